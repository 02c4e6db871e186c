// cpu/product_input.cpp: x as the tiles of a product want it.
#include "cpu/product_input.h"
#include "cpu/scratch.h"
#include "model/instances.h"
#include <cstring>
#include <vector>

#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
// x (N,in) to (N/16, in/2, 16) pairs, zeros for the tokens that are missing in the last 16. N = 1: x itself.
const bf16* amx_pack(const bf16* x, int N, int in) {
    if (N == 1) return x;
    static thread_local std::vector<uint32_t> kept;
    const int tiles = (N + 15) / 16;
    uint32_t* out = at_least(kept, (size_t)tiles * in * 8);
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int t = 0; t < tiles; t++)
        for (int n = 0; n < 16; n++)
            for (int i = 0; i < in / 2; i++) {
                uint32_t pair = 0;
                if (t * 16 + n < N) memcpy(&pair, x + (size_t)(t * 16 + n) * in + 2 * i, 4);
                out[((size_t)t * in / 2 + i) * 16 + n] = pair;
            }
    return (const bf16*)out;
}

const FixedTile* amx_pack_int8(const FixedX* x, int N, int in) { // (N/16, in/32)
    static thread_local std::vector<FixedTile> kept;
    const int tiles = (N + 15) / 16, groups = in / GROUP;
    FixedTile* out = at_least(kept, (size_t)tiles * groups);
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int t = 0; t < tiles; t++)
        for (int g = 0; g < groups; g++)
            for (int n = 0; n < 16; n++) {
                const size_t token = std::min(t * 16 + n, N - 1); // (numbers past N are never read)
                const FixedX& from = x[token * groups / 2 + g / 2];
                FixedTile& to = out[(size_t)t * groups + g];
                to.step[n] = from.step[g % 2];
                for (int p = 0; p < 3; p++)
                    for (int k = 0; k < 8; k++) memcpy(to.plane[p][k][n], from.plane[p] + g % 2 * GROUP + 4 * k, 4);
            }
    return out;
}
#endif

template <class T> static const acc<T>* widen_x(const T* x, size_t n) {
    static thread_local std::vector<acc<T>> kept;
    acc<T>* out = at_least(kept, n);
    #pragma omp parallel for schedule(static) if (n > 50000)
    for (size_t i = 0; i < n; i++) out[i] = to_acc(x[i]);
    return out;
}

template <class T>
ProductInput<T>::ProductInput(const Linear<T>& W, const T* x, int N) : N(N), in(W.in), streams(N == 1) {
#ifdef HAVE_SIMD
    if constexpr (std::is_same_v<T, bf16>) {
        if (take_integers(W, x)) return;
        const bool plain = W.format == Format::PLAIN;
        if (plain && in % 32 == 0 && instruction_set >= ISA_AMX) packed = amx_pack(x, N, in), streams = false;
        if (plain && instruction_set >= ISA_AVX512_BF16) {
            vectors = avx512_bf16_tile, operand = (const uint8_t*)x, token_bytes = in * sizeof(T);
            return;
        }
    }
#endif
    vectors = best_loops<T>().tile[(int)W.format];
    token_bytes = in * sizeof(acc<T>);
    if constexpr (std::is_same_v<T, acc<T>>) operand = (const uint8_t*)x;
    else operand = (const uint8_t*)widen_x(x, (size_t)N * in);
}

template <class T> bool ProductInput<T>::take_integers([[maybe_unused]] const Linear<T>& W,
                                                       [[maybe_unused]] const T* x) {
#ifdef HAVE_SIMD
    if constexpr (std::is_same_v<T, bf16>) {
        if (W.format == Format::INT4 && in % 64 == 0 && instruction_set >= ISA_AVX2) {
            const IntegerTiles* tiles = instruction_set >= ISA_AVX512_BF16 ? avx512_bf16_int4 : avx2_int4;
            set_operand(tiles[W.group == 32 ? 0 : W.group == 64 ? 1 : 2], x);
            return true;
        }
        if (W.format != Format::INT8) return false;
        if (instruction_set >= ISA_AMX && in % FixedX::COLUMNS == 0) {
            set_operand(amx_int8[N > 1], x);
            if (N > 1) fixed_packed = amx_pack_int8((const FixedX*)operand, N, in);
            streams = false;
            return true;
        }
        if (instruction_set >= ISA_AVX512_BF16 && in % avx512_bf16_int8.columns == 0)
            return set_operand(avx512_bf16_int8, x), true;
        if (instruction_set >= ISA_AVX2 && in % avx2_int8.columns == 0) return set_operand(avx2_int8, x), true;
    }
#endif
    return false;
}
template <class T> void ProductInput<T>::set_operand(const IntegerTiles& tiles, const T* x) {
    if constexpr (std::is_same_v<T, bf16>) {
        operand = fix_all(tiles, x, N, in), vectors = tiles.tile;
        token_bytes = (in + tiles.columns - 1) / tiles.columns * tiles.bytes;
    }
}

template <class T> void ProductInput<T>::tile(acc<T>* y, const WeightRows<T>& w, int rows, int n, int count) const {
#ifdef HAVE_SIMD
    if constexpr (std::is_same_v<T, bf16>) {
        const size_t before = (size_t)n * in;
        if (fixed_packed && rows == TILE_ROWS)
            return amx_int8_tile(y, w, fixed_packed + before / (16 * GROUP), count);
        if (packed && rows == TILE_ROWS) return amx_tile(y, w.w, packed + before, N == 1, count, in);
    }
#endif
    vectors(y, w, rows, operand + n * token_bytes, count);
}

#define INSTANTIATE(T) template struct ProductInput<T>;
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
