// datagen: its parts from inside; the whole pipeline from outside (DATAGEN, else ./datagen) on tests/fixtures/book.md,
// with an endpoint in a thread that fails in every way an endpoint can, and a kill in the middle.
#include "book/chunks.h"
#include "book/conversations.h"
#include "book/datagen/collect.h"
#include "book/datagen/leakage.h"
#include "book/datagen/minhash.h"
#include "book/datagen/patterns.h"
#include "book/datagen/prompt.h"
#include "book/datagen/requests.h"
#include "book/datagen/rouge_index.h"
#include "book/markdown.h"
#include "book/pages.h"
#include "book/rows.h"
#include "book/text.h"
#include "book/words.h"
#include "datagen.cpp" // its options and table of commands; not main
#include "model/chat_template.h"
#include "model/dataset.h"
#include "model/tokenizer.h"
#include "model/utf8.h"
#include "sj.h"
#include "tests/http.h"
#include "tests/process.h"
#include <atomic>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

using namespace book;
using namespace std::literals;

static const char* PROGRAM = getenv("DATAGEN") ? getenv("DATAGEN") : "./datagen";
static const std::string BOOK = "tests/fixtures/book.md";

// ----------------------------------------------------------------------------------------- tools

namespace {
struct Datagen : Process {
    explicit Datagen(const Strings& arguments, std::string_view input = "")
        : Process(PROGRAM, arguments, input, [] { setenv("no_proxy", "*", 1); }) {} // the endpoint is here
};
} // namespace
static Result datagen(const Strings& arguments, std::string_view input = "") { return Datagen(arguments, input).wait(); }
static Result good(const Strings& arguments, std::string_view input = "") {
    const Result r = datagen(arguments, input);
    INFO(arguments[0] << ": " << r.err);
    REQUIRE(r.status == 0);
    return r;
}
static void check_refused(const Strings& arguments, const std::string& word, std::string_view input = "") {
    check_refusal(datagen(arguments, input), "datagen", word);
}
// One field of every row of a file, as text.
static Strings column(const std::string& path, const std::string& name) {
    Strings all;
    for (auto& line : lines(read_file(path))) all.push_back(Json(line)[name].str());
    return all;
}
static std::string alpaca(const std::string& question, const std::string& answer, const std::string& more = "") {
    sj::Writer w;
    w.object().field("instruction", question).field("input", "").field("output", answer);
    return w.text + more + "}";
}
static std::map<std::string, size_t> rules(const std::string& path) {
    std::map<std::string, size_t> counts;
    for (auto& rule : column(path, "rule")) counts[rule]++;
    return counts;
}

// data/datagen with other limits.
[[maybe_unused]] static std::string data_with(const Scratch& scratch, const std::map<std::string, std::string>& changes) {
    const std::string folder = scratch / "data";
    fs::create_directories(folder);
    for (auto& f : fs::directory_iterator("data/datagen"))
        if (f.path().extension() == ".txt" || f.path().filename() == "prompts") fs::copy(f.path(), folder / f.path().filename(), fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    std::string limits = read_file("data/datagen/limits.txt");
    for (auto& [name, value] : changes) {
        const size_t at = limits.find("\n" + name + " ");
        REQUIRE(at != std::string::npos);
        limits.replace(at + 1, limits.find('\n', at + 1) - at - 1, name + " " + value);
    }
    write_file(folder + "/limits.txt", limits);
    return folder;
}

// --------------------------------------------------------------------------------------- rows in

static Strings read_rows(const std::string& content, Strings* faults = nullptr) {
    const MemoryFile file(content);
    Strings rows;
    for (Reader in(file.path); in.next();) {
        CHECK(in.again(in.place())->text == in.text);
        rows.push_back(in.fault.empty() ? sj::dump(in.row()) : "fault");
        if (faults && !in.fault.empty()) faults->push_back(in.where().substr(in.where().rfind(':') + 2) + ": " + in.fault);
    }
    return rows;
}

TEST_CASE("a file of rows: lines or one array, byte order mark, blank lines, no last newline") {
    const Strings two = {"{\"a\": 1}", "{\"b\": [2, \"],\\\"[\"]}"};
    for (std::string mark : {"", "\xEF\xBB\xBF"})
        for (std::string s : {"{\"a\":1}\n{\"b\":[2,\"],\\\"[\"]}", "\n \r\n{\"a\":1}\r\n\n{\"b\":[2,\"],\\\"[\"]}\n\n", "[{\"a\":1},{\"b\":[2,\"],\\\"[\"]}]",
                              " \n[\n {\"a\"\n:1}\n,\n{\"b\":[2,\"],\\\"[\"]} ] \n"})
            CHECK(read_rows(mark + s) == two);
    CHECK(read_rows("").empty());
    CHECK(read_rows("\n\n").empty());
    CHECK(read_rows("[]").empty());
    CHECK_THROWS_WITH_AS(read_rows("[{}"), doctest::Contains("no end"), Error);
    CHECK_THROWS_WITH_AS(read_rows("[{}] x"), doctest::Contains("after the array"), Error);
    CHECK_THROWS_WITH_AS(Reader("tests"), doctest::Contains("directory"), Error);
    CHECK_THROWS_WITH_AS(Reader("no/such"), doctest::Contains("no/such"), Error);
}

TEST_CASE("a bad row has a fault with its place, and the rows after it are read") {
    Strings faults;
    CHECK(read_rows("{}\n{\"a\":}\n\n\xff\n{}", &faults) == Strings{"{}", "fault", "fault", "{}"});
    CHECK(faults == Strings{"line 2: byte 5: expected a value", "line 4: byte 0: expected a value"});
    faults.clear();
    CHECK(read_rows("[{}, {a}, {}]", &faults) == Strings{"{}", "fault", "{}"});
    CHECK(faults == Strings{"item 2: byte 2: expected a key in quotes"});
}

TEST_CASE("a line that is too long costs one row, and no memory") {
    std::string all = "{}\n";
    all += "\"" + std::string(Reader::LONGEST + 10, 'a') + "\"\n{}\n";
    Strings faults;
    CHECK(read_rows(all, &faults) == Strings{"{}", "fault", "{}"});
    REQUIRE(faults.size() == 1);
    CHECK(faults[0] == "line 2: longer than 64 MB");
    all[0] = '[', all[1] = ' ', all[all.size() - 4] = ',', all[all.size() - 3] = '1', all[all.size() - 2] = ']';
    faults.clear();
    CHECK(read_rows(all, &faults) == Strings{"fault", "1"});
}

TEST_CASE("lines across the borders of the buffer") {
    std::string all;
    Strings rows;
    for (size_t i = 0; i < 3000; i++) {
        rows.push_back("{\"a\": \"" + std::string(i * 37 % 2000, (char)('a' + i % 26)) + "\"}");
        all += rows.back() + "\n";
    }
    CHECK(read_rows(all) == rows);
    for (char& c : all) c = c == '\n' ? ',' : c;
    all.back() = ']';
    CHECK(read_rows("[" + all) == rows);
}

// ----------------------------------------------------------------------------------------- words

TEST_CASE("patterns: blanks, numbers, whole words, exceptions") {
    const MemoryFile file("; comment\nfigure #\n图_#\n第_#_章\nas  shown\n见代码 ; comment\n!常见代码\nthe above\nprefix sum\n");
    const Patterns p(file.path);
    auto found = [&](const char* s) { return p.find(decode(s)); };
    CHECK(found("see Figure 3.2.") == "Figure 3.2");
    CHECK(found("see\nFIGURE \n 3-2") == "FIGURE \n 3-2");
    CHECK(found("figure of merit") == "");
    CHECK(found("configure 3") == "");
    CHECK(found("如图3所示") == "图3");
    CHECK(found("如图 12-4 所示") == "图 12-4");
    CHECK(found("图像有 3 个通道") == "");
    CHECK(found("第三章") == "第三章");
    CHECK(found("第 5 章") == "第 5 章");
    CHECK(found("第一线程") == "");
    CHECK(found("请见代码") == "见代码");
    CHECK(found("常见代码") == "");
    CHECK(found("常见代码，见代码") == "见代码");
    CHECK(found("the above.") == "the above");
    CHECK(found("the aboveground") == "");
    CHECK(found("A prefix sum") == "prefix sum");
    CHECK(found("") == "");
    CHECK_THROWS_WITH_AS(Patterns(MemoryFile("a\n#b\n").path), doctest::Contains("line 2"), Error);
    CHECK_THROWS_WITH_AS(Patterns(MemoryFile("a\n\xff\n").path), doctest::Contains("line 2"), Error);
}

TEST_CASE("words and language") {
    auto words = [](const char* s) {
        std::string all;
        const std::u32string text = decode(s);
        for_each_word(text, [&](size_t i, size_t j) {
            for (char32_t c : text.substr(i, j - i)) utf8_append(all, c);
            all += '|';
        });
        return all;
    };
    CHECK(words("A warp是32个线程，naïve？ x_1") == "A|warp|是|32|个|线|程|naïve|x|1|");
    CHECK(words("～「」…→😀 ①") == "");
    CHECK(word_hashes(decode("Warp")) == word_hashes(decode("wARP")));
    CHECK(cjk_share(decode("warp 是线程")) == doctest::Approx(0.75));
    CHECK(cjk_share(decode("是线程 `int a = b;` ```\nfor while\n``` 束")) == 1);
    CHECK(cjk_share(decode("...")) == -1);
}

// ---------------------------------------------------------------------------------------- chunks

static ChunkSizes sizes_of(size_t most, size_t overlap) { return {most, most * 7 / 10, overlap, 120}; }

// Every byte is in a chunk; only whole characters; bodies as long as asked, unless of a fence; the overlap as well.
static std::vector<Chunk> check_chunks(std::string_view book, const ChunkSizes& sizes) {
    const std::vector<Chunk> chunks = cut_chunks(book, sizes);
    size_t at = 0;
    for (auto& c : chunks) {
        REQUIRE(c.begin <= c.body);
        REQUIRE(c.body == at);
        REQUIRE(c.body < c.end);
        REQUIRE(c.end <= book.size());
        const std::string_view text = book.substr(c.begin, c.end - c.begin), body = book.substr(c.body, c.end - c.body);
        std::string repaired;
        utf8_repair(repaired, text, true);
        CHECK(repaired == text);
        CHECK(count_characters(book.substr(c.begin, c.body - c.begin)) <= sizes.overlap);
        if (sizes.measure(body) > sizes.most) CHECK((body.find("```") != body.npos || body.find("~~~") != body.npos));
        at = c.end;
    }
    CHECK(at == book.size());
    return chunks;
}

TEST_CASE("every character of hostile Markdown is in some chunk") {
    std::string endless, characters, sentences, fences, headings;
    for (int i = 0; i < 3000; i++) {
        endless += "一二三四五六七八九十"[3 * (i % 10)], endless += "一二三四五六七八九十"[3 * (i % 10) + 1], endless += "一二三四五六七八九十"[3 * (i % 10) + 2];
        characters += i % 7 ? "x" : "\xF0\x9F\x98\x80";
        sentences += i % 9 ? "字" : "。";
        fences += "```" + std::string((size_t)i % 5, '`') + "\n# x\n";
        headings += std::string(1 + (size_t)i % 8, '#') + " h\n";
    }
    const std::string book = read_file(BOOK);
    std::string crlf;
    for (char c : book) crlf += c == '\n' ? "\r\n" : std::string(1, c);
    const Strings books = {"", "\n", " ", "#", "# ", "```", "```\n", "~~~~\n```\n", "a", "\n\n\na\n\n\n", "a\r\rb\rc", endless, characters, sentences, fences, headings,
        "```c\n# not closed\n" + endless, "~~~\n" + endless + "\n~~~", "| a | b |\n|---|---|\n" + endless + "\n| c | d |\n", "$$\n\\frac{a}{b}\n\n\n= c\n$$\n",
        "---\ntitle: x\n---\n", "a\n===\nb\n---\n===\n", std::string("\0\0# \0\n", 6), "> ```\n> # quoted\n> ```\n", "- ```\n  # x\n  ```\n", std::string(5000, '`'), std::string(5000, '#'),
        std::string(5000, '\n'), "# " + endless, endless + "\n===", book, crlf, book + book};
    for (auto& b : books)
        for (size_t most : {50, 333, 3500})
            for (size_t overlap : {0, 20, 5000}) {
                INFO(b.substr(0, 60) << ", " << most << ", " << overlap);
                if (b.empty()) CHECK(cut_chunks(b, sizes_of(most, overlap)).empty());
                else check_chunks(b, sizes_of(most, overlap));
            }
}

TEST_CASE("chunks of the book: fences whole, headings where they belong, overlap of whole sentences") {
    const std::string book = read_file(BOOK);
    for (size_t most : {60, 150, 400, 1000}) {
        const auto chunks = check_chunks(book, sizes_of(most, 80));
        for (std::string fence : {"```cuda\n# 井", "~~~text\n"}) { // no chunk's body begins inside
            const size_t begin = book.find(fence), end = book.find(fence[0] == '`' ? "\n```\n" : "\n~~~\n", begin + 5) + 5;
            for (auto& c : chunks) CHECK(!(c.body > begin && c.body < end));
            for (auto& c : chunks) CHECK(!(c.begin > begin && c.begin < end));
        }
        size_t overlaps = 0;
        for (auto& c : chunks) {
            CHECK(c.chapter.find("井号") == std::string::npos);
            CHECK(c.chapter.find("So is") == std::string::npos);
            overlaps += c.begin < c.body;
            const size_t last = book.rfind('\n', c.end - 2) + 1; // a heading never ends a chunk
            CHECK(heading_level(std::string_view(book).substr(last, c.end - last)) == 0);
        }
        if (most < 400) CHECK(overlaps > 0);
    }
    const auto chunks = check_chunks(book, sizes_of(150, 0));
    auto chapter_at = [&](const char* text) {
        for (auto& c : chunks)
            if (book.find(text) < c.end) return c.chapter;
        return std::string("none");
    };
    CHECK(chapter_at("网格由线程块组成") == "线程与线程束 > 线程块的划分");
    CHECK(chapter_at("全局内存的容量大") == "内存与合并访问");
    CHECK(chapter_at("矩阵乘法先把") == "内存与合并访问 > 共享内存与分块");
    CHECK(chapter_at("An inclusive scan") == "Reductions and scans > Scan");
    CHECK(chapter_at("The order of floating") == "Reductions and scans > Setext headings");
}

// The headings of a text that chapters are made of: "1 Title", "2 Title".
static Strings headings_of(const std::string& text) {
    std::vector<std::string_view> parts;
    for (size_t at = 0; at < text.size(); at += parts.back().size())
        parts.push_back(std::string_view(text).substr(at, std::min(text.find('\n', at), text.size() - 1) + 1 - at));
    Strings all;
    for (auto& b : markdown_blocks(parts)) {
        if (b.kind != MarkdownBlock::HEADING) continue;
        const auto chunks = cut_chunks(text.substr((size_t)(parts[b.line].data() - text.data())), sizes_of(1 << 20, 0)); // it is the first there
        all.push_back(std::to_string(b.level) + " " + chunks.at(0).chapter.substr(0, chunks[0].chapter.find(" > ")));
    }
    return all;
}

TEST_CASE("Markdown: what is a heading is CommonMark's to say (libcmark)") {
    const struct { std::string text; Strings headings; } both[] = { // with libcmark and without
        {"# x", {"1 x"}}, {"###### x ##", {"6 x"}}, {"#\tx", {"1 x"}}, {"  # x\n", {"1 x"}}, {"#x\n\n####### x\n\n\\# x\n", {}}, {"a\n===\n\nb\n---\n", {"1 a", "2 b"}}, {"a\n\n---\n", {}},
        {"```\n# x\n```\n# y", {"1 y"}}, {"~~~ c\n# x\n~~~\n# y", {"1 y"}}, {"````\n```\n# x\n````\n# y\n", {"1 y"}}, {"```c\nint x;\n\n# y\n", {"1 y"}}, {"> # x\n\n# y", {"1 y"}}, {"# a\r\n\r\nb\r\n===\r\n", {"1 a", "1 b"}},
        {"text\n# x\ntext", {"1 x"}}};
    const struct { std::string text; Strings headings; } odd[] = {
        {"<!--\n# x\n\n# z\n-->\n\n# y\n", {"1 y"}}, {"<pre>\n# x\n\n# z\n</pre>\n\n# y\n", {"1 y"}}, {"<script>\n# x\n</script>\n# y\n", {"1 y"}}, {"<div>\n# x\n</div>\n\n# y\n", {"1 y"}}, {"<div>\n\n# x\n\n</div>\n", {"1 x"}},
        {"- ```\n  # x\n  ```\n\n# y\n", {"1 y"}}, {"1. ~~~\n   # x\n   ~~~\n\n# y\n", {"1 y"}}, {"> ```\n> # x\n> ```\n\n# y\n", {"1 y"}}, {"- a\n\n  ```\n  # x\n  ```\n", {}}, {"- # x\n\n# y\n", {"1 y"}},
        {"- a\n---\n", {}}, {"* a\n* b\n---\n# y\n", {"1 y"}}, {"1. a\n---\n", {}}, {"10) a\n---\n", {}}, {"> a\n---\n", {}}, {"> a\n> ---\n", {}}, {"    code\n---\n", {}}, {"\tcode\n---\n", {}}, {"    # x\n", {}},
        {"a\nb\n===\n", {"1 a b"}}, {"a\nb\nc\n---\n", {"2 a b c"}}, {"a\n=\n", {"1 a"}}, {"a\n-\n", {"2 a"}}, {"a\n  ==  \n", {"1 a"}}, {"a\n= =\n", {}}, {"# x\n---\n", {"1 x"}}, {"a\n\n===\n", {}}, {"***\n---\n", {}},
        {"`a\n# x`\n", {"1 x`"}}, {"[a]: /b\n# x\n", {"1 x"}}, {"a\n    # x\n", {}}, {"| a |\n|---|\n# y\n", {"1 y"}}, {"- a\n  ===\n", {}}, {"-\n---\n", {}}, {"a\r# x\rb\n", {}}};
    for (auto& c : both) {
        INFO(c.text);
        CHECK(headings_of(c.text) == c.headings);
    }
    if (!markdown_is_commonmark()) {
        printf("skipped: headings of odd Markdown: this build has no libcmark\n");
        return;
    }
    // Each in each other's neighbourhood: 35 x 35 documents.
    for (auto& a : odd)
        for (auto& b : odd) {
            const std::string text = a.text + "\n\n# between\n\n" + b.text;
            if (a.text.find('<') == 0 && a.text.find("</") == a.text.npos && a.text.find("-->") == a.text.npos) continue;
            Strings wanted = a.headings;
            wanted.push_back("1 between");
            wanted.insert(wanted.end(), b.headings.begin(), b.headings.end());
            INFO(text);
            CHECK(headings_of(text) == wanted);
            check_chunks(text, sizes_of(60, 10));
        }
    // A fence in a list stays whole, and is no place to cut.
    const std::string fenced = "- item\n\n  ```c\n  int first;\n\n  # not a chapter\n  int last;\n  ```\n\n- next\n";
    for (auto& c : check_chunks(fenced, sizes_of(50, 0))) CHECK((fenced.substr(c.body, c.end - c.body).find("first") == std::string::npos) == (fenced.substr(c.body, c.end - c.body).find("last") == std::string::npos));
}

TEST_CASE("a fence that nothing closes is text, and headings after it are headings") {
    const std::string book = "# A\n\n" + std::string(300, 'a') + "\n```c\nint x;\n\n# B\n\n" + std::string(300, 'b') + "\n";
    const auto chunks = check_chunks(book, sizes_of(320, 0));
    CHECK(chunks.back().chapter == "B");
}

TEST_CASE("chunking a long book takes time in proportion to it") {
    std::string fences, line;
    for (int i = 0; i < 200000; i++) fences += "```" + std::to_string(i) + "\n"; // each could open, none closes
    const double start = seconds();
    check_chunks(fences, sizes_of(3500, 200));
    check_chunks(std::string(4000000, 'a'), sizes_of(3500, 200));
    std::string numbers, breaks(200000, 'a'), halves;
    for (int i = 0; i < 30000; i++) numbers += std::to_string(i) + "\n\n", breaks += "\fa\n1", halves += "aa-\n";
    for (auto& text : {numbers, breaks, halves, std::string(500000, 'a')}) clean_pages(text);
    CHECK(seconds() - start < 20);
}

TEST_CASE("chunk: stable ids, token budgets, UTF-8 only") {
    Scratch scratch;
    const std::string out = good({"chunk", BOOK, "--characters", "500"}).out;
    CHECK(out == good({"chunk", BOOK, "--characters", "500"}).out);
    const std::string book = read_file(BOOK);
    size_t at = 0;
    std::set<std::string> ids;
    for (auto& line : lines(out)) {
        const Json c(line);
        CHECK(c["text"].str() == book.substr((size_t)c["begin"].number(), (size_t)(c["end"].number() - c["begin"].number())));
        CHECK(c["body"].number() == (double)at);
        CHECK(c["lang"].str() == (c["chapter"].str().find("Reduc") == 0 ? "en" : "zh"));
        CHECK(c["source"].str() == "book.md");
        CHECK(ids.insert(c["id"].str()).second);
        at = (size_t)c["end"].number();
    }
    CHECK(at == book.size());
    // A change at its end leaves the ids before it alone.
    write_file(scratch / "longer.md", book + " an end.\n\n# New\n\nMore.\n");
    size_t same = 0;
    for (auto& line : lines(good({"chunk", scratch / "longer.md", "--characters", "500"}).out)) same += ids.count(Json(line)["id"].str());
    CHECK(same == ids.size() - 1);
    // The same text twice has two ids.
    write_file(scratch / "twice.md", "# A\n\ntext\n\n# A\n\ntext\n\n");
    const auto twice = lines(good({"chunk", scratch / "twice.md"}).out);
    REQUIRE(twice.size() == 2);
    CHECK(Json(twice[1])["id"].str() == Json(twice[0])["id"].str() + "-2");

    const Tokenizer tokenizer("tokenizer.bin");
    for (auto& line : lines(good({"chunk", BOOK, "--tokens", "300", "--overlap", "0"}).out)) {
        const std::string text = Json(line)["text"].str();
        if (text.find("```") == text.npos) CHECK(tokenizer.encode(text, false).size() <= 310); // sums of pieces
    }
    write_file(scratch / "bom.md", "\xEF\xBB\xBF# A\n");
    CHECK(Json(lines(good({"chunk", scratch / "bom.md"}).out)[0])["text"].str() == "# A\n");
    write_file(scratch / "gbk.md", "abc\xC4\xE3\xBA\xC3");
    check_refused({"chunk", scratch / "gbk.md"}, "byte 3");
    write_file(scratch / "empty.md", "");
    check_refused({"chunk", scratch / "empty.md"}, "empty");
    check_refused({"chunk", BOOK, "--characters", "10"}, "--characters 10");
    check_refused({"chunk", BOOK, "--characters", "100", "--tokens", "100"}, "one of them");
}

// ------------------------------------------------------------------- books of other formats, and PDFs

// datagen with programs of ours in PATH, and no others.
static Result datagen_with(const Scratch& scratch, const std::map<std::string, std::string>& programs, const Strings& arguments) {
    const std::string folder = scratch / "bin";
    fs::remove_all(folder);
    fs::create_directories(folder);
    for (auto& [name, script] : programs) {
        write_file(folder + "/" + name, "#!/bin/sh\n" + script);
        fs::permissions(folder + "/" + name, fs::perms::all);
    }
    return Process(PROGRAM, arguments, "", [&] { setenv("PATH", folder.c_str(), 1); }).wait();
}

TEST_CASE("chunk: PDF by pdftotext, HTML and the like by pandoc; without them the line that converts") {
    Scratch scratch;
    const std::string pdf = scratch / "my book.pdf", unnamed = scratch / "book", html = scratch / "b.HTML", dashed = "-o.html";
    write_file(pdf, "%PDF-1.7 ...");
    write_file(unnamed, "%PDF-1.4\n\xff\xfe");
    write_file(html, "<html>");
    for (auto& path : {pdf, unnamed}) {
        const Result r = datagen_with(scratch, {}, {"chunk", path});
        const std::string stem = path == pdf ? scratch / "my book" : unnamed;
        check_refusal(r, "datagen", "poppler-utils");
        CHECK(r.err.find("pdftotext -layout " + path + " " + stem + ".txt\n") != std::string::npos);
    }
    for (std::string ending : {"html", "htm", "xhtml", "docx", "odt", "epub"}) {
        write_file(scratch / "b." + ending, "PK");
        const Result r = datagen_with(scratch, {}, {"chunk", scratch / "b." + ending});
        check_refusal(r, "datagen", "pandoc -t gfm " + (scratch / "b." + ending) + " -o " + (scratch / "b.md"));
    }
    // The words come as they are, no shell between; the text goes to the chunks.
    const std::string words = "for w; do printf '%s|' \"$w\"; done; printf ' read the words of this.\\n'";
    auto text = [&](const std::string& path) {
        const Result r = datagen_with(scratch, {{"pdftotext", words}, {"pandoc", words}}, {"chunk", path});
        INFO(r.err);
        REQUIRE(r.status == 0);
        return Json(lines(r.out)[0])["text"].str();
    };
    CHECK(text(pdf) == "-layout|-enc|UTF-8|" + pdf + "|-| read the words of this.\n");
    CHECK(text(unnamed) == "-layout|-enc|UTF-8|" + unnamed + "|-| read the words of this.\n");
    const std::string filter = "-t|gfm-raw_html|--wrap=none|--lua-filter|" + fs::canonical(".").string() + "/data/datagen/book.lua|",
                      heap = "|+RTS|-M2G|-RTS|";
    CHECK(text(html) == filter + html + heap + " read the words of this.\n");
    write_file(scratch / "b.ODT", "PK");
    CHECK(text(scratch / "b.ODT") == filter + (scratch / "b.ODT") + heap + " read the words of this.\n");
    // Where pandoc has a sandbox it is in it. A file's name is a file's, whatever it looks like.
    const std::string boxed = "case $1 in --help) echo ' --sandbox[=true|false]';; *) " + words + ";; esac";
    for (std::string name : {"http:b.html", "-o.html"}) {
        write_file(name, "<p>");
        const std::string given = (name[0] == '-' ? "./" : "") + name;
        const Result r = datagen_with(scratch, {{"pandoc", boxed}}, {"chunk", given});
        fs::remove(name);
        INFO(r.err);
        REQUIRE(r.status == 0);
        CHECK(Json(lines(r.out)[0])["text"].str() == filter + "./" + given + "|--sandbox" + heap + " read the words of this.\n");
    }
    // One that was built without options for its heap runs without.
    const std::string other = "case $2 in +RTS) exit 1;; esac; case $1 in --help) ;; *) " + words + ";; esac";
    const Result r = datagen_with(scratch, {{"pandoc", other}}, {"chunk", html});
    INFO(r.err);
    REQUIRE(r.status == 0);
    CHECK(Json(lines(r.out)[0])["text"].str() == filter + html + "| read the words of this.\n");
    // The last line of their messages on failure is shown.
    const Result bad = datagen_with(scratch, {{"pdftotext", "echo some text; printf 'Odd.\nIncorrect \033[1mpassword\n' >&2; exit 3"}}, {"chunk", pdf, "-o", scratch / "x"});
    CHECK(bad.status == 1);
    CHECK(bad.err == "datagen: " + pdf + ": pdftotext failed: exit status 3: Incorrect  [1mpassword\n");
    CHECK(!fs::exists(scratch / "x"));
    CHECK(datagen_with(scratch, {{"pdftotext", "kill -9 $$"}}, {"chunk", pdf}).err.find("ended by signal 9") != std::string::npos);
    check_refusal(datagen_with(scratch, {{"pdftotext", "printf '\\f\\f'"}}, {"chunk", pdf}), "datagen", "OCR");
    check_refusal(datagen_with(scratch, {{"pandoc", "printf 'a\\377'"}}, {"chunk", html}), "datagen", "byte 1");
}

TEST_CASE("chunk: an office program's document and UTF-16 are named as such") {
    Scratch scratch;
    for (auto [bytes, word] : {std::pair("PK\3\4\24"s, "save it as .docx, .odt, .epub or .html"), {"\xD0\xCF\x11\xE0\xA1"s, "save it as .docx"}, {"{\\rtf1 x}"s, "save it as .docx"}, {"\xFF\xFEh\0"s, "UTF-16; convert it first"}, {"h\0e\0l\0"s, "UTF-16LE"}}) {
        write_file(scratch / "book.doc", bytes);
        check_refused({"chunk", scratch / "book.doc"}, word);
    }
}

// A page of layout lines: two texts side by side.
static std::string beside(const Strings& left, const Strings& right) {
    std::string page;
    for (size_t i = 0; i < std::max(left.size(), right.size()); i++) {
        std::string line = i < left.size() ? left[i] : "";
        line.resize(std::max<size_t>(line.size(), 52), ' ');
        page += (i < right.size() ? line + right[i] : i < left.size() ? left[i] : "") + "\n";
    }
    return page;
}

TEST_CASE("chunk: pages in two columns are read one column after another; tables stay as they lie") {
    Strings left, right, cells, notes;
    for (int i = 0; i < 20; i++) {
        left.push_back(format("the left column says number %d in words", i));
        right.push_back(format("and the right one goes on with line %d", i));
        cells.push_back(format("Port %-10d%d m%12s%d", i, 3 * i, "open      ", 10 * i));
        notes.push_back(format("Term %d", i));
    }
    const std::string two = beside(left, right), table = beside(cells, {}), listed = beside(notes, right);
    CHECK(in_columns(two));
    CHECK(in_columns("  A title that goes over both of the columns of the page, as titles do\n\n" + two));
    CHECK(!in_columns(table));
    CHECK(!in_columns(beside(cells, cells)));
    CHECK(!in_columns(listed)); // terms beside their explanations belong together
    CHECK(!in_columns(beside(left, {})));
    CHECK(!in_columns(two.substr(0, two.find("number 5")))); // too few lines to tell
    CHECK(!in_columns(""));
    Scratch scratch;
    write_file(scratch / "b.pdf", "%PDF-1.7");
    write_file(scratch / "layout", two + "\f" + table + "\f");
    write_file(scratch / "ordered", "LEFT then RIGHT.\n\fcells\none\nby\none\n\f");
    const std::string tool = "case $1 in -layout) cat " + scratch / "layout" + ";; *) cat " + scratch / "ordered" + ";; esac";
    const Result r = datagen_with(scratch, {{"pdftotext", "PATH=/usr/bin:/bin\n" + tool}}, {"chunk", scratch / "b.pdf", "--overlap", "0"});
    INFO(r.err);
    REQUIRE(r.status == 0);
    const std::string text = Json(lines(r.out)[0])["text"].str();
    CHECK(text.find("LEFT then RIGHT.") == 0);
    CHECK(text.find("left column") == std::string::npos);
    CHECK(text.find(trimmed(cells[7])) != std::string::npos);
    CHECK(r.err.find("1 of 2 pages are in columns") != std::string::npos);
}

TEST_CASE("chunk: a book of HTML without what is only the web page's (pandoc)") {
    Scratch scratch;
    if (Process("/usr/bin/env", {"pandoc", "--version"}).wait().status != 0) {
        printf("skipped: chunk by pandoc: it is not installed\n");
        return;
    }
    std::atomic<int> fetched{0};
    Listener server([&](int) { fetched++; });
    write_file(scratch / "b.html", format(R"x(<html><body><nav><ul><li><a href="/a">Home</a></li><li><a href="/b">About us</a></li></ul></nav>
<div id="x"><h1><span>1</span> The moon<sup><a href="#n1">1</a></sup></h1><p>The <span class="c">moon</span> pulls H<sub>2</sub>O: see <a href="javascript:x()">this</a>.<sup><a href="#n1">2</a></sup></p>
<iframe src="http://127.0.0.1:%d/x"></iframe><img src="http://127.0.0.1:%d/y.png"><table><tr><th>a</th><th>b</th></tr><tr><td>1<br>2</td><td><p>3</p><p>4</p></td></tr></table></div></body></html>)x", server.port, server.port));
    const Result r = good({"chunk", scratch / "b.html"});
    const Json chunk(lines(r.out)[0]);
    INFO(chunk.text);
    CHECK(chunk["chapter"].str() == "1 The moon");
    const std::string text = chunk["text"].str();
    CHECK(text.find("# 1 The moon\n\nThe moon pulls H₂O: see this.\n") == 0);
    CHECK(text.find("| 1 2 | 3 4 |") != std::string::npos);
    for (const char* gone : {"<", "](", "javascript", "Home", "127.0.0.1", "TABLE"}) CHECK(text.find(gone) == std::string::npos);
    CHECK(fetched == 0);
}

TEST_CASE("numbered chapters on lines of their own are no page numbers; 第二章 stays a line of its own") {
    auto book = [&](const char* end) {
        std::string all;
        for (int i = 1; i <= 8; i++) {
            all += std::to_string(i) + "\n\n";
            for (int k = 0; k < 12; k++) all += "The tide turns twice a day, and the harbour follows it without a word from anyone, as it did before.\n\n";
            all.erase(all.size() - 3), all += end + "\n\n"s;
        }
        return all;
    };
    CHECK(!was_pdf(book(".")));
    CHECK(was_pdf(book(" and")));                         // within a sentence
    CHECK(was_pdf(book(".").substr(book(".").find("\n2\n")))); // (page numbers begin anywhere)
    const std::string cut = "第一章\n\n潮汐一日两次。\n\f第二章\n\n港口随之而动\n\f没有一句怨言。\n\f第三章 月亮\n\n月亮牵引着海\n\f第四章\n\n完。\n";
    CHECK(clean_pages(cut).text == "第一章\n\n潮汐一日两次。\n\n第二章\n\n港口随之而动\n没有一句怨言。\n\n第三章 月亮\n\n月亮牵引着海\n\n第四章\n\n完。\n");
    CHECK(clean_pages("a share of 15-\n20% of it, and of 3-\nfold\n").text == "a share of 15-20%\nof it, and of 3-\nfold\n");
}

static const std::string SENTENCE = "The tide turns twice a day, and the harbour follows it without a word of complaint from anyone.";

TEST_CASE("text of a PDF: page numbers, running heads and feet, page breaks and hyphens go") {
    // Four pages; the heads alternate, a sentence runs on over a break, and some lines only look like numbers.
    const std::string book = "Preface\n\nOf tides and har-\nbours.\n\n                 i\n\f"
        "2   TIDES AND HARBOURS\n\n1\n\nThe moon pulls the sea; this is known as the spring-\ntide, a well-known and well-\nfounded name. A spring-tide comes\n\n   - 2 -\n\f"
        "Chapter 1: The moon      3\n\n   twice a month.\n\nChapter 1\n\n" + SENTENCE + "\n\n   - 3 -\n\f"
        "4   TIDES AND HARBOURS\n\nYYMMDDhh-\nmm is a date, ﬁnally; e-\nmail is not. Soft\xC2\xAD\nware and co\xE2\x80\x90\noperation.\n\n42\n\n" + SENTENCE + "\n\n   - 4 -\n\f";
    const CleanText c = clean_pages(book);
    const std::string wanted = "Preface\n\nOf tides and harbours.\n\n"
        "1\n\nThe moon pulls the sea; this is known as the spring-tide,\na well-known and wellfounded\nname. A spring-tide comes\n"
        "   twice a month.\n\nChapter 1\n\n" + SENTENCE + "\n\n"
        "YYMMDDhh-\nmm is a date, finally; e-mail\nis not. Software\nand cooperation.\n\n42\n\n" + SENTENCE + "\n";
    CHECK(c.text.find("TIDES") == std::string::npos);
    CHECK(c.text.find("- 3 -") == std::string::npos);
    const size_t head = c.text.find("Chapter 1: The moon      3\n\n"); // stands on one page only
    REQUIRE(head != std::string::npos);
    std::string rest = c.text;
    rest.erase(head, 28);
    if (head > 0 && rest[head - 1] == '\n' && rest[head - 2] == '\n') rest.erase(head - 1, 1);
    CHECK(rest == wanted);
    CHECK(c.breaks == 4);
    CHECK(c.numbers == 4);
    CHECK(c.heads == 2);
    CHECK(c.hyphens == 6);
    CHECK(clean_pages(c.text).text == c.text);
    CHECK(clean_pages("A\n}\n\fB\n}\n\fC\n}\n\fD\n}\n").text == "A\n}\n\nB\n}\n\nC\n}\n\nD\n}\n"); // a brace is no foot
    CHECK(clean_pages("\f\f").text == "\n");
}

TEST_CASE("page numbers") {
    for (auto [line, number] : {std::pair<const char*, long>{"12", 12}, {"  - 12 -", 12}, {"– 7 –", 7}, {"Page 12 of 300", 12}, {"12 / 300", 12}, {"12/300", 12}, {"第 12 页", 12}, {"第12页", 12},
             {"[12]", 12}, {"<!-- page 12 -->", 12}, {"**12**", 12}, {"xiv", 14}, {"ix", 9}, {"p. 3", 3}, {"", -1}, {"--", -1}, {"12.5", -1}, {"Chapter 1", -1}, {"12 of", -1}, {"1. item", -1},
             {"mild", -1}, {"123456", -1}, {"12 页内容", -1}, {"IV", -1}}) {
        const std::string text = line;
        INFO(text);
        CHECK(page_number(text) == number);
    }
}

TEST_CASE("Markdown of a PDF shows by its page numbers, and is cleaned; other Markdown stays as it is, to the byte") {
    Scratch scratch;
    std::string pages, numbered;
    for (int i = 1; i <= 6; i++) {
        pages += "# Part " + std::to_string(i) + "\n\n" + SENTENCE + " " + SENTENCE + "\n\nThe end of it is a har-\nbour" + std::string((size_t)i, '!') + "\n\n" + SENTENCE + "\n\n" + std::to_string(i + 10) + "\n\nTides and Harbours\n\n";
        numbered += std::to_string(i) + "\n\nshort\n\n"; // numbers too near each other for pages
    }
    auto body = [&](const std::string& text, const Strings& more = {}, std::string* said = nullptr) {
        write_file(scratch / "b.md", text);
        Strings all = {"chunk", scratch / "b.md", "--overlap", "0"};
        all.insert(all.end(), more.begin(), more.end());
        const Result r = good(all);
        if (said) *said = r.err;
        std::string joined;
        for (auto& line : lines(r.out)) joined += Json(line)["text"].str();
        return joined;
    };
    std::string said;
    const std::string clean = body(pages, {}, &said);
    CHECK(said.find("6 page breaks, 6 page numbers, 6 running heads and feet, 6 hyphens") != std::string::npos);
    CHECK(said.find("--clean no") != std::string::npos);
    for (int i = 1; i <= 6; i++) {
        CHECK(clean.find("# Part " + std::to_string(i) + "\n") != std::string::npos);
        CHECK(clean.find("\n" + std::to_string(i + 10) + "\n") == std::string::npos);
    }
    CHECK(clean.find("har-") == std::string::npos);
    CHECK(clean.find("The end of it is a harbour!\n\n" + SENTENCE + "\n\n# Part 2\n\n" + SENTENCE) != std::string::npos);
    CHECK(body(pages, {"--clean", "no"}, &said) == pages);
    CHECK(said.find("cleaned") == std::string::npos);
    const std::string fenced = "```\n" + pages + "```\n" + SENTENCE + " A har-\nbour.\n";
    for (auto& text : {read_file(BOOK), read_file("data/course/notes/01-introduction.md"), read_file("README.md"), numbered, fenced, std::string("a well-\nknown word\r\n\r\n1\r\n")})
        CHECK(body(text) == text);
    CHECK(body("a har-\nbour", {"--clean", "yes"}) == "a harbour\n");
    check_refused({"chunk", BOOK, "--clean", "maybe"}, "auto, yes or no");
}

// --------------------------------------------------------------------------------------- prompts

TEST_CASE("the templates are about no subject; the course's examples are rows, too") {
    for (auto& f : fs::recursive_directory_iterator("data/datagen/prompts")) {
        if (f.is_directory()) continue;
        const std::string text = read_file(f.path().string());
        for (auto word : {"CUDA", "cuda", "GPU", "warp", "thread", "kernel", "线程", "核函数", "显存"}) {
            INFO(f.path() << ": " << word);
            CHECK(text.find(word) == std::string::npos);
        }
    }
    for (std::string folder : {"data/datagen/prompts", "data/course/examples"})
        for (std::string lang : {"/en/", "/zh/"})
            for (auto difficulty : DIFFICULTIES) {
                const Json list(read_file(folder + lang + difficulty + ".json"));
                CHECK(list.root().size() >= 2);
                for (sj::Value item : list.root().items()) CHECK((item.size() == 2 && !item["question"].str().empty() && !item["answer"].str().empty()));
            }
}

TEST_CASE("prompt: the subject, examples, the model and max_tokens") {
    Scratch scratch;
    sj::Writer w;
    w.object().field("id", "c").field("source", "b.md").field("chapter", "Tides").field("lang", "en").field("text", std::string(3500, 'a')).end();
    write_file(scratch / "chunks", w.text + "\n");
    auto ask = [&](const Strings& more) {
        Strings all = {"prompt", scratch / "chunks"};
        all.insert(all.end(), more.begin(), more.end());
        return lines(good(all).out);
    };
    auto part = [](const std::string& line, size_t i) { return Json(line)["body"]["messages"][i]["content"].str(); };
    const Strings plain = ask({});
    REQUIRE(plain.size() == 3); // 3 easy, 2 medium, 1 hard
    const double wanted[] = {3 * 400, 2 * 700, 1500};
    for (size_t i = 0; i < 3; i++) {
        CHECK(Json(plain[i])["body"]["max_tokens"].number() == wanted[i]);
        CHECK(!Json(plain[i])["body"]["model"]);
        CHECK(part(plain[i], 0).find("about the subject of the source text,") != std::string::npos);
        CHECK(part(plain[i], 1).find("{{") == std::string::npos);
        CHECK(part(plain[i], 1).find(i < 2 ? " questions: each" : "Write 1 **hard** question: each") != std::string::npos);
    }
    CHECK(part(plain[0], 1).find("hydration of a dough") != std::string::npos);
    const Strings other = ask({"--subject", "{{count}} harbours", "--model", "m", "--max-tokens", "77", "--examples", "data/course/examples"});
    CHECK(part(other[0], 0).find("about {{count}} harbours,") != std::string::npos);
    CHECK(part(other[0], 1).find("What is a warp in CUDA?") != std::string::npos);
    CHECK(Json(other[0])["body"]["model"].str() == "m");
    CHECK(Json(other[2])["body"]["max_tokens"].number() == 77);
    const Strings bare = ask({"--max-tokens", "0", "--examples", "none"});
    CHECK(!Json(bare[0])["body"]["max_tokens"]);
    CHECK(part(bare[0], 1).find("Examples") == std::string::npos);
    CHECK(part(bare[0], 1).find("knows. Answers of 40 to 120 words.\n\nChapter: Tides\n\nSource:\naaa") != std::string::npos);
    check_refused({"prompt", scratch / "chunks", "--examples", scratch / "none"}, "none/en/easy.json");
    check_refused({"prompt", scratch / "chunks", "--max-tokens", "x"}, "--max-tokens x");
}

TEST_CASE("prompt: shares of difficulty in every chapter, quotas, templates") {
    Scratch scratch;
    std::string chunks;
    for (int i = 0; i < 60; i++) {
        sj::Writer w;
        w.object().field("id", format("c%d", i)).field("source", "b.md").field("chapter", format("%d > x", i / 20)).field("lang", i % 2 ? "zh" : "en");
        w.field("text", "{{count}} " + std::string(500 + 20 * (size_t)i, 'a')).end();
        chunks += w.text + "\n";
    }
    chunks += "{\"id\": \"s\", \"source\": \"b.md\", \"chapter\": \"9\", \"lang\": \"en\", \"text\": \"short\"}\n";
    write_file(scratch / "chunks", chunks);
    auto ask = [&](const Strings& more, std::map<std::string, std::array<int, 3>>& given) {
        Strings arguments = {"prompt", scratch / "chunks", "-o", scratch / "requests"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        const Result r = good(arguments);
        given.clear();
        std::set<std::string> ids;
        for (auto& line : lines(read_file(scratch / "requests"))) {
            const Json q(line);
            CHECK(ids.insert(q["custom_id"].str()).second);
            CHECK(q["custom_id"].str().size() <= 64);
            CHECK(q["method"].str() == "POST");
            CHECK(q["url"].str() == "/v1/chat/completions");
            const sj::Value messages = q["body"]["messages"];
            REQUIRE(messages.size() == 2);
            const std::string id = q["custom_id"].str(), user = messages[1]["content"].str();
            const std::string difficulty = id.substr(id.find('.') + 1, id.rfind('.') - id.find('.') - 1);
            const int d = difficulty == "easy" ? 0 : difficulty == "medium" ? 1 : 2;
            const size_t at = user.find("**" + difficulty + "**");
            const bool english = at != std::string::npos;
            const int number = std::stoi(user.substr(english ? user.find("Write ") + 6 : user.find("请出 ") + 7));
            CHECK(english == (std::stoi(id.substr(1)) % 2 == 0));
            CHECK(user.find("{{count}} aaa") != std::string::npos); // the chunk's own braces stay
            given[std::to_string(std::stoi(id.substr(1)) / 20)][(size_t)d] += number;
        }
        return r;
    };
    std::map<std::string, std::array<int, 3>> given;
    ask({}, given);
    REQUIRE(given.size() == 3);
    for (auto& [chapter, n] : given) {
        const int sum = n[0] + n[1] + n[2];
        for (int d = 0; d < 3; d++) CHECK(std::abs(n[(size_t)d] - (d == 0 ? .5 : d == 1 ? .3 : .2) * sum) <= 1);
    }
    CHECK(given["2"][0] > given["0"][0]); // longer chunks
    CHECK(rules(scratch / "chunks.dropped") == std::map<std::string, size_t>{{"short", 1}});
    ask({"--chapter-quota", "10"}, given);
    for (auto& chapter : given) CHECK(chapter.second == std::array<int, 3>{5, 3, 2});
    CHECK(rules(scratch / "chunks.dropped")["quota"] == 30);
    check_refused({"prompt", "-", "--dropped", scratch / "d"}, "twice");
    check_refused({"prompt", BOOK}, "line 1");
    write_file(scratch / "hostile", R"({"id": "x", "source": "", "chapter": "", "lang": "../../x", "text": ""})");
    check_refused({"prompt", scratch / "hostile"}, "no language");
    check_refused({"prompt", scratch / "chunks", "--lang", "fr"}, "prompts/fr");
}

// -------------------------------------------------------------------------- an endpoint and its faults

#ifdef HAVE_CURL
namespace {
// Answers /v1/chat/completions. The k-th new body it sees is treated the k-th way at first, and well when asked again.
struct Endpoint {
    struct Seen { size_t number, asked = 0, answered = 0; };
    int delay_ms = 0;
    bool faulty = true;
    int refusal = 0;                // a status for every request of an answer, with these words
    std::string words;
    Strings models = {"the model"}; // that GET /v1/models names
    std::atomic<size_t> listed{0};  // ... so many times
    std::string key;
    std::mutex mutex;
    std::map<std::string, Seen> seen; // by body
    std::atomic<size_t> answers{0}, unauthorised{0};
    Listener listener{[this](int peer) { serve(peer); }}; // the last: what it serves with is there before it and after

    std::string url() const { return format("http://127.0.0.1:%d/v1", listener.port); }

    void serve(int peer) {
        std::string in, header, body;
        while (listener.request(peer, in, header, body)) {
            const bool list = header.find("GET /v1/models HTTP/1.1\r\n") == 0;
            if (!list && header.find("POST /v1/chat/completions HTTP/1.1\r\n") != 0) {
                send(peer, 404, "", "{\"detail\": \"Not Found\"}");
                continue;
            }
            if (!key.empty() && header.find("Authorization: Bearer " + key + "\r\n") == header.npos) {
                unauthorised++;
                send(peer, 401, "", "no key");
                continue;
            }
            if (list) {
                listed++;
                sj::Writer w;
                w.object().key("data").array();
                for (auto& m : models) w.object().field("id", m).end();
                send(peer, 200, "", w.end().end().text);
                continue;
            }
            size_t number, asked;
            {
                std::lock_guard<std::mutex> lock(mutex);
                Seen& s = seen.insert({body, {seen.size()}}).first->second;
                number = s.number, asked = s.asked++;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
            if (refusal) {
                send(peer, refusal, "", words);
                continue;
            }
            const int way = faulty && asked == 0 ? (int)(number % 9) : 8;
            if (way == 0) send(peer, number % 2 ? 408 : 429, "Retry-After: 0\r\n", "{\"error\": {\"message\": \"slow down, secret-key\"}}");
            else if (way == 1) send(peer, 503, "", "<html>");
            else if (way == 2) { // stalls until the client has enough
                while (listener.receive(peer, in)) {}
                return;
            } else if (way == 3) send(peer, 200, "", "\xff not JSON");
            else if (way == 4) return raw(peer, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{\"choices\": ["); // breaks off
            else if (way == 5) send(peer, 200, "", "{\"error\": \"none of your business\"}");
            else if (way == 6) return; // hangs up
            else if (way == 7) return raw(peer, "\x01\x02 no HTTP at all\r\n\r\n");
            else {
                send(peer, 200, "", answer(body, number));
                answers++;
                std::lock_guard<std::mutex> lock(mutex);
                seen.at(body).answered++;
            }
        }
    }
    void raw(int peer, const std::string& bytes) { ::send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
    void send(int peer, int status, const std::string& header, const std::string& body) {
        raw(peer, format("HTTP/1.1 %d X\r\n%sContent-Length: %zu\r\n\r\n", status, header.c_str(), body.size()) + body);
    }

    // Questions about the sentences of the chunk, in the ways that models answer.
    static std::string answer(const std::string& body, size_t number) {
        sj::Doc doc;
        REQUIRE(sj::parse(doc, body) == "");
        const std::string prompt = doc.root()["messages"][1]["content"].str();
        const bool english = prompt.compare(0, 5, "Write") == 0;
        const size_t count = std::stoul(prompt.substr(english ? 6 : 7));
        const std::string marker = english ? "Source:\n" : "原文：\n", text = prompt.substr(prompt.rfind(marker) + marker.size());
        Strings sentences;
        size_t begin = 0;
        for (size_t end : sentence_ends(text)) {
            const std::string s = text.substr(begin, end - begin);
            if (count_characters(s) > 18 && s.find_first_of("#|`$~\\{") == s.npos) sentences.push_back(s);
            begin = end;
        }
        sj::Writer list;
        list.array();
        for (size_t i = 0; i < count && !sentences.empty(); i++) {
            const std::string& s = sentences[(number + i) % sentences.size()];
            list.object().field("question", english ? "Why is this so: " + s : "请说明理由：" + s).field("answer", s + s).end();
        }
        std::string content = list.end().text;
        if (number % 10 == 1) content = "<think>\n[not this]\n</think>\n\n" + content;
        if (number % 10 == 2) content = "```json\n" + content + "\n```";
        if (number % 10 == 3) content = "<think>x</think>```\n" + content + "\n```\n";
        if (number % 10 == 4) content = "Here you are: " + content;
        if (number % 10 == 5) content.pop_back();
        if (number % 10 == 6) content = "{\"question\": \"q\", \"answer\": \"a\"}";
        if (number % 10 == 7) content = "[{\"question\": \"q\"}, {\"question\": \"\", \"answer\": \"a\"}, {\"question\": \"q\", \"answer\": 1}]";
        sj::Writer w;
        w.object().field("id", format("chatcmpl-%zu", number)).field("echo", "Bearer secret-key").key("choices").array().object().field("index", 0).key("message").object();
        w.field("role", "assistant").field("content", content).end().field("finish_reason", number % 10 == 5 ? "length" : "stop").end().end();
        std::string reply = w.end().text;
        return reply.replace(1, 0, "\r\n  "); // on several lines
    }
};

struct Pipeline {
    Scratch scratch;
    std::string chunks = scratch / "chunks.jsonl", requests = scratch / "requests.jsonl", responses = scratch / "responses.jsonl";
    std::string journal = requests + ".journal";
    std::string data = data_with(scratch, {{"generate.backoff", "0.02"}, {"generate.give_up", "30"}, {"prompt.characters_per_question", "60"}, {"prompt.least_characters", "60"}});
    Pipeline() {
        good({"chunk", BOOK, "--characters", "250", "--overlap", "60", "--data", data, "-o", chunks});
        good({"prompt", chunks, "--data", data, "--model", "m", "-o", requests});
    }
    Strings generate(const Endpoint& e, const Strings& more = {}) const {
        Strings all = {"generate", requests, "--url", e.url(), "--data", data, "--parallel", "4", "--timeout", "2", "-o", responses};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
};
} // namespace

TEST_CASE("end to end: an endpoint that fails, stalls, answers 429 and sends garbage; then filter, split and pack") {
    const Pipeline p;
    const size_t count = lines(read_file(p.requests)).size();
    REQUIRE(count > 20);
    {
        Endpoint e;
        e.key = "secret-key";
        setenv("DATAGEN_TEST_KEY", e.key.c_str(), 1);
        const Result r = good(p.generate(e, {"--key-env", "DATAGEN_TEST_KEY"}));
        INFO(r.err);
        CHECK(e.seen.size() == count);
        for (auto& [body, s] : e.seen) {
            CHECK(s.answered == 1); // none is missing, none is asked again
            CHECK(s.asked == (s.number % 9 == 8 ? 1 : 2));
        }
        CHECK(e.unauthorised == 0);
        for (auto fault : {"HTTP status 429: slow down", "HTTP status 408", "HTTP status 503: <html>", "Timeout was reached", "no chat completion"}) CHECK(r.err.find(fault) != std::string::npos);
        // The key stands nowhere, though the endpoint echoes it.
        for (const std::string& s : {r.err, read_file(p.responses), read_file(p.journal)}) CHECK(s.find("secret") == std::string::npos);
        // Again: nothing is asked.
        const std::string first = read_file(p.responses);
        good(p.generate(e, {"--key-env", "DATAGEN_TEST_KEY"}));
        CHECK(e.answers == count);
        CHECK(read_file(p.responses) == first);
    }
    CHECK(column(p.responses, "custom_id") == column(p.requests, "custom_id"));
    for (auto& line : lines(read_file(p.responses))) {
        const Json r(line);
        CHECK(r["response"]["status_code"].number() == 200);
        CHECK(r["response"]["body"]["choices"].size() == 1);
        CHECK(r["error"].is(sj::Null));
    }

    const std::string qa = p.scratch / "qa.jsonl", clean = p.scratch / "clean.jsonl";
    good({"collect", p.responses, "--chunks", p.chunks, "-o", qa});
    const size_t tenth = count / 10;
    auto aside = rules(p.responses + ".dropped");
    CHECK(aside["json"] >= tenth); // no good item. (Prose around a list, an end that is missing, one object: all are read)
    CHECK(aside["json"] <= tenth + 1);
    CHECK(aside.size() == 1);
    const Strings ids = column(qa, "id");
    CHECK(ids.size() > count / 2);
    CHECK(std::set<std::string>(ids.begin(), ids.end()).size() == ids.size());
    std::map<std::string, std::string> chapter_of;
    for (auto& line : lines(read_file(p.chunks))) chapter_of[Json(line)["id"].str()] = Json(line)["chapter"].str();
    for (auto& line : lines(read_file(qa))) {
        const Json r(line);
        CHECK(chapter_of.at(r["chunk"].str()) == r["chapter"].str());
        CHECK(r["id"].str().find(r["chunk"].str() + "." + r["difficulty"].str() + ".") == 0);
    }

    good({"filter", qa, "--chunks", p.chunks, "-o", clean});
    const auto dropped = rules(qa + ".dropped");
    CHECK(lines(read_file(clean)).size() + lines(read_file(qa + ".dropped")).size() == ids.size());
    CHECK(lines(read_file(clean)).size() > 10);
    CHECK(dropped.count("exact") + dropped.count("near") + dropped.count("rouge-l") > 0); // the endpoint repeats itself
    CHECK(dropped.count("grounding") == 0);                                               // but lies not
    // Clean text stays as it is.
    good({"filter", clean, "--chunks", p.chunks, "-o", p.scratch / "again.jsonl"});
    CHECK(read_file(p.scratch / "again.jsonl") == read_file(clean));

    const Result split = good({"split", clean, "--test", "4", "-o", p.scratch.path.string(), "--data", data_with(p.scratch, {{"split.leak_rows", "1"}})});
    const Strings train = column(p.scratch / "train.jsonl", "chunk"), test = column(p.scratch / "test.jsonl", "chunk");
    CHECK(train.size() + test.size() == lines(read_file(clean)).size());
    CHECK(test.size() == 4);
    for (auto& chunk : test) CHECK(std::count(train.begin(), train.end(), chunk) == 0);
    CHECK(split.err.find("leakage: ") != std::string::npos);

    const std::string bin = p.scratch / "train.bin";
    good({"pack", p.scratch / "train.jsonl", bin});
    const Dataset data(bin);
    CHECK(data.rows() == train.size());
    CHECK(good({"stats", bin}).out.find(format("rows      %zu,", train.size())) != std::string::npos);
    CHECK(good({"stats", clean}).out.find("easy") != std::string::npos);
}

TEST_CASE("generate: a kill in the middle loses no answer, and none is asked again") {
    const Pipeline p;
    const size_t count = lines(read_file(p.requests)).size();
    Endpoint e;
    e.delay_ms = 60;
    auto journaled = [&] {
        const std::string text = fs::exists(p.journal) ? read_file(p.journal) : "";
        return (size_t)std::count(text.begin(), text.end(), '\n');
    };
    size_t kills = 0, before = 0;
    for (; kills < 3; kills++) {
        Datagen run(p.generate(e));
        for (int ms = 0; ms < 20000 && journaled() < before + 3; ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        kill(run.pid, SIGKILL);
        CHECK(run.wait().status == 1000 + SIGKILL);
        CHECK(!fs::exists(p.responses));
        CHECK(e.answers < count);
        before = journaled();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300)); // the endpoint ends what it was at
    // Half a line at the end is what a kill in the middle of a write leaves.
    const std::string whole = read_file(p.journal);
    CHECK(whole.back() == '\n');
    std::map<std::string, size_t> asked; // how often each of the journal's requests was asked so far
    std::map<std::string, std::string> body_of;
    for (auto& line : lines(read_file(p.requests))) body_of[Json(line)["custom_id"].str()] = std::string(Json(line)["body"].raw());
    for (auto& id : column(p.journal, "custom_id")) asked[body_of.at(id)] = e.seen.at(body_of.at(id)).asked;
    CHECK(asked.size() >= 9);
    CHECK(asked.size() < count);
    write_file(p.journal, whole + whole.substr(0, whole.find('\n') / 2));

    good(p.generate(e));
    CHECK(column(p.responses, "custom_id") == column(p.requests, "custom_id"));
    CHECK(read_file(p.journal).compare(0, whole.size(), whole) == 0);
    CHECK(lines(read_file(p.journal)).size() == count);
    for (auto& [body, n] : asked) CHECK(e.seen.at(body).asked == n);
    // Only requests in flight at a kill, at most one a connection, were answered twice.
    size_t twice = 0;
    for (auto& [body, s] : e.seen) {
        CHECK(s.answered >= 1);
        twice += s.answered - 1;
    }
    CHECK(twice <= 4 * kills);
}

TEST_CASE("generate: Ctrl-C takes the answers that are on their way, then leaves with 130") {
    const Pipeline p;
    Endpoint e;
    e.faulty = false, e.delay_ms = 30;
    Datagen run(p.generate(e));
    for (int ms = 0; ms < 20000 && e.answers < 5; ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    check_refused(p.generate(e), "another run");
    kill(run.pid, SIGINT);
    const Result r = run.wait();
    INFO(r.err);
    CHECK(r.status == 130);
    CHECK(!fs::exists(p.responses));
    CHECK(lines(read_file(p.journal)).size() == e.answers);
    good(p.generate(e));
    for (auto& [body, s] : e.seen) CHECK(s.asked == 1);
}

TEST_CASE("generate: what cannot be had is said, and the exit status is not 0") {
    const Pipeline p;
    Endpoint e;
    {
        Endpoint locked;
        locked.key = "secret-key";
        const Result r = datagen(p.generate(locked));
        CHECK(r.status == 1);
        CHECK(r.err.find("the endpoint answers HTTP status 401: no key\n") != std::string::npos);
        CHECK(locked.unauthorised <= 4); // it does not go on
        CHECK(!fs::exists(p.responses));
    }
    Strings nobody = p.generate(e, {"--retries", "1"});
    nobody[3] = "http://127.0.0.1:1/v1";
    const Result r = datagen(nobody);
    CHECK(r.status == 1);
    CHECK(r.err.find("in a row failed") != std::string::npos);
    // Some fail for good: the others are there, and the next run asks for these only.
    const Result some = datagen(p.generate(e, {"--retries", "0"}));
    CHECK(some.status == 1);
    CHECK(some.err.find("are missing") != std::string::npos);
    const size_t had = e.answers;
    CHECK(lines(read_file(p.responses)).size() == had);
    good(p.generate(e));
    for (auto& [body, s] : e.seen) CHECK(s.answered == 1);

    auto refused = [&](const Strings& arguments, const std::string& word) { check_refused(arguments, word); };
    refused({"generate", p.requests}, "--url");
    refused({"generate", p.requests, "--url", "file:///etc/passwd"}, "--url");
    refused(p.generate(e, {"--key-env", "NO_SUCH_KEY"}), "NO_SUCH_KEY");
    refused(p.generate(e, {"--key", "secret"}), "unknown option --key");
    write_file(p.requests, read_file(p.requests) + lines(read_file(p.requests))[0] + "\n");
    refused(p.generate(e), "twice");
    std::string other = lines(read_file(p.requests))[0];
    other.replace(other.find("0.7"), 3, "0.8");
    write_file(p.requests, other + "\n");
    refused(p.generate(e), "something else");
    write_file(p.requests, "{\"custom_id\": \"a\", \"method\": \"GET\", \"url\": \"/\", \"body\": {}}\n");
    refused(p.generate(e), "line 1");
    write_file(p.journal, "{\"custom_id\": 1}\n");
    refused(p.generate(e), "line 1");
}

TEST_CASE("generate: 401, 403 and 404 end the run with the endpoint's words; other refusals are kept with theirs") {
    const Pipeline p;
    const size_t count = lines(read_file(p.requests)).size();
    for (int status : {401, 403, 404}) {
        Endpoint e;
        e.refusal = status, e.words = R"({"error": {"message": "not with\u001b me", "code": "context_length_exceeded"}})";
        const Result r = datagen(p.generate(e));
        INFO(r.err);
        CHECK(r.status == 1);
        CHECK(r.err.find(format("\ndatagen: the endpoint answers HTTP status %d: not with  me (datagen chunk", status)) != std::string::npos);
        CHECK(e.seen.size() <= 4); // what was on its way
        for (auto& [body, s] : e.seen) CHECK(s.asked == 1);
        CHECK(!fs::exists(p.responses));
        const Strings why = column(p.requests + ".dropped", "why");
        CHECK(why.size() == e.seen.size());
        for (auto& w : why) CHECK(w.find(format("HTTP status %d: not with  me (datagen chunk", status)) == 0);
        CHECK(rules(p.requests + ".dropped") == std::map<std::string, size_t>{{format("status %d", status), why.size()}});
    }
    {
        Endpoint e;
        e.refusal = 422, e.words = R"({"detail": [{"msg": "no"}]})";
        Strings all = p.generate(e);
        all[5] = data_with(p.scratch, {{"generate.give_up", "1000"}});
        const Result r = datagen(all);
        CHECK(r.status == 1);
        CHECK(e.seen.size() == 2 * count); // with the form of the answer, and without
        for (auto& [body, s] : e.seen) CHECK(s.asked == 1);
        CHECK(r.err.find(format("%zu requests were refused or failed for good: %s.dropped", count, p.requests.c_str())) != std::string::npos);
        Strings rows;
        for (auto& line : lines(read_file(p.requests + ".dropped"))) rows.push_back(Json(line)["row"]["custom_id"].str());
        CHECK(std::set<std::string>(rows.begin(), rows.end()).size() == count);
        CHECK(column(p.requests + ".dropped", "why")[0] == R"(HTTP status 422: [{"msg": "no"}])");
    }
    Endpoint well;
    well.faulty = false;
    good(p.generate(well));
    CHECK(read_file(p.requests + ".dropped") == "");
}

TEST_CASE("generate: without a model it takes the endpoint's only one; the URL with or without /v1") {
    const Pipeline p;
    Strings rows = lines(read_file(p.requests));
    std::string two;
    for (size_t i = 0; i < 2; i++) {
        const std::string name = "\"model\": \"m\", ";
        REQUIRE(rows[i].find(name) != std::string::npos);
        two += rows[i].erase(rows[i].find(name), name.size()) + "\n";
    }
    write_file(p.requests, two);
    Endpoint e;
    e.faulty = false;
    const std::string base = e.url().substr(0, e.url().size() - 3);
    for (std::string end : {"", "/", "/v1", "/v1/", "/v1//", "/v1/chat/completions"}) {
        Strings all = p.generate(e);
        all[3] = base + end;
        fs::remove(p.journal);
        INFO(end);
        CHECK(good(all).err.find("\"the model\"") != std::string::npos);
        REQUIRE(e.seen.size() == 2);
        for (auto& [body, s] : e.seen) {
            CHECK(Json(body)["model"].str() == "the model");
            CHECK(Json(body)["messages"].size() == 2);
        }
    }
    CHECK(e.listed == 6);
    good(p.generate(e)); // all is answered: nothing is asked, not even for models
    CHECK(e.listed == 6);
    fs::remove(p.journal);
    e.models = {"one", "t\x1bwo"};
    check_refused(p.generate(e), "--model NAME is needed: the endpoint has one, t wo");
    e.models = {};
    check_refused(p.generate(e), "the endpoint has no model");
    good(p.generate(e, {"--model", "mine"}));
    CHECK(std::count_if(e.seen.begin(), e.seen.end(), [](auto& s) { return Json(s.first)["model"].str() == "mine"; }) == 2);
    write_file(p.requests, rows[2] + "\n");
    check_refused(p.generate(e, {"--model", "mine"}), "line 1: asks the model \"m\", --model says mine");
    e.key = "secret-key", e.models = {"one"};
    write_file(p.requests, rows[0] + "\n");
    fs::remove(p.journal);
    check_refused(p.generate(e), "/v1/models: HTTP status 401: no key; --model NAME names the model");
    Strings elsewhere = p.generate(e);
    elsewhere[3] = base + "/other";
    check_refused(elsewhere, "HTTP status 404: Not Found");
}

namespace {
// An endpoint that a test writes: from a request's body and how often that was asked to the whole answer.
struct Written {
    std::function<std::string(const std::string& body, size_t asked)> say;
    std::mutex mutex;
    std::map<std::string, size_t> asked;
    Listener listener{[this](int peer) {
        std::string in, header, body;
        while (listener.request(peer, in, header, body)) {
            std::string answer;
            {
                std::lock_guard<std::mutex> lock(mutex);
                const size_t n = asked[body]++;
                answer = say(body, n);
            }
            CHECK(::send(peer, answer.data(), answer.size(), MSG_NOSIGNAL) == (ssize_t)answer.size());
        }
    }};
    std::string url() const { return format("http://127.0.0.1:%d/v1", listener.port); }
    size_t all() {
        size_t n = 0;
        for (auto& [body, times] : asked) n += times;
        return n;
    }
};
} // namespace
static std::string http(int status, const std::string& body, const std::string& headers = "") {
    return format("HTTP/1.1 %d X\r\n%sContent-Length: %zu\r\n\r\n", status, headers.c_str(), body.size()) + body;
}
static std::string completion(const std::string& content, const char* finish = "stop") {
    sj::Writer w;
    w.object().key("choices").array().object().key("message").object().field("role", "assistant").field("content", content).end();
    return http(200, w.field("finish_reason", finish).end().end().end().text);
}
// n requests as `prompt` writes them, and one chunk.
static Strings few_requests(const Scratch& scratch, size_t n, const std::string& url, const Strings& more = {}) {
    sj::Writer w;
    w.object().field("id", "c1").field("source", "b.md").field("chapter", "C").field("lang", "en").field("text", "x").end();
    std::string all;
    for (size_t i = 0; i < n; i++) all += format(R"({"custom_id": "c1.easy.%02zu", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": "Q%zu"}], "response_format": {"type": "json_schema", "json_schema": {"name": "questions", "schema": {}}}}})", i, i) + "\n";
    write_file(scratch / "requests", all);
    write_file(scratch / "chunks", w.text + "\n");
    Strings ask = {"generate", scratch / "requests", "--url", url, "--data", data_with(scratch, {{"generate.backoff", "0.02"}}), "--parallel", "2", "-o", scratch / "responses"};
    ask.insert(ask.end(), more.begin(), more.end());
    return ask;
}
static std::string asked_of(const std::string& body) {
    const Json json(body);
    return json["messages"][0]["content"].str();
}

TEST_CASE("a reply without a question is asked again with the reason, until it has one, and then no more") {
    Scratch scratch;
    Written e;
    const std::string good_reply = R"([{"question": "q", "answer": "a"}])";
    e.say = [&](const std::string& body, size_t) {
        const std::string q = asked_of(body);
        if (q.find("Q1") == 0 && q.find("no list in it") == q.npos) return completion("I cannot do that.");
        if (q.find("Q2") == 0) return completion("[{\"question\": \"half", "length");
        return completion(good_reply);
    };
    const Strings ask = few_requests(scratch, 4, e.url());
    const Strings collect = {"collect", scratch / "responses", "--chunks", scratch / "chunks", "-o", scratch / "qa"};
    const Result first = good(ask);
    CHECK(first.err.find("1 of the new answers were cut off at max_tokens") != std::string::npos);
    const Result r = good(collect);
    INFO(r.err);
    CHECK(column(scratch / "qa", "id") == Strings{"c1.easy.00.1", "c1.easy.03.1"});
    CHECK(r.err.find("2 of 4 replies have no question that can be used; this asks them again:\n  datagen generate REQUESTS --url URL --again " + scratch / "responses.dropped") != std::string::npos);
    CHECK(r.err.find("1 of 4 replies were cut off") != std::string::npos);
    CHECK(column(scratch / "responses.dropped", "why") == Strings{"no list in it", "cut off at max_tokens: no whole question in it"});
    good(ask);
    CHECK(e.all() == 4);
    Strings again = ask;
    again.insert(again.end(), {"--again", scratch / "responses.dropped"});
    good(again);
    CHECK(e.all() == 6);
    good(collect);
    CHECK(column(scratch / "qa", "id") == Strings{"c1.easy.00.1", "c1.easy.01.1", "c1.easy.03.1"});
    CHECK(lines(read_file(scratch / "responses")).size() == 4);
    // An item dropped first and answered meanwhile is not requested again; the other is, with its present fault.
    good(again);
    CHECK(e.all() == 7);
    good(ask);
    CHECK(e.all() == 7);
}

TEST_CASE("generate: empty content is asked again by itself; what max_tokens or a filter ended is not") {
    Scratch scratch;
    Written e;
    e.say = [&](const std::string& body, size_t asked) {
        const std::string q = asked_of(body);
        if (q == "Q0" && asked < 2) return completion(asked ? " \n" : "");
        if (q == "Q1") return completion("", "length");
        if (q == "Q2") return completion("", "content_filter");
        return completion("x");
    };
    const Result r = good(few_requests(scratch, 4, e.url()));
    INFO(r.err);
    CHECK(e.all() == 6);
    CHECK(r.err.find("2 times: a reply without content\n") != std::string::npos);
}

TEST_CASE("generate: a prompt that is refused goes aside and the others are asked; the form goes where it is refused") {
    Scratch scratch;
    {
        Written e; // refuses more in a row than generate.give_up, but has answered
        e.say = [&](const std::string& body, size_t) {
            const size_t n = std::stoul(asked_of(body).substr(1));
            return n > 2 && n < 28 ? http(400, R"({"error": {"code": "data_inspection_failed", "message": "Input data may contain inappropriate content."}})") : completion("x");
        };
        const Result r = datagen(few_requests(scratch, 30, e.url()));
        INFO(r.err);
        CHECK(r.status == 1);
        CHECK(lines(read_file(scratch / "responses")).size() == 5);
        CHECK(column(scratch / "requests.dropped", "why") == Strings(25, "HTTP status 400: Input data may contain inappropriate content."));
        CHECK(r.err.find("takes no response_format") == std::string::npos);
    }
    fs::remove(scratch / "requests.journal");
    Written old; // knows no response_format
    old.say = [&](const std::string& body, size_t) {
        return body.find("response_format") != body.npos ? http(400, R"({"error": {"message": "response_format is not supported"}})") : completion("x");
    };
    const Result r = good(few_requests(scratch, 8, old.url()));
    INFO(r.err);
    CHECK(r.err.find("the endpoint takes no response_format; asking without it\n") != std::string::npos);
    CHECK(old.all() <= 8 + 3);
    CHECK(read_file(scratch / "requests.dropped") == "");
    // One that refuses everything ends the run after some.
    fs::remove(scratch / "requests.journal");
    Written none;
    none.say = [&](const std::string&, size_t) { return http(400, "no such model"); };
    const Result all = datagen(few_requests(scratch, 30, none.url()));
    CHECK(all.status == 1);
    CHECK(all.err.find("10 requests in a row failed, the last with: HTTP status 400: no such model\n") != std::string::npos);
}

TEST_CASE("the form that prompt asks for is a schema, and no part of what is asked") {
    const Pipeline p;
    const Json row(lines(read_file(p.requests))[0]);
    const sj::Value schema = row["body"]["response_format"]["json_schema"]["schema"];
    CHECK(schema["type"].str() == "object");
    CHECK(schema["properties"]["questions"]["items"]["required"].size() == 2);
    CHECK(schema["properties"]["questions"]["items"]["properties"]["answer"]["type"].str() == "string");
    Reader in(p.requests);
    REQUIRE(in.next());
    Request with(in), without(in);
    REQUIRE(with.has_form());
    without.remove_form();
    CHECK(!without.has_form());
    write_file(p.scratch / "bare", "{\"custom_id\": \"c\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": " + without.body + "}\n");
    Reader bare(p.scratch / "bare");
    REQUIRE(bare.next());
    CHECK(Request(bare).id == with.id);
}

TEST_CASE("generate: Retry-After in fractions; a file gets a line every 30 s at most") {
    Scratch scratch;
    Written e;
    std::vector<double> waits;
    double last = 0;
    const char* headers[] = {"Retry-After: 0.4\r\n", "retry-after-ms: 300\r\n", "Retry-After: 1\r\n"};
    e.say = [&](const std::string&, size_t asked) {
        if (asked) waits.push_back(seconds() - last);
        last = seconds();
        return asked < 3 ? http(429, "{}", headers[asked]) : completion("x");
    };
    const Result r = good(few_requests(scratch, 1, e.url()));
    REQUIRE(waits.size() == 3);
    CHECK(waits[0] >= 0.39);
    CHECK(waits[0] < 0.95);
    CHECK(waits[1] >= 0.29);
    CHECK(waits[1] < 0.95);
    CHECK(waits[2] >= 0.99);
    CHECK(r.err.find("s left") == std::string::npos);
}

TEST_CASE("a key is found in a text however its characters are escaped") {
    const std::string key = "sk-a/b\"c&d";
    for (const char* text : {"sk-a/b\"c&d", R"(sk-a\/b\"c&d)", R"(\u0073k\u002Da/b\u0022c\u0026d)", R"(\\u0073k-a\\\/b\\\"c\\u0026d)", "sk%2Da%2fb%22c%26d", "sk&#45;a&#x2F;b&quot;c&amp;d", "&#115;&#x6b;-a/b&#34;c&#38;d"}) {
        INFO(text);
        CHECK(without_key(text, key) == "***");
        CHECK(without_key("{" + std::string(text) + text + "}", key) == "{******}");
        CHECK(without_key(std::string(text).substr(0, strlen(text) - 1), key).find("***") == std::string::npos);
    }
    CHECK(without_key("sk-a/b", "") == "sk-a/b");
    CHECK(without_key("\\", "k") == "\\");
    CHECK(without_key("%&\\u&#;&#x;%6", "key") == "%&\\u&#;&#x;%6");
    Scratch scratch;
    Written e;
    e.say = [&](const std::string& body, size_t asked) {
        if (!asked && asked_of(body) == "Q0") return http(500, R"({"error": {"message": "bad key \u0073ecret%2Dkey"}})");
        return http(200, R"({"echo": "\u0073ecret\u002dkey", "choices": [{"message": {"content": "s\u0065cret-key"}}]})");
    };
    setenv("DATAGEN_TEST_KEY", "secret-key", 1);
    const Result r = good(few_requests(scratch, 2, e.url(), {"--key-env", "DATAGEN_TEST_KEY"}));
    CHECK(r.err.find("bad key ***") != std::string::npos);
    for (const std::string& text : {read_file(scratch / "responses"), read_file(scratch / "requests.journal")}) {
        CHECK(text.find("ecret") == std::string::npos);
        CHECK(text.find("***") != std::string::npos);
    }
}

TEST_CASE("generate: what endpoints say of a fault") {
    auto words = [](const std::string& text) {
        sj::Doc doc;
        const bool json = sj::parse(doc, text).empty();
        return words_of(json ? doc.root() : sj::Value(), text);
    };
    CHECK(words(R"({"error": {"message": "a\nb", "code": 1}})") == "a b");
    CHECK(words(R"({"error": "a"})") == "a");
    CHECK(words(R"({"error": {"code": 7}})") == R"({"code": 7})");
    CHECK(words(R"({"message": "a"})") == "a");
    CHECK(words(R"({"detail": "a"})") == "a");
    CHECK(words(R"({"detail": ["a"]})") == R"(["a"])");
    CHECK(words(" <html>\n") == "<html>");
    CHECK(words("\xff") == "\xEF\xBF\xBD");
    CHECK(words("") == "");
    CHECK(words(std::string(5000, 'a')).size() == 203);
}
#endif

TEST_CASE("where a request goes") {
    const std::string url = "/v1/chat/completions";
    CHECK(address("http://h:1", url) == "http://h:1/v1/chat/completions");
    CHECK(address("http://h:1/", url) == "http://h:1/v1/chat/completions");
    CHECK(address("http://h/v1", url) == "http://h/v1/chat/completions");
    CHECK(address("http://h/api/v4/", url) == "http://h/api/v4/chat/completions");
    CHECK(address("http://h/v1/chat/completions", url) == "http://h/v1/chat/completions");
    CHECK(address("http://h/vision", url) == "http://h/vision/v1/chat/completions");
    CHECK(address("http://h/v1", "/rerank") == "http://h/v1/rerank");
    CHECK(address("http://h/v1/chat/completions/", "/v1/models") == "http://h/v1/models");
    CHECK(address("http://h/v1/chat/completions", url) == "http://h/v1/chat/completions");
}

TEST_CASE("collect: the questions of a reply, whatever surrounds them") {
    const std::string one = R"({"question": "q", "answer": "a"})", two = one + ", " + one;
    const struct { std::string reply; size_t items, bad; bool cut; } cases[] = {
        {"[" + two + "]", 2, 0, false}, {" [" + one + "]\n", 1, 0, false}, {"```json\n[" + two + "]\n```", 2, 0, false}, {"```\n[" + one + "]```", 1, 0, false},
        {"<think>\n[" + one + "]\n</think>\n\n[" + two + "]", 2, 0, false}, {"<think></think>```json\n[" + one + "]\n```  ", 1, 0, false},
        {"I may write [" + one + "].\n</think>\n\n[" + two + "]", 2, 0, false}, // the template gave the opening mark
        {"Here are the questions:\n\n[" + two + "]\n\nI hope this helps!", 2, 0, false}, {"Sure! Here you are:\n```json\n[" + two + "]\n```\nLet me know.", 2, 0, false},
        {"{\"questions\": [" + two + "]}", 2, 0, false}, {"{\"data\": {\"items\": [" + two + "]}, \"count\": 2}", 2, 0, false}, {"{\"easy\": [" + one + "], \"hard\": [" + one + "]}", 2, 0, false},
        {one, 1, 0, false}, {one + "\n" + one + "\n", 2, 0, false}, {one + ",\n" + one, 2, 0, false}, {"1. " + one + "\n2. " + one, 2, 0, false}, {"[[" + one + "], [" + one + "]]", 2, 0, false},
        {"[" + two + ",]", 2, 0, false}, {"[" + two, 2, 0, true}, {"[" + two + ", {\"question\": \"q\", \"ans", 2, 0, true}, {"[" + one + ", {\"question\": \"q\", \"answer\": \"half", 1, 0, true},
        {"```json\n[" + one + ", {\"question\": \"half", 1, 0, true}, {"{\"questions\": [" + one + ", {\"qu", 1, 0, true},
        {R"([{"question": "q", "answer": "a", "difficulty": "easy"}])", 1, 0, false}, {R"([{"id": 1, "Question": "q", "Answer": "a"}])", 1, 0, false}, {R"([{"QUESTION": "q", "ANSWER": "a"}])", 1, 0, false},
        {"[{\"question\": \"q\", \"answer\": \"a\nb\"}]", 1, 0, false}, {"[{'question': 'q', 'answer': 'it is'}]", 1, 0, false}, {R"([{question: "q", answer: "a"}])", 1, 0, false},
        {R"([{"question": "what is "x"?", "answer": "it's "y""}])", 1, 0, false}, {R"x([{"question": "\(x\)", "answer": "\alpha"}])x", 1, 0, false}, {"[{“question”: “q”, “answer”: “a”}]", 1, 0, false},
        {R"([{"question": "q" "answer": "a"}])", 1, 0, false}, {"[{\"question\": \"q\"\n\"answer\": \"a\"}]", 1, 0, false}, {"[" + one + " " + one + "]", 2, 0, false},
        {"[" + one + R"(, {"question": "q"}, {"question": "", "answer": "a"}, {"question": "q", "answer": 1}])", 1, 3, false},
        {"", 0, 0, false}, {"I cannot.", 0, 0, false}, {"<think>[" + one + "]", 0, 0, false}, {"```", 0, 0, false}, {"[]", 0, 0, false}, {"[1, \"a\"]", 0, 0, false}};
    for (auto& c : cases) {
        INFO(c.reply);
        const ReplyItems r(c.reply);
        CHECK(r.items.size() == c.items);
        CHECK(r.bad == c.bad);
        CHECK(r.cut == c.cut);
    }
    CHECK(ReplyItems("[{\"question\": \"q\", \"answer\": \"a\nb\"}]").items[0].second == "a\nb");
    CHECK(ReplyItems(R"([{"question": "\alpha", "answer": "a"}])").items[0].first == "\\alpha");
}

TEST_CASE("collect: what is kept aside, and why") {
    Scratch scratch;
    write_file(scratch / "chunks", "{\"id\": \"c1\", \"source\": \"b.md\", \"chapter\": \"C\", \"lang\": \"en\"}\n");
    auto line = [](const std::string& id, const std::string& content, int status = 200) {
        sj::Writer w;
        w.object().field("custom_id", id).key("response").object().field("status_code", status).key("body").object().key("choices").array();
        return w.object().key("message").object().field("content", content).end().end().end().end().end().end().text + "\n";
    };
    const std::string one = "[{\"question\": \"q\", \"answer\": \"a\"}]";
    write_file(scratch / "r", line("c1.easy.00", one) + "broken\n" + "[]\n" + line("c1.easy.00", one) + line("c2.easy.01", one) + line("c1.weird.01", one) + line("easy", one) +
                              line("c1.hard.02", one, 500) + line("c1.hard.03", "") + line("c1.hard.04", "{}") + line("c1.hard.05", "[[]]") + line("c1.hard.07", "[{\"question\": \"q\", \"answer\": 1}]") + line("c1.hard.08", "So: " + one.substr(0, one.size() - 1) + ", {\"question\": 1},]") + "{\"custom_id\": \"c1.hard.06\"}\n");
    const Result r = good({"collect", scratch / "r", "--chunks", scratch / "chunks", "-o", scratch / "qa"});
    CHECK(column(scratch / "qa", "id") == Strings{"c1.easy.00.1", "c1.hard.08.1"});
    CHECK(rules(scratch / "r.dropped") == std::map<std::string, size_t>{{"line", 2}, {"repeated", 1}, {"custom_id", 3}, {"status", 2}, {"reply", 1}, {"json", 3}, {"item", 1}});
    CHECK(r.err.find("1 of 8 replies were repaired: a comma 1, text around it 1\n") != std::string::npos);
    check_refused({"collect", scratch / "r"}, "--chunks");
}

// --------------------------------------------------------------------------------- ROUGE-L, MinHash

static double rouge_l(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) { // the definition
    std::vector<size_t> lengths(b.size() + 1); // of the longest common subsequences with the first i of a
    for (const uint32_t word : a) {
        size_t diagonal = 0;
        for (size_t j = 0, *l = lengths.data(); j < b.size(); j++, l++) {
            const size_t above = l[1];
            l[1] = word == b[j] ? diagonal + 1 : std::max(above, l[0]);
            diagonal = above;
        }
    }
    return 2. * (double)lengths.back() / (double)(a.size() + b.size());
}

TEST_CASE("the index finds every question at or above the threshold, and no other") {
    std::mt19937 random(7);
    auto below = [&](size_t n) { return (size_t)(random() % n); };
    for (double t : {0.3, 0.5, 0.7, 0.9, 1.0}) {
        RougeIndex index(t);
        std::vector<std::vector<uint32_t>> questions;
        for (int i = 0; i < 350; i++) {
            std::vector<uint32_t> q;
            if (i % 2 && !questions.empty()) { // a variation of another
                q = questions[below(questions.size())];
                for (size_t edits = below(q.size() / 2 + 2); edits--;) {
                    const size_t at = below(q.size() + 1);
                    if (below(2)) q.insert(q.begin() + (ptrdiff_t)at, (uint32_t)below(40));
                    else if (at < q.size()) q.erase(q.begin() + (ptrdiff_t)at);
                }
            } else
                for (size_t n = below(i % 10 ? 30 : 150); n--;) q.push_back((uint32_t)(below(40) * below(40) / 40)); // some words are frequent
            questions.push_back(q);
            if (i % 3 == 0) index.learn(q);
        }
        size_t near = 0;
        for (size_t i = 0; i < questions.size(); i++) {
            std::set<size_t> found, wanted;
            index.find(questions[i], [&](size_t k) { return found.insert(k).second; });
            for (size_t k = 0; k < i; k++)
                if (!questions[i].empty() && !questions[k].empty() && rouge_l(questions[i], questions[k]) >= t - 1e-12) wanted.insert(k);
            REQUIRE(found == wanted);
            near += wanted.size();
            index.add(questions[i]);
        }
        CHECK(near > 20);
    }
}

TEST_CASE("MinHash finds pairs as often as its formula says") {
    std::mt19937_64 random(3);
    const MinHash minhash;
    for (int common : {20, 40, 55, 65, 75, 90}) { // of 100 grams; the Jaccard similarity is common / (200 - common)
        int found = 0;
        const int trials = 2000;
        for (int i = 0; i < trials; i++) {
            std::vector<uint64_t> a, b;
            for (int k = 0; k < 100; k++) a.push_back(mix(1, random())), b.push_back(k < common ? a.back() : mix(2, random()));
            const auto x = minhash.bands(a), y = minhash.bands(b);
            bool same = false;
            for (size_t k = 0; k < MinHash::BANDS; k++) same |= x[k] == y[k];
            found += same;
        }
        const double s = common / (200. - common), p = 1 - std::pow(1 - std::pow(s, 8), 14), sigma = std::sqrt(p * (1 - p) / trials);
        INFO(s << ": " << found << " of " << trials << ", not " << p * trials);
        CHECK(std::fabs((double)found / trials - p) < 5 * sigma + 0.01);
    }
    CHECK(jaccard({1, 2, 2, 3}, {3, 2, 4, 4}) == doctest::Approx(0.5));
    HashTable table(1000);
    for (uint32_t i = 0; i < 1000; i++) table.add(mix(5, i / 2) * 0x9E3779B97F4A7C15, i);
    for (uint32_t i = 0; i < 1000; i++) {
        std::set<uint32_t> rows;
        table.find(mix(5, i / 2) * 0x9E3779B97F4A7C15, [&](uint32_t row) { return rows.insert(row), false; });
        CHECK(rows == std::set<uint32_t>{i / 2 * 2, i / 2 * 2 + 1});
    }
}

// ---------------------------------------------------------------------------------------- filter

TEST_CASE("filter: each rule drops what it is there for, in its order, and says so") {
    Scratch scratch;
    const std::string text = "一个线程束由 32 个线程组成，cudaMalloc 在设备上分配 1,024 字节的全局内存。线程块最多有 1024 个线程，它们用 threadIdx.x 区分自己的数据。";
    sj::Writer chunk;
    write_file(scratch / "chunks", chunk.object().field("id", "c").field("text", text).end().text + "\n");
    const std::string c = ", \"chunk\": \"c\"", answer = "一个线程束由 32 个线程组成，它们用 threadIdx.x 区分自己的数据。";
    const struct { std::string row, rule; } rows[] = {
        {alpaca("一个线程束有多少个线程？", answer, c), ""},
        {"{\"instruction\": \"broken\"", "schema"},
        {"{\"instruction\": \"\xff\"}", "utf8"},
        {alpaca("", answer, c), "schema"},
        {"{\"messages\": []}", "schema"},
        {"[1]", "schema"},
        {alpaca("啥？", answer, c), "length"},
        {alpaca("一个线程束是什么呢？", "线程。", c), "length"},
        {alpaca("线程束里有哪些\xEF\xBF\xBD东西呢？", answer, c), "utf8"},
        {alpaca("线程束里有哪些\\u0007东西呢？", answer + "\x7f", c), "utf8"},
        {alpaca("What is a cafe\xCC\x81 in a warp?", answer, c), "nfc"},
        {alpaca("How many threads does a warp have?", answer, c), "language"},
        {alpaca("如图 3.2，线程束里有多少线程？", answer, c), "reference"},
        {alpaca("线程束里到底有几个线程？", answer + "见第 5 章。", c), "reference"},
        {alpaca("线程束的大小是多少？", "一个线程束由 64 个线程组成，它们用 threadIdx.x 区分自己的数据。", c), "grounding"},
        {alpaca("全局内存怎样在设备上分配？", "在设备上分配全局内存用 cudaHostAlloc，字节数是参数。", c), "grounding"},
        {alpaca("线程块的调度次序如何？", "调度器任意决定先后，程序不能依赖它们完成的顺序，否则会死锁。", c), "grounding"},
        {alpaca("谁来区分自己的数据呢？", "它们区分自己的数据，它们区分自己的数据", c), "terms"},
        {alpaca("线程块最多有多少个线程？", "线程块最多有 1024 个线程。它们用 threadIdx.x 区分自己的数据。", ", \"chunk\": \"other\""), "grounding"},
        {alpaca("一个线程束有多少个线程？", answer, c), "exact"},
        {alpaca("一个线程束有多少个线程呢？", answer, c), "near"},
        {alpaca("一个线程束有多少线程？", "线程块最多有 1024 个线程，线程束由 32 个线程组成。", c), "rouge-l"},
        {alpaca("怎样在设备上分配全局内存？", "在设备上分配全局内存用 cudaMalloc，这里是 1024 字节。", c), ""},
    };
    std::string all;
    Strings kept, wanted;
    for (auto& r : rows) {
        all += r.row + "\n";
        if (r.rule.empty()) kept.push_back(r.row);
        else wanted.push_back(r.rule);
    }
    write_file(scratch / "qa", all);
    write_file(scratch / "terms", "线程\n内存\nthread\nwarp\n");
    const Result r = good({"filter", scratch / "qa", "--chunks", scratch / "chunks", "--terms", scratch / "terms"});
    CHECK(lines(r.out) == kept);
    CHECK(column(scratch / "qa.dropped", "rule") == wanted);
    INFO(r.err);
    for (auto rule : {"schema", "grounding", "near", "rouge-l"}) CHECK(r.err.find(rule) != std::string::npos);
    CHECK(r.err.find(format("%zu rows kept, %zu dropped", kept.size(), wanted.size())) != std::string::npos);
    for (auto& line : lines(read_file(scratch / "qa.dropped"))) {
        const Json d(line);
        CHECK(d["why"].str() != "");
        CHECK((d["row"] || d["text"]));
    }
    // An array gives the same rows, each on its line.
    write_file(scratch / "array", "[\n" + kept[0].insert(1, "\n") + ",\n" + kept[1] + "]\n");
    CHECK(lines(good({"filter", scratch / "array", "--terms", scratch / "terms"}).out).size() == 2);
    CHECK(lines(good({"filter", scratch / "array", "--lang", "en", "--dropped", scratch / "d"}).out).empty());
    check_refused({"filter", "-", "--dropped", scratch / "d"}, "twice");
    check_refused({"filter", scratch / "none"}, "none");
    check_refused({"filter", scratch / "qa", "--lang", "fr"}, "fr");
    write_file(scratch / "limits.txt", "filter.near x\n");
    check_refused({"filter", scratch / "qa", "--data", scratch.path.string()}, "line 1");
}

TEST_CASE("filter: no terms unless they are named, from a list or from the book; a rule that drops more than half says so") {
    Scratch scratch;
    auto ask = [&](const Strings& more) {
        Strings all = {"filter", scratch / "qa", "-o", scratch / "clean"};
        all.insert(all.end(), more.begin(), more.end());
        return good(all).err;
    };
    std::string rows, chunks;
    const Strings questions = {"How long does the rennet work before the curd is cut?", "Why is a washed rind orange and not white at all?", "What keeps the flies from the cellar of the dairy in spring?",
                               "Who was the first emperor that crossed the Alps?", "Which planet has the longest day of them all?"};
    for (auto& q : questions) rows += alpaca(q, "Nobody can say so for certain: " + q.substr(4, 30) + ", most likely.") + "\n";
    write_file(scratch / "qa", rows);
    const std::string off = ask({});
    CHECK(read_file(scratch / "clean") == rows); // a book on cheese is no worse than one on GPUs
    CHECK(off.find("***") == std::string::npos);
    // From the book: a heading, capitals, clumps; not what stands everywhere, once, or in headings of any book.
    for (int i = 0; i < 8; i++) {
        sj::Writer w;
        const std::string text = "Everything here is certain, Alps. " + (i == 2 ? std::string("A curd, curd, curd and curd: curd. ") : "") + (i > 3 ? "CELLAR " : "") + (i == 5 ? "The CELLAR planet. " : "") +
                                 "\n## Introduction: first example\n\nEverything is certain, nobody more.";
        w.object().field("id", format("c%d", i)).field("chapter", i == 1 ? "Chapter 3 > The Washed Rind" : "Summary").field("text", text).end();
        chunks += w.text + "\n";
    }
    write_file(scratch / "chunks", chunks);
    const std::string from_book = ask({"--terms", "auto", "--chunks", scratch / "chunks", "--skip", "grounding"});
    INFO(from_book);
    CHECK(from_book.find("4 terms of the book: cellar, curd, rind, washed\n") != std::string::npos);
    CHECK(lines(read_file(scratch / "clean")) == Strings{lines(rows)[0], lines(rows)[1], lines(rows)[2]});
    CHECK(rules(scratch / "qa.dropped") == std::map<std::string, size_t>{{"terms", 2}});
    check_refused({"filter", scratch / "qa", "--terms", "auto"}, "--chunks");
    // Named; an empty list is no rule.
    write_file(scratch / "terms", "planet\n");
    const std::string named = ask({"--terms", scratch / "terms"});
    CHECK(named.find("*** The rule terms dropped 4 of 5 rows, more than half; the first: names nothing of the subject. --skip terms turns the rule off. ***\n") != std::string::npos);
    for (auto list : {"", "; nothing\n"}) {
        write_file(scratch / "terms", list);
        CHECK(ask({"--terms", scratch / "terms"}).find("5 rows kept, 0 dropped") != std::string::npos);
    }
    // Rules by name.
    const std::string short_one = alpaca("啥？", "no") + "\n" + alpaca("啥？", "no") + "\n";
    write_file(scratch / "qa", short_one + short_one);
    CHECK(ask({}).find("*** The rule length dropped 4 of 4 rows") != std::string::npos);
    CHECK(ask({"--skip", "length,language"}).find("1 rows kept, 3 dropped") != std::string::npos);
    CHECK(ask({"--skip", "length,language,exact,near,rouge-l"}).find("4 rows kept, 0 dropped") != std::string::npos);
    check_refused({"filter", scratch / "qa", "--skip", "length,schema"}, "--skip schema: the rules are length, ");
    check_refused({"filter", scratch / "qa", "--terms", scratch / "no such"}, "no such");
}

TEST_CASE("filter: Ctrl-C leaves nothing half-written, and status 130") {
    Scratch scratch;
    std::string rows;
    for (int i = 0; i < 20000; i++) {
        std::string text;
        for (int k = 0; k < 40; k++) text += format("warp w%llu ", (unsigned long long)mix(9, (uint64_t)(i * 100 + k)) % 100000);
        rows += alpaca(text, text + text) + "\n";
    }
    write_file(scratch / "qa", rows);
    Datagen run({"filter", scratch / "qa", "-o", scratch / "clean"});
    auto begun = [&] { // its temporary files are there
        return scratch.count() > 1;
    };
    for (int ms = 0; ms < 20000 && !begun(); ms++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(run.pid, SIGINT);
    const Result r = run.wait();
    INFO(r.err);
    CHECK(r.status == 130);
    CHECK(r.err.find("interrupted\n") != std::string::npos);
    CHECK(scratch.count() == 1);
}

TEST_CASE("split: rows without chunk or difficulty, too many, and a leak") {
    Scratch scratch;
    std::string rows;
    for (int i = 0; i < 100; i++) {
        std::string q;
        for (int k = 0; k < 8; k++) q += format("w%llu ", (unsigned long long)mix(7, (uint64_t)(i * 100 + k)) % 100000);
        rows += alpaca(q, q + q, format(", \"chunk\": \"c%d\", \"chapter\": \"%d > x\", \"difficulty\": \"%s\"", i / 2, i / 20, DIFFICULTIES[i % 10 < 5 ? 0 : i % 10 < 8 ? 1 : 2])) + "\n";
    }
    write_file(scratch / "x", rows);
    const Strings ask = {"split", scratch / "x", "--test", "20", "-o", scratch.path.string()};
    good(ask);
    const std::string test = read_file(scratch / "test.jsonl");
    std::map<std::string, int> difficulties, chapters;
    for (auto& d : column(scratch / "test.jsonl", "difficulty")) difficulties[d]++;
    for (auto& c : column(scratch / "test.jsonl", "chapter")) chapters[c]++;
    CHECK(difficulties == std::map<std::string, int>{{"easy", 10}, {"medium", 6}, {"hard", 4}});
    CHECK(chapters == std::map<std::string, int>{{"0 > x", 4}, {"1 > x", 4}, {"2 > x", 4}, {"3 > x", 4}, {"4 > x", 4}});
    Strings both = lines(test + read_file(scratch / "train.jsonl")), all = lines(rows);
    std::sort(both.begin(), both.end()), std::sort(all.begin(), all.end());
    CHECK(both == all);
    good(ask);
    CHECK(read_file(scratch / "test.jsonl") == test);
    Strings other = ask;
    other.insert(other.end(), {"--seed", "1"});
    good(other);
    CHECK(read_file(scratch / "test.jsonl") != test);

    check_refused({"split", scratch / "x", "--test", "100"}, "100 rows");
    check_refused({"split", scratch / "x"}, "--test");
    write_file(scratch / "bad", alpaca("q", "a") + "\n{\"instruction\": \"q\"}\n");
    check_refused({"split", scratch / "bad", "--test", "1", "-o", scratch.path.string()}, "bad: line 2: output: missing");
    std::string leaky;
    for (int i = 0; i < 10; i++) leaky += alpaca("What is a warp of the GPU?", "It is a group of 32 threads.", format(", \"chunk\": \"%d\"", i)) + "\n";
    write_file(scratch / "leaky", leaky);
    fs::remove(scratch / "test.jsonl");
    const Result r = datagen({"split", scratch / "leaky", "--test", "2", "-o", scratch.path.string()});
    CHECK(r.status == 1);
    CHECK(r.err.find("2 rows leak") != std::string::npos);
    CHECK(r.err.find("nothing was written") != std::string::npos);
    CHECK(r.err.find("--drop-leaks") != std::string::npos);
    CHECK(r.err.find("--seed") != std::string::npos);
    CHECK(!fs::exists(scratch / "test.jsonl"));
}

TEST_CASE("split: what leaks is named, and --drop-leaks leaves it out of train") {
    Scratch scratch;
    std::mt19937 random(5);
    auto words = [&](int n) {
        std::string s;
        while (n--) s += format("w%u ", (unsigned)(random() % 100000));
        return s;
    };
    // Every row has a twin in another chunk: half of them by question, half by answer.
    std::string rows;
    for (int i = 0; i < 40; i++) {
        const std::string q = "Q\x1b[1m " + words(8), a = words(30), other = i % 2 ? q : words(9), answer = i % 2 ? words(30) : a;
        rows += alpaca(q, a, format(", \"chunk\": \"a%d\", \"id\": \"a%d\"", i, i)) + "\n" + alpaca(other, answer, format(", \"chunk\": \"b%d\", \"id\": \"b%d\"", i, i)) + "\n";
    }
    for (auto& c : rows) c = c == '\x1b' ? ' ' : c;
    write_file(scratch / "x", rows);
    const Strings ask = {"split", scratch / "x", "--test", "12", "-o", scratch.path.string()};
    const Result refused = datagen(ask);
    INFO(refused.err);
    CHECK(refused.status == 1);
    Strings named;
    for (auto& line : lines(refused.err))
        if (line.find(" leaks: ") != std::string::npos) named.push_back(line);
    CHECK(named.size() == 5);
    for (auto& line : named) {
        const char side = line[2] == 'a' ? 'b' : 'a';
        const std::string number = line.substr(3, line.find(' ', 3) - 3);
        const bool by_question = std::stoi(number) % 2;
        CHECK(line.find(by_question ? "(train asks the like in " + std::string(1, side) + number + ")" : "% of its n-grams stand in train)") != std::string::npos);
    }
    CHECK(refused.err.find("\n  and ") != std::string::npos);
    CHECK(!fs::exists(scratch / "test.jsonl"));

    Strings drop = ask;
    drop.push_back("--drop-leaks");
    const Result r = good(drop);
    const Strings test = column(scratch / "test.jsonl", "id"), train = column(scratch / "train.jsonl", "id");
    Strings gone;
    for (auto& line : lines(read_file(scratch / "x.dropped"))) gone.push_back(Json(line)["row"]["id"].str());
    CHECK(test.size() == 12);
    CHECK(test.size() + train.size() + gone.size() == 80);
    std::set<std::string> twins; // of the test rows, but for twins that are both there
    for (auto& id : test) twins.insert((id[0] == 'a' ? "b" : "a") + id.substr(1));
    for (auto& id : test) twins.erase(id);
    CHECK(std::set<std::string>(gone.begin(), gone.end()) == twins);
    CHECK(r.err.find(format("%zu rows of train kept, %zu dropped", train.size(), gone.size())) != std::string::npos);
    // So nothing leaks: as the measure says when it is asked again.
    std::vector<Conversation> tests;
    for (Reader in(scratch / "test.jsonl"); in.next();) tests.push_back(need_conversation(in));
    const Limits limits{Arguments()};
    Leakage leakage(tests, limits);
    for (Reader in(scratch / "train.jsonl"); in.next();) leakage.train(need_conversation(in), "x");
    CHECK(leakage.report().empty());
    check_refused({"split", scratch / "x", "--test", "2", "--seed", "x"}, "--seed x");
}

// ------------------------------------------------------------------------------------------ pack

// The trained parts and the others of each row, as text.
static std::vector<std::vector<std::string>> parts_of(const std::string& path) {
    const Tokenizer tokenizer("tokenizer.bin");
    const Dataset data(path);
    data.must_match(tokenizer.hash(), template_hash());
    std::vector<std::vector<std::string>> all;
    for (size_t i = 0; i < data.rows(); i++) {
        std::vector<std::string> parts;
        std::vector<int> run;
        bool train = false;
        for (uint32_t word : data.row(i)) {
            if (((word & TRAIN) != 0) != train) parts.push_back(tokenizer.decode(run, false)), run.clear(), train = !train;
            run.push_back((int)(word & ~TRAIN));
        }
        parts.push_back(tokenizer.decode(run, false));
        all.push_back(parts);
    }
    return all;
}

TEST_CASE("pack: Alpaca, OpenAI and ShareGPT give the same rows; every answer is trained behind what is fed for it") {
    Scratch scratch;
    const std::string alpaca_row = R"({"instruction": "Q3", "input": "more", "output": "A3", "system": "S", "history": [["Q1", "A1"], ["Q2", "A2"]]})";
    const std::string openai = R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "Q2"}, {"role": "assistant", "content": "A2"}, {"role": "user", "content": "Q3\nmore"}, {"role": "assistant", "content": "A3"}]})";
    const std::string sharegpt = R"({"system": "S", "conversations": [{"from": "human", "value": "Q1"}, {"from": "gpt", "value": "A1"},
        {"from": "human", "value": "Q2"}, {"from": "gpt", "value": "A2"}, {"from": "human", "value": "Q3\nmore"}, {"from": "gpt", "value": "A3"}]})";
    const std::string system = "<|im_start|>system\nS<|im_end|>\n", u = "<|im_start|>user\n", e = "<|im_end|>\n", a = "<|im_start|>assistant\n", t = "<think>\n\n</think>\n\n";
    const std::vector<std::vector<std::string>> wanted = {
        {system + u + "Q1" + e + a + t, "A1" + e},
        {system + u + "Q1" + e + a + "A1" + e + u + "Q2" + e + a + t, "A2" + e},
        {system + u + "Q1" + e + a + "A1" + e + u + "Q2" + e + a + "A2" + e + u + "Q3\nmore" + e + a + t, "A3" + e}};
    std::string first;
    for (auto& row : {alpaca_row, openai, sharegpt}) {
        write_file(scratch / "x.jsonl", one_line(row) + "\n");
        good({"pack", scratch / "x.jsonl", scratch / "x.bin"});
        CHECK(parts_of(scratch / "x.bin") == wanted);
        if (first.empty()) first = read_file(scratch / "x.bin");
        CHECK(read_file(scratch / "x.bin") == first);
        // LLaMA-Factory's entry leads back to the same rows.
        good({"pack", scratch / "dataset_info.json", scratch / "y.bin", "--name", "x"});
        CHECK(read_file(scratch / "y.bin") == first);
    }
    write_file(scratch / "y.jsonl", alpaca_row + "\n");
    good({"pack", scratch / "y.jsonl", scratch / "y.bin"});
    const Json info(read_file(scratch / "dataset_info.json")); // both are in there
    CHECK(info["x"]["formatting"].str() == "sharegpt");
    CHECK(info["y"]["columns"]["history"].str() == "history");
    CHECK(info["y"]["file_name"].str() == "y.jsonl");
    // Other names of columns and tags.
    write_file(scratch / "dataset_info.json", R"({"z": {"file_name": "z.json", "formatting": "sharegpt", "columns": {"messages": "talk", "system": "sys"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "U", "assistant_tag": "A"}}})");
    write_file(scratch / "z.json", R"([{"sys": "S", "talk": [{"who": "U", "what": "Q1"}, {"who": "A", "what": "A1"}]}])");
    good({"pack", scratch / "dataset_info.json", scratch / "z.bin", "--name", "z"});
    CHECK(parts_of(scratch / "z.bin") == std::vector<std::vector<std::string>>{wanted[0]});
    check_refused({"pack", scratch / "dataset_info.json", scratch / "z.bin", "--name", "q"}, "\"q\"");
    check_refused({"pack", scratch / "dataset_info.json", scratch / "z.bin"}, "--name");
}

TEST_CASE("pack: prompts are the template's, special tokens in a row stay text, thoughts and tool calls are trained") {
    Scratch scratch;
    const std::string row = R"({"tools": "[{\"name\": \"f\"}]", "conversations": [{"from": "human", "value": "<|im_end|> hi"}, {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
        {"from": "observation", "value": "7"}, {"from": "gpt", "value": "<think>\nhm\n</think>\n\n\nIt is 7."}]})";
    write_file(scratch / "x.jsonl", one_line(row) + "\n");
    good({"pack", scratch / "x.jsonl", scratch / "x.bin"});
    const Tokenizer tokenizer("tokenizer.bin");
    const Dataset data(scratch / "x.bin");
    REQUIRE(data.rows() == 2);
    const auto parts = parts_of(scratch / "x.bin");
    CHECK(parts[0][1] == "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>\n");
    CHECK(parts[1][1] == "<think>\nhm\n</think>\n\nIt is 7.<|im_end|>\n");
    std::vector<int> prompt;
    for (uint32_t word : data.row(0))
        if (!(word & TRAIN)) prompt.push_back((int)word);
    CHECK(prompt == render_chat(tokenizer, {{"user", "<|im_end|> hi"}}, {}, {"{\"name\": \"f\"}"}));
    CHECK(std::count(prompt.begin(), prompt.end(), tokenizer.id("<|im_end|>")) == 2); // system and user; not the row's
}

// The output of pack for rows, with an entry of dataset_info.json ("": none): all of each row, and the trained part of
// it after "=> ".
static Strings packed(const Scratch& scratch, const std::string& rows, const std::string& entry = "", std::string* said = nullptr) {
    write_file(scratch / "rows.jsonl", rows);
    fs::remove(scratch / "dataset_info.json");
    if (!entry.empty()) write_file(scratch / "dataset_info.json", "{\"d\": {\"file_name\": \"rows.jsonl\", " + entry.substr(1) + "}");
    Strings ask = {"pack", scratch / (entry.empty() ? "rows.jsonl" : "dataset_info.json"), scratch / "rows.bin"};
    if (!entry.empty()) ask.insert(ask.end(), {"--name", "d"});
    const Result r = good(ask);
    if (said) *said = r.err;
    Strings all;
    for (auto& parts : parts_of(scratch / "rows.bin")) {
        std::string row;
        for (auto& part : parts) row += (row.empty() ? "" : "=> ") + part;
        all.push_back(row);
    }
    return all;
}
static std::string chat(const std::string& system, Strings turns) {
    std::string all = system.empty() ? "" : "<|im_start|>system\n" + system + "<|im_end|>\n";
    for (size_t i = 0; i < turns.size(); i++)
        all += i + 1 == turns.size() ? "<|im_start|>assistant\n<think>\n\n</think>\n\n=> " + turns[i] + "<|im_end|>\n"
                                     : (i % 2 ? "<|im_start|>assistant\n" : "<|im_start|>user\n") + turns[i] + "<|im_end|>\n";
    return all;
}

TEST_CASE("pack: what dataset_info.json does not map is not read, and pack says so") {
    Scratch scratch;
    std::string said;
    const std::string row = R"({"question": "Q", "answer": "A", "input": "I", "system": "S", "history": [["a", "b"]], "chosen": "C", "rejected": "R", "tools": "[{\"name\": \"f\"}]"})" "\n";
    CHECK(packed(scratch, row, R"({"columns": {"prompt": "question", "response": "answer"}})", &said) == Strings{chat("", {"Q", "A"})});
    CHECK(said.find("columns: prompt <- question, response <- answer; not read: chosen, history, input, rejected, system, tools\n") != said.npos);
    CHECK(packed(scratch, row, R"({"columns": {"prompt": "question", "response": "answer", "system": "system"}})") == Strings{chat("S", {"Q", "A"})});
    // Without columns three have a default; what is optional has none. A mapped answer of a pair makes no pair.
    const std::string usual = R"({"instruction": "Q", "input": "I", "output": "A", "system": "S", "history": [["a", "b"]]})" "\n";
    CHECK(packed(scratch, usual, R"({"formatting": "alpaca"})") == Strings{chat("", {"Q\nI", "A"})});
    CHECK(packed(scratch, usual, "", &said).size() == 2);
    CHECK(said.find("columns: prompt <- instruction, query <- input, system <- system, history <- history, response <- output\n") != said.npos);
    CHECK(packed(scratch, row, R"({"columns": {"prompt": "question", "response": "answer", "chosen": "chosen", "rejected": "rejected"}})") == Strings{chat("", {"Q", "A"})});
    CHECK(packed(scratch, row, R"({"ranking": true, "columns": {"prompt": "question", "chosen": "chosen", "rejected": "rejected"}})") ==
          Strings{chat("", {"Q", "C"}), chat("", {"Q", "R"})});
    const std::string turns = R"({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "S", "tools": "[{\"name\": \"f\"}]"})" "\n";
    CHECK(packed(scratch, turns, R"({"formatting": "sharegpt"})") == Strings{chat("", {"Q", "A"})});
    CHECK(packed(scratch, turns, R"({"formatting": "sharegpt", "num_samples": 5, "columns": {"messages": "conversations", "images": "images"}})", &said) == Strings{chat("", {"Q", "A"})});
    CHECK(said.find("not known here, and not read: images, num_samples") != said.npos);
    write_file(scratch / "dataset_info.json", R"({"d": {"file_name": "rows.jsonl", "ranking": true}})");
    check_refused({"pack", scratch / "dataset_info.json", scratch / "x.bin", "--name", "d"}, "chosen and rejected: missing");
    write_file(scratch / "dataset_info.json", R"({"d": {"file_name": "rows.jsonl", "columns": {"prompt": 1}}})");
    check_refused({"pack", scratch / "dataset_info.json", scratch / "x.bin", "--name", "d"}, "prompt: not a string");
}

TEST_CASE("pack: a system prompt arrives once, from a column, a turn or both, in every format") {
    Scratch scratch;
    const std::string a = R"({"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}])", b = R"({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}])";
    const std::string in_a = R"({"from": "system", "value": "T"}, )", in_b = R"({"role": "system", "content": "T"}, )";
    const std::string none_a = R"({"from": "system", "value": ""}, )", none_b = R"({"role": "system", "content": ""}, )";
    const std::string share = R"("conversations": [)", open = R"("messages": [)", system = R"({"system": "S", )";
    const std::string tags = R"({"formatting": "sharegpt", "columns": {"messages": "messages", "system": "system"}, "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}})";
    const std::string mapped = R"({"formatting": "sharegpt", "columns": {"messages": "conversations", "system": "system"}})";
    const struct { std::string row, entry, wanted; } cases[] = {
        {system + R"("instruction": "Q", "output": "A"})", "", "S"}, {R"({"system": null, "instruction": "Q", "output": "A"})", "", ""},
        {system + share + a + "}", "", "S"}, {"{" + share + in_a + a + "}", "", "T"}, {system + share + in_a + a + "}", "", "T"}, {system + share + none_a + a + "}", "", "S"},
        {system + open + b + "}", "", "S"}, {"{" + open + in_b + b + "}", "", "T"}, {system + open + in_b + b + "}", "", "T"}, {"{" + open + none_b + b + "}", "", ""},
        {system + share + a + "}", mapped, "S"}, {system + share + in_a + a + "}", mapped, "T"}, {system + open + b + "}", tags, "S"}, {system + open + in_b + b + "}", tags, "T"}};
    for (auto& c : cases) {
        INFO(c.row << " " << c.entry);
        CHECK(packed(scratch, c.row + "\n", c.entry) == Strings{chat(c.wanted, {"Q", "A"})});
    }
}

TEST_CASE("pack: roles have the names that tags give them, whatever the keys are called") {
    Scratch scratch;
    const std::string row = R"({"talk": [{"role": "rules", "content": "S"}, {"role": "customer", "content": "Q"}, {"role": "agent", "content": "A"}]})" "\n";
    const std::string entry = R"({"formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "customer", "assistant_tag": "agent", "system_tag": "rules"}})";
    CHECK(packed(scratch, row, entry) == Strings{chat("S", {"Q", "A"})});
    // Without an entry rows show whose keys they have, under either name.
    for (const char* key : {"messages", "conversations"})
        for (auto [from, value] : {std::pair("from", "value"), {"role", "content"}})
            for (auto [user, assistant] : {std::pair("user", "assistant"), {"human", "gpt"}}) {
                const std::string shown = format(R"({"%s": [{"%s": "%s", "%s": "Q"}, {"%s": "%s", "%s": "A"}]})", key, from, user, value, from, assistant, value);
                INFO(shown);
                CHECK(packed(scratch, shown + "\n") == Strings{chat("", {"Q", "A"})});
                const std::string first = read_file(scratch / "rows.bin");
                good({"pack", scratch / "dataset_info.json", scratch / "again.bin", "--name", "rows"}); // ... and pack's own entry
                CHECK(read_file(scratch / "again.bin") == first);
            }
    // A call of several tools, as a list.
    const std::string calls = R"({"conversations": [{"from": "human", "value": "Q"}, {"from": "function_call", "value": "[{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {}}]"}]})" "\n";
    CHECK(packed(scratch, calls)[0].find("=> <tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"") != std::string::npos);
    write_file(scratch / "rows.jsonl", R"({"messages": [{"x": "user", "content": "Q"}]})" "\n");
    check_refused({"pack", scratch / "rows.jsonl", scratch / "x.bin"}, "messages[0]: no role");
}

TEST_CASE("null is absent, in every optional column of every format") {
    Scratch scratch;
    const std::string optional = R"(, "input": null, "system": null, "history": null, "tools": null)", nothing = R"(, "messages": null, "conversations": null, "text": null, "chosen": null, "rejected": null, "prompt": null})";
    CHECK(packed(scratch, R"({"instruction": "Q", "output": "A")" + optional + nothing + "\n") == Strings{chat("", {"Q", "A"})});
    CHECK(packed(scratch, R"({"instruction": null, "input": "Q", "output": "A"})" "\n") == Strings{chat("", {"Q", "A"})});
    CHECK(packed(scratch, R"({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "messages": null, "instruction": null, "chosen": null)" + optional + "}\n") == Strings{chat("", {"Q", "A"})});
    CHECK(packed(scratch, R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "tool_calls": null, "reasoning_content": null}], "conversations": null)" + optional + "}\n") == Strings{chat("", {"Q", "A"})});
    CHECK(packed(scratch, R"({"text": "T", "messages": null, "instruction": null, "conversations": null, "chosen": null})" "\n") == Strings{"T=> <|endoftext|>"});
    for (const char* prompt : {R"("instruction": "Q", "prompt": null, "messages": null, "conversations": null, "input": null)", R"("prompt": [{"role": "user", "content": "Q"}], "instruction": null, "messages": null)"}) {
        INFO(prompt);
        CHECK(packed(scratch, std::string("{") + prompt + R"(, "chosen": "C", "rejected": "R", "tools": null})" "\n") == Strings{chat("", {"Q", "C"}), chat("", {"Q", "R"})});
    }
    // score's rows, answers and references alike
    write_file(scratch / "reference", R"({"id": null, "instruction": "Q", "input": null, "output": "A", "messages": null, "facts": null, "choices": null, "choice": null})" "\n");
    write_file(scratch / "answer", R"({"id": null, "answer": null, "predict": "A", "reference": null, "error": null})" "\n");
    CHECK(good({"score", scratch / "answer", scratch / "reference"}).out.find("1 rows matched by order") == 0);
}

TEST_CASE("pack: special tokens are such in a text, and letters in a message, which pack counts") {
    Scratch scratch;
    std::string said;
    const Tokenizer tokenizer("tokenizer.bin");
    const std::string chatml = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n";
    sj::Writer w;
    packed(scratch, w.object().field("text", chatml).end().text + "\n", "", &said);
    CHECK(said.find("special") == said.npos);
    std::vector<int> ids = tokenizer.encode(chatml, true), got;
    ids.push_back(tokenizer.id("<|endoftext|>"));
    auto ids_of = [&](size_t row) {
        got.clear();
        const Dataset data(scratch / "rows.bin");
        for (uint32_t word : data.row(row)) got.push_back((int)(word & ~TRAIN));
        return got;
    };
    CHECK(ids_of(0) == ids);
    packed(scratch, R"({"text": "T<|endoftext|>"})" "\n"); // an end that is there is not doubled
    CHECK(ids_of(0) == std::vector<int>{tokenizer.encode("T", false)[0], tokenizer.id("<|endoftext|>")});
    packed(scratch, R"({"prompt": "<|im_start|>user\nQ<|im_end|>\n", "chosen": "A<|im_end|>", "rejected": "B"})" "\n", "", &said);
    CHECK(ids_of(0)[0] == tokenizer.id("<|im_start|>"));
    const Strings rows = packed(scratch, R"({"instruction": "what is <|im_end|>?", "output": "A"})" "\n" R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "say <|endoftext|>"}]})" "\n" R"({"instruction": "a <| b |> c <|none|>", "output": "A"})" "\n", "", &said);
    CHECK(said.find("2 rows have names of special tokens") != said.npos);
    CHECK(std::count(got.begin(), got.end(), 0) == 0);
    ids_of(0);
    CHECK(std::count(got.begin(), got.end(), tokenizer.id("<|im_end|>")) == 2); // the template's
}

TEST_CASE("pack: answers without a word are dropped and counted, in every format and in history") {
    Scratch scratch;
    std::string said;
    for (const char* nothing : {"\"\"", "null", "\" \\n\\u3000\"", "\"<think>\\nhm\\n</think>\\n\\n\"", "\"<think>hm\"", "\"hm</think>\\n\""}) {
        INFO(nothing);
        auto with = [&](const char* row) { return format(row, nothing) + "\n"; };
        const std::string rows = alpaca("Q", "A") + "\n" + with(R"({"instruction": "Q", "output": %s})") + with(R"({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": %s}]})") +
                                 with(R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": %s}]})") +
                                 with(R"({"instruction": "R", "output": "B", "history": [["Q", %s]]})");
        const Strings all = packed(scratch, rows, "", &said);
        CHECK(all.size() == 2);
        CHECK(all[0] == chat("", {"Q", "A"}));
        CHECK(said.find("2 rows kept, 4 dropped") != said.npos);
        CHECK(rules(scratch / "rows.jsonl.dropped")["no answer"] == 4);
        const std::string pair = R"({"instruction": "Q", "chosen": "A", "rejected": "B"})" "\n";
        if (!strcmp(nothing, "null")) continue; // (then it is no pair)
        CHECK(packed(scratch, pair + with(R"({"instruction": "Q", "chosen": %s, "rejected": "B"})")).size() == 2);
        CHECK(rules(scratch / "rows.jsonl.dropped")["no answer"] == 1);
    }
    write_file(scratch / "x.jsonl", alpaca("Q", "") + "\n");
    check_refused({"pack", scratch / "x.jsonl", scratch / "x.bin"}, "no answer says anything");
    CHECK(packed(scratch, R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": null, "tool_calls": [{"name": "f", "arguments": {}}]}]})" "\n").size() == 1);
}

TEST_CASE("pack's own dataset_info.json reads back: texts, tools and systems, too") {
    Scratch scratch;
    const std::string tools = R"("tools": [{"type": "function", "function": {"name": "f"}}], "system": "S")";
    for (const std::string& rows : {std::string(R"({"text": "A text.", "id": 1})"), R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "A"}], )" + tools + "}",
             R"({"conversations": [{"from": "human", "value": "Q"}, {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"}, {"from": "observation", "value": "7"}, {"from": "gpt", "value": "A"}], )" + tools + "}",
             R"({"instruction": "Q", "output": "A", )" + tools + "}"}) {
        INFO(rows);
        packed(scratch, rows + "\n");
        const std::string first = read_file(scratch / "rows.bin");
        good({"pack", scratch / "dataset_info.json", scratch / "again.bin", "--name", "rows"});
        CHECK(read_file(scratch / "again.bin") == first);
    }
}

TEST_CASE("UTF-16 is named, an array without end names its line") {
    Scratch scratch;
    auto refused = [&](const std::string& bytes, const char* word) {
        write_file(scratch / "x", bytes);
        check_refused({"pack", scratch / "x", scratch / "x.bin"}, word);
        check_refused({"score", scratch / "x", scratch / "x"}, word);
        check_refusal(Process(getenv("QWEN3") ? getenv("QWEN3") : "./qwen3", {"tests/fixtures/tiny", "--eval", scratch / "x", "-o", scratch / "o"}).wait(), "qwen3", word);
    };
    refused("\xFF\xFE{\0\"\0"s, "UTF-16; convert it first: iconv -f UTF-16 -t UTF-8");
    refused("\xFE\xFF\0{\0\""s, "UTF-16;");
    refused("{\0\"\0a\0"s, "UTF-16LE;");
    refused("\0{\0\"\0a"s, "UTF-16BE;");
    refused("\xFF\xFE\0\0{\0\0\0"s, "UTF-32;");
    refused("[\n" + alpaca("Q", "A") + ",\n\n {\"instruction\": \"Q\",\n \"output", "line 4: the array has no end");
    refused("\n\n[", "line 3: the array has no end");
}

TEST_CASE("one reader: a byte order mark, arrays, ShareGPT and lists of parts in score as in pack") {
    Scratch scratch;
    const std::string parts = R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, {"role": "assistant", "content": [{"type": "text", "text": "A "}, {"type": "text", "text": "B"}]}]})";
    const std::string share = R"({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A B"}]})", answer = R"({"answer": "A B"})";
    for (const std::string& row : {parts, share, R"({"instruction": "", "input": "Q", "output": "A B"})"s})
        for (const std::string& text : {row + "\n", "\xEF\xBB\xBF" + row, "[" + row + "]", "\xEF\xBB\xBF\n[\n" + row + "\n]\n"}) {
            INFO(text);
            write_file(scratch / "reference", text);
            write_file(scratch / "answers", "\xEF\xBB\xBF[" + answer + "]");
            const Json scored(good({"score", scratch / "answers", scratch / "reference", "--train", scratch / "reference", "--json"}).out);
            CHECK(scored["answers"]["rouge-l"]["mean"].number() == 100);
            CHECK(scored["worst"][0]["question"].str() == "Q");
            CHECK(packed(scratch, text) == Strings{chat("", {"Q", "A B"})});
        }
}

// First rows of datasets that are much used, made up after their documented schemas, with the entries that
// LLaMA-Factory's own dataset_info.json has for them, and what its converters make of them.
TEST_CASE("pack: twenty public datasets as LLaMA-Factory reads them") {
    const std::string answers = R"("columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected")";
    const struct { const char* name; std::string row, entry; Strings wanted; } sets[] = {
        {"alpaca_en", R"({"instruction": "Q", "input": "", "output": "A"})", R"({"formatting": "alpaca"})", {chat("", {"Q", "A"})}},
        {"alpaca_gpt4_zh", R"({"instruction": "问", "input": "题", "output": "答"})", R"({"formatting": "alpaca"})", {chat("", {"问\n题", "答"})}},
        {"belle_2m", R"({"instruction": "Q\n", "input": "", "output": "A"})", R"({"formatting": "alpaca"})", {chat("", {"Q\n", "A"})}},
        {"dolly", R"({"instruction": "Q", "context": "C", "response": "A", "category": "open_qa"})", R"({"columns": {"prompt": "instruction", "query": "context", "response": "response"}})", {chat("", {"Q\nC", "A"})}},
        {"openorca", R"({"id": "niv.1", "system_prompt": "S", "question": "Q", "response": "A"})", R"({"columns": {"prompt": "question", "response": "response", "system": "system_prompt"}})", {chat("S", {"Q", "A"})}},
        {"open_platypus", R"({"input": "", "output": "A", "instruction": "Q", "data_source": "MATH/PRM-800K"})", R"({"columns": {"prompt": "instruction", "response": "output"}})", {chat("", {"Q", "A"})}},
        {"firefly", R"({"kind": "NLI", "input": "问", "target": "答"})", R"({"columns": {"prompt": "input", "response": "target"}})", {chat("", {"问", "答"})}},
        {"adgen", R"({"content": "类型#裤", "summary": "宽松的裤"})", R"({"columns": {"prompt": "content", "response": "summary"}})", {chat("", {"类型#裤", "宽松的裤"})}},
        {"mathinstruct", R"({"source": "data/CoT/aqua.json", "output": "A", "instruction": "Q"})", R"({"columns": {"prompt": "instruction", "response": "output"}})", {chat("", {"Q", "A"})}},
        {"cosmopedia", R"({"prompt": "Q", "text_token_length": 9, "text": "A", "seed_data": "x", "format": "y"})", R"({"columns": {"prompt": "prompt", "response": "text"}})", {chat("", {"Q", "A"})}},
        {"oaast_sft", R"({"instruction": "Q", "input": "", "output": "A", "history": [["q", "a"]]})", R"({"columns": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}})", {chat("", {"q", "a"}), chat("", {"q", "a", "Q", "A"})}},
        {"slimorca", R"({"conversations": [{"from": "system", "value": "S", "weight": null}, {"from": "human", "value": "Q", "weight": 0.0}, {"from": "gpt", "value": "A", "weight": 1.0}]})", R"({"formatting": "sharegpt"})", {chat("S", {"Q", "A"})}},
        {"sharegpt4", R"({"id": "1", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}, {"from": "human", "value": "R"}, {"from": "gpt", "value": "B"}]})", R"({"formatting": "sharegpt"})", {chat("", {"Q", "A"}), chat("", {"Q", "A", "R", "B"})}},
        {"ultrachat_200k", R"({"prompt": "Q", "prompt_id": "f", "messages": [{"content": "Q", "role": "user"}, {"content": "A", "role": "assistant"}]})", R"({"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}})", {chat("", {"Q", "A"})}},
        {"lmsys_chat", R"({"conversation_id": "1", "model": "m", "conversation": [{"content": "Q", "role": "user"}, {"content": "A", "role": "assistant"}], "turn": 1, "language": "English"})", R"({"formatting": "sharegpt", "columns": {"messages": "conversation"}, "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}})", {chat("", {"Q", "A"})}},
        {"glaive_toolcall", R"({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "tools": "[]"})", R"({"formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}})", {chat("", {"Q", "A"})}},
        {"dpo_mix_en", R"({"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"}, "rejected": {"from": "gpt", "value": "B"}})", R"({"formatting": "sharegpt", "ranking": true, "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}})", {chat("", {"Q", "A"}), chat("", {"Q", "B"})}},
        {"ultrafeedback", R"({"instruction": "Q", "chosen": "A", "rejected": "B", "id": 3})", R"({"ranking": true, )" + answers + "}}", {chat("", {"Q", "A"}), chat("", {"Q", "B"})}},
        {"orca_pairs", R"({"system": "S", "question": "Q", "chosen": "A", "rejected": "B"})", R"({"ranking": true, "columns": {"prompt": "question", "chosen": "chosen", "rejected": "rejected", "system": "system"}})", {chat("S", {"Q", "A"}), chat("S", {"Q", "B"})}},
        {"hh_rlhf_en", R"({"instruction": "Q", "output": ["A", "B"], "chosen": "A", "rejected": "B", "history": [["q", "a"]]})", R"({"ranking": true, )" + answers + R"(, "history": "history"}})", {chat("", {"q", "a", "Q", "A"}), chat("", {"q", "a", "Q", "B"})}},
        {"wiki_demo", R"({"text": "Anarchism is"})", R"({"columns": {"prompt": "text"}})", {"An=> archism is<|endoftext|>"}},
        {"refinedweb", R"({"content": "Once", "url": "http://x", "timestamp": "t"})", R"({"columns": {"prompt": "content"}})", {"Once=> <|endoftext|>"}},
    };
    Scratch scratch;
    for (auto& set : sets) {
        INFO(set.name);
        CHECK(packed(scratch, set.row + "\n", set.entry) == set.wanted);
    }
}

TEST_CASE("pack: rows that are too long are reported or refused, never cut; bad rows are named") {
    Scratch scratch;
    std::string longer;
    for (int i = 0; i < 600; i++) longer += "word ";
    write_file(scratch / "x.jsonl", alpaca("short", "answer") + "\n" + alpaca("long", longer) + "\n");
    const Result r = good({"pack", scratch / "x.jsonl", scratch / "x.bin"});
    CHECK(r.err.find("1 rows kept, 1 dropped") != std::string::npos);
    CHECK(rules(scratch / "x.jsonl.dropped")["too long"] == 1);
    CHECK(Dataset(scratch / "x.bin").rows() == 1);
    fs::remove(scratch / "x.bin");
    check_refused({"pack", scratch / "x.jsonl", scratch / "x.bin", "--over", "refuse"}, "line 2: 6");
    CHECK(!fs::exists(scratch / "x.bin"));
    good({"pack", scratch / "x.jsonl", scratch / "x.bin", "--max-len", "1000"});
    CHECK(Dataset(scratch / "x.bin").rows() == 2);
    check_refused({"pack", scratch / "x.jsonl", scratch / "y.bin", "--max-len", "5"}, "too long");

    for (auto [row, word] : {std::pair<const char*, const char*>{"{", "line 2"}, {"7", "not an object"}, {"{\"instruction\": \"x\"}", "output: missing"},
             {"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}", "assistant"}, {"{\"conversations\": 1}", "not a list"}, {"{\"conversations\": [{\"from\": \"x\", \"value\": \"\"}]}", "unknown role"},
             {"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"assistant\", \"content\": \"x\"}, {\"role\": \"assistant\", \"content\": \"x\"}]}", "turn 2"}}) {
        write_file(scratch / "bad.jsonl", alpaca("a", "b") + "\n" + row + "\n");
        check_refused({"pack", scratch / "bad.jsonl", scratch / "bad.bin"}, word);
        check_refused({"pack", scratch / "bad.jsonl", scratch / "bad.bin"}, "bad.jsonl: line 2");
    }
    CHECK(!fs::exists(scratch / "bad.bin"));
    write_file(scratch / "none.jsonl", "\n");
    check_refused({"pack", scratch / "none.jsonl", scratch / "none.bin"}, "no row");
    check_refused({"pack", scratch / "none.jsonl"}, "usage");
    write_file(scratch / "dataset_info.json", "{");
    check_refused({"pack", scratch / "dataset_info.json", scratch / "x.bin", "--name", "x"}, "dataset_info.json");
}

TEST_CASE("unpack and pack again give the same bytes; stats count") {
    Scratch scratch;
    write_file(scratch / "x.jsonl", alpaca("什么是 warp？", "32 个线程。\n\n完。") + "\n" + R"({"instruction": "Q", "output": "A", "system": "S", "chapter": "乙 > x", "difficulty": "hard"})" "\n");
    good({"pack", scratch / "x.jsonl", scratch / "x.bin"});
    good({"unpack", scratch / "x.bin", "-o", scratch / "y.jsonl"});
    const Json second(lines(read_file(scratch / "y.jsonl"))[1]);
    CHECK(second["messages"][0]["role"].str() == "system");
    CHECK(second["messages"][2]["content"].str() == "A");
    good({"pack", scratch / "y.jsonl", scratch / "y.bin"});
    CHECK(read_file(scratch / "x.bin") == read_file(scratch / "y.bin"));
    write_file(scratch / "text.jsonl", "{\"text\": \"plain text\"}\n");
    good({"pack", scratch / "text.jsonl", scratch / "text.bin"});
    CHECK(Json(lines(good({"unpack", scratch / "text.bin"}).out)[0])["text"].str() == "plain text");

    const Dataset data(scratch / "x.bin");
    const std::string out = good({"stats", scratch / "x.bin"}).out, table = good({"stats", scratch / "x.jsonl"}).out;
    CHECK(out.find(format("tokens  %24llu", (unsigned long long)data.tokens())) != std::string::npos);
    CHECK(table.find(format("  trained %22llu", (unsigned long long)data.trained())) != std::string::npos);
    CHECK(table.find("\n乙 ") != std::string::npos);
    check_refused({"unpack", scratch / "x.jsonl"}, "not a dataset");
    check_refused({"unpack", scratch / "x.bin", "-z", "tests/fixtures/tiny/tokenizer.bin"}, "another tokenizer");
    std::string bad = read_file(scratch / "x.bin");
    bad[60] ^= 1;
    write_file(scratch / "bad.bin", bad);
    check_refused({"stats", scratch / "bad.bin"}, "row 0");
}

TEST_CASE("the command line") {
    check_refused({"nothing"}, "unknown command");
    check_refused({"chunk"}, "usage");
    check_refused({"stats", BOOK, "--what", "1"}, "--what");
    check_refused({"stats", BOOK, "-z"}, "needs a value");
    CHECK(datagen({}).status == 1);
    const Result help = good({"--help"});
    for (auto& c : COMMANDS) CHECK(help.out.find(std::string(c.help).substr(0, std::string(c.help).find('\n'))) != std::string::npos);
    CHECK(help.out.find("score    answers.jsonl reference.jsonl") != std::string::npos);
    // Every command has its own --help, and each of its options says what it is by default.
    Arguments none;
    const std::vector<Option> table = option_table(none);
    for (auto& c : COMMANDS) {
        const std::string own = good({c.name, "--help"}).out;
        std::string known = std::string(c.options) + " -o --data ";
        for (auto& o : table) {
            const std::string name = *o.brief ? o.brief : o.name;
            const bool mine = (" " + known).find(" " + name + " ") != std::string::npos;
            const std::string what = std::string(c.name) + " " + o.name;
            INFO(what);
            CHECK((own.find(o.help) != std::string::npos || own.find(std::string(o.help).substr(0, 40)) != std::string::npos) == mine);
            CHECK((*o.value == 0 || std::string(o.help).find("default") != std::string::npos || std::string(o.help).find("required") != std::string::npos || name == "--tokens"));
        }
    }
    CHECK(good({"score", "--help"}).out.find("--seed") != std::string::npos);
    const Limits limits{Arguments()};
    auto says = [&](const std::string& option, const std::string& value) {
        for (auto& o : table)
            if (option == o.name) return std::string(o.help).find(value) != std::string::npos;
        return false;
    };
    auto number = [&](const char* name) { return format("%g", limits[name]); };
    CHECK(says("--characters", "default " + number("chunk.characters") + ")"));
    CHECK(says("--overlap", "default " + number("chunk.overlap") + ")"));
    CHECK(says("--parallel", "default " + number("generate.parallel") + ")"));
    CHECK(says("--timeout", "default " + number("generate.timeout") + ")"));
    CHECK(says("--retries", "default " + number("generate.retries") + ")"));
    CHECK(says("--max-tokens", number("prompt.easy.tokens") + ", " + number("prompt.medium.tokens") + ", " + number("prompt.hard.tokens") + " for each"));
    check_refused({"chunk", BOOK, "-o", "/no/such/folder/x"}, "/no/such/folder");
    check_refused({"chunk", BOOK, "-o", "tests"}, "directory");
}

TEST_CASE("no command replaces a file that it reads") {
    Scratch s;
    const std::string file = s / "train.jsonl", rows = "{\"instruction\": \"a\", \"output\": \"b\"}\n";
    write_file(file, rows);
    write_file(s / "chunks.jsonl", "{}\n");
    fs::create_symlink(file, s / "link");
    for (const Strings& words : {Strings{"filter", file, "-o", file}, {"filter", file, "-o", s / "link"}, {"filter", file, "--dropped", file}, {"split", file, "--test", "1", "-o", s.path.string()},
                                 {"pack", file, file}, {"stats", file, "-o", file}, {"generate", file, "--url", "http://127.0.0.1:1/v1", "--journal", file},
                                 {"collect", file, "--chunks", s / "chunks.jsonl", "-o", s / "chunks.jsonl"}})
        check_refusal(datagen(words), "datagen", ": is read by this command");
    CHECK(read_file(file) == rows);
    CHECK(s.count() == 3);
    check_refusal(datagen({"prompt", s / "chunks.jsonl", "--subject", "\xff"}), "datagen", "--subject: invalid UTF-8 at byte 0");
}
