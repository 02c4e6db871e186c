// cpu/ceilings.h: the read bandwidth and the multiply rate of this machine's CPU.
#pragma once
#include "base/arena.h"
#include <cstddef>
#include <cstdint>

// This machine's ceilings, measured by loops that only read memory, or only multiply registers. Measured speeds are
// reported as shares of them.

// Reads 1 GB of memory with all threads. The number of streams that a CPU's prefetchers follow best differs between
// makes, by 1.5 times in bandwidth: the best of 1, 2, 4 and 8 per thread, five passes of each.
class ReadTest {
    Arena arena;
    uint64_t* data;
    size_t best = 0; // number of streams: 2^best
    double pass(size_t kind);

  public:
    double ceiling = 0; // bytes a second
    ReadTest();
    double pass() { return pass(best); }
};

// Flops a second that all threads reach in `time` seconds, with the instructions that products of T use.
template <class T> double cpu_multiply_ceiling(double time);

// A burst of multiply-adds on registers alone, one function for each instruction set, in its source; returns the number
// of flops. There are enough sums to hide the latency of one and few enough for the registers; the compiler cannot
// prove that they are equal.
typedef float MultiplyBlock __attribute__((vector_size(64), may_alias));
double plain_multiply(MultiplyBlock* memory); // (16) blocks, all 1, as are the others
double avx2_multiply(MultiplyBlock* memory);
double avx512_multiply(MultiplyBlock* memory);
double avx512_bf16_multiply(MultiplyBlock* memory);
double amx_multiply(MultiplyBlock* memory);
double arm_bf16_multiply(MultiplyBlock* memory);
