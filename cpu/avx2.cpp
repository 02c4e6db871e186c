// cpu/avx2.cpp: the inner loops for AVX2.
#include "cpu/instruction_set.h"
#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
#ifndef __AVX2__
#error "compiled with -mavx2 -mfma: see the Makefile"
#endif
#include "cpu/byte_loops.h"
#include "cpu/ceilings.h"
#include "cpu/loops.h"
#include <immintrin.h>

namespace {
struct Avx2 {
    using Vector = __m256;
    using Operand = Vector;
    template <class T> using Input = float;
    static constexpr int WIDTH = 8, SUMS = 8, ROWS = 4, TOKENS = 3, CHAINS = 2, STREAMS = 2, KEYS = 8, MIXED = 8,
                         OUTER = 6; // 16 registers
    static INLINE void load8(Vector& v, const float* p) { v = _mm256_loadu_ps(p); }
    static INLINE void load8(Vector& v, const bf16* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
        v = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static INLINE void load8(Vector& v, const int8_t* p) {
        v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
    }
    static INLINE void load8(Vector& v, const e4m3* p) { // same as load_lanes
        const __m256i u = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
        const __m256i size = _mm256_and_si256(u, _mm256_set1_epi32(0x7f));
        const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(size, 20), _mm256_set1_epi32(120 << 23));
        const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(size), _mm256_set1_ps(0x1p-9f));
        const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), size);
        const __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(u, size), 24);
        v = _mm256_or_ps(_mm256_blendv_ps(_mm256_castsi256_ps(normal), small, _mm256_castsi256_ps(is_small)),
                         _mm256_castsi256_ps(sign));
    }
    using Part = int;
    static INLINE Part part(int n) { return n; }
    template <class T> static INLINE void load(Vector& v, const T* p, Part n) {
        if (n >= WIDTH) return load8(v, p);
        T whole[WIDTH] = {};
        memcpy((void*)whole, p, (size_t)n * sizeof(T));
        load8(v, whole);
    }
    static INLINE void store(float* p, const Vector& v, Part n) {
        memcpy(p, &v, smaller(WIDTH, n) * sizeof(float));
    }
    static INLINE void keep(Operand& v) { asm("" : "+x"(v)); }
    static INLINE void load_sum(Vector& v, const float* p) { v = _mm256_loadu_ps(p); }
    static INLINE void store_sum(float* p, const Vector& v) { _mm256_storeu_ps(p, v); }
    static INLINE void fill(Vector& v, float a) { v = _mm256_set1_ps(a); }
    static INLINE void fill_two(Vector& v, Vector& u, const bf16* p) {
        int both;
        memcpy(&both, p, 4);
        v = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_set1_epi32(both), 16));
        u = _mm256_castsi256_ps(_mm256_and_si256(_mm256_set1_epi32(both), _mm256_set1_epi32(-65536)));
    }
    template <class S> static INLINE void load_scaled(Operand& v, const S* p, const Vector& scale) {
        load8(v, p);
        v = _mm256_mul_ps(v, scale);
    }
    struct Codes { Vector scale, zero; }; // the number is code * scale + zero, exactly
    static INLINE void make_codes(Codes& c, uint16_t half, int zero) {
        const float scale = half_as_float(half);
        c.scale = _mm256_set1_ps(scale), c.zero = _mm256_set1_ps(-scale * (float)zero);
    }
    template <int SHIFT> static INLINE void load_codes(Operand& v, const uint8_t* p, const Codes& c) {
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
        const __m256i code = SHIFT ? _mm256_srli_epi32(bytes, SHIFT) : _mm256_and_si256(bytes, _mm256_set1_epi32(15));
        v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), c.scale, c.zero);
    }
    static INLINE void multiply(Vector& v, float s) { v = _mm256_mul_ps(v, _mm256_set1_ps(s)); }
    static INLINE void multiply_add(Vector& sum, const Vector& a, const Vector& b) {
        sum = _mm256_fmadd_ps(a, b, sum);
    }
    static INLINE float total(const Vector& v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    template <int R, int M, int C> static INLINE void totals(float* y, const Vector (&sum)[R][M][C]) {
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int r = 0; r < R; r++) y[m * TILE_ROWS + r] = total(sum[r][m][0]);
    }
};

// Bytes of both signs: the size of one times the other with its sign. (-128 has the size 128.)
struct Avx2Bytes {
    typedef int Int __attribute__((vector_size(32)));
    typedef float Float __attribute__((vector_size(32)));
    static constexpr int ROWS = 8, TOKENS = 4, SQUARE = 0;
    static constexpr bool NARROW = true, SIGNED = true, SUMS = false;
    static INLINE void panel(Int (&v)[4], const uint8_t* p, size_t apart) {
        __m256i t[4], a[2], b[2];
        UNROLL for (int i = 0; i < 4; i++) {
            const __m128i high = _mm_loadu_si128((const __m128i*)(p + (i + 4) * apart));
            t[i] = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(p + i * apart)));
            t[i] = _mm256_inserti128_si256(t[i], high, 1);
        }
        UNROLL for (int i = 0; i < 2; i++)
            a[i] = _mm256_unpacklo_epi32(t[2 * i], t[2 * i + 1]), b[i] = _mm256_unpackhi_epi32(t[2 * i], t[2 * i + 1]);
        v[0] = (Int)_mm256_unpacklo_epi64(a[0], a[1]), v[1] = (Int)_mm256_unpackhi_epi64(a[0], a[1]);
        v[2] = (Int)_mm256_unpacklo_epi64(b[0], b[1]), v[3] = (Int)_mm256_unpackhi_epi64(b[0], b[1]);
    }
    static INLINE void gather(Int& v, const uint8_t* p, size_t apart) {
        const __m256i at = _mm256_mullo_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32((int)apart));
        v = (Int)_mm256_i32gather_epi32((const int*)p, at, 1);
    }
    static INLINE void half(Float& v, const Int& u) { // without subnormal floats
        const Int size = u & 0x7fff, normal = (size << 13) + (112 << 23), is_small = size < 0x400;
        v = __builtin_convertvector(size, Float) * 0x1p-24f;
        v = (Float)(((Int)v & is_small) | (normal & ~is_small) | (u & 0x8000) << 16);
    }
    static INLINE void fill(Int& v, const void* p) { v = (Int)_mm256_set1_epi32(load_as<int>(p)); }
    static INLINE void multiply_add(Int& sum, const Int& w, const Int& x) {
        sum = (Int)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
    }
    static INLINE void widen(Int& sum, const Int& part) {
        sum += (Int)_mm256_madd_epi16((__m256i)part, _mm256_set1_epi16(1));
    }
    static INLINE void multiply_add_signed(Int& sum, const Int& w, const Int& x) {
        const __m256i signs = _mm256_sign_epi8((__m256i)x, (__m256i)w);
        widen(sum, (Int)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), signs));
    }
    static INLINE void fma(Float& sum, const Float& a, const Float& b) {
        sum = (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
    }
};
} // namespace

const ByteTile avx2_bytes = byte_tile<Avx2Bytes>;
template <> const Loops<bf16>& avx2_loops() { return LOOPS<Avx2, bf16>; }
template <> const Loops<float>& avx2_loops() { return LOOPS<Avx2, float>; }

double avx2_multiply(MultiplyBlock* memory) {
    __m256 a = _mm256_set1_ps(1), s[10];
    for (int i = 0; i < 10; i++) memcpy(s + i, memory + i, 32);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 10; i++) s[i] = _mm256_fmadd_ps(a, a, s[i]);
    for (int i = 0; i < 10; i++) memcpy(memory + i, s + i, 32);
    return 2. * 8 * 10 * 4000;
}
#endif
