// cpu/amx.h: product tiles of AMX, and how x is laid out for them.
#pragma once
#include "cpu/tiles.h"

// ---- bf16. A tile register is 16 rows of 64 bytes; tdpbf16ps multiplies 16 rows of W by 16 tokens, 32 deep, at once.
// Rows of W are loaded from where they are. `amx_pack` lays out x: row after row, the pairs (x[2i], x[2i+1]) of all 16
// tokens side by side. A single token is packed as it is: decoding is the same code, one column wide, and has the bits
// that it has in any batch. For `in` a multiple of 32 and 32 rows; else avx512_bf16_tile.

// x (N,in) to (N/16, in/2, 16) pairs, zeros for the tokens that are missing in the last 16. N = 1: x itself.
const bf16* amx_pack(const bf16* x, int N, int in);
// x packed by amx_pack for a batch of one token (`one`) or more, from a multiple of 16 tokens on.
void amx_tile(float* y, const bf16* w, const bf16* x, bool one, int N, int in);

// ---- INT8 on CPUs with AMX, whose tiles multiply signed bytes and sum a whole group: X = 65536 h + 256 m + l, three
// planes. The sums H, M, L of q h, q m, q l over a group are integers, the same in any order; so vectors, for a single
// token, and tiles of AMX give the same bits:
//     y = fma(scale_g, step_g * fma(256 H_g + M_g, 256, L_g), y)    group after group.
// For `in` a multiple of 64.
struct alignas(64) FixedX { // two groups of one token
    static constexpr int COLUMNS = 2 * GROUP;
    int8_t plane[3][COLUMNS];   // h, m, l
    int32_t upper[2], lower[2]; // 128 times the sums of 256 h + m, and of l
    float step[2];
};
extern const IntegerTiles amx_int8[2]; // vectors, any number of rows: for one token; for more. x is FixedX

// For tiles: the numbers of 16 tokens in a group, 4 neighbours together, as tdpbssd reads them.
struct alignas(64) FixedTile {
    int8_t plane[3][8][16][4]; // (planes, fours, tokens, 4)
    float step[16];
};
const FixedTile* amx_pack_int8(const FixedX* x, int N, int in); // (N/16, in/32)
// 32 rows of INT8 and N <= TILE_TOKENS tokens; the bits of amx_int8's tiles.
void amx_int8_tile(float* y, const WeightRows<bf16>& w, const FixedTile* x, int N);
