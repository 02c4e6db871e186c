#include "book/words.h"
#include <algorithm>

namespace book {

uint64_t word_hash(std::u32string_view word) {
    uint64_t h = word.size();
    for (char32_t c : word) h = mix(h, lower(c));
    return h;
}

std::vector<uint32_t> word_hashes(std::u32string_view s) {
    std::vector<uint32_t> out;
    for_each_word(s, [&](size_t i, size_t j) { out.push_back((uint32_t)(word_hash(s.substr(i, j - i)) >> 16)); });
    return out;
}

double cjk_share(std::u32string_view s) {
    size_t all = 0, cjk = 0;
    bool code = false;
    for (size_t i = 0; i < s.size();) { // runs of backticks alternate between code and prose
        size_t end = std::min(s.find(U'`', i), s.size());
        if (!code) for_each_word(s.substr(i, end - i), [&](size_t at, size_t) { all++, cjk += is_cjk(s[i + at]); });
        if (end < s.size()) code = !code;
        for (i = end; i < s.size() && s[i] == '`';) i++;
    }
    return all ? (double)cjk / (double)all : -1;
}

} // namespace book
