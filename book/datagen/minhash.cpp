#include "book/datagen/minhash.h"
#include "book/characters.h"
#include "book/words.h"
#include <algorithm>
#include <iterator>
#include <string>

namespace book {

std::vector<uint64_t> ngrams(std::u32string_view s, size_t n) {
    std::u32string letters;
    for (char32_t c : s)
        if (!is_space(c)) letters += lower(c);
    std::vector<uint64_t> grams;
    for (size_t i = 0; i == 0 || i + n <= letters.size(); i++) {
        uint64_t h = n;
        for (char32_t c : std::u32string_view(letters).substr(i, n)) h = mix(h, c);
        grams.push_back(h);
    }
    return grams;
}

double jaccard(std::vector<uint64_t> a, std::vector<uint64_t> b) {
    for (auto* v : {&a, &b}) {
        std::sort(v->begin(), v->end());
        v->erase(std::unique(v->begin(), v->end()), v->end());
    }
    size_t common = 0;
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();)
        if (a[i] == b[j]) common++, i++, j++;
        else a[i] < b[j] ? i++ : j++;
    return (double)common / (double)(a.size() + b.size() - common);
}

MinHash::MinHash() {
    uint64_t h = 1;
    for (auto& f : factor) f = (uint32_t)(h = mix(h, 1)) | 1;
    for (auto& x : summand) x = (uint32_t)(h = mix(h, 2));
}

std::array<uint64_t, MinHash::BANDS> MinHash::bands(const std::vector<uint64_t>& grams) const {
    uint32_t least[BANDS * ROWS];
    std::fill(std::begin(least), std::end(least), UINT32_MAX);
    for (uint64_t gram : grams) {
        const uint32_t x = (uint32_t)(gram >> 16);
        for (size_t i = 0; i < BANDS * ROWS; i++) least[i] = std::min(least[i], factor[i] * x + summand[i]);
    }
    std::array<uint64_t, BANDS> out;
    for (size_t b = 0; b < BANDS; b++) {
        out[b] = b;
        for (size_t r = 0; r < ROWS; r++) out[b] = mix(out[b], least[b * ROWS + r]);
        out[b] *= 0x9E3779B97F4A7C15; // the table uses both ends of it
    }
    return out;
}

} // namespace book
