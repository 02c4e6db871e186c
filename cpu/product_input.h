// cpu/product_input.h: the layout of x for product tiles, and the choice of the tile.
#pragma once
#include "cpu/amx.h"
#include "cpu/byte_rows.h"

template <class T> struct ProductInput {
    int N, in;
    int task_rows;              // of W, for a thread at a time
    ProductTile<T> vectors;     // for `operand`: x itself where the instructions take bf16, or floats
    const uint8_t* operand;
    size_t token_bytes;         // of it
    AmxTile amx = nullptr;      // for `packed`, and whole tiles
    const bf16* packed;
    const int8_t* bytes = nullptr; // or x rounded to bytes (N,in), which are multiplied instead
    const RoundedGroup* groups;
    ByteTile byte_loops = nullptr; // null: the definition

    ProductInput(const Context& ctx, const Linear<T>& W, const T* x, int N);
    // The tile of `rows` rows at w, which are number `place` of the task, and `count` tokens from n on.
    void tile(acc<T>* y, const WeightRows<T>& w, int rows, int place, int n, int count) const;
};
