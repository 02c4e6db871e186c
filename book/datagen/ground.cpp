#include "book/datagen/ground.h"
#include "book/characters.h"
#include "book/words.h"
#include <algorithm>
#include <cctype>

namespace book {

void for_each_fact(std::u32string_view s, const std::function<void(const std::string& run, bool is_fact)>& f) {
    auto here = [&](size_t i) -> uint32_t { return i < s.size() ? s[i] : 0; };
    for (size_t i = 0; i < s.size(); i++) {
        std::string run;
        for (;; i++) {
            const uint32_t c = here(i);
            if (is_latin(c) || is_digit(c) || c == '_' || c == '.') run += (char)c;
            else if (c != ',' || run.empty() || !is_digit(here(i - 1)) || !is_digit(here(i + 1))) break;
        }
        while (!run.empty() && run.back() == '.') run.pop_back();
        run.erase(0, run.find_first_not_of('.'));
        bool is_fact = run.find_first_of("0123456789_") != run.npos;
        for (size_t k = 1; k < run.size(); k++) is_fact |= islower((uint8_t)run[k - 1]) && isupper((uint8_t)run[k]);
        if (!run.empty()) f(run, is_fact);
    }
}

template <class F> static void for_each_part(const std::string& run, F f) {
    for (size_t at = 0; at <= run.size();) {
        const size_t dot = std::min(run.find('.', at), run.size());
        if (dot > at) f(run.substr(at, dot - at));
        at = dot + 1;
    }
}

Ground::Ground(std::u32string_view text, const std::unordered_set<uint64_t>& stop_words) : stop_words(stop_words) {
    for_each_content_word(text, [&](uint64_t word) { words.insert(word); });
    for_each_fact(text, [&](const std::string& run, bool) {
        facts.insert(run);
        for_each_part(run, [&](const std::string& part) { facts.insert(part); });
    });
}

bool Ground::has(const std::string& fact) const {
    bool all = true;
    for_each_part(fact, [&](const std::string& part) { all &= facts.count(part) > 0; });
    return facts.count(fact) || (all && fact.find_first_not_of("0123456789.") != fact.npos);
}

void Ground::for_each_content_word(std::u32string_view s, const std::function<void(uint64_t)>& f) const {
    for_each_word(s, [&](size_t i, size_t j) {
        if (is_cjk(s[i])) {
            if (j < s.size() && is_cjk(s[j])) f(word_hash(s.substr(i, 2)));
        } else if (j - i >= 3 && !stop_words.count(word_hash(s.substr(i, j - i)))) f(word_hash(s.substr(i, j - i)));
    });
}

} // namespace book
