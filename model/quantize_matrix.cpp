// model/quantize_matrix.cpp: a matrix in numbers of few bits that share scales.
#include "model/quantize_matrix.h"
#include "model/weights.h"
#include <algorithm>
#include <cmath>
#include <limits>

// ============================================================================================================= 1 Grids

uint8_t Grid::code(float w) const {
    if (scale == 0) return (uint8_t)zero;
    if (format == Format::FP8) return float_to_e4m3(w / scale);
    const double q = std::nearbyint((double)w / scale); // (INT8's scale is wide enough for all)
    if (format == Format::INT8) return (uint8_t)(int8_t)std::clamp(q, -127., 127.);
    return (uint8_t)std::clamp(q + zero, 0., 15.);
}

void Grid::codes(uint8_t* q, const float* w, size_t n) const {
    if (format == Format::FP8 || scale == 0) {
        for (size_t i = 0; i < n; i++) q[i] = code(w[i]);
        return;
    }
    const bool eight = format == Format::INT8;
    const double s = scale, z = zero, low = eight ? -127 : 0, high = eight ? 127 : 15;
    for (size_t i = 0; i < n; i++) {
        const double at = w[i] / s + ROUND - ROUND + z, above = at < low ? low : at;
        q[i] = (uint8_t)(int)(above > high ? high : above);
    }
}

Grid choose_grid(Format format, const float* w, size_t n) {
    Grid best = {format};
    if (format == Format::INT8) return best.scale = to_acc(int8_scale(w, n)), best;
    float low = 0, high = 0;
    for (size_t i = 0; i < n; i++) low = std::min(low, w[i]), high = std::max(high, w[i]);
    if (!(low < high)) return best;
    constexpr int WIDTHS = 8; // side by side in a vector, as in int8_scale
    typedef double Each __attribute__((vector_size(WIDTHS * sizeof(double))));
    Grid grids[WIDTHS];
    Each scale = {}, zero = {}, lost = {};
    for (int c = 0; c < WIDTHS; c++) {
        const double width = ((double)high - low) * (1 - 0.05 * c);
        Grid& grid = grids[c] = {format};
        grid.scale = half_to_float(std::max<uint16_t>(float_to_half((float)(width / 15)), 1));
        grid.zero = (int)std::clamp(std::nearbyint(-low * (1 - 0.05 * c) / grid.scale), 0., 15.);
        scale[c] = grid.scale, zero[c] = grid.zero;
    }
    for (size_t i = 0; i < n; i++) {
        const double x = w[i];
        Each q = x / scale + Grid::ROUND - Grid::ROUND + zero;
        q = q < 0. ? Each{} : q, q = q > 15. ? Each{} + 15. : q;
        const Each off = x - (q - zero) * scale; // (the product is exact)
        lost += off * off;
    }
    int chosen = 0;
    for (int c = 1; c < WIDTHS; c++)
        if (lost[c] < lost[chosen]) chosen = c;
    return grids[chosen];
}

Grid choose_block_grid(const float* w, size_t stride, size_t rows, size_t n) {
    float largest = 0;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(w[r * stride + i]));
    Grid grid = {Format::FP8};
    grid.scale = largest == 0 ? 1 : std::max(largest / 448, std::numeric_limits<float>::min());
    return grid;
}

// ========================================================================================================== 2 A matrix

QuantizedMatrix quantize_matrix(float* W, size_t rows, size_t in, Format format, size_t group,
                                       const std::vector<float>* factor) {
    constexpr size_t BLOCK = 128; // groups do not cross blocks
    const size_t group_rows = format == Format::FP8 ? 128 : 1, task_rows = format == Format::FP8 ? 128 : 16;
    QuantizedMatrix m = {format, rows, in, group, group_rows, {}, {}};
    m.q.resize(rows * in), m.grids.resize((rows + group_rows - 1) / group_rows * m.groups());
    #pragma omp parallel for schedule(dynamic)
    for (size_t first = 0; first < rows; first += task_rows) {
        const size_t count = std::min(task_rows, rows - first);
        float* w = W + first * in;
        for (size_t k = 0; k < in && !factor; k += group) {
            const size_t n = std::min(group, in - k);
            for (size_t r = 0; r < count; r++) {
                Grid& grid = m.grids[(first + r) / group_rows * m.groups() + k / group];
                if (format != Format::FP8) grid = choose_grid(format, w + r * in + k, n);
                else if (r == 0) grid = choose_block_grid(w + k, in, count, n);
                grid.codes(&m.q[(first + r) * in + k], w + r * in + k, n);
            }
        }
        if (!factor) continue;
        std::vector<float> lost(count * BLOCK);
        for (size_t begin = 0; begin < in; begin += BLOCK) {
            const size_t end = std::min(in, begin + BLOCK);
            for (size_t k = begin; k < end; k++) {
                const size_t n = std::min(group, in - k);
                for (size_t r = 0; r < count && k % group == 0; r += group_rows)
                    m.grids[(first + r) / group_rows * m.groups() + k / group] =
                        format == Format::FP8 ? choose_block_grid(w + k, in, count, n)
                                              : choose_grid(format, w + r * in + k, n);
                for (size_t r = 0; r < count; r++) {
                    const Grid& grid = m.grids[(first + r) / group_rows * m.groups() + k / group];
                    float* row = w + r * in;
                    const uint8_t q = m.q[(first + r) * in + k] = grid.code(row[k]);
                    const float* f = factor->data() + k * in;
                    const float off = lost[r * BLOCK + k - begin] = (row[k] - grid.number(q)) / f[k];
                    for (size_t j = k + 1; j < end; j++) row[j] -= off * f[j];
                }
            }
            for (size_t r = 0; r < count; r++)
                for (size_t k = begin; k < end; k++) {
                    const float off = lost[r * BLOCK + k - begin], *f = factor->data() + k * in;
                    float* row = w + r * in;
                    for (size_t j = end; j < in; j++) row[j] -= off * f[j];
                }
        }
    }
    return m;
}

// ============================================================================= 3 GPTQ's factor of the activations

std::vector<float> gptq_factor(const std::vector<float>& H, size_t n, std::vector<bool>& dead) {
    std::vector<double> R(n * n);
    std::vector<float> U(n * n);
    double mean = 0;
    dead.assign(n, false);
    for (size_t i = 0; i < n; i++) mean += H[i * n + i] / (double)n;
    for (size_t i = 0; i < n; i++) {
        dead[i] = H[i * n + i] == 0;
        for (size_t j = i; j < n; j++) R[i * n + j] = H[i * n + j];
        R[i * n + i] = (dead[i] ? std::max(mean, 1e-30) : R[i * n + i]) + 0.01 * mean;
    }
    // Blocks of columns from the last to the first. First the contributions of all later columns are subtracted, four
    // of its columns at a time, so that a row is read 16 times and not 64.
    constexpr size_t SOME = 64, LANES = 4;
    for (size_t end = n, begin; end > 0; end = begin) {
        begin = end > SOME ? end - SOME : 0;
        const auto finish = [&](size_t i) { // row i of the block's columns
            double* row = &R[i * n];
            for (size_t j = end; j-- > std::max(begin, i);) {
                for (size_t k = j + 1; k < end; k++) row[j] -= row[k] * R[j * n + k];
                if (i < j) row[j] /= R[j * n + j];
                else if (!(row[j] > 0)) DIE("the calibration text's activations have no Cholesky factor");
                else row[j] = std::sqrt(row[j]);
            }
        };
        #pragma omp parallel for schedule(dynamic, 16)
        for (size_t i = 0; i < end; i++)
            for (size_t j = begin; j < end && end < n; j += 4) {
                const size_t count = std::min<size_t>(4, end - j);
                double sums[4][LANES] = {};
                const double *row = &R[i * n], *others[4];
                for (size_t c = 0; c < 4; c++) others[c] = &R[(j + std::min(c, count - 1)) * n];
                for (size_t k = end; k < n; k += LANES) // (n - end is a multiple of SOME)
                    for (size_t c = 0; c < 4; c++)
                        for (size_t l = 0; l < LANES; l++) sums[c][l] += row[k + l] * others[c][k + l];
                for (size_t c = 0; c < count; c++)
                    if (j + c >= i) R[i * n + j + c] -= (sums[c][0] + sums[c][1]) + (sums[c][2] + sums[c][3]);
            }
        for (size_t i = end; i-- > begin;) finish(i);
        #pragma omp parallel for schedule(dynamic, 16)
        for (size_t i = 0; i < begin; i++) finish(i);
    }
    #pragma omp parallel for schedule(dynamic)
    for (size_t first = 0; first < n; first += SOME) {
        const size_t end = std::min(n, first + SOME);
        std::vector<double> mine(end * SOME); // columns first .. end - 1, side by side
        for (size_t i = end; i-- > 0;) {
            double sum[SOME] = {};
            for (size_t k = i + 1; k < end; k++) {
                const double r = R[i * n + k], *u = &mine[k * SOME];
                for (size_t j = 0; j < SOME; j++) sum[j] += r * u[j];
            }
            for (size_t j = first; j < end; j++)
                mine[i * SOME + j - first] = j < i ? 0 : ((i == j) - sum[j - first]) / R[i * n + i];
            for (size_t j = first; j < end; j++) U[i * n + j] = (float)mine[i * SOME + j - first];
        }
    }
    return U;
}
