// decode.cu: most of the time of decoding one token: y = W x, one product after the other, each with the result
// of the one before. Weights are read once and used once, so the only ceiling is the read bandwidth.
// (lab/lab.h says how to run it)
//
// --size LxC: L products of C x C weights in bf16; x of a product is y of the one before, rounded to bf16. 64 x 2,048
// are 537 MB, more than any L2 cache holds; a token of Qwen3-0.6B is 112 such products, of 7.9 MB on average, and
// the head. "Predicted" is arithmetic for an H100 (132 multiprocessors, reads at 3,000 GB/s, 700 ns from a load to its
// data): a product of 8.4 MB takes 2.8 us at the least, all 64 179 us. On an RTX 4090 (950 GB/s) they are 8.8 and 565
// us, so what is lost at the start and end of a kernel counts a third as much: expect 75 to 80% at step 3, 85% at step
// 6, 90% or more at step 8; steps 9 and 10 are Hopper's, and step 7 is step 6 there.
//
// How many bytes must be on the way? 3,000 GB/s x 700 ns = 2.1 MB, 16 KB a multiprocessor, at every moment. Each step
// is a way to keep so many on the way, also when a product begins and ends.
#ifdef LAB_QWEN3 // `make lab` by nvcc: the last step is the program's own kernel
#include "model/device.h"
#include "gpu/step/road.h"
#include "cpu/step_ceilings.h"
#include "qwen3.cu"
#endif
#include "lab/ptx.h"
#ifdef HAVE_CUBLAS
#include "lab/cublas.h"
#endif

namespace lab::decode {

// ---- What is computed, and how it is checked. Weights are noise, yet every sum is exact in float32 in any order, and
// y is exact in bf16: x holds each of its numbers twice, side by side; the two weights of such a pair add up to 0, but
// for one pair of a row, whose weights add up to 1 or -1. So rows r and r ^ 1 are both x's pair there, and no error is
// allowed. (The definition does not know this.)
struct Chain : Problem {
    int L, C; // C: a multiple of 16, so that rows are whole pieces of 16 bytes
    std::vector<bf16> weights, first;
    std::vector<float> want;
    Array<bf16> W, x, out, other; // in, and y of products in turn, so that the last one is in `out`
    Array<uint64_t> words;        // of one kernel for all products
    static bf16 narrow(float v) { return __float2bfloat16(v); }
    static std::vector<bf16> twice(const std::vector<float>& v) {
        std::vector<bf16> w(v.size() * 2);
        for (size_t i = 0; i < w.size(); i++) w[i] = narrow(v[i / 2]);
        return w;
    }
    static std::vector<bf16> noise(int L, int C) {
        std::vector<bf16> w((size_t)L * C * C);
#pragma omp parallel for
        for (int row = 0; row < L * C; row++) {
            const int pair = row % C / 2, l = row / C, chosen = (pair + 7 * l + 3) % (C / 2);
            const float sign = (pair * 13 + l) % 2 ? 1 : -1;
            const std::vector<float> v = random_numbers(C / 2, row);
            for (int j = 0; j < C / 2; j++) {
                w[(size_t)row * C + 2 * j] = narrow(v[j]);
                w[(size_t)row * C + 2 * j + 1] = narrow((j == chosen ? sign : 0) - v[j]);
            }
        }
        return w;
    }
    explicit Chain(Shape s)
        : L(s.x), C((s.y + 15) / 16 * 16), weights(noise(L, C)), first(twice(random_numbers(C / 2, 7))), W(weights),
          x(first), out(C), other(C), words((size_t)L * C / 2) {
        bytes = 2. * L * C * C, flops = bytes, tolerance = 0;
#ifdef HAVE_CUBLAS
        library_name = "cuBLAS";
#endif
    }
    void define() {
        for (bf16 v : first) want.push_back(__bfloat162float(v));
        for (int l = 0; l < L; l++) {
            std::vector<float> y(C);
#pragma omp parallel for
            for (int r = 0; r < C; r++) {
                double sum = 0;
                for (int k = 0; k < C; k++)
                    sum += (double)__bfloat162float(weights[((size_t)l * C + r) * C + k]) * want[k];
                y[r] = __bfloat162float(narrow((float)sum));
            }
            want = y;
        }
    }
    void spoil() override { out.spoil(), other.spoil(), words.spoil(); }
    double error() override {
        if (want.empty()) define();
        std::vector<float> got;
        for (bf16 v : out.get()) got.push_back(__bfloat162float(v));
        return largest_difference(got, want);
    }
    // f(weights, x, y) for each product.
    template <class F> void each(F f) {
        for (int l = 0; l < L; l++) {
            const auto y = [&](int of) { return (L - 1 - of) % 2 ? other.p : out.p; };
            f(W.p + (size_t)l * C * C, l ? y(l - 1) : x.p, y(l));
        }
    }
#ifdef HAVE_CUBLAS
    void library() override { // a product with one column
        const float one = 1, zero = 0;
        each([&](const bf16* weights, const bf16* from, bf16* to) {
            const cublasStatus_t said =
                cublasGemmEx(cublas(), CUBLAS_OP_T, CUBLAS_OP_N, C, 1, C, &one, weights, CUDA_R_16BF, C, from,
                             CUDA_R_16BF, C, &zero, to, CUDA_R_16BF, C, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
            if (said != CUBLAS_STATUS_SUCCESS) fail("cuBLAS says %d", (int)said);
        });
    }
#endif
};
struct Launched : Chain { // by the host, one after the other
    explicit Launched(Shape s) : Chain(s) { captured = false; }
};

__device__ inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ inline float dot8(uint4 a, uint4 b) { // of 16 bytes
    return low(a.x) * low(b.x) + high(a.x) * high(b.x) + low(a.y) * low(b.y) + high(a.y) * high(b.y) +
           low(a.z) * low(b.z) + high(a.z) * high(b.z) + low(a.w) * low(b.w) + high(a.w) * high(b.w);
}
__device__ inline float warp_sum(float x) {
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// ---- 1 a thread a row. As it is written: a loop for each number of y. The lanes of a warp read 32 rows at the same
// place, 4,096 bytes apart: 32 sectors for 64 bytes, of which L1 may keep the rest for the next rounds. Predicted:
// 2,048 threads are 64 warps on 132 multiprocessors, each with 32 sectors, 1 KB, on the way: 64 KB / 700 ns = 0.1 TB/s,
// of which L1 keeps what is not needed at once. Some 3% of the ceiling.
__global__ void by_threads(const bf16* W, const bf16* x, bf16* y, int C) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= C) return;
    float sum = 0;
    for (int k = 0; k < C; k++) sum += __bfloat162float(W[(size_t)r * C + k]) * __bfloat162float(x[k]);
    y[r] = __float2bfloat16(sum);
}

// ---- 2 a warp a row. Lanes have neighbours of a row, 64 bytes a load, and add up by shuffles. Predicted: 2,048 warps,
// 15 a multiprocessor, with four loads on the way if the compiler unrolls the loop by four: 4 KB, a quarter of what it
// takes, and 64 rounds of a load and a handful of instructions: 20 to 25%.
__global__ void __launch_bounds__(256) by_warps(const bf16* W, const bf16* x, bf16* y, int C) {
    const int r = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (r >= C) return;
    float sum = 0;
    // exercise decode-2: the product of row r of W with x, by a warp: neighbouring lanes take neighbouring numbers.
    // Then the lanes' sums are added up: warp_sum().
    for (int k = lane; k < C; k += 32) sum += __bfloat162float(W[(size_t)r * C + k]) * __bfloat162float(x[k]);
    sum = warp_sum(sum);
    // end of exercise
    if (lane == 0) y[r] = __float2bfloat16(sum);
}

// ---- 3 vector loads. 16 bytes a lane: 8 rounds a row instead of 64, each with 512 bytes. Predicted: 15 warps x 4
// loads x 512 B = 30 KB on the way while the loop runs, which is enough; but it runs for 2.8 us at best, and begins and
// ends with none: a launch, 700 ns until the first data, the shuffles, and the host's 2 to 3 us a launch. 40 to 50%.
//
// ---- 4 split over warps. Four warps share a row, and their sums meet in shared memory: 62 warps a multiprocessor,
// each with its two loads at once. Predicted: the beginning is over at once, so a little more: 50%.
//
// ---- 5 several rows a warp. Each 16 bytes of x, which come from L1, serve four rows; so there are half as many loads,
// and eight of W before the first is used: as many bytes on the way from a quarter of the warps. Predicted: as step 4
// or a little better: the host's launches bound both, and the gap between kernels.
//
// ---- 6 a graph. The same kernels as nodes of a graph: no host between them. Predicted: a node starts 1.0 to 1.5 us
// after the last one's end, and then waits 700 ns for its first data: 2.8 us of 5: 55 to 60%.
//
// ---- 7 launched early. Weights do not depend on the product before, only x does. With a programmatic dependent launch
// a block may start when the last kernel's blocks all have their places, load its weights to registers, and wait with
// these in its hands (Hopper and later; elsewhere this is step 6). Predicted: the start of a kernel and its first
// 700 ns disappear behind the end of the one before: 70 to 80%. How much is on the way is what registers hold.
template <int SPLIT, int ROWS, bool EARLY>
__global__ void __launch_bounds__(256) by_rows(const bf16* W, const bf16* x, bf16* y, int C) {
    constexpr int AHEAD = 2; // rounds of loads before the wait: all there are at C = 2,048
    __shared__ float parts[8][ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = C / 8;
    const int row = (blockIdx.x * (8 / SPLIT) + warp / SPLIT) * ROWS, from = warp % SPLIT * 32 + lane;
    const uint4* const weights = (const uint4*)W + (size_t)row * each;
    const auto load = [&](int r, int c) { return row + r < C && c < each ? weights[(size_t)r * each + c] : uint4{}; };
    float sum[ROWS] = {};
    uint4 first[AHEAD][ROWS];
    if (EARLY) {
        let_next_start();
        UNROLL for (int a = 0; a < AHEAD; a++)
            UNROLL for (int r = 0; r < ROWS; r++) first[a][r] = load(r, from + a * 32 * SPLIT);
        wait_for_previous();
        UNROLL for (int a = 0; a < AHEAD; a++)
            if (const int c = from + a * 32 * SPLIT; c < each)
                UNROLL for (int r = 0; r < ROWS; r++) sum[r] += dot8(first[a][r], ((const uint4*)x)[c]);
    }
    // exercise decode-3: the warp's share of the row: pieces of 8 numbers (uint4) from `from` on, 32 * SPLIT apart.
    // load(r, c) is piece c of the warp's row r; dot8() multiplies two pieces. x is read once for all ROWS.
    for (int c = from + (EARLY ? AHEAD * 32 * SPLIT : 0); c < each; c += 32 * SPLIT) {
        const uint4 mine = ((const uint4*)x)[c];
        UNROLL for (int r = 0; r < ROWS; r++) sum[r] += dot8(load(r, c), mine);
    }
    // end of exercise
    UNROLL for (int r = 0; r < ROWS; r++) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0) parts[warp][r] = sum[r];
    }
    __syncthreads();
    const int t = threadIdx.x, r = blockIdx.x * (8 / SPLIT) * ROWS + t;
    if (t >= 8 / SPLIT * ROWS || r >= C) return;
    float all = 0;
    for (int w = 0; w < SPLIT; w++) all += parts[t / ROWS * SPLIT + w][t % ROWS];
    y[r] = __float2bfloat16(all);
}

// ---- 8 a ring, by cp.async. What is on the way needs no registers: it waits in shared memory. A block a
// multiprocessor; a warp has rows of its own and a ring of 16 pieces of 512 bytes: 64 KB a multiprocessor, four times
// what the latency asks for, from the first moment on. A lane reads back its own copies, so no thread waits
// for anybody: no barrier, only its own groups of copies. Predicted: of 8 x 132 warps most have two rows and some one,
// 97% used; as step 7, and better where a matrix is larger than the registers: 75 to 80%.
constexpr int PIECE = 256, DEPTH = 16; // numbers: 16 bytes a lane; pieces in a ring
__global__ void __launch_bounds__(256) ring(const bf16* W, const bf16* x, bf16* y, int C) {
    DYNAMIC_SHARED(bf16, pieces);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = gridDim.x * 8, mine = blockIdx.x * 8 + warp;
    const int in_row = (C + PIECE - 1) / PIECE, count = (C - mine + warps - 1) / warps * in_row; // (C >= mine, or none)
    bf16* const own = pieces + warp * DEPTH * PIECE + lane * 8;
    const auto copy = [&](int i) {
        const int r = mine + i / in_row * warps, k = i % in_row * PIECE + lane * 8;
        copy16(own + i % DEPTH * PIECE, W + (size_t)r * C + k, i < count && k < C);
        copies_commit();
    };
    let_next_start();
    for (int i = 0; i < DEPTH - 1; i++) copy(i);
    wait_for_previous();
    float sum = 0;
    for (int i = 0; i < count; i++) {
        // exercise decode-8: wait for piece i, ask for the piece that takes the freed place, multiply piece i with its
        // part of x.
        // copies_wait<N>() waits until at most N groups are under way. copy(i) is a group, also past the end.
        copies_wait<DEPTH - 2>();
        copy(i + DEPTH - 1);
        const int k = i % in_row * PIECE + lane * 8;
        if (k < C) sum += dot8(*(const uint4*)(own + i % DEPTH * PIECE), *(const uint4*)(x + k));
        // end of exercise
        if (i % in_row < in_row - 1) continue;
        sum = warp_sum(sum);
        if (lane == 0) y[mine + i / in_row * warps] = __float2bfloat16(sum);
        sum = 0;
    }
}

// ---- 9 bulk copies (Hopper). A lane's address and bounds for each 16 bytes are
// instructions, and each group of copies is waited for by all. One lane asks for a whole piece of 2 KB by one
// instruction, and an mbarrier counts its bytes. The ring has 6 of them: 96 KB a multiprocessor, so that two blocks, of
// two kernels, fit side by side. Predicted: as step 8, within a few percent: a kernel's start and end is what both
// lose.
//
// ---- 10 one kernel for all products (Hopper). What is lost now is lost between
// kernels: rings run dry and fill again. So one kernel stays for all products, and its rings do not stop at the end of
// one: the next one's weights come while its x is not there yet. Blocks tell each other their numbers by words of eight
// bytes, two numbers of y and the product they are of: the word itself shows whether it has come, and no fence or
// counter is needed. A warp owns two neighbouring rows, a word; every block collects all words. All blocks must run at
// once, so there are no more than multiprocessors, and the launch says so (cooperative). Predicted: 1.2 to 1.5 us an
// exchange, of which 2.8 us of weights hide most while the ring is deep enough: 80 to 85%.
//
// How one asks is worth a third. Each thread polling its words one after the other took 345 us (on an H200): four times
// the way to the L2 cache, and as many polls on the way as weights. All four words asked for together 273; by a lane of
// each warp that waits for one word first, 247; and two rows multiplied side by side, each piece of x read once, 226.
//
// ---- 11 qwen3.cu: step.h, a whole token of Qwen3-0.6B at position 100 without the draw, whatever --size says: 112
// products as here, attention, norms and the head, whose 311 MB come at the memory's speed.
constexpr int BULK = 1024, BULK_DEPTH = 6; // numbers of a piece; pieces in a ring
constexpr size_t BULK_SHARED = 8 * BULK_DEPTH * BULK * sizeof(bf16) + 128;
struct Bulk { // a warp's ring: pieces in turn of rows in turn, each row C numbers
    bf16* pieces;
    uint64_t* full;
    int in_row, count, lane;
    __device__ Bulk(bf16* room, uint64_t* barriers, int C, int rows)
        : pieces(room + threadIdx.x / 32 * BULK_DEPTH * BULK), full(barriers + threadIdx.x / 32 * BULK_DEPTH),
          in_row((C + BULK - 1) / BULK), count(rows * in_row), lane(threadIdx.x % 32) {
        if (lane == 0)
            for (int i = 0; i < BULK_DEPTH; i++) barrier_init(&full[i], 1);
        if (lane == 0) barriers_ready();
        __syncwarp();
    }
    __device__ void ask(int i, const bf16* row, int k, int C) const { // all lanes; numbers k .. of a row
        if (lane || i >= count) return;
        const int bytes = min(BULK, C - k) * (int)sizeof(bf16);
        barrier_expect(&full[i % BULK_DEPTH], bytes);
        bulk_load(pieces + i % BULK_DEPTH * BULK, row + k, bytes, &full[i % BULK_DEPTH]);
    }
    __device__ const bf16* wait(int i) const {
        barrier_wait(&full[i % BULK_DEPTH], i / BULK_DEPTH % 2);
        return pieces + i % BULK_DEPTH * BULK;
    }
};
__global__ void __launch_bounds__(256) bulk_ring(const bf16* W, const bf16* x, bf16* y, int C) {
    DYNAMIC_SHARED(bf16, room);
    __shared__ uint64_t barriers[8 * BULK_DEPTH];
    const int warps = gridDim.x * 8, mine = blockIdx.x * 8 + threadIdx.x / 32;
    const Bulk ring(room, barriers, C, (C - mine + warps - 1) / warps);
    const auto ask = [&](int i) {
        ring.ask(i, W + (size_t)(mine + i / ring.in_row * warps) * C, i % ring.in_row * BULK, C);
    };
    let_next_start();
    for (int i = 0; i < BULK_DEPTH; i++) ask(i);
    wait_for_previous();
    float sum = 0;
    for (int i = 0; i < ring.count; i++) {
        const bf16 *piece = ring.wait(i), *now = x + i % ring.in_row * BULK;
        UNROLL for (int k = ring.lane * 8; k < BULK; k += 256)
            if (i % ring.in_row * BULK + k < C) sum += dot8(*(const uint4*)(piece + k), *(const uint4*)(now + k));
        __syncwarp(); // all lanes have read it: the next may come
        ask(i + BULK_DEPTH);
        if (i % ring.in_row < ring.in_row - 1) continue;
        sum = warp_sum(sum);
        if (ring.lane == 0) y[mine + i / ring.in_row * warps] = __float2bfloat16(sum);
        sum = 0;
    }
}
constexpr int MAX_C = 8192;         // of one_kernel
constexpr int WORDS = 4;            // that a thread asks for at once
constexpr int PATIENCE = 1 << 16;   // polls, until a word is taken to be lost
__global__ void __launch_bounds__(256)
one_kernel(const bf16* W, const bf16* x, bf16* y, uint64_t* words, int L, int C) {
    DYNAMIC_SHARED(bf16, room);
    __shared__ __align__(16) bf16 numbers[2][MAX_C]; // x of a product, and of the next
    __shared__ uint64_t barriers[8 * BULK_DEPTH];
    const int warps = gridDim.x * 8, mine = blockIdx.x * 8 + threadIdx.x / 32;
    const int pairs = (C / 2 - mine + warps - 1) / warps; // of rows, of each product
    const Bulk ring(room, barriers, C, L * pairs * 2);
    const auto ask = [&](int i) { // pieces of the two rows of a pair in turn
        const int n = i / 2 % ring.in_row, j = i / 2 / ring.in_row, l = j / pairs;
        ring.ask(i, W + ((size_t)l * C + (mine + j % pairs * warps) * 2 + i % 2) * C, n * BULK, C);
    };
    for (int i = 0; i < BULK_DEPTH; i++) ask(i);
    for (int l = 0, i = 0; l < L; l++) {
        uint32_t* const own = (uint32_t*)numbers[l % 2];
        const uint64_t* const from = words + (size_t)(l - 1) * C / 2;
        if (l && ring.lane == 0) // one word, until it is there; then all words by all lanes
            for (int tries = 0; (int)(get_word(from + C / 2 - 1) >> 32) != l && tries < PATIENCE; tries++) {}
        __syncwarp();
        for (int first = threadIdx.x; first < C / 2; first += 256 * WORDS) {
            uint64_t word[WORDS] = {};
            bool there = false;
            for (int tries = 0; !there && tries < PATIENCE; tries++) {
                there = true;
                UNROLL for (int w = 0; w < WORDS; w++)
                    if (const int p = first + w * 256; p < C / 2)
                        word[w] = l ? get_word(from + p) : ((const uint32_t*)x)[p];
                UNROLL for (int w = 0; w < WORDS; w++)
                    if (first + w * 256 < C / 2) there &= (int)(word[w] >> 32) == l;
            }
            UNROLL for (int w = 0; w < WORDS; w++) // (NaN: the step fails, no GPU hangs)
                if (const int p = first + w * 256; p < C / 2) own[p] = there ? (uint32_t)word[w] : 0xffffffff;
        }
        __syncthreads(); // (a block that is a product ahead writes to the other half)
        for (int pair = 0; pair < pairs; pair++) {
            float sum[2] = {};
            for (int n = 0; n < ring.in_row; n++, i += 2) {
                const bf16 *first = ring.wait(i), *second = ring.wait(i + 1), *now = numbers[l % 2] + n * BULK;
                UNROLL for (int k = ring.lane * 8; k < BULK; k += 256)
                    if (n * BULK + k < C) {
                        const uint4 eight = *(const uint4*)(now + k);
                        sum[0] += dot8(*(const uint4*)(first + k), eight);
                        sum[1] += dot8(*(const uint4*)(second + k), eight);
                    }
                __syncwarp(); // all lanes have read them: the next may come
                ask(i + BULK_DEPTH), ask(i + 1 + BULK_DEPTH);
            }
            const __nv_bfloat162 both = __floats2bfloat162_rn(warp_sum(sum[0]), warp_sum(sum[1]));
            uint32_t bits;
            memcpy(&bits, &both, 4);
            const int at = mine + pair * warps;
            if (ring.lane) continue;
            if (l == L - 1) ((uint32_t*)y)[at] = bits;
            else put_word(words + (size_t)l * C / 2 + at, (uint64_t)(l + 1) << 32 | bits);
        }
    }
}

// ================================================================================ the table
// A launch that may begin before the kernel ahead of it has ended, or (together) whose blocks all run at once.
template <class... P, class... A>
void launch_as([[maybe_unused]] bool early, [[maybe_unused]] bool together, void (*kernel)(P...), dim3 grid, dim3 block,
               size_t shared, A... args) {
#ifdef __CUDACC__
    if (shared > 48 << 10)
        GPU_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    int major = 0;
    GPU_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    cudaLaunchAttribute attribute[2];
    unsigned count = 0;
    if (early && major >= 9) {
        attribute[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (together) attribute[count].id = cudaLaunchAttributeCooperative, attribute[count++].val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = attribute, config.numAttrs = count;
    GPU_CHECK(cudaLaunchKernelEx(&config, kernel, P(args)...));
#else
    launch(kernel, grid, block, shared, args...);
#endif
}
template <int SPLIT, int ROWS, bool EARLY> void rows_by(Chain& p) {
    p.each([&](const bf16* W, const bf16* x, bf16* y) {
        launch_as(EARLY, false, by_rows<SPLIT, ROWS, EARLY>, blocks_for(p.C, 8 / SPLIT * ROWS), dim3(256), 0, W, x, y,
                  p.C);
    });
}
template <class K> void rings(Chain& p, K kernel, size_t shared) {
    const dim3 grid(std::min(multiprocessors(), blocks_for(p.C, 8)));
    p.each([&](const bf16* W, const bf16* x, bf16* y) {
        launch_as(true, false, kernel, grid, dim3(256), shared, W, x, y, p.C);
    });
}
inline void all_products(Chain& p) {
    if (p.C > MAX_C) fail("one kernel takes products up to %d, not %d", MAX_C, p.C);
    p.words.clear();
    int blocks = std::min(multiprocessors(), blocks_for(p.C, 16));
#ifndef __CUDACC__
    blocks = 1; // (emulated blocks run one after the other: none could wait for another)
#endif
    launch_as(false, true, one_kernel, dim3(blocks), dim3(256), BULK_SHARED, p.W.p, p.x.p, p.out.p, p.words.p, p.L,
              p.C);
}
#ifdef LAB_QWEN3
__global__ void noise(::bf16* to, size_t n) { // about normal, deviation 0.02
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        float sum = 0;
        for (uint32_t word : philox(1, i, 0).v) sum += (float)word / 4294967296.f - 0.5f;
        to[i] = round_bf16(sum * 0.0346f);
    }
}
// A token by the program's one kernel; its logits are those of the program's kernels one after the other, within 1% of
// the largest. (That those are right, tests/gpu shows.)
struct WholeToken : Problem {
    static constexpr int POSITION = 100, PAGES = POSITION / PAGE + 1;
    const Config c = {1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e-6f, 1e6, true, {}};
    Context ctx = open_gpu(0);
    Arena arena;
    Weights<::bf16> w;
    Activations<::bf16> a;
    KVCache<::bf16> kv;
    float *rope, *logits;
    ::bf16* picked;
    int* numbers; // token, position, sequence, slot, then pages
    Draw* draw;
    unsigned long long* best;
    std::vector<float> want;
    Batch batch;
    std::unique_ptr<StepRoad> road;

    void plan() {
        const auto matrix = [&](Linear<::bf16>& W, std::initializer_list<int> rows, int in) {
            std::copy(rows.begin(), rows.end(), W.rows), W.in = in;
            const ::bf16* at = arena.take<::bf16>((size_t)W.out() * in);
            for (size_t i = 0; i < rows.size(); at += (size_t)W.rows[i++] * in) W.w[i] = at;
        };
        w.layers.resize(c.L);
        matrix(w.embed, {c.V}, c.C), w.head = w.embed;
        for (Layer<::bf16>& y : w.layers) {
            matrix(y.qkv, {c.H * c.D, c.K * c.D, c.K * c.D}, c.C), matrix(y.o, {c.C}, c.H * c.D);
            matrix(y.gate_up, {c.F, c.F}, c.C), matrix(y.down, {c.C}, c.F);
            y.norm1 = arena.take<::bf16>(c.C), y.norm2 = arena.take<::bf16>(c.C);
            y.q_norm = arena.take<::bf16>(c.D), y.k_norm = arena.take<::bf16>(c.D);
        }
        w.norm = arena.take<::bf16>(c.C);
        kv.plan(arena, c, PAGES);
        // (up to here all is noise)
        a.plan(arena, c, 1, false);
        rope = arena.take<float>((size_t)(POSITION + 1) * c.D);
        logits = arena.take<float>(c.V);
        picked = arena.take<::bf16>(c.C);
        numbers = arena.take<int>(4 + PAGES);
        draw = arena.take<Draw>(1), best = arena.take<unsigned long long>(BEST_BLOCKS);
        ctx.gpu->attention = arena.take<float>(attention_scratch(ctx, 1, 1, c.H, c.D));
        ctx.gpu->attention_arrived = arena.take<int>(c.H);
        ctx.gpu->partial = arena.take<float>(PARTIAL_BYTES / sizeof(float));
        ctx.gpu->arrived = arena.take<int>(MAX_TILES);
    }
    explicit WholeToken(Shape) {
        ctx.gpu->stream = stream, ctx.one_kernel = Context::TOGETHER, arena.gpu = true;
        plan(), arena.allocate("a token's model"), plan();
        launch(noise, 1024, 256, 0, (::bf16*)w.embed.w[0], (size_t)((::bf16*)a.layer[0].in - w.embed.w[0]));
        std::vector<float> angles((size_t)(POSITION + 1) * c.D);
        fill_rope(angles.data(), POSITION + 1, c.D, c.rope_theta, c.rope_scaling);
        std::vector<int> host = {7, POSITION, 0, POSITION};
        for (int i = 0; i < PAGES; i++) host.push_back(i);
        const Draw any = {Sampling{}, c.V}; // without penalties
        gpu_copy(ctx, rope, angles.data(), angles.size() * sizeof(float), false);
        gpu_copy(ctx, numbers, host.data(), host.size() * sizeof(int), false);
        gpu_copy(ctx, draw, &any, sizeof any, false);
        batch = {1, 1, numbers, numbers + 1, numbers + 2, numbers + 3, numbers + 4, PAGES, 1};
        road = std::make_unique<StepRoad>(ctx, c, w);
        road->use(batch, kv, rope, logits, draw, best);
        bytes = (double)step_bytes(w) + (double)KVCache<::bf16>::bytes(c, 1) / PAGE * (POSITION + 1);
        ::forward(ctx, c, w, batch, a, kv, rope);
        head_gpu(ctx, logits, picked, a.normed, numbers + 2, w.head, 1);
        want = read_logits();
        for (float x : want) tolerance = std::max(tolerance, 0.01 * std::fabs(x));
    }
    void spoil() override { GPU_CHECK(cudaMemsetAsync(logits, 0xff, c.V * sizeof(float), stream)); }
    double error() override {
        const std::vector<float> got = read_logits();
        road->check();
        return largest_difference(got, want);
    }
    std::vector<float> read_logits() {
        std::vector<float> x(c.V);
        gpu_copy(ctx, x.data(), logits, x.size() * sizeof(float), true);
        return x;
    }
};
#endif
inline Laboratory laboratory() {
    Laboratory l("decode", "products of one row, one after the other: the read bandwidth", {64, 2048, 1}, {3, 48, 1});
    constexpr const char *SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
                         *FLIGHT = "sm__warps_active.avg.pct_of_peak_sustained_active,"
                                   "dram__throughput.avg.pct_of_peak_sustained_elapsed",
                         *LOADS = "smsp__inst_executed_pipe_lsu.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed",
                         *TIME = "gpu__time_duration.sum";
    l.step<Launched>("a thread a row", "one loop for each number", [](Chain& p) {
        p.each([&](const bf16* W, const bf16* x, bf16* y) {
            launch(by_threads, blocks_for(p.C, 32), dim3(32), 0, W, x, y, p.C);
        });
    }, READ, SECTORS, "16.5: the mean of 32 (W) and 1 (x)");
    l.step<Launched>("a warp a row", "neighbours of a row; a sum by shuffles", [](Chain& p) {
        p.each([&](const bf16* W, const bf16* x, bf16* y) {
            launch(by_warps, blocks_for(p.C, 8), dim3(256), 0, W, x, y, p.C);
        });
    }, READ, SECTORS, "2");
    l.step<Launched>("vector loads", "16 bytes a lane", rows_by<1, 1, false>, READ, SECTORS,
                     "16: four lines a request");
    l.step<Launched>("split over warps", "four warps a row", rows_by<4, 1, false>, READ, FLIGHT,
                     "four times the warps");
    l.step<Launched>("several rows", "four rows for the same x", rows_by<4, 4, false>, READ, LOADS,
                     "fewer loads; the memory as busy as before");
    l.step<Chain>("a graph", "no host between the kernels", rows_by<4, 4, false>, READ, TIME,
                  "as step 5: the kernels are the same");
    l.step<Chain>("launched early", "weights before the last product has ended", rows_by<4, 4, true>, READ, TIME,
                  "nothing: ncu runs kernels one by one. nsys profile shows them overlap");
    l.step<Chain>("a ring", "cp.async: no registers for what is on the way",
                  [](Chain& p) { rings(p, ring, 8 * DEPTH * PIECE * sizeof(bf16)); }, READ, FLIGHT,
                  "8 warps a multiprocessor");
    l.step<Chain>("bulk copies", "one instruction for 2 KB", [](Chain& p) { rings(p, bulk_ring, BULK_SHARED); }, READ,
                  LOADS, "fewer loads than step 8", 90);
    l.step<Chain>("one kernel", "rings that never stop; blocks tell each other", all_products, READ, FLIGHT,
                  "the memory busy all the time", 90);
#ifdef LAB_QWEN3
    l.step<WholeToken>("qwen3.cu", "the program's own: a token, all of it",
                       [](WholeToken& t) { t.road->launch_step(); }, READ, FLIGHT, "as step 10");
#endif
    l.exercise("At 3,000 GB/s and 700 ns from a load to its data: how many KB (1,000 bytes) must each of 132 "
               "multiprocessors have on the way?", [] { return 3e12 * 700e-9 / 132 / 1e3; });
    l.exercise("Step 8 gives 2,048 rows to 8 x 132 warps, which take whole rows. How many per cent of the warps' time "
               "is used, if every row takes as long?", [] { return 100. * 2048 / (2 * 8 * 132); });
    l.exercise("A token of 1.192 GB of weights in 113 products at 3,040 GB/s, and 1.3 us lost at each: how many tokens "
               "a second?", [] { return 1 / (1.192e9 / 3.04e12 + 113 * 1.3e-6); });
    return l;
}
} // namespace lab::decode

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::decode::laboratory().main(argc, argv); }
#endif
