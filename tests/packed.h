// Matrices of random numbers in every packed format.
#pragma once
#include "model/numbers.h"
#include "tests/batch.h"
#include <cmath>
#include <vector>

// INT4 in groups of 32, 64 or 128 with zero points or without, FP8 in blocks of `high` rows, or INT8.
template <class T> struct PackedLinear : Linear<T> {
    std::vector<int8_t> all_q;
    std::vector<uint16_t> halves; // INT8: bf16
    std::vector<uint8_t> zeros;
    std::vector<float> floats;
    template <class R>
    PackedLinear(R& random, Format format, int group, bool with_zeros, std::vector<int> blocks, int in, int high = 5) {
        this->format = format, this->group = group, this->in = in;
        size_t rows = 0, at = 0;
        for (int r : blocks) rows += (size_t)r;
        const size_t groups = (size_t)this->groups();
        for (size_t i = 0; i < rows * this->row_bytes(); i++) {
            all_q.push_back((int8_t)random.below(256));
            if (format == Format::FP8 && (all_q.back() & 0x7f) == 0x7f) all_q.back() = 3; // no NaN
        }
        for (size_t i = 0; i < rows * groups + 8; i++) {
            const float s = (float)std::ldexp(1 + random.uniform(), -random.below(18)) * (random.below(9) ? 1.f : -1.f);
            const float scale = random.below(20) ? s : 0; // subnormals and zeros too
            halves.push_back(format == Format::INT8 ? to_bf16(scale).bits : float_to_half(scale));
            floats.push_back(random.below(20) ? s : 0);
            zeros.push_back((uint8_t)random.below(16));
        }
        if (format == Format::FP8) this->group_rows = high;
        for (size_t b = 0; b < blocks.size(); b++) {
            const size_t g = format == Format::FP8 ? (at + (size_t)high - 1) / (size_t)high * groups : at * groups;
            this->q[b] = all_q.data() + at * this->row_bytes();
            this->scale[b] = format == Format::FP8 ? (const void*)(floats.data() + g) : halves.data() + g;
            if (with_zeros) this->zero[b] = zeros.data() + g;
            this->rows[b] = blocks[b], at += (size_t)blocks[b];
        }
    }
    PackedLinear(const PackedLinear&) = delete;
};
struct PackedKind { Format format; int group; bool zeros; };
static const std::vector<PackedKind> PACKED_KINDS = {
    {Format::INT4, 32, false}, {Format::INT4, 32, true},   {Format::INT4, 64, false}, {Format::INT4, 64, true},
    {Format::INT4, 128, false}, {Format::INT4, 128, true}, {Format::FP8, 128, false}, {Format::FP8, 32, false},
    {Format::FP8, 96, false},  {Format::INT8, 32, false}};
