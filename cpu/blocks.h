// cpu/blocks.h: rows of GGUF's blocks as numbers, 16 at a time: the definition's text (model/blocks.h) on vectors.
// AVX-512 has faster code of its own for the blocks of 256; the numbers are the same, bit for bit.
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
template <> INLINE void signed_at(int16v& v, const uint8_t* p) {
#if defined(__AVX512F__)
    v = (int16v)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    const __m256i half[2] = {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                             _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
    memcpy(&v, half, sizeof v);
#else
    bytes_at(v, p), v = (v ^ 128) - 128;
#endif
}
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

// 32 neighbours.
template <class Out> static INLINE void store_group(Out* p, const float16v& low, const float16v& high) {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<Out, bf16>) {
        const __m512bh nearest = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        memcpy((void*)p, &nearest, sizeof nearest);
        return;
    }
#endif
    store_lanes(p, low), store_lanes(p + LANES, high);
}

#ifdef __AVX2__
// Half FIRST of the two at p in the lower four lanes, half LAST in the upper ones.
template <int FIRST, int LAST> INLINE void four_of_each(__m256& v, const uint8_t* p) {
#ifdef __AVX512F__
    constexpr int A = FIRST * 0x202 + 0x100, B = LAST * 0x202 + 0x100; // (two bytes' places)
    const __m128i order = _mm_set_epi16(B, B, B, B, A, A, A, A);
    v = _mm256_maskz_cvtph_ps(0xff, _mm_shuffle_epi8(_mm_cvtsi32_si128(load_as<int>(p)), order));
#else
    const float a = half_at(p + 2 * FIRST), b = half_at(p + 2 * LAST);
    v = _mm256_set_ps(b, b, b, b, a, a, a, a);
#endif
}
#endif
// d of GROUPS groups from FIRST on, then their m. (One after another, the scales of a long block take longer than its
// numbers.)
template <class Block, int FIRST, int GROUPS> static INLINE void read_scales(float* scale, const uint8_t* b) {
#ifdef __AVX2__
    __m256 unit, eight;
    if constexpr (std::is_base_of_v<ScalesOfSix, Block>) { // four scales and four minima, a byte each
        const uint64_t s = load_as<uint64_t>(b + 4), t = load_as<uint32_t>(b + 12);
        const uint64_t first = s & 0x3f3f3f3f3f3f3f3f;
        const uint64_t other = (s >> 2 & 0x3030303030303030) | (t & 0x0f0f0f0f) | (t >> 4 & 0x0f0f0f0f) << 32;
        eight = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)(FIRST ? other : first))));
        four_of_each<0, 1>(unit, b);
        unit = _mm256_xor_ps(unit, _mm256_set_ps(-0.f, -0.f, -0.f, -0.f, 0, 0, 0, 0));
    }
    if constexpr (std::is_same_v<Block, BlockQ6_K>) {
        eight = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(b + 192 + FIRST))));
        four_of_each<1, 1>(unit, b + 206);
    }
    if constexpr (Block::COUNT == LONGEST_BLOCK) return _mm256_storeu_ps(scale, _mm256_mul_ps(unit, eight));
#endif
#ifdef __AVX512F__
    const __m128 both = _mm_maskz_cvtph_ps(0xff, _mm_cvtsi32_si128(load_as<int>(b)));
    memcpy(scale, &both, 2 * sizeof(float)); // (without m the second is not read)
    return;
#endif
    const Block block{b};
    UNROLL for (int g = 0; g < GROUPS; g++) {
        scale[g] = block.d(FIRST + g);
        if constexpr (Block::OFFSET) scale[GROUPS + g] = block.m(FIRST + g);
    }
}

// Numbers i to i + 15 of group g from its q.
template <class Block> INLINE void as_numbers(float16v& v, const int16v& q, const float16v& d, const float16v& m) {
    v = __builtin_convertvector(q, float16v);
#ifdef __AVX512F__
    if (Block::OFFSET) v = (float16v)_mm512_fmadd_ps((__m512)v, (__m512)d, (__m512)m); // (the product is exact)
    else v *= d;
#else
    v *= d;
    if (Block::OFFSET) v += m;
#endif
}

#ifdef __AVX512F__
INLINE void load_twice(__m512i& v, const uint8_t* p) {
    v = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256((const __m256i*)p));
}
// Rotates words of 32 bits: those of the first 32 bytes by FIRST, of the last by LAST (negative: to the left).
template <int FIRST, int LAST> INLINE void turn_right(__m512i& v) {
    constexpr long long A = (FIRST & 31) * 0x100000001, B = (LAST & 31) * 0x100000001;
    v = _mm512_maskz_rorv_epi32(0xffff, v, _mm512_set_epi64(B, B, B, B, A, A, A, A));
}
// q of 64 numbers of part PART of a long block, as signed bytes: the first (PAIR 0) or the last of 128. Bits from
// neighbouring bytes are masked out.
template <class Block, int PART, int PAIR> INLINE void read_codes(int8_t* q, const uint8_t* b) {
    constexpr int AT = PART * 2 + PAIR; // of the block's four
    __m512i low, high;
    if constexpr (std::is_base_of_v<ScalesOfSix, Block>) {
        load_twice(low, b + Block::BYTES - 128 + AT * 32);
        turn_right<0, 4>(low);
    } else {
        low = _mm512_maskz_loadu_epi8(~0ull, b + PART * 64);
        if (PAIR) turn_right<4, 4>(low);
    }
    if constexpr (std::is_same_v<Block, BlockQ5_K>) {
        load_twice(high, b + 16);
        turn_right<2 * AT - 4, 2 * AT - 3>(high); // the group's bit to bit 4
    }
    if constexpr (std::is_same_v<Block, BlockQ6_K>) {
        load_twice(high, b + 128 + PART * 32);
        turn_right<4 * PAIR - 4, 4 * PAIR - 2>(high); // the pair of bits to bits 4 and 5
    }
    const __m512i lower_half = _mm512_set1_epi8(15);
    if constexpr (std::is_same_v<Block, BlockQ4_K>) low = _mm512_and_si512(low, lower_half);
    else low = _mm512_ternarylogic_epi32(lower_half, low, high, 0xca); // there low, elsewhere high
    if constexpr (std::is_same_v<Block, BlockQ5_K>) low = _mm512_and_si512(low, _mm512_set1_epi8(31));
    if constexpr (std::is_same_v<Block, BlockQ6_K>)
        low = _mm512_sub_epi8(_mm512_and_si512(low, _mm512_set1_epi8(63)), _mm512_set1_epi8(32));
    memcpy(q + PAIR * 64, &low, sizeof low);
}
#endif

// Part PART of two of a long block, or a short block (PART 0): SLICE numbers, each GROUP of them `apart` behind the
// last. (The block is read before out is written: a byte may be part of any object. Groups are unrolled, so that
// shifts are constants.)
template <class Block> constexpr int SLICE = smaller(Block::COUNT, LONGEST_BLOCK / 2);
template <class Block, int PART, class Out>
static INLINE void widen_slice(Out* out, size_t apart, const uint8_t* bytes) {
    constexpr int SIZE = Block::COUNT / Block::GROUPS, GROUPS = SLICE<Block> / SIZE;
    const Block block{bytes};
    float scale[2 * GROUPS];
    read_scales<Block, PART * GROUPS, GROUPS>(scale, bytes);
    asm("" : "+m"(scale)); // g++ would shuffle them out of a register, where a load can fill all lanes
#ifdef __AVX512F__
    alignas(64) int8_t codes[LONGEST_BLOCK / 2];
    if constexpr (Block::COUNT == LONGEST_BLOCK) {
        read_codes<Block, PART, 0>(codes, bytes), read_codes<Block, PART, 1>(codes, bytes);
        asm("" : "+m"(codes)); // (the same)
    }
#endif
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<Out, bf16> && std::is_base_of_v<ScalesOfSix, Block>) {
        // The numbers are looked up in a table of 32: two groups' values of Q4_K, one's of Q5_K.
        constexpr bool TWO = std::is_same_v<Block, BlockQ4_K>;
        const __m512 count = (__m512)float16v{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        __m512i table, q;
        UNROLL for (int g = 0; g < GROUPS; g++, out += apart) {
            if (!TWO || g % 2 == 0) {
                float16v d[2], m[2];
                UNROLL for (int i = 0; i < 2; i++)
                    fill_lanes(d[i], scale[g + TWO * i]), fill_lanes(m[i], scale[GROUPS + g + TWO * i]);
                const __m512 low = _mm512_fmadd_ps(count, (__m512)d[0], (__m512)m[0]);
                const __m512 high = _mm512_fmadd_ps(TWO ? count : count + 16, (__m512)d[1], (__m512)m[1]);
                table = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            }
            q = _mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256((const __m256i*)(codes + g * SIZE)));
            if (TWO && g % 2) q = _mm512_or_si512(q, _mm512_set1_epi16(16));
            const __m512i numbers = _mm512_maskz_permutexvar_epi16(~0u, q, table);
            memcpy((void*)out, &numbers, sizeof numbers);
        }
        return;
    }
#endif
    UNROLL for (int i = 0; i < SLICE<Block>; i += GROUP, out += apart) {
        float16v v[2];
        UNROLL for (int h = 0; h < 2; h++) {
            const int at = i + h * LANES, g = at / SIZE;
            float16v d, m = {};
            fill_lanes(d, scale[g]);
            if constexpr (Block::OFFSET) fill_lanes(m, scale[GROUPS + g]);
            int16v q;
#ifdef __AVX512F__
            if constexpr (Block::COUNT == LONGEST_BLOCK) signed_at(q, (const uint8_t*)codes + at);
            else
#endif
                block.q(q, PART * GROUPS + g, at % SIZE);
            as_numbers<Block>(v[h], q, d, m);
        }
        store_group(out, v[0], v[1]);
    }
}

// As widen_rows in cpu/loops.h; the rows are row_bytes apart.
template <class Block, class Out>
static void widen_blocks(Out* out, size_t row_apart, size_t apart, const uint8_t* at, size_t row_bytes, int rows, int k,
                         int columns, size_t ahead) {
    constexpr int COUNT = Block::COUNT, STEP = SLICE<Block>;
    for (int r = 0; r < rows; r++, at += row_bytes, out += row_apart) {
        const uint8_t* bytes = at + (size_t)(k / COUNT) * Block::BYTES;
        bool second = k % COUNT;
        Out* to = out;
        for (int i = 0; i < columns; i += STEP, to += STEP / GROUP * apart) {
            const uintptr_t then = (uintptr_t)bytes + ahead + (second ? Block::BYTES / 2 : 0);
            __builtin_prefetch((const void*)then, 0, 2);
            if (STEP > GROUP) __builtin_prefetch((const void*)(then + 64), 0, 2);
            if (second) widen_slice<Block, COUNT / STEP - 1>(to, apart, bytes);
            else widen_slice<Block, 0>(to, apart, bytes);
            second = STEP < COUNT && !second;
            if (!second) bytes += Block::BYTES;
        }
    }
}
// By type from Q4_0 on.
template <class Out>
static constexpr decltype(&widen_blocks<BlockQ4_0, Out>) WIDEN_BLOCKS[] = {
    widen_blocks<BlockQ4_0, Out>, widen_blocks<BlockQ4_1, Out>, widen_blocks<BlockQ5_0, Out>,
    widen_blocks<BlockQ5_1, Out>, widen_blocks<BlockQ8_0, Out>, widen_blocks<BlockQ4_K, Out>,
    widen_blocks<BlockQ5_K, Out>, widen_blocks<BlockQ6_K, Out>};

// `columns` numbers of the row from column k on, each GROUP of them `apart` behind the last. k and columns are
// multiples of 128; in blocks of 32 numbers of 32.
template <class Out>
static void widen_row(Out* out, size_t apart, Dtype type, const uint8_t* row, int k, int columns) {
    WIDEN_BLOCKS<Out>[(int)type - (int)Dtype::Q4_0](out, 0, apart, row, 0, 1, k, columns, 0);
}
