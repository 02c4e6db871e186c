// gpu/backward/attention.h: attention_backward on any card.
#pragma once
#include "qwen3.cu"

// ---- Attention backward: Book I's `attention_backward`, and `attend_backward` where the norms' weights are not
// trained (FlashAttention-2's backward pass without its atomics)
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
    // attend_backward's: qkv (N,(H+2K)D) before norm and RoPE, whose gradient dqkv then is.
    const bf16 *qkv = nullptr, *q_weight = nullptr, *k_weight = nullptr;
    const float* rope = nullptr;
    float eps = 0;
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
template <int D> __global__ void attention_delta_kernel(float* delta, const bf16* dout, const bf16* out, size_t rows) {
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

// One past the last token that sees one of the tokens before m1, or a spare row: each of THREADS asks one token, evenly
// spaced between what is known to see one and what is known not to, until no gap is left. count(x): how many of them
// say so, for all of them.
template <int THREADS, class F>
__device__ __forceinline__ int end_of_queries(const Batch& b, int m0, int m1, F count) {
    int end = m0, past = b.N;
    while (end < past) {
        const int stride = (past - end + THREADS - 1) / THREADS, n = end + (int)threadIdx.x % THREADS * stride;
        const int seeing = count(n < past && b.seq[n] >= 0 && n - b.pos[n] < m1);
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
            copy_few_async<4>(to, p.lse + heads.place(row, n), row0 + r < rows);
            copy_few_async<4>(to + 2 * PASSING_ROWS * 4, p.b.pos + n, row0 + r < rows);
        } else copy_few_async<4>(to + PASSING_ROWS * 4, p.delta + heads.place(row, n), row0 + r < rows);
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

// A quad of lanes holds two rows in store_row's layout; g becomes the gradient of the heads `head` of tokens n before
// norm and RoPE. The rule is WarpHeadBackward's; it is linear in g, so a factor of g may follow later. Spare rows stay
// zero. All loads of both rows are issued before the first number is used.
template <int D>
__device__ __forceinline__ void through_norm_rope(const AttentionBackward& p, float (&g)[D / 8][4], const int (&n)[2],
                                                  const int (&head)[2]) {
    constexpr int J = D / 16; // g[j] and g[j + J] are of the same planes
    const int quad = threadIdx.x % 4;
    const uint32_t* w = (const uint32_t*)(head[0] < p.H ? p.q_weight : p.k_weight) + quad;
    uint32_t x[2][2 * J];
    const float4* angles[2];
    bool spare[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        const int token = min(n[h], p.b.N - 1), pos = p.b.pos[token];
        const uint32_t* row = (const uint32_t*)(p.qkv + ((size_t)token * (p.H + 2 * p.K) + head[h]) * D) + quad;
        spare[h] = p.b.seq[token] < 0;
        angles[h] = (const float4*)(p.rope + (size_t)(spare[h] ? 0 : pos) * D) + quad;
        #pragma unroll
        for (int j = 0; j < 2 * J; j++) x[h][j] = row[j * 4];
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        float squares = 0, mixed = 0;
        #pragma unroll
        for (int j = 0; j < J; j++) {
            const float4 angle = angles[h][j * 4]; // cosine and sine of one plane, and of the next
            const uint32_t xu = x[h][j], xv = x[h][j + J], wu = w[j * 4], wv = w[(j + J) * 4];
            const auto turn = [](float& u, float& v, float cosine, float sine) {
                const float a = u;
                u = a * cosine + v * sine, v = v * cosine - a * sine;
            };
            float *u = &g[j][2 * h], *v = &g[j + J][2 * h];
            turn(u[0], v[0], angle.x, angle.y), turn(u[1], v[1], angle.z, angle.w);
            squares += low(xu) * low(xu) + low(xv) * low(xv) + high(xu) * high(xu) + high(xv) * high(xv);
            mixed += low(xu) * low(wu) * u[0] + low(xv) * low(wv) * v[0];
            mixed += high(xu) * high(wu) * u[1] + high(xv) * high(wv) * v[1];
        }
        const float r = 1 / sqrtf(quad_sum(squares) / D + p.eps), mean = quad_sum(mixed) * r * r * r / D;
        #pragma unroll
        for (int j = 0; j < 2 * J; j++) {
            float* y = &g[j][2 * h];
            y[0] = spare[h] ? 0 : r * low(w[j * 4]) * y[0] - low(x[h][j]) * mean;
            y[1] = spare[h] ? 0 : r * high(w[j * 4]) * y[1] - high(x[h][j]) * mean;
        }
    }
}

// Stores the gradients of this warp's keys and values from `first` on. Spare rows met no query: theirs are zeros.
template <int D>
__device__ __forceinline__ void store_key_value_gradients(const AttentionBackward& p, float (&dk)[1][D / 8][4],
                                                          const float (&dv)[1][D / 8][4], int first, int m1, int kv,
                                                          float scale) {
    if (p.qkv) through_norm_rope<D>(p, dk[0], {first + score_row(0, 0), first + score_row(0, 2)}, {p.H + kv, p.H + kv});
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
    const int m0 = tile * GRADIENT_KEYS, m1 = min(m0 + GRADIENT_KEYS, p.b.N);
    const int end = end_of_queries<128>(p.b, m0, m1, [](bool sees) { return __syncthreads_count(sees); });
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

// Stores the gradients of this warp's queries from first_row on. Spare rows are zeros, as their q and dout were.
template <int D, int I>
__device__ __forceinline__ void store_query_gradients(const AttentionBackward& p, const HeadQueries& heads,
                                                      float (&dq)[I][D / 8][4], int first_row, float scale) {
    #pragma unroll
    for (int i = 0; i < I; i++) {
        int n[2], head[2];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = first_row + score_row(i, 2 * h), G = heads.G;
            n[h] = heads.token(r), head[h] = heads.kv * G + r - n[h] * G;
        }
        if (p.qkv) through_norm_rope<D>(p, dq[i], n, head);
        #pragma unroll
        for (int h = 0; h < 2; h++)
            if (n[h] < p.b.N) store_row(p.dqkv + ((size_t)n[h] * (p.H + 2 * p.K) + head[h]) * D, dq[i], h, scale);
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
