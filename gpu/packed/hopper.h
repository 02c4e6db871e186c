// gpu/packed/hopper.h: products of 17 tokens and more with packed weights, on Hopper.
#pragma once
#include "gpu/packed/formats.h"
#include "gpu/packed/packed.h"
#include "gpu/products/hopper.h"
#include "qwen3.cu"

// ================================================================================== 5 17 tokens and more, on Hopper
// The packed bytes are copied to shared memory and converted on their way to the tensor core. Rows of W are wgmma's
// rows and tokens its columns: a lane converts its own part of operand a, which wgmma reads from registers, and no
// number is written back. A converted weight serves all tokens of a tile. Bound by memory bandwidth up to 128 tokens,
// where the L2 cache, from which each block reads x, the tensor cores and the conversions are also busy most of the
// time; from 512 on by the tensor cores.
//
// Grid: tiles of tokens and rows, times splits of `in`, the blocks of a cluster; without splits as many blocks as are
// resident at once, and a block takes tiles in turn. A block's warpgroups have 64 rows of the tile each, or, in tiles
// of few rows, several have the same rows and alternate stages: while one converts, others multiply. One more warp, the
// producer, issues TMA copies of stage after stage to a ring: columns of x, in panels of 64 as hopper_kernel's stages,
// and the packed rows, swizzled in theirs.
//
// Ownership. Lane 4 g + t holds rows g and g + 8 of the 16 rows of a warp's operand a; with PAIR they are a row of gate
// and the same row of up, half a tile apart. In each eight columns it holds the pair 2 t and 2 t + 1, the layout of
// mma. All lanes of a quad load the same 16 bytes, and each selects its pairs.
constexpr int PACKED_STAGES = 12; // stages at most

template <class F, int TOKENS> struct PackedTile {
    // Maximum warpgroups for the available registers; the producer is one, and leaves most of its registers to the
    // others.
    static constexpr int WARPGROUPS = TOKENS == 64 ? 4 : TOKENS == 128 ? 3 : 2, THREADS = (WARPGROUPS + 1) * 128;
    static constexpr int REGISTERS = TOKENS == 64 ? 112 : TOKENS == 128 ? 152 : 240, PRODUCERS = TOKENS > 128 ? 24 : 32;
    static constexpr int TURNS = TOKENS > 128 ? 1 : WARPGROUPS;        // warpgroups that may have the same rows
    static constexpr int IN = TOKENS > 128 ? PACKED_IN / 2 : PACKED_IN; // columns of a stage; a step has PACKED_IN
    static constexpr int GROUP = TOKENS > 128 ? 4 : 2;                  // wgmma that are issued at once
    static constexpr int X_BYTES = TOKENS * IN * 2, ROW_BYTES = IN / F::RUNS; // of a stage
    BOTH static int stage_bytes(int rows) { return X_BYTES + rows * ROW_BYTES; }
};
struct PackedTiles {
    CUtensorMap x, W, added, out[3]; // (the last two: PackedBoxes)
    int units, splits, stages; // tiles x splits; of the ring
    int rows, turns;           // of a tile; warpgroups that have the same rows
    int down, across;          // tiles of tokens, of rows
    int lent;                  // stages in which the results of a tile are collected, or 0
};
// The tile of a unit. Tiles are numbered in bands, as TilePlace's.
template <int TOKENS> struct PackedPlace {
    int n0 = 0, r0, split;
    __device__ __forceinline__ PackedPlace(const PackedTiles& tiles, int unit) {
        split = unit % tiles.splits;
        const int tile = unit / tiles.splits;
        if (tiles.down == 1) r0 = tile * tiles.rows;
        else {
            constexpr int BAND = 2048 / TOKENS;
            const int band = tile / (BAND * tiles.across), in_band = tile % (BAND * tiles.across);
            const int high = min(BAND, tiles.down - band * BAND);
            n0 = (band * BAND + in_band % high) * TOKENS, r0 = in_band / high * tiles.rows;
        }
    }
};

// The scales and zero points of a lane's two rows in a step, loaded a step ahead: one, or one for each quarter of its
// columns, one in each lane of a quad.
template <class F> struct PackedScales {
    int at[2];
    typename F::Raw next[2];
    uint32_t next_zero[2], less[2], words[2][F::WORDS];
    __device__ __forceinline__ PackedScales(const PackedArgs& p, int row, int other)
        : at{(int)p.template scale_at<F>(row, 0), (int)p.template scale_at<F>(other, 0)} {}
    __device__ __forceinline__ void load(const PackedArgs& p, int step) {
        const int column = step * PACKED_IN + (int)threadIdx.x % F::SLOTS * 32;
        const int g = min(column >> p.shift, p.groups - 1);
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            next[h] = ((const typename F::Raw*)p.scale)[at[h] + g];
            if (F::ZEROS) next_zero[h] = p.zero ? p.zero[at[h] + g] : 8;
        }
    }
    __device__ __forceinline__ void take() { // the loaded values
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            F::scale_words(words[h], next[h]);
            if (F::ZEROS) less[h] = 0xc300c300 | next_zero[h] * 0x00010001;
        }
    }
    // Those of 32 columns.
    struct Quarter {
        uint32_t words[2][F::WORDS], less[2];
    };
    __device__ __forceinline__ void get(Quarter& q, int quarter) const { // all lanes of a warp
        const auto of = [&](uint32_t mine) {
            return F::SLOTS == 1 ? mine : __shfl_sync(~0u, mine, (threadIdx.x & 28) | quarter);
        };
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            q.less[h] = F::ZEROS ? of(less[h]) : 0;
            GPU_UNROLL
            for (int i = 0; i < F::WORDS; i++) q.words[h][i] = of(words[h][i]);
        }
    }
};

// The bytes of 64 columns that a lane converts, each twice. w: place of chunk 0 (of 16 bytes) of its row g in a stage,
// swizzled; its other row is `apart` bytes further. Of eight bytes a lane selects two. INT4: these have numbers of the
// first 32 columns in their lower halves, and of the others in their upper halves.
template <class F> struct PackedPanel {
    static constexpr int CHUNKS = 4 / F::RUNS;
    uint32_t picked[CHUNKS][2][2];
    __device__ __forceinline__ void load(uint32_t stage, uint32_t w, uint32_t apart, uint32_t pick, int panel) {
        GPU_UNROLL
        for (int c = 0; c < CHUNKS; c++)
            GPU_UNROLL
            for (int h = 0; h < 2; h++) {
                const uint4 v = load_shared(stage + h * apart + (w ^ (panel * CHUNKS + c) * 16));
                picked[c][h][0] = __byte_perm(v.x, v.y, pick), picked[c][h][1] = __byte_perm(v.z, v.w, pick);
            }
    }
    // Columns 16 k .. 16 k + 15 as operand a: W.at, rounded.
    __device__ __forceinline__ void convert(uint32_t (&a)[4], int k,
                                            const typename PackedScales<F>::Quarter& scales) const {
        GPU_UNROLL
        for (int h = 0; h < 2; h++)
            GPU_UNROLL
            for (int i = 0; i < 2; i++)
                a[2 * i + h] =
                    F::scaled(F::pair(picked[k % CHUNKS][h][i], k / CHUNKS, scales.less[h]), scales.words[h]);
    }
};

// Four adjacent rows of one token, from two fragments (16 tokens) and row h of each lane. Four lanes, 4 apart, have
// these rows of four tokens each, and transpose them: lane 16 a + 4 i + t gets rows 4 a .. 4 a + 3 of token 2 t + i % 2
// + 8 (i / 2).
__device__ __forceinline__ float4 four_rows(const float (&even)[4], const float (&odd)[4], int h) {
    const bool second = threadIdx.x & 4, third = threadIdx.x & 8;
    const float2 e = {even[2 * h], even[2 * h + 1]}, o = {odd[2 * h], odd[2 * h + 1]};
    const float from_e = __shfl_xor_sync(~0u, second ? e.x : e.y, 4);
    const float from_o = __shfl_xor_sync(~0u, second ? o.x : o.y, 4);
    const float2 a = second ? make_float2(from_e, e.y) : make_float2(e.x, from_e);
    const float2 b = second ? make_float2(from_o, o.y) : make_float2(o.x, from_o);
    const float x = __shfl_xor_sync(~0u, third ? a.x : b.x, 8), y = __shfl_xor_sync(~0u, third ? a.y : b.y, 8);
    return third ? make_float4(x, y, b.x, b.y) : make_float4(a.x, a.y, x, y);
}

// Whether the results of a tile are stored as PackedBoxes, if one warpgroup has all of its rows' sums.
template <int TOKENS, class Epilogue> constexpr bool PACKED_BOXED = TOKENS > 64 && Epilogue::OUTPUTS > 0;

// Passes the sums of a lane's rows to the epilogue. Warpgroups with the same rows, in a block and its cluster, have the
// sums of some stages each. They store them in shared memory (in stages that are no longer used), where each adds up
// some pieces, of 16 tokens, in order.
template <int TOKENS, class Epilogue>
__device__ __forceinline__ void finish_packed(const float (&sum)[TOKENS / 8][4], uint32_t shared,
                                              const PackedTiles& tiles, int unit, int N, int out, Epilogue& epilogue) {
    constexpr int PIECES = TOKENS / 16, MOST_TURNS = 4, apart = Epilogue::PAIR ? 0 : 8;
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(unit)); // the code below needs no earlier register
    const PackedPlace<TOKENS> at_tile(tiles, unit);
    const int lane = thread % 32, rows = tiles.rows, same = rows * 2, threads = same * tiles.turns; // of a turn; all
    const int split = at_tile.split, warp = thread / 32;
    const int r = (Epilogue::PAIR ? at_tile.r0 / 2 + warp * 8 % (rows / 2) : at_tile.r0 + warp * 16 % rows) +
                  lane / 16 * 4; // the first of four
    const int own = at_tile.n0 + lane % 4 * 2 + lane / 4 % 2 + lane / 8 % 2 * 8; // token of piece 0
    const auto inside = [&](int piece, int h) {
        return piece < PIECES && piece * 16 + own < N && r + h * apart < out;
    };
    const auto old = [&](int piece, int h) {
        return Epilogue::ADDS && inside(piece, h) ? epilogue.old_four(piece * 16 + own, r + h * apart) : float4{};
    };
    const auto hand = [&](int piece, const float (&even)[4], const float (&odd)[4], const float4 (&before)[2]) {
        const float4 y[2] = {four_rows(even, odd, 0), four_rows(even, odd, 1)};
        const int n = piece * 16 + own;
        if constexpr (Epilogue::PAIR) {
            if (inside(piece, 0)) epilogue.four(n, r, y[0], y[1]);
        } else
            for (int h = 0; h < 2; h++)
                if (inside(piece, h)) epilogue.four(n, r + h * apart, y[h], before[h]);
    };
    const int parts = tiles.splits * tiles.turns;
    if (!PACKED_BOXED<TOKENS, Epilogue> && parts == 1) {
        GPU_UNROLL
        for (int first = 0; first < PIECES; first += 2) {
            float4 before[2][2]; // loaded before the first wait
            GPU_UNROLL
            for (int i = 0; i < 2; i++) before[i][0] = old(first + i, 0), before[i][1] = old(first + i, 1);
            GPU_UNROLL
            for (int i = 0; i < 2; i++) hand(first + i, sum[2 * (first + i)], sum[2 * (first + i) + 1], before[i]);
        }
        return;
    }
    const auto meet = [&] { asm volatile("barrier.sync 1, %0;" ::"r"(threads) : "memory"); };
    meet(); // all have read the stages
    GPU_UNROLL
    for (int f = 0; f < TOKENS / 8; f++) store_shared(shared + (f * threads + thread) * 16, sum[f]);
    const int first = split * tiles.turns + thread / same;
    float4 before[2] = {old(first, 0), old(first, 1)};
    if (tiles.splits == 1) meet();
    else cluster_arrive(), cluster_wait();
    for (int piece = first; piece < PIECES; piece += parts) {
        const uint32_t at = shared + (2 * piece * threads + thread % same) * 16;
        float v[2][4] = {};
        for (int s = 0; s < tiles.splits; s++) {
            float part[MOST_TURNS][2][4] = {};
            GPU_UNROLL
            for (int i = 0; i < MOST_TURNS * 2; i++)
                if (i / 2 < tiles.turns) read_block(part[i / 2][i % 2], at + (i % 2 * threads + i / 2 * same) * 16, s);
            GPU_UNROLL
            for (int i = 0; i < MOST_TURNS * 8; i++) v[i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
        }
        hand(piece, v[0], v[1], before);
        before[0] = old(piece + parts, 0), before[1] = old(piece + parts, 1);
    }
    if (tiles.splits > 1) cluster_arrive(), cluster_wait(); // no block exits while others read its memory
}

// The results of a tile as boxes of 128 bytes a token (PAIR: 64), which go out through stages of the ring that the
// producer lends: each holds as many boxes as its x has room for. With ADDS it first copies there the numbers to which
// the sums are added, while the tile's last products run. A box belongs to as many warps as have its rows.
template <int TOKENS, class Epilogue> struct PackedBoxes {
    static constexpr bool FLOATS = sizeof(typename Epilogue::Four) == sizeof(float4);
    static constexpr int WIDE = FLOATS || Epilogue::PAIR ? 32 : 64, BYTES = TOKENS * WIDE * (FLOATS ? 4 : 2);
    static constexpr int WARPS = FLOATS ? 2 : 4;
    static_assert(FLOATS == Epilogue::ADDS || !Epilogue::OUTPUTS, "floats are added to others");
    BOTH static int count(int rows) { return (Epilogue::PAIR ? rows / 2 : rows) / WIDE; } // of a tile
    __device__ static int first_row(int r0, int box) { return (Epilogue::PAIR ? r0 / 2 : r0) + box * WIDE; }
    // One output of this warp's part of a box at `at`; with ADDS the box holds what is added.
    __device__ __forceinline__ static void put(const float (&sum)[TOKENS / 8][4], uint32_t at, int output,
                                               Epilogue& epilogue) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS;
        if constexpr (FLOATS) {
            uint32_t to[4]; // of fragment 0
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                const int token = lane % 4 * 2 + e % 2, row = warp * 16 + e / 2 * 8 + lane / 4;
                to[e] = chunk_address(at, token, row / 4) + row % 4 * 4;
            }
            GPU_UNROLL
            for (int f = 0; f < TOKENS / 8; f += 4) {
                float4 old[4];
                GPU_UNROLL
                for (int i = 0; i < 4; i++) {
                    const int place = (f + i) * 1024;
                    old[i] = make_float4(load_shared_float(to[0] + place), load_shared_float(to[1] + place),
                                         load_shared_float(to[2] + place), load_shared_float(to[3] + place));
                }
                GPU_UNROLL
                for (int i = 0; i < 4; i++) {
                    const float(&v)[4] = sum[f + i];
                    epilogue.values(make_float4(v[0], v[1], v[2], v[3]), old[i], [&](int, const float4& y) {
                        const float four[4] = {y.x, y.y, y.z, y.w};
                        GPU_UNROLL
                        for (int e = 0; e < 4; e++)
                            store_shared(to[e] + (f + i) * 1024, __float_as_uint(four[e]));
                    });
                }
            }
        } else {
            // Matrices of a store: of rows h of two fragments; with PAIR of four fragments.
            constexpr int EACH = Epilogue::PAIR ? 4 : 2;
            const uint32_t to = Epilogue::PAIR ? at + lane * 64 + ((warp ^ lane / 2 % 4) << 4)
                                               : chunk_address(at, lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
            GPU_UNROLL
            for (int f = 0; f < TOKENS / 8; f += EACH) {
                uint32_t v[4] = {};
                GPU_UNROLL
                for (int i = 0; i < 2; i++) {
                    const float(&a)[4] = sum[Epilogue::PAIR ? f + 2 * i : f + i];
                    const float(&b)[4] = sum[Epilogue::PAIR ? f + 2 * i + 1 : f + i];
                    const auto keep = [&](int k, const float4& y) {
                        if (k == output) v[2 * i] = pack(y.x, y.y), v[2 * i + 1] = pack(y.z, y.w);
                    };
                    if constexpr (Epilogue::PAIR)
                        epilogue.values(make_float4(a[0], a[1], b[0], b[1]), make_float4(a[2], a[3], b[2], b[3]), keep);
                    else epilogue.values(make_float4(a[0], a[1], a[2], a[3]), {}, keep);
                }
                store_transposed(to + f * 8 * WIDE * 2, v);
            }
        }
    }
};

template <class F, int TOKENS, class Epilogue>
__global__ void __launch_bounds__(PackedTile<F, TOKENS>::THREADS, 1)
packed_hopper_kernel(const __grid_constant__ PackedTiles tiles, const __grid_constant__ PackedArgs p,
                     Epilogue epilogue) {
#ifdef HAVE_WGMMA
    using Tile = PackedTile<F, TOKENS>;
    using Boxes = PackedBoxes<TOKENS, Epilogue>;
    constexpr bool BOXED = PACKED_BOXED<TOKENS, Epilogue>;
    constexpr int BOXES = Tile::X_BYTES / Boxes::BYTES; // that a stage has room for
    constexpr bool PAIR = Epilogue::PAIR;
    constexpr int PANEL = TOKENS * 128; // bytes of 64 columns of x
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[2 * PACKED_STAGES];
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u, at_barriers = shared_address(barriers);
    const int consumers = blockDim.x - 128, rows = tiles.rows, all = PAIR ? 2 * p.out : p.out;
    const int bytes = Tile::stage_bytes(rows);
    const auto stage = [&](int s) { return shared + s * bytes; };
    const auto full = [&](int s) { return at_barriers + 8 * s; };
    const auto empty = [&](int s) { return at_barriers + 8 * (PACKED_STAGES + s); };
    constexpr int STAGES = PACKED_IN / Tile::IN; // of a step
    const int steps = (p.in + PACKED_IN - 1) / PACKED_IN;
    const auto step_at = [&](int split) { return (int)((int64_t)steps * split / tiles.splits); };
    if (threadIdx.x == consumers) prefetch_map(tiles.W), prefetch_map(tiles.x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < tiles.stages; s++) barrier_begin(full(s), 1), barrier_begin(empty(s), rows / 16);
        barriers_begun();
    }
    __syncthreads();
    let_next_start(); // every block is resident
    Ring<PACKED_STAGES> ring;
    if (threadIdx.x >= consumers) {
        keep_registers<Tile::PRODUCERS>();
        if (threadIdx.x > consumers) return;
        for (int u = blockIdx.x; u < tiles.units; u += gridDim.x) {
            const PackedPlace<TOKENS> place(tiles, u);
            const int r0 = place.r0, n0 = place.n0, split = place.split, last = step_at(split + 1) * STAGES;
            const auto copy_w = [&](int step, int s) { // here a step is a stage's
                const uint32_t to = stage(s) + Tile::X_BYTES;
                barrier_arrive_expecting(full(s), bytes);
                copy_box(to, tiles.W, full(s), step * Tile::ROW_BYTES, PAIR ? r0 / 2 : r0);
                if (PAIR)
                    copy_box(to + rows / 2 * Tile::ROW_BYTES, tiles.W, full(s), step * Tile::ROW_BYTES, p.out + r0 / 2);
            };
            const auto copy_x = [&](int step, int s) {
                for (int c = 0; c < Tile::IN / 64; c++)
                    copy_box(stage(s) + c * PANEL, tiles.x, full(s), step * Tile::IN + c * 64, n0);
            };
            int step = step_at(split) * STAGES;
            if (u == blockIdx.x) { // the ring is empty, and weights may be read early, as in stream_kernel
                const int first = step, ready = min(last - first, tiles.stages);
                for (int s = 0; s < ready; s++) copy_w(first + s, s);
                wait_for_previous();
                for (; step < first + ready; step++, ring.next(tiles.stages)) copy_x(step, ring.stage);
            }
            for (; step < last; step++, ring.next(tiles.stages)) {
                barrier_wait(empty(ring.stage), ring.parity ^ 1);
                copy_w(step, ring.stage), copy_x(step, ring.stage);
            }
            if constexpr (BOXED)
                for (int s = 0; s < tiles.lent; s++, ring.next(tiles.stages)) {
                    const uint32_t lent = full(ring.stage);
                    barrier_wait(empty(ring.stage), ring.parity ^ 1);
                    if constexpr (Epilogue::ADDS) {
                        const int first = s * BOXES, past = min(first + BOXES, Boxes::count(rows));
                        barrier_arrive_expecting(lent, (past - first) * Boxes::BYTES);
                        for (int box = first; box < past; box++)
                            copy_box(stage(ring.stage) + (box - first) * Boxes::BYTES, tiles.added, lent,
                                     Boxes::first_row(r0, box), n0);
                    } else barrier_arrive(lent);
                }
        }
        return;
    }
    take_registers<Tile::REGISTERS>();
    const int warp = threadIdx.x / 32, turns = Tile::TURNS > 1 ? tiles.turns : 1;
    const int turn = Tile::TURNS > 1 ? threadIdx.x / (2 * rows) : 0;
    const int in_tile = PAIR ? warp * 8 % (rows / 2) : warp * 16 % rows; // rows h = 0
    const int g = threadIdx.x % 32 / 4, apart = PAIR ? p.out : 8;        // .. and from there to h = 1: of W,
    const uint32_t apart_bytes = (PAIR ? rows / 2 : 8) * Tile::ROW_BYTES; // and in a stage
    uint32_t pick = 0x1100 + 0x2222 * (threadIdx.x % 4);
    uint32_t w_at = Tile::X_BYTES + (in_tile + g) * Tile::ROW_BYTES + g * Tile::ROW_BYTES / 128 * 16;
    asm volatile("" : "+r"(pick), "+r"(w_at)); // not recomputed in each step
    ring.next(tiles.stages, turn);
    const auto done_with = [&](int s) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(s));
    };
    for (int u = blockIdx.x; u < tiles.units; u += gridDim.x) {
        const PackedPlace<TOKENS> place(tiles, u);
        const int split = place.split, last = step_at(split + 1);
        const int mine = (PAIR ? place.r0 / 2 : place.r0) + in_tile;
        int step = step_at(split) + turn;
        PackedScales<F> scales(p, min(mine + g, all - 1), min(mine + g + apart, all - 1));
        scales.load(p, step);
        wait_for_previous(); // whose results an epilogue may add to
        float sum[1][TOKENS / 8][4] = {};
        int before = -1;
        PackedPanel<F> weights;
        typename PackedScales<F>::Quarter quarter;
        for (; step < last; step += turns) {
            scales.take();
            scales.load(p, step + turns); // (past the end: the row's last)
            uint32_t a[2][Tile::GROUP][4];
            GPU_UNROLL
            for (int group = 0; group < PACKED_IN / 16 / Tile::GROUP; group++) {
                const int first = group * Tile::GROUP % (Tile::IN / 16), panel = first / 4; // of the stage
                if (first == 0) {
                    // A barrier two phases behind looks full, and this warpgroup may be a ring ahead of another turn,
                    // whose data for this stage are still to come: first wait until they have been used.
                    if (Tile::TURNS > 1) barrier_wait(empty(ring.stage), ring.parity ^ 1);
                    barrier_wait(full(ring.stage), ring.parity);
                }
                const uint32_t at = stage(ring.stage);
                const uint64_t x = wgmma_operand(at, 0);
                if (first % 4 == 0) weights.load(at, w_at, apart_bytes, pick, panel);
                GPU_UNROLL
                for (int i = 0; i < Tile::GROUP; i++) {
                    const int k = group * Tile::GROUP + i;
                    if (k % 2 == 0) scales.get(quarter, k / 2);
                    weights.convert(a[group % 2][i], k % 4, quarter);
                }
                wgmma_begin();
                GPU_UNROLL
                for (int i = 0; i < Tile::GROUP; i++) {
                    const int k = first + i;
                    const uint32_t x_at = (uint32_t)x + k / 4 * (PANEL / 16) + k % 4 * 2;
                    wgmma<TOKENS, false>(sum[0], a[group % 2][i], x >> 32 << 32 | x_at, true);
                }
                wgmma_commit();
                wgmma_wait<1>(); // while they run the next are converted, in place of the ones before
                if (first == 0 && before >= 0) done_with(before);
                if (first + Tile::GROUP == Tile::IN / 16) before = ring.stage, ring.next(tiles.stages, turns);
            }
        }
        wgmma_wait<0>();
        wgmma_settle(sum);
        if (before >= 0) done_with(before);
        if constexpr (BOXED)
            if (tiles.lent) {
                const int box = warp / Boxes::WARPS;
                const auto meet = [&] {
                    asm volatile("barrier.sync %0, %1;" ::"r"(2 + box), "n"(Boxes::WARPS * 32) : "memory");
                    __syncwarp();
                };
                const bool stores = threadIdx.x % (Boxes::WARPS * 32) == 0;
                for (int s = 0; s < tiles.lent; s++, ring.next(tiles.stages)) {
                    barrier_wait(full(ring.stage), ring.parity);
                    const uint32_t at = stage(ring.stage) + box % BOXES * Boxes::BYTES;
                    if (box / BOXES == s)
                        GPU_UNROLL
                        for (int k = 0; k < Epilogue::OUTPUTS; k++) {
                            if (!epilogue.output(k).at) continue;
                            if (k) meet(); // the output before has been read
                            Boxes::put(sum[0], at, k, epilogue);
                            shared_to_async();
                            meet();
                            if (!stores) continue;
                            store_box(tiles.out[k], at, Boxes::first_row(place.r0, box), place.n0);
                            commit_boxes();
                            wait_for_boxes<0>();
                        }
                    __syncwarp();
                    done_with(ring.stage);
                }
                continue;
            }
        finish_packed<TOKENS>(sum[0], shared, tiles, u, p.N, p.out, epilogue);
    }
#endif
}

// Tokens and rows (in warpgroups) of a tile, and blocks that share it. Up to 64 tokens, measured on an H100: a block a
// tile of 64 rows, on which all warpgroups work, if there are enough multiprocessors; else larger tiles, in turn. Two
// blocks a tile pay if half of the multiprocessors would be idle and rows are long. Of more tokens: the least predicted
// time in microseconds, fitted to an H200 (bench_packed sweep), where its choices take 1.4% more than the best.
struct PackedPlan {
    int tokens = 64, warpgroups = 1, splits = 1;
    double least = 1e30;
    PackedPlan(int tokens, int warpgroups, int splits) : tokens(tokens), warpgroups(warpgroups), splits(splits) {}
    PackedPlan(int sms, int N, int rows, int in) {
        if (N <= 64) {
            const int tiles = (rows + 63) / 64;
            warpgroups = std::min(3, (tiles + sms - 1) / sms), splits = 2 * tiles <= sms - 4 && in >= 3072 ? 2 : 1;
            return;
        }
        consider(64, 1, 5.2, 0.11, 0.28, sms, N, rows, in);
        consider(128, 1, 3.7, 0.2, 0.336, sms, N, rows, in);
        consider(128, 2, 1.7, 0.43, 0.484, sms, N, rows, in);
        consider(128, 3, 1.5, 0.6, 0.67, sms, N, rows, in);
        consider(256, 2, 2.5, 0.63, 0.72, sms, N, rows, in);
    }
    // Microseconds of 64 columns: `step` if each block has one tile, else `later`. (Tokens past the end, where TMA
    // writes zeros, take longer to copy than others. Tiles of 64 rows wait for that.)
    void consider(int tile, int groups, double first, double step, double later, int sms, int N, int rows, int in) {
        const int down = (N + tile - 1) / tile;
        const int64_t tiles = (int64_t)down * ((rows + 64 * groups - 1) / (64 * groups));
        const double past = groups == 1 && tile == 128 ? 1.7 * (down * tile - N) / tile : 0;
        for (int s = 1; s <= 4; s *= 2) {
            if (s > 1 && tiles * s > (s > 2 ? sms * 2 / 3 : sms - 4)) break; // (see HopperPlan::consider_few)
            const bool once = s > 1 || tiles <= sms, turned = once && 64 * groups * tile < 128 * 128;
            const double sums = s == 1 ? 0 : turned ? 2.2 * s - 2.4 : 2 + 2.3 * groups * tile / 256;
            const double waves = (double)((tiles * s + sms - 1) / sms);
            const double time = first + waves * in / 64 / s * (once ? step : later) * (1 + past) + sums;
            if (time < least) tokens = tile, warpgroups = groups, splits = s, least = time;
        }
    }
};

template <class F, int TOKENS, class Epilogue>
void launch_packed_hopper(Context& ctx, const PackedArgs& p, PackedPlan plan, Epilogue epilogue) {
    static_assert(!Epilogue::MASKS && !Epilogue::PARTS, "finish_packed has neither");
    using Tile = PackedTile<F, TOKENS>;
    const int all = Epilogue::PAIR ? 2 * p.out : p.out, rows = 64 * plan.warpgroups;
    const int down = (p.N + TOKENS - 1) / TOKENS, across = (all + rows - 1) / rows;
    const int bytes = Tile::stage_bytes(rows), units = down * across * plan.splits;
    const bool once = plan.splits > 1 || units <= ctx.gpu->sms; // a block has one tile, and the ring's memory for sums
    const int turns = once ? std::max(1, Tile::TURNS / plan.warpgroups) : 1;
    const int stages = std::min(PACKED_STAGES, 225 * 1024 / bytes);
    if (stages <= turns) // each turn holds one until it has its next
        DIE("stages of %d bytes: a ring has too few for %d turns", bytes, turns);
    PackedTiles tiles = {{}, {}, {}, {}, units, plan.splits, stages, rows, turns, down, across, 0};
    tiles.x = tensor_map(p.x, {{(size_t)p.in, 1, 64}, {(size_t)p.N, (size_t)p.in, TOKENS}});
    tiles.W = tensor_map(p.q, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1,
                         Tile::ROW_BYTES == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
                         : Tile::ROW_BYTES == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                 : CU_TENSOR_MAP_SWIZZLE_128B,
                         {{p.row_bytes, 1, Tile::ROW_BYTES},
                          {(size_t)all, p.row_bytes, Epilogue::PAIR ? rows / 2 : rows}});
    if constexpr (PACKED_BOXED<TOKENS, Epilogue>)
        if (turns * plan.splits == 1) {
            using Boxes = PackedBoxes<TOKENS, Epilogue>;
            constexpr int BOXES = Tile::X_BYTES / Boxes::BYTES;
            tiles.lent = (Boxes::count(rows) + BOXES - 1) / BOXES;
            const auto map = [&](auto at, size_t ld) {
                return tensor_map(at, {{(size_t)p.out, 1, Boxes::WIDE}, {(size_t)p.N, ld, TOKENS}});
            };
            for (int k = 0; k < Epilogue::OUTPUTS; k++)
                if (const auto to = epilogue.output(k); to.at) tiles.out[k] = map(to.at, to.ld);
            if constexpr (Epilogue::ADDS) tiles.added = map(epilogue.residual, epilogue.ld);
        }
    launch_clusters(ctx, ctx.gpu->overlap, plan.splits, packed_hopper_kernel<F, TOKENS, Epilogue>,
                    once ? units : ctx.gpu->sms, rows * 2 * turns + 128, (size_t)tiles.stages * bytes + 1024, tiles, p,
                    epilogue);
}

template <class Epilogue>
void packed_hopper_product(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N) {
    with_packing(W, [&](auto format) {
        using F = decltype(format);
        PackedArgs p = packed_args(W);
        p.x = x, p.N = N;
        if (Epilogue::PAIR) p.out = W.rows[0];
        const PackedPlan plan(ctx.gpu->sms, N, W.out(), W.in);
        if (plan.tokens == 64) launch_packed_hopper<F, 64>(ctx, p, plan, epilogue);
        else if (plan.tokens == 128) launch_packed_hopper<F, 128>(ctx, p, plan, epilogue);
        else launch_packed_hopper<F, 256>(ctx, p, plan, epilogue);
    }, PACKED_IN - 1);
}
