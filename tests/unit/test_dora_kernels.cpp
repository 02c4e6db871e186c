// DoRA's kernels by emulation (tests/emulate/emulate.h): lengths of rows, the product's last step by each epilogue, what
// dropout changes, and gradients are those of Book I, whatever the order of the threads.
#include <doctest/doctest.h>
#include "tests/emulate/packed_emulation.h"
#include "qwen3.cu"
#include "tests/batch.h"
#include "tests/dora.h"

static const std::pair<std::vector<int>, std::vector<int>> BLOCKS[] = {{{264}, {0}}, {{64, 32, 16}, {0, 2}}, {{24, 24}, {0, 1}}};
// Epilogues as StoreEpilogue, AddEpilogue and (PAIR) SwigluEpilogue take their numbers.
template <bool PAIR_, bool ADDS_> struct Keep {
    static constexpr bool PAIR = PAIR_, ADDS = ADDS_;
    float *y, *second;
    const float* residual;
    size_t ld;
    float4 old_four(int n, int r) const { return *(const float4*)(residual + n * ld + r); }
    void four(int n, int r, const float4& v, const float4& more) {
        store_four(y + n * ld + r, v);
        if (second) store_four(second + n * ld + r, more);
    }
};
static unsigned blocks_for(size_t threads) { return (unsigned)((threads + 255) / 256); }

TEST_CASE("dora_norm_kernel, dora_kernel, dropped_kernel, dora_backward_kernel: Book I's results") {
    Random random{5};
    for (float p : {0.f, 0.3f})
        for (auto& shape : BLOCKS)
            for (bool order : {false, true}) {
                const std::vector<int>&rows = shape.first, &blocks = shape.second;
                backwards = order;
                const int N = 37, in = 136;
                DoraProduct<bf16> d(random, rows, blocks, in, 8, N, p, 0.3);
                const int out = d.W.out();
                INFO("p " << p << " out " << out);
                const std::vector<bf16> x = random.fill<bf16>((size_t)N * in);
                std::vector<bf16> want((size_t)N * out);
                dora_norm(d.W);
                const std::vector<float> norm = d.norm, c = d.c;
                d.norm = d.c = poisoned<float>(out);
                d.use();
                for (int b = 0; b < 3 && d.W.rows[b]; b++)
                    launch(dim3(d.W.rows[b] / DORA_ROWS), dim3(DORA_THREADS), [&] { dora_norm_kernel(d.W.adapter, d.w.data(), in, d.W.module_of(d.W.first_row(b)), d.W.first_row(b)); });
                for (int r = 0; r < out; r++) {
                    CHECK((d.norm[r] == norm[r] || std::fabs(d.norm[r] / norm[r] - 1) < 1e-6));
                    CHECK(std::fabs(d.c[r] / c[r] - 1) < 1e-6);
                }

                // Forward. The product of LoRA, then what DoRA makes of it.
                linear(want.data(), x.data(), d.W, N);
                const std::vector<bf16> want_u = d.u;
                Linear<bf16> lora = d.W;
                lora.adapter.dora.on = false;
                linear(d.u.data(), x.data(), lora, N);
                std::vector<bf16> off((size_t)N * out), less((size_t)N * in);
                std::vector<uint32_t> words(DropoutMasks::size((int)blocks.size(), in, N));
                const DropoutMasks masks = {words.data(), (in + 63) / 64, N};
                const float scale = 1 / (1 - p);
                for (int j = 0; j < d.W.adapter.modules && p > 0; j++) {
                    for (int n = 0; n < N; n++)
                        for (int i = 0; i < in; i++)
                            masks.at(j, i / 64, n)[i % 64 / 32] |= (uint32_t)dropout_keeps(d.dropout, n, d.W.adapter.module[j], i) << i % 32;
                    const Linear<bf16> part = d.W.block(blocks[(size_t)j]);
                    launch(dim3(blocks_for((size_t)N * in / 8)), dim3(256), [&] { dropped_kernel<false>(less.data(), x.data(), masks, j, scale, N, in); });
                    product(part, less.data(), N, [&](int n, int r, float v) { off[(size_t)n * out + d.W.first_row(blocks[(size_t)j]) + r] = to_bf16(v); });
                }
                const bf16* beside = p > 0 ? off.data() : nullptr;
                const std::vector<bf16> first_u = d.u;
                const std::vector<float> residual = random.fill<float>((size_t)N * out);
                std::vector<float> sum((size_t)N * out), second(sum.size());
                launch(dim3(blocks_for((size_t)N * out / 4)), dim3(256), [&] { dora_kernel(Keep<false, true>{sum.data(), second.data(), residual.data(), (size_t)out}, d.u.data(), beside, d.c.data(), N, out); });
                const auto near = [&](size_t) { return 0.02 * std::sqrt(in); };
                CHECK(wrong(sum, as_double(want), near) == 0);
                CHECK(second == residual);
                CHECK(wrong(d.u, as_double(want_u), near) == 0);
                d.u = first_u, d.use();
                const size_t half = (size_t)out / 2;
                std::vector<float> gate((size_t)N * half), up(gate.size());
                launch(dim3(blocks_for((size_t)N * out / 8)), dim3(256), [&] { dora_kernel(Keep<true, false>{gate.data(), up.data(), nullptr, half}, d.u.data(), beside, d.c.data(), N, out); });
                size_t other = 0;
                for (size_t i = 0; i < sum.size(); i++) other += sum[i] != (i % out < half ? gate : up)[i / out * half + i % out % half];
                CHECK(other == 0);

                // Backward.
                const std::vector<bf16> dy = random.fill<bf16>((size_t)N * out);
                std::vector<float> dm = random.fill<float>(out), want_m = dm;
                std::vector<bf16> du(want.size()), want_du(want.size());
                dora_backward(want_du.data(), want_m.data(), dy.data(), d.W, N);
                const std::vector<bf16> want_off = d.off;
                const int each = 10, splits = (N + each - 1) / each, across = (out + 255) / 256;
                std::vector<float> partial = poisoned<float>((size_t)splits * out);
                d.off = poisoned<bf16>(want.size());
                d.use();
                if (p == 0) d.W.adapter.dora.off = nullptr;
                launch(dim3(across, splits), dim3(256), [&] { dora_backward_kernel(du.data(), partial.data(), dy.data(), d.W.adapter.dora, N, out, each); });
                for (int i = 0; i < splits * out; i++) dm[(size_t)(i % out)] += partial[(size_t)i];
                CHECK(!stuck);
                CHECK(wrong(du, as_double(want_du), [&](size_t i) { return 2 * rounding<bf16>(to_acc(want_du[i])); }) == 0);
                if (p > 0) CHECK(wrong(d.off, as_double(want_off), [&](size_t i) { return 2 * rounding<bf16>(to_acc(want_off[i])) + 1e-6; }) == 0);
                CHECK(wrong(dm, as_double(want_m), [&](size_t) { return 1e-4; }) == 0);
                for (int j = 0; j < d.W.adapter.modules && p > 0; j++) { // dx += drop(t) - t
                    std::vector<bf16> dx = random.fill<bf16>(x.size());
                    const std::vector<bf16> was = dx;
                    launch(dim3(blocks_for((size_t)N * in / 8)), dim3(256), [&] { dropped_kernel<true>(dx.data(), x.data(), masks, j, scale, N, in); });
                    for (size_t i = 0; i < dx.size(); i++) {
                        const float t = to_acc(x[i]), by = dropout_keeps(d.dropout, (int)(i / in), d.W.adapter.module[j], (int)(i % in)) ? scale : 0;
                        CHECK(std::fabs(to_acc(dx[i]) - (to_acc(was[i]) + t * by - t)) <= 0.01 * (std::fabs(to_acc(was[i])) + std::fabs(t)));
                    }
                }
            }
    backwards = false;
}
