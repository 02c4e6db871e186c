// distillation_kernel by emulation (tests/emulate/emulate.h): losses, agreement and gradients are those of Book I's
// `distillation` in double, whatever the order of the threads, and the gradient replaces no logit before it was read.
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
