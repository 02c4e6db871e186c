// Random numbers, and ragged batches over a paged cache with scattered pages.
#pragma once
#include "qwen3.cu"
#include "tests/numbers.h"
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

// Fresh numbers in -scale..scale, as T stores them.
struct Random {
    uint64_t seed, counter = 0;
    double uniform() { return random_word(seed, counter++) / 4294967296.0; }
    int below(int n) { return (int)(uniform() * n); }
    template <class T> std::vector<T> fill(size_t n, double scale = 1, double mean = 0) {
        std::vector<T> v(n);
        for (T& x : v) x = to_stored<T>((acc<T>)(mean + scale * (2 * uniform() - 1)));
        return v;
    }
};

// Scaled frequencies, and cosines and sines of length 1.2: for ops that take RoPE's table.
inline const RopeScaling SCALED = {RopeScaling::YARN, 4, 256, 1.2, 32, 1, true};

// Sequences of `past` tokens in the cache and `fresh` in the batch, on pages in random order; spare rows at the
// end on request.
struct TestBatch {
    std::vector<int> token, pos, seq, slot, pages;
    int max_pages = 0, page_count = 0;
    TestBatch(Random& random, std::vector<std::pair<int, int>> past_fresh, int V, int spare = 0) {
        for (auto [past, fresh] : past_fresh) max_pages = std::max(max_pages, (past + fresh + PAGE - 1) / PAGE);
        page_count = max_pages * (int)past_fresh.size() + 3;
        std::vector<int> order(page_count);
        for (int i = 0; i < page_count; i++) order[i] = i;
        for (int i = page_count - 1; i > 0; i--) std::swap(order[i], order[random.below(i + 1)]);
        for (size_t s = 0; s < past_fresh.size(); s++) {
            auto [past, fresh] = past_fresh[s];
            for (int p = 0; p < max_pages; p++) pages.push_back(order[s * max_pages + p]);
            for (int i = 0; i < fresh; i++) {
                int p = past + i;
                token.push_back(random.below(V)), pos.push_back(p), seq.push_back((int)s);
                slot.push_back(pages[s * max_pages + p / PAGE] * PAGE + p % PAGE);
            }
        }
        for (int i = 0; i < spare; i++) token.push_back(-1), pos.push_back(-1), seq.push_back(-1), slot.push_back(-1);
    }
    Batch view() const {
        return {(int)token.size(), (int)pages.size() / std::max(1, max_pages), token.data(), pos.data(), seq.data(), slot.data(), pages.data(), max_pages};
    }
};
