// FP8 keys and values: the stored row; attention over them has the bits of attention over a bf16 cache of the same
// numbers; their size; sessions, saved prompts, options.
#include "model/session.h"
#include "tests/common.h"
#include "tests/golden.h"
#include "tests/process.h"

namespace {
static Batch eight(Batch b) { return b.fp8 = true, b; }

TEST_CASE_TEMPLATE("FP8 rows: the least power of two that holds the largest; numbers of 4 bits; no row knows another", T, bf16, float, double) {
    Random random{91};
    const int K = 3, D = 40, pages = 2;
    std::vector<T> cache((size_t)pages * K * PAGE * (D + 1) / sizeof(T)), row(D);
    memset((void*)cache.data(), 0x55, cache.size() * sizeof(T));
    int token = 0, seq = 0, slot = 0, pos = 0, table[2] = {0, 1};
    const Batch b = eight({1, 1, &token, &pos, &seq, &slot, table, 2});
    for (int exponent = -130; exponent <= 120; exponent += 5)
        for (int at : {0, 15, 16, 31}) {
            const int head = random.below(K);
            float largest = 0;
            for (T& x : row) {
                x = to_stored<T>((acc<T>)std::ldexp(2 * random.uniform() - 1, exponent - random.below(12)));
                largest = std::max(largest, std::fabs((float)to_acc(x)));
            }
            const std::vector<T> before = cache;
            store_kv(cache.data(), b.fp8, at, head, row.data(), K, D);
            const uint8_t *now = (const uint8_t*)cache.data(), *then = (const uint8_t*)before.data();
            const size_t page = (size_t)(at / PAGE) * K * PAGE * (D + 1), first = page + (size_t)(head * PAGE + at % PAGE) * D;
            const size_t e = page + (size_t)(K * D + head) * PAGE + at % PAGE;
            for (size_t i = 0; i < cache.size() * sizeof(T); i++)
                if ((i < first || i >= first + D) && i != e) REQUIRE(now[i] == then[i]);
            const KVRow<T> kept(cache.data(), b.fp8, at / PAGE, head, at % PAGE, K, D);
            const double unit = now[e] - 128;
            CHECK(largest <= std::ldexp(448., (int)unit));
            if (now[e] > 28) CHECK(largest > std::ldexp(448., (int)unit - 1));
            for (int i = 0; i < D; i++) {
                const double x = to_acc(row[(size_t)i]), y = kept[i];
                REQUIRE(std::fabs(y - x) <= std::max(std::fabs(x) / 16, std::ldexp(1., (int)unit - 10)));
                REQUIRE(to_acc(to_bf16((float)y)) == y);
                row[(size_t)i] = to_stored<T>((acc<T>)y);
            }
            store_kv(cache.data(), b.fp8, at, head, row.data(), K, D); // its own numbers it keeps
            const KVRow<T> again(cache.data(), b.fp8, at / PAGE, head, at % PAGE, K, D);
            for (int i = 0; i < D; i++) REQUIRE(again[i] == to_acc(row[(size_t)i]));
        }
    auto stored = [&](acc<T> x, acc<T> others) {
        std::fill(row.begin(), row.end(), to_stored<T>(others));
        row[7] = to_stored<T>(x);
        store_kv(cache.data(), b.fp8, 3, 1, row.data(), K, D);
        const KVRow<T> kept(cache.data(), b.fp8, 0, 1, 3, K, D);
        return std::pair(kept[7], kept[8]);
    };
    CHECK(stored(0, 0) == std::pair<acc<T>, acc<T>>(0, 0));
    CHECK(stored(448, -1) == std::pair<acc<T>, acc<T>>(448, -1));
    CHECK(stored(450, 1).first == 448); // 225 x 2 is between 224 and 240
    for (float bad : {NAN, INFINITY, -INFINITY}) CHECK((std::isnan(stored(bad, 1).first) && std::isnan(stored(bad, 0).second)));
}

TEST_CASE_TEMPLATE("attention over FP8 rows has the bits of attention over the same numbers in a plain cache", T, bf16, float, double) {
    EACH_WAY;
    Random random{92};
    struct Shape { int H, K, D; };
    for (Shape s : {Shape{4, 2, 64}, {8, 2, 40}, {5, 1, 128}, {8, 1, 6}}) {
        TestBatch batch(random, {{0, 1}, {14, 1}, {16, 1}, {511, 1}, {530, 1}, {0, 37}, {30, 19}, {500, 20}}, 10, 1);
        const int N = (int)batch.token.size(), width = (s.H + 2 * s.K) * s.D;
        const size_t numbers = (size_t)batch.page_count * s.K * PAGE * s.D;
        auto qkv = random.fill<T>((size_t)N * width, 3);
        const auto weight = random.fill<T>((size_t)s.D, 0.3, 1);
        std::vector<acc<T>> rope((size_t)600 * s.D);
        fill_rope(rope.data(), 600, s.D, 1e4);
        const Batch b = batch.view(), b8 = eight(b);
        std::vector<T> keys(numbers), values(numbers), keys8(numbers), values8(numbers), row((size_t)s.D); // (more than FP8 needs)
        const size_t page8 = (size_t)s.K * PAGE * (s.D + 1), page_plain = (size_t)s.K * PAGE * s.D * sizeof(T); // bytes
        const int different = std::min(batch.page_count, 7);                                               // the others repeat them
        for (T* cache : {keys8.data(), values8.data()}) {
            T* plain = cache == keys8.data() ? keys.data() : values.data();
            for (int slot = 0; slot < different * PAGE; slot++)
                for (int h = 0; h < s.K; h++) {
                    for (T& x : row) x = to_stored<T>((acc<T>)std::ldexp(2 * random.uniform() - 1, random.below(9)));
                    store_kv(cache, b8.fp8, slot, h, row.data(), s.K, s.D);
                    const KVRow<T> kept(cache, b8.fp8, slot / PAGE, h, slot % PAGE, s.K, s.D);
                    for (int i = 0; i < s.D; i++) row[(size_t)i] = to_stored<T>(kept[i]);
                    store_kv(plain, b.fp8, slot, h, row.data(), s.K, s.D);
                }
            for (size_t page = (size_t)different; page < (size_t)batch.page_count; page++) {
                memcpy((uint8_t*)cache + page * page8, (uint8_t*)cache + page % (size_t)different * page8, page8);
                memcpy((uint8_t*)plain + page * page_plain, (uint8_t*)plain + page % (size_t)different * page_plain, page_plain);
            }
        }
        on_every_instruction_set([&] {
            std::vector<T> q((size_t)N * s.H * s.D), out = poisoned<T>(q.size()), want = out;
            CALL(attend, out.data(), (acc<T>*)nullptr, q.data(), {keys8.data(), values8.data()}, qkv.data(), {weight.data(), weight.data(), rope.data()}, b8, {s.H, s.K, s.D, 1e-6f});
            for (int n = 0; n < N; n++) // what the new tokens left, to the plain cache
                for (int h = 0; h < s.K && b.seq[n] >= 0; h++)
                    for (bool key : {true, false}) {
                        const KVRow<T> kept(key ? keys8.data() : values8.data(), b8.fp8, b.slot[n] / PAGE, h, b.slot[n] % PAGE, s.K, s.D);
                        for (int i = 0; i < s.D; i++) row[(size_t)i] = to_stored<T>(kept[i]);
                        store_kv(key ? keys.data() : values.data(), b.fp8, b.slot[n], h, row.data(), s.K, s.D);
                    }
            CALL(attention, want.data(), (acc<T>*)nullptr, q.data(), {keys.data(), values.data()}, b, {s.H, s.K, s.D});
            CHECK(same_bits(out, want));
        });
    }
}

TEST_CASE("sessions with FP8 keys and values: half the memory, the same bits whatever is fed at once, near the usual logits") {
    const Golden g("tied_bf16");
    const Weights<bf16> w(g.file);
    const Config& c = g.file.config;
    CHECK(KVCache<bf16>::bytes(c, 7, true) * 2 * (size_t)c.D == KVCache<bf16>::bytes(c, 7) * (size_t)(c.D + 1));
    auto logits = [&](bool fp8, bool plain, size_t at_once) {
        std::vector<float> all;
        Context ctx;
        ctx.kv_fp8 = fp8, ctx.plain = plain;
        for (auto& prompt : g.prompts) {
            Session<bf16> session(c, w, 64, ctx);
            for (size_t i = 0; i < prompt.size(); i += at_once)
                session.feed({prompt.begin() + (ptrdiff_t)i, prompt.begin() + (ptrdiff_t)std::min(prompt.size(), i + at_once)}, nullptr,
                             [&](const float* row) { all.insert(all.end(), row, row + c.V); });
        }
        return all;
    };
    const auto usual = logits(false, false, 1000), fp8 = logits(true, false, 1000);
    CHECK(same_bits(fp8, logits(true, false, 1)));
    CHECK(same_bits(fp8, logits(true, false, 5)));
    const double cost = mean_kl(usual, fp8, c.V), defined = mean_kl(fp8, logits(true, true, 1000), c.V);
    INFO("KL " << cost << ", of the definition " << defined);
    CHECK(cost > 1e-8);
    CHECK(cost < 0.05);
    CHECK(defined < 0.3 * cost + 1e-4);
}

static Result run_qwen3(const Strings& arguments) {
    const char* path = getenv("QWEN3");
    REQUIRE_MESSAGE(path, "QWEN3 is not set: make test sets it");
    return Process(path, arguments).wait();
}

TEST_CASE("--kv-dtype: a saved prompt is not another cache's; --against says what it costs; bad names are refused") {
    const Scratch s;
    const std::string model = "data/tiny/model.bin", tokenizer = "data/tiny/tokenizer.bin";
    auto ask = [&](const std::string& dtype) {
        return run_qwen3({model, "-z", tokenizer, "-d", "cpu", "-i", "What is a warp? Say it in some words.", "-n", "8", "-t", "0", "--prompt-cache", s / "cache", "--kv-dtype", dtype});
    };
    const Result first = ask("fp8"), second = ask("fp8"), other = ask("same");
    INFO(first.err << second.err << other.err);
    CHECK((first.status == 0 && second.status == 0 && first.out == second.out));
    CHECK(second.err.find("from the prompt cache") != std::string::npos);
    CHECK((other.status != 0 || other.err.find("from the prompt cache") == std::string::npos));
    const std::string notes = read_file("data/course/notes/01-introduction.md");
    write_file(s / "text", notes.substr(0, notes.rfind('\n', 1500)));
    const Result r = run_qwen3({model, "-z", tokenizer, "-d", "cpu", "--kv-dtype", "fp8", "--ppl", s / "text", "--against", model, "--json"});
    INFO(r.err);
    REQUIRE(r.status == 0);
    const double kl = Json(r.out)["kl"][(size_t)0].number();
    CHECK(kl > 1e-7);
    CHECK(kl < 0.01);
    check_refusal(run_qwen3({model, "--kv-dtype", "int8", "-i", "day"}), "qwen3", "fp8");
}
} // namespace
