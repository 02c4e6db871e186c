// cpu/plain.cpp: the inner loops for any CPU, in the compilers' own vectors.
#include "cpu/ceilings.h"
#include "cpu/loops.h"
#include "cpu/plain_vectors.h"
#include "model/instances.h"

#define INSTANTIATE(T) template <> const Loops<T>& plain_loops() { return LOOPS<Plain<acc<T>>, T>; }
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

#ifndef QWEN3_DOUBLE
double plain_multiply(MultiplyBlock* memory) {
    MultiplyBlock a = memory[14], b = memory[15], s0 = memory[0], s1 = memory[1];
    for (int k = 0; k < 4000; k++) s0 = s0 * a + b, s1 = s1 * a + b;
    memory[0] = s0, memory[1] = s1;
    return 2. * 16 * 2 * 4000;
}
#endif
