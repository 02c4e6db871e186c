#include "book/datagen/terms.h"
#include "book/characters.h"
#include "book/chunks.h"
#include "book/words.h"
#include "model/utf8.h"
#include <algorithm>
#include <utility>
#include <vector>

namespace book {

BookTerms::BookTerms(const std::unordered_set<uint64_t>& stop_words, const std::string& common) : nothing(stop_words) {
    for_each_line(common, [&](std::string_view word, size_t) { nothing.insert(word_hash(decode(word))); });
}

void BookTerms::learn(sj::Value chunk) {
    chunks++;
    const std::string text = chunk["text"].str();
    add(chunk["chapter"].str(), true);
    for (auto line : lines_of(text))
        if (heading_level(line)) add(line, true);
    add(text, false);
}

Strings BookTerms::terms(const Limits& limits) const {
    const size_t least = limits.count("terms.least");
    std::vector<std::pair<size_t, std::string>> order;
    for (auto& [word, u] : uses) {
        const bool clumps = (double)u.count >= limits["terms.clump"] * (double)u.chunks;
        const bool spread = (double)u.chunks > std::max(1., limits["terms.spread"] * (double)chunks);
        const bool frequent = u.count >= least && (u.capitals || (clumps && !spread));
        if (u.heading || frequent) order.push_back({u.count, word});
    }
    std::sort(order.begin(), order.end(), [](auto& x, auto& y) {
        return x.first != y.first ? x.first > y.first : x.second < y.second;
    });
    Strings all;
    for (auto& [count, word] : order) all.push_back(word);
    return all;
}

void BookTerms::add(std::string_view valid, bool heading) {
    const std::u32string text = decode(valid);
    auto note = [&](std::u32string_view word, bool capitals) {
        if (nothing.count(word_hash(word))) return;
        std::string name;
        for (char32_t c : word) utf8_append(name, lower(c));
        Use& u = uses[name];
        u.heading |= heading, u.capitals |= capitals;
        if (heading) return;
        u.count++;
        if (u.last != chunks) u.last = chunks, u.chunks++;
    };
    for_each_word(text, [&](size_t i, size_t j) {
        const std::u32string_view word = std::u32string_view(text).substr(i, j - i);
        if (is_cjk(word[0])) return;
        const bool letters = !std::all_of(word.begin(), word.end(), is_digit);
        const bool capitals = word.size() >= 2 && std::all_of(word.begin(), word.end(), [](uint32_t c) {
            return (c >= 'A' && c <= 'Z') || is_digit(c);
        });
        if (letters && (word.size() >= 3 || capitals)) note(word, capitals);
    });
    if (std::none_of(text.begin(), text.end(), is_cjk)) return;
    if (!jieba) jieba = std::make_unique<Jieba>(find_jieba());
    std::vector<std::string_view> words;
    jieba->cut(words, valid);
    for (auto w : words) {
        const std::u32string word = decode(w);
        if (word.size() >= 2 && std::all_of(word.begin(), word.end(), is_cjk)) note(word, false);
    }
}

} // namespace book
