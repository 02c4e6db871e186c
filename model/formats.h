/* model/formats.h: the formats in which a Linear of qwen3.cu stores weights, beside T. `group` neighbours of a row have
   one scale s:
     INT8   W[r][i] = q s         q a signed byte; groups of 32; s a bf16
     INT4   W[r][i] = (q - z) s   q, z 0..15, two q a byte; groups of 32, 64 or 128; s a half; z = 8 if none is stored
     FP8    W[r][i] = q s         q an e4m3; blocks of group_rows rows and `group` columns; s a float
     BLOCKS                       rows of GGUF's blocks as in the file (model/blocks.h); one type for a block of rows
   INT4: 64 columns of a row are 32 bytes; column i is the lower half of byte i, column 32 + i the upper half. */
#pragma once
#include "model/bf16.h"
#include <cstddef>
#include <cstdint>

enum class Format { PLAIN, INT8, INT4, FP8, BLOCKS };
constexpr int GROUP = 32;                 // INT8's, and the smallest of all
inline constexpr int FP8_GROUP = 128;     // of FP8 activations; the common one of FP8 weights, in rows and in columns

// BLOCKS: number i of a row, and the bytes of a row of `in` numbers (model/quantized.cpp).
float block_number(Dtype type, const uint8_t* row, size_t i);
size_t block_row_bytes(Dtype type, size_t in);
const char* block_name(Dtype type); // "q4_k"

// The part of a Linear that depends on the format. A Linear has up to three blocks of rows, of one format.
struct StoredRows {
    Format format = Format::PLAIN;
    const int8_t* q[3] = {};           // (rows, row_bytes) of each block; null: PLAIN
    const void* scale[3] = {};         // but for BLOCKS: (rows / group_rows, groups)
    const uint8_t* zero[3] = {};       // INT4: (rows, groups) zero points, or null: all are 8
    Dtype type[3] = {};                // BLOCKS: the type of each block
    int group = GROUP, group_rows = 1; // columns and rows that share a scale
    int in = 0;                        // columns of W
    int groups() const { return (in + group - 1) / group; }
    size_t row_bytes(int b = 0) const { // bytes of a row of q[b]; only in BLOCKS they depend on b
        if (format == Format::BLOCKS) return block_row_bytes(type[b], (size_t)in);
        return format == Format::INT4 ? ((size_t)in + 63) / 64 * 32 : (size_t)in;
    }
};

// INT4's number i of a row, before its zero point: 0 to 15. A byte has those of i and i + 32.
inline int int4_code(const uint8_t* row, int i) { return row[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15; }

// W[r][i] as A, of row r of block b of a Linear that is not PLAIN.
template <class A, class Linear> A packed_number(const Linear& W, int b, int r, int i) {
    const size_t g = (size_t)(r / W.group_rows) * W.groups() + i / W.group;
    const int8_t* row = W.q[b] + (size_t)r * W.row_bytes(b);
    if (W.format == Format::BLOCKS) return (A)block_number(W.type[b], (const uint8_t*)row, (size_t)i);
    if (W.format == Format::INT8) return (A)row[i] * to_acc(((const bf16*)W.scale[b])[g]);
    if (W.format == Format::FP8) return (A)e4m3_to_float((uint8_t)row[i]) * ((const float*)W.scale[b])[g];
    const int number = int4_code((const uint8_t*)row, i);
    return (A)(number - (W.zero[b] ? W.zero[b][g] : 8)) * half_to_float(((const uint16_t*)W.scale[b])[g]);
}
