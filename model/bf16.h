// model/bf16.h: the stored types bf16, float and double, and the types that sums over them have.
#pragma once
#include "model/numbers.h"
#include <cstdint>
#include <cstring>
#include <type_traits>

// The upper half of a float: 8 bits of exponent, 7 of fraction.
struct bf16 {
    uint16_t bits;
};

BOTH inline float to_acc(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline float to_acc(float x) { return x; }
inline double to_acc(double x) { return x; }

// Rounds to nearest, ties to even; a NaN stays a NaN.
inline bf16 to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t nearest = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40;
    return {(uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : nearest)}; // branchless: loops vectorise
}

template <class T> struct Acc { using type = T; };
template <> struct Acc<bf16> { using type = float; };
template <class T> using acc = typename Acc<T>::type;

template <class T> inline T to_stored(acc<T> x) {
    if constexpr (std::is_same_v<T, bf16>) return to_bf16(x);
    else return x;
}
