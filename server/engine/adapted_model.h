// adapted_model.h: a model with one LoRA adapter, as the engine computes with it.
#pragma once
#include "model/adapters.h"
#include "model/model_file.h"
#include "qwen3.cu"
#include "server/engine/adapters.h"
#include <array>
#include <string>
#include <vector>

namespace server {

// A layer's products, in the order of RowAdapters.
template <class T> std::array<const Linear<T>*, 4> products_of(const Layer<T>& l) {
    return {&l.qkv, &l.o, &l.gate_up, &l.down};
}

// The model's layers with the adapter; the matrices remain the model's. For batches of up to `tokens` rows.
template <class T> struct AdaptedModel : LoadedAdapter {
    std::vector<Layer<T>> layers;
    AttachedAdapter<T> attached;
    Arena table;
    Adapter<T>* on_gpu = nullptr; // (4 L) of qkv, o, gate_up and down of each layer: see RowAdapters

    AdaptedModel(Context ctx, const Weights<T>& w, const AdapterFile& file, const std::string& name, int tokens);
};

} // namespace server
