// cpu.h: the ops of Book I that take time, once more for the vector and matrix instructions of CPUs. Included by qwen3.cu.
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#endif

// Inlined wherever it is used, so that it is compiled for the instruction set of the function that uses it.
#define INLINE inline __attribute__((always_inline))

// ---- Lanes: 16 numbers that are computed on at once. The compilers' own vector type: one zmm register with
// AVX-512, two ymm with AVX2, four xmm on any x86-64.
constexpr int LANES = 16;
typedef float float16v __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef double double16v __attribute__((vector_size(LANES * sizeof(double)), may_alias));
typedef uint16_t ushort16v __attribute__((vector_size(LANES * sizeof(uint16_t)), may_alias));
typedef uint32_t uint16v __attribute__((vector_size(LANES * sizeof(uint32_t)), may_alias));
typedef int32_t int16v __attribute__((vector_size(LANES * sizeof(int32_t)), may_alias));
typedef int8_t char16v __attribute__((vector_size(LANES), may_alias));
template <class A> struct LanesOf;
template <> struct LanesOf<float> { using type = float16v; };
template <> struct LanesOf<double> { using type = double16v; };
template <class T> using lanes = typename LanesOf<acc<T>>::type;

INLINE void load_lanes(float16v& v, const bf16* p) {
    ushort16v h;
    memcpy(&h, p, sizeof h);
    uint16v u = __builtin_convertvector(h, uint16v) << 16;
    memcpy(&v, &u, sizeof v);
}
template <class A> INLINE void load_lanes(lanes<A>& v, const A* p) { memcpy(&v, p, sizeof v); }
template <class V> INLINE void load_lanes(V& v, const int8_t* p) {
    char16v c;
    memcpy(&c, p, sizeof c);
    v = __builtin_convertvector(__builtin_convertvector(c, int16v), V);
}

// The next n <= 16 numbers of a row, zeros behind them.
template <class V, class T> INLINE void load_some(V& v, const T* p, int n) {
    if (n == LANES) return load_lanes(v, p);
    T whole[LANES] = {};
    memcpy((void*)whole, p, (size_t)n * sizeof(T));
    load_lanes(v, whole);
}

// The sum of 16 lanes, always in this order: halves onto each other.
template <class V> INLINE auto sum_lanes(const V& v) {
    std::decay_t<decltype(v[0])> s[LANES];
    memcpy(s, &v, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
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

// e^x from multiplications, additions and exponent bits only, 16 lanes at once. Relative error under 3e-7; 0 below
// -87; x <= 88. e^x = 2^k e^r with k = round(x / ln 2), |r| <= ln 2 / 2, and e^r by its Taylor series up to r^7.
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

// ---- CPU roads: what instructions there are is asked when the program starts. Ops whose plain loop is too slow
// have twins for them; the others are compiled for the build's own target.
enum InstructionSet { ISA_PLAIN, ISA_AVX2, ISA_AVX512, ISA_AVX512_BF16, ISA_AMX };
inline const char* instruction_set_name(int road) {
    static const char* names[] = {"plain", "avx2", "avx512", "avx512bf16", "amx"};
    return names[road];
}

// Older compilers do not know the instructions of bf16 and AMX; they, and other processors, get the plain loops.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAVE_SIMD
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")))
#define TARGET_AVX512_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")))
#define TARGET_AMX __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")))
#endif

// The best road this CPU has.
inline InstructionSet best_instruction_set() {
#ifdef HAVE_SIMD
    unsigned a, b, c, d, a1 = 0, b1, c1, d1;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ISA_PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq")) return ISA_AVX2;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return ISA_AVX512;
    if (!(a1 >> 5 & 1) || !(c >> 11 & 1)) return ISA_AVX512; // AVX512_BF16, AVX512_VNNI
    const bool amx = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1); // AMX-BF16, AMX-TILE, AMX-INT8
    // Linux gives a process the tile registers when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return amx && syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? ISA_AMX : ISA_AVX512_BF16;
#else
    return ISA_PLAIN;
#endif
}
inline InstructionSet instruction_set = best_instruction_set(); // for the whole process; a test or --cpu may take a lesser one

// 1 / sqrt(mean(x^2) + eps) of one row.
template <class T> acc<T> inverse_rms(const T* x, int n, float eps) { return 1 / std::sqrt(dot(x, x, n) / n + (acc<T>)eps); }

// ---- rmsnorm: out[n] = x[n] / rms(x[n]) * w       (Zhang & Sennrich, "Root mean square layer normalization", 2019)
template <class T>
void rmsnorm_cpu(Context&, T* out,          // (N,C) out
                 const acc<T>* x, // (N,C)
                 const T* w,      // (C)
                 int N, int C, float eps) {
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const acc<T>* row = x + (size_t)n * C;
        acc<T> scale = inverse_rms(row, C, eps);
        for (int i = 0; i < C; i++) out[(size_t)n * C + i] = to_stored<T>(row[i] * scale * to_acc(w[i]));
    }
}

// ---- products: y[n][r] = sum_i W[r][i] x[n][i]
// Work is cut into tasks, a few rows of W each: a thread streams its own rows, and holds them in its cache while
// the tokens pass, SLAB at a time. The innermost piece, `product_tile`, has a twin for each instruction set:
//     y[n * TILE_ROWS + r] = W[r] . x[n] for `rows` <= TILE_ROWS rows and N <= SLAB tokens.
// In each of them an output is one sum in one order, whatever the other rows and tokens are.
constexpr int TILE_ROWS = 32, SLAB = 64;

// Consecutive rows of one block of a Linear.
template <class T> struct WeightRows {
    const T* w;
    const int8_t* q;
    const bf16* scale;
    int K;
    WeightRows(const Linear<T>& W, int block, size_t r) : w(W.w[block]), q(W.q[block]), scale(W.scale[block]), K(W.in) { skip(r); }
    INLINE void skip(size_t r) {
        if (w) w += r * K;
        else q += r * K, scale += r * ((K + GROUP - 1) / GROUP);
    }
};

// R rows by M tokens, in lanes of the compiler's making. TOKENS: how many at once keep the sums in registers.
struct PlainKernel {
    static constexpr int TOKENS = 4;
    template <bool INT8, int R, int M, class T> static INLINE void run(acc<T>* y, const WeightRows<T>& rows, const T* x, int K) {
        lanes<T> sum[R][M] = {}, a, b[M];
        const size_t groups = (K + GROUP - 1) / GROUP;
        for (int i = 0; i < K; i += LANES) {
            const int n = std::min(LANES, K - i);
            for (int m = 0; m < M; m++) load_some(b[m], x + (size_t)m * K + i, n);
            for (int r = 0; r < R; r++) {
                if (!INT8) load_some(a, rows.w + (size_t)r * K + i, n);
                else {
                    load_some(a, rows.q + (size_t)r * K + i, n);
                    a *= (acc<T>)to_acc(rows.scale[r * groups + i / GROUP]);
                }
                for (int m = 0; m < M; m++) sum[r][m] += a * b[m];
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = sum_lanes(sum[r][m]);
    }
};

#ifdef HAVE_SIMD
// The same with AVX2: 8 lanes, 16 registers.
TARGET_AVX2 INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
TARGET_AVX2 INLINE __m256 load8(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
TARGET_AVX2 INLINE __m256 load8(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
template <class T> TARGET_AVX2 INLINE __m256 load8(const T* p, int n) {
    if (n >= 8) return load8(p);
    T whole[8] = {};
    memcpy((void*)whole, p, (size_t)n * sizeof(T));
    return load8(whole);
}
TARGET_AVX2 INLINE float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
struct Avx2Kernel {
    static constexpr int TOKENS = 2;
    template <bool INT8, int R, int M, class T> TARGET_AVX2 static void run(float* y, const WeightRows<T>& rows, const T* x, int K) {
        __m256 sum[R][M], a, b[M];
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) sum[r][m] = _mm256_setzero_ps();
        const size_t groups = (K + GROUP - 1) / GROUP;
        for (int i = 0; i < K; i += 8) {
            for (int m = 0; m < M; m++) b[m] = load8(x + (size_t)m * K + i, K - i);
            for (int r = 0; r < R; r++) {
                if (!INT8) a = load8(rows.w + (size_t)r * K + i, K - i);
                else a = _mm256_mul_ps(load8(rows.q + (size_t)r * K + i, K - i), _mm256_set1_ps(to_acc(rows.scale[r * groups + i / GROUP])));
                for (int m = 0; m < M; m++) sum[r][m] = _mm256_fmadd_ps(a, b[m], sum[r][m]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = sum8(sum[r][m]);
    }
};

// With AVX-512: 16 lanes, 32 registers, and masks for the end of a row.
TARGET_AVX512 INLINE __mmask16 first_lanes(int n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1); }
TARGET_AVX512 INLINE __m512 load16(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
TARGET_AVX512 INLINE __m512 load16(const bf16* p, __mmask16 m) {
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(m, _mm512_maskz_cvtepu16_epi32(m, _mm256_maskz_loadu_epi16(m, p)), 16));
}
TARGET_AVX512 INLINE __m512 load16(const int8_t* p, __mmask16 m) {
    return _mm512_maskz_cvtepi32_ps(m, _mm512_maskz_cvtepi8_epi32(m, _mm_maskz_loadu_epi8(m, p)));
}
// Adds the lanes: halves, quarters, pairs. (The masked forms, all lanes on: g++ 12 warns of the plain ones.)
TARGET_AVX512 INLINE float sum16(__m512 v) {
    v = _mm512_add_ps(v, _mm512_maskz_shuffle_f32x4(0xffff, v, v, 0x4e));
    v = _mm512_add_ps(v, _mm512_maskz_shuffle_f32x4(0xffff, v, v, 0xb1));
    v = _mm512_add_ps(v, _mm512_maskz_permute_ps(0xffff, v, 0x4e));
    v = _mm512_add_ps(v, _mm512_maskz_permute_ps(0xffff, v, 0xb1));
    return _mm512_cvtss_f32(v);
}
struct Avx512Kernel {
    static constexpr int TOKENS = 4;
    template <bool INT8, int R, int M, class T> TARGET_AVX512 static void run(float* y, const WeightRows<T>& rows, const T* x, int K) {
        __m512 sum[R][M], a, b[M];
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) sum[r][m] = _mm512_setzero_ps();
        const size_t groups = (K + GROUP - 1) / GROUP;
        for (size_t g = 0; g < groups; g += 16) { // 16 groups: their scales, as floats, are one register a row
            float scale[R][16];
            if (INT8)
                for (int r = 0; r < R; r++) _mm512_storeu_ps(scale[r], load16(rows.scale + r * groups + g, first_lanes((int)(groups - g))));
            for (int i = (int)g * GROUP; i < std::min(K, (int)g * GROUP + 16 * GROUP); i += 16) {
                const __mmask16 mask = first_lanes(K - i);
                for (int m = 0; m < M; m++) b[m] = load16(x + (size_t)m * K + i, mask);
                for (int r = 0; r < R; r++) {
                    // A row is short; the next ones are asked for while this one is computed on.
                    const void* next = INT8 ? (const void*)(rows.q + (size_t)(R + r) * K + i) : (const void*)(rows.w + (size_t)(R + r) * K + i);
                    if (M == 1 && i % 64 == 0) _mm_prefetch((const char*)next, _MM_HINT_T0);
                    if (!INT8) a = load16(rows.w + (size_t)r * K + i, mask);
                    else a = _mm512_mul_ps(load16(rows.q + (size_t)r * K + i, mask), _mm512_set1_ps(scale[r][i / GROUP - g]));
                    for (int m = 0; m < M; m++) sum[r][m] = _mm512_fmadd_ps(a, b[m], sum[r][m]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = sum16(sum[r][m]);
    }
};

// vdpbf16ps multiplies 32 pairs of bf16 and adds neighbours into 16 floats, with no conversion at all.
struct Bf16Kernel {
    static constexpr int TOKENS = 4;
    template <bool INT8, int R, int M, class T> TARGET_AVX512_BF16 static void run(float* y, const WeightRows<T>& rows, const T* x, int K) {
        static_assert(!INT8 && std::is_same_v<T, bf16>, "");
        __m512 sum[R][M];
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) sum[r][m] = _mm512_setzero_ps();
        for (int i = 0; i < K; i += 32) {
            const __mmask32 mask = K - i >= 32 ? ~0u : (1u << (K - i)) - 1;
            __m512bh b[M];
            for (int m = 0; m < M; m++) b[m] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + (size_t)m * K + i);
            for (int r = 0; r < R; r++) {
                __m512bh a = (__m512bh)_mm512_maskz_loadu_epi16(mask, rows.w + (size_t)r * K + i);
                for (int m = 0; m < M; m++) sum[r][m] = _mm512_dpbf16_ps(sum[r][m], a, b[m]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++) y[m * TILE_ROWS + r] = sum16(sum[r][m]);
    }
};

// INT8 in integers. vpdpbusd multiplies 64 pairs of bytes and adds them by fours into 16 sums of 32 bits, exactly; so
// x becomes integers, too. In each group of 32, x = step * (65536 h + 256 m + l): three planes of signed bytes, and a
// power of two that gives the largest |x| 22 bits. A bf16 has 8: all within 2^-14 of the largest are held exactly,
// and what smaller ones lose is less than a float sum would round away. (The least step is 2^-126.) The sums over a
// group are integers, the same in any order; so vectors may do a part of the work and tiles another, with the bits of
//     y = fma(scale_g, step_g * fma(256 H_g + M_g, 256, L_g), y)    group after group.
// For K a multiple of 64.
struct alignas(64) FixedX { // two groups of one token
    int8_t plane[3][2 * GROUP]; // h, m, l
    int32_t upper[2], lower[2]; // 128 times the sums of 256 h + m, and of l
    float step[2];
};
TARGET_AVX512_BF16 inline void fix_x(FixedX* out, const bf16* x) {
    for (int g = 0; g < 2; g++, x += GROUP) {
        int largest = 0;
        for (int i = 0; i < GROUP; i++) largest = std::max(largest, x[i].bits & 0x7fff);
        const int exponent = std::max(largest >> 7, 22); // so that neither power of two is subnormal
        const uint32_t step = (uint32_t)(exponent - 21) << 23, inverse = (uint32_t)(275 - exponent) << 23;
        const __m512 per_x = _mm512_castsi512_ps(_mm512_set1_epi32((int)inverse)); // step is 2^(exponent - 148)
        int sum[3] = {};
        for (int i = 0; i < GROUP; i += 16) {
            __m512i v = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(load16(x + i, 0xffff), per_x));
            for (int p = 2; p >= 0; p--) {
                _mm_storeu_si128((__m128i*)(out->plane[p] + g * GROUP + i), _mm512_maskz_cvtepi32_epi8(0xffff, v));
                v = _mm512_maskz_srai_epi32(0xffff, _mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
            }
        }
        for (int i = 0; i < GROUP; i++)
            for (int p = 0; p < 3; p++) sum[p] += out->plane[p][g * GROUP + i];
        out->upper[g] = 128 * (256 * sum[0] + sum[1]), out->lower[g] = 128 * sum[2];
        memcpy(out->step + g, &step, 4);
        if (exponent == 255) out->step[g] = NAN; // an infinity or a NaN is among them
    }
}
inline const FixedX* fix_all_x(const bf16* x, int N, int K) {
    static thread_local std::vector<FixedX> all; // grows to the largest batch, and stays
    const size_t n = (size_t)N * (K / 64);
    if (all.size() < n) all.resize(n);
    FixedX* out = all.data();
    #pragma omp parallel for schedule(static) if (N > 16)
    for (size_t i = 0; i < n; i++) fix_x(out + i, x + i * 64);
    return out;
}

// The sums of each half of 8 vectors of integers: of the lower halves of a[0..3], of their upper halves, and the same
// of a[4..7].
TARGET_AVX512_BF16 INLINE __m512i sum_halves(const __m512i* a) {
    __m512i two[4], four[2];
    for (int i = 0; i < 4; i++)
        two[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi32(0xffff, a[2 * i], a[2 * i + 1]),
                                  _mm512_maskz_unpackhi_epi32(0xffff, a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        four[i] = _mm512_add_epi32(_mm512_maskz_unpacklo_epi64(0xff, two[2 * i], two[2 * i + 1]),
                                   _mm512_maskz_unpackhi_epi64(0xff, two[2 * i], two[2 * i + 1]));
    return _mm512_add_epi32(_mm512_maskz_shuffle_i32x4(0xffff, four[0], four[1], 0x88),
                            _mm512_maskz_shuffle_i32x4(0xffff, four[0], four[1], 0xdd));
}

// A number for each of two groups, in the order of sum_halves.
TARGET_AVX512_BF16 INLINE __m512i per_group(const void* two_words) {
    int64_t pair;
    memcpy(&pair, two_words, 8);
    const __m512i which = _mm512_set_epi32(1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_maskz_permutexvar_epi32(0xffff, which, _mm512_set1_epi64(pair));
}

// 8 rows at a time, from all over the tile: memory gives the most when it is read at several places.
TARGET_AVX512_BF16 inline void product_tile_vnni(float* y, const WeightRows<bf16>& w, int rows, const FixedX* x, int N) {
    const int K = w.K, groups = K / GROUP, apart = (rows + 7) / 8;
    for (int first = 0; first < apart; first++) {
        const int8_t* q[8];
        int at[8], row[8];
        for (int r = 0; r < 8; r++) { // (the last rows stand for those that are missing)
            row[r] = std::min(first + r * apart, rows - 1);
            q[r] = w.q + (size_t)row[r] * K, at[r] = row[r] * groups;
        }
        const __m256i scale_at = _mm256_loadu_si256((const __m256i*)at);
        for (int n = 0; n < N; n++) {
            __m256 total = _mm256_setzero_ps();
            for (int k = 0; k < K; k += 64) {
                const FixedX& f = x[(size_t)n * (K / 64) + k / 64];
                const __m512i h = _mm512_load_si512(f.plane[0]), m = _mm512_load_si512(f.plane[1]), l = _mm512_load_si512(f.plane[2]);
                __m512i upper[8], lower[8]; // the sums of 256 h + m, and of l
                for (int r = 0; r < 8; r++) {
                    if (N == 1) _mm_prefetch((const char*)(q[r] + (size_t)TILE_ROWS * K + k), _MM_HINT_T0); // the next tile
                    // The instruction wants one factor without sign: q + 128, and 128 sum x is taken away below.
                    const __m512i u = _mm512_xor_si512(_mm512_loadu_si512(q[r] + k), _mm512_set1_epi8(-128));
                    lower[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, l);
                    upper[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, h);
                    upper[r] = _mm512_dpbusd_epi32(_mm512_maskz_slli_epi32(0xffff, upper[r], 8), u, m);
                }
                const __m512 a = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(sum_halves(upper), per_group(f.upper)));
                const __m512 b = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(sum_halves(lower), per_group(f.lower)));
                __m512 sum = _mm512_mul_ps(_mm512_castsi512_ps(per_group(f.step)), _mm512_fmadd_ps(a, _mm512_set1_ps(256), b));
                sum = _mm512_maskz_shuffle_f32x4(0xffff, sum, sum, 0xd8); // the first group's halves, then the second's
                const __m256i scales = _mm256_i32gather_epi32((const int*)(w.scale + k / GROUP), scale_at, 2); // two a row
                const __m256i scale0 = _mm256_slli_epi32(scales, 16), scale1 = _mm256_and_si256(scales, _mm256_set1_epi32(-65536));
                total = _mm256_fmadd_ps(_mm256_castsi256_ps(scale0), _mm512_maskz_extractf32x8_ps(0xff, sum, 0), total);
                total = _mm256_fmadd_ps(_mm256_castsi256_ps(scale1), _mm512_maskz_extractf32x8_ps(0xff, sum, 1), total);
            }
            float sums[8];
            _mm256_storeu_ps(sums, total);
            for (int r = 0; r < 8; r++) y[n * TILE_ROWS + row[r]] = sums[r];
        }
    }
}
#endif

// A whole tile in pieces of 4 rows and TOKENS tokens: their sums, and an operand or five, are what registers hold.
template <class Kernel, bool INT8, class T>
void product_tile(acc<T>* y, WeightRows<T> w, int rows, const T* x, int N) {
    constexpr int M = Kernel::TOKENS;
    const int K = w.K;
    for (int r = 0; r < rows;) {
        const bool four = r + 4 <= rows;
        int n = 0;
        for (; n + M <= N; n += M) {
            if (four) Kernel::template run<INT8, 4, M>(y + n * TILE_ROWS, w, x + (size_t)n * K, K);
            else Kernel::template run<INT8, 1, M>(y + n * TILE_ROWS, w, x + (size_t)n * K, K);
        }
        for (; n < N; n++) {
            if (four) Kernel::template run<INT8, 4, 1>(y + n * TILE_ROWS, w, x + (size_t)n * K, K);
            else Kernel::template run<INT8, 1, 1>(y + n * TILE_ROWS, w, x + (size_t)n * K, K);
        }
        const int done = four ? 4 : 1;
        w.skip(done);
        y += done, r += done;
    }
}
template <class T> using ProductTile = void (*)(acc<T>* y, WeightRows<T> w, int rows, const T* x, int N);

#ifdef HAVE_SIMD
// AMX: a tile register is 16 rows of 64 bytes; tdpbf16ps multiplies 16 rows of W by 16 tokens, 32 deep, at once.
// Rows of W are loaded from where they are. Of x it wants, row after row, the pairs (x[2k], x[2k+1]) of all 16
// tokens side by side: `amx_pack`. A single token is packed by its nature: so decoding takes the same road, one
// column wide, and gets the same bits as any batch. For K a multiple of 32 and 32 rows; else Bf16Kernel.
struct alignas(64) AmxConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    AmxConfig& tiles(int first, int last, int count, int bytes) {
        for (int t = first; t <= last; t++) rows[t] = (uint8_t)count, row_bytes[t] = (uint16_t)bytes;
        return *this;
    }
    TARGET_AMX void load() const {
        asm volatile("" ::"r"(this) : "memory"); // g++ 12 does not see that the next line reads all of it
        _tile_loadconfig(this);
    }
};

// x (N,K) to (N/16, K/2, 16) pairs, zeros for the tokens that are missing in the last 16. N = 1: x itself.
inline const bf16* amx_pack(const bf16* x, int N, int K) {
    if (N == 1) return x;
    static thread_local std::vector<uint32_t> packed; // grows to the largest batch, and stays
    const int groups = (N + 15) / 16;
    if (packed.size() < (size_t)groups * K * 8) packed.resize((size_t)groups * K * 8);
    uint32_t* out = packed.data();
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int g = 0; g < groups; g++)
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < K / 2; k++) {
                uint32_t pair = 0;
                if (g * 16 + n < N) memcpy(&pair, x + (size_t)(g * 16 + n) * K + 2 * k, 4);
                out[((size_t)g * K / 2 + k) * 16 + n] = pair;
            }
    return (const bf16*)out;
}

// Tiles 0-3: sums, 4 and 5: rows of W, 6 and 7: tokens. `width`: bytes of a row of tokens or sums.
TARGET_AMX inline void amx_configure(int width) {
    AmxConfig().tiles(0, 7, 16, width).tiles(4, 5, 16, 64).load();
}

// x as amx_pack made it, `width` bytes a row, from a multiple of 16 tokens on; N <= SLAB.
TARGET_AMX inline void product_tile_amx(float* y, const bf16* w, const bf16* x, int width, int N, int K) {
    amx_configure(width);
    const bf16* w2 = w + (size_t)16 * K;
    if (width == 4) { // one token: two columns of sums
        _tile_zero(0);
        _tile_zero(1);
        for (int k = 0; k < K; k += 32) {
            _tile_loadd(4, w + k, K * 2);
            _tile_loadd(6, x + k, 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, w2 + k, K * 2);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, y, 4);
        _tile_stored(1, y + 16, 4);
        return _tile_release();
    }
    for (int n = 0; n < N; n += 32) { // 32 rows by 32 tokens; the second 16 tokens may not be there
        const bool two = N - n > 16;
        const bf16 *x1 = x + (size_t)n * K, *x2 = two ? x1 + (size_t)16 * K : x1;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < K; k += 32) {
            _tile_loadd(4, w + k, K * 2);
            _tile_loadd(6, x1 + (size_t)k * 16, 64);
            _tile_loadd(5, w2 + k, K * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (two) {
                _tile_loadd(7, x2 + (size_t)k * 16, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        float sums[TILE_ROWS * 32]; // (rows, tokens): y wants it the other way round
        _tile_stored(0, sums, 128);
        _tile_stored(1, sums + 16 * 32, 128);
        _tile_stored(2, sums + 16, 128);
        _tile_stored(3, sums + 16 * 32 + 16, 128);
        for (int m = 0; m < std::min(32, N - n); m++)
            for (int r = 0; r < TILE_ROWS; r++) y[(n + m) * TILE_ROWS + r] = sums[r * 32 + m];
    }
    _tile_release();
}

// For INT8 weights: what 16 tokens have in a group, as tdpbssd takes it, 4 neighbours together.
struct alignas(64) FixedTile {
    int8_t plane[3][8][16][4]; // (planes, fours, tokens, 4)
    float step[16];
};
inline const FixedTile* amx_pack_int8(const FixedX* x, int N, int K) { // (N/16, K/32)
    static thread_local std::vector<FixedTile> packed; // grows to the largest batch, and stays
    const int tiles = (N + 15) / 16, groups = K / GROUP;
    if (packed.size() < (size_t)tiles * groups) packed.resize((size_t)tiles * groups);
    FixedTile* out = packed.data();
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int t = 0; t < tiles; t++)
        for (int g = 0; g < groups; g++)
            for (int n = 0; n < 16; n++) {
                const size_t token = std::min(t * 16 + n, N - 1); // (nobody reads what is behind N)
                const FixedX& from = x[token * groups / 2 + g / 2];
                FixedTile& to = out[(size_t)t * groups + g];
                to.step[n] = from.step[g % 2];
                for (int p = 0; p < 3; p++)
                    for (int k = 0; k < 8; k++) memcpy(to.plane[p][k][n], from.plane[p] + g % 2 * GROUP + 4 * k, 4);
            }
    return out;
}

// The sums H, M, L of one group, 16 rows by 16 tokens each, in tiles A, B and C. (A tile's name is no variable.)
#define AMX_GROUP(A, B, C, sums, q, x) \
    _tile_zero(A);                     \
    _tile_zero(B);                     \
    _tile_zero(C);                     \
    _tile_loadd(6, q, K);              \
    _tile_loadd(7, x.plane[0], 64);    \
    _tile_dpbssd(A, 6, 7);             \
    _tile_loadd(7, x.plane[1], 64);    \
    _tile_dpbssd(B, 6, 7);             \
    _tile_loadd(7, x.plane[2], 64);    \
    _tile_dpbssd(C, 6, 7);             \
    _tile_stored(A, sums[0], 64);      \
    _tile_stored(B, sums[1], 64);      \
    _tile_stored(C, sums[2], 64)

// 32 rows of INT8 and N <= SLAB tokens, 16 by 16 at a time; the bits of product_tile_vnni. A few groups go through the
// tiles, in turns through two sets of them, before vectors take the sums: what a tile has stored cannot be loaded soon.
TARGET_AMX inline void product_tile_amx_int8(float* y, const WeightRows<bf16>& w, const FixedTile* x, int N) {
    constexpr int PART = 4;
    const int K = w.K, groups = K / GROUP;
    alignas(64) float total[SLAB / 16][16][16]; // (tokens / 16, rows, tokens)
    alignas(64) int32_t sums[PART][3][16][16];  // (groups, planes, rows, tokens)
    AmxConfig().tiles(0, 5, 16, 64).tiles(6, 6, 16, GROUP).tiles(7, 7, 8, 64).load();
    for (int half = 0; half < 2; half++) {
        memset(total, 0, sizeof total);
        for (int g0 = 0; g0 < groups; g0 += PART) {
            const int parts = std::min(PART, groups - g0);
            float scale[PART][16];
            for (int r = 0; r < 16; r++)
                for (int g = 0; g < parts; g++) scale[g][r] = to_acc(w.scale[(size_t)(half * 16 + r) * groups + g0 + g]);
            for (int t = 0; t * 16 < N; t++) {
                const FixedTile* tile = x + (size_t)t * groups + g0;
                const int8_t* q = w.q + (size_t)half * 16 * K + g0 * GROUP;
                for (int g = 0; g < parts; g += 2) {
                    AMX_GROUP(0, 1, 2, sums[g], q + g * GROUP, tile[g]);
                    AMX_GROUP(3, 4, 5, sums[g + 1], q + (g + 1) * GROUP, tile[g + 1]);
                }
                for (int r = 0; r < 16; r += 4) {
                    __m512 sum[4];
                    for (int i = 0; i < 4; i++) sum[i] = _mm512_load_ps(total[t][r + i]);
                    for (int g = 0; g < parts; g++) {
                        const __m512 step = _mm512_load_ps(tile[g].step);
                        for (int i = 0; i < 4; i++) {
                            const __m512i h = _mm512_load_si512(sums[g][0][r + i]), m = _mm512_load_si512(sums[g][1][r + i]);
                            const __m512i upper = _mm512_add_epi32(_mm512_maskz_slli_epi32(0xffff, h, 8), m);
                            const __m512 a = _mm512_maskz_cvtepi32_ps(0xffff, upper);
                            const __m512 b = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_load_si512(sums[g][2][r + i]));
                            const __m512 of_group = _mm512_mul_ps(step, _mm512_fmadd_ps(a, _mm512_set1_ps(256), b));
                            sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(scale[g][r + i]), of_group, sum[i]);
                        }
                    }
                    for (int i = 0; i < 4; i++) _mm512_store_ps(total[t][r + i], sum[i]);
                }
            }
        }
        for (int n = 0; n < N; n++)
            for (int r = 0; r < 16; r++) y[n * TILE_ROWS + half * 16 + r] = total[n / 16][r][n % 16];
    }
    _tile_release();
}
#endif

// The twin for this CPU.
template <bool INT8, class T> ProductTile<T> choose_tile() {
#ifdef HAVE_SIMD
    if constexpr (!INT8 && std::is_same_v<T, bf16>)
        if (instruction_set >= ISA_AVX512_BF16) return product_tile<Bf16Kernel, INT8, T>;
    if constexpr (!std::is_same_v<T, double>) {
        if (instruction_set >= ISA_AVX512) return product_tile<Avx512Kernel, INT8, T>;
        if (instruction_set >= ISA_AVX2) return product_tile<Avx2Kernel, INT8, T>;
    }
#endif
    return product_tile<PlainKernel, INT8, T>;
}

// `store(n, r, y)` takes each output once.
template <class T, class Store>
void product_cpu(const Linear<T>& W, const T* x, int N, Store store) {
    const int K = W.in;
    const ProductTile<T> tile = W.q[0] ? choose_tile<true, T>() : choose_tile<false, T>();
    bool integers = false, amx = false; // integers for INT8; AMX for whole tiles
#ifdef HAVE_SIMD
    const bf16* packed = nullptr;
    const FixedX* fixed = nullptr;
    const FixedTile* fixed_packed = nullptr;
    if constexpr (std::is_same_v<T, bf16>) {
        integers = instruction_set >= ISA_AVX512_BF16 && W.q[0] && K % 64 == 0;
        amx = instruction_set >= ISA_AMX && (W.q[0] ? integers && N > 1 : K % 32 == 0);
        if (integers) fixed = fix_all_x(x, N, K);
        if (amx && integers) fixed_packed = amx_pack_int8(fixed, N, K);
        else if (amx) packed = amx_pack(x, N, K);
    }
#endif
    // Tasks of 32 rows; fewer for a single token, so that they spread evenly (AMX and integers want their 32); more when there
    // are tokens enough to make re-reading x cost something.
    int step = N == 1 && !amx && !integers ? 8 : TILE_ROWS, first_task[4] = {};
    while (N >= SLAB && step < 128 && W.out() / (2 * step) >= 2 * thread_count()) step *= 2;
    for (int b = 0; b < 3; b++) first_task[b + 1] = first_task[b] + (W.rows[b] + step - 1) / step;
    #pragma omp parallel for schedule(static) if ((size_t)W.out() * K * N > 50000)
    for (int task = 0; task < first_task[3]; task++) {
        int b = 0, base = 0;
        while (task >= first_task[b + 1]) base += W.rows[b++];
        const int r0 = (task - first_task[b]) * step, r1 = std::min(W.rows[b], r0 + step);
        acc<T> y[TILE_ROWS * SLAB];
        for (int n0 = 0; n0 < N; n0 += SLAB) {
            const int n1 = std::min(N, n0 + SLAB);
            for (int r = r0; r < r1; r += TILE_ROWS) {
                const int rows = std::min(TILE_ROWS, r1 - r);
                const WeightRows<T> w(W, b, r);
#ifdef HAVE_SIMD
                if constexpr (std::is_same_v<T, bf16>) {
                    const size_t before = (size_t)n0 * K;
                    const bool tiles = amx && rows == TILE_ROWS;
                    if (tiles && integers) product_tile_amx_int8(y, w, fixed_packed + before / (16 * GROUP), n1 - n0);
                    else if (tiles) product_tile_amx(y, w.w, packed + before, N == 1 ? 4 : 64, n1 - n0, K);
                    else if (integers) product_tile_vnni(y, w, rows, fixed + before / (2 * GROUP), n1 - n0);
                }
#endif
                if (!integers && (!amx || rows < TILE_ROWS)) tile(y, w, rows, x + (size_t)n0 * K, n1 - n0);
                for (int n = n0; n < n1; n++)
                    for (int i = 0; i < rows; i++) store(n, base + r + i, y[(n - n0) * TILE_ROWS + i]);
            }
        }
    }
}

// out[n][k] = x[n][k] / (1 - p) where the mask keeps it, else 0
template <class T> void drop_cpu(T* out, const T* x, const Dropout& d, int module, int N, int K) {
    const acc<T> scale = 1 / (1 - (acc<T>)d.p);
    #pragma omp parallel for schedule(static) if ((size_t)N * K > 2000)
    for (int n = 0; n < N; n++)
        for (int k = 0; k < K; k += 8) {
            const uint32_t kept = dropout_mask(d, d.token[n], module, k / 8);
            for (int i = k; i < std::min(K, k + 8); i++) out[(size_t)n * K + i] = to_stored<T>(kept >> (i - k) & 1 ? to_acc(x[(size_t)n * K + i]) * scale : 0);
        }
}
// x as module j of W's adapter sees it: dropped into scratch, or x itself.
template <class T> const T* dropped_cpu(const T* x, const Linear<T>& W, int j, int N) {
    if (!W.adapter.dropout) return x;
    static thread_local std::vector<T> scratch; // grows to the largest, and stays
    if (scratch.size() < (size_t)N * W.in) scratch.resize((size_t)N * W.in);
    drop_cpu(scratch.data(), x, *W.adapter.dropout, W.adapter.module[j], N, W.in);
    return scratch.data();
}

// ---- lora_down: h[n][j * rank + i] = sum_k A[j * rank + i][k] drop_j(x[n])[k]
template <class T>
void lora_down_cpu(Context&, T* h,       // (N, m * rank) out
                   const T* x, // (N, W.in)
                   const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t ld = (size_t)a.modules * a.rank;
    for (int j = 0; j < a.modules; j++) {
        Linear<T> A;
        A.w[0] = a.A + (size_t)j * a.rank * W.in, A.rows[0] = a.rank, A.in = W.in;
        product_cpu(A, dropped_cpu(x, W, j, N), N, [=](int n, int r, acc<T> y) { h[n * ld + j * a.rank + r] = to_stored<T>(y); });
    }
}

// x W^T with W's adapter, if it has one: s B h is added before anything is rounded.
template <class T, class Store>
void adapted_product_cpu(Context& ctx, const Linear<T>& W, const T* x, int N, Store store) {
    const Adapter<T>& a = W.adapter;
    if (!a.rank) return product_cpu(W, x, N, store);
    lora_down_cpu(ctx, a.h, x, W, N);
    const size_t ld = (size_t)a.modules * a.rank;
    product_cpu(W, x, N, [&, ld](int n, int r, acc<T> y) {
        int block = 0, first = W.rows[0];
        while (r >= first) first += W.rows[++block];
        for (int j = 0; j < a.modules; j++)
            if (a.block[j] == block) y += dot(a.h + n * ld + j * a.rank, a.B + r * ld + j * a.rank, a.rank);
        store(n, r, y);
    });
}

// out = x W^T
template <class T>
void linear_cpu(Context& ctx, T* out,     // (N, W.out) out
                const T* x, // (N, W.in)
                const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product_cpu(ctx, W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(y); });
}

// out = residual + x W^T; out may be residual.
template <class T>
void linear_add_cpu(Context& ctx, acc<T>* out,            // (N, W.out) out
                    const acc<T>* residual, // (N, W.out)
                    const T* x,             // (N, W.in)
                    const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product_cpu(ctx, W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = residual[n * ld + r] + y; });
}

// out = normed W^T with normed = rmsnorm(x): where it helps, the product makes the rows it needs itself, and
// `normed` is not written.
template <class T>
void norm_linear_cpu(Context& ctx, T* out,          // (N, W.out) out
                     T* normed,       // (N,C) scratch
                     const acc<T>* x, // (N,C)
                     const T* w,      // (C)
                     const Linear<T>& W, int N, float eps) {
    rmsnorm_cpu(ctx, normed, x, w, N, W.in, eps);
    linear_cpu(ctx, out, normed, W, N);
}

// ---- q/k norm, RoPE, KV write: the q and k heads of each token are RMS-normalised and turned by the angle
// pos * theta^(-2i/D) in each plane (i, i + D/2)      (Su et al., "RoFormer", 2021, in the half-split layout);
// q goes on, k and v go to the cache.
template <class T>
void qknorm_rope_kv_cpu(Context&, T* q,              // (N,HD) out
                        T* keys,           // one layer's cache, out
                        T* values,         // one layer's cache, out
                        const T* qkv,      // (N,(H+2K)D)
                        const T* q_weight, // (D)
                        const T* k_weight, // (D)
                        const acc<T>* rope, // (positions, D/2, 2) cosine and sine
                        const Batch& b, int H, int K, int D, float eps) {
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const T* row = qkv + (size_t)n * (H + 2 * K) * D;
        const acc<T>* turn = rope + (size_t)b.pos[n] * D;
        const int page = b.slot[n] / PAGE, within = b.slot[n] % PAGE;
        auto norm_rope = [&](T* out, const T* in, const T* w) {
            const acc<T> scale = inverse_rms(in, D, eps);
            for (int i = 0; i < D / 2; i++) {
                acc<T> u = to_acc(in[i]) * scale * to_acc(w[i]), v = to_acc(in[i + D / 2]) * scale * to_acc(w[i + D / 2]);
                out[i] = to_stored<T>(u * turn[2 * i] - v * turn[2 * i + 1]);
                out[i + D / 2] = to_stored<T>(v * turn[2 * i] + u * turn[2 * i + 1]);
            }
        };
        for (int h = 0; h < H; h++) norm_rope(q + ((size_t)n * H + h) * D, row + h * D, q_weight);
        for (int h = 0; h < K; h++) {
            size_t at = kv_offset(page, h, within, K, D);
            norm_rope(keys + at, row + (H + h) * D, k_weight);
            memcpy((void*)(values + at), row + (H + K + h) * D, D * sizeof(T));
        }
    }
}

// ---- attention: out[n][h] = softmax(q . k / sqrt(D)) v over the positions 0..pos[n] of n's sequence; query head
// h reads key/value head h / G. Page by page with a running maximum (Milakov & Gimelshein, "Online normalizer
// calculation for softmax", 2018): when it grows, what was summed so far is scaled down. Every PIECE keys the sums
// start anew, and are then added to those of the pieces before in the same way: so the pieces of one row can be tasks
// of their own, where there are few rows (decode at long contexts), and the row's bits stay what they are.
constexpr int ATTENTION_ROWS = 32; // query rows that share a page while it is in the first-level cache

constexpr int PIECE = 512;         // keys; whole pages

// Numerator and denominator of a softmax over some keys, both divided by e^maximum.
template <class T> struct AttentionSum {
    acc<T> out[MAX_HEAD], maximum, sum;

    void clear(int D) {
        std::fill(out, out + D, (acc<T>)0);
        maximum = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
    }
    void add(const AttentionSum& o, int D) { // other keys
        const acc<T> top = std::max(maximum, o.maximum), mine = std::exp(maximum - top), theirs = std::exp(o.maximum - top);
        for (int i = 0; i < D; i++) out[i] = out[i] * mine + o.out[i] * theirs;
        maximum = top, sum = sum * mine + o.sum * theirs;
    }
};
template <class T> struct AttentionRow {
    acc<T> q[MAX_HEAD];
    AttentionSum<T> piece, total;
    int length; // keys it sees
};

// p[j] = q . keys[j] for the 16 keys of a page, and out = out * scale + sum_j p[j] values[j]; keys, values (16,D).
template <class A> void attention_scores_plain(A* p, const A* q, const A* keys, int D) {
    for (int j = 0; j < PAGE; j++) p[j] = dot(q, keys + j * D, D);
}
template <class A> void attention_mix_plain(A* out, A scale, const A* p, const A* values, int D) {
    for (int i = 0; i < D; i += LANES) {
        const int n = std::min(LANES, D - i);
        lanes<A> o, v;
        load_some(o, out + i, n);
        o *= scale;
        for (int j = 0; j < PAGE; j++) {
            load_some(v, values + j * D + i, n);
            o += v * p[j];
        }
        memcpy(out + i, &o, n * sizeof(A));
    }
}
#ifdef HAVE_SIMD
TARGET_AVX2 inline void attention_scores_avx2(float* p, const float* q, const float* keys, int D) {
    for (int j = 0; j < PAGE; j += 4) {
        __m256 sum[4], a;
        for (int k = 0; k < 4; k++) sum[k] = _mm256_setzero_ps();
        for (int i = 0; i < D; i += 8) {
            a = load8(q + i, D - i);
            for (int k = 0; k < 4; k++) sum[k] = _mm256_fmadd_ps(a, load8(keys + (j + k) * D + i, D - i), sum[k]);
        }
        for (int k = 0; k < 4; k++) p[j + k] = sum8(sum[k]);
    }
}
TARGET_AVX2 inline void attention_mix_avx2(float* out, float scale, const float* p, const float* values, int D) {
    for (int i = 0; i < D; i += 8) {
        __m256 o = _mm256_mul_ps(load8(out + i, D - i), _mm256_set1_ps(scale));
        for (int j = 0; j < PAGE; j++) o = _mm256_fmadd_ps(_mm256_set1_ps(p[j]), load8(values + j * D + i, D - i), o);
        memcpy(out + i, &o, std::min(8, D - i) * sizeof(float));
    }
}
TARGET_AVX512 inline void attention_scores_avx512(float* p, const float* q, const float* keys, int D) {
    for (int j = 0; j < PAGE; j += 8) {
        __m512 sum[8], a;
        for (int k = 0; k < 8; k++) sum[k] = _mm512_setzero_ps();
        for (int i = 0; i < D; i += 16) {
            const __mmask16 mask = first_lanes(D - i);
            a = load16(q + i, mask);
            for (int k = 0; k < 8; k++) sum[k] = _mm512_fmadd_ps(a, load16(keys + (j + k) * D + i, mask), sum[k]);
        }
        for (int k = 0; k < 8; k++) p[j + k] = sum16(sum[k]);
    }
}
// 64 numbers of `out` at a time: four chains of sums hide each other's latency.
TARGET_AVX512 inline void attention_mix_avx512(float* out, float scale, const float* p, const float* values, int D) {
    for (int i = 0; i < D; i += 64) {
        __m512 o[4];
        for (int k = 0; k < 4; k++) o[k] = _mm512_mul_ps(load16(out + i + 16 * k, first_lanes(std::max(0, D - i - 16 * k))), _mm512_set1_ps(scale));
        for (int j = 0; j < PAGE; j++) {
            const __m512 weight = _mm512_set1_ps(p[j]);
            for (int k = 0; k < 4; k++)
                o[k] = _mm512_fmadd_ps(weight, load16(values + j * D + i + 16 * k, first_lanes(std::max(0, D - i - 16 * k))), o[k]);
        }
        for (int k = 0; k < 4; k++) _mm512_mask_storeu_ps(out + i + 16 * k, first_lanes(std::max(0, D - i - 16 * k)), o[k]);
    }
}
#endif

template <class T> void widen(acc<T>* __restrict out, const T* __restrict in, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = to_acc(in[i]);
}

// One page for one query row: keys and values as acc<T>, zeros behind the row's length.
template <class T, class Scores, class Mix>
void attention_page(AttentionRow<T>& row, const acc<T>* keys, const acc<T>* values, int first, int D, Scores scores, Mix mix) {
    const int n = row.length - first;
    if (n <= 0) return;
    AttentionSum<T>& a = row.piece;
    acc<T> p[PAGE], top = a.maximum;
    scores(p, row.q, keys, D);
    for (int j = n; j < PAGE; j++) p[j] = -std::numeric_limits<acc<T>>::infinity();
    for (int j = 0; j < PAGE; j++) top = p[j] > top ? p[j] : top;
    const acc<T> scale = std::exp(a.maximum - top);
    lanes<T> e;
    static_assert(PAGE == LANES, "a page's scores are one vector");
    load_lanes(e, p);
    e -= top;
    exp_lanes(e);
    memcpy(p, &e, sizeof e);
    a.maximum = top;
    a.sum *= scale;
    for (int j = 0; j < PAGE; j++) a.sum += p[j];
    mix(a.out, scale, p, values, D);
}

template <class T>
void attention_cpu(Context&, T* out,          // (N,HD) out
                   acc<T>* lse,     // (N,H) out: log sum_j e^(q . k_j / sqrt(D)) of each row, which backward needs; null: not wanted
                   const T* q,      // (N,HD)
                   const T* keys,   // one layer's cache
                   const T* values, // one layer's cache
                   const Batch& b, int H, int K, int D) {
    const int G = H / K;
    const int heads = std::min(G, ATTENTION_ROWS);   // query heads of one KV head at a time
    const int tokens = ATTENTION_ROWS / heads;       // tokens at a time
    const int head_tiles = (G + heads - 1) / heads, token_tiles = (b.N + tokens - 1) / tokens;
    const acc<T> scale = 1 / std::sqrt((acc<T>)D);
    auto scores = attention_scores_plain<acc<T>>;
    auto mix = attention_mix_plain<acc<T>>;
#ifdef HAVE_SIMD
    if constexpr (std::is_same_v<acc<T>, float>) {
        if (instruction_set >= ISA_AVX2) scores = attention_scores_avx2, mix = attention_mix_avx2;
        if (instruction_set >= ISA_AVX512) scores = attention_scores_avx512, mix = attention_mix_avx512;
    }
#endif
    [[maybe_unused]] size_t work = 0;
    int pieces = 1; // of the longest row
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        work += (size_t)(b.pos[n] + 1) * H * D;
        pieces = std::max(pieces, b.pos[n] / PIECE + 1);
    }
    const int parts = (size_t)b.N * H * pieces <= 8192 ? pieces : 1; // tasks that share a row, if there are few rows
    static thread_local std::vector<AttentionSum<T>> partial;        // (N,H,parts): grows to the largest, and stays
    if (parts > 1 && partial.size() < (size_t)b.N * H * parts) partial.resize((size_t)b.N * H * parts);
    AttentionSum<T>* sums = partial.data();
    auto store = [&](size_t row, const AttentionSum<T>& a) {
        for (int i = 0; i < D; i++) out[row * D + i] = to_stored<T>(a.out[i] / a.sum);
        if (lse) lse[row] = a.maximum + std::log(a.sum);
    };
    #pragma omp parallel if (work > 20000)
    {
        static thread_local std::vector<AttentionRow<T>> rows; // they grow once, and stay
        static thread_local std::vector<acc<T>> page;          // keys and values of a page, as acc<T>
        if (rows.size() < (size_t)heads * std::min(tokens, b.N)) rows.resize((size_t)heads * std::min(tokens, b.N));
        if (page.size() < (size_t)2 * PAGE * D) page.resize((size_t)2 * PAGE * D);
        #pragma omp for schedule(dynamic)
        for (int task = 0; task < token_tiles * K * head_tiles * parts; task++) {
            // Later tokens see more keys: long tasks first.
            const int part = task % parts, tile = token_tiles - 1 - task / (K * head_tiles * parts), kv = task / (head_tiles * parts) % K;
            const int h0 = kv * G + task / parts % head_tiles * heads, h1 = std::min(h0 + heads, (kv + 1) * G);
            const int end = std::min(b.N, (tile + 1) * tokens);
            for (int n0 = tile * tokens, n1; n0 < end; n0 = n1) {
                for (n1 = n0 + 1; n1 < end && b.seq[n1] == b.seq[n0]; n1++) {}
                if (b.seq[n0] < 0) continue;
                int count = 0, longest = 0;
                for (int n = n0; n < n1; n++)
                    for (int h = h0; h < h1; h++) {
                        AttentionRow<T>& row = rows[count++];
                        for (int i = 0; i < D; i++) row.q[i] = to_acc(q[((size_t)n * H + h) * D + i]) * scale;
                        row.total.clear(D);
                        row.length = b.pos[n] + 1;
                        longest = std::max(longest, row.length);
                    }
                const int* table = b.pages + (size_t)b.seq[n0] * b.max_pages;
                const int end_key = parts > 1 ? std::min(longest, (part + 1) * PIECE) : longest;
                for (int first = part * PIECE; first < end_key; first += PAGE) {
                    if (first % PIECE == 0)
                        for (int i = 0; i < count; i++) rows[i].piece.clear(D);
                    // What lies behind the longest row was never written: zeros stand for it.
                    const size_t at = kv_offset(table[first / PAGE], kv, 0, K, D), held = (size_t)std::min(PAGE, longest - first) * D;
                    widen(page.data(), keys + at, held);
                    widen(page.data() + PAGE * D, values + at, held);
                    std::fill(page.begin() + held, page.begin() + PAGE * D, 0);
                    std::fill(page.begin() + PAGE * D + held, page.begin() + 2 * PAGE * D, 0);
                    for (int i = 0; i < count; i++) attention_page(rows[i], page.data(), page.data() + PAGE * D, first, D, scores, mix);
                    const bool complete = (first + PAGE) % PIECE == 0 || first + PAGE >= end_key;
                    for (int i = 0; i < count && complete; i++)
                        if (rows[i].length > first / PIECE * PIECE) rows[i].total.add(rows[i].piece, D);
                }
                count = 0;
                for (int n = n0; n < n1; n++)
                    for (int h = h0; h < h1; h++) {
                        const size_t row = (size_t)n * H + h;
                        if (parts > 1) sums[row * parts + part] = rows[count++].total;
                        else store(row, rows[count++].total);
                    }
            }
        }
    }
    for (int n = 0; n < b.N && parts > 1; n++)
        for (int h = 0; h < H && b.seq[n] >= 0; h++) {
            const size_t row = (size_t)n * H + h;
            AttentionSum<T>& all = sums[row * parts];
            for (int part = 1; part <= b.pos[n] / PIECE; part++) all.add(sums[row * parts + part], D);
            store(row, all);
        }
}

// The two together: from qkv to what o takes.
template <class T>
void attend_cpu(Context& ctx, T* out, acc<T>* lse, T* q, T* keys, T* values, const T* qkv, const T* q_weight, const T* k_weight, const acc<T>* rope,
                const Batch& b, int H, int K, int D, float eps) {
    qknorm_rope_kv_cpu(ctx, q, keys, values, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
    attention_cpu(ctx, out, lse, q, keys, values, b, H, K, D);
}

// ---- SwiGLU: out = silu(gate) * up, silu(g) = g / (1 + e^-g)       (Shazeer, "GLU variants improve transformer", 2020)
template <class T>
void swiglu_cpu(Context&, T* out,           // (N,F) out
                const T* gate_up, // (N,2F)
                int N, int F) {
    const int PART = 512, parts = (F + PART - 1) / PART;
    #pragma omp parallel for schedule(static) if ((size_t)N * F > 2000)
    for (int task = 0; task < N * parts; task++) {
        const T *gate = gate_up + (size_t)(task / parts) * 2 * F, *up = gate + F;
        T* row = out + (size_t)(task / parts) * F;
        for (int i = task % parts * PART; i < std::min(F, (task % parts + 1) * PART); i += LANES) {
            const int n = std::min(LANES, F - i);
            lanes<T> g, u, e = {};
            load_some(g, gate + i, n);
            load_some(u, up + i, n);
            for (int l = 0; l < LANES; l++) e[l] = std::min(-g[l], (acc<T>)80); // beyond 80 it is 0 to all purposes
            exp_lanes(e);
            u *= g / (1 + e);
            for (int l = 0; l < n; l++) row[i + l] = to_stored<T>(u[l]);
        }
    }
}

// The product with gate and up, then SwiGLU.
template <class T>
void linear_swiglu_cpu(Context& ctx, T* out,     // (N,F) out
                       T* gate_up, // (N,2F) out
                       const T* x, // (N,C)
                       const Linear<T>& W, int N) {
    linear_cpu(ctx, gate_up, x, W, N);
    swiglu_cpu(ctx, out, gate_up, N, W.rows[0]);
}

// The same of rmsnorm(x), see norm_linear. gate_up may be null on the GPU, if nobody wants it.
template <class T>
void norm_linear_swiglu_cpu(Context& ctx, T* out, T* gate_up, T* normed, const acc<T>* x, const T* w, const Linear<T>& W, int N, float eps) {
    rmsnorm_cpu(ctx, normed, x, w, N, W.in, eps);
    linear_swiglu_cpu(ctx, out, gate_up, normed, W, N);
}

// ---- head: the logits of R named rows, never rounded below acc<T>
template <class T>
void head_cpu(Context&, acc<T>* logits, // (R,V) out
              T* picked,      // (R,C) scratch
              const T* x,     // (N,C) after the final norm
              const int* rows, // (R)
              const Linear<T>& W, int R) {
    for (int r = 0; r < R; r++) memcpy((void*)(picked + (size_t)r * W.in), x + (size_t)rows[r] * W.in, (size_t)W.in * sizeof(T));
    const size_t V = W.out();
    product_cpu(W, picked, R, [=](int r, int v, acc<T> y) { logits[r * V + v] = y; });
}


// The products of this section: close(a, i, sum) for every a < A, i < I with one sum in the order of t,
//     sum = open(a, i) + sum_t (factor * u[t * u_term + a * u_row]) * row(t)[i],  t < terms.
// Tiles of 4 by 32 sums stay in registers.
template <class T, class Row, class Open, class Close>
void outer_sums(int A, int I, int terms, const T* u, size_t u_term, size_t u_row, acc<T> factor, Row row, Open open, Close close) {
    constexpr int ROWS = 4, COLUMNS = 2 * LANES;
    const int across = (I + COLUMNS - 1) / COLUMNS, tiles = (A + ROWS - 1) / ROWS * across;
    #pragma omp parallel for schedule(static) if ((size_t)A * I * terms > 50000)
    for (int tile = 0; tile < tiles; tile++) {
        const int a0 = tile / across * ROWS, i0 = tile % across * COLUMNS, rows = std::min(ROWS, A - a0), columns = std::min(COLUMNS, I - i0);
        acc<T> sums[ROWS][COLUMNS] = {};
        for (int a = 0; a < rows; a++)
            for (int i = 0; i < columns; i++) sums[a][i] = open(a0 + a, i0 + i);
        lanes<T> s[ROWS][2], v[2];
        const T* from[ROWS]; // (the last row stands for those that are missing)
        for (int a = 0; a < ROWS; a++) {
            load_lanes(s[a][0], sums[a]), load_lanes(s[a][1], sums[a] + LANES);
            from[a] = u + std::min(a0 + a, A - 1) * u_row;
        }
        for (int t = 0; t < terms; t++) {
            const T* x = row(t) + i0;
            load_some(v[0], x, std::min(LANES, columns));
            if (columns > LANES) load_some(v[1], x + LANES, columns - LANES);
            else v[1] = lanes<T>{};
            for (int a = 0; a < ROWS; a++) {
                const acc<T> y = factor * to_acc(from[a][t * u_term]);
                s[a][0] += y * v[0], s[a][1] += y * v[1];
            }
        }
        for (int a = 0; a < rows; a++) {
            memcpy(sums[a], s[a], sizeof s[a]);
            for (int i = 0; i < columns; i++) close(a0 + a, i0 + i, sums[a][i]);
        }
    }
}

// ---- cross_entropy: loss[r] = log(sum_v e^logits[r][v]) - logits[r][target[r]]
// dlogits = scale (softmax(logits) - one at the target). Over all V rows, those of ids that do not exist too, as Hugging
// Face's is.
template <class T>
void cross_entropy_cpu(Context&, acc<T>* loss,         // (R) out
                       T* dlogits,           // out, or null: the memory of logits, row r at its row r
                       const acc<T>* logits, // (R,V)
                       const int* target,    // (R)
                       acc<T> scale, int R, int V) {
    #pragma omp parallel for schedule(static) if ((size_t)R * V > 2000)
    for (int r = 0; r < R; r++) {
        const acc<T>* row = logits + (size_t)r * V;
        acc<T> top = -std::numeric_limits<acc<T>>::infinity(), sum = 0, right;
        for (int v = 0; v < V; v++) top = std::max(top, row[v]);
        lanes<T> e, sums = {};
        auto exponentials = [&](int v) { // of 16 logits, zeros behind the end
            const int n = std::min(LANES, V - v);
            load_some(e, row + v, n);
            for (int l = n; l < LANES; l++) e[l] = -std::numeric_limits<acc<T>>::infinity();
            e -= top;
            exp_lanes(e);
            return n;
        };
        for (int v = 0; v < V; v += LANES) {
            exponentials(v);
            sums += e;
        }
        sum = sum_lanes(sums);
        memcpy(&right, row + target[r], sizeof right);
        loss[r] = std::log(sum) + top - right;
        if (!dlogits) continue;
        uint8_t* out = (uint8_t*)row; // (a gradient is never longer than its logit: nothing unread is overwritten)
        for (int v = 0; v < V; v += LANES) {
            const int n = exponentials(v);
            T g[LANES];
            for (int l = 0; l < n; l++) g[l] = to_stored<T>((e[l] / sum - (v + l == target[r])) * scale);
            memcpy(out + v * sizeof(T), g, n * sizeof(T));
        }
    }
}

// The head and its loss: logits[r] = W x[rows[r]], and their gradient in place of them.
template <class T>
void head_loss_cpu(Context& ctx, acc<T>* loss,       // (R) out
                   T* dlogits,         // out, or null: as cross_entropy's
                   acc<T>* logits,     // (R,V) out
                   T* picked,          // (R,C) scratch
                   acc<T>*,            // (R, V / 64 rounded up, 2) scratch of the GPU's
                   const T* x,         // (N,C) after the final norm
                   const int* rows,    // (R)
                   const int* target,  // (R)
                   acc<T> scale, const Linear<T>& W, int R) {
    head_cpu(ctx, logits, picked, x, rows, W, R);
    cross_entropy_cpu(ctx, loss, dlogits, logits, target, scale, R, W.out());
}

// ---- head: logits[r] = W normed[rows[r]]
// dnormed of these rows; those of the others are not touched.
template <class T>
void head_backward_cpu(Context&, T* dnormed,       // (N,C) out
                       const T* dlogits, // (R, ld), V of each row
                       size_t ld,
                       const int* rows,  // (R), none twice
                       const Linear<T>& W, int R) {
    const int C = W.in;
    outer_sums(R, C, W.out(), dlogits, 1, ld, 1, [&](int v) { return W.w[0] + (size_t)v * C; }, [](int, int) { return 0; },
               [&](int r, int i, acc<T> sum) { dnormed[(size_t)rows[r] * C + i] = to_stored<T>(sum); });
}

// ---- rmsnorm: out = x r w with r = 1 / sqrt(mean(x^2) + eps)
// dx += r w dout - x r^3 / C sum_j x_j w_j dout_j,  dw += x r dout
template <class T>
void rmsnorm_backward_cpu(Context&, acc<T>* dx,      // (N,C) +=
                          T* dy,           // (N,C) out: the new dx as T, or null
                          T* normed,       // (N,C) out: what forward's `out` was, or null
                          acc<T>* dw,      // (C) +=, or null
                          const T* dout,   // (N,C)
                          const acc<T>* x, // (N,C)
                          const T* w,      // (C)
                          int N, int C, float eps) {
    static thread_local std::vector<acc<T>> scratch; // r of each token: grows to the largest, and stays
    scratch.resize(N);
    acc<T>* scale = scratch.data();
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * C;
        const acc<T> r = scale[n] = inverse_rms(x + at, C, eps);
        lanes<T> sums = {}, a, b, d;
        for (int i = 0; i < C; i += LANES) {
            const int k = std::min(LANES, C - i);
            load_some(a, x + at + i, k), load_some(b, w + i, k), load_some(d, dout + at + i, k);
            sums += a * b * d;
        }
        const acc<T> mean = sum_lanes(sums) * r * r * r / C;
        for (int i = 0; i < C; i++) {
            const acc<T> weight = to_acc(w[i]);
            if (normed) normed[at + i] = to_stored<T>(x[at + i] * r * weight);
            dx[at + i] += r * weight * to_acc(dout[at + i]) - x[at + i] * mean;
            if (dy) dy[at + i] = to_stored<T>(dx[at + i]);
        }
    }
    if (!dw) return;
    #pragma omp parallel for schedule(static) if ((size_t)N * C > 2000)
    for (int i = 0; i < C; i++)
        for (int n = 0; n < N; n++) dw[i] += to_acc(dout[(size_t)n * C + i]) * x[(size_t)n * C + i] * scale[n];
}

// ---- linear: y = x W^T + sum_j s h_j B_j^T,  h_j = drop_j(x) A_j^T; the second part is the adapter's, if there is one
// dh_j = dy (s B_j),  dx = sum_j drop_j(dh_j A_j) + dy W
template <class T>
void linear_backward_input_cpu(Context&, T* dx,       // (N, W.in) out
                               T* dh,       // (N, m * rank) out
                               const T* dy, // (N, W.out)
                               const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const int rank = a.rank;
    const size_t in = W.in, ld = (size_t)a.modules * rank;
    for (int j = 0; j < a.modules; j++) {
        const int first = std::accumulate(W.rows, W.rows + a.block[j], 0);
        outer_sums(N, rank, W.rows[a.block[j]], dy + first, 1, (size_t)W.out(), 1, [&](int r) { return a.B + (first + r) * ld + j * rank; },
                   [](int, int) { return 0; }, [&](int n, int i, acc<T> sum) { dh[n * ld + j * rank + i] = to_stored<T>(sum); });
    }
    static thread_local std::vector<acc<T>> scratch; // the adapter's part; grows to the largest, and stays
    if (rank && scratch.size() < N * in) scratch.resize(N * in);
    acc<T>* ahead = scratch.data();
    const acc<T> scale = a.dropout ? 1 / (1 - (acc<T>)a.dropout->p) : 1;
    #pragma omp parallel for schedule(static) if ((size_t)N * in > 2000)
    for (int n = 0; n < (rank ? N : 0); n++)
        for (int k = 0; k < (int)in; k += LANES) {
            const int some = std::min(LANES, (int)in - k);
            lanes<T> sum = {}, part, v;
            for (int j = 0; j < a.modules; j++) {
                part = lanes<T>{};
                for (int i = 0; i < rank; i++) {
                    load_some(v, a.A + (size_t)(j * rank + i) * in + k, some);
                    part += to_acc(dh[n * ld + j * rank + i]) * v;
                }
                for (int l = 0; l < LANES && a.dropout; l += 8) {
                    const uint32_t kept = dropout_mask(*a.dropout, a.dropout->token[n], a.module[j], (k + l) / 8);
                    for (int i = 0; i < 8; i++) part[l + i] *= kept >> i & 1 ? scale : 0;
                }
                sum += part;
            }
            for (int l = 0; l < some; l++) ahead[n * in + k + l] = sum[l];
        }
    auto row = [&](int r) {
        int b = 0;
        while (r >= W.rows[b]) r -= W.rows[b++];
        return W.w[b] + r * in;
    };
    outer_sums(N, W.in, W.out(), dy, 1, (size_t)W.out(), 1, row, [&](int n, int i) { return rank ? ahead[n * in + i] : 0; },
               [&](int n, int i, acc<T> sum) { dx[n * in + i] = to_stored<T>(sum); });
}

// dW += dy^T x
template <class T>
void linear_backward_weight_cpu(Context&, acc<T>* dW,  // (out,in) +=
                                const T* dy, // (N, ld), `out` of each row
                                size_t ld,
                                const T* x,  // (N,in)
                                int N, int out, int in) {
    outer_sums(out, in, N, dy, ld, 1, 1, [&](int n) { return x + (size_t)n * in; }, [&](int o, int i) { return dW[(size_t)o * in + i]; },
               [&](int o, int i, acc<T> sum) { dW[(size_t)o * in + i] = sum; });
}

// dA_j += dh_j^T drop_j(x),  dB_j += s dy^T h_j
template <class T>
void lora_backward_weight_cpu(Context&, acc<T>* dA,  // (m * rank, W.in) +=
                              acc<T>* dB,  // (W.out, m * rank) +=, where module and row belong together
                              const T* dh, // (N, m * rank)
                              const T* dy, // (N, W.out)
                              const T* x,  // (N, W.in)
                              const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const int rank = a.rank;
    const size_t in = W.in, ld = (size_t)a.modules * rank;
    for (int j = 0; j < a.modules; j++) {
        const T* seen = dropped_cpu(x, W, j, N);
        acc<T>* A = dA + j * rank * in;
        outer_sums(rank, W.in, N, dh + j * rank, ld, 1, 1, [&](int n) { return seen + n * in; }, [&](int r, int i) { return A[r * in + i]; },
                   [&](int r, int i, acc<T> sum) { A[r * in + i] = sum; });
        const int first = std::accumulate(W.rows, W.rows + a.block[j], 0);
        acc<T>* B = dB + first * ld + j * rank;
        outer_sums(W.rows[a.block[j]], rank, N, dy + first, (size_t)W.out(), 1, a.s, [&](int n) { return a.h + n * ld + j * rank; },
                   [&](int r, int i) { return B[r * ld + i]; }, [&](int r, int i, acc<T> sum) { B[r * ld + i] = sum; });
    }
}

// ---- SwiGLU: out = silu(gate) * up, silu(g) = g sigma(g), sigma(g) = 1 / (1 + e^-g)
// dgate = dout up sigma (1 + g (1 - sigma)),  dup = dout silu(gate)
template <class T>
void swiglu_backward_cpu(Context&, T* dgate_up,      // (N,2F) out
                         T* hidden,        // (N,F) out: what forward's `out` was
                         const T* dhidden, // (N,F)
                         const T* gate_up, // (N,2F)
                         int N, int F) {
    #pragma omp parallel for schedule(static) if ((size_t)N * F > 2000)
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * F;
        const T *gate = gate_up + 2 * at, *up = gate + F;
        for (int i = 0; i < F; i += LANES) {
            const int some = std::min(LANES, F - i);
            lanes<T> g, u, d, e = {};
            load_some(g, gate + i, some), load_some(u, up + i, some), load_some(d, dhidden + at + i, some);
            for (int l = 0; l < LANES; l++) e[l] = std::min(-g[l], (acc<T>)80);
            exp_lanes(e);
            const lanes<T> silu = g / (1 + e), sigma = 1 / (1 + e), dgate = d * u * sigma * (1 + g * (1 - sigma)), dup = d * silu;
            u *= silu;
            for (int l = 0; l < some; l++) {
                hidden[at + i + l] = to_stored<T>(u[l]);
                dgate_up[2 * at + i + l] = to_stored<T>(dgate[l]);
                dgate_up[2 * at + F + i + l] = to_stored<T>(dup[l]);
            }
        }
    }
}

// ---- attention_backward:  attention(out, lse, q, keys, values)
// With s[n][m] = q_n . k_m / sqrt(D), p = e^(s - lse) and o_n = sum_m p[n][m] v_m over the tokens m <= n of n's sequence:
//     dv_m = sum_n p[n][m] do_n                              dp[n][m] = do_n . v_m
//     ds[n][m] = p[n][m] (dp[n][m] - delta_n)                delta_n = sum_m p[n][m] dp[n][m] = do_n . o_n
//     dq_n = sum_m ds[n][m] k_m / sqrt(D)                    dk_m = sum_n ds[n][m] q_n / sqrt(D)
// where for dk and dv n runs over all G query heads of the KV head too. A training batch holds sequences from their
// position 0 on: so key m of a sequence is its m-th row of the batch, and lies at that row's slot. Spare rows, behind
// all others, get zeros, since weight gradients are sums over all rows.
// The probabilities are computed again from lse, not stored.
template <class T>
void attention_backward_cpu(Context&, T* dqkv,           // (N,(H+2K)D) out: gradients of q and k after RoPE, and of v
                            const T* dout,     // (N,HD)
                            const T* q,        // (N,HD)
                            const T* keys,     // one layer's cache
                            const T* values,   // one layer's cache
                            const T* out,      // (N,HD) of attention
                            const acc<T>* lse, // (N,H) of attention
                            const Batch& b, int H, int K, int D,
                            acc<T>* delta) { // (N,H) scratch
    const int G = H / K;
    const size_t width = (size_t)(H + 2 * K) * D;
    const acc<T> scale = 1 / std::sqrt((acc<T>)D);
    std::vector<int> starts; // of sequences, and N
    for (int n = 0; n < b.N; n++)
        if (n == 0 || b.seq[n] != b.seq[n - 1]) starts.push_back(n);
    const int tasks = (int)starts.size() * K; // a sequence and KV head each; sums run over its tokens in order
    starts.push_back(b.N);
    #pragma omp parallel for schedule(dynamic) if (b.N > 4)
    for (int task = 0; task < tasks; task++) {
        const int n0 = starts[task / K], n1 = starts[task / K + 1], kv = task % K;
        const size_t all = (size_t)(n1 - n0) * D;
        auto key_gradient = [&](int n) { return dqkv + n * width + (size_t)(H + kv) * D; };
        auto value_gradient = [&](int n) { return key_gradient(n) + (size_t)K * D; };
        auto query_gradient = [&](int n) { return dqkv + n * width + (size_t)kv * G * D; };
        if (b.seq[n0] < 0) {
            for (int n = n0; n < n1; n++) {
                std::fill(query_gradient(n), query_gradient(n) + (size_t)G * D, T{});
                std::fill(key_gradient(n), key_gradient(n) + D, T{});
                std::fill(value_gradient(n), value_gradient(n) + D, T{});
            }
            continue;
        }
        static thread_local std::vector<acc<T>> scratch; // it grows to the longest sequence, and stays
        scratch.assign(4 * all + 3 * D, 0);
        acc<T> *k = scratch.data(), *v = k + all, *dk = v + all, *dv = dk + all; // (tokens, D) each
        acc<T> *query = dv + all, *dquery = query + D, *doutput = dquery + D;
        for (int n = n0; n < n1; n++) {
            const size_t at = kv_offset(b.slot[n] / PAGE, kv, b.slot[n] % PAGE, K, D);
            widen(k + (size_t)(n - n0) * D, keys + at, D);
            widen(v + (size_t)(n - n0) * D, values + at, D);
        }
        for (int n = n0; n < n1; n++)
            for (int g = 0; g < G; g++) {
                const size_t row = (size_t)n * H + kv * G + g;
                delta[row] = dot(dout + row * D, out + row * D, D);
                widen(doutput, dout + row * D, D);
                for (int i = 0; i < D; i++) query[i] = to_acc(q[row * D + i]) * scale, dquery[i] = 0;
                for (int m = 0; m <= n - n0; m++) {
                    const size_t at = (size_t)m * D;
                    const acc<T> p = std::exp(dot(query, k + at, D) - lse[row]), ds = p * (dot(doutput, v + at, D) - delta[row]);
                    for (int i = 0; i < D; i++) dv[at + i] += p * doutput[i];
                    for (int i = 0; i < D; i++) dk[at + i] += ds * query[i];
                    for (int i = 0; i < D; i++) dquery[i] += ds * k[at + i];
                }
                for (int i = 0; i < D; i++) query_gradient(n)[g * D + i] = to_stored<T>(dquery[i] * scale);
            }
        for (int n = n0; n < n1; n++)
            for (int i = 0; i < D; i++) {
                key_gradient(n)[i] = to_stored<T>(dk[(size_t)(n - n0) * D + i]);
                value_gradient(n)[i] = to_stored<T>(dv[(size_t)(n - n0) * D + i]);
            }
    }
}

// ---- q/k norm, RoPE: (a, b) = x r w in the plane (i, i + D/2) of a head, r = 1 / rms(x);
// out = (a cos - b sin, b cos + a sin)
// Back through the turn, which is the turn by the opposite angle, and then as rmsnorm.
template <class T>
void qknorm_rope_backward_cpu(Context&, T* dqkv,            // (N,(H+2K)D) in place, the heads of q and k
                              acc<T>* dq_weight,  // (D) +=, or null
                              acc<T>* dk_weight,  // (D) +=, or null
                              const T* qkv,       // (N,(H+2K)D) before norm and turn
                              const T* q_weight,  // (D)
                              const T* k_weight,  // (D)
                              const acc<T>* rope, // (positions, D/2, 2)
                              const Batch& b, int H, int K, int D, float eps) {
    const int heads = H + K;
    auto at = [&](int n, int h) { return ((size_t)n * (H + 2 * K) + h) * D; };
    // The gradient of (a, b) in plane i of head h.
    auto unturned = [&](int n, int h, int i, acc<T>& da, acc<T>& db) {
        const acc<T> *turn = rope + (size_t)b.pos[n] * D + 2 * i, u = to_acc(dqkv[at(n, h) + i]), v = to_acc(dqkv[at(n, h) + i + D / 2]);
        da = u * turn[0] + v * turn[1], db = v * turn[0] - u * turn[1];
    };
    if (dq_weight) {
        static thread_local std::vector<acc<T>> scratch; // r of each head: grows to the largest, and stays
        scratch.resize((size_t)b.N * heads);
        acc<T>* scale = scratch.data();
        #pragma omp parallel for schedule(static) if (b.N > 4)
        for (int n = 0; n < b.N; n++)
            for (int h = 0; h < heads && b.seq[n] >= 0; h++) scale[n * heads + h] = inverse_rms(qkv + at(n, h), D, eps);
        #pragma omp parallel for schedule(static) if (b.N > 4)
        for (int i = 0; i < D / 2; i++)
            for (int n = 0; n < b.N; n++)
                for (int h = 0; h < heads && b.seq[n] >= 0; h++) {
                    acc<T> da, db, *dw = h < H ? dq_weight : dk_weight;
                    unturned(n, h, i, da, db);
                    dw[i] += da * to_acc(qkv[at(n, h) + i]) * scale[n * heads + h];
                    dw[i + D / 2] += db * to_acc(qkv[at(n, h) + i + D / 2]) * scale[n * heads + h];
                }
    }
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++)
        for (int h = 0; h < heads && b.seq[n] >= 0; h++) {
            const T *x = qkv + at(n, h), *w = h < H ? q_weight : k_weight;
            T* dx = dqkv + at(n, h);
            const acc<T> r = inverse_rms(x, D, eps);
            acc<T> dy[MAX_HEAD], sum = 0;
            for (int i = 0; i < D / 2; i++) unturned(n, h, i, dy[i], dy[i + D / 2]);
            for (int i = 0; i < D; i++) sum += to_acc(x[i]) * to_acc(w[i]) * dy[i];
            const acc<T> mean = sum * r * r * r / D;
            for (int i = 0; i < D; i++) dx[i] = to_stored<T>(r * to_acc(w[i]) * dy[i] - to_acc(x[i]) * mean);
        }
}

// Ops whose definition is fast enough.
#define AS_DEFINED(op) template <class... P> void op##_cpu(Context&, P&&... p) { op(std::forward<P>(p)...); }
AS_DEFINED(embed)
AS_DEFINED(add_losses)
AS_DEFINED(embed_backward)
AS_DEFINED(grad_norm)
AS_DEFINED(adamw)
#undef AS_DEFINED
