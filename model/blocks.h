// model/blocks.h: the blocks of numbers that GGUF stores matrices as.
#pragma once
#include "model/numbers.h"
#include <type_traits>

// A row is blocks of COUNT neighbours, of BYTES bytes each, at any address. A block has GROUPS groups, whose numbers
// share a scale d and in some formats (OFFSET) an offset m. Number i of group g is d q or d q + m: block_number is the
// definition. The product is exact in a float (11 bits of a half, 6 or 7 of a scale, 4 to 8 of q), the sum is rounded
// once.
// V is int for the q of number i, or a vector of 16 integers for those of i to i + 15, i a multiple of 16
// (cpu/blocks.h): so the ops of a CPU read blocks by this text too.

template <class V> void bytes_at(V& v, const uint8_t* p);      // byte 0; of a vector bytes 0 to 15
template <class V> void signed_at(V& v, const uint8_t* p);     // the same of signed bytes
template <class V> void bits_from(V& v, uint32_t word, int i); // bit i; of a vector bits i to i + 15
template <> INLINE void bytes_at(int& v, const uint8_t* p) { v = *p; }
template <> INLINE void signed_at(int& v, const uint8_t* p) { v = (int8_t)*p; }
template <> INLINE void bits_from(int& v, uint32_t word, int i) { v = (int)(word >> i & 1); }

INLINE float half_at(const uint8_t* p) { return half_to_float(load_as<uint16_t>(p)); }
// Number i is in the lower half of byte i % 16 for i < 16, else in the upper half.
template <class V> INLINE void nibbles(V& v, const uint8_t* q, int i) {
    bytes_at(v, q + i % 16);
    v = v >> (i < 16 ? 0 : 4) & 15;
}
// The same, with a fifth bit of a word.
template <class V> INLINE void five_bits(V& v, const uint8_t* q, const uint8_t* word, int i) {
    V high;
    nibbles(v, q, i), bits_from(high, load_as<uint32_t>(word), i);
    v |= high << 4;
}

struct BlockQ4_0 { // half d, 16 bytes: d (q - 8)
    static constexpr const char* NAME = "q4_0";
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 18;
    static constexpr bool OFFSET = false;
    const uint8_t* b;
    INLINE float d(int) const { return half_at(b); }
    template <class V> INLINE void q(V& v, int, int i) const { nibbles(v, b + 2, i), v = v - 8; }
};
struct BlockQ4_1 { // half d, half m, 16 bytes
    static constexpr const char* NAME = "q4_1";
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 20;
    static constexpr bool OFFSET = true;
    const uint8_t* b;
    INLINE float d(int) const { return half_at(b); }
    INLINE float m(int) const { return half_at(b + 2); }
    template <class V> INLINE void q(V& v, int, int i) const { nibbles(v, b + 4, i); }
};
struct BlockQ5_0 { // half d, 32 fifth bits, 16 bytes: d (q - 16)
    static constexpr const char* NAME = "q5_0";
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 22;
    static constexpr bool OFFSET = false;
    const uint8_t* b;
    INLINE float d(int) const { return half_at(b); }
    template <class V> INLINE void q(V& v, int, int i) const { five_bits(v, b + 6, b + 2, i), v = v - 16; }
};
struct BlockQ5_1 { // half d, half m, 32 fifth bits, 16 bytes
    static constexpr const char* NAME = "q5_1";
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 24;
    static constexpr bool OFFSET = true;
    const uint8_t* b;
    INLINE float d(int) const { return half_at(b); }
    INLINE float m(int) const { return half_at(b + 2); }
    template <class V> INLINE void q(V& v, int, int i) const { five_bits(v, b + 8, b + 4, i); }
};
struct BlockQ8_0 { // half d, 32 signed bytes
    static constexpr const char* NAME = "q8_0";
    static constexpr int COUNT = 32, GROUPS = 1, BYTES = 34;
    static constexpr bool OFFSET = false;
    const uint8_t* b;
    INLINE float d(int) const { return half_at(b); }
    template <class V> INLINE void q(V& v, int, int i) const { signed_at(v, b + 2 + i); }
};

// Eight groups of 32 with scales and minima of 6 bits, which are themselves multiples of two halves; m is the minimum's
// negative. 12 bytes hold them: the lower 6 bits of bytes 0-3 and 4-7 are scales and minima of groups 0-3; those of
// groups 4-7 have their lower 4 bits in bytes 8-11 and their upper 2 in the top of bytes 0-7.
struct ScalesOfSix { // half d, half m, 12 bytes
    static constexpr int COUNT = 256, GROUPS = 8;
    static constexpr bool OFFSET = true;
    const uint8_t* b;
    INLINE float d(int g) const {
        const uint8_t* s = b + 4 + g;
        return half_at(b) * (float)(g < 4 ? s[0] & 63 : (s[4] & 15) | s[-4] >> 6 << 4);
    }
    INLINE float m(int g) const {
        const uint8_t* s = b + 4 + g;
        return -half_at(b + 2) * (float)(g < 4 ? s[4] & 63 : s[4] >> 4 | s[0] >> 6 << 4);
    }
};
struct BlockQ4_K : ScalesOfSix { // scales; 32 bytes for each two groups, the even one in the lower halves
    static constexpr const char* NAME = "q4_k";
    static constexpr int BYTES = 144;
    template <class V> INLINE void q(V& v, int g, int i) const {
        bytes_at(v, b + 16 + g / 2 * 32 + i);
        v = v >> g % 2 * 4 & 15;
    }
};
struct BlockQ5_K : ScalesOfSix { // the same with a fifth bit: bit g of 32 bytes
    static constexpr const char* NAME = "q5_k";
    static constexpr int BYTES = 176;
    template <class V> INLINE void q(V& v, int g, int i) const {
        V high;
        bytes_at(v, b + 48 + g / 2 * 32 + i), bytes_at(high, b + 16 + i);
        v = (v >> g % 2 * 4 & 15) | (high >> g & 1) << 4;
    }
};
// Two halves of 128 numbers, each of eight groups of 16: 64 bytes of lower halves and 32 of upper pairs of bits. 16
// signed bytes of scales, half d: d s_g (q - 32).
struct BlockQ6_K {
    static constexpr const char* NAME = "q6_k";
    static constexpr int COUNT = 256, GROUPS = 16, BYTES = 210;
    static constexpr bool OFFSET = false;
    const uint8_t* b;
    INLINE float d(int g) const { return half_at(b + 208) * (float)(int8_t)b[192 + g]; }
    template <class V> INLINE void q(V& v, int g, int i) const {
        const int half = g / 8, at = g % 8; // the at-th of the half's groups
        V high;
        bytes_at(v, b + half * 64 + at % 4 * 16 + i), bytes_at(high, b + 128 + half * 32 + at % 2 * 16 + i);
        v = ((v >> at / 4 * 4 & 15) | (high >> at / 2 * 2 & 3) << 4) - 32;
    }
};

template <class Block> INLINE float block_number(const Block& block, int g, int i) {
    int q;
    block.q(q, g, i);
    const float product = block.d(g) * (float)q;
    if constexpr (Block::OFFSET) return product + block.m(g);
    else return product;
}

constexpr int LONGEST_BLOCK = 256;

// f of a null pointer to the type of these blocks: its result. They are none: 0.
template <class F> auto with_block(Dtype dtype, F f) -> decltype(f((BlockQ4_0*)nullptr)) {
    switch (dtype) {
        case Dtype::Q4_0: return f((BlockQ4_0*)nullptr);
        case Dtype::Q4_1: return f((BlockQ4_1*)nullptr);
        case Dtype::Q5_0: return f((BlockQ5_0*)nullptr);
        case Dtype::Q5_1: return f((BlockQ5_1*)nullptr);
        case Dtype::Q8_0: return f((BlockQ8_0*)nullptr);
        case Dtype::Q4_K: return f((BlockQ4_K*)nullptr);
        case Dtype::Q5_K: return f((BlockQ5_K*)nullptr);
        case Dtype::Q6_K: return f((BlockQ6_K*)nullptr);
        default: return decltype(f((BlockQ4_0*)nullptr))();
    }
}
#define BLOCK_TYPE(p) std::remove_pointer_t<decltype(p)>
