// attention.cu: causal attention with grouped heads, from three passes over a matrix of scores to the kernel of
// qwen3.cu; one token against a long context; the gradients.   (lab/lab.h says how to run it)
//
// out = softmax(q k^T / sqrt(D)) v for each head, where token n sees keys 0 .. n. q and out are (T,H,D), k and v
// (T,K,D), bf16, D = 128; G = H / K query heads share a KV head. --size TxHxK. The gradients need lse, the logarithm of
// a row's sum of exponentials.
//
// Its bound: two products of T x T x D a head. Half of the square is masked, so there are 2 T T D H flops, and
// 2 (2 H + 2 K) T D bytes. At 4,096 tokens, 16 heads and 8 KV heads that is 69 GFLOP and 50 MB: 1,366 flops a byte,
// for the tensor cores. But T x T scores are 268 million numbers for the 16 heads: each more than once to memory and
// back, and memory is all there is. So the scores must stay where they are made. "Predicted" is arithmetic for an H100
// (132 multiprocessors at 1.755 GHz, 3.35 TB/s, 989 TFLOP/s by the data sheet). On an RTX 4090 (165 TFLOP/s) step 6 is
// the last of a prompt: its tensor cores are slow beside the exponentials, as they are not on an H100, so expect a
// larger share, some 110 TFLOP/s; and 90% of 950 GB/s at step 5.
#ifdef LAB_QWEN3 // `make lab` by nvcc: two steps are the program's own kernels
#include "model/device.h"
#include "qwen3.cu"
#endif
#include "lab/ptx.h"

namespace lab::attention {

constexpr int D = 128;
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;
constexpr float SCALE = 0.0883883476f * LOG2E; // 1 / sqrt(D), for powers of two instead of e

#ifdef LAB_QWEN3
// The layout of the program's kernels: keys and values in pages of 16 tokens, here in order, and a batch of one
// sequence.
struct Paged {
    Array<bf16> k, v;
    Array<int> pos, seq, slot, table;
    Array<float> scratch;
    Batch b;
    static std::vector<bf16> pages(const std::vector<bf16>& from, int T, int K) {
        std::vector<bf16> to((size_t)blocks_for(T, PAGE) * PAGE * K * D, bf16(0.f));
        for (int n = 0; n < T; n++)
            for (int kv = 0; kv < K; kv++)
                memcpy(&to[kv_offset(n / PAGE, kv, n % PAGE, K, D)], &from[((size_t)n * K + kv) * D], D * sizeof(bf16));
        return to;
    }
    static std::vector<int> numbers(int n, int step) {
        std::vector<int> v(n);
        for (int i = 0; i < n; i++) v[i] = i * step;
        return v;
    }
    static Context& gpu() {
        static Array<int> arrived{numbers(MAX_TILES, 0)}, arrived_too{numbers(MAX_TILES, 0)};
        static Context ctx = [] {
            Context c = open_gpu(0);
            c.gpu->stream = stream, c.gpu->arrived = arrived, c.gpu->attention_arrived = arrived_too;
            return c;
        }();
        return ctx;
    }
    Paged(const std::vector<bf16>& keys, const std::vector<bf16>& values, int T, int H, int K)
        : k(pages(keys, T, K)), v(pages(values, T, K)), pos(numbers(T, 1)), seq(numbers(T, 0)), slot(numbers(T, 1)),
          table(numbers(blocks_for(T, PAGE), 1)), scratch(attention_scratch(gpu(), 0, 0, H, D)),
          b{T, 1, pos, pos, seq, slot, table, (int)table.n, 0, 1, T} {}
    Context& context() {
        gpu().gpu->attention = scratch;
        return gpu();
    }
    static const ::bf16* at(const bf16* p) { return (const ::bf16*)p; }
    LayerCache<::bf16> cache() { return {(::bf16*)k.p, (::bf16*)v.p}; }
};
#endif

// ---- What is computed, and how it is checked
struct Args {
    const bf16 *q, *k, *v;
    bf16* out;
    float* lse; // (T,H)
    int T, H, K;
    // The query rows of a KV head, numbered through: row r is head r % G of token r / G. Tiles of them use a key for
    // all G heads.
    __device__ int rows() const { return T * (H / K); }
    __device__ int token(int r) const { return r / (H / K); }
    __device__ size_t place(int r, int kv) const { return (size_t)token(r) * H + kv * (H / K) + r % (H / K); }
};
inline std::vector<bf16> stored(const std::vector<float>& v) {
    std::vector<bf16> w(v.size());
    for (size_t i = 0; i < v.size(); i++) w[i] = __float2bfloat16(v[i]);
    return w;
}
inline double dot(const float* a, const float* b) {
    double sum = 0;
    for (int d = 0; d < D; d++) sum += (double)a[d] * b[d];
    return sum;
}
struct Tokens : Problem {
    int T, K, H;
    std::vector<float> q, k, v; // as bf16 has them; q is larger, so that some keys matter more than others
    std::vector<int> checked;   // tokens: of few all, of many 48
    Array<bf16> Q, KEYS, V, out;
#ifdef LAB_QWEN3
    std::unique_ptr<Paged> pages;
    Paged& paged() {
        if (!pages) pages = std::make_unique<Paged>(stored(k), stored(v), T, H, K);
        return *pages;
    }
#endif
    Tokens(int T, int queries, Shape s)
        : T(T), K(s.z), H((std::max(s.y, K) + K - 1) / K * K), q(random_numbers((size_t)queries * H * D, 1)),
          k(random_numbers((size_t)T * K * D, 2)), v(random_numbers(k.size(), 3)), Q(stored(times4())), KEYS(stored(k)),
          V(stored(v)), out(q.size()) {
        for (int i = 0; i < T; i++)
            if (T <= 256 || i == T - 1 || i % (T / 47) == i / (T / 47) % 47) checked.push_back(i);
    }
    const std::vector<float>& times4() {
        for (float& x : q) x *= 4;
        return q;
    }
    // out of head h for query `row` and keys up to n, in double; the result is lse.
    double attend(const float* row, int h, int n, double* to) const {
        const int kv = h / (H / K);
        std::vector<double> s(n + 1);
        double most = -INFINITY, sum = 0;
        for (int m = 0; m <= n; m++)
            s[m] = dot(row, &k[((size_t)m * K + kv) * D]) / std::sqrt((double)D), most = std::max(most, s[m]);
        for (double& x : s) sum += x = std::exp(x - most);
        for (int d = 0; d < D; d++) to[d] = 0;
        for (int m = 0; m <= n; m++)
            for (int d = 0; d < D; d++) to[d] += s[m] / sum * v[((size_t)m * K + kv) * D + d];
        return most + std::log(sum);
    }
};
// All tokens of a prompt. Values are below 1, so rounding `out` to bf16 is off by 1 / 512 at most; a weight that is
// rounded is off by 1 / 256 of itself, and so is their sum with the values: 3 / 512, and a little for float32.
struct Prompt : Tokens {
    Array<float> lse;
    std::vector<double> want, want_lse;
    std::unique_ptr<Array<float>> matrix; // of scores (H,T,T): step 1 alone
    explicit Prompt(Shape s) : Tokens(s.x, s.x, s), lse((size_t)T * H) {
        flops = 2. * T * T * D * H, bytes = 4. * T * D * (H + K), tolerance = 1. / 170;
    }
    Args args() { return {Q, KEYS, V, out, lse, T, H, K}; }
    float* scores() {
        if (!matrix) matrix = std::make_unique<Array<float>>((size_t)H * T * T);
        return *matrix;
    }
    void spoil() override { out.spoil(), lse.spoil(); }
    double error() override {
        if (want.empty()) {
            want.resize(checked.size() * H * D), want_lse.resize(checked.size() * H);
#pragma omp parallel for schedule(dynamic)
            for (size_t i = 0; i < want_lse.size(); i++) {
                const int n = checked[i / H], h = (int)(i % H);
                want_lse[i] = attend(&q[((size_t)n * H + h) * D], h, n, &want[i * D]);
            }
        }
        const auto all = out.get();
        const auto all_lse = lse.get();
        std::vector<double> got, got_lse;
        for (int n : checked)
            for (size_t i = (size_t)n * H; i < (size_t)(n + 1) * H; i++) {
                for (int d = 0; d < D; d++) got.push_back(__bfloat162float(all[i * D + d]));
                got_lse.push_back(all_lse[i]);
            }
        return largest_difference(got_lse, want_lse) < 1e-4 ? largest_difference(got, want) : INFINITY;
    }
};
// One new token, which sees all keys: a context eight times as long as the prompt.
struct Token : Tokens {
    std::vector<double> want;
    int splits;
    Array<float> parts; // (H, splits, D + 2): sums of values, the largest score, the sum of the weights
    explicit Token(Shape s)
        : Tokens(8 * s.x, 1, s), splits(std::max(2, 4 * multiprocessors() / K)), parts((size_t)H * splits * (D + 2)) {
        bytes = 4. * T * D * K, flops = 4. * T * D * H, tolerance = 1. / 170;
    }
    Args args() { return {Q, KEYS, V, out, nullptr, T, H, K}; }
    void spoil() override { out.spoil(), parts.spoil(); }
    double error() override {
        if (want.empty()) {
            want.resize((size_t)H * D);
            for (int h = 0; h < H; h++) attend(&q[(size_t)h * D], h, T - 1, &want[(size_t)h * D]);
        }
        std::vector<double> got;
        for (bf16 x : out.get()) got.push_back(__bfloat162float(x));
        return largest_difference(got, want);
    }
};

// ---- Small things that many steps use
__device__ inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ inline uint32_t pack(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}
__device__ inline float warp_sum(float x) {
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
__device__ inline float warp_max(float x) {
    for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}
__device__ inline float quad_sum(float x) { // of the four lanes that share a row of mma's sums
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float dot8(uint4 a, uint4 b) {
    return low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y) +
           low(a.z) * low(b.z) + high(a.z) * high(b.z) + low(a.w) * low(b.w) + high(a.w) * high(b.w);
}
__device__ inline float dot(const bf16* a, const bf16* b) { // of two rows, by one thread
    float sum = 0;
    for (int c = 0; c < D / 8; c++) sum += dot8(((const uint4*)a)[c], ((const uint4*)b)[c]);
    return sum;
}
__device__ inline void add_row(float (&sum)[4], float weight, const bf16* row) { // a warp: four numbers a lane
    const uint2 x = ((const uint2*)row)[threadIdx.x % 32];
    sum[0] += weight * low(x.x), sum[1] += weight * high(x.x);
    sum[2] += weight * low(x.y), sum[3] += weight * high(x.y);
}
__device__ inline void store_row(bf16* row, const float (&x)[4], float by) {
    ((uint2*)row)[threadIdx.x % 32] = {pack(x[0] * by, x[1] * by), pack(x[2] * by, x[3] * by)};
}

// ================================================================================ forward, on the CUDA cores
// ---- 1 three passes. As the formula says: a kernel for the scores, one for the softmax of each row, one for the
// weighted values. Predicted: the scores, half of 268 million float32 that are written, read three times, written once
// more and read again, are 3.2 GB, 1 ms. The products take longer: for 32 scores a warp reads 16 bytes of 32 rows of k
// at a time, 32 cache lines, some 16 clocks of the L1 cache, and does so 16 times: 5 ms for the scores. A row of v is
// two cache lines, but each costs a load and a dozen instructions: 2 ms. 8 ms together, 1% of the tensor cores' rate.
__global__ void scores(Args p, float* s) { // (H,T,T); a thread a score
    const int m = blockIdx.x * 32 + threadIdx.x, n = blockIdx.y * 8 + threadIdx.y, h = blockIdx.z;
    if (n >= p.T || m > n) return;
    const bf16 *q = p.q + ((size_t)n * p.H + h) * D, *k = p.k + ((size_t)m * p.K + h / (p.H / p.K)) * D;
    s[((size_t)h * p.T + n) * p.T + m] = dot(q, k) * SCALE;
}
__global__ void softmax(Args p, float* s) { // a warp a row
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, n = row / p.H, h = row % p.H;
    if (n >= p.T) return;
    float* const weight = s + ((size_t)h * p.T + n) * p.T;
    float most = -INFINITY, sum = 0;
    for (int m = lane; m <= n; m += 32) most = fmaxf(most, weight[m]);
    most = warp_max(most);
    for (int m = lane; m <= n; m += 32) sum += exp2_fast(weight[m] - most);
    sum = warp_sum(sum);
    for (int m = lane; m <= n; m += 32) weight[m] = exp2_fast(weight[m] - most) / sum;
    if (lane == 0) p.lse[row] = most * LN2 + logf(sum);
}
__global__ void weighted(Args p, const float* s) { // a warp a row
    const int row = blockIdx.x * 4 + threadIdx.x / 32, n = row / p.H, h = row % p.H, kv = h / (p.H / p.K);
    if (n >= p.T) return;
    const float* const weight = s + ((size_t)h * p.T + n) * p.T;
    float sum[4] = {};
    for (int m = 0; m <= n; m++) add_row(sum, weight[m], p.v + ((size_t)m * p.K + kv) * D);
    store_row(p.out + (size_t)row * D, sum, 1);
}

// ---- 2 online softmax. The matrix goes: a warp has a row, and takes 32 keys at a time, a lane each. When the largest
// score so far rises from `most` to `top`, what was summed shrinks by 2^(most - top); so one pass is enough (Milakov
// and Gimelshein, 2018). Predicted: 3.2 GB less, 1 ms and the launches; the rest as before, since each row still reads
// all of its keys and values for itself, from the caches: 6 to 7 ms.
__global__ void __launch_bounds__(128) online(Args p) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, n = row / p.H;
    const int kv = row % p.H / (p.H / p.K);
    if (n >= p.T) return;
    float most = -1e30f, sum = 0, mixed[4] = {};
    for (int m0 = 0; m0 <= n; m0 += 32) {
        const int m = m0 + lane;
        const float s = m <= n ? dot(p.q + (size_t)row * D, p.k + ((size_t)m * p.K + kv) * D) * SCALE : -INFINITY;
        // exercise attention-2: 32 new scores s, a lane each, join the softmax: `most` of the row, `sum` of this lane,
        // `mixed`.
        // `weight` is 2^(s - top) with the new maximum; what was summed so far shrinks by 2^(most - top).
        // instead: const float weight = 0;
        const float top = fmaxf(most, warp_max(s)), shrink = exp2_fast(most - top), weight = exp2_fast(s - top);
        most = top, sum = sum * shrink + weight; // (of this lane's keys)
        UNROLL for (int i = 0; i < 4; i++) mixed[i] *= shrink;
        // end of exercise
        for (int j = 0; j < 32 && m0 + j <= n; j++)
            add_row(mixed, __shfl_sync(~0u, weight, j), p.v + ((size_t)(m0 + j) * p.K + kv) * D);
    }
    sum = warp_sum(sum);
    store_row(p.out + (size_t)row * D, mixed, 1 / sum);
    if (lane == 0) p.lse[row] = most * LN2 + logf(sum);
}

// ---- 3 tiles in shared memory. 32 keys and values are copied once for 32 query rows, and a warp has four of these: a
// number of k or v that it reads from shared memory serves four rows out of a register. A row of a tile has 65 words,
// so that lanes that read 32 rows at the same place meet 32 banks. Predicted: 64 words of q and of k for 8
// multiply-adds each make 5 loads for 8; the values 2 loads and 4 shuffles for 16. About one load or shuffle for 2
// multiply-adds, where a multiprocessor can issue one for 4: half of the float32 ceiling, less the shifts and masks
// that make float32 of bf16, as many as multiply-adds: a quarter, 4 ms.
constexpr int ROWS = 32, WORDS = D / 2 + 1; // of a tile; of a row
__device__ inline void fill_tile(uint32_t (*tile)[WORDS], int r, int c, const bf16* row) {
    tile[r][c] = row ? ((const uint32_t*)row)[c] : 0;
}
__global__ void __launch_bounds__(256) tiles(Args p) {
    __shared__ uint32_t q[ROWS][WORDS], k[ROWS][WORDS], v[ROWS][WORDS];
    const int t = threadIdx.x, lane = t % 32, own = t / 32 * 4, kv = blockIdx.y;
    const int r0 = (gridDim.x - 1 - blockIdx.x) * ROWS; // later tokens see more keys: long blocks first
    const int rows = p.rows(), end = p.token(min(r0 + ROWS, rows) - 1) + 1; // keys that the last row sees
    for (int i = t; i < ROWS * D / 2; i += 256)
        fill_tile(q, i / 64, i % 64, r0 + i / 64 < rows ? p.q + p.place(r0 + i / 64, kv) * D : nullptr);
    float most[4], sum[4] = {}, mixed[4][4] = {};
    for (float& x : most) x = -1e30f;
    for (int m0 = 0; m0 < end; m0 += ROWS) {
        __syncthreads(); // all have finished reading the tiles before
        for (int i = t; i < ROWS * D / 2; i += 256) {
            const size_t at = ((size_t)(m0 + i / 64) * p.K + kv) * D;
            fill_tile(k, i / 64, i % 64, m0 + i / 64 < end ? p.k + at : nullptr);
            fill_tile(v, i / 64, i % 64, m0 + i / 64 < end ? p.v + at : nullptr);
        }
        __syncthreads();
        float s[4] = {};
        // exercise attention-3: scores of four rows of q (own + i) with this lane's key, from shared memory.
        // A word has two bf16: low() and high(). The word of k is read once for four rows.
        for (int c = 0; c < D / 2; c++)
            UNROLL for (int i = 0; i < 4; i++)
                s[i] += low(q[own + i][c]) * low(k[lane][c]) + high(q[own + i][c]) * high(k[lane][c]);
        // end of exercise
        UNROLL for (int i = 0; i < 4; i++) {
            const float x = m0 + lane <= p.token(r0 + own + i) ? s[i] * SCALE : -INFINITY;
            const float top = fmaxf(most[i], warp_max(x)), shrink = exp2_fast(most[i] - top);
            s[i] = exp2_fast(x - top), most[i] = top, sum[i] = sum[i] * shrink + s[i];
            UNROLL for (int e = 0; e < 4; e++) mixed[i][e] *= shrink;
        }
        for (int j = 0; j < ROWS; j++) {
            const uint32_t a = v[j][lane], b = v[j][lane + 32];
            UNROLL for (int i = 0; i < 4; i++) {
                const float weight = __shfl_sync(~0u, s[i], j);
                mixed[i][0] += weight * low(a), mixed[i][1] += weight * high(a);
                mixed[i][2] += weight * low(b), mixed[i][3] += weight * high(b);
            }
        }
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const float all = warp_sum(sum[i]), by = 1 / all;
        if (r0 + own + i >= rows) continue;
        const size_t row = p.place(r0 + own + i, kv);
        uint32_t* const to = (uint32_t*)(p.out + row * D);
        to[lane] = pack(mixed[i][0] * by, mixed[i][1] * by), to[lane + 32] = pack(mixed[i][2] * by, mixed[i][3] * by);
        if (lane == 0) p.lse[row] = most[i] * LN2 + logf(all);
    }
}

// ================================================================================ one token against a long context
// ---- 4 a token. Decoding asks for one row of each head: 4 flops a number of k or v, so only the bytes count, and with
// them how many loads are on the way. A block has a KV head and all G query heads that share it, so each key is read
// once. 16 lanes have a key, 16 bytes each; a half of a warp goes through four keys at a time, loads first. Each half
// has an online softmax of its own, and 16 of them are joined at the end: first the halves of a warp by shuffles, then
// the warps through shared memory. Predicted: K = 8 blocks on 132 multiprocessors, each with 64 x 512 B on the way: 8 x
// 32 KB in some 800 ns are 0.33 TB/s, a tenth of the bandwidth.
//
// ---- 5 split keys. The same kernel, but the keys of a head are shared out to many blocks, each of which leaves its
// part: the weighted sum, the largest score and the sum of the weights. A second kernel joins them, as halves and warps
// were joined (Dao and others, "Flash-Decoding", 2023). Predicted: 528 blocks, 90% of the bandwidth, less some 3 us
// for the second kernel: for 32,768 keys and 134 MB some 47 us.
constexpr int AT_ONCE = 4;
struct Part { float most, sum; }; // of some keys: the largest score, the sum of 2^(score - most)
__device__ inline float join(Part& a, Part b, float& shrink) { // what b's values count; shrink: what a's do
    // exercise attention-4: a becomes the softmax of the keys of a and b: the larger `most`, the sum at that maximum.
    // Values of a then count `shrink`, those of b what is returned.
    // instead: shrink = 0;
    // instead: return 0;
    const float top = fmaxf(a.most, b.most), other = exp2_fast(b.most - top);
    shrink = exp2_fast(a.most - top), a = {top, a.sum * shrink + b.sum * other};
    return other;
    // end of exercise
}
template <int G> __global__ void __launch_bounds__(256) token(Args p, float* parts) {
    __shared__ float mixed[8][G][D];
    __shared__ Part part[8][G];
    const int kv = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16, c = lane % 16;
    const int from = (int)((int64_t)p.T * blockIdx.y / gridDim.y);
    const int to = (int)((int64_t)p.T * (blockIdx.y + 1) / gridDim.y);
    uint4 q[G];
    Part mine[G];
    float sum[G][8] = {};
    UNROLL for (int g = 0; g < G; g++) q[g] = ((const uint4*)(p.q + (kv * G + g) * D))[c], mine[g] = {-1e30f, 0};
    for (int m0 = from + warp * 2 * AT_ONCE; m0 < to; m0 += 16 * AT_ONCE) {
        uint4 k[AT_ONCE] = {}, v[AT_ONCE] = {};
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            const int m = m0 + 2 * i + half;
            const size_t at = ((size_t)m * p.K + kv) * D / 8 + c;
            if (m < to) k[i] = ((const uint4*)p.k)[at], v[i] = ((const uint4*)p.v)[at];
        }
        UNROLL for (int g = 0; g < G; g++)
            UNROLL for (int i = 0; i < AT_ONCE; i++) {
                float s = dot8(q[g], k[i]) * SCALE, shrink;
                for (int d = 8; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
                const float weight = join(mine[g], {m0 + 2 * i + half < to ? s : -INFINITY, 1}, shrink);
                const uint32_t x[] = {v[i].x, v[i].y, v[i].z, v[i].w};
                UNROLL for (int e = 0; e < 8; e++)
                    sum[g][e] = sum[g][e] * shrink + weight * (e % 2 ? high(x[e / 2]) : low(x[e / 2]));
            }
    }
    UNROLL for (int g = 0; g < G; g++) {
        float shrink;
        const Part other = {__shfl_xor_sync(~0u, mine[g].most, 16), __shfl_xor_sync(~0u, mine[g].sum, 16)};
        const float by = join(mine[g], other, shrink);
        UNROLL for (int e = 0; e < 8; e++) {
            const float value = sum[g][e] * shrink + __shfl_xor_sync(~0u, sum[g][e], 16) * by;
            if (!half) mixed[warp][g][c * 8 + e] = value;
        }
        if (lane == 0) part[warp][g] = mine[g];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < G * D; i += 256) {
        const int g = i / D, h = kv * G + g;
        Part all = {-1e30f, 0};
        float value = 0, shrink;
        for (int w = 0; w < 8; w++) {
            const float by = join(all, part[w][g], shrink);
            value = value * shrink + mixed[w][g][i % D] * by;
        }
        float* const left = parts + ((size_t)h * gridDim.y + blockIdx.y) * (D + 2);
        if (gridDim.y == 1) p.out[h * D + i % D] = __float2bfloat16(value / all.sum);
        else left[i % D] = value, left[D] = all.most, left[D + 1] = all.sum;
    }
}
__global__ void join_splits(Args p, const float* parts, int splits) { // a block a head, a thread a number
    Part all = {-1e30f, 0};
    float value = 0, shrink;
    for (int i = 0; i < splits; i++) {
        const float* const left = parts + ((size_t)blockIdx.x * splits + i) * (D + 2);
        const float by = join(all, {left[D], left[D + 1]}, shrink);
        value = value * shrink + left[threadIdx.x] * by;
    }
    p.out[blockIdx.x * D + threadIdx.x] = __float2bfloat16(value / all.sum);
}

// ================================================================================ forward, on the tensor cores
// ---- 6 mma.sync, the weights in registers. Both products go to the tensor cores (Dao, "FlashAttention-2", 2023). A
// warp has 16 query rows, and mma leaves it their scores with 64 keys as 8 fragments of 16 x 8. Two neighbouring
// fragments, rounded to bf16, are just what mma wants as its left operand of 16 x 16: the weights never leave their
// registers. Keys and values come by cp.async, a tile ahead, in the swizzle of lab/matmul.cu; of v, whose rows are what
// is summed over, ldmatrix.trans makes columns. A row's maximum is shared by four lanes: two shuffles. Predicted: 128
// mma a warp and tile of 64 keys, 768 clocks of the tensor core of a quarter of a multiprocessor, at two thirds of
// wgmma's rate. Beside them 16 x 64 exponentials, 256 clocks of its special function unit, and some 500 other
// instructions: with two warps a quarter, what one does not hide of the other's is lost. 300 TFLOP/s, 0.23 ms.
constexpr int TILE = 64; // query rows of a block, and keys of a stage
__host__ __device__ constexpr int place(int r, int d) { return r * D + ((d / 8) ^ (r % 8)) * 8 + d % 8; }
__device__ inline const bf16* fragment_of(const bf16* tile, int r, int d) { // 16 x 16 numbers, for ldmatrix
    return tile + place(r + threadIdx.x % 16, d + threadIdx.x % 32 / 16 * 8);
}
template <class Row> __device__ inline void copy_tile(bf16* tile, Row row) { // row(r): where it lies, or null: zeros
    for (int i = threadIdx.x; i < TILE * D / 8; i += 128) {
        const bf16* const from = row(i / 16);
        copy16(tile + place(i / 16, i % 16 * 8), from ? from + i % 16 * 8 : nullptr, from);
    }
}
// s (16,64) += rows of a by those of b, D numbers each. a_row: the warp's first.
__device__ inline void multiply_rows(float (&s)[8][4], const bf16* a, int a_row, const bf16* b) {
    UNROLL for (int d = 0; d < D; d += 16) {
        uint32_t left[4], right[4];
        ldmatrix4(left, fragment_of(a, a_row, d));
        UNROLL for (int j = 0; j < 4; j++) {
            ldmatrix4(right, fragment_of(b, j * 16, d));
            mma(s[2 * j], left, right[0], right[2]), mma(s[2 * j + 1], left, right[1], right[3]);
        }
    }
}
// sum (16,D) += w (16,64) b: w as multiply_rows leaves it, rounded; b 64 rows of D numbers.
__device__ inline void add_rows(float (&sum)[16][4], const float (&w)[8][4], const bf16* b) {
    UNROLL for (int k = 0; k < 4; k++) {
        const uint32_t left[4] = {pack(w[2 * k][0], w[2 * k][1]), pack(w[2 * k][2], w[2 * k][3]),
                                  pack(w[2 * k + 1][0], w[2 * k + 1][1]), pack(w[2 * k + 1][2], w[2 * k + 1][3])};
        UNROLL for (int d = 0; d < D; d += 16) {
            uint32_t right[4];
            ldmatrix4_transposed(right, fragment_of(b, k * 16, d));
            mma(sum[d / 8], left, right[0], right[1]), mma(sum[d / 8 + 1], left, right[2], right[3]);
        }
    }
}
// A lane's numbers x[j][e] of such fragments are of row lane / 4 + e / 2 * 8, column j * 8 + lane % 4 * 2 + e % 2.
__device__ inline int row_of(int e) { return threadIdx.x % 32 / 4 + e / 2 * 8; }
__device__ inline int column_of(int j, int e) { return j * 8 + threadIdx.x % 4 * 2 + e % 2; }
// The online softmax of the two rows of a lane, of which it has N / 4 scores in s: they become weights; `shrink` is for
// what was summed before.
template <int N>
__device__ inline void soften(float (&s)[N][4], float (&most)[2], float (&sum)[2], float (&shrink)[2]) {
    UNROLL for (int h = 0; h < 2; h++) {
        // exercise attention-6: the online softmax of row h of this lane: scores s[j][2 h] and s[j][2 h + 1] become
        // weights.
        // Four lanes share a row: quad_max(). Scores are not scaled yet: SCALE. sum[] stays this lane's.
        float top = most[h], weights = 0;
        UNROLL for (int j = 0; j < N; j++) top = fmaxf(top, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
        top = quad_max(top);
        shrink[h] = exp2_fast((most[h] - top) * SCALE), most[h] = top;
        UNROLL for (int j = 0; j < N; j++)
            UNROLL for (int e = 2 * h; e < 2 * h + 2; e++)
                weights += s[j][e] = exp2_fast(s[j][e] * SCALE - top * SCALE);
        sum[h] = sum[h] * shrink[h] + weights;
        // end of exercise
    }
}
__device__ inline void store_pairs(bf16* row, const float (&x)[16][4], int h, float by) {
    UNROLL for (int j = 0; j < 16; j++)
        *(uint32_t*)(row + column_of(j, 0)) = pack(x[j][2 * h] * by, x[j][2 * h + 1] * by);
}
__global__ void __launch_bounds__(128, 2) tensor(Args p) {
    DYNAMIC_SHARED(bf16, q); // then two stages of keys and two of values
    bf16 *const k = q + TILE * D, *const v = k + 2 * TILE * D;
    const int kv = blockIdx.y, r0 = (gridDim.x - 1 - blockIdx.x) * TILE, own = threadIdx.x / 32 * 16, rows = p.rows();
    const int end = p.token(min(r0 + TILE, rows) - 1) + 1, first = p.token(r0);
    const auto copy = [&](int m0) { // (past the end: zeros, unused)
        const int stage = m0 / TILE % 2 * TILE * D;
        const auto at = [&](const bf16* from, int m) { return m < end ? from + ((size_t)m * p.K + kv) * D : nullptr; };
        copy_tile(k + stage, [&](int r) { return at(p.k, m0 + r); });
        copy_tile(v + stage, [&](int r) { return at(p.v, m0 + r); });
        copies_commit();
    };
    copy_tile(q, [&](int r) { return r0 + r < rows ? p.q + p.place(r0 + r, kv) * D : nullptr; });
    copy(0);
    float most[2] = {-1e30f, -1e30f}, sum[2] = {}, shrink[2], mixed[16][4] = {};
    for (int m0 = 0; m0 < end; m0 += TILE) {
        copies_wait<0>();
        __syncthreads(); // all copies have come, and all have finished reading the stage before
        copy(m0 + TILE);
        const int stage = m0 / TILE % 2 * TILE * D;
        float s[8][4] = {};
        multiply_rows(s, q, own, k + stage);
        if (m0 + TILE > first + 1)
            UNROLL for (int j = 0; j < 8; j++)
                UNROLL for (int e = 0; e < 4; e++)
                    if (m0 + column_of(j, e) > p.token(r0 + own + row_of(e))) s[j][e] = -INFINITY;
        soften(s, most, sum, shrink);
        UNROLL for (int j = 0; j < 16; j++)
            UNROLL for (int e = 0; e < 4; e++) mixed[j][e] *= shrink[e / 2];
        add_rows(mixed, s, v + stage);
    }
    copies_wait<0>();
    UNROLL for (int h = 0; h < 2; h++) {
        const float all = quad_sum(sum[h]);
        const int r = r0 + own + row_of(2 * h);
        if (r >= rows) continue;
        store_pairs(p.out + p.place(r, kv) * D, mixed, h, 1 / all);
        p.lse[p.place(r, kv)] = most[h] * SCALE * LN2 + logf(all); // (all four lanes of a row the same)
    }
}

// ---- 7 wgmma and TMA (Hopper). What bounds step 6 on Hopper is mma.sync, as in
// lab/matmul.cu. Here two groups of four warps have 64 tokens of a head each, as a rule two heads that share their keys
// and values, 128 at a time; a ninth warp has TMA copy these. Scores are q k^T out of shared memory. The weights stay
// in registers, which wgmma takes as its left operand, too; v, whose rows are summed over, it reads transposed: two
// panels of 64 columns. Each group waits for its scores, softens them, adds the values and waits again. Predicted: for
// a tile of 64 x 128 a head 2 x 512 clocks of the tensor cores and 64 x 128 exponentials at 16 a clock in all, 512
// clocks: if one group's exponentials fall beside the other's products, as chance has it, two thirds to three quarters
// of the rate: 450 TFLOP/s.
//
// ---- 8 ping-pong (Hopper). The same work in another order: a group asks for the
// scores of the next keys and for the values of the last ones at once, and softens the scores while the values are
// being added; so the tensor cores have something to do while it computes exponentials, and the two groups need no
// order between them. The weights of a tile wait in registers for a round (32 more). Predicted: 550 TFLOP/s at 4,096
// tokens, where an average row of blocks has only 16 tiles and starts are not hidden.
constexpr int GROUP_ROWS = 64, KEYS = 128, CONSUMERS = 256, STAGES = 2;
constexpr int BOX = 64; // columns that a box of TMA has: half a row
constexpr size_t HOPPER_SHARED = (2 * GROUP_ROWS + 2 * STAGES * KEYS) * D * sizeof(bf16) + 1024;
struct Maps { CUtensorMap q, k, v; };
struct Stages { // of the keys, or of the values, each in two boxes of 64 columns
    bf16* tiles;
    uint64_t *full, *empty;
    int stage = 0;
    uint32_t parity = 0;
    __device__ bf16* tile() const { return tiles + stage * KEYS * D; }
    __device__ void fill(const CUtensorMap& map, int kv, int key0) { // one thread
        barrier_wait(&empty[stage], parity ^ 1);
        barrier_expect(&full[stage], KEYS * D * sizeof(bf16));
        for (int box = 0; box < 2; box++)
            tma_load(tile() + box * KEYS * BOX, map, &full[stage], kv * D + box * BOX, key0);
        next();
    }
    __device__ void wait() const { barrier_wait(&full[stage], parity); }
    __device__ void leave() { // one lane of each warp speaks for it
        if (threadIdx.x % 32 == 0) barrier_arrive(&empty[stage]);
        next();
    }
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
struct Group { // what four warps have: 64 tokens of a head; as a rule the block's other group has the same tokens
    int head, t0;
    __device__ Group(const Args& p, int kv, int tile) {
        const int G = p.H / p.K;
        head = kv * G + tile % G, t0 = tile / G * GROUP_ROWS;
    }
    __device__ int token(int e) const { return t0 + threadIdx.x % 128 / 32 * 16 + row_of(e); }
};
__device__ inline void ask_scores(float (&s)[64], const bf16* q, const bf16* k) {
    wgmma_fence();
    UNROLL for (int d = 0; d < D; d += 16)
        wgmma_64x<KEYS>(s, q + d / BOX * GROUP_ROWS * BOX + d % BOX, k + d / BOX * KEYS * BOX + d % BOX, d);
    wgmma_commit();
}
__device__ inline void ask_values(float (&mixed)[64], const uint32_t (&weights)[8][4], const bf16* v, bool more) {
    wgmma_fence();
    UNROLL for (int k = 0; k < 8; k++)
        wgmma_registers_64x128(mixed, weights[k], v + k * 16 * BOX, KEYS * BOX * sizeof(bf16), more || k);
    wgmma_commit();
}
// Scores of 128 keys from m0 on become weights: those that a row does not see are none.
__device__ inline void soften(float (&x)[64], float (&most)[2], float (&sum)[2], float (&shrink)[2], const Group& g,
                              int m0) {
    float (&s)[16][4] = (float(&)[16][4])x;
    if (m0 + KEYS > g.t0 + 1)
        UNROLL for (int j = 0; j < 16; j++)
            UNROLL for (int e = 0; e < 4; e++)
                if (m0 + column_of(j, e) > g.token(e)) s[j][e] = -INFINITY;
    soften(s, most, sum, shrink);
}
__device__ inline void shrink_and_round(float (&mixed)[64], uint32_t (&weights)[8][4], const float (&shrink)[2],
                                        const float (&s)[64]) {
    UNROLL for (int i = 0; i < 64; i++) mixed[i] *= shrink[i % 4 / 2];
    UNROLL for (int i = 0; i < 32; i++) weights[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
}
__device__ inline void store_group(const Args& p, const Group& g, const float (&mixed)[64], const float (&most)[2],
                                   const float (&sum)[2]) {
    UNROLL for (int h = 0; h < 2; h++) {
        const float all = quad_sum(sum[h]);
        const int n = g.token(2 * h);
        if (n >= p.T) continue;
        store_pairs(p.out + ((size_t)n * p.H + g.head) * D, (const float(&)[16][4])mixed, h, 1 / all);
        p.lse[(size_t)n * p.H + g.head] = most[h] * SCALE * LN2 + logf(all);
    }
}
// Step 7: scores, weights, values, one after the other.
__device__ inline void consume_in_turn(const Args& p, const Group& g, const bf16* q, Stages k, Stages v, int end) {
    float s[64], mixed[64] = {}, most[2] = {-1e30f, -1e30f}, sum[2] = {}, shrink[2];
    uint32_t weights[8][4];
    for (int m0 = 0; m0 < end; m0 += KEYS) {
        k.wait();
        ask_scores(s, q, k.tile());
        wgmma_wait<0>();
        settle(s);
        k.leave();
        soften(s, most, sum, shrink, g, m0);
        shrink_and_round(mixed, weights, shrink, s);
        v.wait();
        ask_values(mixed, weights, v.tile(), true);
        wgmma_wait<0>();
        settle(mixed);
        v.leave();
    }
    store_group(p, g, mixed, most, sum);
}
// Step 8: the next scores and the last values together.
__device__ inline void consume_ping_pong(const Args& p, const Group& g, const bf16* q, Stages k, Stages v, int end) {
    float s[64], mixed[64] = {}, most[2] = {-1e30f, -1e30f}, sum[2] = {}, shrink[2];
    uint32_t weights[8][4];
    k.wait();
    ask_scores(s, q, k.tile());
    wgmma_wait<0>();
    settle(s);
    k.leave();
    soften(s, most, sum, shrink, g, 0);
    shrink_and_round(mixed, weights, shrink, s);
    for (int m0 = KEYS; m0 < end; m0 += KEYS) {
        k.wait();
        ask_scores(s, q, k.tile());
        v.wait();
        ask_values(mixed, weights, v.tile(), true);
        wgmma_wait<1>(); // the scores
        settle(s);
        k.leave();
        soften(s, most, sum, shrink, g, m0);
        wgmma_wait<0>(); // the values
        settle(mixed);
        v.leave();
        shrink_and_round(mixed, weights, shrink, s);
    }
    v.wait();
    ask_values(mixed, weights, v.tile(), true);
    wgmma_wait<0>();
    settle(mixed);
    store_group(p, g, mixed, most, sum);
}
template <bool PING_PONG>
__global__ void __launch_bounds__(CONSUMERS + 128, 1) hopper(const __grid_constant__ Maps maps, Args p) {
#ifdef HAVE_HOPPER
    DYNAMIC_SHARED(bf16, room);
    __shared__ uint64_t barriers[1 + 4 * STAGES];
    bf16 *const q = aligned_1024(room), *const k_tiles = q + 2 * GROUP_ROWS * D;
    bf16* const v_tiles = k_tiles + STAGES * KEYS * D;
    Stages k = {k_tiles, barriers + 1, barriers + 1 + STAGES}, v = {v_tiles, k.empty + STAGES, k.empty + 2 * STAGES};
    if (threadIdx.x == 0) {
        barrier_init(barriers, 1);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&k.full[s], 1), barrier_init(&k.empty[s], CONSUMERS / 32);
            barrier_init(&v.full[s], 1), barrier_init(&v.empty[s], CONSUMERS / 32);
        }
        barriers_ready();
    }
    __syncthreads();
    const int kv = blockIdx.y, tile = (gridDim.x - 1 - blockIdx.x) * 2;
    const int end = min(p.T, Group(p, kv, tile + 1).t0 + GROUP_ROWS);
    if (threadIdx.x >= CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x > CONSUMERS) return;
        barrier_expect(barriers, 2 * GROUP_ROWS * D * sizeof(bf16));
        for (int i = 0; i < 4; i++) {
            const Group g(p, kv, tile + i / 2);
            tma_load(q + i * GROUP_ROWS * BOX, maps.q, barriers, g.head * D + i % 2 * BOX, g.t0);
        }
        for (int m0 = 0; m0 < end; m0 += KEYS) k.fill(maps.k, kv, m0), v.fill(maps.v, kv, m0);
        return;
    }
    take_registers<232>();
    const int mine = threadIdx.x / 128;
    const Group g(p, kv, tile + mine);
    barrier_wait(barriers, 0);
    if (PING_PONG) consume_ping_pong(p, g, q + mine * GROUP_ROWS * D, k, v, end);
    else consume_in_turn(p, g, q + mine * GROUP_ROWS * D, k, v, end);
#endif
}

// ================================================================================ backward
// With w = softmax's weights, delta_n = dout_n . out_n and ds = w (dout . v - delta) / sqrt(D):
//     dv_m = sum_n w_nm dout_n      dk_m = sum_n ds_nm q_n      dq_n = sum_m ds_nm k_m
// The weights are not saved: 2^(score - lse) is them again, from one number a row. So there are five products: scores,
// dout v^T, dv, dk, dq: 5 T T D H flops with half the square. dqkv is (T,(H+2K)D), as qwen3.cu has it.
struct Gradients : Tokens {
    struct Args { // of the kernels
        const bf16 *q, *k, *v, *dout;
        const float *lse, *delta;
        bf16* dqkv;
        int T, H, K;
        __device__ int rows() const { return T * (H / K); }
        __device__ int token(int r) const { return r / (H / K); }
        __device__ size_t place(int r, int kv) const { return (size_t)token(r) * H + kv * (H / K) + r % (H / K); }
        __device__ bf16* gradient(int n, int head) const { return dqkv + ((size_t)n * (H + 2 * K) + head) * D; }
    };
    std::vector<float> dout;
    Array<bf16> DOUT, dqkv;
    Array<float> lse, delta;
    std::unique_ptr<Array<float>> sums; // of dk, then of dv, (T,K,D): the step with atomics alone
    std::vector<float> rows, rows_lse;  // what the forward pass left
    std::vector<double> want, bound;
    explicit Gradients(Shape s)
        : Tokens(s.x, s.x, s), dout(random_numbers(q.size(), 4)), DOUT(stored(dout)), dqkv((size_t)T * (H + 2 * K) * D),
          lse((size_t)T * H), delta(lse.n) {
        flops = 5. * T * T * D * H, bytes = 4. * T * D * (2 * H + 2 * K), tolerance = INFINITY;
        const lab::attention::Args forward = {Q, KEYS, V, out, lse, T, H, K};
        launch(tensor, dim3(blocks_for((size_t)T * (H / K), TILE), K), dim3(128), 5 * TILE * D * sizeof(bf16), forward);
        for (bf16 x : out.get()) rows.push_back(__bfloat162float(x));
        rows_lse = lse.get();
    }
    Args args() { return {Q, KEYS, V, DOUT, lse, delta, dqkv, T, H, K}; }
    float* key_sums() {
        if (!sums) sums = std::make_unique<Array<float>>((size_t)2 * T * K * D);
        sums->clear();
        return *sums;
    }
    void spoil() override { dqkv.spoil(), delta.spoil(); }
    // The weight of key m for token n, and ds; size: what ds could be if nothing cancelled.
    void pair(int n, int h, int m, double& w, double& ds, double& size) const {
        const size_t row = ((size_t)n * H + h) * D, key = ((size_t)m * K + h / (H / K)) * D;
        const double dp = dot(&dout[row], &v[key]), of_row = dot(&dout[row], &rows[row]);
        w = std::exp(dot(&q[row], &k[key]) / std::sqrt((double)D) - rows_lse[row / D]);
        ds = w * (dp - of_row) / std::sqrt((double)D);
        size = w * (std::fabs(dp) + std::fabs(of_row)) / std::sqrt((double)D);
    }
    // The gradients of the checked tokens. w and ds are rounded to bf16, and so is the result: by 1 / 256 of it.
    void define() {
        const int width = (H + 2 * K) * D;
        want.resize(checked.size() * width), bound.resize(want.size());
#pragma omp parallel for schedule(dynamic)
        for (size_t i = 0; i < checked.size(); i++) {
            const auto add = [&](int head, double by, double size, const float* row) {
                for (int d = 0; d < D; d++) {
                    want[i * width + head * D + d] += by * row[d];
                    bound[i * width + head * D + d] += size * std::fabs(row[d]);
                }
            };
            double w, ds, size;
            for (int h = 0; h < H; h++) {
                const int t = checked[i], kv = h / (H / K);
                for (int m = 0; m <= t; m++)
                    pair(t, h, m, w, ds, size), add(h, ds, size, &k[((size_t)m * K + kv) * D]);
                for (int n = t; n < T; n++) {
                    const size_t row = ((size_t)n * H + h) * D;
                    pair(n, h, t, w, ds, size);
                    add(H + kv, ds, size, &q[row]), add(H + K + kv, w, w, &dout[row]);
                }
            }
        }
        for (size_t i = 0; i < want.size(); i++) bound[i] = (bound[i] + std::fabs(want[i])) / 250 + 1e-6;
    }
    double error() override { // infinite if a number is further off than its own terms allow
        if (want.empty()) define();
        const auto all = dqkv.get();
        const size_t width = (size_t)(H + 2 * K) * D;
        double most = 0;
        for (size_t i = 0; i < want.size(); i++) {
            const double d = std::fabs(__bfloat162float(all[checked[i / width] * width + i % width]) - want[i]);
            if (!(d <= bound[i])) return NAN;
            most = std::max(most, d);
        }
        return most;
    }
};
using Back = Gradients::Args;

// ---- 9 backward: atomics. delta first, by a kernel of its own. Then a warp has a query row, as in step 2: dq is its
// own, and what a key gets from this row it adds to dk and dv in memory, in float32: 256 atomic additions a key and
// row. A last kernel rounds them. Predicted: two products as slow as step 2's, 10 ms, and 134 million pairs x 256
// additions, of which the L2 cache takes 2,048 or so a clock: 10 ms more, in part at the same time. And the sums come
// in another order each time, so the same batch gives other bits.
__global__ void delta_of(const bf16* dout, const bf16* out, float* delta, int rows) { // a warp a row
    const int row = blockIdx.x * 4 + threadIdx.x / 32, c = threadIdx.x % 32;
    if (row >= rows) return;
    const uint2 a = ((const uint2*)(dout + (size_t)row * D))[c], b = ((const uint2*)(out + (size_t)row * D))[c];
    const float sum =
        warp_sum(low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y));
    if (c == 0) delta[row] = sum;
}
struct Pair { float w, ds; };
__device__ inline Pair pair_of(const Back& p, size_t row, size_t key) { // one thread
    const float w = exp2_fast(dot(p.q + row * D, p.k + key * D) * SCALE - p.lse[row] * LOG2E);
    return {w, w * (dot(p.dout + row * D, p.v + key * D) - p.delta[row]) * (SCALE / LOG2E)};
}
__device__ inline void add_atomically(float* to, float weight, const bf16* row) {
    float x[4] = {};
    add_row(x, weight, row);
    for (int i = 0; i < 4; i++) atomicAdd(to + threadIdx.x % 32 * 4 + i, x[i]);
}
template <bool ATOMICS> __global__ void __launch_bounds__(128) by_rows(Back p, float* dk, float* dv) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, n = row / p.H, h = row % p.H;
    const int kv = h / (p.H / p.K);
    if (n >= p.T) return;
    float dq[4] = {};
    for (int m0 = 0; m0 <= n; m0 += 32) {
        const Pair mine = m0 + lane <= n ? pair_of(p, row, (size_t)(m0 + lane) * p.K + kv) : Pair{};
        for (int j = 0; j < 32 && m0 + j <= n; j++) {
            const size_t key = (size_t)(m0 + j) * p.K + kv;
            const float w = __shfl_sync(~0u, mine.w, j), ds = __shfl_sync(~0u, mine.ds, j);
            add_row(dq, ds, p.k + key * D);
            if (ATOMICS) {
                add_atomically(dk + key * D, ds, p.q + (size_t)row * D);
                add_atomically(dv + key * D, w, p.dout + (size_t)row * D);
            }
        }
    }
    store_row(p.gradient(n, h), dq, 1);
}
__global__ void round_sums(Back p, const float* dk, const float* dv) { // a block a key of a head, a thread a number
    const int m = blockIdx.x, kv = blockIdx.y;
    const size_t at = ((size_t)m * p.K + kv) * D + threadIdx.x;
    p.gradient(m, p.H + kv)[threadIdx.x] = __float2bfloat16(dk[at]);
    p.gradient(m, p.H + p.K + kv)[threadIdx.x] = __float2bfloat16(dv[at]);
}

// ---- 10 backward: in order. No atomics: a second kernel gives a warp a key, and it adds up dk and dv over all query
// rows that see it, in their order. The weights are computed in both kernels: seven products instead of five, for the
// same bits each time. Predicted: bound by the L1 cache as step 2 is, four products of its kind: 20 to 25 ms, no faster
// than the atomics. Order is what this step is for; time is the next one's.
__global__ void __launch_bounds__(128) by_keys(Back p) {
    const int key = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, m = key / p.K, kv = key % p.K;
    if (m >= p.T) return;
    const int rows = p.rows();
    float dk[4] = {}, dv[4] = {};
    for (int r0 = m * (p.H / p.K); r0 < rows; r0 += 32) {
        const Pair mine = r0 + lane < rows ? pair_of(p, p.place(r0 + lane, kv), key) : Pair{};
        for (int j = 0; j < 32 && r0 + j < rows; j++) {
            const size_t row = p.place(r0 + j, kv);
            add_row(dk, __shfl_sync(~0u, mine.ds, j), p.q + row * D);
            add_row(dv, __shfl_sync(~0u, mine.w, j), p.dout + row * D);
        }
    }
    store_row(p.gradient(m, p.H + kv), dk, 1), store_row(p.gradient(m, p.H + p.K + kv), dv, 1);
}

// ---- 11 backward: mma.sync. Step 10's two kernels as step 6 has it, one source for both: a block owns 64 keys (or
// query rows), a warp 16 of them, and the rows of the other kind pass by, 64 at a time, in two stages. Scores are
// computed as own times passing, so that w and ds lie as the left operand of the sums over what passes: nothing is
// transposed but by ldmatrix. Sums of dk and dv take 128 registers a lane, w and ds 64 more: all 255, two blocks of
// four warps a multiprocessor. Predicted: seven products where five count, at 300 TFLOP/s of mma.sync: 200 TFLOP/s.
template <bool KEYS_OWN> __global__ void __launch_bounds__(128, 2) gradients(Back p) {
    DYNAMIC_SHARED(bf16, own_a); // k and v, or q and dout; then two stages of q and dout, or of k and v
    bf16 *const own_b = own_a + TILE * D, *const passing = own_b + TILE * D;
    const int kv = blockIdx.y, G = p.H / p.K, rows = p.rows(), warp_row = threadIdx.x / 32 * 16;
    const int tile = KEYS_OWN ? blockIdx.x : gridDim.x - 1 - blockIdx.x, own0 = tile * TILE; // long blocks first
    const int from = KEYS_OWN ? own0 * G : 0; // what sees us, or what we see
    const int end = KEYS_OWN ? rows : p.token(min(own0 + TILE, rows) - 1) + 1;
    const auto row_at = [&](const bf16* x, int r) { return r < rows ? x + p.place(r, kv) * D : nullptr; };
    const auto key_at = [&](const bf16* x, int m) { return m < p.T ? x + ((size_t)m * p.K + kv) * D : nullptr; };
    const auto copy = [&](bf16* a, bf16* b, bool keys, int first) {
        copy_tile(a, [&](int r) { return keys ? key_at(p.k, first + r) : row_at(p.q, first + r); });
        copy_tile(b, [&](int r) { return keys ? key_at(p.v, first + r) : row_at(p.dout, first + r); });
        copies_commit();
    };
    const auto stage = [&](int at) { return passing + (at - from) / TILE % 2 * 2 * TILE * D; };
    copy(own_a, own_b, KEYS_OWN, own0);
    copy(stage(from), stage(from) + TILE * D, !KEYS_OWN, from);
    float da[16][4] = {}, db[KEYS_OWN ? 16 : 1][4] = {}; // dk and dv, or dq
    for (int at = from; at < end; at += TILE) {
        copies_wait<0>();
        __syncthreads();
        const bf16 *const a = stage(at), *const b = a + TILE * D;
        copy(stage(at + TILE), stage(at + TILE) + TILE * D, !KEYS_OWN, at + TILE);
        float w[8][4] = {}, ds[8][4] = {};
        multiply_rows(w, own_a, warp_row, a), multiply_rows(ds, own_b, warp_row, b);
        UNROLL for (int j = 0; j < 8; j++)
            UNROLL for (int e = 0; e < 4; e++) {
                const int mine = own0 + warp_row + row_of(e), other = at + column_of(j, e);
                const int r = KEYS_OWN ? other : mine, m = KEYS_OWN ? mine : other;
                const bool seen = r < rows && m <= p.token(r);
                const size_t row = seen ? p.place(r, kv) : 0;
                w[j][e] = seen ? exp2_fast(w[j][e] * SCALE - p.lse[row] * LOG2E) : 0;
                ds[j][e] = w[j][e] * (ds[j][e] - p.delta[row]) * (SCALE / LOG2E);
            }
        add_rows(da, ds, a);
        if constexpr (KEYS_OWN) add_rows(db, w, b);
    }
    copies_wait<0>();
    UNROLL for (int h = 0; h < 2; h++) {
        const int i = own0 + warp_row + row_of(2 * h);
        if (KEYS_OWN ? i >= p.T : i >= rows) continue;
        store_pairs(KEYS_OWN ? p.gradient(i, p.H + kv) : p.gradient(p.token(i), kv * G + i % G), da, h, 1);
        if constexpr (KEYS_OWN) store_pairs(p.gradient(i, p.H + p.K + kv), db, h, 1);
    }
}

// ================================================================================ the program's own (nvcc only)
// ---- 12 qwen3.cu. Its kernel is step 8, and what a model needs beside it: keys and values in pages of 16 tokens,
// several sequences in one batch, splits of the keys where there are few tiles; blocks that stay, take tiles from a
// counter, long ones first, and copy the next tile's queries meanwhile. Its section in Book II is called "Attention for
// prompts".
//
// ---- 13 backward: qwen3.cu. Both kinds of tiles in one launch, so that neither waits for the last ones of the other;
// pages, several sequences; lse and delta come with the tiles. On Hopper by wgmma, as step 7: one warpgroup copies, two
// own 64 keys or query rows each, and the next unit's tiles come while this one's pass. It is gpu/backward/hopper.h's.

// ================================================================================ the table
inline void three_passes(Prompt& p) {
    launch(scores, dim3(blocks_for(p.T, 32), blocks_for(p.T, 8), p.H), dim3(32, 8), 0, p.args(), p.scores());
    launch(softmax, blocks_for((size_t)p.T * p.H, 4), dim3(128), 0, p.args(), p.scores());
    launch(weighted, blocks_for((size_t)p.T * p.H, 4), dim3(128), 0, p.args(), p.scores());
}
inline void attend_token(Token& p, int splits) {
    const auto with = [&](auto kernel) { launch(kernel, dim3(p.K, splits), dim3(256), 0, p.args(), p.parts); };
    switch (p.H / p.K) {
    case 1: with(token<1>); break;
    case 2: with(token<2>); break;
    case 4: with(token<4>); break;
    case 5: with(token<5>); break;
    case 8: with(token<8>); break;
    default: fail("a token has 1, 2, 4, 5 or 8 query heads for a KV head here, not %d", p.H / p.K);
    }
    if (splits > 1) launch(join_splits, p.H, dim3(D), 0, p.args(), p.parts, splits);
}
template <bool PING_PONG> void attend_hopper(Prompt& p) {
    const Maps maps = {tensor_map(p.Q, p.T, p.H * D, GROUP_ROWS), tensor_map(p.KEYS, p.T, p.K * D, KEYS),
                       tensor_map(p.V, p.T, p.K * D, KEYS)};
    const size_t tiles = (size_t)blocks_for(p.T, GROUP_ROWS) * (p.H / p.K);
    launch(hopper<PING_PONG>, dim3(blocks_for(tiles, 2), p.K), dim3(CONSUMERS + 128), HOPPER_SHARED, maps, p.args());
}
inline void find_delta(Gradients& p) {
    launch(delta_of, blocks_for(p.delta.n, 4), dim3(128), 0, p.DOUT, p.out, p.delta, (int)p.delta.n);
}
inline void backward_atomics(Gradients& p) {
    float *const dk = p.key_sums(), *const dv = dk + (size_t)p.T * p.K * D;
    find_delta(p);
    launch(by_rows<true>, blocks_for(p.delta.n, 4), dim3(128), 0, p.args(), dk, dv);
    launch(round_sums, dim3(p.T, p.K), dim3(D), 0, p.args(), dk, dv);
}
inline void backward_in_order(Gradients& p) {
    find_delta(p);
    launch(by_rows<false>, blocks_for(p.delta.n, 4), dim3(128), 0, p.args(), nullptr, nullptr);
    launch(by_keys, blocks_for((size_t)p.T * p.K, 4), dim3(128), 0, p.args());
}
inline void backward_tensor(Gradients& p) {
    constexpr size_t SHARED = 6 * TILE * D * sizeof(bf16);
    find_delta(p);
    launch(gradients<true>, dim3(blocks_for(p.T, TILE), p.K), dim3(128), SHARED, p.args());
    launch(gradients<false>, dim3(blocks_for((size_t)p.T * (p.H / p.K), TILE), p.K), dim3(128), SHARED, p.args());
}
#ifdef LAB_QWEN3
inline void run_qwen3(Prompt& p) {
    Paged& pages = p.paged();
    attention_gpu(pages.context(), (::bf16*)p.out.p, p.lse, pages.at(p.Q), pages.cache(), pages.b,
                  {p.H, p.K, D});
}
inline void run_qwen3_backward(Gradients& p) {
    Paged& pages = p.paged();
    attention_backward_gpu(pages.context(), (::bf16*)p.dqkv.p, pages.at(p.DOUT),
                           {pages.at(p.Q), pages.at(p.out), p.lse}, pages.cache(), pages.b, {p.H, p.K, D}, p.delta);
}
#endif
inline Laboratory laboratory() {
    Laboratory l("attention", "prompts, one token, gradients: scores that never leave their registers", {4096, 16, 8},
                 {70, 4, 2});
    constexpr const char *MEMORY = "dram__bytes.sum,gpu__time_duration.sum",
                         *LINES = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum,l1tex__throughput.avg.pct_of_peak_"
                                  "sustained_elapsed",
                         *SHARED = "smsp__inst_executed_pipe_lsu.sum,smsp__inst_executed_pipe_fma.sum",
                         *READS = "dram__throughput.avg.pct_of_peak_sustained_elapsed,launch__grid_size",
                         *TENSORS = "sm__inst_executed_pipe_tensor.sum,"
                                    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
                         *ATOMICS = "lts__t_sectors_op_red.sum,lts__throughput.avg.pct_of_peak_sustained_elapsed";
    l.step<Prompt>("three passes", "scores, softmax, values: a matrix in memory", three_passes, FMA, MEMORY,
                   "of the second kernel: half of 268 million float32, several times");
    l.step<Prompt>("online softmax", "one pass: what was summed shrinks", [](Prompt& p) {
        launch(online, blocks_for((size_t)p.T * p.H, 4), dim3(128), 0, p.args());
    }, FMA, LINES, "few bytes from memory now, but the L1 cache busy");
    l.step<Prompt>("shared tiles", "32 keys for 32 rows, four rows a warp", [](Prompt& p) {
        launch(tiles, dim3(blocks_for((size_t)p.T * (p.H / p.K), ROWS), p.K), dim3(256), 0, p.args());
    }, FMA, SHARED, "one load of shared memory for two multiply-adds");
    l.step<Token>("a token", "one row a head, a long context", [](Token& p) { attend_token(p, 1); }, READ, READS,
                  "8 blocks; a tenth of the bandwidth");
    l.step<Token>("split keys", "many blocks a head; their parts are joined",
                  [](Token& p) { attend_token(p, p.splits); }, READ, READS, "four blocks a multiprocessor");
    l.step<Prompt>("mma.sync", "tensor cores; the weights stay in registers", [](Prompt& p) {
        constexpr size_t SHARED = 5 * TILE * D * sizeof(bf16);
        launch(tensor, dim3(blocks_for((size_t)p.T * (p.H / p.K), TILE), p.K), dim3(128), SHARED, p.args());
    }, TENSOR, TENSORS, "the pipe busy for half of the time");
    l.step<Prompt>("wgmma, TMA", "128 keys a tile, two heads a block", attend_hopper<false>, TENSOR, TENSORS,
                   "fewer instructions than step 6, pipe busier", 90);
    l.step<Prompt>("ping-pong", "the next scores beside the last values", attend_hopper<true>, TENSOR, TENSORS,
                   "as many instructions as step 7, pipe busier", 90);
    l.step<Gradients>("backward: atomics", "the weights again from lse; dk, dv in memory", backward_atomics, FMA,
                      ATOMICS, "of the second kernel: 256 additions a pair of tokens");
    l.step<Gradients>("backward: in order", "a kernel for dq, one for dk and dv", backward_in_order, FMA, ATOMICS,
                      "none");
    l.step<Gradients>("backward: mma.sync", "both on the tensor cores", backward_tensor, TENSOR, TENSORS,
                      "of the second and third kernel: the pipe busy for half of the time");
#ifdef LAB_QWEN3
    l.step<Prompt>("qwen3.cu", "the program's own: pages, blocks that stay", run_qwen3, TENSOR, TENSORS, "as step 8");
    l.step<Gradients>("backward: qwen3.cu", "the program's own: wgmma, one launch", run_qwen3_backward, TENSOR, TENSORS,
                      "the pipe busy for most of the time");
#endif
    l.exercise("The scores of 4,096 tokens and 16 heads in float32, without the masked half: how many MB?",
               [] { return 4096. * 4096 / 2 * 16 * 4 / 1e6; });
    l.exercise("32,768 keys and values of 8 heads of 128 numbers in bf16: at 3,000 GB/s, how many microseconds does "
               "attention of one token take at the least?", [] { return 4. * 32768 * 8 * 128 / 3e12 * 1e6; });
    l.exercise("A multiprocessor does 2,048 multiply-adds and 16 exponentials a clock. Of a tile of 64 x 128 scores, "
               "D = 128: how long do the exponentials take, in % of the time of both products?",
               [] { return 100. * (64 * 128 / 16) / (2. * 64 * 128 * 128 / 2048); });
    return l;
}
} // namespace lab::attention

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::attention::laboratory().main(argc, argv); }
#endif
