// Speed of segmentation on one core, in MB (10^6 bytes) of text a second of CPU time, line by line; the best of
// five runs. Then of scores, in rows a second.
//   make build/bench_jieba
//   build/bench_jieba [--write DIR] [TEXT_FILE...]       from the repository's root
// Without files it makes a text of 8 MB; --write stores it. --cut TEXT_FILE prints the words instead, a line a
// line, with a byte 1 after each. The same files through jieba, compared word by word:
//   python tests/reference/peer_jieba.py build/bench_jieba FILE...
#include "base/file.h"
#include "book/datagen/score.h"
#include "book/jieba.h"
#include "sj.h"
#include "tests/bench/zipf.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <time.h>
#include <vector>

static double cpu_seconds() { // of this program's own time
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// f(line) for each line, without its line feed.
template <class F> static void each_line(std::string_view text, F f) {
    for (size_t at = 0; at < text.size();) {
        const std::string_view line = text.substr(at, text.find('\n', at) - at);
        at += line.size() + 1;
        f(line);
    }
}

// Made of the test fixture's sentences and words by Zipf's law.
static std::string make_text(size_t size) {
    const MappedFile file("tests/fixtures/score/material.json");
    sj::Doc doc;
    sj::parse(doc, file.text());
    std::vector<std::string> words;
    for (sj::Value s : doc.root()["items"].items()) words.push_back(s.str());
    ZipfWords random;
    std::string out;
    while (out.size() < size) {
        for (int i = 4 + (int)(random.uniform() * 8); i > 0; i--)
            out += random.of(words);
        out += random.uniform() < 0.7 ? "，" : "。\n";
    }
    return out;
}

int main(int argc, char** argv) {
    try {
        double start = cpu_seconds();
        const Jieba jieba("data/datagen/jieba.bin");
        const double loading = cpu_seconds() - start;
        std::vector<std::pair<std::string, std::string>> texts; // name, bytes
        std::vector<std::string_view> words;
        for (int i = 1; i < argc; i++) {
            if (strcmp(argv[i], "--cut") == 0 && i + 1 < argc) {
                const MappedFile file(argv[i + 1]);
                each_line(file.text(), [&](std::string_view line) {
                    words.clear();
                    jieba.cut(words, line);
                    for (auto w : words) fwrite(w.data(), 1, w.size(), stdout), putchar(1);
                    putchar('\n');
                });
                return 0;
            }
            if (strcmp(argv[i], "--write") == 0 && i + 1 < argc) {
                OutputFile out(std::string(argv[++i]) + "/made.txt");
                out.write(make_text(8000000));
                out.commit();
            } else {
                texts.emplace_back(argv[i], MappedFile(argv[i]).text());
            }
        }
        if (texts.empty()) texts.emplace_back("made", make_text(8000000));
        printf("loading data/datagen/jieba.bin: %.1f ms\n", 1e3 * loading);
        for (auto& [name, text] : texts) {
            double best = 1e9;
            size_t count = 0;
            for (int run = 0; run < 5; run++) {
                count = 0;
                start = cpu_seconds();
                each_line(text, [&](std::string_view line) {
                    words.clear();
                    jieba.cut(words, line);
                    count += words.size();
                });
                best = std::min(best, cpu_seconds() - start);
            }
            printf("%s: %.1f MB, %zu words, %.1f MB/s\n", name.c_str(), (double)text.size() / 1e6, count,
                   (double)text.size() / 1e6 / best);
        }

        // An answer of ten lines against the next ten.
        std::vector<std::string> rows(1);
        each_line(texts[0].second, [&](std::string_view line) {
            if (rows.size() > 2000) return;
            rows.back() += std::string(line) + "\n";
            if (std::count(rows.back().begin(), rows.back().end(), '\n') == 10) rows.emplace_back();
        });
        start = cpu_seconds();
        size_t bytes = 0;
        for (size_t i = 0; i + 1 < rows.size(); i++) {
            const ScoredText a(jieba, rows[i]), b(jieba, rows[i + 1]);
            score_pair(a, b);
            bytes += rows[i].size() + rows[i + 1].size();
        }
        const double time = cpu_seconds() - start, n = (double)rows.size() - 1;
        printf("scores: %.0f rows a second, of %.0f bytes on both sides\n", n / time, (double)bytes / n);
    } catch (const Error& e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
