// cpu/byte_rows.h: product tiles of packed weights with activations rounded to bytes.
#pragma once
#include "cpu/tiles.h"
#include "model/int8_activations.h"

// byte_products of the first rows of a tile, for its ld of TILE_ROWS; returns their number. The bits are those of the
// definition: sums of bytes are exact, and groups are added in its order.
using ByteTile = int (*)(float* y, const StoredRows& W, int b, size_t row_bytes, size_t row, int rows,
                         const int8_t* x, const RoundedGroup* group, int N);
#ifdef HAVE_SIMD
extern const ByteTile avx2_bytes, vnni_bytes, amx_bytes;
#endif
#ifdef HAVE_ARM
extern const ByteTile arm_bytes;
#endif
