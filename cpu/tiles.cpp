// cpu/tiles.cpp: rows of weights as numbers, and the choice by instruction set.
#include "cpu/tiles.h"
#include "cpu/blocks.h"
#include "cpu/scratch.h"
#include "model/instances.h"

template <class T> template <class X> void WeightRows<T>::widen(X* out, int k, int columns) const {
    if (W.format == Format::BLOCKS) return widen_row(out, GROUP, W.type[block], (const uint8_t*)q, k, columns);
    for (int i = 0; i < columns; i += GROUP) {
        const int n = std::min(GROUP, columns - i), column = k + i, g = column / W.group;
        acc<T> wide[GROUP];
        if (W.format == Format::PLAIN) {
            ::widen(wide, w + column, n);
        } else if (W.format == Format::INT8) {
            const acc<T> s = to_acc(scale[g]);
            for (int j = 0; j < n; j++) wide[j] = q[column + j] * s;
        } else if (W.format == Format::INT4) {
            const acc<T> s = half_to_float(half[g]);
            const int z = zero ? zero[g] : 8, shift = column / GROUP % 2 * 4;
            const uint8_t* from = (const uint8_t*)q + column / 64 * 32;
            for (int j = 0; j < n; j++) wide[j] = (acc<T>)((from[j] >> shift & 15) - z) * s;
        } else {
            const acc<T> s = block_scales()[g];
            for (int j = 0; j < n; j++) wide[j] = e4m3_to_float((uint8_t)q[column + j]) * s;
        }
        for (int j = 0; j < n; j++)
            if constexpr (std::is_same_v<X, acc<T>>) out[i + j] = wide[j];
            else out[i + j] = to_stored<T>(wide[j]);
    }
}

template <class T> const Loops<T>& best_loops() {
#ifdef HAVE_SIMD
    if constexpr (!std::is_same_v<T, double>) {
        if (instruction_set >= ISA_AVX512) return avx512_loops<T>();
        if (instruction_set >= ISA_AVX2) return avx2_loops<T>();
    }
#endif
    return plain_loops<T>();
}

#ifndef QWEN3_DOUBLE
template void WeightRows<bf16>::widen(bf16*, int, int) const;
#endif
#define INSTANTIATE(T)                                               \
    template void WeightRows<T>::widen(acc<T>*, int, int) const;     \
    template const Loops<T>& best_loops<T>();
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

#ifndef QWEN3_DOUBLE
void* tile_scratch(size_t bytes) {
    static thread_local std::vector<uint8_t> kept;
    return at_least(kept, bytes);
}
#endif
