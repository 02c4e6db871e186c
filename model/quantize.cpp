// model/quantize.cpp: makes a quantised model of another one.
//   Contents    1 Tensors to write    2 Checks    3 Calibration    4 A model
#include "model/quantize.h"
#include "base/arena.h"
#include "model/weights.h"
#include "sj.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>

// ================================================================================================== 1 Tensors to write

// A tensor with its numbers.
template <class U>
static OutTensor out_tensor(const std::string& name, const char* dtype, const Shape& shape, UnsetVector<U> numbers) {
    const auto kept = std::make_shared<UnsetVector<U>>(std::move(numbers));
    return {name, dtype, shape, [kept](OutputFile& out) { out.write(kept->data(), kept->size() * sizeof(U)); }};
}

// NAME.weight as the tensors of its format (see quantized.h, section 4). m's codes may be gone then.
static void add_quantized(std::vector<OutTensor>& out, const std::string& weight, QuantizedMatrix& m) {
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

// ============================================================================================================ 2 Checks

std::string Quantization::config() const {
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

void check_groups(const ModelFile& file, const Quantization& how) {
    const char* path = file.path.c_str();
    for (const ModelTensor& t : model_tensors(file.config))
        if (how.format == Format::INT4 && t.kind < MODULES && (t.rows % 8 || t.columns % how.group))
            DIE("%s: %s (%d,%d) is not in groups of %d columns and words of 8 rows", path, t.name().c_str(), t.rows,
                t.columns, how.group);
}

// Throws Error if a model cannot be quantised, before anything is computed.
static void check_quantization(const ModelFile& file, const Quantization& how, const Context& ctx) {
    if (file.is_quantized() || file.is_int8())
        DIE("%s: is quantised already; --convert makes bf16 of it", file.path.c_str());
    check_groups(file, how);
    if (!how.text.empty() && file.config.E && ctx.gpu)
        DIE("%s: a mixture of experts is calibrated on the CPU", file.path.c_str());
    if (!how.text.empty() && how.windows() == 0)
        DIE("the calibration text has %zu tokens, a window %d", how.text.size(), how.window);
}

// All numbers of a matrix, checked: finite, and such that the format's scales hold them.
static void numbers_to_quantize(UnsetVector<float>& w, const ModelFile& file, const ModelTensor& m, Format to) {
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

// ======================================================================================================= 3 Calibration

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

// Calibration's data, where the context computes: the text's windows at the entry of a layer, and one layer's arrays.
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
    // H = X^T X, (in,in), where X is the input of the layer's four products over all windows. Its numbers are float:
    // sums of products of a window's tokens, then of the windows.
    struct Squares { acc<T>* H; int in; } squares[4]; // qkv, o, gate_up, down
    // Experts have inputs of their own. They are kept, since most windows have few tokens for an expert.
    struct OfExpert {
        std::vector<size_t> tokens; // rows of norm2
        std::vector<T> hidden;      // (tokens,M)
    };
    std::vector<OfExpert> experts; // of the layer at work
    std::vector<T> norm2;          // (windows N, C)
    std::vector<std::vector<T>> quantized; // on a CPU: of the layer at work

    Calibration(const ModelFile& f, const Quantization& q, const Context& where);
    size_t pages() const { return (size_t)(N + PAGE - 1) / PAGE; }
    void plan();
    Batch batch(size_t window) const;
    void forward(int l, size_t window);
    void sum_squares(int l, const std::function<void()>& each);
    void keep_inputs_of_experts();
    std::vector<float> squares_of(const ModelTensor& t);
    // From now on the layer computes with the quantised matrix.
    void replace(const ModelTensor& t, const QuantizedMatrix& m);
    void pass_on(int l, const std::function<void()>& each); // to the next layer's entry, in its place
};

template <class T>
Calibration<T>::Calibration(const ModelFile& f, const Quantization& q, const Context& where)
    : file(f), how(q), ctx(where), weights(f), windows(q.windows()), N(q.window) {
    const Config& c = file.config;
    arena.gpu = ctx.gpu != nullptr;
    if constexpr (HAS_GPU<T>) if (ctx.gpu) weights.upload(ctx, file);
    ctx.invariant = true; // (norms leave their earlier output, whatever N is)
    plan();
    arena.allocate("the calibration");
    plan();
    std::vector<acc<T>> angles((size_t)N * c.D);
    fill_rope(angles.data(), N, c.D, c.rope_theta, c.rope_scaling);
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

template <class T> void Calibration<T>::plan() {
    const Config& c = file.config;
    in.clear();
    for (size_t i = 0; i < windows; i++) in.push_back(arena.take<acc<T>>((size_t)N * c.C));
    Activations<T> all;
    all.plan(arena, c, N);
    a = all.layer[0];
    a.norm1 = arena.take<T>((size_t)N * c.C); // (apart from norm2, as the squares of both are needed)
    cache.plan(arena, c, pages(), true);
    rope = arena.take<acc<T>>((size_t)N * c.D);
    tokens = arena.take<int>(windows * N);
    positions = arena.take<int>(N), sequence = arena.take<int>(N), table = arena.take<int>(pages()); // (sequence: 0)
    const int widths[] = {c.C, c.H * c.D, c.C, c.F};
    for (int k = 0; k < 4; k++) squares[k] = {arena.take<acc<T>>((size_t)widths[k] * widths[k]), widths[k]};
#ifdef QWEN3_GPU
    if (ctx.gpu) plan_scratch(ctx, arena, c, N, 0, 1, 0);
#endif
}

template <class T> Batch Calibration<T>::batch(size_t window) const {
    Batch b = {N, 1, tokens + window * N, positions, sequence, positions, table, (int)pages()};
    b.longest = N;
    return b;
}

template <class T> void Calibration<T>::forward(int l, size_t window) {
    a.in = in[window];
    layer_forward(ctx, file.config, weights.layers[l], batch(window), a, cache.layer(0), rope);
}

template <class T> void Calibration<T>::sum_squares(int l, const std::function<void()>& each) {
    for (const Squares& s : squares) clear(ctx, s.H, (size_t)s.in * s.in);
    norm2.clear();
    experts.assign(weights.layers[l].experts.size(), {});
    for (size_t i = 0; i < windows; i++) {
        forward(l, i);
        const T* const x[] = {a.norm1, a.attention, a.norm2, a.hidden};
        for (int k = 0; k < (experts.empty() ? 4 : 2); k++) add_squares(ctx, squares[k].H, x[k], N, squares[k].in);
        if (!experts.empty()) keep_inputs_of_experts();
        each();
    }
}

template <class T> void Calibration<T>::keep_inputs_of_experts() {
    const Config& c = file.config;
    const size_t before = norm2.size() / c.C;
    norm2.insert(norm2.end(), a.norm2, a.norm2 + (size_t)N * c.C);
    for (size_t e = 0; e < experts.size(); e++) {
        const size_t first = a.routed.first[e], last = a.routed.first[e + 1];
        for (size_t i = first; i < last; i++) experts[e].tokens.push_back(before + a.routed.pair[i] / c.k);
        experts[e].hidden.insert(experts[e].hidden.end(), a.hidden + first * c.M, a.hidden + last * c.M);
    }
}

template <class T> std::vector<float> Calibration<T>::squares_of(const ModelTensor& t) {
    const size_t in = t.columns;
    std::vector<float> H(in * in);
    if (t.expert < 0) {
        const int product = t.kind == O_PROJ ? 1 : t.kind == GATE_PROJ ? 2 : t.kind == DOWN_PROJ ? 3 : 0;
        copy_out(ctx, H.data(), squares[product].H, H.size());
        return H;
    }
    const OfExpert& of = experts[t.expert];
    constexpr size_t SOME = 4096; // tokens at a time
    std::vector<T> x;
    for (size_t first = 0; first < of.tokens.size(); first += SOME) {
        const size_t n = std::min(SOME, of.tokens.size() - first);
        if (t.kind == GATE_PROJ) {
            x.resize(n * in);
            for (size_t i = 0; i < n; i++) std::copy_n(&norm2[of.tokens[first + i] * in], in, &x[i * in]);
        }
        add_squares(ctx, H.data(), t.kind == GATE_PROJ ? x.data() : &of.hidden[first * in], (int)n, (int)in);
    }
    return H;
}

template <class T> void Calibration<T>::replace(const ModelTensor& t, const QuantizedMatrix& m) {
    std::vector<T> numbers(m.q.size());
    for (size_t i = 0; i < m.q.size(); i++) numbers[i] = to_stored<T>((acc<T>)m.at(i / m.in, i % m.in));
    const T*& W = place_of(weights, t).numbers();
    if (ctx.gpu) return copy_in(ctx, (T*)W, numbers.data(), numbers.size()); // (it is a copy of the file's)
    quantized.push_back(std::move(numbers));
    W = quantized.back().data();
}

template <class T> void Calibration<T>::pass_on(int l, const std::function<void()>& each) {
    acc<T>* const out = a.out;
    for (size_t i = 0; i < windows; i++) {
        a.out = in[i];
        forward(l, i);
        each();
    }
    a.out = out;
    quantized.clear(); // (this layer is not computed again)
}

// =========================================================================================================== 4 A model

// The tensors of the quantised model, those with the widest numbers first, so that all are aligned.
template <class T>
std::vector<OutTensor> quantize_model(const ModelFile& file, const Quantization& how, const Context& ctx,
                                      RoundedExperts* report) {
    check_quantization(file, how, ctx);
    std::vector<OutTensor> out;
    std::unique_ptr<Calibration<T>> calibration;
    if (!how.text.empty()) calibration = std::make_unique<Calibration<T>>(file, how, ctx);
    const std::vector<ModelTensor> tensors = model_tensors(file.config);
    size_t done = 0, all = (size_t)file.config.L * 2 * how.windows(); // steps
    for (const ModelTensor& t : tensors) all += t.kind < MODULES;
    int layer = -1;
    auto step = [&] {
        if (ctx.stop && *ctx.stop) DIE("interrupted");
        how.progress(++done, all, layer);
    };
    UnsetVector<float> W;
    std::vector<float> factor; // empty: to the nearest
    std::vector<bool> dead;
    RoundedExperts rounded;
    for (const ModelTensor& t : tensors) {
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
        const bool same_input = t.kind == K_PROJ || t.kind == V_PROJ || t.kind == UP_PROJ; // as the matrix before
        if (calibration && !same_input) {
            const bool few = t.expert >= 0 && calibration->experts[t.expert].tokens.size() < columns;
            factor = few ? std::vector<float>() : gptq_factor(calibration->squares_of(t), columns, dead);
        }
        for (size_t i = 0; i < W.size() && !factor.empty(); i++)
            if (dead[i % columns]) W[i] = 0;
        QuantizedMatrix m = quantize_matrix(W.data(), rows, columns, how.format, how.group_of(),
                                            factor.empty() ? nullptr : &factor);
        if (calibration) calibration->replace(t, m);
        add_quantized(out, t.name(), m);
        step();
        if (!calibration || t.kind != DOWN_PROJ) continue;
        const Config& c = file.config;
        if (t.expert >= 0) {
            const size_t tokens = calibration->experts[t.expert].tokens.size();
            rounded.all++, rounded.some += tokens < (size_t)std::max(c.C, c.M), rounded.unreached += tokens == 0;
        }
        if (t.expert < 0 || t.expert + 1 == c.E) calibration->pass_on(layer, step);
    }
    if (report) *report = rounded;
    auto size = [](const OutTensor& t) { return dtype_named(t.dtype)->size; };
    std::stable_sort(out.begin(), out.end(), [&](auto& a, auto& b) { return size(a) > size(b); });
    return out;
}

std::string quantized_config(const ModelFile& file, const Quantization& how) {
    const std::string config = how.config();
    if (config.empty()) return file.config_text;
    const size_t end = file.config_text.rfind('}');
    return file.config_text.substr(0, end) + ", \"quantization_config\": " + config + file.config_text.substr(end);
}

#define INSTANTIATE(T) \
    template std::vector<OutTensor> quantize_model<T>(const ModelFile&, const Quantization&, const Context&, \
                                                      RoundedExperts*); \
    template void add_squares<T>(Context&, acc<T>*, const T*, int, int);
INSTANTIATE(bf16)
INSTANTIATE(float)
#undef INSTANTIATE
