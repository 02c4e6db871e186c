/* cpu.h: Book I's slow ops once more, for the vector and matrix instructions of CPUs. Included by qwen3.cu.

   op_cpu(ctx, ...) computes what `op` of Book I computes: see there for formulas, shapes and what each parameter is.
   Only the order of a sum's terms differs. Two contracts hold for every op and instruction set: the bits of a row
   depend neither on the other rows of the batch nor on the number of threads.

   Lanes             16 numbers at once in the compilers' own vectors, for any CPU
   Instruction sets  plain, AVX2, AVX-512, AVX-512 with BF16 and VNNI, AMX: which are there is asked at the start
   Product tiles     32 rows of W by up to 64 tokens, of which `product` is made: floats, and INT8 in integers (loops
                     that are written once for all instruction sets: cpu_loops.h); AMX for bf16 and INT8
   Products          product (which cuts W into tasks), lora_down, linear, linear_add
   Forward ops       rmsnorm, norm_linear, qknorm_rope_kv, attention, swiglu, head; sample
   Backward ops      in Book I's order
*/
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#endif

// Inlined wherever it is used, so that it is compiled for the instruction set of the function that uses it.
#define INLINE inline __attribute__((always_inline))

// Memory for n numbers that an op keeps from call to call: it grows to the largest call, and stays. It begins with a
// cache line, since a vector that lies across two takes twice as long to load.
template <class U> U* at_least(std::vector<U>& kept, size_t n) {
    const size_t line = 64, spare = sizeof(U) < line ? line / sizeof(U) : 0;
    if (kept.size() < n + spare) kept.resize(n + spare);
    return spare ? (U*)(((uintptr_t)kept.data() + line - 1) / line * line) : kept.data();
}

// Loops over a sum's rows, tokens and chains are unrolled, so that it stays in registers.
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#ifdef __CUDACC__
#pragma nv_diag_suppress 1675 // nvcc does not know this pragma, and hands it on to g++
#endif

// ============================================================================================================== Lanes
// 16 numbers that are computed on at once. The compilers' own vector type: one zmm register with AVX-512, two ymm with
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

// FP8: moved to float's places, and 120 added to the exponent; subnormals have none, they are eighths of 2^-6.
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
    if (n == LANES / 2) memcpy((void*)whole, p, LANES / 2 * sizeof(T)); // (of a known size it is one instruction)
    else memcpy((void*)whole, p, (size_t)n * sizeof(T));
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

// Of each group of 2 HALF lanes its first half, or with MORE = HALF its second one; a's groups and b's in turn.
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
    for (int l = 0; l < LANES; l++) e[l] = std::min(-g[l], (std::decay_t<decltype(g[0])>)80);
    exp_lanes(e);
    e = 1 + e;
}

// =================================================================================================== Instruction sets
// What there is is asked when the program starts. Only product tiles and attention have code for each of them; all else
// is compiled for the build's own target.
enum InstructionSet { ISA_PLAIN, ISA_AVX2, ISA_AVX512, ISA_AVX512_BF16, ISA_AMX };
inline const char* instruction_set_name(int set) {
    static const char* names[] = {"plain", "avx2", "avx512", "avx512bf16", "amx"};
    return names[set];
}

// Older compilers do not know the instructions of bf16 and AMX; they, and other processors, get the plain loops.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAVE_SIMD
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")))
#define TARGET_AVX512_BF16 \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")))
#define TARGET_AMX \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni," \
                          "amx-tile,amx-bf16,amx-int8")))
#endif

// The best one of this CPU.
inline InstructionSet best_instruction_set() {
#ifdef HAVE_SIMD
    unsigned a, b, c, d, a1 = 0, b1, c1, d1;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return ISA_PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) return ISA_AVX2;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return ISA_AVX512;
    if (!(a1 >> 5 & 1) || !(c >> 11 & 1)) return ISA_AVX512; // AVX512_BF16, AVX512_VNNI
    const bool amx = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1); // AMX-BF16, AMX-TILE, AMX-INT8
    // Linux gives a process the tile registers when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return amx && syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? ISA_AMX : ISA_AVX512_BF16;
#else
    return ISA_PLAIN;
#endif
}
inline InstructionSet instruction_set = best_instruction_set(); // the process's; a test or --cpu may take a lesser one

// ====================================================================================================== Product tiles
// y[n * TILE_ROWS + r] = W[r] . x[n] for `rows` <= TILE_ROWS rows of W and N <= TILE_TOKENS tokens. In each way to
// compute it an output is one sum in one order, whatever the other rows and tokens are.
constexpr int TILE_ROWS = 32, TILE_TOKENS = 64;

// Consecutive rows of one block of a Linear.
template <class T> struct WeightRows {
    const Linear<T>& W;
    const T* w;
    const int8_t* q;
    const bf16* scale;    // INT8's
    const uint16_t* half; // INT4's
    const uint8_t* zero;
    size_t row;           // of the block
    int block, in;
    WeightRows(const Linear<T>& W, int block, size_t r)
        : W(W), w(W.w[block]), q(W.q[block]), scale((const bf16*)W.scale[block]),
          half((const uint16_t*)W.scale[block]), zero(W.zero[block]), row(0), block(block), in(W.in) { skip(r); }
    INLINE void skip(size_t r) {
        const size_t groups = r * W.groups();
        row += r;
        if (w) w += r * in;
        else q += r * W.row_bytes();
        if (W.format == Format::INT8) scale += groups;
        if (W.format == Format::INT4) half += groups, zero += zero ? groups : 0;
    }
    const float* block_scales() const { // FP8: of this row
        return (const float*)W.scale[block] + row / W.group_rows * W.groups();
    }
    // (rows, columns) from column k on, a multiple of 2 * GROUP. INT8 and INT4 are exact: a scale has 8 or 11 bits, a
    // weight 7 or 5.
    const acc<T>* widen(acc<T>* out, int rows, int k, int columns) const {
        WeightRows at = *this;
        for (int r = 0; r < rows; r++, out += columns, at.skip(1)) {
            if (w) ::widen(out, at.w + k, columns);
            for (int i = 0; i < columns && q; i += GROUP) {
                const int n = std::min(GROUP, columns - i), column = k + i, g = column / W.group;
                if (W.format == Format::INT8) {
                    const acc<T> s = to_acc(at.scale[g]);
                    for (int j = 0; j < n; j++) out[i + j] = at.q[column + j] * s;
                } else if (W.format == Format::INT4) {
                    const acc<T> s = half_to_float(at.half[g]);
                    const int z = zero ? at.zero[g] : 8, shift = column / GROUP % 2 * 4;
                    const uint8_t* from = (const uint8_t*)at.q + column / 64 * 32;
                    for (int j = 0; j < n; j++) out[i + j] = (acc<T>)((from[j] >> shift & 15) - z) * s;
                } else {
                    lanes<T> v;
                    const acc<T> s = at.block_scales()[g];
                    for (int j = 0; j < n; j += LANES) {
                        load_some(v, (const e4m3*)at.q + column + j, std::min(LANES, n - j));
                        v *= s;
                        memcpy(out + i + j, &v, std::min(LANES, n - j) * sizeof(acc<T>));
                    }
                }
            }
        }
        return out - (size_t)rows * columns;
    }
};

// ---- Floats. Each struct below is a set of vector instructions, and has the loops of cpu_loops.h made of them:
//     Vector    SUMS sums; load_sum, store_sum       Operand  WIDTH numbers that are multiplied
//     part      of n >= 0 numbers that follow, those that fit into an Operand
//     load      that part of a row, zeros past it    store    that part to memory
//     fill      the same number in all lanes         keep     in a register: g++ would read it again for every product
//     multiply  v *= s    multiply_add  sum += a * b    total  the sum of the lanes: halves onto each other
//     totals    of R rows by M tokens: y[m][r]
//     Input     what x is read as: acc<T>, made once a product, or T where the instructions take it
//     CHAINS    vectors a sum, so that one does not wait for another in a single token's product
//     ROWS, TOKENS  of W and x at once; KEYS and MIXED of attention: as many as the registers hold
template <class A> struct Plain {
    using Vector = lanes<A>;
    using Operand = Vector;
    template <class T> using Input = A;
    static constexpr int WIDTH = LANES, SUMS = LANES, ROWS = 2, TOKENS = 2, CHAINS = 1, KEYS = 1, MIXED = 1;
    using Part = int;
    static INLINE Part part(int n) { return std::min(LANES, n); }
    template <class T> static INLINE void load(Vector& v, const T* p, Part n) { load_some(v, p, n); }
    static INLINE void store(A* p, const Vector& v, Part n) { memcpy(p, &v, n * sizeof(A)); }
    static INLINE void keep(Vector&) {}
    static INLINE void load_sum(Vector& v, const A* p) { memcpy(&v, p, sizeof v); }
    static INLINE void store_sum(A* p, const Vector& v) { memcpy(p, &v, sizeof v); }
    static INLINE void fill(Vector& v, A a) { v = Vector{} + a; }
    static INLINE void multiply(Vector& v, A s) { v *= s; }
    static INLINE void multiply_add(Vector& sum, const Vector& a, const Vector& b) { sum += a * b; }
    template <int R, int M, int C> static INLINE void totals(A* y, const Vector (&sum)[R][M][C]) {
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++) y[m * TILE_ROWS + r] = sum_lanes(sum[r][m][0]);
    }
#define TARGET
#include "cpu/loops.h"
#undef TARGET
};

#ifdef HAVE_SIMD
struct Avx2 {
    using Vector = __m256;
    using Operand = Vector;
    template <class T> using Input = float;
    static constexpr int WIDTH = 8, SUMS = 8, ROWS = 4, TOKENS = 3, CHAINS = 2, KEYS = 8, MIXED = 8; // 16 registers
    TARGET_AVX2 static INLINE void load8(Vector& v, const float* p) { v = _mm256_loadu_ps(p); }
    TARGET_AVX2 static INLINE void load8(Vector& v, const bf16* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
        v = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    TARGET_AVX2 static INLINE void load8(Vector& v, const int8_t* p) {
        v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
    }
    TARGET_AVX2 static INLINE void load8(Vector& v, const e4m3* p) { // as load_lanes has it
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
    template <class T> TARGET_AVX2 static INLINE void load(Vector& v, const T* p, Part n) {
        if (n >= WIDTH) return load8(v, p);
        T whole[WIDTH] = {};
        memcpy((void*)whole, p, (size_t)n * sizeof(T));
        load8(v, whole);
    }
    TARGET_AVX2 static INLINE void store(float* p, const Vector& v, Part n) {
        memcpy(p, &v, std::min(WIDTH, n) * sizeof(float));
    }
    TARGET_AVX2 static INLINE void keep(Operand& v) { asm("" : "+x"(v)); }
    TARGET_AVX2 static INLINE void load_sum(Vector& v, const float* p) { v = _mm256_loadu_ps(p); }
    TARGET_AVX2 static INLINE void store_sum(float* p, const Vector& v) { _mm256_storeu_ps(p, v); }
    TARGET_AVX2 static INLINE void fill(Vector& v, float a) { v = _mm256_set1_ps(a); }
    TARGET_AVX2 static INLINE void multiply(Vector& v, float s) { v = _mm256_mul_ps(v, _mm256_set1_ps(s)); }
    TARGET_AVX2 static INLINE void multiply_add(Vector& sum, const Vector& a, const Vector& b) {
        sum = _mm256_fmadd_ps(a, b, sum);
    }
    TARGET_AVX2 static INLINE float total(const Vector& v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    template <int R, int M, int C> TARGET_AVX2 static INLINE void totals(float* y, const Vector (&sum)[R][M][C]) {
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int r = 0; r < R; r++) y[m * TILE_ROWS + r] = total(sum[r][m][0]);
    }
#define TARGET TARGET_AVX2
#include "cpu/loops.h"
#undef TARGET
};

// (Masked forms with all lanes on: g++ 12 warns of the plain ones.)
struct Avx512 {
    using Vector = __m512;
    using Operand = Vector;
    template <class T> using Input = float;
    static constexpr int WIDTH = 16, SUMS = 16, ROWS = 4, TOKENS = 4, CHAINS = 2, KEYS = 16, MIXED = 8; // 32 registers
    using Part = __mmask16;
    static INLINE Part part(int n) { return n >= WIDTH ? (Part)0xffff : (Part)((1u << n) - 1); }
    TARGET_AVX512 static INLINE void load(Vector& v, const float* p, Part m) { v = _mm512_maskz_loadu_ps(m, p); }
    TARGET_AVX512 static INLINE void load(Vector& v, const bf16* p, Part m) {
        const __m512i wide = _mm512_maskz_cvtepu16_epi32(m, _mm256_maskz_loadu_epi16(m, p));
        v = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(m, wide, 16));
    }
    TARGET_AVX512 static INLINE void load(Vector& v, const int8_t* p, Part m) {
        v = _mm512_maskz_cvtepi32_ps(m, _mm512_maskz_cvtepi8_epi32(m, _mm_maskz_loadu_epi8(m, p)));
    }
    // e4m3 at half's places is the number times 2^-8; the conversion takes subnormals too.
    TARGET_AVX512 static INLINE void load(Vector& v, const e4m3* p, Part m) {
        const __m256i u = _mm256_maskz_cvtepu8_epi16(m, _mm_maskz_loadu_epi8(m, p));
        const __m256i size = _mm256_and_si256(u, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(u, size), 8);
        const __m256i half = _mm256_or_si256(_mm256_slli_epi16(size, 7), sign);
        v = _mm512_mul_ps(_mm512_maskz_cvtph_ps(m, half), _mm512_set1_ps(256));
    }
    TARGET_AVX512 static INLINE void store(float* p, const Vector& v, Part m) { _mm512_mask_storeu_ps(p, m, v); }
    TARGET_AVX512 static INLINE void keep(__m512& v) { asm("" : "+v"(v)); }
    TARGET_AVX512 static INLINE void load_sum(Vector& v, const float* p) { v = _mm512_maskz_loadu_ps(0xffff, p); }
    TARGET_AVX512 static INLINE void store_sum(float* p, const Vector& v) { _mm512_mask_storeu_ps(p, 0xffff, v); }
    TARGET_AVX512 static INLINE void fill(Vector& v, float a) { v = _mm512_set1_ps(a); }
    TARGET_AVX512 static INLINE void multiply(Vector& v, float s) { v = _mm512_mul_ps(v, _mm512_set1_ps(s)); }
    TARGET_AVX512 static INLINE void multiply_add(Vector& sum, const Vector& a, const Vector& b) {
        sum = _mm512_fmadd_ps(a, b, sum);
    }
    TARGET_AVX512 static INLINE float total(const Vector& sum) {
        __m512 v = _mm512_add_ps(sum, _mm512_maskz_shuffle_f32x4(0xffff, sum, sum, 0x4e));
        v = _mm512_add_ps(v, _mm512_maskz_shuffle_f32x4(0xffff, v, v, 0xb1));
        v = _mm512_add_ps(v, _mm512_maskz_permute_ps(0xffff, v, 0x4e));
        v = _mm512_add_ps(v, _mm512_maskz_permute_ps(0xffff, v, 0xb1));
        return _mm512_cvtss_f32(v);
    }
    // The totals of 16 sums in one vector, for little more than three single ones take; the same additions.
    TARGET_AVX512 static INLINE Vector totals16(const Vector (&s)[16]) {
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
    template <int R, int M, int C> TARGET_AVX512 static INLINE void totals(float* y, const Vector (&sum)[R][M][C]) {
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
#define TARGET TARGET_AVX512
#include "cpu/loops.h"
#undef TARGET
};

// vdpbf16ps multiplies 32 pairs of bf16 and adds neighbours into 16 floats, with no conversion at all. For products of
// bf16 weights.
struct Bf16Dot : Avx512 {
    using Operand = __m512bh;
    template <class T> using Input = bf16;
    static constexpr int WIDTH = 32, ROWS = 4, TOKENS = 4, CHAINS = 1;
    static INLINE void keep(Operand&) {}
    using Avx512::load, Avx512::multiply, Avx512::multiply_add; // for attention's loops, which nobody calls here
    static void multiply(Operand&, float);                      // for INT8's, likewise: nvcc looks at discarded code
    using Part = __mmask32;
    static INLINE Part part(int n) { return n >= WIDTH ? ~0u : (1u << n) - 1; }
    TARGET_AVX512_BF16 static INLINE void load(Operand& v, const bf16* p, Part m) {
        v = (__m512bh)_mm512_maskz_loadu_epi16(m, p);
    }
    TARGET_AVX512_BF16 static INLINE void multiply_add(Vector& sum, const Operand& a, const Operand& b) {
        sum = _mm512_dpbf16_ps(sum, a, b);
    }
    TARGET_AVX512_BF16 static INLINE float total(const Vector& sum) { return Avx512::total(sum); }
#define TARGET TARGET_AVX512_BF16
#include "cpu/loops.h"
#undef TARGET
};
#endif

// A tile. A single token streams W from memory row after row, in the order in which it lies there: this is what gives
// the most of it. For several tokens a few rows are made Inputs once, BLOCK bytes of each at a time.
template <class Set, Format F, class T>
void product_tile(acc<T>* y, WeightRows<T> w, int rows, const void* input, int N) {
    using X = typename Set::template Input<T>;
    constexpr bool PLAIN = F == Format::PLAIN;
    constexpr int BLOCK = 2048 / sizeof(X), C = PLAIN ? Set::CHAINS : GROUP / Set::WIDTH;
    constexpr int R = Set::ROWS, M = Set::TOKENS;
    const X* x = (const X*)input;
    const int in = w.in;
    if (N == 1 && F != Format::INT4) { // (INT4 by floats is for T and sizes that nobody decodes fast)
        for (int r = 0; r < rows; r++, w.skip(1))
            if constexpr (F == Format::INT8)
                Set::template product_row<true, C>(y + r, w.q, w.scale, GROUP, x, in);
            else if constexpr (F == Format::FP8)
                Set::template product_row<true, C>(y + r, (const e4m3*)w.q, w.block_scales(), w.W.group, x, in);
            else Set::template product_row<false, C>(y + r, w.w, w.scale, in, x, in);
        return;
    }
    static thread_local std::vector<X> kept;
    static thread_local std::vector<acc<T>> kept_sums;
    acc<T>* sums = at_least(kept_sums, (size_t)TILE_ROWS * TILE_TOKENS * C * Set::SUMS);
    for (int k = 0; k < in; k += BLOCK) {
        const int columns = std::min(BLOCK, in - k);
        const bool first = k == 0, last = k + columns == in;
        WeightRows<T> at = w;
        for (int r = 0, some; r < rows; r += some, at.skip(some)) {
            some = r + R <= rows ? R : 1;
            const X* wide;
            size_t row = columns;
            if constexpr (PLAIN && std::is_same_v<T, X>) wide = at.w + k, row = in;
            else wide = at.widen(at_least(kept, R * BLOCK), some, k, columns);
            for (int n = 0, tokens; n < N; n += tokens) {
                tokens = n + M <= N ? M : 1;
                acc<T>* part = sums + (size_t)(r * TILE_TOKENS + n * some) * C * Set::SUMS;
                auto loop = some == R ? tokens == M ? Set::template product_block<R, M, C, acc<T>, X, X>
                                                    : Set::template product_block<R, 1, C, acc<T>, X, X>
                                      : tokens == M ? Set::template product_block<1, M, C, acc<T>, X, X>
                                                    : Set::template product_block<1, 1, C, acc<T>, X, X>;
                loop(y + n * TILE_ROWS + r, part, wide, row, x + (size_t)n * in + k, in, columns, first, last);
            }
        }
    }
}
template <class T> using ProductTile = void (*)(acc<T>* y, WeightRows<T> w, int rows, const void* x, int N);
template <Format F, class T> ProductTile<T> choose_tile() { // x: bf16 for Bf16Dot, acc<T> for the others
#ifdef HAVE_SIMD
    if constexpr (F == Format::PLAIN && std::is_same_v<T, bf16>)
        if (instruction_set >= ISA_AVX512_BF16) return product_tile<Bf16Dot, F, T>;
    if constexpr (!std::is_same_v<T, double>) {
        if (instruction_set >= ISA_AVX512) return product_tile<Avx512, F, T>;
        if (instruction_set >= ISA_AVX2) return product_tile<Avx2, F, T>;
    }
#endif
    return product_tile<Plain<acc<T>>, F, T>;
}

#ifdef HAVE_SIMD
// ---- INT8 in integers. In each group of 32, x = step * X with |X| < 2^22, and a power of two that gives the largest
// |X| 22 bits. A bf16 has 8: all within 2^-14 of the largest are held exactly; what smaller ones lose is less than a
// float sum would round away. (The least step is 2^-126.) So a sum of four q X is exact in 32 bits, and only it becomes
// a float: y += scale * step * sum.
INLINE float fix_group(int* X, const bf16* x, int n = GROUP) {
    int largest = 0;
    for (int i = 0; i < n; i++) largest = std::max(largest, x[i].bits & 0x7fff);
    const int exponent = std::max(largest >> 7, 22); // so that neither power of two is subnormal
    const uint32_t step_bits = (uint32_t)(exponent - 21) << 23, inverse_bits = (uint32_t)(275 - exponent) << 23;
    float step, inverse; // 2^(exponent - 148), and 1 / step
    memcpy(&step, &step_bits, 4), memcpy(&inverse, &inverse_bits, 4);
    for (int i = 0; i < n; i += LANES) {
        float16v v;
        load_lanes(v, x + i);
        v = v * inverse + 12582912.f; // 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold
        const int16v fixed = (int16v)v - 0x4b400000;
        memcpy(X + i, &fixed, sizeof fixed);
    }
    return exponent < 255 ? step : NAN; // an infinity or a NaN is among them
}

// How far ahead of their use INT8 weights are asked for, at least, in bytes. (Zen 4: 2 KB is too late; 8 to 64 KB are
// the same.)
constexpr size_t FETCH_AHEAD = 8192;

// Each struct below adds to a set of vectors, for integer_loop of cpu_loops.h:
//     Fixed    COLUMNS numbers of a token as integers; `fix` makes them    Weights  COLUMNS weights of a row
//     load_weights, load_scales   these, and their scales lane by lane     add_product  sum += q X scale step
// vpmaddwd multiplies 16 pairs of 16 bits and adds neighbours: X = 2048 h + l.
struct Avx2Integers : Avx2 {
    static constexpr int COLUMNS = GROUP, ROWS = 2, TOKENS = 2;
    struct alignas(32) Fixed {
        int16_t h[GROUP], l[GROUP];
        float step;
    };
    using Weights = __m256i[2];
    TARGET_AVX2 static void fix(Fixed& out, const bf16* x) {
        int X[GROUP];
        out.step = fix_group(X, x);
        for (int i = 0; i < GROUP; i++) out.h[i] = (int16_t)(X[i] >> 11), out.l[i] = X[i] & 2047;
    }
    TARGET_AVX2 static INLINE void load_weights(Weights& w, const int8_t* q) {
        for (int i = 0; i < 2; i++) w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(q + 16 * i)));
    }
    TARGET_AVX2 static INLINE void load_scales(Vector& s, const bf16* scale) { fill(s, to_acc(*scale)); }
    TARGET_AVX2 static INLINE void add_product(Vector& sum, const Weights& w, const Vector& scale, const Fixed& x) {
        const __m256i *h = (const __m256i*)x.h, *l = (const __m256i*)x.l;
        const __m256i upper = _mm256_add_epi32(_mm256_madd_epi16(w[0], h[0]), _mm256_madd_epi16(w[1], h[1]));
        const __m256i lower = _mm256_add_epi32(_mm256_madd_epi16(w[0], l[0]), _mm256_madd_epi16(w[1], l[1]));
        const __m256i sums = _mm256_add_epi32(_mm256_slli_epi32(upper, 11), lower);
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(scale, _mm256_set1_ps(x.step)), sum);
    }
#define TARGET TARGET_AVX2
#define INTEGERS
#include "cpu/loops.h"
#undef TARGET
};

// vpdpbusd multiplies 64 pairs of bytes and adds them by fours to 16 sums: X = 65536 h + 256 m + l. One factor has no
// sign: m and l, and q + 128 for h; so -128 times the sum of h is where its sums begin. (What overflows on the way is
// a multiple of 2^32.)
struct VnniIntegers : Avx512 {
    static constexpr int COLUMNS = 2 * GROUP, ROWS = 4, TOKENS = 2;
    struct alignas(64) Fixed {
        int8_t h[COLUMNS];
        uint8_t m[COLUMNS], l[COLUMNS];
        int32_t bias[16];
        float step[16];
    };
    struct Weights { __m512i q, unsigned_q; };
    TARGET_AVX512_BF16 static void fix(Fixed& out, const bf16* x) {
        int X[COLUMNS];
        for (int g = 0; g < 2; g++) std::fill_n(out.step + 8 * g, 8, fix_group(X + g * GROUP, x + g * GROUP));
        for (int i = 0; i < COLUMNS; i++)
            out.h[i] = (int8_t)(X[i] >> 16), out.m[i] = (uint8_t)(X[i] >> 8), out.l[i] = (uint8_t)X[i];
        for (int i = 0; i < 16; i++)
            out.bias[i] = -128 * (out.h[4 * i] + out.h[4 * i + 1] + out.h[4 * i + 2] + out.h[4 * i + 3]);
    }
    TARGET_AVX512_BF16 static INLINE void load_weights(Weights& w, const int8_t* q) {
        w.q = _mm512_loadu_si512(q);
        w.unsigned_q = _mm512_xor_si512(w.q, _mm512_set1_epi8(-128));
    }
    TARGET_AVX512_BF16 static INLINE void load_scales(Vector& s, const bf16* scale) { // the first half's, the second's
        int both;
        memcpy(&both, scale, 4);
        const __m512i shift = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
        const __m512i bits = _mm512_maskz_sllv_epi32(0xffff, _mm512_set1_epi32(both), shift);
        s = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
    }
    TARGET_AVX512_BF16 static INLINE void add_product(Vector& sum, const Weights& w, const Vector& scale,
                                                      const Fixed& x) {
        __m512i sums = _mm512_dpbusd_epi32(_mm512_load_si512(x.bias), w.unsigned_q, _mm512_load_si512(x.h));
        sums = _mm512_dpbusd_epi32(_mm512_maskz_slli_epi32(0xffff, sums, 8), _mm512_load_si512(x.m), w.q);
        sums = _mm512_dpbusd_epi32(_mm512_maskz_slli_epi32(0xffff, sums, 8), _mm512_load_si512(x.l), w.q);
        const Vector unit = _mm512_mul_ps(scale, _mm512_load_ps(x.step));
        sum = _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, sums), unit, sum);
    }
#define TARGET TARGET_AVX512_BF16
#include "cpu/loops.h"
#undef TARGET
#undef INTEGERS
};

// x (N,in) as integers; `in` is a multiple of COLUMNS.
template <class Set> const typename Set::Fixed* fix_all(const bf16* x, int N, int in) { // (N, in / COLUMNS)
    static thread_local std::vector<typename Set::Fixed> kept;
    const size_t n = (size_t)N * (in / Set::COLUMNS);
    typename Set::Fixed* out = at_least(kept, n);
    #pragma omp parallel for schedule(static) if (N > 16)
    for (size_t i = 0; i < n; i++) Set::fix(out[i], x + i * Set::COLUMNS);
    return out;
}

// The tile of product_tile, in integers.
template <class Set> void integer_tile(float* y, WeightRows<bf16> w, int rows, const void* input, int N) {
    constexpr int R = Set::ROWS, M = Set::TOKENS;
    const auto* x = (const typename Set::Fixed*)input;
    const size_t steps = w.in / Set::COLUMNS;
    for (int r = 0, some; r < rows; r += some, y += some, w.skip(some)) {
        some = r + R <= rows ? R : 1;
        int n = 0;
        for (; n + M <= N; n += M)
            if (some == R) Set::template integer_loop<R, M>(y + n * TILE_ROWS, w.q, w.scale, x + n * steps, w.in);
            else Set::template integer_loop<1, M>(y + n * TILE_ROWS, w.q, w.scale, x + n * steps, w.in);
        for (; n < N; n++)
            if (some == R) Set::template integer_loop<R, 1>(y + n * TILE_ROWS, w.q, w.scale, x + n * steps, w.in);
            else Set::template integer_loop<1, 1>(y + n * TILE_ROWS, w.q, w.scale, x + n * steps, w.in);
    }
}

// ---- INT4 in integers. Bytes without sign (q) are multiplied by bytes with one, three planes of x: X = 65536 h +
// 256 m + l. The sum over a group of (q - z) X is that of q X, less z times that of X, which is known before: all exact
// in 32 bits for groups of up to 128. y += scale * step * sum. HALF bytes of a row are read at once, and hold two
// numbers each.
template <int G, int HALF> struct alignas(64) FixedPairs { // of 2 * HALF numbers of a token
    static constexpr int COLUMNS = 2 * HALF, TOGETHER = std::min(G, COLUMNS); // numbers that share a step
    int8_t plane[3][2][HALF]; // h, m, l of the numbers in lower halves of bytes, and of those in upper ones
    int32_t sum[2][HALF / 4]; // of four X; for groups of 64 and more, of both halves
    float step[2][HALF / 4];

    // `left` numbers follow, a multiple of 64; zeros stand for those that are missing.
    static void fix(FixedPairs& out, const bf16* x, int left) {
        int X[COLUMNS] = {};
        float step[COLUMNS / TOGETHER] = {};
        for (int i = 0; i < std::min(left, COLUMNS); i += TOGETHER) {
            const int n = std::min(TOGETHER, left - i);
            step[i / TOGETHER] = fix_group(X + i, x + i, n);
            if (std::isnan(step[i / TOGETHER])) std::fill_n(X + i, n, 0); // (they are no numbers)
        }
        memset(out.sum, 0, sizeof out.sum);
        for (int half = 0; half < 2; half++)
            for (int j = 0; j < HALF; j++) {
                const int column = j / 32 * 64 + half * 32 + j % 32;
                for (int p = 2, rest = X[column]; p >= 0; p--, rest = (rest + 128) >> 8)
                    out.plane[p][half][j] = (int8_t)rest;
                out.sum[G == 32 ? half : 0][j / 4] += X[column];
                out.step[half][j / 4] = step[column / TOGETHER];
            }
    }
};

// Each struct below adds to a set of vectors, for pairs_loop of cpu_loops.h:
//     Weights     HALF bytes of a row as two vectors of numbers; load_pairs    Scales  those of the row's groups there
//     add_pairs   sum += scale * step * (q - z) X
struct Avx2Pairs : Avx2 {
    static constexpr int HALF = 32, ROWS = 2, TOKENS = 2;
    template <int G> using Fixed = FixedPairs<G, HALF>;
    using Integers = __m256i;
    using Weights = __m256i[2];
    template <int G> struct Scales { Vector s[G == 32 ? 2 : 1]; __m256i zero[G == 32 ? 2 : 1]; };
    TARGET_AVX2 static INLINE void load_pairs(Weights& w, const int8_t* q, int) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)q), low = _mm256_set1_epi8(15);
        w[0] = _mm256_and_si256(both, low);
        w[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    // A half that is finite; as half_to_float has it.
    TARGET_AVX2 static INLINE void widen_half(Vector& s, uint16_t h) {
        const __m256i u = _mm256_set1_epi32((h & 0x7fff) << 13 | (h & 0x8000) << 16);
        s = _mm256_mul_ps(_mm256_castsi256_ps(u), _mm256_set1_ps(0x1p112f));
    }
    template <int G>
    TARGET_AVX2 static INLINE void load_scales(Scales<G>& s, const uint16_t* scale, const uint8_t* zero, int column) {
        for (int i = 0; i < (G == 32 ? 2 : 1); i++) {
            widen_half(s.s[i], scale[column / G + i]);
            s.zero[i] = _mm256_set1_epi32(zero ? zero[column / G + i] : 8);
        }
    }
    // The sums of four q X each: the parts from `first` to `last`.
    template <int FIRST, int LAST, class F>
    TARGET_AVX2 static INLINE void four_sums(__m256i& out, const Weights& w, const F& x) {
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
    TARGET_AVX2 static INLINE void add_group(Vector& sum, __m256i sums, const Vector& scale, const __m256i& zero,
                                             const int32_t* all, const float* step) {
        sums = _mm256_sub_epi32(sums, _mm256_mullo_epi32(zero, _mm256_load_si256((const __m256i*)all)));
        // (The step first: scale * step may be subnormal.)
        sum = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_load_ps(step)), scale, sum);
    }
#define TARGET TARGET_AVX2
#define PAIRS
#include "cpu/loops.h"
#undef TARGET
};

struct VnniPairs : Avx512 {
    static constexpr int HALF = 64, ROWS = 4, TOKENS = 2;
    template <int G> using Fixed = FixedPairs<G, HALF>;
    using Integers = __m512i;
    using Weights = __m512i[2];
    template <int G> struct Scales { Vector s[G == 32 ? 2 : 1]; __m512i zero[G == 32 ? 2 : 1]; };
    TARGET_AVX512_BF16 static INLINE void load_pairs(Weights& w, const int8_t* q, int left) {
        const __mmask16 some = left < 2 * HALF ? 0xff : 0xffff;
        const __m512i both = _mm512_maskz_loadu_epi32(some, q), low = _mm512_set1_epi8(15);
        w[0] = _mm512_and_si512(both, low);
        w[1] = _mm512_and_si512(_mm512_maskz_srli_epi16(~0u, both, 4), low);
    }
    // Lanes 0-7 have the scale of their columns' group, 8-15 that of columns 64 further on. Past the end of a row some
    // other row's are read, and multiplied by zeros.
    template <int G>
    TARGET_AVX512_BF16 static INLINE void load_scales(Scales<G>& s, const uint16_t* scale, const uint8_t* zero,
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
    TARGET_AVX512_BF16 static INLINE void four_sums(__m512i& out, const Weights& w, const F& x) {
        out = _mm512_setzero_si512();
        UNROLL for (int p = 0; p < 3; p++) {
            if (p) out = _mm512_maskz_slli_epi32(0xffff, out, 8);
            out = _mm512_dpbusd_epi32(out, w[FIRST], _mm512_load_si512(x.plane[p][FIRST]));
            if (LAST > FIRST) out = _mm512_dpbusd_epi32(out, w[LAST], _mm512_load_si512(x.plane[p][LAST]));
        }
    }
    TARGET_AVX512_BF16 static INLINE void add_group(Vector& sum, __m512i sums, const Vector& scale, const __m512i& zero,
                                                    const int32_t* all, const float* step) {
        sums = _mm512_sub_epi32(sums, _mm512_mullo_epi32(zero, _mm512_load_si512(all)));
        const Vector stepped = _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, sums), _mm512_load_ps(step));
        sum = _mm512_fmadd_ps(stepped, scale, sum);
    }
#define TARGET TARGET_AVX512_BF16
#include "cpu/loops.h"
#undef TARGET
#undef PAIRS
};

// x (N,in) as integers; `in` is a multiple of 64.
template <class Fixed> const Fixed* fix_all_pairs(const bf16* x, int N, int in) {
    static thread_local std::vector<Fixed> kept;
    const size_t steps = (in + Fixed::COLUMNS - 1) / Fixed::COLUMNS, n = N * steps;
    Fixed* out = at_least(kept, n);
    #pragma omp parallel for schedule(static) if (N > 16)
    for (size_t i = 0; i < n; i++) {
        const int column = (int)(i % steps) * Fixed::COLUMNS;
        Fixed::fix(out[i], x + i / steps * in + column, in - column);
    }
    return out;
}

// The tile of product_tile, in integers.
template <class Set, int G> void pairs_tile(float* y, WeightRows<bf16> w, int rows, const void* input, int N) {
    constexpr int R = Set::ROWS, M = Set::TOKENS;
    const auto* x = (const typename Set::template Fixed<G>*)input;
    const size_t steps = (w.in + 2 * Set::HALF - 1) / (2 * Set::HALF);
    for (int r = 0, some; r < rows; r += some, y += some, w.skip(some)) {
        some = r + R <= rows ? R : 1;
        for (int n = 0, tokens; n < N; n += tokens) {
            tokens = n + M <= N ? M : 1;
            auto loop = some == R ? tokens == M ? Set::template pairs_loop<G, R, M> : Set::template pairs_loop<G, R, 1>
                                  : tokens == M ? Set::template pairs_loop<G, 1, M> : Set::template pairs_loop<G, 1, 1>;
            loop(y + n * TILE_ROWS, w.q, w.half, w.zero, x + n * steps, w.in);
        }
    }
}

// ---- INT8 on CPUs with AMX, whose tiles multiply signed bytes and sum a whole group: X = 65536 h + 256 m + l, three
// planes. The sums H, M, L of q h, q m, q l over a group are integers, the same in any order; so vectors, for a single
// token, and tiles of AMX give the same bits:
//     y = fma(scale_g, step_g * fma(256 H_g + M_g, 256, L_g), y)    group after group.
// For `in` a multiple of 64.
struct alignas(64) FixedX { // two groups of one token
    static constexpr int COLUMNS = 2 * GROUP;
    using Fixed = FixedX; // for fix_all
    int8_t plane[3][COLUMNS];   // h, m, l
    int32_t upper[2], lower[2]; // 128 times the sums of 256 h + m, and of l
    float step[2];
    TARGET_AVX512_BF16 static void fix(FixedX& out, const bf16* x) {
        for (int g = 0; g < 2; g++) {
            int X[GROUP], sum[3] = {};
            out.step[g] = fix_group(X, x + g * GROUP);
            for (int i = 0; i < GROUP; i++)
                for (int p = 2, left = X[i]; p >= 0; p--, left = (left + 128) >> 8)
                    sum[p] += out.plane[p][g * GROUP + i] = (int8_t)left;
            out.upper[g] = 128 * (256 * sum[0] + sum[1]), out.lower[g] = 128 * sum[2];
        }
    }
};

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

// 256 h + m and l of x by 64 weights of one row: 16 sums each, of which 8 are a group's. The instruction wants one
// factor without sign: q + 128; and 128 times the sum of x is subtracted later.
TARGET_AVX512_BF16 INLINE void dot64(__m512i& upper, __m512i& lower, const int8_t* q, const FixedX& x) {
    const __m512i u = _mm512_xor_si512(_mm512_loadu_si512(q), _mm512_set1_epi8(-128));
    lower = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, _mm512_load_si512(x.plane[2]));
    upper = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, _mm512_load_si512(x.plane[0]));
    upper = _mm512_dpbusd_epi32(_mm512_maskz_slli_epi32(0xffff, upper, 8), u, _mm512_load_si512(x.plane[1]));
}

// step * fma(256 H + M, 256, L) of 16 groups, as sum_halves orders them.
TARGET_AVX512_BF16 INLINE __m512 group_sums(const __m512i (&upper)[8], const __m512i (&lower)[8], __m512i upper128,
                                            __m512i lower128, __m512 step) {
    const __m512 a = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(sum_halves(upper), upper128));
    const __m512 b = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(sum_halves(lower), lower128));
    return _mm512_mul_ps(step, _mm512_fmadd_ps(a, _mm512_set1_ps(256), b));
}

// 8 rows at a time, two groups of each. The rows are from all over the tile, and a single token's product asks for
// those of the next tile: the memory of these CPUs gives the most when it is read at several places.
template <bool ONE_TOKEN>
TARGET_AVX512_BF16 void amx_vnni_tile(float* y, WeightRows<bf16> w, int rows, const void* input, int N) {
    const FixedX* x = (const FixedX*)input;
    const int in = w.in, groups = in / GROUP, apart = (rows + 7) / 8;
    for (int first = 0; first < apart; first++) {
        const int8_t* q[8];
        int at[8], row[8];
        for (int r = 0; r < 8; r++) { // (the last row stands for those that are missing)
            row[r] = std::min(first + r * apart, rows - 1);
            q[r] = w.q + (size_t)row[r] * in, at[r] = row[r] * groups;
        }
        const __m256i scale_at = _mm256_loadu_si256((const __m256i*)at);
        for (int n = 0; n < N; n++) {
            __m256 total = _mm256_setzero_ps();
            for (int k = 0; k < in; k += 64) {
                const FixedX& some = x[(size_t)n * (in / 64) + k / 64];
                __m512i upper[8], lower[8];
                UNROLL for (int r = 0; r < 8; r++) {
                    if (ONE_TOKEN) _mm_prefetch((const char*)(q[r] + (size_t)TILE_ROWS * in + k), _MM_HINT_T0);
                    dot64(upper[r], lower[r], q[r] + k, some);
                }
                __m512 sum = group_sums(upper, lower, per_group(some.upper), per_group(some.lower),
                                        _mm512_castsi512_ps(per_group(some.step)));
                sum = _mm512_maskz_shuffle_f32x4(0xffff, sum, sum, 0xd8); // a group's 8 rows together
                // both groups' scales are the halves of one word
                const __m256i scales = _mm256_i32gather_epi32((const int*)(w.scale + k / GROUP), scale_at, 2);
                const __m256 scale0 = _mm256_castsi256_ps(_mm256_slli_epi32(scales, 16));
                const __m256 scale1 = _mm256_castsi256_ps(_mm256_and_si256(scales, _mm256_set1_epi32(-65536)));
                total = _mm256_fmadd_ps(scale0, _mm512_maskz_extractf32x8_ps(0xff, sum, 0), total);
                total = _mm256_fmadd_ps(scale1, _mm512_maskz_extractf32x8_ps(0xff, sum, 1), total);
            }
            float sums[8];
            _mm256_storeu_ps(sums, total);
            for (int r = 0; r < 8; r++) y[n * TILE_ROWS + row[r]] = sums[r];
        }
    }
}

// ---- AMX: a tile register is 16 rows of 64 bytes; tdpbf16ps multiplies 16 rows of W by 16 tokens, 32 deep, at once.
// Rows of W are loaded from where they are. Of x it wants, row after row, the pairs (x[2i], x[2i+1]) of all 16 tokens
// side by side: `amx_pack`. A single token is packed as it is: decoding is the same code, one column wide, and gets the
// bits that it has in any batch. For `in` a multiple of 32 and 32 rows; else Bf16Dot.
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

// x (N,in) to (N/16, in/2, 16) pairs, zeros for the tokens that are missing in the last 16. N = 1: x itself.
inline const bf16* amx_pack(const bf16* x, int N, int in) {
    if (N == 1) return x;
    static thread_local std::vector<uint32_t> kept;
    const int tiles = (N + 15) / 16;
    uint32_t* out = at_least(kept, (size_t)tiles * in * 8);
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int t = 0; t < tiles; t++)
        for (int n = 0; n < 16; n++)
            for (int i = 0; i < in / 2; i++) {
                uint32_t pair = 0;
                if (t * 16 + n < N) memcpy(&pair, x + (size_t)(t * 16 + n) * in + 2 * i, 4);
                out[((size_t)t * in / 2 + i) * 16 + n] = pair;
            }
    return (const bf16*)out;
}

// Tiles 0-3: sums, 4 and 5: rows of W, 6 and 7: tokens. `width`: bytes of a row of tokens or sums.
TARGET_AMX inline void amx_configure(int width) {
    AmxConfig().tiles(0, 7, 16, width).tiles(4, 5, 16, 64).load();
}

// One token: two columns of sums.
TARGET_AMX inline void amx_column(float* y, const bf16* w, const bf16* x, int in) {
    const bf16* w2 = w + (size_t)16 * in;
    _tile_zero(0);
    _tile_zero(1);
    for (int i = 0; i < in; i += 32) {
        _tile_loadd(4, w + i, in * 2);
        _tile_loadd(6, x + i, 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w2 + i, in * 2);
        _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, y, 4);
    _tile_stored(1, y + 16, 4);
}

// 32 rows by 32 tokens, or by 16 (then `two` is false).
TARGET_AMX inline void amx_square(float* sums, const bf16* w, const bf16* x, int in, bool two) { // sums (rows, tokens)
    const bf16 *w2 = w + (size_t)16 * in, *x2 = two ? x + (size_t)16 * in : x;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < in; i += 32) {
        _tile_loadd(4, w + i, in * 2);
        _tile_loadd(6, x + (size_t)i * 16, 64);
        _tile_loadd(5, w2 + i, in * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (two) {
            _tile_loadd(7, x2 + (size_t)i * 16, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16 * 32, 128);
    _tile_stored(2, sums + 16, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}

// x as amx_pack made it of a batch of one token (`one`) or more, from a multiple of 16 tokens on.
TARGET_AMX inline void product_tile_amx(float* y, const bf16* w, const bf16* x, bool one, int N, int in) {
    amx_configure(one ? 4 : 64);
    if (one) amx_column(y, w, x, in);
    for (int n = 0; n < N && !one; n += 32) {
        float sums[TILE_ROWS * 32];
        amx_square(sums, w, x + (size_t)n * in, in, N - n > 16);
        for (int m = 0; m < std::min(32, N - n); m++)
            for (int r = 0; r < TILE_ROWS; r++) y[(n + m) * TILE_ROWS + r] = sums[r * 32 + m];
    }
    _tile_release();
}

// ---- AMX for INT8 weights: what 16 tokens have in a group, as tdpbssd takes it, 4 neighbours together.
struct alignas(64) FixedTile {
    int8_t plane[3][8][16][4]; // (planes, fours, tokens, 4)
    float step[16];
};
inline const FixedTile* amx_pack_int8(const FixedX* x, int N, int in) { // (N/16, in/32)
    static thread_local std::vector<FixedTile> kept;
    const int tiles = (N + 15) / 16, groups = in / GROUP;
    FixedTile* out = at_least(kept, (size_t)tiles * groups);
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int t = 0; t < tiles; t++)
        for (int g = 0; g < groups; g++)
            for (int n = 0; n < 16; n++) {
                const size_t token = std::min(t * 16 + n, N - 1); // (nobody reads what is past N)
                const FixedX& from = x[token * groups / 2 + g / 2];
                FixedTile& to = out[(size_t)t * groups + g];
                to.step[n] = from.step[g % 2];
                for (int p = 0; p < 3; p++)
                    for (int k = 0; k < 8; k++) memcpy(to.plane[p][k][n], from.plane[p] + g % 2 * GROUP + 4 * k, 4);
            }
    return out;
}

// The sums H, M, L of one group, 16 rows by 16 tokens each, in tiles A, B and C. (A tile's name is no variable.)
#define AMX_GROUP(A, B, C, sums, q, in, x) \
    _tile_zero(A);                         \
    _tile_zero(B);                         \
    _tile_zero(C);                         \
    _tile_loadd(6, q, in);                 \
    _tile_loadd(7, (x).plane[0], 64);      \
    _tile_dpbssd(A, 6, 7);                 \
    _tile_loadd(7, (x).plane[1], 64);      \
    _tile_dpbssd(B, 6, 7);                 \
    _tile_loadd(7, (x).plane[2], 64);      \
    _tile_dpbssd(C, 6, 7);                 \
    _tile_stored(A, (sums)[0], 64);        \
    _tile_stored(B, (sums)[1], 64);        \
    _tile_stored(C, (sums)[2], 64)

// total += scale * step * fma(256 H + M, 256, L), group after group, for 16 rows by 16 tokens.
TARGET_AMX INLINE void amx_add_groups(float (*total)[16],              // (rows, tokens) in place
                                      const int32_t (*sums)[3][16][16], // (groups, planes, rows, tokens)
                                      const float (*scale)[16],        // (groups, rows)
                                      const FixedTile* x, int groups) {
    for (int r = 0; r < 16; r += 4) {
        __m512 sum[4];
        for (int i = 0; i < 4; i++) sum[i] = _mm512_load_ps(total[r + i]);
        for (int g = 0; g < groups; g++) {
            const __m512 step = _mm512_load_ps(x[g].step);
            for (int i = 0; i < 4; i++) {
                const __m512i h = _mm512_load_si512(sums[g][0][r + i]), m = _mm512_load_si512(sums[g][1][r + i]);
                const __m512i upper = _mm512_add_epi32(_mm512_maskz_slli_epi32(0xffff, h, 8), m);
                const __m512 a = _mm512_maskz_cvtepi32_ps(0xffff, upper);
                const __m512 b = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_load_si512(sums[g][2][r + i]));
                const __m512 of_group = _mm512_mul_ps(step, _mm512_fmadd_ps(a, _mm512_set1_ps(256), b));
                sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(scale[g][r + i]), of_group, sum[i]);
            }
        }
        for (int i = 0; i < 4; i++) _mm512_store_ps(total[r + i], sum[i]);
    }
}

// 32 rows of INT8 and N <= TILE_TOKENS tokens, 16 by 16 at a time; the bits of amx_vnni_tile. Four groups go through
// the tiles, alternating between two sets of them, before vectors take the sums: what a tile has stored cannot be
// loaded soon.
TARGET_AMX inline void product_tile_amx_int8(float* y, const WeightRows<bf16>& w, const FixedTile* x, int N) {
    constexpr int TOGETHER = 4;
    const int in = w.in, groups = in / GROUP;
    alignas(64) float total[TILE_TOKENS / 16][16][16]; // (tokens / 16, rows, tokens)
    alignas(64) int32_t sums[TOGETHER][3][16][16];     // (groups, planes, rows, tokens)
    AmxConfig().tiles(0, 5, 16, 64).tiles(6, 6, 16, GROUP).tiles(7, 7, 8, 64).load();
    for (int half = 0; half < 2; half++) {
        memset(total, 0, sizeof total);
        for (int g0 = 0; g0 < groups; g0 += TOGETHER) {
            const int count = std::min(TOGETHER, groups - g0); // even
            float scale[TOGETHER][16];
            for (int r = 0; r < 16; r++)
                for (int g = 0; g < count; g++)
                    scale[g][r] = to_acc(w.scale[(size_t)(half * 16 + r) * groups + g0 + g]);
            for (int t = 0; t * 16 < N; t++) {
                const FixedTile* tile = x + (size_t)t * groups + g0;
                const int8_t* q = w.q + (size_t)half * 16 * in + g0 * GROUP;
                for (int g = 0; g < count; g += 2) {
                    AMX_GROUP(0, 1, 2, sums[g], q + g * GROUP, in, tile[g]);
                    AMX_GROUP(3, 4, 5, sums[g + 1], q + (g + 1) * GROUP, in, tile[g + 1]);
                }
                amx_add_groups(total[t], sums, scale, tile, count);
            }
        }
        for (int n = 0; n < N; n++)
            for (int r = 0; r < 16; r++) y[n * TILE_ROWS + half * 16 + r] = total[n / 16][r][n % 16];
    }
    _tile_release();
}
#undef AMX_GROUP
#endif // HAVE_SIMD

// =========================================================================================================== Products

// x as the tiles of a product want it, and which tiles these are.
template <class T> struct ProductInput {
    int N, in;
    bool streams;               // a single token's rows are read one after another, so that tasks can be of few rows
    ProductTile<T> vectors;     // for `operand`: Bf16Dot's x itself, integers, or floats
    const uint8_t* operand;
    size_t token_bytes;         // of it
#ifdef HAVE_SIMD
    const bf16* packed = nullptr;            // for AMX, which takes whole tiles
    const FixedTile* fixed_packed = nullptr; // for AMX with integers
#endif

    ProductInput(const Linear<T>& W, const T* x, int N) : N(N), in(W.in), streams(N == 1) {
        const bool int8 = W.format == Format::INT8, plain = W.format == Format::PLAIN;
#ifdef HAVE_SIMD
        if constexpr (std::is_same_v<T, bf16>) {
            const bool amx = instruction_set >= ISA_AMX;
            if (W.format == Format::INT4 && in % 64 == 0 && instruction_set >= ISA_AVX2) {
                if (W.group == 32) set_pairs<32>(x);
                else if (W.group == 64) set_pairs<64>(x);
                else set_pairs<128>(x);
                return;
            }
            if (int8 && in % FixedX::COLUMNS == 0 && amx) {
                const FixedX* fixed = set_operand<FixedX>(N == 1 ? amx_vnni_tile<true> : amx_vnni_tile<false>, x);
                if (N > 1) fixed_packed = amx_pack_int8(fixed, N, in);
                streams = false;
                return;
            }
            if (int8 && in % VnniIntegers::COLUMNS == 0 && instruction_set >= ISA_AVX512_BF16) {
                set_operand<VnniIntegers>(integer_tile<VnniIntegers>, x);
                return;
            }
            if (int8 && in % Avx2Integers::COLUMNS == 0 && instruction_set >= ISA_AVX2) {
                set_operand<Avx2Integers>(integer_tile<Avx2Integers>, x);
                return;
            }
            if (plain && in % 32 == 0 && amx) packed = amx_pack(x, N, in), streams = false;
            if (plain && instruction_set >= ISA_AVX512_BF16) {
                vectors = choose_tile<Format::PLAIN, T>(), operand = (const uint8_t*)x, token_bytes = in * sizeof(T);
                return;
            }
        }
#endif
        vectors = plain ? choose_tile<Format::PLAIN, T>() : int8 ? choose_tile<Format::INT8, T>()
                  : W.format == Format::INT4 ? choose_tile<Format::INT4, T>() : choose_tile<Format::FP8, T>();
        token_bytes = in * sizeof(acc<T>);
        if constexpr (std::is_same_v<T, acc<T>>) operand = (const uint8_t*)x;
        else operand = (const uint8_t*)widen_x(x, (size_t)N * in);
    }
#ifdef HAVE_SIMD
    template <class Set> const typename Set::Fixed* set_operand(ProductTile<T> tile, const T* x) {
        const typename Set::Fixed* fixed = fix_all<Set>(x, N, in);
        vectors = tile, operand = (const uint8_t*)fixed, token_bytes = in / Set::COLUMNS * sizeof *fixed;
        return fixed;
    }
    template <int G> void set_pairs(const T* x) {
        instruction_set >= ISA_AVX512_BF16 ? set_pairs<VnniPairs, G>(x) : set_pairs<Avx2Pairs, G>(x);
    }
    template <class Set, int G> void set_pairs(const T* x) {
        using Fixed = typename Set::template Fixed<G>;
        operand = (const uint8_t*)fix_all_pairs<Fixed>(x, N, in), vectors = pairs_tile<Set, G>;
        token_bytes = (in + Fixed::COLUMNS - 1) / Fixed::COLUMNS * sizeof(Fixed);
    }
#endif
    static const acc<T>* widen_x(const T* x, size_t n) {
        static thread_local std::vector<acc<T>> kept;
        acc<T>* out = at_least(kept, n);
        #pragma omp parallel for schedule(static) if (n > 50000)
        for (size_t i = 0; i < n; i++) out[i] = to_acc(x[i]);
        return out;
    }
    // The tile of `rows` rows at w and `count` tokens from n on.
    void tile(acc<T>* y, const WeightRows<T>& w, int rows, int n, int count) const {
#ifdef HAVE_SIMD
        if constexpr (std::is_same_v<T, bf16>) {
            const size_t before = (size_t)n * in;
            if (fixed_packed && rows == TILE_ROWS)
                return product_tile_amx_int8(y, w, fixed_packed + before / (16 * GROUP), count);
            if (packed && rows == TILE_ROWS) return product_tile_amx(y, w.w, packed + before, N == 1, count, in);
        }
#endif
        vectors(y, w, rows, operand + n * token_bytes, count);
    }
};

// A task is a few rows of W: a thread streams its own rows, and holds them in its cache while the tokens pass,
// TILE_TOKENS at a time. Each tile y goes to use(y, block, row, rows, token, tokens): `rows` rows of W from `row` on,
// all of one block; y[n * TILE_ROWS + i] is of token + n and row + i.
template <class T, class Use> void product_tiles(const Linear<T>& W, const T* x, int N, Use use) {
    const ProductInput<T> input(W, x, N);
    // Tasks of 32 rows; fewer for a single token, so that they spread evenly (AMX wants its 32); more when there are
    // tokens enough to make re-reading x cost something.
    int task_rows = input.streams ? 8 : TILE_ROWS, first_task[4] = {};
    while (N >= TILE_TOKENS && task_rows < 128 && W.out() / (2 * task_rows) >= 2 * thread_count()) task_rows *= 2;
    for (int b = 0; b < 3; b++) first_task[b + 1] = first_task[b] + (W.rows[b] + task_rows - 1) / task_rows;
    #pragma omp parallel for schedule(static) if ((size_t)W.out() * W.in * N > 50000)
    for (int task = 0; task < first_task[3]; task++) {
        int b = 0;
        while (task >= first_task[b + 1]) b++;
        const int r0 = (task - first_task[b]) * task_rows, r1 = std::min(W.rows[b], r0 + task_rows);
        const int base = W.first_row(b);
        acc<T> y[TILE_ROWS * TILE_TOKENS];
        for (int n0 = 0; n0 < N; n0 += TILE_TOKENS) {
            const int tokens = std::min(TILE_TOKENS, N - n0);
            for (int r = r0; r < r1; r += TILE_ROWS) {
                const int rows = std::min(TILE_ROWS, r1 - r);
                input.tile(y, WeightRows<T>(W, b, r), rows, n0, tokens);
                use(y, b, base + r, rows, n0, tokens);
            }
        }
    }
}
template <class T, class Store>
void product_cpu(const Linear<T>& W, const T* x, int N, Store store) {
    product_tiles(W, x, N, [&](const acc<T>* y, int, int row, int rows, int token, int tokens) {
        for (int n = 0; n < tokens; n++)
            for (int i = 0; i < rows; i++) store(token + n, row + i, y[n * TILE_ROWS + i]);
    });
}

// What module j of W's adapter keeps of x, in scratch, or x itself: what is summed over it is to be multiplied by
// drop_scale.
template <class T> acc<T> drop_scale(const Adapter<T>& a) { return a.dropout ? 1 / (1 - (acc<T>)a.dropout->p) : 1; }
template <class T> const T* dropped_cpu(const T* x, const Linear<T>& W, int j, int N) {
    const Dropout* d = W.adapter.dropout;
    if (!d) return x;
    const int in = W.in, module = W.adapter.module[j];
    static thread_local std::vector<T> kept;
    T* out = at_least(kept, (size_t)N * in);
    #pragma omp parallel for schedule(static) if ((size_t)N * in > 2000)
    for (int n = 0; n < N; n++)
        for (int k = 0; k < in; k += 8) {
            const uint32_t mask = dropout_mask(*d, d->token[n], module, k / 8);
            for (int i = k; i < std::min(in, k + 8); i++) {
                const size_t at = (size_t)n * in + i;
                out[at] = mask >> (i - k) & 1 ? x[at] : to_stored<T>((acc<T>)0);
            }
        }
    return out;
}

template <class T> void lora_down_cpu(Context&, T* h, const T* x, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t ld = a.width();
    const int together = a.dropout ? 1 : a.modules; // modules that see the same x
    const acc<T> scale = drop_scale(a);
    for (int j = 0; j < a.modules; j += together) {
        Linear<T> A;
        A.w[0] = a.A + (size_t)j * a.rank * W.in, A.rows[0] = together * a.rank, A.in = W.in;
        T* column = h + (size_t)j * a.rank;
        product_cpu(A, dropped_cpu(x, W, j, N), N,
                    [=](int n, int r, acc<T> y) { column[n * ld + r] = to_stored<T>(y * scale); });
    }
}

// y[i] += B[row + i] . h, i < rows: an adapter's part of some rows of one block and a token. Each sum is that of `dot`,
// but those of 16 rows are made at once.
template <class T>
INLINE void add_adapter(acc<T>* y, const Adapter<T>& a, int block, int row, int rows, const T* h) { // h: (m * rank)
    const size_t ld = a.width();
    for (int j = 0; j < a.modules; j++) {
        if (a.block[j] != block) continue;
        const T *x = h + j * a.rank, *B = a.B + row * ld + j * a.rank;
        for (int r = 0; r < rows; r += LANES) { // (past the end the last row is taken again)
            const int some = std::min(LANES, rows - r);
            lanes<T> sum[LANES] = {}, u, v;
            int i = 0;
            for (; i + LANES <= a.rank; i += LANES) {
                load_lanes(u, x + i);
                UNROLL for (int k = 0; k < LANES; k++)
                    load_lanes(v, B + (r + std::min(k, some - 1)) * ld + i), sum[k] += u * v;
            }
            if (i < a.rank) {
                load_some(u, x + i, a.rank - i);
                UNROLL for (int k = 0; k < LANES; k++)
                    load_some(v, B + (r + std::min(k, some - 1)) * ld + i, a.rank - i), sum[k] += u * v;
            }
            sum_lanes_of_each(sum);
            for (int k = 0; k < some; k++) y[r + k] += sum[0][k];
        }
    }
}

// x W^T + s B h, where of(n) is token n's adapter, or null.
template <class T, class Of, class Store>
void product_with_adapters(const Linear<T>& W, const T* x, int N, Of of, Store store) {
    product_tiles(W, x, N, [&](acc<T>* y, int block, int row, int rows, int token, int tokens) {
        for (int n = token; n < token + tokens; n++, y += TILE_ROWS) {
            if (const Adapter<T>* a = of(n)) add_adapter(y, *a, block, row, rows, a->h + n * a->width());
            for (int i = 0; i < rows; i++) store(n, row + i, y[i]);
        }
    });
}

template <class T, class Store>
void adapted_product_cpu(Context& ctx, const Linear<T>& W, const T* x, int N, Store store) {
    if (!W.adapter.rank) return product_cpu(W, x, N, store);
    lora_down_cpu(ctx, W.adapter.h, x, W, N);
    product_with_adapters(W, x, N, [&](int) { return &W.adapter; }, store);
}

template <class T> void linear_cpu(Context& ctx, T* out, const T* x, const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product_cpu(ctx, W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = to_stored<T>(y); });
}

template <class T>
void linear_add_cpu(Context& ctx, acc<T>* out, const acc<T>* residual, const T* x, const Linear<T>& W, int N) {
    const size_t ld = W.out();
    adapted_product_cpu(ctx, W, x, N, [=](int n, int r, acc<T> y) { out[n * ld + r] = residual[n * ld + r] + y; });
}

// ======================================================================================================== Forward ops

template <class T>
void rmsnorm_cpu(Context&, T* out, const acc<T>* x, const T* w, int N, int C, float eps) {
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const acc<T>* row = x + (size_t)n * C;
        const acc<T> r = inverse_rms(row, C, eps);
        for (int i = 0; i < C; i++) out[(size_t)n * C + i] = to_stored<T>(row[i] * r * to_acc(w[i]));
    }
}

template <class T>
void norm_linear_cpu(Context& ctx, T* out, T* normed, const acc<T>* x, const T* w, const Linear<T>& W, int N,
                     float eps) {
    rmsnorm_cpu(ctx, normed, x, w, N, W.in, eps);
    linear_cpu(ctx, out, normed, W, N);
}

template <class T>
void qknorm_rope_kv_cpu(Context&, T* q, T* keys, T* values, const T* qkv, const T* q_weight, const T* k_weight,
                        const acc<T>* rope, const Batch& b, int H, int K, int D, float eps) {
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++) {
        if (b.seq[n] < 0) continue;
        const T* row = qkv + (size_t)n * (H + 2 * K) * D;
        const acc<T>* angle = rope + (size_t)b.pos[n] * D;
        auto norm_rope = [&](T* out, const T* head, const T* w) {
            const acc<T> r = inverse_rms(head, D, eps);
            for (int i = 0; i < D / 2; i++) {
                const acc<T> u = to_acc(head[i]) * r * to_acc(w[i]);
                const acc<T> v = to_acc(head[i + D / 2]) * r * to_acc(w[i + D / 2]);
                out[i] = to_stored<T>(u * angle[2 * i] - v * angle[2 * i + 1]);
                out[i + D / 2] = to_stored<T>(v * angle[2 * i] + u * angle[2 * i + 1]);
            }
        };
        for (int h = 0; h < H; h++) norm_rope(q + ((size_t)n * H + h) * D, row + h * D, q_weight);
        for (int h = 0; h < K; h++) {
            T key[MAX_HEAD];
            norm_rope(key, row + (H + h) * D, k_weight);
            store_kv(keys, b, b.slot[n], h, key, K, D);
            store_kv(values, b, b.slot[n], h, row + (H + K + h) * D, K, D);
        }
    }
}

// ---- attention, page by page with a running maximum (Milakov & Gimelshein, "Online normalizer calculation for
// softmax", 2018): when it grows, what was summed so far is scaled down. Every CPU_SPLIT keys the sums start anew, and
// are then added to those of the splits before in the same way. So the splits of one row can be tasks of their own,
// where there are few rows (decoding at long contexts), and the row's bits are the same.
constexpr int ATTENTION_ROWS = 32; // query rows that share a page while it is in the first-level cache
constexpr int CPU_SPLIT = 512;     // keys; whole pages

// Numerator and denominator of a softmax over some keys, both divided by e^maximum.
template <class T> struct AttentionSum {
    alignas(64) acc<T> out[MAX_HEAD];
    acc<T> maximum, sum;

    void clear(int D) {
        std::fill(out, out + D, (acc<T>)0);
        maximum = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
    }
    void add(const AttentionSum& o, int D) { // other keys
        const acc<T> top = std::max(maximum, o.maximum);
        const acc<T> mine = std::exp(maximum - top), theirs = std::exp(o.maximum - top);
        for (int i = 0; i < D; i++) out[i] = out[i] * mine + o.out[i] * theirs;
        maximum = top, sum = sum * mine + o.sum * theirs;
    }
};
template <class T> struct AttentionRow { // a query head of a token
    alignas(64) acc<T> q[MAX_HEAD];
    AttentionSum<T> split, total;
    int length; // keys it sees
};

// One layer's attention. A task is up to ATTENTION_ROWS rows, `tokens` tokens by `heads` query heads of one KV head,
// and all their keys or one split of them.
template <class T> struct Attention {
    using A = acc<T>;
    T* out;
    A* lse;
    const T *q, *keys, *values;
    const Batch& b;
    int H, K, D, G, heads, tokens, head_tiles, token_tiles;
    size_t work = 0;                 // multiplications, about
    int splits = 1;                  // of a row into tasks: 1, or as many as the longest row has
    AttentionSum<T>* sums = nullptr; // (N,H,splits) if these are more than one
    template <class S> struct Page { const S *keys, *values; }; // (16,D) each, as they are stored or widened to A
    template <class S> struct Loops {
        void (*scores)(A*, const A*, const S*, const S*, int);
        void (*mix)(A*, A, const A*, const S*, const S*, int);
        template <class Set> void choose(int D) { // 128: every Qwen3's
            scores = D == 128 ? Set::template attention_scores<128, A, S> : Set::template attention_scores<0, A, S>;
            mix = D == 128 ? Set::template attention_mix<128, A, S> : Set::template attention_mix<0, A, S>;
        }
    };
    Loops<T> stored;
    Loops<A> widened;

    Attention(T* out, A* lse, const T* q, const T* keys, const T* values, const Batch& b, int H, int K, int D)
        : out(out), lse(lse), q(q), keys(keys), values(values), b(b), H(H), K(K), D(D), G(H / K) {
        choose_loops<Plain<A>>();
#ifdef HAVE_SIMD
        if constexpr (std::is_same_v<A, float>) {
            if (instruction_set >= ISA_AVX512) choose_loops<Avx512>();
            else if (instruction_set >= ISA_AVX2) choose_loops<Avx2>();
        }
#endif
        heads = std::min(G, ATTENTION_ROWS), tokens = ATTENTION_ROWS / heads;
        head_tiles = (G + heads - 1) / heads, token_tiles = (b.N + tokens - 1) / tokens;
        int longest = 1; // splits of the longest row
        for (int n = 0; n < b.N; n++) {
            if (b.seq[n] < 0) continue;
            work += (size_t)(b.pos[n] + 1) * H * D;
            longest = std::max(longest, b.pos[n] / CPU_SPLIT + 1);
        }
        if ((size_t)b.N * H * longest <= 8192) splits = longest; // few rows
        static thread_local std::vector<AttentionSum<T>> kept;
        if (splits > 1) sums = at_least(kept, (size_t)b.N * H * splits);
    }
    template <class Set> void choose_loops() { stored.template choose<Set>(D), widened.template choose<Set>(D); }
    int tasks() const { return token_tiles * K * head_tiles * splits; }

    void store(size_t row, const AttentionSum<T>& a) const {
        for (int i = 0; i < D; i++) out[row * D + i] = to_stored<T>(a.out[i] / a.sum);
        if (lse) lse[row] = a.maximum + std::log(a.sum);
    }

    void task(int number) const {
        // Later tokens see more keys: long tasks first.
        const int split = number % splits, head_tile = number / splits % head_tiles;
        const int kv = number / (head_tiles * splits) % K, tile = token_tiles - 1 - number / (K * head_tiles * splits);
        const int h0 = kv * G + head_tile * heads, h1 = std::min(h0 + heads, (kv + 1) * G);
        const int end = std::min(b.N, (tile + 1) * tokens);
        for (int n0 = tile * tokens, n1; n0 < end; n0 = n1) { // the tokens of one sequence
            for (n1 = n0 + 1; n1 < end && b.seq[n1] == b.seq[n0]; n1++) {}
            if (b.seq[n0] >= 0) sequence(n0, n1, h0, h1, kv, split);
        }
    }

    // Tokens n0 .. n1 - 1, which are of one sequence; query heads h0 .. h1 - 1, which are KV head kv's.
    void sequence(int n0, int n1, int h0, int h1, int kv, int split) const {
        static thread_local std::vector<AttentionRow<T>> kept;
        AttentionRow<T>* rows = at_least(kept, (size_t)heads * std::min(tokens, b.N));
        const A scale = 1 / std::sqrt((A)D);
        int count = 0, longest = 0;
        for (int n = n0; n < n1; n++)
            for (int h = h0; h < h1; h++) {
                AttentionRow<T>& row = rows[count++];
                for (int i = 0; i < D; i++) row.q[i] = to_acc(q[((size_t)n * H + h) * D + i]) * scale;
                row.total.clear(D);
                row.length = b.pos[n] + 1;
                longest = std::max(longest, row.length);
            }
        add_pages(rows, count, kv, b.pages + (size_t)b.seq[n0] * b.max_pages, split * CPU_SPLIT,
                  splits > 1 ? std::min(longest, (split + 1) * CPU_SPLIT) : longest, longest);
        count = 0;
        for (int n = n0; n < n1; n++)
            for (int h = h0; h < h1; h++) {
                const size_t row = (size_t)n * H + h;
                if (splits > 1) sums[row * splits + split] = rows[count++].total;
                else store(row, rows[count++].total);
            }
    }

    // Adds keys first .. end - 1 to the rows' totals. `longest`: keys of the longest row.
    void add_pages(AttentionRow<T>* rows, int count, int kv, const int* table, int first, int end, int longest) const {
        static thread_local std::vector<A> kept;
        A *page_keys = at_least(kept, (size_t)2 * PAGE * D), *page_values = page_keys + PAGE * D; // (16,D) each
        for (; first < end; first += PAGE) {
            if (first % CPU_SPLIT == 0)
                for (int i = 0; i < count; i++) rows[i].split.clear(D);
            const size_t at = kv_offset(table[first / PAGE], kv, 0, K, D);
            const size_t held = (size_t)std::min(PAGE, longest - first) * D;
            if (!b.fp8 && count <= 2 && held == (size_t)PAGE * D) { // each load widens: the same numbers
                const size_t next = first + PAGE < end ? kv_offset(table[first / PAGE + 1], kv, 0, K, D) : at;
                const Page<T> page = {keys + at, values + at}, following = {keys + next, values + next};
                for (int i = 0; i < count; i++) add_page(rows[i], stored, page, i == 0 ? following : page, first);
            } else {
                // What lies past the end of the longest row was never written: zeros stand for it.
                if (b.fp8) {
                    widen_fp8(page_keys, keys, table[first / PAGE], kv, held);
                    widen_fp8(page_values, values, table[first / PAGE], kv, held);
                } else {
                    widen(page_keys, keys + at, held);
                    widen(page_values, values + at, held);
                }
                std::fill(page_keys + held, page_keys + PAGE * D, 0);
                std::fill(page_values + held, page_values + PAGE * D, 0);
                const Page<A> page = {page_keys, page_values};
                for (int i = 0; i < count; i++) add_page(rows[i], widened, page, page, first);
            }
            const bool complete = (first + PAGE) % CPU_SPLIT == 0 || first + PAGE >= end;
            for (int i = 0; i < count && complete; i++)
                if (rows[i].length > first / CPU_SPLIT * CPU_SPLIT) rows[i].total.add(rows[i].split, D);
        }
    }

    // The first `held` numbers of a page and head of an FP8 cache. (A NaN is not among the e4m3: see KVRow.)
    void widen_fp8(A* page, const T* cache, int number, int kv, size_t held) const {
        for (size_t j = 0; j < held / D; j++) {
            const KVRow<T> row(cache, b, number, kv, (int)j, K, D);
            lanes<T> v;
            for (int i = 0; i < D; i += LANES) {
                const int n = std::min(LANES, D - i);
                load_some(v, (const e4m3*)row.q + i, n);
                v *= row.factor;
                memcpy(page + j * D + i, &v, n * sizeof(A));
            }
        }
    }

    // One page for one row.
    template <class S>
    void add_page(AttentionRow<T>& row, const Loops<S>& loops, const Page<S>& page, const Page<S>& next,
                  int first) const {
        const int n = row.length - first;
        if (n <= 0) return;
        AttentionSum<T>& a = row.split;
        A p[PAGE], top = a.maximum;
        loops.scores(p, row.q, page.keys, next.keys, D);
        for (int j = n; j < PAGE; j++) p[j] = -std::numeric_limits<A>::infinity();
        for (int j = 0; j < PAGE; j++) top = p[j] > top ? p[j] : top;
        const A scale = top == a.maximum ? 1 : std::exp(a.maximum - top);
        lanes<T> e;
        static_assert(PAGE == LANES, "a page's scores are one vector");
        load_lanes(e, p);
        e -= top;
        exp_lanes(e);
        memcpy(p, &e, sizeof e);
        a.maximum = top;
        a.sum = a.sum * scale + sum_lanes(e);
        loops.mix(a.out, scale, p, page.values, next.values, D);
    }

    // The rows whose splits were tasks of their own.
    void join_splits() const {
        for (int n = 0; n < b.N && splits > 1; n++)
            for (int h = 0; h < H && b.seq[n] >= 0; h++) {
                const size_t row = (size_t)n * H + h;
                AttentionSum<T>& all = sums[row * splits];
                for (int split = 1; split <= b.pos[n] / CPU_SPLIT; split++) all.add(sums[row * splits + split], D);
                store(row, all);
            }
    }
};

template <class T>
void attention_cpu(Context&, T* out, acc<T>* lse, const T* q, const T* keys, const T* values, const Batch& b, int H,
                   int K, int D) {
    const Attention<T> a(out, lse, q, keys, values, b, H, K, D);
    #pragma omp parallel for schedule(dynamic) if (a.work > 20000)
    for (int task = 0; task < a.tasks(); task++) a.task(task);
    a.join_splits();
}

template <class T>
void attend_cpu(Context& ctx, T* out, acc<T>* lse, T* q, T* keys, T* values, const T* qkv, const T* q_weight,
                const T* k_weight, const acc<T>* rope, const Batch& b, int H, int K, int D, float eps) {
    qknorm_rope_kv_cpu(ctx, q, keys, values, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
    attention_cpu(ctx, out, lse, q, keys, values, b, H, K, D);
}

template <class T> void swiglu_cpu(Context&, T* out, const T* gate_up, int N, int F) {
    const int COLUMNS = 512, across = (F + COLUMNS - 1) / COLUMNS; // of a task
    #pragma omp parallel for schedule(static) if ((size_t)N * F > 2000)
    for (int task = 0; task < N * across; task++) {
        const int begin = task % across * COLUMNS, end = std::min(F, begin + COLUMNS);
        const T *gate = gate_up + (size_t)(task / across) * 2 * F, *up = gate + F;
        T* row = out + (size_t)(task / across) * F;
        for (int i = begin; i < end; i += LANES) {
            const int n = std::min(LANES, F - i);
            lanes<T> g, u, e;
            load_some(g, gate + i, n);
            load_some(u, up + i, n);
            one_plus_exp_minus(e, g);
            u *= g / e;
            for (int l = 0; l < n; l++) row[i + l] = to_stored<T>(u[l]);
        }
    }
}

template <class T>
void norm_linear_swiglu_cpu(Context& ctx, T* out, T* gate_up, T* normed, const acc<T>* x, const T* w,
                            const Linear<T>& W, int N, float eps) {
    norm_linear_cpu(ctx, gate_up, normed, x, w, W, N, eps);
    swiglu_cpu(ctx, out, gate_up, N, W.rows[0]);
}

template <class T>
void head_cpu(Context&, acc<T>* logits, T* picked, const T* x, const int* rows, const Linear<T>& W, int R) {
    for (int r = 0; r < R; r++) std::copy_n(x + (size_t)rows[r] * W.in, W.in, picked + (size_t)r * W.in);
    const size_t V = W.out();
    product_cpu(W, picked, R, [=](int r, int v, acc<T> y) { logits[r * V + v] = y; });
}

// Draws what `sample` draws, which it asks about those logits only that top-k may keep: all that are at least the k-th
// largest of the largest ones of blocks.
inline int sample_cpu(const Context&, const float* logits, int exist, const Sampling& how, uint64_t counter) {
    constexpr int BLOCK = 512; // whole vectors
    const int k = how.temperature == 0 ? 1 : how.top_k, blocks = exist / BLOCK;
    if (k <= 0 || k > blocks) return sample(logits, exist, how, counter);
    std::vector<float> tops(blocks), kept;
    for (int b = 0; b < blocks; b++) {
        float top[LANES];
        std::fill_n(top, LANES, -FLT_MAX);
        for (int i = 0; i < BLOCK; i += LANES)
            for (int l = 0; l < LANES; l++) top[l] = std::max(top[l], logits[b * BLOCK + i + l]); // (not a NaN)
        tops[b] = *std::max_element(top, top + LANES);
    }
    std::nth_element(tops.begin(), tops.begin() + k - 1, tops.end(), std::greater<float>());
    const float least = tops[k - 1];
    if (least == -FLT_MAX) return sample(logits, exist, how, counter);
    std::vector<int> ids;
    for (int id = 0; id < exist; id++)
        if (logits[id] >= least) ids.push_back(id), kept.push_back(logits[id]);
    return ids[sample(kept.data(), (int)kept.size(), how, counter)];
}

// Tells what `likeliest` tells. One pass finds the largest logit of each block, another one adds up, and looks for the
// likeliest only in blocks whose largest is at least the k-th of these.
inline void likeliest_cpu(const Context&, Likeliest& out, const float* logits, int exist, int k) {
    constexpr int BLOCK = 512; // whole vectors
    const int blocks = (exist + BLOCK - 1) / BLOCK;
    std::vector<float> tops(blocks);
    auto load = [&](float (&v)[LANES], int i, int n) { // n usable logits; what is past them is as good as not there
        std::fill(v + n, v + LANES, -INFINITY);
        for (int l = 0; l < n; l++) v[l] = std::min(std::max(-FLT_MAX, logits[i + l]), FLT_MAX); // (not a NaN)
    };
    auto each = [&](int b, auto f) {
        const int end = std::min(exist, (b + 1) * BLOCK);
        int i = b * BLOCK;
        for (; i + LANES <= end; i += LANES) f(i, LANES);
        if (i < end) f(i, end - i);
    };
    for (int b = 0; b < blocks; b++) {
        float top[LANES], v[LANES];
        std::fill_n(top, LANES, -FLT_MAX);
        each(b, [&](int i, int n) {
            load(v, i, n);
            for (int l = 0; l < LANES; l++) top[l] = std::max(top[l], v[l]);
        });
        tops[b] = *std::max_element(top, top + LANES);
    }
    std::vector<float> order = tops;
    const float top = *std::max_element(tops.begin(), tops.end());
    float least = k > 0 ? -FLT_MAX : INFINITY;
    if (k > 0 && k <= blocks) {
        std::nth_element(order.begin(), order.begin() + k - 1, order.end(), std::greater<float>());
        least = order[k - 1];
    }
    double sum = 0;
    std::vector<int> ids;
    for (int b = 0; b < blocks; b++) {
        float16v part = {}, x;
        each(b, [&](int i, int n) {
            float v[LANES];
            load(v, i, n);
            memcpy(&x, v, sizeof x);
            x -= top;
            exp_lanes(x);
            part += x;
        });
        sum += sum_lanes(part);
        for (int id = b * BLOCK; tops[b] >= least && id < std::min(exist, (b + 1) * BLOCK); id++)
            if (usable(logits[id]) >= least) ids.push_back(id);
    }
    out.log_sum = (float)(top + std::log(sum));
    out.count = std::min(k, exist);
    std::partial_sort(ids.begin(), ids.begin() + out.count, ids.end(), [&](int a, int b) {
        const float x = usable(logits[a]), y = usable(logits[b]);
        return x != y ? x > y : a < b;
    });
    for (int i = 0; i < out.count; i++) out.id[i] = ids[i], out.logit[i] = usable(logits[ids[i]]);
}

// ======================================================================================================= Backward ops

// The products among them: close(a, i, sum) for every a < A, i < I with one sum in the order of t < terms,
//     sum = open(a, i) + sum_t (factor * u[t * u_term + a * u_row]) * row(t)[i]
// Tiles of 4 by 32 sums stay in registers.
template <class T, class Row, class Open, class Close>
void outer_sums(int A, int I, int terms, const T* u, size_t u_term, size_t u_row, acc<T> factor, Row row, Open open,
                Close close) {
    constexpr int ROWS = 4, COLUMNS = 2 * LANES;
    const int across = (I + COLUMNS - 1) / COLUMNS, tiles = (A + ROWS - 1) / ROWS * across;
    #pragma omp parallel for schedule(static) if ((size_t)A * I * terms > 50000)
    for (int tile = 0; tile < tiles; tile++) {
        const int a0 = tile / across * ROWS, i0 = tile % across * COLUMNS;
        const int rows = std::min(ROWS, A - a0), columns = std::min(COLUMNS, I - i0);
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
            const auto* x = row(t) + i0;
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
constexpr auto FROM_ZERO = [](int, int) { return 0; }; // an `open`

template <class T>
void cross_entropy_cpu(Context&, acc<T>* loss, T* dlogits, acc<T>* logits, const int* target, acc<T> scale, int R,
                       int V) {
    #pragma omp parallel for schedule(static) if ((size_t)R * V > 2000)
    for (int r = 0; r < R; r++) {
        acc<T>* row = logits + (size_t)r * V;
        acc<T> top = -std::numeric_limits<acc<T>>::infinity();
        for (int v = 0; v < V; v++) top = std::max(top, row[v]);
        lanes<T> e, sums = {};
        auto exponentials = [&](int v) { // of 16 logits, zeros past the end
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
        const acc<T> sum = sum_lanes(sums);
        acc<T> right;
        memcpy(&right, row + target[r], sizeof right); // (the memory is of both types)
        loss[r] = std::log(sum) + top - right;
        for (int v = 0; v < V && dlogits; v += LANES) { // (a gradient is no longer than a logit: what is unread stays)
            const int n = exponentials(v);
            T g[LANES];
            for (int l = 0; l < n; l++) g[l] = to_stored<T>((e[l] / sum - (v + l == target[r])) * scale);
            memcpy((uint8_t*)row + v * sizeof(T), g, n * sizeof(T));
        }
    }
}

template <class T>
void head_loss_cpu(Context& ctx, acc<T>* loss, T* dlogits, acc<T>* factor, acc<T>* logits, T* picked, acc<T>*,
                   const T* x, const int* rows, const int* target, acc<T> scale, const acc<T>* by, const Linear<T>& W,
                   int R) {
    head_cpu(ctx, logits, picked, x, rows, W, R);
    cross_entropy_cpu(ctx, loss, dlogits, logits, target, scale, R, W.out());
    for (int r = 0; r < R; r++) factor[r] = by ? by[r] : 1;
}

// Products with W's transpose: close(n, i, ahead[n][i] + sum_r dy[n * ld + r] W[r][i]), the sum in the order of r.
// Packed rows are widened a few at a time while the sums wait in memory: the same sums in the same order.
template <class T, class Close>
void transposed_product_cpu(const Linear<T>& W, const T* dy, size_t ld, int N,
                            const acc<T>* ahead, // (N, W.in), or null: zeros
                            Close close) {
    const size_t in = W.in;
    auto begin = [&](int n, int i) { return ahead ? ahead[n * in + i] : 0; };
    if (W.format == Format::PLAIN)
        return outer_sums(N, W.in, W.out(), dy, 1, ld, 1, [&](int r) {
            int b = 0;
            while (r >= W.rows[b]) r -= W.rows[b++];
            return W.w[b] + r * in;
        }, begin, close);
    constexpr int ROWS = 64;
    static thread_local std::vector<acc<T>> kept, kept_sums;
    acc<T> *wide = at_least(kept, ROWS * in), *sums = at_least(kept_sums, N * in);
    const int out = W.out();
    for (int b = 0; b < 3; b++)
        for (int r0 = 0; r0 < W.rows[b]; r0 += ROWS) {
            const int rows = std::min(ROWS, W.rows[b] - r0), first = W.first_row(b) + r0;
            #pragma omp parallel for schedule(static) if (rows * in > 20000)
            for (int r = 0; r < rows; r++) WeightRows<T>(W, b, (size_t)(r0 + r)).widen(wide + r * in, 1, 0, W.in);
            outer_sums(N, W.in, rows, dy + first, 1, ld, 1, [=](int r) { return wide + r * in; },
                       [&](int n, int i) { return first ? sums[n * in + i] : begin(n, i); },
                       [&](int n, int i, acc<T> sum) {
                           if (first + rows == out) close(n, i, sum);
                           else sums[n * in + i] = sum;
                       });
        }
}

template <class T>
void head_backward_cpu(Context&, T* dnormed, const T* dlogits, size_t ld, const acc<T>* factor, const int* rows,
                       const Linear<T>& W, int R) {
    const size_t C = W.in;
    transposed_product_cpu(W, dlogits, ld, R, (const acc<T>*)nullptr,
                           [&](int r, int i, acc<T> sum) { dnormed[rows[r] * C + i] = to_stored<T>(sum * factor[r]); });
}

template <class T>
void rmsnorm_backward_cpu(Context&, acc<T>* dx, T* dy, T* normed, acc<T>* dw, const T* dout, const acc<T>* x,
                          const T* w, int N, int C, float eps) {
    static thread_local std::vector<acc<T>> kept;
    acc<T>* factor = at_least(kept, N); // r of each token
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * C;
        const acc<T> r = factor[n] = inverse_rms(x + at, C, eps);
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
        for (int n = 0; n < N; n++) dw[i] += to_acc(dout[(size_t)n * C + i]) * x[(size_t)n * C + i] * factor[n];
}

// The adapter's part of dx, (N, W.in): sum_j drop_j(dh_j A_j).
template <class T> const acc<T>* adapter_backward(const T* dh, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const int in = W.in, rank = a.rank;
    const acc<T> scale = a.dropout ? 1 / (1 - (acc<T>)a.dropout->p) : 1;
    static thread_local std::vector<acc<T>> kept;
    acc<T>* out = at_least(kept, (size_t)N * in);
    #pragma omp parallel for schedule(static) if ((size_t)N * in > 2000)
    for (int n = 0; n < N; n++)
        for (int k = 0; k < in; k += LANES) {
            const int some = std::min(LANES, in - k);
            lanes<T> sum = {}, part, v;
            for (int j = 0; j < a.modules; j++) {
                part = lanes<T>{};
                for (int i = j * rank; i < (j + 1) * rank; i++) {
                    load_some(v, a.A + (size_t)i * in + k, some);
                    part += to_acc(dh[n * a.width() + i]) * v;
                }
                for (int l = 0; l < LANES && a.dropout; l += 8) {
                    const uint32_t mask = dropout_mask(*a.dropout, a.dropout->token[n], a.module[j], (k + l) / 8);
                    for (int i = 0; i < 8; i++) part[l + i] *= mask >> i & 1 ? scale : 0;
                }
                sum += part;
            }
            memcpy(out + (size_t)n * in + k, &sum, some * sizeof(acc<T>));
        }
    return out;
}

template <class T>
void linear_backward_input_cpu(Context&, T* dx, T* dh, acc<T>* dB, const T* dy, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, out = W.out(), ld = a.width();
    for (int j = 0; j < a.modules; j++) {
        const size_t first = W.first_row(a.block[j]), column = (size_t)j * a.rank;
        outer_sums(N, a.rank, W.rows[a.block[j]], dy + first, 1, out, 1,
                   [&](int r) { return a.B + (first + r) * ld + column; }, FROM_ZERO,
                   [&](int n, int i, acc<T> sum) { dh[n * ld + column + i] = to_stored<T>(sum); });
        auto B = [&](int r, int i) -> acc<T>& { return dB[(first + r) * ld + column + i]; };
        outer_sums(W.rows[a.block[j]], a.rank, N, dy + first, out, 1, a.s,
                   [&](int n) { return a.h + n * ld + column; }, B, [&](int r, int i, acc<T> sum) { B(r, i) = sum; });
    }
    const acc<T>* ahead = a.rank ? adapter_backward(dh, W, N) : nullptr;
    transposed_product_cpu(W, dy, out, N, ahead,
                           [&](int n, int i, acc<T> sum) { dx[n * in + i] = to_stored<T>(sum); });
}

template <class T>
void linear_backward_weight_cpu(Context&, acc<T>* dW, const T* dy, size_t ld, const T* x, int N, int out, int in) {
    auto at = [=](int r, int i) -> acc<T>& { return dW[(size_t)r * in + i]; };
    outer_sums(out, in, N, dy, ld, 1, 1, [&](int n) { return x + (size_t)n * in; }, at,
               [&](int r, int i, acc<T> sum) { at(r, i) = sum; });
}

template <class T>
void lora_backward_weight_cpu(Context&, acc<T>* dA, const T* dh, const T* x, const Linear<T>& W, int N) {
    const Adapter<T>& a = W.adapter;
    const size_t in = W.in, ld = a.width();
    for (int j = 0; j < a.modules; j++) {
        const size_t column = (size_t)j * a.rank;
        const T* seen = dropped_cpu(x, W, j, N);
        auto A = [&](int r, int i) -> acc<T>& { return dA[(column + r) * in + i]; };
        outer_sums(a.rank, W.in, N, dh + column, ld, 1, drop_scale(a), [&](int n) { return seen + n * in; }, A,
                   [&](int r, int i, acc<T> sum) { A(r, i) = sum; });
    }
}

template <class T>
void swiglu_backward_cpu(Context&, T* dgate_up, T* hidden, const T* dhidden, const T* gate_up, int N, int F) {
    #pragma omp parallel for schedule(static) if ((size_t)N * F > 2000)
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * F;
        const T *gate = gate_up + 2 * at, *up = gate + F;
        for (int i = 0; i < F; i += LANES) {
            const int some = std::min(LANES, F - i);
            lanes<T> g, u, d, e;
            load_some(g, gate + i, some), load_some(u, up + i, some), load_some(d, dhidden + at + i, some);
            one_plus_exp_minus(e, g);
            const lanes<T> silu = g / e, sigma = 1 / e, dgate = d * u * sigma * (1 + g * (1 - sigma)), dup = d * silu;
            u *= silu;
            for (int l = 0; l < some; l++) {
                if (hidden) hidden[at + i + l] = to_stored<T>(u[l]);
                dgate_up[2 * at + i + l] = to_stored<T>(dgate[l]);
                dgate_up[2 * at + F + i + l] = to_stored<T>(dup[l]);
            }
        }
    }
}
template <class T>
void linear_backward_swiglu_cpu(Context& ctx, T* dgate_up, T* hidden, T* dhidden, T* dh, acc<T>* dB, const T* dy,
                                const T* gate_up, const Linear<T>& W, int N) {
    linear_backward_input_cpu(ctx, dhidden, dh, dB, dy, W, N);
    swiglu_backward_cpu(ctx, dgate_up, hidden, dhidden, gate_up, N, W.in);
}

// One KV head of one sequence, rows n0 .. n1 - 1 of the batch; its sums run over the tokens in order.
template <class T>
void attention_backward_sequence(T* dqkv, const T* dout, const T* q, const T* keys, const T* values, const T* out,
                                 const acc<T>* lse, const Batch& b, int H, int K, int D, acc<T>* delta, int n0, int n1,
                                 int kv) {
    const int G = H / K;
    const size_t width = (size_t)(H + 2 * K) * D, all = (size_t)(n1 - n0) * D;
    const acc<T> scale = 1 / std::sqrt((acc<T>)D);
    auto key_gradient = [&](int n) { return dqkv + n * width + (size_t)(H + kv) * D; };
    auto value_gradient = [&](int n) { return key_gradient(n) + (size_t)K * D; };
    auto query_gradient = [&](int n) { return dqkv + n * width + (size_t)kv * G * D; };
    if (b.seq[n0] < 0) {
        for (int n = n0; n < n1; n++) {
            std::fill_n(query_gradient(n), (size_t)G * D, T{});
            std::fill_n(key_gradient(n), D, T{});
            std::fill_n(value_gradient(n), D, T{});
        }
        return;
    }
    static thread_local std::vector<acc<T>> kept;
    acc<T>* k = at_least(kept, 4 * all + 3 * D);
    acc<T> *v = k + all, *dk = v + all, *dv = dk + all;                       // (tokens, D) each
    acc<T> *query = dv + all, *dquery = query + D, *doutput = dquery + D;     // (D) each
    std::fill(dk, dk + 2 * all, 0);
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
                const acc<T> p = std::exp(dot(query, k + at, D) - lse[row]);
                const acc<T> ds = p * (dot(doutput, v + at, D) - delta[row]);
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

template <class T>
void attention_backward_cpu(Context&, T* dqkv, const T* dout, const T* q, const T* keys, const T* values, const T* out,
                            const acc<T>* lse, const Batch& b, int H, int K, int D, acc<T>* delta) {
    std::vector<int> starts; // of sequences, and N
    for (int n = 0; n < b.N; n++)
        if (n == 0 || b.seq[n] != b.seq[n - 1]) starts.push_back(n);
    const int tasks = (int)starts.size() * K;
    starts.push_back(b.N);
    #pragma omp parallel for schedule(dynamic) if (b.N > 4)
    for (int task = 0; task < tasks; task++)
        attention_backward_sequence(dqkv, dout, q, keys, values, out, lse, b, H, K, D, delta, starts[task / K],
                                    starts[task / K + 1], task % K);
}

template <class T>
void qknorm_rope_backward_cpu(Context&, T* dqkv, acc<T>* dq_weight, acc<T>* dk_weight, const T* qkv, const T* q_weight,
                              const T* k_weight, const acc<T>* rope, const Batch& b, int H, int K, int D, float eps) {
    const int heads = H + K;
    auto at = [&](int n, int h) { return ((size_t)n * (H + 2 * K) + h) * D; };
    // The gradient of plane i of head h, rotated back.
    auto rotate_back = [&](int n, int h, int i, acc<T>& da, acc<T>& db) {
        const acc<T>* angle = rope + (size_t)b.pos[n] * D + 2 * i;
        const acc<T> u = to_acc(dqkv[at(n, h) + i]), v = to_acc(dqkv[at(n, h) + i + D / 2]);
        da = u * angle[0] + v * angle[1], db = v * angle[0] - u * angle[1];
    };
    if (dq_weight) {
        static thread_local std::vector<acc<T>> kept;
        acc<T>* factor = at_least(kept, (size_t)b.N * heads); // r of each head
        #pragma omp parallel for schedule(static) if (b.N > 4)
        for (int n = 0; n < b.N; n++)
            for (int h = 0; h < heads && b.seq[n] >= 0; h++)
                factor[n * heads + h] = inverse_rms(qkv + at(n, h), D, eps);
        #pragma omp parallel for schedule(static) if (b.N > 4)
        for (int i = 0; i < D / 2; i++)
            for (int n = 0; n < b.N; n++)
                for (int h = 0; h < heads && b.seq[n] >= 0; h++) {
                    acc<T> da, db, *dw = h < H ? dq_weight : dk_weight;
                    rotate_back(n, h, i, da, db);
                    dw[i] += da * to_acc(qkv[at(n, h) + i]) * factor[n * heads + h];
                    dw[i + D / 2] += db * to_acc(qkv[at(n, h) + i + D / 2]) * factor[n * heads + h];
                }
    }
    #pragma omp parallel for schedule(static) if (b.N > 4)
    for (int n = 0; n < b.N; n++)
        for (int h = 0; h < heads && b.seq[n] >= 0; h++) {
            const T *x = qkv + at(n, h), *w = h < H ? q_weight : k_weight;
            T* dx = dqkv + at(n, h);
            const acc<T> r = inverse_rms(x, D, eps);
            acc<T> dy[MAX_HEAD], sum = 0;
            for (int i = 0; i < D / 2; i++) rotate_back(n, h, i, dy[i], dy[i + D / 2]);
            for (int i = 0; i < D; i++) sum += to_acc(x[i]) * to_acc(w[i]) * dy[i];
            const acc<T> mean = sum * r * r * r / D;
            for (int i = 0; i < D; i++) dx[i] = to_stored<T>(r * to_acc(w[i]) * dy[i] - to_acc(x[i]) * mean);
        }
}

template <class T>
void attend_backward_cpu(Context& ctx, T* dqkv, acc<T>* dq_weight, acc<T>* dk_weight, const T* dout, const T* q,
                         const T* keys, const T* values, const T* out, const acc<T>* lse, const T* qkv,
                         const T* q_weight, const T* k_weight, const acc<T>* rope, const Batch& b, int H, int K, int D,
                         float eps, acc<T>* delta) {
    attention_backward_cpu(ctx, dqkv, dout, q, keys, values, out, lse, b, H, K, D, delta);
    qknorm_rope_backward_cpu(ctx, dqkv, dq_weight, dk_weight, qkv, q_weight, k_weight, rope, b, H, K, D, eps);
}

// ---- Ops whose definition is fast enough.
#define AS_DEFINED(op) template <class... P> void op##_cpu(Context&, P&&... p) { op(std::forward<P>(p)...); }
AS_DEFINED(embed)
AS_DEFINED(add_losses)
AS_DEFINED(scale_rows)
AS_DEFINED(embed_backward)
AS_DEFINED(grad_norm)
AS_DEFINED(adamw)
#undef AS_DEFINED
