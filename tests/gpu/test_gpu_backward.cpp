// Every kernel of the backward pass, and of adapters, against its CPU definition, at odd sizes, on fresh random numbers,
// into poisoned memory; and that the same batch gives the same bits. Built by nvcc, run where a GPU is.
#include "model/chat_template.h"
#include "model/dataset.h"
#include "model/quantize.h"
#include "model/write.h"
#include "tests/dora.h"
#include "tests/gpu/gpu.h"
#include "tests/gradients.h"
#include "tests/http.h"
#include "tests/trainer.h"
#include <fstream>

static const std::vector<int> COUNTS = {1, 2, 7, 33, 64, 65, 257, 1000};

// A product with an adapter on some of its blocks, on both sides.
struct AdaptedMatrix : Matrix {
    std::vector<bf16> A, B;
    Device<bf16> dA, dB, dh;
    std::vector<uint32_t> names;
    Device<uint32_t> dnames, dkept;
    std::vector<bf16> h;
    Dropout on_host, on_device;
    AdaptedMatrix(Random& random, std::vector<int> rows, int in, std::vector<int> blocks, int rank, float p, int N)
        : Matrix(random, rows, in), A(random.fill<bf16>(blocks.size() * rank * in, 0.3)), B(host.out() * blocks.size() * rank), dA(A), dB(0), dh((size_t)N * blocks.size() * rank),
          names(N), dnames(0), dkept(DropoutMasks::size((int)blocks.size(), in, N)), h(dh.n) {
        const size_t columns = blocks.size() * rank;
        for (size_t j = 0; j < blocks.size(); j++) {
            const int first = std::accumulate(rows.begin(), rows.begin() + blocks[j], 0);
            for (int r = first; r < first + rows[blocks[j]]; r++)
                for (int i = 0; i < rank; i++) B[r * columns + j * rank + i] = to_bf16((float)(random.uniform() - 0.5));
        }
        for (int n = 0; n < N; n++) names[n] = (uint32_t)random.below(1 << 30);
        dB.replace(B), dnames.replace(names);
        on_host = on_device = {p, 77, 5, nullptr};
        on_host.token = names.data(), on_device.token = dnames;
        for (Linear<bf16>* W : {&host, &device}) {
            Adapter<bf16>& a = W->adapter;
            a.rank = rank, a.modules = (int)blocks.size(), a.s = 2;
            for (size_t j = 0; j < blocks.size(); j++) a.block[j] = blocks[j], a.module[j] = 14 + (int)j;
            a.A = W == &host ? A.data() : dA.data, a.B = W == &host ? B.data() : dB.data, a.h = W == &host ? h.data() : dh.data;
            if (p > 0) a.dropout = W == &host ? &on_host : &on_device;
            if (W == &device) a.kept = dkept;
        }
    }
};
struct AdaptedShape { std::vector<int> rows; int in; std::vector<int> blocks; int rank; };
static const std::vector<AdaptedShape> ADAPTED_SHAPES = {{{64, 32, 32}, 72, {0, 1, 2}, 8}, {{256, 128, 128}, 1024, {0, 2}, 32}, {{200}, 136, {0}, 40}, {{96, 96}, 264, {0, 1}, 16}, {{1104, 1304}, 264, {0, 1}, 32}};

TEST_CASE("adapters in the products: h and what it adds, with and without dropout") {
    Random random{1};
    Scratchpad pad;
    for (const AdaptedShape& shape : ADAPTED_SHAPES)
        for (int N : COUNTS)
            for (float p : {0.f, 0.25f}) {
                if ((size_t)N * shape.in > 300000) continue;
                INFO("N " << N << " in " << shape.in << " rank " << shape.rank << " p " << p);
                AdaptedMatrix W(random, shape.rows, shape.in, shape.blocks, shape.rank, p, N);
                const int R = W.host.out(), K = shape.in;
                const std::vector<bf16> x = random.fill<bf16>((size_t)N * K);
                const std::vector<float> residual = random.fill<float>((size_t)N * R);
                Device<bf16> dx(x), out((size_t)N * R);
                Device<float> dresidual(residual), sum((size_t)N * R);
                std::vector<bf16> want((size_t)N * R);
                std::vector<float> want_sum((size_t)N * R);
                linear_cpu(cpu(), want.data(), x.data(), W.host, N);
                linear_gpu(pad.ctx, out, dx, W.device, N);
                CHECK(differences(W.dh.get(), W.h, K) == 0);
                if (p > 0) { // masks made by the norm ahead of the product: the same
                    const std::vector<float> stream = random.fill<float>((size_t)N * K);
                    const Device<float> dstream(stream);
                    const Device<bf16> weight(random.fill<bf16>(K, 1, 1));
                    Device<bf16> normed((size_t)N * K), again((size_t)N * K);
                    rmsnorm_gpu(pad.ctx, normed, dstream, weight, N, K, 1e-6f);
                    lora_down_gpu(pad.ctx, W.dh, normed, W.device, N);
                    const std::vector<uint32_t> kept = W.dkept.get();
                    const std::vector<bf16> h = W.dh.get();
                    W.dkept.replace(std::vector<uint32_t>(kept.size(), 0xffffffff)), W.dh.replace(std::vector<bf16>(h.size()));
                    rmsnorm_masks_gpu(pad.ctx, again.data, dstream.data, weight.data, 1e-6f, LoraArgs(W.device, N), N);
                    CHECK(same_bits(again.get(), normed.get()));
                    CHECK(W.dkept.get() == kept);
                    lora_down_gpu(pad.ctx, W.dh, again, W.device, N, true);
                    CHECK(same_bits(W.dh.get(), h));
                }
                // A rounding of h that falls to the other side changes an output by 2^-8 of a term, |h B| <= |h| / 2.
                double most = 0;
                for (bf16 y : W.h) most = std::max<double>(most, std::fabs(to_acc(y)));
                CHECK(wrong(out.get(), as_double(want), [&](size_t i) { return 2.2 * rounding<bf16>(to_acc(want[i])) + 4 * most / 512 + sum_error<float>(K) * 4; }) == 0);
                linear_add_cpu(cpu(), want_sum.data(), residual.data(), x.data(), W.host, N);
                linear_add_gpu(pad.ctx, sum, dresidual, dx, W.device, N);
                CHECK(wrong(sum.get(), as_double(want_sum), [&](size_t) { return 4 * most / 512 + sum_error<float>(K) * 4; }) == 0);
            }
}

TEST_CASE("adapters and up to 16 tokens: beside weights of every format, with every epilogue; a row's bits do not depend on how many there are") {
    Random random{31};
    Scratchpad pad;
    std::vector<PackedKind> kinds = PACKED_KINDS;
    if (!Optional::HERE) kinds.clear();
    kinds.insert(kinds.begin(), {Format::PLAIN, 0, false});
    // (12,800 rows: blocks take a second group. Of the last shape B has 216 columns: a product of tiles.)
    for (const AdaptedShape& shape : {AdaptedShape{{64, 32, 32}, 72, {0, 2}, 8}, AdaptedShape{{96, 96}, 264, {0, 1}, 16}, AdaptedShape{{96, 96}, 136, {1}, 8},
                                      AdaptedShape{{1040}, 1096, {0}, 24}, AdaptedShape{{12800}, 72, {0}, 8}, AdaptedShape{{64, 32, 32}, 72, {0, 1, 2}, 72}})
        for (const PackedKind& kind : kinds) {
            const bool is_plain = kind.format == Format::PLAIN;
            if ((shape.rank == 72 && !is_plain) || (shape.rows[0] > 5000 && !is_plain && kind.format != Format::INT8)) continue;
            const int K = shape.in, most = 16;
            AdaptedMatrix plain(random, shape.rows, K, shape.blocks, shape.rank, 0, most);
            std::unique_ptr<PackedMatrix> packed;
            Linear<bf16> host = plain.host, W = plain.device;
            if (!is_plain) {
                packed = std::make_unique<PackedMatrix>(random, kind, shape.rows, K, 8); // (with no room for unpacking)
                packed->use(pad.ctx);
                host = packed->host, W = packed->device, W.adapter = plain.device.adapter;
            }
            const int R = W.out(), F = W.rows[0], width = (int)W.adapter.width();
            const std::vector<bf16> x = random.fill<bf16>((size_t)most * K);
            const std::vector<float> residual = random.fill<float>((size_t)most * R);
            const std::vector<double> base = WideLinear(host)(as_double(x), most), sizes = WideLinear(host, true)(magnitudes(x), most);
            const Device<bf16> dx(x);
            const Device<float> dresidual(residual);
            const std::vector<bf16> nobody = poisoned<bf16>(plain.dh.n);
            std::vector<bf16> h_wanted(plain.dh.n), all_out, all_gate_up, all_hidden;
            std::vector<float> all_sums;
            lora_down_cpu(cpu(), h_wanted.data(), x.data(), plain.host, most);
            auto as_of_all = [](auto& all, const auto& got) { // the first rows of 16
                if (all.empty()) all = got;
                return same_bits(got, {all.begin(), all.begin() + (long)got.size()});
            };
            for (int N : {16, 1, 2, 8, 9}) {
                INFO("format " << (int)kind.format << " group " << kind.group << " N " << N << " R " << R << " K " << K << " rank " << shape.rank);
                Device<bf16> out((size_t)N * R);
                plain.dh.replace(nobody);
                linear_gpu(pad.ctx, out, dx, W, N);
                std::vector<bf16> h = plain.dh.get();
                h.resize((size_t)N * width);
                CHECK(differences(h, std::vector<bf16>(h_wanted.begin(), h_wanted.begin() + (long)h.size()), K) == 0);
                std::vector<double> y, off, added;
                for (int n = 0; n < N; n++)
                    for (int r = 0; r < R; r++) {
                        double more = 0, size = 0;
                        for (int c = 0; c < width; c++) {
                            const double term = (double)to_acc(plain.B[(size_t)r * width + c]) * to_acc(h[(size_t)n * width + c]);
                            more += term, size += std::fabs(term);
                        }
                        y.push_back(base[(size_t)n * R + r] + more), off.push_back(sum_error<float>(sizes[(size_t)n * R + r] + size));
                        added.push_back(y.back() + residual[(size_t)n * R + r]);
                    }
                const auto near = [&](size_t i) { return rounding<bf16>(y[i]) + off[i]; };
                CHECK(wrong(out.get(), y, near) == 0);
                CHECK(as_of_all(all_out, out.get()));
                Device<float> sum((size_t)N * R);
                plain.dh.replace(nobody);
                linear_add_gpu(pad.ctx, sum, dresidual, dx, W, N);
                CHECK(wrong(sum.get(), added, [&](size_t i) { return rounding<float>(added[i]) + off[i] + sum_error<float>(1); }) == 0);
                CHECK(as_of_all(all_sums, sum.get()));
                if (shape.rows.size() != 2) continue; // (gate and up)
                Device<bf16> hidden((size_t)N * F), gate_up((size_t)N * R), alone((size_t)N * F);
                plain.dh.replace(nobody);
                product_gpu(pad.ctx, SwigluEpilogue(hidden, gate_up, F), dx, W, N);
                CHECK(wrong(gate_up.get(), y, near) == 0);
                CHECK(as_of_all(all_gate_up, gate_up.get()));
                CHECK(as_of_all(all_hidden, hidden.get()));
                product_gpu(pad.ctx, SwigluEpilogue(alone, nullptr, F), dx, W, N);
                CHECK(same_bits(alone.get(), hidden.get()));
                std::vector<bf16> want((size_t)N * F);
                const std::vector<bf16> both = gate_up.get();
                swiglu_cpu(cpu(), want.data(), both.data(), N, F);
                CHECK(differences(hidden.get(), want, 1) == 0);
            }
        }
}

TEST_CASE("the backward of products: input, weight, an adapter's, and with SwiGLU behind it") {
    Random random{2};
    Scratchpad pad;
    for (const AdaptedShape& shape : ADAPTED_SHAPES)
        for (int N : COUNTS)
            for (float p : {0.f, 0.25f}) {
                if ((size_t)N * shape.in > 300000) continue;
                INFO("N " << N << " in " << shape.in << " rank " << shape.rank << " p " << p);
                AdaptedMatrix W(random, shape.rows, shape.in, shape.blocks, shape.rank, p, N);
                const int R = W.host.out(), K = shape.in, E = (int)shape.blocks.size() * shape.rank;
                const std::vector<bf16> x = random.fill<bf16>((size_t)N * K), dy = random.fill<bf16>((size_t)N * R);
                const Device<bf16> device_x(x), device_dy(dy);
                Device<bf16> dx((size_t)N * K), dh((size_t)N * E);
                std::vector<bf16> want((size_t)N * K), want_dh((size_t)N * E);
                Linear<bf16> bare = W.host, bare_device = W.device; // without the adapter
                bare.adapter = bare_device.adapter = {};
                bf16* const none = nullptr;
                linear_backward_input_gpu(pad.ctx, dx, none, nullptr, device_dy, bare_device, N);
                linear_backward_input_cpu(cpu(), want.data(), none, (float*)nullptr, dy.data(), bare, N);
                CHECK(differences(dx.get(), want, R) == 0);

                const std::vector<float> old = random.fill<float>((size_t)R * K);
                Device<float> dW(old);
                std::vector<float> want_dW = old;
                linear_backward_weight_gpu(pad.ctx, dW, device_dy, R, device_x, N, R, K);
                linear_backward_weight_cpu(cpu(), want_dW.data(), dy.data(), (size_t)R, x.data(), N, R, K);
                CHECK(wrong(dW.get(), as_double(want_dW), [&](size_t) { return sum_error<float>(N) * 4 + 1e-6; }) == 0);
#ifndef QWEN3_PORTABLE
                if (pad.ctx.gpu->hopper && R % 8 == 0) { // the transposed product
                    dW.replace(old);
                    hopper_product<true, true>(pad.ctx, {device_x, device_dy, K, N, R}, AddTransposedEpilogue(dW, K));
                    CHECK(wrong(dW.get(), as_double(want_dW), [&](size_t) { return sum_error<float>(N) * 4 + 1e-6; }) == 0);
                }
#endif

                // The adapter's; what is kept, and h, as forward leaves it.
                lora_down_gpu(pad.ctx, W.dh, device_x, W.device, N);
                lora_down_cpu(cpu(), W.h.data(), x.data(), W.host, N);
                W.dh.replace(W.h);
                const std::vector<float> old_A = random.fill<float>((size_t)E * K), old_B = random.fill<float>((size_t)R * E);
                Device<float> dA(old_A), dB(old_B);
                std::vector<float> want_dA = old_A, want_dB = old_B;
                linear_backward_input_gpu(pad.ctx, dx, dh, dB, device_dy, W.device, N);
                linear_backward_input_cpu(cpu(), want.data(), want_dh.data(), want_dB.data(), dy.data(), W.host, N);
                CHECK(differences(dh.get(), want_dh, R) == 0);
                double most = 0;
                for (bf16 y : want_dh) most = std::max<double>(most, std::fabs(to_acc(y)));
                CHECK(wrong(dx.get(), as_double(want), [&](size_t i) {
                    return 2.2 * rounding<bf16>(to_acc(want[i])) + 4 * 0.3 * most / 256 + sum_error<float>(R) * 4;
                }) == 0);
                // The same with SwiGLU behind it.
                const std::vector<bf16> gate_up = random.fill<bf16>((size_t)N * 2 * K, 8);
                const Device<bf16> device_gate_up(gate_up);
                Device<bf16> dgate_up((size_t)N * 2 * K), hidden((size_t)N * K), again_dh((size_t)N * E);
                Device<float> again_B(old_B);
                std::vector<bf16> want_gate_up((size_t)N * 2 * K), want_hidden((size_t)N * K);
                const std::vector<bf16> dhidden = dx.get();
                swiglu_backward_cpu(cpu(), want_gate_up.data(), want_hidden.data(), dhidden.data(), gate_up.data(), N, K);
                linear_backward_swiglu_gpu(pad.ctx, dgate_up, hidden, none, again_dh, again_B, device_dy, device_gate_up, W.device, N);
                CHECK(wrong(dgate_up.get(), as_double(want_gate_up), [&](size_t i) { return 2.2 * rounding<bf16>(to_acc(want_gate_up[i])) + 1e-5; }) == 0);
                CHECK(differences(hidden.get(), want_hidden, 1) == 0);
                CHECK(same_bits(again_dh.get(), dh.get()));
                CHECK(same_bits(again_B.get(), dB.get()));

                dh.replace(want_dh);
                lora_backward_weight_gpu(pad.ctx, dA, dh, device_x, W.device, N);
                lora_backward_weight_cpu(cpu(), want_dA.data(), want_dh.data(), x.data(), W.host, N);
                double most_h = 0;
                for (bf16 y : W.h) most_h = std::max<double>(most_h, std::fabs(to_acc(y)));
                CHECK(wrong(dA.get(), as_double(want_dA), [&](size_t) { return sum_error<float>(N * most * 2) * 4 + 1e-6; }) == 0);
                CHECK(wrong(dB.get(), as_double(want_dB), [&](size_t) { return sum_error<float>(N * most_h * 2) * 4 + 1e-6; }) == 0);
                Device<float> again_A(old_A);
                lora_backward_weight_gpu(pad.ctx, again_A, dh, device_x, W.device, N);
                CHECK(same_bits(again_A.get(), dA.get()));
            }
    for (int n : pad.arrived.get()) CHECK(n == 0);
}

TEST_CASE("dropout inside a product: every tile's mask, whole and in splits") {
    Random random{6};
    Scratchpad pad;
    for (auto [rank, modules] : std::initializer_list<std::pair<int, int>>{{8, 1}, {32, 1}, {136, 1}, {8, 3}, {24, 3}, {32, 2}, {72, 3}})
        for (int N : {24, 200}) {
            AdaptedMatrix W(random, modules == 1 ? std::vector<int>{520} : modules == 2 ? std::vector<int>{320, 200} : std::vector<int>{320, 120, 80}, 264,
                      modules == 1 ? std::vector<int>{0} : modules == 2 ? std::vector<int>{0, 1} : std::vector<int>{0, 1, 2}, rank, 0.25f, N);
            const int R = W.host.out(), K = W.host.in, width = modules * rank;
            const std::vector<bf16> dy = random.fill<bf16>((size_t)N * R);
            std::vector<bf16> want((size_t)N * K), dh((size_t)N * width);
            std::vector<float> dB((size_t)R * width);
            linear_backward_input_cpu(cpu(), want.data(), dh.data(), dB.data(), dy.data(), W.host, N);
            const Device<bf16> device_dy(dy), device_dh(dh);
            lora_down_gpu(pad.ctx, W.dh, Device<bf16>(random.fill<bf16>((size_t)N * K)), W.device, N);
            const LoraArgs lora(W.device, N);
            const int modules_of = lora.modules, rank_of = lora.rank; // (no structured bindings in a lambda)
            auto check = [&](auto hopper, auto shape, int splits) {
                using S = decltype(shape);
                INFO("rank " << lora.rank << " modules " << modules_of << " N " << N << " splits " << splits << " tile " << S::TOKENS << " x " << S::ROWS << " Hopper " << hopper);
                Device<bf16> dx((size_t)N * K);
                TileArgs p = {device_dy, W.device.w[0], N, R, K};
                p.more_x = device_dh, p.more_W = W.device.adapter.A, p.more = width, p.more_last = true, p.splits = splits;
                const DropEpilogue epilogue(dx, K, lora.kept, rank_of, lora.scale);
#ifndef QWEN3_PORTABLE
                if constexpr (hopper) launch_hopper<S, false, true>(pad.ctx, p, epilogue);
#endif
                if constexpr (!hopper) launch_tiles<S, false, true>(pad.ctx, p, epilogue);
                CHECK(differences(dx.get(), want, R) == 0);
            };
            const std::false_type no;
            [[maybe_unused]] const std::true_type yes;
            for (int splits : {1, 2, 7}) check(no, Tile128x128{}, splits), check(no, Tile64x128{}, splits), check(no, Tile64x64{}, splits), check(no, Tile32x64{}, splits);
#ifndef QWEN3_PORTABLE
            if (!pad.ctx.gpu->hopper) continue;
            check(yes, Hopper128x256{}, 1), check(yes, Hopper128x192{}, 1), check(yes, Hopper128x128{}, 1);
            check(yes, Hopper64x64{}, 1), check(yes, HopperPairs{}, 1);
#endif
        }
}

// |got - want| / |want|
template <class X> static double distance(const std::vector<X>& got, const std::vector<X>& want) {
    REQUIRE(got.size() == want.size());
    double off = 0, size = 0;
    for (size_t i = 0; i < want.size(); i++) off += std::pow((double)to_acc(got[i]) - to_acc(want[i]), 2), size += std::pow((double)to_acc(want[i]), 2);
    return std::sqrt(off / size);
}

TEST_CASE("DoRA: lengths of rows, the product by each epilogue, gradients, with dropout and without; twice the same bits") {
    Random random{12};
    Scratchpad pad;
    for (const AdaptedShape& shape : {AdaptedShape{{64, 32, 32}, 72, {0, 1, 2}, 8}, AdaptedShape{{256, 128, 128}, 1024, {0, 2}, 32}, AdaptedShape{{200}, 136, {0}, 40},
                                      AdaptedShape{{96, 96}, 264, {0, 1}, 16}, AdaptedShape{{1304, 1304}, 264, {1}, 24}, AdaptedShape{{64, 32, 32}, 72, {1}, 264}})
        for (int N : {1, 7, 16, 33, 257, 1000})
            for (float p : {0.f, 0.25f}) {
                INFO("N " << N << " in " << shape.in << " rank " << shape.rank << " p " << p);
                DoraProduct<bf16> d(random, shape.rows, shape.blocks, shape.in, shape.rank, N, p, 0.3);
                const int R = d.W.out(), K = shape.in, E = (int)d.W.adapter.width();
                const Device<bf16> w(d.w), A(d.A), B(d.sB);
                const Device<float> m(d.m);
                const Device<uint32_t> token(d.token);
                Device<uint32_t> kept(DropoutMasks::size((int)shape.blocks.size(), K, (size_t)N));
                Device<float> norm((size_t)R), c((size_t)R), dm((size_t)R), dB((size_t)R * E);
                Device<bf16> h((size_t)N * E), u((size_t)N * R), off((size_t)N * R), less((size_t)2 * N * K), y((size_t)N * R), du((size_t)N * R), dx((size_t)N * K), dh((size_t)N * E);
                Dropout dropout = d.dropout;
                dropout.token = token;
                Linear<bf16> W = d.W;
                for (int b = 0; b < 3; b++) W.w[b] = w.data + (size_t)W.first_row(b) * K;
                Adapter<bf16>& a = W.adapter;
                a.A = A.data, a.B = B.data, a.h = h, a.kept = kept, a.dropout = p > 0 ? &dropout : nullptr;
                a.dora.m = m.data, a.dora.norm = norm, a.dora.c = c, a.dora.u = u, a.dora.off = off, a.dora.x = less, a.dora.dx = less.data + (size_t)N * K;
                dora_norm(d.W);
                dora_norm_gpu(pad.ctx, W);
                const std::vector<float> lengths = norm.get(), scales = c.get();
                for (int r = 0; r < R; r++) {
                    CHECK((lengths[(size_t)r] == d.norm[(size_t)r] || std::fabs(lengths[(size_t)r] / d.norm[(size_t)r] - 1) < 2e-6));
                    CHECK(std::fabs(scales[(size_t)r] / d.c[(size_t)r] - 1) < 2e-6);
                }

                const std::vector<bf16> x = random.fill<bf16>((size_t)N * K), dy = random.fill<bf16>((size_t)N * R);
                const Device<bf16> device_x(x), device_dy(dy);
                std::vector<bf16> want((size_t)N * R);
                linear_cpu(cpu(), want.data(), x.data(), d.W, N);
                linear_gpu(pad.ctx, y, device_x, W, N);
                CHECK(distance(y.get(), want) < 6e-3);
                CHECK(distance(u.get(), d.u) < 6e-3);
                const std::vector<bf16> first = y.get();
                linear_gpu(pad.ctx, y, device_x, W, N);
                CHECK(same_bits(y.get(), first));
                const std::vector<float> residual = random.fill<float>((size_t)N * R);
                const Device<float> device_residual(residual);
                Device<float> sum((size_t)N * R);
                std::vector<float> want_sum(residual.size());
                linear_add_cpu(cpu(), want_sum.data(), residual.data(), x.data(), d.W, N);
                linear_add_gpu(pad.ctx, sum, device_residual, device_x, W, N);
                CHECK(distance(sum.get(), want_sum) < 6e-3);
                if (shape.rows.size() == 2) { // gate and up, behind the norm, which makes the masks
                    const std::vector<float> stream = random.fill<float>((size_t)N * K);
                    const std::vector<bf16> weight = random.fill<bf16>((size_t)K, 1, 1);
                    const Device<float> device_stream(stream);
                    const Device<bf16> device_weight(weight);
                    Device<bf16> hidden((size_t)N * R / 2), normed((size_t)N * K);
                    std::vector<bf16> want_hidden((size_t)N * R / 2), want_normed((size_t)N * K);
                    norm_linear_swiglu_cpu(cpu(), want_hidden.data(), want.data(), want_normed.data(), stream.data(), weight.data(), d.W, N, 1e-6f);
                    norm_linear_swiglu_gpu(pad.ctx, hidden, y, normed, device_stream, device_weight, W, N, 1e-6f);
                    CHECK(distance(hidden.get(), want_hidden) < 2e-2);
                    CHECK(distance(y.get(), want) < 6e-3);
                    linear_cpu(cpu(), want.data(), x.data(), d.W, N);
                    linear_gpu(pad.ctx, y, device_x, W, N);
                }

                const std::vector<float> old_m = random.fill<float>((size_t)R), old_B = random.fill<float>((size_t)R * E, 0.1);
                std::vector<float> want_m = old_m, want_B = old_B;
                std::vector<bf16> want_u((size_t)N * R), want_x((size_t)N * K), want_h((size_t)N * E);
                dm.replace(old_m), dB.replace(old_B), u.replace(d.u), h.replace(d.h);
                dora_backward(want_u.data(), want_m.data(), dy.data(), d.W, N);
                dora_backward_gpu(pad.ctx, du, dm, device_dy, W, N);
                CHECK(distance(du.get(), want_u) < 6e-3);
                CHECK(distance(dm.get(), want_m) < 1e-4);
                for (int r = 0; r < R; r++)
                    if (d.W.module_of(r) < 0) CHECK(dm.get()[(size_t)r] == old_m[(size_t)r]);
                linear_backward_input_cpu(cpu(), want_x.data(), want_h.data(), want_B.data(), want_u.data(), d.W, N);
                linear_backward_input_gpu(pad.ctx, dx, dh, dB, du, W, N);
                CHECK(distance(dx.get(), want_x) < 1e-2);
                CHECK(distance(dh.get(), want_h) < 1e-2);
                CHECK(distance(dB.get(), want_B) < 1e-2);
                const std::vector<bf16> gate_up = random.fill<bf16>((size_t)N * 2 * K, 4), dhidden = dx.get();
                const Device<bf16> device_gate_up(gate_up);
                Device<bf16> dgate_up((size_t)N * 2 * K), hidden((size_t)N * K);
                std::vector<bf16> want_gate_up((size_t)N * 2 * K), want_hidden((size_t)N * K);
                swiglu_backward_cpu(cpu(), want_gate_up.data(), want_hidden.data(), dhidden.data(), gate_up.data(), N, K);
                linear_backward_swiglu_gpu(pad.ctx, dgate_up, hidden, nullptr, dh, dB, du, device_gate_up, W, N);
                CHECK(distance(dgate_up.get(), want_gate_up) < 6e-3);
                CHECK(distance(hidden.get(), want_hidden) < 6e-3);
            }
    for (int n : pad.arrived.get()) CHECK(n == 0);
}

TEST_CASE("the head's loss in place, and the head's backward") {
    Random random{3};
    Scratchpad pad;
    for (int V : {8, 72, 1024, 4104, 20000})
        for (int R : {1, 3, 33}) {
            INFO("V " << V << " R " << R);
            const int C = 72, N = 2 * R;
            Matrix W(random, {V}, C);
            const bool far = V % 3; // whether logits lie far from zero
            std::vector<bf16> x = random.fill<bf16>((size_t)N * C, far ? 4 : 0.5);
            std::vector<int> target(R), rows(R);
            for (int r = 0; r < R; r++) target[r] = random.below(V), rows[r] = 2 * ((r * 7) % R) + 1;
            if (R % 7 == 0) std::iota(rows.begin(), rows.end(), 0);
            for (int c = 0; c < C && far; c++) x[(size_t)rows[0] * C + c] = to_bf16(4 * to_acc(W.w[(size_t)(V / 2) * C + c])); // one that is sure
            Device<float> logits((size_t)R * V / 2), loss(R), parts((size_t)R * ((V + 63) / 64 + 1) * 2), factor(R);
            Device<bf16> picked((size_t)R * C);
            const std::vector<float> by = random.fill<float>(R, 2);
            const Device<float> dby(by);
            const Device<bf16> dx(x);
            const Device<int> dtarget(target), drows(rows);
            std::vector<float> want, want_logits((size_t)R * V), want_loss(R);
            std::vector<float> gradient((size_t)R * V);
            std::vector<bf16> want_picked((size_t)R * C), weights((size_t)R * V), right((size_t)R * V);
            head_cpu(cpu(), want_logits.data(), want_picked.data(), x.data(), rows.data(), W.host, R);
            for (bool hopper : {false, true}) { // both tiles
                if (hopper && !gpu().gpu->hopper) continue;
                pad.ctx.gpu->hopper = hopper;
                head_loss_gpu(pad.ctx, loss, nullptr, factor, logits, picked, parts, dx, {drows, dtarget, 0.125f, nullptr, R}, W.device);
                const std::vector<float> only_loss = loss.get();
                head_loss_gpu(pad.ctx, loss, (bf16*)logits.data, factor, logits, picked, parts, dx, {drows, dtarget, 0.125f, nullptr, R}, W.device);
                CHECK(same_bits(only_loss, loss.get()));
                const std::vector<float> its = factor.get(), got = logits.get();
                head_loss_gpu(pad.ctx, loss, (bf16*)logits.data, factor, logits, picked, parts, dx, {drows, dtarget, 0.125f, dby, R}, W.device);
                CHECK(same_bits(got, logits.get()));
                for (int r = 0; r < R; r++) CHECK(factor.get()[r] == doctest::Approx(its[r] * by[r]).epsilon(1e-6));
                want = want_logits;
                cross_entropy_cpu<bf16>(cpu(), want_loss.data(), (bf16*)want.data(), want.data(), target.data(), 0.125f, R, V);
                const double off = sum_error<float>(C * 4) * 4; // of a logit, on either side
                CHECK(wrong(only_loss, as_double(want_loss), [&](size_t r) { return 2e-6 * (24 + want_loss[r]) + 2 * off; }) == 0);
                memcpy((void*)weights.data(), got.data(), weights.size() * sizeof(bf16));
                for (size_t i = 0; i < gradient.size(); i++) gradient[i] = to_acc(weights[i]) * its[i / V];
                for (int r = 0; r < R; r++) memcpy((void*)&right[(size_t)r * V], &want[(size_t)r * V], V * sizeof(bf16));
                // A probability is as exact as its logit; near the target's 1 little is left of it.
                CHECK(wrong(gradient, as_double(right), [&](size_t i) {
                    const bool target_own = (int)(i % V) == target[i / V];
                    const double p = to_acc(right[i]) / 0.125 + target_own;
                    return 2.2 * rounding<bf16>(to_acc(right[i])) + 0.125 * p * (2e-5 + 2 * off) + (target_own ? 0.125 * 2e-6 : 1e-8);
                }) == 0);
            }
            const Device<float> dlogits(want);
            Device<bf16> dnormed(std::vector<bf16>((size_t)N * C));
            std::vector<bf16> want_normed((size_t)N * C);
            head_backward_gpu(pad.ctx, dnormed, (bf16*)dlogits.data, (size_t)2 * V, dby, drows, W.device, R);
            head_backward_cpu(cpu(), want_normed.data(), (const bf16*)want.data(), (size_t)2 * V, by.data(), rows.data(), W.host, R);
            CHECK(differences(dnormed.get(), want_normed, 0.3) == 0);
            Device<float> dW(std::vector<float>((size_t)V * C));
            std::vector<float> want_dW((size_t)V * C);
            linear_backward_weight_gpu(pad.ctx, dW, (bf16*)dlogits.data, (size_t)2 * V, picked, R, V, C);
            linear_backward_weight_cpu(cpu(), want_dW.data(), (const bf16*)want.data(), (size_t)2 * V, want_picked.data(), R, V, C);
            CHECK(wrong(dW.get(), as_double(want_dW), [&](size_t) { return 4e-6; }) == 0);
        }
}

TEST_CASE("distillation: losses, agreement and the gradient in place") {
    Random random{17};
    Scratchpad pad;
    for (int V : {8, 72, 4104, 151936})
        for (const Distillation& how : {Distillation{0, 1, 1}, {1, 1, 1}, {0.3f, 1, 1}, {0, 2, 0.6f}, {1, 0.5f, 0.25f}, {0.5f, 1.5f, 0.9f}}) {
            INFO("V " << V << " beta " << how.beta << " temperature " << how.temperature << " weight " << how.weight);
            const int R = 5;
            std::vector<float> s = random.fill<float>((size_t)R * V, 5), t = random.fill<float>((size_t)R * V, 5);
            std::copy(s.begin(), s.begin() + V, t.begin()); // equal models
            for (int v = 0; v < V; v++) s[(size_t)V + v] *= 8; // a student that is sure
            std::vector<int> target(R);
            for (int& id : target) id = random.below(V);
            std::vector<double> wide(s.begin(), s.end()), teacher(t.begin(), t.end()), want[3];
            for (auto& list : want) list.resize(R);
            distillation<double>({want[0].data(), want[1].data(), want[2].data()}, wide.data(), wide.data(),
                                 {teacher.data(), target.data(), how, 0.25, R, V});
            const Device<float> dt(t);
            const Device<int> dtarget(target);
            Device<float> logits(s), got[3] = {Device<float>(R), Device<float>(R), Device<float>(R)};
            const Distilled<float> out = {got[0], got[1], got[2]};
            const DistillationRows<float> of = {dt, dtarget, how, 0.25f, R, V};
            distillation_gpu(pad.ctx, out, nullptr, logits, of);
            CHECK(same_bits(logits.get(), s));
            const std::vector<float> only_loss = got[0].get();
            distillation_gpu(pad.ctx, out, (bf16*)logits.data, logits, of);
            CHECK(same_bits(only_loss, got[0].get()));
            for (int k : {0, 1}) CHECK(wrong(got[k].get(), want[k], [&](size_t r) { return 2e-5 * (1 + want[k][r]); }) == 0);
            for (int r = 0; r < R; r++) CHECK(got[2].get()[r] == want[2][r]);
            const std::vector<float> both = logits.get();
            std::vector<bf16> gradient((size_t)R * V);
            for (int r = 0; r < R; r++) memcpy((void*)&gradient[(size_t)r * V], &both[(size_t)r * V], V * sizeof(bf16));
            CHECK(wrong(gradient, wide, [&](size_t i) { return 2.2 * rounding<bf16>(wide[i]) + 5e-6; }) == 0);
            for (int r = 0; r < R; r++) { // ... and of all ids together
                double off = 0, size = 0;
                for (size_t i = (size_t)r * V; i < (size_t)(r + 1) * V; i++) off += std::fabs(to_acc(gradient[i]) - wide[i]), size += std::fabs(wide[i]);
                CHECK(off < size / 256 + 1e-5);
            }
        }
}

TEST_CASE("outcomes: gathered logits, tails, and the gradient in place") {
    Random random{19};
    Scratchpad pad;
    for (int V : {72, 4104, 151936}) {
        INFO("V " << V);
        const int R = 5, J = 24;
        std::vector<float> s = random.fill<float>((size_t)R * V, 5);
        std::vector<int> id((size_t)R * J, -1);
        for (int r = 0; r < R; r++)
            for (int j = 0; j < J - 1 - 4 * r; j++) id[(size_t)(r * J + j)] = (7 * j + r) % V; // distinct
        std::vector<double> wide(s.begin(), s.end()), want_z((size_t)R * J), want_tail(R), dz((size_t)R * J);
        gather_outcomes<double>(want_z.data(), want_tail.data(), wide.data(), id.data(), R, J, V);
        std::vector<bf16> stored((size_t)R * J);
        for (size_t i = 0; i < dz.size(); i++) stored[i] = to_bf16((float)(i % 7) / 7 - 0.5f), dz[i] = to_acc(stored[i]);
        std::vector<double> want = wide;
        scatter_outcomes<double>(want.data(), want.data(), dz.data(), J, want_tail.data(), id.data(), R, J, V);
        Device<float> logits(s), z(R * J), tail(R);
        const Device<int> ids(id);
        const Device<bf16> device_dz(stored);
        gather_outcomes_gpu(pad.ctx, z, tail, logits, ids, R, J, V);
        CHECK(wrong(z.get(), want_z, [&](size_t i) { return 2e-6 * (1 + std::fabs(want_z[i])); }) == 0);
        CHECK(wrong(tail.get(), want_tail, [&](size_t r) { return 2e-6 * (1 + std::fabs(want_tail[r])); }) == 0);
        scatter_outcomes_gpu(pad.ctx, (bf16*)logits.data, logits, device_dz, J, tail, ids, R, J, V);
        const std::vector<float> both = logits.get();
        std::vector<bf16> gradient((size_t)R * V);
        for (int r = 0; r < R; r++) memcpy((void*)&gradient[(size_t)r * V], &both[(size_t)r * V], V * sizeof(bf16));
        CHECK(wrong(gradient, want, [&](size_t i) { return 1.1 * rounding<bf16>(want[i]) + 1e-6; }) == 0);
    }
}

#ifndef QWEN3_PORTABLE
TEST_CASE("what epilogues hand to the TMA in boxes is what they store, and nothing past the ends is written") {
    if (!gpu().gpu->hopper) return;
    Random random{14};
    Scratchpad pad;
    pad.ctx.gpu->sms = 2; // so that a block has several tiles
    for (int N : {1, 17, 130, 333})
        for (int R : {8, 72, 264, 520})
            for (int K : {64, 200}) {
                INFO("N " << N << " R " << R << " K " << K);
                const Device<bf16> x(random.fill<bf16>((size_t)N * K)), w(random.fill<bf16>((size_t)2 * R * K, 0.2));
                const std::vector<float> residual = random.fill<float>((size_t)N * R), from = random.fill<float>(N);
                std::vector<int> target(N);
                for (int& t : target) t = random.below(R);
                const Device<float> dresidual(residual), dfrom(from);
                const Device<int> dtarget(target), again(std::vector<int>{1});
                const size_t past = 64, numbers = (size_t)N * R + past, pieces = (R + 63) / 64;
                // One after another: an Add, gate and up, SwiGLU of them, the same alone, weights, their parts, the targets'.
                auto all = [&](auto shape) {
                    using S = decltype(shape);
                    Device<float> sum(numbers), parts(N * pieces * 2), right(N);
                    Device<bf16> gate_up(numbers + (size_t)N * R), hidden(numbers), alone(numbers), weights(numbers);
                    const TileArgs p = {x, w, N, K, R};
                    launch_hopper<S>(pad.ctx, p, AddEpilogue(sum, dresidual, R));
                    launch_hopper<S>(pad.ctx, p, SwigluEpilogue(hidden, gate_up, R));
                    launch_hopper<S>(pad.ctx, p, SwigluEpilogue(alone, nullptr, R));
                    launch_hopper<S>(pad.ctx, p, LossEpilogue{{}, weights, (float2*)parts.data, right, dtarget, dfrom, again, (size_t)R, pieces, 0});
                    return std::make_tuple(sum.get(), gate_up.get(), hidden.get(), alone.get(), weights.get(), parts.get(), right.get());
                };
                const auto want = all(Hopper64x64{}), wide = all(Hopper128x256{}), narrow = all(Hopper128x128{}), pairs = all(HopperPairs{});
                for (const auto* got : {&wide, &narrow, &pairs}) {
                    CHECK(same_bits(std::get<0>(*got), std::get<0>(want)));
                    CHECK(same_bits(std::get<1>(*got), std::get<1>(want)));
                    CHECK(same_bits(std::get<2>(*got), std::get<2>(want)));
                    CHECK(same_bits(std::get<3>(*got), std::get<3>(want)));
                    CHECK(same_bits(std::get<4>(*got), std::get<4>(want)));
                    CHECK(wrong(std::get<5>(*got), as_double(std::get<5>(want)), [&](size_t i) { return 1e-5 * std::fabs(std::get<5>(want)[i]); }) == 0);
                    CHECK(same_bits(std::get<6>(*got), std::get<6>(want)));
                }
            }
}
#endif // QWEN3_PORTABLE

TEST_CASE("rows of a gradient, each times a number of its own") {
    Random random{9};
    Scratchpad pad;
    for (int R : {1, 5, 130})
        for (int n : {1, 8, 255, 257, 8192}) {
            INFO("R " << R << " n " << n);
            const size_t ld = (size_t)n + 24;
            const std::vector<bf16> x = random.fill<bf16>(R * ld);
            const std::vector<float> by = random.fill<float>(R, 3);
            Device<bf16> dx(x);
            const Device<float> dby(by);
            std::vector<bf16> want = x;
            scale_rows(want.data(), ld, by.data(), R, n);
            scale_rows_gpu(pad.ctx, dx, ld, dby, R, n);
            CHECK(same_bits(dx.get(), want)); // and what is past a row's n is as it was
        }
}

TEST_CASE("--grpo: answers drawn on the GPU are as likely as the CPU's, and a step's gradient is near the CPU's") {
    const ModelFile file("tests/fixtures/tiny/model.bin");
    Scratch out;
    {
        DatasetWriter writer(out / "rows.bin", Tokenizer("tests/fixtures/tiny/tokenizer.bin").hash(), template_hash());
        Random random{12};
        for (int row = 0; row < 6; row++) {
            std::vector<uint32_t> words;
            for (int i = 0, n = 10 + 13 * row; i < n; i++) words.push_back((uint32_t)random.below(900));
            words.push_back(5 | TRAIN), writer.add(words);
        }
        writer.commit();
    }
    const Dataset data(out / "rows.bin");
    TrainOptions o;
    o.grpo = true, o.tokenizer = "tests/fixtures/tiny/tokenizer.bin", o.batch = 3, o.accum = 2, o.dropout = 0, o.rl.group = 5, o.rl.max_tokens = 24, o.rl.kl_beta = 0.1;
    o.rl.rewards = {"length:4", "regex:[a-m]"}, o.rl.epsilon_high = 0.2, o.lora.rank = 8, o.lora.alpha = 16;
    std::fill(o.lora.targets, o.lora.targets + MODULES, true);
    TrainOptions with_gpu = o;
    with_gpu.rank_step = GPU_RANK_STEP;
    Trainer<bf16> host(o, Context(), file, data, nullptr), device(with_gpu, gpu(), file, data, nullptr);
    host.take_groups(host.loader.rows_of(0)), device.take_groups(device.loader.rows_of(0));
    CHECK(host.fault == "");
    CHECK(device.fault == "");
    REQUIRE(device.groups.rows.size() == 30);
    // A draw goes by sums of a thousand probabilities, so that bf16 lets some fall otherwise, and all tokens behind them
    // too. But both draw from one distribution: log-probabilities of what they drew have the same mean.
    auto likely = [](const Groups& groups) { // mean, and its variance
        double n = 0, sum = 0, squares = 0;
        for (auto& row : groups.reference)
            for (float x : row) n++, sum += x, squares += (double)x * x;
        return std::pair(sum / n, (squares / n - sum / n * sum / n) / n);
    };
    for (size_t i = 0; i < 30; i++) {
        const auto &a = host.groups.rows[i], &b = device.groups.rows[i];
        REQUIRE(std::equal(a.begin(), a.end() - (ptrdiff_t)host.groups.length(i), b.begin())); // the prompts
    }
    const auto on_host = likely(host.groups), on_device = likely(device.groups);
    MESSAGE("mean log-probability of a drawn token: CPU " << on_host.first << ", GPU " << on_device.first);
    CHECK(std::fabs(on_host.first - on_device.first) < 4 * std::sqrt(on_host.second + on_device.second));
    // The same answers on both: losses, reference and gradient.
    device.groups = host.groups, device.groups.old.clear(), host.groups.old.clear();
    device.groups.reference.clear(), device.ask_reference();
    for (size_t i = 0; i < 30; i++)
        for (size_t k = 0; k < host.groups.length(i); k++) CHECK(std::fabs(device.groups.reference[i][k] - host.groups.reference[i][k]) < 0.1);
    host.add_gradients({}, 1), device.add_gradients({}, 1);
    std::vector<float> got(device.params.count);
    copy_out(device.ctx, got.data(), device.params.gradient, device.params.count);
    auto length = [](const float* x, size_t n) {
        double sum = 0;
        for (size_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
        return std::sqrt(sum);
    };
    const double want = length(host.params.gradient, host.params.count), is = length(got.data(), got.size());
    MESSAGE("gradient: CPU " << want << ", GPU " << is);
    CHECK(want > 1e-3);
    CHECK(is == doctest::Approx(want).epsilon(0.05));
}

TEST_CASE("norms, RoPE and embedding, backward") {
    Random random{4};
    Scratchpad pad;
    for (int N : COUNTS)
        for (int C : {8, 72, 520, 1032}) {
            INFO("N " << N << " C " << C);
            const std::vector<float> x = random.fill<float>((size_t)N * C, 3), old = random.fill<float>((size_t)N * C), old_dw = random.fill<float>(C);
            const std::vector<bf16> w = random.fill<bf16>(C, 1, 1), dout = random.fill<bf16>((size_t)N * C);
            Device<float> device_x(x), dx(old), dw(old_dw);
            Device<bf16> device_w(w), device_dout(dout), dy((size_t)N * C), normed((size_t)N * C);
            std::vector<float> want = old, want_dw = old_dw;
            std::vector<bf16> want_dy((size_t)N * C), want_normed((size_t)N * C);
            pad.ctx.gpu->sms = N > 100 ? 2 : gpu().gpu->sms; // so that a block has several tokens
            rmsnorm_backward_gpu(pad.ctx, dx, dy, normed, dw, device_dout, device_x, device_w, N, C, 1e-6f);
            pad.ctx.gpu->sms = gpu().gpu->sms;
            rmsnorm_backward_cpu(cpu(), want.data(), want_dy.data(), want_normed.data(), want_dw.data(), dout.data(), x.data(), w.data(), N, C, 1e-6f);
            CHECK(wrong(dx.get(), as_double(want), [&](size_t) { return 1e-5; }) == 0);
            CHECK(wrong(dy.get(), as_double(want_dy), [&](size_t i) { return 2.2 * rounding<bf16>(to_acc(want_dy[i])) + 1e-5; }) == 0);
            CHECK(differences(normed.get(), want_normed, 0) == 0);
            CHECK(wrong(dw.get(), as_double(want_dw), [&](size_t) { return sum_error<float>(N * 3) + 1e-6; }) == 0);
            Device<float> alone(old);
            rmsnorm_backward_gpu(pad.ctx, alone, nullptr, nullptr, nullptr, device_dout, device_x, device_w, N, C, 1e-6f);
            CHECK(same_bits(alone.get(), dx.get()));

            const int V = 20;
            TestBatch batch(random, {{0, N}}, V, 3);
            Device<int> token(batch.token), seq(batch.seq);
            const std::vector<float> rows = random.fill<float>((size_t)(N + 3) * C), table = random.fill<float>((size_t)V * C);
            Device<float> drows(rows), dtable(table);
            std::vector<float> want_table = table;
            Batch b = batch.view();
            embed_backward_cpu(cpu(), want_table.data(), rows.data(), b, C);
            b.token = token, b.seq = seq;
            embed_backward_gpu(pad.ctx, dtable, drows, b, C);
            CHECK(same_bits(dtable.get(), want_table));
        }
    for (int D : {64, 128})
        for (int N : COUNTS) {
            INFO("D " << D << " N " << N);
            const int H = 6, K = 2, width = (H + 2 * K) * D;
            TestBatch batch(random, {{0, N}, {0, 5}}, 10, 2);
            const int all = N + 7;
            const std::vector<bf16> qkv = random.fill<bf16>((size_t)all * width, 2), dout = random.fill<bf16>((size_t)all * width), qw = random.fill<bf16>(D, 0.5, 1), kw = random.fill<bf16>(D, 0.5, 1);
            const std::vector<float> old = random.fill<float>(2 * D);
            std::vector<float> rope((size_t)std::max(N, 5) * D);
            fill_rope(rope.data(), std::max(N, 5), D, 1e6, SCALED);
            const Device<int> pos(batch.pos), seq(batch.seq);
            const Device<bf16> device_qkv(qkv), device_qw(qw), device_kw(kw);
            const Device<float> device_rope(rope);
            Device<bf16> dqkv(dout), alone(dout);
            Device<float> dw(old);
            std::vector<bf16> want = dout;
            std::vector<float> want_dw = old;
            Batch b = batch.view();
            qknorm_rope_backward_cpu(cpu(), want.data(), {want_dw.data(), want_dw.data() + D}, qkv.data(), {qw.data(), kw.data(), rope.data()}, b, {H, K, D, 1e-6f});
            b.pos = pos, b.seq = seq;
            qknorm_rope_backward_gpu(pad.ctx, dqkv, {dw, dw + D}, device_qkv, {device_qw, device_kw, device_rope}, b, {H, K, D, 1e-6f});
            CHECK(wrong(dqkv.get(), as_double(want), [&](size_t i) { return 2.2 * rounding<bf16>(to_acc(want[i])) + 1e-5; }) == 0);
            CHECK(wrong(dw.get(), as_double(want_dw), [&](size_t) { return sum_error<float>(all * H * 3) + 1e-5; }) == 0);
            qknorm_rope_backward_gpu(pad.ctx, alone, {nullptr, nullptr}, device_qkv, {device_qw, device_kw, device_rope}, b, {H, K, D, 1e-6f});
            CHECK(same_bits(alone.get(), dqkv.get()));
        }
}

// A number that was rounded to bf16 is off by 2^-9 of itself; turned by a scaled table, by SCALED.attention sqrt(2) of
// that of its head's largest; and then it is multiplied by w / rms, or as part of a mean by w x / rms^2 and x / rms.
TEST_CASE("attend, backward: the two ops, without the rounding between them") {
    Random random{12};
    const float eps = 1e-6f;
    for (int D : {64, 128})
        for (std::pair<int, int> groups : std::vector<std::pair<int, int>>{{2, 2}, {4, 2}, {10, 2}, {8, 1}})
            for (auto& shape : std::vector<std::pair<std::vector<int>, int>>{{{1}, 0}, {{33}, 0}, {{63, 1, 64}, 200}, {{1, 3, 2, 64, 65, 130, 300}, 9}}) {
                const int H = groups.first, K = groups.second;
                INFO("D " << D << " H " << H << " K " << K << " sequences " << shape.first.size());
                std::vector<std::pair<int, int>> sequences;
                for (int n : shape.first) sequences.push_back({0, n});
                TestBatch batch(random, sequences, 10, shape.second);
                const int N = (int)batch.token.size(), width = (H + 2 * K) * D, used = N - shape.second;
                const size_t heads = (size_t)N * H, cache = (size_t)batch.page_count * K * PAGE * D;
                std::vector<bf16> qkv = random.fill<bf16>((size_t)N * width, 2), dout = random.fill<bf16>(heads * D);
                memset((void*)(qkv.data() + (size_t)used * width), 0xff, (size_t)(N - used) * width * sizeof(bf16)); // nothing of spare rows
                const std::vector<bf16> weights[] = {random.fill<bf16>(D, 0.5, 1), random.fill<bf16>(D, 0.5, 1)};
                std::vector<float> rope((size_t)512 * D);
                fill_rope(rope.data(), 512, D, 1e6, SCALED);
                Scratchpad pad(attention_scratch(gpu(), 0, 0, H, D));
                Device<int> pos(batch.pos), seq(batch.seq), slot(batch.slot), pages(batch.pages);
                const Device<bf16> x(qkv), g(dout), wq(weights[0]), wk(weights[1]);
                const Device<float> angles(rope);
                Device<bf16> keys(std::vector<bf16>((size_t)cache)), values(keys.get()); // (behind a sequence a cache has to be finite)
                Device<bf16> q(heads * D), out(heads * D), d((size_t)N * width), got(d.n), both(d.n), two(d.n);
                Device<float> lse(heads), delta(heads), dw(std::vector<float>(2 * D)), two_dw(std::vector<float>(2 * D));
                Batch b = batch.view();
                b.token = nullptr, b.pos = pos, b.seq = seq, b.slot = slot, b.pages = pages;
                attend_gpu(pad.ctx, out, lse, q, {keys, values}, x, {wq, wk, angles}, b, {H, K, D, eps});
                attention_backward_gpu(pad.ctx, d, g, {q, out, lse}, {keys, values}, b, {H, K, D}, delta);
                attend_backward_gpu(pad.ctx, got, {nullptr, nullptr}, g, {q, out, lse}, {keys, values}, x, {wq, wk, angles}, b, {H, K, D, eps}, delta);
                const std::vector<bf16> before = d.get();
                std::vector<bf16> want = before;
                qknorm_rope_backward_cpu(cpu(), want.data(), {nullptr, nullptr}, qkv.data(), {weights[0].data(), weights[1].data(), rope.data()}, batch.view(), {H, K, D, eps});
                std::vector<double> tolerance(want.size());
                for (size_t at = 0; at < want.size(); at += D) {
                    const size_t head = at % width / D;
                    if ((int)head >= H + K || (int)(at / width) >= used) continue; // v's and spare rows: the same
                    const std::vector<bf16>& w = weights[(int)head >= H];
                    const double r = rms_factor(&qkv[at], D, eps);
                    double most = 0, heaviest = 0;
                    for (int i = 0; i < D; i++) most = std::max<double>(most, std::fabs(to_acc(before[at + i]))), heaviest = std::max<double>(heaviest, to_acc(w[i]));
                    for (int i = 0; i < D; i++)
                        tolerance[at + i] = SCALED.attention * std::sqrt(2.) / 512 * most * r * (to_acc(w[i]) + std::fabs(to_acc(qkv[at + i])) * r * heaviest) + 2.2 * rounding<bf16>(to_acc(want[at + i])) + 1e-6;
                }
                CHECK(wrong(got.get(), as_double(want), [&](size_t i) { return tolerance[i]; }) == 0);
                // Where the norms' weights are trained, they are two.
                attend_backward_gpu(pad.ctx, both, {dw, dw + D}, g, {q, out, lse}, {keys, values}, x, {wq, wk, angles}, b, {H, K, D, eps}, delta);
                two.replace(before);
                qknorm_rope_backward_gpu(pad.ctx, two, {two_dw, two_dw + D}, x, {wq, wk, angles}, b, {H, K, D, eps});
                CHECK(same_bits(both.get(), two.get()));
                CHECK(same_bits(dw.get(), two_dw.get()));
            }
}

TEST_CASE("the length of the gradient and AdamW; a gradient that is not finite changes nothing") {
    Random random{5};
    Scratchpad pad;
    for (size_t n : {1, 255, 4096, 4097, 100000}) {
        INFO("n " << n);
        const std::vector<float> p = random.fill<float>(n), m = random.fill<float>(n), g = random.fill<float>(n);
        std::vector<float> v = random.fill<float>(n, 0.5, 0.5);
        Device<double> norm(1), pieces(n / NORM_PIECE + 1);
        Device<float> dp(p), dm(m), dv(v), dg(g);
        Device<bf16> stored(n);
        double want_norm;
        std::vector<double> partial(n / NORM_PIECE + 1);
        grad_norm_gpu(pad.ctx, norm, pieces, dg, n);
        grad_norm_cpu(cpu(), &want_norm, partial.data(), g.data(), n);
        CHECK(norm.get()[0] == doctest::Approx(want_norm).epsilon(1e-12));
        AdamW a;
        a.lr = 0.01f, a.decay = 0.1f, a.clip = 1, a.step = 3, a.copy = 2;
        std::vector<float> wp = p, wm = m, wv = v;
        std::vector<bf16> ws(n);
        adamw_gpu(pad.ctx, stored, dp, dm, dv, dg, norm, n, a);
        adamw_cpu(cpu(), ws.data(), wp.data(), wm.data(), wv.data(), g.data(), &want_norm, n, a);
        CHECK(wrong(dp.get(), as_double(wp), [&](size_t) { return 3e-7; }) == 0);
        CHECK(wrong(dm.get(), as_double(wm), [&](size_t) { return 3e-7; }) == 0);
        CHECK(wrong(dv.get(), as_double(wv), [&](size_t) { return 3e-7; }) == 0);
        CHECK(wrong(stored.get(), as_double(ws), [&](size_t i) { return 2.2 * rounding<bf16>(to_acc(ws[i])) + 1e-6; }) == 0);
        const std::vector<float> before = dp.get();
        norm.replace({INFINITY});
        adamw_gpu(pad.ctx, stored, dp, dm, dv, dg, norm, n, a);
        CHECK(same_bits(dp.get(), before));
    }
}

TEST_CASE("a whole model, all its parameters and an adapter of rank 4: each gradient is as near to fp32's as PyTorch's in bf16, and to the CPU's in bf16") {
    for (bool full : {false, true}) {
        const Tensor64 truth = whole_gradients<float>(Context(), full), cpu = whole_gradients<bf16>(Context(), full), got = whole_gradients<bf16>(gpu(), full);
        no_worse_than_pytorch(distances(got, truth, truth), full);
        no_worse_than_pytorch(distances(got, cpu, truth), full);
    }
}

// ---- Several GPUs: ranks are processes.
static int gpus() {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

static void write_rows(const std::string& path) {
    Random random{11};
    DatasetWriter writer(path, Tokenizer("tests/fixtures/tiny/tokenizer.bin").hash(), template_hash());
    for (int row = 0; row < 60; row++) {
        std::vector<uint32_t> words;
        for (int i = 0, n = 8 + (int)random.below(100); i < n; i++) words.push_back((uint32_t)random.below(900) | (i > n / 2 ? TRAIN : 0));
        writer.add(words);
    }
    writer.commit();
}

TEST_CASE("ranks on GPUs without NCCL end with one line that names it") {
    Scratch out;
    write_rows(out / "rows.bin");
    make_folder(out / "lib");
    write_file(out / "lib/libnccl.so.2", "no library");
    const std::string port = std::to_string(free_port());
    auto rank = [&](const char* number) { // both on the first GPU
        const Strings how = {"tests/fixtures/tiny/model.bin", out / "rows.bin", "-z", "tests/fixtures/tiny/tokenizer.bin", "-d", "cuda", "--steps", "2", "-o", out / "run"};
        return std::make_unique<Process>(program("TRAIN_LORA", "./train_lora"), how, "", [&] {
            const char* before = getenv("LD_LIBRARY_PATH");
            setenv("LD_LIBRARY_PATH", ((out / "lib") + (before ? ":" + std::string(before) : "")).c_str(), 1);
            setenv("MASTER_ADDR", "127.0.0.1", 1), setenv("MASTER_PORT", port.c_str(), 1), setenv("WORLD_SIZE", "2", 1);
            setenv("RANK", number, 1), setenv("LOCAL_RANK", "0", 1);
        });
    };
    const auto zero = rank("0"), one = rank("1");
    const Result r = zero->wait(), other = one->wait();
    INFO(r.err << other.err);
    CHECK(r.status == 1);
    CHECK(other.status == 1);
    const std::string last = lines(r.err).back();
    CHECK(last.find("several GPUs need NCCL: ") != std::string::npos);
    CHECK(last.find("libnccl.so.2: ") != std::string::npos);
    CHECK(last.find("apt-get install libnccl2") != std::string::npos);
    CHECK(!fs::exists(out / "run"));
}

TEST_CASE("two GPUs have one's curve with the same rows a step, by NCCL; twice the same bits, overlapped or not" * doctest::skip(gpus() < 2)) {
    Scratch out;
    write_rows(out / "rows.bin");
    auto train = [&](const std::string& name, Strings arguments) {
        const Strings how = {"tests/fixtures/tiny/model.bin", out / "rows.bin", "-z", "tests/fixtures/tiny/tokenizer.bin", "-d", "cuda", "--steps", "12", "--warmup", "0", "-o", out / name};
        arguments.insert(arguments.begin(), how.begin(), how.end());
        const Result r = Process(program("TRAIN_LORA", "./train_lora"), arguments).wait();
        INFO(name << ": " << r.err);
        REQUIRE(r.status == 0);
    };
    auto losses = [&](const std::string& name, const char* field) {
        std::vector<double> v;
        for (auto& line : lines(read_file(out / name + "/trainer_log.jsonl"))) v.push_back(Json(line)[field].number());
        return v;
    };
    for (const std::string kind : {"lora", "full"}) {
        INFO(kind);
        const Strings how = kind == "full" ? Strings{"--full", "--lr", "1e-3"} : Strings{"--rank", "8", "--lr", "1e-2"};
        auto with = [&](Strings more) { return more.insert(more.begin(), how.begin(), how.end()), more; };
        train(kind + "1", with({"--batch", "20"}));
        train(kind + "2", with({"--batch", "10", "--gpus", "2"}));
        train(kind + "3", with({"--batch", "10", "--gpus", "2", "--no-overlap"}));
        for (const char* field : {"loss", "grad_norm"}) {
            const std::vector<double> one = losses(kind + "1", field), two = losses(kind + "2", field);
            REQUIRE(two.size() == 12);
            for (size_t i = 0; i < 12; i++) {
                INFO(field << " of step " << i + 1);
                CHECK(two[i] == doctest::Approx(one[i]).epsilon(i ? 2e-2 : 1e-3)); // bf16: what differs grows with the steps
            }
            CHECK(losses(kind + "3", field) == two);
        }
        const std::string result = kind == "full" ? "/model.bin" : "/adapter_model.safetensors";
        CHECK(read_file(out / (kind + "2") + result) == read_file(out / (kind + "3") + result));
    }
}

#ifndef QWEN3_PORTABLE
TEST_CASE("train_lora --dora on the GPU: the CPU's losses, with dropout, recomputed, on packed weights; the adapter in use") {
    const ModelFile from("tests/fixtures/tiny/model.bin");
    const Scratch s;
    write_fixture_rows(s / "rows.bin");
    const Dataset data(s / "rows.bin");
    Quantization how;
    how.format = Format::INT4, how.group = 64;
    write_safetensors(s / "int4.bin", model_metadata(quantized_config(from, how), from.generation_text), quantize_model<bf16>(from, how, {}));
    for (const std::string& model : {from.path, s / "int4.bin"})
        for (float p : {0.f, 0.2f}) {
            const ModelFile file(model);
            std::vector<double> losses[3];
            for (int run = 0; run < 3; run++) { // on the CPU; on the GPU; recomputed
                TrainOptions o;
                o.packed = true, o.dropout = p, o.steps = 12, o.lr = 5e-3, o.shuffle = false, o.recompute = run == 2;
                o.rank_step = run ? GPU_RANK_STEP : 1;
                o.lora.rank = 8, o.lora.alpha = 16, o.lora.dora = true;
                std::fill(o.lora.targets, o.lora.targets + MODULES, true);
                Trainer<bf16> t(o, run ? gpu() : Context(), file, data, nullptr);
                while (t.step < 12) {
                    REQUIRE(t.train_step());
                    losses[run].push_back(t.last_loss);
                }
                losses[run].push_back(t.mean_loss(data, t.loader.rows));
                t.write_result(s / "a", 0);
            }
            CHECK(losses[1] == losses[2]);
            for (size_t i = 0; i < losses[0].size(); i++) {
                INFO("step " << i << " p " << p << ": " << losses[1][i] << ", the CPU's " << losses[0][i]);
                CHECK(std::fabs(losses[1][i] - losses[0][i]) < (i ? 0.03 * losses[0][0] : 5e-3));
            }
            CHECK(losses[1].back() < 0.8 * losses[1][0]);
            Weights<bf16> w(file, Format::PLAIN, true); // (a CPU keeps what is quantised)
            Context ctx = gpu();
            w.upload(ctx, file);
            const AdapterFile written(s / "a", file.config);
            const AttachedAdapter<bf16> attached(ctx, w, written, Session<bf16>::GPU_CHUNK);
            Session<bf16> session(file.config, w, 160, ctx);
            double sum = 0;
            for (size_t i = 0; i < data.rows(); i++) {
                std::vector<int> ids;
                for (uint32_t word : data.row(i)) ids.push_back((int)(word & ~TRAIN));
                session.rewind(0);
                size_t at = 0;
                session.feed(ids, nullptr, [&](const float* row) {
                    if (++at < ids.size() && data.row(i).first[at] & TRAIN) sum += log_sum(row, file.config.V, 1.f) - row[ids[at]];
                });
            }
            CHECK(sum / (double)data.trained() == doctest::Approx(losses[1].back()).epsilon(0.02));
        }
}

TEST_CASE("QLoRA on the GPU: gradients of adapters on packed weights are as near to the truth as PyTorch's bf16 ones, and the CPU's") {
    const ModelFile from("tests/fixtures/tiny/model.bin");
    for (Format format : {Format::INT4, Format::INT8, Format::FP8}) {
        CAPTURE((int)format);
        const Scratch s;
        const std::string model = s / "m.bin";
        Quantization how;
        how.format = format, how.group = 64;
        write_safetensors(model, model_metadata(quantized_config(from, how), from.generation_text), quantize_model<bf16>(from, how, {}));
        const Tensor64 truth = whole_gradients<float>(Context(), false, model), got = whole_gradients<bf16>(gpu(), false, model);
        no_worse_than_pytorch(distances(got, truth, truth), false);
    }
}
#endif // QWEN3_PORTABLE
