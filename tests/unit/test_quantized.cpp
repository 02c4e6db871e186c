// Packed models on a CPU: INT4 and FP8 matrices keep the numbers of the file; their logits; how they are made.
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
    auto squares = [&](const std::vector<double>& matrix) { // of X matrix^T
        double all = 0;
        for (size_t n = 0; n < TOKENS; n++)
            for (size_t r = 0; r < ROWS; r++) {
                const float* x = &X[n * IN];
                const double* w = &matrix[r * IN];
                double sum = 0;
                for (size_t k = 0; k < IN; k++) sum += x[k] * w[k];
                all += sum * sum;
            }
        return all;
    };
    const double all = squares(std::vector<double>(W.begin(), W.end()));
    auto error = [&](const QuantizedMatrix& m) {
        std::vector<double> off;
        for (size_t r = 0; r < ROWS; r++)
            for (size_t k = 0; k < IN; k++) off.push_back(W[r * IN + k] - m.at(r, k));
        return squares(off) / all;
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
TEST_CASE("--activations int8 is refused where it means nothing, and changes logits elsewhere") {
    const std::string int4 = "tests/fixtures/quantized/awq", fp8 = "tests/fixtures/quantized/fp8";
    const auto refused = [](Strings arguments, const char* word) {
        check_refusal(run_qwen3(arguments + Strings{"--activations", "int8", "--ids", "1"}), "qwen3", word);
    };
    refused({TINY, "-d", "cpu"}, "INT4");
    refused({TINY, "-d", "cpu", "--dtype", "fp8"}, "INT4");
    refused({fp8, "-d", "cpu"}, "INT4");
    refused({int4, "-d", "cpu", "--dtype", "bf16"}, "INT4");
    refused({TINY, "-d", "plain", "--dtype", "int8"}, "plain");
    refused({TINY, "-d", "cuda", "--dtype", "int8"}, "for a CPU");
    const auto logits = [](Strings more) {
        const Result r = run_qwen3(Strings{TINY, "-d", "cpu", "--dtype", "int8", "--ids", "5 6 7", "--logits-hash"} + more);
        CHECK(r.status == 0);
        return r.out;
    };
    CHECK(logits({}) != logits({"--activations", "int8"}));
    for (int set = ISA_PLAIN; set < best_instruction_set(); set++) // (attention has bits of its own)
        CHECK(logits({"--cpu", instruction_set_name(set)}) != logits({"--cpu", instruction_set_name(set), "--activations", "int8"}));
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
            for (int set = ISA_BF16; set <= best_instruction_set(); set++) { // packed: the bits of bf16
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
    const size_t half = notes.find('\n', notes.size() / 2) + 1;
    write_file(s / "seen.txt", notes.substr(0, half)), write_file(s / "new.txt", notes.substr(half, notes.rfind('\n', half + 2000) - half));
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
