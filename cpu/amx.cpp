// cpu/amx.cpp: the inner loops of products for AMX.
#include "cpu/instruction_set.h"
#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
#if !(defined(__AMX_INT8__) || defined(__AMXINT8__)) || !defined(__AVX512BF16__) // (clang 14: the second)
#error "compiled with avx512_bf16.cpp's flags, -mamx-tile, -mamx-bf16 and -mamx-int8: see the Makefile"
#endif
#include "cpu/amx.h"
#include "cpu/ceilings.h"
#include "cpu/integer_loops.h"
#include <immintrin.h>

// ---- INT8 by vectors
static void fix_two_groups(void* to, const bf16* x, int) {
    FixedX& out = *(FixedX*)to;
    for (int g = 0; g < 2; g++) {
        int X[GROUP], sum[3] = {};
        out.step[g] = fix_group(X, x + g * GROUP);
        for (int i = 0; i < GROUP; i++)
            for (int p = 2, left = X[i]; p >= 0; p--, left = (left + 128) >> 8)
                sum[p] += out.plane[p][g * GROUP + i] = (int8_t)left;
        out.upper[g] = 128 * (256 * sum[0] + sum[1]), out.lower[g] = 128 * sum[2];
    }
}

// The sums of each half of 8 vectors of integers: the lower halves of a[0..3], their upper halves, then the same for
// a[4..7].
static INLINE __m512i sum_halves(const __m512i* a) {
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

// One number for each of two groups, in the order of sum_halves.
static INLINE __m512i per_group(const void* two_words) {
    int64_t pair;
    memcpy(&pair, two_words, 8);
    const __m512i which = _mm512_set_epi32(1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_maskz_permutexvar_epi32(0xffff, which, _mm512_set1_epi64(pair));
}

// Products of 256 h + m and l of x with 64 weights of one row: 16 sums each, 8 per group. The instruction needs one
// unsigned factor: q + 128. 128 times the sum of x is subtracted later.
static INLINE void dot64(__m512i& upper, __m512i& lower, const int8_t* q, const FixedX& x) {
    const __m512i u = _mm512_xor_si512(_mm512_loadu_si512(q), _mm512_set1_epi8(-128));
    lower = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, _mm512_load_si512(x.plane[2]));
    upper = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, _mm512_load_si512(x.plane[0]));
    upper = _mm512_dpbusd_epi32(_mm512_maskz_slli_epi32(0xffff, upper, 8), u, _mm512_load_si512(x.plane[1]));
}

// step * fma(256 H + M, 256, L) of 16 groups, as sum_halves orders them.
static INLINE __m512 group_sums(const __m512i (&upper)[8], const __m512i (&lower)[8], __m512i upper128,
                                __m512i lower128, __m512 step) {
    const __m512 a = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(sum_halves(upper), upper128));
    const __m512 b = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(sum_halves(lower), lower128));
    return _mm512_mul_ps(step, _mm512_fmadd_ps(a, _mm512_set1_ps(256), b));
}

// 8 rows at a time, two groups of each. The rows are spread over the tile. A single token's product also prefetches
// rows of the next tile: the memory of these CPUs is fastest when several places are read at once.
template <bool ONE_TOKEN>
static void amx_vnni_tile(float* y, WeightRows<bf16> w, int rows, const void* input, int N) {
    const FixedX* x = (const FixedX*)input;
    const int in = w.in, groups = in / GROUP, apart = (rows + 7) / 8;
    for (int first = 0; first < apart; first++) {
        const int8_t* q[8];
        int at[8], row[8];
        for (int r = 0; r < 8; r++) { // (the last row replaces missing ones)
            row[r] = smaller(first + r * apart, rows - 1);
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
const IntegerTiles amx_int8[2] = {{FixedX::COLUMNS, sizeof(FixedX), fix_two_groups, amx_vnni_tile<true>},
                                  {FixedX::COLUMNS, sizeof(FixedX), fix_two_groups, amx_vnni_tile<false>}};

// ---- bf16
namespace {
struct alignas(64) AmxConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    AmxConfig& tiles(int first, int last, int count, int bytes) {
        for (int t = first; t <= last; t++) rows[t] = (uint8_t)count, row_bytes[t] = (uint16_t)bytes;
        return *this;
    }
    void load() const {
        asm volatile("" ::"r"(this) : "memory"); // g++ 12 does not see that the next line reads all of it
        _tile_loadconfig(this);
    }
};
} // namespace

// Tiles 0-3: sums, 4 and 5: rows of W, 6 and 7: tokens. `width`: bytes of a row of tokens or sums.
static void amx_configure(int width) {
    AmxConfig().tiles(0, 7, 16, width).tiles(4, 5, 16, 64).load();
}

// One token: two columns of sums.
static void amx_column(float* y, const bf16* w, const bf16* x, int in) {
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
static void amx_square(float* sums, const bf16* w, const bf16* x, int in, bool two) { // sums (rows, tokens)
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

void amx_tile(float* y, const bf16* w, const bf16* x, bool one, int N, int in) {
    amx_configure(one ? 4 : 64);
    if (one) amx_column(y, w, x, in);
    for (int n = 0; n < N && !one; n += 32) {
        float sums[TILE_ROWS * 32];
        amx_square(sums, w, x + (size_t)n * in, in, N - n > 16);
        for (int m = 0; m < smaller(32, N - n); m++)
            for (int r = 0; r < TILE_ROWS; r++) y[(n + m) * TILE_ROWS + r] = sums[r * 32 + m];
    }
    _tile_release();
}

// ---- INT8 by tiles
// The sums H, M, L of one group, 16 rows by 16 tokens each, in tiles A, B and C. (A tile's name must be a constant.)
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
static INLINE void amx_add_groups(float (*total)[16],              // (rows, tokens) in place
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
// the tiles, alternating between two sets of them, before vectors read the sums: a stored tile cannot be loaded at
// once.
void amx_int8_tile(float* y, const WeightRows<bf16>& w, const FixedTile* x, int N) {
    constexpr int TOGETHER = 4;
    const int in = w.in, groups = in / GROUP;
    alignas(64) float total[TILE_TOKENS / 16][16][16]; // (tokens / 16, rows, tokens)
    alignas(64) int32_t sums[TOGETHER][3][16][16];     // (groups, planes, rows, tokens)
    AmxConfig().tiles(0, 5, 16, 64).tiles(6, 6, 16, GROUP).tiles(7, 7, 8, 64).load();
    for (int half = 0; half < 2; half++) {
        memset(total, 0, sizeof total);
        for (int g0 = 0; g0 < groups; g0 += TOGETHER) {
            const int count = smaller(TOGETHER, groups - g0); // even
            float scale[TOGETHER][16];
            for (int r = 0; r < 16; r++)
                for (int g = 0; g < count; g++)
                    scale[g][r] = as_float(w.scale[(size_t)(half * 16 + r) * groups + g0 + g]);
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

double amx_multiply(MultiplyBlock* memory) {
    amx_configure(64);
    _tile_loadd(4, memory, 64);
    _tile_loadd(5, memory, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < 500; k++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, memory, 64);
    _tile_release();
    return 2. * 16 * 16 * 32 * 4 * 500;
}
// tdpbssd takes the same time and is twice as deep, but each of the three planes of x needs its own.
double amx_multiply_int8(MultiplyBlock* memory) { return amx_multiply(memory) * 2 / 3; }
#endif
