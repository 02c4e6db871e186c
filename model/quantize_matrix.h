/* model/quantize_matrix.h: a matrix in numbers of few bits that share scales (see Linear).

   Without a text each weight goes to the nearest number. With one, GPTQ (Frantar et al., "GPTQ: accurate post-training
   quantization for generative pre-trained transformers", 2022) rounds column by column, and moves what each rounding
   loses to the columns still to come, so that the product with the text's activations changes least.

   Contents    1 Grids    2 A matrix    3 GPTQ's factor of the activations
*/
#pragma once
#include "model/numbers.h"
#include "qwen3.cu"
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// Arrays without initial values: the threads that fill them touch their pages first.
template <class U> struct Unset : std::allocator<U> {
    template <class V> struct rebind { using other = Unset<V>; };
    template <class V> void construct(V*) {}
    template <class V, class... A> void construct(V* at, A&&... a) { ::new ((void*)at) V(std::forward<A>(a)...); }
};
template <class U> using UnsetVector = std::vector<U, Unset<U>>;

// ============================================================================================================= 1 Grids
// The values that a group's weights can take: code q stands for (q - zero) * scale; FP8: for the e4m3 q times scale.

struct Grid {
    Format format;
    float scale = 0;
    int zero = 0;

    uint8_t code(float w) const;
    // The codes of n weights: `code` of each, in a form that compilers vectorise.
    void codes(uint8_t* q, const float* w, size_t n) const;
    static constexpr double ROUND = 6755399441055744.; // 1.5 * 2^52: added and taken away it rounds to nearest even
    float number(uint8_t q) const {
        if (format == Format::FP8) return e4m3_to_float(q) * scale;
        return (float)(format == Format::INT8 ? (int)(int8_t)q : (int)q - zero) * scale;
    }
};

// The grid of a group of n weights with the least sum of squared errors among some candidates. INT4: from the least
// weight to the largest, including 0, and narrower ones, since clipping a single large weight can pay. INT8: see
// int8_scale.
Grid choose_grid(Format format, const float* w, size_t n);
// FP8's, for a block of rows: the largest weight becomes 448, the largest e4m3.
Grid choose_block_grid(const float* w, size_t stride, size_t rows, size_t n);

// ========================================================================================================== 2 A matrix

struct QuantizedMatrix {
    Format format;
    size_t rows, in, group, group_rows;
    UnsetVector<uint8_t> q;   // (rows, in), a code each
    UnsetVector<Grid> grids;  // (rows / group_rows, groups)
    size_t groups() const { return (in + group - 1) / group; }
    float at(size_t r, size_t k) const { return grids[r / group_rows * groups() + k / group].number(q[r * in + k]); }
};

// W (rows, in) in a format. `factor` is GPTQ's (see section 3), (in, in), or null: round to nearest. W is overwritten.
// Rows are independent except in FP8's blocks, so a task is 128 rows or fewer. Columns are done in blocks: a column's
// error goes to the columns of its block at once, to all others when the block is done.
QuantizedMatrix quantize_matrix(float* W, size_t rows, size_t in, Format format, size_t group,
                                const std::vector<float>* factor);

// ============================================================================= 3 GPTQ's factor of the activations
// H = X^T X of the activations X (tokens, in). The rounding of column k moves w_j by -lost * U[k][j] / U[k][k], j > k,
// where U^T U = H^-1 with U upper triangular: each row of U says how the columns after k compensate column k. With H =
// R R^T, R upper triangular (Cholesky's factor, from the last column on), U is R^-1.

// The factor of H + 1% of its diagonal's mean. A column whose activations are all zero is `dead`: its weights have no
// effect and become zero.
std::vector<float> gptq_factor(const std::vector<float>& H, size_t n, std::vector<bool>& dead);
