// AdamW with moments of 8 bits (--moments 8): its codes, its op beside 32 bits, and runs of train_lora (TRAIN_LORA and
// DATAGEN, else the programs here).
#include <doctest/doctest.h>
#include "model/safetensors.h"
#include "tests/common.h"
#include "tests/files.h"
#include "tests/process.h"
#include "tests/trainer.h"

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";

TEST_CASE("codes of moments: 256 ascending values, the nearest of them, and the bounds of their errors") {
    for (bool sign : {true, false}) {
        INFO("sign " << sign);
        std::vector<float> code;
        for (int c = 0; c < 256; c++) code.push_back(moment_code(c, sign));
        for (int c = 1; c < 256; c++) CHECK(code[c - 1] < code[c]);
        CHECK(code[255] == 1);
        CHECK(code[sign ? 127 : 0] == 0);
        CHECK(code[254] == doctest::Approx(sign ? 0.1 + 0.9 * 63.5 / 64 : 0.1 + 0.9 * 127.5 / 128).epsilon(1e-7));
        CHECK(code[sign ? 128 : 1] == doctest::Approx(sign ? 0.55e-6 : 0.325e-6).epsilon(1e-6)); // the middle of [0.1, 1] 10^-6, of its half
        for (int c = 0; sign && c < 127; c++) CHECK(code[c] == -code[254 - c]);
        Random random{3};
        for (int i = 0; i < 20000; i++) {
            const float x = (sign && i % 2 ? -1 : 1) * (float)std::pow(10., -8 * random.fill<double>(1, 1)[0] * random.fill<double>(1, 1)[0]);
            if (std::fabs(x) > 1) continue;
            const int got = nearest_code(code.data(), x);
            for (int c = std::max(0, got - 1); c <= std::min(255, got + 1); c++) REQUIRE(std::fabs(code[got] - x) <= std::fabs(code[c] - x));
            // The decade 10^(i - 6) has 2^i values, so the error is at most half a part of it.
            for (int i = 6, n = sign ? 64 : 128; i > 0; i--, n /= 2)
                if (std::fabs(x) >= std::pow(10., i - 7) && x > -0.99) {
                    REQUIRE(std::fabs(code[got] - x) <= 0.45 / n * std::pow(10., i - 6) * 1.2 + 0.05 * std::pow(10., i - 6) / n);
                    break;
                }
        }
    }
}

TEST_CASE("adamw8: the first step is adamw's; later ones stay near it; blocks do not depend on one another or on n; no step at a norm that is not finite") {
    EACH_WAY;
    Random random{8};
    const size_t n = 600, decayed = 400;
    AdamW how;
    how.lr = 1e-2f, how.decay = 0.1f, how.clip = 1;
    const double norm = 2;
    std::vector<float> p = random.fill<float>(n, 1), p8 = p, first_block(p.begin(), p.begin() + 256), m(n), v(n), stored(n), stored8(n), scales(6), block_scales(2);
    std::vector<uint8_t> codes(2 * n), block_codes(512);
    const Moments8 to = {codes.data(), codes.data() + n, scales.data(), scales.data() + 3}, of_block = {block_codes.data(), block_codes.data() + 256, block_scales.data(), block_scales.data() + 1};
    const std::vector<float> typical = random.fill<float>(n, 1);
    for (int step = 1; step <= 20; step++) {
        how.step = step;
        std::vector<float> g = random.fill<float>(n, 0.3);
        for (size_t i = 0; i < n; i++) g[i] += typical[i];
        for (size_t i = 0; i < n; i += 3) g[i] *= 1e-3f;
        AdamW plain = how;
        plain.decay = 0;
        CALL(adamw, stored.data(), p.data(), m.data(), v.data(), g.data(), &norm, decayed, how);
        CALL(adamw, stored.data() + decayed, p.data() + decayed, m.data() + decayed, v.data() + decayed, g.data() + decayed, &norm, n - decayed, plain);
        CALL(adamw8, stored8.data(), p8.data(), to, g.data(), &norm, n, decayed, how);
        CALL(adamw8, stored8.data(), first_block.data(), of_block, g.data(), &norm, 256, 256, how);
        double off = 0, off_large = 0, sum = 0; // of any number, of those in the upper decade, where a step of the code is below 7%
        for (size_t i = 0; i < n; i++) {
            const double apart = std::fabs(p[i] - p8[i]);
            off = std::max(off, apart), sum += apart;
            if (i % 3 && std::fabs(typical[i]) > 0.3) off_large = std::max(off_large, apart);
        }
        if (step == 1) CHECK(off < 1e-7);
        CHECK(off_large < 0.05 * how.lr * step); // 32 bits move each number by about lr a step
        CHECK(sum / (double)n < 0.03 * how.lr * step);
        CHECK(off < 0.35 * how.lr * step);
    }
    CHECK(std::equal(first_block.begin(), first_block.end(), p8.begin()));
    const std::vector<float> before = p8;
    const std::vector<uint8_t> codes_before = codes;
    const double infinite = INFINITY;
    CALL(adamw8, stored8.data(), p8.data(), to, typical.data(), &infinite, n, decayed, how);
    CHECK(p8 == before);
    CHECK(codes == codes_before);
}

static std::string model(const std::string& out) { return read_file(out + "/model.bin"); }

TEST_CASE("--full --moments 8: converges as with 32 bits, in less memory; resume to the bit, also on other ranks; a smaller state") {
    Scratch out;
    const std::string text = read_file("tests/fixtures/train/rows.jsonl");
    size_t cut = 0;
    for (int i = 0; i < 32; i++) cut = text.find('\n', cut) + 1;
    write_file(out / "rows.jsonl", text.substr(0, cut));
    const std::string rows = out / "rows.bin";
    REQUIRE(Process(program("DATAGEN", "./datagen"), {"pack", "-z", VOCABULARY, out / "rows.jsonl", rows, "--info", "none"}).wait().status == 0);
    const Strings how = {TINY, rows, "--full", "--lr", "2e-3", "--batch", "8", "--steps", "40"}, eight = how + Strings{"--moments", "8"};
    const Result r8 = train(eight + Strings{"-o", out / "w"}), r32 = train(how + Strings{"-o", out / "plain"});
    const std::vector<double> loss = logged(out / "w", "loss"), plain = logged(out / "plain", "loss");
    REQUIRE(loss.size() == 40);
    CHECK(loss[0] == plain[0]);
    CHECK(loss[1] == doctest::Approx(plain[1]).epsilon(1e-4)); // (the rate of step 1 is 0: it has a warm-up)
    double last = 0, last_plain = 0;
    for (int i = 32; i < 40; i++) last += loss[i] / 8, last_plain += plain[i] / 8;
    INFO(last << " with 8 bits, " << last_plain << " with 32");
    CHECK(last < 0.3 * loss[0]);
    CHECK(last < 1.1 * last_plain);
    auto planned = [](const Result& r) { // MB of gradients and moments
        const std::string word = "gradients and moments ";
        return atof(r.err.c_str() + r.err.find(word) + word.size());
    };
    CHECK(planned(r8) < planned(r32) * (4 + 2.05) / 12);
    CHECK(fs::file_size(out / "w" + "/state.safetensors") < fs::file_size(out / "plain" + "/state.safetensors") * 6.1 / 12);

    Process p = start_training(eight + Strings{"-o", out / "parts"});
    interrupt_at_step(5, p, out / "parts");
    CHECK(logged(out / "parts", "loss").size() < 40);
    check_refusal(start_training(how + Strings{"-o", out / "parts", "--resume"}).wait(), "train_lora", "begun with moments \"8\", not unset");
    train(eight + Strings{"-o", out / "parts", "--resume"});
    CHECK(model(out / "parts") == model(out / "w"));

    const Strings ranked = {TINY, rows, "--full", "--lr", "2e-3", "--steps", "6", "--moments", "8", "-d", "cpu"};
    train(ranked + Strings{"--batch", "8", "-o", out / "one"});
    train(ranked + Strings{"--batch", "4", "--gpus", "2", "-o", out / "two"});
    for (size_t i = 0; i < 6; i++) CHECK(logged(out / "two", "loss")[i] == doctest::Approx(logged(out / "one", "loss")[i]).epsilon(1e-3));
    // A state of two ranks has the same places of its blocks.
    Process q = start_training({TINY, rows, "--full", "--lr", "2e-3", "--steps", "30", "--moments", "8", "-d", "cpu", "--batch", "4", "--gpus", "2", "-o", out / "moved"});
    interrupt_at_step(5, q, out / "moved");
    const Result on = train({TINY, rows, "--full", "--lr", "2e-3", "--steps", "30", "--moments", "8", "-d", "cpu", "--batch", "8", "-o", out / "moved", "--resume"});
    CHECK(on.err.find("begun on 2 ranks, goes on with 1") != std::string::npos);
    CHECK(logged(out / "moved", "loss").size() == 30);
    CHECK(logged(out / "moved", "loss").back() < 0.5 * logged(out / "moved", "loss")[0]);
    auto refused = [&](const Strings& arguments, const std::string& word) { check_refusal(start_training(arguments + Strings{"-o", out / "no"}).wait(), "train_lora", word); };
    refused({TINY, rows, "--moments", "8"}, "--moments 8 is for --full");
    refused({TINY, rows, "--full", "--moments", "16"}, "--moments");
    std::string state = read_file(out / "w" + "/state.safetensors");
    state.replace(state.find("\"scale_m\""), 9, "\"scale_x\"");
    write_file(out / "w" + "/state.safetensors", state);
    check_refusal(start_training(eight + Strings{"-o", out / "w", "--resume"}).wait(), "train_lora", "no tensor scale_m of ");
}
