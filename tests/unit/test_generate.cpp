// Between the logits and the user: penalties, stop strings, `generate`. Each against a plain way to say the same.
#include "model/chat_template.h"
#include "base/stop_flag.h"
#include "model/model_file.h"
#include "model/pace.h"
#include "model/session.h"
#include "model/stop_filter.h"
#include "model/tokenizer.h"
#include "model/utf8.h"
#include "model/weights.h"
#include "tests/common.h"

TEST_CASE("as many threads as have cores: given up at once, tried again after a while, less often each time in vain") {
    ThreadPace::Rule rule{8};
    CHECK(rule.next(7.8, 0.02) == 8);
    CHECK(rule.next(4.1, 0.02) == 4);
    double time = 0;
    auto until_tried = [&] {
        for (time = 0; rule.now < 8; time += 0.02) rule.next(rule.now, 0.02);
        return time;
    };
    CHECK(until_tried() == doctest::Approx(0.25).epsilon(0.1));
    for (double pause : {0.5, 1., 2., 4., 4.}) {
        CHECK(rule.next(3.9, 0.02) == 4);
        CHECK(until_tried() == doctest::Approx(pause).epsilon(0.1));
    }
    CHECK(rule.next(8, 0.02) == 8); // they have come back
    CHECK(rule.next(0.2, 0.02) == 1);
    for (int i = 0; i < 1000; i++) CHECK(rule.next(0.8, 0.02) == 1); // not even one core is free
    CHECK(until_tried() == doctest::Approx(0.25).epsilon(0.1));
    CHECK(ThreadPace::Rule{1}.next(0, 1) == 1);
}

// ---------------------------------------------------------------------------------------------------- penalties

// For each id of the vocabulary by itself: how often it was seen, and what that makes of its logit.
static std::vector<float> penalized_plainly(std::vector<float> logits, const Sampling& how, const std::vector<int>& ids,
                                    size_t answer) {
    for (int id = 0; id < (int)logits.size(); id++) {
        const auto in_answer = std::count(ids.begin() + (ptrdiff_t)answer, ids.end(), id);
        if (std::count(ids.begin(), ids.end(), id)) {
            if (logits[id] > 0) logits[id] /= how.repeat;
            else logits[id] *= how.repeat;
        }
        if (in_answer) logits[id] -= std::fma(how.frequency, (float)in_answer, how.presence);
    }
    return logits;
}

static Sampling penalties(float repeat, float presence, float frequency) {
    Sampling how;
    how.repeat = repeat, how.presence = presence, how.frequency = frequency;
    return how;
}

TEST_CASE("penalties by hand") {
    const std::vector<float> logits = {4, -4, 3, -3, 2, 0};
    const std::vector<int> ids = {0, 1, 0, 1, 2, 3, 2, 2}; // a prompt of four
    auto after = [&](const Sampling& how) {
        std::vector<float> l = logits;
        penalize(l.data(), how, ids, 4, (int)l.size());
        return l;
    };
    CHECK(after(penalties(1, 0, 0)) == logits);
    CHECK(after(penalties(2, 0, 0)) == std::vector<float>{2, -8, 1.5f, -6, 2, 0});     // once, however often seen
    CHECK(after(penalties(1, 1, 0)) == std::vector<float>{4, -4, 2, -4, 2, 0});        // the answer only, once
    CHECK(after(penalties(1, 0, 0.5f)) == std::vector<float>{4, -4, 1.5f, -3.5f, 2, 0}); // as often as it occurs
    CHECK(after(penalties(0.5f, -1, -1)) == std::vector<float>{8, -2, 10, 0.5f, 2, 0}); // they may also encourage
}

TEST_CASE("penalties over random logits and ids") {
    Random random{21};
    for (int round = 0; round < 200; round++) {
        const int V = 1 + random.below(50), n = random.below(60);
        std::vector<float> logits = random.fill<float>((size_t)V, 10);
        if (round % 5 == 0) logits[(size_t)random.below(V)] = 0;
        std::vector<int> ids;
        for (int i = 0; i < n; i++) ids.push_back(random.below(V));
        const size_t answer = (size_t)random.below(n + 1);
        auto maybe = [&](double low, double high, float off) {
            return random.below(3) ? (float)(low + (high - low) * random.uniform()) : off;
        };
        const Sampling how = penalties(maybe(0.5, 2, 1), maybe(-2, 2, 0), maybe(-2, 2, 0));
        const std::vector<float> want = penalized_plainly(logits, how, ids, answer);
        penalize(logits.data(), how, ids, answer, V);
        CHECK(same_bits(logits, want));
    }
}

// ------------------------------------------------------------------------------------------------- stop strings

// The text that may be shown once its first n bytes are known. It ends before a stop string; of several, before
// the one whose last byte comes first, of these the longest: byte by byte, one would stop there. Otherwise all is
// shown but the longest tail that a stop string begins with.
static std::string shown(const std::string& text, size_t n, const std::vector<std::string>& stops, bool* stopped) {
    *stopped = true;
    for (size_t end = 1; end <= n; end++)
        for (size_t begin = 0; begin < end; begin++)
            for (auto& s : stops)
                if (text.substr(begin, end - begin) == s) return text.substr(0, begin);
    *stopped = false;
    for (size_t begin = 0; begin < n; begin++)
        for (auto& s : stops)
            if (s.size() > n - begin && s.compare(0, n - begin, text, begin, n - begin) == 0) return text.substr(0, begin);
    return text.substr(0, n);
}

TEST_CASE("the stop string that ends first, in whatever pieces the text comes") {
    using Pieces = std::vector<std::string>;
    for (const auto& pieces : {Pieces{"abcd"}, {"a", "bcd"}, {"ab", "cd"}, {"abc", "d"}, {"a", "b", "c", "d"}}) {
        StopFilter filter{{"abcd", "bc"}, "", false};
        std::string out;
        for (auto& p : pieces) out += filter.feed(p);
        CHECK(out == "a");
        CHECK(filter.stopped);
        CHECK(filter.feed("more") == "");
        CHECK(filter.flush() == "");
    }
    StopFilter tie{{"c", "bc"}, "", false};
    CHECK(tie.feed("abc") == "a");
}

TEST_CASE("stop strings over random texts, sets and pieces") {
    Random random{22};
    const std::vector<std::string> alphabets[] = {{"a", "b"}, {"a", "b", "c", "\n"}, {"线", "程", "束", "a"}, {"线", "缀", "\xe7"}};
    int stops_seen = 0, held_back = 0;
    for (int round = 0; round < 4000; round++) {
        auto& letters = alphabets[round % 4];
        auto some = [&](int n) {
            std::string s;
            while (n-- > 0) s += letters[(size_t)random.below((int)letters.size())];
            return s;
        };
        std::vector<std::string> stops;
        for (int n = random.below(4); n >= 0; n--) {
            stops.push_back(some(1 + random.below(6)));
            if (random.below(3) == 0) stops.push_back(stops.back() + some(1 + random.below(3))); // one begins the other
        }
        const std::string text = some(random.below(30));
        INFO("text " << text << ", " << stops.size() << " stops, the first " << stops[0]);

        StopFilter filter{stops, "", false};
        std::string out;
        size_t fed = 0;
        bool stopped = false;
        while (fed < text.size()) { // pieces of any length, 0 too, even within a character
            const size_t n = std::min(text.size() - fed, (size_t)random.below(7));
            out += filter.feed(text.substr(fed, n));
            fed += n;
            CHECK(out == shown(text, fed, stops, &stopped));
            CHECK(filter.stopped == stopped);
            held_back += !stopped && out.size() < fed;
        }
        stops_seen += stopped;
        const std::string before = out;
        out += filter.flush();
        CHECK(out == (stopped ? before : text));
    }
    CHECK(stops_seen > 1000); // both ends are reached
    CHECK(stops_seen < 3900);
    CHECK(held_back > 1000);
}

// ----------------------------------------------------------------------------------------------------- generate

struct Tiny {
    ModelFile file{"tests/fixtures/tiny/model.bin"};
    Weights<bf16> weights{file};
    Tokenizer tokenizer{"tests/fixtures/tiny/tokenizer.bin"};
    Session<bf16> session{file.config, weights, 256};
    std::vector<int> prompt = render_chat(tokenizer, {{"user", "What is a warp?"}});

    Generation answer(const Generation& how) {
        Generation g = how;
        session.rewind(0);
        session.feed(prompt);
        std::string all;
        generate<bf16>(session, &tokenizer, g, [&](std::string_view s) { all += s; });
        CHECK(all == g.text);
        return g;
    }
};

TEST_CASE("a stop string ends the answer wherever the borders of tokens are") {
    Tiny tiny;
    Generation how;
    how.sampling.temperature = 0;
    how.sampling.repeat = 1.3f; // so that it does not repeat itself
    how.max_tokens = 40;
    const Generation whole = tiny.answer(how);
    REQUIRE(whole.ids.size() == 40);
    // The text after each token, as far as whole characters go.
    std::vector<std::string> after;
    Utf8Stream characters;
    std::string text;
    for (int id : whole.ids) {
        if (!tiny.tokenizer.is_special(id)) text += characters.feed(tiny.tokenizer.bytes(id));
        after.push_back(text);
    }
    const std::string all = text + characters.flush();
    REQUIRE(all == whole.text);

    std::vector<size_t> starts; // of characters
    for (size_t i = 0; i < all.size(); i++)
        if (((uint8_t)all[i] & 0xC0) != 0x80) starts.push_back(i);
    REQUIRE(starts.size() > 40);
    starts.push_back(all.size());
    int across = 0;
    for (size_t length : {1, 2, 5, 9})
        for (size_t i = 0; i + length < starts.size(); i++) {
            const std::string stop = all.substr(starts[i], starts[i + length] - starts[i]);
            const size_t at = all.find(stop), end = at + stop.size();
            size_t tokens = 1; // that it takes to see all of the stop string
            while (tokens < after.size() && after[tokens - 1].size() < end) tokens++;
            how.stops = {"never said, that", stop};
            const Generation g = tiny.answer(how);
            INFO("stop " << stop);
            CHECK(g.text == all.substr(0, at));
            CHECK(std::string(g.finish) == "stop");
            CHECK(g.ids == std::vector<int>(whole.ids.begin(), whole.ids.begin() + (ptrdiff_t)tokens));
            across += tokens > 1 && after[tokens - 2].size() > at;
        }
    CHECK(across > 30);
    how.stops = {"never said, that", all.substr(starts[starts.size() - 4]) + "!"}; // held back at the end, but not complete
    const Generation g = tiny.answer(how);
    CHECK(g.text == all);
    CHECK(std::string(g.finish) == "length");
}

TEST_CASE("each token is drawn from the penalised logits, and these are divided by the temperature") {
    Tiny tiny;
    Generation how;
    how.sampling = penalties(1.4f, 0.7f, 0.9f);
    how.sampling.temperature = 0.6f, how.sampling.top_k = 0, how.sampling.top_p = 1, how.sampling.seed = 3;
    how.max_tokens = 60;
    const Generation g = tiny.answer(how);
    REQUIRE(g.ids.size() > 20);

    Session<bf16> session(tiny.file.config, tiny.weights, 256);
    session.feed(tiny.prompt);
    Sampling plain = how.sampling; // the logits come penalised and divided
    plain.temperature = 1;
    int changed = 0;
    for (int id : g.ids) {
        std::vector<float> raw(session.logits, session.logits + session.config.V);
        std::vector<float> logits = penalized_plainly(raw, how.sampling, session.ids, tiny.prompt.size());
        for (float& l : logits) l /= how.sampling.temperature;
        for (float& l : raw) l /= how.sampling.temperature;
        CHECK(id == sample(logits.data(), tiny.tokenizer.size(), plain, session.ids.size()));
        changed += id != sample(raw.data(), tiny.tokenizer.size(), plain, session.ids.size());
        session.feed({id});
    }
    CHECK(changed > 0);
}

TEST_CASE("an interrupt ends the answer and keeps what is there; rows of feed are the same one by one") {
    Tiny tiny;
    Generation g;
    StopFlag stop = 0;
    g.sampling.temperature = 0;
    g.max_tokens = 30;
    g.interrupt = &stop;
    tiny.session.feed(tiny.prompt);
    std::string text;
    generate<bf16>(tiny.session, &tiny.tokenizer, g, [&](std::string_view s) { text += s, stop = 1; });
    CHECK(std::string(g.finish) == "interrupt");
    CHECK(g.text == text);
    CHECK(g.ids.size() < 30);
    CHECK(!g.ids.empty());

    // Logits of every token, many at once (see Session::ROWS) and one at a time.
    const size_t V = (size_t)tiny.file.config.V;
    std::vector<float> rows, single;
    std::vector<int> ids;
    for (int i = 0; i < 2 * Session<bf16>::ROWS + 3; i++) ids.push_back(i * 29 % 1000);
    Session<bf16> session(tiny.file.config, tiny.weights, 64);
    session.feed(ids, nullptr, [&](const float* row) { rows.insert(rows.end(), row, row + V); });
    CHECK(std::equal(rows.end() - (ptrdiff_t)V, rows.end(), session.logits)); // afterwards the last one's
    session.rewind(0);
    for (int id : ids) {
        session.feed({id});
        single.insert(single.end(), session.logits, session.logits + V);
    }
    CHECK(same_bits(rows, single));
}
