// Packed weights on a CPU: INT4 and FP8 matrices keep the numbers of the file, products on every instruction set hold
// to W.at, a row's bits depend on no other row.
#include "../common.h"
#include "../files.h"
#include "../golden.h"

static const std::string QUANTIZED = "tests/fixtures/quantized/";

// ----------------------------------------------------------------------------------------- products

// A Linear of random numbers in a format: INT4 in groups of 32, 64 or 128 with zero points or without, or FP8.
template <class T> struct PackedLinear : Linear<T> {
    std::vector<int8_t> all_q;
    std::vector<uint16_t> halves;
    std::vector<uint8_t> zeros;
    std::vector<float> floats;
    PackedLinear(Random& random, Format format, int group, bool with_zeros, std::vector<int> blocks, int in) {
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
            halves.push_back(float_to_half(random.below(20) ? s : 0)); // subnormals and zeros too
            floats.push_back(random.below(20) ? s : 0);
            zeros.push_back((uint8_t)random.below(16));
        }
        if (format == Format::FP8) this->group_rows = 5;
        for (size_t b = 0; b < blocks.size(); b++) {
            const size_t g = format == Format::FP8 ? (at + 4) / 5 * groups : at * groups;
            this->q[b] = all_q.data() + at * this->row_bytes();
            this->scale[b] = format == Format::FP8 ? (const void*)(floats.data() + g) : halves.data() + g;
            if (with_zeros) this->zero[b] = zeros.data() + g;
            this->rows[b] = blocks[b], at += (size_t)blocks[b];
        }
    }
    PackedLinear(const PackedLinear&) = delete;
};
struct Kind { Format format; int group; bool zeros; };
static const Kind KINDS[] = {{Format::INT4, 32, false}, {Format::INT4, 32, true}, {Format::INT4, 64, false}, {Format::INT4, 64, true},
                             {Format::INT4, 128, false}, {Format::INT4, 128, true}, {Format::FP8, 128, false}, {Format::FP8, 32, false}};

TEST_CASE_TEMPLATE("products with INT4 and FP8 weights are those of W.at", T, bf16, float, double) {
    EACH_WAY;
    Random random{31};
    for (const Kind& kind : KINDS) for (int N : {1, 2, 5, 67}) for (int in : {1, 33, 64, 96, 128, 192, 320}) {
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
            CHECK(wrong(y, want, [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(size[i]); }) == 0);
        });
    }
}

TEST_CASE_TEMPLATE("a row of an INT4 or FP8 product has the same bits in any batch, for any number of threads", T, bf16, float) {
    Random random{32};
    for (const Kind& kind : KINDS) for (int in : {96, 192, 256}) on_every_instruction_set([&] {
        const int N = 37;
        PackedLinear<T> W(random, kind.format, kind.group, kind.zeros, {45, 20}, in);
        const auto x = random.fill<T>((size_t)N * in);
        const std::vector<acc<T>> zero((size_t)N * W.out());
        auto product = [&](int first, int count) {
            auto y = poisoned<acc<T>>((size_t)count * W.out());
            linear_add_cpu(cpu(), y.data(), zero.data(), x.data() + (size_t)first * in, W, count);
            return y;
        };
        const auto whole = product(0, N);
        auto same = [&](int first, int count) {
            return memcmp(product(first, count).data(), &whole[(size_t)first * W.out()], (size_t)count * W.out() * sizeof(acc<T>)) == 0;
        };
        for (int count : {1, 2, 3, 16})
            for (int n = 0; n + count <= N; n += 7) CHECK(same(n, count));
#ifdef _OPENMP
        const int threads = omp_get_max_threads();
        omp_set_num_threads(5);
        CHECK(same(0, N));
        omp_set_num_threads(threads);
#endif
    });
}

TEST_CASE("INT4 products: wide ranges of x, subnormals, infinities; weights that are all zero") {
    Random random{33};
    const int in = 320, N = 37;
    for (int group : {32, 64, 128}) {
        PackedLinear<bf16> W(random, Format::INT4, group, true, {64, 13}, in);
        // Groups whose q are all the zero point are zeros, exactly, beside any x.
        for (int i = 0; i < in; i++) {
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
        std::vector<double> want(zero.size()), size(zero.size()), least(zero.size());
        for (size_t i = 0; i < want.size(); i++)
            for (int k = 0; k < in; k++) {
                const double w = W.at((int)(i % out), k), term = w * to_acc(x[i / out * in + k]);
                want[i] += term, size[i] += std::fabs(term), least[i] += std::ldexp(std::fabs(w), -127);
            }
        on_every_instruction_set([&] {
            const auto y = product(x);
            CHECK(wrong(y, want, [&](size_t i) { return rounding<float>(want[i]) + sum_error<float>(size[i]) + least[i]; }) == 0);
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

TEST_CASE("embed with INT4 and FP8 weights: W.at of the token's row") {
    EACH_WAY;
    Random random{34};
    for (const Kind& kind : KINDS) {
        PackedLinear<bf16> table(random, kind.format, kind.group, kind.zeros, {50}, 96);
        TestBatch batch(random, {{0, 7}, {3, 1}}, 50, 2);
        auto x = poisoned<float>(10 * 96);
        CALL(embed, x.data(), table, batch.view(), 96);
        for (int n = 0; n < 8; n++)
            for (int i = 0; i < 96; i++) REQUIRE(x[(size_t)n * 96 + i] == table.at(batch.token[(size_t)n], i));
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

TEST_CASE("AWQ, GPTQ, FP8 and Q4_0 stay packed on a CPU: W.at is the file's number, bit by bit") {
    std::map<Format, int> seen;
    for (std::string model : {"awq", "gptq4", "gptq8", "fp8", "mixed/model.gguf", "chat/model.gguf"}) {
        CAPTURE(model);
        const ModelFile file(QUANTIZED + model);
        const Weights<bf16> w(file, false, true);
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
                    if (y.format == Format::INT4 || y.format == Format::FP8) off += memcmp(&a, &b, 4) != 0;
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
    for (Format f : {Format::INT4, Format::FP8, Format::INT8, Format::PLAIN}) CHECK(seen[f] > 0);
}

TEST_CASE("packed models: logits are transformers' on the same matrices, as defined and on every instruction set") {
    for (std::string model : {"awq", "fp8"}) {
        CAPTURE(model);
        const Golden g("quantized/" + model);
        const Weights<bf16> w(g.file, false, true);
        CHECK((w.layers[0].down.format == Format::INT4 || w.layers[0].down.format == Format::FP8));
        auto logits = [&](bool plain) {
            std::vector<float> out;
            Context ctx;
            ctx.plain = plain;
            for (auto& prompt : g.prompts) {
                Session<bf16> session(g.file.config, w, 64, ctx);
                session.feed(prompt, nullptr, [&](const float* row) { out.insert(out.end(), row, row + g.file.config.V); });
            }
            return out;
        };
        const double defined = mean_kl(g.logits, logits(true), g.file.config.V);
        CHECK(defined <= g.bf16_kl);
        on_every_instruction_set([&] { CHECK(mean_kl(g.logits, logits(false), g.file.config.V) <= g.bf16_kl); });
    }
}
