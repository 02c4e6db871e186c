// The GPU features of step.h, on a CPU, beside emulated.h: its coroutines for the threads of all blocks at once, since
// they wait for each other; step.h's instructions. Copies poison their target at once and arrive when they are waited
// for.
#pragma once
#define STEP_EMULATED
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-variable"
#include "tests/emulate/packed_emulation.h"
#include <map>
#undef __global__
#define __global__ [[maybe_unused]] static
#define __grid_constant__
#define __noinline__

// ---- Blocks that run at once
constexpr size_t BLOCK_MEMORY = 112 << 10;
static std::vector<unsigned char> block_memory;
struct Meeting { int arrived = 0; std::vector<size_t> waiting; };
static std::map<std::pair<unsigned, int>, Meeting> meetings; // (block, barrier)
static uint64_t emulated_ns;

template <int> void keep_registers() {}
template <int> void take_registers() {}
__device__ inline unsigned char* step_memory() { return block_memory.data() + blockIdx.x * BLOCK_MEMORY; }
__device__ inline void step_meet(int barrier, int threads) {
    Meeting& m = meetings[{blockIdx.x, barrier}];
    if (++m.arrived < threads) {
        m.waiting.push_back(running);
        wait_at(Coroutine::AT_BLOCK);
        return;
    }
    for (size_t thread : m.waiting) coroutines[thread].state = Coroutine::READY;
    m = {};
}

// All blocks of a launch together; every other pass of the scheduler goes from the last thread to the first. False: a
// thread has not come to its end.
template <class F> bool launch_together(unsigned blocks, unsigned threads, F kernel) {
    gridDim = dim3(blocks), blockDim = dim3(threads), body = kernel;
    const size_t n = (size_t)blocks * threads;
    if (n > MOST_THREADS) std::abort();
    block_memory.assign(blocks * BLOCK_MEMORY, 0xff); // NaN
    meetings.clear();
    begin_threads(n);
    bool from_last = backwards;
    do {
        for (size_t k = 0; k < n; k++) {
            const size_t i = from_last ? n - 1 - k : k;
            if (coroutines[i].state != Coroutine::READY) continue;
            threadIdx.x = (unsigned)i % threads, blockIdx.x = (unsigned)i / threads;
            go_on(i);
        }
        from_last = !from_last;
    } while (release());
    for (auto& c : coroutines)
        if (c.state != Coroutine::DONE) return false;
    return true;
}

// ---- Instructions
__device__ inline int step_opaque(int x) { return x; }
struct EmulatedCopy { unsigned char* to; const unsigned char* from; int bytes; bool counted; }; // to null: an arrival
struct StepBarrier;
static std::map<StepBarrier*, std::vector<EmulatedCopy>> copies_to_come;
static std::vector<EmulatedCopy> copies_of[MOST_THREADS]; // copy16's, by thread
struct StepBarrier {
    uint16_t expected, missing, bytes, phase;
    void begin(int arrivals) {
        expected = missing = (uint16_t)arrivals, bytes = phase = 0;
        copies_to_come[this].clear();
    }
    void settle() { if (!missing && !bytes) phase++, missing = expected; }
    void arrive() { missing--, settle(); }
    void expect(int n) { bytes = (uint16_t)(bytes + n), arrive(); }
    void wait(uint32_t parity) {
        while ((phase & 1) == parity) {
            for (auto& c : copies_to_come[this]) {
                if (c.to) memcpy(c.to, c.from, (size_t)c.bytes);
                if (!c.to) missing--;
                else if (c.counted) bytes = (uint16_t)(bytes - c.bytes);
            }
            if (!copies_to_come[this].empty()) copies_to_come[this].clear(), settle();
            else wait_at(Coroutine::READY);
        }
    }
    bool is_odd() const { return phase & 1; }
    static EmulatedCopy spoil(void* to, const void* from, int n) {
        if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || n % 16)
            std::puts("FALSE: a copy is not aligned"), std::exit(1);
        memset(to, 0xff, (size_t)n);
        return {(unsigned char*)to, (const unsigned char*)from, n, true};
    }
    void copy(void* to, const void* from, int n) { copies_to_come[this].push_back(spoil(to, from, n)); }
    static void copy16(void* to, const void* from) { copies_of[running].push_back(spoil(to, from, 16)); }
    void arrive_with_copies() {
        auto& own = copies_of[running];
        own.push_back({nullptr, nullptr, 0, false});
        for (auto& c : own) c.counted = false, copies_to_come[this].push_back(c);
        own.clear();
    }
    static void begun() {}
};
static_assert(sizeof(StepBarrier) == 8, "as on a GPU");
static bool words_get_lost = false; // a block whose words are never read: for the watchdog
__device__ inline uint4 step_peek(const uint4* word) { return *word; }
__device__ inline void step_publish(uint4* word, uint4 v) { if (!words_get_lost || blockIdx.x) *word = v; }
__device__ inline uint64_t step_clock() { return wait_at(Coroutine::READY), emulated_ns += 1000; }
__device__ inline int step_arrive(int* counter) { return (*counter)++; }

inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline uint32_t __ballot_sync(unsigned, bool x) {
    uint32_t lanes = (uint32_t)x << threadIdx.x % 32;
    for (int other = 16; other; other /= 2) lanes |= __shfl_xor_sync(~0u, lanes, other);
    return lanes;
}
template <class Join> uint32_t reduced(uint32_t x, Join join) {
    for (int other = 16; other; other /= 2) x = join(x, __shfl_xor_sync(~0u, x, other));
    return x;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t x) {
    return reduced(x, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t x) {
    return reduced(x, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline void __threadfence_block() {}
#include "gpu/step/formats.h"
#include "gpu/step/step.h"
#pragma GCC diagnostic pop
