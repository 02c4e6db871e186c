/* quantize.h: makes a quantised model of another one, for `qwen3 --quantize`. Included by cli.h.

   A matrix becomes numbers of few bits that share scales (see Linear). Without a text each weight goes to the nearest
   number. With one, GPTQ (Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained
   transformers", 2022) rounds column by column, and moves what each rounding loses to the columns still to come, so
   that the product with the text's activations changes least.

   The file is in a form that others have: INT4 as AWQ's packed words, FP8 as Qwen's own FP8 models, INT8 as export.py
   --int8 writes it. Embedding and head become INT8, or stay as they are.

   Contents    1 Grids    2 A matrix    3 GPTQ's factor of the activations    4 Tensors to write    5 A model
*/
#pragma once
#include "model/adapters.h"
#include "model/device.h"
#include "model/weights.h"
#include "model/write.h"

// Arrays that begin without values: the threads that fill them are the first to touch their pages.
template <class U> struct Unset : std::allocator<U> {
    template <class V> struct rebind { using other = Unset<V>; };
    template <class V> void construct(V*) {}
    template <class V, class... A> void construct(V* at, A&&... a) { ::new ((void*)at) V(std::forward<A>(a)...); }
};
template <class U> using UnsetVector = std::vector<U, Unset<U>>;

// ============================================================================================================= 1 Grids
// What the weights of a group can become: code q stands for (q - zero) * scale; FP8: for the e4m3 q times scale.

struct Grid {
    Format format;
    float scale = 0;
    int zero = 0;

    uint8_t code(float w) const {
        if (scale == 0) return (uint8_t)zero;
        if (format == Format::FP8) return float_to_e4m3(w / scale);
        const double q = std::nearbyint((double)w / scale); // (INT8's scale is wide enough for all)
        if (format == Format::INT8) return (uint8_t)(int8_t)std::clamp(q, -127., 127.);
        return (uint8_t)std::clamp(q + zero, 0., 15.);
    }
    // The codes of n weights: `code` of each, in a form that compilers make vector instructions of.
    void codes(uint8_t* q, const float* w, size_t n) const {
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
    static constexpr double ROUND = 6755399441055744.; // 1.5 * 2^52: added and taken away it rounds to nearest even
    float number(uint8_t q) const {
        if (format == Format::FP8) return e4m3_to_float(q) * scale;
        return (float)(format == Format::INT8 ? (int)(int8_t)q : (int)q - zero) * scale;
    }
};

// The grid of a group of n weights with the least sum of squared errors among a few: INT4 from the least weight to the
// largest, 0 among them, and less wide ones, since it pays to cut off a lone large weight. INT8: see int8_scale.
inline Grid choose_grid(Format format, const float* w, size_t n) {
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
// FP8's, of a block of rows: the largest weight becomes 448, the largest e4m3.
inline Grid choose_block_grid(const float* w, size_t stride, size_t rows, size_t n) {
    float largest = 0;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(w[r * stride + i]));
    Grid grid = {Format::FP8};
    grid.scale = largest == 0 ? 1 : std::max(largest / 448, std::numeric_limits<float>::min());
    return grid;
}

// ========================================================================================================== 2 A matrix

struct QuantizedMatrix {
    Format format;
    size_t rows, in, group, group_rows;
    UnsetVector<uint8_t> q;   // (rows, in), a code each
    UnsetVector<Grid> grids;  // (rows / group_rows, groups)
    size_t groups() const { return (in + group - 1) / group; }
    float at(size_t r, size_t k) const { return grids[r / group_rows * groups() + k / group].number(q[r * in + k]); }
};

// W (rows, in) in a format. `factor` is GPTQ's (see section 3), (in, in), or null: to the nearest. W changes.
// Rows are independent but for FP8's blocks, so a task is 128 rows or fewer. Columns are done in blocks: what a column
// loses goes to those of its block at once, to all others when the block is done.
inline QuantizedMatrix quantize_matrix(float* W, size_t rows, size_t in, Format format, size_t group,
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
// H = X^T X of the activations X (tokens, in). The rounding of column k moves w_j by -lost * U[k][j] / U[k][k], j > k,
// where U^T U = H^-1 with U upper triangular: each row of U says how the columns after k can stand in for it. With H =
// R R^T, R upper triangular (Cholesky's factor, from the last column on), U is R^-1.

// The factor of H + 1% of its diagonal's mean. A column that no activation ever has is `dead`: it may
// become anything, and becomes zero.
inline std::vector<float> gptq_factor(const std::vector<float>& H, size_t n, std::vector<bool>& dead) {
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
    // A block of columns after the other, from the last on: what all columns behind it have of it is taken off first,
    // four of its columns at a time, so that a row is read 16 times and not 64.
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

// H += X^T X. Its numbers are float: sums of products of a window's tokens, then of the windows.
template <class T> void add_squares(Context& ctx, acc<T>* H, const T* X, int tokens, int in) {
    if constexpr (HAS_GPU<T>)
        if (ctx.gpu) return linear_backward_weight_gpu(ctx, H, X, (size_t)in, X, tokens, in, in);
    std::vector<T> columns((size_t)in * tokens); // X^T: as a product of rows it is faster on a CPU
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < in; i++)
        for (int n = 0; n < tokens; n++) columns[(size_t)i * tokens + n] = X[(size_t)n * in + i];
    Linear<T> W;
    W.w[0] = columns.data(), W.rows[0] = in, W.in = tokens;
    RUN(linear_add, H, H, columns.data(), W, in);
}

// ================================================================================================== 4 Tensors to write

// A tensor with its numbers.
template <class U>
OutTensor out_tensor(const std::string& name, const char* dtype, const Shape& shape, UnsetVector<U> numbers) {
    const auto kept = std::make_shared<UnsetVector<U>>(std::move(numbers));
    return {name, dtype, shape, [kept](OutputFile& out) { out.write(kept->data(), kept->size() * sizeof(U)); }};
}

// NAME.weight as the tensors of its format (see quantized.h, section 4). m's codes may be gone then.
inline void add_quantized(std::vector<OutTensor>& out, const std::string& weight, QuantizedMatrix& m) {
    const std::string name = weight.substr(0, weight.size() - strlen(".weight"));
    const size_t rows = m.rows, in = m.in, groups = m.groups(), down = (rows + m.group_rows - 1) / m.group_rows;
    const Shape shape = {(int64_t)rows, (int64_t)in};
    if (m.format == Format::INT4) {
        const size_t words = rows / 8;
        UnsetVector<uint32_t> q(in * words), zeros(groups * words);
        UnsetVector<uint16_t> scales(groups * rows);
        constexpr size_t LINE = 16; // words side by side, a thread's
        #pragma omp parallel for schedule(dynamic)
        for (size_t first = 0; first < words; first += LINE) {
            const size_t end = std::min(words, first + LINE);
            const auto word = [](size_t i, auto code) { // of rows 8 i .. 8 i + 7
                uint32_t w = 0;
                for (size_t r = 8 * i; r < 8 * i + 8; r++) w |= (uint32_t)code(r) << Packed::awq_shift(r);
                return w;
            };
            for (size_t k = 0; k < in; k++)
                for (size_t i = first; i < end; i++)
                    q[k * words + i] = word(i, [&](size_t r) { return m.q[r * in + k]; });
            for (size_t g = 0; g < groups; g++) {
                for (size_t i = first; i < end; i++)
                    zeros[g * words + i] = word(i, [&](size_t r) { return m.grids[r * groups + g].zero; });
                for (size_t r = 8 * first; r < 8 * end; r++)
                    scales[g * rows + r] = float_to_half(m.grids[r * groups + g].scale);
            }
        }
        const int64_t across = (int64_t)words, all = (int64_t)rows;
        out.push_back(out_tensor(name + ".qweight", "I32", {(int64_t)in, across}, std::move(q)));
        out.push_back(out_tensor(name + ".qzeros", "I32", {(int64_t)groups, across}, std::move(zeros)));
        out.push_back(out_tensor(name + ".scales", "F16", {(int64_t)groups, all}, std::move(scales)));
        return;
    }
    const Shape grid = {(int64_t)down, (int64_t)groups};
    const auto scales = [&](auto of) {
        UnsetVector<decltype(of(0.f))> all(m.grids.size());
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < all.size(); i++) all[i] = of(m.grids[i].scale);
        return all;
    };
    const bool fp8 = m.format == Format::FP8;
    out.push_back(out_tensor(weight, fp8 ? "F8_E4M3" : "I8", shape, std::move(m.q)));
    if (fp8) out.push_back(out_tensor(weight + "_scale_inv", "F32", grid, scales([](float s) { return s; })));
    else out.push_back(out_tensor(weight + "_scale", "BF16", grid, scales([](float s) { return to_bf16(s).bits; })));
}

// =========================================================================================================== 5 A model

struct Quantization {
    Format format = Format::PLAIN;
    int group = 0;                // INT4: 32, 64 or 128
    bool keep_embedding = false;  // and head
    std::vector<int> text;        // calibration; none: to the nearest
    int window = 512;             // tokens
    size_t most_windows = 128;
    std::function<void(size_t done, size_t all, int layer)> progress = [](size_t, size_t, int) {};

    size_t windows() const { return std::min(most_windows, text.size() / (size_t)window); }
    size_t group_of() const { return format == Format::INT4 ? (size_t)group : format == Format::INT8 ? GROUP : 128; }
    // config.json's quantization_config as others write it; "": the format is none of theirs.
    std::string config() const {
        sj::Writer w;
        w.object();
        if (format == Format::INT4) {
            w.field("bits", 4).field("group_size", group).field("quant_method", "awq").field("version", "gemm");
            w.field("zero_point", true);
        } else if (format == Format::FP8) {
            w.field("activation_scheme", "dynamic").field("fmt", "e4m3").field("quant_method", "fp8");
            w.key("weight_block_size").array().value(128).value(128).end();
        } else {
            return "";
        }
        return w.key("modules_to_not_convert").array().value("lm_head").end().end().text;
    }
};

// Throws what a format cannot hold of a model's shapes.
inline void check_groups(const ModelFile& file, const Quantization& how) {
    const char* path = file.path.c_str();
    for (const ModelTensor& t : model_tensors(file.config))
        if (how.format == Format::INT4 && t.kind < MODULES && (t.rows % 8 || t.columns % how.group))
            DIE("%s: %s (%d,%d) is not in groups of %d columns and words of 8 rows", path, t.name().c_str(), t.rows,
                t.columns, how.group);
}
// ... of the model, before anything is computed.
inline void check_quantization(const ModelFile& file, const Quantization& how) {
    if (file.is_quantized() || file.is_int8())
        DIE("%s: is quantised already; --convert makes bf16 of it", file.path.c_str());
    check_groups(file, how);
    if (!how.text.empty() && how.windows() == 0)
        DIE("the calibration text has %zu tokens, a window %d", how.text.size(), how.window);
}

// All numbers of a matrix, checked: finite, and such that the format's scales hold them.
inline void numbers_to_quantize(UnsetVector<float>& w, const ModelFile& file, const ModelTensor& m, Format to) {
    const auto found = file.tensors.find(m.name());
    if (found == file.tensors.end()) DIE("%s: no tensor %s", file.path.c_str(), m.name().c_str());
    need_shape(m.name(), found->second, m.shape());
    if (!found->second.is_plain()) DIE("%s: tensor %s is not BF16, F16 or F32", file.path.c_str(), m.name().c_str());
    w.clear(), w.resize(m.size()); // (nothing is copied)
    if (!read_numbers(w.data(), found->second))
        DIE("%s: tensor %s has an infinity or a NaN", file.path.c_str(), m.name().c_str());
    // INT4: a group's width, at most twice its largest weight, is 15 steps of a half. FP8: see kept_as.
    const float most = to == Format::INT4 ? 480000 : to == Format::FP8 ? 5e32f : std::numeric_limits<float>::max();
    float largest = 0;
    #pragma omp parallel for schedule(static) reduction(max : largest)
    for (size_t i = 0; i < w.size(); i++) largest = std::max(largest, std::fabs(w[i]));
    if (largest > most)
        DIE("%s: tensor %s has %g, beyond what the format's scales hold", file.path.c_str(), m.name().c_str(), largest);
}

// What calibration needs: the text's windows at the entry of a layer, and one layer's arrays; where the context computes.
template <class T> struct Calibration {
    const ModelFile& file;
    const Quantization& how;
    Context ctx;
    Weights<T> weights;
    size_t windows;
    int N;                                // tokens of a window
    Arena arena;
    std::vector<acc<T>*> in;              // (windows) of (N,C)
    typename Activations<T>::PerLayer a;
    KVCache<T> cache;
    acc<T>* rope;
    int *tokens, *positions, *sequence, *table;
    // H = X^T X, (in,in), of what enters the layer's four products, over all windows. Its numbers are float: sums of
    // products of a window's tokens, then of the windows.
    struct Squares { acc<T>* H; int in; } squares[4]; // qkv, o, gate_up, down
    std::vector<std::vector<T>> quantized; // on a CPU: of the layer at work

    Calibration(const ModelFile& f, const Quantization& q, const Context& where)
        : file(f), how(q), ctx(where), weights(f), windows(q.windows()), N(q.window) {
        const Config& c = file.config;
        arena.gpu = ctx.gpu != nullptr;
        if constexpr (HAS_GPU<T>) if (ctx.gpu) weights.upload(ctx, file);
        ctx.invariant = true; // (norms leave what they made, whatever N is)
        plan();
        arena.allocate("the calibration");
        plan();
        std::vector<acc<T>> angles((size_t)N * c.D);
        fill_rope(angles.data(), N, c.D, c.rope_theta);
        copy_in(ctx, rope, angles.data(), angles.size());
        copy_in(ctx, tokens, how.text.data(), windows * N);
        std::vector<int> from_zero(N);
        std::iota(from_zero.begin(), from_zero.end(), 0);
        copy_in(ctx, positions, from_zero.data(), from_zero.size());
        copy_in(ctx, table, from_zero.data(), pages());
        for (size_t i = 0; i < windows; i++) {
            const Batch b = batch(i);
            RUN(embed, in[i], weights.embed, b, c.C);
        }
    }
    size_t pages() const { return (size_t)(N + PAGE - 1) / PAGE; }
    void plan() {
        const Config& c = file.config;
        in.clear();
        for (size_t i = 0; i < windows; i++) in.push_back(arena.take<acc<T>>((size_t)N * c.C));
        a.mid = arena.take<acc<T>>((size_t)N * c.C), a.out = arena.take<acc<T>>((size_t)N * c.C);
        a.norm1 = arena.take<T>((size_t)N * c.C), a.norm2 = arena.take<T>((size_t)N * c.C);
        a.qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
        a.q = arena.take<T>((size_t)N * c.H * c.D), a.attention = arena.take<T>((size_t)N * c.H * c.D);
        a.gate_up = arena.take<T>((size_t)N * 2 * c.F), a.hidden = arena.take<T>((size_t)N * c.F);
        cache.plan(arena, c, pages(), true);
        rope = arena.take<acc<T>>((size_t)N * c.D);
        tokens = arena.take<int>(windows * N);
        positions = arena.take<int>(N), sequence = arena.take<int>(N), table = arena.take<int>(pages()); // (sequence: 0)
        const int widths[] = {c.C, c.H * c.D, c.C, c.F};
        for (int k = 0; k < 4; k++) squares[k] = {arena.take<acc<T>>((size_t)widths[k] * widths[k]), widths[k]};
        if constexpr (WITH_GPU) if (ctx.gpu) plan_scratch(ctx, arena, c, N, 0, 1, 0);
    }
    Batch batch(size_t window) const {
        Batch b = {N, 1, tokens + window * N, positions, sequence, positions, table, (int)pages()};
        b.longest = N;
        return b;
    }
    void forward(int l, size_t window) {
        a.in = in[window];
        layer_forward(ctx, file.config, weights.layers[l], batch(window), a, cache.keys, cache.values, rope);
    }
    template <class F> void sum_squares(int l, F each) {
        for (const Squares& s : squares) clear(ctx, s.H, (size_t)s.in * s.in);
        for (size_t i = 0; i < windows; i++) {
            forward(l, i);
            const T* const x[] = {a.norm1, a.attention, a.norm2, a.hidden};
            for (int k = 0; k < 4; k++) add_squares(ctx, squares[k].H, x[k], N, squares[k].in);
            each();
        }
    }
    std::vector<float> squares_of(int product) {
        std::vector<float> H((size_t)squares[product].in * squares[product].in);
        copy_out(ctx, H.data(), squares[product].H, H.size());
        return H;
    }
    // The layer computes with the quantised matrix from now on.
    void replace(const ModelTensor& t, const QuantizedMatrix& m) {
        std::vector<T> numbers(m.q.size());
        for (size_t i = 0; i < m.q.size(); i++) numbers[i] = to_stored<T>((acc<T>)m.at(i / m.in, i % m.in));
        const T*& W = place_of(weights, t).numbers();
        if (ctx.gpu) return copy_in(ctx, (T*)W, numbers.data(), numbers.size()); // (it is a copy of the file's)
        quantized.push_back(std::move(numbers));
        W = quantized.back().data();
    }
    template <class F> void pass_on(int l, F each) { // to the next layer's entry, in its place
        acc<T>* const out = a.out;
        for (size_t i = 0; i < windows; i++) {
            a.out = in[i];
            forward(l, i);
            each();
        }
        a.out = out;
        quantized.clear(); // (nobody computes this layer again)
    }
};

// The tensors of the quantised model, those with the widest numbers first, so that all are aligned.
template <class T>
std::vector<OutTensor> quantize_model(const ModelFile& file, const Quantization& how, const Context& ctx) {
    check_quantization(file, how);
    std::vector<OutTensor> out;
    std::unique_ptr<Calibration<T>> calibration;
    if (!how.text.empty()) calibration = std::make_unique<Calibration<T>>(file, how, ctx);
    const size_t per_layer = 2 * how.windows() + MODULES, all = (size_t)file.config.L * per_layer;
    size_t done = 0;
    int layer = -1;
    auto step = [&] {
        if (ctx.stop && *ctx.stop) DIE("interrupted");
        how.progress(++done, all, layer);
    };
    UnsetVector<float> W;
    std::vector<float> factor;
    std::vector<bool> dead;
    for (const ModelTensor& t : model_tensors(file.config)) {
        const auto found = file.tensors.find(t.name());
        if (t.kind == HEAD && file.bare && found == file.tensors.end()) continue;
        const bool module = t.kind < MODULES, matrix = module || t.kind == EMBED || t.kind == HEAD;
        if (!matrix || (!module && how.keep_embedding)) {
            if (found == file.tensors.end()) DIE("%s: no tensor %s", file.path.c_str(), t.name().c_str());
            const Tensor& same = found->second;
            need_shape(t.name(), same, t.shape());
            out.push_back({t.name(), written_type(t.name(), same), same.shape,
                           [&same, name = t.name()](OutputFile& o) { write_tensor(o, name, same); }});
            continue;
        }
        numbers_to_quantize(W, file, t, module ? how.format : Format::INT8);
        const size_t rows = (size_t)t.rows, columns = (size_t)t.columns;
        if (!module) {
            QuantizedMatrix m = quantize_matrix(W.data(), rows, columns, Format::INT8, GROUP, nullptr);
            add_quantized(out, t.name(), m);
            W = {}; // (the largest matrix: its room is not kept)
            continue;
        }
        const bool begins = t.layer != layer;
        layer = t.layer;
        if (calibration && begins) calibration->sum_squares(layer, step);
        const int product = t.kind == Q_PROJ ? 0 : t.kind == O_PROJ ? 1 : t.kind == GATE_PROJ ? 2 : t.kind == DOWN_PROJ ? 3 : -1;
        if (calibration && product >= 0) // k, v and up see what q and gate see
            factor = gptq_factor(calibration->squares_of(product), columns, dead);
        for (size_t i = 0; i < W.size() && calibration; i++)
            if (dead[i % columns]) W[i] = 0;
        QuantizedMatrix m = quantize_matrix(W.data(), rows, columns, how.format, how.group_of(),
                                            calibration ? &factor : nullptr);
        if (calibration) calibration->replace(t, m);
        add_quantized(out, t.name(), m);
        step();
        if (calibration && t.kind == DOWN_PROJ) calibration->pass_on(layer, step);
    }
    auto size = [](const OutTensor& t) { return dtype_named(t.dtype)->size; };
    std::stable_sort(out.begin(), out.end(), [&](auto& a, auto& b) { return size(a) > size(b); });
    return out;
}

// The config's text with a quantization_config.
inline std::string quantized_config(const ModelFile& file, const Quantization& how) {
    const std::string config = how.config();
    if (config.empty()) return file.config_text;
    const size_t end = file.config_text.rfind('}');
    return file.config_text.substr(0, end) + ", \"quantization_config\": " + config + file.config_text.substr(end);
}
