// step.h, the kernel that is a whole token, by emulation: it gives what Book I's `forward` gives, for many shapes, places,
// numbers of blocks and formats of weights; the same bits phase by phase and all at once, alone and in company.
#include <doctest/doctest.h>
#include "tests/emulate/step_emulation.h"

using Small = StepShape<2, 8, 1, true>; // two warps, stages of 256 k

struct RandomNumbers {
    uint64_t seed, counter = 0;
    double uniform() { return philox(seed, counter++, 99).v[0] / 4294967296.0; }
    int below(int n) { return (int)(uniform() * n); }
    std::vector<bf16> fill(size_t n, double scale = 1, double mean = 0) {
        std::vector<bf16> v(n);
        for (bf16& x : v) x = to_bf16((float)(mean + scale * (2 * uniform() - 1)));
        return v;
    }
};

#include "tests/packed.h"

// A matrix of random numbers: bf16, or packed.
struct Matrix {
    std::vector<bf16> numbers;
    std::unique_ptr<PackedLinear<bf16>> packed;
    Matrix() = default;
    Matrix(RandomNumbers& random, const PackedKind& kind, std::vector<int> rows, int in, double size) {
        if (kind.format == Format::PLAIN) {
            for (int r : rows) {
                const auto more = random.fill((size_t)r * in, size);
                numbers.insert(numbers.end(), more.begin(), more.end());
            }
            return;
        }
        packed = std::make_unique<PackedLinear<bf16>>(random, kind.format, kind.group, kind.zeros, rows, in);
        if (kind.format == Format::FP8) packed->group_rows = 8; // (the scales there are enough)
        const double most = kind.format == Format::INT8 ? 128 : kind.format == Format::INT4 ? 8 : 64;
        for (auto& h : packed->halves) {
            const float scale = (float)(size / most * (0.5 + random.uniform()));
            h = kind.format == Format::INT8 ? to_bf16(scale).bits : float_to_half(scale);
        }
        for (float& f : packed->floats) f = (float)(size / most * (0.5 + random.uniform()));
    }
    // As Book I reads it; `plain`: bf16 numbers as T.
    template <class T> Linear<T> as(std::initializer_list<int> rows, int in, const T* plain) const {
        Linear<T> to;
        to.in = in;
        size_t at = 0;
        int b = 0;
        for (int r : rows) {
            to.rows[b] = r;
            if (packed) to.q[b] = packed->q[b], to.scale[b] = packed->scale[b], to.zero[b] = packed->zero[b];
            else to.w[b] = plain + at;
            at += (size_t)r * in, b++;
        }
        if (packed) to.format = packed->format, to.group = packed->group, to.group_rows = packed->group_rows;
        return to;
    }
};

// A model of random numbers, which Book I reads as T.
struct RandomModel {
    Config c;
    struct Matrices {
        std::vector<bf16> norm1, norm2, q_norm, k_norm;
        Matrix qkv, o, gate_up, down;
        std::vector<bf16> router = {};
        std::vector<std::pair<Matrix, Matrix>> experts = {}; // gate_up, down
    };
    struct Experts { int E, k, M; bool normed; };
    std::vector<Matrices> layers;
    std::vector<bf16> norm;
    Matrix embed, head;
    std::vector<float> rope;
    static constexpr int POSITIONS = 1024;
    RandomModel(RandomNumbers& random, int C, int F, int H, int K, int V, int L, bool tied,
                PackedKind of_layers = {Format::PLAIN, 0, false}, PackedKind of_head = {Format::PLAIN, 0, false},
                const Experts& experts = {0, 0, 0, true}) {
        c = {C, L, H, K, STEP_HEAD, F, V, POSITIONS, 1e-6f, 1e6, tied, {}};
        c.E = experts.E, c.k = experts.k, c.M = experts.M, c.normed_shares = experts.normed;
        if (of_layers.format == Format::PLAIN) c.rope_scaling = {RopeScaling::YARN, 4, 256, 1.2, 32, 1, true};
        const int D = c.D;
        auto matrix = [&](std::vector<int> rows, int in) { return Matrix(random, of_layers, rows, in, 1.7 / std::sqrt(in)); };
        for (int l = 0; l < L; l++) {
            layers.push_back({random.fill(C, 0.5, 1), random.fill(C, 0.5, 1), random.fill(D, 0.5, 1.5), random.fill(D, 0.5, 1.5),
                              matrix({H * D, K * D, K * D}, C), matrix({C}, H * D), matrix({F, F}, C), matrix({C}, F)});
            if (c.E) layers[l].router = random.fill((size_t)c.E * C, 0.5 / std::sqrt(C));
            for (int e = 0; e < c.E; e++) {
                Matrix up = matrix({c.M, c.M}, C); // (before down, in any compiler)
                layers[l].experts.emplace_back(std::move(up), matrix({C}, c.M));
            }
        }
        embed = Matrix(random, of_head, {V}, C, 1), norm = random.fill(C, 0.5, 1);
        if (!tied) head = Matrix(random, of_head, {V}, C, 1.7 / std::sqrt(C));
        rope.resize((size_t)POSITIONS * D);
        fill_rope(rope.data(), POSITIONS, D, c.rope_theta, c.rope_scaling);
    }
    const Matrix& head_matrix() const { return c.tied ? embed : head; }
};

// Rows of a step: which sequence, at which position; and a cache that holds what is before, on scattered pages.
struct Place {
    std::vector<int> token, pos, seq, slot, pages;
    int max_pages = 0, page_count = 0;
    std::vector<bf16> keys, values; // of all layers
    size_t layer_size;
    Place(RandomNumbers& random, const RandomModel& m, std::vector<std::pair<int, int>> first_and_count) {
        for (auto [first, count] : first_and_count) max_pages = std::max(max_pages, (first + count - 1) / PAGE + 2);
        page_count = max_pages * (int)first_and_count.size() + 2;
        std::vector<int> order(page_count);
        std::iota(order.begin(), order.end(), 0);
        for (int i = page_count - 1; i > 0; i--) std::swap(order[i], order[random.below(i + 1)]);
        layer_size = kv_offset(page_count, 0, 0, m.c.K, m.c.D);
        keys.resize(m.c.L * layer_size), values.resize(m.c.L * layer_size);
        memset((void*)keys.data(), 0xff, keys.size() * 2), memset((void*)values.data(), 0xff, values.size() * 2); // NaN
        for (size_t s = 0; s < first_and_count.size(); s++) {
            pages.insert(pages.end(), &order[s * max_pages], &order[s * max_pages] + max_pages);
            auto [first, count] = first_and_count[s];
            auto slot_of = [&](int p) { return pages[s * max_pages + p / PAGE] * PAGE + p % PAGE; };
            for (int p = first; p < first + count; p++)
                token.push_back(random.below(m.c.V)), pos.push_back(p), seq.push_back((int)s), slot.push_back(slot_of(p));
            for (int p = 0; p < first; p++)
                for (int l = 0; l < m.c.L; l++)
                    for (int h = 0; h < m.c.K; h++) {
                        const size_t at = l * layer_size + kv_offset(slot_of(p) / PAGE, h, p % PAGE, m.c.K, m.c.D);
                        const std::vector<bf16> k = random.fill(m.c.D, 1.5), v = random.fill(m.c.D);
                        std::copy(k.begin(), k.end(), &keys[at]), std::copy(v.begin(), v.end(), &values[at]);
                    }
        }
    }
    Batch batch() const {
        const int N = (int)token.size();
        return {N, (int)pages.size() / max_pages, token.data(), pos.data(), seq.data(), slot.data(), pages.data(), max_pages};
    }
};

template <class T> std::vector<T> as(const std::vector<bf16>& v) {
    std::vector<T> out;
    for (bf16 x : v) out.push_back(to_stored<T>((acc<T>)to_acc(x)));
    return out;
}
struct Result {
    std::vector<double> logits, keys, values, residual;
};
// Book I's `forward` and `head`, in T.
template <class T> Result by_definition(const RandomModel& m, const Place& place) {
    const Config& c = m.c;
    Context ctx;
    const Batch b = place.batch();
    std::vector<std::vector<T>> kept;
    kept.reserve((9 + 2 * c.E) * c.L + 8);
    auto keep = [&](const std::vector<bf16>& v) { return (const T*)(kept.push_back(as<T>(v)), kept.back().data()); };
    auto linear_of = [&](const Matrix& w, std::initializer_list<int> rows, int in) {
        return w.as<T>(rows, in, keep(w.numbers));
    };
    Arena arena;
    Activations<T> a;
    for (int pass = 0; pass < 2; pass++) {
        a.plan(arena, c, b.N);
        if (!pass) arena.allocate("a test");
    }
    std::vector<T> keys = as<T>(place.keys), values = as<T>(place.values), picked((size_t)b.N * c.C);
    std::vector<acc<T>> rope((size_t)c.max_positions * c.D), logits((size_t)b.N * c.V);
    for (size_t i = 0; i < rope.size(); i++) rope[i] = m.rope[i];
    std::vector<int> rows(b.N);
    std::iota(rows.begin(), rows.end(), 0);
    embed(a.layer[0].in, linear_of(m.embed, {c.V}, c.C), b, c.C);
    for (int l = 0; l < c.L; l++) {
        const auto& w = m.layers[l];
        Layer<T> layer = {keep(w.norm1), keep(w.norm2), keep(w.q_norm), keep(w.k_norm),
                                linear_of(w.qkv, {c.H * c.D, c.K * c.D, c.K * c.D}, c.C), linear_of(w.o, {c.C}, c.H * c.D),
                                linear_of(w.gate_up, {c.F, c.F}, c.C), linear_of(w.down, {c.C}, c.F), {}, {}};
        if (c.E) layer.router.w[0] = keep(w.router), layer.router.rows[0] = c.E, layer.router.in = c.C;
        for (auto& e : w.experts)
            layer.experts.push_back({linear_of(e.first, {c.M, c.M}, c.C), linear_of(e.second, {c.C}, c.M)});
        layer_forward(ctx, c, layer, b, a.layer[l], {&keys[l * place.layer_size], &values[l * place.layer_size]}, rope.data());
    }
    rmsnorm(a.normed, a.layer[0].out, keep(m.norm), b.N, c.C, c.eps);
    head(logits.data(), picked.data(), a.normed, rows.data(), linear_of(m.head_matrix(), {c.V}, c.C), b.N);
    Result r;
    for (auto x : logits) r.logits.push_back(x);
    for (auto x : keys) r.keys.push_back(to_acc(x));
    for (auto x : values) r.values.push_back(to_acc(x));
    for (size_t i = 0; i < (size_t)b.N * c.C; i++) r.residual.push_back(a.layer[0].out[i]);
    return r;
}

// The kernel, on the emulated GPU; Head: the shape for a head that is packed in another way.
template <class S, class Head = S> struct Emulated {
    static constexpr bool TWO = !std::is_same_v<S, Head>;
    const RandomModel& m;
    unsigned blocks;
    StepArgs p, of_head;
    std::vector<uint4> packed, packed_head, words; // (aligned as a GPU's memory)
    std::vector<bf16> gains, router;
    uint32_t steps = 0;
    int arrived = 0, fault = 0;
    std::vector<float> residual;
    std::vector<unsigned long long> best;
    std::vector<Draw> draw;

    Emulated(const RandomModel& m, int N, unsigned blocks)
        : m(m), blocks(blocks), p(plan_step<S>(m.c, N, (int)blocks, BLOCK_MEMORY)),
          of_head(plan_step<Head>(m.c, N, (int)blocks, BLOCK_MEMORY)) {
        const Config& c = m.c;
        REQUIRE(step_refuses(c, (int)blocks) == nullptr);
        REQUIRE(std::min(p.stages, of_head.stages) > 3);
        packed.resize((p.product[STEP_LOGITS].at + (TWO ? 0 : p.product[STEP_LOGITS].bytes(S::W::CHUNK))) / sizeof(uint4));
        packed_head.resize(TWO ? of_head.product[STEP_LOGITS].bytes(Head::W::CHUNK) / sizeof(uint4) : 0);
        for (int l = 0; l < c.L; l++) {
            const auto& w = m.layers[l];
            pack<S>(place(l, STEP_QKV), p, STEP_QKV, w.qkv), pack<S>(place(l, STEP_O), p, STEP_O, w.o);
            if (!c.E) pack<S>(place(l, STEP_GATE_UP), p, STEP_GATE_UP, w.gate_up), pack<S>(place(l, STEP_DOWN), p, STEP_DOWN, w.down);
            for (size_t e = 0; e < w.experts.size(); e++) {
                pack<S>(place(l, STEP_GATE_UP) + e * p.expert_bytes, p, STEP_GATE_UP, w.experts[e].first);
                pack<S>(place(l, STEP_DOWN) + e * p.expert_bytes, p, STEP_DOWN, w.experts[e].second);
            }
            router.insert(router.end(), w.router.begin(), w.router.end());
            for (auto* g : {&w.norm1, &w.norm2, &w.q_norm, &w.k_norm}) gains.insert(gains.end(), g->begin(), g->end());
        }
        if (TWO) pack<Head>((unsigned char*)packed_head.data(), of_head, STEP_LOGITS, m.head_matrix());
        else pack<S>(place(0, STEP_LOGITS), p, STEP_LOGITS, m.head_matrix());
        gains.insert(gains.end(), m.norm.begin(), m.norm.end());
        words.resize(step_words(p, nullptr, N));
        step_words(p, words.data(), N);
        residual.resize((size_t)N * c.C, NAN), best.resize((size_t)N * BEST_BLOCKS);
        draw.resize(N, Draw{Sampling{}, c.V});
        p.packed = (const unsigned char*)packed.data(), of_head.packed = (const unsigned char*)packed_head.data();
        p.gains = gains.data(), p.router = router.data(), p.rope = m.rope.data();
        p.embed = m.embed.packed ? nullptr : m.embed.numbers.data();
        p.residual = residual.data(), p.steps = &steps, p.arrived = &arrived, p.fault = &fault;
        p.draw = draw.data(), p.best = best.data(), p.short_keys = 96;
    }
    unsigned char* place(int layer, int phase) {
        return (unsigned char*)packed.data() + (phase == STEP_LOGITS ? 0 : layer * p.layer_bytes) + p.product[phase].at;
    }
    template <class Shape> void pack(unsigned char* to, const StepArgs& p, int phase, const Matrix& W) {
        using P = typename Shape::W;
        const StepProduct q = p.of_one(phase);
        Linear<bf16> from;
        std::unique_ptr<Uploaded> on;
        if (W.packed) on = std::make_unique<Uploaded>(*W.packed), from = on->W;
        else from.w[0] = W.numbers.data(), from.rows[0] = (int)(W.numbers.size() / q.in), from.in = q.in;
        REQUIRE(q.units * q.tiles * 8 == from.out());
        bool right = false;
        with_step_weights(from, [&](auto packed) {
            if constexpr (std::is_same_v<decltype(packed), P>) {
                const StepPacking<P> args = {to, step_source(from, packed), q, (size_t)from.out() / 2};
                launch(dim3((unsigned)(q.bytes(P::CHUNK) / 16 + 127) / 128), dim3(128), [&] { step_pack_kernel(args); });
                right = true;
            }
        });
        REQUIRE(right);
    }
    // One step. The place's cache gets the new keys and values.
    Result step(Place& place, bool together) {
        p.b = place.batch();
        p.keys = place.keys.data(), p.values = place.values.data(), p.layer_size = place.layer_size;
        std::vector<float> logits((size_t)p.b.N * m.c.V, NAN);
        p.logits = logits.data();
        const uint32_t before = steps;
        if (m.embed.packed)
            for (int n = 0; n < p.b.N; n++)
                for (int i = 0; i < m.c.C; i++) residual[(size_t)n * m.c.C + i] = m.embed.packed->at(p.b.token[n], i);
        const int all = p.phases(), layers = TWO ? all - 1 : all;
        if (together) CHECK(launch_together(blocks, S::THREADS, [&] { step_kernel<S>(p, 0, layers); }));
        for (int phase = 0; phase < layers && !together; phase++)
            CHECK(launch_together(blocks, S::THREADS, [&] { step_kernel<S>(p, phase, phase + 1); }));
        const StepArgs last = step_head(p, of_head);
        if (TWO) CHECK(launch_together(blocks, Head::THREADS, [&] { step_kernel<Head>(last, layers, all); }));
        CHECK(steps == before + 1);
        CHECK(arrived == 0);
        Result r;
        for (float x : logits) r.logits.push_back(x);
        for (bf16 x : place.keys) r.keys.push_back(to_acc(x));
        for (bf16 x : place.values) r.values.push_back(to_acc(x));
        for (float x : residual) r.residual.push_back(x);
        return r;
    }
};

static double rms_difference(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++)
        if (!std::isnan(b[i])) sum += (a[i] - b[i]) * (a[i] - b[i]); // (of the cache: what nobody wrote)
    return std::sqrt(sum / (double)a.size());
}
// Within twice the distance of Book I's own bf16 from the truth: ours rounds x g where Book I rounds r x g, and the relative
// error of a rounding depends on where between two powers of two a number lies, by a factor of two.
static void check_result(const RandomModel& m, const Place& place, const Result& got) {
    const Result truth = by_definition<double>(m, place), book = by_definition<bf16>(m, place);
    const std::pair<const char*, std::vector<double> Result::*> parts[] = {
        {"logits", &Result::logits}, {"residual", &Result::residual}, {"keys", &Result::keys}, {"values", &Result::values}};
    for (auto& p : parts) {
        const double ours = rms_difference(got.*p.second, truth.*p.second), theirs = rms_difference(book.*p.second, truth.*p.second);
        INFO(std::string(p.first) << ": rms error " << ours << ", Book I's " << theirs);
        CHECK(ours <= 2 * theirs);
        CHECK(ours > 0);
    }
}
static bool same(const Result& a, const Result& b) {
    auto equal = [](const std::vector<double>& x, const std::vector<double>& y) {
        return x.size() == y.size() && memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0;
    };
    return equal(a.logits, b.logits) && equal(a.residual, b.residual) && equal(a.keys, b.keys) && equal(a.values, b.values);
}

TEST_CASE("a token by one kernel is what `forward` computes: phase by phase, and all at once with the same bits") {
    struct Case { int C, F, H, K, V, L; bool tied; int pos; unsigned blocks; };
    // Inputs of no whole stage, of one and of several; groups of 1, 2 and 4; fewer tiles than blocks and more; positions
    // at the borders of pages and, with 96 keys, of splits: up to 4 are joined by O, 7 by JOIN.
    for (const Case& y : {Case{136, 72, 2, 1, 72, 2, true, 0, 3}, Case{128, 264, 2, 1, 200, 1, false, 1, 1},
                          Case{40, 24, 4, 1, 64, 1, false, 15, 7}, Case{264, 136, 2, 1, 88, 1, true, 16, 3},
                          Case{72, 520, 2, 1, 40, 1, false, 17, 7}, Case{136, 72, 4, 1, 72, 1, true, 95, 3},
                          Case{40, 72, 2, 1, 72, 2, true, 96, 7}, Case{40, 24, 2, 2, 24, 1, false, 300, 7},
                          Case{40, 24, 2, 1, 24, 1, true, 200, 1}, Case{40, 24, 4, 1, 24, 1, true, 215, 7}}) {
        RandomNumbers random{(uint64_t)y.C * 1000 + y.pos};
        INFO("C " << y.C << " F " << y.F << " H " << y.H << " K " << y.K << " V " << y.V << " L " << y.L << " position " << y.pos
                  << " blocks " << y.blocks);
        const RandomModel m(random, y.C, y.F, y.H, y.K, y.V, y.L, y.tied);
        const Place before(random, m, {{y.pos, 1}});
        Emulated<Small> gpu(m, 1, y.blocks);
        Place place = before;
        const Result phases = gpu.step(place, false);
        check_result(m, before, phases);
        // Nothing of a step before is taken for this one's, also where the count of steps begins anew.
        const Place other(random, m, {{y.pos, 1}});
        gpu.steps = ~0u, place = other;
        gpu.step(place, true);
        place = before, backwards = true;
        CHECK(same(gpu.step(place, true), phases));
        backwards = false;
    }
}

// A token at a position: near the definition phase by phase, the same bits all at once.
template <class S, class Head> static void check_token(RandomNumbers& random, const RandomModel& m, int pos, unsigned blocks) {
    const Place before(random, m, {{pos, 1}});
    Emulated<S, Head> gpu(m, 1, blocks);
    Place place = before;
    const Result phases = gpu.step(place, false);
    check_result(m, before, phases);
    place = before, backwards = true;
    CHECK(same(gpu.step(place, true), phases));
    backwards = false;
}
template <class Packed, bool BULK = true> using SmallOf = StepShape<2, 8, 1, BULK, Packed>;
template <class S, class Head> static void check_packed(const PackedKind& layers, const PackedKind& head, int C, int F, int V, bool tied, int pos,
                                                        unsigned blocks, int L = 2) {
    RandomNumbers random{(uint64_t)C * 100 + (uint64_t)layers.group};
    INFO("format " << (int)layers.format << " groups of " << layers.group << (layers.zeros ? " with zero points" : "") << ", C " << C << " F " << F);
    const RandomModel m(random, C, F, 2, 1, V, L, tied, layers, head);
    check_token<S, Head>(random, m, pos, blocks);
}
TEST_CASE("packed weights in the kernel are those of W.at: every format, heads and embeddings in the layers' format and in another") {
    const PackedKind plain = {Format::PLAIN, 0, false}, int8 = {Format::INT8, 32, false}, fp8 = {Format::FP8, 128, false};
    using Int8 = StepPacked<PackedInt8, 2>;
    using Fp8 = StepPacked<PackedFp8, 1>;
    // C and F: parts of a chunk, whole ones, several stages; rows in groups that end in a chunk's middle.
    check_packed<SmallOf<Int8>, SmallOf<Int8>>(int8, int8, 136, 264, 72, true, 0, 3);
    check_packed<SmallOf<Int8>, SmallOf<Int8>>(int8, int8, 40, 72, 200, false, 96, 7); // 4 splits
    check_packed<SmallOf<Fp8>, Small>(fp8, plain, 264, 136, 72, true, 16, 3);
    check_packed<SmallOf<Fp8>, SmallOf<Fp8>>(fp8, fp8, 72, 520, 40, false, 1, 3);
    for (bool zeros : {false, true}) {
        const PackedKind by32 = {Format::INT4, 32, zeros}, by64 = {Format::INT4, 64, zeros}, by128 = {Format::INT4, 128, zeros};
        check_packed<SmallOf<StepPacked<PackedInt4<1>, 4>>, SmallOf<Int8>>(by32, int8, 136, 552, 72, true, 110, 7);
        check_packed<SmallOf<StepPacked<PackedInt4<1>, 2>>, Small>(by64, plain, 264, 136, 72, false, 3, 5);
        check_packed<SmallOf<StepPacked<PackedInt4<1>, 1>>, SmallOf<Int8>>(by128, int8, 520, 72, 40, true, 3, 3);
        check_packed<SmallOf<StepPacked<PackedInt4<1>, 1>, false>, SmallOf<Int8, false>>(by128, int8, 72, 264, 40, false, 20, 3);
    }
}

template <class Packed, bool BULK = true> using LargeOf = StepShape<8, 32, 1, BULK, Packed>;
TEST_CASE("... and stage by stage, as larger models have it: rows of every number of chunks a warp, and of several stages") {
    const PackedKind int8 = {Format::INT8, 32, false}, fp8 = {Format::FP8, 128, false}, int4 = {Format::INT4, 128, true};
    using Int8 = StepPacked<PackedInt8, 2>;
    using Fp8 = StepPacked<PackedFp8, 1>;
    using Int4 = StepPacked<PackedInt4<1>, 1>;
    // In chunks: C 5, F 9; 11 and 38; 13 and 2; 17 and 33.
    check_packed<LargeOf<Int8>, LargeOf<Fp8>>(int8, fp8, 264, 544, 40, false, 0, 3, 1);
    check_packed<LargeOf<Fp8>, LargeOf<Int8>>(fp8, int8, 680, 2432, 40, true, 3, 2, 1);
    check_packed<LargeOf<Int4>, LargeOf<Int8>>(int4, int8, 1544, 136, 40, true, 17, 1, 1);
    check_packed<LargeOf<Int4, false>, LargeOf<Int8, false>>(int4, int8, 2056, 4104, 24, true, 1, 1, 1);
}

TEST_CASE("an adapter is packed with its matrix: W + s B A, with DoRA a number of the row times it, rounded once") {
    RandomNumbers random{77};
    for (const bool dora : {false, true}) {
        const int in = 72, rank = 8, width = 2 * rank; // of q and v
        Linear<bf16> W;
        W.rows[0] = 24, W.rows[1] = 8, W.rows[2] = 16, W.in = in;
        const std::vector<bf16> numbers = random.fill((size_t)W.out() * in);
        std::vector<bf16> A((size_t)width * in), B((size_t)W.out() * width, bf16{0}), merged;
        std::vector<float> scale;
        for (int r = 0; r < W.out(); r++) scale.push_back(dora ? (float)(1 + r % 3) : 1);
        auto eighth = [&] { return to_bf16((float)(random.below(7) - 3) / 8); }; // sums are exact
        for (bf16& a : A) a = eighth();
        for (int r = 0; r < W.out(); r++)
            for (int c = 0; c < rank && (r < 24 || r >= 32); c++) B[(size_t)r * width + (r < 24 ? 0 : rank) + c] = eighth();
        for (int r = 0; r < W.out(); r++)
            for (int k = 0; k < in; k++) {
                double y = to_acc(numbers[(size_t)r * in + k]);
                for (int c = 0; c < width; c++) y += (double)to_acc(B[(size_t)r * width + c]) * to_acc(A[(size_t)c * in + k]);
                merged.push_back(to_bf16((float)y * scale[(size_t)r]));
            }
        W.w[0] = numbers.data();
        Linear<bf16> whole = W, adapted = W;
        whole.w[0] = merged.data();
        adapted.adapter.rank = rank, adapted.adapter.modules = 2, adapted.adapter.A = A.data(), adapted.adapter.B = B.data();
        adapted.adapter.dora.on = dora, adapted.adapter.dora.c = scale.data();
        for (int tiles : {1, 2}) { // 2: of rows 24 apart
            const StepProduct q = {W.out() / 8 / tiles, tiles, in, (in + 31) / 32, false, 2, 0};
            auto packed = [&](const Linear<bf16>& from) {
                std::vector<uint4> to(q.bytes(StepPlain::CHUNK) / sizeof(uint4));
                const StepPacking<StepPlain> args = {(unsigned char*)to.data(), step_source(from, StepPlain()), q, 24};
                launch(dim3((unsigned)(to.size() + 127) / 128), dim3(128), [&] { step_pack_kernel(args); });
                return to;
            };
            const std::vector<uint4> want = packed(whole), got = packed(adapted), without = packed(W);
            CHECK(memcmp(want.data(), got.data(), want.size() * sizeof(uint4)) == 0);
            CHECK(memcmp(want.data(), without.data(), want.size() * sizeof(uint4)) != 0);
        }
    }
}

// Experts: more of them than blocks and fewer, all chosen and one, shares that are normed and not; sections of a stage of
// `down` that end within a copy, and with it.
template <class S, class Head> static void check_experts(const PackedKind& layers, const PackedKind& head, int C, const RandomModel::Experts& experts,
                                                         int pos, unsigned blocks) {
    RandomNumbers random{(uint64_t)C * 10 + (uint64_t)experts.E};
    INFO("format " << (int)layers.format << " groups of " << layers.group << ", C " << C << ", " << experts.E << " experts of " << experts.M
                   << ", " << experts.k << " of a token, on " << blocks << " blocks");
    const RandomModel m(random, C, 64, 2, 1, 72, 2, true, layers, head, experts);
    check_token<S, Head>(random, m, pos, blocks);
}
template <int WARPS, int STEPS, class Packed, bool BULK = true> using ExpertsOf = StepShape<WARPS, STEPS, 1, BULK, Packed, true>;
TEST_CASE("a mixture of experts by one kernel is what `forward` computes, in every format, and on cards before Hopper") {
    const PackedKind plain = {Format::PLAIN, 0, false}, int8 = {Format::INT8, 32, false}, fp8 = {Format::FP8, 128, false};
    using Int8 = StepPacked<PackedInt8, 2>;
    using Fp8 = StepPacked<PackedFp8, 1>;
    using Plain = ExpertsOf<2, 8, StepPlain>;
    check_experts<Plain, Plain>(plain, plain, 136, {5, 2, 128, true}, 0, 3);
    check_experts<Plain, Plain>(plain, plain, 72, {9, 1, 128, false}, 17, 7);
    check_experts<Plain, Plain>(plain, plain, 40, {2, 2, 256, false}, 96, 1);
    using Async = ExpertsOf<2, 8, StepPlain, false>;
    check_experts<Async, Async>(plain, plain, 72, {4, 3, 128, true}, 20, 2);
    check_experts<ExpertsOf<2, 8, Int8>, ExpertsOf<2, 8, Int8>>(int8, int8, 136, {5, 3, 384, true}, 3, 3);
    check_experts<ExpertsOf<8, 32, Int8>, LargeOf<Fp8>>(int8, fp8, 264, {4, 3, 384, true}, 1, 2);
    check_experts<ExpertsOf<8, 32, Fp8>, LargeOf<Int8>>(fp8, int8, 136, {6, 4, 768, false}, 3, 3);
    check_experts<ExpertsOf<2, 8, Fp8, false>, SmallOf<Fp8, false>>(fp8, fp8, 136, {3, 2, 128, true}, 3, 2);
    for (bool zeros : {false, true}) {
        const PackedKind by32 = {Format::INT4, 32, zeros}, by64 = {Format::INT4, 64, zeros}, by128 = {Format::INT4, 128, zeros};
        check_experts<ExpertsOf<2, 8, StepPacked<PackedInt4<1>, 4>>, SmallOf<Int8>>(by32, int8, 136, {5, 3, 384, true}, 3, 3);
        check_experts<ExpertsOf<2, 8, StepPacked<PackedInt4<1>, 2>, false>, Small>(by64, plain, 264, {4, 2, 128, true}, 3, 5);
        check_experts<ExpertsOf<8, 32, StepPacked<PackedInt4<1>, 1>>, LargeOf<Int8>>(by128, int8, 1032, {4, 2, 768, true}, 17, 2);
    }
}

// Eight rows of a chunk: within the rounding of a few float operations, whatever x's sizes are.
template <class W> static void check_chunk(const PackedKind& kind, RandomNumbers& random) {
    INFO("format " << (int)kind.format << " groups of " << kind.group << (kind.zeros ? " with zero points" : ""));
    constexpr int NUMBERS = W::NUMBERS;
    PackedLinear<bf16> linear(random, kind.format, kind.group, kind.zeros, {8}, NUMBERS);
    const Uploaded on(linear);
    alignas(16) static unsigned char chunk[W::CHUNK], x_of_chunk[2 * W::X_BYTES];
    for (int i = 0; i < W::CHUNK / 16; i++) {
        const uint4 v = W::piece(step_source(on.W, W()), 0, 0, i);
        memcpy(chunk + i * 16, &v, 16);
    }
    for (int range : {0, 8, 20, 60, 120}) { // powers of two
        std::vector<bf16> x(NUMBERS);
        for (int k = 0; k < NUMBERS; k++)
            x[k] = to_bf16((float)std::ldexp(2 * random.uniform() - 1, k % 7 ? -random.below(range + 1) : 3));
        for (int special : {0, 1, 2}) {
            if (special) x[random.below(NUMBERS)] = to_bf16(special == 1 ? INFINITY : NAN);
            static float y[8];
            launch(dim3(1), dim3(32), [&] {
                const int lane = threadIdx.x, i = lane % (NUMBERS / 4);
                uint2 four;
                memcpy(&four, &x[i * 4], 8);
                W::store_x(x_of_chunk + lane / (NUMBERS / 4) * W::X_BYTES, i, four, true);
                __syncwarp();
                typename W::Lane w;
                typename W::X of_x;
                W::load(w, chunk, 0, 0, lane), W::load_x(of_x, x_of_chunk, lane);
                float sum = 0;
                W::add(sum, w, of_x);
                sum = W::whole(sum);
                if (lane % 4 == 0) y[lane / 4] = sum;
            });
            for (int r = 0; r < 8; r++) {
                double want = 0, size = 0;
                for (int k = 0; k < NUMBERS; k++) {
                    const double s = kind.format == Format::INT8 ? to_acc(bf16{linear.halves[r * linear.groups() + k / kind.group]})
                                                                 : half_to_float(linear.halves[r * linear.groups() + k / kind.group]);
                    const double by = to_acc(x[k]);
                    want += linear.at(r, k) * by, size += std::fabs(s * by) * (kind.format == Format::INT8 ? 128 : 144); // (128 + q, and 128 + zero)
                }
                INFO("range " << range << " row " << r << ": " << y[r] << ", not " << want << " (" << size << ")");
                if (special) CHECK_FALSE(std::isfinite(y[r]));
                else CHECK(std::fabs(y[r] - want) <= size * 0x1p-20);
            }
        }
    }
}
TEST_CASE("INT4 as 128 + q, and INT8: as good as in float, whatever x is; what is not finite stays so") {
    RandomNumbers random{13};
    check_chunk<StepPacked<PackedInt8, 2>>({Format::INT8, 32, false}, random);
    for (bool zeros : {false, true}) {
        check_chunk<StepPacked<PackedInt4<1>, 4>>({Format::INT4, 32, zeros}, random);
        check_chunk<StepPacked<PackedInt4<1>, 2>>({Format::INT4, 64, zeros}, random);
        check_chunk<StepPacked<PackedInt4<1>, 1>>({Format::INT4, 128, zeros}, random);
    }
}

// The rows of a step together and, by a kernel for one token, each alone.
template <class Several, class One> static void check_together(const RandomModel& m, const Place& before, unsigned blocks, bool definition) {
    const int N = (int)before.token.size();
    Place place = before, alone = before;
    Emulated<Several> several(m, N, blocks);
    std::vector<int> drawn(N), pos = before.pos, slot(N);
    several.p.greedy = true;
    several.p.next = {drawn.data(), pos.data(), slot.data(), before.seq.data(), before.pages.data(), before.max_pages, nullptr, nullptr, 0, nullptr};
    const Result together = several.step(place, true);
    for (int n = 0; n < N; n++) {
        const auto row = together.logits.begin() + (long)n * m.c.V;
        CHECK(drawn[n] == std::max_element(row, row + m.c.V) - row);
        CHECK(pos[n] == before.pos[n] + 1);
    }
    if (definition) check_result(m, before, together);
    Emulated<One> one(m, 1, blocks);
    REQUIRE(several.packed.size() == one.packed.size()); // both take the same weights
    CHECK(memcmp(several.packed.data(), one.packed.data(), one.packed.size() * sizeof(uint4)) == 0);
    std::vector<double> logits, residual;
    for (size_t n = 0; n < (size_t)N; n++) {
        Place single = alone;
        single.token = {alone.token[n]}, single.pos = {alone.pos[n]}, single.seq = {alone.seq[n]}, single.slot = {alone.slot[n]};
        const Result r = one.step(single, true);
        logits.insert(logits.end(), r.logits.begin(), r.logits.end());
        residual.insert(residual.end(), r.residual.begin(), r.residual.end());
        alone.keys = single.keys, alone.values = single.values; // the next finds this one's
    }
    CHECK(together.logits == logits);
    CHECK(together.residual == residual);
    CHECK(memcmp(place.keys.data(), alone.keys.data(), place.keys.size() * 2) == 0);
    CHECK(memcmp(place.values.data(), alone.values.data(), place.values.size() * 2) == 0);
    if (N > 2) return;
    Place phases = before; // ... and phase by phase
    CHECK(same(several.step(phases, false), together));
}
using Rows = std::vector<std::pair<int, int>>; // of each sequence the first position, and how many

TEST_CASE("two tokens in a step: each has the bits that it has alone, whether they follow each other or not") {
    RandomNumbers random{7};
    const RandomModel m(random, 72, 136, 2, 1, 72, 2, true);
    for (int pos : {0, 15, 95})
        for (bool follow : {true, false}) {
            INFO("position " << pos << ", sequences: " << (follow ? 1 : 2));
            const Place before(random, m, follow ? Rows{{pos, 2}} : Rows{{pos, 1}, {pos / 2, 1}});
            check_together<StepShape<2, 8, 2, true>, Small>(m, before, 5, true);
        }
}

TEST_CASE("up to eight tokens in a step: each has the bits that it has alone, over the borders of pages and splits too") {
    // Eight warps as on a GPU; contexts of 128 keys and more have several splits, shorter ones have one.
    RandomNumbers random{11};
    const RandomModel m(random, 136, 264, 2, 1, 72, 1, false);
    struct Case { Rows rows; bool bulk; };
    for (const Case& y : {Case{{{13, 8}}, true}, Case{{{123, 8}}, true}, Case{{{125, 7}}, false}, Case{{{300, 4}}, false},
                          Case{{{125, 4}, {30, 2}, {127, 2}}, true}}) {
        std::string told;
        for (auto& [first, count] : y.rows) told += format(" %d from %d", count, first);
        INFO("rows:" << told);
        const Place before(random, m, y.rows);
        if (y.bulk) check_together<StepShape<8, 16, 8, true>, StepShape<8, 16, 1, true>>(m, before, 3, y.rows.size() > 1);
        else check_together<StepShape<8, 16, 8, false>, StepShape<8, 16, 1, false>>(m, before, 3, false);
    }
}

TEST_CASE("kernels of two and of four tokens, too; and groups of attention that end within a sequence") {
    RandomNumbers random{12};
    for (int H : {1, 3, 5}) { // queries of a KV head: 8, 2 tokens or 1 are attended together
        INFO("H " << H);
        const RandomModel m(random, 136, 72, H, 1, 72, 1, false);
        using One = StepShape<8, 16, 1, true>;
        check_together<StepShape<8, 16, 2, true>, One>(m, Place(random, m, Rows{{15, 2}}), 3, true);
        check_together<StepShape<8, 16, 4, true>, One>(m, Place(random, m, Rows{{126, 4}}), 3, true);
        check_together<StepShape<8, 16, 4, true>, One>(m, Place(random, m, Rows{{255, 3}}), 3, true);
        check_together<StepShape<8, 16, 8, true>, One>(m, Place(random, m, Rows{{62, 5}, {7, 3}}), 5, true);
    }
}

TEST_CASE("before Hopper: four warps fetch weights by cp.async, with the same bits") {
    RandomNumbers random{8};
    const RandomModel m(random, 136, 72, 2, 1, 72, 1, true);
    const Place before(random, m, {{20, 1}});
    Place a = before, b = before;
    Emulated<Small> bulk(m, 1, 3);
    Emulated<StepShape<2, 8, 1, false>> async(m, 1, 3);
    CHECK(same(bulk.step(a, true), async.step(b, true)));
}

TEST_CASE("a greedy draw inside the kernel is `sample`'s, with penalties too, and becomes the next step's batch") {
    RandomNumbers random{9};
    const RandomModel m(random, 40, 24, 2, 1, 200, 1, true);
    for (int round = 0; round < 2; round++) {
        const int exist = m.c.V - 9;
        Place place(random, m, {{15, 1}});
        Sampling how;
        how.temperature = 0;
        if (round % 2) how.repeat = 1.3f, how.presence = 0.5f;
        const std::vector<int> ids = {5, place.token[0], 190};
        std::vector<uint32_t> seen = seen_counts(ids, 1, m.c.V);
        Emulated<Small> gpu(m, 1, 3);
        gpu.draw[0] = {how, exist};
        int token = -1, pos = place.pos[0], slot = -1;
        gpu.p.seen = has_penalties(how) ? seen.data() : nullptr, gpu.p.greedy = true;
        gpu.p.next = {&token, &pos, &slot, place.seq.data(), place.pages.data(), place.max_pages, nullptr, nullptr, 0, nullptr};
        Place at = place;
        const Result r = gpu.step(at, true);
        std::vector<float> logits(r.logits.begin(), r.logits.end());
        CHECK(token == sample(logits.data(), exist, how, 0)); // (the kernel's logits have their penalties)
        CHECK(pos == 16);
        CHECK(slot == place.pages[1] * PAGE);
        gpu.p.seen = nullptr, gpu.p.greedy = false, at = place;
        const Result plain = gpu.step(at, true);
        std::vector<float> want(plain.logits.begin(), plain.logits.end());
        penalize(want.data(), how, ids, 1, m.c.V);
        CHECK(want == logits);
    }
    // Equal logits: the lower id, as in `sample`.
    RandomNumbers again{9};
    RandomModel equal(again, 40, 24, 2, 1, 200, 1, true);
    auto& rows = equal.embed.numbers;
    for (int v = 0; v < m.c.V; v++) std::copy_n(rows.begin(), m.c.C, rows.begin() + (size_t)v * m.c.C);
    Place place(random, equal, {{3, 1}});
    Emulated<Small> gpu(equal, 1, 3);
    int token = -1, pos = 3, slot = -1;
    gpu.draw[0].how.temperature = 0, gpu.p.greedy = true;
    gpu.p.next = {&token, &pos, &slot, place.seq.data(), place.pages.data(), place.max_pages, nullptr, nullptr, 0, nullptr};
    gpu.step(place, true);
    CHECK(token == 0);
}

TEST_CASE("a block whose words do not come: the others end after their patience, and say so") {
    RandomNumbers random{10};
    const RandomModel m(random, 40, 24, 2, 1, 72, 1, true);
    Place place(random, m, {{3, 1}});
    Emulated<Small> gpu(m, 1, 3);
    gpu.p.patience = 20000;
    words_get_lost = true;
    gpu.step(place, true); // (comes to its end)
    words_get_lost = false;
    CHECK(gpu.fault == 1);
}

TEST_CASE("what the kernel cannot compute is refused before") {
    Config c = {1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e-6f, 1e6, true, {}};
    CHECK(step_refuses(c, 132) == nullptr);
    for (auto& change : std::vector<std::function<void(Config&)>>{[](Config& c) { c.D = 64; }, [](Config& c) { c.H = 72; },
                                                                  [](Config& c) { c.F = 3076; }, [](Config& c) { c.H = 12; }}) {
        Config bad = c;
        change(bad);
        CHECK(step_refuses(bad, 132) != nullptr);
    }
    // 30B-A3B: 128 experts of 768, 8 of them for a token.
    Config experts = {2048, 48, 32, 4, 128, 6144, 151936, 40960, 1e-6f, 1e6, false, {}};
    experts.E = 128, experts.k = 8, experts.M = 768;
    CHECK(step_refuses(experts, 132) == nullptr);
    for (auto& change : std::vector<std::function<void(Config&)>>{[](Config& c) { c.M = 800; }, [](Config& c) { c.dense_layers = {3}; },
                                                                  [](Config& c) { c.E = 300; }, [](Config& c) { c.k = 40; }}) {
        Config bad = experts;
        change(bad);
        CHECK(step_refuses(bad, 132) != nullptr);
    }
    CHECK(step_refuses(experts, 60) != nullptr); // two rows of the router a block at most
    const StepArgs plan = plan_step<StepShape<8, 32, 1, true, StepPlain, true>>(experts, 1, 132, 232448);
    CHECK(plan.stages >= 8);
    CHECK(plan.expert_bytes == 3ull * 768 * 2048 * 2);
    CHECK(plan.layer_bytes == 2ull * (40 * 128 * 2048 + 2048 * 32 * 128) + 128 * plan.expert_bytes);
    // Qwen3's sizes on an H100, a 4090 and an A100: the ring has room, and every row is somebody's once.
    struct Size { int C, L, H, K, F; };
    struct Card { int sms; size_t shared; };
    for (const Size& y : {Size{1024, 28, 16, 8, 3072}, Size{2048, 28, 16, 8, 6144}, Size{2560, 36, 32, 8, 9728},
                          Size{4096, 36, 32, 8, 12288}, Size{5120, 40, 40, 8, 17408}, Size{5120, 64, 64, 8, 25600}})
        for (const Card& card : {Card{132, 232448}, Card{128, 101376}, Card{108, 166912}}) {
            c.C = y.C, c.L = y.L, c.H = y.H, c.F = y.F;
            const StepArgs p = plan_step<StepShape<8, 32, 1, true>>(c, 1, card.sms, card.shared);
            INFO("C " << y.C << " on " << card.sms << " multiprocessors: " << p.stages << " stages, " << p.shared << " bytes");
            CHECK(p.shared <= card.shared);
            if (y.C < 5120 || card.sms != 128) CHECK(p.stages >= 4); // (14B in bf16 does not fit a 4090 anyway)
            const size_t matrices = (size_t)(c.H + 2 * c.K) * c.D * c.C + (size_t)c.C * c.H * c.D + 3ull * c.C * c.F;
            CHECK(p.layer_bytes == matrices * 2);
            const StepArgs of_eight = plan_step<StepShape<8, 32, 8, true>>(c, 8, card.sms, card.shared);
            if (y.C <= 2048 && card.sms == 132) CHECK(of_eight.stages >= 4);
            CHECK(of_eight.layer_bytes == p.layer_bytes); // one copy of the weights is for both
            CHECK(of_eight.product[STEP_LOGITS].at == p.product[STEP_LOGITS].at);
        }
}
