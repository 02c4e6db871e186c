// cpu/ceilings.cpp: measures the CPU's read bandwidth and multiply rate.
#include "cpu/ceilings.h"
#include "cpu/instruction_set.h"
#include "cpu/lanes.h"
#include <array>
#include <cstdio>

#ifndef QWEN3_DOUBLE
// The sum of n words, which a thread reads as `streams` pieces side by side; n is a multiple of 8 * streams.
template <int STREAMS> static uint64_t read_streams(const uint64_t* data, size_t n) {
    typedef uint64_t Words __attribute__((vector_size(64), may_alias));
    const size_t piece = n / STREAMS;
    Words sum[STREAMS] = {};
    for (size_t i = 0; i < piece; i += 8)
        UNROLL for (int s = 0; s < STREAMS; s++) sum[s] += *(const Words*)(data + s * piece + i);
    uint64_t all = 0;
    for (const Words& s : sum)
        for (int l = 0; l < 8; l++) all += s[l];
    return all;
}

static constexpr size_t WORDS = (size_t)1 << 27, TASKS = 64;
static constexpr std::array READ = {read_streams<1>, read_streams<2>, read_streams<4>, read_streams<8>};

double ReadTest::pass(size_t kind) {
    uint64_t sum = 0;
    const double start = seconds();
    #pragma omp parallel for schedule(static) reduction(+ : sum)
    for (size_t task = 0; task < TASKS; task++) sum += READ[kind](data + task * (WORDS / TASKS), WORDS / TASKS);
    const double rate = (double)(WORDS * 8) / (seconds() - start);
    if (sum == 1) fprintf(stderr, " "); // the sum is used, so no compiler removes the loop
    return rate;
}

ReadTest::ReadTest() {
    arena.take<uint64_t>(WORDS);
    arena.allocate("the bandwidth test");
    data = arena.take<uint64_t>(WORDS);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < WORDS; i++) data[i] = i;
    for (size_t i = 0; i < 5 * READ.size(); i++)
        if (const double rate = pass(i % READ.size()); rate > ceiling) ceiling = rate, best = i % READ.size();
}
#endif

template <class T> double cpu_multiply_ceiling(double time) {
    [[maybe_unused]] const bool narrow = std::is_same_v<T, bf16>;
    auto multiply = plain_multiply;
#ifdef HAVE_SIMD
    if (instruction_set >= ISA_AVX2) multiply = avx2_multiply;
    if (instruction_set >= ISA_AVX512) multiply = avx512_multiply;
    if (narrow && instruction_set >= ISA_AVX512_BF16) multiply = avx512_bf16_multiply;
    if (narrow && instruction_set >= ISA_AMX) multiply = amx_multiply;
#endif
#ifdef HAVE_ARM
    if (narrow && instruction_set >= ISA_ARM_BF16) multiply = arm_bf16_multiply;
#endif
    double rate = 0;
    #pragma omp parallel reduction(+ : rate)
    {
        MultiplyBlock memory[16];
        for (auto& v : memory) v = MultiplyBlock{} + 1;
        double flops = 0, took = 0; // once per thread: waking the threads takes time
        for (const double start = seconds(); took < time; took = seconds() - start) flops += multiply(memory);
        rate += flops / took;
    }
    return rate;
}

#ifndef QWEN3_DOUBLE
template double cpu_multiply_ceiling<bf16>(double time);
template double cpu_multiply_ceiling<float>(double time);
#endif
