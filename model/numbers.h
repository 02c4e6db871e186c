// model/numbers.h: the number formats that models are stored in, beside bf16: half, e4m3; the types of tensors.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define BOTH __host__ __device__ // for the CPU and the GPU alike
#else
#define BOTH
#endif

// Always inlined: it is compiled for the instruction set of the function that uses it, and no object file holds a copy.
#define INLINE inline __attribute__((always_inline))

// The stored type of a tensor's numbers. First the types of safetensors files (Other is checked for its size and never
// read), then GGUF's blocks (model/blocks.h), then a matrix of several tensors (Packed in model/quantized.h).
enum class Dtype { BF16, F16, F32, I8, F8, I32, Other, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Packed };

template <class U> INLINE U load_as(const void* p) { // from any address
    U u;
    memcpy(&u, p, sizeof u);
    return u;
}

// IEEE 754 half precision: a sign, 5 bits of exponent, 10 of fraction. Moved to float's places they are the number
// times 2^-112, subnormals too; an exponent of 31 is an infinity or a NaN.
INLINE float half_to_float(uint16_t h) {
    const uint32_t size = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    const float f = load_as<float>(&size) * 0x1p112f;
    const uint32_t u = load_as<uint32_t>(&f) | sign | (f >= 65536 ? 0x7f800000 : 0);
    return load_as<float>(&u);
}

// Rounds to nearest, ties to even; 65520 and more become an infinity, a NaN stays a NaN.
inline uint16_t float_to_half(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    if (size >= 0x477ff000) return (uint16_t)(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (size < 0x38800000) // below 2^-14: a multiple of 2^-24
        return (uint16_t)(sign | (uint32_t)std::nearbyint(std::fabs(f) * 16777216.f));
    return (uint16_t)(sign | (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13);
}

// FP8 e4m3: a sign, 4 bits of exponent, 3 of fraction, in the same way; no infinity, and one NaN of either sign.
inline float e4m3_to_float(uint8_t x) {
    const uint32_t size = (uint32_t)(x & 0x7f) << 20, sign = (uint32_t)(x & 0x80) << 24;
    const float f = load_as<float>(&size) * 0x1p120f;
    const uint32_t u = load_as<uint32_t>(&f) | sign | ((x & 0x7f) == 0x7f ? 0x7fc00000 : 0);
    return load_as<float>(&u);
}

// Rounds to nearest, ties to even; larger numbers become 448, the largest. A NaN stays a NaN.
BOTH inline uint8_t float_to_e4m3(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 24 & 0x80, size = u & 0x7fffffff;
    if (size > 0x7f800000) return (uint8_t)(sign | 0x7f);
    if (size >= 0x43e00000) return (uint8_t)(sign | 0x7e);
    if (size < 0x3c800000) // below 2^-6: a multiple of 2^-9
        return (uint8_t)(sign | (uint32_t)nearbyintf(fabsf(f) * 512.f));
    return (uint8_t)(sign | (size - (120 << 23) + 0x7ffff + (size >> 20 & 1)) >> 20);
}

// The exponent of a group of FP8 numbers q 2^e whose largest has this size: the smallest e with which it is at most
// 448. (At least -100: 2^-9 times 2^-100 is still a bf16.)
BOTH inline int kv_exponent(float largest) {
    int exponent = 0; // largest = f 2^exponent, 1/2 <= f < 1; 448 is 7/8 of 2^9
    const float f = frexpf(largest, &exponent);
    const int e = exponent - 9 + (f > 0.875f);
    return largest > 0 && e > -100 ? e : -100;
}
