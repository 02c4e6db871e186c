// model/upload.h: where the weights of a model lie in the memory of a GPU.
#pragma once
#include "qwen3.cu"
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

// One copy to the GPU: bytes of the CPU's memory, and their place in the weights' arena.
struct UploadPiece { const void* from; size_t to, bytes; };

// Places a packed matrix in the arena, its blocks one after another: numbers, scales, and INT4's zero points, which all
// blocks have if one has them. FP8's blocks of rows continue across blocks only where they are whole; else each row
// gets its own scales. With `pieces`, lists the copies and sets the pointers; `made` keeps arrays that no file holds.
template <class T>
void place_packed(Arena& gpu, Linear<T>& W, std::vector<UploadPiece>* pieces,
                  std::vector<std::vector<uint8_t>>& made) {
    const size_t groups = (size_t)W.groups(), size = W.format == Format::FP8 ? sizeof(float) : sizeof(uint16_t);
    bool whole = true, zeros = false;
    for (int b = 0; b < 3; b++) {
        zeros |= W.zero[b] != nullptr;
        whole &= b == 2 || !W.rows[b + 1] || W.rows[b] % W.group_rows == 0;
    }
    const int group_rows = whole ? W.group_rows : 1;
    auto scale_rows = [&](int b) { return (size_t)(W.rows[b] + group_rows - 1) / group_rows; };
    int8_t* q = gpu.take<int8_t>((size_t)W.out() * W.row_bytes());
    uint8_t* scale = gpu.take<uint8_t>((scale_rows(0) + scale_rows(1) + scale_rows(2)) * groups * size);
    uint8_t* zero = zeros ? gpu.take<uint8_t>((size_t)W.out() * groups) : nullptr;
    if (!pieces) return;
    auto put = [&](const void* from, const void* to, size_t bytes) {
        pieces->push_back({from, (size_t)((const uint8_t*)to - gpu.base), bytes});
    };
    for (int b = 0; b < 3 && W.rows[b]; b++) {
        const size_t rows = (size_t)W.rows[b], row_bytes = groups * size;
        const uint8_t* scales = (const uint8_t*)W.scale[b];
        if (!whole) {
            std::vector<uint8_t>& each = made.emplace_back(rows * row_bytes);
            for (size_t r = 0; r < rows; r++)
                memcpy(&each[r * row_bytes], scales + r / (size_t)W.group_rows * row_bytes, row_bytes);
            scales = each.data();
        }
        if (zeros && !W.zero[b]) made.emplace_back(rows * groups, (uint8_t)8);
        put(W.q[b], q, rows * W.row_bytes()), put(scales, scale, scale_rows(b) * row_bytes);
        if (zeros) put(W.zero[b] ? W.zero[b] : made.back().data(), zero, rows * groups);
        W.q[b] = q, W.scale[b] = scale, W.zero[b] = zero;
        q += rows * W.row_bytes(), scale += scale_rows(b) * row_bytes, zero += zeros ? rows * groups : 0;
    }
    W.group_rows = group_rows;
}

// Room for the largest matrix of a layer as bf16; and for parts of embedding and head, which are larger (each_part).
constexpr size_t LEAST_UNPACKED = 32 << 20; // numbers
inline size_t unpacked_numbers(const Config& c) {
    const size_t C = (size_t)c.C, head = (size_t)c.V * C, wide = (size_t)(c.H + 2 * c.K) * c.D;
    return std::max({C * wide, 2 * C * (size_t)c.F, std::min(head, std::max(LEAST_UNPACKED, (size_t)c.V * 64))});
}
