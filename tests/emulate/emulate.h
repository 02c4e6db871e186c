// tests/emulate/emulate.h: runs CUDA code on a CPU, thread by thread; data/course/check_code.py compiles the code of each
// row with it.
//
//   launch(grid, block, [&] { kernel(x, n); });    one thread after the other, from the first to the last
//   backwards = true;                              ... from the last to the first: a race gives another result
//   check(condition);                              ends with 1 if it is false
//   says(format, ...);                             a text that must stand in the row's answer
//
// check_code.py writes a launch of host code, k<<<grid, block>>>(x), as start_kernel([&] { k(x); }, grid, block), and
// extern __shared__ T s[] as a pointer to dynamic_shared; the few calls of the runtime below work on the one memory.
//
// A thread of a block is a coroutine that runs until it waits: at __syncthreads(), or at a warp's function until the
// lanes of its mask have come. Blocks run one after the other. `stuck`: threads waited for an event that never came.
// Not emulated: clusters, barriers between blocks, streams, textures, half precision, tensor cores, time. It finds
// wrong results, not all races: only these two orders are tried.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>
#define __global__ static
#define __device__ static
#define __host__
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __restrict__
using std::isinf;
using std::isnan;
using std::max;
using std::min;
#ifndef COUNTED // (lab/check.cpp counts copies of these types: hooks miss arguments and results of calls)
#define COUNTED(bytes)
#define COUNTED_HALF __nv_bfloat16
#endif
struct uint3 { unsigned x = 0, y = 0, z = 0; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 { float x, y, z, w; COUNTED(16) };
struct alignas(8) float2 { float x, y; COUNTED(8) };
struct alignas(16) int4 { int x, y, z, w; COUNTED(16) };
struct alignas(16) uint4 { unsigned x, y, z, w; COUNTED(16) };
struct alignas(8) int2 { int x, y; COUNTED(8) };
struct alignas(8) uint2 { unsigned x, y; COUNTED(8) };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
alignas(1024) static char dynamic_shared[227 << 10];
constexpr int warpSize = 32;

static bool backwards = false, stuck = false;

struct Coroutine {
    enum State { READY, AT_BLOCK, AT_WARP, DONE } state = READY;
    void* place = nullptr; // where it goes on: in enter() when it is DONE
    uint3 index;
    unsigned mask = 0;
};
static std::vector<Coroutine> coroutines;
constexpr size_t STACK = 64 << 10;
static std::vector<std::unique_ptr<char[]>> stacks; // the coroutines'; one that has ended leaves its own to the next
static size_t running;
static void* scheduler;
static std::function<void()> body;
constexpr size_t MOST_THREADS = 2048; // at once
static uint64_t exchange[MOST_THREADS];

// Goes on at `to` and, when somebody comes back to `from`, here. (swapcontext does that, too, but asks the system each
// time which signals are blocked.)
#ifdef __x86_64__
extern "C" void change_stacks(void** from, void* to);
asm(".pushsection .text\nchange_stacks:\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n mov %rsp, (%rdi)\n"
    "mov %rsi, %rsp\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n.popsection");
static void* first_place(char* stack, void (*enter)()) { // six registers, and what change_stacks returns to
    void** const place = (void**)((uintptr_t)(stack + STACK) / 16 * 16) - 8;
    std::fill(place, place + 8, nullptr);
    place[6] = (void*)enter;
    return place;
}
#else
static void change_stacks(void** from, void* to) {
    ucontext_t here;
    *from = &here;
    swapcontext(&here, (ucontext_t*)to);
}
static void* first_place(char* stack, void (*enter)()) {
    ucontext_t* const place = (ucontext_t*)stack;
    getcontext(place);
    place->uc_stack.ss_sp = place + 1, place->uc_stack.ss_size = STACK - sizeof *place, place->uc_link = nullptr;
    return makecontext(place, enter, 0), place;
}
#endif
static void wait_at(Coroutine::State state, unsigned mask = 0) {
    Coroutine& c = coroutines[running];
    c.state = state, c.mask = mask;
    change_stacks(&c.place, scheduler);
}
static void enter() {
    for (;;) body(), wait_at(Coroutine::DONE);
}
static void go_on(size_t i) {
    running = i;
    change_stacks(&scheduler, coroutines[i].place);
}
// So many threads that are about to begin. (One that is stuck never goes on: another takes its place, on a new stack.)
static void begin_threads(size_t n) {
    coroutines.resize(n), stacks.resize(std::max(n, stacks.size()));
    for (size_t i = 0; i < n; i++) {
        Coroutine& c = coroutines[i];
        if (c.state == Coroutine::DONE) c.state = Coroutine::READY;
        else stacks[i].reset(new char[STACK]), c = {Coroutine::READY, first_place(stacks[i].get(), enter), {}, 0};
    }
}
// Lets threads go on whose barrier is complete; false: there is none.
static bool release() {
    bool any = false, all = true;
    const size_t n = coroutines.size();
    for (auto& c : coroutines) any |= c.state == Coroutine::READY; // it polls
    for (size_t first = 0; first < n; first += 32)
        for (size_t i = first; i < std::min(first + 32, n); i++) {
            if (coroutines[i].state != Coroutine::AT_WARP) continue;
            const unsigned mask = coroutines[i].mask;
            bool complete = true;
            for (size_t j = first; j < std::min(first + 32, n); j++)
                if (mask >> (j - first) & 1)
                    complete &= coroutines[j].state == Coroutine::AT_WARP && coroutines[j].mask == mask;
            for (size_t j = first; j < std::min(first + 32, n) && complete; j++)
                if (mask >> (j - first) & 1) coroutines[j].state = Coroutine::READY, any = true;
        }
    if (any) return true;
    for (auto& c : coroutines) all &= c.state == Coroutine::AT_BLOCK || c.state == Coroutine::DONE;
    for (auto& c : coroutines)
        if (all && c.state == Coroutine::AT_BLOCK) c.state = Coroutine::READY, any = true;
    return any;
}
static void (*block_begins)() = [] {}; // emulate_tensor.h: what the block before left under way is gone
static void run_block() {
    block_begins();
    const size_t n = (size_t)blockDim.x * blockDim.y * blockDim.z;
    if (n > 1024 || n == 0) std::abort();
    begin_threads(n);
    for (size_t i = 0; i < n; i++) {
        Coroutine& c = coroutines[i];
        c.index.x = (unsigned)(i % blockDim.x);
        c.index.y = (unsigned)(i / blockDim.x % blockDim.y);
        c.index.z = (unsigned)(i / blockDim.x / blockDim.y);
    }
    do
        for (size_t k = 0; k < n; k++) {
            const size_t i = backwards ? n - 1 - k : k;
            if (coroutines[i].state != Coroutine::READY) continue;
            threadIdx = coroutines[i].index;
            go_on(i);
        }
    while (release());
    for (auto& c : coroutines) stuck |= c.state != Coroutine::DONE;
}
template <class F> void launch(dim3 grid, dim3 block, F kernel) {
    gridDim = grid, blockDim = block, body = kernel;
    const unsigned n = grid.x * grid.y * grid.z;
    for (unsigned k = 0; k < n; k++) {
        const unsigned b = backwards ? n - 1 - k : k;
        blockIdx.x = b % grid.x, blockIdx.y = b / grid.x % grid.y, blockIdx.z = b / grid.x / grid.y;
        run_block();
    }
}

// ---- what host code calls
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
using cudaStream_t = void*;
static cudaError_t last_error = cudaSuccess;
template <class F> void start_kernel(F kernel, dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr) {
    const size_t threads = (size_t)block.x * block.y * block.z, blocks = (size_t)grid.x * grid.y * grid.z;
    if (!threads || threads > 1024 || block.z > 64 || !blocks || std::max(grid.y, grid.z) > 65535)
        last_error = cudaErrorInvalidConfiguration;
    else if (shared > 48 << 10)
        last_error = cudaErrorInvalidValue;
    else
        launch(grid, block, kernel);
}
static cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
static cudaError_t cudaPeekAtLastError() { return last_error; }
static cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
static void (*array_is)(void*, size_t) = [](void*, size_t) {}; // for a count of accesses: an array comes; 0 bytes: goes
template <class T> cudaError_t cudaMalloc(T** p, size_t bytes) {
    return *p = (T*)std::malloc(bytes), array_is(*p, bytes), cudaSuccess;
}
static cudaError_t cudaFree(void* p) { return array_is(p, 0), std::free(p), cudaSuccess; }
static cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return std::memcpy(to, from, bytes), cudaSuccess;
}
static cudaError_t cudaMemset(void* p, int byte, size_t bytes) { return std::memset(p, byte, bytes), cudaSuccess; }

// ---- what device code calls
// For a count of accesses: those that no compiler sees in the source.
[[maybe_unused]] static void (*touches)(const void*, size_t, bool store) = [](const void*, size_t, bool) {};
static void __syncthreads() { wait_at(Coroutine::AT_BLOCK); }
static int __syncthreads_count(int predicate) {
    static int count;
    count += predicate != 0;
    __syncthreads();
    const int all = count;
    __syncthreads();
    count = 0;
    __syncthreads();
    return all;
}
static int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) > 0; }
static int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }
static void __syncwarp(unsigned mask = ~0u) { wait_at(Coroutine::AT_WARP, mask); }
static void __threadfence() {}
static void __threadfence_system() {}
static int lane_of() { return (int)(running % 32); }
// Each lane gives a value; then all of the mask's are there to be read.
template <class T, class R> auto warp_exchange(unsigned mask, T v, R read) {
    std::memcpy(&exchange[running], &v, sizeof v);
    __syncwarp(mask);
    auto result = read([&](int lane) {
        T x;
        std::memcpy(&x, &exchange[running / 32 * 32 + (size_t)lane], sizeof x);
        return x;
    });
    __syncwarp(mask);
    return result;
}
template <class T> T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
    const int l = lane_of();
    return warp_exchange(mask, v, [&](auto at) { return at(l / width * width + (from & (width - 1))); });
}
template <class T> T __shfl_down_sync(unsigned mask, T v, int d, int width = 32) {
    const int l = lane_of(), from = l % width + d < width ? l + d : l;
    return warp_exchange(mask, v, [&](auto at) { return at(from); });
}
template <class T> T __shfl_up_sync(unsigned mask, T v, int d, int width = 32) {
    const int l = lane_of(), from = l % width >= d ? l - d : l;
    return warp_exchange(mask, v, [&](auto at) { return at(from); });
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int d) {
    const int l = lane_of();
    return warp_exchange(mask, v, [&](auto at) { return at(l ^ d); });
}
static unsigned __ballot_sync(unsigned mask, int predicate) {
    return warp_exchange(mask, predicate != 0, [&](auto at) {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1 && at(i)) bits |= 1u << i;
        return bits;
    });
}
template <class T> unsigned __match_any_sync(unsigned mask, T v) {
    return warp_exchange(mask, v, [&](auto at) {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1 && at(i) == v) bits |= 1u << i;
        return bits;
    });
}
static int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static int __all_sync(unsigned mask, int predicate) { return (__ballot_sync(mask, predicate) & mask) == mask; }
template <class T> T __reduce_add_sync(unsigned mask, T v) {
    return warp_exchange(mask, v, [&](auto at) {
        T sum = 0;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) sum += at(i);
        return sum;
    });
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
template <class T, class U> T atomicAdd(T* p, U v) { const T old = *p; *p = (T)(old + (T)v); return old; }
template <class T, class U> T atomicSub(T* p, U v) { const T old = *p; *p = (T)(old - (T)v); return old; }
template <class T, class U> T atomicMin(T* p, U v) { const T old = *p; *p = std::min(old, (T)v); return old; }
template <class T, class U> T atomicAnd(T* p, U v) { const T old = *p; *p = old & (T)v; return old; }
template <class T, class U> T atomicOr(T* p, U v) { const T old = *p; *p = old | (T)v; return old; }
template <class T, class U> T atomicXor(T* p, U v) { const T old = *p; *p = old ^ (T)v; return old; }
static unsigned atomicInc(unsigned* p, unsigned top) {
    const unsigned old = *p;
    *p = old >= top ? 0 : old + 1;
    return old;
}
template <class T, class U> T atomicMax(T* p, U v) { const T old = *p; *p = std::max(old, (T)v); return old; }
template <class T, class U> T atomicExch(T* p, U v) { const T old = *p; *p = (T)v; return old; }
template <class T> T atomicCAS(T* p, T compare, T v) { const T old = *p; if (old == compare) *p = v; return old; }
template <class T> T __ldg(const T* p) { return *p; }
static unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
#define __expf expf
static unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }

// ---- what the rows' runs call
#define check(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) std::printf("FALSE: %s\n", #condition), std::exit(1);                                        \
    } while (0)
[[gnu::format(printf, 1, 2)]] static void says(const char* format, ...) {
    va_list list;
    va_start(list, format);
    std::vprintf(format, list);
    va_end(list);
    std::puts("");
}
// 32-byte sectors that a warp's addresses touch: the thread with this lane reads `bytes` at address(lane).
template <class F> int sectors(F address, int bytes = 4) {
    std::vector<long> all;
    for (int lane = 0; lane < 32; lane++)
        for (long b = (long)address(lane); b < (long)address(lane) + bytes; b++) all.push_back(b / 32);
    std::sort(all.begin(), all.end());
    return (int)(std::unique(all.begin(), all.end()) - all.begin());
}
// Ways of a bank conflict: the most different words of one bank that the lanes' word indices name.
template <class F> int conflict_ways(F word) {
    int most = 0;
    for (int bank = 0; bank < 32; bank++) {
        std::vector<long> words;
        for (int lane = 0; lane < 32; lane++)
            if ((long)word(lane) % 32 == bank) words.push_back((long)word(lane));
        std::sort(words.begin(), words.end());
        most = std::max(most, (int)(std::unique(words.begin(), words.end()) - words.begin()));
    }
    return most;
}
// Book II's block_sum: the sum over a block, for all its threads.
template <class N> N block_sum(N x) {
    static N parts[32];
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    N sum = 0;
    for (unsigned i = 0; i < blockDim.x / 32; i++) sum += parts[i];
    return sum;
}
