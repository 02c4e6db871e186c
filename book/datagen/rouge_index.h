// book/datagen/rouge_index.h: finds earlier questions that are near-duplicates of a new one, by ROUGE-L.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

namespace book {

// Finds every question whose ROUGE-L F with a new one, 2 LCS / (m + n) for m and n words, reaches a threshold t. A
// common subsequence is no longer than the overlap of the two bags of words, so the overlap must reach t (m + n) / 2,
// too; this is the prefix filter of set similarity joins (Chaudhuri et al. 2006, Xiao et al. 2008). With all words in
// one fixed order, two bags that share o words have a common one among the first m - o + 1 of the one and the first
// n - o + 1 of the other. So only these words of a question, the rarest first, are entered and looked up. The least o
// for any partner of m words is that of the shortest one, n = t m / (2 - t). Candidates are narrowed by the word's
// position and by 64-bit signatures, both upper bounds of the overlap; then the LCS decides. No match is
// lost. (Words are compared by 32-bit hashes: a collision could only add a candidate.)
struct RougeIndex {
    const double t;
    std::unordered_map<uint32_t, uint32_t> frequency; // of words, from learn(): any order is correct, this one is fast

    explicit RougeIndex(double threshold);
    void learn(const std::vector<uint32_t>& words);
    size_t size() const { return begin.size() - 1; }

    void add(const std::vector<uint32_t>& words);
    // Calls f with the number, counted by add(), of every question within the threshold, until f returns false.
    void find(const std::vector<uint32_t>& words, const std::function<bool(size_t)>& f);

  private:
    struct Posting { uint64_t signature; uint32_t row; uint16_t length, after; };
    struct Bag { // a question's second "the" is a different word from the first
        std::vector<uint32_t> keys;
        uint64_t signature = 0;
        size_t prefix = 0;
        Bag(const RougeIndex& index, const std::vector<uint32_t>& words);
    };
    std::unordered_map<uint32_t, std::vector<Posting>> postings;
    std::vector<uint32_t> all;        // words of all questions
    std::vector<uint64_t> begin = {0};
    std::vector<uint32_t> seen;       // the last round that visited the question
    uint32_t round = 0;

    using Places = std::unordered_map<uint32_t, std::vector<uint64_t>>; // bit i: words[i] is this word
    static Places places_of(const std::vector<uint32_t>& words);
    // Length of the longest common subsequence of m words and a row, 64 words at a time as the bits of a column
    // (Hyyrö 2004): a bit is 0 where the subsequence grows.
    size_t longest_common(const Places& places, size_t m, size_t row) const;
};

} // namespace book
