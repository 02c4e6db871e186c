#include "book/datagen/facts_and_choices.h"
#include "book/jieba.h"
#include "model/utf8.h"
#include <cstring>
#include <initializer_list>

std::string book::fact_form(std::string_view text) {
    std::string ascii;
    for (const char* p = text.data(); p < text.data() + text.size();) {
        uint32_t c = utf8_read(p);
        if (c >= 0xFF01 && c <= 0xFF5E) c -= 0xFEE0;
        if (c == 0x2212 || c == 0x2013) c = '-';
        if (c == 0xA0 || c == 0x3000 || (c >= 0x2000 && c <= 0x200A) || c == 0x202F || c < ' ') c = ' ';
        utf8_append(ascii, c - 'A' < 26 ? c | 32 : c);
    }
    auto word = [](char c) { return Jieba::is_alphanumeric((uint8_t)c) || c == '_'; };
    auto digit = [](char c) { return Jieba::is_digit((uint8_t)c); };
    std::string out = "[";
    for (size_t i = 0; i < ascii.size(); i++) {
        const char c = ascii[i];
        if (c == ' ') {
            size_t next = i;
            while (next < ascii.size() && ascii[next] == ' ') next++;
            if (word(out.back()) && next < ascii.size() && word(ascii[next])) out += ' ';
            i = next - 1;
        } else {
            size_t digits = 0;
            while (i + 1 + digits < ascii.size() && digit(ascii[i + 1 + digits])) digits++;
            if (c != ',' || !digit(out.back()) || digits != 3) out += c;
        }
    }
    return out + "]";
}

bool book::fact_stands(const std::string& answer, std::string_view fact) {
    const std::string any(fact.substr(1, fact.size() - 2));
    auto word = [](char c) { return Jieba::is_alphanumeric((uint8_t)c) || c == '_'; };
    auto digit = [](char c) { return Jieba::is_digit((uint8_t)c); };
    for (size_t from = 0; from <= any.size();) {
        const std::string one = any.substr(from, any.find('|', from) - from);
        from += one.size() + 1;
        if (one.empty()) continue;
        for (size_t at = 1; (at = answer.find(one, at)) != answer.npos && at + one.size() < answer.size(); at++) {
            const char before = answer[at - 1], after = answer[at + one.size()]; // (brackets enclose it)
            const bool unit = digit(one.back()) && !digit(after) && after != '_'; // 227KB
            bool alone = !(word(one[0]) && word(before)) && (unit || !(word(one.back()) && word(after)));
            if (digit(one[0]) && (before == '^' || (before == '.' && digit(answer[at - 2])) ||
                                  (before == '-' && !word(answer[at - 2]) && !(answer[at - 2] & 0x80))))
                alone = false;
            const char next = after == ']' ? after : answer[at + one.size() + 1];
            if (digit(one.back()) && digit(next) && (after == '.' || after == 'e')) alone = false;
            if (alone) return true;
        }
    }
    return false;
}

char chosen_letter(std::string_view answer, size_t choices) {
    auto letter = [&](size_t at) { return at < answer.size() && (size_t)(answer[at] - 'A') < choices; };
    auto sign_of_word = [&](size_t at) { // part of a Latin word, a number, C++ or C#
        return at < answer.size() && (Jieba::is_alphanumeric((uint8_t)answer[at]) || strchr("_+#", answer[at]));
    };
    auto alone = [&](size_t at) { return !(at && sign_of_word(at - 1)) && !sign_of_word(at + 1); };
    auto article = [&](size_t at) {
        if (answer[at] != 'A' || at + 2 >= answer.size() || answer[at + 1] != ' ') return false;
        const std::string_view next = answer.substr(at + 2);
        return next[0] >= 'a' && next[0] <= 'z' && next.substr(0, 3) != "is " && next.substr(0, 3) != "or " &&
               next.substr(0, 4) != "and ";
    };
    auto begins = [&](size_t at, std::string_view word) { // ASCII: case-insensitive
        for (size_t i = 0; i < word.size(); i++) {
            const char c = at + i < answer.size() ? answer[at + i] : '\0';
            if (word[i] != c && !(c >= 'A' && c <= 'Z' && (c | 32) == word[i])) return false;
        }
        return true;
    };
    auto skip = [&](size_t at, std::initializer_list<const char*> words) { // any number of them
        for (bool more = true; more;) {
            more = false;
            for (const std::string_view word : words)
                if (begins(at, word)) at += word.size(), more = true;
        }
        return at;
    };
    const auto between = {" ", "\n", "*", "`", "\"", "(", "[", "{", ":", "$", "\\text", "（", "【", "：", "“", "的",
                          "是", "为", "应该", "应", "该", "选项", "选择", "选", "答案", "is", "the ", "option ", "choice ",
                          "answer ", "would be ", "letter "};
    char announced = 0;
    for (size_t i = 0; i < answer.size(); i++)
        for (const std::string_view cue : {"答案", "选", "正确", "answer", "correct", "\\boxed"}) {
            if (!begins(i, cue) || (i && sign_of_word(i - 1) && (uint8_t)cue[0] < 0x80)) continue;   // incorrect
            if (i >= 3 && answer.substr(i - 3, 3) == "不") continue;                                  // 不正确
            const size_t at = skip(i + cue.size(), between);
            // "选项 A" may name any of them: only 正确 or 答案 announces an 选项
            if (letter(at) && alone(at) && !article(at) && !(cue == "选" && begins(i, "选项"))) announced = answer[at];
        }
    if (announced) return announced;

    const size_t first = skip(0, {" ", "\n", "*", "`", "(", "[", "（", "【", "“", "\""});
    const size_t end = skip(first + 1, {" ", "\n", "*", "`", ")", "]", "）", "】", ".", "。", "”", "\""});
    if (end >= answer.size() && first < answer.size() && (size_t)((answer[first] & ~32) - 'A') < choices)
        return (char)(answer[first] & ~32);
    const auto signs = {"\n", "*", "`", ")", "]", "）", "】", ".", "。", ",", "，", ":", "：", ";", "；", "、"};
    if (letter(first) && skip(first + 1, signs) > first + 1) return answer[first];

    char only = 0;
    for (size_t i = 0; i < answer.size(); i++) {
        if (!letter(i) || !alone(i) || article(i)) continue;
        if (only && only != answer[i]) return 0;
        only = answer[i];
    }
    return only;
}
