// search/words.cpp: texts cut into words, see words.h.
#include "search/words.h"
#include "base/file.h" // fnv1a
#include "book/chunks.h"
#include "model/utf8.h"
#include <algorithm>
#include <string>

// A character in its indexed form: lower case (Latin, Greek, Cyrillic); full-width letters and digits as ASCII.
static uint32_t folded(uint32_t c) {
    if (c >= 0xFF01 && c <= 0xFF5E) c -= 0xFEE0;
    if (c < 0x80) return lower(c);
    auto in = [c](uint32_t first, uint32_t last) { return c >= first && c <= last; };
    if ((in(0xC0, 0xDE) && c != 0xD7) || in(0x391, 0x3A9) || in(0x410, 0x42F)) return c + 32;
    return in(0x400, 0x40F) ? c + 80 : c;
}

// English plurals as singulars: D. Harman's rules ("How effective is suffixing?", 1991).
static void drop_plural(std::string& word) {
    auto ends = [&](std::string_view s) {
        return word.size() > s.size() && std::string_view(word).substr(word.size() - s.size()) == s;
    };
    if (word.size() < 4 || word.back() != 's') return;
    if (ends("ies")) {
        if (!ends("eies") && !ends("aies")) word.replace(word.size() - 3, 3, "y");
    } else if (ends("es")) {
        if (!ends("aes") && !ends("ees") && !ends("oes")) word.pop_back();
    } else if (!ends("us") && !ends("ss")) {
        word.pop_back();
    }
}

void index_words(const Jieba& jieba, std::string_view text, const std::function<void(std::string_view)>& f) {
    const char *p = text.data(), *const end = p + text.size();
    std::vector<std::string_view> cut;
    std::string word, part;
    auto give = [&](std::string& w) {
        if (w.empty()) return;
        drop_plural(w);
        f(std::string_view(w));
    };
    auto next_is = [&](const char* at, auto is) { return at < end && is(utf8_read(at)); };
    // A run of letters, digits and _: as a whole, and, if _ or capitals divide it, its parts (HTTPServer: http, server;
    // but GPUs is gpu).
    auto identifier = [&] {
        uint32_t before = 0, c;
        bool of_acronym = false; // capitals followed by s
        auto close = [&] {
            if (!part.empty() && part.size() < word.size()) give(part);
            part.clear();
        };
        auto is_capital = [](uint32_t x) { return is_word(x) && folded(x) != x; };
        auto is_small_at = [&](const char* at) { return at < end && *at >= 'a' && *at <= 'z'; };
        const char* const start = p;
        for (bool again : {false, true}) { // first the whole, then its parts, if there are several
            for (p = start, before = 0; p < end; before = c) {
                const char* at = p;
                c = utf8_read(p);
                const bool point = c == '.' && is_digit(before) && next_is(p, is_digit);
                if (!is_word(c) && c != '_' && !point) {
                    p = at;
                    break;
                }
                const bool hump = is_capital(c) && (!is_capital(before) || (is_small_at(p) && is_small_at(p + 1)));
                if (again && (c == '_' || (hump && is_word(before)))) close();
                if (!again) of_acronym = c == 's' && is_capital(before) && word.size() > 1;
                if (!again) utf8_append(word, folded(c));
                else if (c != '_') utf8_append(part, folded(c));
            }
            if (again) close();
        }
        if (of_acronym) word.pop_back();
        give(word);
        word.clear();
    };
    auto is_han = [](uint32_t c) { return c >= Jieba::FIRST_HAN && c <= Jieba::LAST_HAN; };
    auto is_other = [&](uint32_t c) { return is_cjk(c) && !is_han(c); };
    while (p < end) {
        const char* const start = p;
        const uint32_t c = utf8_read(p);
        if (is_word(c) || c == '_') {
            p = start;
            identifier();
        } else if (is_han(c)) {
            while (next_is(p, is_han)) p += 3;
            cut.clear();
            jieba.cut(cut, {start, (size_t)(p - start)});
            for (std::string_view w : cut) f(w);
        } else if (is_other(c)) {
            const char* first = start;
            const bool alone = !next_is(p, is_other);
            if (alone) f(std::string_view(start, (size_t)(p - start)));
            while (next_is(p, is_other)) {
                const char* second = p;
                utf8_read(p);
                f(std::string_view(first, (size_t)(p - first)));
                first = second;
            }
        }
    }
}

static WordCounts counted_words(std::vector<uint64_t> all) {
    std::sort(all.begin(), all.end());
    WordCounts counts;
    for (uint64_t w : all)
        if (!counts.empty() && counts.back().first == w) counts.back().second++;
        else counts.push_back({w, 1});
    return counts;
}

WordCounts count_words(const Jieba& jieba, std::string_view text, uint32_t& length) {
    std::vector<uint64_t> all;
    index_words(jieba, text, [&](std::string_view w) { all.push_back(fnv1a(w)); });
    length = (uint32_t)all.size();
    return counted_words(std::move(all));
}

bool says_nothing(std::string_view word) {
    static const std::string_view WORDS =
        " 什么 为什么 怎样 怎么 如何 哪 哪个 哪些 哪里 几 多少 吗 呢 请 是 的 了 有 我 你 您 他 她 它 我们 "
        "你们 他们 她们 它们 自己 这 那 这个 那个 这些 那些 这里 那里 谁 怎么办 怎么样 何时 在 和 与 及 "
        "或 也 都 就 还 又 再 才 把 被 给 对 从 到 向 为 以 于 而 但 但是 因为 所以 如果 虽然 要 会 能 "
        "能够 可以 可 应该 需要 想 想要 请问 告诉 一下 帮 帮助 让 着 过 吧 啊 呀 嘛 之 其 此 很 最 更 太 "
        "非常 好 一个 一些 一 去 来 说 做 还是 时候 不要 不会 解释 介绍 说明 描述 讲 讲讲 定义 意思 区别 "
        "a about after all also am an and any are as at be because been before being both but by can could "
        "define describe did difference do does doing each explain for from get give got had has have having "
        "he her here him his how i if in into is it its just let many may me mean meaning might mine more "
        "most much must my no nor not now of off on only or other our out own please same shall she should so "
        "some such tell than that the their them then there these they thi those to too until up us very was "
        "we were what when where which while who why will with would you your ";
    return WORDS.find(" " + std::string(word) + " ") != WORDS.npos;
}

WordCounts question_words(const Jieba& jieba, std::string_view question) {
    std::vector<uint64_t> all;
    index_words(jieba, question, [&](std::string_view w) { if (!says_nothing(w)) all.push_back(fnv1a(w)); });
    return counted_words(std::move(all));
}
