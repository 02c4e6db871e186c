// cpu/avx512.cpp: the inner loops for AVX-512.
#include "cpu/instruction_set.h"
#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
#ifndef __AVX512DQ__
#error "compiled with -mavx2 -mfma -mavx512f -mavx512bw -mavx512vl -mavx512dq: see the Makefile"
#endif
#include "cpu/avx512_vectors.h"
#include "cpu/ceilings.h"
#include "cpu/loops.h"

template <> const Loops<bf16>& avx512_loops() { return LOOPS<Avx512, bf16>; }
template <> const Loops<float>& avx512_loops() { return LOOPS<Avx512, float>; }

double avx512_multiply(MultiplyBlock* memory) {
    __m512 a = _mm512_set1_ps(1), s[12];
    for (int i = 0; i < 12; i++) memcpy(s + i, memory + i, 64);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 12; i++) s[i] = _mm512_fmadd_ps(a, a, s[i]);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 16 * 12 * 4000;
}
#endif
