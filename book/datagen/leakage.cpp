#include "book/datagen/leakage.h"
#include "base/error.h"
#include "book/characters.h"
#include "book/datagen/minhash.h"
#include "book/report.h"
#include "book/words.h"
#include <algorithm>
#include <map>

namespace book {

Leakage::Leakage(const std::vector<Conversation>& tests, const Limits& limits)
    : n(limits.count("split.ngram")), limit(limits["split.leak_share"]), tests(tests),
      index(limits["filter.rouge"]), asked(tests.size()) {
    for (auto& c : tests) index.learn(question(c));
    for (auto& c : tests) {
        index.add(question(c));
        for (uint64_t gram : grams(c)) in_train[gram] = false;
    }
}

std::vector<uint32_t> Leakage::question(const Conversation& c) {
    return word_hashes(decode(c.question));
}

std::vector<uint64_t> Leakage::grams(const Conversation& c) const {
    return ngrams(decode(c.question + "\n" + c.answer), n);
}

void Leakage::train(const Conversation& c, const std::string& name) {
    for (uint64_t gram : grams(c))
        if (auto found = in_train.find(gram); found != in_train.end()) found->second = true;
    index.find(question(c), [&](size_t i) { return asked[i] = name, true; });
}

double Leakage::share(size_t test) const {
    const auto all = grams(tests[test]);
    const auto common = std::count_if(all.begin(), all.end(), [&](uint64_t gram) { return in_train.at(gram); });
    return (double)common / (double)all.size();
}

std::vector<size_t> Leakage::report() const {
    size_t overlapping = 0, alike = 0;
    std::vector<size_t> leaks;
    double mean = 0;
    for (size_t i = 0; i < tests.size(); i++) {
        const double x = share(i);
        mean += x / (double)tests.size();
        overlapping += x > limit, alike += !asked[i].empty();
        if (x > limit || !asked[i].empty()) leaks.push_back(i);
    }
    say(format("leakage: of a test row's %zu-character n-grams %.2f%% stand in train, on average", n, 100 * mean));
    say(format("  %zu rows with more than %.0f%% there, %zu with a question of ROUGE-L %.2f or more to one there: "
               "%zu rows leak", overlapping, 100 * limit, alike, index.t, leaks.size()));
    return leaks;
}

std::set<size_t> leaking_rows(Leakage& leakage, const std::function<void(const TrainRow& f)>& for_each_train) {
    std::set<size_t> gone;
    std::vector<size_t> overlapping;
    std::unordered_map<uint64_t, std::vector<size_t>> holders; // rows of train, by n-grams of the test row's
    for (size_t i = 0; i < leakage.tests.size(); i++)
        if (leakage.share(i) > leakage.limit) {
            overlapping.push_back(i);
            for (uint64_t gram : leakage.grams(leakage.tests[i])) holders[gram];
        }
    for_each_train([&](const Conversation& c, size_t row) {
        leakage.index.find(Leakage::question(c), [&](size_t) { return gone.insert(row), false; });
        for (uint64_t gram : leakage.grams(c))
            if (auto found = holders.find(gram); found != holders.end())
                if (found->second.empty() || found->second.back() != row) found->second.push_back(row);
    });
    for (size_t i : overlapping) {
        const std::vector<uint64_t> all = leakage.grams(leakage.tests[i]);
        for (;;) {
            size_t common = 0;
            std::map<size_t, size_t> shared; // number of shared n-grams, by row of train
            for (uint64_t gram : all) {
                bool here = false;
                for (size_t row : holders.at(gram))
                    if (!gone.count(row)) here = true, shared[row]++;
                common += here;
            }
            if ((double)common <= leakage.limit * (double)all.size()) break;
            auto fewer = [](auto& x, auto& y) { return x.second < y.second; };
            gone.insert(std::max_element(shared.begin(), shared.end(), fewer)->first);
        }
    }
    return gone;
}

} // namespace book
