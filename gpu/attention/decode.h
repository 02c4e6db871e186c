// gpu/attention/decode.h: attention of sequences of one new token.
#pragma once
#include "gpu/attention/parts.h"
#include "gpu/norm_rope.h"
#include "gpu/packed/formats.h"
#include "qwen3.cu"

// ---- Attention for sequences of one new token: Book I's `attend` (Dao et al., "Flash-Decoding", 2023)
// That is qknorm_rope_kv and attention in one. A block has up to 8 query heads of a KV head, the rows of an mma, and of
// the splits of a sequence, SPLIT keys each, every gridDim.x-th. Its warps take a split's pages in turn. Where several
// blocks share a sequence, the last one to arrive joins their parts in order. All but the newest token's keys and
// values are asked for before the kernel before has ended.
// Where a warp has its page: few sequences, in registers (HeldPage), since a block that needs little shared memory
// begins beside the kernel before; many, in a ring of two stages in shared memory (RingPage), which cp.async fills with
// the next page while one is multiplied, and with whole lines of it, where loads into registers ask for halves.
// Keys are operand b as they lie: lane 4 g + t has eight numbers of keys g and g + 8, from 8 t on, of every 32
// (mma_32). What it gets are the scores of head g and of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and that is operand a
// of the second product, where nothing has to move either: of these four keys the lane has the values, eight numbers
// from 8 g on of every 64, and makes operands b of pairs of them. Weights are rounded to bf16, as in prompts. An FP8
// cache has e4m3 numbers, which become bf16 in registers; their factors go to scores and weights. As these are powers
// of two, all sums have the bits that this kernel makes of a bf16 cache of the same numbers.
// Grid (blocks of a KV head of a sequence, H / heads, sequences). Bound by reading keys and values; with one short
// sequence, by latency.
constexpr int DECODE_ROWS = 8; // query heads of a block, at most

struct DecodeArgs {
    bf16* out;                           // (N,HD)
    bf16 *keys, *values;                 // one layer's cache
    const bf16 *qkv;                     // (N,(H+2K)D)
    const bf16 *q_weight, *k_weight;     // (D)
    const float* rope;                   // (positions, D/2, 2)
    Batch b;
    int H, K;
    float eps;
    float* partial;                      // (singles, H, splits, D + 2): see join_splits
    int* arrived;                        // (singles, H / heads), zero between kernels
};

template <int D> struct DecodeShared {
    __align__(16) bf16 q[DECODE_ROWS][D];                    // normalised and rotated; zeros where there is no head
    float maximum[SPLIT / PAGE][DECODE_ROWS], sum[SPLIT / PAGE][DECODE_ROWS]; // of a warp's pages
    __align__(16) uint8_t new_key[2 * D], new_value[2 * D];  // the newest token's, as in the cache
    uint8_t exponents[2];
};

// The common part of the two places of a page: registers (HeldPage) and a ring in shared memory (RingPage). A place has
// WARPS a block, STAGES a warp, RING bytes of shared memory a warp; ask_for(i, ..) starts the load of a warp's i-th
// page, whose first `count` rows exist; wait(i) waits for it; insert adds one row; key(j, i) and value(r, c) are eight
// numbers of a lane; factor(r, value) is the factor of an FP8 row.
template <int D, bool FP8> struct DecodePage {
    static constexpr int SIZE = FP8 ? 1 : 2, ROW = D * SIZE; // bytes of a number and of a row
    using Chunk = std::conditional_t<FP8, uint2, uint4>;      // eight numbers
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __device__ int key_of(int r) const { return r / 2 * 8 + 2 * t + r % 2; } // of a lane's scores
    __device__ static uint4 widened(const Chunk& x) {
        if constexpr (FP8) return PackedFp8::run(x, 0, 0);
        else return x;
    }
    __device__ static const Chunk& chunk(const uint8_t* row, int column) {
        return *(const Chunk*)(row + column * SIZE);
    }
};

template <int D, bool FP8> struct HeldPage : DecodePage<D, FP8> {
    using Base = DecodePage<D, FP8>;
    using Base::key_of, Base::lane, Base::g, Base::t, Base::ROW, Base::chunk, Base::widened;
    static constexpr int WARPS = SPLIT / PAGE, STAGES = 1, RING = 0, BLOCKS = 2;
    typename Base::Chunk k[2][D / 32] = {}, v[4][D / 64] = {};
    int exponent[2][4] = {}; // FP8: the bytes of KVRow of keys and values key_of(r)
    __device__ explicit HeldPage(uint8_t*) {}

    __device__ __forceinline__ void ask_for(int, const uint8_t* keys, const uint8_t* values, int count) {
        GPU_UNROLL
        for (int j = 0; j < 2; j++)
            GPU_UNROLL
            for (int i = 0; i < D / 32; i++)
                if (8 * j + g < count) k[j][i] = chunk(keys + (8 * j + g) * ROW, 32 * i + 8 * t);
        GPU_UNROLL
        for (int r = 0; r < 4; r++)
            GPU_UNROLL
            for (int c = 0; c < D / 64; c++)
                if (key_of(r) < count) v[r][c] = chunk(values + key_of(r) * ROW, 64 * c + 8 * g);
        GPU_UNROLL
        for (int r = 0; r < 4 && FP8; r += 2) // two keys are neighbours
            if (key_of(r) < count) {
                const int two = *(const uint16_t*)(keys + PAGE * D + key_of(r));
                const int of_values = *(const uint16_t*)(values + PAGE * D + key_of(r));
                exponent[0][r] = two & 255, exponent[0][r + 1] = two >> 8;
                exponent[1][r] = of_values & 255, exponent[1][r + 1] = of_values >> 8;
            }
    }
    __device__ void wait(int) { __syncwarp(); } // (loads and insert have branches)
    __device__ void insert(const DecodeShared<D>& shared, int row) {
        GPU_UNROLL
        for (int j = 0; j < 2; j++)
            GPU_UNROLL
            for (int i = 0; i < D / 32; i++)
                if (8 * j + g == row) k[j][i] = chunk(shared.new_key, 32 * i + 8 * t);
        GPU_UNROLL
        for (int r = 0; r < 4; r++) {
            if (key_of(r) != row) continue;
            GPU_UNROLL
            for (int c = 0; c < D / 64; c++) v[r][c] = chunk(shared.new_value, 64 * c + 8 * g);
            exponent[0][r] = shared.exponents[0], exponent[1][r] = shared.exponents[1];
        }
        __syncwarp();
    }
    __device__ uint4 key(int j, int i) const { return widened(k[j][i]); }
    __device__ uint4 value(int r, int c) const { return widened(v[r][c]); }
    __device__ float factor(int r, bool value) const { return FP8 ? fp8_factor(exponent[value][r]) : 1; }
};

// Rows of D numbers in chunks of 16 bytes, swizzled so that the rows that a load touches at once lie in different
// banks; of an FP8 cache the exponents behind.
template <int D, bool FP8> struct RingPage : DecodePage<D, FP8> {
    using Base = DecodePage<D, FP8>;
    using Base::key_of, Base::lane, Base::g, Base::t, Base::SIZE, Base::ROW, Base::chunk, Base::widened;
    static constexpr int WARPS = 4, STAGES = 2, CHUNKS = ROW / 16, BLOCKS = FP8 ? 4 : 3;
    static constexpr int VALUES = PAGE * ROW, EXPONENTS = 2 * VALUES; // where they begin
    static constexpr int BYTES = EXPONENTS + (FP8 ? 2 * PAGE : 0), RING = STAGES * BYTES;
    static_assert(RING >= DECODE_ROWS * (D + 8) * 4, "a ring has room for a warp's sums");
    uint8_t *const ring, *stage;
    __device__ explicit RingPage(uint8_t* at) : ring(at), stage(at) {}

    __device__ static int chunk_at(int row, int chunk) {
        const int flip = FP8 ? 2 * (row % 4 ^ row / 4 % 2) : row % 8 ^ row % 2 * 4;
        return row * ROW + (chunk ^ flip % CHUNKS) * 16;
    }
    __device__ uint4 eight(const uint8_t* rows, int row, int column) const {
        return widened(chunk(rows + chunk_at(row, column * SIZE / 16) + column * SIZE % 16, 0));
    }
    // (Rows past `count` become zeros.)
    __device__ __forceinline__ void ask_for(int i, const uint8_t* keys, const uint8_t* values, int count) const {
        uint8_t* const to = ring + i % STAGES * BYTES;
        GPU_UNROLL
        for (int c = 0; c < 2 * PAGE * CHUNKS; c += 32) {
            const int at = (c + lane) % (PAGE * CHUNKS), row = at / CHUNKS;
            const bool value = c >= PAGE * CHUNKS;
            copy_async(shared_address(to + value * VALUES + chunk_at(row, at % CHUNKS)),
                       (value ? values : keys) + at * 16, row < count);
        }
        if (FP8 && lane < 2)
            copy_async(shared_address(to + EXPONENTS + lane * PAGE), (lane ? values : keys) + PAGE * D, count > 0);
    }
    __device__ void wait(int i) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        stage = ring + i % STAGES * BYTES;
    }
    __device__ void insert(const DecodeShared<D>& shared, int row) {
        if (lane < 2 * CHUNKS) {
            const bool value = lane >= CHUNKS;
            const int chunk = lane % CHUNKS;
            *(uint4*)(stage + value * VALUES + chunk_at(row, chunk)) =
                *(const uint4*)((value ? shared.new_value : shared.new_key) + chunk * 16);
        }
        if (FP8 && lane < 2) stage[EXPONENTS + lane * PAGE + row] = shared.exponents[lane];
        __syncwarp();
    }
    __device__ uint4 key(int j, int i) const { return eight(stage, 8 * j + g, 32 * i + 8 * t); }
    __device__ uint4 value(int r, int c) const { return eight(stage + VALUES, key_of(r), 64 * c + 8 * g); }
    __device__ float factor(int r, bool value) const {
        return FP8 ? fp8_factor(stage[EXPONENTS + value * PAGE + key_of(r)]) : 1;
    }
};

// The part of a warp's pages so far, of head g: the largest score, the sum of the weights, and the sum of the values by
// them: y[c][i][e] is number 64 c + 16 t + 8 i + e.
template <int D, bool FP8, class Page> struct DecodePart {
    float top = -INFINITY, sum = 0, y[D / 64][2][8] = {};

    // The first `count` keys of the page count: one at least.
    __device__ __forceinline__ void add(const DecodeShared<D>& shared, const Page& page, int count) {
        float s[2][4] = {}, odd[2][4] = {}; // scores: rows g and g + 8, of which only g is a head
        GPU_UNROLL
        for (int i = 0; i < D / 32; i++) {
            const uint4 q = *(const uint4*)(shared.q[page.g] + 32 * i + 8 * page.t);
            GPU_UNROLL
            for (int j = 0; j < 2; j++) // (where there are registers, in two chains)
                mma_32(i % 2 && !Page::RING ? odd[j] : s[j], q, uint4{0, 0, 0, 0}, page.key(j, i));
        }
        const float scale = LOG2E / sqrtf((float)D); // scores are powers of 2
        float weights[4], largest = top, more = 0;
        GPU_UNROLL
        for (int r = 0; r < 4; r++) {
            const float score = (s[r / 2][r % 2] + odd[r / 2][r % 2]) * scale * page.factor(r, false);
            weights[r] = page.key_of(r) < count ? score : -INFINITY;
            largest = fmaxf(largest, weights[r]);
        }
        largest = quad_max(largest);
        GPU_UNROLL
        for (int r = 0; r < 4; r++) {
            weights[r] = exp2_fast(weights[r] - largest), more += weights[r];
            if (FP8) weights[r] = page.key_of(r) < count ? weights[r] * page.factor(r, true) : 0;
        }
        const float shrink = exp2_fast(top - largest);
        top = largest, sum = fmaf(sum, shrink, quad_sum(more));
        if (__any_sync(~0u, shrink < 1)) // (seldom)
            GPU_UNROLL
            for (int e = 0; e < D / 4; e++) y[e / 16][e / 8 % 2][e % 8] *= shrink;
        const uint32_t first = pack(weights[0], weights[1]), second = pack(weights[2], weights[3]);
        GPU_UNROLL
        for (int c = 0; c < D / 64; c++) {
            uint4 rows[4];
            GPU_UNROLL
            for (int r = 0; r < 4; r++) rows[r] = page.value(r, c);
            GPU_UNROLL
            for (int e = 0; e < 8; e++) { // in this product column g stands for number 8 g + e
                const auto pair = [&](const uint4& a, const uint4& b) {
                    const uint32_t x = e < 2 ? a.x : e < 4 ? a.y : e < 6 ? a.z : a.w;
                    const uint32_t z = e < 2 ? b.x : e < 4 ? b.y : e < 6 ? b.z : b.w;
                    return __byte_perm(x, z, e % 2 ? 0x7632 : 0x5410);
                };
                float d[4] = {y[c][0][e], y[c][1][e], 0, 0};
                mma(d, first, 0, second, 0, pair(rows[0], rows[1]), pair(rows[2], rows[3]));
                settle(y[c][0][e] = d[0]), settle(y[c][1][e] = d[1]);
            }
        }
    }
    // To shared memory: heads are D + 8 numbers apart.
    __device__ __forceinline__ void store(DecodeShared<D>& shared, const Page& page, float* sums, int heads) const {
        const int warp = threadIdx.x / 32, g = page.g, t = page.t;
        if (g >= heads) return;
        if (t == 0) shared.maximum[warp][g] = top, shared.sum[warp][g] = sum;
        GPU_UNROLL
        for (int c = 0; c < D / 64; c++)
            GPU_UNROLL
            for (int e = 0; e < 16; e += 4) {
                const float* from = &y[c][e / 8][e % 8];
                store_four(sums + g * (D + 8) + 64 * c + 16 * t + e, make_float4(from[0], from[1], from[2], from[3]));
            }
    }
};

// The newest token's key (one warp) or value (another) to shared memory, and to the cache if no other block does it.
template <int D, bool FP8>
__device__ __forceinline__ void take_newest(const DecodeArgs& p, DecodeShared<D>& shared, const bf16* from, int slot,
                                            int kv, bool key, const float* angles, bool writes) {
    WarpHead<D> head, weights;
    head.load(from), weights.load(p.k_weight);
    if (key) head.norm_rope(weights, WarpAngles<D / 64>(angles), p.eps);
    uint8_t* const row = key ? shared.new_key : shared.new_value;
    bf16* const cache = key ? p.keys : p.values;
    if constexpr (FP8) {
        const WarpFp8Head<D> rounded(head);
        rounded.store(row, shared.exponents + !key);
        if (writes) rounded.store(cache, slot, kv, p.K);
    } else {
        head.store((bf16*)row);
        if (writes) head.store(cache + kv_offset(slot / PAGE, kv, slot % PAGE, p.K, D));
    }
}

template <int D, bool FP8, class Page>
__global__ void __launch_bounds__(32 * Page::WARPS, Page::BLOCKS) attention_decode_kernel(DecodeArgs p, int heads) {
    __shared__ DecodeShared<D> shared;
    PACKED_SHARED(rings); // the warps'; then their sums
    // No kernel of this forward writes the data read before the wait: positions, sequences and pages belong to the
    // batch, older keys and values to an earlier forward (see launch_kernel).
    const Batch& b = p.b;
    const int h0 = blockIdx.y * heads, n = blockIdx.z, kv = h0 / (p.H / p.K), warp = threadIdx.x / 32;
    const int seq = b.seq[n], pos = b.pos[n], pages = pos / PAGE + 1, splits = pos / SPLIT + 1;
    if (!Page::RING && seq >= 0 && splits > (int)gridDim.x) __trap(); // keys that no block owns: an error
    if (seq < 0 || (int)blockIdx.x >= splits) {
        let_next_start();
        wait_for_previous();
        return;
    }
    constexpr int STAGES = Page::STAGES;
    static_assert(SPLIT == Page::WARPS * STAGES * PAGE, "a split fills a block's stages");
    const int* table = b.pages + (size_t)seq * b.max_pages;
    const auto page_of = [&](int i) { // this warp's i-th page
        return (i / STAGES * (int)gridDim.x + (int)blockIdx.x) * (SPLIT / PAGE) + i % STAGES * Page::WARPS + warp;
    };
    const auto place = [&](int i) { return page_of(i) < pages ? table[page_of(i)] : 0; }; // of it in the cache
    Page page((uint8_t*)rings + warp * Page::RING);
    const auto ask_for = [&](int i, int at) {
        const int count = pos - page_of(i) * PAGE; // without the newest token
        const size_t first = kv_offset(at, kv, 0, p.K, D);
        if (page_of(i) >= pages) {}
        else if (FP8) page.ask_for(i, fp8_block<D>(p.keys, at, kv, p.K), fp8_block<D>(p.values, at, kv, p.K), count);
        else page.ask_for(i, (const uint8_t*)(p.keys + first), (const uint8_t*)(p.values + first), count);
        commit_copies();
    };
    int next[STAGES]; // places of the pages that come after those on their way
    GPU_UNROLL
    for (int i = 0; i < STAGES; i++) next[i] = place(i);
    GPU_UNROLL
    for (int i = 0; i < STAGES; i++) ask_for(i, next[i]), next[i] = place(i + STAGES);
    let_next_start();
    wait_for_previous();

    const bf16* row = p.qkv + (size_t)n * (p.H + 2 * p.K) * D;
    const float* angles = p.rope + (size_t)pos * D;
    for (int h = warp; h < DECODE_ROWS; h += Page::WARPS) {
        WarpHead<D> head = {}, weights;
        if (h < heads) {
            head.load(row + (size_t)(h0 + h) * D), weights.load(p.q_weight);
            head.norm_rope(weights, WarpAngles<D / 64>(angles), p.eps);
        }
        head.store(shared.q[h]);
    }
    if ((splits - 1) % (int)gridDim.x == (int)blockIdx.x && warp >= Page::WARPS - 2) {
        const bool key = warp == Page::WARPS - 2, writes = h0 % (p.H / p.K) == 0;
        take_newest<D, FP8>(p, shared, row + (size_t)(p.H + (key ? 0 : p.K) + kv) * D, b.slot[n], kv, key, angles,
                            writes);
    }
    __syncthreads();
    DecodePart<D, FP8, Page> part;
    for (int i = 0; page_of(i) < pages; i++) {
        page.wait(i);
        if (page_of(i) == pages - 1) page.insert(shared, pos % PAGE);
        part.add(shared, page, pos + 1 - page_of(i) * PAGE);
        if (!Page::RING) break; // (a block a split)
        __syncwarp(); // all have read it
        ask_for(i + STAGES, next[0]);
        GPU_UNROLL
        for (int k = 0; k + 1 < STAGES; k++) next[k] = next[k + 1];
        next[STAGES - 1] = place(i + 2 * STAGES);
    }
    const int apart = Page::RING ? Page::RING / 4 : heads * (D + 8); // numbers from one warp's sums to the next
    part.store(shared, page, rings + warp * apart, heads);
    __syncthreads();
    // The warps' parts, a thread a number: to `out` or, where the sequence has several blocks, to `parts`.
    const int blocks = min(splits, (int)gridDim.x);
    bf16* out = p.out + ((size_t)n * p.H + h0) * D;
    float* parts = p.partial + ((size_t)n * p.H + h0) * gridDim.x * (D + 2);
    for (int o = threadIdx.x; o < heads * D; o += blockDim.x) {
        const int h = o / D, d = o % D;
        const AttentionPart all = join_parts(Page::WARPS, [&](int w) {
            return AttentionPart{shared.maximum[w][h], shared.sum[w][h], rings[w * apart + h * (D + 8) + d]};
        });
        if (blocks == 1) out[o] = round_bf16(all.value / all.weights);
        else {
            float* to = parts + ((size_t)h * gridDim.x + blockIdx.x) * (D + 2);
            to[d] = all.value;
            if (d == 0) to[D] = all.top, to[D + 1] = all.weights;
        }
    }
    if (blocks == 1 || !last_to_arrive(p.arrived + (size_t)n * gridDim.y + blockIdx.y, blocks)) return;
    for (int o = threadIdx.x; o < heads * D; o += blockDim.x)
        out[o] = round_bf16(join_splits(parts + (size_t)(o / D) * gridDim.x * (D + 2), blocks, D, o % D));
}

// b.splits: of the longest sequence. A block takes more than one split where sequences fill the GPU by themselves.
void attention_decode_gpu(Context& ctx, const DecodeArgs& p, int singles, int D);
