// score.h: how near a model's answers come to the reference answers, in the numbers LLaMA-Factory reports.
//
//   datagen score answers.jsonl reference.jsonl [--compat] [--json] [--seed N] [--dict FILE]
//
//   Jieba jieba("data/datagen/jieba.bin");
//   std::vector<std::string_view> words;
//   jieba.cut(words, "我们在学习CUDA编程");                       // 我们 在 学习 CUDA 编程
//   ScoredText answer(jieba, "..."), reference(jieba, "...");
//   double rouge_l = score_pair(answer, reference)[0][ROUGE_L];         // percent; [1]: blank lines count
//
// The numbers: ROUGE-1, ROUGE-2 and ROUGE-L of rouge_chinese 1.0.3 over the words of jieba 0.42.1, BLEU-4 of
// nltk over characters; each row's in percent, rounded to 4 digits; then their mean. What is added here:
//   - a think block is stripped first, from both sides;
//   - rouge_chinese takes some blank lines for words (see rouge_words), so that layout is scored. By default
//     they are dropped, with --compat they count; both are shown;
//   - the question itself is scored as if it were the answer: what is no better than that has learnt little;
//   - 95% intervals from a bootstrap over rows, seeded; and the three worst rows, to be read.
//
// jieba.bin (made by data/datagen/jieba_bin.py from the package's own files; little-endian). Inside it a character is
// its label: ASCII its own code, U+4E00..U+9FD5 the numbers from 128 on. The dictionary is a trie, stored
// level by level, siblings side by side and sorted; the children of the first inner node come first, then the
// second's, ...
//   char magic[8]            "qwen3jba"
//   u32  version             1
//   u32  N, depth, F, E, D   nodes, letters of the longest word, frequencies, characters, probabilities
//   u64  total               sum of all frequencies
//   f64  start[4]            log probability of the first state; states are B, E, M, S
//   f64  trans[4][4]         ... of the second state after the first
//   f64  probability[D]      log probabilities of a character in a state
//   u32  frequency[F]        frequency[0] is 0
//   u32  node[N]             label | last of its siblings << 15 | index of the frequency << 16 | inner << 31
//   u16  emission[E][5]      label, and for each state the index of the probability; 65535: never
//
// Limits: little-endian machines; a row costs time proportional to the product of its texts' lengths (a 64th
// of a word's comparison each), memory proportional to their sum. A Jieba is immutable: any number of threads
// may use one.
#pragma once
#include "file.h"
#include "options.h"
#include "sj.h"
#include "tokenizer.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <vector>

// ---------------------------------------------------------------------------------------------- segmentation

struct Jieba {
    enum State { B, E, M, S }; // a character begins, ends, is in the middle of a word, or is one by itself
    static constexpr uint32_t FIRST_HAN = 0x4E00, LAST_HAN = 0x9FD5; // all of Chinese to jieba
    static constexpr uint32_t HAN = 128, LABELS = HAN + LAST_HAN - FIRST_HAN + 1;
    static constexpr uint32_t MOST_DEPTH = 64;     // bounds the steps for each character; jieba's own is 16
    static constexpr double NEVER = -3.14e100;     // jieba's logarithm of 0: finite, but it absorbs any other

    explicit Jieba(const std::string& path); // throws Error

    // Appends the words of a text, from left to right and without a gap: joined they are the text. A byte
    // that is no UTF-8 is a word by itself.
    void cut(std::vector<std::string_view>& out, std::string_view text) const;

    // The label of the character that s begins with, if it is one of [\u4E00-\u9FD5a-zA-Z0-9+#&._%-]; else 0.
    static uint32_t label(std::string_view s) {
        if (s.empty()) return 0;
        const uint8_t c = (uint8_t)s[0];
        if (c < 0x80) return is_alphanumeric(c) || (c && strchr("+#&._%-", c)) ? c : 0u;
        if (c < 0xE4 || c > 0xE9 || utf8_length(s.data(), s.size()) != 3) return 0;
        const char* p = s.data();
        const uint32_t code = utf8_read(p);
        return code >= FIRST_HAN && code <= LAST_HAN ? code - FIRST_HAN + HAN : 0;
    }
    static bool is_digit(uint32_t c) { return c - '0' < 10; }
    static bool is_alphanumeric(uint32_t c) { return is_digit(c) || (c | 32) - 'a' < 26; }

  private:
    struct Header {
        char magic[8];
        uint32_t version, nodes, depth, frequencies, emissions, probabilities;
        uint64_t total;
    };
    struct Cutter;

    MappedFile file;
    const uint32_t* nodes;              // node n is nodes[n - 1]; node 0 is the root
    std::vector<uint32_t> first;        // node n's children are first[n] up to first[n + 1]
    std::vector<uint32_t> root;         // the root's child by label; 0: none
    std::vector<double> log_frequency;  // log(frequency / total) by index; [0]: of a frequency of 1
    std::array<double, 4> start;
    std::array<std::array<double, 4>, 4> trans;
    std::vector<std::array<double, 4>> emit; // by label - HAN

    uint32_t frequency(uint32_t n) const { return nodes[n - 1] >> 16 & 0x7FFF; }
    uint32_t child(uint32_t n, uint32_t label) const { // 0: none
        if (n == 0) return root[label];
        uint32_t low = first[n], high = first[n + 1];
        while (low < high) {
            const uint32_t middle = (low + high) / 2, l = nodes[middle - 1] & 0x7FFF;
            if (l == label) return middle;
            if (l < label) low = middle + 1;
            else high = middle;
        }
        return 0;
    }
};

inline Jieba::Jieba(const std::string& path) : file(path), first(), root(LABELS) {
    auto need = [&](bool good, const char* fault) { if (!good) DIE("%s: %s", path.c_str(), fault); };
    Header h;
    need(file.size >= sizeof h && memcmp(file.data, "qwen3jba", 8) == 0, "not a jieba.bin");
    memcpy(&h, file.data, sizeof h);
    need(h.version == 1, "a jieba.bin of another version");
    const uint64_t size = sizeof h + 8 * (20 + (uint64_t)h.probabilities) +
                          4 * ((uint64_t)h.frequencies + h.nodes) + 10 * (uint64_t)h.emissions;
    need(file.size == size, "its size is not what its header says");
    need(h.nodes < 1u << 31 && h.frequencies <= 1 << 15, "it has more nodes or frequencies than can be numbered");
    const double* reals = (const double*)(file.data + sizeof h); // the header is 40 bytes: all is aligned
    const double* probability = reals + 20;
    const uint32_t* frequencies = (const uint32_t*)(probability + h.probabilities);
    nodes = frequencies + h.frequencies;
    const uint16_t* emission = (const uint16_t*)(nodes + h.nodes);

    need(h.total > 0 && h.frequencies > 0 && frequencies[0] == 0, "it has no frequencies");
    log_frequency.push_back(0 - std::log((double)h.total));
    for (uint32_t i = 1; i < h.frequencies; i++) {
        need(frequencies[i] > 0 && frequencies[i] <= h.total, "a frequency is out of range");
        log_frequency.push_back(std::log((double)frequencies[i]) - std::log((double)h.total));
    }

    // Every node must be the child of one node before it: so the trie is one, and its depth is what it says.
    first.reserve((size_t)h.nodes + 2);
    uint32_t next = 1, level_end = 1, depth = 0; // the next node that has no parent yet; where n's level ends
    for (uint32_t n = 0; n <= h.nodes; n++) {
        need(n == 0 || n < next, "a node of its trie has no parent");
        if (n == level_end) level_end = next, depth++;
        first.push_back(next);
        if (n && !(nodes[n - 1] >> 31)) continue;
        for (uint32_t previous = 0, last = 0; !last; next++) {
            need(next <= h.nodes, "its trie ends too early");
            const uint32_t node = nodes[next - 1], label = node & 0x7FFF;
            need(label > previous && label < LABELS, "a label of its trie is out of order");
            need(frequency(next) < h.frequencies, "a frequency is out of range");
            if (n == 0) root[label] = next;
            previous = label, last = node >> 15 & 1;
        }
    }
    first.push_back(next);
    need(depth == h.depth && depth <= MOST_DEPTH, "its trie is deeper than it may be");

    for (const double* p = reals; p < (const double*)frequencies; p++)
        need(std::isfinite(*p), "a probability is no number");
    memcpy(&start, reals, sizeof start);
    memcpy(&trans, reals + 4, sizeof trans);
    emit.assign(LABELS - HAN, {NEVER, NEVER, NEVER, NEVER});
    for (uint32_t i = 0, previous = HAN - 1; i < h.emissions; i++, emission += 5) {
        need(emission[0] > previous && emission[0] < LABELS, "a character is out of order");
        previous = emission[0];
        for (int state = 0; state < 4; state++) {
            const uint16_t index = emission[1 + state];
            need(index < h.probabilities || index == 0xFFFF, "a probability is out of range");
            if (index != 0xFFFF) emit[previous - HAN][(size_t)state] = probability[index];
        }
    }
}

// Cuts one block, a run of characters that have labels, and keeps its memory for the next.
struct Jieba::Cutter {
    const Jieba& jieba;
    std::vector<std::string_view>& out;
    const char* at = nullptr;       // the text that is not cut yet
    std::vector<uint16_t> block;    // labels
    size_t done = 0;                // ... that are cut
    std::vector<double> best;       // log probability of the likeliest way from here to the end
    std::vector<uint8_t> length;    // characters of the first word on that way
    std::vector<uint8_t> states;

    // Appends the next n characters as a word.
    void word(size_t n) {
        size_t bytes = 0;
        for (const size_t end = done + n; done < end; done++) bytes += block[done] < HAN ? 1 : 3;
        out.emplace_back(at, bytes);
        at += bytes;
    }

    // The likeliest sequence of words, found from the end: a word's probability is its share of all text,
    // that of a character where no word begins 1 / total. Of equal ones the longer first word is taken.
    // Neighbouring words of one character may be a word that the dictionary lacks: the HMM decides.
    void cut() {
        const size_t n = block.size();
        best.assign(n + 1, 0);
        length.assign(n, 0);
        for (size_t i = n; i-- > 0;) {
            double most = -std::numeric_limits<double>::infinity();
            uint32_t node = 0;
            for (size_t end = i; end < n && (node = jieba.child(node, block[end])); end++) {
                if (!jieba.frequency(node)) continue;
                const double p = jieba.log_frequency[jieba.frequency(node)] + best[end + 1];
                if (p >= most) most = p, length[i] = (uint8_t)(end + 1 - i);
            }
            if (!length[i]) most = jieba.log_frequency[0] + best[i + 1], length[i] = 1;
            best[i] = most;
        }
        done = 0;
        while (done < n) {
            size_t singles = 0;
            while (done + singles < n && length[done + singles] == 1) singles++;
            if (singles) cut_singles(singles);
            else word(length[done]);
        }
    }

    void cut_singles(size_t n) {
        const size_t end = done + n;
        uint32_t node = 0;
        for (size_t i = done; i < end && (i == done || node); i++) node = jieba.child(node, block[i]);
        if (n == 1 || (node && jieba.frequency(node))) { // a word that the way above did not take
            while (done < end) word(1);
            return;
        }
        auto run = [&](size_t i, auto is) {
            while (i < end && is(block[i])) i++;
            return i;
        };
        while (done < end) {
            size_t i = done;
            if (block[i] >= HAN) {
                cut_han(run(i, [](uint32_t c) { return c >= HAN; }) - done);
            } else if (is_alphanumeric(block[i])) { // [a-zA-Z0-9]+(\.[0-9]+)?%?
                i = run(i, is_alphanumeric);
                if (i + 1 < end && block[i] == '.' && is_digit(block[i + 1])) i = run(i + 1, is_digit);
                if (i < end && block[i] == '%') i++;
                word(i - done);
            } else {
                word(run(i, [](uint32_t c) { return c < HAN && !is_alphanumeric(c); }) - done);
            }
        }
    }

    // Viterbi: the likeliest states of n Chinese characters. Only two states can come before each; of equally
    // likely ones the later letter is taken, as everywhere. (That matters: NEVER plus anything is NEVER.)
    void cut_han(size_t n) {
        static constexpr State before[4][2] = {{E, S}, {B, M}, {B, M}, {E, S}};
        auto emit = [&](size_t t) { return jieba.emit[block[done + t] - HAN]; };
        states.assign(n, 0); // first: bit s says that before[s][1] comes before state s
        std::array<double, 4> v, e = emit(0);
        for (size_t s = 0; s < 4; s++) v[s] = jieba.start[s] + e[s];
        for (size_t t = 1; t < n; t++) {
            const std::array<double, 4> old = v;
            e = emit(t);
            for (size_t s = 0; s < 4; s++) {
                const double p0 = old[before[s][0]] + jieba.trans[before[s][0]][s] + e[s];
                const double p1 = old[before[s][1]] + jieba.trans[before[s][1]][s] + e[s];
                v[s] = p1 >= p0 ? p1 : p0;
                states[t] |= (uint8_t)((p1 >= p0) << s);
            }
        }
        State state = v[S] >= v[E] ? S : E;
        for (size_t t = n; t-- > 0;) { // then: the state
            const State previous = before[state][states[t] >> state & 1];
            states[t] = state;
            state = previous;
        }
        for (size_t t = 0, begin = 0; t < n; t++)
            if (states[t] == E || states[t] == S) word(t + 1 - begin), begin = t + 1;
    }
};

inline void Jieba::cut(std::vector<std::string_view>& out, std::string_view text) const {
    Cutter cutter{*this, out, nullptr, {}, 0, {}, {}, {}};
    while (!text.empty()) {
        cutter.at = text.data();
        cutter.block.clear();
        while (const uint32_t l = label(text)) {
            cutter.block.push_back((uint16_t)l);
            text.remove_prefix(l < HAN ? 1 : 3);
        }
        if (!cutter.block.empty()) {
            cutter.cut();
        } else { // what can be in no word stands alone, but for \r\n
            const int length = utf8_length(text.data(), text.size());
            const size_t n = text.substr(0, 2) == "\r\n" ? 2 : length > 0 ? (size_t)length : 1;
            out.push_back(text.substr(0, n));
            text.remove_prefix(n);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- scores

constexpr int ROUGE_1 = 0, ROUGE_2 = 1, ROUGE_L = 2, BLEU_4 = 3;
constexpr const char* METRICS[4] = {"rouge-1", "rouge-2", "rouge-l", "bleu-4"};
using Scores = std::array<double, 4>; // percent

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
    std::vector<uint32_t> characters;
    std::vector<std::string_view> words[2]; // rouge's, which lie in the text; [1]: with the blank ones

    ScoredText(const Jieba& jieba, std::string_view text) { // valid UTF-8
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
// a match counts as half of a match, to the power of k.
inline double bleu4(const std::vector<uint32_t>& hypothesis, const std::vector<uint32_t>& reference) {
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
    for (size_t n = 1; n <= 4; n++) {
        const std::vector<Gram> h = shortened(all_h, n);
        const size_t matches = count_common(h, shortened(all_r, n));
        if (n == 1 && matches == 0) return 0;
        const double of = (double)std::max<size_t>(h.size(), 1);
        log_sum += 0.25 * std::log(matches ? (double)matches / of : (half /= 2) / of);
    }
    const double ratio = (double)reference.size() / (double)hypothesis.size();
    return (ratio < 1 ? 1 : std::exp(1 - ratio)) * std::exp(log_sum);
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

// ------------------------------------------------------------------------------------------------- intervals

struct Interval {
    double mean, low, high;
};

// Means of columns with 95% bootstrap intervals (B. Efron, 1979; the percentile method): as many rows as
// there are are drawn with replacement, a thousand times; the interval leaves out the 25 lowest and highest
// means. A draw is of whole rows, so that the columns' intervals belong together.
constexpr int RESAMPLES = 1000;
template <size_t C>
std::array<Interval, C> bootstrap(const std::vector<std::array<double, C>>& rows, uint64_t seed) {
    auto random = [&](size_t n) { // splitmix64; the high half of a product is a number below n
        uint64_t z = seed += 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        return (size_t)((unsigned __int128)(z ^ z >> 31) * n >> 64);
    };
    const double n = (double)rows.size();
    std::array<double, C> sum{};
    for (auto& row : rows)
        for (size_t c = 0; c < C; c++) sum[c] += row[c];
    std::vector<std::array<double, C>> means(RESAMPLES);
    for (auto& mean : means) {
        mean = {};
        for (size_t i = 0; i < rows.size(); i++) {
            auto& row = rows[random(rows.size())];
            for (size_t c = 0; c < C; c++) mean[c] += row[c];
        }
        for (double& x : mean) x /= n;
    }
    std::array<Interval, C> out;
    std::vector<double> column(RESAMPLES);
    for (size_t c = 0; c < C; c++) {
        for (size_t i = 0; i < column.size(); i++) column[i] = means[i][c];
        std::sort(column.begin(), column.end());
        out[c] = {sum[c] / n, column[RESAMPLES / 40], column[RESAMPLES - 1 - RESAMPLES / 40]};
    }
    return out;
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
// OpenAI's {messages}, the last of which is the reference.
struct ScoreReference {
    std::string question, answer;

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

// data/datagen/jieba.bin beside the program or in the working folder.
inline std::string find_jieba() {
    char program[4096];
    const ssize_t n = readlink("/proc/self/exe", program, sizeof program);
    const std::string path(program, n > 0 ? (size_t)n : 0);
    for (const std::string& folder : {path.substr(0, path.find_last_of('/') + 1), std::string()})
        if (access((folder + "data/datagen/jieba.bin").c_str(), F_OK) == 0) return folder + "data/datagen/jieba.bin";
    DIE("no data/datagen/jieba.bin beside the program or in this folder (--dict FILE names it)");
}

// `score`; argv[0] is its name. Throws Error.
inline int score_main(int argc, char** argv) {
    const std::string usage = "usage: datagen score ANSWERS.jsonl REFERENCE.jsonl [options]\n";
    std::string dict;
    bool compat = false, json = false, help = false;
    uint64_t seed = 0;
    const std::vector<Option> options = {
        {"", "--compat", "", "blank lines count, as the original tools have it", flag(compat)},
        {"", "--json", "", "one JSON object", flag(json)},
        {"", "--seed", "N", "of the resamples that the intervals come from: 0", whole(seed, 0, INT64_MAX)},
        {"", "--dict", "FILE", "default: data/datagen/jieba.bin beside the program or in this folder", file_name(dict)},
        {"-h", "--help", "", "this text", flag(help)}};
    const std::vector<std::string> files = parse(options, argc, argv);
    if (help) return print_help(usage.c_str(), options), 0;
    if (files.size() != 2) DIE("%s", usage.substr(0, usage.size() - 1).c_str());
    const Jieba jieba(dict.empty() ? find_jieba() : dict);
    const ScoreFile answers(files[0]), references(files[1]);
    const bool by_id = answers.has_ids && references.has_ids;
    const std::vector<size_t> match = match_rows(answers, references, by_id);

    // Columns: the answers, the same with the other treatment of blank lines, the questions as answers.
    std::vector<std::array<double, 12>> table;
    size_t empty = 0;
    for (size_t i = 0; i < match.size(); i++) {
        const ScoreReference row(references, references.rows[match[i]]);
        const std::string answer = without_thought(score_answer(answers, answers.rows[i], row.answer));
        const std::string wanted = without_thought(row.answer);
        const ScoredText a(jieba, answer), r(jieba, wanted), q(jieba, row.question);
        empty += a.words[0].empty();
        const auto of_answer = score_pair(a, r), of_question = score_pair(q, r);
        table.emplace_back();
        for (size_t m = 0; m < 4; m++) {
            table.back()[m] = of_answer[compat][m];
            table.back()[4 + m] = of_answer[!compat][m];
            table.back()[8 + m] = of_question[compat][m];
        }
    }
    const std::array<Interval, 12> result = bootstrap(table, seed);

    std::vector<size_t> worst(table.size()); // by ROUGE-L, then by BLEU-4
    for (size_t i = 0; i < worst.size(); i++) worst[i] = i;
    std::stable_sort(worst.begin(), worst.end(), [&](size_t a, size_t b) {
        auto key = [&](size_t i) { return std::pair(table[i][ROUGE_L], table[i][BLEU_4]); };
        return key(a) < key(b);
    });
    worst.resize(std::min<size_t>(worst.size(), 3));

    // Once for people, once for programs.
    const char* matched = by_id ? "id" : "order";
    std::string text = format("%zu rows matched by %s; %zu empty answers, which score 0; ", table.size(),
                              matched, empty);
    text += format("95%% intervals of %d resamples, seed %llu\n\n", RESAMPLES, (unsigned long long)seed);
    text += format("%-8s  %-26s%-26s%s\n", "", "answers",
                   compat ? "blank lines dropped" : "blank lines counted", "the question as answer");
    for (size_t m = 0; m < 4; m++) {
        text += format("%-8s", METRICS[m]);
        for (size_t column = 0; column < 3; column++) {
            const Interval& x = result[4 * column + m];
            text += format("  %8.4f [%5.2f, %5.2f]%s", x.mean, x.low, x.high, column < 2 ? " " : "\n");
        }
    }
    sj::Writer w;
    w.object().field("rows", table.size()).field("matched_by", matched).field("empty", empty);
    w.field("compat", compat).field("seed", seed).field("resamples", RESAMPLES);
    const char* keys[3] = {"answers", compat ? "blank_lines_dropped" : "blank_lines_counted", "question"};
    for (size_t column = 0; column < 3; column++) {
        w.key(keys[column]).object();
        for (size_t m = 0; m < 4; m++) {
            const Interval& x = result[4 * column + m];
            w.key(METRICS[m]).object().field("mean", x.mean).field("low", x.low).field("high", x.high).end();
        }
        w.end();
    }

    text += "\nThe worst by rouge-l:\n";
    w.key("worst").array();
    for (size_t i : worst) {
        const ScoreFile::Row& a = answers.rows[i];
        const ScoreReference row(references, references.rows[match[i]]);
        const std::string answer = without_thought(score_answer(answers, a, row.answer));
        text += format("%8.4f  line %zu%s%s\n", table[i][ROUGE_L], a.line, by_id ? ", id " : "",
                       by_id ? score_excerpt(a.id, 60).c_str() : "");
        text += "          question   " + score_excerpt(row.question, 160) + "\n";
        text += "          reference  " + score_excerpt(row.answer, 160) + "\n";
        text += "          answer     " + score_excerpt(answer, 160) + "\n";
        w.object().field("line", a.line);
        if (by_id) w.key("id").text += a.id, w.comma = true;
        for (size_t m = 0; m < 4; m++) w.field(METRICS[m], table[i][m]);
        w.field("question", row.question).field("reference", row.answer).field("answer", answer).end();
    }
    w.end().end();
    if (json) text = w.text + "\n";
    if (fwrite(text.data(), 1, text.size(), stdout) != text.size() || fflush(stdout) != 0)
        DIE("standard output: %s", strerror(errno));
    return 0;
}
