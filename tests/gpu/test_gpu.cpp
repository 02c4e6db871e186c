// Every CUDA kernel against its CPU definition, at odd sizes, on fresh random numbers, into poisoned memory; the whole
// model against the CPU's and Hugging Face's logits; and what the GPU promises: the same batch gives the same bits, with
// `invariant` a row does not depend on its batch, and draws are the CPU's. Built by nvcc, run where a GPU is.
#include "cpu/step_ceilings.h"
#include "model/device.h"
#include "model/fp8_activations.h"
#include "model/options.h"
#include "model/quantize.h"
#include "model/write.h"
#include "tests/far.h"
#include "tests/golden.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/checkpoint.h"
#include "server/engine/row_products.h"
#include <filesystem>
#include <sys/wait.h>

template <class A, class B> static double dot(const A* a, const B* b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)to_acc(a[i]) * (double)to_acc(b[i]);
    return sum;
}

static const std::vector<int> COUNTS = {1, 2, 7, 8, 9, 16, 17, 33, 65, 257, 1000};

TEST_CASE("embed and rmsnorm") {
    Random random{1};
    for (int N : COUNTS)
        for (int C : {8, 72, 128, 1032}) {
            INFO("N " << N << " C " << C);
            const int V = 50;
            Matrix table(random, {V}, C);
            TestBatch batch(random, {{0, N}}, V);
            Device<int> token(batch.token), seq(batch.seq);
            Device<float> x((size_t)N * C);
            Batch b = {N, 1, token, nullptr, seq, nullptr, nullptr, 0};
            embed_gpu(gpu(), x, table.device, b, C);
            std::vector<float> want((size_t)N * C);
            embed_cpu(cpu(), want.data(), table.host, batch.view(), C);
            CHECK(same_bits(x.get(), want));

            const std::vector<float> stream = random.fill<float>((size_t)N * C, 3);
            const std::vector<bf16> w = random.fill<bf16>(C, 1, 1);
            Device<float> dx(stream);
            Device<bf16> dw(w), out((size_t)N * C);
            rmsnorm_gpu(gpu(), out, dx, dw, N, C, 1e-6f);
            std::vector<bf16> expected((size_t)N * C);
            rmsnorm_cpu(cpu(), expected.data(), stream.data(), w.data(), N, C, 1e-6f);
            CHECK(differences(out.get(), expected, 0) == 0);
            Device<bf16> by_warps((size_t)N * C); // as where there are many tokens
            Context few = gpu();
            few.gpu = std::make_shared<Gpu>(*few.gpu), few.gpu->sms = 0;
            rmsnorm_gpu(few, by_warps, dx, dw, N, C, 1e-6f);
            CHECK(same_bits(by_warps.get(), out.get()));
        }
}

TEST_CASE("noise on embeddings") {
    Random random{3};
    for (int N : {1, 9, 257})
        for (int C : {8, 50, 1032}) {
            const std::vector<float> stream = random.fill<float>((size_t)N * C, 3), bound(N, 0.25f);
            std::vector<uint32_t> token(N);
            for (int n = 0; n < N; n++) token[n] = (uint32_t)(5 * n);
            Device<float> x(stream), device_bound(bound);
            Device<uint32_t> device_token(token);
            add_noise_gpu(gpu(), x, Noise{7, 11, device_token, device_bound}, N, C);
            std::vector<float> want = stream;
            add_noise(want.data(), Noise{7, 11, token.data(), bound.data()}, N, C);
            const std::vector<float> got = x.get();
            double worst = 0;
            for (size_t i = 0; i < got.size(); i++) worst = std::max(worst, (double)std::fabs(got[i] - want[i]));
            CHECK(worst < 1e-6);
        }
}

TEST_CASE("products, with every epilogue, alone and after a norm") {
    Random random{2};
    Scratchpad pad;
    struct Shape { std::vector<int> rows; int in; };
    for (const Shape& shape : {Shape{{8}, 8}, Shape{{64, 32, 32}, 80}, Shape{{200}, 136}, Shape{{256, 128, 128}, 1024}, Shape{{1024}, 2048}, Shape{{72}, 3072}})
        for (int N : COUNTS) {
            if ((size_t)N * shape.in > 600000) continue; // the CPU's time
            Matrix W(random, shape.rows, shape.in);
            const int R = W.host.out(), K = shape.in;
            INFO("N " << N << " R " << R << " K " << K);
            const std::vector<bf16> x = random.fill<bf16>((size_t)N * K), norm = random.fill<bf16>(K, 1, 1);
            const std::vector<float> residual = random.fill<float>((size_t)N * R), stream = random.fill<float>((size_t)N * K, 2);
            Device<bf16> dx(x), dnorm(norm), out((size_t)N * R), normed((size_t)N * K);
            Device<float> dresidual(residual), sum((size_t)N * R), dstream(stream);
            std::vector<bf16> want((size_t)N * R), scratch((size_t)N * K);
            std::vector<float> want_sum((size_t)N * R);
            linear_gpu(pad.ctx, out, dx, W.device, N);
            linear_cpu(cpu(), want.data(), x.data(), W.host, N);
            CHECK(differences(out.get(), want, K) == 0);
            linear_add_gpu(pad.ctx, sum, dresidual, dx, W.device, N);
            linear_add_cpu(cpu(), want_sum.data(), residual.data(), x.data(), W.host, N);
            CHECK(wrong(sum.get(), as_double(want_sum), [&](size_t) { return sum_error<float>(K) * 4; }) == 0);
            // After a norm a rounding may fall to the other side and change an output by 2^-8 of one term.
            norm_linear_gpu(pad.ctx, out, normed, dstream, dnorm, W.device, N, 1e-6f);
            norm_linear_cpu(cpu(), want.data(), scratch.data(), stream.data(), norm.data(), W.host, N, 1e-6f);
            CHECK(wrong(out.get(), as_double(want), [&](size_t i) { return 2.2 * rounding<bf16>(to_acc(want[i])) + 0.03; }) == 0);
            if (shape.rows.size() != 1) continue;
            // SwiGLU: this W's rows twice.
            Matrix G(random, {R, R}, K);
            Device<bf16> hidden((size_t)N * R), gate_up((size_t)N * 2 * R);
            std::vector<bf16> want_hidden((size_t)N * R), want_gate_up((size_t)N * 2 * R);
            for (bf16* kept : {gate_up.data, (bf16*)nullptr}) {
                product_gpu(pad.ctx, SwigluEpilogue(hidden, kept, R), dx, G.device, N);
                linear_cpu(cpu(), want_gate_up.data(), x.data(), G.host, N);
                swiglu_cpu(cpu(), want_hidden.data(), want_gate_up.data(), N, R);
                auto close = [&](size_t i) { // half a unit of gate or of up, and of the output
                    const double g = to_acc(want_gate_up[i / R * 2 * R + i % R]), u = to_acc(want_gate_up[(i / R * 2 + 1) * R + i % R]);
                    return 2.2 * (rounding<bf16>(to_acc(want_hidden[i])) + 1.1 * rounding<bf16>(g) * std::fabs(u) + rounding<bf16>(u) * std::fabs(g)) + 1e-5 * K;
                };
                CHECK(wrong(hidden.get(), as_double(want_hidden), close) == 0);
                if (kept) CHECK(differences(gate_up.get(), want_gate_up, K) == 0);
            }
            norm_linear_swiglu_gpu(pad.ctx, hidden, nullptr, normed, dstream, dnorm, G.device, N, 1e-6f);
            norm_linear_swiglu_cpu(cpu(), want_hidden.data(), want_gate_up.data(), scratch.data(), stream.data(), norm.data(), G.host, N, 1e-6f);
            CHECK(wrong(hidden.get(), as_double(want_hidden), [&](size_t i) { return 0.03 * std::fabs(to_acc(want_hidden[i])) + 0.1; }) == 0);
            // The head: any rows, in any order.
            std::vector<int> rows;
            for (int r = 0; r < std::min(N, 40); r++) rows.push_back(random.below(N));
            Device<int> drows(rows);
            Device<bf16> picked(rows.size() * K);
            Device<float> logits(rows.size() * R);
            std::vector<float> want_logits(rows.size() * R);
            std::vector<bf16> want_picked(rows.size() * K);
            head_gpu(pad.ctx, logits, picked, dx, drows, W.device, (int)rows.size());
            head_cpu(cpu(), want_logits.data(), want_picked.data(), x.data(), rows.data(), W.host, (int)rows.size());
            CHECK(wrong(logits.get(), as_double(want_logits), [&](size_t) { return sum_error<float>(K) * 4; }) == 0);
        }
}

// (rows, columns) -> (columns, rows)
static std::vector<bf16> transposed(const bf16* w, int rows, int columns) {
    std::vector<bf16> t((size_t)rows * columns);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) t[(size_t)c * rows + r] = w[(size_t)r * columns + c];
    return t;
}

TEST_CASE("products of every tile shape, operand layout and number of splits, with further columns; their counters end at zero") {
    Random random{3};
    Scratchpad pad;
    struct Problem { int N, R, K, more; };
    for (const Problem& problem : {Problem{104, 200, 520, 0}, Problem{136, 264, 1024, 96}, Problem{24, 72, 4096, 8}, Problem{128, 128, 256, 64}, Problem{264, 136, 1001, 0}}) {
        const int N = problem.N, R = problem.R, K = problem.K, more = problem.more;
        Matrix W(random, {R}, K + more);
        const std::vector<bf16> x = random.fill<bf16>((size_t)N * (K + more));
        std::vector<bf16> want((size_t)N * R), with_more((size_t)N * R), own_x((size_t)N * K), own_w((size_t)R * K), more_x((size_t)N * more), more_w((size_t)R * more);
        auto part = [&](std::vector<bf16>& to, const bf16* from, int rows, int first, int columns) {
            for (int r = 0; r < rows; r++) std::copy_n(from + (size_t)r * (K + more) + first, columns, to.begin() + (size_t)r * columns);
        };
        part(own_x, x.data(), N, 0, K), part(own_w, W.w.data(), R, 0, K), part(more_x, x.data(), N, K, more), part(more_w, W.w.data(), R, K, more);
        linear_cpu(cpu(), with_more.data(), x.data(), W.host, N);
        Linear<bf16> own;
        own.w[0] = own_w.data(), own.rows[0] = R, own.in = K;
        linear_cpu(cpu(), want.data(), own_x.data(), own, N);
        const Device<bf16> dx(own_x), dw(own_w), dmore_x(more_x), dmore_w(more_w), more_w_cols(transposed(more_w.data(), R, more)), x_cols(transposed(own_x.data(), N, K)), w_cols(transposed(own_w.data(), R, K));
        for (int splits : {1, 2, 3, 7, 8, 16}) {
            auto check = [&](auto hopper, auto shape, auto columns_x, auto columns_w, bool further) {
                constexpr bool X_COLS = decltype(columns_x)::value, W_COLS = decltype(columns_w)::value;
                using S = decltype(shape);
                INFO("N " << N << " R " << R << " K " << K << " splits " << splits << " tile " << S::TOKENS << " x " << S::ROWS << " Hopper " << hopper << " columns " << X_COLS << W_COLS << " further " << further);
                TileArgs args = {X_COLS ? x_cols : dx, W_COLS ? w_cols : dw, N, K, R};
                if (further) args.more_x = dmore_x, args.more_W = W_COLS ? more_w_cols : dmore_w, args.more = more;
                args.splits = splits;
                Device<bf16> out((size_t)N * R), again((size_t)N * R);
                auto run = [&](bf16* to) {
                    const StoreEpilogue<bf16> epilogue(to, R);
#ifndef QWEN3_PORTABLE
                    if constexpr (hopper) return launch_hopper<S, X_COLS, W_COLS>(pad.ctx, args, epilogue);
#endif
                    if constexpr (!hopper) launch_tiles<S, X_COLS, W_COLS>(pad.ctx, args, epilogue);
                };
                run(out);
                CHECK(differences(out.get(), further ? with_more : want, K) == 0);
                run(again);
                CHECK(same_bits(out.get(), again.get()));
            };
            const std::false_type rows;
            const std::true_type columns;
            [[maybe_unused]] auto forward = [&](auto shape) {
                if (K % 8 == 0) check(columns, shape, rows, rows, false);
                if (K % 8 == 0 && more) check(columns, shape, rows, rows, true);
            };
            auto layouts = [&](auto hopper, auto shape) {
                if (K % 8 == 0) {
                    check(hopper, shape, rows, rows, false);
                    check(hopper, shape, rows, columns, false);
                    if (more) check(hopper, shape, rows, rows, true), check(hopper, shape, rows, columns, true);
                }
                if constexpr (decltype(shape)::TOKENS >= 64) check(hopper, shape, columns, columns, false);
            };
            layouts(rows, Tile128x128{});
            layouts(rows, Tile64x128{});
            layouts(rows, Tile64x64{});
            layouts(rows, Tile32x64{});
#ifndef QWEN3_PORTABLE
            if (!pad.ctx.gpu->hopper || splits > std::min(K / STAGE_IN, MOST_SPLITS)) continue;
            layouts(columns, Hopper128x256{});
            if (splits == 1) layouts(columns, HopperPairs{});
            layouts(columns, Hopper128x192{});
            layouts(columns, Hopper128x128{});
            layouts(columns, Hopper64x64{});
            if (N <= Hopper32x64::MOST) forward(Hopper32x64{});
            forward(Hopper64x64Deep{});
            forward(Hopper64x128{});
            forward(Hopper128x64{});
            forward(Hopper128x96{});
#endif
        }
    }
    for (int n : pad.arrived.get()) CHECK(n == 0);
}

#ifndef QWEN3_PORTABLE
// Products product(epilogue) with packed W of N tokens, with every epilogue but the head's: y up to a rounding and `off`,
// and to `adding` where something is added; twice the same bits.
template <class Product>
static void check_epilogues(Random& random, const PackedMatrix& W, int N, const std::vector<double>& y,
                            const std::vector<double>& off, double adding, Product product) {
    const int R = W.host.out(), F = W.host.rows[0];
    const auto near = [&](size_t i) { return rounding<bf16>(y[i]) + off[i]; };
    Device<bf16> out((size_t)N * R), again((size_t)N * R);
    product(StoreEpilogue<bf16>(out, R));
    CHECK(wrong(out.get(), y, near) == 0);
    product(StoreEpilogue<bf16>(again, R));
    CHECK(same_bits(out.get(), again.get()));
    const std::vector<float> residual = random.fill<float>((size_t)N * R);
    const Device<float> dresidual(residual);
    Device<float> sum((size_t)N * R);
    product(AddEpilogue(sum, dresidual, R));
    std::vector<double> added = y;
    for (size_t i = 0; i < added.size(); i++) added[i] += residual[i];
    CHECK(wrong(sum.get(), added, [&](size_t i) { return rounding<float>(added[i]) + off[i] + adding; }) == 0);
    if (W.host.rows[1] != F || R != 2 * F) return; // (gate and up)
    Device<bf16> hidden((size_t)N * F), alone((size_t)N * F), gate_up((size_t)N * R);
    product(SwigluEpilogue(hidden, gate_up, F));
    CHECK(wrong(gate_up.get(), y, near) == 0);
    std::vector<bf16> want((size_t)N * F);
    const std::vector<bf16> both = gate_up.get();
    swiglu_cpu(cpu(), want.data(), both.data(), N, F);
    CHECK(differences(hidden.get(), want, 1) == 0);
    product(SwigluEpilogue(alone, nullptr, F));
    CHECK(same_bits(alone.get(), hidden.get()));
}
static void check_products(Random& random, Context& ctx, const PackedMatrix& W, const Device<bf16>& x, int N,
                           const std::vector<double>& y, const std::vector<double>& off, double adding = 0) {
    check_epilogues(random, W, N, y, off, adding, [&](auto epilogue) {
        using E = decltype(epilogue);
        if constexpr (E::PAIR) product_gpu(ctx, epilogue, x, W.device, N);
        else if constexpr (E::ADDS) linear_add_gpu(ctx, epilogue.out, epilogue.residual, x, W.device, N);
        else linear_gpu(ctx, epilogue.out, x, W.device, N);
    });
}
// The head's, of the tokens in reverse order.
static void check_head(Context& ctx, const PackedMatrix& W, const Device<bf16>& x, int N, const std::vector<double>& y,
                       const std::vector<double>& off) {
    const int R = W.host.out();
    std::vector<int> rows;
    for (int n = 0; n < N; n++) rows.push_back(N - 1 - n);
    const Device<int> drows(rows);
    Device<bf16> picked((size_t)N * W.host.in);
    Device<float> logits((size_t)N * R);
    head_gpu(ctx, logits, picked, x, drows, W.device, N);
    const auto turned = [&](size_t i) { return (N - 1 - i / R) * R + i % R; };
    std::vector<double> want(y.size());
    for (size_t i = 0; i < y.size(); i++) want[i] = y[turned(i)];
    CHECK(wrong(logits.get(), want, [&](size_t i) { return off[turned(i)]; }) == 0);
}

TEST_CASE("packed weights, few tokens: products are those of W.at, with every epilogue") {
    Random random{21};
    Scratchpad pad;
    struct Shape { std::vector<int> rows; int in; };
    for (const PackedKind& kind : PACKED_KINDS)
        for (const Shape& shape : {Shape{{8}, 8}, Shape{{24, 7, 9}, 40}, Shape{{72, 72}, 136}, Shape{{200}, 1096}, Shape{{2200}, 128}}) {
            PackedMatrix W(random, kind, shape.rows, shape.in, 8);
            W.use(pad.ctx);
            const int R = W.host.out(), K = shape.in;
            for (int N : {1, 2, 8, 9, 16}) {
                INFO("format " << (int)kind.format << " group " << kind.group << " zeros " << kind.zeros << " N " << N << " R " << R << " K " << K);
                const std::vector<bf16> x = random.fill<bf16>((size_t)N * K);
                const std::vector<double> y = WideLinear(W.host)(as_double(x), N);
                std::vector<double> off = WideLinear(W.host, true)(magnitudes(x), N);
                for (double& v : off) v = sum_error<float>(v);
                const Device<bf16> dx(x);
                check_products(random, pad.ctx, W, dx, N, y, off, sum_error<float>(1));
                check_head(pad.ctx, W, dx, N, y, off);
            }
        }
}

// The same by one tile, with every number of warpgroups and splits; and in a few blocks, which take tiles in turn.
template <class F, int TOKENS>
static void check_tiles(Random& random, Context& ctx, const PackedMatrix& W, const Device<bf16>& x, int N,
                        const std::vector<double>& y, const std::vector<double>& off) {
    const int R = W.host.out(), K = W.host.in, all = ctx.gpu->sms;
    const std::pair<int, int> ways[] = {{1, all}, {2, all}, {3, all}, {8, all}, {1, 4}};
    for (int warpgroups = 1; warpgroups <= PackedTile<F, TOKENS>::WARPGROUPS; warpgroups++)
        for (const auto& way : ways) {
            const int splits = way.first, sms = way.second;
            if (splits > (K + PACKED_IN - 1) / PACKED_IN || (R > 1000 && (splits > 1 || sms < all))) continue;
            INFO("tokens " << TOKENS << " warpgroups " << warpgroups << " splits " << splits << " multiprocessors " << sms);
            ctx.gpu->sms = sms;
            const auto product = [&](auto epilogue) {
                PackedArgs p = packed_args(W.device);
                p.x = x, p.N = N;
                if (epilogue.PAIR) p.out = W.host.rows[0];
                launch_packed_hopper<F, TOKENS>(ctx, p, {TOKENS, warpgroups, splits}, epilogue);
            };
            Device<float> logits((size_t)N * R);
            product(StoreEpilogue<float>(logits, R));
            CHECK(wrong(logits.get(), y, [&](size_t i) { return off[i]; }) == 0);
            check_epilogues(random, W, N, y, off, sum_error<float>(1), product);
            ctx.gpu->sms = all;
        }
}
TEST_CASE("packed weights, 17 tokens and more on Hopper: products are those of W.at rounded, with every epilogue, tile and number of splits") {
    if (!gpu().gpu->hopper) return;
    Random random{24};
    Scratchpad pad;
    struct Case { std::vector<int> rows; int in; std::vector<int> tokens; };
    const Case cases[] = {{{8}, 16, {17, 129}},
                          {{72, 16, 24}, 464, {17, 33, 64, 65, 100, 128, 129, 257, 500}},
                          {{136, 136}, 1040, {17, 64, 100, 128, 200, 256, 300, 512}},
                          {{1160, 1160}, 144, {1000, 2000}}};
    for (const PackedKind& kind : PACKED_KINDS)
        for (const Case& c : cases) {
            if (c.rows[0] > 1000 && kind.format != Format::INT8) continue; // (the definition takes its time)
            PackedMatrix W(random, kind, c.rows, c.in, 8); // (no room to unpack it)
            W.use(pad.ctx);
            if (!streams_packed(pad.ctx, W.device, 17)) continue;
            const double slack = kind.format == Format::FP8 ? 4e-3 : 0; // an operand may be rounded the other way
            const WideLinear wide(W.plain), sizes(W.plain, true);
            for (int N : c.tokens) {
                INFO("format " << (int)kind.format << " group " << kind.group << " zeros " << kind.zeros << " N " << N << " R " << W.host.out() << " K " << c.in);
                const std::vector<bf16> x = random.fill<bf16>((size_t)N * c.in);
                const std::vector<double> y = wide(as_double(x), N);
                std::vector<double> off = sizes(magnitudes(x), N);
                for (double& v : off) v = sum_error<float>(4 * v) + slack * v;
                const Device<bf16> dx(x);
                check_products(random, pad.ctx, W, dx, N, y, off, sum_error<float>(1));
                check_head(pad.ctx, W, dx, N, y, off);
                with_packing(W.device, [&](auto format) {
                    using F = decltype(format);
                    if (N <= 64 || N == 257) check_tiles<F, 64>(random, pad.ctx, W, dx, N, y, off);
                    if (N > 64) check_tiles<F, 128>(random, pad.ctx, W, dx, N, y, off);
                    if (N > 128) check_tiles<F, 256>(random, pad.ctx, W, dx, N, y, off);
                }, PACKED_IN - 1);
            }
        }
}

TEST_CASE("packed weights, many tokens: unpacked they are W.at rounded, and forward and backward have the bits of a bf16 matrix") {
    Random random{22};
    Scratchpad pad;
    for (const PackedKind& kind : PACKED_KINDS)
        for (const auto& [blocks, in] : {std::pair(std::vector<int>{64, 24, 40}, 72), {std::vector<int>{136}, 1096}, {std::vector<int>{264}, 192}}) {
            const int R = std::accumulate(blocks.begin(), blocks.end(), 0), K = in;
            PackedMatrix W(random, kind, blocks, K, (size_t)R * K);
            W.use(pad.ctx);
            for (int N : {136, 200, UNPACKED_FROM}) {
                INFO("format " << (int)kind.format << " group " << kind.group << " zeros " << kind.zeros << " N " << N << " R " << R << " K " << K);
                const Device<bf16> x(random.fill<bf16>((size_t)N * K)), dy(random.fill<bf16>((size_t)N * R));
                Device<bf16> a((size_t)N * R), b((size_t)N * R), da((size_t)N * K), db((size_t)N * K);
                linear_gpu(pad.ctx, a, x, W.device, N);
                linear_gpu(pad.ctx, b, x, W.plain_device, N);
                if (!streams_packed(pad.ctx, W.device, N)) CHECK(same_bits(a.get(), b.get())); // (else nothing was unpacked)
                bf16* const none = nullptr;
                linear_backward_input_gpu(pad.ctx, da, none, nullptr, dy, W.device, N);
                CHECK(same_bits(W.scratch.get(), W.rounded));
                linear_backward_input_gpu(pad.ctx, db, none, nullptr, dy, W.plain_device, N);
                CHECK(same_bits(da.get(), db.get()));
            }
        }
}

// How far x W^T may be off if tensor cores multiply e4m3. Hopper's add 32 products at once to the sum of those before in
// the group: all are aligned to the largest, and what is more than about 13 bits behind its first is cut off, in the
// result too. So each of these 34 numbers is off by at most 2^-13 of the largest. (What is cut off has either sign:
// errors come to a tenth of this, but a wrong number or scale to several times as much.) Groups' sums are float.
static std::vector<double> e4m3_bounds(const WideLinear& W, const std::vector<double>& x, int N) {
    const int R = W.out(), K = W.in;
    std::vector<double> bounds((size_t)N * R);
    #pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int r = 0; r < R; r++) {
            double bound = 0, sum = 0, all = 0;
            for (int i = 0; i < K;) {
                if (i % FP8_GROUP == 0) sum = 0;
                double largest = std::fabs(sum);
                for (const int end = std::min(i + 32, K); i < end; i++) {
                    const double term = x[(size_t)n * K + i] * W.all[(size_t)r * K + i];
                    sum += term, all += std::fabs(term), largest = std::max(largest, std::fabs(term));
                }
                bound += 34 * 0x1p-13 * std::max(largest, std::fabs(sum));
            }
            bounds[(size_t)n * R + r] = bound + sum_error<float>(all);
        }
    return bounds;
}
TEST_CASE("FP8 activations: rounded as defined; products of e4m3 are those of the rounded numbers, with every epilogue") {
    Random random{24};
    Scratchpad pad;
    pad.ctx.fp8_activations = true;
    const PackedKind kind = {Format::FP8, 128, false};
    const std::tuple<std::vector<int>, int, int> shapes[] = {
        {{128}, 128, 128}, {{256, 128, 72}, 1040, 128}, {{384, 384}, 656, 128}, {{1408}, 272, 128}, {{136}, 1096, 128}, {{136, 136}, 400, 5},
        {{128}, 4096, 128}, {{4096, 4096}, 256, 128}};
    std::set<int> seen;
    for (const auto& [blocks, in, high] : shapes) {
        const int R = std::accumulate(blocks.begin(), blocks.end(), 0), K = in;
        PackedMatrix W(random, kind, blocks, K, (size_t)R * K, high);
        W.use(pad.ctx);
        const bool e4m3 = takes_e4m3(W.device);
        CHECK(e4m3 == (pad.ctx.gpu->sm >= 89 && high == 128 && K % 16 == 0));
        for (int N : {17, 65, 129, 300}) {
            if (R > 4096 && N != 129) continue; // (for the widest tile; the definition takes its time)
            INFO("N " << N << " R " << R << " K " << K);
            if (e4m3 && pad.ctx.gpu->hopper) seen.insert(E4M3Plan(pad.ctx, N, R, K / 2).shape);
            const std::vector<bf16> x = random.fill<bf16>((size_t)N * K);
            std::vector<bf16> exact(x.size());
            round_activations(exact.data(), x.data(), N, K);
            Device<bf16> scratch((size_t)(N + 127) / 128 * 128 * K), dx(x);
            pad.ctx.gpu->rounded = scratch, pad.ctx.gpu->rounded_numbers = scratch.n;
            round_to_bf16(pad.ctx, dx, N, K);
            std::vector<bf16> got = scratch.get();
            got.resize(exact.size());
            CHECK(same_bits(got, exact));
            const WideLinear wide(W.host);
            const std::vector<double> y = wide(as_double(exact), N);
            std::vector<double> off = WideLinear(W.host, true)(magnitudes(exact), N);
            for (double& v : off) v *= 0x1p-8; // W is rounded
            if (e4m3) off = e4m3_bounds(wide, as_double(exact), N);
            const bool hopper = pad.ctx.gpu->hopper;
            check_products(random, pad.ctx, W, dx, N, y, off);
            pad.ctx.gpu->hopper = false; // mma.sync
            if (hopper) check_products(random, pad.ctx, W, dx, N, y, off);
            pad.ctx.gpu->hopper = hopper;
        }
        const Device<bf16> few(random.fill<bf16>((size_t)16 * K)); // of so few nothing is rounded
        Device<bf16> a((size_t)16 * R), b((size_t)16 * R);
        linear_gpu(pad.ctx, a, few, W.device, 16);
        packed_product(pad.ctx, StoreEpilogue<bf16>(b, R), few, nullptr, W.device, 16);
        CHECK(same_bits(a.get(), b.get()));
    }
    if (pad.ctx.gpu->hopper && pad.ctx.gpu->sms == 132) CHECK(seen.size() >= 6); // tiles
    ModelOptions o;
    o.device = "cuda", o.packed = true, o.activations = "fp8";
    CHECK(choose_device(o, Golden("quantized/fp8").file).fp8_activations);
}

// x as e4m3 in the scratch: its bytes, then the scales of its tokens.
static std::vector<uint8_t> e4m3_in(const Device<bf16>& scratch, const E4M3Rows& r, int N, int in) {
    const std::vector<bf16> all = scratch.get();
    const uint8_t* const from = (const uint8_t*)all.data();
    const auto at = [&](const void* p) { return from + ((const uint8_t*)p - (const uint8_t*)(const bf16*)scratch.data); };
    std::vector<uint8_t> bytes(at(r.q), at(r.q) + (size_t)N * in);
    for (int g = 0; g < (in + FP8_GROUP - 1) / FP8_GROUP; g++)
        bytes.insert(bytes.end(), at(r.scale + g * r.pitch), at(r.scale + g * r.pitch + N));
    return bytes;
}
TEST_CASE("FP8 activations: norm and SwiGLU leave what round_kernel makes of their outputs") {
    Random random{25};
    Scratchpad pad;
    pad.ctx.fp8_activations = true;
    const auto check = [&](const Device<bf16>& scratch, const E4M3Rows& got, const bf16* x, int N, int in) {
        const std::vector<uint8_t> left = e4m3_in(scratch, got, N, in);
        const E4M3Rows want = first_rows(pad.ctx, N, in);
        launch_round<true>(pad.ctx, want, x, N, in);
        CHECK(left == e4m3_in(scratch, want, N, in));
    };
    const auto use = [&](const Device<bf16>& scratch) { pad.ctx.gpu->rounded = scratch, pad.ctx.gpu->rounded_numbers = scratch.n; };
    for (int C : {128, 272, 1040, 4096}) for (int N : {17, 129}) {
        INFO("C " << C << " N " << N);
        std::vector<float> numbers = random.fill<float>((size_t)N * C);
        numbers[5] = NAN, std::fill_n(numbers.begin() + C, C, 0.f);
        const Device<float> x(numbers);
        const Device<bf16> weight(random.fill<bf16>(C));
        Device<bf16> normed((size_t)N * C), scratch((size_t)256 * C);
        use(scratch);
        rmsnorm_gpu(pad.ctx, normed, x, weight, N, C, 1e-6f);
        const E4M3Rows got = first_rows(pad.ctx, N, C);
        rmsnorm_rounded_gpu(pad.ctx, got, x, weight, N, C, 1e-6f);
        check(scratch, got, normed, N, C);
    }
    if (!pad.ctx.gpu->hopper) return;
    const int F = 1536, C = 272;
    PackedMatrix W(random, {Format::FP8, 128, false}, {F, F}, C, (size_t)2 * F * C, 128);
    for (int N : {1300, 1408}) { // (as many tiles of 128 x 256 as an H100 has multiprocessors)
        const Device<float> x(random.fill<float>((size_t)N * C));
        const Device<bf16> weight(random.fill<bf16>(C));
        Device<bf16> normed((size_t)N * C), hidden((size_t)N * F), scratch((size_t)1408 * F);
        use(scratch);
        E4M3Rows left;
        norm_linear_swiglu_gpu(pad.ctx, hidden, nullptr, normed, x, weight, W.device, N, 1e-6f, &left);
        CHECK((left.q || pad.ctx.gpu->sms != 132));
        if (left.q) check(scratch, left, hidden, N, F);
    }
}

TEST_CASE("packed weights, a head larger than the scratch: logits, losses and gradients are those of a bf16 head; the embedding is W.at") {
    Random random{23};
    Scratchpad pad;
    const int V = 1000, C = 136, N = 100;
    for (const PackedKind& kind : PACKED_KINDS) {
        INFO("format " << (int)kind.format << " group " << kind.group << " zeros " << kind.zeros);
        PackedMatrix W(random, kind, {V}, C, (size_t)V * 64); // three parts of the columns; of the rows 470, so 448 at a time
        W.use(pad.ctx);
        const std::vector<bf16> x = random.fill<bf16>((size_t)N * C, 0.02);
        std::vector<int> rows, target;
        for (int n = 0; n < N; n++) rows.push_back(N - 1 - n), target.push_back(random.below(V));
        const Device<bf16> dx(x);
        const Device<int> drows(rows), dtarget(target);
        Device<bf16> picked((size_t)N * C), dn[2] = {Device<bf16>((size_t)N * C), Device<bf16>((size_t)N * C)};
        Device<float> logits[2] = {Device<float>((size_t)N * V), Device<float>((size_t)N * V)}, loss[2] = {Device<float>(N), Device<float>(N)};
        Device<float> parts((size_t)N * ((V + 63) / 64 + 1) * 2), factor(N);
        const Linear<bf16>* both[2] = {&W.device, &W.plain_device};
        std::vector<std::vector<float>> seen;
        for (int i = 0; i < 2; i++) {
            head_gpu(pad.ctx, logits[i], picked, dx, drows, *both[i], N);
            seen.push_back(logits[i].get());
            head_loss_gpu(pad.ctx, loss[i], (bf16*)logits[i].data, factor, logits[i], picked, parts, dx, {drows, dtarget, 0.01f, nullptr, N}, *both[i]);
            head_backward_gpu(pad.ctx, dn[i], (bf16*)logits[i].data, V, factor, drows, *both[i], N);
        }
        const std::vector<double> size = WideLinear(W.plain, true)(magnitudes(x), N);
        CHECK(wrong(seen[0], as_double(seen[1]), [&](size_t i) { return 2 * sum_error<float>(size[(N - 1 - i / V) * V + i % V]); }) == 0);
        const auto one = loss[0].get(), two = loss[1].get();
        for (int n = 0; n < N; n++) CHECK(one[n] == doctest::Approx(two[n]).epsilon(1e-4));
        const auto g = as_double(dn[1].get());
        double largest = 0;
        for (double y : g) largest = std::max(largest, std::fabs(y));
        CHECK(largest > 0);
        CHECK(wrong(dn[0].get(), g, [&](size_t i) { return 2.2 * rounding<bf16>(g[i]) + 0.01 * largest; }) == 0);
        TestBatch batch(random, {{0, 30}}, V, 2);
        Device<int> token(batch.token), seq(batch.seq);
        Device<float> embedded((size_t)32 * C);
        const Batch b = {32, 1, token, nullptr, seq, nullptr, nullptr, 0};
        embed_gpu(pad.ctx, embedded, W.device, b, C);
        const auto e = embedded.get();
        for (int n = 0; n < 30; n++)
            for (int i = 0; i < C; i++) REQUIRE(e[(size_t)n * C + i] == W.host.at(batch.token[n], i));
    }
}

TEST_CASE("packed models on the GPU: logits as near to transformers' as bf16, drawn and greedy answers go on") {
    for (std::string model : {"awq", "fp8"}) {
        CAPTURE(model);
        const Golden g("quantized/" + model);
        Weights<bf16> w(g.file, Format::PLAIN, true);
        Context ctx = gpu();
        ctx.gpu = std::make_shared<Gpu>(*ctx.gpu);
        w.upload(ctx, g.file);
        CHECK(w.layers[0].down.format != Format::PLAIN);
        std::vector<float> logits;
        for (auto& prompt : g.prompts) {
            Session<bf16> session(g.file.config, w, 64, ctx);
            session.feed(prompt, nullptr, [&](const float* row) { logits.insert(logits.end(), row, row + g.file.config.V); });
            Generation how;
            how.max_tokens = 12, how.sampling.temperature = 0.8f;
            generate(session, nullptr, how, [](std::string_view) {});
            CHECK((how.ids.size() == 12 || how.finish == std::string("stop")));
        }
        CHECK(mean_kl(g.logits, logits, g.file.config.V) <= g.bf16_kl);
    }
}
#endif // QWEN3_PORTABLE

TEST_CASE("GPTQ on the GPU: as near the model on its text as GPTQ on the CPU, and nearer than the nearest numbers") {
    const ModelFile file("tests/fixtures/tiny/model.bin");
    const Config& c = file.config;
    Random random{33};
    Quantization how;
    how.format = Format::INT4, how.group = 32, how.window = 250;
    for (int i = 0; i < 1100; i++) how.text.push_back(random.below(c.V) / (1 + random.below(20)));
    Context one = gpu();
    one.gpu = std::make_shared<Gpu>(*one.gpu);
    const auto logits = [&](const ModelFile& of) {
        const Weights<bf16> w(of);
        Session<bf16> session(of.config, w, 1000);
        std::vector<float> all;
        session.feed({how.text.begin(), how.text.begin() + 1000}, nullptr, [&](const float* row) { all.insert(all.end(), row, row + c.V); });
        return all;
    };
    const std::vector<float> truth = logits(file);
    const auto cost = [&](const Quantization& q, const Context& where) {
        char path[] = "/tmp/qwen3_gptq.XXXXXX";
        close(mkstemp(path));
        write_safetensors(path, model_metadata(quantized_config(file, q), file.generation_text), quantize_model<bf16>(file, q, where));
        const double kl = mean_kl(truth, logits(ModelFile(path)), c.V);
        unlink(path);
        return kl;
    };
    Quantization nearest = how;
    nearest.text.clear();
    const double on_cpu = cost(how, cpu()), on_gpu = cost(how, one), rounded = cost(nearest, cpu());
    CAPTURE(on_cpu);
    CAPTURE(on_gpu);
    CHECK(on_gpu < 1.2 * on_cpu);
    CHECK(on_gpu < 0.9 * rounded);
    CHECK(cost(how, one) == on_gpu);
}

TEST_CASE("products that no kernel can compute are refused") {
    Random random{12};
    Scratchpad pad;
    const Device<bf16> x(random.fill<bf16>(64 * 64)), W(random.fill<bf16>(64 * 64));
    Device<bf16> out(64 * 64);
    const StoreEpilogue<bf16> store(out, 64);
    TileArgs p = {x, W, 64, 64, 64};
    p.more_x = x, p.more_W = W, p.more = 8;
    launch_tiles<Tile64x64>(pad.ctx, p, store);
    CHECK_THROWS_AS((launch_tiles<Tile64x64, true, true>(pad.ctx, p, store)), Error); // x in columns has no further ones
    CHECK_THROWS_AS((tile_product<true, true>(pad.ctx, p, store)), Error);
    p.more = 4;
    CHECK_THROWS_AS(launch_tiles<Tile64x64>(pad.ctx, p, store), Error);
    p.more = 0, p.in = 60;
    CHECK_THROWS_AS(launch_tiles<Tile64x64>(pad.ctx, p, store), Error);
    p.in = 64, p.splits = 1 << 20; // more sums than there is scratch
    CHECK_THROWS_AS(launch_tiles<Tile64x64>(pad.ctx, p, store), Error);
    p.splits = 0;
    CHECK_THROWS_AS(launch_tiles<Tile64x64>(pad.ctx, p, store), Error);
    auto stream = [&](int N, int in) { stream_product(pad.ctx, StreamArgs::of(x, W, N, in, 64), store); };
    stream(16, 64);
    CHECK_THROWS_AS(stream(17, 64), Error);
    CHECK_THROWS_AS(stream(1, 60), Error);
    CUDA_CHECK(cudaStreamSynchronize(gpu().gpu->stream));
}

// The likeliest id below `exist` of each block of a head, the first of equals; -1: it has none.
static std::vector<int> likeliest_of_blocks(const float* logits, int exist, const RowsDealt& dealt) {
    std::vector<int> likeliest(dealt.blocks, -1);
    for (int id = 0; id < exist; id++) {
        int& of_block = likeliest[(id / dealt.rows + dealt.shift) % dealt.blocks];
        if (of_block < 0 || logits[id] > logits[of_block]) of_block = id;
    }
    return likeliest;
}

// A GPU of 188 multiprocessors (RTX PRO 6000) has room for more blocks of a small head than each row's list of the blocks'
// likeliest ids, which sample_kernel reads with a thread for each.
TEST_CASE("the head with its likeliest ids on a GPU of many multiprocessors: right, and nothing is written past the list") {
    Random random{13};
    Scratchpad pad;
    pad.ctx.gpu->sms = 188;
    for (int C : {64, 512, 608})
        for (int N : {1, 8, 16}) {
            const int V = 20000, guard = 4096;
            INFO("C " << C << " N " << N);
            Matrix W(random, {V}, C);
            const std::vector<bf16> x = random.fill<bf16>((size_t)N * C);
            const Device<bf16> dx(x);
            Device<float> logits((size_t)N * V);
            std::vector<Draw> draws(N);
            for (Draw& draw : draws) draw.exist = V - 5;
            const Device<Draw> ddraws(draws);
            const unsigned long long mark = 0xfeedfacefeedfaceull;
            Device<unsigned long long> best(std::vector<unsigned long long>((size_t)N * BEST_BLOCKS + guard, mark));
            const StreamArgs head = StreamArgs::of(dx, W.device.w[0], N, C, V);
            const RowsDealt dealt = stream_product(pad.ctx, head, DrawEpilogue{{}, logits, (size_t)V, ddraws, nullptr, best});
            CHECK(dealt.blocks <= BEST_BLOCKS);
            std::vector<float> want((size_t)N * V);
            std::vector<bf16> picked((size_t)N * C);
            std::vector<int> rows(N);
            std::iota(rows.begin(), rows.end(), 0);
            head_cpu(cpu(), want.data(), picked.data(), x.data(), rows.data(), W.host, N);
            const std::vector<float> got = logits.get();
            CHECK(wrong(got, as_double(want), [&](size_t) { return sum_error<float>(C) * 4; }) == 0);
            const std::vector<unsigned long long> keys = best.get();
            for (int n = 0; n < N; n++) {
                const std::vector<int> likeliest = likeliest_of_blocks(&got[(size_t)n * V], V - 5, dealt);
                for (int b = 0; b < BEST_BLOCKS; b++) {
                    const unsigned long long key = keys[(size_t)n * BEST_BLOCKS + b];
                    if (b < dealt.blocks) CHECK((int)~(uint32_t)key == likeliest[b]);
                    else CHECK(key == mark);
                }
            }
            for (int i = 0; i < guard; i++) CHECK(keys[(size_t)N * BEST_BLOCKS + i] == mark);
        }
}

#ifndef QWEN3_PORTABLE
TEST_CASE("a packed head's likeliest ids are those of the rows that were dealt to each block") {
    Random random{14};
    Scratchpad pad;
    for (const PackedKind& kind : PACKED_KINDS)
        for (int V : {40, 5000}) {
            const int C = 136, most = 16, exist = V - 5;
            PackedMatrix W(random, kind, {V}, C, 8);
            W.use(pad.ctx);
            const Device<bf16> x(random.fill<bf16>((size_t)most * C));
            Device<float> logits((size_t)most * V);
            std::vector<Draw> draws(most);
            for (Draw& draw : draws) draw.exist = exist;
            const Device<Draw> ddraws(draws);
            Device<unsigned long long> best((size_t)most * BEST_BLOCKS);
            for (int N : {1, 8, 16}) {
                INFO("format " << (int)kind.format << " group " << kind.group << " V " << V << " N " << N);
                const RowsDealt dealt = packed_product(pad.ctx, DrawEpilogue{{}, logits, (size_t)V, ddraws, nullptr, best}, x, nullptr, W.device, N);
                const std::vector<float> got = logits.get();
                const std::vector<unsigned long long> keys = best.get();
                int wrong = 0;
                for (int n = 0; n < N; n++) {
                    const std::vector<int> likeliest = likeliest_of_blocks(&got[(size_t)n * V], exist, dealt);
                    for (int b = 0; b < dealt.blocks; b++) {
                        const unsigned long long key = keys[(size_t)n * BEST_BLOCKS + b];
                        wrong += likeliest[b] < 0 ? key != 0 : (int)~(uint32_t)key != likeliest[b];
                    }
                }
                CHECK(wrong == 0);
            }
        }
}
#endif // QWEN3_PORTABLE

TEST_CASE("a row's bits: of up to 16 tokens always, of any number with `invariant`, it does not depend on the batch") {
    Random random{4};
    Scratchpad pad;
    Matrix W(random, {256, 128, 128}, 1024);
    const int K = 1024, R = 512, N = 300;
    const std::vector<bf16> x = random.fill<bf16>((size_t)N * K);
    Device<bf16> dx(x), out((size_t)N * R), one((size_t)N * R);
    auto row = [&](const Device<bf16>& y, int n) {
        const std::vector<bf16> all = y.get();
        return std::vector<bf16>(all.begin() + (size_t)n * R, all.begin() + (size_t)(n + 1) * R);
    };
    for (int count : {2, 8, 9, 16}) {
        linear_gpu(pad.ctx, out, dx, W.device, count);
        for (int n : {0, count / 2, count - 1}) {
            linear_gpu(pad.ctx, one, dx + (size_t)n * K, W.device, 1);
            CHECK(same_bits(row(out, n), row(one, 0)));
        }
    }
    Scratchpad fixed;
    fixed.ctx.invariant = true;
    for (int count : {1, 5, 40, 300}) {
        linear_gpu(fixed.ctx, out, dx, W.device, count);
        for (int n : {0, count / 2, count - 1}) {
            linear_gpu(fixed.ctx, one, dx + (size_t)n * K, W.device, 1);
            CHECK(same_bits(row(out, n), row(one, 0)));
        }
    }
}

// Q, K, V of a batch over a cache with a past; `attend` on both sides, and the cache afterwards.
static void check_attention(Random& random, std::vector<std::pair<int, int>> past_fresh, int spare, int H, int K, int D, bool invariant) {
    TestBatch batch(random, past_fresh, 10, spare);
    const int N = (int)batch.token.size(), width = (H + 2 * K) * D;
    int singles = 0, longest = 1;
    while (singles < (int)past_fresh.size() && past_fresh[singles].second == 1) singles++;
    for (auto [past, fresh] : past_fresh) longest = std::max(longest, past + fresh);
    const int splits = (longest - 1) / SPLIT + 2;
    const size_t cache = (size_t)batch.page_count * K * PAGE * D;
    const std::vector<bf16> qkv = random.fill<bf16>((size_t)N * width, 2), q_weight = random.fill<bf16>(D, 0.5, 1), k_weight = random.fill<bf16>(D, 0.5, 1);
    std::vector<bf16> keys = random.fill<bf16>(cache, 2), values = random.fill<bf16>(cache);
    std::vector<float> rope((size_t)longest * D);
    fill_rope(rope.data(), longest, D, 1e6, SCALED);

    Scratchpad pad(attention_scratch(gpu(), std::max(1, singles), splits, H, D), std::max(1, singles) * H);
    pad.ctx.invariant = invariant;
    Device<int> pos(batch.pos), seq(batch.seq), slot(batch.slot), pages(batch.pages);
    Device<bf16> dqkv(qkv), dqw(q_weight), dkw(k_weight), dkeys(keys), dvalues(values), q((size_t)N * H * D), out((size_t)N * H * D);
    Device<float> drope(rope);
    Batch b = batch.view(), device = b;
    device.token = nullptr, device.pos = pos, device.seq = seq, device.slot = slot, device.pages = pages, device.singles = singles;
    device.splits = splits, device.longest = longest;
    attend_gpu(pad.ctx, out, nullptr, q, {dkeys, dvalues}, dqkv, {dqw, dkw, drope}, device, {H, K, D, 1e-6f});
    std::vector<bf16> want_q((size_t)N * H * D), want((size_t)N * H * D);
    attend_cpu(cpu(), want.data(), nullptr, want_q.data(), {keys.data(), values.data()}, qkv.data(), {q_weight.data(), k_weight.data(), rope.data()}, b, {H, K, D, 1e-6f});
    // Weights are rounded to bf16 before they meet the values: a part in 2^8 of the largest value, at worst.
    const std::vector<bf16> got = out.get();
    int bad = 0;
    for (size_t i = 0; i < got.size(); i++)
        if (batch.seq[i / (H * D)] >= 0 && !(std::fabs(to_acc(got[i]) - to_acc(want[i])) <= 0.006 + rounding<bf16>(to_acc(want[i])))) {
            if (bad++ < 3) MESSAGE("token " << i / (H * D) << " head " << i / D % H << " at " << i % D << ": " << to_acc(got[i]) << ", not " << to_acc(want[i]));
        }
    CHECK(bad == 0);
    // (A rotation may take one product of about 4 off another: what float has rounded off is then all that counts.)
    auto unit = [&](const std::vector<bf16>& v) { return [&](size_t i) { return 2.2 * rounding<bf16>(to_acc(v[i])) + 4 * 0x1p-23; }; };
    CHECK(wrong(dkeys.get(), as_double(keys), unit(keys)) == 0);
    CHECK(same_bits(dvalues.get(), values));
    for (int n : pad.attention_arrived.get()) CHECK(n == 0);
}

TEST_CASE("attention: head sizes, groups, contexts at the borders of pages, splits and tiles, ragged batches") {
    Random random{5};
    for (bool invariant : {false, true})
        for (int D : {64, 128})
            for (std::pair<int, int> heads : std::vector<std::pair<int, int>>{{2, 2}, {4, 2}, {4, 1}, {10, 2}, {8, 1}, {6, 2}}) {
                const int H = heads.first, K = heads.second;
                INFO("invariant " << invariant << " D " << D << " H " << H << " K " << K);
                for (int past : {0, 14, 15, 16, 126, 127, 128, 300}) check_attention(random, {{past, 1}}, 0, H, K, D, invariant); // one token
                for (int fresh : {2, 15, 16, 17, 33, 64, 65, 200}) check_attention(random, {{0, fresh}}, 0, H, K, D, invariant);   // prompts
                check_attention(random, {{70, 50}}, 0, H, K, D, invariant);                                                      // a later chunk
                check_attention(random, {{5, 1}, {200, 1}, {0, 1}, {31, 1}}, 0, H, K, D, invariant);                              // decoding
                check_attention(random, {{5, 1}, {130, 1}, {0, 18}, {40, 70}, {0, 3}}, 3, H, K, D, invariant);                    // all of it
            }
    for (int D : {64, 128}) // so many sequences that pages are in shared memory, and a block has several splits
        for (std::pair<int, int> heads : std::vector<std::pair<int, int>>{{2, 2}, {4, 2}, {4, 1}, {10, 2}, {16, 1}, {6, 2}}) {
            std::vector<std::pair<int, int>> many = {{1023, 1}};
            while (many.size() * heads.second < 130) many.push_back({(int)random.below(1023), 1});
            check_attention(random, many, 3, heads.first, heads.second, D, false);
        }
    check_attention(random, {{4096, 1}}, 0, 4, 2, 128, false);
    check_attention(random, {{4000, 97}, {0, 300}}, 0, 4, 2, 128, false);
    // Keys split over blocks: parts that a row sees nothing of, and tiles that sequences share.
    for (int D : {64, 128})
        for (std::pair<int, int> heads : std::vector<std::pair<int, int>>{{4, 2}, {5, 1}}) {
            check_attention(random, {{0, 2000}}, 0, heads.first, heads.second, D, false);
            check_attention(random, {{2500, 600}}, 0, heads.first, heads.second, D, false);
            check_attention(random, {{900, 1}, {3, 1}, {1023, 2}, {0, 40}, {1500, 300}}, 3, heads.first, heads.second, D, false);
        }
}

// The same with an FP8 cache: new rows are stored as Book I's store_kv does it, byte by byte; attention is Book I's of what the
// cache then holds. `exact`: new rows are chosen so that e4m3 holds them, and so is all that attention reads in a bf16 cache:
// then it has the bits that it has there.
static void check_fp8_attention(Random& random, std::vector<std::pair<int, int>> past_fresh, int spare, int H, int K, int D, bool invariant, bool exact) {
    TestBatch batch(random, past_fresh, 10, spare);
    const int N = (int)batch.token.size(), width = (H + 2 * K) * D;
    int singles = 0, longest = 1;
    while (singles < (int)past_fresh.size() && past_fresh[singles].second == 1) singles++;
    for (auto [past, fresh] : past_fresh) longest = std::max(longest, past + fresh);
    const int splits = (longest - 1) / SPLIT + 2;
    std::vector<bf16> qkv = random.fill<bf16>((size_t)N * width, 2), k_weight = random.fill<bf16>(D, 0.5, 1);
    const std::vector<bf16> q_weight = random.fill<bf16>(D, 0.5, 1);
    std::vector<float> rope((size_t)longest * D);
    fill_rope(rope.data(), longest, D, 1e6, SCALED);
    const auto coarse = [&](double least) { return to_bf16((float)((1 + random.below(8) / 8.) * least * (random.below(2) ? 1 : -1))); };
    if (exact) {
        for (size_t i = 0; i < rope.size(); i++) rope[i] = i % 2 ? 0.f : 1.f; // nothing is rotated
        for (bf16& w : k_weight) w = coarse(0.5);
        for (size_t i = 0; i < qkv.size(); i++)
            if ((int)(i % width) >= (H + K) * D) qkv[i] = coarse(0.25);
            else if ((int)(i % width) >= H * D) qkv[i] = to_bf16(i % 3 ? 2.f : -2.f); // all of one size: the norm makes +1 and -1
    }
    Batch b = batch.view();
    b.fp8 = true;
    const size_t bytes = (size_t)batch.page_count * K * PAGE * (D + 1), numbers = (size_t)batch.page_count * K * PAGE * D;
    std::vector<bf16> keys8(bytes / 2), values8(bytes / 2), keys(numbers), values(numbers);
    for (int slot = 0; slot < batch.page_count * PAGE; slot++)
        for (int h = 0; h < K; h++) {
            store_kv(keys8.data(), b.fp8, slot, h, random.fill<bf16>(D, 2).data(), K, D);
            store_kv(values8.data(), b.fp8, slot, h, random.fill<bf16>(D, std::ldexp(1, random.below(20) - 15)).data(), K, D);
        }
    const auto widen = [&](std::vector<bf16>& to, const std::vector<bf16>& from) {
        for (int slot = 0; slot < batch.page_count * PAGE; slot++)
            for (int h = 0; h < K; h++) {
                const KVRow<bf16> row(from.data(), b.fp8, slot / PAGE, h, slot % PAGE, K, D);
                for (int i = 0; i < D; i++) to[kv_offset(slot / PAGE, h, slot % PAGE, K, D) + i] = to_bf16(row[i]);
            }
    };
    widen(keys, keys8), widen(values, values8);

    Scratchpad pad(attention_scratch(gpu(), std::max(1, singles), splits, H, D), std::max(1, singles) * H);
    pad.ctx.invariant = invariant;
    Device<bf16> widened(2 * numbers);
    pad.ctx.gpu->widened = widened, pad.ctx.gpu->widened_numbers = 2 * numbers;
    Device<int> pos(batch.pos), seq(batch.seq), slot(batch.slot), pages(batch.pages);
    Device<bf16> dqkv(qkv), dqw(q_weight), dkw(k_weight), q((size_t)N * H * D);
    Device<float> drope(rope);
    Batch device = b;
    device.token = nullptr, device.pos = pos, device.seq = seq, device.slot = slot, device.pages = pages, device.singles = singles;
    device.splits = splits, device.longest = longest;
    const auto attend = [&](bool fp8, Device<bf16>& k, Device<bf16>& v) {
        Device<bf16> out((size_t)N * H * D);
        device.fp8 = fp8;
        attend_gpu(pad.ctx, out, nullptr, q, {k, v}, dqkv, {dqw, dkw, drope}, device, {H, K, D, 1e-6f});
        return out.get();
    };
    Device<bf16> dkeys8(keys8), dvalues8(values8), dkeys(keys), dvalues(values);
    const std::vector<bf16> got = attend(true, dkeys8, dvalues8), in_bf16 = attend(false, dkeys, dvalues);
    const std::vector<bf16> new_keys = dkeys.get(), new_values = dvalues.get();
    for (int n = 0; n < N; n++)
        for (int h = 0; h < K && batch.seq[n] >= 0; h++) {
            const size_t at = kv_offset(batch.slot[n] / PAGE, h, batch.slot[n] % PAGE, K, D);
            store_kv(keys8.data(), b.fp8, batch.slot[n], h, &new_keys[at], K, D), store_kv(values8.data(), b.fp8, batch.slot[n], h, &new_values[at], K, D);
        }
    CHECK(same_bits(dkeys8.get(), keys8));
    CHECK(same_bits(dvalues8.get(), values8));
    std::vector<bf16> want((size_t)N * H * D), want_q((size_t)N * H * D), unused_keys(numbers), unused_values(numbers);
    Batch plain = b;
    plain.fp8 = false;
    qknorm_rope_kv(want_q.data(), {unused_keys.data(), unused_values.data()}, qkv.data(), {q_weight.data(), k_weight.data(), rope.data()}, plain, {H, K, D, 1e-6f});
    attention(want.data(), (float*)nullptr, want_q.data(), {keys8.data(), values8.data()}, b, {H, K, D});
    int bad = 0, other = 0;
    for (size_t row = 0; row < got.size(); row += D) {
        if (batch.seq[row / (H * D)] < 0) continue;
        float largest = 0;
        for (size_t i = row; i < row + D; i++) largest = std::max(largest, std::fabs(to_acc(want[i])));
        for (size_t i = row; i < row + D; i++) {
            bad += !(std::fabs(to_acc(got[i]) - to_acc(want[i])) <= largest / 32);
            other += got[i].bits != in_bf16[i].bits;
        }
    }
    CHECK(bad == 0);
    if (exact) CHECK(other == 0);
    for (int n : pad.attention_arrived.get()) CHECK(n == 0);
}

TEST_CASE("attention over an FP8 cache: rows are stored to the byte, and read to the bit") {
    Random random{55};
    for (bool exact : {false, true})
        for (bool invariant : {false, true})
            for (int D : {64, 128})
                for (std::pair<int, int> heads : std::vector<std::pair<int, int>>{{2, 2}, {4, 2}, {4, 1}, {10, 2}, {8, 1}}) {
                    const int H = heads.first, K = heads.second;
                    INFO("exact " << exact << " invariant " << invariant << " D " << D << " H " << H << " K " << K);
                    for (int past : {0, 15, 16, 127, 128, 300}) check_fp8_attention(random, {{past, 1}}, 0, H, K, D, invariant, exact);
                    for (int fresh : {2, 17, 200}) check_fp8_attention(random, {{0, fresh}}, 0, H, K, D, invariant, exact);
                    check_fp8_attention(random, {{70, 50}}, 0, H, K, D, invariant, exact);
                    check_fp8_attention(random, {{5, 1}, {130, 1}, {0, 18}, {40, 70}, {0, 3}, {300, 300}}, 3, H, K, D, invariant, exact);
                }
    for (int D : {64, 128}) { // so many sequences that pages are in shared memory
        std::vector<std::pair<int, int>> many = {{1023, 1}};
        while (many.size() < 70) many.push_back({(int)random.below(1023), 1});
        for (bool exact : {false, true}) check_fp8_attention(random, many, 3, 4, 2, D, false, exact);
    }
    check_fp8_attention(random, {{4096, 1}}, 0, 4, 2, 128, false, true);
    check_fp8_attention(random, {{900, 1}, {3, 1}, {1023, 2}, {0, 40}, {1500, 300}}, 3, 4, 2, 128, false, true);
}

// Attention of one token at `position` over zeros, in a batch of so many splits; what becomes of the kernel.
static cudaError_t attend_one(int position, int splits) {
    const int D = 64, page_count = position / PAGE + 1;
    std::vector<int> identity(page_count);
    std::iota(identity.begin(), identity.end(), 0);
    Scratchpad pad(attention_scratch(gpu(), 1, position / SPLIT + 1, 1, D), 1);
    Device<int> pos(std::vector<int>{position}), seq(std::vector<int>{0}), slot(std::vector<int>{position}), pages(identity);
    Device<bf16> keys(std::vector<bf16>((size_t)page_count * PAGE * D)), values(keys.get()), qkv(std::vector<bf16>(3 * D));
    Device<bf16> weight(std::vector<bf16>(D, to_bf16(1))), q(D), out(D);
    Device<float> rope(std::vector<float>((size_t)(position + 1) * D));
    const Batch b = {1, 1, nullptr, pos, seq, slot, pages, page_count, 1, splits};
    attend_gpu(pad.ctx, out, nullptr, q, {keys, values}, qkv, {weight, weight, rope}, b, {1, 1, D, 1e-6f});
    return cudaStreamSynchronize(pad.ctx.gpu->stream);
}
constexpr int REFUSED = 42;

// A kernel that stops with an error takes its process's context with it: by the next one, in a process of its own.
TEST_CASE("too few splits" * doctest::skip()) {
    if (attend_one(SPLIT, 1) != cudaSuccess) _exit(REFUSED);
    FAIL("a row of nothing, and no error");
}
TEST_CASE("attention of single tokens: a batch with too few splits is refused, not computed in part") {
    CHECK(attend_one(SPLIT - 1, 1) == cudaSuccess);
    CHECK(attend_one(SPLIT, 2) == cudaSuccess);
    CHECK_THROWS_AS(attend_one(0, 0), Error);
    const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    const int status = system(("'" + self + "' --no-skip=true --test-case='too few splits' > /dev/null 2>&1").c_str());
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == REFUSED);
    CHECK(attend_one(SPLIT, 2) == cudaSuccess);
}

// A training batch: whole sequences, spare rows behind them. lse on both sides; then the gradients, from the same inputs.
static void check_attention_backward(Random& random, const std::vector<int>& lengths, int spare, int H, int K, int D) {
    std::vector<std::pair<int, int>> past_fresh;
    for (int n : lengths) past_fresh.push_back({0, n});
    TestBatch batch(random, past_fresh, 10, spare);
    const int N = (int)batch.token.size(), G = H / K, width = (H + 2 * K) * D, used = N - spare;
    const size_t heads = (size_t)N * H, cache = (size_t)batch.page_count * K * PAGE * D;
    std::vector<bf16> q = random.fill<bf16>(heads * D, 2), dout = random.fill<bf16>(heads * D);
    std::vector<bf16> keys = poisoned<bf16>(cache), values = keys; // nothing but the batch's own may be read
    auto place = [&](int n, int kv) { return kv_offset(batch.slot[n] / PAGE, kv, batch.slot[n] % PAGE, K, D); };
    for (int n = 0; n < used; n++)
        for (int kv = 0; kv < K; kv++) {
            const std::vector<bf16> k = random.fill<bf16>(D, 2), v = random.fill<bf16>(D);
            memcpy((void*)&keys[place(n, kv)], k.data(), D * sizeof(bf16)), memcpy((void*)&values[place(n, kv)], v.data(), D * sizeof(bf16));
        }
    memset((void*)(q.data() + (size_t)used * H * D), 0xff, (size_t)spare * H * D * sizeof(bf16)); // nor spare rows
    memset((void*)(dout.data() + (size_t)used * H * D), 0xff, (size_t)spare * H * D * sizeof(bf16));
    std::vector<bf16> out = poisoned<bf16>(heads * D), want = poisoned<bf16>((size_t)N * width);
    std::vector<float> lse = poisoned<float>(heads), delta(heads);
    attention_cpu(cpu(), out.data(), lse.data(), q.data(), {keys.data(), values.data()}, batch.view(), {H, K, D});
    attention_backward_cpu(cpu(), want.data(), dout.data(), {q.data(), out.data(), lse.data()}, {keys.data(), values.data()}, batch.view(), {H, K, D}, delta.data());

    Scratchpad pad(attention_scratch(gpu(), 0, 0, H, D));
    Context& ctx = pad.ctx;
    Device<int> pos(batch.pos), seq(batch.seq), slot(batch.slot), pages(batch.pages);
    Device<bf16> q_copy(q), dout_copy(dout), keys_copy(keys), values_copy(values), out_copy(out);
    Batch b = batch.view();
    b.token = nullptr, b.pos = pos, b.seq = seq, b.slot = slot, b.pages = pages;
    Device<bf16> forward_out(heads * D), silent_out(heads * D);
    Device<float> forward_lse(heads);
    attention_gpu(ctx, forward_out, forward_lse, q_copy, {keys_copy, values_copy}, b, {H, K, D});
    attention_gpu(ctx, silent_out, nullptr, q_copy, {keys_copy, values_copy}, b, {H, K, D});
    CHECK(same_bits(forward_out.get(), silent_out.get()));
    std::vector<float> got_lse = forward_lse.get();
    for (size_t i = (size_t)used * H; i < heads; i++) CHECK(std::isnan(got_lse[i]));
    got_lse.resize((size_t)used * H), lse.resize(heads);
    const std::vector<float> want_lse(lse.begin(), lse.begin() + used * H);
    // A score's terms add up to less than 4 sqrt(D); its error is lse's.
    CHECK(wrong(got_lse, as_double(want_lse), [&](size_t) { return sum_error<float>(4 * std::sqrt((double)D)); }) == 0);

    // The kernels round p and ds to bf16: by e = 2^-8 of them at most, by 0.41 e as a deviation (uniform within half a unit,
    // which is between e / 2 and e of a number). Of a sum of p times uniform |dout| < 1 (deviation 0.58) that makes e / 4
    // times the root of the sum of p^2; of ds times q or k (< 2) over sqrt(D), the same of ds times 2 / sqrt(D). Allowed is
    // 7 times that. Besides, the fp32 errors of p and of dp - delta, and both results' rounding.
    std::vector<double> row_ds2(heads), key_p((size_t)N * K), key_p2(key_p.size()), key_ds2(key_p.size());
    #pragma omp parallel for schedule(dynamic)
    for (int kv = 0; kv < K * (int)lengths.size(); kv++) { // a sequence and KV head each
        for (int n = 0; n < used; n++) {
            if (batch.seq[n] != kv / K) continue;
            for (int h = kv % K * G; h < (kv % K + 1) * G; h++)
                for (int m = n - batch.pos[n]; m <= n; m++) {
                    const size_t row = (size_t)n * H + h, key = (size_t)m * K + kv % K;
                    const double p = std::exp(dot(&q[row * D], &keys[place(m, kv % K)], D) / std::sqrt((double)D) - lse[row]);
                    const double ds = p * (dot(&dout[row * D], &values[place(m, kv % K)], D) - delta[row]);
                    row_ds2[row] += ds * ds, key_p[key] += p, key_p2[key] += p * p, key_ds2[key] += ds * ds;
                }
        }
    }
    auto tolerance = [&](size_t i) {
        const size_t n = i / width;
        const int head = (int)(i % width) / D;
        const double e = 7. / 4 / 256, factor = 2 / std::sqrt((double)D), round = 2.2 * rounding<bf16>(to_acc(want[i]));
        if (head < H) return round + factor * (e * std::sqrt(row_ds2[n * H + head]) + sum_error<float>((int)n < used ? D : 0));
        const size_t key = n * K + (head - H) % K;
        if (head < H + K) return round + factor * (e * std::sqrt(key_ds2[key]) + sum_error<float>(D * key_p[key]));
        return round + e * std::sqrt(key_p2[key]) + sum_error<float>(20 * key_p[key]);
    };
    std::vector<bf16> results[2];
    for (std::vector<bf16>& result : results) {
        Device<bf16> dqkv((size_t)N * width);
        Device<float> scratch(heads), lse_copy(lse);
        attention_backward_gpu(ctx, dqkv, dout_copy, {q_copy, out_copy, lse_copy}, {keys_copy, values_copy}, b, {H, K, D}, scratch);
        result = dqkv.get();
    }
    CHECK(wrong(results[0], as_double(want), tolerance) == 0);
    CHECK(same_bits(results[0], results[1]));
}

TEST_CASE("attention backward: head sizes, groups, lengths at the borders of pages and tiles, ragged batches, spare rows") {
    Random random{8};
    for (int D : {64, 128})
        for (std::pair<int, int> heads : std::vector<std::pair<int, int>>{{2, 2}, {4, 2}, {4, 1}, {10, 2}, {8, 1}}) {
            const int H = heads.first, K = heads.second;
            INFO("D " << D << " H " << H << " K " << K);
            for (int length : {1, 2, 7, 33, 64, 65, 128, 129, 257}) check_attention_backward(random, {length}, 0, H, K, D);
            check_attention_backward(random, std::vector<int>(150, 1), 0, H, K, D); // nothing but first tokens
            check_attention_backward(random, {1, 3, 2, 5, 1, 1, 4, 2, 7, 9, 1, 2, 31, 2, 1, 64, 3, 1, 1}, 5, H, K, D);
            check_attention_backward(random, {63, 1, 64, 65, 127, 2}, 200, H, K, D); // whole tiles of spare rows
            check_attention_backward(random, {38, 200}, 0, H, K, D); // a sequence that begins inside a tile of keys, queries behind it
            check_attention_backward(random, {15, 32, 100}, 0, H, K, D); // sequences that begin at a warp's last key
            check_attention_backward(random, {1, 2, 7, 512, 33, 64, 65, 257, 1, 1000}, 9, H, K, D);
        }
    check_attention_backward(random, {70, 3, 130}, 3, 128, 1, 64); // a token is a whole tile of rows
    check_attention_backward(random, {2500}, 0, 2, 1, 128);
}

TEST_CASE("the sampler draws what the CPU draws, bit for bit") {
    Random random{6};
    auto key_of = [](float logit, int id) { // draw_key, whose text is for a GPU
        uint32_t u;
        logit += 0.f, memcpy(&u, &logit, 4);
        return (unsigned long long)(u >> 31 ? ~u : u | 0x80000000) << 32 | (uint32_t)~id;
    };
    // Two rows, of sequences 1 and 0: of the same logits, the second one drawn greedily.
    auto check = [&](const std::vector<float>& logits, int exist, const Sampling& how, int position) {
        const int V = (int)logits.size();
        std::vector<float> twice = logits;
        twice.insert(twice.end(), logits.begin(), logits.end());
        Device<float> d(twice);
        Sampling greedy = how;
        greedy.temperature = 0;
        Device<Draw> draws(std::vector<Draw>{{how, exist}, {greedy, exist}});
        const std::vector<int> before = {position - 1, 3};
        Device<int> token(2), pos(before), slot(2), seq(std::vector<int>{1, 0}), pages(std::vector<int>{9, 9, 9, 0, 7, 3}), last(std::vector<int>{-1, -1});
        Device<uint32_t> seen{std::vector<uint32_t>(2 * V)};
        const DrawState state = {token, pos, slot, seq, pages, 3, seen, nullptr, 0, last};
        RowsDealt dealt; // of a head
        dealt.rows = 8 + 8 * random.below(2);
        dealt.blocks = 1 + random.below(std::min((V + dealt.rows - 1) / dealt.rows, BEST_BLOCKS));
        dealt.shift = random.below(dealt.blocks);
        std::vector<unsigned long long> keys(2 * BEST_BLOCKS, 0);
        for (int id = 0; id < exist; id++) {
            const int block = (id / dealt.rows + dealt.shift) % dealt.blocks;
            keys[block] = keys[BEST_BLOCKS + block] = std::max(keys[block], key_of(usable(logits[id]), id));
        }
        Device<unsigned long long> best(keys);
        INFO("V " << V << " exist " << exist << " t " << how.temperature << " k " << how.top_k << " p " << how.top_p << " min-p " << how.min_p << " seed " << how.seed << " blocks " << dealt.blocks << " of " << dealt.rows << " rows from " << dealt.shift);
        const std::vector<int> want = {sample(logits.data(), exist, how, (uint64_t)position), sample(logits.data(), exist, greedy, 4)};
        for (bool by_blocks : {true, false}) {
            pos.replace(before);
            sample_gpu(gpu(), true, d, (size_t)V, draws, by_blocks ? (const unsigned long long*)best : nullptr, by_blocks ? dealt : RowsDealt(), state, 2);
            CHECK(token.get() == want);
            CHECK(pos.get() == std::vector<int>{position, 4});
            CHECK(last.get() == std::vector<int>{want[1], want[0]});
            CHECK(slot.get()[1] == 9 * 16 + 4);
            if (position < 48) CHECK(slot.get()[0] == std::vector<int>{0, 7, 3}[position / 16] * 16 + position % 16);
        }
        const std::vector<uint32_t> counts = seen.get();
        CHECK(counts[V + want[0]] == 2);
        CHECK(counts[want[1]] == 2);
    };
    for (int round = 0; round < 150; round++) {
        const int V = round % 3 == 0 ? 40 : round % 3 == 1 ? 5000 : 151936;
        std::vector<float> logits = random.fill<float>(V, round % 5 == 0 ? 0.5 : 12);
        if (round % 4 == 1) for (float& l : logits) l = std::round(l); // many ties
        if (round % 25 == 24) for (float& l : logits) l = 3;           // ... all
        if (round % 25 == 12) for (float& l : logits) l = l > 11.9f ? l : -90; // most have no weight
        if (round % 7 == 2) logits[random.below(V)] = NAN, logits[random.below(V)] = INFINITY, logits[random.below(V)] = -INFINITY, logits[0] = -0.f;
        Sampling how;
        how.seed = (uint64_t)round * 977;
        how.temperature = (float[]){0.7f, 1.f, 0.f, 0.3f, 2.f}[round % 5];
        how.top_k = (int[]){20, 0, 1, 40, 1000, 3000, 0, DRAW_GROUPS, DRAW_GROUPS + 1}[round % 9];
        how.top_p = (float[]){0.8f, 1.f, 0.95f, 0.f}[round / 2 % 4];
        how.min_p = round % 6 == 3 ? 0.1f : 0.f;
        check(logits, round % 2 ? V : V - 7, how, 1 + random.below(60));
    }
    check({1.f}, 1, Sampling(), 5);
}

// ---- The whole model

// Logits of every position of every prompt on the GPU, or of the same model on the CPU in bf16.
static std::vector<float> model_logits(const Golden& g, bool on_gpu, bool invariant, bool one_by_one) {
    Weights<bf16> weights(g.file);
    Context ctx;
    if (on_gpu) {
        ctx = gpu();
        ctx.invariant = invariant;
        weights.upload(ctx, g.file);
    }
    std::vector<float> out;
    for (auto& prompt : g.prompts) {
        Session<bf16> session(g.file.config, weights, 64, ctx);
        auto keep = [&](const float* row) { out.insert(out.end(), row, row + g.file.config.V); };
        if (!one_by_one) session.feed(prompt, nullptr, keep);
        else
            for (int id : prompt) session.feed({id}, nullptr, keep);
    }
    return out;
}

TEST_CASE("likeliest: the ids and logits that the definition tells, and its log-sum-exp") {
    Random random{26};
    for (int round = 0; round < 60; round++) {
        const int V = (int[]){1, 40, 1023, 5000, 151936}[round % 5], R = 1 + round % 3, exist = V > 7 && round % 2 ? V - 7 : V;
        const int k = (int[]){20, 0, 1, 5}[round % 4];
        std::vector<float> logits = random.fill<float>((size_t)R * V, round % 5 == 0 ? 0.5 : 12);
        for (size_t i = 0; i < logits.size(); i++) {
            if (round % 4 == 1) logits[i] = std::round(logits[i]); // many ties
            if (round % 6 == 2 && random.below(4) == 0) logits[i] = random.below(2) ? -INFINITY : NAN;
            if (round % 6 == 3 && i % 1024 != 77) logits[i] = -50 - logits[i]; // the largest are all one thread's
            if (round % 9 == 4) logits[i] = i % 3 ? 0.f : -0.f;
        }
        if (round % 10 == 7) logits[random.below(V)] = INFINITY;
        // Row r is sequence 2 r; the last of several rows is a spare one, and one sequence wants nothing.
        std::vector<int> seq, wanted(2 * (size_t)R + 2, k);
        for (int r = 0; r < R; r++) seq.push_back(2 * r);
        const int silent = R == 3 ? 1 : -1, spare = R > 1 ? R - 1 : -1;
        if (silent >= 0) wanted[2] = -1;
        if (spare >= 0) seq[(size_t)spare] = -1;
        Device<float> d(logits);
        Device<int> dseq(seq), dwanted(wanted);
        Device<Likeliest> out((size_t)R);
        likeliest_gpu(gpu(), out, d, (size_t)V, exist, dseq, dwanted, R);
        const auto got = out.get();
        for (int r = 0; r < R; r++) {
            INFO("round " << round << " V " << V << " exist " << exist << " k " << k << " row " << r << " of " << R);
            if (r == silent || r == spare) {
                CHECK(got[(size_t)r].count == -1); // as it was
                continue;
            }
            Likeliest want;
            likeliest(want, &logits[(size_t)r * V], exist, k);
            REQUIRE(got[(size_t)r].count == want.count);
            CHECK(std::abs(got[(size_t)r].log_sum - want.log_sum) <= 3e-6f * (1 + std::abs(want.log_sum)));
            for (int i = 0; i < want.count; i++) {
                INFO("the likeliest but " << i << ": " << got[(size_t)r].logit[i] << ", wanted " << want.logit[i]);
                CHECK(got[(size_t)r].id[i] == want.id[i]);
                CHECK(got[(size_t)r].logit[i] == want.logit[i]);
            }
        }
    }
}

// An adapter of random numbers for a product, on both sides: modules of the given blocks.
struct RandomAdapter {
    std::vector<bf16> A, B;
    Device<bf16> dA{0}, dB{0}, dh;
    Adapter<bf16> host, device;
    std::vector<bf16> h;
    RandomAdapter(Random& random, const Linear<bf16>& W, int rank, const std::vector<int>& blocks, int tokens)
        : dh((size_t)tokens * blocks.size() * rank), h((size_t)tokens * blocks.size() * rank) {
        host.rank = host.true_rank = rank, host.modules = (int)blocks.size();
        for (size_t j = 0; j < blocks.size(); j++) host.block[j] = blocks[j];
        const size_t width = host.width();
        A = random.fill<bf16>(width * W.in, 2 / std::sqrt(W.in)), B.assign((size_t)W.out() * width, bf16{});
        for (size_t j = 0; j < blocks.size(); j++)
            for (int r = W.first_row(blocks[j]); r < W.first_row(blocks[j]) + W.rows[blocks[j]]; r++) {
                const auto row = random.fill<bf16>((size_t)rank, 0.5);
                std::copy(row.begin(), row.end(), &B[(size_t)r * width + j * rank]);
            }
        dA.replace(A), dB.replace(B);
        device = host;
        host.A = A.data(), host.B = B.data(), host.h = h.data(), device.A = dA, device.B = dB, device.h = dh;
    }
};

TEST_CASE("rows with different adapters in one batch: each is what it is with its adapter alone") {
    Random random{27};
    Scratchpad pad;
    struct Shape { std::vector<int> rows; int in; std::vector<int> blocks; };
    for (const Shape& shape : {Shape{{64, 32, 32}, 80, {0, 2}}, Shape{{256, 128, 128}, 1024, {0, 1, 2}}, Shape{{200}, 136, {0}},
                               Shape{{1024}, 3072, {0}}, Shape{{768, 768}, 256, {0, 1}}, Shape{{72, 72}, 64, {1}}})
        for (int N : {1, 2, 5, 8, 16, 17, 64, 200, 256}) {
            Matrix W(random, shape.rows, shape.in);
            const int R = W.host.out(), K = shape.in;
            std::vector<std::unique_ptr<RandomAdapter>> all;
            for (int rank : {8, 16, 64, 24}) all.push_back(std::make_unique<RandomAdapter>(random, W.host, rank, shape.blocks, N));
            // A model's table has four adapters a layer: this product is the seventh. Some of its products have none.
            std::vector<std::unique_ptr<Device<Adapter<bf16>>>> tables;
            for (auto& one : all) {
                std::vector<Adapter<bf16>> table(8);
                table[6] = one->device;
                tables.push_back(std::make_unique<Device<Adapter<bf16>>>(table));
            }
            tables.push_back(std::make_unique<Device<Adapter<bf16>>>(std::vector<Adapter<bf16>>(8)));
            std::vector<const Adapter<bf16>*> of;
            std::vector<int> which; // of `all`; -1: none
            for (int n = 0; n < N; n++) { // runs of one to six rows, some without
                const int pick = n && random.below(3) ? which.back() : random.below(6) - 1;
                which.push_back(pick);
                of.push_back(pick < 0 ? nullptr : tables[(size_t)pick]->data);
            }
            for (int& pick : which) pick = pick == 4 ? -1 : pick;
            Device<const Adapter<bf16>*> dof(of);
            Device<float> sums((size_t)N * R);
            const server::RowAdapters rows = {dof, 6, sums};
            const std::vector<bf16> x = random.fill<bf16>((size_t)N * K);
            const std::vector<float> residual = random.fill<float>((size_t)N * R);
            // As the definition says it, a row at a time.
            std::vector<float> y((size_t)N * R);
            for (int n = 0; n < N; n++) {
                Linear<bf16> one = W.host;
                if (which[(size_t)n] >= 0) one.adapter = all[(size_t)which[(size_t)n]]->host;
                adapted_product(one, &x[(size_t)n * K], 1, [&](int, int r, float sum) { y[(size_t)n * R + r] = sum; });
            }
            // A rounding of h may fall to the other side: 2^-8 of one of its numbers, times one of B.
            const double slack = 0.02;
            auto close = [&](const auto& got, auto want, double unit) {
                int wrong = 0;
                for (int n = 0; n < N; n++)
                    for (int r = 0; r < R; r++) {
                        const size_t i = (size_t)n * R + r;
                        const double w = want(i), bound = unit * std::abs(w) + sum_error<float>(K) * 8 + (which[(size_t)n] < 0 ? 0 : slack);
                        if (std::abs(to_acc(got[i]) - w) <= bound) continue;
                        if (wrong++ < 3) MESSAGE("row " << n << " (adapter " << which[(size_t)n] << "), output " << r << ": " << to_acc(got[i]) << ", wanted " << w);
                    }
                return wrong;
            };
            INFO("N " << N << " R " << R << " K " << K);
            Device<bf16> dx(x), out((size_t)N * R);
            Device<float> dresidual(residual), added((size_t)N * R);
            server::rows_linear_gpu(pad.ctx, out, dx, W.device, rows, N);
            CHECK(close(out.get(), [&](size_t i) { return y[i]; }, 0.005) == 0);
            server::rows_linear_add_gpu(pad.ctx, added, dresidual, dx, W.device, rows, N);
            const auto first = added.get();
            CHECK(close(first, [&](size_t i) { return residual[i] + y[i]; }, 1e-6) == 0);
            server::rows_linear_add_gpu(pad.ctx, added, dresidual, dx, W.device, rows, N);
            CHECK(same_bits(added.get(), first));
            if (shape.rows.size() != 2) continue;
            const size_t F = (size_t)R / 2;
            Device<bf16> hidden((size_t)N * F);
            server::rows_linear_swiglu_gpu(pad.ctx, hidden, dx, W.device, rows, N);
            const auto got = hidden.get();
            int wrong = 0;
            for (int n = 0; n < N; n++)
                for (size_t f = 0; f < F; f++) {
                    const double g = y[(size_t)n * R + f], u = y[(size_t)n * R + F + f], want = g / (1 + std::exp(-g)) * u;
                    const double bound = 0.02 * std::abs(want) + 0.02 * (std::abs(g) + std::abs(u)) + 0.01;
                    wrong += !(std::abs(to_acc(got[(size_t)n * F + f]) - want) <= bound);
                }
            CHECK(wrong == 0);
        }
}

TEST_CASE("whole model: no further from the fp32 truth than transformers' own bf16; decoding and prompts agree") {
    for (const char* folder : {"tied_bf16", "untied_bf16", "tied_f16"}) {
        INFO(std::string(folder));
        Golden g(folder);
        for (bool invariant : {false, true})
            for (bool one_by_one : {false, true}) {
                const double kl = mean_kl(g.logits, model_logits(g, true, invariant, one_by_one), g.file.config.V);
                INFO("invariant " << invariant << " one by one " << one_by_one << ": mean KL " << kl << ", transformers " << g.bf16_kl);
                CHECK(kl <= g.bf16_kl);
                CHECK(kl > 0);
            }
        CHECK(same_bits(model_logits(g, true, false, false), model_logits(g, true, false, false)));
        CHECK(same_bits(model_logits(g, true, true, false), model_logits(g, true, true, true))); // a row alone = the row in a batch
    }
}

TEST_CASE("draws: the graph's tokens are those that the CPU's sampler draws from the GPU's logits") {
    Golden g("tied_bf16");
    const Config& c = g.file.config;
    Weights<bf16> weights(g.file);
    weights.upload(gpu(), g.file);
    for (int round = 0; round < 6; round++) {
        INFO("round " << round);
        Generation a;
        a.sampling.seed = (uint64_t)round;
        a.sampling.temperature = round == 0 ? 0.f : 1.f;
        a.sampling.top_k = round % 2 ? 0 : 50;
        if (round >= 3) a.sampling.repeat = 1.2f, a.sampling.presence = 0.3f, a.sampling.frequency = 0.1f;
        a.max_tokens = round == 5 ? 3 : 400;
        const int capacity = round == 4 ? 100 : 300; // to the end of the context, across several sizes of graph
        Session<bf16> session(c, weights, capacity, gpu());
        const std::vector<int> prompt = g.prompts.back();
        session.feed(prompt);
        generate(session, nullptr, a, [](std::string_view) {});
        CHECK(a.ids.size() > 2);

        Session<bf16> steps(c, weights, capacity, gpu());
        steps.feed(prompt);
        std::vector<int> want;
        while (want.size() < a.max_tokens) {
            penalize(steps.logits, a.sampling, steps.ids, prompt.size(), c.V);
            const int id = sample(steps.logits, c.V, a.sampling, steps.ids.size());
            if (std::find(c.end_tokens.begin(), c.end_tokens.end(), id) != c.end_tokens.end()) break;
            want.push_back(id);
            if (steps.full()) break;
            steps.feed({id});
        }
        CHECK(a.ids == want);
        // The session goes on after an answer, with what it had.
        if (session.full() || steps.full()) continue;
        session.rewind(prompt.size()), steps.rewind(prompt.size());
        session.feed({1, 2, 3}), steps.feed({1, 2, 3});
        CHECK(memcmp(session.logits, steps.logits, c.V * sizeof(float)) == 0);
    }
}

TEST_CASE("greedy text is the CPU's on checkpoints whose logits leave room") {
    for (const char* folder : {"tied_bf16", "untied_bf16"}) {
        Golden g(folder);
        Weights<bf16> host(g.file), device(g.file);
        device.upload(gpu(), g.file);
        for (auto& prompt : g.prompts) {
            Session<bf16> a(g.file.config, host, 128), b(g.file.config, device, 128, gpu());
            a.feed(prompt), b.feed(prompt);
            for (int step = 0; step < 40; step++) {
                std::vector<float> la(a.logits, a.logits + g.file.config.V), lb(b.logits, b.logits + g.file.config.V);
                const int best = (int)(std::max_element(la.begin(), la.end()) - la.begin());
                float second = -INFINITY;
                for (int v = 0; v < (int)la.size(); v++)
                    if (v != best) second = std::max(second, la[v]);
                if (la[best] - second > 0.25) CHECK(std::max_element(lb.begin(), lb.end()) - lb.begin() == best);
                a.feed({best}), b.feed({best});
            }
        }
    }
}

TEST_CASE("a context of 20,000 tokens: chunks and single steps agree with the CPU") {
    Golden g("untied_bf16"); // one layer: the CPU can follow
    Config c = g.file.config;
    c.max_positions = 30000;
    Weights<bf16> host(g.file), device(g.file);
    device.upload(gpu(), g.file);
    Random random{7};
    std::vector<int> text;
    for (int i = 0; i < 20000; i++) text.push_back(random.below(c.V));
    Session<bf16> a(c, host, 20010), b(c, device, 20010, gpu());
    a.feed(text), b.feed(text);
    auto agree = [&] {
        const std::vector<float> la(a.logits, a.logits + c.V), lb(b.logits, b.logits + c.V);
        return mean_kl(la, lb, c.V);
    };
    CHECK(agree() < g.bf16_kl);
    for (int i = 0; i < 4; i++) {
        a.feed({i}), b.feed({i});
        CHECK(agree() < g.bf16_kl);
    }
    // Saved and restored, the cache is the same.
    std::vector<std::vector<uint8_t>> blocks;
    each_block(b, b.ids.size(), [&](bf16* p) { blocks.emplace_back((uint8_t*)p, (uint8_t*)p + block_bytes(b, b.ids.size())); });
    Session<bf16> other(c, device, 20010, gpu());
    size_t i = 0;
    each_block(other, b.ids.size(), [&](bf16* p) { memcpy((void*)p, blocks[i].data(), blocks[i].size()), i++; });
    other.ids = b.ids;
    other.feed({5}), b.feed({5});
    CHECK(memcmp(other.logits, b.logits, c.V * sizeof(float)) == 0);
}

TEST_CASE("YaRN at position 120,000: prompts, single steps, FP8 keys and values, one kernel a token agree with the CPU") {
    constexpr int LONG = 120000;
    Golden g("untied_bf16"), unscaled("untied_bf16"); // one layer: see fill_cache
    g.file.scale_rope("yarn", 4, 32768);
    const Config& c = g.file.config;
    Config plain = unscaled.file.config;
    plain.max_positions = c.max_positions;
    Weights<bf16> host(g.file), device(g.file);
    device.upload(gpu(), g.file);
    const std::vector<int> text = far_text(LONG + 8);
    const auto logits = [&](const Session<bf16>& s) { return std::vector<float>(s.logits, s.logits + c.V); };
    const auto apart = [&](const Session<bf16>& one, const Session<bf16>& other) { return mean_kl(logits(one), logits(other), c.V); };
    Session<bf16> exact(c, host, LONG + 10, cpu());
    for (bool fp8 : {false, true}) {
        INFO("FP8: " << fp8);
        Context where = gpu(), in_cpu = cpu();
        where.kv_fp8 = in_cpu.kv_fp8 = fp8, where.one_kernel = Context::OFF;
        Session<bf16> a(c, host, LONG + 10, in_cpu), b(c, device, LONG + 10, where), other(plain, host, LONG + 10, in_cpu);
        for (Session<bf16>* s : {&a, &other, &exact}) {
            s->rewind(0), fill_cache(*s, {text.begin(), text.begin() + LONG});
            s->feed({text[LONG]});
        }
        b.feed({text.begin(), text.begin() + LONG + 1});
        double between = apart(a, b), cost = apart(exact, a);
        CHECK(apart(other, a) > 10 * g.bf16_kl); // it can fail
        for (int i = LONG + 1; i < LONG + 5; i++) {
            for (Session<bf16>* s : {&a, &b, &exact}) s->feed({text[i]});
            between += apart(a, b), cost += apart(exact, a);
        }
        CHECK(between < (fp8 ? 0.5 * cost : 5 * g.bf16_kl));
    }
#ifndef QWEN3_PORTABLE
    Context where = gpu();
    where.one_kernel = Context::TOGETHER;
    Session<bf16> a(c, host, LONG + 10, cpu()), b(c, device, LONG + 10, where);
    fill_cache(a, {text.begin(), text.begin() + LONG});
    b.feed({text.begin(), text.begin() + LONG});
    Sampling greedy;
    greedy.temperature = 0;
    b.begin_draws(greedy, c.V, LONG, 4);
    REQUIRE(draws_of(b).road != nullptr);
    std::vector<int> ids = {b.draw()};
    while (ids.size() < 4) b.accept(ids.back()), ids.push_back(b.draw());
    std::vector<float> last((size_t)c.V); // of the last step
    copy_out(b.ctx, last.data(), b.row_logits, last.size());
    a.feed({ids.begin(), ids.end() - 1});
    CHECK(mean_kl(logits(a), last, c.V) < g.bf16_kl);
#endif
}

TEST_CASE("--kv-dtype fp8 reaches the GPU") {
    ModelOptions o;
    o.device = "cuda", o.kv_dtype = "fp8";
    CHECK(choose_device(o, Golden("untied_bf16").file).kv_fp8);
}

TEST_CASE("FP8 keys and values: a session on the GPU agrees with one on the CPU, in prompts and step by step, and is saved and restored") {
    Golden g("untied_bf16");
    Config c = g.file.config;
    c.max_positions = 200;
    Weights<bf16> host(g.file), device(g.file);
    device.upload(gpu(), g.file);
    Random random{8};
    std::vector<int> text;
    for (int i = 0; i < 150; i++) text.push_back(random.below(c.V));
    for (bool invariant : {false, true}) {
        Context where = gpu(), in_cpu = cpu();
        where.invariant = invariant, where.kv_fp8 = in_cpu.kv_fp8 = true;
        Session<bf16> a(c, host, 200, in_cpu), b(c, device, 200, where), exact(c, host, 200);
        const auto logits = [&](const Session<bf16>& s) { return std::vector<float>(s.logits, s.logits + c.V); };
        const auto apart = [&](const Session<bf16>& one, const Session<bf16>& other) { return mean_kl(logits(one), logits(other), c.V); };
        double between = 0, cost = 0; // of FP8 on the two; of FP8 and bf16
        const auto feed = [&](const std::vector<int>& more) {
            for (Session<bf16>* s : {&a, &b, &exact}) s->feed(more);
            between += apart(a, b), cost += apart(exact, a);
        };
        feed({text.begin(), text.begin() + 90}), feed({text.begin() + 90, text.begin() + 130});
        for (int i = 130; i < 150; i++) feed({text[i]});
        CHECK(cost > 0);
        CHECK(between < 0.5 * cost);
        std::vector<std::vector<uint8_t>> blocks;
        each_block(b, b.ids.size(), [&](bf16* p) { blocks.emplace_back((uint8_t*)p, (uint8_t*)p + block_bytes(b, b.ids.size())); });
        Session<bf16> other(c, device, 200, where);
        size_t i = 0;
        each_block(other, b.ids.size(), [&](bf16* p) { memcpy((void*)p, blocks[i].data(), blocks[i].size()), i++; });
        other.ids = b.ids;
        other.feed({5}), b.feed({5});
        CHECK(memcmp(other.logits, b.logits, c.V * sizeof(float)) == 0);
    }
}

// ---- One kernel a token (step.h). Emulated before in tests/unit/test_step.cpp.
#ifndef QWEN3_PORTABLE
TEST_CASE("packed weights are uploaded right where they fill several buffers") {
    const RandomCheckpoint m(gpu(), 1024, 3072, 16, 8, 4096, 2, true);
    Weights<bf16> host(*m.file, Format::INT8, true), device(*m.file, Format::INT8, true); // INT8: 34 MB
    Context ctx = gpu();
    ctx.gpu = std::make_shared<Gpu>(*ctx.gpu);
    device.upload(ctx, *m.file);
    REQUIRE(device.layers[1].down.format == Format::INT8);
    Session<bf16> on_cpu(m.file->config, host, 64, cpu()), on_gpu(m.file->config, device, 64, ctx);
    on_cpu.feed({5, 6, 7}), on_gpu.feed({5, 6, 7});
    const int V = m.file->config.V;
    CHECK(mean_kl(std::vector<float>(on_cpu.logits, on_cpu.logits + V), std::vector<float>(on_gpu.logits, on_gpu.logits + V), V) < 1e-3);
}

// The ids that a session samples after a prompt, and the logits after the prompt and of its last step.
struct RoadRun {
    std::vector<int> ids;
    std::vector<float> of_prompt, logits;
    RoadRun(const RandomCheckpoint& m, Context::OneKernel road, int position, int draws, Sampling how)
        : RoadRun(m, *m.weights, gpu(), road, position, draws, how) {}
    RoadRun(const RandomCheckpoint& m, const Weights<bf16>& weights, Context ctx, Context::OneKernel road, int position,
            int draws, Sampling how) {
        ctx.one_kernel = road;
        const int V = m.file->config.V;
        Session<bf16> s(m.file->config, weights, position + draws + 8, ctx);
        Random random{(uint64_t)position};
        std::vector<int> prompt(position);
        for (int& id : prompt) id = random.below(V);
        s.feed(prompt);
        of_prompt.assign(s.logits, s.logits + V);
        s.begin_draws(how, V, prompt.size(), draws);
        REQUIRE((draws_of(s).road != nullptr) == (road != Context::OFF));
        for (int i = 0; i < draws; i++) {
            if (i) s.accept(ids.back());
            ids.push_back(s.draw());
        }
        logits.resize(V);
        copy_out(s.ctx, logits.data(), s.row_logits, logits.size());
    }
};

TEST_CASE("one kernel a token: the graph's logits within a few ulps, at all places and shapes; the same bits on every run") {
    struct Shape { int C, F, H, K, V, L; bool tied; };
    for (const Shape& y : {Shape{1024, 3072, 16, 8, 4096, 4, true}, Shape{2560, 9728, 32, 8, 4096, 2, true},
                           Shape{136, 264, 4, 4, 1000, 3, false}, Shape{5120, 520, 40, 8, 1024, 2, false}}) {
        const RandomCheckpoint m(gpu(), y.C, y.F, y.H, y.K, y.V, y.L, y.tied);
        for (int position : {1, 15, 16, 17, 100, 383, 384, 385, 1000, 2100, 9000}) {
            INFO("C " << y.C << " F " << y.F << " H " << y.H << " K " << y.K << " position " << position);
            Sampling greedy;
            greedy.temperature = 0;
            const RoadRun graph(m, Context::OFF, position, 2, greedy), road(m, Context::TOGETHER, position, 2, greedy);
            REQUIRE(graph.ids[0] == road.ids[0]); // of the prompt
            double difference = 0, size = 0;
            for (int v = 0; v < y.V; v++)
                difference += std::pow(graph.logits[v] - road.logits[v], 2), size += std::pow(graph.logits[v], 2);
            INFO("rms difference " << std::sqrt(difference / y.V) << " of logits of rms " << std::sqrt(size / y.V));
            CHECK(difference <= size * 0.015 * 0.015);
            CHECK(road.ids[1] == std::max_element(road.logits.begin(), road.logits.end()) - road.logits.begin());
            CHECK(same_bits(road.logits, RoadRun(m, Context::TOGETHER, position, 2, greedy).logits));
            CHECK(same_bits(road.logits, RoadRun(m, Context::BY_PHASE, position, 2, greedy).logits));
        }
        // Many steps, drawn by sample_kernel and inside.
        for (float temperature : {0.f, 1.f}) {
            Sampling how;
            how.temperature = temperature, how.seed = 5, how.repeat = 1.1f;
            const RoadRun a(m, Context::TOGETHER, 90, 60, how), b(m, Context::TOGETHER, 90, 60, how), c(m, Context::BY_PHASE, 90, 60, how);
            CHECK(a.ids == b.ids);
            CHECK(a.ids == c.ids);
            CHECK(same_bits(a.logits, b.logits));
            CHECK(same_bits(a.logits, c.logits));
        }
        for (uint64_t seed = 0; seed < 12; seed++) { // from few of the head's blocks, see list_from_kth
            Sampling how;
            how.temperature = 1, how.seed = seed, how.top_k = (int[]){20, 5, 50}[seed % 3];
            const RoadRun a(m, Context::TOGETHER, 90, 2, how);
            CHECK(a.ids.back() == sample(a.logits.data(), y.V, how, 91));
        }
    }
}

// A RandomCheckpoint's matrices in a format, packed on the GPU.
struct PackedCheckpoint {
    std::unique_ptr<ModelFile> file;
    std::unique_ptr<Weights<bf16>> weights;
    Context ctx = gpu();
    PackedCheckpoint(const RandomCheckpoint& m, Format format, int group) {
        const std::string path = m.path + ".packed.bin";
        Quantization how;
        how.format = format, how.group = group;
        write_safetensors(path, model_metadata(quantized_config(*m.file, how), ""), quantize_model<bf16>(*m.file, how, {}));
        file = std::make_unique<ModelFile>(path);
        weights = std::make_unique<Weights<bf16>>(*file, Format::PLAIN, true);
        ctx.gpu = std::make_shared<Gpu>(*ctx.gpu);
        weights->upload(ctx, *file);
        std::filesystem::remove(path); // (it stays mapped)
    }
};

TEST_CASE("packed weights: a prompt has the same bits in every new session, whose memory is slow at first") {
    const RandomCheckpoint m(gpu(), 1024, 3072, 16, 8, 4096, 1, true);
    const PackedCheckpoint packed(m, Format::INT8, 32);
    // (64: four turns of warpgroups; 128: three, and 1% of the sessions were wrong where a turn could pass another.)
    for (int N : {64, 128, 300}) {
        INFO(N << " tokens");
        std::vector<int> prompt;
        Random random{9};
        for (int i = 0; i < N; i++) prompt.push_back(random.below(4096));
        std::vector<float> first;
        int others = 0;
        for (int i = 0; i < (N == 128 ? 700 : 100); i++) {
            Session<bf16> session(m.file->config, *packed.weights, N + 10, packed.ctx);
            session.feed(prompt);
            const std::vector<float> logits(session.logits, session.logits + 4096);
            if (i == 0) first = logits;
            others += !same_bits(first, logits);
        }
        CHECK(others == 0);
    }
}

TEST_CASE("one kernel a token with packed weights: the graph's logits, phase by phase and all at once the same bits") {
    struct Kind { bool large; Format format; int group; };
    for (const Kind& kind : {Kind{false, Format::INT8, 32}, Kind{false, Format::INT4, 32}, Kind{false, Format::INT4, 64},
                             Kind{false, Format::INT4, 128}, Kind{false, Format::FP8, 128}, Kind{true, Format::INT8, 32},
                             Kind{true, Format::INT4, 32}, Kind{true, Format::INT4, 64}, Kind{true, Format::INT4, 128},
                             Kind{true, Format::FP8, 128}}) {
        const Format format = kind.format;
        const int group = kind.group;
        INFO("C " << (kind.large ? 2560 : 1024) << ", format " << (int)format << ", groups of " << group);
        const RandomCheckpoint m(gpu(), kind.large ? 2560 : 1024, kind.large ? 9728 : 3072, kind.large ? 32 : 16, 8, 4096, kind.large ? 1 : 2, true);
        const PackedCheckpoint packed(m, format, group);
        REQUIRE(packed.weights->layers.back().down.format == format);
        Sampling greedy;
        greedy.temperature = 0;
        for (int position : {1, 100, 1000}) {
            INFO("position " << position);
            auto run = [&](Context::OneKernel road) { return RoadRun(m, *packed.weights, packed.ctx, road, position, 2, greedy); };
            const RoadRun graph = run(Context::OFF), road = run(Context::TOGETHER);
            double difference = 0, size = 0;
            for (size_t v = 0; v < graph.logits.size(); v++)
                difference += std::pow(graph.logits[v] - road.logits[v], 2), size += std::pow(graph.logits[v], 2);
            CHECK(difference <= size * 0.015 * 0.015);
            for (auto again : {Context::TOGETHER, Context::BY_PHASE}) {
                const RoadRun other = run(again);
                CHECK(same_bits(road.of_prompt, other.of_prompt));
                CHECK(same_bits(road.logits, other.logits));
            }
        }
    }
}

// Steps of several rows by the kernel after a prompt, beside those of one row.
struct RoadRows {
    Session<bf16> session;
    std::vector<int> ids; // that follow the prompt
    RoadRows(const RandomCheckpoint& m, Context ctx, int position) : session(m.file->config, *m.weights, position + 24, with_road(ctx)) {
        const int V = m.file->config.V;
        Random random{(uint64_t)position};
        std::vector<int> prompt(position);
        for (int& id : prompt) id = random.below(V);
        for (int r = 0; r < STEP_TOKENS; r++) ids.push_back(random.below(V));
        session.feed(prompt);
        session.begin_draws({}, V, prompt.size(), 1);
        session.draw();
    }
    static Context with_road(Context ctx) { return ctx.one_kernel = Context::TOGETHER, ctx; }
    StepRoad& road() { return dynamic_cast<StepRoad&>(*draws_of(session).road); }
    // Logits of N rows, from the first-th of `ids` on.
    std::vector<float> step(int first, int N) {
        GpuDraws& d = draws_of(session);
        const Config& c = session.config;
        std::vector<int> pos(N);
        std::iota(pos.begin(), pos.end(), (int)session.ids.size() + first);
        copy_in(session.ctx, d.step.token, &ids[first], N), copy_in(session.ctx, d.step.pos, pos.data(), N);
        copy_in(session.ctx, d.step.slot, pos.data(), N);
        road().use({N, 1, d.step.token, d.step.pos, d.seq, d.step.slot, session.table, session.pages, N == 1}, session.cache, session.rope,
                   session.row_logits, d.draw_parameters, d.best);
        road().args.greedy = false, road().args.seen = nullptr;
        road().launch_step();
        std::vector<float> logits((size_t)N * c.V);
        copy_out(session.ctx, logits.data(), session.row_logits, logits.size());
        road().check();
        return logits;
    }
};
TEST_CASE("one kernel, several tokens: each has the bits of a step of its own, at all places and shapes") {
    struct Shape { int C, F, H, K, V, L; bool tied; };
    for (const Shape& y : {Shape{1024, 3072, 16, 8, 4096, 4, true}, Shape{2560, 9728, 32, 8, 4096, 2, true},
                           Shape{136, 264, 4, 4, 1000, 3, false}, Shape{4096, 12288, 32, 8, 1024, 1, false}}) {
        const RandomCheckpoint m(gpu(), y.C, y.F, y.H, y.K, y.V, y.L, y.tied);
        // (The first key; the end of a page; 64, where contexts begin to be split, and where they get one split more.)
        for (int position : {1, 10, 13, 60, 100, 124, 250, 1020, 2100, 9000}) {
            RoadRows rows(m, gpu(), position);
            const int most = rows.road().most;
            INFO("C " << y.C << " F " << y.F << " H " << y.H << " K " << y.K << " position " << position << ", at most " << most << " tokens");
            REQUIRE(most > 1);
            if (y.C <= 1024) CHECK(most == STEP_TOKENS);
            const std::vector<float> together = rows.step(0, most); // before their keys have ever been in the cache
            for (int r = 0; r < most; r++) {
                INFO("token " << r);
                const std::vector<float> alone = rows.step(r, 1);
                CHECK(same_bits(alone, std::vector<float>(&together[(size_t)r * y.V], &together[(size_t)r * y.V] + y.V)));
            }
            for (int N : {2, 3, most}) {
                INFO("a step of " << N);
                if (N > most) continue;
                CHECK(same_bits(rows.step(0, N), std::vector<float>(together.begin(), together.begin() + (size_t)N * y.V)));
            }
            rows.road().by_phase = true;
            CHECK(same_bits(rows.step(0, most), together));
        }
    }
}

TEST_CASE("one kernel and prompt lookup: the ids are those without, greedy and drawn, whatever is proposed") {
    const RandomCheckpoint m(gpu(), 1024, 3072, 16, 8, 512, 2, true);
    Context ctx = gpu();
    ctx.one_kernel = Context::TOGETHER;
    const int V = m.file->config.V;
    std::vector<int> prompt;
    Random random{4};
    for (int i = 0; i < 90; i++) prompt.push_back(i < 30 ? random.below(V) : prompt[(size_t)i - 30]);
    size_t proposed = 0, right = 0;
    for (int round = 0; round < 7; round++) {
        Generation how;
        how.sampling.seed = (uint64_t)round, how.sampling.temperature = round < 2 ? 0 : round < 5 ? 0.1f : 0.8f;
        how.sampling.top_k = round % 2 ? 0 : 20;
        if (round == 1 || round == 6) how.sampling.repeat = 1.1f, how.sampling.presence = 0.2f; // (nothing is proposed)
        how.max_tokens = round == 3 ? 400 : 150; // (400: to the context's end)
        std::vector<int> ids[3];
        for (int lookup : {0, LookUp::MOST, 1, -1}) {
            Session<bf16> one(m.file->config, *m.weights, 300, ctx);
            one.lookup.most = lookup < 0 ? LookUp::MOST : lookup, one.lookup.always = lookup > 0; // -1: while it pays
            // The second beside what the first left behind. It reads the prompt from 40 on only: products of 50 tokens
            // may have other bits than those of 90, so it is held to the second one without lookup. The third reads all.
            for (int answer = 0; answer < 3; answer++) {
                one.rewind(answer == 1 ? 40 : 0);
                one.feed({prompt.begin() + (long)one.ids.size(), prompt.end()});
                Generation a = how;
                generate(one, nullptr, a, [](std::string_view) {});
                INFO("round " << round << ", lookup " << lookup << ", answer " << answer << ": " << one.lookup.right << " of " << one.lookup.proposed);
                if (lookup == 0) ids[answer] = a.ids;
                CHECK(a.ids == ids[answer]);
                if (answer == 2) CHECK(a.ids == ids[0]);
                CHECK(one.ids.size() <= 300);
                if (has_penalties(how.sampling) || !lookup) CHECK(one.lookup.proposed == 0);
                proposed += one.lookup.proposed, right += one.lookup.right;
            }
        }
    }
    MESSAGE(right << " of " << proposed << " looked up were right");
    CHECK(proposed > 0);
    CHECK(right > 0);
}

TEST_CASE("one kernel a token: what is waited for in vain ends the kernel, and is an error") {
    const RandomCheckpoint m(gpu(), 1024, 3072, 16, 8, 4096, 2, true);
    Context ctx = gpu();
    ctx.one_kernel = Context::TOGETHER;
    Session<bf16> s(m.file->config, *m.weights, 64, ctx);
    s.feed({1, 2, 3});
    Sampling greedy;
    greedy.temperature = 0;
    s.begin_draws(greedy, 4096, 3, 4);
    s.accept(s.draw());
    s.draw();
    CUDA_CHECK(cudaStreamSynchronize(s.ctx.gpu->stream));
    StepRoad& road = dynamic_cast<StepRoad&>(*draws_of(s).road);
    StepArgs args = road.args;
    args.patience = 1000000; // 1 ms
    road.layers.kernel<<<road.blocks, road.threads, args.shared, s.ctx.gpu->stream>>>(args, STEP_O, STEP_O + 1); // nobody attends
    CUDA_CHECK(cudaStreamSynchronize(s.ctx.gpu->stream));
    CHECK(*road.fault == 1);
    CHECK_THROWS_AS(road.check(), Error);
}

TEST_CASE("one kernel a token: a model that it cannot compute takes the graph") {
    Golden g("tied_bf16"); // heads of 64
    Weights<bf16> weights(g.file);
    weights.upload(gpu(), g.file);
    Context ctx = gpu();
    ctx.one_kernel = Context::TOGETHER;
    Session<bf16> s(g.file.config, weights, 64, ctx);
    s.feed({1, 2, 3});
    s.begin_draws({}, g.file.config.V, 3, 4);
    CHECK(draws_of(s).road == nullptr);
    CHECK(s.draw() >= 0);
}
#endif // QWEN3_PORTABLE

TEST_CASE("what the GPU cannot do is one line") {
    if (!Optional::HERE) { // a portable build
        const ModelFile packed("tests/fixtures/quantized/fp8");
        Weights<bf16> w(packed, Format::PLAIN, true);
        CHECK_THROWS_AS(w.upload(gpu(), packed), Error);
    }
    Config c = Golden("tied_bf16").file.config;
    Golden g("tied_bf16");
    auto refuses = [&](Config bad) { CHECK_THROWS_AS(check_gpu("m", bad, true), Error); };
    check_gpu("m", c, true);
    c.D = 80, refuses(c);
    c = g.file.config, c.V = 1021, refuses(c);
    c = g.file.config, c.C = 84, refuses(c);
    Weights<bf16> weights(g.file);
    weights.upload(gpu(), g.file);
    c = g.file.config;
    c.L = 4000, c.K = 64;
    CHECK_THROWS_AS(Session<bf16>(c, weights, 1 << 20, gpu()), Error); // more memory than there is
}

TEST_CASE("prompt lookup: with `invariant` the answers are those of a step a token, since steps of 1 to 8 tokens agree to the bit") {
    // The reason: the logits of a token in a step of 1 to 8 tokens have the same bits.
    Golden g("tied_bf16");
    Weights<bf16> weights(g.file);
    weights.upload(gpu(), g.file);
    Context fixed = gpu();
    fixed.invariant = true;
    const int V = g.file.config.V;
    std::vector<int> prompt = g.prompts.back();
    for (int i = 0; i < 100; i++) prompt.push_back(prompt[(size_t)i % 17]);
    Session<bf16> session(g.file.config, weights, 300, fixed);
    auto step = [&](int tokens) { // logits of the last of so many tokens after the prompt's first
        session.rewind(0);
        const auto at = prompt.end() - tokens;
        session.feed({prompt.begin(), at});
        session.feed({at, prompt.end()}, nullptr, [](const float*) {});
        return std::vector<float>(session.logits, session.logits + V);
    };
    const std::vector<float> alone = step(1);
    for (int tokens = 2; tokens <= LookUp::MOST + 1; tokens++) {
        INFO("a step of " << tokens << " tokens");
        CHECK(same_bits(step(tokens), alone));
    }

    for (int round = 0; round < 4; round++) {
        Generation how;
        how.sampling.seed = (uint64_t)round, how.sampling.temperature = round ? 0.4f : 0;
        if (round == 3) how.sampling.repeat = 1.1f, how.sampling.presence = 0.2f;
        how.max_tokens = 120;
        std::vector<int> ids[2];
        for (int lookup : {0, LookUp::MOST}) {
            Session<bf16> one(g.file.config, weights, 400, fixed);
            one.lookup.most = lookup, one.lookup.always = true;
            one.feed(prompt);
            Generation a = how;
            generate(one, nullptr, a, [](std::string_view) {});
            ids[lookup > 0] = a.ids;
            if (lookup) CHECK(one.lookup.proposed > 0);
        }
        INFO("round " << round);
        CHECK(ids[0] == ids[1]);
    }
    Session<bf16> other(g.file.config, weights, 400, gpu()); // attention of a token alone has another order of sums
    other.lookup.most = 1;
    other.feed(prompt);
    CHECK_THROWS_AS(other.begin_draws({}, V, prompt.size(), 1), Error);
}
