// model/fp8_activations.h: activations rounded to FP8, a scale for each group of columns.
#pragma once
#include "model/bf16.h"
#include "model/formats.h"
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

// Definition of the activations that FP8 products read: out = x, each number rounded to the nearest q 2^e, q an e4m3, e
// the smallest with which none of FP8_GROUP neighbours of a token is above 448. Each is a bf16. If one of the
// neighbours is not finite, all become NaN.
template <class T>
void round_activations(T* out,     // (N,in) out
                       const T* x, // (N,in)
                       int N, int in) {
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++)
        for (int first = 0; first < in; first += FP8_GROUP) {
            const size_t begin = (size_t)n * in + first, end = begin + std::min(FP8_GROUP, in - first);
            bool finite = true;
            float largest = 0;
            for (size_t i = begin; i < end; i++) {
                const float size = std::fabs((float)to_acc(x[i]));
                finite &= size <= std::numeric_limits<float>::max(), largest = std::max(largest, size);
            }
            const int e = kv_exponent(finite ? largest : 0);
            for (size_t i = begin; i < end; i++) {
                const uint8_t q = float_to_e4m3((float)std::ldexp((float)to_acc(x[i]), -e));
                out[i] = to_stored<T>(finite ? (acc<T>)std::ldexp(e4m3_to_float(q), e)
                                             : std::numeric_limits<acc<T>>::quiet_NaN());
            }
        }
}
