// book/datagen/leakage.h: the overlap of test rows with training rows, and which of the latter to remove.
#pragma once
#include "book/arguments.h"
#include "book/conversations.h"
#include "book/datagen/rouge_index.h"
#include "book/text.h"
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace book {

// The overlap of test rows with training rows: character n-grams, and near-duplicate questions.
struct Leakage {
    const size_t n;
    const double limit; // a row with a greater share of its n-grams in train is a leak
    const std::vector<Conversation>& tests;
    RougeIndex index;
    std::unordered_map<uint64_t, bool> in_train; // n-grams of the test rows
    Strings asked;                               // per test row: a row of train with a near-duplicate question

    Leakage(const std::vector<Conversation>& tests, const Limits& limits);
    static std::vector<uint32_t> question(const Conversation& c);
    std::vector<uint64_t> grams(const Conversation& c) const;
    void train(const Conversation& c, const std::string& name);
    double share(size_t test) const;
    // Reports the result; returns the test rows that leak.
    std::vector<size_t> report() const;
};

// The rows of train to remove so that no test row leaks: those with a near-duplicate question; and of those that share
// n-grams with a test row the ones that share most, until at most `limit` of its n-grams are left in train.
// for_each_train(f) calls f(conversation, row) for every row of train.
using TrainRow = std::function<void(const Conversation&, size_t row)>;
std::set<size_t> leaking_rows(Leakage& leakage, const std::function<void(const TrainRow& f)>& for_each_train);

} // namespace book
