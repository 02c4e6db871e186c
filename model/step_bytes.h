// model/step_bytes.h: the bytes of a session's keys and values, and those that a step reads.
#pragma once
#include "model/session.h"
#include "model/weights.h"

// The first n tokens in a session's KV cache: block_bytes(n) from the start of each of 2 L blocks, in whole pages of a
// layer's keys, then of its values. These and `ids` are a session's whole state. f may read and write.
template <class T> size_t block_bytes(const Session<T>& s, size_t n) {
    return (n + PAGE - 1) / PAGE * s.config.K * KVCache<T>::block_bytes(s.config, s.cache.fp8);
}
template <class T, class F> void each_block(Session<T>& s, size_t n, F f) {
    std::vector<T> copy(s.ctx.gpu ? block_bytes(s, n) / sizeof(T) : 0);
    T* const both[] = {s.cache.keys, s.cache.values}; // (nvcc cannot walk a braced list here)
    for (T* all : both)
        for (int l = 0; l < s.config.L; l++) {
            T* block = all + l * s.cache.layer_size;
            if (!s.ctx.gpu) { // host memory itself
                f(block);
                continue;
            }
            copy_out(s.ctx, copy.data(), block, copy.size());
            f(copy.data());
            copy_in(s.ctx, block, copy.data(), copy.size());
        }
}

// Bytes of a product's weights, and of all that a step reads which chooses so many of a layer's experts.
template <class T> size_t weight_bytes(const Linear<T>& W) {
    if (W.format == Format::PLAIN) return (size_t)W.out() * W.in * sizeof(T);
    if (W.format == Format::BLOCKS)
        return W.rows[0] * W.row_bytes(0) + W.rows[1] * W.row_bytes(1) + W.rows[2] * W.row_bytes(2);
    const size_t scale = W.format == Format::FP8 ? 4 : W.zero[0] ? 3 : 2, each = (size_t)W.group_rows;
    return (size_t)W.out() * W.row_bytes() + ((size_t)W.out() + each - 1) / each * (size_t)W.groups() * scale;
}
template <class T> size_t step_bytes(const Weights<T>& w, size_t chosen = 0) {
    size_t n = weight_bytes(w.head);
    for (auto& l : w.layers) {
        n += weight_bytes(l.qkv) + weight_bytes(l.o);
        if (l.experts.empty()) {
            n += weight_bytes(l.gate_up) + weight_bytes(l.down);
            continue;
        }
        const Expert<T>& one = l.experts[0];
        n += weight_bytes(l.router) + chosen * (weight_bytes(one.gate_up) + weight_bytes(one.down));
    }
    return n;
}
