// Random words for the benchmarks' texts.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

struct ZipfWords {
    uint64_t state = 1;
    double uniform() { // splitmix64, in [0, 1)
        uint64_t z = state += 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        return (double)(z >> 11) * 0x1p-53;
    }
    // One of the words; the k-th about 1/k as often as the first.
    template <class W> const W& of(const std::vector<W>& words) { return words[(size_t)std::pow((double)words.size(), uniform()) - 1]; }
};
