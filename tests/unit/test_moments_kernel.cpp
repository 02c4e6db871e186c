// adamw8_kernel by emulation (tests/emulate/emulate.h): parameters, scales and codes are those of `adamw8`, whatever
// the order of the threads.
#include <doctest/doctest.h>
#include "tests/emulate/packed_emulation.h"
#include "qwen3.cu"
#include "tests/batch.h"
#include "train/adamw8.cu"

TEST_CASE("adamw8_kernel: several steps, a block that is not full, numbers without decay, a norm that is not finite") {
    Random random{9};
    for (size_t n : {1, 256, 700, 2050}) {
        INFO("n " << n);
        const size_t blocks = (n + MOMENT_BLOCK - 1) / MOMENT_BLOCK, decayed = n / 3;
        for (bool order : {false, true}) {
            backwards = order;
            std::vector<float> p = random.fill<float>(n, 1), want_p = p;
            std::vector<bf16> stored(n), want_stored(n);
            std::vector<uint8_t> code[4];
            std::vector<float> scale[4];
            for (auto& list : code) list.assign(n, 0);
            for (auto& list : scale) list.assign(blocks, 0);
            const Moments8 to = {code[0].data(), code[1].data(), scale[0].data(), scale[1].data()}, want = {code[2].data(), code[3].data(), scale[2].data(), scale[3].data()};
            AdamW how;
            how.lr = 0.01f, how.decay = 0.1f, how.clip = 1;
            for (int step = 1; step <= 4; step++) {
                how.step = step;
                std::vector<float> g = random.fill<float>(n, 1);
                for (size_t i = 0; i < n; i += 5) g[i] *= 1e-3f;
                const double norm = step == 3 ? INFINITY : 2.5;
                const AdamWStep<float> s(how);
                adamw8<bf16>(want_stored.data(), want_p.data(), want, g.data(), &norm, n, decayed, how);
                const unsigned grid = blocks > 2 ? 2 : (unsigned)blocks; // a block has several blocks of numbers
                launch(dim3(grid), dim3(MOMENT_BLOCK), [&] { adamw8_kernel(stored.data(), p.data(), to, g.data(), &norm, n, decayed, s); });
                CHECK(!stuck);
                size_t off = 0, other = 0, far = 0;
                for (size_t i = 0; i < n; i++) {
                    off += !(std::fabs(p[i] - want_p[i]) <= 1e-6 * (1 + std::fabs(want_p[i])));
                    other += code[0][i] != code[2][i] || code[1][i] != code[3][i]; // a magnitude between two values
                    far += std::abs(code[0][i] - code[2][i]) > 1 || std::abs(code[1][i] - code[3][i]) > 1;
                    off += std::fabs(to_acc(stored[i]) - p[i]) > std::fabs(p[i]) / 256;
                }
                for (size_t b = 0; b < blocks; b++)
                    for (int k : {0, 1}) off += !(std::fabs(scale[k][b] - scale[k + 2][b]) <= 1e-6 * scale[k + 2][b]);
                CHECK(off == 0);
                CHECK(far == 0);
                CHECK(other <= n / 100);
                code[0] = code[2], code[1] = code[3]; // the next step begins alike
            }
            backwards = false;
        }
    }
}
