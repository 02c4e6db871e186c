// cpu/avx512_bf16.cpp: the inner loops of products for AVX-512 with BF16.
#include "cpu/instruction_set.h"
#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
#if !defined(__AVX512BF16__) || !defined(__AVX512VNNI__)
#error "compiled with avx512.cpp's flags, -mavx512bf16 and -mavx512vnni: see the Makefile"
#endif
#include "cpu/avx512_vectors.h"
#include "cpu/byte_loops.h"
#include "cpu/ceilings.h"
#include "cpu/loops.h"

const ByteTile vnni_bytes = byte_tile<Vnni>;

const ProductTile<bf16> avx512_bf16_tile[5] = {
    product_tile<Bf16Dot, Format::PLAIN, bf16>, product_tile<Bf16Dot, Format::INT8, bf16>,
    product_tile<Bf16Dot, Format::INT4, bf16>, product_tile<Bf16Dot, Format::FP8, bf16>,
    product_tile<Bf16Dot, Format::BLOCKS, bf16>};

double avx512_bf16_multiply(MultiplyBlock* memory) {
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 s[12];
    for (int i = 0; i < 12; i++) memcpy(s + i, memory + i, 64);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 12; i++) s[i] = _mm512_dpbf16_ps(s[i], a, a);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 32 * 12 * 4000;
}
#endif
