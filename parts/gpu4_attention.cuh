// ============================================================================================== 11 Attention on a GPU
// Three kernels for Book I's `attention`: attention_kernel for prompts (and training's forward),
// attention_decode_kernel for sequences of one new token (with qknorm_rope_kv in it: all of `attend`),
// attention_backward_kernel. Where there are too few blocks for the GPU, the keys of a row are split: each block leaves
// a part (the largest score, the sum of weights, the weighted sum of values), and parts are joined in order. G = H / K
// query heads share a KV head.

// ---- What they share: tiles, products of tiles, sums over the lanes of a row, parts
// A tile in shared memory has rows of D numbers in chunks of 16 bytes; chunk c of row r lies at c ^ (r % 8), so that
// the eight rows that an ldmatrix reads at a time are in different banks. A tile begins at a multiple of 128 bytes.
template <int D> struct HeadTile {
    static constexpr int ROW = D * 2, CHUNKS = D / 8; // bytes and chunks of a row
    __device__ static int at(int row, int chunk) { return row * ROW + ((chunk ^ row % 8) << 4); }
};
// What a thread of 128 copies of a tile: one chunk of every STEPth row.
template <int D> struct HeadRows {
    static constexpr int THREADS = 128, STEP = THREADS / HeadTile<D>::CHUNKS;
    const int row = threadIdx.x / HeadTile<D>::CHUNKS, chunk = threadIdx.x % HeadTile<D>::CHUNKS;
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

// Where this lane's numbers of such an s are: row of s[i][.][e], column of s[.][j][e].
__device__ __forceinline__ int score_row(int i, int e) { return i * 16 + e / 2 * 8 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int score_column(int j, int e) { return j * 8 + threadIdx.x % 4 * 2 + e % 2; }
// f(number, i, j, e) for each of them.
template <int I, int J, class F> __device__ __forceinline__ void each_score(float (&s)[I][J][4], F f) {
    #pragma unroll
    for (int i = 0; i < I; i++)
        #pragma unroll
        for (int j = 0; j < J; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) f(s[i][j][e], i, j, e);
}
// What this lane has of one of the two rows in x = s[i], lane / 4 (h = 0) or lane / 4 + 8 (1), times `by`, to `row`.
template <int J> __device__ __forceinline__ void store_row(bf16* row, const float (&x)[J][4], int h, float by) {
    #pragma unroll
    for (int j = 0; j < J; j++)
        *(uint32_t*)(row + score_column(j, 0)) = pack(x[j][2 * h] * by, x[j][2 * h + 1] * by);
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
    __device__ explicit QueryTile(const AttentionArgs& p) : kv(blockIdx.x), G(p.H / p.K) {
        const int tokens = QUERY_ROWS / G;
        const int tile = gridDim.y - 1 - blockIdx.y; // later tokens see more keys: long blocks first
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

template <int D>
__global__ void __launch_bounds__(128, 2) attention_kernel(AttentionArgs p) {
    extern __shared__ __align__(128) uint4 tiles[]; // of queries; two stages of keys, two of values
    const QueryTile tile(p);
    wait_for_previous();
    load_queries<D>(p, tile, shared_address(tiles));
    for (int n0 = tile.begin, n1; n0 < tile.end; n0 = n1) {
        for (n1 = n0 + 1; n1 < tile.end && p.b.seq[n1] == p.b.seq[n0]; n1++) {}
        if (p.b.seq[n0] >= 0) attend_sequence<D>(p, tile, n0, n1, shared_address(tiles));
    }
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
constexpr int LEAST_KEYS = 256; // that are worth a block of their own
inline void attention_gpu(Context& ctx, bf16* out, float* lse, const bf16* q, const bf16* keys, const bf16* values,
                          const Batch& b, int H, int K, int D, int first = 0) {
    const int tokens = QUERY_ROWS / (H / K), tiles = (b.N - first + tokens - 1) / tokens, blocks = tiles * K;
    const int wanted = std::min(BLOCKS_A_SM * ctx.gpu->sms / blocks, b.longest / LEAST_KEYS);
    const int splits = ctx.invariant || lse ? 1 : std::max(1, wanted);
    const dim3 grid((unsigned)K, (unsigned)tiles, (unsigned)splits);
    const size_t shared = (size_t)(QUERY_ROWS + 4 * KEYS) * D * sizeof(bf16);
    float* partial = ctx.gpu->attention;
    launch(ctx, D == 128 ? attention_kernel<128> : attention_kernel<64>, grid, 128, shared,
           AttentionArgs{out, lse, q, keys, values, b, first, H, K, partial});
    if (splits == 1) return;
    launch(ctx, attention_sum_kernel, dim3((unsigned)((b.N - first) * H)), D, 0, out, partial, b.seq, first, H, splits);
}

// ---- Attention for sequences of one new token: Book I's `attend` (Dao et al., "Flash-Decoding", 2023)
// That is qknorm_rope_kv and attention in one. A block of 256 threads owns a split, SPLIT keys of one sequence, for G
// of the query heads of a KV head (all, or a divisor of all: 8, 5, 4, 2, 1); each of its 8 warps owns a page, whose
// keys and values it holds in registers. All but the newest token's are asked for before the kernel before has ended.
// Where a sequence has several splits, the last block to arrive joins their parts in order. The length of a split is
// fixed: a row's bits do not depend on the batch.
// Grid (splits of the batch, H / G, sequences); shared memory: DecodeShared, 38 KB at most. Bound by reading keys
// and values; with one short sequence, by latency.
static_assert(SPLIT == 8 * PAGE, "a page a warp");
constexpr int DECODE_WARPS = SPLIT / PAGE;

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
    int* arrived;                        // (singles, H / G), zero between kernels
};

template <int D, int G> struct DecodeShared {
    float q[G][D];                                          // normalised, rotated, scaled: scores are powers of 2
    float mixed[DECODE_WARPS][G][D];                        // the part of each warp's page
    float maximum[DECODE_WARPS][G], sum[DECODE_WARPS][G];
    __align__(16) bf16 new_key[D], new_value[D];            // the newest token's
};

// sum_i a[i] q[i] of 8 numbers
__device__ inline float dot8(uint4 a, const float* q) {
    const float4 u = *(const float4*)q, v = *(const float4*)(q + 4);
    return low(a.x) * u.x + high(a.x) * u.y + low(a.y) * u.z + high(a.y) * u.w +
           low(a.z) * v.x + high(a.z) * v.y + low(a.w) * v.z + high(a.w) * v.w;
}

// A page of keys and values in a warp's registers. Keys: four lanes a key, 8 keys at once, in two halves; a lane has
// chunks lane % 4, + 4, ... of key lane / 4. Values: a lane has chunk lane % LANES of every KEYS_A_LOADth key.
template <int D> struct WarpPage {
    static constexpr int LANES = D / 8, KEYS_A_LOAD = 32 / LANES, LOADS = PAGE / KEYS_A_LOAD; // of values
    const int lane = threadIdx.x % 32, value_key = lane / LANES, column = lane % LANES * 8;
    uint4 k[2][D / 32] = {}, v[LOADS] = {};

    // The first `count` keys and values of a page that begins at `keys` and `values`; the others are zeros.
    __device__ __forceinline__ void load(const bf16* keys, const bf16* values, int count) {
        #pragma unroll
        for (int half = 0; half < 2; half++)
            #pragma unroll
            for (int i = 0; i < D / 32; i++) {
                const int key = half * 8 + lane / 4;
                if (key < count) k[half][i] = *(const uint4*)(keys + key * D + (i * 4 + lane % 4) * 8);
            }
        #pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const int key = j * KEYS_A_LOAD + value_key;
            if (key < count) v[j] = *(const uint4*)(values + key * D + column);
        }
    }
    // One more, from shared memory.
    __device__ __forceinline__ void insert(const bf16* key, const bf16* value, int within) {
        #pragma unroll
        for (int half = 0; half < 2; half++)
            if (half * 8 + lane / 4 == within)
                #pragma unroll
                for (int i = 0; i < D / 32; i++) k[half][i] = *(const uint4*)(key + (i * 4 + lane % 4) * 8);
        #pragma unroll
        for (int j = 0; j < LOADS; j++)
            if (j * KEYS_A_LOAD + value_key == within) v[j] = *(const uint4*)(value + column);
    }
    // The score of key half * 8 + lane / 4, for all four lanes that hold it.
    __device__ __forceinline__ float score(const float* q, int half) const {
        float dot = 0;
        #pragma unroll
        for (int i = 0; i < D / 32; i++) dot += dot8(k[half][i], q + (i * 4 + lane % 4) * 8);
        return quad_sum(dot);
    }
};

// q of the block's heads h0 .., a warp each, to shared memory.
template <int D, int G>
__device__ __forceinline__ void rotate_queries(const DecodeArgs& p, DecodeShared<D, G>& shared, const bf16* heads,
                                               const float* angles) {
    WarpHead<D> head;
    for (int h = threadIdx.x / 32; h < G; h += DECODE_WARPS) {
        head.load(heads + (size_t)h * D);
        head.norm_rope(p.q_weight, angles, p.eps);
        const int i = threadIdx.x % 32 * head.P;
        const float scale = LOG2E / sqrtf((float)D);
        for (int e = 0; e < head.P; e++) {
            shared.q[h][i + e] = to_acc(round_bf16(head.u[e])) * scale;
            shared.q[h][i + e + D / 2] = to_acc(round_bf16(head.v[e])) * scale;
        }
    }
}

// The newest token's key (one warp) or value (another) to shared memory, and to the cache if no other block does it.
template <int D>
__device__ __forceinline__ void take_newest(const DecodeArgs& p, bf16* shared, bf16* cache, const bf16* from, bool key,
                                            const float* angles, bool writes) {
    WarpHead<D> head;
    head.load(from);
    if (key) head.norm_rope(p.k_weight, angles, p.eps);
    head.store(shared);
    if (writes) head.store(cache);
}

// This warp's part: softmax of its page's scores, of which the first `count` keys count, and the weighted sum of
// values.
template <int D, int G>
__device__ __forceinline__ void attend_page(DecodeShared<D, G>& shared, const WarpPage<D>& page, int count) {
    using P = WarpPage<D>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float s[2][G], mix[G][8] = {};
    #pragma unroll
    for (int h = 0; h < G; h++) {
        float top = -INFINITY, weights = 0;
        for (int half = 0; half < 2; half++) {
            const float score = page.score(shared.q[h], half);
            s[half][h] = half * 8 + lane / 4 < count ? score : -INFINITY;
            top = fmaxf(top, s[half][h]);
        }
        for (int other = 4; other < 32; other *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
        for (int half = 0; half < 2; half++) {
            s[half][h] = count > 0 ? exp2_fast(s[half][h] - top) : 0;
            weights += s[half][h];
        }
        for (int other = 4; other < 32; other *= 2) weights += __shfl_xor_sync(~0u, weights, other);
        if (lane == 0) shared.maximum[warp][h] = top, shared.sum[warp][h] = weights;
    }
    #pragma unroll
    for (int j = 0; j < P::LOADS; j++) {
        const uint4 v = page.v[j];
        const float values[8] = {low(v.x), high(v.x), low(v.y), high(v.y), low(v.z), high(v.z), low(v.w), high(v.w)};
        #pragma unroll
        for (int h = 0; h < G; h++) {
            const int holder = (j * P::KEYS_A_LOAD % 8 + page.value_key) * 4;
            const float weight = __shfl_sync(~0u, s[j * P::KEYS_A_LOAD / 8][h], holder);
            for (int e = 0; e < 8; e++) mix[h][e] += weight * values[e];
        }
    }
    #pragma unroll
    for (int h = 0; h < G; h++) {
        for (int e = 0; e < 8; e++)
            for (int other = P::LANES; other < 32; other *= 2) mix[h][e] += __shfl_xor_sync(~0u, mix[h][e], other);
        float* to = shared.mixed[warp][h] + page.column;
        if (page.value_key == 0) {
            *(float4*)to = make_float4(mix[h][0], mix[h][1], mix[h][2], mix[h][3]);
            *(float4*)(to + 4) = make_float4(mix[h][4], mix[h][5], mix[h][6], mix[h][7]);
        }
    }
}

// Joins the warps' parts, a thread a number: to `out`, or, where the sequence has several splits, to `parts`, of which
// each head has gridDim.x.
template <int D, int G>
__device__ __forceinline__ void join_warps(const DecodeShared<D, G>& shared, bf16* out, float* parts, int split,
                                           int splits) {
    for (int o = threadIdx.x; o < G * D; o += blockDim.x) {
        const int h = o / D, d = o % D;
        const AttentionPart all = join_parts(DECODE_WARPS, [&](int w) {
            return AttentionPart{shared.maximum[w][h], shared.sum[w][h], shared.mixed[w][h][d]};
        });
        if (splits == 1) out[o] = round_bf16(all.value / all.weights);
        else {
            float* part = parts + ((size_t)h * gridDim.x + split) * (D + 2);
            part[d] = all.value;
            if (d == 0) part[D] = all.top, part[D + 1] = all.weights;
        }
    }
}

template <int D, int G>
__global__ void __launch_bounds__(256, G <= 4 ? 2 : 1) attention_decode_kernel(DecodeArgs p) {
    __shared__ __align__(16) DecodeShared<D, G> shared;
    // What is read before the wait no kernel of this forward writes: positions, sequences and pages are the batch's,
    // older keys and values an earlier forward's (see launch_kernel).
    const Batch& b = p.b;
    const int split = blockIdx.x, h0 = blockIdx.y * G, n = blockIdx.z, kv = h0 / (p.H / p.K), warp = threadIdx.x / 32;
    const int seq = b.seq[n], pos = b.pos[n], splits = pos / SPLIT + 1;
    if (seq >= 0 && splits > (int)gridDim.x) __trap(); // keys that no block owns: an error, not a row of nothing
    if (seq < 0 || split >= splits) {
        let_next_start();
        wait_for_previous();
        return;
    }
    const int page = split * DECODE_WARPS + warp, first = page * PAGE; // this warp's page and its first position
    const bool held = first <= pos;
    const size_t at = held ? kv_offset(b.pages[(size_t)seq * b.max_pages + page], kv, 0, p.K, D) : 0;
    WarpPage<D> keys;
    keys.load(p.keys + at, p.values + at, pos - first);
    let_next_start();
    wait_for_previous();

    const bf16* row = p.qkv + (size_t)n * (p.H + 2 * p.K) * D;
    const float* angles = p.rope + (size_t)pos * D;
    rotate_queries(p, shared, row + (size_t)h0 * D, angles);
    if (split == splits - 1 && warp >= DECODE_WARPS - 2) {
        const bool key = warp == DECODE_WARPS - 2, writes = h0 % (p.H / p.K) == 0;
        const size_t to = kv_offset(b.slot[n] / PAGE, kv, b.slot[n] % PAGE, p.K, D);
        take_newest<D>(p, key ? shared.new_key : shared.new_value, (key ? p.keys : p.values) + to,
                       row + (size_t)(p.H + (key ? 0 : p.K) + kv) * D, key, angles, writes);
    }
    __syncthreads();
    if (page == pos / PAGE) keys.insert(shared.new_key, shared.new_value, pos % PAGE);
    attend_page(shared, keys, pos - first + 1);
    __syncthreads();
    bf16* out = p.out + ((size_t)n * p.H + h0) * D;
    float* parts = p.partial + ((size_t)n * p.H + h0) * gridDim.x * (D + 2);
    join_warps(shared, out, parts, split, splits);
    if (splits == 1 || !last_to_arrive(p.arrived + (size_t)n * gridDim.y + blockIdx.y, splits)) return;
    for (int o = threadIdx.x; o < G * D; o += blockDim.x)
        out[o] = round_bf16(join_splits(parts + (size_t)(o / D) * gridDim.x * (D + 2), splits, D, o % D));
}

// Numbers of scratch that attention needs: for so many sequences of one token, or for any others.
inline size_t attention_scratch(const Context& ctx, int singles, int splits, int H, int D) {
    return std::max((size_t)singles * H * splits, (size_t)BLOCKS_A_SM * ctx.gpu->sms * QUERY_ROWS) * (D + 2);
}

// b.splits must be enough for the largest position. Positions are in the GPU's memory: the kernel itself sees to it.
inline void attention_decode_gpu(Context& ctx, const DecodeArgs& p, int singles, int D) {
    if (p.b.splits < 1) DIE("attention_decode: %d splits; positions need one for each %d keys", p.b.splits, SPLIT);
    const int G = p.H / p.K;
    const int heads = G % 8 == 0 ? 8 : G % 5 == 0 ? 5 : G % 4 == 0 ? 4 : G % 2 == 0 ? 2 : 1; // of a block
#define DECODE(D) {attention_decode_kernel<D, 1>, attention_decode_kernel<D, 2>, attention_decode_kernel<D, 4>, \
                   attention_decode_kernel<D, 5>, attention_decode_kernel<D, 8>}
    static void (*const kernels[2][5])(DecodeArgs) = {DECODE(64), DECODE(128)};
#undef DECODE
    const int instance = heads == 8 ? 4 : heads == 5 ? 3 : heads == 4 ? 2 : heads - 1;
    const dim3 grid((unsigned)p.b.splits, (unsigned)(p.H / heads), (unsigned)singles);
    launch(ctx, kernels[D == 128][instance], grid, 256, 0, p);
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
    attention_gpu(ctx, out, lse, q, keys, values, b, H, K, D, singles);
}

// ---- Attention backward: Book I's `attention_backward` (FlashAttention-2's backward pass without its atomics)
// The probabilities are computed twice: once where dk and dv of some keys are summed over all queries, once where dq
// of some queries is summed over all keys. So a number has one block that sums it, in one order; seven products of
// tiles instead of five. With s = q . k / sqrt(D), p = e^(s - lse) and ds = p (dout . v - delta):
//     dv_m = sum_n p dout_n      dk_m = sum_n ds q_n / sqrt(D)      dq_n = sum_m ds k_m / sqrt(D)
// The query rows of a KV head are numbered through: row r is head r % G of token r / G. The keys that token n sees are
// rows n - pos[n] .. n of the batch; tiles may lie across the borders of sequences, since that is all that a mask
// needs. A warp skips tiles in which its keys and queries do not meet.
struct AttentionBackward {
    bf16* dqkv;                // (N,(H+2K)D) out
    const bf16 *dout, *q;      // (N,HD)
    const bf16 *keys, *values; // one layer's cache
    const float *lse, *delta;  // (N,H)
    Batch b;
    int H, K;
};
constexpr int GRADIENT_KEYS = 64;  // that a block sums dk and dv of
constexpr int PASSING_ROWS = 64;   // query rows that pass by them at a time
constexpr int GRADIENT_ROWS = 128; // query rows that a block sums dq of
constexpr int PASSING_KEYS = 32;   // keys that pass by them at a time
// Shared memory of either block: keys, values, two stages of q and two of dout, 64 rows each; or q and dout, 128 rows
// each, two stages of keys and two of values, 32 rows each. And lse, delta and position of 128 rows: 97.5 KB for D =
// 128.
constexpr size_t backward_shared(int D) { return (size_t)6 * 64 * D * sizeof(bf16) + 3 * 128 * 4; }

// delta[n][h] = dout[n][h] . out[n][h]: D / 8 lanes a row, 8 numbers a lane; blocks of 256. Bound by memory.
template <int D>
__global__ void attention_delta_kernel(float* delta, const bf16* dout, const bf16* out, size_t rows) {
    let_next_start();
    wait_for_previous();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / (D / 8);
    float sum = 0;
    if (row < rows) {
        const uint4 a = *(const uint4*)(dout + i * 8), b = *(const uint4*)(out + i * 8);
        sum = low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y) +
              low(a.z) * low(b.z) + high(a.z) * high(b.z) + low(a.w) * low(b.w) + high(a.w) * high(b.w);
    }
    #pragma unroll
    for (int lane = D / 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (row < rows && i % (D / 8) == 0) delta[row] = sum;
}

// The query rows of a KV head.
struct HeadQueries {
    int H, G, kv;
    uint32_t inverse; // 2^31 / G, rounded up
    __device__ HeadQueries(const AttentionBackward& p, int kv)
        : H(p.H), G(p.H / p.K), kv(kv), inverse((0x80000000u + G - 1) / G) {}
    // r / G, exact as long as r * G < 2^31.
    __device__ int token(int r) const { return (int)__umulhi(2 * (uint32_t)r, inverse); }
    // Row r of q and dout, of lse and delta: n H + kv G + r % G, for n = token(r).
    __device__ int place(int r, int n) const { return r + n * (H - G) + kv * G; }
};

// s, scores, become probabilities: 2^(s scale log2(e) - lse log2(e)). lse_of(i, j, e) is that of the number's query
// row.
template <int I, int J, class F>
__device__ __forceinline__ void probabilities(float (&s)[I][J][4], float scale, F lse_of) {
    each_score(s, [&](float& x, int i, int j, int e) {
        x = exp2_fast(fmaf(x, scale * LOG2E, -lse_of(i, j, e) * LOG2E));
    });
}

// ---- dk and dv. A block owns 64 keys of a KV head, a warp 16 of them, with the sums of dk and dv in registers; all
// query rows that see one of the keys pass by, 64 at a time, of all G heads. Scores are computed as keys times queries,
// so that they lie as the weights of the two sums want them.

// One past the last token that sees one of the tokens before m1, or a spare row: every thread asks one token, evenly
// spaced between what is known to see one and what is known not to, until no gap is left.
__device__ __forceinline__ int end_of_queries(const Batch& b, int m0, int m1) {
    constexpr int THREADS = 128;
    int end = m0, past = b.N;
    while (end < past) {
        const int stride = (past - end + THREADS - 1) / THREADS, n = end + threadIdx.x * stride;
        const int seeing = __syncthreads_count(n < past && b.seq[n] >= 0 && n - b.pos[n] < m1);
        past = min(past, end + seeing * stride);
        if (seeing) end += (seeing - 1) * stride + 1;
    }
    return end;
}

// Query rows, up to `rows`, pass through two stages of shared memory, with dout, lse, delta and position.
template <int D> struct PassingQueries {
    static constexpr int TILE = PASSING_ROWS * HeadTile<D>::ROW;
    const AttentionBackward& p;
    const HeadQueries heads;
    int rows;
    uint32_t q_tiles, dout_tiles;
    float* numbers; // of each stage 64 lse, 64 delta, 64 positions
    HeadRows<D> mine;

    __device__ __forceinline__ const float* lse(int stage) const { return numbers + stage * 3 * PASSING_ROWS; }
    __device__ __forceinline__ const float* delta(int stage) const { return lse(stage) + PASSING_ROWS; }
    __device__ __forceinline__ const int* pos(int stage) const { return (const int*)(lse(stage) + 2 * PASSING_ROWS); }
    __device__ __forceinline__ void copy(int stage, int row0) const {
        const int last = max(rows, 1) - 1;
        #pragma unroll
        for (int i = 0; i < PASSING_ROWS / mine.STEP; i++) {
            const int r = mine.row + i * mine.STEP, row = min(row0 + r, last);
            const int to = stage * TILE + HeadTile<D>::at(r, mine.chunk);
            const size_t at = (size_t)heads.place(row, heads.token(row)) * D + mine.chunk * 8;
            copy_async(q_tiles + to, p.q + at, row0 + r < rows);
            copy_async(dout_tiles + to, p.dout + at, row0 + r < rows);
        }
        const int r = threadIdx.x % PASSING_ROWS, row = min(row0 + r, last), n = heads.token(row);
        const uint32_t to = shared_address(lse(stage) + r);
        if (threadIdx.x < PASSING_ROWS) {
            copy_async_4(to, p.lse + heads.place(row, n), row0 + r < rows);
            copy_async_4(to + 2 * PASSING_ROWS * 4, p.b.pos + n, row0 + r < rows);
        } else copy_async_4(to + PASSING_ROWS * 4, p.delta + heads.place(row, n), row0 + r < rows);
        commit_copies();
    }
};

// The keys and values of tokens m0 .., of which those from `end` on are zeros, to tiles.
template <int D>
__device__ __forceinline__ void load_keys(const AttentionBackward& p, int m0, int end, int kv, uint32_t k_tile,
                                          uint32_t v_tile) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < GRADIENT_KEYS; r += mine.STEP) {
        const bool there = m0 + r < end;
        const int slot = there ? p.b.slot[m0 + r] : 0, to = HeadTile<D>::at(r, mine.chunk);
        const size_t at = kv_offset(slot / PAGE, kv, slot % PAGE, p.K, D) + mine.chunk * 8;
        copy_async(k_tile + to, p.keys + at, there);
        copy_async(v_tile + to, p.values + at, there);
    }
}

// Of this warp's keys first ..; spare rows met no query: zeros.
template <int D>
__device__ __forceinline__ void store_key_value_gradients(const AttentionBackward& p, const float (&dk)[1][D / 8][4],
                                                          const float (&dv)[1][D / 8][4], int first, int m1, int kv,
                                                          float scale) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int m = first + score_row(0, 2 * h);
        if (m >= m1) continue;
        bf16* to = p.dqkv + ((size_t)m * (p.H + 2 * p.K) + p.H + kv) * D;
        store_row(to, dk[0], h, scale);
        store_row(to + p.K * D, dv[0], h, 1);
    }
}

template <int D>
__device__ __forceinline__ void key_value_gradients(const AttentionBackward& p, int tile, int kv, uint4* tiles) {
    constexpr int ROW = HeadTile<D>::ROW, TILE = 64 * ROW, J = PASSING_ROWS / 16;
    static_assert(GRADIENT_KEYS == 64 && PASSING_ROWS == 64, "one size of tile; 16 keys a warp");
    const uint32_t k_tile = shared_address(tiles), v_tile = k_tile + TILE, own = threadIdx.x / 32 * 16 * ROW;
    const int m0 = tile * GRADIENT_KEYS, m1 = min(m0 + GRADIENT_KEYS, p.b.N), end = end_of_queries(p.b, m0, m1);
    const HeadQueries heads(p, kv);
    const int rows = end * heads.G, first = m0 + threadIdx.x / 32 * 16, last = first + 15; // this warp's keys
    float* numbers = (float*)((char*)tiles + 6 * TILE);
    const PassingQueries<D> queries = {p, heads, rows, v_tile + TILE, v_tile + 3 * TILE, numbers};
    const float scale = 1 / sqrtf((float)D);
    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    load_keys<D>(p, m0, min(m1, end), kv, k_tile, v_tile);
    queries.copy(0, m0 * heads.G);
    for (int row0 = m0 * heads.G, stage = 0; row0 < rows; row0 += PASSING_ROWS, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        queries.copy(stage ^ 1, row0 + PASSING_ROWS);
        const uint32_t q_tile = queries.q_tiles + stage * TILE, dout_tile = queries.dout_tiles + stage * TILE;
        const float *lse = queries.lse(stage), *delta = queries.delta(stage);
        const int *pos = queries.pos(stage), last_row = min(PASSING_ROWS, rows - row0) - 1;
        const int oldest = heads.token(row0), newest = heads.token(row0 + last_row);
        if (first > newest || last < oldest - pos[0]) continue;
        float s[1][2 * J][4] = {}, ds[1][2 * J][4];
        multiply_rows<D, 1, J>(s, k_tile + own, q_tile);
        probabilities(s, scale, [&](int, int j, int e) { return lse[score_column(j, e)]; });
        if (last > oldest || first < newest - pos[last_row])
            each_score(s, [&](float& x, int, int j, int e) {
                const int r = score_column(j, e), n = heads.token(row0 + r), m = first + score_row(0, e);
                if ((uint32_t)(n - m) > (uint32_t)pos[r]) x = 0;
            });
        add_weighted_rows<D, 1, J>(dv, s, dout_tile);
        each_score(ds, [&](float& x, int, int j, int e) { x = -delta[score_column(j, e)]; });
        multiply_rows<D, 1, J>(ds, v_tile + own, dout_tile);
        each_score(ds, [&](float& x, int i, int j, int e) { x *= s[i][j][e]; });
        add_weighted_rows<D, 1, J>(dk, ds, q_tile);
    }
    wait_for_copies<0>();
    store_key_value_gradients<D>(p, dk, dv, first, m1, kv, scale);
}

// ---- dq. A block owns 128 query rows of a KV head, a warp 32 of them, with the sums of dq in registers; the keys they
// see pass by, 32 at a time.

// Rows row0 .., of which those from `rows` on are zeros: q and dout to tiles; lse, delta and position, a thread a row.
template <int D>
__device__ __forceinline__ void load_query_rows(const AttentionBackward& p, const HeadQueries& heads, int row0,
                                                int rows, uint32_t q_tile, uint32_t dout_tile, float* lse,
                                                float* delta, int* pos) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < GRADIENT_ROWS; r += mine.STEP) {
        const bool there = row0 + r < rows;
        const int to = HeadTile<D>::at(r, mine.chunk), row = row0 + r;
        const size_t at = there ? (size_t)heads.place(row, heads.token(row)) * D + mine.chunk * 8 : 0;
        copy_async(q_tile + to, p.q + at, there);
        copy_async(dout_tile + to, p.dout + at, there);
    }
    const int t = threadIdx.x, row = row0 + t, n = heads.token(row), at = heads.place(row, n);
    const bool there = row < rows;
    lse[t] = there ? p.lse[at] : 0, delta[t] = there ? p.delta[at] : 0, pos[t] = there ? p.b.pos[n] : 0;
}

// Keys and values of the batch's tokens up to `end` pass through two stages of shared memory. Their slots are read a
// tile ahead of the copies that need them.
template <int D> struct PassingKeys {
    static constexpr int TILE = PASSING_KEYS * HeadTile<D>::ROW, COUNT = PASSING_KEYS / HeadRows<D>::STEP;
    const AttentionBackward& p;
    int kv, end;
    uint32_t k_tiles, v_tiles;
    HeadRows<D> mine;
    int slot[COUNT];
    __device__ __forceinline__ void next_slots(int key0) {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int m = key0 + mine.row + i * mine.STEP;
            slot[i] = m < end ? p.b.slot[m] : 0;
        }
    }
    __device__ __forceinline__ void copy(int stage, int key0) const {
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int r = mine.row + i * mine.STEP, to = stage * TILE + HeadTile<D>::at(r, mine.chunk);
            const size_t at = kv_offset(slot[i] / PAGE, kv, slot[i] % PAGE, p.K, D) + mine.chunk * 8;
            copy_async(k_tiles + to, p.keys + at, key0 + r < end);
            copy_async(v_tiles + to, p.values + at, key0 + r < end);
        }
        commit_copies();
    }
};

// Of this warp's rows first_row ..; spare rows are zeros: so were their q and dout.
template <int D>
__device__ __forceinline__ void store_query_gradients(const AttentionBackward& p, const HeadQueries& heads,
                                                      const float (&dq)[2][D / 8][4], int first_row, float scale) {
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = first_row + score_row(i, 2 * h), n = heads.token(r), G = heads.G;
            const int head = heads.kv * G + r - n * G;
            if (n < p.b.N) store_row(p.dqkv + ((size_t)n * (p.H + 2 * p.K) + head) * D, dq[i], h, scale);
        }
}

template <int D>
__device__ __forceinline__ void query_gradients(const AttentionBackward& p, int tile, int kv, uint4* tiles) {
    constexpr int ROW = HeadTile<D>::ROW, J = PASSING_KEYS / 16;
    static_assert(GRADIENT_ROWS == 128, "32 rows a warp; a thread asks for a row");
    const uint32_t q_tile = shared_address(tiles), dout_tile = q_tile + GRADIENT_ROWS * ROW;
    const uint32_t k_tiles = dout_tile + GRADIENT_ROWS * ROW, v_tiles = k_tiles + 2 * PASSING_KEYS * ROW;
    float *lse = (float*)((char*)tiles + (2 * GRADIENT_ROWS + 4 * PASSING_KEYS) * ROW), *delta = lse + GRADIENT_ROWS;
    int* pos = (int*)(delta + GRADIENT_ROWS);
    const Batch& b = p.b;
    const HeadQueries heads(p, kv);
    const int row0 = tile * GRADIENT_ROWS, n0 = heads.token(row0);
    const int n1 = heads.token(min(row0 + GRADIENT_ROWS, b.N * heads.G) - 1), n = n0 + threadIdx.x;
    const int end = n0 + __syncthreads_count(n <= n1 && b.seq[n] >= 0), rows = end * heads.G; // what follows is spare
    load_query_rows<D>(p, heads, row0, rows, q_tile, dout_tile, lse, delta, pos);
    // This warp's tokens, and where the sequences of the first and of the last of them begin.
    const int own = threadIdx.x / 32 * 32, first_row = row0 + own;
    const int oldest = heads.token(first_row), newest = heads.token(min(first_row + 32, rows) - 1);
    const bool some = first_row < rows;
    const int oldest_first = some ? oldest - b.pos[oldest] : b.N, newest_first = some ? newest - b.pos[newest] : b.N;
    const float scale = 1 / sqrtf((float)D);
    const int key_begin = end > n0 ? n0 - b.pos[n0] : end;
    PassingKeys<D> keys = {p, kv, end, k_tiles, v_tiles};
    float dq[2][D / 8][4] = {};
    keys.next_slots(key_begin);
    keys.copy(0, key_begin);
    keys.next_slots(key_begin + PASSING_KEYS);
    for (int key0 = key_begin, stage = 0; key0 < end; key0 += PASSING_KEYS, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        keys.copy(stage ^ 1, key0 + PASSING_KEYS);
        keys.next_slots(key0 + 2 * PASSING_KEYS);
        if (key0 > newest || key0 + PASSING_KEYS <= oldest_first) continue;
        const uint32_t k_tile = k_tiles + stage * keys.TILE, v_tile = v_tiles + stage * keys.TILE;
        float s[2][2 * J][4] = {}, ds[2][2 * J][4];
        multiply_rows<D, 2, J>(s, q_tile + own * ROW, k_tile);
        probabilities(s, scale, [&](int i, int, int e) { return lse[own + score_row(i, e)]; });
        if (key0 + PASSING_KEYS > oldest + 1 || key0 < newest_first)
            each_score(s, [&](float& x, int i, int j, int e) {
                const int r = own + score_row(i, e), n = heads.token(row0 + r), m = key0 + score_column(j, e);
                if ((uint32_t)(n - m) > (uint32_t)pos[r]) x = 0;
            });
        each_score(ds, [&](float& x, int i, int, int e) { x = -delta[own + score_row(i, e)]; });
        multiply_rows<D, 2, J>(ds, dout_tile + own * ROW, v_tile);
        each_score(ds, [&](float& x, int i, int j, int e) { x *= s[i][j][e]; });
        add_weighted_rows<D, 2, J>(dq, ds, k_tile);
    }
    wait_for_copies<0>();
    store_query_gradients<D>(p, heads, dq, first_row, scale);
}

// Both in one launch, so that neither waits for the other's last blocks: grid (K, tiles of keys + tiles of rows), 128
// threads, two blocks a multiprocessor; bound by the tensor cores and by registers (for D = 128 all 255). Early keys
// are seen by many queries, late queries see many keys: of one sequence, long blocks come first.
template <int D>
__global__ void __launch_bounds__(128, 2) attention_backward_kernel(AttentionBackward p, int key_tiles) {
    extern __shared__ __align__(128) uint4 tiles[];
    wait_for_previous();
    if ((int)blockIdx.y < key_tiles) key_value_gradients<D>(p, blockIdx.y, blockIdx.x, tiles);
    else query_gradients<D>(p, gridDim.y - 1 - blockIdx.y, blockIdx.x, tiles);
}
inline void attention_backward_gpu(Context& ctx, bf16* dqkv, const bf16* dout, const bf16* q, const bf16* keys,
                                   const bf16* values, const bf16* out, const float* lse, const Batch& b, int H, int K,
                                   int D, float* delta) {
    const int64_t rows = (int64_t)b.N * (H / K), key_tiles = (b.N + GRADIENT_KEYS - 1) / GRADIENT_KEYS;
    const int64_t tiles = key_tiles + (rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
    if (rows * H >= (int64_t)1 << 31 || tiles > 65535)
        DIE("attention_backward: a batch of %d tokens is too large for %d query heads", b.N, H);
    const size_t heads = (size_t)b.N * H;
    launch(ctx, D == 128 ? attention_delta_kernel<128> : attention_delta_kernel<64>,
           (unsigned)((heads * (D / 8) + 255) / 256), 256, 0, delta, dout, out, heads);
    launch(ctx, D == 128 ? attention_backward_kernel<128> : attention_backward_kernel<64>,
           dim3((unsigned)K, (unsigned)tiles), 128, backward_shared(D),
           AttentionBackward{dqkv, dout, q, keys, values, lse, delta, b, H, K}, (int)key_tiles);
}
