// tests/far.h: sessions far into a long text.
#pragma once
#include "cpu/ops.h"
#include "model/session.h"
#include <algorithm>
#include <cstdint>
#include <vector>

// Ids of a long text: make_rope_fixtures.py has the same.
inline std::vector<int> far_text(int n) {
    std::vector<int> ids((size_t)n);
    for (int p = 0; p < n; p++) ids[(size_t)p] = (int)(((uint32_t)p * 2654435761u >> 7) % 1000);
    return ids;
}

// Puts `ids` into an empty session on the CPU. The model has one layer: keys and values of a token need no attention.
template <class T> void fill_cache(Session<T>& s, const std::vector<int>& ids) {
    const Config& c = s.config;
    const Layer<T>& layer = s.weights.layers[0];
    auto& a = s.activations.layer[0];
    for (int first = 0, N; first < (int)ids.size(); first += N) {
        N = std::min(s.chunk, (int)ids.size() - first);
        for (int n = 0; n < N; n++)
            s.token[n] = ids[(size_t)(first + n)], s.pos[n] = s.slot[n] = first + n, s.seq[n] = 0;
        const Batch b = s.cache.of({N, 1, s.token, s.pos, s.seq, s.slot, s.table, s.pages, false});
        embed_cpu(s.ctx, a.in, s.weights.embed, b, c.C);
        norm_linear_cpu(s.ctx, a.qkv, a.norm1, a.in, layer.norm1, layer.qkv, N, c.eps);
        qknorm_rope_kv_cpu(s.ctx, a.q, {s.cache.keys, s.cache.values}, a.qkv, {layer.q_norm, layer.k_norm, s.rope}, b,
                           c.heads());
    }
    s.ids = ids;
}
