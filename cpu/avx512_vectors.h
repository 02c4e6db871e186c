// cpu/avx512_vectors.h: the vectors of AVX-512, for the sources that are compiled for it.
#pragma once
#include "cpu/lanes.h"
#include "cpu/tiles.h"
#ifdef __AVX512F__ // else there is nothing
#include <immintrin.h>

namespace { // (a type of each source's own: see cpu/loops.h)
// (Masked forms with all lanes on: g++ 12 warns of the plain ones.)
struct Avx512 {
    using Vector = __m512;
    using Operand = Vector;
    template <class T> using Input = float;
    static constexpr int WIDTH = 16, SUMS = 16, ROWS = 4, TOKENS = 4, CHAINS = 2, KEYS = 16, MIXED = 8, OUTER = 12; // 32 registers
    using Part = __mmask16;
    static INLINE Part part(int n) { return n >= WIDTH ? (Part)0xffff : (Part)((1u << n) - 1); }
    static INLINE void load(Vector& v, const float* p, Part m) { v = _mm512_maskz_loadu_ps(m, p); }
    static INLINE void load(Vector& v, const bf16* p, Part m) {
        const __m512i wide = _mm512_maskz_cvtepu16_epi32(m, _mm256_maskz_loadu_epi16(m, p));
        v = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(m, wide, 16));
    }
    static INLINE void load(Vector& v, const int8_t* p, Part m) {
        v = _mm512_maskz_cvtepi32_ps(m, _mm512_maskz_cvtepi8_epi32(m, _mm_maskz_loadu_epi8(m, p)));
    }
    // e4m3 shifted to the fields of a half is the number times 2^-8; the conversion handles subnormals too.
    static INLINE void load(Vector& v, const e4m3* p, Part m) {
        const __m256i u = _mm256_maskz_cvtepu8_epi16(m, _mm_maskz_loadu_epi8(m, p));
        const __m256i size = _mm256_and_si256(u, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(u, size), 8);
        const __m256i half = _mm256_or_si256(_mm256_slli_epi16(size, 7), sign);
        v = _mm512_mul_ps(_mm512_maskz_cvtph_ps(m, half), _mm512_set1_ps(256));
    }
    static INLINE void store(float* p, const Vector& v, Part m) { _mm512_mask_storeu_ps(p, m, v); }
    static INLINE void keep(__m512& v) { asm("" : "+v"(v)); }
    static INLINE void load_sum(Vector& v, const float* p) { v = _mm512_maskz_loadu_ps(0xffff, p); }
    static INLINE void store_sum(float* p, const Vector& v) { _mm512_mask_storeu_ps(p, 0xffff, v); }
    static INLINE void fill(Vector& v, float a) { v = _mm512_set1_ps(a); }
    static INLINE void multiply(Vector& v, float s) { v = _mm512_mul_ps(v, _mm512_set1_ps(s)); }
    static INLINE void multiply_add(Vector& sum, const Vector& a, const Vector& b) {
        sum = _mm512_fmadd_ps(a, b, sum);
    }
    static INLINE float total(const Vector& sum) {
        __m512 v = _mm512_add_ps(sum, _mm512_maskz_shuffle_f32x4(0xffff, sum, sum, 0x4e));
        v = _mm512_add_ps(v, _mm512_maskz_shuffle_f32x4(0xffff, v, v, 0xb1));
        v = _mm512_add_ps(v, _mm512_maskz_permute_ps(0xffff, v, 0x4e));
        v = _mm512_add_ps(v, _mm512_maskz_permute_ps(0xffff, v, 0xb1));
        return _mm512_cvtss_f32(v);
    }
    // The totals of 16 sums in one vector, at little more than the cost of three single totals; the same additions.
    static INLINE Vector totals16(const Vector (&s)[16]) {
        Vector a[8], b[4], c[2];
        UNROLL for (int i = 0; i < 8; i++)
            a[i] = _mm512_maskz_shuffle_f32x4(0xffff, s[i], s[i + 8], 0x44) +
                   _mm512_maskz_shuffle_f32x4(0xffff, s[i], s[i + 8], 0xee);
        UNROLL for (int i = 0; i < 4; i++)
            b[i] = _mm512_maskz_shuffle_f32x4(0xffff, a[i], a[i + 4], 0x88) +
                   _mm512_maskz_shuffle_f32x4(0xffff, a[i], a[i + 4], 0xdd);
        UNROLL for (int i = 0; i < 2; i++)
            c[i] = (Vector)_mm512_maskz_unpacklo_pd(0xff, (__m512d)b[i], (__m512d)b[i + 2]) +
                   (Vector)_mm512_maskz_unpackhi_pd(0xff, (__m512d)b[i], (__m512d)b[i + 2]);
        const Vector mixed = _mm512_maskz_shuffle_ps(0xffff, c[0], c[1], 0x88) +
                             _mm512_maskz_shuffle_ps(0xffff, c[0], c[1], 0xdd);
        const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0);
        return _mm512_maskz_permutexvar_ps(0xffff, order, mixed);
    }
    template <int R, int M, int C> static INLINE void totals(float* y, const Vector (&sum)[R][M][C]) {
        if constexpr (R * M < 8 || R * M > 16) {
            UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int r = 0; r < R; r++) y[m * TILE_ROWS + r] = total(sum[r][m][0]);
        } else {
            Vector all[16];
            UNROLL for (int i = 0; i < 16; i++) all[i] = i < R * M ? sum[i % R][i / R][0] : Vector{};
            float numbers[16];
            _mm512_mask_storeu_ps(numbers, 0xffff, totals16(all));
            UNROLL for (int m = 0; m < M; m++) memcpy(y + m * TILE_ROWS, numbers + m * R, R * sizeof(float));
        }
    }
};
} // namespace
#endif
