#include "book/datagen/rouge_index.h"
#include "base/error.h"
#include "book/words.h"
#include <algorithm>
#include <cmath>
#include <utility>

namespace book {

RougeIndex::RougeIndex(double threshold) : t(threshold) {
    if (t <= 0 || t > 1) DIE("rouge: a threshold of %g is not in 0..1", t);
}

void RougeIndex::learn(const std::vector<uint32_t>& words) {
    for (uint32_t w : words) frequency[w]++;
}

void RougeIndex::add(const std::vector<uint32_t>& words) {
    const Bag bag(*this, words);
    const uint32_t row = (uint32_t)size();
    for (size_t i = 0, m = words.size(); i < bag.prefix; i++)
        postings[bag.keys[i]].push_back({bag.signature, row, (uint16_t)m, (uint16_t)(m - i - 1)});
    all.insert(all.end(), words.begin(), words.end());
    begin.push_back(all.size());
    seen.push_back(0);
}

void RougeIndex::find(const std::vector<uint32_t>& words, const std::function<bool(size_t)>& f) {
    const size_t m = words.size();
    const Bag bag(*this, words);
    Places places;
    round++;
    for (size_t i = 0; i < bag.prefix; i++) {
        const auto list = postings.find(bag.keys[i]);
        if (list == postings.end()) continue;
        for (const Posting& p : list->second) {
            const double wanted = t * (double)(m + p.length) - 1e-9; // twice the overlap
            const size_t after = 1 + std::min<size_t>(m - i - 1, p.after);
            if ((double)(2 * after) < wanted) continue;
            if ((double)(m + p.length - (size_t)__builtin_popcountll(bag.signature ^ p.signature)) < wanted)
                continue;
            if (seen[p.row] == round) continue;
            seen[p.row] = round;
            if (places.empty()) places = places_of(words);
            if (2 * (double)longest_common(places, m, p.row) >= wanted && !f((size_t)p.row)) return;
        }
    }
}

RougeIndex::Bag::Bag(const RougeIndex& index, const std::vector<uint32_t>& words) {
    const size_t m = words.size();
    if (m == 0 || m > UINT16_MAX) return;
    std::vector<uint32_t> sorted = words;
    std::sort(sorted.begin(), sorted.end());
    std::vector<std::pair<uint32_t, uint32_t>> order;
    for (size_t i = 0, k = 0; i < m; i++) {
        k = i > 0 && sorted[i] == sorted[i - 1] ? k + 1 : 0;
        const auto found = index.frequency.find(sorted[i]);
        const uint32_t key = (uint32_t)(mix(k, sorted[i]) >> 8);
        order.push_back({found == index.frequency.end() ? 0 : found->second, key});
        signature |= (uint64_t)1 << (key % 64);
    }
    std::sort(order.begin(), order.end());
    for (auto& [count, key] : order) keys.push_back(key);
    const double shortest = std::ceil(index.t * (double)m / (2 - index.t) - 1e-9);
    const double overlap = std::ceil(index.t * ((double)m + shortest) / 2 - 1e-9);
    prefix = m + 1 - std::min(m, (size_t)overlap);
}

RougeIndex::Places RougeIndex::places_of(const std::vector<uint32_t>& words) {
    Places places;
    for (size_t i = 0; i < words.size(); i++) {
        auto& bits = places[words[i]];
        bits.resize((words.size() + 63) / 64);
        bits[i / 64] |= (uint64_t)1 << (i % 64);
    }
    return places;
}

size_t RougeIndex::longest_common(const Places& places, size_t m, size_t row) const {
    const size_t n = (m + 63) / 64;
    std::vector<uint64_t> column(n, ~(uint64_t)0);
    for (uint64_t i = begin[row]; i < begin[row + 1]; i++) {
        const auto found = places.find(all[i]);
        if (found == places.end()) continue;
        uint64_t carry = 0;
        for (size_t k = 0; k < n; k++) {
            const uint64_t v = column[k], u = v & found->second[k], sum = v + u, with_carry = sum + carry;
            carry = (sum < v) | (with_carry < sum);
            column[k] = with_carry | (v & ~u);
        }
    }
    size_t length = 0;
    for (size_t i = 0; i < m; i++) length += !(column[i / 64] >> (i % 64) & 1);
    return length;
}

} // namespace book
