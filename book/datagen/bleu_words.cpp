#include "book/datagen/bleu_words.h"
#include "book/datagen/score.h"
#include "book/jieba.h"
#include "model/utf8.h"
#include <cstdint>
#include <cstring>
#include <unordered_map>

namespace book {

bool has_spaces(std::string_view text) {
    size_t with = 0, without = 0;
    bool fenced = false;
    for (const char* p = text.data(); p < text.data() + text.size();) {
        if (text.substr((size_t)(p - text.data()), 3) == "```") fenced = !fenced, p += 3;
        if (p == text.data() + text.size()) break;
        const uint32_t c = utf8_read(p);
        if (fenced) continue;
        auto in = [c](uint32_t first, uint32_t last) { return c >= first && c <= last; };
        if (in(0x0E00, 0x109F) || in(0x1780, 0x17FF) || in(0x3040, 0x30FF) || in(0x3400, 0x4DBF) ||
            in(0x4E00, 0x9FFF) || in(0xF900, 0xFAFF) || in(0x20000, 0x3FFFF))
            without++;
        else
            with += (c | 32) - 'a' < 26 || in(0xC0, 0x1FFF) || in(0xAC00, 0xD7A3);
    }
    return with > 0 && 10 * without < with + without;
}

static void replace_all(std::string& text, std::string_view from, std::string_view to) {
    for (size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size()) text.replace(at, from.size(), to);
}

std::vector<std::string> words_13a(std::string_view text) {
    std::string line(text);
    while (!line.empty()) { // strips white space at the end, character by character
        size_t last = line.size() - 1;
        while (last && (line[last] & 0xC0) == 0x80) last--;
        if (!is_blank(std::string_view(line).substr(last))) break;
        line.resize(last);
    }
    replace_all(line, "<skipped>", "");
    replace_all(line, "-\n", "");
    replace_all(line, "\n", " ");
    replace_all(line, "&quot;", "\"");
    replace_all(line, "&amp;", "&");
    replace_all(line, "&lt;", "<");
    replace_all(line, "&gt;", ">");
    std::string apart = " ";
    for (char c : line) {
        const bool sign = c >= ' ' && c <= '~' && !Jieba::is_alphanumeric((uint8_t)c) && !strchr("',-.", c);
        if (sign) ((apart += ' ') += c) += ' ';
        else apart += c;
    }
    apart += ' ';
    // A match of a pattern of two characters is consumed as a whole; the next match begins after it.
    auto pairs = [](const std::string& from, auto matches, int mark) { // mark: the pair's 0th or 1st character
        std::string to;
        for (size_t i = 0; i < from.size(); i++) {
            if (i + 1 == from.size() || !matches(from[i], from[i + 1])) {
                to += from[i];
                continue;
            }
            if (mark == 0) to += ' ';
            ((to += from[i]) += ' ') += from[i + 1];
            if (mark == 1) to += ' ';
            i++;
        }
        return to;
    };
    auto digit = [](char c) { return Jieba::is_digit((uint8_t)c); };
    auto point = [](char c) { return c == '.' || c == ','; };
    apart = pairs(apart, [&](char a, char b) { return !digit(a) && point(b); }, 1);
    apart = pairs(apart, [&](char a, char b) { return point(a) && !digit(b); }, 0);
    apart = pairs(apart, [&](char a, char b) { return digit(a) && b == '-'; }, 1);

    std::vector<std::string> words(1);
    for (const char* p = apart.data(); p < apart.data() + apart.size();) {
        const char* begin = p;
        utf8_read(p);
        const std::string_view c(begin, (size_t)(p - begin));
        if (!is_blank(c)) words.back() += c;
        else if (!words.back().empty()) words.emplace_back();
    }
    words.pop_back(); // `apart` ends with a blank
    return words;
}

double bleu4_words(std::string_view hypothesis, std::string_view reference) {
    std::unordered_map<std::string, uint32_t> number;
    auto numbers = [&](std::string_view text) {
        std::vector<uint32_t> ids;
        for (const std::string& word : words_13a(text))
            ids.push_back(number.emplace(word, (uint32_t)number.size()).first->second);
        return ids;
    };
    const std::vector<uint32_t> h = numbers(hypothesis), r = numbers(reference);
    return bleu4(h, r, true);
}

} // namespace book
