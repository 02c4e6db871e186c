// Matrices of random numbers in every packed format.
#pragma once
#include "model/numbers.h"
#include "tests/common.h"
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

// Whether the instruction set in use rounds a packed weight of a Linear<T> to bf16 before it is multiplied.
template <class T> bool rounds_packed() { return std::is_same_v<T, bf16> && instruction_set >= ISA_BF16 && !as_defined; }
// The error of a packed product whose terms' magnitudes add up to `size`: that of the sum, and half a unit of the last
// place of each weight where it is rounded.
template <class T> double packed_error(double size) {
    return sum_error<T>(size) + (rounds_packed<T>() ? rounding<bf16>(size) : 0);
}
// The loss by numbers below 2^-126 where instructions take bf16: each of x, each term and each sum becomes zero.
inline double flushed(double weights, int in) { return rounds_packed<bf16>() ? std::ldexp(weights + 2 * in, -126) : 0; }

// A packed Linear's numbers as S, unpacked.
template <class S> struct Unpacked : Linear<S> {
    std::vector<S> all;
    template <class T> explicit Unpacked(const Linear<T>& W) {
        this->in = W.in;
        for (int r = 0; r < W.out(); r++)
            for (int i = 0; i < W.in; i++) all.push_back(to_stored<S>(W.at(r, i)));
        for (int b = 0; b < 3; b++) this->rows[b] = W.rows[b], this->w[b] = all.data() + (size_t)W.first_row(b) * W.in;
    }
    Unpacked(const Unpacked&) = delete;
};

// The bits of products of W with N > 16 rows of x depend on neither the batch nor the number of threads.
template <class T> void same_bits_in_batches(const Linear<T>& W, const std::vector<T>& x, int N) {
    const auto same = same_in_any_batch<T>(W, x, N);
    for (int count : {1, 2, 3, 16})
        for (int n = 0; n + count <= N; n += 7) CHECK(same(n, count));
#ifdef _OPENMP
    const int threads = omp_get_max_threads();
    omp_set_num_threads(5);
    CHECK(same(0, N));
    omp_set_num_threads(threads);
#endif
}
