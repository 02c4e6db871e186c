// Mixtures of experts: golden logits of transformers, the router, an expert's rows, files in both layouts.
#include "tests/golden.h"
#include "model/step_bytes.h"
#include "model/quantize.h"
#include "tests/packed.h"
#include "tests/process.h"
#include <numeric>
#include <omp.h>

namespace {
const char* const FLOATS[] = {"moe/odd_f32", "moe/top1_f32", "moe/dense_between_f32", "moe/step_f32"};

template <class T> std::vector<acc<T>> logits_of(const ModelFile& file, const std::vector<std::vector<int>>& prompts, bool plain = false) {
    const Weights<T> weights(file);
    std::vector<acc<T>> out;
    Context ctx;
    ctx.plain = plain;
    for (auto& prompt : prompts) {
        Session<T> session(file.config, weights, 64, ctx);
        session.feed(prompt, nullptr, [&](const acc<T>* row) { out.insert(out.end(), row, row + file.config.V); });
    }
    return out;
}

TEST_CASE("experts: every logit within 1e-4 of Hugging Face's in float and in double, as defined and by cpu/") {
    for (const char* folder : FLOATS) {
        INFO(std::string(folder));
        const Golden g(folder);
        auto check = [&](const auto& ours) {
            REQUIRE(ours.size() == g.logits.size());
            double worst = 0;
            for (size_t i = 0; i < ours.size(); i++) {
                const double d = std::fabs((double)ours[i] - g.logits[i]);
                worst = d <= worst ? worst : d; // a NaN becomes the worst
            }
            INFO("largest difference " << worst);
            CHECK(worst <= 1e-4);
        };
        on_every_instruction_set([&] { check(logits_of<float>(g.file, g.prompts)); });
        check(logits_of<float>(g.file, g.prompts, true));
        check(logits_of<double>(g.file, g.prompts));
    }
}

TEST_CASE("experts: GGUF's tensors of all experts of a layer, in blocks") {
    const Golden g("moe/gguf", "/model.gguf");
    CHECK((g.file.config.E == 5 && g.file.config.k == 2 && g.file.config.M == 32 && g.file.config.normed_shares));
    const auto ours = logits_of<float>(g.file, g.prompts);
    REQUIRE(ours.size() == g.logits.size());
    double worst = 0;
    for (size_t i = 0; i < ours.size(); i++) worst = std::max(worst, std::fabs((double)ours[i] - g.logits[i]));
    CHECK(worst <= 1e-4);
    // In the blocks' own formats, of which gate and up have two.
    const Weights<bf16> packed(g.file, Format::PLAIN, true);
    CHECK(packed.layers[1].experts[4].gate_up.format == Format::BLOCKS);
    CHECK(packed.layers[1].router.format == Format::PLAIN);
}

TEST_CASE("experts in bf16: no further from the fp32 truth than transformers' own bf16") {
    const Golden g("moe/bf16");
    const int V = g.file.config.V;
    on_every_instruction_set([&] { CHECK(mean_kl(g.logits, logits_of<bf16>(g.file, g.prompts), V) <= g.bf16_kl); });
    CHECK(mean_kl(g.logits, logits_of<bf16>(g.file, g.prompts, true), V) <= g.bf16_kl);
}

TEST_CASE("experts in INT4, packed: no further from transformers' logits of the same matrices than its own bf16; or the bits of bf16") {
    const Golden g("moe/int4");
    const Weights<bf16> w(g.file, Format::PLAIN, true);
    for (const Layer<bf16>& layer : w.layers)
        for (const Expert<bf16>& e : layer.experts) CHECK((e.gate_up.format == Format::INT4 && e.down.format == Format::INT4));
    CHECK(w.layers[0].router.format == Format::PLAIN);
    const auto logits = [&](bool plain) { return logits_by(w, g, plain); };
    const auto kl = [&](bool plain) { return mean_kl(g.logits, logits(plain), g.file.config.V); };
    CHECK(kl(true) <= g.bf16_kl);
    on_every_instruction_set([&] { // (where weights are rounded a token of these goes to another expert)
        if (rounds_packed<bf16>()) CHECK(same_bits(logits(false), logits_of<bf16>(g.file, g.prompts)));
        else CHECK(kl(false) <= g.bf16_kl);
    });
}

// Routed with its memory.
template <class T> struct Routes {
    std::vector<acc<T>> p, share;
    std::vector<int> expert, first, pair;
    Routes(int N, int E, int k)
        : p(poisoned<acc<T>>((size_t)N * E)), share(poisoned<acc<T>>((size_t)N * k)), expert((size_t)N * k, -7),
          first((size_t)E + 1, -7), pair((size_t)N * k, -7) {}
    Routed<T> view() { return {p.data(), expert.data(), share.data(), first.data(), pair.data()}; }
};
struct Rows { // a batch of which only seq counts
    std::vector<int> seq;
    Batch view() const { return {(int)seq.size(), 1, nullptr, nullptr, seq.data(), nullptr, nullptr, 0}; }
};

TEST_CASE_TEMPLATE("route: the k likeliest experts, in order of number; their pairs in order of expert", T, float, bf16) {
    EACH_WAY
    Random random{4};
    const struct { int E, k, C, N; } shapes[] = {{7, 3, 24, 5}, {1, 1, 8, 3}, {128, 8, 40, 37}, {5, 5, 16, 2}, {64, 1, 16, 9}};
    for (auto& shape : shapes)
        for (bool normed : {false, true}) {
            const int E = shape.E, k = shape.k, C = shape.C, N = shape.N;
            CAPTURE(E);
            CAPTURE(normed);
            const auto x = random.fill<T>((size_t)N * C), w = random.fill<T>((size_t)E * C);
            Linear<T> W;
            W.w[0] = w.data(), W.rows[0] = E, W.in = C;
            Rows rows{std::vector<int>((size_t)N, 0)};
            rows.seq.back() = -1; // a spare row
            Routes<T> r(N, E, k);
            CALL(route, r.view(), x.data(), W, rows.view(), k, normed);
            std::vector<int> all;
            for (int n = 0; n < N; n++) {
                std::vector<double> p((size_t)E);
                double sum = 0, shares = 0, likeliest = 0;
                for (int e = 0; e < E; e++) {
                    double y = 0;
                    for (int i = 0; i < C; i++) y += (double)to_acc(w[(size_t)e * C + i]) * to_acc(x[(size_t)n * C + i]);
                    sum += p[(size_t)e] = std::exp(y);
                }
                const int* expert = &r.expert[(size_t)n * k];
                if (n == N - 1) {
                    for (int j = 0; j < k; j++) CHECK(expert[j] == -1);
                    continue;
                }
                std::vector<double> sorted = p;
                std::sort(sorted.rbegin(), sorted.rend());
                likeliest = std::accumulate(sorted.begin(), sorted.begin() + k, 0.);
                for (int j = 0; j < k; j++) {
                    REQUIRE((expert[j] >= 0 && expert[j] < E));
                    if (j) CHECK(expert[j] > expert[j - 1]);
                    CHECK(p[(size_t)expert[j]] >= sorted[(size_t)k - 1] * (1 - 1e-5)); // (two may be as good as equal)
                    const double share = p[(size_t)expert[j]] / (normed ? likeliest : sum);
                    CHECK(std::fabs(r.share[(size_t)n * k + j] - share) <= 2e-6);
                    shares += r.share[(size_t)n * k + j];
                    CHECK(std::fabs(r.p[(size_t)n * E + expert[j]] - p[(size_t)expert[j]] / sum) <= 2e-6);
                    all.push_back(n * k + j);
                }
                if (normed) CHECK(std::fabs(shares - 1) <= 1e-6);
            }
            std::stable_sort(all.begin(), all.end(), [&](int a, int b) { return r.expert[(size_t)a] < r.expert[(size_t)b]; });
            REQUIRE(r.first[0] == 0);
            REQUIRE(r.first[(size_t)E] == (int)all.size());
            CHECK(std::vector<int>(r.pair.begin(), r.pair.begin() + (int)all.size()) == all);
            for (int e = 0; e < E; e++)
                for (int i = r.first[(size_t)e]; i < r.first[(size_t)e + 1]; i++) CHECK(r.expert[(size_t)r.pair[(size_t)i]] == e);
        }
}

TEST_CASE("route: of equal experts the first; numbers that are none choose k different ones, too") {
    EACH_WAY
    const int E = 6, k = 3;
    std::vector<float> w(E, 0.f), x = {1.f, NAN};
    w[4] = 1;
    Linear<float> W;
    W.w[0] = w.data(), W.rows[0] = E, W.in = 1;
    const Rows rows{{0, 0}};
    Routes<float> r(2, E, k);
    CALL(route, r.view(), x.data(), W, rows.view(), k, true);
    CHECK(std::vector<int>(r.expert.begin(), r.expert.begin() + 3) == std::vector<int>{0, 1, 4});
    CHECK(std::vector<int>(r.expert.begin() + 3, r.expert.end()) == std::vector<int>{0, 1, 2});
    CHECK(r.first[(size_t)E] == 6);
}

// E experts, plain or packed, and their definition in double.
template <class T> struct TestExperts {
    std::vector<std::vector<T>> numbers;
    std::vector<std::unique_ptr<PackedLinear<T>>> packed;
    std::vector<Expert<T>> experts;
    TestExperts(Random& random, const PackedKind* kind, int E, int C, int M) {
        for (int e = 0; e < E; e++) {
            Expert<T> one;
            auto fill = [&](Linear<T>& W, std::vector<int> blocks, int in) {
                if (kind) {
                    packed.push_back(std::make_unique<PackedLinear<T>>(random, kind->format, kind->group, kind->zeros, blocks, in));
                    W = *packed.back();
                    return;
                }
                for (size_t b = 0; b < blocks.size(); b++) {
                    numbers.push_back(random.fill<T>((size_t)blocks[b] * in, 0.3));
                    W.w[b] = numbers.back().data(), W.rows[b] = blocks[b];
                }
                W.in = in;
            };
            fill(one.gate_up, {M, M}, C);
            fill(one.down, {C}, M);
            experts.push_back(one);
        }
    }
};

// W as it is multiplied: packed weights are rounded where the instruction set in use does so.
template <class T> struct Multiplied : WideLinear {
    explicit Multiplied(const Linear<T>& W, bool magnitudes = false) : WideLinear(W, magnitudes) {
        if (W.format != Format::PLAIN && rounds_packed<T>()) for (double& v : all) v = to_acc(to_bf16((float)v));
    }
};

TEST_CASE_TEMPLATE("expert_mlp: sums of the chosen experts, for every format of weights", T, float, bf16) {
    EACH_WAY
    Random random{6};
    const int E = 6, k = 2, C = 64, M = 32, N = 9;
    std::vector<const PackedKind*> kinds = {nullptr};
    for (auto& kind : PACKED_KINDS) kinds.push_back(&kind);
    for (const PackedKind* kind : kinds) {
        const TestExperts<T> W(random, kind, E, C, M);
        const auto x = random.fill<T>((size_t)N * C, kind ? 0.01 : 1);
        const auto residual = random.fill<acc<T>>((size_t)N * C);
        Routes<T> r(N, E, k);
        for (int n = 0; n < N; n++) { // expert 5 has no token, expert 0 all but the last two
            const int a = n < N - 2 ? 0 : 1 + n % 2, b = 1 + n % 4 > a ? 1 + n % 4 : 3;
            r.expert[(size_t)n * k] = a, r.expert[(size_t)n * k + 1] = b;
            for (int j = 0; j < k; j++) r.share[(size_t)n * k + j] = (acc<T>)random.uniform();
        }
        int at = 0;
        for (int e = 0; e <= E; e++) {
            r.first[(size_t)e] = at;
            for (int i = 0; i < N * k; i++)
                if (r.expert[(size_t)i] == e) r.pair[(size_t)at++] = i;
        }
        on_every_instruction_set([&] {
            auto out = poisoned<acc<T>>((size_t)N * C);
            auto gate_up = poisoned<T>((size_t)N * k * 2 * M), hidden = poisoned<T>((size_t)N * k * M), rows = poisoned<T>((size_t)N * C);
            CALL(expert_mlp, out.data(), gate_up.data(), hidden.data(), rows.data(), residual.data(), x.data(), W.experts, r.view(), N, k);
            size_t wrong_numbers = 0;
            for (int n = 0; n < N; n++) {
                std::vector<double> want(residual.begin() + n * C, residual.begin() + (n + 1) * C), size(want.size());
                const std::vector<double> row = as_double(std::vector<T>(x.begin() + n * C, x.begin() + (n + 1) * C));
                for (int j = 0; j < k; j++) {
                    const Expert<T>& e = W.experts[(size_t)r.expert[(size_t)n * k + j]];
                    const Multiplied<T> up(e.gate_up), down(e.down), sizes(e.down, true);
                    const auto both = up(row, 1);
                    std::vector<double> h((size_t)M), magnitude((size_t)M);
                    for (int f = 0; f < M; f++) { // (gate and up are stored as T in between)
                        const double g = to_acc(to_stored<T>((acc<T>)both[(size_t)f])), u = to_acc(to_stored<T>((acc<T>)both[(size_t)(M + f)]));
                        h[(size_t)f] = g / (1 + std::exp(-g)) * u, magnitude[(size_t)f] = std::fabs(h[(size_t)f]);
                    }
                    const auto y = down(h, 1), s = sizes(magnitude, 1);
                    for (int i = 0; i < C; i++)
                        want[(size_t)i] += r.share[(size_t)n * k + j] * y[(size_t)i], size[(size_t)i] += s[(size_t)i];
                }
                const double near = std::is_same_v<T, bf16> ? 2. / 128 : 2e-5; // h is rounded to T, gate and up may go the other way
                for (int i = 0; i < C; i++) wrong_numbers += !(std::fabs(out[(size_t)(n * C + i)] - want[(size_t)i]) <= near * size[(size_t)i] + 1e-5);
            }
            CHECK(wrong_numbers == 0);
            // In place; and each row alone has the same bits.
            auto same = residual;
            CALL(expert_mlp, same.data(), gate_up.data(), hidden.data(), rows.data(), same.data(), x.data(), W.experts, r.view(), N, k);
            CHECK(same_bits(same, out));
            for (int n : {0, N - 1}) {
                Routes<T> one(1, E, k);
                for (int j = 0, i = 0; j < k; j++) {
                    one.expert[(size_t)j] = r.expert[(size_t)n * k + j], one.share[(size_t)j] = r.share[(size_t)n * k + j], one.pair[(size_t)j] = j;
                    for (; i <= one.expert[(size_t)j]; i++) one.first[(size_t)i] = j;
                    for (int rest = i; rest <= E; rest++) one.first[(size_t)rest] = j + 1;
                }
                std::vector<acc<T>> alone(residual.begin() + n * C, residual.begin() + (n + 1) * C);
                CALL(expert_mlp, alone.data(), gate_up.data(), hidden.data(), rows.data(), alone.data(), x.data() + n * C, W.experts, one.view(), 1, k);
                CHECK(memcmp(alone.data(), &out[(size_t)n * C], C * sizeof(acc<T>)) == 0);
            }
        });
    }
}

// ---- Files

Result run_qwen3(const Strings& arguments) {
    const char* path = getenv("QWEN3");
    REQUIRE_MESSAGE(path, "QWEN3 is not set: make test sets it");
    return Process(path, arguments).wait();
}
std::string golden_text(const std::string& file) { return read_file("tests/fixtures/moe/" + file); }
std::string hash_of(const Strings& arguments) {
    const Result r = run_qwen3(arguments + Strings{"-d", "cpu", "--ids", "5 6 7 200 12", "--logits-hash"});
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
}
const std::string MOE = "tests/fixtures/moe/";

TEST_CASE("experts: a bad config is one line that names the fault") {
    const Scratch s;
    const std::string good = golden_text("odd_f32/config.json");
    fs::copy(MOE + "odd_f32/model.safetensors", s / "model.safetensors");
    const struct { std::string key, value, word; } cases[] = {
        {"num_experts_per_tok", "8", "num_experts_per_tok = 8, and there are 7 experts"},
        {"num_experts_per_tok", "0", "num_experts_per_tok = 0 is outside"},
        {"num_experts_per_tok", "\"3\"", "num_experts_per_tok is not an integer"},
        {"num_experts", "0", "num_experts = 0 is outside"},
        {"num_experts", "8", "the config needs (8,40)"},
        {"num_experts", "6", "is none of the model"}, // expert 6 is there
        {"num_hidden_layers", "4000, \"num_experts\": 4000", "are too many"},
        {"num_experts_per_tok", "40, \"num_experts\": 50", "num_experts_per_tok = 40 is more than 32"},
        {"moe_intermediate_size", "25", "the config needs (25,40)"},
        {"moe_intermediate_size", "null", "moe_intermediate_size is not an integer"},
        {"norm_topk_prob", "1", "norm_topk_prob = 1"},
        {"decoder_sparse_step", "0", "decoder_sparse_step = 0 is outside"},
        {"decoder_sparse_step", "2", "is none of the model"},
        {"mlp_only_layers", "[2]", "mlp_only_layers = [2]"},
        {"mlp_only_layers", "[\"0\"]", "mlp_only_layers"},
        {"mlp_only_layers", "1", "mlp_only_layers = 1"},
        {"mlp_only_layers", "[0]", "is none of the model"},
        {"shared_expert_intermediate_size", "64", "shared_expert_intermediate_size = 64"},
        {"num_local_experts", "6", "num_experts and num_local_experts differ"},
    };
    for (auto& c : cases) { // (of two equal keys the last counts)
        write_file(s / "config.json", good.substr(0, good.rfind('}')) + ", \"" + c.key + "\": " + c.value + "}");
        check_refusal(run_qwen3({s.path.string(), "--ids", "1"}), "qwen3", c.word);
    }
    for (std::string key : {"num_experts\"", "num_experts_per_tok", "moe_intermediate_size"}) {
        const size_t at = good.find("\"" + key), end = good.find('\n', at);
        REQUIRE(at != std::string::npos);
        std::string without = good;
        without.erase(at, end - at);
        while (without[without.find_last_not_of(" \n}")] == ',') without.erase(without.find_last_not_of(" \n}"), 1);
        write_file(s / "config.json", without);
        check_refusal(run_qwen3({s.path.string(), "--ids", "1"}), "qwen3", "config has no " + key.substr(0, key.find('"')));
    }
}

TEST_CASE("experts: one tensor each and all of a layer in two are the same model; model.bin, conversions and INT8") {
    const Scratch s;
    for (std::string name : {"odd_f32", "step_f32", "bf16"}) {
        CAPTURE(name);
        const std::string folder = MOE + name, whole = hash_of({folder});
        REQUIRE(run_qwen3({folder, "--convert", s / (name + ".bin")}).status == 0);
        CHECK(hash_of({s / (name + ".bin")}) == whole);
        const Result r = Process("/usr/bin/python3", {"-I", "-S", "export.py", folder, s / "exported.bin", "--keep-dtype"}).wait();
        INFO(r.err);
        REQUIRE(r.status == 0);
        CHECK(hash_of({s / "exported.bin"}) == whole);
        REQUIRE(Process("/usr/bin/python3", {"-I", "-S", "export.py", "--to-hf", s / "exported.bin", s / "hf"}).wait().status == 0);
        CHECK(hash_of({s / "hf"}) == whole);
        fs::remove_all(s / "hf");
        REQUIRE(Process("/usr/bin/python3", {"-I", "-S", "export.py", folder, s / "int8.bin", "--int8"}).wait().status == 0);
        if (name == "bf16") CHECK(hash_of({s / "int8.bin"}) == hash_of({folder, "--dtype", "int8"}));
        CHECK(ModelFile(s / "int8.bin").tensors.at("model.layers.1.mlp.gate.weight").dtype == Dtype::BF16);
        CHECK(ModelFile(s / "int8.bin").tensors.at("model.layers.1.mlp.experts.2.down_proj.weight").dtype == Dtype::I8);
    }
}

// A random model of a small shape.
std::string synthesized(const Scratch& s) {
    write_file(s / "c.json", R"({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 9, "num_experts_per_tok": 4, "norm_topk_prob": true, "vocab_size": 1024,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"})");
    REQUIRE(run_qwen3({"--synthesize", s / "c.json", s / "m.bin"}).status == 0);
    return s / "m.bin";
}

TEST_CASE("experts: a file without one of them is refused by its name") {
    const Scratch s;
    std::string bytes = golden_text("odd_f32/model.safetensors");
    const std::string name = "model.layers.1.mlp.experts.6.down_proj.weight";
    const size_t at = bytes.find(name);
    REQUIRE(at != std::string::npos);
    bytes[at + name.size() - 1] = 'x'; // (no weight of a model)
    write_file(s / "model.safetensors", bytes), write_file(s / "config.json", golden_text("odd_f32/config.json"));
    check_refusal(run_qwen3({s.path.string(), "--ids", "1"}), "qwen3", "no tensor " + name);
}

TEST_CASE("experts: --quantize writes each, and keeps the router") {
    const Scratch s;
    const std::string model = synthesized(s);
    for (std::string how : {"int4", "int8", "fp8"}) {
        CAPTURE(how);
        const std::string out = s / how + ".bin";
        Strings asked = {model, "--quantize", how, out};
        if (how == "int4") asked = asked + Strings{"--group", "32"};
        const Result r = run_qwen3(asked);
        INFO(r.err);
        REQUIRE(r.status == 0);
        const ModelFile file(out), from(model);
        const Weights<bf16> w(file, Format::PLAIN, true), plain(from);
        CHECK(type_name(w) == how);
        CHECK(w.layers[1].router.format == Format::PLAIN);
        size_t off = 0;
        const Linear<bf16>&a = w.layers[1].experts[5].down, &b = plain.layers[1].experts[5].down;
        for (int i = 0; i < a.out(); i++)
            for (int k = 0; k < a.in; k++) off += std::fabs(a.at(i, k) - b.at(i, k)) > (how == "int4" ? 0.012 : how == "fp8" ? 0.004 : 0.0005);
        CHECK(off == 0);
        CHECK(step_bytes(w, 2) < step_bytes(w, 6));
        CHECK(hash_of({out, "--packed"}) != hash_of({model}));
    }
}

// A random model of one layer of 16 experts, of which a token has one. Scores of experts 5 and 9 are equal: 9 has no
// token.
std::string with_an_unreached_expert(const Scratch& s) {
    write_file(s / "one.json", R"({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 1, "norm_topk_prob": true, "vocab_size": 1024,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"})");
    REQUIRE(run_qwen3({"--synthesize", s / "one.json", s / "same.bin"}).status == 0);
    std::string bytes = read_file(s / "same.bin");
    const ModelFile file(s / "same.bin");
    const size_t row = 64 * 2, at = (size_t)(file.tensors.at("model.layers.0.mlp.gate.weight").data - (const uint8_t*)file.maps[0].data);
    bytes.replace(at + 9 * row, row, bytes, at + 5 * row, row);
    write_file(s / "one.bin", bytes);
    return s / "one.bin";
}

TEST_CASE("experts: --calibrate has a smaller error on each expert's own inputs; an expert with few is rounded") {
    const Scratch s;
    const ModelFile file(with_an_unreached_expert(s));
    const Config& c = file.config;
    const int WINDOWS = 12, N = 64, E = c.E;
    Quantization how;
    how.format = Format::INT4, how.group = 32, how.keep_embedding = true, how.window = N;
    auto write = [&](const std::string& path, RoundedExperts* report) {
        write_safetensors(path, file.metadata(quantized_config(file, how)), quantize_model<float>(file, how, cpu(), report));
        return read_file(path);
    };
    RoundedExperts none, report;
    write(s / "nearest.bin", &none);
    for (int i = 0; i < WINDOWS * N; i++) how.text.push_back((int)(philox(7, (uint64_t)i, 0).v[0] % 300));
    const std::string whole = write(s / "gptq.bin", &report);
    for (int threads : {1, 3}) {
        const int all = omp_get_max_threads();
        omp_set_num_threads(threads);
        const bool same = write(s / "again.bin", nullptr) == whole;
        omp_set_num_threads(all);
        CHECK(same);
    }
    // The inputs of each expert's products, in the order of the windows.
    const Weights<float> w(file);
    std::vector<std::vector<float>> x((size_t)E), hidden((size_t)E);
    for (int i = 0; i < WINDOWS; i++) {
        Arena arena;
        Activations<float> a; // of training: one layer's norm2 stays
        KVCache<float> cache;
        auto plan = [&] { a.plan_training(arena, c, N, false), cache.plan(arena, c, 4); };
        plan(), arena.allocate("a test"), plan();
        std::vector<float> rope((size_t)N * c.D);
        fill_rope(rope.data(), N, c.D, c.rope_theta);
        std::vector<int> at((size_t)N), zero((size_t)N);
        std::iota(at.begin(), at.end(), 0);
        forward(cpu(), c, w, Batch{N, 1, &how.text[(size_t)i * N], at.data(), zero.data(), at.data(), at.data(), 4}, a, cache, rope.data());
        const auto& layer = a.layer[0];
        for (int e = 0; e < E; e++)
            for (int p = layer.routed.first[e]; p < layer.routed.first[e + 1]; p++) {
                const float *row = layer.norm2 + (size_t)layer.routed.pair[p] * c.C, *h = layer.hidden + (size_t)p * c.M;
                x[(size_t)e].insert(x[(size_t)e].end(), row, row + c.C), hidden[(size_t)e].insert(hidden[(size_t)e].end(), h, h + c.M);
            }
    }
    const ModelFile nearest_file(s / "nearest.bin"), gptq_file(s / "gptq.bin");
    const Weights<float> nearest(nearest_file), gptq(gptq_file);
    auto error = [](const std::vector<float>& x, const Linear<float>& a, const Linear<float>& b) {
        double sum = 0;
        for (size_t n = 0; n < x.size(); n += (size_t)a.in)
            for (int r = 0; r < a.out(); r++) {
                double off = 0;
                for (int i = 0; i < a.in; i++) off += x[n + (size_t)i] * ((double)a.at(r, i) - b.at(r, i));
                sum += off * off;
            }
        return sum;
    };
    RoundedExperts counted;
    int better = 0, rounded = 0;
    double all_rounding = 0, all_gptq = 0;
    for (size_t e = 0; e < (size_t)E; e++) {
        CAPTURE(e);
        const size_t tokens = x[e].size() / (size_t)c.C;
        counted.all++, counted.some += tokens < (size_t)c.C, counted.unreached += tokens == 0;
        for (auto which : {&Expert<float>::gate_up, &Expert<float>::down}) {
            const Linear<float>&truth = w.layers[0].experts[e].*which, &a = nearest.layers[0].experts[e].*which, &b = gptq.layers[0].experts[e].*which;
            if (tokens < (size_t)truth.in) {
                int off = 0;
                for (int r = 0; r < a.out(); r++)
                    for (int i = 0; i < a.in; i++) off += a.at(r, i) != b.at(r, i);
                CHECK(off == 0);
                rounded++;
                continue;
            }
            const auto& inputs = truth.in == c.C ? x[e] : hidden[e];
            const double by_rounding = error(inputs, truth, a), by_gptq = error(inputs, truth, b);
            CHECK(by_gptq < by_rounding);
            all_rounding += by_rounding, all_gptq += by_gptq, better++;
        }
    }
    CHECK(x[9].empty());
    CHECK(all_gptq < 0.8 * all_rounding);
    INFO(better << " matrices by GPTQ, " << rounded << " rounded");
    CHECK((better >= 10 && rounded >= 6));
    CHECK((report.all == E && report.some == counted.some && report.unreached == counted.unreached));
    CHECK((none.all == 0 && none.some == 0));
}

TEST_CASE("experts: --calibrate by the command, with layers of both kinds, and how many experts are rounded") {
    const Scratch s;
    write_file(s / "c.json", R"({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true, "vocab_size": 1024,
        "decoder_sparse_step": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"})");
    REQUIRE(run_qwen3({"--synthesize", s / "c.json", s / "m.bin"}).status == 0);
    const std::string notes = read_file("data/course/notes/01-introduction.md");
    write_file(s / "short.txt", notes.substr(0, notes.find("。", 400) + 3)), write_file(s / "long.txt", notes);
    auto calibrated = [&](const std::string& out, const std::string& text, Strings more = {}) {
        return run_qwen3(Strings{s / "m.bin", "--quantize", "int4", s / out, "--group", "32", "--calibrate", s / text, "-z", "tests/fixtures/tiny/tokenizer.bin"} + more);
    };
    const Result few = calibrated("few.bin", "short.txt"), many = calibrated("many.bin", "long.txt"), one = calibrated("one.bin", "long.txt", {"-j", "1"});
    INFO(few.err << many.err << one.err);
    REQUIRE((few.status == 0 && many.status == 0 && one.status == 0));
    CHECK(few.err.find(" of 8 experts have fewer of the text's tokens than columns, ") != std::string::npos);
    CHECK(many.err.find("experts have fewer") == std::string::npos);
    CHECK(read_file(s / "one.bin") == read_file(s / "many.bin"));
    CHECK(hash_of({s / "many.bin", "--packed"}) != hash_of({s / "few.bin", "--packed"}));
}

TEST_CASE("experts: --synthesize makes a mixture; programs without one refuse it in a line") {
    const Scratch s;
    const ModelFile file(synthesized(s));
    CHECK(parameters(file.config) == 1024u * 64 + 64 + 2u * (64 * 128 * 2 + 64 * 64 * 2 + 2 * 64 + 2 * 64 + 9 * 64 + 9 * 3 * 64 * 32));
    CHECK(hash_of({s / "m.bin"}) == hash_of({s / "m.bin", "-j", "1"}));
    check_refusal(run_qwen3({"--synthesize", "3B", s / "x.bin"}), "qwen3", "30B-A3B");
}
} // namespace
