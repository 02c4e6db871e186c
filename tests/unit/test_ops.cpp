// The forward ops of cpu/ against their definitions in double, at odd sizes, for every stored type and instruction set;
// and the contract that a row's bits depend neither on the other rows nor on the number of threads. The definitions are
// held to arithmetic by hand here, to PyTorch in test_backward.cpp, to Hugging Face's logits in test_model.cpp.
#include "cpu/adapter_rows.h"
#include "cpu/lanes.h"
#include "model/fp8_activations.h"
#include "tests/common.h"
#include <atomic>

namespace {
TEST_CASE("bf16: every value survives, rounding is to nearest even") {
    for (uint32_t u = 0; u < 65536; u++) {
        float f = to_acc(bf16{(uint16_t)u});
        uint16_t back = to_bf16(f).bits;
        bool fine = std::isnan(f) ? std::isnan(to_acc(bf16{back})) : back == u;
        if (!fine) FAIL("value " << u);
    }
    CHECK(to_bf16(1.f + 1.f / 256).bits == 0x3f80);       // a tie goes to the even neighbour
    CHECK(to_bf16(1.f + 3.f / 256).bits == 0x3f82);
    CHECK(to_bf16(1.f + 1.001f / 256).bits == 0x3f81);
    CHECK(to_bf16(3.4e38f).bits == 0x7f80);               // beyond the largest: infinity
}

TEST_CASE("half_to_float: every value, against arithmetic on its fields") {
    for (uint32_t u = 0; u < 65536; u++) {
        int e = (int)(u >> 10 & 31), m = (int)(u & 1023);
        float f = half_to_float((uint16_t)u);
        double want = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
        if (u & 0x8000) want = -want;
        bool fine = std::isnan(want) ? std::isnan(f) : (f == want && std::signbit(f) == std::signbit(want));
        if (!fine) FAIL("value " << u);
    }
}

TEST_CASE("philox 4x32-10: the published test vectors") { // Random123's kat_vectors: counter, key, result
    Philox a = philox(0, 0, 0);
    CHECK(a.v[0] == 0x6627e8d5); CHECK(a.v[1] == 0xe169c58d); CHECK(a.v[2] == 0xbc57ac4c); CHECK(a.v[3] == 0x9b00dbd8);
    Philox b = philox(~0ull, ~0ull, ~0ull);
    CHECK(b.v[0] == 0x408f276d); CHECK(b.v[1] == 0x41c83b0e); CHECK(b.v[2] == 0xa20bc7c6); CHECK(b.v[3] == 0x6d5451fd);
    Philox c = philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e);
    CHECK(c.v[0] == 0xd16cfe09); CHECK(c.v[1] == 0x94fdcceb); CHECK(c.v[2] == 0x5001e420); CHECK(c.v[3] == 0x24126ea1);
}

TEST_CASE("exp_exact and exp_lanes: within 3e-7 of e^x, never above 1 below 0, exactly 1 at 0") {
    auto lane = [](float x) {
        float16v v = float16v{} + x;
        exp_lanes(v);
        return v[7];
    };
    CHECK(exp_exact(0.f) == 1.f);
    CHECK(lane(0.f) == 1.f);
    CHECK(exp_exact(-INFINITY) == 0.f);
    CHECK(lane(-INFINITY) == 0.f);
    CHECK(lane(-1000.f) == 0.f);
    double worst = 0;
    for (int i = 0; i < 1000000; i++) {
        float x = -87.f * (float)i / 1000000;
        for (float y : {exp_exact(x), lane(x)}) {
            worst = std::max(worst, std::fabs(y / std::exp((double)x) - 1));
            if (y > 1) FAIL("above 1 at " << x);
        }
    }
    for (int i = 0; i < 1000; i++) worst = std::max(worst, std::fabs(lane(0.08f * (float)i) / std::exp((double)(0.08f * (float)i)) - 1));
    INFO("worst relative error " << worst);
    CHECK(worst < 3e-7);
}

TEST_CASE("the definitions on a few numbers by hand") {
    const double w[] = {1, 2, 3, 4, 5, 6}, x[] = {3, 4, 1, 0}, norm[] = {1, 2};
    Linear<double> W;
    W.w[0] = w, W.w[2] = w + 2, W.rows[0] = 1, W.rows[2] = 2, W.in = 2; // rows (1, 2), (3, 4), (5, 6)
    double y[6], residual[] = {10, 10, 10, 20, 20, 20}, picked[2], normed[4];
    linear(y, x, W, 2);
    CHECK(as_double(std::vector<double>(y, y + 6)) == std::vector<double>{11, 25, 39, 1, 3, 5});
    linear_add(residual, residual, x, W, 2);
    CHECK(std::vector<double>(residual, residual + 6) == std::vector<double>{21, 35, 49, 21, 23, 25});
    const int second = 1;
    head(y, picked, x, &second, W, 1);
    CHECK(std::vector<double>(y, y + 3) == std::vector<double>{1, 3, 5});
    rmsnorm(normed, x, norm, 1, 2, 0.f); // rms = sqrt(12.5)
    CHECK(normed[0] == doctest::Approx(3 / std::sqrt(12.5)));
    CHECK(normed[1] == doctest::Approx(8 / std::sqrt(12.5)));
    norm_linear(y, normed, x, norm, W, 1, 0.f);
    CHECK(y[2] == doctest::Approx((15 + 48) / std::sqrt(12.5)));
    swiglu(y, x, 1, 2); // gates 3 and 4, ups 1 and 0
    CHECK(y[0] == doctest::Approx(3 / (1 + std::exp(-3.))));
    CHECK(y[1] == 0);
    // An adapter of rank 1 on the last block: A = (1, 1), s B = (0, 2, 3).
    double A[] = {1, 1}, B[] = {0, 2, 3}, h[2];
    W.adapter.rank = 1, W.adapter.modules = 1, W.adapter.block[0] = 2, W.adapter.A = A, W.adapter.B = B, W.adapter.h = h;
    linear(y, x, W, 2);
    CHECK((h[0] == 7 && h[1] == 1));
    CHECK(std::vector<double>(y, y + 6) == std::vector<double>{11, 39, 60, 1, 5, 8});
    // Attention: two keys of scores 0 and log 3 give weights 1/4 and 3/4. RoPE: position 1 rotates by one radian.
    const int pos[] = {0, 1}, zero[] = {0, 0};
    const Batch both = {2, 1, zero, pos, zero, pos, zero, 1};
    double keys[] = {0, 0, std::log(3.) * std::sqrt(2.), 0}, values[] = {4, 0, 8, 4};
    const double q[] = {1, 0, 1, 0};
    double out[4], lse[2], rope[4], to_keys[2 * PAGE], to_values[2 * PAGE];
    attention(out, lse, q, {keys, values}, both, {1, 1, 2});
    CHECK((out[0] == 4 && out[1] == 0));
    CHECK(out[2] == doctest::Approx(7));
    CHECK(out[3] == doctest::Approx(3));
    CHECK(lse[1] == doctest::Approx(std::log(4.)));
    fill_rope(rope, 2, 2, 1e4);
    const double qkv[] = {1, 1, 1, 1, 5, 6, 0, 2, 2, 0, 7, 8}, ones[] = {1, 1};
    qknorm_rope_kv(out, {to_keys, to_values}, qkv, {ones, ones, rope}, both, {1, 1, 2, 0.f});
    CHECK((out[0] == 1 && out[1] == 1)); // position 0: as it was
    CHECK(out[2] == doctest::Approx(-std::sqrt(2.) * std::sin(1.)));
    CHECK(out[3] == doctest::Approx(std::sqrt(2.) * std::cos(1.)));
    CHECK(to_keys[2] == doctest::Approx(std::sqrt(2.) * std::cos(1.)));
    CHECK(to_keys[3] == doctest::Approx(std::sqrt(2.) * std::sin(1.)));
    CHECK((to_values[2] == 7 && to_values[3] == 8));
}

TEST_CASE_TEMPLATE("embed copies rows, spare rows stay", T, bf16, float, double) {
    EACH_WAY;
    Random random{1};
    for (int C : {1, 33, 80}) {
        auto table = random.fill<T>(50 * C);
        Linear<T> embedding;
        embedding.w[0] = table.data(), embedding.rows[0] = 50, embedding.in = C;
        TestBatch batch(random, {{0, 7}, {3, 1}}, 50, 2);
        auto x = poisoned<acc<T>>(10 * C);
        CALL(embed, x.data(), embedding, batch.view(), C);
        for (int n = 0; n < 10; n++)
            for (int i = 0; i < C; i++) {
                if (n < 8) REQUIRE(x[n * C + i] == to_acc(table[batch.token[n] * C + i]));
                else REQUIRE(std::isnan(x[n * C + i]));
            }
    }
}

TEST_CASE_TEMPLATE("rmsnorm, and its fusion with the product", T, bf16, float, double) {
    EACH_WAY;
    Random random{2};
    for (int N : {1, 2, 33}) for (int C : {1, 2, 15, 16, 17, 257, 1024}) {
        auto x = random.fill<acc<T>>((size_t)N * C, 3);
        auto w = random.fill<T>(C, 0.5, 1);
        auto out = poisoned<T>((size_t)N * C);
        CALL(rmsnorm, out.data(), x.data(), w.data(), N, C, 1e-6f);
        std::vector<double> want(out.size());
        rmsnorm(want.data(), as_double(x).data(), as_double(w).data(), N, C, 1e-6f);
        CHECK(wrong(out, want, [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(std::fabs(want[i])); }) == 0);
        if (C > 257) continue;
        const auto rows = random.fill<T>(6 * C);
        Linear<T> W;
        W.w[0] = rows.data(), W.rows[0] = 6, W.in = C;
        auto fused = poisoned<T>((size_t)N * 6), apart = fused, normed = out;
        CALL(norm_linear, fused.data(), normed.data(), x.data(), w.data(), W, N, 1e-6f);
        CALL(linear, apart.data(), out.data(), W, N);
        CHECK(same_bits(fused, apart));
    }
}

// A Linear of up to three blocks over one array of rows.
template <class T> struct TestLinear : Linear<T> {
    std::vector<T> all;
    TestLinear(Random& random, std::vector<int> blocks, int in) {
        this->in = in;
        size_t rows = 0;
        for (int r : blocks) rows += r;
        all = random.fill<T>(rows * in);
        size_t at = 0;
        for (size_t i = 0; i < blocks.size(); i++) this->w[i] = all.data() + at, this->rows[i] = blocks[i], at += (size_t)blocks[i] * in;
    }
    // The product in double, and the magnitudes its terms add up to.
    std::vector<double> product(const std::vector<T>& x, int N, std::vector<double>& size) const {
        size = WideLinear(*this, true)(magnitudes(x), N);
        return WideLinear(*this)(as_double(x), N);
    }
};

TEST_CASE_TEMPLATE("products: linear, linear_add, head", T, bf16, float, double) {
    EACH_WAY; // the definition in T is as near to that in double as cpu/
    Random random{3};
    for (int in : {1, 16, 33, 96, 257}) for (auto blocks : {std::vector<int>{1}, {7, 3, 3}, {96, 33}}) {
        TestLinear<T> W(random, blocks, in);
        const int most = 65;
        const auto x = random.fill<T>((size_t)most * in);
        std::vector<double> size, want = W.product(x, most, size);
        for (int N : {65, 33, 17, 5, 2, 1}) { // 65: more than TILE_TOKENS
            want.resize((size_t)N * W.out());
            on_every_instruction_set([&] {
                auto tolerance = [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(size[i]); };
                auto out = poisoned<T>(want.size());
                CALL(linear, out.data(), x.data(), W, N);
                CHECK(wrong(out, want, tolerance) == 0);

                auto residual = random.fill<acc<T>>(want.size());
                auto sum = poisoned<acc<T>>(want.size());
                CALL(linear_add, sum.data(), residual.data(), x.data(), W, N);
                std::vector<double> want_sum;
                for (size_t i = 0; i < want.size(); i++) want_sum.push_back(want[i] + residual[i]);
                CHECK(wrong(sum, want_sum, [&](size_t i) { return rounding<acc<T>>(want_sum[i]) + sum_error<T>(size[i]); }) == 0);
                CALL(linear_add, residual.data(), residual.data(), x.data(), W, N); // in place
                CHECK(same_bits(residual, sum));

                std::vector<int> rows = {N - 1, 0, N / 2};
                auto picked = poisoned<T>(3 * in);
                auto logits = poisoned<acc<T>>(3 * (size_t)W.out());
                CALL(head, logits.data(), picked.data(), x.data(), rows.data(), W, 3);
                std::vector<double> want_logits, head_size;
                for (int r : rows) for (int v = 0; v < W.out(); v++) want_logits.push_back(want[(size_t)r * W.out() + v]), head_size.push_back(size[(size_t)r * W.out() + v]);
                CHECK(wrong(logits, want_logits, [&](size_t i) { return sum_error<T>(head_size[i]); }) == 0);
            });
        }
    }
}

TEST_CASE_TEMPLATE("round_activations: the nearest e4m3 of all, by the least power of two that reaches the largest", T, bf16, float, double) {
    Random random{15};
    const int N = 40, in = 200;
    std::vector<T> x((size_t)N * in), y(x.size());
    for (auto& v : x) v = to_stored<T>((acc<T>)std::ldexp(random.uniform() - 0.5, random.below(30) - 15));
    for (int i = 0; i < in; i++) x[(size_t)i] = to_stored<T>(0);
    x[(size_t)in] = to_stored<T>(448), x[(size_t)2 * in] = to_stored<T>(450); // 450: by 2
    for (int i = 1; i < 128; i++) x[(size_t)in + i] = x[(size_t)2 * in + i] = to_stored<T>((acc<T>)i);
    x[(size_t)3 * in + 130] = to_stored<T>(std::numeric_limits<acc<T>>::infinity());
    x[(size_t)4 * in] = to_stored<T>(std::numeric_limits<acc<T>>::quiet_NaN());
    round_activations(y.data(), x.data(), N, in);
    int wrong = 0;
    for (int n = 0; n < N; n++)
        for (int first : {0, 128}) {
            const int last = std::min(first + 128, in);
            double largest = 0, power = std::ldexp(1, -100);
            bool finite = true;
            for (int i = first; i < last; i++) {
                const double v = (double)to_acc(x[(size_t)n * in + i]);
                finite &= std::isfinite(v), largest = std::max(largest, std::fabs(v));
            }
            while (finite && largest / power > 448) power *= 2;
            for (int i = first; i < last; i++) {
                const double v = (double)to_acc(x[(size_t)n * in + i]), got = (double)to_acc(y[(size_t)n * in + i]);
                double least = 1e300;
                for (int code = 0; code < 256 && finite; code++)
                    if ((code & 127) != 127) least = std::min(least, std::fabs(e4m3_to_float((uint8_t)code) * power - v));
                wrong += finite ? !(std::fabs(got - v) <= least * (1 + 1e-6)) || std::signbit(got) != std::signbit(v) : !std::isnan(got);
            }
        }
    CHECK(wrong == 0);
    CHECK(to_acc(y[(size_t)in + 1]) == 1); // a power of 1 has all of 1 .. 16
    CHECK(to_acc(y[(size_t)in + 17]) == 16); // a tie: to the even code
}

TEST_CASE_TEMPLATE("a product's row has the same bits alone and in any batch, on any number of threads", T, bf16, float, double) {
    Random random{4};
    for (int in : {96, 137}) on_every_instruction_set([&] {
        const int N = 83;
        TestLinear<T> W(random, {70, 33}, in);
        auto x = random.fill<T>((size_t)N * in);
        auto whole = poisoned<acc<T>>((size_t)N * W.out()), zero = std::vector<acc<T>>(whole.size());
        linear_add_cpu(cpu(), whole.data(), zero.data(), x.data(), W, N);
        for (int count : {1, 2, 16, 31, 64, 65}) // rows in the batch of which ours is one
            for (int n = 0; n + count <= N; n += 11) {
                auto alone = poisoned<acc<T>>((size_t)count * W.out());
                linear_add_cpu(cpu(), alone.data(), zero.data(), x.data() + (size_t)n * in, W, count);
                REQUIRE(memcmp(alone.data(), whole.data() + (size_t)n * W.out(), alone.size() * sizeof(acc<T>)) == 0);
            }
#ifdef _OPENMP
        const int threads = omp_get_max_threads();
        for (int j : {1, 3, 7}) {
            omp_set_num_threads(j);
            auto again = poisoned<acc<T>>(whole.size());
            linear_add_cpu(cpu(), again.data(), zero.data(), x.data(), W, N);
            CHECK(same_bits(again, whole));
        }
        omp_set_num_threads(threads);
#endif
    });
}

TEST_CASE("a product's tasks of 64 and 128 rows give the bits of tasks of 32") {
    Random random{12};
    TestLinear<bf16> W(random, {600, 33}, 64);
    auto x = random.fill<bf16>(70 * 64);
    on_every_instruction_set([&] {
        std::vector<std::vector<float>> results;
        for (int j : {1, 64}) { // few threads make the tasks large
#ifdef _OPENMP
            const int threads = omp_get_max_threads();
            omp_set_num_threads(j);
#endif
            std::vector<float> zero((size_t)70 * W.out());
            results.push_back(poisoned<float>(zero.size()));
            linear_add_cpu(cpu(), results.back().data(), zero.data(), x.data(), W, 70);
#ifdef _OPENMP
            omp_set_num_threads(threads);
#endif
            (void)j;
        }
        CHECK(same_bits(results[0], results[1]));
        std::vector<double> size, want = W.product(x, 70, size);
        CHECK(wrong(results[0], want, [&](size_t i) { return rounding<float>(want[i]) + sum_error<float>(size[i]); }) == 0);
    });
}

TEST_CASE_TEMPLATE("an adapter's part of a tile: 16 rows at once, each with the bits of dot", T, bf16, float, double) {
    Random random{9};
    for (int rank : {1, 7, 8, 16, 24, 32, 61})
        for (int rows : {1, 15, 16, 17, 32}) {
            Adapter<T> a;
            a.rank = rank, a.modules = 2, a.block[0] = 0, a.block[1] = 2;
            const int row = 3;
            auto B = random.fill<T>((size_t)(row + rows) * a.width()), h = random.fill<T>(a.width());
            a.B = B.data();
            for (int j = 0; j < 2; j++) {
                const std::vector<acc<T>> before = random.fill<acc<T>>((size_t)rows);
                std::vector<acc<T>> y = before, want = before;
                add_adapter(y.data(), a, a.block[j], row, rows, h.data());
                for (int r = 0; r < rows; r++) want[(size_t)r] += dot(&h[(size_t)j * rank], &B[(row + r) * a.width() + j * rank], rank);
                INFO("rank " << rank << " rows " << rows);
                CHECK(same_bits(y, want));
                add_adapter(y.data(), a, 1, row, rows, h.data()); // no module is of this block
                CHECK(same_bits(y, want));
            }
        }
}

TEST_CASE_TEMPLATE("swiglu and its fusion with the product", T, bf16, float, double) {
    EACH_WAY;
    Random random{5};
    for (int N : {1, 3}) for (int F : {1, 33, 72}) {
        auto gate_up = random.fill<T>((size_t)N * 2 * F, 12);
        auto out = poisoned<T>((size_t)N * F);
        CALL(swiglu, out.data(), gate_up.data(), N, F);
        std::vector<double> want(out.size());
        swiglu(want.data(), as_double(gate_up).data(), N, F);
        CHECK(wrong(out, want, [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(std::fabs(want[i])); }) == 0);

        TestLinear<T> W(random, {F, F}, 24);
        auto a = poisoned<T>((size_t)N * 2 * F), b = a;
        auto fused = poisoned<T>((size_t)N * F), apart = fused;
        const auto residual = random.fill<acc<T>>(N * 24);
        const auto w = random.fill<T>(24, 0.5, 1);
        auto normed = poisoned<T>(N * 24);
        CALL(norm_linear_swiglu, fused.data(), a.data(), normed.data(), residual.data(), w.data(), W, N, 1e-6f);
        CALL(rmsnorm, normed.data(), residual.data(), w.data(), N, 24, 1e-6f);
        CALL(linear, b.data(), normed.data(), W, N);
        CALL(swiglu, apart.data(), b.data(), N, F);
        CHECK(same_bits(a, b));
        CHECK(same_bits(fused, apart));

        TestLinear<T> down(random, {24}, F);
        auto out_of_mlp = poisoned<acc<T>>(N * 24), added = out_of_mlp;
        auto hidden = poisoned<T>(fused.size());
        CALL(mlp, out_of_mlp.data(), hidden.data(), a.data(), normed.data(), residual.data(), w.data(), W, down, N, 1e-6f);
        CALL(linear_add, added.data(), residual.data(), fused.data(), down, N);
        CHECK(same_bits(hidden, fused));
        CHECK(same_bits(out_of_mlp, added));
    }
}

TEST_CASE_TEMPLATE("qknorm_rope_kv", T, bf16, float, double) {
    EACH_WAY;
    Random random{6};
    for (int D : {2, 6, 64, 128}) for (auto [H, K] : {std::pair<int, int>{1, 1}, {6, 2}}) {
        TestBatch batch(random, {{20, 1}, {0, 17}, {15, 2}}, 10, 1);
        const int N = (int)batch.token.size(), row = (H + 2 * K) * D, positions = 40;
        auto qkv = random.fill<T>((size_t)N * row, 2);
        auto qw = random.fill<T>(D, 0.5, 1), kw = random.fill<T>(D, 0.5, 1);
        std::vector<acc<T>> rope((size_t)positions * D);
        fill_rope(rope.data(), positions, D, 1e4);
        auto q = poisoned<T>((size_t)N * H * D);
        auto keys = poisoned<T>((size_t)batch.page_count * K * PAGE * D), values = keys;
        CALL(qknorm_rope_kv, q.data(), {keys.data(), values.data()}, qkv.data(), {qw.data(), kw.data(), rope.data()}, batch.view(), {H, K, D, 1e-6f});
        size_t written = 0;
        for (const T& k : keys) written += !std::isnan(to_acc(k));
        CHECK(written == (size_t)(N - 1) * K * D); // nothing else was touched
        int bad = 0;
        for (int n = 0; n < N - 1; n++)
            for (int h = 0; h < H + K; h++) {
                const T* in = &qkv[(size_t)n * row + h * D];
                const auto& w = h < H ? qw : kw;
                double sum = 0;
                for (int i = 0; i < D; i++) sum += (double)to_acc(in[i]) * to_acc(in[i]);
                size_t at = h < H ? ((size_t)n * H + h) * D : kv_offset(batch.slot[n] / PAGE, h - H, batch.slot[n] % PAGE, K, D);
                const T* got = (h < H ? q.data() : keys.data()) + at;
                for (int i = 0; i < D; i++) {
                    int pair = i < D / 2 ? i + D / 2 : i - D / 2, plane = i % (D / 2);
                    double angle = batch.pos[n] * std::pow(1e4, -2. * plane / D), r = 1 / std::sqrt(sum / D + (double)1e-6f);
                    double u = to_acc(in[i]) * r * to_acc(w[i]), v = to_acc(in[pair]) * r * to_acc(w[pair]);
                    double want = u * std::cos(angle) + (i < D / 2 ? -v : v) * std::sin(angle);
                    double tolerance = rounding<T>(want) + sum_error<T>(6 * (std::fabs(u) + std::fabs(v)));
                    bad += !(std::fabs(to_acc(got[i]) - want) <= tolerance);
                    if (h >= H) bad += to_acc(values[at + i]) != to_acc(in[K * D + i]);
                }
            }
        CHECK(bad == 0);
        for (int i = 0; i < H * D; i++) CHECK(std::isnan(to_acc(q[(size_t)(N - 1) * H * D + i]))); // the spare row
    }
}

TEST_CASE_TEMPLATE("attention over a paged, ragged batch", T, bf16, float, double) {
    Random random{7};
    struct Shape { int H, K, D; };
    for (Shape s : {Shape{1, 1, 64}, {4, 2, 64}, {8, 2, 40}, {5, 1, 128}, {8, 1, 6}, {80, 2, 16}}) {
        // contexts of 1, 15, 16, 17, 300, 512, 513 and 1,100 keys; one-token sequences first; a prompt from nothing; one
        // in the middle; one across the border of two splits
        TestBatch batch(random, {{0, 1}, {14, 1}, {15, 1}, {16, 1}, {299, 1}, {511, 1}, {512, 1}, {1099, 1}, {0, 37}, {30, 19}, {1022, 4}}, 10, 1);
        const int N = (int)batch.token.size();
        auto q = random.fill<T>((size_t)N * s.H * s.D, 3);
        auto some = [&] { // as many numbers as the cache has, again and again the same 10,007
            auto v = random.fill<T>(10007);
            const size_t once = v.size();
            v.resize((size_t)batch.page_count * s.K * PAGE * s.D);
            for (size_t at = once; at < v.size(); at += once)
                memcpy((void*)&v[at], v.data(), std::min(once, v.size() - at) * sizeof(T));
            return v;
        };
        auto keys = some(), values = some();
        const size_t rows = (size_t)(N - 1) * s.H; // but the spare one's
        std::vector<double> want(q.size()), size(q.size()), want_lse((size_t)N * s.H), terms(rows);
        std::vector<double> wide_q = as_double(q), wide_keys = as_double(keys);
        attention(want.data(), want_lse.data(), wide_q.data(), {wide_keys.data(), as_double(values).data()}, batch.view(), {s.H, s.K, s.D});
        attention(size.data(), nullptr, wide_q.data(), {wide_keys.data(), magnitudes(values).data()}, batch.view(), {s.H, s.K, s.D});
        want.resize(rows * s.D), want_lse.resize(rows);
        for (size_t row = 0; row < rows; row++) // a score's error is one of lse: q and k are at most 3 and 1
            for (int i = 0; i < s.D; i++) terms[row] += std::fabs(wide_q[row * s.D + i]) / std::sqrt((double)s.D);
        {
            auto out = poisoned<T>(q.size());
            auto lse = poisoned<acc<T>>((size_t)N * s.H);
            attention(out.data(), lse.data(), q.data(), {keys.data(), values.data()}, batch.view(), {s.H, s.K, s.D});
            out.resize(want.size()), lse.resize(rows);
            CHECK(wrong(out, want, [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(10 * size[i]); }) == 0);
            CHECK(wrong(lse, want_lse, [&](size_t i) { return sum_error<T>(terms[i] + std::fabs(want_lse[i]) + 1); }) == 0);
        }
        on_every_instruction_set([&] {
            auto out = poisoned<T>(q.size());
            auto lse = poisoned<acc<T>>((size_t)N * s.H);
            attention_cpu(cpu(), out.data(), lse.data(), q.data(), {keys.data(), values.data()}, batch.view(), {s.H, s.K, s.D});
            std::vector<T> spare(out.end() - s.H * s.D, out.end());
            for (const T& x : spare) REQUIRE(std::isnan(to_acc(x)));
            out.resize(want.size());
            for (int h = 0; h < s.H; h++) REQUIRE(std::isnan(lse[rows + h]));
            lse.resize(rows);
            CHECK(wrong(lse, want_lse, [&](size_t i) { return sum_error<T>(terms[i] + std::fabs(want_lse[i]) + 1); }) == 0);
            // The error of a score, some 1e-6, is one of its weight: hence 10 times a sum's.
            CHECK(wrong(out, want, [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(10 * size[i]); }) == 0);

            // The row of a token is the same when its sequence is alone in the batch.
            for (size_t first = 0; first < batch.token.size() - 1;) {
                size_t last = first;
                while (last < batch.token.size() && batch.seq[last] == batch.seq[first]) last++;
                Batch whole = batch.view();
                for (size_t n : {first, last - 1}) {
                    Batch one = {1, whole.B, whole.token + n, whole.pos + n, whole.seq + n, whole.slot + n, whole.pages, whole.max_pages};
                    auto alone = poisoned<T>((size_t)s.H * s.D);
                    attention_cpu(cpu(), alone.data(), nullptr, q.data() + n * s.H * s.D, {keys.data(), values.data()}, one, {s.H, s.K, s.D});
                    REQUIRE(memcmp(alone.data(), out.data() + n * s.H * s.D, alone.size() * sizeof(T)) == 0);
                }
                first = last;
            }
        });
    }
}

TEST_CASE_TEMPLATE("attention survives scores that overflow a careless exp", T, bf16, float, double) {
    EACH_WAY;
    const int D = 16;
    std::vector<T> q(D, to_stored<T>(100)), keys(PAGE * 2 * D), values(PAGE * 2 * D), out(D);
    for (int j = 0; j < 2 * PAGE; j++)
        for (int i = 0; i < D; i++) keys[j * D + i] = to_stored<T>((acc<T>)j), values[j * D + i] = to_stored<T>((acc<T>)j);
    int token = 0, pos = 2 * PAGE - 1, seq = 0, slot = pos, pages[2] = {0, 1};
    CALL(attention, out.data(), nullptr, q.data(), {keys.data(), values.data()}, Batch{1, 1, &token, &pos, &seq, &slot, pages, 2}, {1, 1, D});
    for (const T& x : out) CHECK(to_acc(x) == 2 * PAGE - 1); // the last key wins by hundreds
}
} // namespace
