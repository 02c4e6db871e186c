// cpu/avx512_vectors.h: the vectors of AVX-512, for the sources that are compiled for it.
#pragma once
#include "cpu/lanes.h"
#include "cpu/tiles.h"
#ifdef __AVX512F__ // else there is nothing
#include <immintrin.h>

namespace { // (a type of each source's own: see cpu/loops.h)
constexpr float CODES[31] = {-15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1, 0,
                             1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// (Masked forms with all lanes on: g++ 12 warns of the plain ones.)
struct Avx512 {
    using Vector = __m512;
    using Operand = Vector;
    template <class T> using Input = float;
    static constexpr int WIDTH = 16, SUMS = 16, ROWS = 4, TOKENS = 4, CHAINS = 2, STREAMS = 4, KEYS = 16,
                         MIXED = 8, OUTER = 12; // 32 registers
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
    static INLINE void fill_two(Vector& v, Vector& u, const bf16* p) {
        int both;
        memcpy(&both, p, 4);
        v = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_set1_epi32(both), 16));
        u = _mm512_castsi512_ps(_mm512_and_si512(_mm512_set1_epi32(both), _mm512_set1_epi32(-65536)));
    }
    template <class S> static INLINE void load_scaled(Operand& v, const S* p, const Vector& scale) {
        load(v, p, part(WIDTH));
        v = _mm512_mul_ps(v, scale);
    }
    using Codes = Vector; // a group's 16 numbers
    static INLINE void make_codes(Codes& c, uint16_t half, int zero) {
        const Vector scale = _mm512_maskz_cvtph_ps(0xffff, _mm256_set1_epi16((short)half));
        c = _mm512_mul_ps(_mm512_maskz_loadu_ps(0xffff, CODES + 15 - zero), scale);
    }
    template <int SHIFT> static INLINE void load_codes(Operand& v, const uint8_t* p, const Codes& c) {
        __m512i code = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
        if (SHIFT) code = _mm512_maskz_srli_epi32(0xffff, code, SHIFT);
        v = _mm512_maskz_permutexvar_ps(0xffff, code, c); // (by the lower 4 bits)
    }
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

#ifdef __AVX512BF16__
// vdpbf16ps multiplies 32 pairs of bf16 and adds neighbours into 16 floats, without conversion. Packed weights are
// rounded to bf16.
struct Bf16Dot : Avx512 {
    using Operand = __m512bh;
    template <class T> using Input = bf16;
    static constexpr int WIDTH = 32, ROWS = 4, TOKENS = 4, CHAINS = 1;
    static INLINE void keep(Operand&) {}
    using Part = __mmask32;
    static INLINE Part part(int n) { return n >= WIDTH ? ~0u : (1u << n) - 1; }
    static INLINE void load(Operand& v, const bf16* p, Part m) {
        v = (__m512bh)_mm512_maskz_loadu_epi16(m, p);
    }
    template <class S> static INLINE void load_scaled(Operand& v, const S* p, const Vector& scale) {
        Vector low, high;
        Avx512::load_scaled(low, p, scale);
        Avx512::load_scaled(high, p + WIDTH / 2, scale);
        v = _mm512_cvtne2ps_pbh(high, low);
    }
    // e4m3 as in Avx512, 32 at once.
    static INLINE void load_scaled(Operand& v, const e4m3* p, const Vector& scale) {
        const __m512i u = _mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256((const __m256i*)p));
        const __m512i size = _mm512_and_si512(_mm512_maskz_slli_epi16(~0u, u, 7), _mm512_set1_epi16(0x3f80));
        const __m512i sign = _mm512_and_si512(_mm512_maskz_slli_epi16(~0u, u, 8), _mm512_set1_epi16((short)0x8000));
        const __m512i half = _mm512_or_si512(size, sign);
        const Vector low = _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xf, half, 0));
        const Vector high = _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xf, half, 1));
        const Vector more = _mm512_mul_ps(scale, _mm512_set1_ps(256));
        v = _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, more), _mm512_mul_ps(low, more));
    }
    using Codes = __m512i; // a group's 16 numbers, twice
    static INLINE void make_codes(Codes& c, uint16_t half, int zero) {
        Vector numbers;
        Avx512::make_codes(numbers, half, zero);
        c = _mm512_maskz_broadcast_i64x4(0xff, (__m256i)_mm512_cvtneps_pbh(numbers));
    }
    template <int SHIFT> static INLINE void load_codes(Operand& v, const uint8_t* p, const Codes& c) {
        __m512i code = _mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256((const __m256i*)p));
        if (SHIFT) code = _mm512_maskz_srli_epi16(~0u, code, SHIFT);
        v = (__m512bh)_mm512_maskz_permutexvar_epi16(~0u, code, c); // (by the lower 5 bits)
    }
    static INLINE void multiply_add(Vector& sum, const Operand& a, const Operand& b) {
        sum = _mm512_dpbf16_ps(sum, a, b);
    }
};
#endif

#ifdef __AVX512VNNI__
// vpdpbusd multiplies 64 unsigned bytes by signed ones and adds neighbours into 16 integers: see cpu/byte_loops.h.
struct Vnni {
    typedef int Int __attribute__((vector_size(64)));
    typedef float Float __attribute__((vector_size(64)));
    static constexpr int ROWS = 16, TOKENS = 4, SQUARE = 0;
    static constexpr bool NARROW = false, SIGNED = false, SUMS = true;
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
        v[0] = (Int)_mm512_maskz_unpacklo_epi64(0xff, a[0], a[1]);
        v[1] = (Int)_mm512_maskz_unpackhi_epi64(0xff, a[0], a[1]);
        v[2] = (Int)_mm512_maskz_unpacklo_epi64(0xff, b[0], b[1]);
        v[3] = (Int)_mm512_maskz_unpackhi_epi64(0xff, b[0], b[1]);
    }
    static INLINE void gather(Int& v, const uint8_t* p, size_t apart) {
        const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i at = _mm512_mullo_epi32(count, _mm512_set1_epi32((int)apart));
        v = (Int)_mm512_mask_i32gather_epi32(__m512i{}, 0xffff, at, p, 1);
    }
    static INLINE void half(Float& v, const Int& u) {
        v = (Float)_mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)u));
    }
    static INLINE void fill(Int& v, const void* p) { v = (Int)_mm512_set1_epi32(load_as<int>(p)); }
    static INLINE void multiply_add(Int& sum, const Int& w, const Int& x) {
        sum = (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
    }
    static INLINE void fma(Float& sum, const Float& a, const Float& b) {
        sum = (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
    }
    // COUNT times 64 columns of a row. Half a vector is a group: lanes of different vectors change places until four
    // neighbours are of four vectors, whose lanes are added meanwhile.
    template <int COUNT> static INLINE void int8_groups(int* sum, const int8_t* w, const int8_t* x) {
        const __m512i order = _mm512_set_epi32(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
        __m512i t[8] = {};
        UNROLL for (int i = 0; i < COUNT; i++) {
            __builtin_prefetch(w + 64 * i + 4096, 0, 2);
            const __m512i bytes = _mm512_maskz_loadu_epi32(0xffff, w + 64 * i);
            t[i] = _mm512_dpbusd_epi32(__m512i{}, _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80)),
                                       _mm512_maskz_loadu_epi32(0xffff, x + 64 * i));
        }
        UNROLL for (int i = 0; i < 8; i += 2)
            t[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi32(0xffff, t[i], t[i + 1]),
                                    _mm512_maskz_unpackhi_epi32(0xffff, t[i], t[i + 1]));
        UNROLL for (int i = 0; i < 8; i += 4)
            t[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi64(0xff, t[i], t[i + 2]),
                                    _mm512_maskz_unpackhi_epi64(0xff, t[i], t[i + 2]));
        const __m512i all = _mm512_add_epi32(_mm512_maskz_shuffle_i32x4(0xffff, t[0], t[4], 0x88),
                                             _mm512_maskz_shuffle_i32x4(0xffff, t[0], t[4], 0xdd));
        const Int groups = (Int)_mm512_maskz_permutexvar_epi32(0xffff, order, all);
        memcpy(sum, &groups, COUNT * 2 * sizeof(int));
    }
    static INLINE void int8_sums(int* sum, const int8_t* w, size_t apart, int rows, const int8_t* x, int columns) {
        for (int r = 0; r < rows; r++, w += apart)
            for (int k = 0; k < columns; k += 512) {
                const bool whole = columns - k >= 512;
                whole ? int8_groups<8>(sum, w + k, x + k) : int8_groups<4>(sum, w + k, x + k);
                sum += whole ? 16 : 8;
            }
    }
};
#endif
} // namespace
#endif
