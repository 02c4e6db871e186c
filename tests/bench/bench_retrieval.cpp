// Retrieval: how often the passage that holds an answer is found, and how long an index and a question take.
//   make build/bench_retrieval; from the repository's root:
//   build/bench_retrieval recall data/course/notes data/course/exam_qa.jsonl ...   questions with `evidence` FILE:FIRST-LAST
//   build/bench_retrieval nothing data/course/notes tests/fixtures/unrelated.txt   counts lines that find a passage
//   build/bench_retrieval words data/course/notes data/course/exam_qa.jsonl ...    the same words as JSON, for
//                                                                                  tests/reference/peer_bm25.py
//   build/bench_retrieval text FOLDER MB                       files of 1 MB of words by Zipf's law, in two languages
//   build/bench_retrieval speed FOLDER INDEX                   index anew, open, update, 200 questions; and 200 common words
//   build/bench_retrieval vectors N DIMENSIONS                 a question's product with N vectors, and the best of them
#include "base/file.h"
#include "base/options.h"
#include "book/datagen/intervals.h"
#include "book/jieba.h"
#include "model/utf8.h"
#include "search/documents.h"
#include "search/index.h"
#include "search/vector_file.h"
#include "search/words.h"
#include "sj.h"
#include "tests/bench/zipf.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <sys/resource.h>
#include <unistd.h>

static const Tell SILENT = [](const std::string&) {};

struct Question {
    std::string text, file; // evidence: lines of a file
    unsigned first = 0, last = 0;
};

static std::vector<Question> read_questions(char** paths, int n) {
    std::vector<Question> all;
    for (int i = 0; i < n; i++) {
        const MappedFile file(paths[i]);
        const std::string_view text = file.text();
        for (size_t at = 0; at < text.size();) {
            const std::string_view line = text.substr(at, text.find('\n', at) - at);
            at += line.size() + 1;
            sj::Doc doc;
            if (!sj::parse(doc, line).empty()) DIE("%s: not JSONL", paths[i]);
            const std::string evidence = doc.root()["evidence"].str();
            const size_t colon = evidence.rfind(':');
            Question q;
            if (colon == evidence.npos || sscanf(evidence.c_str() + colon, ":%u-%u", &q.first, &q.last) != 2)
                DIE("%s: a row without evidence FILE:FIRST-LAST", paths[i]);
            q.file = evidence.substr(0, colon), q.text = doc.root()["instruction"].str();
            if (!doc.root()["input"].str().empty()) q.text += "\n" + doc.root()["input"].str();
            all.push_back(q);
        }
    }
    return all;
}

static bool holds(const DocumentIndex& index, uint32_t passage, const Question& q) {
    const DocumentIndex::Passage& p = index.passage_at(passage);
    const std::string_view text = index.text_of(p), body = text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
    const unsigned last = p.line + (unsigned)std::count(body.begin(), body.end(), '\n');
    return index.name_of(index.file_at(p.file)) == q.file && p.line <= q.last && last >= q.first;
}

// The rank of the first passage that holds the answer, from 1 on; 0: none does, or none is shown.
static size_t rank_of(const DocumentIndex& index, const Jieba& jieba, const Question& q, bool limited) {
    const WordCounts words = question_words(jieba, q.text);
    const std::vector<DocumentIndex::Hit> hits = index.search(words, index.header().passages);
    if (limited && !hits.empty() && !index.is_about(jieba, words, hits[0])) return 0;
    for (size_t i = 0; i < hits.size(); i++)
        if (holds(index, hits[i].passage, q)) return i + 1;
    return 0;
}

static void recall(const DocumentIndex& index, const Jieba& jieba, const std::vector<Question>& questions) {
    std::vector<double> at_1, at_5, reciprocal;
    size_t none = 0;
    for (const Question& q : questions) {
        const size_t rank = rank_of(index, jieba, q, true);
        at_1.push_back(rank == 1 ? 100 : 0), at_5.push_back(rank >= 1 && rank <= 5 ? 100 : 0);
        reciprocal.push_back(rank ? 1 / (double)rank : 0);
        none += rank == 0;
    }
    const book::Interval one = book::bootstrap(at_1, 0), five = book::bootstrap(at_5, 0);
    const book::Interval mean = book::bootstrap(reciprocal, 0);
    printf("%zu questions, %llu passages: recall@1 %.1f [%.1f, %.1f], recall@5 %.1f [%.1f, %.1f], MRR %.3f [%.3f, %.3f]; "
           "%zu not found at all\n", questions.size(), (unsigned long long)index.header().passages, one.mean, one.low, one.high,
           five.mean, five.low, five.high, mean.mean, mean.low, mean.high, none);
}

static void print_found(const Documents& documents, std::string_view questions) {
    size_t all = 0, found = 0;
    for (size_t at = 0; at < questions.size(); all++) {
        const std::string_view line = questions.substr(at, questions.find('\n', at) - at);
        at += line.size() + 1;
        if (documents.find(line).empty()) continue;
        found++;
        printf("%s\n", std::string(line).c_str());
    }
    printf("%zu of %zu questions find a passage\n", found, all);
}

// {"passages": [[word, ...]], "questions": [{"words": [...], "holds": [number, ...], "rank": ours}]}
static void print_words(const DocumentIndex& index, const Jieba& jieba, const std::vector<Question>& questions) {
    sj::Writer w;
    auto list = [&](std::string_view text, bool asked) {
        w.array();
        index_words(jieba, text, [&](std::string_view word) { if (!asked || !says_nothing(word)) w.value(word); });
        w.end();
    };
    w.object().key("passages").array();
    for (uint32_t i = 0; i < index.header().passages; i++) {
        const DocumentIndex::Passage& p = index.passage_at(i);
        list(std::string(index.heading_of(p)) + "\n" + std::string(index.text_of(p)), false);
    }
    w.end().key("questions").array();
    for (const Question& q : questions) {
        w.object().key("words");
        list(q.text, true);
        w.key("holds").array();
        for (uint32_t i = 0; i < index.header().passages; i++)
            if (holds(index, i, q)) w.value((size_t)i);
        w.end().field("rank", rank_of(index, jieba, q, false)).end();
    }
    printf("%s\n", w.end().end().text.c_str());
}

// Words of two and three syllables, and of one to three Han characters: 300,000 of each language.
static std::vector<std::string> make_words(bool chinese) {
    static const char *FIRST[] = {"b", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "t", "v", "st", "tr"};
    static const char *SECOND[] = {"a", "e", "i", "o", "u", "ar", "en", "or", "al", "in"};
    ZipfWords random;
    random.state = chinese ? 7 : 3;
    std::vector<std::string> words;
    while (words.size() < 300000) {
        std::string word;
        for (int k = chinese ? 1 + (int)(random.uniform() * 3) : 2 + (int)(random.uniform() * 2); k > 0; k--) {
            if (chinese) utf8_append(word, 0x4E00 + (uint32_t)(random.uniform() * random.uniform() * 6000));
            else word += FIRST[(int)(random.uniform() * 16)] + std::string(SECOND[(int)(random.uniform() * 10)]);
        }
        words.push_back(word);
    }
    return words;
}
static void make_text(const std::string& folder, size_t megabytes) {
    const std::vector<std::string> words[] = {make_words(false), make_words(true)};
    ZipfWords random;
    make_folder(folder);
    for (size_t i = 0; i < megabytes; i++) {
        const bool chinese = i % 2;
        std::string text;
        while (text.size() < 1'000'000) {
            text += "\n## " + random.of(words[chinese]) + (chinese ? "" : " ") + random.of(words[chinese]) + "\n\n";
            for (int sentences = 8 + (int)(random.uniform() * 30); sentences > 0; sentences--) {
                for (int k = 6 + (int)(random.uniform() * 14); k > 0; k--)
                    text += random.of(words[chinese]) + (chinese ? "" : k > 1 ? " " : "");
                text += chinese ? "。" : random.uniform() < 0.2 ? ".\n\n" : ". ";
            }
        }
        write_text(folder + format("/%05zu.md", i), text);
    }
}

static double milliseconds(double since) { return 1e3 * (seconds() - since); }

static void speed(const std::string& folder, const std::string& path) {
    unlink(path.c_str());
    const Jieba jieba(find_jieba());
    const DocumentOptions options{folder, path, 4};
    double start = seconds();
    { Documents made(options, SILENT); }
    printf("index made in %.1f s", seconds() - start);
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    printf(" with %.2f GB of memory", (double)used.ru_maxrss / 1e6);
    start = seconds();
    { DocumentIndex opened(path); }
    const double open_ms = milliseconds(start);
    start = seconds();
    Documents documents(options, SILENT);
    const double check_ms = milliseconds(start);
    const DocumentIndex index(path);
    const DocumentIndex::Header& h = index.header();
    printf(", %.2f GB for %.2f GB of text, %llu passages, %llu words\n", (double)MappedFile(path).size / 1e9, (double)h.text_bytes / 1e9,
           (unsigned long long)h.passages, (unsigned long long)h.words);
    printf("opened in %.3f ms; files looked up and dictionary loaded, too: %.1f ms\n", open_ms, check_ms);
    ZipfWords random;
    random.state = 99;
    for (const bool common : {false, true}) { // a passage's own words, any 12 of them; or of all the commonest 12
        std::vector<double> took;
        size_t first = 0;
        for (int i = 0; i < 200; i++) {
            const uint32_t passage = (uint32_t)(random.uniform() * (double)h.passages);
            std::vector<std::pair<uint64_t, std::string>> words; // by how many passages have them
            index_words(jieba, index.text_of(index.passage_at(passage)), [&](std::string_view w) {
                words.push_back({index.word_at(index.lower_word(fnv1a(w))).passages, std::string(w)});
            });
            if (common) std::sort(words.rbegin(), words.rend());
            std::string question;
            for (size_t k = 0; k < 12; k++)
                question += words[common ? std::min(k, words.size() - 1) : (size_t)(random.uniform() * (double)words.size())].second + " ";
            start = seconds();
            const auto hits = index.search(question_words(jieba, question), 4);
            took.push_back(milliseconds(start));
            first += !hits.empty() && hits[0].passage == passage;
        }
        std::sort(took.begin(), took.end());
        printf("12 words of a passage%s: median %.2f ms, 99%% %.2f ms; the passage is first in %zu of 200\n",
               common ? ", its commonest" : "", took[100], took[198], first);
    }
    const std::string file = folder + "/zz-new.md";
    write_text(file, "# New\n\nOne more file.\n");
    start = seconds();
    { Documents updated(options, SILENT); }
    printf("one file more: %.2f s\n", seconds() - start);
    unlink(file.c_str());
}

static void scan(size_t n, size_t dimensions) {
    const std::string folder = format("/tmp/bench_retrieval.%d", (int)getpid()), path = folder + "/vectors";
    make_folder(folder + "/docs");
    write_text(folder + "/docs/a.md", "a");
    { Documents made({folder + "/docs", folder + "/index", 4}, SILENT); }
    const DocumentIndex index(folder + "/index");
    ZipfWords random;
    auto any = [&] {
        std::vector<float> v(dimensions);
        for (float& x : v) x = (float)((random.uniform() - 0.5) * std::sqrt(12 / (double)dimensions));
        return v;
    };
    {
        OutputFile out(path);
        VectorFile::Header h;
        memcpy(h.magic, "qwen3vec", sizeof h.magic);
        h.dimensions = dimensions, h.count = n;
        out.write(&h, sizeof h);
        const std::vector<float> v = any();
        for (size_t i = 0; i < n; i++) out.write(VectorFile::record_of(i, i % 64 ? v : any()));
        out.commit();
    }
    double start = seconds();
    const VectorFile file(path);
    const size_t good = file.count_good();
    printf("%zu vectors of %zu numbers, %.0f MB: opened and checked in %.1f ms\n", good, dimensions, (double)(n * file.stride()) / 1e6,
           milliseconds(start));
    std::vector<double> took;
    double sum = 0;
    for (int i = 0; i < 50; i++) {
        const std::vector<float> question = any();
        start = seconds();
        sum += file.products(question)[0];
        took.push_back(milliseconds(start));
    }
    std::sort(took.begin(), took.end());
    printf("%d threads: median %.1f ms, slowest of 50 %.1f ms (%.1f GB/s; %g)\n", thread_count(), took[25], took[49],
           (double)(n * file.stride()) / took[25] / 1e6, sum);
    for (const char* name : {"/docs/a.md", "/docs", "/index", "/vectors", ""}) remove((folder + name).c_str());
}

int main(int argc, char** argv) {
    try {
        const std::string what = argc > 1 ? argv[1] : "";
        if (what == "text" && argc == 4) return make_text(argv[2], (size_t)parse_integer("MB", argv[3], 1, 1 << 20)), 0;
        if (what == "speed" && argc == 4) return speed(argv[2], argv[3]), 0;
        if (what == "vectors" && argc == 4)
            return scan((size_t)parse_integer("N", argv[2], 1, 1 << 26), (size_t)parse_integer("DIMENSIONS", argv[3], 1, 65536)), 0;
        if ((what != "recall" && what != "words" && what != "nothing") || argc < 4)
            DIE("see the head of this file for how it is used");
        const std::string path = format("/tmp/bench_retrieval.%d.index", (int)getpid());
        const Documents documents({argv[2], path, 5}, SILENT);
        const DocumentIndex index(path);
        unlink(path.c_str());
        const Jieba jieba(find_jieba());
        if (what == "nothing") return print_found(documents, MappedFile(argv[3]).text()), 0;
        if (what == "words") return print_words(index, jieba, read_questions(argv + 3, argc - 3)), 0;
        for (int i = 3; i < argc; i++) printf("%s: ", argv[i]), recall(index, jieba, read_questions(argv + i, 1));
        if (argc > 4) printf("all: "), recall(index, jieba, read_questions(argv + 3, argc - 3));
        return 0;
    } catch (const std::exception& e) {
        print_error("bench_retrieval", e.what());
        return 1;
    }
}
