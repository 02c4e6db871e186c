// model/tensors.h: the model's tensors: their names in files, their shapes, their places in Weights.
#pragma once
#include "model/quantized.h"

// The one table of their names, shapes and places. All code that reads, writes, samples, trains or uploads all weights
// uses it.

// The first seven are the modules: the products that can have an adapter. (Their numbers name the dropout masks: see
// Adapter.)
enum TensorKind {
    Q_PROJ, K_PROJ, V_PROJ, O_PROJ, GATE_PROJ, UP_PROJ, DOWN_PROJ,
    INPUT_NORM, Q_NORM, K_NORM, POST_NORM, ROUTER, EMBED, FINAL_NORM, HEAD
};
constexpr int MODULES = DOWN_PROJ + 1;
constexpr const char* TENSOR_NAMES[] = { // by TensorKind
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm",
    "mlp.gate", "model.embed_tokens", "model.norm", "lm_head"};

struct ModelTensor {
    TensorKind kind;
    int layer;         // -1: of the model as a whole
    int rows, columns; // a matrix (rows, columns); columns = 0: a vector of `rows` numbers
    int expert = -1;   // of GATE_PROJ, UP_PROJ and DOWN_PROJ; -1: of the layer's only MLP

    std::string name() const;
    Shape shape() const { return columns ? Shape{rows, columns} : Shape{rows}; }
    size_t size() const { return (size_t)rows * (columns ? columns : 1); } // in numbers
};

// All tensors of a model, in the order of the layers' work, which is the order of our files. Blocks of one Linear are
// neighbours.
std::vector<ModelTensor> model_tensors(const Config& c);
// How many numbers a model has.
size_t parameters(const Config& c);

// Where a tensor is in Weights: a block of rows of a Linear, or a vector.
template <class T> struct TensorPlace {
    Linear<T>* linear; // null: a vector
    int block;
    const T** vector;
    const T*& numbers() const { return linear ? linear->w[block] : *vector; } // (not those of an INT8 matrix)
};
template <class T> TensorPlace<T> place_of(Layer<T>& in, TensorKind kind, int expert = -1) {
    switch (kind) {
        case Q_PROJ: return {&in.qkv, 0, nullptr};
        case K_PROJ: return {&in.qkv, 1, nullptr};
        case V_PROJ: return {&in.qkv, 2, nullptr};
        case O_PROJ: return {&in.o, 0, nullptr};
        case GATE_PROJ: return {expert < 0 ? &in.gate_up : &in.experts[expert].gate_up, 0, nullptr};
        case UP_PROJ: return {expert < 0 ? &in.gate_up : &in.experts[expert].gate_up, 1, nullptr};
        case DOWN_PROJ: return {expert < 0 ? &in.down : &in.experts[expert].down, 0, nullptr};
        case ROUTER: return {&in.router, 0, nullptr};
        case INPUT_NORM: return {nullptr, 0, &in.norm1};
        case Q_NORM: return {nullptr, 0, &in.q_norm};
        case K_NORM: return {nullptr, 0, &in.k_norm};
        default: return {nullptr, 0, &in.norm2}; // POST_NORM
    }
}
template <class T> TensorPlace<T> place_of(Weights<T>& w, const ModelTensor& t) {
    if (t.kind == EMBED) return {&w.embed, 0, nullptr};
    if (t.kind == HEAD) return {&w.head, 0, nullptr};
    if (t.kind == FINAL_NORM) return {nullptr, 0, &w.norm};
    return place_of(w.layers[t.layer], t.kind, t.expert);
}

// Calls f(linear) for the products of a layer (not the router's), in the model's order.
template <class Layer, class F> void each_product(Layer& layer, F f) {
    f(layer.qkv), f(layer.o);
    if (layer.experts.empty()) f(layer.gate_up), f(layer.down);
    for (auto& expert : layer.experts) f(expert.gate_up), f(expert.down);
}
// The last of them: its format is that of most of the model's numbers.
template <class T> const Linear<T>& last_product(const Layer<T>& layer) {
    return layer.experts.empty() ? layer.down : layer.experts.back().down;
}
