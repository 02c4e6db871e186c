// book/datagen/ground.h: the facts and content words of a chunk, which support an answer.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_set>

namespace book {

// Numbers and identifiers of a text: runs of letters, digits, '_' and '.' that contain a digit, a '_' or a capital
// after a small letter. "1,024" is 1024; threadIdx.x is also threadIdx and x.
void for_each_fact(std::u32string_view s, const std::function<void(const std::string& run, bool is_fact)>& f);

// The support for an answer: the facts and content words of its chunk. A content word is a pair of adjacent
// CJK characters, or a word of three letters and more that is no stop word.
struct Ground {
    std::unordered_set<uint64_t> words;
    std::unordered_set<std::string> facts;
    const std::unordered_set<uint64_t>& stop_words;

    Ground(std::u32string_view text, const std::unordered_set<uint64_t>& stop_words);
    bool has(const std::string& fact) const;
    void for_each_content_word(std::u32string_view s, const std::function<void(uint64_t)>& f) const;
};

} // namespace book
