// Packed weights on a CPU: products on every instruction set hold to W.at and to the bits of the same weights unpacked, a
// row's bits depend on no other row.
#include "tests/common.h"
#include "tests/packed.h"

TEST_CASE_TEMPLATE("products with packed weights are those of W.at", T, bf16, float, double) {
    EACH_WAY;
    Random random{31};
    // (Of 65 rows and more the next test knows the bits.)
    for (const PackedKind& kind : PACKED_KINDS) for (int in : {1, 33, 64, 96, 128, 192, 320}) {
        PackedLinear<T> W(random, kind.format, kind.group, kind.zeros, {41, 7}, in);
        const size_t out = (size_t)W.out(), most = 19;
        const auto x = random.fill<T>(most * in);
        std::vector<double> want = WideLinear(W)(as_double(x), most);
        const std::vector<double> size = WideLinear(W, true)(magnitudes(x), most);
        for (size_t N : {19, 5, 2, 1}) {
            want.resize(N * out);
            on_every_instruction_set([&] {
                CAPTURE((int)kind.format);
                CAPTURE(kind.group);
                CAPTURE(N);
                CAPTURE(in);
                auto y = poisoned<T>(N * out);
                CALL(linear, y.data(), x.data(), W, (int)N);
                CHECK(wrong(y, want, [&](size_t i) { return rounding<T>(want[i]) + packed_error<T>(size[i]); }) == 0);
            });
        }
    }
}

TEST_CASE_TEMPLATE("packed products have the bits of the same weights unpacked: to bf16 where instructions take it, else to float", T, bf16, float) {
    Random random{35};
    for (const PackedKind& kind : PACKED_KINDS) for (int in : {1, 32, 33, 64, 96, 160, 320, 544, 1088, 1120}) {
        const int N = 65, rows = in < 500 ? 41 : 33;
        PackedLinear<T> W(random, kind.format, kind.group, kind.zeros, {rows, 1, 64}, in);
        const Unpacked<bf16> rounded(W);
        const Unpacked<float> exact(W);
        const size_t out = (size_t)W.out();
        const auto x = random.fill<T>((size_t)N * in);
        std::vector<bf16> x_bf16;
        std::vector<float> x_float;
        for (const T& v : x) x_bf16.push_back(to_bf16(to_acc(v))), x_float.push_back(to_acc(v));
        const std::vector<float> zero(N * out);
        on_every_instruction_set([&] {
            for (int n : {1, 2, 5, 16, 17, 33, 64, 65}) {
                CAPTURE((int)kind.format);
                CAPTURE(kind.group);
                CAPTURE(kind.zeros);
                CAPTURE(n);
                CAPTURE(in);
                auto y = poisoned<float>(n * out), want = y;
                linear_add_cpu(cpu(), y.data(), zero.data(), x.data(), W, n);
                if (rounds_packed<T>()) linear_add_cpu(cpu(), want.data(), zero.data(), x_bf16.data(), rounded, n);
                else linear_add_cpu(cpu(), want.data(), zero.data(), x_float.data(), exact, n);
                CHECK(same_bits(y, want));
            }
        });
    }
}

TEST_CASE("packed products: tasks of 64 and 128 rows have the bits of the same weights unpacked") {
    Random random{36};
    const int N = 70, in = 320, rows = 1061; // (128 rows a task on up to 2 threads)
    for (Format format : {Format::INT8, Format::INT4, Format::FP8}) {
        PackedLinear<bf16> W(random, format, format == Format::INT8 ? 32 : 128, false, {rows}, in);
        const Unpacked<bf16> rounded(W);
        const auto x = random.fill<bf16>((size_t)N * in);
        const std::vector<float> zero((size_t)N * rows);
        on_every_instruction_set([&] {
            if (!rounds_packed<bf16>()) return;
            auto y = poisoned<float>(zero.size()), want = y;
            linear_add_cpu(cpu(), y.data(), zero.data(), x.data(), W, N);
            linear_add_cpu(cpu(), want.data(), zero.data(), x.data(), rounded, N);
            CHECK(same_bits(y, want));
        });
    }
}

TEST_CASE("packed products: scales near the ends of the exponents have the bits of the same weights unpacked") {
    Random random{37};
    const int in = 256, rows = 64;
    for (Format format : {Format::INT8, Format::FP8}) for (float size : {0x1.5p112f, 0x1.5p96f, 0x1.5p-96f, 0x1.5p-112f}) {
        PackedLinear<bf16> W(random, format, format == Format::INT8 ? 32 : 128, false, {rows}, in);
        for (uint16_t& s : W.halves) s = to_bf16(to_acc(bf16{s}) < 0 ? -size : size).bits;
        for (float& s : W.floats) s = s < 0 ? -size : size;
        const Unpacked<bf16> rounded(W);
        std::vector<bf16> x;
        for (int i = 0; i < in; i++) x.push_back(to_bf16(random.uniform() / size));
        const std::vector<float> zero(rows);
        on_every_instruction_set([&] {
            if (!rounds_packed<bf16>()) return;
            CAPTURE((int)format);
            CAPTURE(size);
            auto y = poisoned<float>(zero.size()), want = y;
            linear_add_cpu(cpu(), y.data(), zero.data(), x.data(), W, 1);
            linear_add_cpu(cpu(), want.data(), zero.data(), x.data(), rounded, 1);
            CHECK(same_bits(y, want));
        });
    }
}

TEST_CASE_TEMPLATE("a row of a packed product has the same bits in any batch, for any number of threads", T, bf16, float) {
    Random random{32};
    for (const PackedKind& kind : PACKED_KINDS) for (int in : {96, 192, 256}) on_every_instruction_set([&] {
        const int N = 37;
        PackedLinear<T> W(random, kind.format, kind.group, kind.zeros, {45, 20}, in);
        const auto x = random.fill<T>((size_t)N * in);
        same_bits_in_batches<T>(W, x, N);
    });
}

TEST_CASE("INT4 and INT8 products: wide ranges of x, subnormals, infinities; weights that are all zero") {
    Random random{33};
    const int in = 320, N = 37;
    for (int group : {0, 32, 64, 128}) { // 0: INT8
        PackedLinear<bf16> W(random, group ? Format::INT4 : Format::INT8, group ? group : 32, group > 0, {64, 13}, in);
        // A row whose q are all zero, or the zero point, is zeros, exactly, beside any x.
        if (!group) std::fill_n(W.all_q.begin(), in, 0);
        for (int i = 0; i < in && group; i++) {
            const int g = i / group, shift = i / 32 % 2 * 4;
            int8_t& pair = W.all_q[(size_t)i / 64 * 32 + i % 32];
            pair = (int8_t)((pair & ~(15 << shift)) | W.zeros[(size_t)g] << shift);
        }
        const size_t out = (size_t)W.out();
        std::vector<bf16> x((size_t)N * in);
        for (int n = 0; n < N; n++)
            for (int i = 0; i < in; i++)
                x[(size_t)n * in + i] = to_bf16((float)std::ldexp(2 * random.uniform() - 1, 6 * n - 115 - random.below(1 + n % 14)));
        for (int i = 0; i < in; i++) x[5 * in + i] = bf16{0}, x[6 * in + i].bits = (uint16_t)random.below(200);
        const std::vector<float> zero((size_t)N * out);
        auto product = [&](const std::vector<bf16>& from) {
            auto y = poisoned<float>(zero.size());
            linear_add_cpu(cpu(), y.data(), zero.data(), from.data(), W, N);
            return y;
        };
        std::vector<double> want(zero.size()), size(zero.size()), weights(zero.size());
        for (size_t i = 0; i < want.size(); i++)
            for (int k = 0; k < in; k++) {
                const double w = W.at((int)(i % out), k), term = w * to_acc(x[i / out * in + k]);
                want[i] += term, size[i] += std::fabs(term), weights[i] += std::fabs(w);
            }
        on_every_instruction_set([&] {
            const auto y = product(x);
            CHECK(wrong(y, want, [&](size_t i) {
                return rounding<float>(want[i]) + packed_error<bf16>(size[i]) + flushed(weights[i], in) + in * 0x1p-149;
            }) == 0);
            for (int n = 0; n < N; n++) CHECK(y[(size_t)n * out] == 0);
            auto broken = x;
            broken[9 * in + 70].bits = 0x7f80;
            const auto z = product(broken);
            int bad = 0; // (a weight of zero makes a NaN of an infinity, others may leave it)
            for (size_t i = 0; i < z.size(); i++) bad += i / out == 9 ? std::isfinite(z[i]) && W.at((int)(i % out), 70) != 0 : memcmp(&z[i], &y[i], 4) != 0;
            CHECK(bad == 0);
        });
    }
}

TEST_CASE("embed with packed weights: W.at of the token's row, rounded where products round it") {
    EACH_WAY;
    Random random{34};
    for (const PackedKind& kind : PACKED_KINDS) on_every_instruction_set([&] {
        PackedLinear<bf16> table(random, kind.format, kind.group, kind.zeros, {50}, 96);
        TestBatch batch(random, {{0, 7}, {3, 1}}, 50, 2);
        auto x = poisoned<float>(10 * 96);
        CALL(embed, x.data(), table, batch.view(), 96);
        for (int n = 0; n < 8; n++)
            for (int i = 0; i < 96; i++) {
                const float w = table.at(batch.token[(size_t)n], i);
                REQUIRE(x[(size_t)n * 96 + i] == (rounds_packed<bf16>() ? to_acc(to_bf16(w)) : w));
            }
    });
}

TEST_CASE_TEMPLATE("dx of packed weights: the definition in double", T, bf16, float, double) {
    EACH_WAY;
    Random random{71};
    for (const PackedKind& kind : PACKED_KINDS) for (int N : {1, 5, 33}) for (int in : {1, 33, 64, 192}) {
        const std::vector<int> blocks = in == 64 ? std::vector<int>{130, 7, 64} : std::vector<int>{41};
        PackedLinear<T> W(random, kind.format, kind.group, kind.zeros, blocks, in);
        const size_t out = (size_t)W.out();
        const auto dy = random.fill<T>((size_t)N * out);
        const std::vector<double> wide = wide_numbers(W, false);
        std::vector<double> want((size_t)N * in), size(want.size());
        for (size_t n = 0; n < (size_t)N; n++)
            for (size_t r = 0; r < out; r++) {
                const double by = to_acc(dy[n * out + r]), *w = &wide[r * in];
                double *sum = &want[n * in], *sizes = &size[n * in];
                for (int i = 0; i < in; i++) sum[i] += by * w[i], sizes[i] += std::fabs(by * w[i]);
            }
        CAPTURE((int)kind.format);
        CAPTURE(kind.group);
        CAPTURE(N);
        CAPTURE(in);
        auto close = [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(size[i]); };
        auto dx = poisoned<T>(want.size());
        T* none = nullptr;
        CALL(linear_backward_input, dx.data(), none, (acc<T>*)nullptr, dy.data(), W, N);
        CHECK(wrong(dx, want, close) == 0);
        std::vector<int> rows;
        for (int n = 0; n < N; n++) rows.push_back(N - 1 - n);
        auto normed = poisoned<T>(want.size());
        CALL(head_backward, normed.data(), dy.data(), out, std::vector<acc<T>>(N, 1).data(), rows.data(), W, N);
        for (int n = 0; n < N; n++)
            for (int i = 0; i < in; i++) REQUIRE(memcmp(&normed[(size_t)rows[(size_t)n] * in + i], &dx[(size_t)n * in + i], sizeof(T)) == 0);
    }
}

TEST_CASE_TEMPLATE("an adapter on packed weights: dx has the bits that it has on the same numbers unpacked; with dropout", T, float, double) {
    Random random{72};
    for (const PackedKind& kind : PACKED_KINDS) for (float p : {0.f, 0.3f}) {
        const int N = 9, in = 96, rank = 3;
        PackedLinear<T> W(random, kind.format, kind.group, kind.zeros, {70, 9}, in);
        const int out = W.out();
        std::vector<T> numbers, A = random.fill<T>(2 * rank * in), B((size_t)out * 2 * rank), h((size_t)N * 2 * rank);
        for (int r = 0; r < out; r++)
            for (int i = 0; i < in; i++) numbers.push_back(W.at(r, i));
        for (int r = 0; r < out; r++)
            for (int i = 0; i < rank; i++) B[(size_t)(2 * r + (r >= 70)) * rank + i] = random.fill<T>(1)[0];
        std::vector<uint32_t> token;
        for (int n = 0; n < N; n++) token.push_back((uint32_t)(5 + n));
        const Dropout dropout = {p, 3, 8, token.data()};
        Adapter<T>& a = W.adapter;
        a.rank = rank, a.modules = 2, a.block[1] = 1, a.module[1] = 1, a.A = A.data(), a.B = B.data(), a.h = h.data();
        if (p > 0) a.dropout = &dropout;
        Linear<T> plain = W;
        plain.format = Format::PLAIN, plain.w[0] = numbers.data(), plain.w[1] = numbers.data() + (size_t)70 * in;
        const auto dy = random.fill<T>((size_t)N * out);
        auto dx = poisoned<T>((size_t)N * in), want = dx, dh = poisoned<T>(h.size());
        std::vector<acc<T>> dB(B.size());
        linear_backward_input_cpu(cpu(), dx.data(), dh.data(), dB.data(), dy.data(), W, N);
        linear_backward_input_cpu(cpu(), want.data(), dh.data(), dB.data(), dy.data(), plain, N);
        CHECK(same_bits(dx, want));
#ifdef _OPENMP
        const int threads = omp_get_max_threads();
        omp_set_num_threads(3);
        linear_backward_input_cpu(cpu(), dx.data(), dh.data(), dB.data(), dy.data(), W, N);
        omp_set_num_threads(threads);
        CHECK(same_bits(dx, want));
#endif
        std::vector<T> one = poisoned<T>((size_t)in); // a row does not know the others
        linear_backward_input_cpu(cpu(), one.data(), dh.data(), dB.data(), dy.data(), W, 1);
        CHECK(memcmp(one.data(), want.data(), (size_t)in * sizeof(T)) == 0);
    }
}
