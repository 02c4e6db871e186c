// cpu/amx.h: product tiles of AMX, and how x is laid out for them.
#pragma once
#include "cpu/tiles.h"

// A tile register is 16 rows of 64 bytes; tdpbf16ps multiplies 16 rows of W by 16 tokens, 32 deep, at once. Rows of
// bf16 are loaded from where they are; packed ones are widened. `amx_pack` lays out x: row after row, the pairs
// (x[2i], x[2i+1]) of all 16 tokens side by side. A single token is packed as it is: decoding is the same code, one
// column wide, and has the bits that it has in any batch. For `in` a multiple of 32 and 32 rows; else
// avx512_bf16_tile.

// x (N,in) to (N/16, in/2, 16) pairs, zeros for the tokens that are missing in the last 16. N = 1: x itself.
const bf16* amx_pack(const bf16* x, int N, int in);

// Memory for 32 packed rows as bf16, tile after tile: (in / 32, 32 rows, 32), or only AMX_RING bytes.
constexpr size_t AMX_RING = 8192;
struct AmxWide {
    bf16* tiles;
    bool ring;  // the few tokens are one pass over W: the memory stays in the first-level cache
    bool ready; // the rows are there, from the tokens before
};
// The tile of 32 rows of W and N tokens: x packed by amx_pack for a batch of one token (`one`) or more, from a multiple
// of 16 tokens on. Packed weights are rounded to bf16.
using AmxTile = void (*)(float* y, const WeightRows<bf16>& w, AmxWide wide, const bf16* x, bool one, int N);
extern const AmxTile amx_tile[5]; // by Format
