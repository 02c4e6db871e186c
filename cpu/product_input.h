// cpu/product_input.h: the layout of x for product tiles, and the choice of the tile.
#pragma once
#include "cpu/amx.h"

template <class T> struct ProductInput {
    int N, in;
    bool streams;               // one token: rows are read one after another, so tasks may have few rows
    ProductTile<T> vectors;     // for `operand`: x itself for avx512_bf16_tile, integers, or floats
    const uint8_t* operand;
    size_t token_bytes;         // of it
    const bf16* packed = nullptr;            // for AMX, which takes whole tiles
    const FixedTile* fixed_packed = nullptr; // for AMX with integers

    ProductInput(const Linear<T>& W, const T* x, int N);
    // The tile of `rows` rows at w and `count` tokens from n on.
    void tile(acc<T>* y, const WeightRows<T>& w, int rows, int n, int count) const;

  private:
    bool take_integers(const Linear<T>& W, const T* x); // whether this instruction set multiplies integers here
    void set_operand(const IntegerTiles& tiles, const T* x);
};
