// cpu/integer_loops.h: the inner loops of INT8 and INT4 products in integers, written once for all instruction sets.
// (Rules for sources of instruction sets: cpu/loops.h.)
#pragma once
#include "cpu/loops.h"

// ---- INT8 in integers. In each group of 32, x = step * X with |X| < 2^22; step is the power of two that gives the
// largest |X| 22 bits. A bf16 has 8: numbers within 2^-14 of the largest are exact; smaller ones lose less than a float
// sum would round away. (The least step is 2^-126.) So a sum of four q X is exact in 32 bits, and only it becomes a
// float: y += scale * step * sum.
INLINE float fix_group(int* X, const bf16* x, int n = GROUP) {
    int largest = 0;
    for (int i = 0; i < n; i++) largest = larger(largest, x[i].bits & 0x7fff);
    const int exponent = larger(largest >> 7, 22); // so that neither power of two is subnormal
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
    return exponent < 255 ? step : __builtin_nanf(""); // an infinity or a NaN is among them
}

// Prefetch distance of INT8 weights in bytes, at least. (Zen 4: 2 KB is too late; 8 to 64 KB are equal.)
constexpr size_t FETCH_AHEAD = 8192;

// A struct `Set` adds to a set of vectors, for integer_loop:
//     Fixed    COLUMNS numbers of a token as integers; `fix` makes them    Weights  COLUMNS weights of a row
//     load_weights, load_scales   these, and their scales lane by lane     add_product  sum += q X scale step

// y[m][r] = W[r] . x[m] for R rows of INT8 weights and M tokens as integers. A cache line of weights takes some 20
// instructions, so a CPU with a window of 300 instructions has too few loads in flight. Hence each line prefetches the
// line at its own place whole blocks of R rows later; into the second-level cache, since the first one tracks too few
// misses.
template <class Set, int R, int M>
static void integer_loop(float* y, const int8_t* q, const bf16* scale, const typename Set::Fixed* x, int in) {
    const int steps = in / Set::COLUMNS;
    const size_t block = (size_t)R * in, ahead = (FETCH_AHEAD + block - 1) / block * block;
    Vector<Set> sum[R][M][1];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) sum[r][m][0] = Vector<Set>{};
    for (int i = 0; i < steps; i++) {
        typename Set::Weights w[R];
        Vector<Set> s[R];
        UNROLL for (int r = 0; r < R; r++) {
            const int8_t* from = q + ((size_t)r * steps + i) * Set::COLUMNS;
            __builtin_prefetch((const void*)((uintptr_t)from + ahead), 0, 2);
            Set::load_weights(w[r], from);
            Set::load_scales(s[r], scale + ((size_t)r * steps + i) * (Set::COLUMNS / GROUP));
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int r = 0; r < R; r++) Set::add_product(sum[r][m][0], w[r], s[r], x[(size_t)m * steps + i]);
    }
    Set::totals(y, sum);
}

// The tile of product_tile, in integers.
template <class Set>
static void integer_tile(float* y, WeightRows<bf16> w, int rows, const void* input, int N) {
    constexpr int R = Set::ROWS, M = Set::TOKENS;
    const auto* x = (const typename Set::Fixed*)input;
    const size_t steps = w.in / Set::COLUMNS;
    for (int r = 0, some; r < rows; r += some, y += some, w.skip(some)) {
        some = r + R <= rows ? R : 1;
        int n = 0;
        for (; n + M <= N; n += M)
            if (some == R) integer_loop<Set, R, M>(y + n * TILE_ROWS, w.q, w.scale, x + n * steps, w.in);
            else integer_loop<Set, 1, M>(y + n * TILE_ROWS, w.q, w.scale, x + n * steps, w.in);
        for (; n < N; n++)
            if (some == R) integer_loop<Set, R, 1>(y + n * TILE_ROWS, w.q, w.scale, x + n * steps, w.in);
            else integer_loop<Set, 1, 1>(y + n * TILE_ROWS, w.q, w.scale, x + n * steps, w.in);
    }
}
template <class Set> static void fix_columns(void* out, const bf16* x, int) {
    Set::fix(*(typename Set::Fixed*)out, x);
}
template <class Set>
constexpr IntegerTiles INT8_TILES = {Set::COLUMNS, sizeof(typename Set::Fixed), fix_columns<Set>, integer_tile<Set>};

// ---- INT4 in integers. Unsigned bytes (q) are multiplied by signed bytes, three planes of x: X = 65536 h + 256 m + l.
// The sum over a group of (q - z) X is the sum of q X less z times the sum of X, which is known before: all exact in 32
// bits for groups of up to 128. y += scale * step * sum. HALF bytes of a row are read at once, and hold two numbers
// each.
namespace { // (a type of each source's own)
template <int G, int HALF> struct alignas(64) FixedPairs { // of 2 * HALF numbers of a token
    static constexpr int COLUMNS = 2 * HALF, TOGETHER = smaller(G, COLUMNS); // numbers that share a step
    int8_t plane[3][2][HALF]; // h, m, l of the numbers in lower halves of bytes, and of those in upper ones
    int32_t sum[2][HALF / 4]; // of four X; for groups of 64 and more, of both halves
    float step[2][HALF / 4];

    // `left` numbers follow, a multiple of 64; missing ones are zeros.
    static void fix(FixedPairs& out, const bf16* x, int left) {
        int X[COLUMNS] = {};
        float step[COLUMNS / TOGETHER] = {};
        for (int i = 0; i < smaller(left, COLUMNS); i += TOGETHER) {
            const int n = smaller(TOGETHER, left - i);
            step[i / TOGETHER] = fix_group(X + i, x + i, n);
            if (__builtin_isnan(step[i / TOGETHER])) memset(X + i, 0, n * sizeof *X); // (they are no numbers)
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
} // namespace

// A struct `Set` adds to a set of vectors, for pairs_loop:
//     Weights     HALF bytes of a row as two vectors of numbers; load_pairs    Scales  those of the row's groups there
//     add_pairs   sum += scale * step * (q - z) X

// integer_loop for rows of INT4 in groups of G. Two halves of columns at a time: of one group each, or of the same one.
template <class Set, int G>
static INLINE void add_pairs(Vector<Set>& sum, const typename Set::Weights& w,
                             const typename Set::template Scales<G>& s, const typename Set::template Fixed<G>& x) {
    typename Set::Integers sums;
    if constexpr (G == 32) {
        Set::template four_sums<0, 0>(sums, w, x);
        Set::add_group(sum, sums, s.s[0], s.zero[0], x.sum[0], x.step[0]);
        Set::template four_sums<1, 1>(sums, w, x);
        Set::add_group(sum, sums, s.s[1], s.zero[1], x.sum[1], x.step[1]);
    } else {
        Set::template four_sums<0, 1>(sums, w, x);
        Set::add_group(sum, sums, s.s[0], s.zero[0], x.sum[0], x.step[0]);
    }
}
template <class Set, int G, int R, int M>
static void pairs_loop(float* y, const int8_t* q, const uint16_t* scale, const uint8_t* zero,
                       const typename Set::template Fixed<G>* x, int in) {
    const size_t row = (size_t)in / 2, groups = (in + G - 1) / G, block = R * row;
    const size_t ahead = (FETCH_AHEAD + block - 1) / block * block;
    const int steps = (in + 2 * Set::HALF - 1) / (2 * Set::HALF);
    Vector<Set> sum[R][M][1];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) sum[r][m][0] = Vector<Set>{};
    for (int i = 0; i < steps; i++)
        UNROLL for (int r = 0; r < R; r++) {
            typename Set::Weights w;
            typename Set::template Scales<G> s;
            const int8_t* from = q + r * row + (size_t)i * Set::HALF;
            __builtin_prefetch((const void*)((uintptr_t)from + ahead), 0, 2);
            Set::load_pairs(w, from, in - i * 2 * Set::HALF);
            Set::load_scales(s, scale + r * groups, zero ? zero + r * groups : nullptr, i * 2 * Set::HALF);
            UNROLL for (int m = 0; m < M; m++) add_pairs<Set, G>(sum[r][m][0], w, s, x[(size_t)m * steps + i]);
        }
    Set::totals(y, sum);
}

// The tile of product_tile, in integers.
template <class Set, int G>
static void pairs_tile(float* y, WeightRows<bf16> w, int rows, const void* input, int N) {
    constexpr int R = Set::ROWS, M = Set::TOKENS;
    const auto* x = (const typename Set::template Fixed<G>*)input;
    const size_t steps = (w.in + 2 * Set::HALF - 1) / (2 * Set::HALF);
    for (int r = 0, some; r < rows; r += some, y += some, w.skip(some)) {
        some = r + R <= rows ? R : 1;
        for (int n = 0, tokens; n < N; n += tokens) {
            tokens = n + M <= N ? M : 1;
            auto loop = some == R ? tokens == M ? pairs_loop<Set, G, R, M> : pairs_loop<Set, G, R, 1>
                                  : tokens == M ? pairs_loop<Set, G, 1, M> : pairs_loop<Set, G, 1, 1>;
            loop(y + n * TILE_ROWS, w.q, w.half, w.zero, x + n * steps, w.in);
        }
    }
}
template <class Set, int G> static void fix_pairs(void* out, const bf16* x, int left) {
    using Fixed = typename Set::template Fixed<G>;
    Fixed::fix(*(Fixed*)out, x, left);
}
template <class Set, int G>
constexpr IntegerTiles INT4_TILES = {2 * Set::HALF, sizeof(typename Set::template Fixed<G>), fix_pairs<Set, G>,
                                     pairs_tile<Set, G>};
