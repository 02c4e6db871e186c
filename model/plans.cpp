// model/plans.cpp: the arrays of a forward and a backward pass, and of the cache, taken from an arena.
#include "model/instances.h"
#include "qwen3.cu"
#include <algorithm>
#include <cstddef>
#include <cstdint>

template <class T> static Routed<T> plan_routed(Arena& arena, const Config& c, int N) {
    if (!c.E) return {};
    const size_t pairs = (size_t)N * c.k;
    return {arena.take<acc<T>>((size_t)N * c.E), arena.take<int>(pairs), arena.take<acc<T>>(pairs),
            arena.take<int>((size_t)c.E + 1), arena.take<int>(pairs)};
}

template <class T>
void Activations<T>::plan(Arena& arena, const Config& c, int N, bool gate_up) {
    PerLayer a;
    a.in = a.mid = a.out = arena.take<acc<T>>((size_t)N * c.C);
    a.norm1 = a.norm2 = normed = arena.take<T>((size_t)N * c.C);
    a.qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
    a.q = arena.take<T>((size_t)N * c.H * c.D);
    a.attention = arena.take<T>((size_t)N * c.H * c.D);
    a.gate_up = gate_up ? arena.take<T>((size_t)N * 2 * c.width()) : nullptr;
    a.hidden = arena.take<T>((size_t)N * c.width());
    a.routed = plan_routed<T>(arena, c, N);
    if (c.E && gate_up) a.rows = arena.take<T>((size_t)N * c.C);
    if (c.E && !gate_up) a.rows = (T*)arena.take<float>(expert_scratch(N, c.C, c.k));
    layer.assign(c.L, a);
}

// Training keeps the inputs of products and of attention; norms, SwiGLU and RoPE are computed again. With `recompute`
// only the input of a layer is kept, and the backward pass computes the layer again. With `ample` the outputs of SwiGLU
// and RoPE are kept too, with keys and values in a cache of all layers. On a CPU SwiGLU's of experts are always kept.
template <class T>
void Activations<T>::plan_training(Arena& arena, const Config& c, int N, bool whole_layers, bool ample_memory,
                                   bool gpu) {
    recompute = whole_layers, ample = ample_memory;
    PerLayer a;
    const bool again = !c.E || gpu; // SwiGLU's outputs are computed again
    auto take_ample = [&] {
        a.q = arena.take<T>((size_t)N * c.H * c.D);
        if (again) a.hidden = arena.take<T>((size_t)N * c.width());
    };
    auto rest = [&] {
        if (ample) take_ample();
        a.qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
        a.attention = arena.take<T>((size_t)N * c.H * c.D);
        a.lse = arena.take<acc<T>>((size_t)N * c.H);
        a.mid = arena.take<acc<T>>((size_t)N * c.C);
        a.gate_up = arena.take<T>((size_t)N * 2 * c.width());
        if (!again) a.hidden = arena.take<T>((size_t)N * c.width());
    };
    a.norm1 = a.norm2 = arena.take<T>((size_t)N * c.C);
    if (c.E) a.rows = gpu ? (T*)arena.take<float>(expert_scratch(N, c.C, c.k)) : arena.take<T>((size_t)N * c.C);
    normed = arena.take<T>((size_t)N * c.C);
    if (!ample) take_ample();
    if (recompute) rest();
    layer.clear();
    a.out = arena.take<acc<T>>((size_t)N * c.C);
    for (int l = 0; l < c.L; l++) {
        a.in = a.out; // of the layer before
        a.routed = plan_routed<T>(arena, c, N); // (balance_loss reads all layers')
        if (!recompute) rest();
        a.out = arena.take<acc<T>>((size_t)N * c.C);
        layer.push_back(a);
    }
}

template <class T>
size_t KVCache<T>::block_bytes(const Config& c, bool fp8) {
    return (size_t)PAGE * (fp8 ? c.D + 1 : c.D * sizeof(T));
}

template <class T>
size_t KVCache<T>::bytes(const Config& c, size_t pages, bool fp8) {
    return 2 * (size_t)c.L * pages * c.K * block_bytes(c, fp8);
}

template <class T>
void KVCache<T>::plan(Arena& arena, const Config& c, size_t pages, bool one_layer, bool eight) {
    fp8 = eight;
    const size_t layer = pages * c.K * block_bytes(c, fp8) / sizeof(T), layers = one_layer ? 1 : c.L;
    layer_size = one_layer ? 0 : layer;
    keys = arena.take<T>(layers * layer), values = arena.take<T>(layers * layer);
}

template <class T>
void Flow<T>::plan(Arena& arena, const Config& c, int N, int rank, int rows, bool gpu) {
    x = arena.take<acc<T>>((size_t)N * c.C);
    y = arena.take<T>((size_t)N * c.C);
    normed = arena.take<T>((size_t)N * c.C);
    qkv = arena.take<T>((size_t)N * (c.H + 2 * c.K) * c.D);
    attention = arena.take<T>((size_t)N * c.H * c.D);
    delta = arena.take<acc<T>>((size_t)N * c.H);
    gate_up = arena.take<T>((size_t)N * 2 * c.width());
    hidden = gpu ? nullptr : arena.take<T>((size_t)N * c.width());
    h = arena.take<T>((size_t)N * (gpu && c.E ? std::max(3, 2 * c.k) : 3) * rank);
    head_rows = rows;
    logits = (acc<T>*)arena.take<uint8_t>((size_t)rows * c.V * (gpu ? sizeof(T) : sizeof(acc<T>)));
    factor = arena.take<acc<T>>(rows);
    parts = arena.take<acc<T>>((size_t)rows * ((c.V + 63) / 64 + 1) * 2);
    picked = arena.take<T>((size_t)rows * c.C);
    slope = nullptr;
    if (!c.E) return;
    this->rows = gpu ? nullptr : arena.take<T>((size_t)N * c.C);
    sum = arena.take<acc<T>>((size_t)N * c.C);
    share = arena.take<acc<T>>((size_t)N * c.k), scores = arena.take<T>((size_t)N * c.E);
    if (c.balance > 0) slope = arena.take<acc<T>>(c.E);
}

#define PLANS(T) template struct Activations<T>; template struct KVCache<T>; template struct Flow<T>;
QWEN3_INSTANCES(PLANS)
