// snn.cu: a layer of leaky integrate-and-fire neurons, forward and backward. Each of T steps depends on the one before,
// and nearly all inputs are zero: the time loop moves into the kernel, and events take the place of a matrix product.
// (lab/lab.h says how to run it)
//
//     current[t] = W x[t]                           x: spikes, 0 or 1, of I inputs; B samples at once
//     u[t] = BETA (u[t-1] - s[t-1]) + current[t]    the membrane leaks; a spike has taken 1 from it
//     s[t] = 1 if u[t] >= 1, else 0
// Backward, the step's derivative (0, or infinite at 1) is replaced by a surrogate, fire'(u) = 1 / (1 + ALPHA |u -
// 1|)^2. With g[t] = dL/ds[t] and d[t] = dL/du[t], d[T] = 0:
//     d[t] = fire'(u[t]) (g[t] - BETA d[t+1]) + BETA d[t+1]        s[t] takes from u[t+1], hence the minus
//     dW = sum over t and samples of d[t] x[t]^T
//
// --size AxBxC: A inputs, B neurons, C steps (of 32 samples). One input in twenty spikes. "Predicted" is
// arithmetic for an H100 (132 SMs, 3.35 TB/s, about 5.5 TB/s from the L2 cache), at 1,024 inputs, 1,024 neurons, 100
// steps.
#include "lab/lab.h"

namespace lab::snn {

constexpr int B = 32;                       // samples
constexpr float BETA = 0.875f, ALPHA = 2;
using spike = unsigned char;

// ---- The definition, in double. Whether u reaches 1 may hang on its last bit, and a spike changes all that follows:
// so the definition takes each spike from the u that it is given (a kernel's), and the kernel's u has to be near its
// own.
struct Layer : Problem {
    int I, O, T, words;                     // words of 32 inputs in a row
    std::vector<float> dense, weights;      // x: (T,B,I); W: (I,O), a row for each input
    std::vector<unsigned> bits;             // x again: (T,B,words), a bit for each input
    explicit Layer(Shape s)
        : I(s.x), O(s.y), T(s.z), words(blocks_for(I, 32)), dense((size_t)T * B * I),
          weights(random_numbers((size_t)I * O, 1)), bits((size_t)T * B * words) {
        uint32_t seed = 2;
        for (size_t k = 0; k < dense.size(); k++)
            if ((seed = seed * 1664525u + 1013904223u) >> 8 < (1 << 24) / 20)
                dense[k] = 1, bits[k / I * words + k % I / 32] |= 1u << k % I % 32;
        for (float& w : weights) w = (w + 0.25f) * 16 / (float)I; // a current of 0.2 on average
    }
    // u, from currents and spikes: fired(index, u) says whether that neuron spikes.
    std::vector<double> potentials(const std::function<bool(size_t, double)>& fired) const {
        std::vector<double> u((size_t)T * B * O);
        const size_t step = (size_t)B * O;
        for (int t = 0; t < T; t++)
            for (int b = 0; b < B; b++) {
                double* row = &u[((size_t)t * B + b) * O];
                const float* x = &dense[((size_t)t * B + b) * I];
                for (int i = 0; i < I; i++)
                    if (x[i] != 0)
                        for (int o = 0; o < O; o++) row[o] += weights[(size_t)i * O + o];
                for (int o = 0; o < O && t > 0; o++) {
                    const size_t before = row - u.data() + o - step;
                    row[o] += BETA * (u[before] - fired(before, u[before]));
                }
            }
        return u;
    }
};
struct Forward : Layer {
    Array<float> x, w, current, u;
    Array<unsigned> events;
    Array<spike> s;
    explicit Forward(Shape shape)
        : Layer(shape), x(dense), w(weights), current((size_t)T * B * O), u(current.n), events(bits), s(current.n) {
        bytes = 4. * (double)(bits.size() + weights.size() + u.n) + (double)s.n;
        tolerance = 1e-5;
    }
    void spoil() override { current.spoil(), u.spoil(), s.spoil(); }
    double error() override {
        const auto got = u.get();
        const auto spikes = s.get();
        const auto want = potentials([&](size_t k, double) { return spikes[k] != 0; });
        for (size_t k = 0; k < got.size(); k++)
            if (spikes[k] != (got[k] >= 1)) return INFINITY;
        return largest_difference(std::vector<double>(got.begin(), got.end()), want);
    }
};

// ---- 1 by steps. The product of all steps and samples at once, a thread a sum; then a small kernel for each step,
// since a step needs the one before. Predicted: 3.4G multiply-adds, each a load of W and half a load of x (the same for
// all of a warp): 1.6M cycles of 132 SMs, 0.9 ms. The 100 kernels for 32,768 neurons each: 1.5 to 2 us in a graph, 0.15
// to 0.2 ms.
__global__ void dense_current(const float* x, const float* w, float* current, int I, int O) {
    int o = blockIdx.x * blockDim.x + threadIdx.x;
    size_t row = blockIdx.y; // of (T,B)
    if (o >= O) return;
    float c = 0;
    for (int i = 0; i < I; i++) c += x[row * I + i] * w[(size_t)i * O + o];
    current[row * O + o] = c;
}
__global__ void lif_step(const float* current, float* u, spike* s, int t, int n) { // n neurons: B O
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= n) return;
    size_t now = (size_t)t * n + k;
    float v = t ? BETA * (u[now - n] - s[now - n]) : 0;
    v += current[now];
    u[now] = v, s[now] = v >= 1;
}

// ---- 2 lif_time. Bound before, beside the product: launches. Neurons do not depend on each other, so each thread
// keeps its neuron through all steps: one kernel, and u stays in a register. Predicted: 0.15 ms less; what is left is
// the product.
__global__ void lif_time(const float* current, float* u, spike* s, int T, int n) {
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= n) return;
    float v = 0;
    for (int t = 0; t < T; t++) {
        // exercise snn-2: one step of neuron k: add its current, write potential and spike (1 from potential 1 on),
        // then leak.
        // After a spike 1 is taken off; what is left leaks by BETA. The neuron's index at step t is t n + k.
        size_t now = (size_t)t * n + k;
        v += current[now];
        u[now] = v, s[now] = v >= 1;
        v = BETA * (v - (v >= 1));
        // end of exercise
    }
}

// ---- 3 event_current. Bound before: products with zero, 19 of 20. Inputs come as bits: a word of 32 is the same for
// the whole block, so no warp diverges, and only inputs that spiked are added: a row of W each. Predicted: 3,200 x 51
// rows of 4 KB are 668 MB from the L2 cache (W is 4 MB), 0.12 ms; current, u and s 0.02 ms.
__global__ void event_current(const unsigned* x, const float* w, float* current, int words, int O) {
    int o = blockIdx.x * blockDim.x + threadIdx.x;
    size_t row = blockIdx.y; // of (T,B)
    if (o >= O) return;
    float c = 0;
    // exercise snn-3: add the rows of w of the inputs that spiked: bit i of word k of this row is input 32 k + i.
    // bits &= bits - 1 takes off the lowest bit, __ffs(bits) - 1 is its number.
    for (int k = 0; k < words; k++)
        for (unsigned bits = x[row * words + k]; bits; bits &= bits - 1)
            c += w[(size_t)(k * 32 + __ffs(bits) - 1) * O + o];
    // end of exercise
    current[row * O + o] = c;
}

// ---- 4 lif_events. Bound before: the L2 cache, and current, written and read. One kernel for both: current never
// leaves its register. But the steps follow one another now, 128 blocks are all there are, and a thread waits for each
// row of W: 51 x 100 waits of 250 cycles. Predicted: 0.7 ms, five times slower than step 3. Fusion has taken the
// parallelism away.
__global__ void lif_events(const unsigned* x, const float* w, float* u, spike* s, int T, int words, int O) {
    int o = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
    if (o >= O) return;
    float v = 0;
    for (int t = 0; t < T; t++) {
        size_t row = (size_t)t * B + b;
        for (int k = 0; k < words; k++)
            for (unsigned bits = x[row * words + k]; bits; bits &= bits - 1)
                v += w[(size_t)(k * 32 + __ffs(bits) - 1) * O + o];
        u[row * O + o] = v, s[row * O + o] = v >= 1;
        v = BETA * (v - (v >= 1));
    }
}

// ---- 5 lif_list. Bound before: latency, one load at a time. A warp makes a list of the events (its lanes count their
// bits, a scan says where each begins), and then eight rows of W are on the way at once. Predicted: 51 / 8 waits a
// step, and two barriers: 0.15 ms or so, near step 3, without its 26 MB of currents.
__global__ void lif_list(const unsigned* x, const float* w, float* u, spike* s, int T, int words, int O) {
    __shared__ int list[32 * 32], events; // of 32 words
    int o = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y, lane = threadIdx.x % 32;
    float v = 0;
    for (int t = 0; t < T; t++) {
        size_t row = (size_t)t * B + b;
        for (int first = 0; first < words; first += 32) {
            if (threadIdx.x < 32) {
                unsigned bits = first + lane < words ? x[row * words + first + lane] : 0;
                int end = __popc(bits), at = -end; // of this lane's part of the list
                for (int d = 1; d < 32; d *= 2) {
                    int before = __shfl_up_sync(~0u, end, d);
                    if (lane >= d) end += before;
                }
                if (lane == 31) events = end;
                for (at += end; bits; bits &= bits - 1) list[at++] = (first + lane) * 32 + __ffs(bits) - 1;
            }
            __syncthreads();
            for (int e = 0; e < events && o < O; e += 8) {
                float rows[8];
                UNROLL for (int k = 0; k < 8; k++) rows[k] = e + k < events ? w[(size_t)list[e + k] * O + o] : 0;
                UNROLL for (int k = 0; k < 8; k++) v += rows[k];
            }
            __syncthreads(); // before the list is overwritten
        }
        if (o < O) u[row * O + o] = v, s[row * O + o] = v >= 1;
        v = BETA * (v - (v >= 1));
    }
}

// ---- Backward: d and dW from u and g.
struct Backward : Layer {
    std::vector<float> potential, grads;
    std::vector<double> want_d, want_dw;
    Array<float> x, u, g, d, dw;
    Array<unsigned> events, by_input;       // by_input: (I to the next 32, words of 32 rows)
    int rows() const { return T * B; }
    explicit Backward(Shape shape)
        : Layer(shape), grads(random_numbers((size_t)T * B * O, 3)), want_dw((size_t)I * O), x(dense), u(grads.size()),
          g(grads), d(grads.size()), dw(want_dw.size()), events(bits),
          by_input((size_t)words * 32 * blocks_for(rows(), 32)) {
        const auto exact = potentials([](size_t, double v) { return v >= 1; });
        potential.assign(exact.begin(), exact.end());
        GPU_CHECK(cudaMemcpy(u, potential.data(), potential.size() * sizeof(float), cudaMemcpyHostToDevice));
        want_d = gradient(potential, grads, (size_t)B * O);
        for (int r = 0; r < rows(); r++)
            for (int i = 0; i < I; i++)
                if (dense[(size_t)r * I + i] != 0)
                    for (int o = 0; o < O; o++) want_dw[(size_t)i * O + o] += want_d[(size_t)r * O + o];
        bytes = 4. * (double)(bits.size() + u.n + g.n + dw.n);
        tolerance = 1e-4; // dW adds up some 160 numbers of size 1
    }
    template <class N> // (float or double: a test asks for both)
    static std::vector<double> gradient(const std::vector<N>& u, const std::vector<N>& g, size_t step) {
        std::vector<double> d(u.size());
        for (size_t k = u.size(); k-- > 0;) {
            const double next = k + step < d.size() ? BETA * d[k + step] : 0;
            const double slope = 1 / (1 + ALPHA * std::fabs(u[k] - 1.));
            d[k] = slope * slope * (g[k] - next) + next;
        }
        return d;
    }
    void spoil() override { d.spoil(), dw.spoil(), by_input.spoil(); }
    double error() override {
        const auto a = d.get(), b = dw.get();
        return std::max(largest_difference(std::vector<double>(a.begin(), a.end()), want_d),
                        largest_difference(std::vector<double>(b.begin(), b.end()), want_dw));
    }
};

// ---- 6 dense backward. surrogate_time is lif_time turned round: from the last step to the first, d in a register.
// Then dW as a product: a thread a sum over all steps and samples. Predicted: as step 2, 0.9 ms.
__global__ void surrogate_time(const float* u, const float* g, float* d, int T, int n) {
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= n) return;
    float next = 0; // BETA d[t + 1]
    for (int t = T - 1; t >= 0; t--) {
        // exercise snn-6: d of step t, from g, the slope of the surrogate at u, and `next`, which is BETA d of step t +
        // 1.
        // slope = 1 / (1 + ALPHA |u - 1|); d = slope^2 (g - next) + next.
        size_t now = (size_t)t * n + k;
        float slope = 1 / (1 + ALPHA * fabsf(u[now] - 1));
        d[now] = slope * slope * (g[now] - next) + next;
        next = BETA * d[now];
        // end of exercise
    }
}
__global__ void dense_gradient(const float* x, const float* d, float* dw, int rows, int I, int O) {
    int o = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    if (o >= O) return;
    float sum = 0;
    for (int r = 0; r < rows; r++) sum += x[(size_t)r * I + i] * d[(size_t)r * O + o];
    dw[(size_t)i * O + o] = sum;
}

// ---- 7 event_gradient. Bound before: products with zero. Bits again, but now an input wants to know its rows, so x is
// turned round first, 32 x 32 bits to a warp: a vote of all lanes makes a word. Each sum is one thread's, in the order
// of rows: no atomics, the same bits each time. Predicted: 1,024 x 160 rows of d, 4 KB each: 671 MB from the L2 cache,
// 0.12 ms, as step 3.
__global__ void transpose_bits(const unsigned* x, unsigned* by_input, int rows, int words) {
    int lane = threadIdx.x, row = blockIdx.x * 32 + lane, k = blockIdx.y;
    unsigned bits = row < rows ? x[(size_t)row * words + k] : 0, mine = 0;
    // exercise snn-7: 32 x 32 bits turned round by a warp: lane i gets bit i of all lanes' words.
    // __ballot_sync makes a word of one bit of each lane.
    for (int i = 0; i < 32; i++) {
        unsigned column = __ballot_sync(~0u, bits >> i & 1);
        if (lane == i) mine = column;
    }
    // end of exercise
    by_input[(size_t)(k * 32 + lane) * gridDim.x + blockIdx.x] = mine;
}
__global__ void event_gradient(const unsigned* by_input, const float* d, float* dw, int words, int O) { // words of rows
    int o = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    if (o >= O) return;
    float sum = 0;
    for (int k = 0; k < words; k++)
        for (unsigned bits = by_input[(size_t)i * words + k]; bits; bits &= bits - 1)
            sum += d[(size_t)(k * 32 + __ffs(bits) - 1) * O + o];
    dw[(size_t)i * O + o] = sum;
}

inline dim3 outputs(const Layer& l, int rows) { return {(unsigned)blocks_for(l.O, 256), (unsigned)rows}; }
inline void through_time(Forward& l) {
    launch(lif_time, blocks_for(B * l.O, 256), 256, 0, l.current, l.u, l.s, l.T, B * l.O);
}
inline void surrogate(Backward& l) {
    launch(surrogate_time, blocks_for(B * l.O, 256), 256, 0, l.u, l.g, l.d, l.T, B * l.O);
}
inline Laboratory laboratory() {
    Laboratory l("snn", "leaky integrate-and-fire neurons: the time loop fused, events instead of products",
                 {1024, 1024, 100}, {70, 45, 9});
    const char *time = "gpu__time_duration.sum", *loads = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
               *waits = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio";
    l.step<Forward>("by steps", "a product, then a kernel a step", [](Forward& l) {
        launch(dense_current, outputs(l, l.T * B), 256, 0, l.x, l.w, l.current, l.I, l.O);
        for (int t = 0; t < l.T; t++)
            launch(lif_step, blocks_for(B * l.O, 256), 256, 0, l.current, l.u, l.s, t, B * l.O);
    }, COPY, time, "100 small kernels, and one large");
    l.step<Forward>("lif_time", "the time loop in one kernel", [](Forward& l) {
        launch(dense_current, outputs(l, l.T * B), 256, 0, l.x, l.w, l.current, l.I, l.O), through_time(l);
    }, COPY, time, "two kernels, the first as before");
    l.step<Forward>("event_current", "only inputs that spiked", [](Forward& l) {
        launch(event_current, outputs(l, l.T * B), 256, 0, l.events, l.w, l.current, l.words, l.O), through_time(l);
    }, COPY, loads, "about a twentieth of step 2's");
    l.step<Forward>("lif_events", "both in one kernel", [](Forward& l) {
        launch(lif_events, outputs(l, B), 256, 0, l.events, l.w, l.u, l.s, l.T, l.words, l.O);
    }, COPY, waits, "warps wait for loads nearly all the time");
    l.step<Forward>("lif_list", "a list of events, eight loads on the way", [](Forward& l) {
        launch(lif_list, outputs(l, B), 256, 0, l.events, l.w, l.u, l.s, l.T, l.words, l.O);
    }, COPY, waits, "less than in step 4");
    l.step<Backward>("dense backward", "the time loop turned round, dW as a product", [](Backward& l) {
        surrogate(l), launch(dense_gradient, outputs(l, l.I), 256, 0, l.x, l.d, l.dw, l.rows(), l.I, l.O);
    }, COPY, loads, "two for each 32 multiply-adds");
    l.step<Backward>("event_gradient", "only rows in which the input spiked", [](Backward& l) {
        const int row_words = blocks_for(l.rows(), 32);
        surrogate(l), launch(transpose_bits, dim3(row_words, l.words), 32, 0, l.events, l.by_input, l.rows(), l.words);
        launch(event_gradient, outputs(l, l.I), 256, 0, l.by_input, l.d, l.dw, row_words, l.O);
    }, COPY, loads, "about a twentieth of step 6's");
    l.exercise("BETA 0.875, a constant current of 0.2, u = 0 before step 1: at which step is the first spike?", [] {
        int t = 0;
        for (double u = 0; u < 1; t++) u = 0.875 * u + 0.2;
        return (double)t;
    });
    l.exercise("A product in tiles of 128 rows reads W once for 128 rows of x; events read a row of W each. Up to "
               "which share of inputs that spike, in per cent, do events read no more?", [] { return 100. / 128; });
    l.exercise("Training keeps u, float32, of 1,024 neurons, 32 samples, 100 steps. How many MB (10^6 bytes)?",
               [] { return 4. * 1024 * 32 * 100 / 1e6; });
    return l;
}
} // namespace lab::snn

#ifndef LAB_NO_MAIN
int main(int argc, char** argv) { return lab::snn::laboratory().main(argc, argv); }
#endif
