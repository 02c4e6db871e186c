// search/: words, the index and its formula, damaged indexes, folders of every kind, vectors of
// passages (of a model that is none: test_embed.cpp has those of a real one), prompts; then --docs of the programs.
#include "base/file.h"
#include "book/read_book.h"
#include "model/chat_template.h"
#include "search/document_files.h"
#include "search/documents.h"
#include "search/grounding.h"
#include "search/quote.h"
#include "search/index.h"
#include "search/index_builder.h"
#include "search/index_update.h"
#include "search/vector_file.h"
#include "search/vector_update.h"
#include "search/words.h"
#include "tests/process.h"
#include <atomic>
#include <cmath>
#include <ctime>
#include <map>
#include <sys/time.h>
#include <thread>

static const Jieba& jieba() {
    static const Jieba j("data/datagen/jieba.bin");
    return j;
}
static Strings words_of(std::string_view text) {
    Strings words;
    index_words(jieba(), text, [&](std::string_view w) { words.emplace_back(w); });
    return words;
}
static WordCounts counts_of(std::string_view text) {
    uint32_t length = 0;
    return count_words(jieba(), text, length);
}
static std::vector<uint64_t> hashes_of(const WordCounts& words) {
    std::vector<uint64_t> all;
    for (auto [hash, times] : words) all.push_back(hash);
    return all;
}

namespace {
// A folder of documents, an index, and what was told. The library is called as `qwen3 --docs` does.
struct Library {
    Scratch scratch;
    const std::string folder = scratch / "docs", index = scratch / "docs.index";
    Strings told{};
    size_t passages = 4;
    DocumentModels models{};

    Library() { make_folder(folder); }
    void put(const std::string& name, std::string_view text) const {
        make_folder((folder + "/" + name).substr(0, (folder + "/" + name).rfind('/')));
        write_file(folder + "/" + name, text);
    }
    Documents open() { return open(folder); }
    Documents open(const std::string& docs) {
        told.clear();
        return Documents({docs, index, passages}, [this](const std::string& line) { told.push_back(line); }, models);
    }
    std::string fault(const std::string& docs) {
        try {
            open(docs);
        } catch (const Error& e) {
            return e.what();
        }
        return "none";
    }
    std::string all() const {
        std::string text;
        for (auto& line : told) text += line + "\n";
        return text;
    }
    bool says(const std::string& word) const { return all().find(word) != std::string::npos; }
    size_t number(const char* before) const { // "3 read": what stands before a word
        const std::string text = all();
        size_t at = text.find(before);
        while (at != text.npos && (at == 0 || !isdigit((unsigned char)text[at - 1]))) at = text.find(before, at + 1);
        REQUIRE(at != text.npos);
        while (at > 0 && isdigit((unsigned char)text[at - 1])) at--;
        return (size_t)atoi(text.c_str() + at);
    }
};
} // namespace
static Strings files_of(const std::vector<Source>& sources) {
    Strings files;
    for (auto& s : sources) files.push_back(s.file);
    return files;
}

// ----------------------------------------------------------------------------------------- words

TEST_CASE("words: Chinese by jieba, identifiers whole and in parts, plurals, other scripts") {
    CHECK(words_of("我们在学习CUDA编程。") == Strings{"我们", "在", "学习", "cuda", "编程"});
    CHECK(words_of("cudaMemcpyAsync(dst)") == Strings{"cuda", "memcpy", "async", "cudamemcpyasync", "dst"});
    CHECK(words_of("launch_bounds, HTTPServer; sm_90a H100 __global__") ==
          Strings{"launch", "bound", "launch_bound", "http", "server", "httpserver", "sm", "90a", "sm_90a", "h100", "global",
                  "__global__"});
    CHECK(words_of("threadIdx.x 3.35 TB/s. 12.") == Strings{"thread", "idx", "threadidx", "x", "3.35", "tb", "s", "12"});
    CHECK(words_of("Warps queries buses class thus has GPUs SMs Is") ==
          Strings{"warp", "query", "buse", "class", "thus", "has", "gpu", "sm", "is"});
    CHECK(words_of("ÉCOLE Привет ΩΜΕΓΑ ＣＵＤＡ１２") == Strings{"école", "привет", "ωμεγα", "cuda12"});
    CHECK(words_of("カタカナ 한국 の") == Strings{"カタ", "タカ", "カナ", "한국", "の"});
    CHECK(words_of(" ,.!?，。\n") == Strings{});
    CHECK(words_of("") == Strings{});
    CHECK(words_of("_ __ a_") == Strings{"_", "__", "a", "a_"});
}

TEST_CASE("words: a question is without those that only ask") {
    CHECK(hashes_of(question_words(jieba(), "什么是 warp？")) == std::vector<uint64_t>{fnv1a("warp")});
    CHECK(hashes_of(question_words(jieba(), "What is the warp of a warp?")) == std::vector<uint64_t>{fnv1a("warp")});
    CHECK(question_words(jieba(), "为什么？ Why? How many?").empty());
    CHECK(question_words(jieba(), "hist an is").size() == 1); // whole words only
    CHECK(question_words(jieba(), "How do I get this? 我们可以怎么办？").empty());
}

// ----------------------------------------------------------------------------------------- the index

// BM25 as the head of index.h has it, word by word over all passages.
static double bm25(const std::vector<Strings>& passages, const Strings& question, size_t p) {
    double all = 0, score = 0;
    for (auto& passage : passages) all += (double)passage.size();
    const double N = (double)passages.size(), mean = all / N;
    for (auto& w : question) {
        auto times = [&](const Strings& in) { return (double)std::count(in.begin(), in.end(), w); };
        double n = 0;
        for (auto& passage : passages) n += times(passage) > 0;
        const double f = times(passages[p]), idf = std::log(1 + (N - n + 0.5) / (n + 0.5));
        score += idf * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * (double)passages[p].size() / mean));
    }
    return score;
}

TEST_CASE("index: the scores are the formula's, the best come first, equal ones by file and place") {
    Scratch scratch;
    const std::string path = scratch / "i";
    const Strings texts = {"warp warp lane", "a warp of threads, and memory", "memory banks and more memory of memory",
                           "memory banks and more memory of memory", "shared memory", "nothing at all", "线程束 与 warp"};
    std::vector<Strings> passages;
    {
        IndexBuilder builder(path, 5);
        std::vector<WordCounts> words;
        for (size_t i = 0; i < texts.size(); i++) {
            uint32_t length = 0;
            builder.add_file(format("%zu.md", texts.size() - i), {}); // the last name first
            words.push_back(count_words(jieba(), texts[i], length));
            builder.add_passage(texts[i], "H", 1, length);
            passages.push_back(words_of(texts[i]));
        }
        builder.add_words(0, words);
        builder.finish();
    }
    const DocumentIndex index(path);
    CHECK(index.header().made_by == 5);
    CHECK(index.header().files == texts.size());
    for (const char* question : {"memory", "warp lane", "memory of a warp", "memory memory warp", "the 线程束", "unheard"}) {
        INFO(question);
        const auto hits = index.search(counts_of(question), 100);
        size_t wanted = 0;
        for (size_t p = 0; p < texts.size(); p++) wanted += bm25(passages, words_of(question), p) > 0;
        CHECK(hits.size() == wanted);
        for (size_t i = 0; i < hits.size(); i++) {
            CHECK(hits[i].score == doctest::Approx(bm25(passages, words_of(question), hits[i].passage)).epsilon(1e-5));
            if (i > 0) CHECK(hits[i - 1].score >= hits[i].score);
            CHECK(index.text_of(index.passage_at(hits[i].passage)) == texts[hits[i].passage]);
        }
        for (size_t k : {0, 1, 2, 3}) { // fewer of them are the first of them
            const auto some = index.search(counts_of(question), k);
            REQUIRE(some.size() == std::min(k, hits.size()));
            for (size_t i = 0; i < some.size(); i++) CHECK(some[i].passage == hits[i].passage);
        }
    }
    const auto equal = index.search(counts_of("banks"), 2);
    REQUIRE(equal.size() == 2);
    CHECK(equal[0].passage == 3); // 4.md
    CHECK(equal[1].passage == 2); // 5.md
}

TEST_CASE("index: a damaged one is one line of error, and never more") {
    Library library;
    for (int i = 0; i < 20; i++) library.put(format("%d.md", i), format("# Title %d\n\nwarp memory word%d\n\n## B\n\nmore of it", i, i));
    library.open();
    const std::string good = read_file(library.index);
    MemoryFile file(good);
    size_t attempts = 0;
    auto attempt = [&] {
        try {
            const DocumentIndex index(file.path);
            for (const char* question : {"warp", "word3 memory", "more of it"})
                for (auto hit : index.search(counts_of(question), 3)) {
                    const DocumentIndex::Passage& p = index.passage_at(hit.passage);
                    (void)(index.text_of(p).size() + index.heading_of(p).size() + index.name_of(index.file_at(p.file)).size());
                }
            if (attempts++ % 8) return std::string("fine");
            IndexBuilder builder(library.scratch / "copy", 1); // as an update would
            builder.take_over(index, std::vector<std::optional<int64_t>>(index.header().files, 1));
            builder.finish();
            const DocumentIndex copy(library.scratch / "copy");
            copy.search(counts_of("warp memory"), 3);
            return std::string("fine");
        } catch (const Error& e) {
            return std::string(e.what());
        }
    };
    CHECK(attempt() == "fine");
    for (size_t n = 0; n < good.size(); n += n < 90 ? 1 : 97) {
        file.truncate(n);
        CHECK(attempt().find(file.path + ": ") == 0);
        file.write(0, good);
    }
    file.write(good.size(), "x");
    CHECK(attempt().find("not what its header says") != std::string::npos);
    file.truncate(good.size());
    size_t refused = 0;
    for (size_t at = 0; at < good.size(); at++) // every byte, three ways
        for (const char x : {'\0', '\x7f', '\xff'}) {
            if (good[at] == x || (at > 100 && at % 11)) continue;
            file.write(at, std::string_view(&x, 1));
            refused += attempt() != "fine";
            file.write(at, std::string_view(&good[at], 1));
        }
    CHECK(refused > 100);
    CHECK(attempt() == "fine");
}

TEST_CASE("documents: damage in files, passages and words is found at the start, in postings by the question") {
    Library library;
    for (int i = 0; i < 9; i++) library.put(format("%d.md", i), format("# T\n\nwarp word%d", i));
    library.open();
    const std::string good = read_file(library.index);
    using Index = DocumentIndex;
    const Index::Header h = Index(library.index).header();
    const size_t lengths = good.size() - 4 * h.passages, words = lengths - sizeof(Index::Word) * h.words;
    const size_t passages = words - sizeof(Index::Passage) * h.passages;
    const size_t files = passages - sizeof(Index::File) * h.files;
    auto found = [&](size_t at) {
        INFO(at);
        std::string bad = good;
        bad.replace(at, 4, "\xff\xff\xff\xff");
        write_file(library.index, bad);
        CHECK_THROWS_AS(Index(library.index), IndexFault);
        CHECK(library.open().find("warp").size() == 4);
        CHECK(library.says("a damaged index; it is made anew"));
        CHECK(read_file(library.index) == good);
    };
    found(passages + sizeof(Index::Passage) * 3 + offsetof(Index::Passage, file));
    found(passages + sizeof(Index::Passage) * 3 + offsetof(Index::Passage, bytes));
    found(passages + sizeof(Index::Passage) * 8 + offsetof(Index::Passage, heading_bytes));
    found(passages + sizeof(Index::Passage) * 8 + offsetof(Index::Passage, text) + 4);
    found(files + sizeof(Index::File) * 2 + offsetof(Index::File, fault));
    found(files + sizeof(Index::File) * 2 + offsetof(Index::File, passages));
    found(files + offsetof(Index::File, name));
    found(words + sizeof(Index::Word) * 2 + offsetof(Index::Word, postings));
    found(words + sizeof(Index::Word) * 2 + offsetof(Index::Word, bytes));
    found(words + offsetof(Index::Word, hash) + 4); // no longer sorted
    std::string bad = good;
    bad.replace(sizeof h + h.text_bytes, h.posting_bytes, std::string(h.posting_bytes, '\x7f'));
    write_file(library.index, bad);
    const Documents docs = library.open();
    CHECK_THROWS_AS(docs.find("warp"), IndexFault);
}

TEST_CASE("documents: an index of another version, cut short or of other rules is made anew; another's file is not touched") {
    Library library;
    library.put("a.md", "# A\n\nwarp");
    CHECK(library.open().find("warp").size() == 1);
    const std::string good = read_file(library.index);
    auto again = [&](std::string bytes, const char* why) {
        write_file(library.index, bytes);
        CHECK(library.open().find("warp").size() == 1);
        INFO(library.all());
        CHECK(library.says(why));
        CHECK(library.number(" read") == 1);
        CHECK(read_file(library.index) == good);
    };
    std::string other = good;
    other[8] = 9;
    again(other, "another version; it is made anew");
    again(good.substr(0, good.size() - 1), "not what its header says; it is made anew");
    other = good, other[16]++;
    again(other, "made for other passages or words; it is made anew");
    other = good, other[good.size() - 5]++; // lengths: another score, nothing more
    write_file(library.index, other);
    library.open();
    CHECK(library.number(" read") == 0);
    const size_t first = good.size() - 4 - 24 * DocumentIndex(library.index).header().words - 32 - 48 + 40; // of the file's record
    other = good, other[first] = 7;
    write_file(library.index, other);
    library.put("b.md", "lane");
    CHECK(library.open().find("warp").size() == 1);
    CHECK(library.says("a damaged index; it is made anew"));
    CHECK(library.number(" read") == 2);

    write_file(library.index, "my thesis");
    CHECK(library.fault(library.folder) == library.index + ": no index of documents; it is not overwritten");
    CHECK(read_file(library.index) == "my thesis");
}

// ----------------------------------------------------------------------------------------- folders

TEST_CASE("documents: passages have their file, line and headings; long code is cut") {
    Library library;
    std::string code = "# Code\n\n```c\n";
    for (int i = 0; i < 300; i++) code += format("int line_%d = %d; // zebra\n", i, i);
    library.put("sub/deep/code.md", code + "```\n");
    library.put("notes.md", "\xEF\xBB\xBF# Threads\n\nintro text that is here to be a passage of its own, with more than two hundred "
                            "characters, so that the next heading begins another one. It goes on and on, and says nothing at all "
                            "about anything, except that it goes on.\n\n## 线程束\n\n一个 warp 有 32 个 lane。\n");
    library.put("empty.md", "");
    library.put(".hidden/x.md", "lane lane lane");
    const Documents docs = library.open();
    const std::vector<Source> found = docs.find("lane");
    REQUIRE(found.size() == 1);
    CHECK(found[0].file == "notes.md");
    CHECK(found[0].heading == "Threads > 线程束");
    CHECK(found[0].line == 5);
    CHECK(found[0].text == "## 线程束\n\n一个 warp 有 32 个 lane。");
    CHECK(name_of(found[0]) == "notes.md:5, Threads > 线程束");
    const std::vector<Source> line = docs.find("line_250");
    REQUIRE(!line.empty());
    CHECK(line[0].file == "sub/deep/code.md");
    CHECK(line[0].heading == "Code");
    CHECK(count_characters(line[0].text) <= PASSAGES.most);
    CHECK(line[0].text.compare(0, 9, "int line_") == 0); // whole lines
    CHECK(line[0].line == 4 + (uint32_t)atoi(line[0].text.c_str() + 9));
}

TEST_CASE("documents: long code takes time by its length; a file of too many lines is left out") {
    std::string fence = "```\n";
    while (fence.size() < 20'000'000) fence += "int line = 0; // 线程束\n";
    Library library;
    for (const bool lines : {true, false}) {
        if (!lines) std::replace(fence.begin() + 4, fence.end(), '\n', ' ');
        DocumentText text;
        text.text = fence + "\n```\n";
        const clock_t start = clock(); // (of this program: other programs may slow it down)
        text.cut();
        CHECK((clock() - start) / CLOCKS_PER_SEC < 10); // it takes a tenth of one; it took many minutes
        CHECK(text.chunks.size() > 12000);
        size_t at = 0;
        for (auto& c : text.chunks) {
            REQUIRE(c.begin == at);
            REQUIRE(count_characters(std::string_view(text.text).substr(at, c.end - at)) <= PASSAGES.most);
            at = c.end;
        }
        CHECK(at == text.text.size());
    }
    library.put("good.md", "warp");
    library.put("lines.txt", "warp" + std::string(DocumentText::MOST_LINES + 1, '\n'));
    library.put("most.txt", "warp" + std::string(1000, '\n'));
    CHECK(library.open().find("warp").size() == 2);
    CHECK(library.says("left out: 1 of more than 16,777,216 lines: lines.txt"));
    library.open();
    CHECK(library.number(" read") == 0);
}

TEST_CASE("index: what is thrown while words are added reaches the caller") {
    Scratch scratch;
    IndexBuilder builder(scratch / "i", 1);
    CHECK_THROWS_AS(builder.on_all_shards([](size_t s) { if (s % 3 == 0) throw std::bad_alloc(); }), std::bad_alloc);
}

TEST_CASE("documents: only what changed is read again, and the answers are those of a new index") {
    Library library;
    for (int i = 0; i < 30; i++) library.put(format("%02d.md", i), format("# T%d\n\nwarp and number%d and 线程 %s", i, i, i % 3 ? "bank" : ""));
    library.open();
    CHECK(library.number(" read") == 30);
    CHECK(library.number(" unchanged") == 0);
    const std::string first = read_file(library.index);
    library.open();
    CHECK(library.number(" read") == 0);
    CHECK(library.number(" unchanged") == 30);
    CHECK(read_file(library.index) == first);

    library.put("03.md", "# T3\n\nnow of tensors");
    library.put("99.md", "# New\n\ntensor cores and a warp");
    fs::remove(library.folder + "/07.md");
    const timeval times[2] = {{1, 0}, {1, 0}};
    REQUIRE(utimes((library.folder + "/11.md").c_str(), times) == 0); // touched only
    library.passages = 40;
    const Documents updated = library.open();
    CHECK(library.number(" read") == 2);
    CHECK(library.number(" unchanged") == 28);
    Library fresh;
    fresh.passages = 40;
    for (auto& entry : fs::directory_iterator(library.folder)) fresh.put(entry.path().filename(), read_file(entry.path()));
    const Documents anew = fresh.open();
    CHECK(fresh.number(" read") == 30);
    for (const char* question : {"warp", "number7", "number8 线程", "tensor", "bank and warp", "T3"}) {
        INFO(question);
        const auto a = updated.find(question), b = anew.find(question);
        REQUIRE(a.size() == b.size());
        for (size_t i = 0; i < a.size(); i++) {
            CHECK(name_of(a[i]) == name_of(b[i]));
            CHECK(a[i].score == b[i].score);
            CHECK(a[i].text == b[i].text);
        }
    }
    CHECK(updated.find("number7").empty());
    CHECK(updated.hash() == anew.hash());
    library.open();
    CHECK(library.number(" read") == 0);
    CHECK(library.number(" unchanged") == 30);
    // The same size and another time: its bytes decide.
    library.put("05.md", "# T5\n\nwarp and number5 and 线程 knab");
    REQUIRE(utimes((library.folder + "/05.md").c_str(), times) == 0);
    CHECK(library.open().find("knab").size() == 1);
    CHECK(library.number(" read") == 1);
}

TEST_CASE("documents: binary files, broken encodings, unreadable files and links are left out, and said once each kind") {
    Library library;
    library.put("good.md", "# Good\n\nwarp");
    library.put("a.bin", std::string_view("ab\0cd", 5));
    library.put("b.bin", "x" + std::string(20000, 'y') + std::string(1, '\0'));
    library.put("gb.txt", "\xcf\xdf\xb3\xcc warp");
    library.put("cut.txt", "warp \xe7\xba");
    CHECK(symlink("..", (library.folder + "/circle").c_str()) == 0);
    CHECK(symlink("/etc/passwd", (library.folder + "/out.md").c_str()) == 0);
    CHECK(mkfifo((library.folder + "/pipe").c_str(), 0600) == 0);
    CHECK(library.open().find("good warp root").size() == 1);
    INFO(library.all());
    CHECK(library.says("left out: 2 binary: a.bin"));
    CHECK(library.says("2 no UTF-8 (iconv -f GB18030 -t UTF-8 converts it): cut.txt at byte 5"));
    CHECK(library.says("not read: "));
    CHECK(library.says("and 2 more links and the like"));
    CHECK(library.number(" read") == 5);
    library.open(); // they are known, and not read again
    CHECK(library.number(" read") == 0);
    CHECK(library.says("2 binary"));
    if (geteuid() != 0) {
        library.put("secret.md", "warp");
        chmod((library.folder + "/secret.md").c_str(), 0);
        CHECK(library.open().find("warp").size() == 1);
        CHECK(library.says("1 cannot be read: secret.md"));
        chmod((library.folder + "/secret.md").c_str(), 0644);
        CHECK(library.open().find("warp").size() == 2); // it is tried again, though its time is the same
    }
}

TEST_CASE("documents: PDF, HTML and the like are the texts that datagen chunk reads; without a program they wait for it") {
    Library library;
    Scratch tools;
    struct Path {
        const std::string was = getenv("PATH");
        ~Path() { setenv("PATH", was.c_str(), 1); }
    } path;
    auto tool = [&](const char* name, const std::string& script) {
        write_file(tools / name, "#!/bin/sh\nPATH=/usr/bin:/bin\n" + script);
        chmod((tools / name).c_str(), 0755);
    };
    setenv("PATH", tools.path.c_str(), 1);
    const std::string pages = "The Book of Tides     1\n\nThe moon pulls the wa-\nter up.\n\f"
                              "The Book of Tides     2\n\nA spring tide is high water.\n\f";
    write_file(tools / "pages", pages);
    library.put("good.md", "warp");
    library.put("tides.pdf", "%PDF-1.7\n\xFF");
    library.put("unnamed", "%PDF-1.4\n\xFF");
    library.put("page.html", "<p>not a word of this");
    CHECK(library.open().find("tide").empty());
    CHECK(library.says("left out: 3 not converted: page.html: no Markdown, and there is no pandoc (install pandoc); elsewhere: "));
    library.open(); // they are tried each time
    CHECK(library.number(" read") == 3);
    CHECK(!library.says(" written"));

    tool("pdftotext", "cat " + tools / "pages");
    tool("pandoc", "printf '# Ebb\\n\\nThe ebb of %s\\n' \"$*\"");
    Documents documents = library.open();
    INFO(library.all());
    CHECK(!library.says("left out"));
    CHECK(library.says("pdftotext and pandoc convert 2 documents\n")); // (those with a name that says so)
    const std::vector<Source> tides = documents.find("moon water");
    CHECK(files_of(tides) == Strings{"tides.pdf", "unnamed"});
    std::string told; // the passages hold the text of datagen's reader
    const std::string text = book::book_text("tides.pdf", "%PDF-", {"auto", "", false, [&](auto& line) { told += line; }});
    CHECK(text.find("water\nup.") != text.npos);
    CHECK(told.find("2 page breaks") != told.npos);
    for (auto& s : tides) CHECK(s.text + "\n" == text);
    const std::vector<Source> ebb = documents.find("ebb");
    REQUIRE(files_of(ebb) == Strings{"page.html"});
    CHECK(ebb[0].heading == "Ebb");
    CHECK(ebb[0].text.find("The ebb of -t gfm-raw_html --wrap=none --lua-filter ") != std::string::npos);
    CHECK(ebb[0].text.find("book.lua " + library.folder + "/page.html") != std::string::npos);

    // Unchanged ones are not converted again; one that fails is named with the reason.
    tool("pdftotext", "echo 'May not be a PDF' >&2; exit 1");
    CHECK(library.open().find("moon").size() == 2);
    library.put("broken.pdf", "%PDF-1.7");
    CHECK(library.open().find("moon").size() == 2);
    CHECK(library.says("left out: 1 not converted: broken.pdf: pdftotext failed: exit status 1: May not be a PDF"));
}

TEST_CASE("documents: each new or touched document is converted once; scanned pages are not tried again") {
    Library library;
    Scratch tools;
    struct Path {
        const std::string was = getenv("PATH");
        ~Path() { setenv("PATH", was.c_str(), 1); }
    } path;
    write_file(tools / "pdftotext", "#!/bin/sh\nPATH=/usr/bin:/bin\necho x >> " + (tools / "log") + "\n"
                                    "case $4 in *scan*) printf '\\f';; *) tail -n +2 $4;; esac\n");
    chmod((tools / "pdftotext").c_str(), 0755);
    setenv("PATH", tools.path.c_str(), 1);
    auto converted = [&] { // since the last call
        const std::string log = fs::exists(tools / "log") ? read_file(tools / "log") : "";
        fs::remove(tools / "log");
        return std::count(log.begin(), log.end(), '\n');
    };
    for (const char* name : {"a.pdf", "b.pdf", "c.pdf"}) library.put(name, std::string("%PDF-1.7\nA warp is in ") + name + ".\n");
    library.put("scan.pdf", "%PDF-1.7\n");
    CHECK(library.open().find("warp").size() == 3);
    CHECK(converted() == 4);
    CHECK(library.says("left out: 1 without text (pictures of pages need OCR first): scan.pdf"));
    library.open();
    CHECK(converted() == 0);
    CHECK(library.says("left out: 1 without text"));
    library.put("scan.pdf", "%PDF-1.7\nother\n"); // new bytes, no text all the same
    library.open();
    CHECK(converted() == 1);
    library.open();
    CHECK(converted() == 0);

    const timeval times[2] = {{1, 0}, {1, 0}};
    for (const char* name : {"a.pdf", "scan.pdf"}) REQUIRE(utimes((library.folder + "/" + name).c_str(), times) == 0);
    library.put("b.pdf", "%PDF-1.7\nA warp is in B.pdf.\n"); // of the same size
    library.put("d.pdf", "%PDF-1.7\nA warp is in d.pdf.\n");
    CHECK(library.open().find("warp").size() == 4);
    CHECK(converted() == 4);
    library.open();
    CHECK(converted() == 0);
}

TEST_CASE("documents: files that cannot be used do not have the index written anew, whatever becomes of them") {
    Library library;
    library.put("good.md", "warp");
    library.put("data.db", std::string(100, '\0'));
    const uint64_t hash = library.open().hash();
    const auto written = fs::last_write_time(library.index);
    auto kept = [&](size_t read, const char* told) {
        INFO(library.all());
        CHECK(library.open().hash() == hash);
        CHECK(library.number(" read") == read);
        CHECK(library.says(told));
        CHECK(!library.says(" written"));
        CHECK(fs::last_write_time(library.index) == written);
    };
    const timeval times[2] = {{1, 0}, {1, 0}};
    REQUIRE(utimes((library.folder + "/data.db").c_str(), times) == 0);
    kept(0, "left out: 1 binary");
    library.put("data.db", std::string(200, '\0'));
    kept(1, "left out: 1 binary");
    library.put("other.db", std::string(10, '\0')), library.put("gb.txt", "\xcf\xdf\xb3\xcc");
    kept(3, "left out: 2 binary: data.db; 1 no UTF-8");
    fs::remove(library.folder + "/data.db");
    kept(2, "left out: 1 binary: other.db");
    if (geteuid() != 0) {
        library.put("secret.md", "warp");
        chmod((library.folder + "/secret.md").c_str(), 0);
        kept(3, "1 cannot be read: secret.md");
        chmod((library.folder + "/secret.md").c_str(), 0644);
    } else {
        library.put("secret.md", "warp");
    }
    CHECK(library.open().find("warp").size() == 2);
    CHECK(library.says(" written"));
    CHECK(library.number(" read") == 3);
    library.put("good.md", std::string(4, '\0')); // what was used no longer is
    CHECK(library.open().find("warp").size() == 1);
    CHECK(library.says("left out: 2 binary"));
}

TEST_CASE("documents: what cannot be indexed at all is one line") {
    Library library;
    CHECK(library.fault(library.folder) == library.folder + ": no text in it");
    library.put("a.bin", std::string_view("\0", 1));
    CHECK(library.fault(library.folder) ==
          library.folder + ": no text in it; left out: 1 binary: a.bin");
    CHECK(library.fault(library.folder + "/a.bin").find("no text in it") != std::string::npos);
    CHECK(library.fault(library.folder + "/absent") == library.folder + "/absent: No such file or directory");
    CHECK(library.fault("/dev/null").find("/dev/null: ") == 0);
    Library other;
    other.put("a.md", "warp");
    const Documents one = other.open(other.folder + "/a.md"); // a file alone
    CHECK(files_of(one.find("warp")) == Strings{"a.md"});
    try {
        Documents({other.folder, other.scratch / "no/such/i", 4}, [](const std::string&) {});
        FAIL("an index where no folder is");
    } catch (const Error& e) {
        CHECK(std::string(e.what()).find("No such file or directory") != std::string::npos);
    }
    for (int i = 0; i < 20; i++) other.put(format("%d.md", i), "warp");
    const Tell silent = [](const std::string&) {};
    CHECK(list_files(other.folder, other.index, silent, 21).size() == 21);
    try {
        list_files(other.folder, other.index, silent, 20);
        FAIL("more files than may be");
    } catch (const Error& e) {
        CHECK(e.what() == other.folder + ": more than 20 files; name a smaller folder");
    }
}

TEST_CASE("documents: a file that grows does no harm to the others, and is there when it is at rest") {
    Library library;
    library.put("log.txt", "线程");
    std::atomic<bool> stop{false};
    std::thread writer([&] {
        const int fd = ::open((library.folder + "/log.txt").c_str(), O_WRONLY | O_APPEND);
        for (int i = 0; !stop && i < 20000; i++) (void)!::write(fd, "线程束\n", 10);
        close(fd);
    });
    for (int i = 0; i < 20; i++) {
        library.put("steady.md", format("# S\n\nsteady %d", i));
        const Documents docs = library.open();
        CHECK(docs.find("steady").size() == 1);
    }
    stop = true;
    writer.join();
    CHECK(library.open().find("线程束").size() > 0);
    CHECK(!library.says("left out"));
    DocumentText text;
    text.read(library.folder + "/absent");
    CHECK(text.file.fault == DocumentIndex::UNREADABLE);
}

TEST_CASE("documents: an index in the folder is no document; what an ended program left behind goes") {
    Library library;
    library.put("a.md", "warp");
    const std::string index = library.folder + "/my.index";
    auto open = [&] {
        library.told.clear();
        Documents({library.folder, index, 4}, [&](const std::string& line) { library.told.push_back(line); });
    };
    open();
    // One of today may be at work, in whatever container; a user's own file is left alone, however old.
    const std::string abandoned = index + ".tmp12345", old = index + ".tmp0123456789abcdef.tmp7";
    const std::string alive = index + ".tmpfedcba9876543210.tmp7", other = index + ".tmpl";
    const timeval days[2] = {{time(nullptr) - 100'000, 0}, {time(nullptr) - 100'000, 0}};
    for (auto& file : {abandoned, old, alive, other}) write_file(file, std::string(4, '\0'));
    for (auto& file : {abandoned, old, other}) REQUIRE(utimes(file.c_str(), days) == 0);
    open();
    CHECK(library.number(" read") == 1); // the user's
    CHECK(library.says("left out: 1 binary: my.index.tmpl"));
    library.put("b.md", "lane");
    open();
    CHECK(!fs::exists(abandoned));
    CHECK(!fs::exists(old));
    CHECK(fs::exists(alive));
    CHECK(fs::exists(other));
    size_t left = 0; // of this program's own
    for (auto& entry : fs::directory_iterator(library.folder))
        left += entry.path().string().find(".tmp") != std::string::npos;
    CHECK(left == 2);
    library.put("my.index.md", "bank"), library.put("my.index.tmpl", "tensor"); // these are
    open();
    CHECK(library.number(" read") == 2);
    CHECK(library.number(" unchanged") == 2);
    CHECK(!library.says("left out"));
}

TEST_CASE("documents: two programs of one pid write the same index at the same time") {
    Library library;
    for (int i = 0; i < 200; i++) library.put(format("%d.md", i), "warp " + std::string(5000, 'x'));
    std::atomic<size_t> found{0};
    std::vector<std::thread> programs; // threads have one pid, as the first programs of two containers do
    for (int i = 0; i < 4; i++)
        programs.emplace_back([&] {
            try {
                found += Documents({library.folder, library.index, 4}, [](auto&) {}).find("warp").size();
            } catch (const Error& e) {
                MESSAGE(e.what());
            }
        });
    for (auto& p : programs) p.join();
    CHECK(found == 16);
    CHECK(std::distance(fs::directory_iterator(library.scratch / "."), fs::directory_iterator()) == 2);
}

TEST_CASE("documents: the index lies in the cache folder; nothing is written into the documents") {
    Library library;
    library.put("a.md", "warp");
    auto named = [](const char* cache, const char* home) {
        cache ? setenv("XDG_CACHE_HOME", cache, 1) : unsetenv("XDG_CACHE_HOME");
        home ? setenv("HOME", home, 1) : unsetenv("HOME");
        try {
            return default_index("/some/docs");
        } catch (const Error& e) {
            return std::string(e.what());
        }
    };
    const char *home = getenv("HOME"), *cache = getenv("XDG_CACHE_HOME");
    const std::string old_home = home ? home : "", old_cache = cache ? cache : "";
    const std::string file = format("/docs-%016llx.index", (unsigned long long)fnv1a("/some/docs"));
    CHECK(named((library.scratch / "c").c_str(), "/nowhere") == library.scratch / "c/qwen3" + file);
    CHECK(named(nullptr, (library.scratch / "h").c_str()) == library.scratch / "h/.cache/qwen3" + file);
    CHECK(named(nullptr, nullptr).find("--index FILE") != std::string::npos);
    named(cache ? old_cache.c_str() : nullptr, home ? old_home.c_str() : nullptr);
    library.open();
    CHECK(std::distance(fs::directory_iterator(library.folder), fs::directory_iterator()) == 1);
}

// ----------------------------------------------------------------------------------------- vectors

namespace {
// A vector for any text, by its hash; what was asked for is counted.
struct FakeVectors : VectorModel {
    uint64_t name = 0xfeed;
    size_t numbers = 21, stop_after = SIZE_MAX;
    Strings shown{}, asked{};

    static std::vector<float> vector_of(std::string_view text, size_t n) {
        std::vector<float> v;
        double squares = 0;
        for (uint64_t hash = fnv1a(text); v.size() < n; hash = fnv1a(&hash, sizeof hash))
            v.push_back((float)((double)(hash >> 40) / (1 << 24) - 0.5)), squares += (double)v.back() * v.back();
        for (float& x : v) x = (float)(x / std::sqrt(squares));
        return v;
    }
    uint64_t hash() const override { return name; }
    size_t dimensions() const override { return numbers; }
    void passages(const std::vector<std::string>& texts, const Each& each) override {
        for (size_t i = 0; i < texts.size() && !interrupted; i++) {
            shown.push_back(texts[i]);
            each(i, vector_of(texts[i], numbers));
            if (shown.size() == stop_after) interrupted = 1; // as Ctrl-C does
        }
    }
    std::vector<float> question(const std::string& text) override {
        asked.push_back(text);
        return vector_of(text, numbers);
    }
};
} // namespace
namespace {
struct VectorLibrary : Library {
    std::shared_ptr<FakeVectors> model = std::make_shared<FakeVectors>();
    const std::string vectors = index + ".000000000000feed.vectors";

    VectorLibrary() { models.vectors = model; }
    size_t made() { // by the open that counts
        const size_t before = model->shown.size();
        open();
        return model->shown.size() - before;
    }
    void fill(int n) const { // with two passages each
        for (int i = 0; i < n; i++) {
            const std::string more(300, (char)('a' + i % 26));
            put(format("%02d.md", i), format("# T%d\n\nwarp and number%d %s\n\n## Of banks %d\n\nbank %s", i, i,
                                             more.c_str(), i, more.c_str()));
        }
    }
};
} // namespace
// To 8 bits, the nearest, of two as near the even one: bf16 of an ordinary number.
static double rounded(float x) {
    int exponent;
    const double fraction = std::frexp((double)x, &exponent);
    return std::ldexp(std::nearbyint(fraction * 256) / 256, exponent);
}

TEST_CASE("rankings: joined by reciprocal ranks, worked out by hand") {
    Library library;
    for (const char* name : {"a", "b", "c", "d", "e"}) library.put(std::string(name) + ".md", "warp");
    library.open();
    const DocumentIndex index(library.index); // 0: a.md, 1: b.md, ...
    using Hit = DocumentIndex::Hit;
    const std::vector<Hit> words = {{0, 9}, {1, 8}, {2, 7}}, vectors = {{2, .9f}, {3, .8f}};
    const std::vector<Hit> all = index.joined({words, vectors}, 10);
    // c: 1/63 + 1/61; a: 1/61; b and d: 1/62, and b's file comes first
    const std::pair<uint32_t, double> wanted[] = {{2, 0.0322664585}, {0, 0.0163934426}, {1, 0.0161290323}, {3, 0.0161290323}};
    REQUIRE(all.size() == 4);
    for (size_t i = 0; i < 4; i++) {
        CHECK(all[i].passage == wanted[i].first);
        CHECK(all[i].score == doctest::Approx(wanted[i].second).epsilon(1e-7));
    }
    CHECK(index.joined({words, vectors}, 2).size() == 2);
    CHECK(index.joined({words, vectors}, 0).empty());
    CHECK(index.joined({{}, {}}, 3).empty());
    const std::vector<Hit> same = index.joined({words}, 3); // one ranking stays what it is
    for (size_t i = 0; i < 3; i++) CHECK(same[i].passage == words[i].passage);
}

TEST_CASE("vectors: the products are those of the rounded vectors, whatever their length") {
    for (const size_t n : {1, 3, 4, 15, 16, 17, 48, 1000}) {
        VectorLibrary library;
        library.fill(20);
        library.model->numbers = n;
        library.open();
        const DocumentIndex index(library.index);
        const VectorFile file(library.vectors);
        REQUIRE(file.size() == 40);
        CHECK(file.header().dimensions == n);
        CHECK(file.count_good() == 40);
        const std::vector<float> question = FakeVectors::vector_of("question", n), products = file.products(question);
        for (uint32_t p = 0; p < 40; p++) {
            const std::vector<float> v = FakeVectors::vector_of(shown_passage(index, p), n);
            double sum = 0;
            for (size_t k = 0; k < n; k++) sum += (double)question[k] * rounded(v[k]);
            CHECK(std::fabs(products[p] - sum) < 1e-6);
        }
        const auto hits = index.best(products, 40, -INFINITY);
        REQUIRE(hits.size() == 40); // negative ones, too
        for (size_t i = 1; i < hits.size(); i++) CHECK(hits[i - 1].score >= hits[i].score);
    }
}

TEST_CASE("vectors: words' and vectors' rankings are joined; a question without a word of its own finds nothing") {
    VectorLibrary library;
    library.fill(30);
    library.passages = 7;
    const Documents docs = library.open();
    const DocumentIndex index(library.index);
    const VectorFile file(library.vectors);
    for (const char* question : {"warp", "number7", "bank and warp", "unheard-of"}) {
        INFO(question);
        std::map<uint32_t, double> sums; // as the paper has it
        const auto words = index.search(question_words(jieba(), question), 60);
        const auto near = index.best(file.products(FakeVectors::vector_of(question, 21)), 60, -INFINITY);
        for (auto ranking : {&words, &near})
            for (size_t i = 0; i < ranking->size(); i++) sums[(*ranking)[i].passage] += 1. / (61 + (double)i);
        std::vector<double> best;
        for (auto [passage, sum] : sums) best.push_back(sum);
        std::sort(best.rbegin(), best.rend());
        const std::vector<Source> found = docs.find(question);
        REQUIRE(found.size() == 7);
        for (size_t i = 0; i < 7; i++) CHECK(found[i].score == doctest::Approx(best[i]).epsilon(1e-6));
        CHECK(library.model->asked.back() == question);
    }
    CHECK(docs.find("Why?").empty());
    CHECK(docs.find("Why?", "What is a warp?").size() == 7);
    CHECK(library.model->asked.back() == "What is a warp?");
    library.models = {};
    CHECK(library.open().hash() != docs.hash());
    CHECK(library.open().find("unheard-of").empty()); // words alone, as before
}

TEST_CASE("vectors: made once; only what changed is made anew, and the answers are those of a new index") {
    VectorLibrary library;
    library.fill(30);
    CHECK(library.made() == 60);
    CHECK(library.says("60 vectors of 21 numbers"));
    CHECK(library.says("60 made"));
    CHECK(library.model->shown[1].find("T0 > Of banks 0\n## Of banks 0\n\nbank aaa") == 0); // with its headings
    const std::string first = read_file(library.vectors);
    CHECK(library.made() == 0);
    CHECK(read_file(library.vectors) == first);

    library.put("03.md", "# T3\n\nnow of tensors");
    fs::remove(library.folder + "/07.md");
    fs::rename(library.folder + "/09.md", library.folder + "/zz.md"); // another name, the same text
    const timeval times[2] = {{1, 0}, {1, 0}};
    REQUIRE(utimes((library.folder + "/11.md").c_str(), times) == 0);
    library.put("05.md", read_file(library.folder + "/05.md") + "\n\n## More\n\nand a section that is new"); // two stay
    library.put("10b.md", "# T3\n\nnow of tensors"); // twice the same
    CHECK(library.made() == 2);
    CHECK(library.model->shown.end()[-2] == "T3\n# T3\n\nnow of tensors");
    CHECK(library.model->shown.end()[-1].find("and a section that is new") != std::string::npos);
    VectorLibrary fresh;
    for (auto& entry : fs::directory_iterator(library.folder)) fresh.put(entry.path().filename(), read_file(entry.path()));
    library.passages = fresh.passages = 64;
    const Documents a = library.open(), b = fresh.open();
    CHECK(a.hash() == b.hash());
    for (const char* question : {"warp", "number8 bank", "tensor", "T3"}) {
        const auto x = a.find(question), y = b.find(question);
        REQUIRE(x.size() == y.size());
        for (size_t i = 0; i < x.size(); i++) {
            CHECK(name_of(x[i]) == name_of(y[i]));
            CHECK(x[i].score == y[i].score);
        }
    }
    // Another model has a file of its own; the first one's stays.
    library.model->name = 0xbeef;
    CHECK(library.made() == fresh.model->shown.size());
    library.model->name = 0xfeed;
    CHECK(library.made() == 0);
}

TEST_CASE("vectors: a damaged file is told in one line, and only what is damaged is made anew") {
    VectorLibrary library;
    library.fill(10);
    library.open();
    const std::string good = read_file(library.vectors);
    const size_t start = sizeof(VectorFile::Header), stride = 16 + 2 * 21;
    REQUIRE(good.size() == start + 20 * stride);
    auto again = [&](const std::string& bytes, size_t made, const std::string& why) {
        write_file(library.vectors, bytes);
        CHECK(library.made() == made);
        INFO(library.all());
        CHECK(library.says(why.empty() ? "20 vectors" : library.vectors + ": " + why + "; made anew"));
        CHECK(library.told.size() == 2 + (size_t)!why.empty());
        CHECK(read_file(library.vectors) == good);
    };
    again(good, 0, "");
    again(good.substr(0, good.size() - 1), 1, "1 vector of 20 damaged or missing");
    again(good.substr(0, start + 7 * stride + 9), 13, "13 vectors of 20 damaged or missing");
    again(good.substr(0, start), 20, "20 vectors of 20 damaged or missing");
    again(good.substr(0, 20), 20, "no vectors of documents");
    again(good + "more", 0, "");
    for (size_t at = start; at < good.size(); at += 31) { // of a record any byte
        std::string bad = good;
        bad[at] ^= 0x40;
        again(bad, 1, "1 vector of 20 damaged or missing");
    }
    auto header = [&](size_t at, size_t made, const std::string& why) {
        std::string bad = good;
        bad[at] ^= 1;
        again(bad, made, why);
    };
    header(8, 20, "vectors of another version");
    header(16, 20, "vectors of another model"); // as if it had been given this one's name
    header(24, 0, "");                          // of other passages, by its hash: what they say is the same
    header(32, 20, "vectors of another model");
    header(40, 0, "1 vector of 21 damaged or missing");
    for (const std::string& other : {library.vectors, library.vectors + ".partial"}) {
        fs::remove(library.vectors);
        write_file(other, "my thesis, not yet finished");
        CHECK(library.fault(library.folder) == other + ": no vectors of documents; it is not overwritten");
        CHECK(read_file(other) == "my thesis, not yet finished");
        fs::remove(other);
    }
    again("qwen3vec", 20, "no vectors of documents");
}

TEST_CASE("vectors: who is stopped loses none that is finished") {
    VectorLibrary library;
    library.fill(30);
    library.model->stop_after = 37;
    const std::string partial = library.vectors + ".partial";
    CHECK(library.fault(library.folder) == library.vectors + ": 37 of 60 vectors are made; the same command goes on");
    interrupted = 0;
    CHECK(!fs::exists(library.vectors));
    write_file(partial, read_file(partial) + "half a record");
    library.put("00.md", "# New\n\none more"); // beside that what was made is of use
    CHECK(library.made() == 24);                 // 23 that are missing, and the new one
    CHECK(!fs::exists(partial));
    CHECK(VectorFile(library.vectors).count_good() == 59);
    const std::string whole = read_file(library.vectors);
    fs::remove(library.vectors);
    CHECK(library.made() == 59);
    CHECK(read_file(library.vectors) == whole);
    // A file that is under way may be damaged, too, or be of another version.
    library.model->stop_after = library.model->shown.size() + 20;
    fs::remove(library.vectors);
    CHECK(library.fault(library.folder).find("20 of 59 vectors") != std::string::npos);
    interrupted = 0;
    std::string bad = read_file(partial);
    bad[sizeof(VectorFile::Header) + 3 * 58 + 30] ^= 1;
    write_file(partial, bad);
    CHECK(library.made() == 40);
    CHECK(read_file(library.vectors) == whole);
    fs::remove(library.vectors);
    bad[8] ^= 1;
    write_file(partial, bad);
    CHECK(library.made() == 59);
    CHECK(read_file(library.vectors) == whole);
}

TEST_CASE("vectors: of two programs at the same time one makes them, the other waits") {
    VectorLibrary library;
    library.fill(30);
    library.models = {}, library.open(), library.models.vectors = library.model;
    std::atomic<size_t> made{0}, found{0};
    std::vector<std::thread> programs;
    for (int i = 0; i < 4; i++)
        programs.emplace_back([&] {
            DocumentModels models;
            auto own = std::make_shared<FakeVectors>();
            models.vectors = own;
            try {
                found += Documents({library.folder, library.index, 4}, [](auto&) {}, models).find("warp").size();
                made += own->shown.size();
            } catch (const Error& e) {
                MESSAGE(e.what());
            }
        });
    for (auto& p : programs) p.join();
    CHECK(found == 16);
    CHECK(made == 60);
    CHECK(!fs::exists(library.vectors + ".partial"));
}

TEST_CASE("vectors: files of an index that lies in the folder are no documents, and are not taken for abandoned ones") {
    VectorLibrary library;
    library.put("a.md", "warp");
    const std::string index = library.folder + "/my.index", vectors = index + ".000000000000feed.vectors";
    auto open = [&] {
        library.told.clear();
        Documents({library.folder, index, 4}, [&](const std::string& line) { library.told.push_back(line); }, library.models);
    };
    open();
    const timeval days[2] = {{time(nullptr) - 100'000, 0}, {time(nullptr) - 100'000, 0}};
    write_file(vectors + ".tmp123", "warp");
    write_file(index + ".0123456789abcdef.vector", "lane"); // a document
    for (auto& file : {vectors, vectors + ".tmp123"}) REQUIRE(utimes(file.c_str(), days) == 0);
    open();
    CHECK(library.number(" read") == 1);
    CHECK(fs::exists(vectors));
    CHECK(!fs::exists(vectors + ".tmp123"));
    CHECK(library.says("2 vectors of 21 numbers"));
    CHECK(library.model->shown.size() == 2);
}

TEST_CASE("documents: a reranker orders the first twenty, and what is not among them stays away") {
    struct Backwards : RankModel { // by the number in the text
        Strings shown{};
        std::string asked{};
        uint64_t hash() const override { return 7; }
        std::vector<double> scores(const std::string& question, const std::vector<std::string>& passages) override {
            std::vector<double> all;
            asked = question, shown = passages;
            for (auto& p : passages) all.push_back(atoi(p.c_str() + p.find("number") + 6) / 100.);
            return all;
        }
    };
    VectorLibrary library;
    for (int i = 0; i < 40; i++) library.put(format("%02d.md", i), format("# T\n\nwarp number%d %s", i, std::string(10 * i, 'x').c_str()));
    library.passages = 40;
    library.models = {};
    const Strings plain = files_of(library.open().find("warp"));
    REQUIRE(plain.size() == 40);
    auto ranks = std::make_shared<Backwards>();
    library.models.ranks = ranks, library.passages = 3;
    const Documents docs = library.open();
    const std::vector<Source> found = docs.find("What is a warp?");
    CHECK(ranks->asked == "What is a warp?");
    CHECK(ranks->shown.size() == 20);
    Strings first(plain.begin(), plain.begin() + 20);
    std::sort(first.rbegin(), first.rend());
    CHECK(files_of(found) == Strings{first[0], first[1], first[2]});
    CHECK(found[0].score == doctest::Approx(atoi(first[0].c_str()) / 100.));
    CHECK(docs.find("unheard-of").empty());
    library.models.vectors = library.model; // both: the reranker has the last word
    const Documents both = library.open();
    CHECK(both.find("warp").size() == 3);
    CHECK(ranks->shown.size() == 20);
    library.models.ranks = nullptr;
    CHECK(library.open().hash() != both.hash());
}

// ----------------------------------------------------------------------------------------- prompts

TEST_CASE("prompts: in the question's language, passages numbered, within the room, the last one cut") {
    auto measure = [](std::string_view s) { return s.size(); };
    CHECK(is_chinese("什么是 warp？"));
    CHECK(is_chinese("warp 是什么"));
    CHECK(!is_chinese("What is a warp?"));
    CHECK(!is_chinese("Is 是 a word of Chinese?"));
    CHECK(!is_chinese("42"));
    std::vector<Source> sources = {{"a.md", "Warps", "A warp has 32 lanes.", 3, 2.f},
                                   {"b.md", "", "一个线程束有 32 个线程。" + std::string(400, 'z'), 1, 1.f},
                                   {"c.md", "C", "third", 9, .5f}};
    auto some = sources;
    const std::string all = grounded("What is a warp?", some, 10000, measure);
    CHECK(some.size() == 3);
    CHECK(all.find("Answer the question from the passages") == 0);
    CHECK(all.find("not in the documents") != all.npos);
    CHECK(all.find("[1] a.md:3, Warps\nA warp has 32 lanes.\n\n[2] b.md:1\n一个") != all.npos);
    CHECK(all.substr(all.size() - 25) == "Question: What is a warp?");
    some = sources;
    const std::string chinese = grounded("什么是线程束？", some, 10000, measure);
    CHECK(chinese.find("文档中没有提到") != chinese.npos);
    CHECK(chinese.substr(chinese.size() - 30) == "问题：什么是线程束？");
    some = sources;
    const std::string question = "What is a warp?";
    CHECK(grounded(question, some, 0, measure) == question);
    CHECK(some.empty());
    CHECK(grounded(question, some, 100, measure) == question); // nothing was found, and to say so does not fit
    for (size_t room = 0; room < all.size() + 50; room += 3) {
        some = sources;
        const std::string text = grounded("What is a warp?", some, room, measure);
        CHECK(text.size() <= std::max(room, question.size()));
        CHECK((text == question) == some.empty());
        std::string valid;
        utf8_repair(valid, text, true);
        CHECK(valid == text); // cut between characters
        for (size_t i = 0; i < some.size(); i++) {
            CHECK(text.find(some[i].text) != text.npos);
            CHECK(sources[i].text.compare(0, some[i].text.size(), some[i].text) == 0);
            if (i + 1 < some.size()) CHECK(some[i].text == sources[i].text); // the last alone is cut
        }
    }
    some.clear();
    CHECK(grounded("What?", some, 10000, measure).find("(No passage was found.)") != std::string::npos);
}

TEST_CASE("prompts: a conversation that fits without passages fits with them, whatever is left for them") {
    Library library;
    library.put("a.md", "# Warps\n\nA warp has lanes." + std::string(900, 'z'));
    const Documents docs = library.open();
    auto measure = [](std::string_view s) { return s.size(); };
    auto rendered = [](const std::vector<Message>& all) {
        size_t size = 10;
        for (auto& m : all) size += m.content.size() + (m.content.size() > 400 ? 7 : 0); // more than its parts
        return size;
    };
    for (const std::string question : {"What is a warp?", "What is unheard-of?"})
        for (size_t most = 0; most < 1500; most += 7) {
            std::vector<Message> messages = {{"system", "Be brief."}, {"user", question}};
            const size_t plain = rendered(messages);
            const std::vector<Source> sources = add_passages(docs, messages, most, rendered, measure);
            CHECK(rendered(messages) <= std::max(most, plain));
            if (most < plain + 200) CHECK(messages[1].content == question);
            if (most > 1300) CHECK(sources.size() == (question == "What is a warp?"));
        }
}

TEST_CASE("prompts: a question without a word of its own is looked up as the one before it") {
    Library library;
    library.put("a.md", "# Warps\n\nA warp has lanes.");
    library.put("b.md", "# Banks\n\nShared memory has banks.");
    const Documents docs = library.open();
    CHECK(docs.find("why?").empty());
    CHECK(files_of(docs.find("Why?", "What is a warp?")) == Strings{"a.md"});
    CHECK(files_of(docs.find("How many banks?", "What is a warp?")) == Strings{"b.md"});
    CHECK(docs.find("\xff\xfe warp lanes").size() == 1); // whatever the bytes
    CHECK(docs.find(std::string(8000, 'x') + " warp lanes").size() == 1);
    CHECK(docs.find(std::string(8192, 'x') + " warp lanes").empty()); // so much of a question is looked up
}

// ----------------------------------------------------------------------------------------- qwen3 --docs

static const char* qwen3() { return getenv("QWEN3") ? getenv("QWEN3") : "./qwen3"; }
static const Strings MODEL = {"tests/fixtures/tiny/model.bin", "-z", "tests/fixtures/tiny/tokenizer.bin", "-t", "0", "-n", "4"};
static Result run(const Strings& more, std::string_view input = "") {
    Strings all = MODEL;
    all.insert(all.end(), more.begin(), more.end());
    return Process(qwen3(), all, input).wait();
}

TEST_CASE("qwen3 --docs: an answer, a chat and an evaluation with passages, and where they are from") {
    Library library;
    library.put("a.md", "# Warps\n\nA warp has 32 lanes.");
    library.put("b.md", "# Banks\n\nShared memory has banks.");
    const Strings docs = {"--docs", library.folder, "--index", library.index, "--quote", "0"};
    auto with = [&](Strings more) {
        more.insert(more.begin(), docs.begin(), docs.end());
        return more;
    };
    const std::string question = "What is a warp?";
    const Result plain = run({"-i", question, "--json"}), one = run(with({"-i", question, "--json"}));
    CHECK(one.status == 0);
    const Json answer(one.out), before(plain.out);
    CHECK(before["sources"].size() == 0);
    REQUIRE(answer["sources"].size() == 1);
    CHECK(answer["sources"][(size_t)0]["file"].str() == "a.md");
    CHECK(answer["sources"][(size_t)0]["heading"].str() == "Warps");
    CHECK(answer["sources"][(size_t)0]["line"].number() == 1);
    CHECK(answer["sources"][(size_t)0]["text"].str() == "# Warps\n\nA warp has 32 lanes.");
    CHECK(one.err.find("[1] a.md:1, Warps\n") != std::string::npos);
    CHECK(one.err.find("2 passages of 2 files") != std::string::npos);

    // The prompt is `grounded`, and nothing else.
    std::vector<Source> sources = library.open().find(question);
    auto measure = [](std::string_view s) { return s.size(); };
    const Result same = run({"-i", grounded(question, sources, 1 << 20, measure), "--json"});
    CHECK(Json(same.out)["ids"].size() == answer["ids"].size());
    CHECK(Json(same.out)["text"].str() == answer["text"].str());
    CHECK(Json(same.out)["prompt_tokens"].number() == answer["prompt_tokens"].number());

    // In a context too small for a passage there is what fits, and the answer has its room.
    const Result small = run(with({"-i", question, "--json", "-c", "160"}));
    CHECK(small.status == 0);
    CHECK(Json(small.out)["prompt_tokens"].number() <= 156);

    const Result chat = run(docs, "What is a warp?\nWhy?\nWhat are banks?\n");
    CHECK(chat.status == 0);
    Strings told;
    for (auto& line : lines(chat.err))
        if (line[0] == '[') told.push_back(line);
    CHECK(told == Strings{"[1] a.md:1, Warps", "[1] a.md:1, Warps", "[1] b.md:1, Banks"});
    const std::string unused = "no passage of the documents was used\n";
    CHECK(chat.err.find(unused) == chat.err.npos);
    CHECK(run(docs, "unheard-of\n").err.find(unused) != std::string::npos);
    CHECK(run(with({"-i", "unheard-of"})).err.find(unused) != std::string::npos);
    CHECK(plain.err.find(unused) == plain.err.npos);

    const std::string rows = library.scratch / "qa.jsonl", out = library.scratch / "out.jsonl";
    write_file(rows, "{\"instruction\": \"What are banks?\", \"output\": \"Parts of shared memory.\"}\n"
                     "{\"instruction\": \"What is unheard-of?\", \"output\": \"Nothing.\"}\n");
    CHECK(run(with({"--eval", rows, "-o", out})).status == 0);
    const Strings made = lines(read_file(out));
    REQUIRE(made.size() == 2);
    CHECK(Json(made[0])["question"].str() == "What are banks?");
    CHECK(Json(made[0])["sources"][(size_t)0]["file"].str() == "b.md");
    CHECK(!Json(made[1])["sources"]);
    // A row's tools are in its prompt: passages take no more than they leave.
    const std::string tool = "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"" +
                             std::string(60, 'd') + "\", \"parameters\": {}}}";
    write_file(library.scratch / "tools.jsonl",
               "{\"messages\": [{\"role\": \"user\", \"content\": \"What are banks?\"}, "
               "{\"role\": \"assistant\", \"content\": \"Parts.\"}], \"tools\": [" + tool + "]}\n");
    for (const char* context : {"400", "700"}) { // 350 tokens without a passage, 490 with one
        const std::string to = library.scratch / format("tools%s", context);
        CHECK(run(with({"--eval", library.scratch / "tools.jsonl", "-o", to, "-c", context})).status == 0);
        const Json row(read_file(to));
        CHECK(!row["error"]);
        CHECK((bool)row["sources"] == (std::string_view(context) == "700"));
    }
    // A half evaluation goes on with the same documents only.
    const std::string half = library.scratch / "half.jsonl";
    fs::copy(out, half + ".partial");
    library.put("c.md", "more");
    Result other = run(with({"--eval", rows, "-o", half}));
    other.err.erase(0, other.err.rfind("qwen3: ")); // what was read comes before it
    check_refusal(other, "qwen3", "begun with another model, other rows or options");
}

TEST_CASE("qwen3 --docs: a model that is too small to use passages quotes the best one") {
    Library library;
    library.put("a.md", "# Warps\n\nA warp has 32 lanes.");
    library.put("b.md", "# Banks\n\nShared memory has banks.");
    const std::string quote = "# Warps\n\nA warp has 32 lanes.\n\n— a.md:1, Warps";
    auto ask = [&](const Strings& more, std::string_view input = "") {
        Strings all = {"--docs", library.folder, "--index", library.index, "-n", "200"};
        all.insert(all.end(), more.begin(), more.end());
        return run(all, input);
    };
    const Result one = ask({"-i", "What is a warp?", "--json"});
    REQUIRE(one.status == 0);
    CHECK(one.err.find("the best passage of --docs is quoted: 0.2 M parameters are too few to use passages\n") !=
          std::string::npos);
    const Json answer(one.out);
    CHECK(answer["text"].str() == quote);
    CHECK(answer["finish_reason"].str() == "stop");
    CHECK(answer["answer_tokens"].number() == (double)answer["ids"].size());
    CHECK(answer["sources"][(size_t)0]["file"].str() == "a.md");
    const Result text = ask({"-i", "What is a warp?"});
    CHECK(text.out == quote + "\n");
    CHECK(text.err.find("[1]") == std::string::npos);
    CHECK(text.err.find(format("\na quote of %zu tokens (stop)\n", answer["ids"].size())) != std::string::npos);
    CHECK(text.err.find("no passage") == std::string::npos);
    CHECK(Json(ask({"-i", "What is a warp?", "--json", "-n", "3"}).out)["finish_reason"].str() == "length");
    // Where nothing is found, the model answers as without documents.
    const Result own = ask({"-i", "unheard-of"});
    CHECK(own.out == run({"-i", "unheard-of", "-n", "200"}).out);
    CHECK(own.err.find("no passage of the documents was used\n") != std::string::npos);
    CHECK(ask({}, "unheard-of\n").err.find("no passage of the documents was used\n") != std::string::npos);
    CHECK(ask({}, "What is a warp?\nWhy?\n").out == quote + "\n" + quote + "\n");
    const std::string rows = library.scratch / "qa.jsonl", out = library.scratch / "out.jsonl";
    write_file(rows, "{\"instruction\": \"What is a warp?\", \"output\": \"32 lanes.\"}\n");
    CHECK(ask({"--eval", rows, "-o", out}).status == 0);
    CHECK(Json(read_file(out))["answer"].str() == quote);
    CHECK(Json(read_file(out))["finish"].str() == "stop");
}

TEST_CASE("a quote is cut behind a sentence or a line to fit, and ends at a stop string as an answer does") {
    const Tokenizer tokenizer("tests/fixtures/tiny/tokenizer.bin");
    const Source source = {"a.md", "Warps", "A warp has lanes. It has 32.\n\n```\nint x;\nint y;\n```\n"
                           "线程束很小。它有 32 个线程。", 1, 2.f};
    const std::string end = "\n\n— a.md:1, Warps";
    auto tokens = [&](const std::string& text) { return tokenizer.encode(text, false).size(); };
    const Quote all = quote(source, tokenizer, 1000, {}, 1000);
    CHECK(all.text == source.text + end);
    CHECK(all.ids.size() == tokens(all.text));
    for (size_t room = 0; room < tokens(all.text) + 5; room++) {
        const Quote q = quote(source, tokenizer, room, {}, 1000);
        CAPTURE(q.text);
        REQUIRE(q.text.size() >= end.size());
        CHECK(q.text.substr(q.text.size() - end.size()) == end);
        CHECK((q.ids.size() <= room || q.text == " …" + end));
        const std::string kept = q.text.substr(0, q.text.find(" …"));
        CHECK(source.text.compare(0, kept == q.text ? 0 : kept.size(), kept == q.text ? "" : kept) == 0);
        CHECK((q.text.find("int") == q.text.npos || q.text.find("\n```\n") != q.text.npos)); // fences are closed
        std::string repaired;
        utf8_repair(repaired, q.text, true);
        CHECK(repaired == q.text);
    }
    const Quote stopped = quote(source, tokenizer, 1000, {"never", "It has"}, 1000);
    CHECK(stopped.text == "A warp has lanes. ");
    CHECK(stopped.stop == "It has");
    const Quote cut = quote(source, tokenizer, 1000, {}, 4);
    CHECK(cut.ids.size() == 4);
    CHECK(cut.finish == std::string("length"));
}

TEST_CASE("a passage with few of the question's words is not shown") {
    Library library;
    for (int i = 0; i < 40; i++)
        library.put(format("%d.md", i),
                    format("number%d of a kernel with threads and a common word, long enough to tell", i));
    const Documents docs = library.open();
    CHECK(docs.find("How do I bake a kernel cake with yeast?").empty());
    CHECK(docs.find("What is a kernel?").size() == 4);
    CHECK(docs.find("How long is number7 of the kernels?").size() == 4);
    // One word of several is not enough, however rare; a question's only word is.
    library.put("tap.md", "A tap on the screen: tap, tap.");
    const Documents more = library.open();
    CHECK(more.find("How do I repair a dripping tap?").empty());
    CHECK(files_of(more.find("Please explain what a tap is.")) == Strings{"tap.md"});
    CHECK(files_of(more.find("a tap on a screen, dripping with paint?")) == Strings{"tap.md"});
    const Documents notes({"data/course/notes", library.scratch / "notes.index", 4}, [](auto&) {});
    for (std::string file : {"everyday", "unrelated"}) {
        int all = 0, found = 0;
        for (auto& question : lines(read_file("tests/fixtures/" + file + ".txt")))
            all++, found += !notes.find(question).empty();
        CAPTURE(file);
        CHECK(all == (file == "everyday" ? 200 : 100));
        CHECK(20 * found <= all); // 5%
    }
    for (const char* question : {"什么是 warp？", "什么是共享内存？", "What is CUDA?", "What is coalesced access?"})
        CHECK(!notes.find(question).empty());
}

TEST_CASE("qwen3 --docs: what is wrong is one line") {
    Library library;
    auto refused = [](const Strings& more, const char* word) {
        Result r = run(more);
        r.err.erase(0, r.err.rfind("qwen3: ")); // lines of progress come before it
        check_refusal(r, "qwen3", word);
    };
    refused({"-i", "a", "--docs", library.folder, "--index", library.index}, "no text in it");
    refused({"-i", "a", "--docs", library.folder + "/none"}, "No such file or directory");
    refused({"-i", "a", "--index", library.index}, "--index is for --docs");
    refused({"-i", "a", "--passages", "4"}, "--passages is for --docs");
    refused({"-i", "a", "--quote", "1"}, "--quote is for --docs");
    refused({"-i", "a", "--docs-embed", "README.md"}, "--docs-embed is for --docs");
    refused({"-i", "a", "--docs-rerank", "README.md"}, "--docs-rerank is for --docs");
    library.put("a.md", "warp");
    refused({"-i", "a", "--docs", library.folder, "--index", library.index, "--docs-embed", "/no/model"}, "/no/model");
    refused({"-i", "a", "--docs", library.folder, "--index", library.index, "--docs-rerank", "/no/model"}, "/no/model");
    fs::remove(library.folder + "/a.md");
    refused({"--raw", "-i", "a", "--docs", library.folder}, "--docs is for questions");
    refused({"--ids", "1", "--docs", library.folder}, "--docs is for questions");
    refused({"-i", "a", "--docs", ""}, "--docs needs a value");
    refused({"-i", "a", "--docs", library.folder, "--passages", "0"}, "--passages");
    // --tools goes with a chat only, and is refused before anything is loaded: the model is not there, and README.md has no rows.
    const Scratch scratch;
    const std::string tools = scratch / "tools.json";
    write_file(tools, R"([{"type": "function", "function": {"name": "f"}, "command": ["true"]}])");
    auto no_tools = [&](Strings more) {
        more.insert(more.end(), {"--tools", tools});
        more.insert(more.begin(), "/absent/model");
        check_refusal(Process(qwen3(), more).wait(), "qwen3", "--tools is for a chat");
    };
    no_tools({"-i", "a"}), no_tools({"--ids", "1"}), no_tools({"--ppl", "README.md"}), no_tools({"--bench"});
    no_tools({"--eval", "README.md", "-o", "b"}), no_tools({"--embed", "-i", "a"});
    no_tools({"--rerank", "-i", "a", "--texts", "README.md"});
}
