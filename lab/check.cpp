// check.cpp: judges one step of a laboratory without a GPU; `make check-matmul-3` builds and runs it (docs/lab.md).
//
// usage: build/exercises/NAME STEP [--size SHAPE]
//
// EXERCISE: the source. It runs by emulation with the threads in two orders; the first run counts accesses of memory.
#include "tests/emulate/accesses.h"
#include <cfloat>
#include <csignal>
#include <cstring>
#include <unistd.h>
// A member of the vector types that counts their copies (see tests/emulate/emulate.h); it lies where they begin.
template <size_t BYTES> struct Counter {
    Counter() = default;
    Counter(const Counter& from) { accesses::touch(&from, BYTES, false); }
    Counter& operator=(const Counter& from) {
        accesses::touch(&from, BYTES, false), accesses::touch(this, BYTES, true);
        return *this;
    }
};
struct __nv_bfloat16;
struct Half { // of a pair, which is counted as one
    uint16_t bits;
    Half() = default;
    template <class T> Half(const T& x) : bits(x.bits) {}
    operator __nv_bfloat16() const;
};
#define COUNTED(bytes) [[no_unique_address]] Counter<bytes> counter;
#define COUNTED_HALF Half
#include "lab/ptx.h"
inline Half::operator __nv_bfloat16() const { return {bits, {}}; }
static_assert(sizeof(float4) == 16 && sizeof(__nv_bfloat16) == 2 && sizeof(__nv_bfloat162) == 4);
#undef __constant__
#define __constant__ static __attribute__((section("constant_memory")))
#define LAB_NO_MAIN
#include EXERCISE
extern "C" char __start_constant_memory[] __attribute__((weak)), __stop_constant_memory[] __attribute__((weak));
using namespace lab;

static void say_and_end(const char* text) { // in a signal handler
    if (write(1, text, strlen(text)) < 0) _exit(2);
    _exit(1);
}
template <class... T> void not_shared(const T&... emulators) {
    (accesses::not_shared(&emulators, sizeof emulators), ...);
}
static void print(const char* memory, const accesses::Count& c, const char* turns, const char* bad) {
    if (c.loads + c.stores)
        printf("%s memory: %ld loads and %ld stores of warps take %ld %s, %ld are enough; %s: %ld\n", memory, c.loads,
               c.stores, c.turns, turns, c.least, bad, c.bad);
}
static void print(const accesses::Report& report) {
    if (!report.complete) return (void)printf("accesses are not counted: there is no addr2line (binutils)\n");
    print("global", report.global, "sectors", "uncoalesced");
    print("shared", report.shared, "wavefronts", "with bank conflicts");
    for (size_t i = 0; i < report.bad.size() && i < 8; i++) {
        const accesses::Line& line = report.bad[i];
        printf(line.shared ? "  %s: %ld %s of shared memory with conflicts, up to %d ways\n"
                           : "  %s: %ld uncoalesced %s, up to %d sectors\n",
               line.place.c_str(), line.count.bad, line.store ? "stores" : "loads", line.count.most);
    }
}
int main(int argc, char** argv) {
    const Laboratory l = LABORATORY::laboratory();
    const int number = argc > 1 ? atoi(argv[1]) : 0;
    const bool sized = argc == 4 && !strcmp(argv[2], "--size");
    if (number < 1 || number > (int)l.steps.size() || (argc != 2 && !sized))
        fail("usage: %s STEP [--size SHAPE]; %s has steps 1 to %zu", argv[0], l.name.c_str(), l.steps.size());
    const Step& step = l.steps[number - 1];
    const Shape shape = sized ? parse_shape(argv[3]) : l.cpu_shape;
    signal(SIGSEGV, [](int) { say_and_end("wrong: it reads or writes outside of its arrays\n"); });
    signal(SIGALRM, [](int) { say_and_end("wrong: it has no end (300 s)\n"); });
    alarm(300);
    array_is = accesses::array, touches = accesses::touch;
    static const auto forget = block_begins;
    block_begins = [] { accesses::block_ends(), forget(); };
    printf("step %d, %s, %dx%dx%d: ", number, step.name.c_str(), shape.x, shape.y, shape.z), fflush(stdout);
    accesses::not_shared(__start_constant_memory, __stop_constant_memory - __start_constant_memory);
    not_shared(threadIdx, blockIdx, blockDim, gridDim, running, scheduler, coroutines, body, exchange, fragments, rows,
               groups, open_group, arrivals, products, open_products, operands, block_begins, touches);
    accesses::Report report;
    for (bool order : {false, true}) {
        const std::shared_ptr<Problem> p = step.make(shape);
        if (!order) accesses::begin(&running);
        backwards = order;
        const double error = Laboratory::try_step(step, *p);
        if (!order) report = accesses::end(EXERCISE);
        if (error <= p->tolerance) continue;
        printf("wrong: the largest error is %g, %g is allowed%s%s\n", error, p->tolerance, wrong_element().c_str(),
               order ? " (only with the threads from the last to the first: a barrier is missing)" : "");
        return 1;
    }
    printf("right, with the threads in two orders\n");
    print(report);
}
