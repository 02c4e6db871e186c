// reduce_scan.cu: many numbers become one (a sum), a row of them (rmsnorm, softmax), as many (a scan), or a few (a
// histogram). All of it is bound by the memory, if threads can be kept from waiting for each other.
// (lab/lab.h says how to run it; --size 67108864x4096: numbers, and how many make a row)
#include "lab/lab.h"
#ifdef HAVE_CUB
#include <cub/cub.cuh>
#endif
#include <cfloat>

namespace lab::reduce_scan {
constexpr int THREADS = 256; // of every block

// CUB's functions are called twice: first they say how much scratch they want. (Built by nvcc only.)
struct Scratch {
    std::unique_ptr<Array<char>> memory;
    template <class F> void call(F f) {
        size_t bytes = memory ? memory->n : 0;
        if (!memory) f(nullptr, bytes), memory = std::make_unique<Array<char>>(bytes ? bytes : 1);
        f(memory->p, bytes);
    }
};

// ================================================================================ a sum
struct Sum : Problem {
    int n; // a multiple of four
    std::vector<float> numbers;
    Array<float> in, out, parts;
    Array<int> arrived;
    Scratch scratch;
    explicit Sum(Shape s)
        : n((s.x + 3) / 4 * 4), numbers(random_numbers(n, 1)), in(numbers), out(1), parts(8 * multiprocessors()),
          arrived(1) {
        bytes = 4. * n, flops = n;
        arrived.clear();
#ifdef HAVE_CUB
        library_name = "CUB's DeviceReduce";
#endif
    }
    void spoil() override { out.spoil(), parts.spoil(); }
    double error() override {
        double sum = 0;
        for (float x : numbers) sum += x;
        return largest_difference(out.get(), {(float)sum});
    }
#ifdef HAVE_CUB
    void library() override {
        scratch.call([&](void* p, size_t& b) { GPU_CHECK(cub::DeviceReduce::Sum(p, b, in.p, out.p, n, stream)); });
    }
#endif
};

// ---- 1 atomics. Every thread adds its number to the one sum. All additions are to one address, so they come one after
// another, where the address lives: in the L2 cache. Predicted: one a clock at best, 2^26 at 1.7 GHz: 39 ms, where
// reading the numbers takes 90 us at 3,000 GB/s.
__global__ void atomics(const float* in, float* out, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) atomicAdd(out, in[i]);
}

// ---- 2 a tree. The threads of a block add up in shared memory: in each round a thread adds its right neighbour's
// number, then that of two places on, then four; one atomic addition a block is left. 256 times fewer. Predicted:
// 300,000 atomics need 0.2 ms, about twice what reading takes; and 8 rounds with a barrier each, in which every second,
// then every fourth thread works: the threads of a warp diverge, and warps without work to do run all the same.
__global__ void tree(const float* in, float* out, int n) {
    __shared__ float part[THREADS];
    const int t = threadIdx.x, i = blockIdx.x * THREADS + t;
    part[t] = i < n ? in[i] : 0;
    for (int step = 1; step < THREADS; step *= 2) {
        __syncthreads();
        if (t % (2 * step) == 0) part[t] += part[t + step];
    }
    if (t == 0) atomicAdd(out, part[0]);
}

// ---- 3 a tree of neighbours. One loop is turned round: the first half of the threads add the second half's numbers,
// then the first quarter. Whole warps work or rest, without divergence until one warp is left; neighbours read
// neighbouring banks. 12 warps have work in the 8 rounds together, where step 2 has 47 (exercise 3). Predicted: a third
// less time.
__global__ void neighbours(const float* in, float* out, int n) {
    __shared__ float part[THREADS];
    const int t = threadIdx.x, i = blockIdx.x * THREADS + t;
    part[t] = i < n ? in[i] : 0;
    // exercise reduce_scan-3: add up part[]: the first half of the threads adds the second half's numbers, then the
    // first quarter, ...
    // A barrier before each round. The sum ends in part[0].
    for (int step = THREADS / 2; step; step /= 2) {
        __syncthreads();
        if (t < step) part[t] += part[t + step];
    }
    // end of exercise
    if (t == 0) atomicAdd(out, part[0]);
}

// ---- 4 shuffles. Within a warp lanes read each other's registers: 5 instructions, no barrier, no shared memory. One
// barrier is left, between the warps' sums and the last five. Predicted: less than step 3; what is left is that a
// thread has only one number: 4 bytes under way a thread are 8 KB a multiprocessor, a half of what it takes to keep the
// memory busy.
__device__ inline float warp_sum(float x) { // in every lane
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}
__device__ inline float block_sum(float x) { // in every thread
    __shared__ float parts[THREADS / 32];
    // exercise reduce_scan-4: the sum over the block, in every thread: warp_sum() within each warp, then over the
    // warps' sums.
    // The warps meet in parts[]. A call may follow another: which threads still read parts[]?
    // instead: return x;
    x = warp_sum(x);
    __syncthreads(); // (all have finished reading the previous call's sums)
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < THREADS / 32 ? parts[threadIdx.x % 32] : 0);
    // end of exercise
}
__global__ void shuffles(const float* in, float* out, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    const float sum = block_sum(i < n ? in[i] : 0);
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

// ---- 5 several a thread. As many blocks as run at once, 8 a multiprocessor; each thread walks through the numbers, 16
// bytes at a time, and adds in a register. The tree is built once a block, not once for 256 numbers: what it costs is
// gone. Two loads of 16 bytes are under way in each thread. Predicted: 90% of the ceiling or more.
__device__ inline float add_up(const float* in, int n) {
    const float4* four = (const float4*)in;
    const int stride = gridDim.x * THREADS;
    float a = 0, b = 0; // two chains: an addition does not wait for the one before
    int i = blockIdx.x * THREADS + threadIdx.x;
    for (; i + stride < n / 4; i += 2 * stride) {
        const float4 v = four[i], w = four[i + stride];
        a += v.x + v.y + v.z + v.w, b += w.x + w.y + w.z + w.w;
    }
    if (i < n / 4) a += four[i].x + four[i].y + four[i].z + four[i].w;
    return a + b;
}
__global__ void several(const float* in, float* out, int n) {
    const float sum = block_sum(add_up(in, n));
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

// ---- 6 in one order. Which block's atomic addition comes first differs from run to run, and so does a rounded sum.
// Here each block leaves its sum in memory, and the last one to arrive adds all up, always in the same order. qwen3.cu
// does so everywhere. The fence comes before the count: a block that sees the count sees the sum. Predicted: as step 5.
__global__ void in_order(const float* in, float* out, float* parts, int* arrived, int n) {
    __shared__ int last;
    const float sum = block_sum(add_up(in, n));
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(arrived, 1) == (int)gridDim.x - 1;
        if (last) *arrived = 0; // for the next launch
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    float mine = 0;
    for (int i = threadIdx.x; i < (int)gridDim.x; i += THREADS) mine += ((const volatile float*)parts)[i];
    mine = block_sum(mine);
    if (threadIdx.x == 0) *out = mine;
}

// ================================================================================ rows: rmsnorm and softmax
// A block has a row. Both need sums over the row before the first number can be written, so a row is read at least
// twice, from memory once and from a cache then, or kept.
struct Rows : Problem {
    int rows, columns;
    std::vector<float> numbers, weights;
    Array<float> in, w, out;
    explicit Rows(Shape s)
        : rows(std::max(s.x / s.y, 1)), columns(s.y), numbers(random_numbers((size_t)rows * columns, 1)),
          weights(random_numbers(columns, 2)), in(numbers), w(weights), out(numbers.size()) {
        bytes = 8. * (double)numbers.size(), flops = 4. * (double)numbers.size();
        tolerance = 1e-5; // of the relative error
    }
    void spoil() override { out.spoil(); }
    virtual std::vector<double> define(const float* x) const = 0; // a row
    double error() override {
        const std::vector<float> got = out.get();
        double most = 0;
        for (int r = 0; r < rows; r++) {
            const std::vector<double> want = define(&numbers[(size_t)r * columns]);
            for (int c = 0; c < columns; c++) {
                const double e = std::fabs(got[(size_t)r * columns + c] / want[c] - 1);
                if (!(e <= most)) most = std::isnan(e) ? INFINITY : e;
            }
        }
        return most;
    }
};
struct Norm : Rows { // y = x / sqrt(mean(x^2) + 1e-6) w
    using Rows::Rows;
    std::vector<double> define(const float* x) const override {
        double squares = 0;
        std::vector<double> y(columns);
        for (int c = 0; c < columns; c++) squares += (double)x[c] * x[c];
        for (int c = 0; c < columns; c++) y[c] = x[c] / std::sqrt(squares / columns + 1e-6) * weights[c];
        return y;
    }
};
struct Softmax : Rows { // y = e^x / sum of them
    using Rows::Rows;
    std::vector<double> define(const float* x) const override {
        double sum = 0;
        std::vector<double> y(columns);
        for (int c = 0; c < columns; c++) sum += std::exp((double)x[c]);
        for (int c = 0; c < columns; c++) y[c] = std::exp((double)x[c]) / sum;
        return y;
    }
};

// ---- 7 rmsnorm. A sum of squares, then the row once more. Predicted: a row of 4,096 has 16 KB and is in the L1 cache
// when it is read again, so the memory sees it once: the ceiling of a copy, less the wait between the two passes, which
// the multiprocessor's other blocks fill.
__global__ void rmsnorm(const float* in, const float* w, float* out, int columns) {
    const float* x = in + (size_t)blockIdx.x * columns;
    float squares = 0;
    for (int c = threadIdx.x; c < columns; c += THREADS) squares += x[c] * x[c];
    const float scale = rsqrtf(block_sum(squares) / (float)columns + 1e-6f);
    for (int c = threadIdx.x; c < columns; c += THREADS) out[(size_t)blockIdx.x * columns + c] = x[c] * scale * w[c];
}

// ---- 8 softmax in three passes. e^x overflows from 88 on, so the row's largest number is taken off first: one pass
// for it, one for the sum, one to write. Predicted: the memory sees the row once, as above; three reads from L1 and two
// reductions with their barriers make it slower than rmsnorm, by how much the other blocks do not hide.
__device__ inline float block_max(float x) { // in every thread
    __shared__ float parts[THREADS / 32];
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    for (float y : parts) x = fmaxf(x, y);
    return x;
}
__global__ void three_passes(const float* in, float* out, int columns) {
    const float* x = in + (size_t)blockIdx.x * columns;
    float most = -FLT_MAX, sum = 0;
    for (int c = threadIdx.x; c < columns; c += THREADS) most = fmaxf(most, x[c]);
    most = block_max(most);
    for (int c = threadIdx.x; c < columns; c += THREADS) sum += expf(x[c] - most);
    sum = block_sum(sum);
    for (int c = threadIdx.x; c < columns; c += THREADS)
        out[(size_t)blockIdx.x * columns + c] = expf(x[c] - most) / sum;
}

// ---- 9 online softmax. Largest number and sum in one pass: where a larger number comes, the sum so far is scaled by
// e^(old - new). A thread does that for its own numbers; between threads one maximum and one sum are left. It is how
// attention never stores a row of scores (FlashAttention). Predicted: two passes instead of three; the gain is small
// where rows fit L1, and a third of the bytes where they do not.
__global__ void online(const float* in, float* out, int columns) {
    const float* x = in + (size_t)blockIdx.x * columns;
    float mine = -FLT_MAX, sum = 0;
    for (int c = threadIdx.x; c < columns; c += THREADS) {
        // exercise reduce_scan-9: x[c] joins this thread's largest number `mine` and its `sum` of e^(x - mine).
        // When the largest number rises, what was summed shrinks by e^(old - new).
        const float larger = fmaxf(mine, x[c]);
        sum = sum * expf(mine - larger) + expf(x[c] - larger);
        mine = larger;
        // end of exercise
    }
    const float most = block_max(mine);
    sum = block_sum(sum * expf(mine - most));
    for (int c = threadIdx.x; c < columns; c += THREADS)
        out[(size_t)blockIdx.x * columns + c] = expf(x[c] - most) / sum;
}

// ================================================================================ a scan
constexpr int EACH = 8, TILE = THREADS * EACH; // of a thread, of a block
struct Scan : Problem { // out[i] = in[0] + ... + in[i], int
    int n;
    std::vector<int> numbers;
    Array<int> in, out, sums, ticket;
    Array<unsigned long long> status;
    Scratch scratch;
    static std::vector<int> whole(int n) {
        std::vector<int> v;
        for (float x : random_numbers(n, 3)) v.push_back((int)(x * 128));
        return v;
    }
    explicit Scan(Shape s)
        : n(s.x), numbers(whole(n)), in(numbers), out(n), sums(blocks_for(n, TILE)), ticket(1),
          status(blocks_for(n, TILE)) {
        bytes = 8. * n, flops = n;
#ifdef HAVE_CUB
        library_name = "CUB's DeviceScan";
#endif
    }
    void spoil() override { out.spoil(), sums.spoil(), status.spoil(); }
    double error() override {
        std::vector<int> want(n);
        for (int i = 0, sum = 0; i < n; i++) want[i] = sum += numbers[i];
        return largest_difference(out.get(), want);
    }
#ifdef HAVE_CUB
    void library() override {
        scratch.call([&](void* p, size_t& b) {
            GPU_CHECK(cub::DeviceScan::InclusiveSum(p, b, in.p, out.p, n, stream));
        });
    }
#endif
};

// A block's tile. Thread t has numbers 8 t to 8 t + 7, for which a scan within a thread is a loop. They come through
// shared memory, so that reads and writes of memory are coalesced; number i lies in place i + i / 8, or eight lanes
// would meet in a bank.
__device__ inline int padded(int i) { return i + i / EACH; }
__device__ inline void load_tile(int (&x)[EACH], const int* in, int first, int n, int* shared) {
    for (int i = threadIdx.x; i < TILE; i += THREADS) shared[padded(i)] = first + i < n ? in[first + i] : 0;
    __syncthreads();
    for (int e = 0; e < EACH; e++) x[e] = shared[padded(threadIdx.x * EACH + e)];
}
__device__ inline void store_tile(const int (&x)[EACH], int* out, int first, int n, int* shared) {
    __syncthreads();
    for (int e = 0; e < EACH; e++) shared[padded(threadIdx.x * EACH + e)] = x[e];
    __syncthreads();
    for (int i = threadIdx.x; i < TILE; i += THREADS)
        if (first + i < n) out[first + i] = shared[padded(i)];
}
// The sum over the threads before this one, and over the block. Lanes scan in five steps, then the warps' sums are
// added.
__device__ inline int scan_block(int mine, int& all) {
    __shared__ int warps[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = mine;
    // exercise reduce_scan-10: `sum` becomes the sum of `mine` over this lane and all lanes before it, in five steps.
    // __shfl_up_sync brings the value of the lane d places before; the first d lanes have none.
    for (int d = 1; d < 32; d *= 2) {
        const int left = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += left;
    }
    // end of exercise
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    int before = sum - mine;
    all = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += warps[w];
        all += warps[w];
    }
    __syncthreads(); // `warps` may be written again
    return before;
}
// The numbers become their sums, from `before` on.
__device__ inline void add_along(int (&x)[EACH], int before) {
    for (int e = 0; e < EACH; e++) x[e] = before += x[e];
}
__device__ inline int sum_of(const int (&x)[EACH]) {
    int sum = 0;
    for (int e = 0; e < EACH; e++) sum += x[e];
    return sum;
}

// ---- 10 three kernels. The sums of all tiles; a scan of those by one block; then each tile again, from its start on.
// The numbers are read twice: 12 bytes a number where 8 are needed. Predicted: two thirds of the ceiling at most.
__global__ void tile_sums(const int* in, int* sums, int n) {
    __shared__ int shared[TILE + TILE / EACH];
    int x[EACH], all;
    load_tile(x, in, blockIdx.x * TILE, n, shared);
    scan_block(sum_of(x), all);
    if (threadIdx.x == 0) sums[blockIdx.x] = all;
}
__global__ void scan_sums(int* sums, int tiles) { // one block; each becomes what stands before its tile
    int before = 0, all;
    for (int i = threadIdx.x; i - (int)threadIdx.x < tiles; i += THREADS, before += all) {
        const int mine = i < tiles ? sums[i] : 0, start = scan_block(mine, all);
        if (i < tiles) sums[i] = before + start;
    }
}
__global__ void scan_tiles(const int* in, const int* sums, int* out, int n) {
    __shared__ int shared[TILE + TILE / EACH];
    int x[EACH], all;
    load_tile(x, in, blockIdx.x * TILE, n, shared);
    add_along(x, sums[blockIdx.x] + scan_block(sum_of(x), all));
    store_tile(x, out, blockIdx.x * TILE, n, shared);
}

// ---- 11 decoupled look-back (Merrill and Garland, 2016). One kernel, which reads each number once. A block publishes
// its tile's sum at once, then looks back: it adds up the sums of the tiles before it until it meets one that has
// published the sum of all up to itself; then it publishes its own such sum. State and value are one word of 64 bits,
// so a block that sees the state sees the value. A block draws its tile's number when it starts: so all tiles before it
// have started, and no block waits for one that is not resident. Predicted: near the ceiling. (By emulation
// blocks run one after another: no block has to wait there.)
enum State : unsigned { NOTHING, OF_TILE, OF_ALL };
__device__ inline void publish(unsigned long long* status, int tile, State state, int sum) {
    ((volatile unsigned long long*)status)[tile] = (unsigned long long)state << 32 | (unsigned)sum;
}
__device__ inline unsigned long long wait_for(const unsigned long long* status, int tile) {
    unsigned long long word;
    do word = ((const volatile unsigned long long*)status)[tile];
    while (word >> 32 == NOTHING);
    return word;
}
__device__ inline int walk(const unsigned long long* status, int tile) { // one thread
    int before = 0;
    for (int p = tile - 1; p >= 0; p--) {
        const unsigned long long word = wait_for(status, p);
        before += (int)(unsigned)word;
        if (word >> 32 == OF_ALL) break;
    }
    return before;
}

// ---- 12 a window. In step 11 one thread walks back tile by tile, and each step is a round trip to the L2 cache, while
// the block waits. Here the first warp looks at 32 tiles at once, and takes what comes until the nearest that knows all
// before it. Predicted: the walk was what bounded step 11, by as much as blocks that run at once are ahead of the last
// full sum.
__device__ inline int window(const unsigned long long* status, int tile) { // one warp; in every lane
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int nearest = tile - 1;; nearest -= 32) {
        const int p = nearest - lane; // lane 0 has the nearest
        const unsigned long long word = p >= 0 ? wait_for(status, p) : (unsigned long long)OF_ALL << 32;
        const unsigned full = __ballot_sync(~0u, word >> 32 == OF_ALL);
        int sum = !full || lane < __ffs(full) ? (int)(unsigned)word : 0;
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        before += sum;
        if (full) return before;
    }
}
template <bool WINDOW>
__global__ void look_back(const int* in, int* out, unsigned long long* status, int* ticket, int n) {
    __shared__ int shared[TILE + TILE / EACH], number, start;
    if (threadIdx.x == 0) number = atomicAdd(ticket, 1);
    __syncthreads();
    const int tile = number, first = tile * TILE;
    int x[EACH], all;
    load_tile(x, in, first, n, shared);
    const int left = scan_block(sum_of(x), all);
    if (threadIdx.x == 0) publish(status, tile, tile ? OF_TILE : OF_ALL, all);
    if (threadIdx.x < (WINDOW ? 32 : 1)) {
        const int before = tile == 0 ? 0 : WINDOW ? window(status, tile) : walk(status, tile);
        if (threadIdx.x == 0) start = before, publish(status, tile, OF_ALL, before + all);
    }
    __syncthreads();
    add_along(x, start + left);
    store_tile(x, out, first, n, shared);
}

// ================================================================================ a histogram
constexpr int BINS = 256;
struct Histogram : Problem { // of bytes
    int n; // a multiple of 16
    std::vector<unsigned char> numbers;
    Array<unsigned char> in;
    Array<int> bins;
    Scratch scratch;
    static std::vector<unsigned char> skewed(int n) { // one number in two is less than 16
        std::vector<unsigned char> v;
        for (float x : random_numbers(n, 4)) v.push_back((unsigned char)(x < 0 ? -x * 16 : x * 256));
        return v;
    }
    explicit Histogram(Shape s) : n((s.x + 15) / 16 * 16), numbers(skewed(n)), in(numbers), bins(BINS) {
        bytes = n, flops = n;
#ifdef HAVE_CUB
        library_name = "CUB's DeviceHistogram";
#endif
    }
    void spoil() override { bins.spoil(); }
    double error() override {
        std::vector<int> want(BINS);
        for (unsigned char x : numbers) want[x]++;
        return largest_difference(bins.get(), want);
    }
#ifdef HAVE_CUB
    void library() override {
        scratch.call([&](void* p, size_t& b) {
            GPU_CHECK(cub::DeviceHistogram::HistogramEven(p, b, in.p, bins.p, BINS + 1, 0, BINS, n, stream));
        });
    }
#endif
};

// ---- 13 atomics in memory. Each thread counts its numbers in the one histogram. 256 addresses share what step 1 had
// one for, but half of the numbers meet in 16 of them. Predicted: bound by the L2 cache's atomics.
__global__ void global_bins(const unsigned char* in, int* bins, int n) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) atomicAdd(&bins[in[i]], 1);
}

// ---- 14 privatisation. Each block counts in a histogram of its own in shared memory, where an atomic addition takes a
// few clocks and other blocks do not meet it; 256 additions to memory a block are left. Predicted: ten times step 13;
// then bound by lanes of a warp that meet in one bin, and by loads of one byte.
__global__ void private_bins(const unsigned char* in, int* bins, int n) {
    __shared__ int mine[BINS];
    // exercise reduce_scan-14: count in mine[], the block's own histogram, then add it to bins[].
    // Three parts with barriers between them: zeros, counts (a grid-stride loop), the additions.
    for (int b = threadIdx.x; b < BINS; b += THREADS) mine[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) atomicAdd(&mine[in[i]], 1);
    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += THREADS)
        if (mine[b]) atomicAdd(&bins[b], mine[b]);
    // end of exercise
}

// ---- 15 a histogram for each warp, and 16 bytes a load. The warps of a block do not meet either: 8 KB a block. The
// loads are a sixteenth. Predicted: what is left are lanes of one warp that meet, 16 likely bins for 32 lanes.
__global__ void warp_bins(const unsigned char* in, int* bins, int n) {
    __shared__ int mine[THREADS / 32][BINS];
    for (int b = threadIdx.x; b < THREADS / 32 * BINS; b += THREADS) mine[b / BINS][b % BINS] = 0;
    __syncthreads();
    int* const my = mine[threadIdx.x / 32];
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n / 16; i += gridDim.x * THREADS) {
        const uint4 v = ((const uint4*)in)[i];
        const unsigned words[] = {v.x, v.y, v.z, v.w};
        for (unsigned word : words)
            for (int b = 0; b < 32; b += 8) atomicAdd(&my[word >> b & 255], 1);
    }
    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += THREADS) {
        int sum = 0;
        for (int w = 0; w < THREADS / 32; w++) sum += mine[w][b];
        if (sum) atomicAdd(&bins[b], sum);
    }
}

// ================================================================================ the table
template <class K> std::function<void(Sum&)> sums(K kernel, bool few) {
    return [=](Sum& s) {
        s.out.clear();
        const dim3 grid(few ? 8 * multiprocessors() : blocks_for(s.n, THREADS));
        launch(kernel, grid, dim3(THREADS), 0, s.in, s.out, s.n);
    };
}
template <class K> std::function<void(Softmax&)> softmax(K kernel) {
    return [=](Softmax& p) { launch(kernel, dim3(p.rows), dim3(THREADS), 0, p.in, p.out, p.columns); };
}
template <class K> std::function<void(Scan&)> looks_back(K kernel) {
    return [=](Scan& s) {
        s.status.clear(), s.ticket.clear();
        launch(kernel, dim3(s.sums.n), dim3(THREADS), 0, s.in, s.out, s.status, s.ticket, s.n);
    };
}
template <class K> std::function<void(Histogram&)> counts(K kernel) {
    return [=](Histogram& h) {
        h.bins.clear();
        launch(kernel, dim3(8 * multiprocessors()), dim3(THREADS), 0, h.in, h.bins, h.n);
    };
}
inline Laboratory laboratory() {
    Laboratory l("reduce_scan", "sums, rows, scans and histograms: how threads wait for each other, and how not",
                 {1 << 26, 4096, 1}, {5000, 300, 1});
    constexpr const char *ATOMICS = "lts__t_requests_srcunit_tex_op_red.sum,lts__t_requests_srcunit_tex_op_atom.sum",
                         *BRANCHES = "smsp__thread_inst_executed_per_inst_executed.ratio,smsp__inst_executed.sum",
                         *MEMORY = "dram__throughput.avg.pct_of_peak_sustained_elapsed,dram__bytes.sum",
                         *SHARED = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_atom.sum,smsp__inst_executed.sum";
    l.step<Sum>("sum: atomics", "every thread adds to one address", sums(atomics, false), READ, ATOMICS,
                "one a number");
    l.step<Sum>("sum: tree", "a block adds up in shared memory", sums(tree, false), READ, BRANCHES,
                "far from 32 threads an instruction");
    l.step<Sum>("sum: neighbours", "whole warps work or rest", sums(neighbours, false), READ, BRANCHES,
                "fewer instructions, more threads in each");
    l.step<Sum>("sum: shuffles", "lanes read each other's registers", sums(shuffles, false), READ, BRANCHES,
                "fewer instructions again");
    l.step<Sum>("sum: several", "each thread adds up many first", sums(several, true), READ, MEMORY, "near the peak");
    l.step<Sum>("sum: in order", "no atomics on floats: the same bits each time", [](Sum& s) {
        launch(in_order, dim3(s.parts.n), dim3(THREADS), 0, s.in, s.out, s.parts, s.arrived, s.n);
    }, READ, MEMORY, "as step 5");
    l.step<Norm>("rmsnorm", "a sum, then the row again, from a cache", [](Norm& p) {
        launch(rmsnorm, dim3(p.rows), dim3(THREADS), 0, p.in, p.w, p.out, p.columns);
    }, COPY, MEMORY, "bytes: each row read once from memory, not twice");
    l.step<Softmax>("softmax: three passes", "largest, sum, quotients", softmax(three_passes), COPY, MEMORY,
                    "bytes: each row read once, not three times");
    l.step<Softmax>("softmax: online", "largest and sum in one pass", softmax(online), COPY, MEMORY, "the same bytes");
    l.step<Scan>("scan: three kernels", "sums of tiles, their scan, tiles again", [](Scan& s) {
        const dim3 tiles(s.sums.n);
        launch(tile_sums, tiles, dim3(THREADS), 0, s.in, s.sums, s.n);
        launch(scan_sums, dim3(1), dim3(THREADS), 0, s.sums, (int)s.sums.n);
        launch(scan_tiles, tiles, dim3(THREADS), 0, s.in, s.sums, s.out, s.n);
    }, COPY, MEMORY, "12 bytes a number, all kernels together");
    l.step<Scan>("scan: look-back", "one pass: blocks wait for sums, not kernels", looks_back(look_back<false>), COPY,
                 MEMORY, "8 bytes a number");
    l.step<Scan>("scan: a window", "a warp looks at 32 tiles at once", looks_back(look_back<true>), COPY, MEMORY,
                 "throughput above step 11's");
    l.step<Histogram>("histogram: atomics", "one histogram in memory", counts(global_bins), READ, ATOMICS,
                      "one a number");
    l.step<Histogram>("histogram: private", "one for each block, in shared memory", counts(private_bins), READ, SHARED,
                      "more wavefronts than instructions: lanes that meet");
    l.step<Histogram>("histogram: of warps", "one for each warp; 16 bytes a load", counts(warp_bins), READ, SHARED,
                      "fewer instructions");
    l.exercise("Step 1 at 2^26 numbers: the L2 cache adds to one address once a clock, at 1.7 GHz. How many ms?",
               [] { return (1 << 26) / 1.7e9 * 1e3; });
    l.exercise("Step 10 moves 12 bytes a number, where 8 are needed. What share (%) of the ceiling is its most?",
               [] { return 100 * 8. / 12; });
    l.exercise("256 threads, 8 rounds: how many warps have a thread with work in step 2, all rounds together?", [] {
        int count = 0;
        for (int step = 1; step < THREADS; step *= 2)
            for (int warp = 0; warp < THREADS; warp += 32) {
                bool any = false;
                for (int t = warp; t < warp + 32; t++) any |= t % (2 * step) == 0;
                count += any;
            }
        return (double)count;
    });
    return l;
}
} // namespace lab::reduce_scan

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::reduce_scan::laboratory().main(argc, argv); }
#endif
