// cpu/lanes.h: 16 numbers at once in the compilers' own vectors, for any CPU.
#pragma once
#include "qwen3.cu"
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// Loops over a sum's rows, tokens and chains are unrolled, so that it stays in registers.
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// std::min and std::max for the sources of instruction sets (see cpu/loops.h).
template <class U> INLINE constexpr U smaller(U a, U b) { return b < a ? b : a; }
template <class U> INLINE constexpr U larger(U a, U b) { return a < b ? b : a; }

// The compilers' own vector type: one zmm register with AVX-512, two ymm with
// AVX2, four xmm on any x86-64. (By reference: how such vectors are passed by value depends on the instruction set.)
constexpr int LANES = 16;
typedef float float16v __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef double double16v __attribute__((vector_size(LANES * sizeof(double)), may_alias));
typedef uint16_t ushort16v __attribute__((vector_size(LANES * sizeof(uint16_t)), may_alias));
typedef uint32_t uint16v __attribute__((vector_size(LANES * sizeof(uint32_t)), may_alias));
typedef int32_t int16v __attribute__((vector_size(LANES * sizeof(int32_t)), may_alias));
typedef int8_t char16v __attribute__((vector_size(LANES), may_alias));
typedef uint8_t uchar16v __attribute__((vector_size(LANES), may_alias));
template <class A> struct LanesOf;
template <> struct LanesOf<float> { using type = float16v; };
template <> struct LanesOf<double> { using type = double16v; };
template <class T> using lanes = typename LanesOf<acc<T>>::type;

template <class V> INLINE void load_lanes(V& v, const bf16* p) {
    ushort16v h;
    memcpy(&h, p, sizeof h);
    uint16v u = __builtin_convertvector(h, uint16v) << 16;
    float16v f;
    memcpy(&f, &u, sizeof f);
    v = __builtin_convertvector(f, V);
}
INLINE void load_lanes(float16v& v, const float* p) { memcpy(&v, p, sizeof v); }
INLINE void load_lanes(double16v& v, const double* p) { memcpy(&v, p, sizeof v); }
template <class V> INLINE void load_lanes(V& v, const int8_t* p) {
    char16v c;
    memcpy(&c, p, sizeof c);
    v = __builtin_convertvector(__builtin_convertvector(c, int16v), V);
}

// to_acc for the sources of instruction sets.
INLINE float as_float(bf16 x) {
    const uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
INLINE float as_float(float x) { return x; }
INLINE float half_as_float(uint16_t half) { // a finite one
    const uint32_t u = (uint32_t)(half & 0x7fff) << 13 | (uint32_t)(half & 0x8000) << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f * 0x1p112f;
}

// FP8: shifted to float's fields, with 120 added to the exponent; subnormals have none, they are eighths of 2^-6.
struct e4m3 {
    uint8_t bits;
};
template <class V> INLINE void load_lanes(V& v, const e4m3* p) {
    uchar16v c;
    memcpy(&c, p, sizeof c);
    const uint16v u = __builtin_convertvector(c, uint16v), size = u & 0x7f;
    const float16v normal = (float16v)((size << 20) + (120u << 23));
    const float16v small = __builtin_convertvector((int16v)size, float16v) * 0x1p-9f;
    const uint16v is_small = (uint16v)(size < 8);
    const uint16v bits = ((uint16v)small & is_small) | ((uint16v)normal & ~is_small) | (u & 0x80) << 24;
    v = __builtin_convertvector((float16v)bits, V);
}

// The next n <= 16 numbers of a row, zeros past them.
template <class V, class T> INLINE void load_some(V& v, const T* p, int n) {
    if (n == LANES) return load_lanes(v, p);
    T whole[LANES] = {};
    if (n == LANES / 2) memcpy((void*)whole, p, LANES / 2 * sizeof(T)); // (for a constant size it is one instruction)
    else memcpy((void*)whole, p, (size_t)n * sizeof(T));
    load_lanes(v, whole);
}

// to_stored of n <= 16 numbers.
INLINE void store_some(bf16* p, const float16v& v, int n) {
    const uint16v u = (uint16v)v, nearest = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40;
    const uint16v is_nan = (uint16v)((u & 0x7fffffff) > 0x7f800000);
    const ushort16v stored = __builtin_convertvector((nan & is_nan) | (nearest & ~is_nan), ushort16v);
    if (n == LANES) memcpy((void*)p, &stored, sizeof stored);
    else memcpy((void*)p, &stored, (size_t)n * sizeof(bf16));
}
template <class A, class V> INLINE void store_some(A* p, const V& v, int n) { memcpy(p, &v, (size_t)n * sizeof(A)); }

// The sum of 16 lanes, always in this order: halves onto each other.
template <class V> INLINE auto sum_lanes(const V& v) {
    std::decay_t<decltype(v[0])> s[LANES];
    memcpy(s, &v, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

// The first half (with MORE = HALF the second) of each group of 2 HALF lanes; groups of a and of b alternate.
template <int HALF, int MORE, size_t... LANE>
INLINE void halves(float16v& out, const float16v& a, const float16v& b, std::index_sequence<LANE...>) {
#define FROM (int)(LANE / HALF / 2 * 2 * HALF + LANE % HALF + LANE / HALF % 2 * LANES + MORE)
#ifdef __clang__
    out = __builtin_shufflevector(a, b, FROM...);
#else
    out = __builtin_shuffle(a, b, int16v{FROM...});
#endif
#undef FROM
}
template <int HALF> INLINE void fold(float16v& a, const float16v& b) {
    float16v low, high;
    halves<HALF, 0>(low, a, b, std::make_index_sequence<LANES>{});
    halves<HALF, HALF>(high, a, b, std::make_index_sequence<LANES>{});
    a = low + high;
}
// Lane l of the first of 16 vectors becomes the sum of vector l, each to the bit that of sum_lanes.
INLINE void sum_lanes_of_each(float16v (&v)[LANES]) {
    UNROLL for (int i = 0; i < 8; i++) fold<8>(v[i], v[i + 8]);
    UNROLL for (int i = 0; i < 4; i++) fold<4>(v[i], v[i + 4]);
    UNROLL for (int i = 0; i < 2; i++) fold<2>(v[i], v[i + 2]);
    fold<1>(v[0], v[1]);
}
INLINE void sum_lanes_of_each(double16v (&v)[LANES]) {
    double16v sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_lanes(v[i]);
    v[0] = sums;
}

// sum_i a[i] b[i], i < n: lane l sums i = l, l + 16, l + 32, ..., and sum_lanes adds the lanes.
template <class A, class B> INLINE acc<A> dot(const A* a, const B* b, int n) {
    lanes<A> sum = {}, u, v;
    for (int i = 0; i < n; i += LANES) {
        load_some(u, a + i, std::min(LANES, n - i));
        load_some(v, b + i, std::min(LANES, n - i));
        sum += u * v;
    }
    return sum_lanes(sum);
}

// 1 / sqrt(mean(x^2) + eps) of one row.
template <class T> acc<T> inverse_rms(const T* x, int n, float eps) {
    return 1 / std::sqrt(dot(x, x, n) / n + (acc<T>)eps);
}

template <class T> void widen(acc<T>* __restrict out, const T* __restrict in, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = to_acc(in[i]);
}

// e^x from multiplications, additions and exponent bits only, 16 lanes at once: exp_exact of Book I, but for where it
// rounds. Relative error under 3e-7; 0 below -87; x <= 88.
INLINE void exp_lanes(float16v& x) {
    const float16v shifted = x * 1.44269504f + 12582912.f; // 1.5 * 2^23: adding it rounds to an integer,
    const float16v k = shifted - 12582912.f;
    const float16v r = x - k * 0.693145752f - k * 1.42860677e-6f; // ln 2 in two parts, the first with few bits
    float16v p = r * (1.f / 5040) + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    const uint16v power = (uint16v)p + ((uint16v)shifted << 23); // which the low bits of `shifted` then hold
    x = (float16v)(power & ~(uint16v)(x < -87.f)); // (so that a NaN stays one)
}
INLINE void exp_lanes(double16v& x) {
    for (int l = 0; l < LANES; l++) x[l] = std::exp(x[l]);
}

// 1 + e^-g of gates g. Past 80 the exponent changes nothing, and e^88 is the largest that exp_lanes makes.
template <class V> INLINE void one_plus_exp_minus(V& e, const V& g) {
    const auto past = 80 < -g;
    e = (V)(((decltype(past))-g & ~past) | ((decltype(past))(V{} + 80) & past));
    exp_lanes(e);
    e = 1 + e;
}
