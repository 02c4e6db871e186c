// book/leakage.h: what test rows have in common with training rows, and which of these to leave out.
#pragma once
#include "book/arguments.h"
#include "book/conversations.h"
#include "book/rouge_index.h"
#include "book/text.h"
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace book {

// What the test rows have in common with training rows: character n-grams, and questions that are nearly the same.
struct Leakage {
    const size_t n;
    const double limit; // more than this share of a row's n-grams in train is a leak
    const std::vector<Conversation>& tests;
    RougeIndex index;
    std::unordered_map<uint64_t, bool> in_train; // n-grams of the test rows
    Strings asked;                               // by test row: the name of a row of train with a question like its own

    Leakage(const std::vector<Conversation>& tests, const Limits& limits);
    static std::vector<uint32_t> question(const Conversation& c);
    std::vector<uint64_t> grams(const Conversation& c) const;
    void train(const Conversation& c, const std::string& name);
    double share(size_t test) const;
    // Says what was found; returns the test rows that leak.
    std::vector<size_t> report() const;
};

// The rows of train to leave out so that no test row leaks: those with a question like a test row's, and of those that
// share n-grams with a test row the ones that share most with it, until no more than `limit` of its own are left there.
// for_each_train(f) calls f(conversation, row) with every row of train.
using TrainRow = std::function<void(const Conversation&, size_t row)>;
std::set<size_t> leaking_rows(Leakage& leakage, const std::function<void(const TrainRow& f)>& for_each_train);

} // namespace book
