// score.h: how near a model's answers come to the reference answers, in the numbers LLaMA-Factory reports.
//
//   datagen score answers.jsonl reference.jsonl [--train train.jsonl] [--compat] [--json] [--seed N] [--dict FILE]
//
//   Jieba jieba("data/datagen/jieba.bin");
//   std::vector<std::string_view> words;
//   jieba.cut(words, "我们在学习CUDA编程");                       // 我们 在 学习 CUDA 编程
//   ScoredText answer(jieba, "..."), reference(jieba, "...");
//   double rouge_l = score_pair(answer, reference)[0][ROUGE_L];         // percent; [1]: blank lines count
//
// What LLaMA-Factory reports: ROUGE-1, ROUGE-2 and ROUGE-L of rouge_chinese 1.0.3 over the words of jieba 0.42.1,
// and BLEU-4 of nltk over characters; each row's in percent, rounded to 4 digits; then their mean. Added here:
//   - bleu-4-word, sacrebleu's sentence BLEU over words (tokenizer 13a), of rows in a language that has spaces;
//   - facts, the share of a row's key facts that stand in the answer; choice, whether the letter is the right one;
//   - a think block is stripped first, from both sides;
//   - rouge_chinese takes some blank lines for words (see rouge_words), so that layout is scored. By default
//     they are dropped, with --compat they count; both are shown;
//   - two baselines: the question itself as the answer, and the answer of the training row whose question is nearest
//     by TF-IDF (--train). What is no better than these has learnt little; the difference has its interval;
//   - 95% intervals from a bootstrap over rows, seeded (Wilson's for choice); the three worst rows, to be read.
//
// Limits: little-endian machines; a row costs time proportional to the product of its texts' lengths (a 64th
// of a word's comparison each), memory proportional to their sum. A Jieba is immutable: any number of threads
// may use one.
#pragma once
#include "base/file.h"
#include "book/jieba.h"
#include "base/options.h"
#include "sj.h"
#include "model/tokenizer.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

// ---------------------------------------------------------------------------------------------------- scores

constexpr size_t ROUGE_1 = 0, ROUGE_2 = 1, ROUGE_L = 2, BLEU_CHAR = 3, BLEU_WORD = 4, FACTS = 5, CHOICE = 6;
constexpr size_t METRIC_COUNT = 7;
constexpr const char* METRICS[METRIC_COUNT] = {"rouge-1", "rouge-2", "rouge-l", "bleu-4-char",
                                               "bleu-4-word", "facts", "choice"};
using Scores = std::array<double, 4>;              // the first four, percent
using Measures = std::array<double, METRIC_COUNT>; // all of them; NAN: not of this row

// White space as Python's str.isspace() has it; s is one character of valid UTF-8, or \r\n.
inline bool is_blank(std::string_view s) {
    const char* p = s.data();
    const uint32_t c = utf8_read(p);
    return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

// The words that rouge_chinese counts in a text that jieba cut. It joins them by spaces, cuts that into lines
// (after 。！？?, after six dots in a row, at line feeds) and these at white space; and a line of white space
// alone, if it is not empty and something follows, comes out as an empty word. `blanks` says whether those
// are kept.
inline std::vector<std::string_view> rouge_words(const std::vector<std::string_view>& pieces, bool blanks) {
    std::vector<std::string_view> words;
    bool begun = false, full = false; // the line has characters; they are not all white space
    size_t empty = 0;                 // empty words, if something follows
    auto end_line = [&] {
        empty += begun && !full;
        begun = full = false;
    };
    for (std::string_view piece : pieces) {
        if (piece.data() != pieces[0].data()) begun = true; // the space that joins
        if (is_blank(piece)) {
            if (piece == "\r\n") begun = true;
            if (piece.back() == '\n') end_line();
            else begun = true;
            continue;
        }
        if (blanks) words.insert(words.end(), empty, {});
        empty = 0;
        for (size_t at = 0; at < piece.size();) {
            // Six dots and the character after them are one match, so that seven dots in a row end two words
            // only if six more follow.
            const size_t dots = piece.find("......", at + (at > 0)), n = std::min(dots, piece.size()) - at;
            begun = full = true;
            words.push_back(piece.substr(at, dots == piece.npos ? n : n + 6));
            if (dots != piece.npos) end_line();
            at += words.back().size();
        }
        if (piece == "。" || piece == "！" || piece == "？" || piece == "?") end_line();
    }
    return words;
}

// A text, ready to be compared.
struct ScoredText {
    std::string_view text;
    std::vector<uint32_t> characters;
    std::vector<std::string_view> words[2]; // rouge's, which lie in the text; [1]: with the blank ones

    ScoredText(const Jieba& jieba, std::string_view of) : text(of) { // valid UTF-8
        std::vector<std::string_view> pieces;
        jieba.cut(pieces, text);
        for (bool blanks : {false, true}) words[blanks] = rouge_words(pieces, blanks);
        for (const char* p = text.data(); p < text.data() + text.size();) characters.push_back(utf8_read(p));
    }
};

// F1 of `overlap` things that two sets of these sizes share.
inline double f1(size_t overlap, size_t hypothesis, size_t reference) {
    const double p = hypothesis ? (double)overlap / (double)hypothesis : 0;
    const double r = reference ? (double)overlap / (double)reference : 0;
    return 2 * (p * r / (p + r + 1e-8));
}

// Things that two sorted lists have in common; equal ones count as often as in the list that has fewer.
template <class T> size_t count_common(const std::vector<T>& a, const std::vector<T>& b) {
    size_t n = 0;
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i] < b[j]) i++;
        else if (b[j] < a[i]) j++;
        else n++, i++, j++;
    }
    return n;
}

// Length of the longest common subsequence: the usual table, 64 columns at a time, a column a bit (H. Hyyrö,
// "Bit- parallel LCS-length computation revisited", 2004). A bit is 0 where the table grows by one from the
// column before. a and b hold numbers below `distinct`.
inline size_t lcs(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b, size_t distinct) {
    std::vector<uint64_t> mask(distinct, 0); // in which of the 64 columns a word stands
    std::vector<uint8_t> carry(a.size(), 0); // from the 64 columns before, row by row
    size_t length = 0;
    for (size_t begin = 0; begin < b.size(); begin += 64) {
        const size_t end = std::min(begin + 64, b.size());
        for (size_t j = begin; j < end; j++) mask[b[j]] |= 1ull << (j - begin);
        uint64_t v = ~0ull;
        for (size_t i = 0; i < a.size(); i++) {
            const uint64_t u = v & mask[a[i]], sum = v + u, all = sum + carry[i];
            carry[i] = sum < v || all < sum;
            v = all | (v & ~u);
        }
        for (size_t j = begin; j < end; j++) {
            length += !(v >> (j - begin) & 1);
            mask[b[j]] = 0;
        }
    }
    return length;
}

// The three of ROUGE, as fractions; 0 where a side has no word.
inline std::array<double, 3> rouge(const std::vector<std::string_view>& hypothesis,
                                   const std::vector<std::string_view>& reference) {
    if (hypothesis.empty() || reference.empty()) return {};
    std::unordered_map<std::string_view, uint32_t> number;
    auto numbers = [&](const std::vector<std::string_view>& words) {
        std::vector<uint32_t> ids;
        for (auto word : words) ids.push_back(number.emplace(word, (uint32_t)number.size()).first->second);
        return ids;
    };
    const std::vector<uint32_t> h = numbers(hypothesis), r = numbers(reference);
    auto overlap = [&](size_t n) { // of the sets of words (n = 1) or pairs of neighbours (n = 2)
        auto grams = [&](const std::vector<uint32_t>& ids) {
            std::vector<uint64_t> set;
            for (size_t i = n - 1; i < ids.size(); i++)
                set.push_back((uint64_t)ids[i + 1 - n] << 32 | ids[i]);
            std::sort(set.begin(), set.end());
            set.erase(std::unique(set.begin(), set.end()), set.end());
            return set;
        };
        const std::vector<uint64_t> a = grams(h), b = grams(r);
        return f1(count_common(a, b), a.size(), b.size());
    };
    return {overlap(1), overlap(2), f1(lcs(h, r, number.size()), h.size(), r.size())};
}

// nltk's sentence_bleu with one reference, equal weights and smoothing method 3 (NIST's): the k-th order without
// a match counts as half of a match, to the power of k. An order that the hypothesis is too short for is without a
// match; or, with `effective`, left out: that is sacrebleu's sentence_bleu.
inline double bleu4(const std::vector<uint32_t>& hypothesis, const std::vector<uint32_t>& reference,
                    bool effective = false) {
    using Gram = std::array<uint32_t, 4>; // characters + 1; 0 past the end
    auto sorted = [](const std::vector<uint32_t>& text) {
        std::vector<Gram> all(text.size());
        for (size_t i = 0; i < text.size(); i++)
            for (size_t k = 0; k < 4 && i + k < text.size(); k++) all[i][k] = text[i + k] + 1;
        std::sort(all.begin(), all.end());
        return all;
    };
    auto shortened = [](const std::vector<Gram>& all, size_t n) { // stays sorted
        std::vector<Gram> some;
        for (Gram g : all) {
            if (!g[n - 1]) continue;
            std::fill(g.begin() + (ptrdiff_t)n, g.end(), 0);
            some.push_back(g);
        }
        return some;
    };
    const std::vector<Gram> all_h = sorted(hypothesis), all_r = sorted(reference);
    double log_sum = 0, half = 1;
    const size_t orders = effective ? std::min<size_t>(hypothesis.size(), 4) : 4;
    for (size_t n = 1; n <= orders; n++) {
        const std::vector<Gram> h = shortened(all_h, n);
        const size_t matches = count_common(h, shortened(all_r, n));
        if (n == 1 && matches == 0) return 0;
        const double of = (double)std::max<size_t>(h.size(), 1);
        log_sum += std::log(matches ? (double)matches / of : (half /= 2) / of);
    }
    if (orders == 0) return 0;
    const double ratio = (double)reference.size() / (double)hypothesis.size();
    return (ratio < 1 ? 1 : std::exp(1 - ratio)) * std::exp(log_sum / (double)orders);
}

// Percent, rounded to 4 digits as Python's round() does.
inline double rounded_percent(double fraction) {
    return std::strtod(format("%.4f", fraction * 100).c_str(), nullptr);
}

// With blank words dropped, and with them.
inline std::array<Scores, 2> score_pair(const ScoredText& hypothesis, const ScoredText& reference) {
    const double bleu = bleu4(hypothesis.characters, reference.characters);
    std::array<Scores, 2> out;
    for (size_t blanks = 0; blanks < 2; blanks++) {
        const auto r = rouge(hypothesis.words[blanks], reference.words[blanks]);
        out[blanks] = {rounded_percent(r[0]), rounded_percent(r[1]), rounded_percent(r[2]), rounded_percent(bleu)};
    }
    return out;
}

// An answer without the thought before it. A block that is not closed was cut off: there is no answer. The
// opening marker may be missing, since it may have been part of the prompt.
inline std::string without_thought(std::string_view text) {
    const char* white = " \t\r\n";
    const size_t open = text.find("<think>"), close = text.find("</think>");
    const bool begins = open != text.npos && open == text.find_first_not_of(white);
    if (!begins && close >= open) return std::string(text); // also if both are missing
    if (close == text.npos) return "";
    text.remove_prefix(close + strlen("</think>"));
    return std::string(text.substr(std::min(text.find_first_not_of(white), text.size())));
}

// ----------------------------------------------------------------------------- words of languages with spaces

// Whether the words of a text stand between spaces: fewer than one in ten of its letters is of a script without (Han,
// kana, Thai, Lao, Tibetan, Burmese, Khmer). Fenced code is left out: it is in no language.
inline bool has_spaces(std::string_view text) {
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

inline void replace_all(std::string& text, std::string_view from, std::string_view to) {
    for (size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size()) text.replace(at, from.size(), to);
}

// The words of sacrebleu's tokenizer 13a, which is that of NIST's mteval-v13a: signs stand alone, but for a point or
// comma within a number, an apostrophe, and a hyphen that does not follow a digit. Valid UTF-8.
inline std::vector<std::string> words_13a(std::string_view text) {
    std::string line(text);
    while (!line.empty()) { // white space at the end, character by character
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
    // What a pattern matches of two characters is taken together, and the next match begins after it.
    auto pairs = [](const std::string& from, auto matches, int mark) { // the mark is the pair's 0th or 1st character
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
    words.pop_back(); // apart ends with a blank
    return words;
}

// sacrebleu's sentence BLEU (13a, exponential smoothing, effective order), as a fraction.
inline double bleu4_words(std::string_view hypothesis, std::string_view reference) {
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

// ----------------------------------------------------------------------------------- key facts, and choices

// A text in the form in which facts are looked for: ASCII for full-width signs and for − and –, lower case, no comma
// within a number (1,024), and one blank between words of ASCII, none elsewhere. "[" and "]" stand around it.
inline std::string fact_form(std::string_view text) {
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

// Whether a key fact stands in an answer, both in fact_form. It is one text, or several divided by "|", any of which
// will do. A word of ASCII stands alone; so does a number, with its sign, point and exponent, but a unit may follow: 6
// is in 6KB, not in 6.4, 16, -6, 10^6 or FP6.
inline bool fact_stands(const std::string& answer, std::string_view fact) {
    const std::string any(fact.substr(1, fact.size() - 2));
    auto word = [](char c) { return Jieba::is_alphanumeric((uint8_t)c) || c == '_'; };
    auto digit = [](char c) { return Jieba::is_digit((uint8_t)c); };
    for (size_t from = 0; from <= any.size();) {
        const std::string one = any.substr(from, any.find('|', from) - from);
        from += one.size() + 1;
        if (one.empty()) continue;
        for (size_t at = 1; (at = answer.find(one, at)) != answer.npos && at + one.size() < answer.size(); at++) {
            const char before = answer[at - 1], after = answer[at + one.size()]; // (brackets at the ends)
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

// The letter that an answer to a question of several choices names; 0: none. The rule, in this order:
//   1. the last letter that is announced, by 答案, 选 (not 选项), 正确, "answer", "correct" or "\boxed", with nothing but
//      signs and words like 是, 应该, 选项, "is", "the", "option" between;
//   2. the letter that the answer begins with, if a sign, a line end or the end follows; alone it may be in lower case;
//   3. the only letter of the choices that stands alone anywhere ("A" before a lower-case word is an article).
inline char chosen_letter(std::string_view answer, size_t choices) {
    auto letter = [&](size_t at) { return at < answer.size() && (size_t)(answer[at] - 'A') < choices; };
    auto sign_of_word = [&](size_t at) { // of a Latin word, a number, C++ or C#
        return at < answer.size() && (Jieba::is_alphanumeric((uint8_t)answer[at]) || strchr("_+#", answer[at]));
    };
    auto alone = [&](size_t at) { return !(at && sign_of_word(at - 1)) && !sign_of_word(at + 1); };
    auto article = [&](size_t at) {
        if (answer[at] != 'A' || at + 2 >= answer.size() || answer[at + 1] != ' ') return false;
        const std::string_view next = answer.substr(at + 2);
        return next[0] >= 'a' && next[0] <= 'z' && next.substr(0, 3) != "is " && next.substr(0, 3) != "or " &&
               next.substr(0, 4) != "and ";
    };
    auto begins = [&](size_t at, std::string_view word) { // ASCII: in any case
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
            // "选项 A" may be any of them: an 选项 is announced by 正确 or 答案 only
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

// ------------------------------------------------------------------------------------------------- intervals

struct Interval {
    double mean, low, high;
};

// A mean with its 95% bootstrap interval (B. Efron, 1979; the percentile method): as many values as there are are
// drawn with replacement, a thousand times; the interval leaves out the 25 lowest and highest means. The same seed and
// number of values draw the same rows.
constexpr int RESAMPLES = 1000;
inline Interval bootstrap(const std::vector<double>& values, uint64_t seed) {
    const size_t n = values.size();
    auto random = [&] { // splitmix64; the high half of a product is a number below n
        uint64_t z = seed += 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        return (size_t)((unsigned __int128)(z ^ z >> 31) * n >> 64);
    };
    double sum = 0;
    for (double x : values) sum += x;
    std::vector<double> means(RESAMPLES);
    for (double& mean : means) {
        mean = 0;
        for (size_t i = 0; i < n; i++) mean += values[random()];
        mean /= (double)n;
    }
    std::sort(means.begin(), means.end());
    return {sum / (double)n, means[RESAMPLES / 40], means[RESAMPLES - 1 - RESAMPLES / 40]};
}

// A share of n, in percent, with its 95% interval (E. B. Wilson, 1927). It has a width where all or none are right,
// which a bootstrap has not.
inline Interval wilson(double right, double n) {
    const double z = 1.959963984540054, p = right / n, of = 1 + z * z / n;
    const double middle = (p + z * z / (2 * n)) / of;
    const double half = z / of * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
    return {100 * p, std::max(100 * (middle - half), 0.0), std::min(100 * (middle + half), 100.0)};
}

// ----------------------------------------------------------------------------------------------- the command

// The rows of a JSONL file: where they are, and their ids as JSON ("": none).
struct ScoreFile {
    struct Row {
        std::string_view text;
        size_t line;
        std::string id;
    };
    MappedFile file;
    std::vector<Row> rows;
    bool has_ids = false;

    explicit ScoreFile(const std::string& path) : file(path) {
        const std::string_view text = file.text();
        for (size_t at = 0, line = 1; at < text.size(); line++) {
            const std::string_view s = text.substr(at, text.find('\n', at) - at);
            at += s.size() + 1;
            if (s.find_first_not_of(" \t\r") == s.npos) continue;
            rows.push_back({s, line, ""});
            sj::Doc doc;
            const sj::Value id = parse(doc, rows.back())["id"];
            if (id && !id.is(sj::Null)) rows.back().id = sj::dump(id), has_ids = true;
        }
        if (rows.empty()) DIE("%s: no row in it", path.c_str());
        for (auto& row : rows)
            if (has_ids && row.id.empty()) fail(row, "no id, which other rows have");
    }
    [[noreturn]] void fail(const Row& row, const std::string& fault) const {
        DIE("%s: line %zu: %s", file.path.c_str(), row.line, fault.c_str());
    }
    sj::Value parse(sj::Doc& doc, const Row& row) const {
        const std::string fault = sj::parse(doc, row.text);
        if (!fault.empty()) fail(row, fault.substr(fault.find("byte"))); // it begins with "line 1, "
        if (!doc.root().is(sj::Object)) fail(row, "not an object");
        return doc.root();
    }
};

// What a row of reference.jsonl asks and what it wants to hear: Alpaca's {instruction, input?, output} or
// OpenAI's {messages}, the last of which is the reference. It may have `facts`, a list of texts that a right answer
// holds, or `choices`, a list, and `choice`, the letter of the right one.
struct ScoreReference {
    std::string question, answer;
    std::vector<std::string> facts; // in fact_form
    size_t choices = 0;
    char choice = 0;                // 0: no such question

    ScoreReference(const ScoreFile& file, const ScoreFile::Row& row) {
        sj::Doc doc;
        const sj::Value v = file.parse(doc, row);
        auto text = [&](sj::Value s, const char* name) {
            if (!s.is(sj::String)) file.fail(row, std::string(name) + (s ? ": not a string" : ": missing"));
            return s.str();
        };
        if (v["messages"]) {
            sj::Value last;
            for (sj::Value m : v["messages"].items()) {
                if (m["role"].str() == "user") question = text(m["content"], "messages: content");
                last = m;
            }
            if (last["role"].str() != "assistant")
                file.fail(row, "messages: the last one is not the assistant's");
            answer = text(last["content"], "messages: content");
        } else {
            question = text(v["instruction"], "instruction");
            answer = text(v["output"], "output");
            const std::string input = v["input"].str();
            if (!input.empty()) question += "\n" + input;
        }
        for (const char* name : {"facts", "choices"})
            if (v[name] && !v[name].is(sj::Null) && !v[name].is(sj::Array))
                file.fail(row, std::string(name) + ": not a list");
        for (sj::Value fact : v["facts"].items()) {
            facts.push_back(fact_form(text(fact, "facts")));
            if (facts.back().find_first_not_of("[|]") == std::string::npos) file.fail(row, "facts: an empty one");
        }
        if (!v["choice"] || v["choice"].is(sj::Null)) return;
        choices = v["choices"].size();
        const std::string right = text(v["choice"], "choice");
        if (choices < 2 || choices > 26) file.fail(row, "choices: 2 to 26 are expected");
        if (right.size() != 1 || (size_t)(right[0] - 'A') >= choices)
            file.fail(row, "choice: not the letter of one of the choices");
        choice = right[0];
    }
};

// The answer of the training row whose question is nearest by TF-IDF: scikit-learn's TfidfVectorizer over the words of
// jieba in lower case (smoothed idf, cosine); of equally near ones the first. It is what a search would answer.
class NearestAnswer {
    struct Posting {
        uint32_t row;
        double weight;
    };
    std::vector<std::string> answers;
    std::unordered_map<std::string, std::vector<Posting>> postings;

    static std::unordered_map<std::string, double> counted(const Jieba& jieba, std::string_view question) {
        std::unordered_map<std::string, double> count;
        std::vector<std::string_view> pieces;
        jieba.cut(pieces, question);
        for (std::string_view word : pieces) {
            if (is_blank(word)) continue;
            std::string lower(word);
            for (char& c : lower) c = (char)(c >= 'A' && c <= 'Z' ? c | 32 : c);
            count[lower]++;
        }
        return count;
    }
    double idf(size_t rows_with_it) const {
        return std::log((1 + (double)answers.size()) / (1 + (double)rows_with_it)) + 1;
    }

  public:
    NearestAnswer(const Jieba& jieba, const ScoreFile& train) {
        for (const ScoreFile::Row& row : train.rows) {
            const ScoreReference r(train, row);
            for (auto& [word, count] : counted(jieba, r.question))
                postings[word].push_back({(uint32_t)answers.size(), count});
            answers.push_back(without_thought(r.answer));
        }
        std::vector<double> squares(answers.size(), 0);
        for (auto& [word, list] : postings)
            for (Posting& p : list) p.weight *= idf(list.size()), squares[p.row] += p.weight * p.weight;
        for (auto& [word, list] : postings)
            for (Posting& p : list) p.weight /= std::sqrt(squares[p.row]);
    }
    // Its number and the cosine; 0 where no word is common.
    std::pair<size_t, double> find(const Jieba& jieba, std::string_view question) const {
        std::vector<double> cosine(answers.size(), 0);
        double squares = 0;
        for (auto& [word, count] : counted(jieba, question)) {
            const auto found = postings.find(word);
            if (found == postings.end()) continue;
            const double weight = count * idf(found->second.size());
            squares += weight * weight;
            for (const Posting& p : found->second) cosine[p.row] += weight * p.weight;
        }
        size_t best = 0; // sums of equal terms differ in their last bits with the order of the words
        for (size_t i = 1; i < cosine.size(); i++)
            if (cosine[i] > cosine[best] + 1e-9 * cosine[best]) best = i;
        return {best, squares > 0 ? cosine[best] / std::sqrt(squares) : 0};
    }
    std::string answer(const Jieba& jieba, std::string_view question) const {
        const auto [row, cosine] = find(jieba, question);
        return cosine > 0 ? answers[row] : "";
    }
};

// A row of answers.jsonl: what `qwen3 --eval` writes, or anything with the answer as `answer`, `predict` (as
// in LLaMA-Factory's generated_predictions.jsonl) or `output`. A row that --eval had to skip has none: it is
// wrong.
inline std::string score_answer(const ScoreFile& file, const ScoreFile::Row& row,
                                const std::string& reference) {
    sj::Doc doc;
    const sj::Value v = file.parse(doc, row);
    if (v["reference"].is(sj::String) && v["reference"].str() != reference)
        file.fail(row, "it answers another question: its reference is not the reference file's");
    for (const char* key : {"answer", "predict", "output"})
        if (v[key].is(sj::String)) return v[key].str();
    if (!v["error"]) file.fail(row, "no answer, predict or output");
    return "";
}

// For each row of `answers` the row of `references` that belongs to it: by id if both files have ids, else by
// order.
inline std::vector<size_t> match_rows(const ScoreFile& answers, const ScoreFile& references, bool by_id) {
    if (answers.rows.size() != references.rows.size())
        DIE("%s: %zu rows, but %s has %zu", answers.file.path.c_str(), answers.rows.size(),
            references.file.path.c_str(), references.rows.size());
    std::unordered_map<std::string_view, size_t> row_of;
    std::vector<size_t> match;
    for (size_t i = 0; i < references.rows.size() && by_id; i++)
        if (!row_of.emplace(references.rows[i].id, i).second)
            references.fail(references.rows[i], "id " + references.rows[i].id + " was there before");
    for (size_t i = 0; i < answers.rows.size(); i++) {
        const auto found = row_of.find(answers.rows[i].id);
        if (by_id && found == row_of.end()) // not there, or taken by an answer before this one
            answers.fail(answers.rows[i], "id " + answers.rows[i].id + " was there before, or is no row of " +
                                              references.file.path);
        match.push_back(by_id ? found->second : i);
        if (by_id) row_of.erase(found);
    }
    return match;
}

// A text in one line of at most `most` characters, and nothing in it that a terminal would obey.
inline std::string score_excerpt(std::string_view text, int most) {
    std::string out;
    for (const char *p = text.data(), *end = p + text.size(); p < end;) {
        if (most-- == 0) return out + "…";
        const uint32_t c = utf8_read(p);
        if (c < 0x20 || (c >= 0x7F && c < 0xA0)) out += ' ';
        else utf8_append(out, c);
    }
    return out;
}

// What is put beside the references, and one number of each kind for each row.
constexpr size_t ANSWER = 0, OTHER_BLANKS = 1, ECHO = 2, NEAREST = 3, GAIN = 4, CANDIDATES = 5;
using ScoreRow = std::array<Measures, CANDIDATES>;

// A row with a choice is scored by its letter alone.
inline Measures measure_text(const ScoreReference& row, const ScoredText& a, const ScoredText& reference, bool blanks) {
    Measures m;
    m.fill(NAN);
    if (row.choice) {
        m[CHOICE] = chosen_letter(a.text, row.choices) == row.choice ? 100 : 0;
        return m;
    }
    const Scores four = score_pair(a, reference)[blanks];
    std::copy(four.begin(), four.end(), m.begin());
    if (has_spaces(reference.text)) m[BLEU_WORD] = rounded_percent(bleu4_words(a.text, reference.text));
    if (!row.facts.empty()) {
        const std::string form = fact_form(a.text);
        double found = 0;
        for (const std::string& fact : row.facts) found += fact_stands(form, fact);
        m[FACTS] = rounded_percent(found / (double)row.facts.size());
    }
    return m;
}

inline ScoreRow score_row(const Jieba& jieba, const ScoreReference& row, const ScoredText& answer,
                          const NearestAnswer* nearest, bool compat) {
    const std::string wanted = without_thought(row.answer), found = nearest ? nearest->answer(jieba, row.question) : "";
    const ScoredText reference(jieba, wanted);
    auto measures = [&](const ScoredText& text, bool blanks) { return measure_text(row, text, reference, blanks); };
    ScoreRow all;
    all[ANSWER] = measures(answer, compat);
    all[OTHER_BLANKS] = measures(answer, !compat);
    all[ECHO] = measures(ScoredText(jieba, row.question), compat);
    all[NEAREST].fill(NAN);
    if (nearest) all[NEAREST] = measures(ScoredText(jieba, found), compat);
    for (size_t m = 0; m < METRIC_COUNT; m++) all[GAIN][m] = all[ANSWER][m] - all[NEAREST][m];
    return all;
}

// A column of a table, without the rows that have no such number; n: how many have.
struct ScoreColumn {
    size_t n = 0;
    Interval interval{};

    ScoreColumn(const std::vector<ScoreRow>& table, size_t candidate, size_t metric, uint64_t seed) {
        std::vector<double> values;
        double sum = 0;
        for (auto& row : table)
            if (!std::isnan(row[candidate][metric])) values.push_back(row[candidate][metric]), sum += values.back();
        n = values.size();
        if (n == 0) return;
        const bool share = metric == CHOICE && candidate != GAIN;
        interval = share ? wilson(sum / 100, (double)n) : bootstrap(values, seed);
    }
};

// The table, once for people and once for programs. `keys` are the candidates' names in JSON.
inline std::string score_table(const std::vector<ScoreRow>& table, bool compat, bool trained, uint64_t seed,
                               sj::Writer& w) {
    const char* keys[CANDIDATES] = {"answers", compat ? "blank_lines_dropped" : "blank_lines_counted", "question",
                                    "nearest", "answers_less_nearest"};
    const char* titles[CANDIDATES] = {"answers", "", "the question as answer", "nearest training answer",
                                      "answers less nearest"};
    std::string text = format("%-12s%6s", "", "rows");
    auto candidates = trained ? std::vector<size_t>{ANSWER, ECHO, NEAREST, GAIN} : std::vector<size_t>{ANSWER, ECHO};
    for (size_t c : candidates) text += format("  %-26s", titles[c]);
    text.erase(text.find_last_not_of(' ') + 1) += "\n";
    auto cell = [](const Interval& x) { return format("  %8.4f [%6.2f, %6.2f]", x.mean, x.low, x.high); };
    std::string lines, other = compat ? "blank lines dropped:\n" : "blank lines counted:\n";
    for (size_t m = 0; m < METRIC_COUNT; m++) {
        const ScoreColumn answers(table, ANSWER, m, seed);
        if (answers.n == 0) continue;
        lines += format("%-12s%6zu", METRICS[m], answers.n);
        for (size_t c : candidates) lines += cell(ScoreColumn(table, c, m, seed).interval);
        lines += "\n";
        if (m > ROUGE_L) continue;
        other += format("  %-10s%6zu", METRICS[m], answers.n);
        other += cell(ScoreColumn(table, OTHER_BLANKS, m, seed).interval) + "\n";
    }
    for (size_t c = 0; c < CANDIDATES; c++) {
        if ((c == NEAREST || c == GAIN) && !trained) continue;
        w.key(keys[c]).object();
        for (size_t m = 0; m < METRIC_COUNT; m++) {
            const ScoreColumn column(table, c, m, seed);
            const Interval& x = column.interval;
            if (column.n == 0) continue;
            w.key(METRICS[m]).object().field("rows", column.n);
            w.field("mean", x.mean).field("low", x.low).field("high", x.high).end();
        }
        w.end();
    }
    return text + lines + (lines.find("rouge") == 0 ? other : "");
}

// The three worst rows, to be read.
inline std::vector<size_t> worst_rows(const std::vector<ScoreRow>& table) {
    std::vector<size_t> worst(table.size()); // by ROUGE-L or the choice, then by BLEU-4
    for (size_t i = 0; i < worst.size(); i++) worst[i] = i;
    std::stable_sort(worst.begin(), worst.end(), [&](size_t a, size_t b) {
        auto key = [&](size_t i) {
            const Measures& m = table[i][ANSWER];
            return std::isnan(m[CHOICE]) ? std::pair(m[ROUGE_L], m[BLEU_CHAR]) : std::pair(m[CHOICE], 0.);
        };
        return key(a) < key(b);
    });
    worst.resize(std::min<size_t>(worst.size(), 3));
    return worst;
}

inline std::string score_usage() {
    return "usage: datagen score ANSWERS.jsonl REFERENCE.jsonl [options]\n\n"
           "rouge-1, 2, l   rouge_chinese's F1 over jieba's words\n"
           "bleu-4-char     nltk's sentence BLEU over characters\n"
           "bleu-4-word     sacrebleu's sentence BLEU over words (13a), of rows in a language with spaces\n"
           "facts           the share of a row's `facts` that stand in the answer\n"
           "choice          rows with `choices` and `choice`: the right letter; such a row has no other number\n"
           "All in percent, means over rows, with 95% intervals.\n\n";
}

// `score`; argv[0] is its name. Throws Error.
inline int score_main(int argc, char** argv) {
    const std::string usage = score_usage();
    std::string dict, train_path;
    bool compat = false, json = false, help = false;
    uint64_t seed = 0;
    const std::vector<Option> options = {
        {"", "--train", "FILE", "training rows, for the nearest training answer", file_name(train_path)},
        {"", "--compat", "", "blank lines count, as the original tools have it", flag(compat)},
        {"", "--json", "", "one JSON object", flag(json)},
        {"", "--seed", "N", "of the resamples that the intervals come from: 0", whole(seed, 0, INT64_MAX)},
        {"", "--dict", "FILE", "default: data/datagen/jieba.bin beside the program or in this folder", file_name(dict)},
        {"-h", "--help", "", "this text", flag(help)}};
    const std::vector<std::string> files = parse(options, argc, argv);
    if (help) return print_help(usage.c_str(), options), 0;
    if (files.size() != 2) DIE("%s", usage.substr(0, usage.find('\n')).c_str());
    const Jieba jieba(dict.empty() ? find_jieba(" (--dict FILE names it)") : dict);
    const ScoreFile answers(files[0]), references(files[1]);
    const bool by_id = answers.has_ids && references.has_ids;
    const std::vector<size_t> match = match_rows(answers, references, by_id);
    std::unique_ptr<NearestAnswer> nearest;
    if (!train_path.empty()) nearest = std::make_unique<NearestAnswer>(jieba, ScoreFile(train_path));

    std::vector<ScoreRow> table;
    size_t empty = 0, asked = 0, unanswered = 0;
    double chance = 0;
    for (size_t i = 0; i < match.size(); i++) {
        const ScoreReference row(references, references.rows[match[i]]);
        const std::string answer = without_thought(score_answer(answers, answers.rows[i], row.answer));
        const ScoredText text(jieba, answer);
        empty += text.words[0].empty();
        if (row.choice)
            asked++, chance += 100. / (double)row.choices, unanswered += !chosen_letter(answer, row.choices);
        table.push_back(score_row(jieba, row, text, nearest.get(), compat));
    }

    const char* matched = by_id ? "id" : "order";
    std::string text = format("%zu rows matched by %s; %zu empty answers, which score 0; ", table.size(),
                              matched, empty);
    text += format("95%% intervals of %d resamples, seed %llu\n", RESAMPLES, (unsigned long long)seed);
    sj::Writer w;
    w.object().field("rows", table.size()).field("matched_by", matched).field("empty", empty);
    w.field("compat", compat).field("seed", seed).field("resamples", RESAMPLES);
    if (asked) {
        chance /= (double)asked;
        text += format("%zu choices: %zu answers name no letter, which is wrong; chance is %.2f%%\n", asked, unanswered,
                       chance);
        w.key("choices").object().field("rows", asked).field("no_letter", unanswered).field("chance", chance).end();
    }
    text += "\n" + score_table(table, compat, nearest != nullptr, seed, w);

    text += format("\nThe worst by %s:\n", asked == table.size() ? "choice" : "rouge-l");
    w.key("worst").array();
    for (size_t i : worst_rows(table)) {
        const ScoreFile::Row& a = answers.rows[i];
        const ScoreReference row(references, references.rows[match[i]]);
        const std::string answer = without_thought(score_answer(answers, a, row.answer));
        const Measures& m = table[i][ANSWER];
        text += format("%8.4f  line %zu%s%s\n", row.choice ? m[CHOICE] : m[ROUGE_L], a.line, by_id ? ", id " : "",
                       by_id ? score_excerpt(a.id, 60).c_str() : "");
        text += "          question   " + score_excerpt(row.question, 160) + "\n";
        text += "          reference  " + score_excerpt(row.answer, 160) + "\n";
        text += "          answer     " + score_excerpt(answer, 160) + "\n";
        w.object().field("line", a.line);
        if (by_id) w.key("id").text += a.id, w.comma = true;
        for (size_t k = 0; k < METRIC_COUNT; k++)
            if (!std::isnan(m[k])) w.field(METRICS[k], m[k]);
        w.field("question", row.question).field("reference", row.answer).field("answer", answer).end();
    }
    w.end().end();
    if (json) text = w.text + "\n";
    if (fwrite(text.data(), 1, text.size(), stdout) != text.size() || fflush(stdout) != 0)
        DIE("standard output: %s", strerror(errno));
    return 0;
}
