// Experts on a GPU: route, expert_mlp and experts_backward beside their definitions, whole models and their training
// beside the CPU.
#include "tests/golden.h"
#include "tests/gpu/gpu.h"
#include "tests/process.h"
#include "tests/trainer.h"
#include "model/chat_template.h"
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

// Adapters of gate, up and down of all experts, in the order in which train_lora keeps them: every A, then every B.
struct ExpertAdapters {
    int rank, E, C, M;
    std::vector<bf16> numbers, host_h;
    Device<bf16> copy, h;
    std::vector<float> gradient;
    Device<float> device_gradient;
    size_t of_A() const { return (size_t)rank * (2 * C + M); }
    size_t of_B() const { return (size_t)rank * (2 * 2 * M + C); }
    // Where an expert's A and B of gate_up or of down begin.
    size_t A(int e, bool down) const { return e * of_A() + (down ? (size_t)2 * rank * C : 0); }
    size_t B(int e, bool down) const { return E * of_A() + e * of_B() + (down ? (size_t)2 * M * 2 * rank : 0); }
    ExpertAdapters(Random& random, TwoExperts& W, int rank, int N, int k)
        : rank(rank), E((int)W.host.size()), C(W.host[0].gate_up.in), M(W.host[0].down.in), numbers(random.fill<bf16>(E * (of_A() + of_B()), 0.3)), host_h((size_t)N * 2 * rank),
          copy(numbers.size()), h((size_t)N * k * 2 * rank), gradient(numbers.size()), device_gradient(gradient) {
        for (int e = 0; e < E; e++) // gate's rows of B have zeros in up's columns, and up's in gate's
            for (int r = 0; r < 2 * M; r++)
                for (int i = 0; i < rank; i++) numbers[B(e, false) + (size_t)r * 2 * rank + (r < M ? rank : 0) + i] = to_bf16(0);
        copy.replace(numbers);
        for (auto [to, from, its_h] : {std::tuple(&W.host, (bf16*)numbers.data(), (bf16*)host_h.data()), {&W.device, (bf16*)copy, (bf16*)h}})
            for (int e = 0; e < E; e++)
                for (bool down : {false, true}) {
                    Adapter<bf16>& a = (down ? (*to)[(size_t)e].down : (*to)[(size_t)e].gate_up).adapter;
                    a.rank = a.true_rank = rank, a.modules = down ? 1 : 2, a.block[1] = 1, a.s = 2;
                    a.A = from + A(e, down), a.B = from + B(e, down), a.h = its_h;
                }
    }
};

TEST_CASE("experts_backward: experts with no and with all tokens, spare rows, shares normed and not, adapters; the same bits twice") {
    Random random{9};
    const struct { int E, k, C, M, N; bool same, normed; int rank; } shapes[] = {
        {8, 2, 256, 64, 1, false, true, 0}, {128, 8, 128, 64, 3, false, true, 0}, {128, 8, 64, 32, 8, true, false, 0}, {16, 4, 192, 72, 17, false, true, 0}, {64, 8, 64, 32, 100, false, true, 0},
        {8, 2, 136, 40, 70, true, true, 0}, {8, 1, 64, 32, 700, false, false, 0}, {8, 8, 64, 64, 300, false, true, 0}, {16, 2, 320, 136, 500, false, true, 0}, {8, 2, 3200, 8, 4500, false, true, 0},
        {8, 2, 64, 32, 1, false, true, 8}, {8, 2, 136, 40, 70, true, true, 8}, {16, 4, 192, 72, 17, false, true, 24}, {16, 2, 320, 136, 500, false, true, 40}, {8, 2, 3200, 8, 4500, false, true, 8}};
    for (auto& shape : shapes) {
        const int E = shape.E, k = shape.k, C = shape.C, M = shape.M, N = shape.N, rank = shape.rank;
        const size_t pairs = (size_t)N * k;
        const std::string text = format("E %d k %d C %d M %d N %d same %d normed %d rank %d", E, k, C, M, N, shape.same, shape.normed, rank);
        INFO(text);
        Scratchpad pad;
        TwoExperts W(random, E, C, M);
        ExpertAdapters adapters(random, W, std::max(rank, 8), N, k);
        for (auto* list : {&W.host, &W.device})
            for (Expert<bf16>& one : *list)
                if (!rank) one.gate_up.adapter = one.down.adapter = {};
        const Matrix router(random, {E}, C);
        Layer<bf16> host_layer, layer;
        host_layer.experts = W.host, layer.experts = W.device, host_layer.router = router.host, layer.router = router.device;
        // The choice, as after route: the last row is spare.
        std::vector<int> chosen;
        std::vector<float> p;
        for (int n = 0; n < N; n++) {
            std::set<int> some;
            while ((int)some.size() < k) some.insert(shape.same ? (int)some.size() : random.below(E));
            for (int e : some) chosen.push_back(N > 2 && n == N - 1 ? -1 : e);
            double all = 0;
            std::vector<double> row;
            for (int e = 0; e < E; e++) row.push_back(random.uniform() + 0.1), all += row.back();
            for (double x : row) p.push_back((float)(x / all));
        }
        HostRoutes host(N, E, k, chosen);
        for (int n = 0; n < N; n++) {
            float sum = 0;
            for (int j = 0; j < k; j++) host.share.push_back(p[(size_t)n * E + std::max(0, chosen[(size_t)(n * k + j)])]), sum += host.share.back();
            for (int j = 0; j < k && shape.normed; j++) host.share[(size_t)(n * k + j)] /= sum;
        }
        DeviceRoutes to(N, E, k);
        to.p.replace(p), to.expert.replace(host.expert), to.share.replace(host.share), to.first.replace(host.first), to.pair.replace(host.pair);
        // The definition, on the CPU; SwiGLU's inputs are rows of its forward pass.
        const auto x = random.fill<bf16>((size_t)N * C), dy = random.fill<bf16>((size_t)N * C);
        const auto slope = random.fill<float>((size_t)E);
        std::vector<bf16> gate_up(pairs * 2 * M), hidden(pairs * M), rows((size_t)N * C), dgate_up(pairs * 2 * M), dhidden(pairs * M), drows((size_t)N * C), norm2 = x;
        std::vector<float> out((size_t)N * C);
        expert_mlp_cpu(cpu(), out.data(), gate_up.data(), hidden.data(), rows.data(), out.data(), x.data(), W.host, host.view(), N, k);
        Activations<bf16>::PerLayer s = {};
        s.routed = host.view(), s.routed.p = p.data(), s.gate_up = gate_up.data(), s.hidden = hidden.data(), s.rows = rows.data(), s.norm2 = norm2.data();
        std::vector<bf16> normed((size_t)N * C), scores((size_t)N * E), y = dy;
        std::vector<float> sum((size_t)N * C), share(pairs), slopes = slope;
        Flow<bf16> d = {};
        d.y = y.data(), d.normed = normed.data(), d.gate_up = dgate_up.data(), d.hidden = dhidden.data(), d.rows = drows.data(), d.sum = sum.data(), d.share = share.data(), d.scores = scores.data(), d.slope = slopes.data();
        std::vector<bf16> dh((size_t)N * 2 * adapters.rank);
        d.h = dh.data();
        Gradients<bf16>::OfLayer gradients;
        gradients.experts.resize((size_t)E);
        for (int e = 0; e < E; e++)
            for (bool down : {false, true}) {
                auto& to = down ? gradients.experts[(size_t)e].down : gradients.experts[(size_t)e].gate_up;
                to.A = &adapters.gradient[adapters.A(e, down)], to.B = &adapters.gradient[adapters.B(e, down)];
            }
        adapters.gradient[3] = 5, adapters.gradient.back() = 7; // (they are added to)
        const std::vector<float> before = adapters.gradient;
        experts_backward<bf16>(cpu(), host_layer, s, d, gradients, N, k, shape.normed);
        // On the GPU, twice. hidden and rows are scratch there.
        const Device<bf16> device_gate_up(gate_up), device_y(dy);
        const Device<float> device_slope(slope);
        std::vector<bf16> first_normed;
        std::vector<float> first_share, first_gradient;
        const Device<bf16> device_x(x);
        { // forward, with gate_up
            Device<bf16> kept(pairs * 2 * M), its_hidden(pairs * M);
            Device<float> scratch(expert_scratch(N, C, k)), its_out(std::vector<float>((size_t)N * C));
            expert_mlp_gpu(pad.ctx, its_out, kept, its_hidden, (bf16*)scratch.data, its_out, device_x, W.device, to.view(), N, k);
            const auto got = its_out.get();
            const auto got_kept = kept.get();
            double different = 0, size = 0, kept_different = 0, kept_size = 0;
            for (size_t i = 0; i < got.size(); i++) different += std::pow((double)got[i] - out[i], 2), size += std::pow((double)out[i], 2);
            for (size_t i = 0; i < (size_t)host.first[(size_t)E] * 2 * M; i++)
                kept_different += std::pow((double)to_acc(got_kept[i]) - to_acc(gate_up[i]), 2), kept_size += std::pow((double)to_acc(gate_up[i]), 2);
            INFO("forward " << std::sqrt(different / size) << " gate_up " << std::sqrt(kept_different / kept_size));
            CHECK(std::sqrt(different / size) < 0.004);
            CHECK(std::sqrt(kept_different / kept_size) < 0.002);
        }
        for (bool again : {false, true}) {
            Device<bf16> device_hidden(pairs * M), device_dgate_up(pairs * 2 * M), device_normed((size_t)N * C), device_scores((size_t)N * E);
            Device<float> scratch(expert_scratch(N, C, k)), device_sum((size_t)N * C), device_share(pairs);
            Device<bf16> device_dh(pairs * 2 * adapters.rank);
            adapters.device_gradient.replace(before);
            float* const dW = adapters.device_gradient;
            const ExpertsBackward in = {device_x, device_gate_up, device_hidden, (bf16*)scratch.data, dW + adapters.A(0, false), dW + adapters.B(0, false), dW + adapters.A(0, true), dW + adapters.B(0, true)};
            Flow<bf16> g = {};
            g.h = device_dh;
            g.y = device_y, g.normed = device_normed, g.gate_up = device_dgate_up, g.sum = device_sum, g.share = device_share, g.scores = device_scores, g.slope = device_slope;
            experts_backward_gpu(pad.ctx, g, in, layer, to.view(), N, k, shape.normed);
            const auto got_gradient = adapters.device_gradient.get();
            const auto got = device_normed.get(), got_scores = device_scores.get();
            const auto got_share = device_share.get(), got_sum = device_sum.get();
            if (again) {
                CHECK(same_bits(got, first_normed));
                CHECK(same_bits(got_share, first_share));
                CHECK(same_bits(got_gradient, first_gradient));
                continue;
            }
            first_normed = got, first_share = got_share, first_gradient = got_gradient;
            // Both round dhidden and hidden to bf16, in sums of another order: now and then to its neighbour, 1 / 128 of it
            // away. Such differences add up as their squares do.
            auto off = [&](size_t count, auto is, auto want, auto counts) {
                double different = 0, size = 0;
                for (size_t i = 0; i < count; i++)
                    if (counts(i)) different += std::pow((double)is(i) - want(i), 2), size += std::pow((double)want(i), 2);
                return std::sqrt(different / size);
            };
            auto all = [](size_t) { return true; };
            const double of_share = off(pairs, [&](size_t i) { return got_share[i]; }, [&](size_t i) { return share[i]; }, [&](size_t i) { return chosen[i] >= 0; });
            const double of_sum = off(got_sum.size(), [&](size_t i) { return got_sum[i]; }, [&](size_t i) { return sum[i]; }, all);
            const double of_scores = off(scores.size(), [&](size_t i) { return to_acc(got_scores[i]); }, [&](size_t i) { return to_acc(scores[i]); }, all);
            const double of_normed = off(normed.size(), [&](size_t i) { return to_acc(got[i]); }, [&](size_t i) { return to_acc(normed[i]); }, all);
            INFO("share " << of_share << " sum " << of_sum << " scores " << of_scores << " dx " << of_normed);
            if (!rank) CHECK(same_bits(got_gradient, before));
            for (int part = 0; part < 4 && rank; part++) { // A and B, of gate_up and of down
                const bool down = part % 2;
                const size_t n = (size_t)rank * (part < 2 ? down ? M : 2 * C : down ? C : 2 * 2 * M);
                auto number = [&](const std::vector<float>& all) {
                    return [&, n, part](size_t i) { return all[(part < 2 ? adapters.A((int)(i / n), part % 2) : adapters.B((int)(i / n), part % 2)) + i % n]; };
                };
                const double of_part = off(n * (size_t)E, number(got_gradient), number(adapters.gradient), all);
                INFO("gradient " << part << ": " << of_part);
                CHECK(of_part < 0.012);
            }
            CHECK(of_share < 0.003);
            CHECK(of_sum < 0.008);
            CHECK(of_scores < 0.006);
            CHECK(of_normed < 0.008);
            // Every number, by the magnitude of its own sum.
            double largest = 0;
            for (float v : sum) largest = std::max(largest, (double)std::fabs(v));
            CHECK(wrong(got_sum, as_double(sum), [&](size_t i) { return std::fabs(sum[i]) / 64 + largest / 64; }) == 0);
            for (int c = 0; c < C && N > 2; c++) CHECK(to_acc(got[(size_t)(N - 1) * C + c]) == 0); // the spare row
        }
        for (int n : pad.arrived.get()) CHECK(n == 0);
    }
}

// A random model, made by qwen3 --synthesize.
std::string synthesized(const Scratch& s, int layers = 3, const std::string& more = "") {
    write_file(s / "c.json", format(R"({"model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": %d, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 192, "moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": true, "mlp_only_layers": [1],
        "vocab_size": 1024, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"%s})", layers, more.c_str()));
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

#ifndef QWEN3_PORTABLE
// The id drawn after a prompt, and the logits of the prompt's last token and of the step that takes it.
struct RoadStep {
    int id = 0;
    std::vector<float> of_prompt, logits;
    RoadStep(const ModelFile& file, const Weights<bf16>& weights, Context::OneKernel road, const std::vector<int>& prompt) {
        Context ctx = gpu();
        ctx.one_kernel = road;
        Session<bf16> session(file.config, weights, 200, ctx);
        session.feed(prompt);
        of_prompt.assign(session.logits, session.logits + file.config.V);
        Sampling greedy;
        greedy.temperature = 0;
        session.begin_draws(greedy, file.config.V, prompt.size(), 2);
        REQUIRE((draws_of(session).road != nullptr) == (road != Context::OFF));
        id = session.draw();
        session.accept(id);
        session.draw();
        logits.resize((size_t)file.config.V);
        copy_out(session.ctx, logits.data(), session.row_logits, logits.size());
    }
};
TEST_CASE("one kernel a token of experts: as near to fp32 as the CPU's bf16 in every format; phase by phase the same bits") {
    const Scratch s;
    write_file(s / "c.json", R"({"model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 192, "moe_intermediate_size": 384, "num_experts": 136, "num_experts_per_tok": 6, "norm_topk_prob": true,
        "vocab_size": 1024, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"})");
    const char* qwen3 = getenv("QWEN3");
    const auto run = [&](const Strings& how) {
        const Result r = Process(qwen3 ? qwen3 : "./qwen3", how).wait();
        INFO(r.err);
        REQUIRE(r.status == 0);
    };
    run({"--synthesize", s / "c.json", s / "m.bin"});
    for (std::string how : {"bf16", "int4 128", "int4 64", "int4 32", "int8", "fp8"}) {
        INFO(how);
        const bool packed = how != "bf16";
        Strings asked = {s / "m.bin", "--quantize", how.substr(0, how.find(' ')), s / "packed.bin", "--overwrite"};
        if (how.size() > 4) asked = asked + Strings{"--group", how.substr(5)};
        if (packed) run(asked);
        const ModelFile file(packed ? s / "packed.bin" : s / "m.bin");
        const Weights<bf16> host(file);
        const Weights<float> exact(file);
        Weights<bf16> device(file, Format::PLAIN, packed);
        device.upload(gpu(), file);
        Random random{8};
        std::vector<float> truth, by_host, by_graph, by_road;
        const auto add = [](std::vector<float>& all, const std::vector<float>& rows, int V) { all.insert(all.end(), rows.end() - V, rows.end()); };
        for (int position : {1, 2, 15, 16, 17, 60, 100, 130}) {
            INFO("position " << position);
            std::vector<int> ids;
            for (int i = 0; i < position; i++) ids.push_back(random.below(1000));
            const RoadStep road(file, device, Context::TOGETHER, ids), graph(file, device, Context::OFF, ids);
            REQUIRE(road.id == graph.id);
            for (auto how : {Context::OFF, Context::TOGETHER, Context::BY_PHASE}) {
                INFO("again, " << (int)how);
                const RoadStep again(file, device, how, ids);
                CHECK(same_bits(road.of_prompt, again.of_prompt));
                CHECK(same_bits(how == Context::OFF ? graph.logits : road.logits, again.logits));
            }
            ids.push_back(road.id);
            add(truth, logits_of(file, exact, ids, cpu()), file.config.V), add(by_host, logits_of(file, host, ids, cpu()), file.config.V);
            add(by_road, road.logits, file.config.V), add(by_graph, graph.logits, file.config.V);
        }
        const double own = mean_kl(truth, by_road, file.config.V), graph = mean_kl(truth, by_graph, file.config.V);
        const double cpus = mean_kl(truth, by_host, file.config.V);
        MESSAGE(how << ": mean KL of one kernel " << own << ", of the graph " << graph << ", of the CPU's bf16 " << cpus);
        CHECK(own <= 2 * std::max(cpus, graph));
        CHECK(own > 0);
    }
}
#endif

// ---- Training: adapters of attention

// Rows of random ids below 900, and a trainer on them.
struct Rows {
    std::unique_ptr<Dataset> data;
    explicit Rows(const Scratch& s, int count = 12) {
        DatasetWriter writer(s / "rows.bin", 0, 0);
        Random random{12};
        for (int row = 0; row < count; row++) {
            std::vector<uint32_t> words;
            for (int i = 0, n = 6 + 7 * row; i < n; i++) words.push_back((uint32_t)random.below(900) | (i > n / 3 ? TRAIN : 0));
            writer.add(words);
        }
        writer.commit();
        data = std::make_unique<Dataset>(s / "rows.bin");
    }
};
TrainOptions attention_only(const Context& ctx) {
    TrainOptions o;
    o.batch = 6, o.accum = 2, o.steps = 8, o.dropout = 0, o.lr = 2e-3, o.warmup = 0, o.packed = true, o.lora.rank = 8, o.lora.alpha = 16;
    for (int m = Q_PROJ; m <= O_PROJ; m++) o.lora.targets[m] = true;
    o.rank_step = ctx.gpu ? GPU_RANK_STEP : 1;
    return o;
}
// Losses of eight steps, and the gradients of the first: with B = 0 those of B.
template <class T> struct Curve {
    std::vector<double> losses, norms;
    std::vector<acc<T>> gradient;
    Curve(const ModelFile& file, const Dataset& data, const Context& ctx, const std::function<void(TrainOptions&)>& change = {}) {
        TrainOptions o = attention_only(ctx);
        if (change) change(o);
        Trainer<T> t(o, ctx, file, data, nullptr);
        t.add_gradients(t.loader.rows_of(0), t.weight(data, t.loader.rows_of(0)));
        gradient = t.params.host(t.params.gradient);
        while (losses.size() < 8 && t.train_step()) losses.push_back(t.last_loss), norms.push_back(t.last_norm);
    }
};
template <class A, class B> double distance(const std::vector<A>& a, const std::vector<B>& b) { // |a - b| / |b|
    REQUIRE(a.size() == b.size());
    double off = 0, size = 0;
    for (size_t i = 0; i < a.size(); i++) off += std::pow((double)a[i] - (double)b[i], 2), size += std::pow((double)b[i], 2);
    return std::sqrt(off / size);
}
// The GPU's gradient is as near to fp32's as the CPU's in bf16 is, within a factor of two: each chooses other experts for
// some tokens, whose scores are nearly equal. Later steps are near by themselves: on a CPU those of Book I and of each
// instruction set, with and without the load-balancing loss, are 2e-5 to 5e-5 (losses) and 6e-4 to 3e-3 (norms) away.
void check_training(const std::string& model, const std::function<void(TrainOptions&)>& change = {}) {
    const Scratch s;
    const Rows rows(s);
    const ModelFile file(model);
    const Curve<float> truth(file, *rows.data, cpu(), change);
    const Curve<bf16> host(file, *rows.data, cpu(), change), device(file, *rows.data, gpu(), change);
    REQUIRE(device.losses.size() == 8);
    const double limit = 2 * distance(host.gradient, truth.gradient), is = distance(device.gradient, truth.gradient);
    MESSAGE("gradient: from fp32 " << is << ", twice the CPU's " << limit << "; losses: from fp32 " << distance(device.losses, truth.losses) << ", the CPU's " << distance(host.losses, truth.losses)
            << "; norms: from fp32 " << distance(device.norms, truth.norms) << ", the CPU's " << distance(host.norms, truth.norms));
    CHECK(limit < 0.5);
    CHECK(is <= limit);
    CHECK(distance(device.losses, truth.losses) < 1.5e-4);
    CHECK(distance(device.norms, truth.norms) < 8e-3);
    CHECK(truth.losses.back() < truth.losses[0] - 0.02); // it learns
    const Curve<bf16> again(file, *rows.data, gpu(), change);
    CHECK(same_bits(again.gradient, device.gradient));
    CHECK(again.losses == device.losses);
}

TEST_CASE("training a mixture of experts: gradients and losses near fp32's, the same bits twice and with --recompute; dropout; the load-balancing loss; adapters of experts") {
    const Scratch s, balanced;
    const std::string model = synthesized(s);
    check_training(model);
    check_training(synthesized(balanced, 3, R"(, "output_router_logits": true, "router_aux_loss_coef": 0.5)"));
    const auto all_targets = [](TrainOptions& o) { std::fill(o.lora.targets, o.lora.targets + MODULES, true); };
    check_training(model, all_targets);
    const Rows rows(s);
    const ModelFile file(model);
    const Curve<bf16> all(file, *rows.data, gpu(), all_targets), all_recomputed(file, *rows.data, gpu(), [&](TrainOptions& o) { all_targets(o), o.recompute = true; });
    CHECK(same_bits(all.gradient, all_recomputed.gradient));
    CHECK(all.losses == all_recomputed.losses);
    for (float dropout : {0.f, 0.2f}) {
        const Curve<bf16> kept(file, *rows.data, gpu(), [&](TrainOptions& o) { o.dropout = dropout; });
        const Curve<bf16> recomputed(file, *rows.data, gpu(), [&](TrainOptions& o) { o.dropout = dropout, o.recompute = true; });
        CHECK(same_bits(kept.gradient, recomputed.gradient));
        CHECK(kept.losses == recomputed.losses);
    }
    // Few tokens, for which forward streams the weights: one row of 5 tokens a batch.
    const Curve<bf16> host(file, *rows.data, cpu(), [](TrainOptions& o) { o.batch = o.accum = 1; }), few(file, *rows.data, gpu(), [](TrainOptions& o) { o.batch = o.accum = 1; });
    CHECK(distance(few.gradient, host.gradient) < 0.3);
}

#ifndef QWEN3_PORTABLE
TEST_CASE("training a mixture of experts in INT4, INT8 and FP8 (QLoRA)") {
    const Scratch s;
    const std::string model = synthesized(s);
    for (std::string how : {"int4", "int4 64", "int8", "fp8"}) {
        INFO(how);
        Strings asked = {model, "--quantize", how.substr(0, 4), s / "packed.bin"};
        if (how == "fp8") asked[2] = how;
        if (how[3] == '4') asked = asked + Strings{"--group", how == "int4" ? "32" : "64"};
        const Result r = Process(program("QWEN3", "./qwen3"), asked + Strings{"--overwrite"}).wait();
        INFO(r.err);
        REQUIRE(r.status == 0);
        check_training(s / "packed.bin");
        check_training(s / "packed.bin", [](TrainOptions& o) { std::fill(o.lora.targets, o.lora.targets + MODULES, true); });
    }
}
#endif

TEST_CASE("training a mixture of experts: a state resumes to the same bits; --grpo's and --dpo's steps; what is for the CPU only") {
    const Scratch s;
    const ModelFile file(synthesized(s));
    const Rows rows(s);
    const TrainOptions o = attention_only(gpu());
    auto numbers = [](Trainer<bf16>& t) { return t.params.host(t.params.p); };
    Trainer<bf16> whole(o, gpu(), file, *rows.data, nullptr);
    for (int step = 0; step < 3; step++) REQUIRE(whole.train_step());
    whole.write_state(s / "state.safetensors", 1, 2);
    for (int step = 0; step < 3; step++) REQUIRE(whole.train_step());
    Trainer<bf16> resumed(o, gpu(), file, *rows.data, nullptr);
    double best, elapsed;
    resumed.read_state(s / "state.safetensors", best, elapsed);
    CHECK(resumed.step == 3);
    for (int step = 0; step < 3; step++) REQUIRE(resumed.train_step());
    CHECK(same_bits(numbers(whole), numbers(resumed)));
    CHECK(whole.last_loss == resumed.last_loss);
    // The same answers on both devices: the gradient of a step of --grpo.
    TrainOptions with[] = {attention_only(cpu()), attention_only(gpu())};
    for (TrainOptions& o : with) o.grpo = true, o.tokenizer = "tests/fixtures/tiny/tokenizer.bin", o.batch = 3, o.accum = 2, o.rl.group = 5, o.rl.max_tokens = 24, o.rl.rewards = {"length:4", "regex:the"};
    DatasetWriter writer(s / "prompts.bin", Tokenizer("tests/fixtures/tiny/tokenizer.bin").hash(), template_hash());
    for (uint32_t row = 0; row < 6; row++) writer.add({row + 7, row + 90, 5 | TRAIN});
    writer.commit();
    const Dataset prompts(s / "prompts.bin");
    Trainer<bf16> host(with[0], cpu(), file, prompts, nullptr), device(with[1], gpu(), file, prompts, nullptr);
    host.take_groups(host.loader.rows_of(0)), device.take_groups(device.loader.rows_of(0));
    CHECK(host.fault == "");
    CHECK(device.fault == "");
    REQUIRE(device.groups.rows.size() == 30);
    device.groups = host.groups, device.groups.old.clear(), host.groups.old.clear();
    host.add_gradients({}, 1), device.add_gradients({}, 1);
    const auto a = device.params.host(device.params.gradient), b = host.params.host(host.params.gradient);
    INFO(distance(a, b));
    CHECK(distance(a, b) < 0.2);
    // The second step of --dpo: the first one's gradient has a reference of the same numbers.
    DatasetWriter pairs(s / "pairs.bin", 0, 0);
    Random random{4};
    for (int row = 0; row < 8; row++) {
        std::vector<uint32_t> chosen, rejected;
        for (int i = 0; i < 20; i++) chosen.push_back((uint32_t)random.below(900) | (i > 8 ? TRAIN : 0));
        for (int i = 0; i < 17; i++) rejected.push_back(i > 8 ? (uint32_t)random.below(900) | TRAIN : chosen[(size_t)i]);
        pairs.add_pair(chosen, rejected);
    }
    pairs.commit();
    const Dataset preferences(s / "pairs.bin");
    std::vector<float> gradients[2];
    double losses[2];
    for (int device = 0; device < 2; device++) {
        TrainOptions o = attention_only(device ? gpu() : cpu());
        o.preference = &PREFERENCE_LOSSES[0], o.batch = 4;
        Trainer<bf16> t(o, device ? gpu() : cpu(), file, preferences, nullptr);
        if (o.preference->has_reference) t.make_reference();
        REQUIRE(t.train_step());
        REQUIRE(t.train_step());
        losses[device] = t.last_loss, gradients[device] = t.params.host(t.params.gradient);
    }
    INFO(losses[0] << " " << losses[1] << ", gradients " << distance(gradients[1], gradients[0]));
    CHECK(losses[1] == doctest::Approx(losses[0]).epsilon(0.01));
    CHECK(distance(gradients[1], gradients[0]) < 0.2);
    // Refusals
    auto refused = [&](const std::function<void(TrainOptions&)>& change, const char* text) {
        TrainOptions o = attention_only(gpu());
        change(o);
        CHECK_THROWS_WITH_AS(Trainer<bf16>(o, gpu(), file, *rows.data, nullptr), doctest::Contains(text), Error);
    };
    refused([](TrainOptions& o) { o.full = true; }, "a mixture of experts is trained on the CPU only");
    refused([](TrainOptions& o) { o.lora.targets[DOWN_PROJ] = true, o.dropout = 0.1f; }, "a GPU trains adapters of experts without dropout");
}

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
