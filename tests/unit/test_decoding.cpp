// Attention of single tokens on a GPU, over caches of bf16 and of FP8, by emulation (tests/emulate/emulate.h): what it gives is
// Book I's, rows are stored as Book I stores them, and an FP8 cache gives the bits of a bf16 cache of the same numbers.
#include <doctest/doctest.h>
#include "tests/emulate/packed_emulation.h"
#include "tests/batch.h"
#include "tests/packed.h"

// A layer's cache before a batch, the batch's rows, and what the kernels make of them.
struct Attending {
    int H, K, D, N, width, singles = 0, splits, blocks; // of a KV head of a sequence
    TestBatch batch;
    std::vector<int> past; // (sequences)
    std::vector<bf16> qkv, q_weight, k_weight, q, out, held; // the latter by pages in registers
    std::vector<float> rope;
    Attending(Random& random, const std::vector<std::pair<int, int>>& past_fresh, int spare, int H, int K, int D, bool exact)
        : H(H), K(K), D(D), batch(random, past_fresh, 10, spare) {
        N = (int)batch.token.size(), width = (H + 2 * K) * D;
        while (singles < (int)past_fresh.size() && past_fresh[(size_t)singles].second == 1) singles++;
        int longest = 1;
        for (auto [before, fresh] : past_fresh) past.push_back(before), longest = std::max(longest, before + fresh);
        blocks = splits = (longest - 1) / SPLIT + 2;
        qkv = random.fill<bf16>((size_t)N * width, 2), q_weight = random.fill<bf16>((size_t)D, 0.5, 1);
        k_weight = random.fill<bf16>((size_t)D, 0.5, 1);
        rope.resize((size_t)longest * D), fill_rope(rope.data(), longest, D, 1e6, SCALED);
        q.resize((size_t)N * H * D), out.resize(q.size());
        if (!exact) return;
        // New rows that e4m3 holds: nothing is rotated, a key's numbers are all of one size before its norm.
        const auto coarse = [&](double least) { return to_bf16((float)((1 + random.below(8) / 8.) * least * (random.below(2) ? 1 : -1))); };
        for (size_t i = 0; i < rope.size(); i++) rope[i] = i % 2 ? 0.f : 1.f;
        for (bf16& w : k_weight) w = coarse(0.5);
        for (size_t i = 0; i < qkv.size(); i++)
            if ((int)(i % (size_t)width) >= (H + K) * D) qkv[i] = coarse(0.25);
            else if ((int)(i % (size_t)width) >= H * D) qkv[i] = to_bf16(i % 3 ? 2.f : -2.f);
    }
    Batch view(bool fp8) const {
        Batch b = batch.view();
        b.fp8 = fp8, b.singles = singles, b.splits = splits;
        return b;
    }
    size_t numbers() const { return (size_t)batch.page_count * K * PAGE * D; }
    std::vector<bf16> fp8_cache(Random& random, bool values) const { // behind a sequence's end it is NaN
        std::vector<bf16> cache((size_t)batch.page_count * K * PAGE * (D + 1) / 2);
        for (size_t s = 0; s < past.size(); s++)
            for (int pos = 0; pos < past[s]; pos++)
                for (int h = 0; h < K; h++) {
                    const int slot = batch.pages[s * (size_t)batch.max_pages + (size_t)pos / PAGE] * PAGE + pos % PAGE;
                    store_kv(cache.data(), true, slot, h, random.fill<bf16>((size_t)D, values ? std::ldexp(1, random.below(20) - 15) : 2).data(), K, D);
                }
        return cache;
    }
    std::vector<bf16> widened(const std::vector<bf16>& cache) const { // by Book I
        std::vector<bf16> all(numbers());
        for (int slot = 0; slot < batch.page_count * PAGE; slot++)
            for (int h = 0; h < K; h++) {
                const KVRow<bf16> row(cache.data(), true, slot / PAGE, h, slot % PAGE, K, D);
                for (int i = 0; i < D; i++) all[kv_offset(slot / PAGE, h, slot % PAGE, K, D) + (size_t)i] = to_bf16(row[i]);
            }
        return all;
    }
    // The first `singles` rows by attention_decode_kernel; the others' keys, values and queries by qknorm_rope_kv_kernel.
    template <int HEAD, int G, bool FP8> void attend(std::vector<bf16>& keys, std::vector<bf16>& values) {
        std::vector<float> partial((size_t)std::max(1, singles) * H * splits * (D + 2));
        std::vector<int> arrived((size_t)std::max(1, singles) * H / G);
        const Batch b = view(FP8);
        const DecodeArgs p = {out.data(), keys.data(), values.data(), qkv.data(), q_weight.data(), k_weight.data(), rope.data(), b, H, K, 1e-6f, partial.data(), arrived.data()};
        for (auto& copies : late) copies.clear();
        if (singles)
            for (bool ring : {false, true}) { // (the former takes a block a split)
                using Held = HeldPage<HEAD, FP8>;
                using Ring = RingPage<HEAD, FP8>;
                launch(dim3((unsigned)(ring ? blocks : splits), (unsigned)(H / G), (unsigned)singles), dim3(32 * (ring ? Ring::WARPS : Held::WARPS)),
                       [&] { ring ? attention_decode_kernel<HEAD, FP8, Ring>(p, G) : attention_decode_kernel<HEAD, FP8, Held>(p, G); });
                if (ring) continue;
                held = out, std::fill(out.begin(), out.end(), bf16{0x7fc1}); // (the new rows of the cache are written again)
            }
        const int tasks = (N - singles) * ((H + 2 * K + 1) / 2);
        if (tasks)
            launch(dim3((unsigned)(tasks + 7) / 8), dim3(256), [&] {
                qknorm_rope_kv_kernel<HEAD, FP8>(q.data(), keys.data(), values.data(), qkv.data(), q_weight.data(), k_weight.data(), rope.data(), b, singles, H, K, 1e-6f);
            });
        for (int n : arrived) CHECK(n == 0);
        CHECK(!stuck);
    }
    template <bool FP8> void attend(std::vector<bf16>& keys, std::vector<bf16>& values) {
        const int G = H / K;
        if (D == 64) G == 1 ? attend<64, 1, FP8>(keys, values) : attend<64, 2, FP8>(keys, values);
        else if (G == 1) attend<128, 1, FP8>(keys, values);
        else if (G == 5) attend<128, 5, FP8>(keys, values);
        else attend<128, 8, FP8>(keys, values); // (of 16 heads two blocks)
    }
};

static void check_attention(Random& random, const std::vector<std::pair<int, int>>& past_fresh, int spare, int H, int K, int D, bool exact) {
    CAPTURE(H);
    CAPTURE(K);
    CAPTURE(D);
    CAPTURE(exact);
    Attending a(random, past_fresh, spare, H, K, D, exact);
    const Batch b = a.view(true), plain = a.view(false);
    std::vector<bf16> keys8 = a.fp8_cache(random, false), values8 = a.fp8_cache(random, true);
    std::vector<bf16> keys = a.widened(keys8), values = a.widened(values8), want_keys8 = keys8, want_values8 = values8;
    a.attend<false>(keys, values);
    const std::vector<bf16> in_bf16 = a.out, held = a.held, queries = a.q;
    a.attend<true>(keys8, values8);
    const std::vector<bf16> in_fp8 = a.out, held_fp8 = a.held;
    CHECK(memcmp(a.q.data(), queries.data(), queries.size() * 2) == 0);

    // Rows: in bf16 Book I's within a rounding, in FP8 those of bf16 by store_kv.
    std::vector<bf16> q(a.q.size()), book_keys(a.numbers()), book_values(a.numbers());
    qknorm_rope_kv(q.data(), {book_keys.data(), book_values.data()}, a.qkv.data(), {a.q_weight.data(), a.k_weight.data(), a.rope.data()}, plain, {H, K, D, 1e-6f});
    int wrong = 0;
    for (int n = 0; n < a.N; n++)
        for (int h = 0; h < K && a.batch.seq[(size_t)n] >= 0; h++) {
            const int slot = a.batch.slot[(size_t)n];
            const size_t at = kv_offset(slot / PAGE, h, slot % PAGE, K, D);
            for (size_t i = at; i < at + (size_t)D; i++) {
                const float want = to_acc(book_keys[i]);
                wrong += !(std::fabs(to_acc(keys[i]) - want) <= std::fabs(want) / 128), wrong += values[i].bits != book_values[i].bits;
            }
            store_kv(want_keys8.data(), b.fp8, slot, h, &keys[at], K, D), store_kv(want_values8.data(), b.fp8, slot, h, &values[at], K, D);
        }
    CHECK(wrong == 0);
    CHECK(memcmp(keys8.data(), want_keys8.data(), keys8.size() * 2) == 0);
    CHECK(memcmp(values8.data(), want_values8.data(), values8.size() * 2) == 0);

    // Attention of single tokens: Book I's of what the caches now hold.
    std::vector<bf16> want(a.out.size()), want8(a.out.size());
    attention(want.data(), (float*)nullptr, q.data(), {keys.data(), values.data()}, plain, {H, K, D});
    attention(want8.data(), (float*)nullptr, q.data(), {keys8.data(), values8.data()}, b, {H, K, D});
    int other = 0;
    for (size_t row = 0; row < (size_t)a.singles * H; row++) {
        float largest = 0;
        for (int i = 0; i < D; i++) largest = std::max({largest, std::fabs(to_acc(want[row * D + i])), std::fabs(to_acc(want8[row * D + i]))});
        for (size_t i = row * D; i < (row + 1) * D; i++) {
            wrong += !(std::fabs(to_acc(in_bf16[i]) - to_acc(want[i])) <= largest / 64);
            wrong += !(std::fabs(to_acc(in_fp8[i]) - to_acc(want8[i])) <= largest / 64);
            wrong += !(std::fabs(to_acc(held[i]) - to_acc(want[i])) <= largest / 64);
            wrong += !(std::fabs(to_acc(held_fp8[i]) - to_acc(want8[i])) <= largest / 64);
            other += in_bf16[i].bits != in_fp8[i].bits || held[i].bits != held_fp8[i].bits;
        }
    }
    CHECK(wrong == 0);
    if (exact) CHECK(other == 0);

    // The pages that attention of several tokens reads.
    if (a.singles == a.N) return;
    std::vector<bf16> wide_keys(a.numbers(), bf16{0x7fc1}), wide_values = wide_keys;
    const std::vector<bf16> all_keys = a.widened(keys8), all_values = a.widened(values8);
    const auto widen = [&](auto kernel) {
        launch(dim3((unsigned)K, 3), dim3(256), [&] { kernel(wide_keys.data(), wide_values.data(), keys8.data(), values8.data(), b, a.singles, K); });
    };
    D == 64 ? widen(widen_pages_kernel<64>) : widen(widen_pages_kernel<128>);
    CHECK(!stuck);
    for (int n = a.singles; n < a.N; n++) {
        const int s = a.batch.seq[(size_t)n];
        if (s < 0) continue;
        for (int pos = 0; pos < (a.batch.pos[(size_t)n] / PAGE + 1) * PAGE; pos++)
            for (int h = 0; h < K; h++) {
                const size_t at = kv_offset(a.batch.pages[(size_t)(s * a.batch.max_pages + pos / PAGE)], h, pos % PAGE, K, D);
                const bool there = pos <= a.batch.pos[(size_t)n];
                for (size_t i = at; i < at + (size_t)D; i++)
                    wrong += there ? wide_keys[i].bits != all_keys[i].bits || wide_values[i].bits != all_values[i].bits
                                   : !std::isfinite(to_acc(wide_keys[i])) || !std::isfinite(to_acc(wide_values[i]));
            }
    }
    CHECK(wrong == 0);
}

TEST_CASE("attention of single tokens, and what attention of several reads of an FP8 cache: Book I's, to the bit where nothing is rounded") {
    Random random{91};
    for (bool exact : {false, true})
        for (auto [H, K, D] : std::vector<std::array<int, 3>>{{4, 2, 64}, {2, 2, 128}, {10, 2, 128}, {16, 1, 128}}) {
            backwards = exact;
            check_attention(random, {{0, 1}, {15, 1}, {16, 1}, {127, 1}, {128, 1}}, 0, H, K, D, exact);
            check_attention(random, {{300, 1}, {5, 1}, {0, 17}, {40, 7}, {0, 3}}, 2, H, K, D, exact);
        }
    backwards = false;
    check_attention(random, {{0, 300}, {20, 280}}, 1, 2, 1, 64, false); // more rows than a block has threads
}

TEST_CASE("rows that are not finite, tiny, huge: an FP8 cache gets Book I's bytes") {
    constexpr int D = 128;
    Random random{92};
    Batch b = {};
    b.fp8 = true;
    const auto both = [&](const std::vector<bf16>& row) {
        std::vector<bf16> want(PAGE * (D + 1) / 2), got = want;
        store_kv(want.data(), b.fp8, 3, 0, row.data(), 1, D);
        launch(dim3(1), dim3(32), [&] {
            WarpHead<D> head;
            head.load(row.data());
            uint8_t* const rows = (uint8_t*)got.data();
            WarpFp8Head<D>(head).store(rows + 3 * D, rows + PAGE * D + 3);
        });
        CHECK(KVRow<bf16>(got.data(), b.fp8, 0, 0, 3, 1, D).scale(((uint8_t*)got.data())[PAGE * D + 3]) != 0);
        return std::make_pair(want, got);
    };
    for (int exponent = -133; exponent <= 127; exponent++) {
        std::vector<bf16> row = random.fill<bf16>(D, 1);
        for (bf16& x : row) x = to_bf16(std::ldexp(to_acc(x), exponent));
        const auto [want, got] = both(row);
        CHECK(memcmp(want.data(), got.data(), want.size() * 2) == 0);
    }
    for (float largest : {448.f, 449.f, 464.f, 480.f, 0.f, 1.75f, 1.7578125f}) {
        std::vector<bf16> row(D, to_bf16(largest / 3));
        row[77] = to_bf16(-largest);
        const auto [want, got] = both(row);
        CHECK(memcmp(want.data(), got.data(), want.size() * 2) == 0);
    }
    for (float bad : {INFINITY, -INFINITY, NAN}) {
        std::vector<bf16> row = random.fill<bf16>(D, 1);
        row[5] = to_bf16(bad);
        const auto [want, got] = both(row);
        for (const auto& cache : {want, got})
            for (int i = 0; i < D; i++) CHECK(std::isnan(KVRow<bf16>(cache.data(), b.fp8, 0, 0, 3, 1, D)[i]));
    }
}
