// lab.h: the harness of the laboratories. A laboratory is one file, lab/NAME.cu: steps from the naive kernel to the
// best, each checked against a plain definition, then timed beside the ceiling and a library.
//
//     make lab                        builds all: with nvcc to time them; with g++ alone the steps run by emulation
//     lab/NAME                        a table of all steps
//     lab/NAME 4 --size 4096          one step (or several: 4 5 6), at another size (or 4096x1024x512)
//     lab/NAME 4 --ncu                the command that shows the counters that step 4 is about, and what to look for
//     lab/NAME 4 --once               runs the step once and prints no time: for ncu and compute-sanitizer
//     lab/NAME --exercise 2 --answer 8      a question whose answer is a number
//     make exercise-NAME-4            step 4 as an exercise: lines that a student writes (lab/exercises.mk)
//
// How to write one (lab/transpose_copy.cu is the shortest):
//   namespace lab::NAME {
//   struct Matrix : Problem { explicit Matrix(Shape s); ... };      what is computed, and how to tell that it is right
//   __global__ void naive(...) { ... }                                 a step: a paragraph, a kernel, its launch
//   inline Laboratory laboratory() {
//       Laboratory l("NAME", "what it is about", {8192, 8192, 1}, {67, 45, 1});   sizes on a GPU and by emulation
//       l.step<Matrix>("naive", "what it adds", [](Matrix& m) { launch(naive, grid, block, 0, m.in, m.out); },
//                      COPY, "counter,counter", "what to look for");
//       l.exercise("How many ...?", [] { return 32.0; });
//       return l;
//   } }
//   #ifndef LAB_NO_MAIN
//   int main(int argc, char** argv) { return lab::NAME::laboratory().main(argc, argv); }
//   #endif
// tests/unit/test_lab.cpp includes the file and runs every step at odd sizes by emulation (tests/emulate/emulate.h).
// Calls that emulation does not have (a library's, a GPU's own) stand inside #ifdef __CUDACC__.
#pragma once
#ifdef __CUDACC__
#include "lab/timing.h"
#include <cuda_bf16.h>
#define DYNAMIC_SHARED(T, name)                                                                                        \
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];                                                  \
    T* const name = (T*)dynamic_shared
#undef UNROLL // (cpu/ has another)
#define UNROLL _Pragma("unroll") // a loop over registers must be unrolled: a register has no address
#else
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-variable"
#include "tests/emulate/tensor.h"
#pragma GCC diagnostic pop
#undef check
#undef __device__
#undef __global__
#define __device__ [[maybe_unused]]
#define __global__ [[maybe_unused]] static
#define DYNAMIC_SHARED(T, name) T* const name = (T*)dynamic_shared
#define UNROLL
#endif
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <typeindex>
#include <vector>

namespace lab {
using bf16 = __nv_bfloat16;

[[noreturn]] [[gnu::format(printf, 1, 2)]] inline void fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    fputs("\n", stderr);
    exit(1);
}

// ---- Launches and memory, the same on a GPU and by emulation
#ifdef __CUDACC__
inline cudaStream_t stream = nullptr; // Laboratory::main makes it
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A&&... args) {
    if (shared > 48 << 10)
        GPU_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    kernel<<<grid, block, shared, stream>>>(P(args)...);
    GPU_CHECK(cudaGetLastError());
}
#else
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A&&... args) {
    if (shared > sizeof dynamic_shared) fail("%zu bytes of shared memory are more than a block can have", shared);
    ::launch(grid, block, [&] { kernel(P(args)...); });
    if (std::exchange(stuck, false)) fail("threads wait for what never comes");
}
#define GPU_CHECK(call) (void)(call)
#endif
inline int multiprocessors() {
    int n = 3; // by emulation: fewer than tests have tiles
#ifdef __CUDACC__
    GPU_CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
#endif
    return n;
}
inline int blocks_for(size_t n, size_t each) { return (int)((n + each - 1) / each); }

// n numbers on the device.
template <class T> struct Array {
    T* p = nullptr;
    size_t n;
    explicit Array(size_t n) : n(n) { GPU_CHECK(cudaMalloc(&p, n * sizeof(T))); }
    explicit Array(const std::vector<T>& v) : Array(v.size()) {
        GPU_CHECK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Array() { cudaFree(p); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    operator T*() const { return p; }
    void fill(int byte) { GPU_CHECK(cudaMemset(p, byte, n * sizeof(T))); }
    void spoil() { fill(0xff); } // NaN, or -1
    void clear() const { // a part of a step: it is timed with it
#ifdef __CUDACC__
        GPU_CHECK(cudaMemsetAsync(p, 0, n * sizeof(T), stream));
#else
        memset(p, 0, n * sizeof(T));
#endif
    }
    std::vector<T> get() const {
        std::vector<T> v(n);
        GPU_CHECK(cudaDeviceSynchronize());
        GPU_CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};
// The same numbers every time: odd multiples of 1/128 between -1 and 1, exact in bf16. float32 adds them up exactly
// while a sum stays under 131,072, and their products under 1,024. So the order of a sum does not matter, and a right
// result has no error at all. Their mean is zero, so that long sums stay small.
inline std::vector<float> random_numbers(size_t n, uint32_t seed) {
    std::vector<float> v(n);
    for (auto& x : v) seed = seed * 1664525u + 1013904223u, x = (float)((int)(seed >> 24 | 1) - 128) / 128;
    return v;
}
// The largest |got - want|; infinite if a number is none. The first that is more than `allowed` is kept.
struct FirstWrong {
    double allowed = 0;
    bool found = false;
    size_t place = 0, of = 0;
    double got = 0, want = 0;
};
inline FirstWrong first_wrong;
inline std::string wrong_element() {
    const FirstWrong& w = first_wrong;
    char text[120] = "";
    if (w.found) snprintf(text, sizeof text, "; element %zu of %zu: got %g, wanted %g", w.place, w.of, w.got, w.want);
    return text;
}
template <class T> double largest_difference(const std::vector<T>& got, const std::vector<T>& want) {
    double most = got.size() == want.size() ? 0 : INFINITY;
    for (size_t i = 0; i < got.size() && i < want.size(); i++) {
        const double d = std::fabs((double)got[i] - (double)want[i]);
        if (!(d <= first_wrong.allowed) && !first_wrong.found)
            first_wrong = {first_wrong.allowed, true, i, got.size(), (double)got[i], (double)want[i]};
        if (!(d <= most)) most = std::isnan(d) ? INFINITY : d;
    }
    return most;
}

// ---- What a laboratory says
struct Shape { int x, y, z; }; // of --size; what they mean is the problem's
enum Ceiling { READ, COPY, FMA, TENSOR }; // what a step is measured against

// The data of the steps: inputs and output on the device, made by a constructor from a Shape.
struct Problem {
    double bytes = 0, flops = 0;    // that the task needs at least, whatever a step does
    double tolerance = 0;           // of error()
    const char* library_name = "";  // "" if the build has none
    bool captured = true;           // false: a step launches for itself (graphs, kernels by the host or by kernels)
    virtual ~Problem() {}
    virtual void spoil() = 0;       // the output, so that no step lives on the one before
    virtual double error() = 0;     // the largest difference from the definition
    virtual void library() {}       // launches the library's kernel for the same
};
struct Step {
    std::string name, adds;         // a word or two; what it adds, in one line
    Ceiling ceiling;
    std::string counters, look;     // for ncu; what to look for
    int sm;                         // the least compute capability x 10; 90 means sm_90a and nothing else
    std::type_index kind;           // of its problem: steps of one kind share one
    std::function<std::shared_ptr<Problem>(Shape)> make;
    std::function<void(Problem&)> run;
};
struct Exercise {
    std::string question;
    std::function<double()> answer;
};

class Laboratory {
public:
    std::string name, about;
    Shape gpu_shape, cpu_shape;
    std::vector<Step> steps;
    std::vector<Exercise> exercises;

    Laboratory(const char* name, const char* about, Shape gpu, Shape cpu)
        : name(name), about(about), gpu_shape(gpu), cpu_shape(cpu) {}
    template <class P>
    void step(const char* name, const char* adds, std::function<void(P&)> run, Ceiling ceiling, const char* counters,
              const char* look, int sm = 80) {
        steps.push_back({name, adds, ceiling, counters, look, sm, typeid(P),
                         [](Shape s) { return std::make_shared<P>(s); },
                         [run](Problem& p) { run(static_cast<P&>(p)); }});
    }
    void exercise(const char* question, std::function<double()> answer) { exercises.push_back({question, answer}); }

    // One run of a step on the problem: the error. (Tests call it.)
    static double try_step(const Step& step, Problem& p) {
        p.spoil();
        step.run(p);
        first_wrong = {p.tolerance};
        return p.error();
    }
    int main(int argc, char** argv);

private:
    struct Options {
        std::vector<int> chosen; // steps
        Shape shape;
        bool ncu = false, once = false;
        int exercise = 0;
        const char* answer = nullptr;
    };
    Options parse(int argc, char** argv) const;
    int ask(int k, const char* answer) const;
    int print_ncu(const Options& o) const;
    int table(const Options& o) const;
};

inline Shape parse_shape(const char* text) {
    int v[3], used = 0;
    const int n = sscanf(text, "%dx%dx%d", &v[0], &v[1], &v[2]);
    for (int i = std::max(n, 1); i < 3; i++) v[i] = v[0];
    char again[64];
    for (int i = 0; i < n; i++) used += snprintf(again + used, sizeof again - used, i ? "x%d" : "%d", v[i]);
    if (n < 1 || strcmp(again, text) || v[0] < 1 || v[1] < 1 || v[2] < 1)
        fail("--size takes a number or up to three, as 4096 or 300x200x100, not %s", text);
    return {v[0], v[1], v[2]};
}
inline Laboratory::Options Laboratory::parse(int argc, char** argv) const {
    Options o;
#ifdef __CUDACC__
    o.shape = gpu_shape;
#else
    o.shape = cpu_shape;
#endif
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        const auto value = [&] { return i + 1 < argc ? argv[++i] : (fail("%s takes a value", argv[i]), nullptr); };
        if (a == "--size") o.shape = parse_shape(value());
        else if (a == "--ncu") o.ncu = true;
        else if (a == "--once") o.once = true;
        else if (a == "--exercise") o.exercise = atoi(value());
        else if (a == "--answer") o.answer = value();
        else if (a == "--help" || a == "-h") {
            printf("lab/%s: %s\n\nusage: lab/%s [STEP ...] [--size N] [--once] [--ncu] [--exercise K [--answer X]]\n\n",
                   name.c_str(), about.c_str(), name.c_str());
            for (size_t s = 0; s < steps.size(); s++)
                printf("%3zu  %-24s %s\n", s + 1, steps[s].name.c_str(), steps[s].adds.c_str());
            exit(0);
        } else if (const int s = atoi(argv[i]); s >= 1 && s <= (int)steps.size() && std::to_string(s) == a)
            o.chosen.push_back(s);
        else fail("%s: neither an option nor one of the steps 1 to %zu; --help lists them", argv[i], steps.size());
    }
    if (o.chosen.empty())
        for (size_t s = 1; s <= steps.size(); s++) o.chosen.push_back((int)s);
    return o;
}
inline int Laboratory::ask(int k, const char* answer) const {
    if (k < 1 || k > (int)exercises.size()) fail("exercises go from 1 to %zu", exercises.size());
    const Exercise& e = exercises[k - 1];
    if (!answer) return printf("%s\n", e.question.c_str()), 0;
    char* end;
    const double given = strtod(answer, &end), right = e.answer();
    if (!*answer || *end) fail("--answer takes a number, not %s", answer);
    const bool same = std::fabs(given - right) <= 0.01 * std::fabs(right); // (a rounded answer is as good)
    return printf(same ? "right\n" : "not yet\n"), !same;
}
inline int Laboratory::print_ncu(const Options& o) const {
    for (int s : o.chosen)
        printf("step %d, %s: %s\n  ncu --metrics %s lab/%s %d --once\n", s, steps[s - 1].name.c_str(),
               steps[s - 1].look.c_str(), steps[s - 1].counters.c_str(), name.c_str(), s);
    return 0;
}
inline int Laboratory::main(int argc, char** argv) {
    const Options o = parse(argc, argv);
    return o.exercise ? ask(o.exercise, o.answer) : o.ncu ? print_ncu(o) : table(o);
}

// A line of the table. lab/plot.py reads it.
inline std::string table_row(int number, const Step& step, double time, const Problem& p, double ceiling,
                             double library, double error) {
    const bool memory = step.ceiling == READ || step.ceiling == COPY;
    const double rate = (memory ? p.bytes : p.flops) / time;
    char beside[16] = "-", row[256];
    if (library) snprintf(beside, sizeof beside, "%.1f%%", 100 * library / time);
    snprintf(row, sizeof row, "%2d  %-22s %-52s %7.1f us %7.1f %s %7.1f%% %8s  %.1e", number, step.name.c_str(),
             step.adds.c_str(), time * 1e6, rate / (memory ? 1e9 : 1e12), memory ? "GB/s  " : "TFLOPS",
             100 * rate / ceiling, beside, error);
    return row;
}

#ifdef __CUDACC__
inline double of(const Ceilings& c, Ceiling kind) {
    return kind == READ ? c.read : kind == COPY ? c.copy : kind == FMA ? c.fma : c.mma;
}
// The library's time for a problem; 0 if there is none.
inline double time_library(Problem& p) {
    if (!*p.library_name) return 0;
    p.spoil(), p.library();
    if (const double error = p.error(); !(error <= p.tolerance))
        return fprintf(stderr, "%s differs from the definition by %g: not shown\n", p.library_name, error), 0;
    return time_graph(stream, 4, [&](int) { p.library(); });
}
inline int Laboratory::table(const Options& o) const {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) fail("no GPU here: times need one (make check-env)");
    cudaDeviceProp gpu;
    GPU_CHECK(cudaGetDeviceProperties(&gpu, 0));
    GPU_CHECK(cudaStreamCreate(&stream));
    const int sm = gpu.major * 10 + gpu.minor;
    Ceilings ceilings = {};
    if (!o.once) {
        ceilings = measure_gpu(stream);
        printf("%s: %s, %dx%dx%d\n"
               "ceilings, measured now: read %.0f GB/s, copy %.0f GB/s; float32 %.1f TFLOP/s, bf16 by mma.sync "
               "%.0f TFLOP/s\n%2s  %-22s %-52s %10s %14s %8s %8s  %s\n", name.c_str(), gpu.name, o.shape.x,
               o.shape.y, o.shape.z, ceilings.read / 1e9, ceilings.copy / 1e9, ceilings.fma / 1e12, ceilings.mma / 1e12,
               "", "step", "adds", "time", "rate", "ceiling", "library", "error");
    }
    std::shared_ptr<Problem> p;
    std::type_index kind = typeid(void);
    double library = 0;
    bool wrong = false;
    for (int s : o.chosen) {
        const Step& step = steps[s - 1];
        if (sm < step.sm || (step.sm == 90 && sm != 90)) {
            printf("%2d  %-22s needs sm_%d%s\n", s, step.name.c_str(), step.sm, step.sm == 90 ? "a" : "");
            continue;
        }
        if (!p || kind != step.kind) {
            p.reset(); // the memory of the one before
            p = step.make(o.shape), kind = step.kind;
            library = o.once ? 0 : time_library(*p);
            if (!o.once) printf("    library: %s\n", library ? p->library_name : "none for this");
            if (!o.once && p->bytes < 4. * gpu.l2CacheSize && (step.ceiling == READ || step.ceiling == COPY))
                printf("    (these arrays fit the L2 cache, more or less: rates above the ceiling are the cache's)\n");
        }
        const double error = try_step(step, *p);
        const bool right = error <= p->tolerance;
        wrong |= !right;
        if (!right || o.once) {
            printf("%2d  %-22s %s: error %.2g%s\n", s, step.name.c_str(), right ? "right" : "WRONG", error,
                   wrong_element().c_str());
            continue;
        }
        const auto run = [&](int) { step.run(*p); };
        const double once = p->captured ? time_graph(stream, 1, run) : 0;
        const double time = p->captured ? time_graph(stream, std::clamp((int)(0.05 / once), 1, 20), run)
                                        : time_events(stream, [&] { run(0); });
        printf("%s\n", table_row(s, step, time, *p, of(ceilings, step.ceiling), library, error).c_str());
    }
    return wrong;
}
#else
inline int Laboratory::table(const Options& o) const {
    if (!o.once)
        printf("%s, by emulation on the CPU at %dx%dx%d: right or wrong. Times need nvcc and a GPU.\n", name.c_str(),
               o.shape.x, o.shape.y, o.shape.z);
    bool wrong = false;
    for (int s : o.chosen) {
        const Step& step = steps[s - 1];
        const std::shared_ptr<Problem> p = step.make(o.shape);
        const double error = try_step(step, *p);
        wrong |= !(error <= p->tolerance);
        printf("%2d  %-22s %-52s %s, error %.2g%s\n", s, step.name.c_str(), step.adds.c_str(),
               error <= p->tolerance ? "right" : "WRONG", error, wrong_element().c_str());
    }
    return wrong;
}
#endif
} // namespace lab
