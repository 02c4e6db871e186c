#include "book/datagen/patterns.h"
#include "base/error.h"
#include "book/arguments.h"
#include "book/characters.h"
#include "model/utf8.h"

namespace book {

Patterns::Patterns(const std::string& path) {
    for_each_line(path, [&](std::string_view line, size_t number) {
        if (!add(line)) DIE("%s: line %zu: a pattern begins with a letter", path.c_str(), number);
    });
}

bool Patterns::add(std::string_view line) {
    const bool except = line[0] == '!';
    std::u32string p = decode(line.substr(except));
    for (char32_t& c : p) c = lower(c);
    if (p.empty() || p[0] == ' ' || p[0] == '_' || p[0] == '#' || p[0] > 0xFFFF) return false;
    auto& same = starting[p[0]];
    same.insert(except ? same.begin() : same.end(), (uint32_t)list.size()); // exceptions are tried first
    list.push_back(p), exception.push_back(except);
    return true;
}

static bool is_ascii_word(uint32_t c) { return is_latin(c) || is_digit(c); }
static size_t match(std::u32string_view p, std::u32string_view s, size_t begin) {
    if (begin > 0 && is_ascii_word(p[0]) && is_ascii_word(s[begin - 1])) return 0;
    size_t at = begin;
    auto here = [&](size_t i) -> uint32_t { return i < s.size() ? s[i] : 0; };
    for (char32_t c : p) {
        const size_t before = at;
        if (c == ' ' || c == '_') {
            while (at < s.size() && is_space(s[at])) at++;
            if (c == ' ' && at == before) return 0;
        } else if (c == '#') {
            const std::u32string_view digits = U"0123456789零一二三四五六七八九十百";
            auto is_number = [&](uint32_t x) { return x && digits.find((char32_t)x) != digits.npos; };
            auto joins = [&](uint32_t x) {
                return at > before && (x == '.' || x == '-') && is_digit(here(at + 1));
            };
            while (is_number(here(at)) || joins(here(at))) at++;
            if (at == before) return 0;
        } else if (lower(here(at)) != c) return 0;
        else at++;
    }
    return is_ascii_word(p.back()) && is_ascii_word(here(at)) ? 0 : at - begin;
}

std::string Patterns::find(std::u32string_view s) const {
    for (size_t i = 0, skip; i < s.size(); i += skip) {
        skip = 1;
        const char32_t c = lower(s[i]);
        if (c > 0xFFFF || starting[c].empty()) continue;
        for (uint32_t p : starting[c]) {
            const size_t n = match(list[p], s, i);
            if (!n) continue;
            if (!exception[p]) {
                std::string out;
                for (char32_t found : s.substr(i, n)) utf8_append(out, found);
                return out;
            }
            skip = n;
            break;
        }
    }
    return "";
}

} // namespace book
