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

namespace {
struct Vnni {
    typedef int Int __attribute__((vector_size(64)));
    typedef float Float __attribute__((vector_size(64)));
    static constexpr int ROWS = 16, TOKENS = 4;
    static constexpr bool NARROW = false;
    static INLINE void panel(Int (&v)[4], const uint8_t* p, size_t apart) {
        __m512i t[4], a[2], b[2];
        UNROLL for (int i = 0; i < 4; i++, p += apart) {
            t[i] = _mm512_maskz_inserti32x4(0xffff, __m512i{}, _mm_loadu_si128((const __m128i*)p), 0);
            t[i] = _mm512_maskz_inserti32x4(0xffff, t[i], _mm_loadu_si128((const __m128i*)(p + 4 * apart)), 1);
            t[i] = _mm512_maskz_inserti32x4(0xffff, t[i], _mm_loadu_si128((const __m128i*)(p + 8 * apart)), 2);
            t[i] = _mm512_maskz_inserti32x4(0xffff, t[i], _mm_loadu_si128((const __m128i*)(p + 12 * apart)), 3);
        }
        UNROLL for (int i = 0; i < 2; i++) {
            a[i] = _mm512_maskz_unpacklo_epi32(0xffff, t[2 * i], t[2 * i + 1]);
            b[i] = _mm512_maskz_unpackhi_epi32(0xffff, t[2 * i], t[2 * i + 1]);
        }
        v[0] = (Int)_mm512_maskz_unpacklo_epi64(0xff, a[0], a[1]), v[1] = (Int)_mm512_maskz_unpackhi_epi64(0xff, a[0], a[1]);
        v[2] = (Int)_mm512_maskz_unpacklo_epi64(0xff, b[0], b[1]), v[3] = (Int)_mm512_maskz_unpackhi_epi64(0xff, b[0], b[1]);
    }
    static INLINE void gather(Int& v, const uint8_t* p, size_t apart) {
        const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i at = _mm512_mullo_epi32(count, _mm512_set1_epi32((int)apart));
        v = (Int)_mm512_mask_i32gather_epi32(__m512i{}, 0xffff, at, p, 1);
    }
    static INLINE void fill(Int& v, const void* p) { v = (Int)_mm512_set1_epi32(load_as<int>(p)); }
    static INLINE void multiply_add(Int& sum, const Int& w, const Int& x) {
        sum = (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
    }
    static INLINE void fma(Float& sum, const Float& a, const Float& b) {
        sum = (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
    }
};
} // namespace
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
