// distillation_kernel by emulation (tests/emulate/emulate.h): losses, agreement and gradients are those of Book I's
// `distillation` in double, whatever the order of the threads, and the gradient replaces no logit before it was read.
// Likewise gather_outcomes_kernel and scatter_outcomes_kernel.
#include <doctest/doctest.h>
#include "tests/emulate/packed_emulation.h"
#include "qwen3.cu"
#include "tests/batch.h"
#include "train/distillation.cu"

TEST_CASE("distillation_kernel: every beta, rows shorter and longer than a block's step, ties and large logits") {
    Random random{4};
    for (int V : {4, 36, 2048, 2056, 6004})
        for (const Distillation& how : {Distillation{0, 1, 1}, {1, 1, 1}, {0.3f, 1, 1}, {0, 2, 0.6f}, {1, 0.5f, 0.25f}, {0.5f, 1.5f, 0.9f}}) {
            INFO("V " << V << " beta " << how.beta << " temperature " << how.temperature << " weight " << how.weight);
            const int R = 3;
            std::vector<float> s = random.fill<float>((size_t)R * V, 5), t = random.fill<float>((size_t)R * V, 5);
            for (int v = 0; v < V; v++) t[(size_t)v] = s[(size_t)v];        // equal models
            for (int v = 0; v < V; v++) s[(size_t)(V + v)] *= 8;           // a student that is sure
            s[(size_t)(2 * V + 1)] = s[(size_t)(2 * V + 3)] = 40, t[(size_t)(2 * V + 1)] = 30; // a tie
            const std::vector<int> target = {V - 1, 0, V / 2};
            std::vector<double> wide(s.begin(), s.end()), teacher(t.begin(), t.end()), loss(R), divergence(R), agrees(R);
            const Distilled<double> want = {loss.data(), divergence.data(), agrees.data()};
            distillation<double>(want, wide.data(), wide.data(), {teacher.data(), target.data(), how, 0.25, R, V});
            CHECK(agrees[0] == 1);
            CHECK(agrees[2] == 1);
            for (bool order : {false, true}) {
                backwards = order;
                std::vector<float> logits = s, got[3];
                for (auto& list : got) list.assign(R, NAN);
                const Distilled<float> out = {got[0].data(), got[1].data(), got[2].data()};
                const DistillationRows<float> of = {t.data(), target.data(), how, 0.25f, R, V};
                launch(dim3(R), dim3(DISTIL_THREADS), [&] { distillation_kernel(out, logits.data(), of, false); });
                CHECK(logits == s);
                launch(dim3(R), dim3(DISTIL_THREADS), [&] { distillation_kernel(out, logits.data(), of, true); });
                CHECK(!stuck);
                double off = 0, off_loss = 0;
                for (int r = 0; r < R; r++) {
                    off_loss = std::max(off_loss, std::fabs(got[0][(size_t)r] - loss[(size_t)r]) / (1 + std::fabs(loss[(size_t)r])));
                    off_loss = std::max(off_loss, std::fabs(got[1][(size_t)r] - divergence[(size_t)r]) / (1 + divergence[(size_t)r]));
                    CHECK((double)got[2][(size_t)r] == agrees[(size_t)r]);
                    for (int v = 0; v < V; v++) {
                        bf16 g;
                        memcpy(&g, (const uint8_t*)(logits.data() + (size_t)r * V) + 2 * v, 2);
                        const double exact = wide[(size_t)r * V + v];
                        off = std::max(off, std::fabs(to_acc(g) - exact) - std::fabs(exact) / 256);
                    }
                }
                CHECK(off < 1e-5);
                CHECK(off_loss < 1e-5);
            }
            backwards = false;
        }
}

TEST_CASE("outcomes' kernels: gathered logits and tails, and the gradient of all ids, rows shorter and longer than a block's step") {
    Random random{6};
    for (int V : {36, 2048, 2056, 6004})
        for (int J : {4, 24, 64}) {
            if (J >= V) continue;
            INFO("V " << V << " J " << J);
            const int R = 3;
            std::vector<float> s = random.fill<float>((size_t)R * V, 5);
            for (int v = 0; v < V; v++) s[(size_t)(V + v)] *= 8; // a student that is sure
            std::vector<int> id((size_t)R * J, -1);
            for (int r = 0; r < R; r++)
                for (int j = 0, n = r == 0 ? J - 1 : r == 1 ? 1 : J / 2; j < n; j++) id[(size_t)(r * J + j)] = (V - 1 - 5 * j % V + V) % V; // distinct: 5 divides no V
            std::vector<double> wide(s.begin(), s.end()), want_z((size_t)R * J), want_tail(R);
            gather_outcomes<double>(want_z.data(), want_tail.data(), wide.data(), id.data(), R, J, V);
            std::vector<float> dz((size_t)R * J); // bf16 in the first halves of its rows
            std::vector<double> dz_wide((size_t)R * J);
            for (size_t i = 0; i < dz.size(); i++) {
                const bf16 g = to_bf16((float)random.fill<float>(1, 1)[0]);
                memcpy((uint8_t*)(dz.data() + i / J * J) + 2 * (i % J), &g, 2), dz_wide[i] = to_acc(g);
            }
            std::vector<double> want = wide;
            scatter_outcomes<double>(want.data(), want.data(), dz_wide.data(), J, want_tail.data(), id.data(), R, J, V);
            for (bool order : {false, true}) {
                backwards = order;
                std::vector<float> logits = s, z((size_t)R * J, NAN), tail(R, NAN);
                launch(dim3(R), dim3(DISTIL_THREADS), [&] { gather_outcomes_kernel(z.data(), tail.data(), logits.data(), id.data(), J, V); });
                double off = 0, off_gradient = 0;
                for (size_t i = 0; i < z.size(); i++)
                    off = std::max(off, std::fabs((double)z[i] - want_z[i]) / (1 + std::fabs(want_z[i])));
                for (int r = 0; r < R; r++) CHECK(tail[(size_t)r] == z[(size_t)(r * J + J - 1)]);
                CHECK(off < 1e-5);
                launch(dim3(R), dim3(DISTIL_THREADS), [&] { scatter_outcomes_kernel(logits.data(), (const bf16*)dz.data(), 2 * J, tail.data(), id.data(), J, V); });
                CHECK(!stuck);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < V; v++) {
                        bf16 g;
                        memcpy((void*)&g, (const uint8_t*)(logits.data() + (size_t)r * V) + 2 * v, 2);
                        const double exact = want[(size_t)r * V + v];
                        off_gradient = std::max(off_gradient, std::fabs(to_acc(g) - exact) - std::fabs(exact) / 256);
                    }
                CHECK(off_gradient < 1e-5);
            }
            backwards = false;
        }
}
