// cpu/arm_bf16.cpp: product tiles for 64-bit Arm with BF16.
#include "cpu/instruction_set.h"
#if defined(HAVE_ARM) && !defined(QWEN3_DOUBLE)
#ifndef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#error "compiled with -march=armv8.2-a+bf16: see the Makefile"
#endif
#include "cpu/ceilings.h"
#include "cpu/loops.h"
#include "cpu/plain_vectors.h"
#include <arm_neon.h>

// bfmmla adds to the 2 x 2 sums of two rows and two tokens the products of four columns: to each sum those of columns 0
// and 1, then those of 2 and 3. So a sum has one order in any place. It rounds to odd and makes numbers below 2^-126
// zeros, on every CPU (FPCR.EBF, which would change this, is 0).
namespace {
struct Bf16Rows : Plain<float> { // packed weights to bf16
    using Operand = uint16x8x2_t;
    static INLINE void nearest(Operand& v, const Vector& numbers) {
        float32x4x4_t f;
        memcpy(&f, &numbers, sizeof f);
        for (int i = 0; i < 2; i++)
            v.val[i] = (uint16x8_t)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(f.val[2 * i]), f.val[2 * i + 1]);
    }
    template <class S> static INLINE void load_scaled(Operand& v, const S* p, const Vector& scale) {
        Vector numbers;
        Plain::load_scaled(numbers, p, scale);
        nearest(v, numbers);
    }
    template <int SHIFT> static INLINE void load_codes(Operand& v, const uint8_t* p, const Codes& c) {
        Vector numbers;
        Plain::load_codes<SHIFT>(numbers, p, c);
        nearest(v, numbers);
    }
};

// Eight columns of P pairs of rows that are `apart`, `count` of them: even[i] are the first four columns of the pair's
// rows, odd[i] the others. The last row stands for those that are missing; zeros for columns from n on.
template <int P> INLINE void load_pairs(bfloat16x8_t (&even)[P], bfloat16x8_t (&odd)[P], const bf16* p, size_t apart,
                                        int count, int n) {
    uint64x2_t row[2 * P];
    UNROLL for (int i = 0; i < 2 * P; i++) {
        const bf16* from = p + smaller(i, count - 1) * apart;
        bf16 some[8] = {};
        if (n < 8) memcpy((void*)some, from, n * sizeof(bf16)), from = some;
        memcpy(&row[i], from, sizeof row[i]);
    }
    UNROLL for (int i = 0; i < P; i++) {
        even[i] = (bfloat16x8_t)vzip1q_u64(row[2 * i], row[2 * i + 1]);
        odd[i] = (bfloat16x8_t)vzip2q_u64(row[2 * i], row[2 * i + 1]);
    }
}

// y[m * TILE_ROWS + r] of at most 8 rows and 2 M tokens. Sums of even and of odd fours hide each other's latency.
template <int M> static void block(float* y, const bf16* w, size_t apart, int rows, const bf16* x, int tokens, int in) {
    constexpr int R = 4;
    float32x4_t sum[R][M][2];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) sum[r][m][0] = sum[r][m][1] = float32x4_t{};
    for (int k = 0; k < in; k += 8) {
        bfloat16x8_t a[2][R], b[2][M];
        load_pairs<R>(a[0], a[1], w + k, apart, rows, in - k);
        load_pairs<M>(b[0], b[1], x + k, in, tokens, in - k);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int c = 0; c < 2; c++) sum[r][m][c] = vbfmmlaq_f32(sum[r][m][c], a[c][r], b[c][m]);
    }
    float total[M][2][2 * R]; // (a number of a vector is no place to loop over: sums would not stay in registers)
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) {
            const float32x4_t both = sum[r][m][0] + sum[r][m][1];
            UNROLL for (int i = 0; i < 4; i++) total[m][i % 2][2 * r + i / 2] = both[i];
        }
    for (int m = 0; m < tokens; m++) memcpy(y + m * TILE_ROWS, total[m / 2][m % 2], rows * sizeof(float));
}

template <Format F> static void tile(float* y, WeightRows<bf16> w, int rows, const void* input, int N) {
    const int in = w.in, apart = (in + GROUP - 1) / GROUP * GROUP;
    const bf16* x = (const bf16*)input;
    for (int r = 0, some; r < rows; r += some, w.skip(some)) {
        some = smaller(8, rows - r);
        const bf16* from = w.w;
        if constexpr (F != Format::PLAIN) {
            bf16* wide = (bf16*)tile_scratch(8 * (size_t)apart * sizeof(bf16));
            widen_rows<Bf16Rows, F>(wide, apart, GROUP, w, some, 0, in, 8 * w.row_bytes);
            from = wide;
        }
        const size_t row = F == Format::PLAIN ? in : apart;
        for (int n = 0; n < N; n += 4) {
            auto loop = N - n > 2 ? block<2> : block<1>;
            loop(y + n * TILE_ROWS + r, from, row, some, x + (size_t)n * in, smaller(4, N - n), in);
        }
    }
}
} // namespace

const ProductTile<bf16> arm_bf16_tile[5] = {tile<Format::PLAIN>, tile<Format::INT8>, tile<Format::INT4>,
                                            tile<Format::FP8>, tile<Format::BLOCKS>};

double arm_bf16_multiply(MultiplyBlock* memory) {
    bfloat16x8_t a; // zeros and ones in turn (g++ 12 has no right constant of ones)
    float32x4_t s[15];
    memcpy(&a, memory + 15, sizeof a);
    for (int i = 0; i < 15; i++) memcpy(s + i, memory + i, 16);
    for (int k = 0; k < 4000; k++)
        UNROLL for (int i = 0; i < 15; i++) s[i] = vbfmmlaq_f32(s[i], a, a);
    for (int i = 0; i < 15; i++) memcpy(memory + i, s + i, 16);
    return 2. * 16 * 15 * 4000;
}
#endif
