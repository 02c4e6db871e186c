// cpu/amx_rows.h: 32 packed rows as tiles of bf16, CHUNK columns at once: the numbers of widen_rows (cpu/loops.h) from
// fewer instructions. (Rules for sources of instruction sets: cpu/loops.h.)
#pragma once
#include "cpu/avx512_vectors.h"
#include "cpu/loops.h"

// On Sapphire Rapids ports 0 and 5 bind: rounding 32 numbers to bf16 takes four of their slots, an extension of bytes a
// slot of port 5, a broadcast from memory none. So the scales of 16 groups of each row are converted at once, and loaded
// into all lanes from memory.
namespace {
constexpr int CHUNK = 128, SCALES = 16;

// Row r's 32 columns from 32 i on are at tiles + (i * TILE_ROWS + r) * 32.
INLINE void store_tile_row(bf16* tiles, int r, int i, const __m512& low, const __m512& high) {
    const __m512bh nearest = _mm512_cvtne2ps_pbh(high, low);
    memcpy((void*)(tiles + (i * TILE_ROWS + r) * 32), &nearest, sizeof nearest);
}

template <Format F> struct ChunkRows {
    INLINE bool widen(bf16*, const WeightRows<bf16>&, int, size_t) { return false; }
};

// A byte q, with its sign bit flipped, as the second byte of 2^15 is the float 2^15 + 128 + q. Its product with the scale
// less that of 2^15 + 128 is exact.
template <> struct ChunkRows<Format::INT8> {
    alignas(64) float scale[TILE_ROWS][SCALES], less[TILE_ROWS][SCALES];
    bool fits;
    INLINE void begin(const WeightRows<bf16>& w, int g) {
        const Avx512::Part some = Avx512::part((int)w.groups - g);
        const bf16* from = w.scale + g;
        __m512 highest = {};
        for (int r = 0; r < TILE_ROWS; r++, from += w.groups) {
            __m512 s;
            __builtin_prefetch(from + TILE_ROWS * w.groups, 0, 2);
            Avx512::load(s, from, some);
            highest = _mm512_max_ps(highest, _mm512_abs_ps(s));
            memcpy(scale[r], &s, sizeof s);
            s *= -(32768.f + 128);
            memcpy(less[r], &s, sizeof s);
        }
        fits = _mm512_cmp_ps_mask(highest, _mm512_set1_ps(0x1p100f), _CMP_NLT_UQ) == 0;
    }
    INLINE bool widen(bf16* tiles, const WeightRows<bf16>& w, int k, size_t ahead) {
        const int first = k / GROUP % SCALES;
        if (first == 0) begin(w, k / GROUP);
        if (!fits) return false;
        __m512i place[4];
        const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        UNROLL for (int i = 0; i < 4; i++)
            place[i] = _mm512_maskz_slli_epi32(0xffff, _mm512_add_epi32(count, _mm512_set1_epi32(16 * i)), 8);
        __m512i flip = _mm512_set1_epi8((char)0x80), power = _mm512_set1_epi32(0x47000000);
        asm("" : "+v"(place[0]), "+v"(place[1]), "+v"(place[2]), "+v"(place[3]), "+v"(flip), "+v"(power)); // in registers
        const int8_t* from = w.q + k;
        const char* later = (const char*)w.q + (size_t)k * TILE_ROWS + ahead;
        for (int r = 0; r < TILE_ROWS; r++, from += w.row_bytes, later += CHUNK)
            UNROLL for (int half = 0; half < 2; half++) {
                __builtin_prefetch(later + 64 * half, 0, 2);
                const __m512i q = _mm512_xor_si512(_mm512_maskz_loadu_epi8(~0ull, from + 64 * half), flip);
                __m512 v[4];
                UNROLL for (int i = 0; i < 4; i++) {
                    const int g = first + 2 * half + i / 2;
                    v[i] = (__m512)_mm512_mask_permutexvar_epi8(power, 0x2222222222222222, place[i], q);
                    v[i] = _mm512_fmadd_ps(v[i], _mm512_set1_ps(scale[r][g]), _mm512_set1_ps(less[r][g]));
                }
                store_tile_row(tiles, r, 2 * half, v[0], v[1]), store_tile_row(tiles, r, 2 * half + 1, v[2], v[3]);
            }
        return true;
    }
};

// The numbers of a group are looked up in a table of them, by the lower 5 bits of a word: so the 16 numbers are in it twice.
template <> struct ChunkRows<Format::INT4> {
    alignas(64) float scale[TILE_ROWS][SCALES];
    INLINE void begin(const WeightRows<bf16>& w, int g) {
        const Avx512::Part some = Avx512::part((int)w.groups - g);
        const uint16_t* from = w.half + g;
        for (int r = 0; r < TILE_ROWS; r++, from += w.groups) {
            __builtin_prefetch(from + TILE_ROWS * w.groups, 0, 2);
            const __m512 s = _mm512_maskz_cvtph_ps(0xffff, _mm256_maskz_loadu_epi16(some, from));
            memcpy(scale[r], &s, sizeof s);
        }
    }
    template <int GROUPS> // of a row's chunk
    INLINE void rows(bf16* tiles, const WeightRows<bf16>& w, int k, size_t ahead) const {
        const int first = k / w.W.group % SCALES;
        const uint8_t* from = (const uint8_t*)w.q + k / 2;
        const uint8_t* zero = w.zero ? w.zero + k / w.W.group : nullptr;
        const char* later = (const char*)w.q + (size_t)k / 2 * TILE_ROWS + ahead;
        __m512 codes = _mm512_maskz_loadu_ps(0xffff, CODES + 15 - 8);
        for (int r = 0; r < TILE_ROWS; r++, from += w.row_bytes, later += CHUNK / 2) {
            __builtin_prefetch(later, 0, 2);
            __m512i table[GROUPS];
            UNROLL for (int g = 0; g < GROUPS; g++) {
                if (zero) codes = _mm512_maskz_loadu_ps(0xffff, CODES + 15 - zero[g]);
                const __m512 numbers = _mm512_mul_ps(codes, _mm512_set1_ps(scale[r][first + g]));
                table[g] = (__m512i)_mm512_cvtne2ps_pbh(numbers, numbers);
            }
            if (zero) zero += w.groups;
            UNROLL for (int i = 0; i < 4; i += 2) { // lower and upper halves of 32 bytes
                __m512i code = _mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256((const __m256i*)(from + i * 16)));
                asm("" : "+v"(code)); // (g++ would extend it twice)
                const __m512i upper = _mm512_maskz_srli_epi16(~0u, code, 4);
                const __m512i a = _mm512_maskz_permutexvar_epi16(~0u, code, table[i * GROUPS / 4]);
                const __m512i b = _mm512_maskz_permutexvar_epi16(~0u, upper, table[(i + 1) * GROUPS / 4]);
                memcpy((void*)(tiles + (i * TILE_ROWS + r) * 32), &a, sizeof a);
                memcpy((void*)(tiles + ((i + 1) * TILE_ROWS + r) * 32), &b, sizeof b);
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
} // namespace
