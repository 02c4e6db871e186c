// Prompt lookup: the ids, the text and the end of an answer are those of a step a token, whatever is proposed; and it is
// tried only while it pays.
#include "model/chat_template.h"
#include "model/model_file.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "tests/common.h"
#include "base/stop_flag.h"

// An answer, told by all that can be seen of it.
struct Answered {
    std::vector<int> ids, held; // of the answer; in the session afterwards
    std::string text, finish;
    std::vector<float> logits;  // after what is held
    size_t proposed = 0, right = 0;
    bool operator==(const Answered& o) const {
        return ids == o.ids && held == o.held && text == o.text && finish == o.finish && same_bits(logits, o.logits);
    }
};

template <class T> struct Model {
    ModelFile file;
    Weights<T> weights;
    std::unique_ptr<Tokenizer> tokenizer;
    Session<T> session;
    Model(const std::string& path, const std::string& vocabulary, int context)
        : file(path), weights(file), tokenizer(vocabulary.empty() ? nullptr : new Tokenizer(vocabulary)),
          session(file.config, weights, context) {}

    Answered answer(const std::vector<int>& prompt, const Generation& how, int lookup) {
        Generation g = how;
        session.rewind(0);
        session.lookup = {};
        session.lookup.most = lookup, session.lookup.always = true;
        session.feed(prompt);
        std::string shown;
        generate<T>(session, tokenizer.get(), g, [&](std::string_view s) { shown += s; });
        CHECK(shown == g.text);
        const std::vector<float> logits(session.logits, session.logits + session.config.V);
        return {g.ids, session.ids, g.text, g.finish, logits, session.lookup.proposed, session.lookup.right};
    }
};

// The same without and with proposals of up to each of these numbers. Counts what was proposed and what was right.
struct Counts { size_t proposed = 0, right = 0; };
template <class M> Answered check_same(M& model, const std::vector<int>& prompt, const Generation& how, Counts& counts,
                                       std::vector<int> numbers = {1, 3, LookUp::MOST}) {
    const Answered without = model.answer(prompt, how, 0);
    CHECK(without.proposed == 0);
    for (int n : numbers) {
        const Answered with = model.answer(prompt, how, n);
        INFO("lookup " << n << ", prompt of " << prompt.size() << ", seed " << how.sampling.seed << ", temperature "
                       << how.sampling.temperature << ": " << without.text << " / " << with.text);
        CHECK(with.ids == without.ids);
        CHECK(with == without);
        counts.proposed += with.proposed, counts.right += with.right;
    }
    return without;
}

static Generation greedy(size_t tokens) {
    Generation g;
    g.sampling.temperature = 0, g.max_tokens = tokens;
    return g;
}

// Every option of the sampler by itself, and all together.
static std::vector<Sampling> ways_to_draw(uint64_t seed) {
    Sampling plain;
    plain.seed = seed, plain.temperature = 0.3f, plain.top_k = 0, plain.top_p = 1;
    std::vector<Sampling> all(8, plain);
    all[1].top_k = 3;
    all[2].top_p = 0.7f;
    all[3].min_p = 0.2f;
    all[4].repeat = 1.2f;
    all[5].presence = 0.5f, all[5].frequency = 0.2f;
    all[6].temperature = 1.5f, all[6].top_k = 40;
    all[7].top_k = 20, all[7].top_p = 0.9f, all[7].min_p = 0.05f, all[7].repeat = 1.05f, all[7].presence = 0.1f;
    return all;
}

// ------------------------------------------------------------------------------------------------- the same answers

TEST_CASE("the default model: questions that were answered before, in Chinese and English, greedy and drawn") {
    Model<bf16> model("data/tiny/model.bin", "data/tiny/tokenizer.bin", 1024);
    Counts counts;
    for (const char* question : {"什么是线程束(warp)?", "Hello!"}) {
        const std::vector<int> once = render_chat(*model.tokenizer, {{"user", question}});
        const Answered first = check_same(model, once, greedy(60), counts, {LookUp::MOST});
        const std::vector<int> again = render_chat(
            *model.tokenizer, {{"user", question}, {"assistant", first.text}, {"user", question}});
        check_same(model, again, greedy(60), counts);
        for (const Sampling& way : ways_to_draw(11)) {
            Generation how = greedy(40);
            how.sampling = way;
            if (question[0] != 'H') check_same(model, again, how, counts, {LookUp::MOST});
        }
    }
    MESSAGE(counts.right << " of " << counts.proposed << " proposed tokens were right");
    CHECK(counts.right > 200);
    CHECK(counts.proposed > counts.right);
}

// Prompts of a model with random weights: ids that repeat, that do not, one id, a text with a turn to another.
static std::vector<std::vector<int>> random_prompts(int V) {
    Random random{5};
    std::vector<std::vector<int>> prompts(4);
    for (int i = 0; i < 60; i++) prompts[0].push_back(7 + i % 5);
    for (int i = 0; i < 40; i++) prompts[1].push_back(i * 3 % V);
    prompts[2] = {9};
    for (int i = 0; i < 80; i++) prompts[3].push_back(i % 20 < 15 ? 20 + i % 20 : random.below(V));
    return prompts;
}

template <class T> static void check_random_model(const char* path, Counts& counts) {
    Model<T> model(path, "", 160);
    for (const auto& prompt : random_prompts(model.file.config.V)) {
        check_same(model, prompt, greedy(60), counts);
        for (uint64_t seed : {1, 2, 3})
            for (const Sampling& way : ways_to_draw(seed)) {
                Generation how = greedy(40);
                how.sampling = way;
                check_same(model, prompt, how, counts, {seed == 2 ? 2 : LookUp::MOST});
            }
    }
}
TEST_CASE("models with random weights, in bf16 and float: every option of the sampler, several seeds") {
    Counts counts;
    check_random_model<bf16>("tests/fixtures/tied_bf16", counts);
    check_random_model<float>("tests/fixtures/untied_f32_sharded", counts);
    MESSAGE(counts.right << " of " << counts.proposed << " proposed tokens were right");
    CHECK(counts.right > 200);
    CHECK(counts.proposed > counts.right + 200);
}

TEST_CASE("Book I's loops and every instruction set: the same") {
    Counts counts;
    const std::vector<int> prompt = random_prompts(100)[0];
    on_every_instruction_set([&] {
        Model<bf16> model("tests/fixtures/tied_bf16", "", 160);
        check_same(model, prompt, greedy(24), counts);
    });
    Model<bf16> plain("tests/fixtures/tied_bf16", "", 160);
    plain.session.ctx.plain = true;
    check_same(plain, prompt, greedy(24), counts);
    CHECK(counts.right > 0);
}

// ------------------------------------------------------------------------------------- an answer ends in a proposal

// A model whose greedy answer goes round in a circle, so that nearly all proposals are right.
struct Circle : Model<bf16> {
    std::vector<int> prompt;
    Circle() : Model("tests/fixtures/tiny/model.bin", "tests/fixtures/tiny/tokenizer.bin", 256) {
        prompt = render_chat(*tokenizer, {{"user", "What is a warp?"}});
        file.config.end_tokens.clear();
    }
};

TEST_CASE("the length, the context, an end token, a stop string, Ctrl-C: wherever in a proposal they come") {
    Circle model;
    constexpr size_t LENGTH = 64;
    const Generation how = greedy(LENGTH);
    Counts counts;
    const Answered whole = check_same(model, model.prompt, how, counts);
    MESSAGE(counts.right << " of " << counts.proposed << " proposed tokens were right");
    REQUIRE(whole.ids.size() == LENGTH);
    REQUIRE(counts.right > 40); // or there is nothing to end in

    SUBCASE("length") {
        for (size_t n = 1; n < LENGTH; n++) check_same(model, model.prompt, greedy(n), counts, {LookUp::MOST});
    }
    SUBCASE("context") {
        for (int more = 1; more < (int)LENGTH; more++) {
            Model<bf16> small("tests/fixtures/tiny/model.bin", "tests/fixtures/tiny/tokenizer.bin",
                              (int)model.prompt.size() + more);
            small.file.config.end_tokens.clear();
            const Answered cut = check_same(small, model.prompt, greedy(SIZE_MAX), counts, {LookUp::MOST});
            CHECK(cut.finish == "length");
            CHECK(cut.ids.size() == (size_t)more + 1); // the last one need not be in the context
        }
    }
    SUBCASE("end token") {
        for (size_t n = 1; n < LENGTH; n++) {
            model.file.config.end_tokens = {whole.ids[n]};
            const Answered cut = check_same(model, model.prompt, how, counts, {LookUp::MOST});
            CHECK(cut.finish == "stop");
        }
        for (int seed = 0; seed < 10; seed++) { // drawn at other places
            Generation other = how;
            other.sampling = ways_to_draw((uint64_t)seed)[6];
            model.file.config.end_tokens = {whole.ids[LENGTH - 9], whole.ids[LENGTH - 4]};
            check_same(model, model.prompt, other, counts, {LookUp::MOST});
        }
    }
    SUBCASE("stop string") {
        int stops = 0;
        for (size_t at = 0; at + 3 < whole.text.size(); at += 2) {
            Generation stopped = how;
            stopped.stops = {whole.text.substr(at, 3)};
            stops += check_same(model, model.prompt, stopped, counts, {LookUp::MOST}).finish == "stop";
        }
        CHECK(stops > 20);
    }
    SUBCASE("Ctrl-C, after which the session goes on") {
        model.tokenizer.reset(); // a piece of text for each id
        const std::vector<int> ids = model.answer(model.prompt, how, 0).ids;
        for (int lookup : {0, LookUp::MOST})
            for (size_t n = 1; n < LENGTH; n++) {
                StopFlag stop = 0;
                Generation g = how;
                g.interrupt = &stop;
                model.session.rewind(0);
                model.session.lookup = {};
                model.session.lookup.most = lookup, model.session.lookup.always = true;
                model.session.feed(model.prompt);
                size_t shown = 0;
                generate<bf16>(model.session, nullptr, g, [&](std::string_view) { stop = ++shown == n; });
                CHECK(std::string(g.finish) == "interrupt");
                CHECK(g.ids == std::vector<int>(ids.begin(), ids.begin() + (ptrdiff_t)n));
                REQUIRE(model.session.ids.size() == model.prompt.size() + n);
                Generation rest = greedy(LENGTH - n);
                generate<bf16>(model.session, nullptr, rest, [](std::string_view) {});
                CHECK(rest.ids == std::vector<int>(ids.begin() + (ptrdiff_t)n, ids.end()));
            }
    }
}

TEST_CASE("what comes after an answer is fed as if nothing had been proposed") {
    Circle model;
    for (size_t n = 1; n < 64; n += 2) {
        const Answered cut = model.answer(model.prompt, greedy(n), LookUp::MOST);
        const std::vector<int> more = {5, 6, 7};
        model.session.feed(more); // into the cache where proposals lie
        std::vector<int> all = cut.held;
        all.insert(all.end(), more.begin(), more.end());
        REQUIRE(model.session.ids == all);
        const std::vector<float> after(model.session.logits, model.session.logits + model.file.config.V);
        model.session.rewind(0);
        model.session.feed(all);
        CHECK(same_bits(after, {model.session.logits, model.session.logits + model.file.config.V}));
    }
}

// ------------------------------------------------------------------------------------------------- what is proposed

TEST_CASE("the index finds the longest match, of equal ones the latest, however the ids came") {
    Random random{3};
    for (int list = 0; list < 60; list++) {
        const int kinds = 25 + list, n = 20 + random.below(300);
        std::vector<int> ids;
        PairIndex index;
        for (int i = 0; i < n; i++) { // new ids, and pieces of what was there
            if (ids.size() > 10 && i % 9 == 0)
                for (size_t from = (size_t)random.below((int)ids.size() - 9), k = 0; k < 9; k++) ids.push_back(ids[from + k]);
            else ids.push_back(random.below(kinds) << 10);
            if (i % 3) index.grow(ids);
            if (i % 3 != 1) continue;
            size_t next = 0, longest = 0;
            for (size_t end = ids.size() - 1; end-- > 1;) {
                size_t same = 0;
                while (same < 16 && same <= end && ids[end - same] == ids[ids.size() - 1 - same]) same++;
                if (same >= 2 && same > longest) longest = same, next = end + 1;
            }
            const PairIndex::Match match = index.find(ids);
            REQUIRE(match.length == (int)longest);
            if (longest) REQUIRE(match.next == next);
        }
    }
    PairIndex index;
    for (std::vector<int> ids : {std::vector<int>{}, {1}, {1, 1}}) {
        index.clear(), index.grow(ids);
        CHECK(index.find(ids).length == 0);
    }
    const std::vector<int> same(5000, 7); // every pair in one chain: a look at few of them
    index.clear(), index.grow(same);
    CHECK(index.find(same).length == 16);
}

TEST_CASE("proposals: what followed, round a circle too, no more than there is room for") {
    LookUp lookup;
    lookup.most = 5, lookup.always = true;
    std::vector<int> ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2};
    lookup.begin(ids, 0);
    CHECK(lookup.propose(ids, 100) == std::vector<int>{3, 4, 5, 6, 7});
    CHECK(lookup.propose(ids, 2) == std::vector<int>{3, 4});
    CHECK(lookup.propose(ids, 0).empty());
    ids = {1, 2, 3, 1, 2};
    lookup.begin(ids, 0);
    CHECK(lookup.propose(ids, 100) == std::vector<int>{3, 1, 2, 3, 1});
    ids.push_back(9);
    CHECK(lookup.propose(ids, 100).empty());
    lookup.most = 0;
    ids = {1, 2, 1, 2};
    lookup.begin(ids, 0);
    CHECK(lookup.propose(ids, 100).empty());
}

// ------------------------------------------------------------------------------------------------ whether it pays

// An answer of `tokens`, of which each goes on as 50 tokens before with probability `repeats`; a step of n tokens takes
// time(n). Returns the time, where a step a token would take `tokens` * time(1).
static double simulated(double repeats, const std::function<double(int)>& time, int tokens, uint64_t seed) {
    Random random{seed};
    std::vector<int> text;
    for (int i = 0; i < 50 + tokens; i++)
        text.push_back(i >= 50 && random.uniform() < repeats ? text[(size_t)i - 50] : random.below(1 << 20));
    std::vector<int> ids(text.begin(), text.begin() + 50);
    LookUp lookup;
    lookup.most = LookUp::MOST;
    lookup.begin(ids, 0);
    double total = 0;
    while (ids.size() < text.size()) {
        ids.push_back(text[ids.size()]);
        const std::vector<int> next = lookup.propose(ids, text.size() - ids.size());
        total += time(1 + (int)next.size());
        lookup.computed(1 + next.size(), time(1 + (int)next.size()));
        for (int id : next) {
            const bool right = id == text[ids.size()];
            lookup.judged(right);
            if (!right) break;
            ids.push_back(id);
        }
    }
    return total;
}

TEST_CASE("lookup costs no more than a hundredth, whatever steps cost and however often it is right; and it gains") {
    for (double repeats : {0., 0.3, 0.6, 0.8, 0.9, 0.95, 1.})
        for (double more : {0., 0.05, 0.2, 0.5, 1.}) // of a step, for each further token
            for (uint64_t seed = 1; seed < 6; seed++) {
                const double with = simulated(repeats, [&](int n) { return 1 + more * (n - 1); }, 1000, seed);
                INFO("repeats " << repeats << ", each token more " << more << " of a step: " << with << " of 1000");
                CHECK(with <= 1010 + 2); // (2: the first try of a number is made before its time is known)
                if (repeats == 1) CHECK(with <= (more < 0.1 ? 250 : more < 0.4 ? 450 : more < 0.9 ? 750 : 1012));
                if (repeats == 0.9 && more < 0.1) CHECK(with <= 500);
            }
    // A step of more than four tokens costs twice as much: four are taken, or eight.
    const double with = simulated(1, [](int n) { return n <= 4 ? 1 : 2.5; }, 1000, 1);
    CHECK(with <= 300);
}

// The same where steps are launched ahead, as on a GPU (GpuDraws in model/draw_ahead.h): two of a token each, or one
// with proposals, which the steps before must precede. A launch while no step is running begins `late`.
static double simulated_ahead(double repeats, const std::function<double(int)>& time, double late, int tokens, uint64_t seed) {
    Random random{seed};
    std::vector<int> text;
    for (int i = 0; i < 50 + tokens; i++)
        text.push_back(i >= 50 && random.uniform() < repeats ? text[(size_t)i - 50] : random.below(1 << 20));
    std::vector<int> ids(text.begin(), text.begin() + 51), proposed; // (the first token is the prompt's)
    LookUp lookup;
    lookup.most = LookUp::MOST;
    lookup.begin({text.begin(), text.begin() + 50}, 0);
    double now = 0, started = 0;
    std::vector<double> ends; // of steps under way
    int expected = -1;
    bool from_idle = false;
    while (ids.size() < text.size()) {
        const size_t left = text.size() - ids.size();
        if (proposed.empty() && ends.size() < 2 && ends.size() < left) {
            const std::vector<int> next = lookup.propose(ids, left - 1);
            const bool idle = ends.empty();
            if (idle) started = now;
            if (!next.empty() && !idle) expected = next[0];
            else if (!next.empty()) proposed = next, ends = {now + late + time(1 + (int)next.size())};
            else
                for (from_idle = idle; ends.size() < std::min((size_t)2, left);)
                    ends.push_back((ends.empty() ? now + late : std::max(now, ends.back())) + time(1));
        }
        now = ends[0], ends.erase(ends.begin());
        if (proposed.empty()) {
            ids.push_back(text[ids.size()]);
            if (expected >= 0) lookup.foreseen(ids.back() == expected);
            lookup.came(1, now, started, from_idle);
            expected = -1, from_idle = false;
            continue;
        }
        lookup.came(1 + proposed.size(), now, started, true);
        for (size_t i = 0; i <= proposed.size(); i++) {
            ids.push_back(text[ids.size()]);
            if (i == proposed.size()) break;
            lookup.judged(ids.back() == proposed[i]);
            if (ids.back() != proposed[i]) break;
        }
        proposed.clear();
    }
    return now;
}

TEST_CASE("lookup where steps are launched ahead costs no more than a hundredth either; and it gains") {
    for (double repeats : {0., 0.3, 0.6, 0.8, 0.9, 0.95, 1.})
        for (double more : {0.02, 0.05, 0.2, 0.5, 1.}) // of a step, for each further token
            for (double late : {0.01, 0.03, 0.1})
                for (uint64_t seed = 1; seed < 6; seed++) {
                    const double with = simulated_ahead(repeats, [&](int n) { return 1 + more * (n - 1); }, late, 1000, seed);
                    INFO("repeats " << repeats << ", each token more " << more << ", late by " << late << " of a step: " << with << " of 1000");
                    CHECK(with <= 1010 + 2);
                    if (repeats == 1) CHECK(with <= (more < 0.1 ? 270 : more < 0.4 ? 460 : more < 0.9 ? 760 : 1012));
                    if (repeats == 0.9 && more < 0.1) CHECK(with <= 530);
                }
}
