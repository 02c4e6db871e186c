// gpu/products/hopper.h: products of many tokens on Hopper, by wgmma. hopper_tiles.h chooses the tile.
#pragma once
#include "gpu/hopper.h"
#include "gpu/packed/round.h"
#include "qwen3.cu"

__device__ inline void round_four(float4& to, const float4& y) { to = y; }
__device__ inline void round_four(uint2& to, const float4& y) { to = make_uint2(pack(y.x, y.y), pack(y.z, y.w)); }

// ---- Products by tiles (qwen3.cu, tile_kernel) on Hopper. Grid: as many blocks as are resident at once; a block takes
// tiles in turn. One warp, the producer, has the Tensor Memory Accelerator copy stage after stage to a ring in shared
// memory, as far ahead as there is room, through the ends of tiles too. The others, the consumers, are a warpgroup for
// every 64 tokens of the tile: it multiplies them by all rows with wgmma, and says when it has done with a stage. So
// copies, products and a part of the epilogues run at the same time. Bound by the tensor cores.
//
// Layouts, stages, further columns, splits and fragments are tile_kernel's; PAIR: the tile's first half are rows of
// gate, its second half the same rows of up.
//
// SHARING: two blocks, a cluster, have neighbouring tiles of tokens and the same rows of W; each copies half of these
// to both. A stage is refilled when the consumers of both blocks have left it. The other block's copy may count before
// this one declares its expected bytes, since the phase still lacks that arrival. Successive products take the card to
// its power limit, so bytes, here those from the L2 cache, cost clocks.
constexpr int MOST_SPLITS = 8; // blocks that every GPU places as a cluster
template <int TOKENS_, int ROWS_, int STAGES_, int MOST_ = TOKENS_, int SHARING_ = 1, bool MOVES_ = (ROWS_ > 128)>
struct HopperShape {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_, STAGES = STAGES_;
    static constexpr int SHARING = SHARING_; // blocks that share W: 1 or 2
    static constexpr int MOST = MOST_; // less than TOKENS: of N, and a stage has no more of x; wgmma reads on into W
    static constexpr int X_BYTES = MOST * STAGE_IN * 2, STAGE_BYTES = X_BYTES + ROWS * STAGE_IN * 2;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES + 1024; // the swizzle counts from multiples of 1024
    static constexpr int MF = 1, NF = ROWS / 8;
    static constexpr int BAND = 2048 / TOKENS / SHARING, UP = NF / 2;
    static constexpr int CONSUMERS = TOKENS / 64 * 128; // threads
    // If three warpgroups could not have enough registers each, the producer is one warpgroup and leaves most of its
    // registers to the others.
    static constexpr bool MOVES_REGISTERS = MOVES_;
    static constexpr int THREADS = CONSUMERS + (MOVES_REGISTERS ? 128 : 32);
    static constexpr int BLOCKS = 2 * SHARED < 225 * 1024 ? 2 : 1; // of a multiprocessor
    static constexpr size_t ROOM = BLOCKS == 2 ? 112 * 1024 : 226 * 1024; // limit of a block
    // Whether the ring may be one stage shorter than STAGES, to hold a block's received sums.
    static constexpr bool GIVES = BLOCKS == 1 && TOKENS * ROWS <= 128 * 64;
    // Two boxes of 16 tokens by 64 columns for each warp, where there is room.
    static constexpr int BOX = 16 * 128, STAGING = CONSUMERS / 32 * 2 * BOX;
    static constexpr bool STAGED = BLOCKS == 1 && CONSUMERS == 256 && ROWS >= 128 && SHARED + STAGING <= 227 * 1024;
    __device__ static int warp_token() { return threadIdx.x / 32 * 16; }
    __device__ static int warp_row() { return 0; }
};
struct TileMaps {
    CUtensorMap x, W, more_x, more_W, out[3];
};

// A stage's two halves. copy_w: two boxes with PAIR; down the columns a box of 64 columns is a panel.
template <class S, bool X_COLS>
__device__ __forceinline__ void copy_x_boxes(const TileMaps& maps, uint32_t to, int i, int n0, bool more,
                                             uint32_t filled) {
    if constexpr (X_COLS)
        #pragma unroll
        for (int c = 0; c < S::TOKENS; c += 64) copy_box(to + c * STAGE_IN * 2, maps.x, filled, n0 + c, i);
    else copy_box(to, more ? maps.more_x : maps.x, filled, i, n0);
}
template <class S, bool W_COLS, bool PAIR>
__device__ __forceinline__ void copy_w_boxes(const TileMaps& maps, uint32_t to, int i, int r0, int out, bool more,
                                             uint32_t filled, uint64_t policy) {
    const CUtensorMap& map = more ? maps.more_W : maps.W;
    constexpr int OWN = S::ROWS / S::SHARING;
    const int mine = S::SHARING > 1 ? (int)(blockIdx.x % 2) * OWN : 0;
    const auto copy = [&](int place, int x, int y) {
        if (S::SHARING > 1) copy_box_to_both(policy, to + place, map, filled, x, y);
        else copy_box_by(policy, to + place, map, filled, x, y);
    };
    if constexpr (W_COLS)
        #pragma unroll
        for (int c = 0; c < OWN; c += 64) copy((mine + c) * STAGE_IN * 2, r0 + mine + c, i);
    else if constexpr (S::SHARING > 1) copy(mine * STAGE_IN * 2, i, !PAIR ? r0 + mine : mine ? out + r0 / 2 : r0 / 2);
    else if constexpr (PAIR) copy(0, i, r0 / 2), copy(S::ROWS * STAGE_IN, i, out + r0 / 2);
    else copy(0, i, r0);
}

// The shared memory of a block, and the barriers of its stages.
template <class S> struct HopperStages {
    uint32_t shared, filled, emptied; // the stages; two arrays of mbarriers
    int given;
    __device__ __forceinline__ int count() const { return S::GIVES ? given : S::STAGES; }
    __device__ __forceinline__ uint32_t x(int s) const { return shared + s * S::STAGE_BYTES; }
    __device__ __forceinline__ uint32_t w(int s) const { return x(s) + S::X_BYTES; }
    __device__ __forceinline__ uint32_t full(int s) const { return filled + 8 * s; }
    __device__ __forceinline__ uint32_t empty(int s) const { return emptied + 8 * s; }
    __device__ __forceinline__ void done_with(int s) const { // per warp; both blocks that fill the stage are notified
        const int lane = threadIdx.x % 32;
        if (lane >= S::SHARING) return;
        if (S::SHARING == 1) barrier_arrive(empty(s));
        else barrier_arrive_there(block_address(empty(s), lane));
    }
};

// One thread. Weights may be read before the previous kernels have ended, as in stream_kernel; with W_COLS W may be an
// activation (dW = dy^T x), which may not. If each block has one tile, W is evicted from the L2 cache first, in favour
// of activations. (For blocks with several tiles that is slower: a copy brings 256 bytes of a row to that cache, a
// stage uses 128.)
template <class S, bool X_COLS, bool W_COLS, bool PAIR>
__device__ __forceinline__ void produce(const TileMaps& maps, const TileArgs& p, const HopperStages<S>& stages,
                                        int units) {
    Ring<S::STAGES> ring;
    const uint64_t policy = !W_COLS && units <= (int)gridDim.x / S::SHARING ? EVICT_FIRST : EVICT_NORMAL;
    const int first = blockIdx.x / S::SHARING;
    for (int u = first; u < units; u += gridDim.x / S::SHARING) {
        const TilePlace<S, PAIR> at(p, u / p.splits, u % p.splits);
        const auto copy_w = [&](int step, int s) {
            barrier_arrive_expecting(stages.full(s), S::STAGE_BYTES);
            copy_w_boxes<S, W_COLS, PAIR>(maps, stages.w(s), at.number(step), at.r0, p.out, at.more(step),
                                          stages.full(s), policy);
        };
        const auto copy_x = [&](int step, int s) {
            copy_x_boxes<S, X_COLS>(maps, stages.x(s), at.number(step), at.n0, at.more(step), stages.full(s));
        };
        int step = at.first;
        if (u == first) { // the ring is empty
            const int ready = min(at.last - at.first, stages.count());
            if (W_COLS) wait_for_previous();
            for (int s = 0; s < ready; s++) copy_w(at.first + s, s);
            if (!W_COLS) wait_for_previous();
            for (; step < at.first + ready; step++, ring.next(stages.count())) copy_x(step, ring.stage);
        }
        for (; step < at.last; step++, ring.next(stages.count())) {
            barrier_wait(stages.empty(ring.stage), ring.parity ^ 1);
            copy_w(step, ring.stage), copy_x(step, ring.stage);
        }
    }
}

// sum = x W^T over `steps` >= 1 stages. One group of wgmma is in flight during the wait for the next stage.
template <class S, bool X_COLS, bool W_COLS>
__device__ __forceinline__ void multiply_steps_wgmma(float (&sum)[1][S::NF][4], const HopperStages<S>& stages,
                                                     Ring<S::STAGES>& ring, int steps) {
    constexpr int PANEL = STAGE_IN * 128, DOWN = 16 * 128, ALONG = 32; // bytes of 16 numbers of `in`, down and along
    const uint32_t my_x = threadIdx.x / 128 * (64 * STAGE_IN * 2);
    const auto multiply = [&](bool add) {
        barrier_wait(stages.full(ring.stage), ring.parity);
        const uint32_t x = stages.x(ring.stage) + my_x, w = stages.w(ring.stage);
        wgmma_begin();
        #pragma unroll
        for (int k = 0; k < STAGE_IN / 16; k++)
            wgmma<S::ROWS, X_COLS, W_COLS>(sum[0], wgmma_operand(x + k * (X_COLS ? DOWN : ALONG), PANEL),
                                           wgmma_operand(w + k * (W_COLS ? DOWN : ALONG), PANEL), add || k);
        wgmma_commit();
    };
    multiply(false);
    int before = ring.stage;
    ring.next(stages.count());
    for (int step = 1; step < steps; step++) {
        multiply(true);
        wgmma_wait<1>();
        stages.done_with(before);
        before = ring.stage;
        ring.next(stages.count());
    }
    wgmma_wait<0>();
    wgmma_settle(sum);
    stages.done_with(before);
}

// The same for e4m3. A stage is a group of 128 numbers of `in`; for the copies two e4m3 count as one number of two
// bytes. A wgmma of e4m3 truncates its 32 products and the sum before to about 14 bits below the largest one's first
// bit, so its result for up to 128 rows of W and a group is added to the sums in float, times the scales of both
// operands.
template <class S, bool PAIR> struct GroupFactors {
    const float *of_x, *of_w[2];
    int pitch;
    float x[2], w[2]; // of this lane's two tokens; of the two halves of the rows, each of which has one scale
    __device__ __forceinline__ GroupFactors(const TileArgs& p, const TilePlace<S, PAIR>& at) : pitch(p.pitch) {
        static_assert(S::ROWS == 64 || S::ROWS % 128 == 0, "each half of the rows has one scale");
        const int groups = (p.in + STAGE_IN - 1) / STAGE_IN, last = ((PAIR ? 2 : 1) * p.out - 1) / 128;
        const int first = (PAIR ? at.r0 / 2 : at.r0) / 128;
        const int second = (PAIR ? p.out + at.r0 / 2 : at.r0 + S::ROWS / 2) / 128;
        of_x = p.x_scale + at.token(0, 0);
        of_w[0] = p.W_scale + (size_t)first * groups, of_w[1] = p.W_scale + (size_t)min(second, last) * groups;
    }
    __device__ __forceinline__ void load(int step) {
        #pragma unroll
        for (int i = 0; i < 2; i++) x[i] = of_x[(size_t)step * pitch + i * 8], w[i] = of_w[i][step];
    }
    __device__ __forceinline__ void get(float (&factor)[2][2]) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) factor[i / 2][i % 2] = x[i / 2] * w[i % 2];
    }
};
// Begins the wgmma of a stage's fragments f .. f + EACH - 1. add_group adds the result to the sums in float.
template <class S, int EACH>
__device__ __forceinline__ void begin_group(float (&part)[1][EACH][4], uint32_t x, uint32_t w, int f) {
    const uint32_t from_x = x + threadIdx.x / 128 * (64 * STAGE_IN * 2), from_w = w + f * (8 * STAGE_IN * 2);
    wgmma_begin();
    #pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_e4m3<EACH * 8>(part[0], wgmma_operand(from_x + k * 32, 0), wgmma_operand(from_w + k * 32, 0), k);
    wgmma_commit();
}
template <class S, int EACH>
__device__ __forceinline__ void add_group(float (&sum)[1][S::NF][4], float (&part)[1][EACH][4],
                                          const float (&factor)[2][2], int f) {
    #pragma unroll
    for (int j = 0; j < EACH; j++)
        #pragma unroll
        for (int e = 0; e < 4; e++)
            sum[0][f + j][e] = fmaf(part[0][j][e], factor[e / 2][2 * (f + j) / S::NF], sum[0][f + j][e]);
}
// 256 rows: halves in turn; meanwhile the other warpgroup's wgmma is in flight. Fewer: registers hold the results of
// two stages, so that one's wgmma is in flight while the other's result is added. Scales are loaded a stage ahead.
template <class S, bool PAIR>
__device__ __forceinline__ void multiply_groups(float (&sum)[1][S::NF][4], const HopperStages<S>& stages,
                                                Ring<S::STAGES>& ring, const TileArgs& p,
                                                const TilePlace<S, PAIR>& at) {
    GroupFactors<S, PAIR> next(p, at);
    next.load(at.first);
    #pragma unroll
    for (int j = 0; j < S::NF * 4; j++) sum[0][j / 4][j % 4] = 0;
    if constexpr (S::NF > 16) {
        for (int step = at.first; step < at.last; step++, ring.next(stages.count())) {
            barrier_wait(stages.full(ring.stage), ring.parity);
            float factor[2][2];
            #pragma unroll
            for (int f = 0; f < S::NF; f += 16) {
                float part[1][16][4];
                begin_group<S>(part, stages.x(ring.stage), stages.w(ring.stage), f);
                if (f == 0) next.get(factor);
                if (f == 0 && step + 1 < at.last) next.load(step + 1);
                wgmma_wait<0>();
                wgmma_settle(part);
                if (f + 16 == S::NF) stages.done_with(ring.stage);
                add_group<S>(sum, part, factor, f);
            }
        }
    } else {
        float part[2][1][S::NF][4], factor[2][2][2];
        int stage[2];
        const auto begin = [&](int k, int step) {
            barrier_wait(stages.full(ring.stage), ring.parity);
            begin_group<S>(part[k], stages.x(ring.stage), stages.w(ring.stage), 0);
            stage[k] = ring.stage;
            ring.next(stages.count());
            next.get(factor[k]);
            if (step + 1 < at.last) next.load(step + 1);
        };
        const auto add = [&](int k) {
            wgmma_settle(part[k]);
            stages.done_with(stage[k]);
            add_group<S>(sum, part[k], factor[k], 0);
        };
        begin(0, at.first);
        int step = at.first + 1;
        for (; step + 1 < at.last; step += 2) {
            begin(1, step), wgmma_wait<1>(), add(0);
            begin(0, step + 1), wgmma_wait<1>(), add(1);
        }
        if (step < at.last) {
            begin(1, step), wgmma_wait<1>(), add(0);
            wgmma_wait<0>(), add(1);
        } else {
            wgmma_wait<0>(), add(0);
        }
    }
}

// The blocks of a cluster share a tile, and each has the sums of some of its steps. Block b adds up the tile's pieces
// b, b + splits, .., in the order of blocks; all blocks send it theirs, to its memory at `received`, and its barrier
// `came` counts the bytes. A piece: the fragments that give a lane four columns of each of its two tokens. No block
// reads another block's memory, so none has to wait before it ends. Consumers only.
template <class S, class Epilogue> struct ClusterPieces {
    static constexpr int EACH = Epilogue::PAIR ? 4 : 2, PIECES = S::NF / EACH; // fragments of a piece; pieces of a tile
    static constexpr int BYTES = EACH * S::CONSUMERS * 16;                     // of a piece
    BOTH static int most(int splits) { return (PIECES + splits - 1) / splits; } // that a block adds up
    __device__ static int count(int split, int splits) { return (PIECES - split + splits - 1) / splits; }
};
template <class S, class Epilogue, class Place>
__device__ __forceinline__ void finish_in_cluster(const float (&sum)[1][S::NF][4], uint32_t received, uint32_t came,
                                                  int split, const TileArgs& p, const Place& at, Epilogue& epilogue) {
    using C = ClusterPieces<S, Epilogue>;
    const int t = threadIdx.x % 4, splits = p.splits;
    const uint32_t mine = received + threadIdx.x * 16;
    const auto row = [&](int piece) {
        return (Epilogue::PAIR ? at.r0 / 2 : at.r0) + piece * 16 + t / 2 * 4 + t % 2 * 8;
    };
    const auto inside = [&](int piece, int h) {
        return piece < C::PIECES && at.token(0, h) < p.N && row(piece) < p.out;
    };
    const auto old = [&](int piece, int h) {
        return Epilogue::ADDS && inside(piece, h) ? epilogue.old_four(at.token(0, h), row(piece)) : float4{};
    };
    if (!p.apart) cluster_arrive();
    cluster_wait(); // all have begun; or all have used their stages, which the sums overwrite
    int owner = 0, turn = 0;
    #pragma unroll
    for (int piece = 0; piece < C::PIECES; piece++) {
        const uint32_t to = block_address(mine + (turn * splits + split) * C::BYTES, owner);
        const uint32_t barrier = block_address(came, owner);
        #pragma unroll
        for (int e = 0; e < C::EACH; e++)
            send_block(to + e * (S::CONSUMERS * 16), sum[0][piece * 2 + e % 2 + e / 2 * S::UP], barrier);
        if (++owner == splits) owner = 0, turn++;
    }
    float4 next[2] = {old(split, 0), old(split, 1)};
    if (split < C::PIECES) barrier_wait(came, 0);
    uint32_t from = mine;
    for (int piece = split; piece < C::PIECES; piece += splits, from += splits * C::BYTES) {
        float4 second[2] = {next[0], next[1]};
        if constexpr (Epilogue::ADDS) next[0] = old(piece + splits, 0), next[1] = old(piece + splits, 1);
        float v[C::EACH][4] = {};
        #pragma unroll
        for (int e = 0; e < C::EACH; e++) {
            uint4 part[MOST_SPLITS];
            #pragma unroll
            for (int s = 0; s < MOST_SPLITS; s++)
                if (s < splits) part[s] = load_shared(from + s * C::BYTES + e * (S::CONSUMERS * 16));
            #pragma unroll
            for (int s = 0; s < MOST_SPLITS; s++)
                if (s < splits) {
                    v[e][0] += __uint_as_float(part[s].x), v[e][1] += __uint_as_float(part[s].y);
                    v[e][2] += __uint_as_float(part[s].z), v[e][3] += __uint_as_float(part[s].w);
                }
        }
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 y = four_columns(v[0], v[1], h);
            if constexpr (Epilogue::PAIR) second[h] = four_columns(v[2], v[3], h);
            if (inside(piece, h)) epilogue.four(at.token(0, h), row(piece), y, second[h]);
        }
    }
}

// Passes a warp's sums to an epilogue with outputs, whose boxes of 128 bytes a token go through shared memory, each in
// one of the warp's two places there in turn: a lane's own stores would write eight pieces of 32 bytes at a time, and
// the warp would wait for them. Numbers that the epilogue adds are loaded 64 columns ahead.
template <class S, class Epilogue> struct Boxes {
    static constexpr int FRAGMENTS = Epilogue::PAIR ? S::UP : S::NF;
    const TilePlace<S, Epilogue::PAIR>& at;
    const int N, out, mine = threadIdx.x % 4 / 2 * 4 + threadIdx.x % 2 * 8, n0 = at.token(0, 0);
    float4 old[2][4];
    using Kept = uint2[FRAGMENTS < 8 ? 1 : FRAGMENTS / 8][2][4]; // with ROUNDS: the numbers of output 0
    __device__ __forceinline__ int row(int j0, int i) const {
        return (Epilogue::PAIR ? at.r0 / 2 : at.r0) + j0 * 8 + i * 16 + mine;
    }
    __device__ __forceinline__ void load(int j0, const Epilogue& epilogue) {
        if constexpr (Epilogue::ADDS)
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const int n = n0 + k / 4 * 8, r = row(j0, k % 4);
                old[k / 4][k % 4] = n < N && r < out ? epilogue.old_four(n, r) : float4{};
            }
    }
    // store(place) to shared memory, then the box goes to column x of an output.
    template <class Store>
    __device__ __forceinline__ void put(const CUtensorMap& map, uint32_t places, int& turn, int x, Store store) const {
        const int lane = threadIdx.x % 32;
        const uint32_t place = places + turn * S::BOX;
        if (lane == 0) wait_for_boxes<1>();
        __syncwarp();
        #pragma unroll
        for (int h = 0; h < 2; h++) store(place, h, h * 8 + lane / 4);
        shared_to_async();
        __syncwarp();
        if (lane == 0) store_box(map, place, x, n0 - lane / 4), commit_boxes();
        turn ^= 1;
    }
    __device__ __forceinline__ void finish(const float (&sum)[S::NF][4], const TileMaps& maps, uint32_t places,
                                           int& turn, Epilogue& epilogue) {
        const int first = row(0, 0) - mine, t = threadIdx.x % 4;
        [[maybe_unused]] WeightSums weights[2];
        if constexpr (Epilogue::PARTS)
            weights[0].begin(n0, first, N, epilogue), weights[1].begin(n0 + 8, first, N, epilogue);
        [[maybe_unused]] Kept kept;
        #pragma unroll
        for (int j0 = 0; j0 < FRAGMENTS; j0 += 8) {
            Boxes next = *this;
            if (j0 + 8 < FRAGMENTS) next.load(j0 + 8, epilogue);
            typename Epilogue::Four four[Epilogue::OUTPUTS][2][4];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int j = j0 + 2 * i;
                    const auto two = [&](int j) { // if nothing is added, two fragments' halves are enough
                        return make_float4(sum[j][2 * h], sum[j][2 * h + 1], sum[j + 1][2 * h], sum[j + 1][2 * h + 1]);
                    };
                    float4 y, second = {};
                    if constexpr (Epilogue::PARTS) y = weights[h].next(sum[j], sum[j + 1], h, j, out);
                    else if constexpr (Epilogue::ADDS) y = four_columns(sum[j], sum[j + 1], h), second = old[h][i];
                    else y = two(j);
                    if constexpr (Epilogue::PAIR) second = two(j + S::UP);
                    epilogue.values(y, second, [&](int k, const float4& v) { round_four(four[k][h][i], v); });
                }
                if constexpr (Epilogue::PARTS) weights[h].end_piece(j0, N, out, epilogue);
                if constexpr (Epilogue::ROUNDS)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) kept[j0 / 8][h][i] = four[0][h][i];
            }
            #pragma unroll
            for (int k = 0; k < Epilogue::OUTPUTS; k++) {
                if (!epilogue.output(k).at) continue;
                if constexpr (Epilogue::ADDS) // of float
                    #pragma unroll
                    for (int i0 = 0; i0 < 4; i0 += 2)
                        put(maps.out[k], places, turn, first + j0 * 8 + i0 * 16, [&](uint32_t place, int h, int row) {
                            #pragma unroll
                            for (int i = 0; i < 2; i++)
                                store_shared(chunk_address(place, row, 4 * i + mine / 4), four[k][h][i0 + i]);
                        });
                else
                    put(maps.out[k], places, turn, first + j0 * 8, [&](uint32_t place, int h, int row) {
                        #pragma unroll
                        for (int i = 0; i < 4; i++) {
                            store_shared(chunk_address(place, row, 2 * i) + t * 4, four[k][h][i].x);
                            store_shared(chunk_address(place, row, 2 * i + 1) + t * 4, four[k][h][i].y);
                        }
                    });
            }
            #pragma unroll
            for (int k = 0; k < 8; k++) old[k / 4][k % 4] = next.old[k / 4][k % 4];
        }
        if constexpr (Epilogue::PARTS) weights[0].end(S::NF, epilogue), weights[1].end(S::NF, epilogue);
        if constexpr (Epilogue::ROUNDS) round(kept, maps, places, turn, first, epilogue);
    }
    // The tile's columns are a group: a box of e4m3, two of which count as one number.
    __device__ __forceinline__ void round(const Kept& kept, const TileMaps& maps,
                                          uint32_t places, int& turn, int first, Epilogue& epilogue) {
        static_assert(FRAGMENTS == 16, "a group has 128 numbers");
        put(maps.out[1], places, turn, first / 2, [&](uint32_t place, int h, int row) {
            uint32_t largest = 0;
            #pragma unroll
            for (int k = 0; k < 8; k++)
                largest = larger(larger(largest, kept[k / 4][h][k % 4].x), kept[k / 4][h][k % 4].y);
            const GroupRounding rounding(largest_of<4>(largest));
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const uint32_t at = chunk_address(place, row, k) + threadIdx.x % 4 * 2;
                store_shared_half(at, rounding.two(kept[k / 4][h][k % 4].x));
                store_shared_half(at + 8, rounding.two(kept[k / 4][h][k % 4].y));
            }
            const int n = n0 + h * 8;
            if (threadIdx.x % 4 == 0 && n < N)
                epilogue.rounded.scale[(size_t)(first / 128) * epilogue.rounded.pitch + n] = rounding.factor;
        });
    }
};

template <class S, bool X_COLS, bool W_COLS, bool E4M3, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
hopper_kernel(const __grid_constant__ TileMaps maps, const __grid_constant__ TileArgs p, int units, Epilogue epilogue) {
#ifdef HAVE_WGMMA
    using C = ClusterPieces<S, Epilogue>;
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[2 * S::STAGES + 1];
    if (epilogue.skipped()) return;
    const uint32_t at_barriers = shared_address(barriers), came = at_barriers + 16 * S::STAGES;
    const HopperStages<S> stages = {(shared_address(memory) + 1023) & ~1023u, at_barriers, at_barriers + 8 * S::STAGES,
                                    p.stages};
    if (threadIdx.x == S::CONSUMERS) prefetch_map(maps.W), prefetch_map(maps.x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages.count(); s++)
            barrier_begin(stages.full(s), 1), barrier_begin(stages.empty(s), S::SHARING * S::CONSUMERS / 32);
        barrier_begin(came, 1);
        barriers_begun();
    }
    __syncthreads();
    if (p.apart || S::SHARING > 1) cluster_arrive();
    if (S::SHARING > 1) cluster_wait(); // both have begun their barriers
    let_next_start(); // every block is resident
    if (threadIdx.x >= S::CONSUMERS) {
        if (S::MOVES_REGISTERS) keep_registers<40>();
        if (threadIdx.x == S::CONSUMERS) produce<S, X_COLS, W_COLS, Epilogue::PAIR>(maps, p, stages, units);
        return;
    }
    if (S::MOVES_REGISTERS) take_registers<232>();
    if (p.splits > 1 && threadIdx.x == 0)
        barrier_arrive_expecting(came, C::count(blockIdx.x % p.splits, p.splits) * p.splits * C::BYTES);
    wait_for_previous(); // whose results an epilogue may add to
    Ring<S::STAGES> ring;
    [[maybe_unused]] const uint32_t places = stages.shared + S::STAGES * S::STAGE_BYTES + threadIdx.x / 32 * 2 * S::BOX;
    [[maybe_unused]] int turn = 0;
    for (int u = blockIdx.x / S::SHARING; u < units; u += gridDim.x / S::SHARING) {
        const TilePlace<S, Epilogue::PAIR> at(p, u / p.splits, u % p.splits);
        float sum[1][S::NF][4];
        [[maybe_unused]] Boxes<S, Epilogue> boxes = {at, p.N, p.out};
        constexpr bool STAGED = S::STAGED && Epilogue::OUTPUTS > 0, LATE = E4M3 || Epilogue::MASKS; // (registers)
        if constexpr (STAGED && !LATE)
            if (p.splits == 1) boxes.load(0, epilogue);
        if constexpr (Epilogue::MASKS) { // (then there are no splits)
            const KeptWords<S> words(at, epilogue.masks, p.more / epilogue.rank);
            multiply_steps_wgmma<S, X_COLS, W_COLS>(sum, stages, ring, at.first_more);
            for (int step = at.first_more; step < at.last; step++, ring.next(stages.count())) {
                barrier_wait(stages.full(ring.stage), ring.parity);
                const uint32_t x = stages.x(ring.stage), w = stages.w(ring.stage);
                add_masked_stage<S>(sum, x, w, at.number(step), words, p, epilogue);
                __syncwarp();
                stages.done_with(ring.stage);
            }
            wgmma_settle(sum);
        } else if constexpr (E4M3) multiply_groups(sum, stages, ring, p, at);
        else multiply_steps_wgmma<S, X_COLS, W_COLS>(sum, stages, ring, at.last - at.first);
        if (p.splits > 1) { // (then this is the block's only unit)
            const uint32_t received = stages.shared + (p.apart ? p.stages * S::STAGE_BYTES : 0);
            finish_in_cluster<S>(sum, received, came, u % p.splits, p, at, epilogue);
            return;
        }
        if constexpr (STAGED) {
            if constexpr (LATE) boxes.load(0, epilogue);
            boxes.finish(sum[0], maps, places, turn, epilogue);
        } else
            #pragma unroll
            for (int h = 0; h < 2; h++) finish_row<S>(sum[0], h, at.token(0, h), at.r0, p.N, p.out, epilogue);
    }
    wait_for_boxes<0>(); // before their memory is released
    // ... or barriers at which the other block arrives. (An exited thread counts as arrived.)
    if (S::SHARING > 1) cluster_arrive(), cluster_wait();
#endif
}

template <class S, bool X_COLS = false, bool W_COLS = false, bool E4M3 = false, class Epilogue>
void launch_hopper(Context& ctx, TileArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || !W_COLS, "gate and up are rows");
    const int tiles = plan_tiles<S, X_COLS, W_COLS, Epilogue>(ctx, p), units = tiles * p.splits;
    if (Epilogue::MASKS && !(p.more && p.more_last))
        DIE("a product that masks further columns needs some, as its last");
    if (p.splits > (Epilogue::MASKS || Epilogue::PARTS ? 1 : MOST_SPLITS))
        DIE("this product takes no %d splits", p.splits);
    if (p.splits > (p.more + STAGE_IN - 1) / STAGE_IN + (p.in + STAGE_IN - 1) / STAGE_IN)
        DIE("a product of %d numbers has not %d splits", p.in + p.more, p.splits);
    if (S::MOST < S::TOKENS && p.N > S::MOST) DIE("a tile of %d tokens has not %d", S::MOST, p.N);
    constexpr int X_BOX = X_COLS ? STAGE_IN : S::MOST;
    constexpr int W_BOX = W_COLS ? STAGE_IN : Epilogue::PAIR || S::SHARING > 1 ? S::ROWS / 2 : S::ROWS;
    static_assert(S::SHARING == 1 || S::ROWS % 128 == 0, "a panel has one who copies it");
    const int rows = Epilogue::PAIR ? 2 * p.out : p.out;
    const auto map = [](const bf16* matrix, int rows, int columns, int ld, int box) {
        return tensor_map(matrix, {{(size_t)columns, 1, STAGE_IN}, {(size_t)rows, (size_t)ld, box}});
    };
    const auto map_x = [&](const bf16* x, int in, int ld) {
        return X_COLS ? map(x, in, p.N, ld, X_BOX) : map(x, p.N, in, ld, X_BOX);
    };
    const auto map_w = [&](const bf16* W, int in, int ld) {
        return W_COLS ? map(W, in, p.out, ld, W_BOX) : map(W, rows, in, ld, W_BOX);
    };
    TileMaps maps = {map_x(p.x, p.in, p.ldx), map_w(p.W, p.in, p.ldw), {}, {}, {}};
    constexpr bool STAGED = S::STAGED && Epilogue::OUTPUTS > 0;
    if constexpr (STAGED)
        for (int k = 0; k < Epilogue::OUTPUTS; k++)
            if (const auto to = epilogue.output(k); to.at) {
                const int wide = 128 / (int)sizeof(*to.at);
                maps.out[k] = tensor_map(to.at, {{(size_t)p.out, 1, wide}, {(size_t)p.N, to.ld, 16}});
            }
    if constexpr (Epilogue::ROUNDS) {
        static_assert(STAGED && S::ROWS == 256);
        if (p.splits > 1 || p.out % 128) DIE("a product that rounds takes whole groups, and no splits");
        const size_t half = (size_t)p.out / 2;
        maps.out[1] = tensor_map((const bf16*)epilogue.rounded.q, {{half, 1, 64}, {(size_t)p.N, half, 16}});
    }
    if (p.more) {
        maps.more_x = map_x(p.more_x, p.more, p.more);
        maps.more_W = map_w(p.more_W, p.more, W_COLS ? p.out : p.more);
    }
    if (S::SHARING > 1 && p.splits > 1) DIE("blocks that share W have no splits");
    const int blocks =
        p.splits > 1 ? units : std::min(units, S::BLOCKS * ctx.gpu->sms / S::SHARING) * S::SHARING;
    using C = ClusterPieces<S, Epilogue>;
    const size_t received = p.splits > 1 ? (size_t)C::most(p.splits) * p.splits * C::BYTES : 0;
    p.stages = S::GIVES && received + S::SHARED > S::ROOM ? S::STAGES - 1 : S::STAGES;
    const size_t ring = S::SHARED - (size_t)(S::STAGES - p.stages) * S::STAGE_BYTES;
    p.apart = received && ring + received <= S::ROOM;
    if (!p.apart) p.stages = S::STAGES;
    if (!p.apart && received > (size_t)S::STAGES * S::STAGE_BYTES)
        DIE("a tile of %d x %d has no room for the sums of %d splits", S::TOKENS, S::ROWS, p.splits);
    const size_t shared = p.apart ? ring + received : S::SHARED + (STAGED && p.splits == 1 ? S::STAGING : 0);
    launch_clusters(ctx, ctx.gpu->overlap, p.splits * S::SHARING, hopper_kernel<S, X_COLS, W_COLS, E4M3, Epilogue>,
                    blocks, S::THREADS, shared, maps, p, units, epilogue);
}
