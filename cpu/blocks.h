// cpu/blocks.h: rows of GGUF's blocks as numbers, 16 at a time: the definition's text (model/blocks.h) on vectors.
// (Rules for sources of instruction sets: cpu/loops.h.)
#pragma once
#include "cpu/lanes.h"
#include "model/blocks.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

template <> INLINE void bytes_at(int16v& v, const uint8_t* p) { // (g++ 12 would convert number by number)
#if defined(__AVX512F__)
    v = (int16v)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    const __m256i half[2] = {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                             _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
    memcpy(&v, half, sizeof v);
#else
    uchar16v c;
    memcpy(&c, p, sizeof c);
    v = __builtin_convertvector(__builtin_convertvector(c, ushort16v), int16v);
#endif
}
#ifdef __AVX512BF16__
typedef int16_t short32v __attribute__((vector_size(64), may_alias)); // 32 numbers at once
template <> INLINE void bytes_at(short32v& v, const uint8_t* p) {
    v = (short32v)_mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256((const __m256i*)p));
}
#endif
template <> INLINE void bits_from(int16v& v, uint32_t word, int i) {
    v = (int16v{} + (int)(word >> i & 0xffff)) >> int16v{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} & 1;
}

// The same number in all lanes.
INLINE void fill_lanes(float16v& v, float a) {
#if defined(__AVX2__) && !defined(__AVX512F__) // (g++ 12 would store it 16 times)
    const __m256 half[2] = {_mm256_set1_ps(a), _mm256_set1_ps(a)};
    memcpy(&v, half, sizeof v);
#else
    v = a - float16v{}; // (-0 too)
#endif
}

INLINE void store_lanes(float* p, const float16v& v) { memcpy(p, &v, sizeof v); }
INLINE void store_lanes(double* p, const float16v& v) {
    const double16v wide = __builtin_convertvector(v, double16v);
    memcpy(p, &wide, sizeof wide);
}
// Rounded to nearest, ties to even. (No block holds a NaN, or a number so small that the instruction makes it zero: all
// are multiples of 2^-24.)
INLINE void store_lanes(bf16* p, const float16v& v) {
#ifdef __AVX512BF16__
    const __m256bh nearest = _mm512_cvtneps_pbh((__m512)v);
#else
    const uint16v u = (uint16v)v;
    const ushort16v nearest = __builtin_convertvector((u + 0x7fff + (u >> 16 & 1)) >> 16, ushort16v);
#endif
    memcpy((void*)p, &nearest, sizeof nearest);
}

// Part PART of two of a long block, or a short block (PART 0): SLICE numbers, each GROUP of them `apart` behind the
// last. (The scales are read before out is written: a byte may be part of any object. Groups are unrolled, so that
// shifts are constants.)
template <class Block> constexpr int SLICE = smaller(Block::COUNT, LONGEST_BLOCK / 2);
template <class Block, int PART, class Out>
static INLINE void widen_slice(Out* out, size_t apart, const uint8_t* bytes) {
    constexpr int SIZE = Block::COUNT / Block::GROUPS, GROUPS = SLICE<Block> / SIZE;
    const Block block{bytes};
    float scale[GROUPS], offset[GROUPS];
    UNROLL for (int g = 0; g < GROUPS; g++) {
        scale[g] = block.d(PART * GROUPS + g);
        if constexpr (Block::OFFSET) offset[g] = block.m(PART * GROUPS + g);
    }
    UNROLL for (int g = 0; g < GROUPS; g++) {
        float16v d, m;
        fill_lanes(d, scale[g]);
        if constexpr (Block::OFFSET) fill_lanes(m, offset[g]);
#ifdef __AVX512BF16__
        if constexpr (std::is_same_v<Out, bf16> && Block::OFFSET && Block::COUNT == LONGEST_BLOCK) {
            // Q4_K and Q5_K: a group's 32 numbers are looked up in a table of its 16 or 32 values.
            const float16v count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const float16v low = count * d + m, high = (count + 16) * d + m;
            const __m512bh table = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            short32v q;
            block.q(q, PART * GROUPS + g, 0);
            const __m512i numbers = _mm512_maskz_permutexvar_epi16(~0u, (__m512i)q, (__m512i)table);
            memcpy((void*)(out + g * apart), &numbers, sizeof numbers);
            continue;
        }
#endif
        UNROLL for (int i = 0; i < SIZE; i += LANES) {
            int16v q;
            block.q(q, PART * GROUPS + g, i);
            float16v v = __builtin_convertvector(q, float16v) * d;
            if constexpr (Block::OFFSET) v += m;
            store_lanes(out + (g * SIZE + i) / GROUP * apart + (g * SIZE + i) % GROUP, v);
        }
    }
}
template <class Block, class Out>
static void widen_blocks(Out* out, size_t apart, const uint8_t* row, int k, int columns) {
    constexpr int COUNT = Block::COUNT, STEP = SLICE<Block>;
    for (int i = 0; i < columns; i += STEP, out += STEP / GROUP * apart) {
        const uint8_t* bytes = row + (size_t)((k + i) / COUNT) * Block::BYTES;
        if ((k + i) % COUNT == 0) widen_slice<Block, 0>(out, apart, bytes);
        else widen_slice<Block, COUNT / STEP - 1>(out, apart, bytes);
    }
}
// By type from Q4_0 on.
template <class Out>
static constexpr void (*WIDEN_BLOCKS[])(Out*, size_t, const uint8_t*, int, int) = {
    widen_blocks<BlockQ4_0, Out>, widen_blocks<BlockQ4_1, Out>, widen_blocks<BlockQ5_0, Out>,
    widen_blocks<BlockQ5_1, Out>, widen_blocks<BlockQ8_0, Out>, widen_blocks<BlockQ4_K, Out>,
    widen_blocks<BlockQ5_K, Out>, widen_blocks<BlockQ6_K, Out>};

// `columns` numbers of the row from column k on, each GROUP of them `apart` behind the last. k and columns are
// multiples of 128; in blocks of 32 numbers of 32.
template <class Out>
static void widen_row(Out* out, size_t apart, Dtype type, const uint8_t* row, int k, int columns) {
    WIDEN_BLOCKS<Out>[(int)type - (int)Dtype::Q4_0](out, apart, row, k, columns);
}
