// model/adapters.h: adapters in PEFT's format, a folder with adapter_config.json and adapter_model.safetensors; read,
// and attached to a model. The weights stay as they are: see Adapter.
#pragma once
#include "model/model_file.h"
#include <set>
#include <strings.h>

constexpr int MAX_RANK = 1024;
constexpr int GPU_RANK_STEP = 8; // the GPU's kernels take multiples of 8

struct AdapterConfig {
    int rank = 0;
    double alpha = 0;
    bool rslora = false; // Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA", 2023
    bool dora = false;   // Liu et al., "DoRA: weight-decomposed low-rank adaptation", 2024
    bool targets[MODULES] = {};
    bool embed = false, head = false; // PEFT's modules_to_save: whole matrices in place of the model's
    bool saves() const { return embed || head; }
    double scale() const { return alpha / (rslora ? std::sqrt((double)rank) : (double)rank); }
};

// A module's name as most adapters have it: q_proj.
inline std::string module_name(int m) { return strchr(TENSOR_NAMES[m], '.') + 1; }

// A module's number, which names its dropout masks, and back: layer, kind, expert (or -1).
struct ModuleOf { int layer, kind, expert; };
inline int module_number(const ModuleOf& m, int layers) {
    return ((m.expert + 1) * layers + m.layer) * MODULES + m.kind;
}
inline ModuleOf module_numbered(int number, int layers) {
    return {number / MODULES % layers, number % MODULES, number / (MODULES * layers) - 1};
}

// The module that PEFT's target_modules names so ("q_proj", "self_attn.q_proj"); -1: none.
int module_of(const std::string& name);

// adapter_config.json as PEFT reads it. `base` names the model, for people. scores: the file has a head's weight too.
std::string adapter_config_json(const AdapterConfig& a, double dropout, const std::string& base, bool scores = false);
// The head of a reward model (1,C): PEFT's name of Qwen3ForSequenceClassification's.
inline constexpr const char* SCORE_TENSOR = "base_model.model.score.weight";

// Throws Error if the adapter is DoRA's, of experts. name: for the message.
void check_dora(const char* name, const Config& c, const AdapterConfig& a);

// The model's matrices that the adapter is for, in the model's order.
std::vector<ModelTensor> targeted(const Config& c, const AdapterConfig& a);
size_t adapter_parameters(const Config& c, const AdapterConfig& a); // with the saved matrices
// The matrices that the adapter replaces: the embedding, the head. A tied model's become two.
std::vector<ModelTensor> saved_tensors(const Config& c, const AdapterConfig& a);
inline std::string saved_name(const ModelTensor& t) { return "base_model.model." + t.name(); } // as PEFT names it
template <class T> Linear<T>& saved_in(Weights<T>& w, const ModelTensor& t) {
    return t.kind == EMBED ? w.embed : w.head;
}
template <class T> Linear<T> saved_linear(const ModelTensor& t, const T* numbers) {
    Linear<T> linear;
    linear.w[0] = numbers, linear.rows[0] = t.rows, linear.in = t.columns;
    return linear;
}
// PEFT's name of a module's A (rank, in), B (out, rank) or DoRA's m (out).
std::string adapter_tensor(const ModuleOf& m, char matrix);
inline std::string adapter_tensor(int layer, int kind, char matrix) {
    return adapter_tensor({layer, kind, -1}, matrix);
}
inline std::string adapter_tensor(const ModelTensor& t, char matrix) {
    return adapter_tensor({t.layer, t.kind, t.expert}, matrix);
}

// An adapter's files, checked against the model: exactly the required tensors are there, with the right shapes and
// finite numbers.
struct AdapterFile {
    std::string path;
    MappedFile map;
    Tensors tensors;
    Metadata metadata;
    Starters starters; // none: the model's
    AdapterConfig config;

    // copied: other programs may be changing the files. scores: a reward model's adapter; any other is refused, and
    // else that one.
    AdapterFile(const std::string& folder, const Config& c, bool copied = false, bool scores = false);
    // Its own embedding and head, as far as it has them.
    std::vector<ModelTensor> saved() const;

  private:
    // PEFT names tensors by the class that it wraps: base_model.model.model.layers.0 of a causal model, without the
    // second model. of a bare one, with 0.auto_model. of a SentenceTransformer.
    void name_as_usual();
    void check(const std::string& name, const Shape& shape) const;
};

// ---- Adapters in memory. `w` is Weights, or any type with the same `layers`.

// Gives every targeted product of the model its Adapter, with no memory for A, B and h yet. Their rank is the config's,
// rounded up to a multiple of `step`; it is returned.
template <class Model> int adapt(Model& w, const AdapterConfig& config, int step = 1) {
    const int rank = (config.rank + step - 1) / step * step, layers = (int)w.layers.size();
    auto give = [&](const ModuleOf& m) {
        const auto place = place_of(w.layers[m.layer], (TensorKind)m.kind, m.expert);
        auto& a = place.linear->adapter;
        a.rank = rank, a.true_rank = config.rank, a.s = (float)config.scale(), a.dora.on = config.dora;
        a.block[a.modules] = place.block, a.module[a.modules++] = module_number(m, layers);
    };
    for (int l = 0; l < layers; l++)
        for (int m = 0; m < MODULES; m++) {
            if (!config.targets[m]) continue;
            const int experts = m < GATE_PROJ ? 0 : (int)w.layers[l].experts.size();
            if (!experts) give({l, m, -1});
            for (int e = 0; e < experts; e++) give({l, m, e});
        }
    return rank;
}

// All numbers of an adapter are one array: the A of each product in the model's order, the B of each, then the m of
// each. This is where a product's A, B and m begin in it, and where its h and u begin within those of one token.
// (Experts share one h, since each is done with it before the next begins.)
struct AdapterPlace { size_t A = 0, B = 0, m = 0, h = 0, u = 0; };
// Calls f(linear, place) for each product that has an adapter. Returns where the last of each end.
template <class Model, class F> AdapterPlace each_adapter(Model& w, F f) {
    AdapterPlace at;
    auto each_linear = [&](auto g) {
        for (auto& layer : w.layers)
            each_product(layer, [&](auto& linear) {
                const bool shared = !layer.experts.empty() && &linear != &layer.qkv && &linear != &layer.o;
                if (linear.adapter.modules) g(linear, linear.adapter.width(), shared);
            });
    };
    each_linear([&](auto& linear, size_t width, bool shared) {
        at.B += width * linear.in, at.m += width * (linear.in + linear.out());
        if (shared) at.h = std::max(at.h, width);
    });
    each_linear([&](auto& linear, size_t width, bool shared) {
        const size_t rows = linear.adapter.dora.on ? linear.out() : 0;
        f(linear, AdapterPlace{at.A, at.B, at.m, shared ? 0 : at.h, at.u});
        at.A += width * linear.in, at.B += width * linear.out(), at.h += shared ? 0 : width;
        at.m += rows, at.u += rows;
    });
    return at;
}

// Calls f(name, rows, columns, at, stride) for each of PEFT's tensors: its row r is `columns` numbers of that array,
// from at + r * stride on. Numbers between the rows are zero.
template <class Model, class F> void each_adapter_tensor(Model& w, F f) {
    each_adapter(w, [&](auto& linear, AdapterPlace at) {
        const auto& a = linear.adapter;
        const size_t rank = a.rank, kept = a.true_rank, in = linear.in, width = a.width();
        for (int j = 0; j < a.modules; j++) {
            const ModuleOf m = module_numbered(a.module[j], (int)w.layers.size());
            const int b = a.block[j];
            const size_t row = linear.first_row(b);
            f(adapter_tensor(m, 'A'), kept, in, at.A + j * rank * in, in);
            f(adapter_tensor(m, 'B'), (size_t)linear.rows[b], kept, at.B + row * width + j * rank, width);
            if (a.dora.on) f(adapter_tensor(m, 'm'), 1, (size_t)linear.rows[b], at.m + row, (size_t)linear.rows[b]);
        }
    });
}

// The file's numbers as that array (B without s).
template <class Model> std::vector<float> adapter_numbers(Model& w, const AdapterFile& file) {
    std::vector<float> p(each_adapter(w, [](auto&, AdapterPlace) {}).m);
    each_adapter_tensor(w, [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t stride) {
        const Tensor& t = file.tensors.at(name);
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < columns; i++) p[at + r * stride + i] = number(t, r * columns + i);
    });
    return p;
}

// An adapter in use, for batches of up to `tokens`. The weights point into it.
template <class T> struct AttachedAdapter {
    Arena arena;

    template <class Model> AttachedAdapter(Context& ctx, Model& w, const AdapterFile& file, int tokens) {
        if (!std::is_same_v<Model, Weights<T>> && file.config.saves())
            DIE("%s: it has its own embedding or head (modules_to_save): one model's adapters share these; name it in "
                "--adapter alone, or merge it", file.path.c_str());
        if (!std::is_same_v<Model, Weights<T>> && file.config.dora)
            DIE("%s: DoRA (use_dora) beside other adapters; name it in --adapter alone, or merge it",
                file.path.c_str());
        const int rank = adapt(w, file.config, ctx.gpu ? GPU_RANK_STEP : 1);
        for (auto& layer : w.layers)
            if (ctx.gpu && !layer.experts.empty() &&
                (layer.experts[0].gate_up.adapter.rank || layer.experts[0].down.adapter.rank))
                DIE("%s: adapters of experts run on the CPU only", file.path.c_str());
        const std::vector<float> p = adapter_numbers(w, file);
        const AdapterPlace end = each_adapter(w, [](Linear<T>&, AdapterPlace) {});
        size_t rows = 0; // of the product with the most
        each_adapter(w, [&](Linear<T>& linear, AdapterPlace) { rows = std::max(rows, (size_t)linear.out()); });
        const float s = (float)file.config.scale();
        std::vector<T> stored(p.size());
        for (size_t i = 0; i < p.size(); i++) stored[i] = to_stored<T>(i < end.A ? p[i] : p[i] * s);
        size_t all = 0; // numbers of saved matrices
        for (const ModelTensor& t : file.saved()) all += t.size();
        arena.gpu = ctx.gpu != nullptr;
        T *numbers, *h, *u, *saved; // one h and u for all products: without training they are not read again
        acc<T>*m, *norm, *c;
        auto plan = [&] {
            numbers = arena.take<T>(p.size()), h = arena.take<T>((size_t)tokens * 3 * rank);
            saved = arena.take<T>(all);
            u = arena.take<T>(end.u ? tokens * rows : 0);
            for (acc<T>** of : {&m, &norm, &c}) *of = arena.take<acc<T>>(end.u);
        };
        plan();
        arena.allocate("the adapter");
        plan();
        copy_in(ctx, numbers, stored.data(), stored.size());
        each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
            Adapter<T>& a = linear.adapter;
            a.A = numbers + at.A, a.B = numbers + at.B, a.h = h;
            if (!a.dora.on) return;
            const std::vector<acc<T>> lengths(&p[at.m], &p[at.m] + linear.out());
            copy_in(ctx, m + at.u, lengths.data(), lengths.size());
            a.dora.m = m + at.u, a.dora.norm = norm + at.u, a.dora.c = c + at.u, a.dora.u = u;
            dora_norm(ctx, linear);
        });
        if (acc<T> one; end.u) copy_out(ctx, &one, c, 1); // other streams read c, too: waits for this one
        if constexpr (std::is_same_v<Model, Weights<T>>)
            for (const ModelTensor& t : file.saved()) {
                const Tensor& from = file.tensors.at(saved_name(t));
                std::vector<T> copy(t.size());
                for (size_t i = 0; i < copy.size(); i++) copy[i] = to_stored<T>(number(from, i));
                copy_in(ctx, saved, copy.data(), copy.size());
                saved_in(w, t) = saved_linear<T>(t, saved);
                saved += t.size();
            }
    }
};
