// GGUF's blocks on a CPU: matrices stay where the file is mapped. Products hold to W.at, on CPUs that multiply bf16 to the
// bit those of the same matrix as bf16; a row's bits depend on no other row; q, k and v may be of different types.
#include "cpu/step_ceilings.h"
#include "model/model_file.h"
#include "model/session.h"
#include "model/weights.h"
#include "tests/blocks.h"
#include "tests/common.h"
#include "tests/files.h"
#include "tests/golden.h"
#include "tests/packed.h"

static const std::string MIXED = "tests/fixtures/quantized/mixed/model.gguf", CHAT = "tests/fixtures/quantized/chat/model.gguf";

// Linears of one block of rows for each type, and of three.
template <class T, class F> static void each_shape(Random& random, F f) {
    for (Dtype type : BLOCK_TYPES)
        for (int in : {32, 288, 768}) {
            if (in % block_columns(type)) continue;
            const BlockLinear<T> W(random, {type}, {41}, in);
            CAPTURE(block_name(type));
            f(W);
        }
    for (const std::vector<Dtype>& types : {std::vector<Dtype>{Dtype::Q4_K, Dtype::Q6_K, Dtype::Q5_0}, {Dtype::Q6_K, Dtype::Q5_K}}) {
        const BlockLinear<T> W(random, types, types.size() == 3 ? std::vector<int>{70, 9, 33} : std::vector<int>{32, 32}, 512);
        CAPTURE(types.size());
        f(W);
    }
}

TEST_CASE_TEMPLATE("products with blocks are those of W.at, or of its nearest bf16", T, bf16, float, double) {
    EACH_WAY;
    Random random{81};
    each_shape<T>(random, [&](const BlockLinear<T>& W) {
        const Unpacked<T> nearest(W);
        const size_t most = 19, out = (size_t)W.out(); // (the next test has 37)
        const auto x = random.fill<T>(most * W.in);
        const std::vector<double> sizes = WideLinear(W, true)(magnitudes(x), most), exact = WideLinear(W)(as_double(x), most);
        const std::vector<double> rounded = std::is_same_v<T, bf16> && !as_defined ? WideLinear(nearest)(as_double(x), most) : exact;
        for (int N : {1, 2, 5, (int)most})
            on_every_instruction_set([&] {
                CAPTURE(N);
                CAPTURE(W.in);
                const bool rounds = rounds_packed<T>();
                std::vector<double> want = rounds ? rounded : exact, size = sizes;
                want.resize(N * out), size.resize(N * out);
                auto y = poisoned<T>(N * out);
                CALL(linear, y.data(), x.data(), W, N);
                CHECK(wrong(y, want, [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(size[i]); }) == 0);
                if (rounds || (std::is_same_v<T, acc<T>> && !as_defined)) { // the code of plain weights adds in the same order
                    auto z = poisoned<T>(N * out);
                    CALL(linear, z.data(), x.data(), nearest, N);
                    CHECK(same_bits(y, z));
                }
            });
    });
}

TEST_CASE_TEMPLATE("a row of a product with blocks has the same bits in any batch, for any number of threads", T, bf16, float) {
    Random random{82};
    each_shape<T>(random, [&](const BlockLinear<T>& W) {
        const int N = 37;
        const auto x = random.fill<T>((size_t)N * W.in);
        on_every_instruction_set([&] {
            same_bits_in_batches<T>(W, x, N);
        });
    });
}

TEST_CASE("embed with blocks: W.at of the token's row, or its nearest bf16") {
    EACH_WAY;
    Random random{83};
    for (Dtype type : BLOCK_TYPES) {
        const BlockLinear<bf16> table(random, {type}, {50}, 256);
        TestBatch batch(random, {{0, 7}, {3, 1}}, 50, 2);
        auto x = poisoned<float>(10 * 256);
        CALL(embed, x.data(), table, batch.view(), 256);
        for (int n = 0; n < 8; n++)
            for (int i = 0; i < 256; i++) {
                const float want = table.at(batch.token[(size_t)n], i);
                REQUIRE(x[(size_t)n * 256 + i] == (rounds_packed<bf16>() ? to_acc(to_bf16(want)) : want));
            }
    }
}

TEST_CASE_TEMPLATE("dx of blocks: the definition in double", T, bf16, float, double) {
    EACH_WAY;
    Random random{84};
    each_shape<T>(random, [&](const BlockLinear<T>& W) {
        for (int N : {1, 11}) {
            const size_t out = (size_t)W.out(), in = (size_t)W.in;
            const auto dy = random.fill<T>((size_t)N * out);
            std::vector<double> want((size_t)N * in), size(want.size()), row(in);
            for (size_t r = 0; r < out; r++) {
                for (size_t i = 0; i < in; i++) row[i] = W.at((int)r, (int)i);
                for (size_t n = 0; n < (size_t)N; n++)
                    for (size_t i = 0; i < in; i++) {
                        const double term = to_acc(dy[n * out + r]) * row[i];
                        want[n * in + i] += term, size[n * in + i] += std::fabs(term);
                    }
            }
            auto dx = poisoned<T>(want.size());
            T* none = nullptr;
            CALL(linear_backward_input, dx.data(), none, (acc<T>*)nullptr, dy.data(), W, N);
            CHECK(wrong(dx, want, [&](size_t i) { return rounding<T>(want[i]) + sum_error<T>(size[i]); }) == 0);
        }
    });
}

// ----------------------------------------------------------------------------------------- files

template <class T> static std::vector<float> all_logits(const Golden& g, const Weights<T>& weights, bool plain = false) {
    std::vector<float> out;
    Context ctx;
    ctx.plain = plain;
    for (auto& prompt : g.prompts) {
        Session<T> session(g.file.config, weights, 64, ctx);
        session.feed(prompt, nullptr, [&](const float* row) { out.insert(out.end(), row, row + g.file.config.V); });
    }
    return out;
}

template <class T> static size_t bytes_of(const Weights<T>& w) { // of all matrices
    size_t n = weight_bytes(w.embed);
    for (auto& layer : w.layers) each_product(layer, [&](auto& W) { n += weight_bytes(W); });
    return n;
}

TEST_CASE("a GGUF's matrices stay as they are mapped: W.at is the file's number, bit by bit; no memory but the file's") {
    const ModelFile file(MIXED);
    const Weights<bf16> w(file, Format::PLAIN, true);
    const Weights<float> truth(file);
    std::set<Dtype> seen;
    auto check = [&](const Linear<bf16>& W, const Linear<float>& wide, Format format) {
        CHECK(W.format == format);
        for (int b = 0; b < 3 && W.format == Format::BLOCKS && W.rows[b]; b++) {
            seen.insert(W.type[b]);
            const uint8_t* q = (const uint8_t*)W.q[b];
            CHECK((q >= file.maps[0].data && q + (size_t)W.rows[b] * W.row_bytes(b) <= file.maps[0].data + file.maps[0].size));
        }
        size_t off = 0;
        for (int r = 0; r < W.out(); r++)
            for (int i = 0; i < W.in; i++) {
                const float a = W.at(r, i), b = format == Format::PLAIN ? to_acc(to_bf16(wide.at(r, i))) : wide.at(r, i);
                off += memcmp(&a, &b, 4) != 0;
            }
        CHECK(off == 0);
    };
    check(w.embed, truth.embed, Format::BLOCKS);
    CHECK(w.head.q[0] == w.embed.q[0]);
    // q, k and v of three types; gate and up of two. Of the second layer q, k and v are not quantised.
    check(w.layers[0].qkv, truth.layers[0].qkv, Format::BLOCKS), check(w.layers[0].gate_up, truth.layers[0].gate_up, Format::BLOCKS);
    check(w.layers[0].o, truth.layers[0].o, Format::INT4), check(w.layers[0].down, truth.layers[0].down, Format::BLOCKS);
    check(w.layers[1].qkv, truth.layers[1].qkv, Format::PLAIN), check(w.layers[1].o, truth.layers[1].o, Format::BLOCKS);
    check(w.layers[1].gate_up, truth.layers[1].gate_up, Format::BLOCKS), check(w.layers[1].down, truth.layers[1].down, Format::BLOCKS);
    for (Dtype type : BLOCK_TYPES) CHECK(seen.count(type) == (type != Dtype::Q4_0));
    CHECK(std::string(type_name(w)) == "blocks"); // (the last layer's q is not quantised)
    size_t stored = 0; // in the file; F32 becomes bf16
    for (auto& [name, t] : file.tensors)
        if (t.shape.size() == 2) stored += t.dtype == Dtype::F32 ? t.bytes / 2 : t.bytes;
    const Linear<bf16>& o = w.layers[0].o; // INT4 has 64 columns at least, and here are 32
    CHECK(bytes_of(w) == stored + (size_t)o.out() * (o.row_bytes() - 16));
    size_t converted = 0;
    for (auto& piece : w.converted) converted += ((const Arena*)piece.get())->used;
    CHECK(converted < stored / 10 + (size_t)w.layers[1].qkv.out() * w.layers[1].qkv.in * 2 + weight_bytes(w.layers[0].o));

    const ModelFile chat(CHAT);
    const Weights<bf16> c(chat, Format::PLAIN, true);
    CHECK(std::string(type_name(c)) == "q8_0");
    CHECK(c.embed.type[0] == Dtype::Q8_0);
    CHECK(Weights<bf16>(chat).embed.format == Format::PLAIN);
}

TEST_CASE("logits of blocks are transformers' on the same matrices; bit by bit those of the file as bf16, where bf16 is multiplied") {
    for (std::string model : {"mixed", "chat"}) {
        CAPTURE(model);
        const Golden g("quantized/" + model, "/model.gguf");
        const Weights<bf16> w(g.file, Format::PLAIN, true), wide(g.file);
        CHECK(mean_kl(g.logits, all_logits(g, w, true), g.file.config.V) <= g.bf16_kl);
        on_every_instruction_set([&] {
            const std::vector<float> logits = all_logits(g, w);
            if (!rounds_packed<bf16>()) CHECK(mean_kl(g.logits, logits, g.file.config.V) <= g.bf16_kl);
            else CHECK(logits == all_logits(g, wide));
        });
    }
}

TEST_CASE("for a GPU blocks become INT8, and --dtype means its format") {
    const ModelFile file(MIXED);
    Weights<bf16> w(file, Format::PLAIN, true);
    blocks_to_int8(w, file);
    const Weights<bf16> want(file, Format::INT8);
    auto same = [](const Linear<bf16>& a, const Linear<bf16>& b) {
        CHECK(a.format == Format::INT8);
        size_t off = 0;
        for (int r = 0; r < a.out(); r++)
            for (int i = 0; i < a.in; i++) off += a.at(r, i) != b.at(r, i);
        CHECK(off == 0);
    };
    same(w.embed, want.embed), same(w.head, want.head), same(w.layers[0].qkv, want.layers[0].qkv);
    same(w.layers[0].gate_up, want.layers[0].gate_up), same(w.layers[1].down, want.layers[1].down);
    CHECK(w.layers[0].o.format == Format::INT4);
    CHECK(w.layers[1].qkv.format == Format::PLAIN);
    const Weights<bf16> fp8(file, Format::FP8);
    CHECK(fp8.layers[0].qkv.format == Format::FP8);
    CHECK(fp8.embed.format == Format::PLAIN);
}

TEST_CASE("a block whose scale is an infinity or a NaN is refused in one line") {
    const Scratch s;
    for (auto [name, half] : {std::pair("token_embd.weight", 0x7c00), {"blk.0.attn_q.weight", 0x7e01}, {"blk.0.attn_v.weight", 0xfc00}}) {
        std::string bytes = read_file(MIXED);
        const ModelFile file(MIXED);
        const std::string ours = name[0] == 't' ? "model.embed_tokens.weight" : name[11] == 'q' ? "model.layers.0.self_attn.q_proj.weight" : "model.layers.0.self_attn.v_proj.weight";
        const Tensor& t = file.tensors.at(ours);
        const size_t last = t.dtype == Dtype::Q6_K ? t.bytes - 2 : t.bytes - 144 + 2; // the last block's d, or m
        memcpy(&bytes[(size_t)(t.data - file.maps[0].data) + last], &half, 2);
        write_file(s / "bad.gguf", bytes);
        const ModelFile bad(s / "bad.gguf");
        std::string message;
        try {
            const Weights<bf16> w(bad, Format::PLAIN, true);
        } catch (const Error& e) { message = e.what(); }
        CHECK(message.find(ours + " has an infinity or a NaN") != std::string::npos);
    }
}
