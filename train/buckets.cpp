// train/buckets.cpp: distributes rows, and partitions an array.
#include "train/buckets.h"
#include <numeric>

std::vector<std::vector<size_t>> deal(const std::vector<size_t>& tokens, int ranks) {
    std::vector<std::vector<size_t>> hands((size_t)ranks);
    std::vector<size_t> order(tokens.size()), sum((size_t)ranks);
    std::iota(order.begin(), order.end(), (size_t)0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tokens[a] > tokens[b]; });
    const size_t room = (tokens.size() + (size_t)ranks - 1) / (size_t)ranks;
    for (size_t place : order) {
        size_t to = hands.size();
        for (size_t r = 0; r < hands.size(); r++)
            if (hands[r].size() < room && (to == hands.size() || sum[r] < sum[to])) to = r;
        hands[to].push_back(place), sum[to] += tokens[place];
    }
    for (auto& hand : hands) std::sort(hand.begin(), hand.end());
    return hands;
}

Buckets::Buckets(size_t numbers, int ranks) : count(numbers) {
    const size_t step = UNIT * (size_t)ranks;
    bucket = std::max((count / MOST + step - 1) / step, (size_t)1) * step;
    n = (count + bucket - 1) / bucket, piece = bucket / (size_t)ranks;
}
