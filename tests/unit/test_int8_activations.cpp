// --activations int8: rounded activations and their products by definition, the same bits on every instruction set, in
// any batch and on any number of threads.
#include "model/int8_activations.h"
#include "tests/blocks.h"
#include "tests/common.h"
#include "tests/packed.h"
#include <functional>
#include <limits>

TEST_CASE_TEMPLATE("round_to_bytes: the nearest multiple of the largest size / 127, with its sums", T, bf16, float) {
    Random random{91};
    const int in = 4096;
    std::vector<T> x;
    for (int i = 0; i < in; i++) {
        const float size = (float)std::ldexp(1, i / 32 - 100); // groups of all sizes from 2^-100 on
        x.push_back(to_stored<T>(i % 32 == 7 ? size : size * (float)(2 * random.uniform() - 1)));
    }
    std::vector<int8_t> q(in, 99);
    std::vector<RoundedGroup> group(in / 32);
    round_to_bytes(q.data(), group.data(), x.data(), in);
    int off = 0, largest = 0;
    for (int g = 0; g < in / 32; g++) {
        float most = 0;
        int sum[2] = {};
        for (int i = 32 * g; i < 32 * g + 32; i++) {
            most = std::max(most, std::fabs((float)to_acc(x[i])));
            off += !(std::fabs((double)to_acc(x[i]) - (double)group[g].scale * q[i]) <= group[g].scale * 0.50001);
            largest += std::abs(q[i]) == 127, off += q[i] == -128, sum[i / 16 % 2] += q[i];
        }
        CHECK(group[g].scale == most / 127);
        CHECK(group[g].offset == group[g].scale * (float)(sum[0] + sum[1]));
        CHECK((group[g].half[0] == -sum[0] && group[g].half[1] == -sum[1] && group[g].less == -sum[0] - sum[1]));
    }
    CHECK(off == 0);
    CHECK(largest >= in / 32);
    // Ties are to the even number; too small ones are zeros; numbers that are not finite make NaN of their group alone.
    std::vector<T> odd(128, to_stored<T>((acc<T>)0x1p-101f));
    odd[32] = to_stored<T>((acc<T>)127), odd[33] = to_stored<T>((acc<T>)2.5), odd[34] = to_stored<T>((acc<T>)-3.5);
    odd[64] = to_stored<T>(std::numeric_limits<acc<T>>::infinity());
    odd[96] = to_stored<T>(std::numeric_limits<acc<T>>::quiet_NaN());
    round_to_bytes(q.data(), group.data(), odd.data(), 128);
    CHECK((group[0].scale == 0 && q[0] == 0));
    CHECK((group[1].scale == 1 && q[32] == 127 && q[33] == 2 && q[34] == -4));
    CHECK((std::isnan(group[2].scale) && std::isnan(group[2].offset) && std::isnan(group[3].scale)));
}

// A matrix of each format, with tails of rows, and one of three types.
template <class T> static void each_matrix(std::function<void(const Linear<T>&)> f) {
    Random random{92};
    for (int in : {256, 768}) {
        for (const PackedKind& kind : PACKED_KINDS)
            if (kind.format != Format::FP8) f(PackedLinear<T>(random, kind.format, kind.group, kind.zeros, {70, 9, 33}, in));
        for (Dtype type : {Dtype::Q4_0, Dtype::Q8_0, Dtype::Q4_K, Dtype::Q5_K, Dtype::Q6_K})
            f(BlockLinear<T>(random, {type}, {101}, in));
    }
    f(BlockLinear<T>(random, {Dtype::Q4_K, Dtype::Q6_K, Dtype::Q8_0}, {64, 33, 32}, 512));
    f(PackedLinear<T>(random, Format::INT8, 32, false, {33}, 4096 + 512 + 256)); // more columns than one piece
}

TEST_CASE("byte_products: integers are W's, and sums are those of W.at with the rounded activations") {
    each_matrix<bf16>([](const Linear<bf16>& W) {
        CAPTURE((int)W.format);
        CAPTURE((int)W.type[0]);
        Random random{93};
        REQUIRE(takes_bytes(W));
        const int N = 3, in = W.in;
        const auto x = random.fill<bf16>((size_t)N * in);
        std::vector<int8_t> q(x.size());
        std::vector<RoundedGroup> group(x.size() / 32);
        std::vector<double> rounded, sizes;
        for (int n = 0; n < N; n++) round_to_bytes(&q[(size_t)n * in], &group[(size_t)n * in / 32], &x[(size_t)n * in], in);
        for (size_t i = 0; i < x.size(); i++)
            rounded.push_back((double)group[i / 32].scale * q[i]), sizes.push_back(std::fabs(rounded.back()));
        const std::vector<double> want = WideLinear(W)(rounded, N), size = WideLinear(W, true)(sizes, N);
        for (int b = 0; b < 3; b++) {
            auto y = poisoned<float>((size_t)N * W.rows[b]);
            byte_products(y.data(), (size_t)W.rows[b], W, b, 0, W.rows[b], q.data(), group.data(), N);
            std::vector<double> here, error;
            for (int n = 0; n < N; n++)
                for (int r = 0; r < W.rows[b]; r++) {
                    const size_t at = (size_t)n * W.out() + W.first_row(b) + r;
                    here.push_back(want[at]), error.push_back(16 * size[at]); // (d q and m may nearly cancel)
                }
            CHECK(wrong(y, here, [&](size_t i) { return sum_error<float>(error[i]); }) == 0);
        }
    });
}

TEST_CASE_TEMPLATE("products with --activations int8 have the bits of byte_products, in any batch, on any threads", T, bf16, float) {
    Context ctx;
    ctx.int8_activations = true;
    each_matrix<T>([&](const Linear<T>& W) {
        CAPTURE((int)W.format);
        CAPTURE((int)W.type[0]);
        CAPTURE(W.in);
        Random random{94};
        const int most = 70, in = W.in, out = W.out();
        auto x = random.fill<T>((size_t)most * in);
        for (size_t i = 0; i < 64; i++) x[i] = to_stored<T>((acc<T>)(i % 2 ? -127 : 127)); // the largest sums
        std::vector<int8_t> q(x.size());
        std::vector<RoundedGroup> group(x.size() / 32);
        for (int n = 0; n < most; n++) round_to_bytes(&q[(size_t)n * in], &group[(size_t)n * in / 32], &x[(size_t)n * in], in);
        auto want = poisoned<float>((size_t)most * out);
        for (int b = 0; b < 3; b++)
            byte_products(want.data() + W.first_row(b), (size_t)out, W, b, 0, W.rows[b], q.data(), group.data(), most);
        on_every_instruction_set([&] {
            struct Part { int first, N; };
            for (const Part part : {Part{0, 1}, {3, 2}, {1, 5}, {7, 17}, {0, 64}, {0, most}})
                for (int threads : {0, 5}) {
#ifdef _OPENMP
                    const int before = omp_get_max_threads();
                    if (threads) omp_set_num_threads(threads);
#endif
                    const std::vector<acc<T>> zero((size_t)part.N * out);
                    auto y = poisoned<acc<T>>(zero.size());
                    linear_add_cpu(ctx, y.data(), zero.data(), x.data() + (size_t)part.first * in, W, part.N);
#ifdef _OPENMP
                    omp_set_num_threads(before);
#endif
                    CAPTURE(part.N);
                    CHECK(memcmp(y.data(), &want[(size_t)part.first * out], y.size() * sizeof(float)) == 0);
                }
        });
    });
}

TEST_CASE("--activations int8 leaves other matrices as they are") {
    Random random{95};
    Context ctx;
    ctx.int8_activations = true;
    const auto same = [&](const Linear<bf16>& W) {
        const auto x = random.fill<bf16>((size_t)3 * W.in);
        auto y = poisoned<bf16>((size_t)3 * W.out()), z = y;
        linear_cpu(ctx, y.data(), x.data(), W, 3);
        linear_cpu(cpu(), z.data(), x.data(), W, 3);
        return same_bits(y, z);
    };
    CHECK(same(PackedLinear<bf16>(random, Format::FP8, 128, false, {40}, 256)));
    CHECK(same(PackedLinear<bf16>(random, Format::INT8, 32, false, {40}, 320)));
    CHECK(same(BlockLinear<bf16>(random, {Dtype::Q5_0}, {40}, 256)));
    CHECK_FALSE(same(PackedLinear<bf16>(random, Format::INT8, 32, false, {40}, 256)));
}
