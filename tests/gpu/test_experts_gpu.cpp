// Experts on a GPU: route and expert_mlp beside their definitions, whole models beside the CPU.
#include "tests/golden.h"
#include "tests/gpu/gpu.h"
#include "tests/process.h"
#include "model/write.h"

namespace {
// Routed in the GPU's memory.
struct DeviceRoutes {
    Device<float> p, share;
    Device<int> expert, first, pair;
    DeviceRoutes(int N, int E, int k) : p((size_t)N * E), share((size_t)N * k), expert((size_t)N * k), first((size_t)E + 1), pair((size_t)N * k) {}
    Routed<bf16> view() { return {p, expert, share, first, pair}; }
};
// ... and in the CPU's: the pairs by expert of a given choice.
struct HostRoutes {
    std::vector<int> expert, first, pair;
    std::vector<float> share;
    HostRoutes(int N, int E, int k, const std::vector<int>& chosen) : expert(chosen), first((size_t)E + 1), pair((size_t)N * k, -1) {
        int at = 0;
        for (int e = 0; e <= E; e++) {
            first[(size_t)e] = at;
            for (int i = 0; i < N * k; i++)
                if (expert[(size_t)i] == e) pair[(size_t)at++] = i;
        }
    }
    Routed<bf16> view() { return {nullptr, expert.data(), share.data(), first.data(), pair.data()}; }
};

TEST_CASE("route: scores, choice, shares and pairs are the definition's") {
    Random random{3};
    const struct { int E, k, C, N; } shapes[] = {{8, 2, 64, 1}, {128, 8, 256, 1}, {128, 8, 256, 16}, {128, 8, 256, 40}, {64, 1, 128, 300}, {1024, 32, 64, 5}, {40, 3, 64, 33}, {8, 8, 64, 3}};
    for (auto& shape : shapes)
        for (bool normed : {false, true}) {
            const int E = shape.E, k = shape.k, C = shape.C, N = shape.N;
            const std::string text = format("E %d k %d N %d normed %d", E, k, N, normed);
            INFO(text);
            Scratchpad pad;
            const Matrix W(random, {E}, C);
            const auto x = random.fill<bf16>((size_t)N * C);
            const Device<bf16> dx(x);
            std::vector<int> seq((size_t)N, 0);
            if (N > 1) seq.back() = -1;
            const Device<int> dseq(seq);
            DeviceRoutes r(N, E, k);
            Batch b = {N, 1, nullptr, nullptr, dseq, nullptr, nullptr, 0};
            route_gpu(pad.ctx, r.view(), dx, W.device, b, k, normed);
            const auto p = r.p.get(), share = r.share.get();
            const auto expert = r.expert.get(), first = r.first.get(), pair = r.pair.get();
            std::vector<float> scores((size_t)N * E);
            linear_add_cpu(cpu(), scores.data(), scores.data(), x.data(), W.host, N);
            for (int n = 0; n < N; n++) {
                double sum = 0, all = 0;
                const float *s = &scores[(size_t)n * E], *q = &p[(size_t)n * E];
                const float top = *std::max_element(s, s + E);
                for (int e = 0; e < E; e++) sum += std::exp((double)s[e] - top);
                size_t off = 0;
                for (int e = 0; e < E; e++) off += !(std::fabs(q[e] - std::exp((double)s[e] - top) / sum) <= 1e-5 + 1e-3 * q[e]);
                CHECK(off == 0);
                std::vector<int> want; // of the GPU's own p
                for (int e = 0; e < E; e++) {
                    int ahead = 0;
                    for (int f = 0; f < E; f++) ahead += q[f] > q[e] || (q[f] == q[e] && f < e);
                    if (ahead < k) want.push_back(e), all += q[e];
                }
                REQUIRE((int)want.size() == k);
                for (int j = 0; j < k; j++) {
                    CHECK(expert[(size_t)n * k + j] == (seq[(size_t)n] < 0 ? -1 : want[(size_t)j]));
                    CHECK(std::fabs(share[(size_t)n * k + j] - q[want[(size_t)j]] / (normed ? all : 1)) <= 2e-6);
                }
            }
            const HostRoutes host(N, E, k, expert);
            CHECK(first == host.first);
            CHECK(std::equal(pair.begin(), pair.begin() + first[(size_t)E], host.pair.begin()));
        }
}

// E experts, one behind the other on both sides.
struct TwoExperts {
    std::vector<bf16> w;
    Device<bf16> copy;
    std::vector<Expert<bf16>> host, device;
    TwoExperts(Random& random, int E, int C, int M) : w(random.fill<bf16>((size_t)E * 3 * C * M, 0.3)), copy(w) {
        for (int e = 0; e < E; e++)
            for (auto [to, from] : {std::pair(&host, (const bf16*)w.data()), {&device, (const bf16*)copy.data}}) {
                Expert<bf16> one;
                const bf16* at = from + (size_t)e * 3 * C * M;
                one.gate_up.w[0] = at, one.gate_up.w[1] = at + (size_t)M * C, one.gate_up.rows[0] = one.gate_up.rows[1] = M, one.gate_up.in = C;
                one.down.w[0] = at + (size_t)2 * M * C, one.down.rows[0] = C, one.down.in = M;
                to->push_back(one);
            }
    }
};

TEST_CASE("expert_mlp: few and many tokens, experts with none and with all, in place, the same bits twice; alone with `invariant`") {
    Random random{5};
    const struct { int E, k, C, M, N; bool same; } shapes[] = {
        {8, 2, 256, 64, 1, false}, {128, 8, 128, 64, 1, false}, {128, 8, 128, 64, 3, false}, {128, 8, 64, 32, 8, true}, {16, 4, 256, 96, 9, false}, {16, 4, 256, 96, 16, true},
        {16, 4, 192, 72, 17, false}, {64, 8, 64, 32, 100, false}, {8, 2, 136, 40, 70, true}, {8, 1, 64, 32, 700, false}, {8, 8, 64, 64, 300, false}, {8, 2, 1024, 8, 9000, false}};
    for (auto& shape : shapes)
        for (bool invariant : {false, true}) {
            const int E = shape.E, k = shape.k, C = shape.C, M = shape.M, N = shape.N;
            const std::string text = format("E %d k %d C %d M %d N %d same %d invariant %d", E, k, C, M, N, shape.same, invariant);
            INFO(text);
            Scratchpad pad;
            pad.ctx.invariant = invariant;
            const TwoExperts W(random, E, C, M);
            const auto x = random.fill<bf16>((size_t)N * C);
            const auto residual = random.fill<float>((size_t)N * C);
            std::vector<int> chosen;
            for (int n = 0; n < N; n++) {
                std::set<int> some;
                while ((int)some.size() < k) some.insert(shape.same ? (int)some.size() : random.below(E));
                for (int e : some) chosen.push_back(N > 2 && n == N - 1 ? -1 : e); // the last row is spare
            }
            HostRoutes host(N, E, k, chosen);
            for (int i = 0; i < N * k; i++) host.share.push_back((float)random.uniform());
            DeviceRoutes to(N, E, k);
            to.expert.replace(host.expert), to.share.replace(host.share), to.first.replace(host.first), to.pair.replace(host.pair);
            std::vector<bf16> gate_up((size_t)N * k * 2 * M), hidden((size_t)N * k * M), rows((size_t)N * C);
            std::vector<float> want((size_t)N * C), size((size_t)N * C);
            expert_mlp_cpu(cpu(), want.data(), gate_up.data(), hidden.data(), rows.data(), residual.data(), x.data(), W.host, host.view(), N, k);
            // Roundings by at most 2^-8 of a number: both sides' of hidden, the CPU's of up and of the gate g, which
            // changes silu(g) by 1 + (1 - sigmoid(g)) |g| times as much.
            for (int i = 0; i < host.first[(size_t)E]; i++) {
                const int pair = host.pair[(size_t)i];
                const Linear<bf16>& down = W.host[(size_t)host.expert[(size_t)pair]].down;
                for (int f = 0; f < M; f++) {
                    const float g = to_acc(gate_up[(size_t)i * 2 * M + f]), slope = 1 + std::fabs(g) / (1 + std::exp(g));
                    const float by = host.share[(size_t)pair] * (3 + slope) / 256 * std::fabs(to_acc(hidden[(size_t)i * M + f]));
                    for (int r = 0; r < C; r++) size[(size_t)(pair / k * C + r)] += by * std::fabs(down.at(r, f));
                }
            }
            const Device<bf16> dx(x);
            Device<bf16> dhidden((size_t)N * k * M);
            Device<float> y(expert_scratch(N, C, k)), out((size_t)N * C), again(residual);
            const Device<float> dresidual(residual);
            expert_mlp_gpu(pad.ctx, out, nullptr, dhidden, (bf16*)y.data, dresidual, dx, W.device, to.view(), N, k);
            const auto got = out.get();
            CHECK(wrong(got, as_double(want), [&](size_t i) { return size[i] + 1e-5; }) == 0);
            expert_mlp_gpu(pad.ctx, again, nullptr, dhidden, (bf16*)y.data, again, dx, W.device, to.view(), N, k);
            CHECK(same_bits(again.get(), got));
            if (!invariant) continue;
            for (int n : {0, N / 2}) {
                if (host.expert[(size_t)n * k] < 0) continue;
                HostRoutes one(1, E, k, {host.expert.begin() + n * k, host.expert.begin() + (n + 1) * k});
                DeviceRoutes alone(1, E, k);
                alone.expert.replace(one.expert), alone.first.replace(one.first), alone.pair.replace(one.pair);
                alone.share.replace({host.share.begin() + n * k, host.share.begin() + (n + 1) * k});
                Device<float> row(std::vector<float>(residual.begin() + n * C, residual.begin() + (n + 1) * C));
                expert_mlp_gpu(pad.ctx, row, nullptr, dhidden, (bf16*)y.data, row, dx + (size_t)n * C, W.device, alone.view(), 1, k);
                CHECK(memcmp(row.get().data(), &got[(size_t)n * C], (size_t)C * sizeof(float)) == 0);
            }
        }
}

// A random model, made by qwen3 --synthesize.
std::string synthesized(const Scratch& s, int layers = 3) {
    write_file(s / "c.json", format(R"({"model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": %d, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 192, "moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": true, "mlp_only_layers": [1],
        "vocab_size": 1024, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"})", layers));
    const char* qwen3 = getenv("QWEN3");
    const Result r = Process(qwen3 ? qwen3 : "./qwen3", {"--synthesize", s / "c.json", s / "m.bin"}).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return s / "m.bin";
}
template <class T> std::vector<float> logits_of(const ModelFile& file, const Weights<T>& w, const std::vector<int>& ids, const Context& ctx, bool one_by_one = false) {
    std::vector<float> out;
    Session<T> session(file.config, w, 1024, ctx);
    const auto keep = [&](const float* row) { out.insert(out.end(), row, row + file.config.V); };
    if (!one_by_one) session.feed(ids, nullptr, keep);
    for (size_t i = 0; i < ids.size() && one_by_one; i++) session.feed({ids[i]}, nullptr, keep);
    return out;
}

// The model on the GPU, in its own packed format if `packed`: how near, the same bits, and graphs.
void check_model(const ModelFile& file, bool packed) {
    const Weights<bf16> host(file);
    const Weights<float> exact(file);
    Weights<bf16> device(file, Format::PLAIN, packed);
    device.upload(gpu(), file);
    Random random{8};
    std::vector<int> ids;
    for (int i = 0; i < 300; i++) ids.push_back(random.below(1000));
    const int V = file.config.V;
    const auto truth = logits_of(file, exact, ids, cpu());
    const double limit = 2 * mean_kl(truth, logits_of(file, host, ids, cpu()), V);
    Context invariant = gpu();
    invariant.invariant = true;
    for (bool one_by_one : {false, true}) {
        const double kl = mean_kl(truth, logits_of(file, device, ids, gpu(), one_by_one), V), own = mean_kl(truth, logits_of(file, device, ids, invariant, one_by_one), V);
        INFO("one by one " << one_by_one << ": mean KL " << kl << ", invariant " << own << ", twice the CPU's " << limit);
        CHECK(kl <= limit);
        CHECK(own <= limit);
    }
    CHECK(same_bits(logits_of(file, device, ids, gpu()), logits_of(file, device, ids, gpu())));
    CHECK(same_bits(logits_of(file, device, ids, invariant), logits_of(file, device, ids, invariant, true)));
    // Graphs: the drawn ids are those of steps, to the end of the context.
    Generation a;
    a.sampling.seed = 3, a.sampling.temperature = 1, a.sampling.top_k = 50, a.max_tokens = 200;
    const std::vector<int> prompt(ids.begin(), ids.begin() + 20);
    Session<bf16> session(file.config, device, 300, gpu()), steps(file.config, device, 300, gpu());
    session.feed(prompt), steps.feed(prompt);
    generate(session, nullptr, a, [](std::string_view) {});
    std::vector<int> want;
    while (want.size() < a.max_tokens && !steps.full()) {
        const int id = sample(steps.logits, V, a.sampling, steps.ids.size());
        if (std::find(file.config.end_tokens.begin(), file.config.end_tokens.end(), id) != file.config.end_tokens.end()) break;
        want.push_back(id);
        if (!steps.full()) steps.feed({id});
    }
    CHECK(a.ids == want);
}

TEST_CASE("experts: a whole model is as near to fp32 as the CPU's bf16; prompts, steps and `invariant`; drawn by graphs") {
    const Scratch s;
    check_model(ModelFile(synthesized(s)), false);
}

#ifndef QWEN3_PORTABLE
TEST_CASE("experts in INT4, INT8 and FP8: the same, beside the same numbers in bf16") {
    const Scratch s;
    const std::string model = synthesized(s);
    const char* qwen3 = getenv("QWEN3");
    for (std::string how : {"int4", "int4 64", "int8", "fp8"}) {
        INFO(how);
        Strings asked = {model, "--quantize", how.substr(0, 4), s / "packed.bin", "--overwrite"};
        if (how == "fp8") asked[2] = how;
        if (how[3] == '4') asked = asked + Strings{"--group", how == "int4" ? "32" : "64"};
        const Result r = Process(qwen3 ? qwen3 : "./qwen3", asked).wait();
        INFO(r.err);
        REQUIRE(r.status == 0);
        check_model(ModelFile(s / "packed.bin"), true);
    }
}
#endif

TEST_CASE("experts: what the GPU cannot do is one line") {
    const Scratch s;
    const ModelFile file(synthesized(s));
    Config c = file.config;
    check_gpu("m", c, true);
    c.E = 12;
    CHECK_THROWS_AS(check_gpu("m", c, true), Error);
    c.E = 32, c.M = 60;
    CHECK_THROWS_AS(check_gpu("m", c, true), Error);
    Weights<bf16> mixed(file);
    mixed.layers[0].experts[3].down.format = Format::FP8;
    CHECK_THROWS_AS(mixed.upload(gpu(), file), Error);
}
} // namespace
