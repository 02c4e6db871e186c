// mixed.h: Book I's forward for a batch whose rows have different adapters.
#pragma once
#include "qwen3.cu"
#include "server/engine/adapted_model.h"
#include <vector>

namespace server {

// Rows first .. first + rows - 1 of a batch, which share an adapter. Null: none.
template <class T> struct Segment {
    int first, rows;
    const AdaptedModel<T>* with;
};
template <class T> using Segments = std::vector<Segment<T>>; // all rows of a batch, in order

// On a GPU: the first `rows` of a batch, computed by kernels that take any mix of adapters (see RowAdapters).
struct MixedRows {
    int rows = 0;
    const Adapter<bf16>* const* of = nullptr; // (rows) in GPU memory
    float* sums = nullptr;                    // (rows, the most rows of a product) scratch
};

// From tokens to hidden states, as `forward`; `w` has no adapter of its own.
template <class T>
void mixed_forward(Context& ctx, const Config& c, const Weights<T>& w, const Segments<T>& segments, const Batch& batch,
                   Activations<T>& a, KVCache<T>& kv, const acc<T>* rope, const MixedRows& mixed = {});

} // namespace server
