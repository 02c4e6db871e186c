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
    bool targets[MODULES] = {};
    double scale() const { return alpha / (rslora ? std::sqrt((double)rank) : (double)rank); }
};

// A module's name as most adapters have it: q_proj.
inline std::string module_name(int m) { return strchr(TENSOR_NAMES[m], '.') + 1; }

// The module that PEFT's target_modules names so ("q_proj", "self_attn.q_proj"); -1: none.
int module_of(const std::string& name);

// adapter_config.json as PEFT reads it. `base` names the model, for people. scores: the file has a head's weight too.
std::string adapter_config_json(const AdapterConfig& a, double dropout, const std::string& base, bool scores = false);
// The head of a reward model (1,C): PEFT's name of Qwen3ForSequenceClassification's.
inline constexpr const char* SCORE_TENSOR = "base_model.model.score.weight";

// The model's matrices that the adapter is for, in the model's order.
std::vector<ModelTensor> targeted(const Config& c, const AdapterConfig& a);
size_t adapter_parameters(const Config& c, const AdapterConfig& a);
// PEFT's name of a module's A (rank, in) or B (out, rank).
inline std::string adapter_tensor(int layer, int m, char matrix) {
    return format("base_model.model.model.layers.%d.%s.lora_%c.weight", layer, TENSOR_NAMES[m], matrix);
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
    const int rank = (config.rank + step - 1) / step * step;
    for (int l = 0; l < (int)w.layers.size(); l++)
        for (int m = 0; m < MODULES; m++) {
            if (!config.targets[m]) continue;
            const auto place = place_of(w.layers[l], (TensorKind)m);
            auto& a = place.linear->adapter;
            a.rank = rank, a.true_rank = config.rank, a.s = (float)config.scale();
            a.block[a.modules] = place.block, a.module[a.modules++] = l * MODULES + m;
        }
    return rank;
}

// All numbers of an adapter are one array: the A of each product in the model's order, then the B of each. This is
// where a product's A and B begin in it, and where its h begins within the h of one token.
struct AdapterPlace { size_t A = 0, B = 0, h = 0; };
// Calls f(linear, place) for each product that has an adapter. Returns where the last A, B and h end.
template <class Model, class F> AdapterPlace each_adapter(Model& w, F f) {
    AdapterPlace at;
    auto each_linear = [&](auto g) {
        for (auto& layer : w.layers)
            for (auto* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
                if (linear->adapter.modules) g(*linear, linear->adapter.width());
    };
    each_linear([&](auto& linear, size_t width) { at.B += width * linear.in; });
    each_linear([&](auto& linear, size_t width) {
        f(linear, at);
        at.A += width * linear.in, at.B += width * linear.out(), at.h += width;
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
            const int layer = a.module[j] / MODULES, m = a.module[j] % MODULES, b = a.block[j];
            const size_t row = linear.first_row(b);
            f(adapter_tensor(layer, m, 'A'), kept, in, at.A + j * rank * in, in);
            f(adapter_tensor(layer, m, 'B'), (size_t)linear.rows[b], kept, at.B + row * width + j * rank, width);
        }
    });
}

// The file's numbers as that array (B without s).
template <class Model> std::vector<float> adapter_numbers(Model& w, const AdapterFile& file) {
    std::vector<float> p(each_adapter(w, [](auto&, AdapterPlace) {}).B);
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
        const int rank = adapt(w, file.config, ctx.gpu ? GPU_RANK_STEP : 1);
        const std::vector<float> p = adapter_numbers(w, file);
        const size_t A = each_adapter(w, [](Linear<T>&, AdapterPlace) {}).A; // numbers of all A
        const float s = (float)file.config.scale();
        std::vector<T> stored(p.size());
        for (size_t i = 0; i < p.size(); i++) stored[i] = to_stored<T>(i < A ? p[i] : p[i] * s);
        arena.gpu = ctx.gpu != nullptr;
        T *numbers, *h; // one h for all products: without training it is not read again
        auto plan = [&] { numbers = arena.take<T>(p.size()), h = arena.take<T>((size_t)tokens * 3 * rank); };
        plan();
        arena.allocate("the adapter");
        plan();
        copy_in(ctx, numbers, stored.data(), stored.size());
        each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
            Adapter<T>& a = linear.adapter;
            a.A = numbers + at.A, a.B = numbers + at.B, a.h = h;
        });
    }
};
