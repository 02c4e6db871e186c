/* attention.h: Book II's kernels for Book I's `attention`. qwen3.cu includes it behind its products.

   attention_kernel is for prompts (and training's forward), on Hopper a second one by wgmma; attention_decode_kernel is
   for sequences of one new token (with qknorm_rope_kv in it: all of `attend`). Where there are too few blocks for the
   GPU, the keys of a row are split: each block leaves a part (the largest score, the sum of weights, the weighted sum
   of values), and parts are joined in order. G = H / K query heads share a KV head.

   Contents    What they share    Prompts    Prompts on Hopper    One new token    FP8 caches    Scratch */
#pragma once

// ---- What they share: tiles, products of tiles, sums over the lanes of a row, parts
// A tile in shared memory has rows of D numbers in chunks of 16 bytes; chunk c of row r lies at c ^ (r % 8), so that
// the eight rows that an ldmatrix reads at a time are in different banks. A tile begins at a multiple of 128 bytes.
template <int D> struct HeadTile {
    static constexpr int ROW = D * 2, CHUNKS = D / 8; // bytes and chunks of a row
    __device__ static int at(int row, int chunk) { return row * ROW + ((chunk ^ row % 8) << 4); }
};
// What each of 128 threads copies of a tile: one chunk of every STEPth row.
template <int D> struct HeadRows {
    static constexpr int THREADS = 128, STEP = THREADS / HeadTile<D>::CHUNKS;
    const int row = threadIdx.x % THREADS / HeadTile<D>::CHUNKS, chunk = threadIdx.x % HeadTile<D>::CHUNKS;
};

// s += a b^T: each of 16 I rows of the warp's own with each of 16 J others, all of D numbers and in tiles. s[i][j] is
// rows 16 i .. of a by rows 8 j .. of b, spread over the warp as mma says.
template <int D, int I, int J>
__device__ __forceinline__ void multiply_rows(float (&s)[I][2 * J][4], uint32_t a_rows, uint32_t b_rows) {
    constexpr int ROW = HeadTile<D>::ROW;
    const int lane = threadIdx.x % 32;
    const uint32_t a_at = a_rows + HeadTile<D>::at(lane % 16, lane / 16);
    const uint32_t b_at = b_rows + HeadTile<D>::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    #pragma unroll
    for (int d = 0; d < D / 16; d++) {
        // Chunk 2d + c lies at (2d + c) ^ (r % 8) = ((c ^ r % 8) ^ 2 (d % 4)) + 8 (d / 4).
        const uint32_t flip = d % 4 << 5, far = d / 4 << 7;
        uint32_t a[I][4], b[4];
        #pragma unroll
        for (int i = 0; i < I; i++) ldmatrix(a[i], (a_at ^ flip) + far + i * 16 * ROW);
        #pragma unroll
        for (int j = 0; j < J; j++) {
            ldmatrix(b, (b_at ^ flip) + far + j * 16 * ROW);
            #pragma unroll
            for (int i = 0; i < I; i++) {
                mma(s[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                mma(s[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

// sum += w b: w (16 I, 16 J) as multiply_rows leaves its s, rounded to bf16 (s is the a operand as it lies); b is 16 J
// rows of D numbers of a tile.
template <int D, int I, int J>
__device__ __forceinline__ void add_weighted_rows(float (&sum)[I][D / 8][4], const float (&w)[I][2 * J][4],
                                                  uint32_t b_rows) {
    const int lane = threadIdx.x % 32;
    const uint32_t b_at = b_rows + HeadTile<D>::at(lane % 16, lane / 16);
    #pragma unroll
    for (int k = 0; k < J; k++) {
        uint32_t a[I][4], b[4];
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const float* pair = &w[i][2 * k + e / 2][e % 2 * 2];
                a[i][e] = pack(pair[0], pair[1]);
            }
        #pragma unroll
        for (int j = 0; j < D / 16; j++) {
            ldmatrix_transposed(b, (b_at ^ (j % 4 << 5)) + (j / 4 << 7) + k * 16 * HeadTile<D>::ROW);
            #pragma unroll
            for (int i = 0; i < I; i++) {
                mma(sum[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                mma(sum[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

// Where this lane's numbers of such an s are: row of s[i][.][e], column of s[.][j][e]; f(number, i, j, e) for each.
__device__ __forceinline__ int score_row(int i, int e) { return i * 16 + e / 2 * 8 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int score_column(int j, int e) { return j * 8 + threadIdx.x % 4 * 2 + e % 2; }
template <int I, int J, class F> __device__ __forceinline__ void each_score(float (&s)[I][J][4], F f) {
    #pragma unroll
    for (int i = 0; i < I; i++)
        #pragma unroll
        for (int j = 0; j < J; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) f(s[i][j][e], i, j, e);
}
// Such an s of 16 rows, rounded, as mma and wgmma take it for their a operand.
template <int K>
__device__ __forceinline__ void round_weights(uint32_t (&weights)[K][4], const float (&s)[1][2 * K][4]) {
    #pragma unroll
    for (int i = 0; i < 4 * K; i++)
        weights[i / 4][i % 4] = pack(s[0][i / 2][i % 2 * 2], s[0][i / 2][i % 2 * 2 + 1]);
}
// What a quad of lanes has of one of the two rows in x = s[i], lane / 4 (h = 0) or lane / 4 + 8 (1), times `by`, to
// `row`.
template <int J> __device__ __forceinline__ void store_row(bf16* row, const float (&x)[J][4], int h, float by) {
    const int quad = threadIdx.x % 4, column = quad / 2 * 4 + quad % 2 * 8;
    #pragma unroll
    for (int j = 0; j < J; j += 2) {
        const float4 y = four_columns(x[j], x[j + 1], h, 0xfu << (threadIdx.x % 32 - quad));
        store_four(row + j * 8 + column, make_float4(y.x * by, y.y * by, y.z * by, y.w * by));
    }
}

// A row's attention over some of its keys, one number of it: the largest score, the sum of the weights 2^(score - top)
// and the sum of the values by them.
struct AttentionPart {
    float top, weights, value;
};
// `count` parts as one: their common maximum, then their sums in order. get(i) is part i; eight are read at a time.
template <class Get> __device__ __forceinline__ AttentionPart join_parts(int count, Get get) {
    AttentionPart all = {-INFINITY, 0, 0};
    for (int first = 0; first < count; first += 8) {
        AttentionPart part[8];
        float top = all.top;
        #pragma unroll
        for (int i = 0; i < 8; i++) part[i] = get(min(first + i, count - 1));
        #pragma unroll
        for (int i = 0; i < 8; i++) top = fmaxf(top, part[i].top);
        if (first) {
            const float shrink = exp2_fast(all.top - top);
            all.value *= shrink, all.weights *= shrink;
        }
        all.top = top;
        #pragma unroll
        for (int i = 0; i < 8; i++)
            if (first + i < count) {
                const float shrink = exp2_fast(part[i].top - top);
                all.value += part[i].value * shrink, all.weights += part[i].weights * shrink;
            }
    }
    return all;
}
// Number d of a row whose keys were split. `parts` (splits, D + 2): D weighted sums of values, the largest score (of
// powers of 2), the sum of the weights. From the L2 cache: other blocks wrote them.
__device__ __forceinline__ float join_splits(const float* parts, int splits, int D, int d) {
    const AttentionPart all = join_parts(splits, [&](int split) {
        const float* part = parts + split * (D + 2);
        return AttentionPart{__ldcg(part + D), __ldcg(part + D + 1), __ldcg(part + d)};
    });
    return all.value / all.weights;
}

// ---- Attention for prompts: Book I's `attention` (Dao, "FlashAttention-2", 2023)
// A block of 128 threads owns 128 query rows: all G heads of 128 / G neighbouring tokens that share a KV head. Keys and
// values pass through shared memory, 64 at a time, in two stages. A warp owns 32 of the rows, with their scores and
// sums in registers; a thread has two columns of every eight, of four rows (see mma). The tokens of a tile may belong
// to several sequences: these are taken one after another, each computing all rows and keeping its own. Where tiles are
// too few for the GPU, the keys are split: blocks that share a tile leave parts, which attention_sum_kernel joins.
// Grid (K, tiles of tokens, splits); shared memory (128 + 4 x 64) rows of D numbers: 96 KB for D = 128, two blocks a
// multiprocessor. Bound by the tensor cores and by registers: for D = 128 all 255 are in use.
constexpr int QUERY_ROWS = 128, KEYS = 64;

struct AttentionArgs {
    bf16* out;        // (N,HD)
    float* lse;       // (N,H) or null
    const bf16* q;    // (N,HD)
    const bf16 *keys, *values; // one layer's cache
    Batch b;
    int first, H, K;  // tokens from `first` on
    float* partial;   // (N - first, H, splits, D + 2): see join_splits
};

// The rows that a block owns: row r is head kv G + r % G of token begin + r / G.
struct QueryTile {
    int kv, G, begin, end; // of tokens begin .. end - 1
    __device__ QueryTile(const AttentionArgs& p, int kv, int tile) : kv(kv), G(p.H / p.K) {
        const int tokens = QUERY_ROWS / G;
        begin = p.first + tile * tokens, end = min(p.b.N, begin + tokens);
    }
    __device__ int token(int r) const { return begin + r / G; }
    __device__ size_t row(int r, int n, int H) const { return (size_t)n * H + kv * G + r - (n - begin) * G; } // of q
};

template <int D>
__device__ __forceinline__ void load_queries(const AttentionArgs& p, const QueryTile& tile, uint32_t q_tile) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < QUERY_ROWS; r += mine.STEP) {
        const int n = tile.token(r);
        const bool there = n < tile.end;
        const bf16* from = there ? p.q + tile.row(r, n, p.H) * D + mine.chunk * 8 : p.q;
        copy_async(q_tile + HeadTile<D>::at(r, mine.chunk), from, there);
    }
}

// Passes keys and values of a sequence, up to position `to`, through two stages of shared memory. A tile has four
// pages, whose numbers are read a tile ahead of the copies that need them.
template <int D> struct PassingPages {
    static constexpr int TILE = KEYS * HeadTile<D>::ROW;
    const AttentionArgs& p;
    const int* table; // the sequence's pages
    int kv, to;
    uint32_t k_tiles, v_tiles;
    HeadRows<D> mine;
    int page[KEYS / PAGE];

    __device__ __forceinline__ static uint32_t stage(int key0) { return key0 / KEYS % 2 * TILE; }
    __device__ __forceinline__ void next_pages(int key0) {
        #pragma unroll
        for (int j = 0; j < KEYS / PAGE; j++) page[j] = key0 + j * PAGE < to ? table[key0 / PAGE + j] : 0;
    }
    __device__ __forceinline__ void copy(uint32_t tile, const bf16* cache, int key0) const {
        #pragma unroll
        for (int i = 0; i < KEYS / mine.STEP; i++) {
            const int r = mine.row + i * mine.STEP; // of page r / PAGE, the same for all threads
            const size_t at = kv_offset(page[i * mine.STEP / PAGE], kv, r % PAGE, p.K, D) + mine.chunk * 8;
            copy_async(tile + HeadTile<D>::at(r, mine.chunk), cache + at, key0 + r < to);
        }
        commit_copies();
    }
    __device__ __forceinline__ void copy(int key0) const {
        copy(k_tiles + stage(key0), p.keys, key0);
        copy(v_tiles + stage(key0), p.values, key0);
    }
};

// What a lane has of its warp's 32 rows: [i][h] is of row 16 i + 8 h + lane / 4; mixed lies as multiply_rows leaves s.
template <int D> struct RowSums {
    float maximum[2][2], sum[2][2] = {}, mixed[2][D / 8][4] = {};
    __device__ __forceinline__ RowSums() { // (a row may see no key of a split: infinities would make it NaN)
        #pragma unroll
        for (int i = 0; i < 2; i++) maximum[i][0] = maximum[i][1] = -1e30f;
    }
};

// The online softmax: scores s become weights 2^(scale (s - maximum)); what was summed so far shrinks to the new
// maximum. `sum` has this lane's columns alone: the four lanes of a row are added at the end.
template <int D>
__device__ __forceinline__ void online_softmax(RowSums<D>& rows, float (&s)[2][KEYS / 8][4], float scale) {
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float& maximum = rows.maximum[i][h];
            float top = maximum;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
            top = quad_max(top);
            const float shrink = exp2_fast((maximum - top) * scale), base = top * scale;
            maximum = top;
            float weights = 0;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                #pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    weights += s[i][j][e] = exp2_fast(fmaf(s[i][j][e], scale, -base));
            rows.sum[i][h] = rows.sum[i][h] * shrink + weights;
            #pragma unroll
            for (int j = 0; j < D / 8; j++) rows.mixed[i][j][2 * h] *= shrink, rows.mixed[i][j][2 * h + 1] *= shrink;
        }
}

// Rows of tokens n0 .. n1 - 1 go to `out`, or, if the keys are split, to `partial`.
template <int D>
__device__ __forceinline__ void store_rows(const AttentionArgs& p, const QueryTile& tile, const RowSums<D>& rows,
                                           int n0, int n1, float scale) {
    const int first_row = threadIdx.x / 32 * 32;
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float total = quad_sum(rows.sum[i][h]), maximum = rows.maximum[i][h];
            const int r = first_row + score_row(i, 2 * h), n = tile.token(r);
            if (n < n0 || n >= n1) continue;
            const size_t row = tile.row(r, n, p.H);
            if (gridDim.z > 1) {
                float* part = p.partial + ((row - (size_t)p.first * p.H) * gridDim.z + blockIdx.z) * (D + 2);
                #pragma unroll
                for (int j = 0; j < D / 8; j++)
                    *(float2*)(part + score_column(j, 0)) = *(const float2*)&rows.mixed[i][j][2 * h];
                *(float2*)(part + D) = make_float2(maximum * scale, total);
                continue;
            }
            store_row(p.out + row * D, rows.mixed[i], h, 1 / total);
            if (p.lse) p.lse[row] = maximum / sqrtf((float)D) + logf(total); // all four lanes of a row
        }
}

// All rows of the tile with the keys of one sequence, whose tokens are n0 .. n1 - 1.
template <int D>
__device__ __forceinline__ void attend_sequence(const AttentionArgs& p, const QueryTile& tile, int n0, int n1,
                                                uint32_t q_tile) {
    constexpr int ROW = HeadTile<D>::ROW;
    const Batch& b = p.b;
    const float scale = LOG2E / sqrtf((float)D); // powers of 2, not of e
    const int longest = b.pos[n1 - 1] + 1, shortest = b.pos[n0] + 1; // keys that the last and the first token see
    const int key_tiles = (longest + KEYS - 1) / KEYS, splits = gridDim.z, split = blockIdx.z;
    const int from = key_tiles * split / splits * KEYS, to = min(longest, key_tiles * (split + 1) / splits * KEYS);
    const int first_row = threadIdx.x / 32 * 32; // of this warp
    int limit[2][2]; // keys that this lane's rows see; rows of other sequences compute what nobody keeps
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = tile.token(first_row + score_row(i, 2 * h));
            limit[i][h] = n >= n0 && n < n1 ? b.pos[n] + 1 : to;
        }
    const uint32_t k_tiles = q_tile + QUERY_ROWS * ROW, v_tiles = k_tiles + 2 * KEYS * ROW;
    PassingPages<D> pages = {p, b.pages + (size_t)b.seq[n0] * b.max_pages, tile.kv, to, k_tiles, v_tiles};
    RowSums<D> rows;
    __syncthreads(); // the sequence before this one is done with the tiles
    pages.next_pages(from);
    pages.copy(from);
    pages.next_pages(from + KEYS);
    for (int key0 = from; key0 < to; key0 += KEYS) {
        wait_for_copies<0>();
        __syncthreads();
        pages.copy(key0 + KEYS);
        pages.next_pages(key0 + 2 * KEYS);
        float s[2][KEYS / 8][4] = {};
        multiply_rows<D, 2, KEYS / 16>(s, q_tile + first_row * ROW, k_tiles + pages.stage(key0));
        if (key0 + KEYS > shortest)
            each_score(s, [&](float& x, int i, int j, int e) {
                if (key0 + score_column(j, e) >= limit[i][e / 2]) x = -INFINITY;
            });
        online_softmax(rows, s, scale);
        add_weighted_rows<D, 2, KEYS / 16>(rows.mixed, s, v_tiles + pages.stage(key0));
    }
    wait_for_copies<0>();
    store_rows(p, tile, rows, n0, n1, scale);
}

template <int D> __global__ void __launch_bounds__(128, 2) attention_kernel(AttentionArgs p) {
    extern __shared__ __align__(128) uint4 tiles[]; // of queries; two stages of keys, two of values
    const QueryTile tile(p, blockIdx.x, gridDim.y - 1 - blockIdx.y); // later tokens see more keys: long blocks first
    wait_for_previous();
    load_queries<D>(p, tile, shared_address(tiles));
    for (int n0 = tile.begin, n1; n0 < tile.end; n0 = n1) {
        for (n1 = n0 + 1; n1 < tile.end && p.b.seq[n1] == p.b.seq[n0]; n1++) {}
        if (p.b.seq[n0] >= 0) attend_sequence<D>(p, tile, n0, n1, shared_address(tiles));
    }
}

// ---- The same on Hopper, for D = 128. Grid: as many blocks as there are multiprocessors; a block takes the next tile
// of 128 query rows whenever it has room for one; each of two warpgroups owns 64 of them. Queries, keys and values, 128
// at a time, pass through shared memory in two stages each: the lanes of a warp have the Tensor Memory Accelerator copy
// a page each. A warpgroup has the scores of the next keys and the values of the last ones multiplied at the same time,
// and makes weights of scores while the latter runs. Bound by the tensor cores and by the exponentials; short sequences
// by memory.
//
// A page's keys, 16 rows of 128 numbers, lie as (2 groups, 2 halves, 8 rows, 64 numbers), so that all groups of eight
// keys of a tile are equally far apart, and so do its values. What pages hold past a sequence's end has weight 0, and
// is finite.
struct HopperAttention {
    static constexpr int D = 128, KEYS = 128, GROUP = 2048, HALF = 1024;     // bytes from a group, a half, to the next
    static constexpr int TILE = 128 * D * 2, SHARED = 6 * TILE + 1024;
    static constexpr int QUERIES = 0, KEYS_AT = 2, VALUES = 4; // the first of two tiles each
    static constexpr int CONSUMERS = 256, THREADS = 384;
    struct Maps {
        CUtensorMap q, keys, values;
    };
    const AttentionArgs& p;
    int tiles, splits;
    int* taken; // how many units were taken from the counter, and how many blocks have left
    struct Shared { // what the warps of a block tell each other
        int unit[2]; // whose queries are in each of the two stages, -1 at the end
        Ring<2> queries, keys, values; // where the next copies go
        bool ended;
    };
    Shared& told;
    uint32_t shared, barriers; // tiles, and a pair of mbarriers for each
    __device__ uint32_t tile(int i) const { return shared + i * TILE; }
    __device__ uint32_t full(int i) const { return barriers + 16 * i; }
    __device__ uint32_t empty(int i) const { return barriers + 16 * i + 8; }

    // A unit is a KV head's tile of queries and a split of its keys. The last tokens come first: those of a long
    // sequence have the most keys, and what is left for the end is short.
    __device__ QueryTile tile_of(int unit) const { return QueryTile(p, unit % p.K, tiles - 1 - unit / p.K / splits); }
    __device__ int split_of(int unit) const { return unit / p.K % splits; }

    // f(n0, n1, from, to) for each sequence in the tile: its tokens there, and the split's keys.
    template <class F> __device__ __forceinline__ void each_sequence(const QueryTile& t, int split, F f) const {
        for (int n0 = t.begin, n1; n0 < t.end; n0 = n1) {
            if (p.b.seq[t.end - 1] == p.b.seq[n0]) n1 = t.end; // (as a rule)
            else
                for (n1 = n0 + 1; n1 < t.end && p.b.seq[n1] == p.b.seq[n0]; n1++) {}
            const int longest = p.b.pos[n1 - 1] + 1, key_tiles = (longest + KEYS - 1) / KEYS;
            const int from = key_tiles * split / splits * KEYS;
            if (p.b.seq[n0] >= 0) f(n0, n1, from, min(longest, key_tiles * (split + 1) / splits * KEYS));
        }
    }

    // Two warps, a unit each in turn: while one copies, the other looks up what its unit's copies need. A block's first
    // two units make an even start, a long one and a short one; the others come from a counter.
    __device__ __forceinline__ void produce(const Maps& maps, int me) const {
        const int lane = threadIdx.x % 32, blocks = gridDim.x, count = tiles * splits * p.K;
        const auto copy = [&](int first, const CUtensorMap& map, Ring<2>& ring, int page, int kv) {
            const int i = first + ring.stage;
            barrier_wait(empty(i), ring.parity ^ 1);
            if (lane == 0) barrier_arrive_expecting(full(i), TILE);
            __syncwarp();
            if (lane < KEYS / PAGE) copy_box(tile(i) + lane * (TILE / 8), map, full(i), 0, 0, 0, (page * p.K + kv) * 2);
            ring.next();
        };
        if (me) pass_turn(0);
        for (int unit = me ? 2 * blocks - 1 - (int)blockIdx.x : blockIdx.x;;) {
            const QueryTile t = tile_of(unit);
            const auto page_of = [&](int n, int key0, int to) { // this lane's; past the end the last one again
                const int* table = p.b.pages + (size_t)p.b.seq[n] * p.b.max_pages;
                return lane < KEYS / PAGE ? table[min(key0 / PAGE + lane, (to - 1) / PAGE)] : 0;
            };
            if (unit < count) // from here on it is in the first-level cache
                each_sequence(t, split_of(unit), [&](int n0, int, int from, int to) {
                    if (from < to) asm volatile("" ::"r"(page_of(n0, from, to)));
                });
            wait_for_turn(me);
            if (unit >= count) break;
            int after = -1; // the unit after the other warp's
            Ring<2> queries = told.queries, keys = told.keys, values = told.values;
            const int q = QUERIES + queries.stage;
            barrier_wait(empty(q), queries.parity ^ 1);
            if (lane == 0) {
                told.unit[queries.stage] = unit;
                barrier_arrive_expecting(full(q), QUERY_ROWS / t.G * t.G * D * 2);
                for (int c = 0; c < D; c += 64)
                    copy_box(tile(q) + c * QUERY_ROWS * 2, maps.q, full(q), c, t.kv * t.G, t.begin);
            }
            queries.next();
            each_sequence(t, split_of(unit), [&](int n0, int, int from, int to) {
                int page = from < to ? page_of(n0, from, to) : 0;
                for (int key0 = from; key0 < to; key0 += KEYS) {
                    const int next = key0 + KEYS < to ? page_of(n0, key0 + KEYS, to) : 0;
                    if (key0 == from) copy(KEYS_AT, maps.keys, keys, page, t.kv);
                    if (key0 + KEYS < to) copy(KEYS_AT, maps.keys, keys, next, t.kv);
                    else if (lane == 0 && after < 0) after = atomicAdd(taken, 1); // (late: who is done first takes it)
                    copy(VALUES, maps.values, values, page, t.kv);
                    page = next;
                }
            });
            if (lane == 0 && after < 0) after = atomicAdd(taken, 1);
            unit = 2 * blocks + __shfl_sync(~0u, after, 0);
            if (lane == 0) told.queries = queries, told.keys = keys, told.values = values;
            pass_turn(!me);
        }
        const Ring<2> queries = told.queries;
        if (!told.ended && lane == 0) {
            barrier_wait(empty(QUERIES + queries.stage), queries.parity ^ 1);
            told.unit[queries.stage] = -1;
            barrier_arrive(full(QUERIES + queries.stage));
            if (atomicAdd(taken + 1, 1) == blocks - 1) taken[0] = taken[1] = 0; // nobody takes any more
        }
        if (told.ended) return;
        __syncwarp();
        if (lane == 0) told.ended = true;
        pass_turn(!me);
    }
    __device__ static void wait_for_turn(int me) { asm volatile("barrier.sync %0, 64;" ::"r"(2 + me) : "memory"); }
    __device__ static void pass_turn(int to) { asm volatile("barrier.arrive %0, 64;" ::"r"(2 + to) : "memory"); }

    // s = q k^T of this warpgroup's 64 rows and a tile of keys; mixed += weights v. Both run on.
    using Scores = float[1][KEYS / 8][4];
    using Mixed = float[1][D / 8][4];
    __device__ __forceinline__ void multiply_keys(Scores& s, int queries, int i) const {
        const uint32_t q = tile(queries) + threadIdx.x / 128 * (64 * 128), k = tile(i);
        wgmma_begin();
        #pragma unroll
        for (int d = 0; d < D / 16; d++)
            wgmma<KEYS, false, false>(s[0], wgmma_operand(q + d / 4 * (QUERY_ROWS * 128) + d % 4 * 32, 0),
                                      wgmma_operand(k + d / 4 * HALF + d % 4 * 32, 0, GROUP), d);
        wgmma_commit();
    }
    __device__ __forceinline__ void add_values(Mixed& mixed, const uint32_t (&weights)[KEYS / 16][4], int i,
                                               bool more) const {
        wgmma_begin();
        #pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            wgmma<128, true>(mixed[0], weights[k], wgmma_operand(tile(i) + k * 2 * GROUP, HALF, GROUP), more || k);
        wgmma_commit();
    }

    // Scores of keys from key0 on become weights; rows see keys below limit[h]. shrink[h]: for what was summed so far.
    __device__ __forceinline__ static void soften(Scores& s, float (&maximum)[2], float (&sum)[2], float (&shrink)[2],
                                                  const int (&limit)[2], bool masked, int key0, float scale) {
        if (masked)
            each_score(s, [&](float& x, int, int j, int e) {
                if (key0 + score_column(j, e) >= limit[e / 2]) x = -INFINITY;
            });
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = maximum[h], weights = 0;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[0][j][2 * h], s[0][j][2 * h + 1]));
            top = quad_max(top);
            shrink[h] = exp2_fast((maximum[h] - top) * scale), maximum[h] = top;
            const float base = top * scale;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                #pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    weights += s[0][j][e] = exp2_fast(fmaf(s[0][j][e], scale, -base));
            sum[h] = sum[h] * shrink[h] + weights;
        }
    }
    // The warp's rows of tokens n0 .. n1 - 1, to `out` or, if the keys are split, to `partial`.
    __device__ __forceinline__ void store(const QueryTile& t, int split, int n0, int n1, const Mixed& mixed,
                                          const float (&maximum)[2], const float (&sum)[2], float scale) const {
        const int quad = threadIdx.x % 4;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float total = quad_sum(sum[h]), by = splits > 1 ? 1 : 1 / total;
            const int r = threadIdx.x / 32 * 16 + score_row(0, 2 * h), n = t.token(r);
            const bool mine = n >= n0 && n < n1;
            const size_t row = mine ? t.row(r, n, p.H) : 0;
            float* part = p.partial + ((row - (size_t)p.first * p.H) * splits + split) * (D + 2);
            #pragma unroll
            for (int j = 0; j < D / 8; j += 2) {
                float4 y = four_columns(mixed[0][j], mixed[0][j + 1], h);
                const int d = j * 8 + quad / 2 * 4 + quad % 2 * 8;
                y = make_float4(y.x * by, y.y * by, y.z * by, y.w * by);
                if (!mine) continue;
                if (splits > 1) *(float2*)(part + d) = {y.x, y.y}, *(float2*)(part + d + 2) = {y.z, y.w};
                else store_four(p.out + row * D + d, y);
            }
            if (mine && splits > 1) *(float2*)(part + D) = make_float2(maximum[h] * scale, total);
            if (mine && p.lse) p.lse[row] = maximum[h] / sqrtf((float)D) + logf(total);
        }
    }

    // Two warpgroups.
    __device__ __forceinline__ void consume() const {
        const float scale = LOG2E / sqrtf((float)D);
        Ring<2> queries, keys, values;
        const auto leave = [&](int i) { if (threadIdx.x % 32 == 0) barrier_arrive(empty(i)); };
        for (;;) {
            const int q = QUERIES + queries.stage;
            barrier_wait(full(q), queries.parity);
            const int unit = told.unit[queries.stage];
            if (unit < 0) return;
            __syncwarp(); // all lanes have read it before one of them leaves the stage
            const QueryTile t = tile_of(unit);
            const int split = split_of(unit);
            each_sequence(t, split, [&](int n0, int n1, int from, int to) {
                int limit[2];
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int n = t.token(threadIdx.x / 32 * 16 + score_row(0, 2 * h));
                    limit[h] = n >= n0 && n < n1 ? p.b.pos[n] + 1 : to;
                }
                const int shortest = p.b.pos[n0] + 1;
                float maximum[2] = {-1e30f, -1e30f}, sum[2] = {}, shrink[2];
                Mixed mixed;
                if (from >= to) { // a split without keys
                    each_score(mixed, [](float& x, int, int, int) { x = 0; });
                    return store(t, split, n0, n1, mixed, maximum, sum, scale);
                }
                uint32_t weights[KEYS / 16][4];
                {
                    Scores s;
                    barrier_wait(full(KEYS_AT + keys.stage), keys.parity);
                    multiply_keys(s, q, KEYS_AT + keys.stage);
                    wgmma_wait<0>();
                    wgmma_settle(s);
                    leave(KEYS_AT + keys.stage), keys.next();
                    soften(s, maximum, sum, shrink, limit, from + KEYS > shortest, from, scale);
                    round_weights(weights, s);
                }
                for (int key0 = from + KEYS; key0 < to; key0 += KEYS) {
                    Scores s;
                    barrier_wait(full(KEYS_AT + keys.stage), keys.parity);
                    multiply_keys(s, q, KEYS_AT + keys.stage);
                    barrier_wait(full(VALUES + values.stage), values.parity);
                    add_values(mixed, weights, VALUES + values.stage, key0 > from + KEYS);
                    wgmma_wait<1>();
                    wgmma_settle(s);
                    leave(KEYS_AT + keys.stage), keys.next();
                    soften(s, maximum, sum, shrink, limit, key0 + KEYS > shortest, key0, scale);
                    wgmma_wait<0>();
                    wgmma_settle(mixed);
                    leave(VALUES + values.stage), values.next();
                    each_score(mixed, [&](float& x, int, int, int e) { x *= shrink[e / 2]; });
                    round_weights(weights, s);
                }
                barrier_wait(full(VALUES + values.stage), values.parity);
                add_values(mixed, weights, VALUES + values.stage, to > from + KEYS);
                wgmma_wait<0>();
                wgmma_settle(mixed);
                leave(VALUES + values.stage), values.next();
                store(t, split, n0, n1, mixed, maximum, sum, scale);
            });
            leave(q), queries.next();
        }
    }
};
__global__ void __launch_bounds__(HopperAttention::THREADS, 1)
attention_hopper_kernel(const __grid_constant__ HopperAttention::Maps maps, const __grid_constant__ AttentionArgs p,
                        int tiles, int splits, int* taken) {
#ifdef HAVE_WGMMA
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[12];
    __shared__ HopperAttention::Shared told;
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u; // the swizzle counts from multiples of 1024
    const HopperAttention a = {p, tiles, splits, taken, told, shared, shared_address(barriers)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 6; i++) barrier_begin(a.full(i), 1), barrier_begin(a.empty(i), a.CONSUMERS / 32);
        told.queries = told.keys = told.values = {}, told.ended = false;
        barriers_begun();
    }
    __syncthreads();
    let_next_start(); // all our blocks have their places
    wait_for_previous();
    if (threadIdx.x >= a.CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x < a.CONSUMERS + 64) a.produce(maps, threadIdx.x / 32 % 4);
    } else {
        take_registers<232>();
        a.consume();
    }
#endif
}

// Joins the parts of split keys. A block a token's head, a thread a number; bound by launching.
__global__ void attention_sum_kernel(bf16* out, const float* partial, const int* seq, int first, int H, int splits) {
    wait_for_previous();
    const size_t row = blockIdx.x, D = blockDim.x;
    if (seq[first + row / H] < 0) return;
    const float sum = join_splits(partial + row * splits * (D + 2), splits, (int)D, threadIdx.x);
    out[((size_t)first * H + row) * D + threadIdx.x] = round_bf16(sum);
}

constexpr int BLOCKS_A_SM = 2;  // blocks of attention_kernel that share a multiprocessor
// Keys that are worth a block of their own: writing and joining parts takes 20 us, on Hopper as long as 1,024 keys.
constexpr int LEAST_KEYS = 256, HOPPER_LEAST_KEYS = 1024;
inline void attention_gpu(Context& ctx, bf16* out, float* lse, const bf16* q, const bf16* keys, const bf16* values,
                          const Batch& b, int H, int K, int D, int first = 0) {
    const bool hopper = ctx.gpu->hopper && D == HopperAttention::D;
    const int G = H / K, tokens = QUERY_ROWS / G, tiles = (b.N - first + tokens - 1) / tokens, blocks = tiles * K;
    const int wanted = hopper ? std::min(ctx.gpu->sms / blocks, b.longest / HOPPER_LEAST_KEYS)
                              : std::min(BLOCKS_A_SM * ctx.gpu->sms / blocks, b.longest / LEAST_KEYS);
    const int splits = ctx.invariant || lse ? 1 : std::max(1, wanted);
    const AttentionArgs p = {out, lse, q, keys, values, b, first, H, K, ctx.gpu->attention};
    if (hopper) {
        const size_t C = (size_t)H * D, groups = (size_t)1 << 28; // (as many as there can be: pages are always inside)
        const auto map_pages = [&](const bf16* cache) {
            return tensor_map(cache, {{64, 1, 64}, {8, (size_t)D, 8}, {2, 64, 2}, {groups, 8 * (size_t)D, 2}});
        };
        const HopperAttention::Maps maps = {
            tensor_map(q, {{(size_t)D, 1, 64}, {(size_t)H, (size_t)D, G}, {(size_t)b.N, C, tokens}}),
            map_pages(keys), map_pages(values)};
        launch(ctx, attention_hopper_kernel, std::min(blocks * splits, ctx.gpu->sms), HopperAttention::THREADS,
               HopperAttention::SHARED, maps, p, tiles, splits, ctx.gpu->arrived);
    } else {
        const dim3 grid((unsigned)K, (unsigned)tiles, (unsigned)splits);
        const size_t shared = (size_t)(QUERY_ROWS + 4 * KEYS) * D * sizeof(bf16);
        launch(ctx, D == 128 ? attention_kernel<128> : attention_kernel<64>, grid, 128, shared, p);
    }
    if (splits == 1) return;
    const dim3 rows((unsigned)((b.N - first) * H));
    launch(ctx, attention_sum_kernel, rows, D, 0, out, p.partial, b.seq, first, H, splits);
}

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

// Splits for a position in a context of so many tokens: 1, 2, 4, ... or all, a graph for each; blocks without keys cost
// little.
inline int splits_for_graph(int position, int context) {
    int splits = 1;
    while (splits * SPLIT <= position) splits *= 2;
    return std::min(splits, (context - 1) / SPLIT + 1);
}

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

// What a page's two places share. A place has: WARPS of its blocks, STAGES of a warp, RING bytes of shared memory of a
// warp; ask_for(i, ..) for a warp's i-th page, of which the first `count` rows are there; wait(i) for it; insert one
// row more; key(j, i), value(r, c): a lane's eight numbers; factor(r, value): an FP8 row's.
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
        #pragma unroll
        for (int j = 0; j < 2; j++)
            #pragma unroll
            for (int i = 0; i < D / 32; i++)
                if (8 * j + g < count) k[j][i] = chunk(keys + (8 * j + g) * ROW, 32 * i + 8 * t);
        #pragma unroll
        for (int r = 0; r < 4; r++)
            #pragma unroll
            for (int c = 0; c < D / 64; c++)
                if (key_of(r) < count) v[r][c] = chunk(values + key_of(r) * ROW, 64 * c + 8 * g);
        #pragma unroll
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
        #pragma unroll
        for (int j = 0; j < 2; j++)
            #pragma unroll
            for (int i = 0; i < D / 32; i++)
                if (8 * j + g == row) k[j][i] = chunk(shared.new_key, 32 * i + 8 * t);
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            if (key_of(r) != row) continue;
            #pragma unroll
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
        #pragma unroll
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
        #pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const uint4 q = *(const uint4*)(shared.q[page.g] + 32 * i + 8 * page.t);
            #pragma unroll
            for (int j = 0; j < 2; j++) // (where there are registers, in two chains)
                mma_32(i % 2 && !Page::RING ? odd[j] : s[j], q, uint4{0, 0, 0, 0}, page.key(j, i));
        }
        const float scale = LOG2E / sqrtf((float)D); // scores are powers of 2
        float weights[4], largest = top, more = 0;
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            const float score = (s[r / 2][r % 2] + odd[r / 2][r % 2]) * scale * page.factor(r, false);
            weights[r] = page.key_of(r) < count ? score : -INFINITY;
            largest = fmaxf(largest, weights[r]);
        }
        largest = quad_max(largest);
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            weights[r] = exp2_fast(weights[r] - largest), more += weights[r];
            if (FP8) weights[r] = page.key_of(r) < count ? weights[r] * page.factor(r, true) : 0;
        }
        const float shrink = exp2_fast(top - largest);
        top = largest, sum = fmaf(sum, shrink, quad_sum(more));
        if (__any_sync(~0u, shrink < 1)) // (seldom)
            #pragma unroll
            for (int e = 0; e < D / 4; e++) y[e / 16][e / 8 % 2][e % 8] *= shrink;
        const uint32_t first = pack(weights[0], weights[1]), second = pack(weights[2], weights[3]);
        #pragma unroll
        for (int c = 0; c < D / 64; c++) {
            uint4 rows[4];
            #pragma unroll
            for (int r = 0; r < 4; r++) rows[r] = page.value(r, c);
            #pragma unroll
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
        #pragma unroll
        for (int c = 0; c < D / 64; c++)
            #pragma unroll
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
    // What is read before the wait no kernel of this forward writes: positions, sequences and pages are the batch's,
    // older keys and values an earlier forward's (see launch_kernel).
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
    #pragma unroll
    for (int i = 0; i < STAGES; i++) next[i] = place(i);
    #pragma unroll
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
        #pragma unroll
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

// Numbers of scratch that attention needs: for so many sequences of one token, or for any others.
inline size_t attention_scratch(const Context& ctx, int singles, int splits, int H, int D) {
    return std::max((size_t)singles * H * splits, (size_t)BLOCKS_A_SM * ctx.gpu->sms * QUERY_ROWS) * (D + 2);
}

// b.splits: of the longest sequence. A block takes more than one split where sequences fill the GPU by themselves.
inline void attention_decode_gpu(Context& ctx, const DecodeArgs& p, int singles, int D) {
    if (p.b.splits < 1) DIE("attention_decode: %d splits", p.b.splits);
    const int G = p.H / p.K;
    int heads = std::min(G, DECODE_ROWS);
    while (G % heads) heads--;
    const int others = singles * p.H / heads, sms = ctx.gpu->sms;
    const auto launch_pages = [&](auto kernel, auto* page, int blocks) {
        using Page = std::remove_pointer_t<decltype(page)>;
        const size_t shared = (size_t)Page::WARPS * std::max(Page::RING, heads * (D + 8) * 4);
        const dim3 grid((unsigned)blocks, (unsigned)(p.H / heads), (unsigned)singles);
        launch(ctx, kernel, grid, 32 * Page::WARPS, shared, p, heads);
    };
    const auto with = [&](auto size, auto fp8) {
        using Held = HeldPage<size, fp8>;
        using Ring = RingPage<size, fp8>;
        if (others * p.b.splits <= 8 * sms)
            launch_pages(attention_decode_kernel<size, fp8, Held>, (Held*)nullptr, p.b.splits);
        else launch_pages(attention_decode_kernel<size, fp8, Ring>, (Ring*)nullptr,
                          std::min(p.b.splits, (3 * sms + others - 1) / others));
    };
    const auto with_format = [&](auto size) {
        if (p.b.fp8) with(size, std::true_type());
        else with(size, std::false_type());
    };
    if (D == 128) with_format(std::integral_constant<int, 128>());
    else with_format(std::integral_constant<int, 64>());
}

// ---- An FP8 cache for attention of several tokens. That reads bf16: what it will read of a layer is widened first,
// into pages of the same numbers. Grid: (K, blocks); a block takes every gridDim.y-th page of each sequence that has
// rows from `first` on. Bound by the memory's speed: 3 bytes a number, and 2 when attention reads it.
template <int D>
__global__ void __launch_bounds__(256) widen_pages_kernel(bf16* to_keys, bf16* to_values, bf16* keys, bf16* values,
                                                          Batch b, int first, int K) {
    __shared__ int last[256], count; // the sequences' last rows, of 256 rows
    let_next_start();
    wait_for_previous();
    const int kv = blockIdx.x, row = threadIdx.x * 8 / D;
    for (int n0 = first; n0 < b.N; n0 += 256) {
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        const int n = n0 + (int)threadIdx.x;
        if (n < b.N && b.seq[n] >= 0 && (n + 1 == b.N || b.seq[n + 1] != b.seq[n])) last[atomicAdd(&count, 1)] = n;
        __syncthreads();
        for (int i = 0; i < count && row < PAGE; i++) {
            const int length = b.pos[last[i]] + 1, *table = b.pages + (size_t)b.seq[last[i]] * b.max_pages;
            for (int page = blockIdx.y; page * PAGE < length; page += gridDim.y) {
                const size_t at = kv_offset(table[page], kv, 0, K, D) + threadIdx.x * 8;
                const auto widen = [&](bf16* to, bf16* cache) {
                    const uint8_t* block = fp8_block<D>(cache, table[page], kv, K);
                    const bool there = page * PAGE + row < length; // what lies behind them has to be finite
                    const uint2 raw = there ? *(const uint2*)(block + threadIdx.x * 8) : uint2{0, 0};
                    const float factor = there ? fp8_factor(block[PAGE * D + row]) : 1;
                    const uint4 v = PackedFp8::run(raw, 0, 0);
                    *(uint4*)(to + at) = {pack(low(v.x) * factor, high(v.x) * factor),
                                          pack(low(v.y) * factor, high(v.y) * factor),
                                          pack(low(v.z) * factor, high(v.z) * factor),
                                          pack(low(v.w) * factor, high(v.w) * factor)};
                };
                widen(to_keys, keys), widen(to_values, values);
            }
        }
        __syncthreads();
    }
}
inline size_t widened_numbers(const Config& c, size_t pages) { return 2 * pages * c.K * PAGE * c.D; }
// Where the widened keys are; the values are behind them.
inline bf16* widen_pages_gpu(Context& ctx, bf16* keys, bf16* values, const Batch& b, int first, int K, int D) {
    bf16* const widened = ctx.gpu->widened;
    const dim3 grid((unsigned)K, (unsigned)std::max(1, 8 * ctx.gpu->sms / K));
    launch(ctx, D == 128 ? widen_pages_kernel<128> : widen_pages_kernel<64>, grid, 256, 0, widened,
           widened + ctx.gpu->widened_numbers / 2, keys, values, b, first, K);
    return widened;
}

inline void attend_gpu(Context& ctx, bf16* out, float* lse, bf16* q, bf16* keys, bf16* values, const bf16* qkv,
                       const bf16* q_weight, const bf16* k_weight, const float* rope, const Batch& b, int H, int K,
                       int D, float eps) {
    const int singles = ctx.invariant || lse ? 0 : b.singles; // attention_decode_kernel has no lse
    if (singles) {
        const DecodeArgs p = {out, keys, values, qkv, q_weight, k_weight, rope, b, H, K, eps,
                              ctx.gpu->attention, ctx.gpu->attention_arrived};
        attention_decode_gpu(ctx, p, singles, D);
    }
    if (singles == b.N) return;
    qknorm_rope_kv_gpu(ctx, q, keys, values, qkv, q_weight, k_weight, rope, b, H, K, D, eps, singles);
    if (b.fp8) {
        keys = widen_pages_gpu(ctx, keys, values, b, singles, K, D);
        values = keys + ctx.gpu->widened_numbers / 2;
    }
    attention_gpu(ctx, out, lse, q, keys, values, b, H, K, D, singles);
}

// ---- Scratch: of products, and of forwards with so many rows and sequences of one token, of up to `context` tokens in
// `pages` pages. The context has a Gpu of its own from then on.
inline void plan_scratch(Context& ctx, Arena& arena) {
    ctx.gpu = std::make_shared<Gpu>(*ctx.gpu);
    ctx.gpu->partial = arena.take<float>(PARTIAL_BYTES / sizeof(float));
    ctx.gpu->arrived = arena.take<int>(MAX_TILES);
}
inline void plan_scratch(Context& ctx, Arena& arena, const Config& c, int rows, int singles, int context, int pages) {
    plan_scratch(ctx, arena);
    ctx.gpu->attention = arena.take<float>(attention_scratch(ctx, singles, (context - 1) / SPLIT + 1, c.H, c.D));
    ctx.gpu->attention_arrived = arena.take<int>((size_t)singles * c.H);
    ctx.gpu->widened_numbers = ctx.kv_fp8 ? widened_numbers(c, (size_t)pages) : 0;
    ctx.gpu->widened = arena.take<bf16>(ctx.gpu->widened_numbers);
    plan_rounded(ctx, arena, c, rows);
}
