// model/blocks.h: the blocks of numbers that GGUF stores matrices as.
#pragma once
#include "model/quantized.h"

// A row is blocks of COUNT neighbours, of BYTES bytes each. A block has GROUPS groups, whose numbers share a scale d,
// and in some formats an offset. The definition is operator(): number i of group g. (Every product here is exact in a
// float: 11 bits of a half times 6 or 7 of a scale times 4 to 8. So their order is free.)

inline float half_at(const uint8_t* p) { return half_to_float(load_as<uint16_t>(p)); }
// Number i is in the lower half of byte i % 16 for i < 16, else in the upper half.
inline int nibble(const uint8_t* q, int i) { return q[i % 16] >> (i < 16 ? 0 : 4) & 15; }

struct BlockQ4_0 { // half d, 16 bytes: d (q - 8)
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 18;
    const float d;
    const uint8_t* q;
    explicit BlockQ4_0(const uint8_t* b) : d(half_at(b)), q(b + 2) {}
    float operator()(int, int i) const { return d * (float)(nibble(q, i) - 8); }
};
struct BlockQ4_1 { // half d, half m, 16 bytes: d q + m
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 20;
    const float d, m;
    const uint8_t* q;
    explicit BlockQ4_1(const uint8_t* b) : d(half_at(b)), m(half_at(b + 2)), q(b + 4) {}
    float operator()(int, int i) const { return d * (float)nibble(q, i) + m; }
};
struct BlockQ5_0 { // half d, 32 fifth bits, 16 bytes: d (q - 16)
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 22;
    const float d;
    const uint32_t high;
    const uint8_t* q;
    explicit BlockQ5_0(const uint8_t* b) : d(half_at(b)), high(load_as<uint32_t>(b + 2)), q(b + 6) {}
    float operator()(int, int i) const { return d * (float)((nibble(q, i) | (int)(high >> i & 1) << 4) - 16); }
};
struct BlockQ5_1 { // half d, half m, 32 fifth bits, 16 bytes: d q + m
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 24;
    const float d, m;
    const uint32_t high;
    const uint8_t* q;
    explicit BlockQ5_1(const uint8_t* b)
        : d(half_at(b)), m(half_at(b + 2)), high(load_as<uint32_t>(b + 4)), q(b + 8) {}
    float operator()(int, int i) const { return d * (float)(nibble(q, i) | (int)(high >> i & 1) << 4) + m; }
};
struct BlockQ8_0 { // half d, 32 signed bytes: d q
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 34;
    const float d;
    const uint8_t* q;
    explicit BlockQ8_0(const uint8_t* b) : d(half_at(b)), q(b + 2) {}
    float operator()(int, int i) const { return d * (float)(int8_t)q[i]; }
};

// Eight groups of 32 with scales and minima of 6 bits, which are themselves multiples of two halves: d_g q - m_g.
// 12 bytes hold them: the lower 6 bits of bytes 0-3 and 4-7 are scales and minima of groups 0-3; those of groups 4-7
// have their lower 4 bits in bytes 8-11 and their upper 2 in the top of bytes 0-7.
struct ScalesOfSix {
    float d[8], m[8];
    explicit ScalesOfSix(const uint8_t* b);
};
struct BlockQ4_K : ScalesOfSix { // 16 bytes of scales; 32 bytes for each two groups, the even one in the lower halves
    static constexpr int COUNT = 256, GROUPS = 8, BYTES = 144;
    const uint8_t* q;
    explicit BlockQ4_K(const uint8_t* b) : ScalesOfSix(b), q(b + 16) {}
    float operator()(int g, int i) const { return d[g] * (float)(q[g / 2 * 32 + i] >> g % 2 * 4 & 15) - m[g]; }
};
struct BlockQ5_K : ScalesOfSix { // the same with a fifth bit: bit g of 32 bytes
    static constexpr int COUNT = 256, GROUPS = 8, BYTES = 176;
    const uint8_t *high, *q;
    explicit BlockQ5_K(const uint8_t* b) : ScalesOfSix(b), high(b + 16), q(b + 48) {}
    float operator()(int g, int i) const {
        const int low = q[g / 2 * 32 + i] >> g % 2 * 4 & 15;
        return d[g] * (float)(low | (high[i] >> g & 1) << 4) - m[g];
    }
};
// Two halves of 128 numbers, each 64 bytes of lower halves and 32 of upper pairs of bits; 16 groups' signed bytes of
// scales, half d: d s_g (q - 32).
struct BlockQ6_K {
    static constexpr int COUNT = 256, GROUPS = 16, BYTES = 210;
    float d[16];
    const uint8_t *low, *high;
    explicit BlockQ6_K(const uint8_t* b) : low(b), high(b + 128) {
        for (int g = 0; g < 16; g++) d[g] = half_at(b + 208) * (float)(int8_t)b[192 + g];
    }
    float operator()(int g, int i) const;
};

constexpr int LONGEST_BLOCK = 256;

// Calls f with a null pointer to the type of t's blocks. False: it has none.
template <class F> bool with_block(Dtype dtype, F f) {
    switch (dtype) {
        case Dtype::Q4_0: return f((BlockQ4_0*)nullptr), true;
        case Dtype::Q4_1: return f((BlockQ4_1*)nullptr), true;
        case Dtype::Q5_0: return f((BlockQ5_0*)nullptr), true;
        case Dtype::Q5_1: return f((BlockQ5_1*)nullptr), true;
        case Dtype::Q8_0: return f((BlockQ8_0*)nullptr), true;
        case Dtype::Q4_K: return f((BlockQ4_K*)nullptr), true;
        case Dtype::Q5_K: return f((BlockQ5_K*)nullptr), true;
        case Dtype::Q6_K: return f((BlockQ6_K*)nullptr), true;
        default: return false;
    }
}
#define BLOCK_TYPE(p) std::remove_pointer_t<decltype(p)>
