// Fuzzes segmentation and scores with any text, and the loader of jieba.bin with any file: bytes that begin
// like a jieba.bin are one.
#include "base/error.h"
#include "book/datagen/bleu_words.h"
#include "book/datagen/facts_and_choices.h"
#include "book/datagen/score.h"
#include "book/jieba.h"
#include "model/utf8.h"
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

using namespace book;

static void need(bool condition) {
    if (!condition) abort();
}

static void load(const uint8_t* data, size_t size) {
    static const int fd = memfd_create("jieba", 0);
    static const std::string path = format("/proc/self/fd/%d", fd);
    need(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    try {
        const Jieba jieba(path);
        std::vector<std::string_view> words;
        jieba.cut(words, "中国人在中国大学的c++,T恤AT&T 3.14%。\u4e00\u9fd5龘");
    } catch (const Error& e) {
        need(std::string_view(e.what()).substr(0, path.size()) == path); // an error names its file
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Jieba jieba("data/datagen/jieba.bin");
    if (size >= 8 && memcmp(data, "qwen3jba", 8) == 0) return load(data, size), 0;

    const std::string_view text((const char*)data, size);
    std::vector<std::string_view> words;
    jieba.cut(words, text);
    const char* at = text.data();
    for (std::string_view w : words) {
        need(!w.empty() && w.data() == at);
        at += w.size();
    }
    need(at == text.data() + size);

    std::string valid; // two halves are compared
    utf8_repair(valid, text, true);
    size_t middle = valid.size() / 2;
    while (middle < valid.size() && ((uint8_t)valid[middle] & 0xC0) == 0x80) middle++;
    const std::string_view both = valid;
    const ScoredText a(jieba, both.substr(0, middle)), b(jieba, both.substr(middle));
    const auto scores = score_pair(a, b), back = score_pair(b, a), same = score_pair(a, a);
    for (size_t blanks = 0; blanks < 2; blanks++) {
        for (size_t m = 0; m < 4; m++) {
            const double x = scores[blanks][m];
            need(x >= 0 && x <= 100 && x <= same[blanks][m]);
            if (m != BLEU_CHAR) need(std::fabs(x - back[blanks][m]) < 1e-3); // F1 does not care which is which
        }
        if (!a.words[0].empty()) need(same[blanks][ROUGE_1] == 100 && same[blanks][ROUGE_L] == 100);
    }
    need(a.words[1].size() >= a.words[0].size());
    const double by_words = bleu4_words(both.substr(0, middle), both.substr(middle));
    need(by_words >= 0 && by_words <= 1 + 1e-9);
    const char letter = chosen_letter(valid, 4);
    need(letter == 0 || (letter >= 'A' && letter <= 'D'));
    const std::string form = fact_form(valid), fact = fact_form(both.substr(middle));
    need(form.front() == '[' && form.back() == ']');
    fact_stands(form, fact), has_spaces(valid);
    score_excerpt(valid, 10), without_thought(valid);
    return 0;
}
