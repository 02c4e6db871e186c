#include "book/datagen/split.h"
#include "base/error.h"
#include "base/file.h"
#include "book/characters.h"
#include "book/conversations.h"
#include "book/datagen/leakage.h"
#include "book/datagen/prompt.h"
#include "book/report.h"
#include "book/rows.h"
#include "book/text.h"
#include "book/words.h"
#include "sj.h"
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace book {
namespace {

using Counts = std::map<std::string, double>; // rows by difficulty
struct Group {                                // the rows of a chunk
    uint64_t order = 0;
    std::string chapter;
    Counts rows;
    size_t size = 0;
    bool test = false;
};

} // namespace

// Moves whole chunks to the test side until it has its rows. Each time takes the chunk that brings the counts by
// chapter and difficulty (within the chapter and overall, "") nearest to the target. Ties go by Group::order.
// missing: rows wanted; on return, rows still missing.
static void choose_tests(const std::vector<Group*>& groups, std::map<std::string, Counts>& missing, size_t& wanted) {
    std::map<std::string, double> missing_rows;
    for (auto& [chapter, counts] : missing)
        for (auto& [difficulty, n] : counts) missing_rows[chapter] += n;
    for (;;) {
        Group* best = nullptr;
        double best_gain = -INFINITY;
        for (Group* g : groups) {
            if (g->test || g->size > wanted) continue;
            double gain = 0; // decrease of the sum of squares of `missing`, per row
            for (auto& [difficulty, n] : g->rows)
                for (const Counts* c : {&missing[g->chapter], &missing[""]}) gain += n * (2 * c->at(difficulty) - n);
            const double n = (double)g->size;
            gain = (gain + n * (2 * missing_rows[g->chapter] - n)) / n;
            if (gain > best_gain + 1e-9) best = g, best_gain = gain;
        }
        stop_if_interrupted();
        if (!best) return;
        best->test = true;
        wanted -= best->size, missing_rows[best->chapter] -= (double)best->size;
        for (auto& [difficulty, n] : best->rows) missing[best->chapter][difficulty] -= n, missing[""][difficulty] -= n;
    }
}

namespace {

struct Split {
    const Arguments& a;
    const Limits limits = Limits(a);
    const size_t wanted = a.number("--test", 0, 1, SIZE_MAX / 2);
    const std::string folder = a.output() == "-" ? "." : a.output();
    std::map<std::string, Group> groups;             // by chunk
    std::map<std::string, Counts> chapters, missing; // "": all of them; rows that the test side still lacks
    size_t rows = 0, taken = 0;                      // in total; for the test

    explicit Split(const Arguments& a) : a(a) {}
    Group& group_of(const Reader& in) { // a row without a chunk is its own group
        const std::string chunk = in.row()["chunk"].str();
        return groups[chunk.empty() ? format("\nrow %zu", in.number) : chunk];
    }
    // Calls f(row as read) for the rows of one side.
    template <class F> void each(bool test, F f) {
        Progress progress;
        size_t done = 0;
        for (Reader in(a.files[0]); in.next();) {
            progress.show("split", ++done, in.share());
            if (group_of(in).test == test) f(in);
        }
    }
    static std::string name_of(const Reader& in) {
        const sj::Value id = in.row()["id"];
        return id.is(sj::String) ? id.str() : id ? sj::dump(id) : format("line %zu", in.number);
    }

    void choose() {
        Reader in(a.files[0]);
        if (!in.seekable()) DIE("%s: is read again, so it has to be a file", in.path.c_str());
        for (Progress progress; in.next(); rows++) {
            progress.show("split", rows, in.share());
            const sj::Value v = in.need();
            const std::string difficulty = v["difficulty"].str("-");
            Group& g = group_of(in);
            if (g.size++ == 0) g.chapter = v["source"].str() + "\n" + top_chapter(v);
            g.rows[difficulty]++, chapters[g.chapter][difficulty]++, chapters[""][difficulty]++;
        }
        if (wanted >= rows) DIE("--test %zu: %s has %zu rows", wanted, a.files[0].c_str(), rows);
        std::vector<Group*> order; // by a hash of seed and chunk, so that the order of rows does not matter
        const std::string seed = std::to_string(a.number("--seed", 0, 0, SIZE_MAX));
        for (auto& [chunk, g] : groups) {
            g.order = mix(0, fnv1a(chunk, fnv1a(seed + "\n")));
            order.push_back(&g);
        }
        std::sort(order.begin(), order.end(), [](const Group* x, const Group* y) { return x->order < y->order; });
        missing = chapters;
        for (auto& [chapter, counts] : missing)
            for (auto& [difficulty, n] : counts) n *= (double)wanted / (double)rows;
        size_t left = wanted;
        choose_tests(order, missing, left);
        taken = wanted - left;
        if (!taken) DIE("--test %zu: every chunk has more rows", wanted);
    }
    void tell_shares() {
        say(format("test %zu rows, train %zu rows; no chunk is on both sides", taken, rows - taken));
        for (auto& [difficulty, count] : chapters[""]) {
            const double target = count * (double)wanted / (double)rows, got = target - missing[""][difficulty];
            say(format("  %-8s %5.1f%% of all rows, %5.1f%% of the test's", difficulty.c_str(),
                       100 * count / (double)rows, 100 * got / (double)taken));
        }
    }
    void name(const std::vector<size_t>& leaks, const Leakage& leakage, const Strings& names) const {
        constexpr size_t SHOWN = 5;
        for (size_t i = 0; i < leaks.size() && i < SHOWN; i++) {
            const size_t test = leaks[i];
            const std::string why = leakage.asked[test].empty()
                ? format("%.0f%% of its n-grams stand in train", 100 * leakage.share(test))
                : "train asks the like in " + leakage.asked[test];
            say(format("  %s leaks: %s (%s)", score_excerpt(names[test], 60).c_str(),
                       score_excerpt(leakage.tests[test].question, 70).c_str(), score_excerpt(why, 100).c_str()));
        }
        if (leaks.size() > SHOWN) say(format("  and %zu more", leaks.size() - SHOWN));
    }

    int run() {
        if (!wanted) DIE("--test N is needed: how many rows are kept for testing");
        choose();
        std::vector<Conversation> tests;
        Strings names;
        each(true, [&](const Reader& in) { tests.push_back(need_conversation(in)), names.push_back(name_of(in)); });
        Leakage leakage(tests, limits);
        each(false, [&](const Reader& in) { leakage.train(need_conversation(in), name_of(in)); });
        tell_shares();
        const std::vector<size_t> leaks = leakage.report();
        name(leaks, leakage, names);
        std::unique_ptr<Report> report;
        std::set<size_t> gone; // rows of train, by number
        if (a.has("--drop-leaks")) {
            report = std::make_unique<Report>(a.dropped(), Strings{"leak"});
            gone = leaking_rows(leakage, [&](auto f) {
                each(false, [&](const Reader& in) { f(need_conversation(in), in.number); });
            });
        } else if ((double)leaks.size() > limits["split.leak_rows"] * (double)taken) {
            DIE("%zu of %zu test rows leak, more than split.leak_rows allows: nothing was written. --drop-leaks leaves "
                "out what they share text with in train, --seed N splits in another way", leaks.size(), taken);
        }
        Output train(folder + "/train.jsonl"), test(folder + "/test.jsonl");
        each(true, [&](const Reader& in) { test.line(one_line(in.text)); });
        each(false, [&](const Reader& in) {
            if (gone.count(in.number)) return report->drop("leak", "shares text or a question with a test row", in);
            train.line(one_line(in.text));
            if (report) report->kept++;
        });
        if (report && !report->kept) DIE("no row of train would be left: nothing was written");
        train.commit();
        test.commit();
        if (report) report->finish("rows of train");
        return 0;
    }
};

} // namespace

int run_split(const Arguments& a) {
    return Split(a).run();
}

} // namespace book
