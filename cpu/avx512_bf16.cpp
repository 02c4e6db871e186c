// cpu/avx512_bf16.cpp: the inner loops of products for AVX-512 with BF16 and VNNI.
#include "cpu/instruction_set.h"
#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
#ifndef __AVX512BF16__
#error "compiled with avx512.cpp's flags, -mavx512bf16 and -mavx512vnni: see the Makefile"
#endif
#include "cpu/avx512_vectors.h"
#include "cpu/ceilings.h"
#include "cpu/integer_loops.h"
#include "cpu/loops.h"

namespace {
// vdpbf16ps multiplies 32 pairs of bf16 and adds neighbours into 16 floats, without conversion. For products of bf16
// weights.
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
    static INLINE void multiply_add(Vector& sum, const Operand& a, const Operand& b) {
        sum = _mm512_dpbf16_ps(sum, a, b);
    }
};

// ---- INT8
// vpdpbusd multiplies 64 pairs of bytes and adds them by fours to 16 sums: X = 65536 h + 256 m + l. One factor is
// unsigned: m and l, and q + 128 for h; so the sums of h start at -128 times the sum of h. (Overflow on the way is a
// multiple of 2^32.)
struct VnniIntegers : Avx512 {
    static constexpr int COLUMNS = 2 * GROUP, ROWS = 4, TOKENS = 2;
    struct alignas(64) Fixed {
        int8_t h[COLUMNS];
        uint8_t m[COLUMNS], l[COLUMNS];
        int32_t bias[16];
        float step[16];
    };
    struct Weights { __m512i q, unsigned_q; };
    static void fix(Fixed& out, const bf16* x) {
        int X[COLUMNS];
        for (int g = 0; g < 2; g++) {
            const float step = fix_group(X + g * GROUP, x + g * GROUP);
            for (int i = 0; i < 8; i++) out.step[8 * g + i] = step;
        }
        for (int i = 0; i < COLUMNS; i++)
            out.h[i] = (int8_t)(X[i] >> 16), out.m[i] = (uint8_t)(X[i] >> 8), out.l[i] = (uint8_t)X[i];
        for (int i = 0; i < 16; i++)
            out.bias[i] = -128 * (out.h[4 * i] + out.h[4 * i + 1] + out.h[4 * i + 2] + out.h[4 * i + 3]);
    }
    static INLINE void load_weights(Weights& w, const int8_t* q) {
        w.q = _mm512_loadu_si512(q);
        w.unsigned_q = _mm512_xor_si512(w.q, _mm512_set1_epi8(-128));
    }
    static INLINE void load_scales(Vector& s, const bf16* scale) { // the first half's, the second's
        int both;
        memcpy(&both, scale, 4);
        const __m512i shift = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
        const __m512i bits = _mm512_maskz_sllv_epi32(0xffff, _mm512_set1_epi32(both), shift);
        s = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
    }
    static INLINE void add_product(Vector& sum, const Weights& w, const Vector& scale,
                                   const Fixed& x) {
        __m512i sums = _mm512_dpbusd_epi32(_mm512_load_si512(x.bias), w.unsigned_q, _mm512_load_si512(x.h));
        sums = _mm512_dpbusd_epi32(_mm512_maskz_slli_epi32(0xffff, sums, 8), _mm512_load_si512(x.m), w.q);
        sums = _mm512_dpbusd_epi32(_mm512_maskz_slli_epi32(0xffff, sums, 8), _mm512_load_si512(x.l), w.q);
        const Vector unit = _mm512_mul_ps(scale, _mm512_load_ps(x.step));
        sum = _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, sums), unit, sum);
    }
};

// ---- INT4
struct VnniPairs : Avx512 {
    static constexpr int HALF = 64, ROWS = 4, TOKENS = 2;
    template <int G> using Fixed = FixedPairs<G, HALF>;
    using Integers = __m512i;
    using Weights = __m512i[2];
    template <int G> struct Scales { Vector s[G == 32 ? 2 : 1]; __m512i zero[G == 32 ? 2 : 1]; };
    static INLINE void load_pairs(Weights& w, const int8_t* q, int left) {
        const __mmask16 some = left < 2 * HALF ? 0xff : 0xffff;
        const __m512i both = _mm512_maskz_loadu_epi32(some, q), low = _mm512_set1_epi8(15);
        w[0] = _mm512_and_si512(both, low);
        w[1] = _mm512_and_si512(_mm512_maskz_srli_epi16(~0u, both, 4), low);
    }
    // Lanes 0-7 hold the scale of their columns' group, 8-15 that of columns 64 further on. Past the end of a row some
    // scales belong to the next row; they are multiplied by zeros.
    template <int G>
    static INLINE void load_scales(Scales<G>& s, const uint16_t* scale, const uint8_t* zero,
                                   int column) {
        constexpr int APART = 64 / G; // groups; 0: the same one
        for (int i = 0; i < (G == 32 ? 2 : 1); i++) {
            const int g = column / G + i;
            __m256i h = _mm256_set1_epi16((short)scale[g]);
            if (APART) h = _mm256_inserti128_si256(h, _mm_set1_epi16((short)scale[g + APART]), 1);
            s.s[i] = _mm512_maskz_cvtph_ps(0xffff, h);
            if (!zero) continue;
            s.zero[i] = _mm512_set1_epi32(zero[g]);
            if (APART) s.zero[i] = _mm512_mask_set1_epi32(s.zero[i], 0xff00, zero[g + APART]);
        }
        if (!zero) UNROLL for (int i = 0; i < (G == 32 ? 2 : 1); i++) s.zero[i] = _mm512_set1_epi32(8);
    }
    template <int FIRST, int LAST, class F>
    static INLINE void four_sums(__m512i& out, const Weights& w, const F& x) {
        out = _mm512_setzero_si512();
        UNROLL for (int p = 0; p < 3; p++) {
            if (p) out = _mm512_maskz_slli_epi32(0xffff, out, 8);
            out = _mm512_dpbusd_epi32(out, w[FIRST], _mm512_load_si512(x.plane[p][FIRST]));
            if (LAST > FIRST) out = _mm512_dpbusd_epi32(out, w[LAST], _mm512_load_si512(x.plane[p][LAST]));
        }
    }
    static INLINE void add_group(Vector& sum, __m512i sums, const Vector& scale, const __m512i& zero,
                                 const int32_t* all, const float* step) {
        sums = _mm512_sub_epi32(sums, _mm512_mullo_epi32(zero, _mm512_load_si512(all)));
        const Vector stepped = _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, sums), _mm512_load_ps(step));
        sum = _mm512_fmadd_ps(stepped, scale, sum);
    }
};
} // namespace

void avx512_bf16_tile(float* y, WeightRows<bf16> w, int rows, const void* x, int N) {
    product_tile<Bf16Dot, Format::PLAIN, bf16>(y, w, rows, x, N);
}
const IntegerTiles avx512_bf16_int8 = INT8_TILES<VnniIntegers>;
const IntegerTiles avx512_bf16_int4[3] = {INT4_TILES<VnniPairs, 32>, INT4_TILES<VnniPairs, 64>,
                                          INT4_TILES<VnniPairs, 128>};

double avx512_bf16_multiply(MultiplyBlock* memory) {
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 s[12];
    for (int i = 0; i < 12; i++) memcpy(s + i, memory + i, 64);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 12; i++) s[i] = _mm512_dpbf16_ps(s[i], a, a);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 32 * 12 * 4000;
}

// vpdpbusd for INT8 weights: three of them, one a plane of x, are one multiplication each of 64 pairs.
double avx512_bf16_multiply_int8(MultiplyBlock* memory) {
    __m512i a = _mm512_set1_epi8(1), s[12];
    for (int i = 0; i < 12; i++) memcpy(s + i, memory + i, 64);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 12; i++) s[i] = _mm512_dpbusd_epi32(s[i], a, a);
    for (int i = 0; i < 12; i++) memcpy(memory + i, s + i, 64);
    return 2. * 64 / 3 * 12 * 4000;
}
#endif
