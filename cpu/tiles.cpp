// cpu/tiles.cpp: rows of weights as numbers, x as integers, and the choice by instruction set.
#include "cpu/tiles.h"
#include "cpu/scratch.h"
#include "model/instances.h"

template <class T> const acc<T>* WeightRows<T>::widen(acc<T>* out, int rows, int k, int columns) const {
    WeightRows at = *this;
    for (int r = 0; r < rows; r++, out += columns, at.skip(1)) {
        if (w) ::widen(out, at.w + k, columns);
        for (int i = 0; i < columns && q; i += GROUP) {
            const int n = std::min(GROUP, columns - i), column = k + i, g = column / W.group;
            if (W.format == Format::INT8) {
                const acc<T> s = to_acc(at.scale[g]);
                for (int j = 0; j < n; j++) out[i + j] = at.q[column + j] * s;
            } else if (W.format == Format::INT4) {
                const acc<T> s = half_to_float(at.half[g]);
                const int z = zero ? at.zero[g] : 8, shift = column / GROUP % 2 * 4;
                const uint8_t* from = (const uint8_t*)at.q + column / 64 * 32;
                for (int j = 0; j < n; j++) out[i + j] = (acc<T>)((from[j] >> shift & 15) - z) * s;
            } else {
                lanes<T> v;
                const acc<T> s = at.block_scales()[g];
                for (int j = 0; j < n; j += LANES) {
                    load_some(v, (const e4m3*)at.q + column + j, std::min(LANES, n - j));
                    v *= s;
                    memcpy(out + i + j, &v, std::min(LANES, n - j) * sizeof(acc<T>));
                }
            }
        }
    }
    return out - (size_t)rows * columns;
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

#define INSTANTIATE(T)             \
    template struct WeightRows<T>; \
    template const Loops<T>& best_loops<T>();
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

#ifndef QWEN3_DOUBLE
void* tile_scratch(size_t bytes) {
    static thread_local std::vector<uint8_t> kept;
    return at_least(kept, bytes);
}

const uint8_t* fix_all(const IntegerTiles& tiles, const bf16* x, int N, int in) {
    static thread_local std::vector<uint8_t> kept;
    const int steps = (in + tiles.columns - 1) / tiles.columns;
    uint8_t* out = at_least(kept, (size_t)N * steps * tiles.bytes);
    #pragma omp parallel for collapse(2) schedule(static) if (N > 16)
    for (int n = 0; n < N; n++)
        for (int i = 0; i < steps; i++) {
            const int column = i * tiles.columns;
            tiles.fix(out + ((size_t)n * steps + i) * tiles.bytes, x + (size_t)n * in + column, in - column);
        }
    return out;
}
#endif
