// Matrices of random numbers in GGUF's blocks.
#pragma once
#include "model/blocks.h"
#include "tests/batch.h"
#include <cmath>
#include <vector>

static const std::vector<Dtype> BLOCK_TYPES = {Dtype::Q4_0, Dtype::Q4_1, Dtype::Q5_0, Dtype::Q5_1,
                                               Dtype::Q8_0, Dtype::Q4_K, Dtype::Q5_K, Dtype::Q6_K};
inline int block_columns(Dtype type) {
    return with_block(type, [](auto* block) { return BLOCK_TYPE(block)::COUNT; });
}

// Blocks of rows of these types, one after another at odd addresses. All bytes are random but the halves, which are
// finite: subnormals and zeros among them.
template <class T> struct BlockLinear : Linear<T> {
    std::vector<std::vector<uint8_t>> bytes;
    template <class R> BlockLinear(R& random, const std::vector<Dtype>& types, const std::vector<int>& rows, int in) {
        this->format = Format::BLOCKS, this->in = in;
        for (size_t b = 0; b < types.size(); b++) {
            this->type[b] = types[b], this->rows[b] = rows[b];
            const size_t size = (size_t)rows[b] * this->row_bytes((int)b);
            std::vector<uint8_t>& all = bytes.emplace_back(1 + size);
            for (uint8_t& x : all) x = (uint8_t)random.below(256);
            with_block(types[b], [&](auto* type) {
                using Block = BLOCK_TYPE(type);
                for (size_t i = 1; i < all.size(); i += Block::BYTES) {
                    const size_t d = std::is_same_v<Block, BlockQ6_K> ? 208 : 0;
                    for (size_t at : {d, d + 2}) {
                        if (at > d && !Block::OFFSET) break;
                        const float size = (float)std::ldexp(1 + random.uniform(), -random.below(24));
                        const float s = random.below(20) ? random.below(9) ? size : -size : 0;
                        const uint16_t half = float_to_half(s);
                        memcpy(&all[i + at], &half, 2);
                    }
                }
            });
            this->q[b] = (const int8_t*)all.data() + 1;
        }
    }
    BlockLinear(const BlockLinear&) = delete;
};
