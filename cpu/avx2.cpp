// cpu/avx2.cpp: the inner loops for AVX2.
#include "cpu/instruction_set.h"
#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
#ifndef __AVX2__
#error "compiled with -mavx2 -mfma: see the Makefile"
#endif
#include "cpu/ceilings.h"
#include "cpu/integer_loops.h"
#include "cpu/loops.h"
#include <immintrin.h>

namespace {
struct Avx2 {
    using Vector = __m256;
    using Operand = Vector;
    template <class T> using Input = float;
    static constexpr int WIDTH = 8, SUMS = 8, ROWS = 4, TOKENS = 3, CHAINS = 2, KEYS = 8, MIXED = 8, OUTER = 6; // 16 registers
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

// ---- INT8: vpmaddwd multiplies 16 pairs of 16 bits and adds neighbours: X = 2048 h + l.
struct Avx2Integers : Avx2 {
    static constexpr int COLUMNS = GROUP, ROWS = 2, TOKENS = 2;
    struct alignas(32) Fixed {
        int16_t h[GROUP], l[GROUP];
        float step;
    };
    using Weights = __m256i[2];
    static void fix(Fixed& out, const bf16* x) {
        int X[GROUP];
        out.step = fix_group(X, x);
        for (int i = 0; i < GROUP; i++) out.h[i] = (int16_t)(X[i] >> 11), out.l[i] = X[i] & 2047;
    }
    static INLINE void load_weights(Weights& w, const int8_t* q) {
        for (int i = 0; i < 2; i++) w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(q + 16 * i)));
    }
    static INLINE void load_scales(Vector& s, const bf16* scale) { fill(s, as_float(*scale)); }
    static INLINE void add_product(Vector& sum, const Weights& w, const Vector& scale, const Fixed& x) {
        const __m256i *h = (const __m256i*)x.h, *l = (const __m256i*)x.l;
        const __m256i upper = _mm256_add_epi32(_mm256_madd_epi16(w[0], h[0]), _mm256_madd_epi16(w[1], h[1]));
        const __m256i lower = _mm256_add_epi32(_mm256_madd_epi16(w[0], l[0]), _mm256_madd_epi16(w[1], l[1]));
        const __m256i sums = _mm256_add_epi32(_mm256_slli_epi32(upper, 11), lower);
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(scale, _mm256_set1_ps(x.step)), sum);
    }
};

// ---- INT4
struct Avx2Pairs : Avx2 {
    static constexpr int HALF = 32, ROWS = 2, TOKENS = 2;
    template <int G> using Fixed = FixedPairs<G, HALF>;
    using Integers = __m256i;
    using Weights = __m256i[2];
    template <int G> struct Scales { Vector s[G == 32 ? 2 : 1]; __m256i zero[G == 32 ? 2 : 1]; };
    static INLINE void load_pairs(Weights& w, const int8_t* q, int) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)q), low = _mm256_set1_epi8(15);
        w[0] = _mm256_and_si256(both, low);
        w[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    // A finite half; same as half_to_float.
    static INLINE void widen_half(Vector& s, uint16_t h) {
        const __m256i u = _mm256_set1_epi32((h & 0x7fff) << 13 | (h & 0x8000) << 16);
        s = _mm256_mul_ps(_mm256_castsi256_ps(u), _mm256_set1_ps(0x1p112f));
    }
    template <int G>
    static INLINE void load_scales(Scales<G>& s, const uint16_t* scale, const uint8_t* zero, int column) {
        for (int i = 0; i < (G == 32 ? 2 : 1); i++) {
            widen_half(s.s[i], scale[column / G + i]);
            s.zero[i] = _mm256_set1_epi32(zero ? zero[column / G + i] : 8);
        }
    }
    // The sums of four q X each: the parts from `first` to `last`.
    template <int FIRST, int LAST, class F>
    static INLINE void four_sums(__m256i& out, const Weights& w, const F& x) {
        __m256i part[3];
        UNROLL for (int p = 0; p < 3; p++) { // (at most 4 * 15 * 128: no overflow of 16 bits)
            const auto* plane = (const __m256i*)x.plane[p]; // one for each half
            part[p] = _mm256_maddubs_epi16(w[FIRST], _mm256_load_si256(plane + FIRST));
            if (LAST > FIRST)
                part[p] = _mm256_add_epi16(part[p], _mm256_maddubs_epi16(w[LAST], _mm256_load_si256(plane + LAST)));
        }
        const __m256i one = _mm256_set1_epi16(1), upper = _mm256_madd_epi16(part[0], _mm256_set1_epi16(256));
        out = _mm256_slli_epi32(_mm256_add_epi32(upper, _mm256_madd_epi16(part[1], one)), 8);
        out = _mm256_add_epi32(out, _mm256_madd_epi16(part[2], one));
    }
    static INLINE void add_group(Vector& sum, __m256i sums, const Vector& scale, const __m256i& zero,
                                 const int32_t* all, const float* step) {
        sums = _mm256_sub_epi32(sums, _mm256_mullo_epi32(zero, _mm256_load_si256((const __m256i*)all)));
        // (The step first: scale * step may be subnormal.)
        sum = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_load_ps(step)), scale, sum);
    }
};
} // namespace

template <> const Loops<bf16>& avx2_loops() { return LOOPS<Avx2, bf16>; }
template <> const Loops<float>& avx2_loops() { return LOOPS<Avx2, float>; }
const IntegerTiles avx2_int8 = INT8_TILES<Avx2Integers>;
const IntegerTiles avx2_int4[3] = {INT4_TILES<Avx2Pairs, 32>, INT4_TILES<Avx2Pairs, 64>, INT4_TILES<Avx2Pairs, 128>};

double avx2_multiply(MultiplyBlock* memory) {
    __m256 a = _mm256_set1_ps(1), s[10];
    for (int i = 0; i < 10; i++) memcpy(s + i, memory + i, 32);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 10; i++) s[i] = _mm256_fmadd_ps(a, a, s[i]);
    for (int i = 0; i < 10; i++) memcpy(memory + i, s + i, 32);
    return 2. * 8 * 10 * 4000;
}
#endif
