// book/words.h: the words of a text, their hashes, and the share of Chinese ones.
#pragma once
#include "book/characters.h"
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace book {

inline uint64_t mix(uint64_t h, uint64_t x) { // a step of hashing; every bit of x reaches the upper half
    h = (h ^ x) * 0x9E3779B97F4A7C15;
    return h ^ h >> 32;
}

// The words of a text as counted by ROUGE-L and the word rules: each CJK character is a word, and so is a run of other
// letters and digits, in lower case (ASCII only). f receives the word's begin and end.
template <class F> void for_each_word(std::u32string_view s, F f) {
    for (size_t i = 0, j; i < s.size(); i = j) {
        j = i + 1;
        if (!is_cjk(s[i]) && !is_word(s[i])) continue;
        while (!is_cjk(s[i]) && j < s.size() && is_word(s[j])) j++;
        f(i, j);
    }
}
uint64_t word_hash(std::u32string_view word);
std::vector<uint32_t> word_hashes(std::u32string_view s);

// The share of words that are Chinese, Japanese or Korean; -1 if there is no word. Code is ignored.
double cjk_share(std::u32string_view s);

} // namespace book
