#include "book/datagen/score.h"
#include "base/error.h"
#include "model/utf8.h"
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace book {

bool is_blank(std::string_view s) {
    const char* p = s.data();
    const uint32_t c = utf8_read(p);
    return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

std::vector<std::string_view> rouge_words(const std::vector<std::string_view>& pieces, bool blanks) {
    std::vector<std::string_view> words;
    bool begun = false, full = false; // the line has characters; they are not all white space
    size_t empty = 0;                 // empty words, counted once something follows
    auto end_line = [&] {
        empty += begun && !full;
        begun = full = false;
    };
    for (std::string_view piece : pieces) {
        if (piece.data() != pieces[0].data()) begun = true; // the joining space
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

// F1 for two sets of these sizes that share `overlap` elements.
static double f1(size_t overlap, size_t hypothesis, size_t reference) {
    const double p = hypothesis ? (double)overlap / (double)hypothesis : 0;
    const double r = reference ? (double)overlap / (double)reference : 0;
    return 2 * (p * r / (p + r + 1e-8));
}

// The number of common elements of two sorted lists; repeated ones count as often as in the list with fewer.
template <class T> static size_t count_common(const std::vector<T>& a, const std::vector<T>& b) {
    size_t n = 0;
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        if (a[i] < b[j]) i++;
        else if (b[j] < a[i]) j++;
        else n++, i++, j++;
    }
    return n;
}

size_t lcs(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b, size_t distinct) {
    std::vector<uint64_t> mask(distinct, 0); // bit per column, of 64: the columns where a word stands
    std::vector<uint8_t> carry(a.size(), 0); // from the previous 64 columns, row by row
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

// Numbers the words of texts: the same word, the same number.
struct WordNumbers {
    std::unordered_map<std::string_view, uint32_t> number;

    template <class Word> std::vector<uint32_t> operator()(const std::vector<Word>& words) {
        std::vector<uint32_t> ids;
        for (auto& word : words) ids.push_back(number.emplace(word, (uint32_t)number.size()).first->second);
        return ids;
    }
};

std::array<double, 3> rouge(const std::vector<std::string_view>& hypothesis,
                            const std::vector<std::string_view>& reference) {
    if (hypothesis.empty() || reference.empty()) return {};
    WordNumbers numbers;
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
    return {overlap(1), overlap(2), f1(lcs(h, r, numbers.number.size()), h.size(), r.size())};
}

std::vector<std::string> ascii_words(const std::vector<std::string_view>& pieces) {
    std::vector<std::string> words;
    for (std::string_view piece : pieces) {
        bool within = false;
        auto add = [&](char c) {
            if (!within) words.emplace_back();
            words.back() += c, within = true;
        };
        for (const char* p = piece.data(); p < piece.data() + piece.size();) {
            const uint32_t c = lower(utf8_read(p));
            if (is_digit(c) || is_latin(c)) add((char)c);
            else if (c == 0x212A) add('k'); // the Kelvin sign; its lower case is ASCII's k
            else if (c == 0x130) add('i'), within = false; // i and a dot above
            else within = false;
        }
    }
    return words;
}

double rouge_score(const std::vector<std::string>& hypothesis, const std::vector<std::string>& reference) {
    if (hypothesis.empty() || reference.empty()) return 0;
    WordNumbers numbers;
    const std::vector<uint32_t> h = numbers(hypothesis), r = numbers(reference);
    const double common = (double)lcs(h, r, numbers.number.size());
    const double precision = common / (double)h.size(), recall = common / (double)r.size();
    return common > 0 ? 2 * precision * recall / (precision + recall) : 0;
}

double bleu4(const std::vector<uint32_t>& hypothesis, const std::vector<uint32_t>& reference, bool effective) {
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

double rounded_percent(double fraction) {
    return std::strtod(format("%.4f", fraction * 100).c_str(), nullptr);
}

} // namespace book

ScoredText::ScoredText(const Jieba& jieba, std::string_view of) : text(of) {
    std::vector<std::string_view> pieces;
    jieba.cut(pieces, text);
    for (bool blanks : {false, true}) words[blanks] = book::rouge_words(pieces, blanks);
    ascii = book::ascii_words(pieces);
    for (const char* p = text.data(); p < text.data() + text.size();) characters.push_back(utf8_read(p));
}

std::array<Scores, 2> score_pair(const ScoredText& hypothesis, const ScoredText& reference) {
    const double bleu = book::bleu4(hypothesis.characters, reference.characters);
    using book::rounded_percent;
    std::array<Scores, 2> out;
    for (size_t blanks = 0; blanks < 2; blanks++) {
        const auto r = book::rouge(hypothesis.words[blanks], reference.words[blanks]);
        out[blanks] = {rounded_percent(r[0]), rounded_percent(r[1]), rounded_percent(r[2]), rounded_percent(bleu)};
    }
    return out;
}

std::string without_thought(std::string_view text) {
    const char* white = " \t\r\n";
    const size_t open = text.find("<think>"), close = text.find("</think>");
    const bool begins = open != text.npos && open == text.find_first_not_of(white);
    if (!begins && close >= open) return std::string(text); // also if both are missing
    if (close == text.npos) return "";
    text.remove_prefix(close + strlen("</think>"));
    return std::string(text.substr(std::min(text.find_first_not_of(white), text.size())));
}
