// Packed weights on a CPU: INT4 and FP8 matrices keep the numbers of the file, products on every instruction set hold
// to W.at and to the bits of the same weights unpacked, a row's bits depend on no other row.
#include "cpu/step_ceilings.h"
#include "model/model_file.h"
#include "model/quantize.h"
#include "model/session.h"
#include "model/weights.h"
#include "tests/common.h"
#include "tests/files.h"
#include "tests/golden.h"
#include "tests/packed.h"
#include "tests/process.h"

static const std::string QUANTIZED = "tests/fixtures/quantized/";

// ----------------------------------------------------------------------------------------- products

TEST_CASE_TEMPLATE("products with packed weights are those of W.at", T, bf16, float, double) {
    EACH_WAY;
    Random random{31};
    for (const PackedKind& kind : PACKED_KINDS) for (int N : {1, 2, 5, 67}) for (int in : {1, 33, 64, 96, 128, 192, 320}) {
        PackedLinear<T> W(random, kind.format, kind.group, kind.zeros, {41, 7}, in);
        const size_t out = (size_t)W.out();
        const auto x = random.fill<T>((size_t)N * in);
        const std::vector<double> want = WideLinear(W)(as_double(x), N), size = WideLinear(W, true)(magnitudes(x), N);
        on_every_instruction_set([&] {
            CAPTURE((int)kind.format);
            CAPTURE(kind.group);
            CAPTURE(N);
            CAPTURE(in);
            auto y = poisoned<T>(N * out);
            CALL(linear, y.data(), x.data(), W, N);
            CHECK(wrong(y, want, [&](size_t i) { return rounding<T>(want[i]) + packed_error<T>(size[i]); }) == 0);
        });
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
        std::vector<double> want((size_t)N * in), size(want.size());
        for (size_t i = 0; i < want.size(); i++)
            for (size_t r = 0; r < out; r++) {
                const double term = to_acc(dy[i / in * out + r]) * (double)W.at((int)r, (int)(i % in));
                want[i] += term, size[i] += std::fabs(term);
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

// ----------------------------------------------------------------------------------------- files

template <class T, class F> static void each_linear(const Weights<T>& w, F f) {
    f(w.embed, "model.embed_tokens");
    for (size_t l = 0; l < w.layers.size(); l++) {
        const std::string layer = format("model.layers.%zu.", l);
        f(w.layers[l].qkv, layer + "self_attn.q_proj"), f(w.layers[l].o, layer + "self_attn.o_proj");
        f(w.layers[l].gate_up, layer + "mlp.gate_proj"), f(w.layers[l].down, layer + "mlp.down_proj");
    }
}

TEST_CASE("AWQ, GPTQ, FP8 and GGUF's blocks stay packed on a CPU: W.at is the file's number, bit by bit") {
    std::map<Format, int> seen;
    for (std::string model : {"awq", "gptq4", "gptq8", "fp8", "mixed/model.gguf", "chat/model.gguf"}) {
        CAPTURE(model);
        const ModelFile file(QUANTIZED + model);
        const Weights<bf16> w(file, Format::PLAIN, true);
        const Weights<float> wide(file);
        size_t off = 0;
        auto others = std::vector<const Linear<float>*>();
        each_linear(wide, [&](const Linear<float>& y, const std::string&) { others.push_back(&y); });
        size_t at = 0;
        each_linear(w, [&](const Linear<bf16>& y, const std::string&) {
            const Linear<float>& truth = *others[at++];
            seen[y.format]++;
            for (int r = 0; r < y.out(); r++)
                for (int i = 0; i < y.in; i++) {
                    const float a = y.at(r, i), b = truth.at(r, i);
                    if (y.format == Format::INT4 || y.format == Format::FP8 || y.format == Format::BLOCKS) off += memcmp(&a, &b, 4) != 0;
                    if (y.format == Format::PLAIN) off += a != to_acc(to_bf16(b));
                    if (y.format == Format::INT8) {
                        float largest = 0;
                        for (int k = i / 32 * 32; k < std::min(y.in, i / 32 * 32 + 32); k++) largest = std::max(largest, std::fabs(truth.at(r, k)));
                        off += !(std::fabs(a - b) <= largest / 240); // (1 + 7 / 128) / 127 / 2
                    }
                }
        });
        CHECK(off == 0);
        CHECK(step_bytes(w) < step_bytes(Weights<bf16>(file)));
    }
    for (Format f : {Format::INT4, Format::FP8, Format::INT8, Format::BLOCKS, Format::PLAIN}) CHECK(seen[f] > 0);
}

TEST_CASE("packed models: logits are transformers' on the same matrices, as defined and on every instruction set") {
    for (std::string model : {"awq", "fp8"}) {
        CAPTURE(model);
        const Golden g("quantized/" + model);
        const Weights<bf16> w(g.file, Format::PLAIN, true);
        CHECK((w.layers[0].down.format == Format::INT4 || w.layers[0].down.format == Format::FP8));
        const auto logits = [&](bool plain) { return logits_by(w, g, plain); };
        const double defined = mean_kl(g.logits, logits(true), g.file.config.V);
        CHECK(defined <= g.bf16_kl);
        on_every_instruction_set([&] { CHECK(mean_kl(g.logits, logits(false), g.file.config.V) <= g.bf16_kl); });
    }
}

// ----------------------------------------------------------------------------------------- made

TEST_CASE("FP8: every number between two e4m3 goes to the nearer, ties to even, beyond 448 to 448") {
    for (int u = 0; u < 0x7e; u++) {
        const float a = e4m3_to_float((uint8_t)u), b = e4m3_to_float((uint8_t)(u + 1)), middle = (a + b) / 2;
        CHECK(float_to_e4m3(a) == u);
        CHECK(float_to_e4m3(-b) == (u + 1) + 128);
        CHECK(float_to_e4m3(middle) == u + (u & 1));
        CHECK(float_to_e4m3(std::nextafter(middle, 0.f)) == u);
        CHECK(float_to_e4m3(std::nextafter(middle, 1e9f)) == u + 1);
    }
    for (float x : {449.f, 1e9f, INFINITY}) CHECK((float_to_e4m3(x) == 0x7e && float_to_e4m3(-x) == 0xfe));
    CHECK((float_to_e4m3(NAN) & 0x7f) == 0x7f);
}

TEST_CASE("grids: zeros, subnormals and large weights lose no more than the format's step") {
    Random random{41};
    for (Format format : {Format::INT4, Format::INT8})
        for (int exponent = -148; exponent <= (format == Format::INT4 ? 17 : 126); exponent += 5) {
            std::vector<float> w(32);
            for (float& x : w) x = (float)std::ldexp(2 * random.uniform() - 1, exponent);
            float low = 0, high = 0;
            for (float x : w) low = std::min(low, x), high = std::max(high, x);
            const Grid grid = choose_grid(format, w.data(), w.size());
            CAPTURE(exponent);
            CHECK(std::isfinite(grid.scale));
            double lost = 0, most = 0;
            const double step = format == Format::INT4 ? std::max(((double)high - low) / 15 * 1.001, 0x1p-24) : std::max<double>(high, -low) / 119;
            for (float x : w) lost += std::pow(x - grid.number(grid.code(x)), 2), most += std::pow(std::max(step, format == Format::INT8 ? 0x1p-133 : 0.), 2);
            CHECK(lost <= most * 1.0001); // half a step each, and as much again where the zero point is rounded
        }
    const std::vector<float> zeros(128);
    for (Format format : {Format::INT4, Format::INT8, Format::FP8}) {
        std::vector<float> W(128 * 128);
        const QuantizedMatrix m = quantize_matrix(W.data(), 128, 128, format, format == Format::INT8 ? 32 : 128, nullptr);
        for (size_t i = 0; i < W.size(); i++) REQUIRE(m.at(i / 128, i % 128) == 0);
    }
}

// The inputs of tests/reference/make_gptq.py.
struct Draws {
    uint64_t state;
    double operator()() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (double)(state >> 33) / 2147483648. - 0.5;
    }
};

TEST_CASE("GPTQ: the layer's error is that of NumPy's, written from the paper, within 2%") {
    const size_t ROWS = 130, IN = 256, TOKENS = 600, DEAD = 77;
    const Json golden(read_file(QUANTIZED + "gptq.json"));
    std::vector<float> W, X(TOKENS * IN);
    Draws one{1}, two{2}, three{3};
    double sum = 0, size = 0;
    for (size_t i = 0; i < ROWS * IN; i++) {
        const double a = one(), b = two();
        W.push_back((float)((a + b * b * b * 8) * 0.1)), sum += W.back();
    }
    for (size_t n = 0; n < TOKENS; n++) {
        double before = 0;
        for (size_t k = 0; k < IN; k++) {
            before = three() + (k ? 0.75 * before : 0);
            X[n * IN + k] = k == DEAD ? 0.f : (float)(before * (k % 16 ? 1 : 10)), size += std::fabs(X[n * IN + k]);
        }
    }
    REQUIRE(sum == doctest::Approx(golden["w"].number()).epsilon(1e-9));
    REQUIRE(size == doctest::Approx(golden["x"].number()).epsilon(1e-9));
    std::vector<float> H(IN * IN);
    std::vector<bool> dead;
    add_squares(cpu(), H.data(), X.data(), (int)TOKENS, (int)IN);
    const std::vector<float> factor = gptq_factor(H, IN, dead);
    for (size_t k = 0; k < IN; k++) REQUIRE(dead[k] == (k == DEAD));
    auto error = [&](const QuantizedMatrix& m) {
        double off = 0, all = 0;
        for (size_t n = 0; n < TOKENS; n++)
            for (size_t r = 0; r < ROWS; r++) {
                double a = 0, b = 0;
                for (size_t k = 0; k < IN; k++) a += X[n * IN + k] * (W[r * IN + k] - m.at(r, k)), b += (double)X[n * IN + k] * W[r * IN + k];
                off += a * a, all += b * b;
            }
        return off / all;
    };
    int rows = 0;
    for (sj::Value row : golden["rows"].items()) {
        const Format format = row["format"].str() == "int4" ? Format::INT4 : Format::FP8;
        const size_t group = (size_t)row["group"].number();
        std::vector<float> nearest = W, moved = W;
        for (size_t r = 0; r < ROWS; r++) moved[r * IN + DEAD] = 0;
        const double a = error(quantize_matrix(nearest.data(), ROWS, IN, format, group, nullptr));
        const double b = error(quantize_matrix(moved.data(), ROWS, IN, format, group, &factor));
        CAPTURE((int)format);
        CAPTURE(group);
        CHECK(a == doctest::Approx(row["nearest"].number()).epsilon(0.002));
        CHECK(b == doctest::Approx(row["gptq"].number()).epsilon(0.02));
        CHECK(b < 0.5 * a);
        CHECK(nearest == W); // without a factor nothing moves
        rows++;
    }
    CHECK(rows == 4);
}

static const char* quantizer() {
    const char* path = getenv("QWEN3");
    REQUIRE_MESSAGE(path, "QWEN3 is not set: make test sets it");
    return path;
}
static const std::string TINY = "data/tiny/model.bin", TINY_TOKENIZER = "data/tiny/tokenizer.bin";
static Result run_qwen3(Strings arguments) { return Process(quantizer(), arguments).wait(); }

TEST_CASE("--activations fp8 is refused where it means nothing") {
    const std::string fp8 = "tests/fixtures/quantized/fp8";
    const auto refused = [](Strings arguments, const char* word) {
        check_refusal(run_qwen3(arguments + Strings{"--activations", "fp8", "--ids", "1"}), "qwen3", word);
    };
    refused({TINY, "--packed"}, "no FP8 weights");
    refused({fp8}, "--packed");
    refused({fp8, "--packed", "--dtype", "bf16"}, "--dtype");
    refused({fp8, "--packed", "--invariant"}, "--invariant");
    refused({fp8, "--packed", "-d", "cpu"}, "for a GPU");
    refused({TINY, "--dtype", "fp8", "-d", "cpu"}, "for a GPU");
}

TEST_CASE("--quantize: files that open again, packed and not, with the numbers that were chosen") {
    const Scratch s;
    for (std::string how : {"int4", "int8", "fp8"}) {
        CAPTURE(how);
        const std::string out = s / how + ".bin";
        const Result r = run_qwen3({TINY, "--quantize", how, out});
        INFO(r.err);
        REQUIRE(r.status == 0);
        const ModelFile from(TINY), file(out);
        CHECK(file.config.end_tokens == from.config.end_tokens);
        const Weights<bf16> w(file, Format::PLAIN, true);
        CHECK(type_name(w) == how);
        CHECK(w.embed.format == Format::INT8);
        const Weights<float> open(file);
        const Weights<float> truth(from);
        size_t off = 0;
        std::vector<float> copy;
        for (int r0 = 0; r0 < truth.layers[1].down.out(); r0++)
            for (int k = 0; k < truth.layers[1].down.in; k++) copy.push_back(truth.layers[1].down.at(r0, k));
        const Linear<bf16>& down = w.layers[1].down;
        const QuantizedMatrix m = quantize_matrix(copy.data(), (size_t)down.out(), (size_t)down.in, down.format, (size_t)down.group, nullptr);
        for (int r0 = 0; r0 < down.out(); r0++)
            for (int k = 0; k < down.in; k++) {
                const float want = m.at((size_t)r0, (size_t)k), kept = down.at(r0, k), read = open.layers[1].down.at(r0, k);
                off += want != kept || want != read;
            }
        CHECK(off == 0);
        if (how == "int8") // what --dtype int8 makes at load
            CHECK(run_qwen3({out, "--ids", "5 6 7", "--logits-hash"}).out == run_qwen3({TINY, "--dtype", "int8", "--ids", "5 6 7", "--logits-hash"}).out);
        if (how != "int8") { // converted, nothing is quantised any more, embedding and head among it
            write_model(file, s / "wide.bin");
            const ModelFile again(s / "wide.bin");
            CHECK((!again.is_quantized() && !again.is_int8()));
            const Weights<bf16> bits(again);
            for (int i = 0; i < 99; i++) CHECK(bits.embed.at(i, i) == to_acc(to_bf16(w.embed.at(i, i))));
            for (int set = ISA_AVX512_BF16; set <= best_instruction_set(); set++) { // packed: the bits of bf16
                const Strings ask = {"--ids", "5 6 7 8 9", "--logits-hash", "-d", "cpu", "--cpu", instruction_set_name(set)};
                CHECK(run_qwen3(Strings{out} + ask).out == run_qwen3(Strings{s / "wide.bin"} + ask).out);
            }
        }
        CHECK(step_bytes(w) < step_bytes(Weights<bf16>(from)) * (how == "int4" ? 0.39 : 0.56));
    }
    // The form that transformers opens: embedding and head as they are.
    REQUIRE(run_qwen3({TINY, "--quantize", "int4", s / "same.bin", "--embedding", "same", "--group", "32"}).status == 0);
    const ModelFile same(s / "same.bin");
    CHECK(same.tensors.at("model.embed_tokens.weight").dtype == Dtype::BF16);
    CHECK(Weights<bf16>(same, Format::PLAIN, true).layers[0].qkv.group == 32);
    check_refusal(run_qwen3({s / "same.bin", "--quantize", "int8", s / "x.bin"}), "qwen3", "is quantised already");
    // --dtype fp8 makes the same at load; of a file in FP8, nothing.
    REQUIRE(run_qwen3({TINY, "--quantize", "fp8", s / "layers.bin", "--embedding", "same"}).status == 0);
    const auto logits = [&](const std::string& model, const std::string& dtype) {
        const Strings asked = {model, "-d", "cpu", "--ids", "5 6 7", "--logits-hash"};
        const Result r = run_qwen3(dtype.empty() ? asked : asked + Strings{"--dtype", dtype});
        INFO(r.err);
        REQUIRE(r.status == 0);
        return r.out;
    };
    CHECK(logits(TINY, "fp8") == logits(s / "layers.bin", ""));
    CHECK(logits(s / "layers.bin", "fp8") == logits(s / "layers.bin", ""));
    CHECK(logits(TINY, "fp8") != logits(TINY, ""));
    write_file(s / "short.txt", "a text of fewer tokens than a window has");
    for (Strings more : {Strings{"--group", "48"}, Strings{"--group", "64"}, Strings{"--calibrate", s / "short.txt", "-z", TINY_TOKENIZER}}) {
        Strings all = {TINY, "--quantize", more[1] == "64" ? "fp8" : "int4", s / "x.bin"};
        all.insert(all.end(), more.begin(), more.end());
        check_refusal(run_qwen3(all), "qwen3", more[0] == "--group" ? "of int4" : "one window takes 512");
    }
    check_refusal(run_qwen3({TINY, "--quantize", "int5", s / "x.bin"}), "qwen3", "int4, int8 or fp8");
    check_refusal(run_qwen3({TINY, "--quantize", "int4", TINY}), "qwen3", "is the model itself");
    check_refusal(run_qwen3({TINY, "--group", "32", "-i", "day"}), "qwen3", "are for --quantize");
    CHECK(!fs::exists(s / "x.bin"));
}

TEST_CASE("FP8 stays FP8 where matrices of one product have more and fewer rows than a block") {
    const Scratch s;
    write_file(s / "c.json", R"({"model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64,
        "intermediate_size": 96, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"})");
    REQUIRE(run_qwen3({"--synthesize", s / "c.json", s / "m.bin"}).status == 0);
    REQUIRE(run_qwen3({s / "m.bin", "--quantize", "fp8", s / "fp8.bin"}).status == 0);
    const ModelFile file(s / "fp8.bin");
    const Weights<bf16> w(file, Format::PLAIN, true);
    const Weights<float> truth(file);
    size_t off = 0;
    for (auto [kept, read] : {std::pair(&w.layers[0].qkv, &truth.layers[0].qkv), {&w.layers[0].gate_up, &truth.layers[0].gate_up}}) {
        CHECK(kept->format == Format::FP8);
        for (int r = 0; r < kept->out(); r++)
            for (int i = 0; i < kept->in; i++) off += kept->at(r, i) != read->at(r, i);
    }
    CHECK(off == 0); // a scale of another block would be
    // The kernels': each row's product with one channel is that number.
    std::vector<bf16> x(128), y((size_t)w.layers[0].qkv.out());
    size_t wrong = 0;
    on_every_instruction_set([&] {
        for (int i : {0, 31, 127}) {
            std::fill(x.begin(), x.end(), bf16{0}), x[(size_t)i] = to_bf16(1);
            linear_cpu(cpu(), y.data(), x.data(), w.layers[0].qkv, 1);
            for (int r = 0; r < w.layers[0].qkv.out(); r++) wrong += to_acc(y[(size_t)r]) != to_acc(to_bf16(truth.layers[0].qkv.at(r, i)));
        }
    });
    CHECK(wrong == 0);
}

TEST_CASE("--calibrate and --against: GPTQ is nearer to the model than rounding on text of the kind it saw") {
    const Scratch s;
    const std::string notes = read_file("data/course/notes/01-introduction.md");
    write_file(s / "seen.txt", notes.substr(0, notes.size() / 2)), write_file(s / "new.txt", notes.substr(notes.size() / 2, 3000));
    REQUIRE(run_qwen3({TINY, "--quantize", "int4", s / "nearest.bin"}).status == 0);
    const Result r = run_qwen3({TINY, "--quantize", "int4", s / "gptq.bin", "--calibrate", s / "seen.txt", "-z", TINY_TOKENIZER});
    INFO(r.err);
    REQUIRE(r.status == 0);
    auto kl = [&](const std::string& model, const std::string& against) {
        const Result c = run_qwen3({model, "-z", TINY_TOKENIZER, "--ppl", s / "new.txt", "--against", against, "--json"});
        INFO(c.err);
        REQUIRE(c.status == 0);
        const Json j(c.out);
        CHECK(j["kl"][(size_t)1].number() <= j["kl"][(size_t)0].number());
        CHECK(j["same_top1"][(size_t)0].number() > 0.6);
        return j["kl"][(size_t)0].number();
    };
    const double nearest = kl(s / "nearest.bin", TINY), gptq = kl(s / "gptq.bin", TINY);
    INFO("nearest " << nearest << ", GPTQ " << gptq);
    CHECK(gptq > 1e-5);
    CHECK(gptq < 0.95 * nearest);
    CHECK(kl(TINY, TINY) == 0);
    check_refusal(run_qwen3({TINY, "--against", TINY, "-i", "day"}), "qwen3", "--against is for --ppl");
}

TEST_CASE("--quantize refuses what no scale holds") {
    const Scratch s;
    auto with = [&](uint16_t bits) { // one weight of the default model
        std::string bytes = read_file(TINY);
        const MappedFile map(TINY);
        Tensors all;
        Metadata metadata;
        read_safetensors(map, all, metadata);
        const Tensor& t = all.at("model.layers.3.mlp.up_proj.weight");
        memcpy(&bytes[(size_t)(t.data - map.data) + 2 * 999], &bits, 2);
        write_file(s / "m.bin", bytes);
    };
    for (uint16_t bits : {0x7fc0, 0x7f80, 0xff80}) {
        with(bits);
        for (const char* how : {"int4", "int8", "fp8"})
            check_refusal(run_qwen3({s / "m.bin", "--quantize", how, s / "x.bin"}), "qwen3", "up_proj.weight has an infinity or a NaN");
    }
    with(0x7f00); // 1.7e38
    check_refusal(run_qwen3({s / "m.bin", "--quantize", "int4", s / "x.bin"}), "qwen3", "beyond what the format's scales hold");
    check_refusal(run_qwen3({s / "m.bin", "--quantize", "fp8", s / "x.bin"}), "qwen3", "beyond what the format's scales hold");
    CHECK(run_qwen3({s / "m.bin", "--quantize", "int8", s / "x.bin"}).status == 0);
}

TEST_CASE("export.py --to-hf makes a folder of a quantised model, which opens as the same") {
    if (std::system("python3 -I -S -c pass >/dev/null 2>&1")) {
        printf("skipped: export.py --to-hf: there is no python3\n");
        return;
    }
    const Scratch s;
    for (std::string how : {"int4", "fp8"}) {
        CAPTURE(how);
        const std::string bin = s / how + ".bin", folder = s / how;
        REQUIRE(run_qwen3({TINY, "--quantize", how, bin, "--embedding", "same"}).status == 0);
        REQUIRE(std::system(("python3 -I -S export.py --to-hf " + bin + " " + folder + " 2>" + folder + ".err").c_str()) == 0);
        const Strings ask = {"--ids", "5 6 7", "--logits-hash"};
        const Result a = run_qwen3({bin, ask[0], ask[1], ask[2]}), b = run_qwen3({folder, ask[0], ask[1], ask[2]});
        CHECK((a.status == 0 && a.out == b.out));
        CHECK(Weights<bf16>(ModelFile(folder), Format::PLAIN, true).layers[0].o.format == (how == "int4" ? Format::INT4 : Format::FP8));
    }
}
