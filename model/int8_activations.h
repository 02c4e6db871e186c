// model/int8_activations.h: activations rounded to bytes, a scale for each 32 columns, and products of packed weights
// with them (--activations int8).
#pragma once
#include "model/blocks.h"
#include "model/formats.h"
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

// 32 neighbours of a token: x = q scale.
struct RoundedGroup {
    float scale;       // NaN if one of them is not finite
    float offset;      // scale times the sum of q
    int less, half[2]; // minus the sum of q: of all, of 16 each
};

// Definition of rounded activations: q (in) is the nearest to x / scale (ties to even), scale the largest size / 127.
// Sizes below 2^-100 are zeros.
template <class T>
void round_to_bytes(int8_t* q,           // (in) out
                    RoundedGroup* group, // (in / 32) out
                    const T* x,          // (in), a multiple of 32
                    int in) {
    for (int first = 0; first < in; first += GROUP, group++) {
        float v[GROUP];
        int bits[GROUP], most = 0, nearest[GROUP], sum[2] = {};
        for (int i = 0; i < GROUP; i++) v[i] = (float)to_acc(x[first + i]);
        memcpy(bits, v, sizeof bits);
        for (int i = 0; i < GROUP; i++) most = std::max(most, bits[i] & 0x7fffffff); // (in the order of sizes)
        const bool finite = most < 0x7f800000;
        const float largest = finite ? load_as<float>(&most) : 0, kept = largest >= 0x1p-100f ? largest : 0;
        const float inverse = kept > 0 ? 127 / kept : 0;
        for (int i = 0; i < GROUP; i++) v[i] = (finite ? v[i] : 0) * inverse + 12582912.f; // 1.5 * 2^23: it rounds
        memcpy(nearest, v, sizeof nearest);
        for (int i = 0; i < GROUP; i++) q[first + i] = (int8_t)(nearest[i] -= 0x4b400000);
        for (int i = 0; i < 16; i++) sum[0] += nearest[i], sum[1] += nearest[16 + i];
        group->scale = finite ? kept / 127 : std::numeric_limits<float>::quiet_NaN();
        group->less = -(sum[0] + sum[1]), group->half[0] = -sum[0], group->half[1] = -sum[1];
        group->offset = group->scale * (float)-group->less;
    }
}

// Formats whose weights are d q + m in integers q; rows of whole chunks. Other matrices are multiplied as always.
constexpr int BYTE_CHUNK = 256; // columns
inline bool takes_bytes(const StoredRows& W) {
    bool takes = W.in % BYTE_CHUNK == 0 && W.format != Format::PLAIN && W.format != Format::FP8;
    for (Dtype t : W.type)
        if (W.format == Format::BLOCKS)
            takes &= t != Dtype::Q4_1 && t != Dtype::Q5_0 && t != Dtype::Q5_1;
    return takes;
}

// Columns of a group of block b, whose sum is one integer.
inline int byte_group(const StoredRows& W, int b) {
    return W.format == Format::BLOCKS && W.type[b] == Dtype::Q6_K ? 16 : GROUP;
}

// Columns first to first + size - 1 of a row of block b: d q + m. Returns whether there is an m.
inline bool stored_group(int* q, float& d, float& m, const StoredRows& W, int b, size_t row, int first, int size) {
    const uint8_t* bytes = (const uint8_t*)W.q[b] + row * W.row_bytes(b);
    const size_t g = row * (size_t)W.groups() + (size_t)(first / W.group);
    m = 0;
    if (W.format == Format::BLOCKS)
        return with_block(W.type[b], [&](auto* type) {
            using Block = BLOCK_TYPE(type);
            constexpr int COUNT = Block::COUNT, SIZE = COUNT / Block::GROUPS;
            const Block block{bytes + first / COUNT * Block::BYTES};
            const int group = first % COUNT / SIZE;
            for (int i = 0; i < size; i++) block.q(q[i], group, i);
            d = block.d(group);
            if constexpr (Block::OFFSET) m = block.m(group);
            return Block::OFFSET;
        });
    if (W.format == Format::INT8) {
        for (int i = 0; i < size; i++) q[i] = (int8_t)bytes[first + i];
        d = to_acc(((const bf16*)W.scale[b])[g]);
        return false;
    }
    const uint8_t* zero = W.zero[b];
    for (int i = 0; i < size; i++) q[i] = int4_code(bytes, first + i) - (zero ? 0 : 8);
    d = half_to_float(((const uint16_t*)W.scale[b])[g]);
    if (zero) m = -d * (float)zero[g];
    return zero;
}

// Definition of their products: y[n * ld + r] = W[row + r] . x[n], where sums of a group's integers are exact, and
// groups are added in order.
inline void byte_products(float* y, size_t ld,      // (N,rows) out
                          const StoredRows& W, int b, size_t row, int rows,
                          const int8_t* x, const RoundedGroup* group, // (N,in), (N,in / 32)
                          int N) {
    const int size = byte_group(W, b);
    for (int r = 0; r < rows; r++) {
        for (int n = 0; n < N; n++) y[n * ld + r] = 0;
        for (int first = 0; first < W.in; first += size) {
            int q[GROUP];
            float d, m;
            const bool offset = stored_group(q, d, m, W, b, row + r, first, size);
            for (int n = 0; n < N; n++) {
                const RoundedGroup& of = group[((size_t)n * W.in + first) / GROUP];
                const int8_t* xs = x + (size_t)n * W.in + first;
                int sum = 0;
                for (int i = 0; i < size; i++) sum += q[i] * xs[i];
                float& to = y[n * ld + r];
                to = std::fma((float)sum, d * of.scale, to);
                if (offset) to = std::fma(m, of.offset, to);
            }
        }
    }
}
