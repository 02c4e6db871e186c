// dynamic.cu: work whose amount only the GPU knows. 2,048 jobs of very different lengths, and a loop of 100 rounds:
// kernels launched by the host, by a graph, by kernels (dynamic parallelism), and one flat kernel that needs none of
// it. (lab/lab.h says how to run it)
//
// --size AxBxC: A jobs of B numbers on average; a loop over C numbers. Kernels that launch kernels need relocatable
// device code; built without it, their steps are left out. "Predicted" rests on what the course's notes
// measured on an H200: 2.8 us for a launch by the host, 6 us by one thread of a kernel, 0.26 us on average where 1,000
// blocks launch one kernel each.
#include "lab/lab.h"

namespace lab::dynamic {

// ---- A launch by a kernel: LAUNCH(kernel, grid, block, stream, arguments...). The emulator keeps what a kernel
// launches, and runs it when that kernel has ended; what goes to cudaStreamTailLaunch comes after all the rest and its
// descendants.
#if defined(__CUDACC__)
#define LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
inline void children_end() {} // a kernel ends when all it launched has ended
#ifdef __CUDACC_RDC__
#define KERNELS_LAUNCH
#endif
#else
#define KERNELS_LAUNCH
#define cudaDeviceSetLimit(limit, value) (void)(value)
#define LAUNCH(kernel, grid, block, stream, ...) children[stream].push_back({grid, block, [=] { kernel(__VA_ARGS__); }})
struct Child { dim3 grid, block; std::function<void()> run; };
enum { cudaStreamFireAndForget, cudaStreamTailLaunch };
inline std::vector<Child> children[2];
inline void children_end() {
    std::vector<Child> now[2];
    for (int s : {cudaStreamFireAndForget, cudaStreamTailLaunch}) now[s].swap(children[s]);
    for (auto& stream : now)
        for (auto& child : stream) ::launch(child.grid, child.block, child.run), children_end();
}
#endif

// ---- Jobs. Job j doubles len[j] numbers from data[begin[j]] on. Between jobs lie numbers that stay as they are.
struct Jobs : Problem {
    int jobs;
    std::vector<int> starts, lengths, ends, sums; // sums[j]: of the lengths of the jobs before j
    std::vector<float> numbers;
    std::unique_ptr<Array<float>> data;
    Array<int> begin, len, end, first, counter;
    Jobs(int jobs, int average)
        : jobs(jobs), starts(jobs), lengths(jobs), ends(jobs), sums(jobs + 1), begin(jobs), len(jobs), end(jobs),
          first(jobs + 1), counter(1) {
        uint32_t seed = 1;
        for (int j = 0, at = 0; j < jobs; j++) {
            seed = seed * 1664525u + 1013904223u; // a power law: half of the jobs have average / 4.7 or less
            lengths[j] = (int)std::min(average / 4.7 * (16777216. / ((seed >> 8) + 1) - 1), 16. * average);
            starts[j] = at + j % 3, ends[j] = at = starts[j] + lengths[j], sums[j + 1] = sums[j] + lengths[j];
        }
        numbers = random_numbers(ends.back() + 1, 2);
        data = std::make_unique<Array<float>>(numbers);
        put(begin, starts), put(len, lengths), put(end, ends), put(first, sums);
        bytes = 8. * sums.back();
    }
    static void put(Array<int>& to, const std::vector<int>& from) {
        GPU_CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(int), cudaMemcpyHostToDevice));
    }
    void spoil() override { // in place: a step begins with the first numbers
        GPU_CHECK(cudaMemcpy(*data, numbers.data(), numbers.size() * sizeof(float), cudaMemcpyHostToDevice));
    }
    double error() override {
        std::vector<float> want = numbers;
        for (int j = 0; j < jobs; j++)
            for (int i = starts[j]; i < ends[j]; i++) want[i] *= 2;
        return largest_difference(data->get(), want);
    }
};
struct Direct : Jobs { // kernels are launched as the step does it
    explicit Direct(Shape s) : Jobs(s.x, s.y) {
        captured = false;
#ifdef KERNELS_LAUNCH // (the default of 2,048 pending launches is too few for bigger sizes)
        GPU_CHECK(cudaDeviceSetLimit(cudaLimitDevRuntimePendingLaunchCount, (size_t)jobs + 2048));
#endif
    }
};
struct Graphed : Jobs { // ... are nodes of a graph
    explicit Graphed(Shape s) : Jobs(s.x, s.y) {}
};

// ---- 1 launches. The host knows the lengths here (else it would have to copy and wait first) and launches a kernel
// for each job. Predicted: 2,048 x 2.8 us = 5.7 ms, for 67 MB that take 0.02 ms.
__global__ void child(float* data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] *= 2.0f;
}
inline void a_launch_a_job(Jobs& p) {
    for (int j = 0; j < p.jobs; j++)
        if (const int n = p.lengths[j]) launch(child, blocks_for(n, 256), 256, 0, *p.data + p.starts[j], n);
}
// ---- 2 a graph. Bound before: the host. The same kernels as nodes of a graph, made once. Predicted: 1.2 to 1.6 us a
// node, 2.5 to 3.3 ms: half. But the lengths are fixed when the graph is made: it cannot serve what only the GPU knows.

#ifdef KERNELS_LAUNCH
// ---- 3 parent. Bound before: a queue of kernels, one after the other. A block for each job launches its kernel on the
// GPU, where the lengths are; the launches of different blocks overlap. Predicted: 2,048 x 0.26 us = 0.53 ms.
__global__ void parent(float* data, const int* begin, const int* end) {
    int b = begin[blockIdx.x], n = end[blockIdx.x] - b;
    if (threadIdx.x == 0 && n > 0) LAUNCH(child, (n + 255) / 256, 256, cudaStreamFireAndForget, data + b, n);
}

// ---- 4 adaptive. Bound before: launches, half of them for 900 numbers or fewer. A thread for each job; what is
// shorter than the threshold, 1,024, it does by itself. Predicted: 46% of the jobs are left to launch, 0.25 ms; but a
// thread alone goes 1,023 rounds at 0.1 to 0.4 us, so about as long as step 3. (A warp waits for its longest job, too.)
__global__ void big(float* x, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] *= 2.0f;
}
__global__ void adaptive(float* x, const int* begin, const int* len, int jobs, int threshold) {
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= jobs) return;
    float* p = x + begin[j];
    int n = len[j];
    // exercise dynamic-4: double n numbers from p on: below the threshold this thread does it, else a kernel that it
    // launches.
    // LAUNCH(kernel, grid, block, stream, arguments...); the stream is cudaStreamFireAndForget.
    if (n < threshold)
        for (int i = 0; i < n; i++) p[i] *= 2.0f;
    else
        LAUNCH(big, (n + 255) / 256, 256, cudaStreamFireAndForget, p, n);
    // end of exercise
}
#endif

// ---- 5 flat. Bound before: launches. One kernel with a thread for each number of all jobs: the sums of the lengths (a
// scan: lab/reduce_scan.cu) say by a binary search of 11 rounds, in the L1 cache, whose number it is. Predicted:
// memory's 0.02 ms and as much for the search, 3 us for the launch.
__global__ void flat(float* data, const int* begin, const int* first, int jobs) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= first[jobs]) return;
    int lo = 0, hi = jobs; // first[lo] <= i < first[hi]
    // exercise dynamic-5: binary search: whose job is number i? first[lo] <= i < first[hi] holds before and after each
    // round.
    // It ends when hi is lo + 1.
    while (hi - lo > 1) {
        int mid = (lo + hi) / 2;
        if (first[mid] <= i) lo = mid;
        else hi = mid;
    }
    // end of exercise
    data[begin[lo] + i - first[lo]] *= 2.0f;
}

// ---- 6 persistent. Bound before: the search, if anything. As many blocks as the GPU holds draw jobs from a counter,
// which needs no sums and would serve jobs that make jobs. Predicted: the longest job has 65,536 numbers, 256 rounds of
// a block at about half a microsecond: 0.13 ms. Slower than flat: a job is never shared.
__global__ void persistent(float* data, const int* begin, const int* len, int jobs, int* counter) {
    __shared__ int job;
    for (;;) {
        // exercise dynamic-6: the block draws a job from *counter, and its threads double the job's numbers; past the
        // last all return.
        // `job` is shared: a barrier before it is read, and one before it is written again.
        // instead: return;
        if (threadIdx.x == 0) job = atomicAdd(counter, 1);
        __syncthreads();                    // all see job
        int j = job;
        __syncthreads();                    // all have read it
        if (j >= jobs) return;              // j is the block's: all leave together
        for (int i = threadIdx.x; i < len[j]; i += blockDim.x) data[begin[j] + i] *= 2.0f;
        // end of exercise
    }
}

// ---- A loop. 100 rounds of x <- x / 2 + round (100, 99, ..., 1), each a kernel, since in earnest a round needs all of
// the one before.
constexpr int ROUNDS = 100;
struct Loop : Problem {
    std::vector<float> first;
    Array<float> x;
    explicit Loop(int n) : first(random_numbers(n, 3)), x(first) { bytes = 8. * ROUNDS * n; }
    void spoil() override {
        GPU_CHECK(cudaMemcpy(x, first.data(), first.size() * sizeof(float), cudaMemcpyHostToDevice));
    }
    double error() override {
        std::vector<float> want = first;
        for (int round = ROUNDS; round > 0; round--)
            for (float& v : want) v = 0.5f * v + (float)round;
        return largest_difference(x.get(), want);
    }
};
struct DirectLoop : Loop {
    explicit DirectLoop(Shape s) : Loop(s.z) { captured = false; }
};
struct GraphedLoop : Loop {
    explicit GraphedLoop(Shape s) : Loop(s.z) {}
};
// ---- 7 host loop. Predicted: 2.8 us a round by the host; the kernel itself takes 2 us for 65,536 numbers.
__global__ void step(float* x, int n, int iter) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = 0.5f * x[i] + iter;
}
inline void rounds_by_host(Loop& l) {
    for (int round = ROUNDS; round > 0; round--)
        launch(step, blocks_for(l.first.size(), 256), 256, 0, l.x, (int)l.first.size(), round);
}
// ---- 8 a graph. Bound before: the host. Predicted: 1.5 to 2 us a round. The number of rounds is fixed.

#ifdef KERNELS_LAUNCH
// ---- 9 tail launch. Bound before: a number of rounds that has to be known. A kernel of one thread launches the round,
// and itself, behind it: cudaStreamTailLaunch begins when all that its parent launched has ended. It could look at the
// result and stop. The host waits for nothing. Predicted: two launches deep for each round, 10 us or more: five times
// the graph. That is the price of deciding on the GPU by launches; a graph with a WHILE node, or one persistent kernel
// with a barrier, is cheaper.
__global__ void next(float* x, int n, int iter) {          // a grid of one thread, which only launches
    if (iter == 0) return;
    // exercise dynamic-9: launch `step` of this round, then this kernel once more, for iter - 1.
    // cudaStreamFireAndForget starts at once, cudaStreamTailLaunch when all that this kernel launched has ended.
    LAUNCH(step, (n + 255) / 256, 256, cudaStreamFireAndForget, x, n, iter);
    LAUNCH(next, 1, 1, cudaStreamTailLaunch, x, n, iter - 1);   // runs when all of step is done
    // end of exercise
}
#endif

inline void draw_jobs(Jobs& p) {
    int blocks = multiprocessors();
#ifdef __CUDACC__
    int each = 0;
    GPU_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, persistent, 256, 0));
    blocks *= each;
#endif
    p.counter.clear();
    launch(persistent, blocks, 256, 0, *p.data, p.begin, p.len, p.jobs, p.counter);
}
inline Laboratory laboratory() {
    Laboratory l("dynamic", "kernels launched by the host, by graphs, by kernels; and one flat kernel",
                 {2048, 4096, 65536}, {29, 150, 300});
    const char* time = "gpu__time_duration.sum";
    l.step<Direct>("launches", "a kernel a job, by the host", a_launch_a_job, COPY, time,
                   "each kernel takes a microsecond or two; the rest is the host's");
    l.step<Graphed>("a graph", "the same kernels as a graph", a_launch_a_job, COPY, time, "as before");
#ifdef KERNELS_LAUNCH
    l.step<Direct>("parent", "a kernel a job, by a kernel", [](Direct& p) {
        launch(parent, p.jobs, 32, 0, *p.data, p.begin, p.end), children_end();
    }, COPY, time, "parent and children as one: ncu does not look into them");
    l.step<Direct>("adaptive", "short jobs by the thread itself", [](Direct& p) {
        launch(adaptive, blocks_for(p.jobs, 32), 32, 0, *p.data, p.begin, p.len, p.jobs, 1024), children_end();
    }, COPY, time, "compare with step 3's");
#endif
    l.step<Direct>("flat", "one kernel, a search for the job", [](Direct& p) {
        launch(flat, blocks_for(p.sums.back(), 256), 256, 0, *p.data, p.begin, p.first, p.jobs);
    }, COPY, "dram__throughput.avg.pct_of_peak_sustained_elapsed", "memory works for most of the time");
    l.step<Direct>("persistent", "resident blocks draw jobs", draw_jobs, COPY,
                   "sm__cycles_active.avg.pct_of_peak_sustained_elapsed", "few multiprocessors work to the end");
    l.step<DirectLoop>("host loop", "100 rounds, by the host", rounds_by_host, COPY, time, "less than the step's time");
    l.step<GraphedLoop>("loop as a graph", "100 rounds as a graph", rounds_by_host, COPY, time, "as before");
#ifdef KERNELS_LAUNCH
    l.step<DirectLoop>("tail launch", "each round launches the next", [](DirectLoop& l) {
        launch(next, 1, 1, 0, l.x, (int)l.first.size(), ROUNDS), children_end();
    }, COPY, time, "the whole loop is one launch of the host");
#endif
    l.exercise("A launch by a kernel costs 6 us, a child works for 54 us. How many per cent of the time are launches?",
               [] { return 100. * 6 / 60; });
    l.exercise("One million points in a quadtree, split evenly until a cell has at most 32: how many cells are split, "
               "each by a kernel of its own?", [] {
                   double all = 0, cells = 1;
                   for (double points = 1e6; points > 32; points /= 4, cells *= 4) all += cells;
                   return all;
               });
    l.exercise("Jobs of 1,000 x 1 ms and 1 x 20 ms on 132 blocks that draw them in this order: after how many ms is "
               "the last done?", [] { return std::floor(1000. / 132) + 20; });
    return l;
}
} // namespace lab::dynamic
#undef LAUNCH
#undef KERNELS_LAUNCH

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::dynamic::laboratory().main(argc, argv); }
#endif
