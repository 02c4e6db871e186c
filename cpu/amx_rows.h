// cpu/amx_rows.h: 32 packed rows as tiles of bf16, CHUNK columns at once: the numbers of widen_rows (cpu/loops.h) from
// fewer instructions. (Rules for sources of instruction sets: cpu/loops.h.)
#pragma once
#include "cpu/avx512_vectors.h"
#include "cpu/loops.h"

// On Sapphire Rapids ports 0 and 5 bind: rounding 32 numbers to bf16 takes four of their slots, extending 32 bytes one
// of port 5, a broadcast from memory none. So scales of many groups are converted at once, and read from memory by
// broadcasts. The next 32 rows are prefetched line by line in memory order.
namespace {
constexpr int CHUNK = 128, SCALES = 16;

INLINE void fetch_line(const void* p, size_t ahead) {
    __builtin_prefetch((const void*)((uintptr_t)p + ahead), 0, 2);
}

// Row r's 32 columns from 32 i on are at tiles + (i * TILE_ROWS + r) * 32.
INLINE void store_tile_row(bf16* tiles, int r, int i, const __m512i& numbers) {
    memcpy((void*)(tiles + (i * TILE_ROWS + r) * 32), &numbers, sizeof numbers);
}
INLINE void store_tile_row(bf16* tiles, int r, int i, const __m512& low, const __m512& high) {
    store_tile_row(tiles, r, i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
INLINE void extend_bytes(__m512i& v, const uint8_t* p) { // 32 bytes to words
    v = _mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256((const __m256i*)p));
    asm("" : "+v"(v)); // (g++ would extend them once for each use)
}
INLINE void look_up(__m512i& v, const __m512i& at, const __m512i& table) { // by the lower 5 bits of a word
    v = _mm512_maskz_permutexvar_epi16(~0u, at, table);
}
INLINE void count_lanes(__m512& v) { v = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

// For vpermb: bytes 16 i to 16 i + 15 to bits `shift` and up of the lanes. (In registers: g++ would reload them.)
INLINE void byte_places(__m512i (&place)[4], int shift) {
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    UNROLL for (int i = 0; i < 4; i++)
        place[i] = _mm512_maskz_slli_epi32(0xffff, _mm512_add_epi32(count, _mm512_set1_epi32(16 * i)), (unsigned)shift);
    asm("" : "+v"(place[0]), "+v"(place[1]), "+v"(place[2]), "+v"(place[3]));
}

// Bytes q times a scale. A byte with its sign bit flipped, as the second byte of 2^15, is the float 2^15 + 128 + q; its
// product with the scale less that of 2^15 + 128 is exact, for scales of at most 11 bits below 2^100.
constexpr float SIGNED_BYTE_LESS = -(32768.f + 128);
struct SignedBytes {
    __m512i place[4], flip, power;
    INLINE SignedBytes() {
        byte_places(place, 8);
        flip = _mm512_set1_epi8((char)0x80), power = _mm512_set1_epi32(0x47000000);
        asm("" : "+v"(flip), "+v"(power));
    }
    // Bytes 16 i to 16 i + 15 of q, times *scale; *less is the scale times SIGNED_BYTE_LESS.
    INLINE void scaled(__m512& v, const __m512i& q, int i, const float* scale, const float* less) const {
        v = (__m512)_mm512_mask_permutexvar_epi8(power, 0x2222222222222222, place[i], _mm512_xor_si512(q, flip));
        v = _mm512_fmadd_ps(v, _mm512_set1_ps(*scale), _mm512_set1_ps(*less));
    }
};

// widen: the CHUNK columns from k on of the 32 rows at w; k goes up by CHUNK from 0. False: only widen_rows can.
template <Format F> struct ChunkRows {
    INLINE bool widen(bf16*, const WeightRows<bf16>&, int, size_t) { return false; }
};

template <> struct ChunkRows<Format::INT8> {
    alignas(64) float scale[TILE_ROWS][SCALES], less[TILE_ROWS][SCALES];
    bool fits;
    INLINE void begin(const WeightRows<bf16>& w, int g) {
        const Avx512::Part some = Avx512::part((int)w.groups - g);
        const bf16* from = w.scale + g;
        __m512 highest = {};
        for (int r = 0; r < TILE_ROWS; r++, from += w.groups) {
            __m512 s;
            fetch_line(from, TILE_ROWS * w.groups * 2);
            Avx512::load(s, from, some);
            highest = _mm512_maskz_max_ps(0xffff, highest, _mm512_abs_ps(s));
            memcpy(scale[r], &s, sizeof s);
            s *= SIGNED_BYTE_LESS;
            memcpy(less[r], &s, sizeof s);
        }
        fits = _mm512_cmp_ps_mask(highest, _mm512_set1_ps(0x1p100f), _CMP_NLT_UQ) == 0;
    }
    INLINE bool widen(bf16* tiles, const WeightRows<bf16>& w, int k, size_t ahead) {
        const int first = k / GROUP % SCALES;
        if (first == 0) begin(w, k / GROUP);
        if (!fits) return false;
        const SignedBytes bytes;
        const int8_t* from = w.q + k;
        ahead += (size_t)k * TILE_ROWS;
        for (int r = 0; r < TILE_ROWS; r++, from += w.row_bytes, ahead += CHUNK)
            UNROLL for (int half = 0; half < 2; half++) {
                fetch_line(w.q, ahead + 64 * half);
                const __m512i q = _mm512_maskz_loadu_epi8(~0ull, from + 64 * half);
                __m512 v[4];
                UNROLL for (int i = 0; i < 4; i++) {
                    const int g = first + 2 * half + i / 2;
                    bytes.scaled(v[i], q, i, &scale[r][g], &less[r][g]);
                }
                store_tile_row(tiles, r, 2 * half, v[0], v[1]), store_tile_row(tiles, r, 2 * half + 1, v[2], v[3]);
            }
        return true;
    }
};

// The numbers of a group are looked up in a table that has them twice, by the lower 5 bits of a word.
template <> struct ChunkRows<Format::INT4> {
    alignas(64) float scale[TILE_ROWS][SCALES];
    INLINE void begin(const WeightRows<bf16>& w, int g) {
        const Avx512::Part some = Avx512::part((int)w.groups - g);
        const uint16_t* from = w.half + g;
        for (int r = 0; r < TILE_ROWS; r++, from += w.groups) {
            fetch_line(from, TILE_ROWS * w.groups * 2);
            const __m512 s = _mm512_maskz_cvtph_ps(0xffff, _mm256_maskz_loadu_epi16(some, from));
            memcpy(scale[r], &s, sizeof s);
        }
    }
    template <int GROUPS> // of a row's chunk
    INLINE void rows(bf16* tiles, const WeightRows<bf16>& w, int k, size_t ahead) const {
        const int first = k / w.W.group % SCALES;
        const uint8_t* from = (const uint8_t*)w.q + k / 2;
        const uint8_t* zero = w.zero ? w.zero + k / w.W.group : nullptr;
        ahead += (size_t)k / 2 * TILE_ROWS;
        __m512 codes = _mm512_maskz_loadu_ps(0xffff, CODES + 15 - 8);
        for (int r = 0; r < TILE_ROWS; r++, from += w.row_bytes, ahead += CHUNK / 2) {
            fetch_line(w.q, ahead);
            __m512i table[GROUPS];
            UNROLL for (int g = 0; g < GROUPS; g++) {
                if (zero) codes = _mm512_maskz_loadu_ps(0xffff, CODES + 15 - zero[g]);
                const __m512 numbers = _mm512_mul_ps(codes, _mm512_set1_ps(scale[r][first + g]));
                table[g] = (__m512i)_mm512_cvtne2ps_pbh(numbers, numbers);
            }
            if (zero) zero += w.groups;
            UNROLL for (int i = 0; i < 4; i += 2) { // lower and upper halves of 32 bytes
                __m512i code, v;
                extend_bytes(code, from + i * 16);
                look_up(v, code, table[i * GROUPS / 4]);
                store_tile_row(tiles, r, i, v);
                look_up(v, _mm512_maskz_srli_epi16(~0u, code, 4), table[(i + 1) * GROUPS / 4]);
                store_tile_row(tiles, r, i + 1, v);
            }
        }
    }
    INLINE bool widen(bf16* tiles, const WeightRows<bf16>& w, int k, size_t ahead) {
        if (k / w.W.group % SCALES == 0) begin(w, k / w.W.group);
        if (w.W.group == 128) rows<1>(tiles, w, k, ahead);
        else if (w.W.group == 64) rows<2>(tiles, w, k, ahead);
        else if (w.W.group == 32) rows<4>(tiles, w, k, ahead);
        else return false;
        return true;
    }
};

// A number with an exponent field above 0 is looked up by its lower 5 bits, with the field's lower 2; the upper 2 are
// added to the result's exponent. Those with an exponent field of 0 have a table of their own. A chunk's columns share
// a scale.
template <> struct ChunkRows<Format::FP8> {
    __m512i normal, small;
    INLINE bool tables(float scale) {
        const float size = scale < 0 ? -scale : scale;
        if (!(size > 0x1p-100f && size < 0x1p100f)) return false; // exponents may not leave their field
        __m512 m; // fractions, twice
        count_lanes(m);
        m *= 0x1p-3f;
        m = _mm512_mask_sub_ps(m, 0xff00, m, _mm512_set1_ps(1));
        const __m512 unit = _mm512_set1_ps(scale * 0x1p-7f);
        const __m512 low = (m + 1.f) * _mm512_mask_mul_ps(unit, 0xff00, unit, _mm512_set1_ps(2));
        normal = (__m512i)_mm512_cvtne2ps_pbh(low * 4.f, low);
        small = (__m512i)_mm512_cvtne2ps_pbh(m, m * unit * 2.f); // (the upper half is not used)
        return true;
    }
    INLINE bool widen(bf16* tiles, const WeightRows<bf16>& w, int k, size_t ahead) {
        if (w.W.group % CHUNK) return false;
        const float* scales = (const float*)w.W.scale[w.block] + k / w.W.group;
        const uint8_t* from = (const uint8_t*)w.q + k;
        ahead += (size_t)k * TILE_ROWS;
        const __m512i none = _mm512_set1_epi16(0x78), upper = _mm512_set1_epi16(0x600);
        const __m512i sign = _mm512_set1_epi16((short)0x8000);
        for (int r = 0; r < TILE_ROWS; r++, from += w.row_bytes, ahead += CHUNK) {
            const size_t row = w.row + (size_t)r;
            const bool new_scale = r == 0 || row % w.W.group_rows == 0;
            if (new_scale && !tables(scales[row / w.W.group_rows * w.groups])) return false;
            fetch_line(w.q, ahead), fetch_line(w.q, ahead + 64);
            UNROLL for (int i = 0; i < 4; i++) {
                __m512i u, v;
                extend_bytes(u, from + 32 * i);
                look_up(v, u, normal);
                v = _mm512_add_epi16(v, _mm512_and_si512(_mm512_maskz_slli_epi16(~0u, u, 4), upper));
                v = _mm512_mask_permutexvar_epi16(v, _mm512_testn_epi16_mask(u, none), u, small);
                v = _mm512_ternarylogic_epi32(v, _mm512_maskz_slli_epi16(~0u, u, 8), sign, 0x78); // v ^ that & sign
                store_tile_row(tiles, r, i, v);
            }
        }
        return true;
    }
};

// GGUF's blocks. A chunk is half a long block or four short ones. The scales of all rows are collected by plain moves
// and converted at once.
template <> struct ChunkRows<Format::BLOCKS> {
    static constexpr int SHORT = CHUNK / 32; // short blocks of a row
    alignas(64) float scale[TILE_ROWS][8];   // of two rows in a vector
    alignas(64) uint16_t halves[TILE_ROWS * SHORT];

    INLINE void halves_of(__m512& v, int i) const { // 16 of them
        v = _mm512_maskz_cvtph_ps(0xffff, _mm256_load_si256((const __m256i*)(halves + i)));
    }
    INLINE void to_floats(float* to, int count) const { // the first `count` halves
        for (int i = 0; i < count; i += 16) {
            __m512 v;
            halves_of(v, i);
            memcpy(to + i, &v, sizeof v);
        }
    }
    template <class Block> INLINE float* short_scales(const uint8_t* from, size_t row_bytes) { // d: (TILE_ROWS, SHORT)
        for (int r = 0; r < TILE_ROWS; r++, from += row_bytes)
            UNROLL for (int g = 0; g < SHORT; g++) memcpy(&halves[r * SHORT + g], from + g * Block::BYTES, 2);
        to_floats(scale[0], TILE_ROWS * SHORT);
        return scale[0];
    }
    // d and m of the half's four groups: bytes s_g and m_g times d and -m of the block
    INLINE void scales_of_six(const uint8_t* from, size_t row_bytes, bool second) {
        alignas(64) uint64_t eight[TILE_ROWS];
        alignas(64) float unit[TILE_ROWS * 2];
        for (int r = 0; r < TILE_ROWS; r++, from += row_bytes) {
            const uint64_t s = load_as<uint64_t>(from + 4), t = load_as<uint32_t>(from + 12);
            const uint64_t other = (s >> 2 & 0x3030303030303030) | (t & 0x0f0f0f0f) | (t >> 4 & 0x0f0f0f0f) << 32;
            eight[r] = second ? other : s & 0x3f3f3f3f3f3f3f3f;
            memcpy(halves + 2 * r, from, 4);
        }
        for (int i = 0; i < 2 * TILE_ROWS; i += 16) {
            __m512 v;
            halves_of(v, i);
            v = (__m512)_mm512_xor_si512((__m512i)v, _mm512_set1_epi64((long long)(1ull << 63)));
            memcpy(unit + i, &v, sizeof v);
        }
        const __m512i lane = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        for (int r = 0; r < TILE_ROWS; r += 2) {
            const __m512 both = _mm512_maskz_broadcast_f32x4(0xffff, _mm_load_ps(unit + 2 * r));
            const __m512i bytes = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_load_si128((const __m128i*)(eight + r)));
            const __m512 v = _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, bytes),
                                           _mm512_maskz_permutevar_ps(0xffff, both, lane));
            memcpy(scale[r], &v, sizeof v);
        }
    }
    // Two groups' numbers in a table of 32; the first one's are in the lower halves of 32 bytes.
    INLINE void q4_k(bf16* tiles, const uint8_t* start, size_t row_bytes, int k, size_t ahead) {
        const bool second = k % 256;
        const uint8_t* from = start + (size_t)k / 256 * BlockQ4_K::BYTES;
        scales_of_six(from, row_bytes, second);
        __m512 count;
        count_lanes(count);
        const __m512i lower = _mm512_set1_epi16(15), other = _mm512_set1_epi16(16);
        from += 16 + 64 * second;
        for (int r = 0; r < TILE_ROWS; r++, from += row_bytes) {
            fetch<BlockQ4_K>(start, k, r, ahead);
            UNROLL for (int i = 0; i < 4; i += 2) {
                __m512 v[2];
                UNROLL for (int g = 0; g < 2; g++)
                    v[g] = _mm512_fmadd_ps(count, _mm512_set1_ps(scale[r][i + g]),
                                           _mm512_set1_ps(scale[r][4 + i + g]));
                const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]);
                __m512i code, numbers;
                extend_bytes(code, from + 16 * i);
                look_up(numbers, _mm512_and_si512(code, lower), table);
                store_tile_row(tiles, r, i, numbers);
                look_up(numbers, _mm512_or_si512(_mm512_maskz_srli_epi16(~0u, code, 4), other), table);
                store_tile_row(tiles, r, i + 1, numbers);
            }
        }
    }
    // A group's numbers in a table of 32; the fifth bit is bit g of 32 other bytes.
    template <bool SECOND> INLINE void q5_k(bf16* tiles, const uint8_t* start, size_t row_bytes, int k, size_t ahead) {
        const uint8_t* from = start + (size_t)k / 256 * BlockQ5_K::BYTES;
        scales_of_six(from, row_bytes, SECOND);
        __m512 count;
        count_lanes(count);
        const __m512i lower = _mm512_set1_epi16(15);
        for (int r = 0; r < TILE_ROWS; r++, from += row_bytes) {
            fetch<BlockQ5_K>(start, k, r, ahead);
            __m512i high, code = {}, numbers;
            extend_bytes(high, from + 16);
            UNROLL for (int i = 0; i < 4; i++) {
                constexpr int G = SECOND ? 4 : 0;
                const __m512 d = _mm512_set1_ps(scale[r][i]), m = _mm512_set1_ps(scale[r][4 + i]);
                const __m512 low = _mm512_fmadd_ps(count, d, m), more = _mm512_fmadd_ps(count + 16.f, d, m);
                const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(more, low);
                if (i % 2 == 0) extend_bytes(code, from + 48 + 64 * SECOND + 16 * i);
                else code = _mm512_maskz_srli_epi16(~0u, code, 4);
                const __m512i fifth = G + i < 4 ? _mm512_maskz_slli_epi16(~0u, high, larger(0, 4 - G - i))
                                                : _mm512_maskz_srli_epi16(~0u, high, larger(0, G + i - 4));
                const __m512i at = _mm512_ternarylogic_epi32(lower, code, fifth, 0xca); // there code, elsewhere fifth
                look_up(numbers, at, table);
                store_tile_row(tiles, r, i, numbers);
            }
        }
    }
    // A code of 6 bits, above a bit of zero and below a bit of one, as the third byte of a float is 64 + code.
    INLINE void q6_k(bf16* tiles, const uint8_t* start, size_t row_bytes, int k, size_t ahead) {
        alignas(64) uint64_t eight[TILE_ROWS];
        alignas(64) float unit[TILE_ROWS], less[TILE_ROWS][8];
        const bool second = k % 256;
        const uint8_t* from = start + (size_t)k / 256 * BlockQ6_K::BYTES;
        for (int r = 0; r < TILE_ROWS; r++) {
            eight[r] = load_as<uint64_t>(from + r * row_bytes + 192 + 8 * second);
            memcpy(halves + r, from + r * row_bytes + 208, 2);
        }
        to_floats(unit, TILE_ROWS);
        const __m512i lane = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
        for (int r = 0; r < TILE_ROWS; r += 2) {
            const __m512 both = (__m512)_mm512_set1_pd(load_as<double>((const uint8_t*)(unit + r)));
            const __m512i bytes = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_load_si128((const __m128i*)(eight + r)));
            __m512 v = _mm512_maskz_permutevar_ps(0xffff, both, lane);
            v = _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, bytes), v);
            memcpy(scale[r], &v, sizeof v);
            v *= -96.f;
            memcpy(less[r], &v, sizeof v);
        }
        __m512i place[4], power = _mm512_set1_epi32(0x42000000);
        byte_places(place, 16);
        asm("" : "+v"(power));
        const __m512i nibble = _mm512_set1_epi8(0x1e), code = _mm512_set1_epi8(0x7e);
        const __m512i top = _mm512_set1_epi8((char)0x80);
        for (int r = 0; r < TILE_ROWS; r++, from += row_bytes) {
            fetch<BlockQ6_K>(start, k, r, ahead);
            UNROLL for (int half = 0; half < 2; half++) {
                __m512i low = _mm512_maskz_loadu_epi8(~0ull, from + 64 * second), high;
                load_twice(high, from + 128 + 32 * second);
                if (half) turn_right<3, 3>(low), turn_right<-1, 1>(high);
                else turn_right<-1, -1>(low), turn_right<-5, -3>(high);
                __m512i q = _mm512_ternarylogic_epi32(nibble, low, high, 0xca); // there low, elsewhere high
                q = _mm512_ternarylogic_epi32(q, code, top, 0xea);              // (q & code) | top
                __m512 v[4];
                UNROLL for (int i = 0; i < 4; i++) {
                    v[i] = (__m512)_mm512_mask_permutexvar_epi8(power, 0x4444444444444444, place[i], q);
                    const int g = 4 * half + i;
                    v[i] = _mm512_fmadd_ps(v[i], _mm512_set1_ps(scale[r][g]), _mm512_set1_ps(less[r][g]));
                }
                store_tile_row(tiles, r, 2 * half, v[0], v[1]), store_tile_row(tiles, r, 2 * half + 1, v[2], v[3]);
            }
        }
    }
    // Two blocks' numbers in a table of 32. Of 16 bytes the lower halves are first, then the upper ones.
    INLINE void q4_0(bf16* tiles, const uint8_t* start, size_t row_bytes, int k, size_t ahead) {
        const uint8_t* from = start + (size_t)k / 32 * BlockQ4_0::BYTES;
        const float* d = short_scales<BlockQ4_0>(from, row_bytes);
        const __m512 codes = _mm512_maskz_loadu_ps(0xffff, CODES + 15 - 8);
        const __m512i lower = _mm512_set1_epi16(15), other = _mm512_set1_epi16(16);
        const __m512i shift = _mm512_maskz_inserti64x4(0xff, _mm512_set1_epi16(4), _mm256_setzero_si256(), 0);
        for (int r = 0; r < TILE_ROWS; r++, from += row_bytes) {
            fetch<BlockQ4_0>(start, k, r, ahead);
            UNROLL for (int i = 0; i < SHORT; i += 2) {
                __m512 v[2];
                __m512i code[2];
                UNROLL for (int g = 0; g < 2; g++) {
                    v[g] = _mm512_mul_ps(codes, _mm512_set1_ps(d[r * SHORT + i + g]));
                    const __m128i bytes = _mm_loadu_si128((const __m128i*)(from + (i + g) * BlockQ4_0::BYTES + 2));
                    code[g] = _mm512_maskz_cvtepu8_epi16(~0u, _mm256_maskz_broadcast_i32x4(0xff, bytes));
                    code[g] = _mm512_maskz_srlv_epi16(~0u, code[g], shift);
                }
                const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]);
                code[0] = _mm512_and_si512(code[0], lower), code[1] = _mm512_or_si512(code[1], other);
                UNROLL for (int g = 0; g < 2; g++) {
                    look_up(code[g], code[g], table);
                    store_tile_row(tiles, r, i + g, code[g]);
                }
            }
        }
    }
    INLINE void q8_0(bf16* tiles, const uint8_t* start, size_t row_bytes, int k, size_t ahead) {
        alignas(64) float less[TILE_ROWS * SHORT];
        const uint8_t* from = start + (size_t)k / 32 * BlockQ8_0::BYTES;
        const float* d = short_scales<BlockQ8_0>(from, row_bytes);
        for (int i = 0; i < TILE_ROWS * SHORT; i++) less[i] = d[i] * SIGNED_BYTE_LESS;
        const SignedBytes bytes;
        for (int r = 0; r < TILE_ROWS; r++, from += row_bytes) {
            fetch<BlockQ8_0>(start, k, r, ahead);
            UNROLL for (int g = 0; g < SHORT; g++) {
                const __m256i q = _mm256_loadu_si256((const __m256i*)(from + g * BlockQ8_0::BYTES + 2));
                __m512 v[2];
                const int at = r * SHORT + g;
                UNROLL for (int i = 0; i < 2; i++)
                    bytes.scaled(v[i], _mm512_maskz_inserti64x4(0xff, __m512i{}, q, 0), i, d + at, less + at);
                store_tile_row(tiles, r, g, v[0], v[1]);
            }
        }
    }
    // Rows of the tile `ahead` bytes further on, in memory order.
    template <class Block> INLINE void fetch(const uint8_t* start, int k, int r, size_t ahead) const {
        constexpr size_t BYTES = CHUNK * Block::BYTES / Block::COUNT;
        ahead += (k / CHUNK * (size_t)TILE_ROWS + r) * BYTES;
        UNROLL for (size_t i = 0; i < BYTES; i += 64) fetch_line(start, ahead + i);
    }
    INLINE bool widen(bf16* tiles, const WeightRows<bf16>& w, int k, size_t ahead) {
        const uint8_t* from = (const uint8_t*)w.q;
        const Dtype type = w.W.type[w.block];
        if (type == Dtype::Q4_K) q4_k(tiles, from, w.row_bytes, k, ahead);
        else if (type == Dtype::Q5_K && k % 256) q5_k<true>(tiles, from, w.row_bytes, k, ahead);
        else if (type == Dtype::Q5_K) q5_k<false>(tiles, from, w.row_bytes, k, ahead);
        else if (type == Dtype::Q6_K) q6_k(tiles, from, w.row_bytes, k, ahead);
        else if (type == Dtype::Q4_0) q4_0(tiles, from, w.row_bytes, k, ahead);
        else if (type == Dtype::Q8_0) q8_0(tiles, from, w.row_bytes, k, ahead);
        else return false;
        return true;
    }
};
} // namespace
