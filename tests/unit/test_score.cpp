// Segmentation as jieba's, scores as rouge_chinese's, nltk's and sacrebleu's, and the command. What must come
// out was made with the originals by make_score_fixtures.py.
#include "book/datagen/bleu_words.h"
#include "book/datagen/facts_and_choices.h"
#include "book/datagen/intervals.h"
#include "book/datagen/nearest_answer.h"
#include "book/datagen/score.h"
#include "book/datagen/score_rows.h"
#include "book/datagen/score_table.h"
#include "book/jieba.h"
#include "model/utf8.h"
#include "tests/process.h"
#include <cmath>
#include <sys/wait.h>

using namespace book;

using Words = std::vector<std::string_view>;
static const std::string FIXTURES = "tests/fixtures/score/";

static const Jieba& jieba() {
    static const Jieba j("data/datagen/jieba.bin");
    return j;
}
static Words cut(std::string_view text) {
    Words words;
    jieba().cut(words, text);
    return words;
}
static std::vector<uint32_t> code_points(std::string_view text) {
    std::vector<uint32_t> all;
    for (const char* p = text.data(); p < text.data() + text.size();) all.push_back(utf8_read(p));
    return all;
}

static std::vector<std::string> strings(sj::Value list) {
    std::vector<std::string> all;
    for (sj::Value s : list.items()) all.push_back(s.str());
    return all;
}
static std::vector<std::string> owned(const Words& words) { return {words.begin(), words.end()}; }

// ---------------------------------------------------------------------------------------------- segmentation

TEST_CASE("chosen lines: jieba's words, and those rouge_chinese counts") {
    const Json cases(read_file(FIXTURES + "cuts.json"));
    REQUIRE(cases.root().size() > 80);
    for (sj::Value c : cases.root().items()) {
        const std::string text = c["text"].str();
        CAPTURE(text);
        CHECK(owned(cut(text)) == strings(c["cut"]));
        CHECK(owned(rouge_words(cut(text), true)) == strings(c["words"]));
    }
}

namespace {
// The generator of make_score_fixtures.py.
struct Draw {
    uint64_t state;
    uint32_t below(uint32_t n) {
        state = state * 6364136223846793005 + 1442695040888963407;
        return (uint32_t)((state >> 32) * n >> 32);
    }
};
} // namespace
static std::string draw_line(Draw& draw, const std::vector<uint32_t>& odd,
                             const std::vector<std::vector<uint32_t>>& items) {
    std::string out;
    for (uint32_t parts = 1 + draw.below(20); parts > 0; parts--) {
        const uint32_t kind = draw.below(16);
        const std::vector<uint32_t>& item = items[draw.below((uint32_t)items.size())];
        if (kind < 8) {
            for (uint32_t c : item) utf8_append(out, c);
        } else if (kind < 10) {
            const size_t begin = draw.below((uint32_t)item.size()), end = begin + 1 + draw.below(3);
            for (size_t i = begin; i < std::min(end, item.size()); i++) utf8_append(out, item[i]);
        } else if (kind < 12) {
            for (size_t i = item.size(); i-- > 0;) utf8_append(out, item[i]);
        } else if (kind == 12) {
            utf8_append(out, 0x4E00 + draw.below(0x9FD6 - 0x4E00));
        } else if (kind == 13) {
            const uint32_t c = odd[draw.below((uint32_t)odd.size())];
            for (uint32_t n = 1 + draw.below(14); n > 0; n--) utf8_append(out, c);
        } else if (kind == 14) {
            for (uint32_t n = 1 + draw.below(8); n > 0; n--) out += (char)(0x20 + draw.below(95));
        } else {
            const uint32_t c = draw.below(0x110000);
            utf8_append(out, c >= 0xD800 && c < 0xE000 ? 'x' : c);
        }
    }
    return out;
}
static uint32_t hash_of(const Words& words) {
    uint64_t h = 0xCBF29CE484222325;
    for (std::string_view w : words)
        for (char c : std::string(w) + "\xFF") h = (h ^ (uint8_t)c) * 0x100000001B3;
    return (uint32_t)(h >> 32 ^ h);
}

TEST_CASE("10,000 mixed lines: the same words as jieba and rouge_chinese") {
    const Json material(read_file(FIXTURES + "material.json"));
    const std::vector<uint32_t> odd = code_points(material.root()["odd"].str());
    std::vector<std::vector<uint32_t>> items;
    for (sj::Value s : material.root()["items"].items()) items.push_back(code_points(s.str()));
    const std::string hashes = read_file(FIXTURES + "lines.u32");
    REQUIRE(hashes.size() == 80000);

    Draw draw{1};
    int cuts = 0, words = 0;
    for (size_t i = 0; i < 10000; i++) {
        const std::string line = draw_line(draw, odd, items);
        uint32_t want[2];
        memcpy(want, &hashes[8 * i], 8);
        const Words pieces = cut(line);
        const bool same_cut = hash_of(pieces) == want[0];
        const bool same_words = hash_of(rouge_words(pieces, true)) == want[1];
        if ((!same_cut || !same_words) && cuts + words < 3) MESSAGE("line " << i << ": " << line);
        cuts += !same_cut, words += !same_words;
    }
    CHECK(cuts == 0);
    CHECK(words == 0);
}

TEST_CASE("any bytes: the words are the text, in order; a byte that is no UTF-8 stands alone") {
    CHECK(owned(cut("中国\xE4\xB8人民\xFF")) == std::vector<std::string>{"中国", "\xE4", "\xB8", "人民", "\xFF"});
    Draw draw{2};
    const std::string bytes = "中国人民的a1.%+# \r\n\xE4\xB8\xFF\xF0\x9F";
    for (int i = 0; i < 2000; i++) {
        std::string text;
        for (uint32_t n = draw.below(40); n > 0; n--) {
            const uint32_t at = draw.below((uint32_t)bytes.size());
            text += bytes.substr(at, 1 + draw.below(6));
        }
        std::string joined;
        for (std::string_view w : cut(text)) {
            CHECK(!w.empty());
            joined += w;
        }
        CHECK(joined == text);
    }
}

TEST_CASE("long texts take time in proportion, whatever they are") {
    for (const char* unit : {"的", "a", "龘", "中国", "1.", "。", "\xFF", "\n"}) {
        CAPTURE(unit);
        std::string text;
        while (text.size() < 1000000) text += unit;
        const double start = (double)clock();
        Words words = cut(text);
        CHECK(((double)clock() - start) / CLOCKS_PER_SEC < 2);
        CHECK(words.back().data() + words.back().size() == text.data() + text.size());
    }
}

// ---------------------------------------------------------------------------------------- jieba.bin, hostile

static std::string fault_of(const std::string& bytes) {
    const MemoryFile file(bytes);
    try {
        const Jieba j(file.path);
        Words words;
        j.cut(words, "中国人民在大学c++,T恤的 3.1%");
        return "";
    } catch (const Error& e) {
        const std::string what = e.what();
        CHECK(what.compare(0, file.path.size() + 2, file.path + ": ") == 0);
        CHECK(what.find('\n') == what.npos);
        return what.substr(std::min(what.size(), file.path.size() + 2));
    }
}

TEST_CASE("a damaged jieba.bin is one line of error") {
    const std::string tiny = read_file("tests/fixtures/fuzz/jieba/tiny");
    REQUIRE(fault_of(tiny) == "");
    for (size_t n = 1; n < tiny.size(); n++) CHECK(fault_of(tiny.substr(0, n)) != "");
    CHECK(fault_of(tiny + "x") == "its size is not what its header says");
    CHECK_THROWS_AS(Jieba("tests/no such file"), Error);

    // header 40: magic 8, version, nodes, depth, frequencies, emissions, probabilities, total 8;
    // 20 + 6 doubles; 10 frequencies, 13 nodes; 5 emissions
    const size_t reals = 40, frequencies = reals + 8 * 26, nodes = frequencies + 4 * 10;
    const size_t emissions = nodes + 4 * 13;
    REQUIRE(emissions + 5 * 10 == tiny.size());
    auto with = [&](size_t at, auto value) {
        std::string s = tiny;
        memcpy(&s[at], &value, sizeof value);
        return fault_of(s);
    };
    auto node = [&](size_t i) {
        uint32_t x;
        memcpy(&x, &tiny[nodes + 4 * i], 4);
        return x;
    };
    CHECK(with(0, 'x') == "not a jieba.bin");
    CHECK(with(8, 2u) == "a jieba.bin of another version");
    for (size_t at : {12, 20, 24, 28})
        for (uint32_t count : {0u, 1u, 0x7FFFFFFFu, 0xFFFFFFFFu})
            CHECK(with(at, count) == "its size is not what its header says");
    CHECK(with(16, 4u) == "its trie is deeper than it may be");
    CHECK(with(32, (uint64_t)0) == "it has no frequencies");
    CHECK(with(32, (uint64_t)5) == "a frequency is out of range");
    CHECK(with(reals, NAN + 0.) == "a probability is no number");
    CHECK(with(reals + 8 * 25, -INFINITY + 0.) == "a probability is no number");
    CHECK(with(frequencies, 1u) == "it has no frequencies");
    CHECK(with(frequencies + 4, 0u) == "a frequency is out of range");
    CHECK(with(nodes, node(0) | 0x7FFF) == "a label of its trie is out of order");
    CHECK(with(nodes + 4, node(0)) == "a label of its trie is out of order");
    CHECK(with(nodes, node(0) | 0x7FFF0000) == "a frequency is out of range");
    CHECK(with(nodes, node(0) | 1 << 15) == "a node of its trie has no parent");
    CHECK(with(nodes + 4 * 12, node(12) | 1u << 31) == "its trie ends too early");
    CHECK(with(nodes + 4 * 12, node(12) & ~(1u << 15)) == "its trie ends too early");
    CHECK(with(emissions, (uint16_t)5) == "a character is out of order");
    CHECK(with(emissions + 10, (uint16_t)173) == "a character is out of order");
    CHECK(with(emissions + 2, (uint16_t)6) == "a probability is out of range");

    const uint32_t more = 32769;
    std::string many = tiny.substr(0, frequencies) + std::string(4 * (more - 10), '\0') + tiny.substr(frequencies);
    memcpy(&many[20], &more, 4);
    CHECK(fault_of(many) == "it has more nodes or frequencies than can be numbered");

    for (uint32_t depth : {64, 65}) { // a word of so many letters: tiny's header and reals, nodes one below the other
        const uint32_t counts[6] = {1, depth, depth, 2, 0, 0}, frequency[2] = {0, 1}, inner = 128 | 1 << 15 | 1u << 31;
        std::vector<uint32_t> chain(depth, inner);
        chain.back() = 128 | 1 << 15 | 1 << 16;
        std::string s = tiny.substr(0, reals + 8 * 20);
        memcpy(&s[8], counts, sizeof counts);
        s.append((const char*)frequency, sizeof frequency).append((const char*)chain.data(), 4 * depth);
        CHECK(fault_of(s) == (depth == 64 ? "" : "its trie is deeper than it may be"));
    }

    for (size_t at = 0; at < tiny.size(); at++) // whatever a byte becomes: an error or a segmenter, no crash
        for (int value : {0, 1, 0x7F, 0x80, 0xFF, tiny[at] ^ 1, tiny[at] ^ 0x40}) with(at, (char)value);
}

// ---------------------------------------------------------------------------------------------------- scores

TEST_CASE("white space is Python's") {
    const Json blank(read_file(FIXTURES + "blank.json"));
    std::vector<uint32_t> want, got;
    for (sj::Value c : blank.root().items()) want.push_back((uint32_t)c.number());
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c >= 0xD800 && c < 0xE000) continue;
        std::string s;
        utf8_append(s, c);
        if (is_blank(s)) got.push_back(c);
    }
    CHECK(got == want);
}

TEST_CASE("row by row the scores are rouge_chinese's and nltk's") {
    const Json expected(read_file(FIXTURES + "expected.json"));
    const ScoreFile answers(FIXTURES + "answers.jsonl"), references(FIXTURES + "reference.jsonl");
    REQUIRE(expected.root()["rows"].size() == answers.rows.size());
    REQUIRE(answers.rows.size() > 100);
    size_t i = 0;
    int differ = 0; // rows where blank lines matter
    for (sj::Value row : expected.root()["rows"].items()) {
        CAPTURE(i);
        const ScoreReference reference(references, references.rows[i]);
        const std::string raw = score_answer(answers, answers.rows[i++], reference.answer);
        const std::string answer = without_thought(raw);
        const ScoredText a(jieba(), answer), r(jieba(), reference.answer), q(jieba(), reference.question);
        auto check = [&](const std::array<double, 3>& got, double bleu, sj::Value want) {
            for (size_t m = 0; m < 3; m++) CHECK(std::fabs(got[m] - want[m].number(NAN)) <= 1e-15);
            CHECK(std::fabs(bleu - want[BLEU_CHAR].number(NAN)) <= 1e-12);
        };
        check(rouge(a.words[1], r.words[1]), bleu4(a.characters, r.characters), row["compat"]);
        check(rouge(a.words[0], r.words[0]), bleu4(a.characters, r.characters), row["plain"]);
        check(rouge(q.words[0], r.words[0]), bleu4(q.characters, r.characters), row["question"]);
        differ += sj::dump(row["compat"]) != sj::dump(row["plain"]);
    }
    CHECK(differ > 20);
}

TEST_CASE("rouge_score's rougeL over jieba's words, exactly: chosen pairs and 400 drawn ones") {
    const Json fixture(read_file(FIXTURES + "rouge_score.json")), material(read_file(FIXTURES + "material.json"));
    auto score = [](const std::string& hypothesis, const std::string& reference) {
        return rouge_score(ScoredText(jieba(), hypothesis).ascii, ScoredText(jieba(), reference).ascii);
    };
    REQUIRE(fixture["chosen"].size() > 15);
    for (sj::Value c : fixture["chosen"].items()) {
        CAPTURE(c["hypothesis"].str());
        CAPTURE(c["reference"].str());
        CHECK(score(c["hypothesis"].str(), c["reference"].str()) == c["f"].number(NAN));
    }
    const std::vector<uint32_t> odd = code_points(material["odd"].str());
    std::vector<std::vector<uint32_t>> items;
    for (sj::Value s : material["items"].items()) items.push_back(code_points(s.str()));
    REQUIRE(fixture["drawn"].size() == 400);
    Draw draw{5};
    int between = 0, wrong = 0;
    for (sj::Value f : fixture["drawn"].items()) {
        std::string a, b, c;
        for (std::string* text : {&a, &b, &c})
            for (int i = 0; i < 5; i++) *text += draw_line(draw, odd, items);
        const uint32_t way = draw.below(4);
        const std::string hypothesis = way == 2 ? a : way == 3 ? a + b + a : a + b;
        const std::string reference = way == 0 ? a + c : way == 1 ? b + a : way == 2 ? c : b + c;
        wrong += score(hypothesis, reference) != f.number(NAN);
        between += f.number() > 0 && f.number() < 1;
    }
    CHECK(wrong == 0);
    CHECK(between > 200);
    CHECK(ascii_words({"\u0130d_\u212A1", "2x"}) == std::vector<std::string>{"i", "d", "k1", "2x"}); // as tokenize()
    CHECK(score("线程束有三十二个线程。", "线程束有三十二个线程。") == 0); // the same text, and not a word of ASCII
}

TEST_CASE("the longest common subsequence is the table's, across 64 columns") {
    Draw draw{3};
    for (size_t n : {0, 1, 5, 63, 64, 65, 127, 128, 129, 300})
        for (size_t m : {0, 1, 64, 65, 200})
            for (uint32_t distinct : {1, 2, 5, 100}) {
                std::vector<uint32_t> a(n), b(m);
                for (uint32_t& x : a) x = draw.below(distinct);
                for (uint32_t& x : b) x = draw.below(distinct);
                std::vector<std::vector<size_t>> table(n + 1, std::vector<size_t>(m + 1));
                for (size_t i = 1; i <= n; i++)
                    for (size_t j = 1; j <= m; j++)
                        table[i][j] = a[i - 1] == b[j - 1] ? table[i - 1][j - 1] + 1
                                                           : std::max(table[i - 1][j], table[i][j - 1]);
                CHECK(lcs(a, b, distinct) == table[n][m]);
            }
}

TEST_CASE("percents are rounded as Python rounds") {
    CHECK(rounded_percent(0.123456789) == 12.3457);
    CHECK(rounded_percent(2. / 3) == 66.6667);
    CHECK(rounded_percent(0.00000625) == 0.0006); // 6.25e-4 exactly is not in binary: just below the half
    CHECK(rounded_percent(0) == 0);
    CHECK(rounded_percent(1) == 100);
}

TEST_CASE("a think block is stripped, and nothing else") {
    const char* cases[][2] = {{"好", "好"}, {"", ""}, {" 好 ", " 好 "},
        {"<think>\n\n</think>\n\n好 ", "好 "}, {"\n <think>a</think>b", "b"}, {"<think>a", ""},
        {"<think>a</think>", ""},
        {"a\n</think>\n\nb", "b"}, {"<think>a</think>b</think>c", "b</think>c"},
        {"see <think>x</think> there", "see <think>x</think> there"},
        {"see <think> there", "see <think> there"}};
    for (auto& c : cases) CHECK(without_thought(c[0]) == c[1]);
}

TEST_CASE("BLEU of words is sacrebleu's: its tokenizer 13a, its score of a sentence") {
    const Json measures(read_file(FIXTURES + "measures.json"));
    REQUIRE(measures.root()["bleu"].size() > 100);
    int between = 0;
    for (sj::Value c : measures.root()["bleu"].items()) {
        const std::string hypothesis = c["hypothesis"].str(), reference = c["reference"].str();
        CAPTURE(hypothesis);
        CAPTURE(reference);
        std::string words;
        for (const std::string& word : words_13a(hypothesis)) words += word + "|";
        std::string want; // (of an empty text sacrebleu has one empty word)
        for (sj::Value word : c["words"].items())
            if (!word.str().empty()) want += word.str() + "|";
        CHECK(words == want);
        const double bleu = bleu4_words(hypothesis, reference), wanted = c["bleu"].number(NAN);
        CHECK(std::fabs(bleu - wanted) <= 1e-12);
        between += wanted > 0.1 && wanted < 0.9;
    }
    CHECK(between > 20);
}

TEST_CASE("a text of a language with spaces") {
    for (const char* yes : {"A warp has 32 threads.", "워프에는 스레드가 있다", "Поток", "a b c d e f g h i j 核", "x", 
                            "See\n```\n核核核核\n```"})
        CHECK(has_spaces(yes));
    for (const char* no : {"", "32", "线程束有 32 个线程", "スレッド", "กระแส", "a b c d e f g h 核", "__syncthreads() 等待全块的线程",
                           "```\nfor (int i = 0; i < n; i++) y[i] = x[i];\n```\n如上", "```a b c```", "```"})
        CHECK(!has_spaces(no));
}

TEST_CASE("key facts: numbers and names stand alone, however they are written") {
    const char* found[][2] = {{"每个 SM 有 2,048 个线程", "2048"}, {"２０４８个", "2,048"}, {"约 75 %", "75%"},
        {"227KB", "227"}, {"Shared  Memory", "shared memory"}, {"用共享 内存", "共享内存"}, {"It is −6.", "-6"},
        {"about 0.5.", "0.5"}, {"1, 2, 3", "2"}, {"8-16", "16"}, {"wgmma。", "HGMMA|wgmma"}, {"(m64n8k16)", "m64n8k16"},
        {"cudaFree()", "cudafree"}, {"6", "6"}, {"答案", "x|答|"}, {"用Warp", "warp"}, {"1,0240", "0240"},
        {"CUDA's __shfl_sync is", "__shfl_sync"}, {"x[0] = 1", "[0]"}, {"[0]", "[0]"}};
    for (auto& c : found) {
        CAPTURE(c[0]);
        CHECK(fact_stands(fact_form(c[0]), fact_form(c[1])));
    }
    const char* missing[][2] = {{"6.4", "6"}, {"16", "6"}, {"2.6", "6"}, {"-6", "6"}, {"10^6", "6"}, {"FP6", "6"},
        {"1,024", "24"}, {"1e5", "1"}, {"warps", "warp"}, {"sharedmemory", "shared memory"}, {"", "6"}, {"]", "6"},
        {"cudaFreeAsync", "cudaFree"}, {"x_a", "a"}, {"65,536", "65"},
        {"0] = 1", "[0]"}, {"x[0", "[0]"}, {"龖", "["}}; // (the form's own brackets are no part of an answer)
    for (auto& c : missing) {
        CAPTURE(c[0]);
        CHECK(!fact_stands(fact_form(c[0]), fact_form(c[1])));
    }
}

TEST_CASE("the letter of a choice, in many words; none where none is chosen") {
    const std::pair<const char*, char> cases[] = {
        {"B", 'B'}, {"b", 'B'}, {"(c)", 'C'}, {" **D**\n", 'D'}, {"B. 因为 A 太小", 'B'},
        {"B、共享内存", 'B'}, {"C：对", 'C'}, {"答案是 B，因为选项 A 错误", 'B'}, {"先看 A。再看 B。所以应选 C。", 'C'},
        {"正确答案：【D】", 'D'}, {"正确的选项是 A", 'A'}, {"The answer is (B).", 'B'}, {"Answer: **C**", 'C'},
        {"the correct option is D", 'D'}, {"$\\boxed{A}$", 'A'}, {"\\boxed{\\text{B}}", 'B'}, {"A is correct", 'A'},
        {"I think B", 'B'}, {"A warp has 32 threads: B", 'B'}, {"选 B 不对，应选 C", 'C'}, {"它用 C++ 写，选 A", 'A'},
        {"答案不是 A，而是 B；答案 B", 'B'}, {"【答案】C", 'C'}, {"ANSWER IS B", 'B'},
        {"A block has threads", 0}, {"", 0}, {"E", 0}, {"A 或 B", 0}, {"不正确：A 与 B", 0}, {"incorrect: A or B", 0},
        {"不知道", 0}, {"The answer is a warp", 0}, {"选项 A 与选项 B 都可以", 0}, {"BC", 0}, {"C++", 0}, {"选", 0}};
    for (auto& c : cases) {
        CAPTURE(std::string(c.first));
        CHECK(chosen_letter(c.first, 4) == c.second);
    }
    CHECK(chosen_letter("E", 5) == 'E');
}

TEST_CASE("the nearest training question is scikit-learn's, by TF-IDF over jieba's words") {
    const Json measures(read_file(FIXTURES + "measures.json"));
    const sj::Value nearest = measures.root()["nearest"];
    Scratch scratch;
    std::string rows;
    size_t n = 0;
    for (sj::Value question : nearest["train"].items()) {
        sj::Writer w;
        w.object().field("instruction", question.str());
        w.field("output", "<think>x</think>answer " + std::to_string(n++)).end();
        rows += w.text + "\n";
    }
    write_file(scratch / "train", rows);
    const ScoreFile file(scratch / "train");
    const NearestAnswer index(jieba(), file);
    REQUIRE(nearest["ask"].size() > 30);
    for (size_t i = 0; i < nearest["ask"].size(); i++) {
        const std::string question = nearest["ask"][i].str();
        CAPTURE(question);
        const auto [row, cosine] = index.find(jieba(), question);
        CHECK((double)row == nearest["found"][i][0].number(NAN));
        CHECK(cosine == doctest::Approx(nearest["found"][i][1].number(NAN)).epsilon(1e-12));
        CHECK(index.answer(jieba(), question) == "answer " + std::to_string(row));
    }
    CHECK(index.answer(jieba(), "") == "");
    CHECK(index.answer(jieba(), "zyzzyva") == "");
}

TEST_CASE("Wilson's interval is statsmodels'") {
    const Json measures(read_file(FIXTURES + "measures.json"));
    for (sj::Value c : measures.root()["wilson"].items()) {
        const Interval x = wilson(c[0].number(NAN), c[1].number(NAN));
        CHECK(x.mean == doctest::Approx(100 * c[0].number(NAN) / c[1].number(NAN)));
        CHECK(std::fabs(x.low - c[2].number(NAN)) < 1e-9);
        CHECK(std::fabs(x.high - c[3].number(NAN)) < 1e-9);
    }
}

TEST_CASE("bootstrap: seeded, centred, and as wide as the normal theory says") {
    Draw draw{4};
    const size_t n = 400;
    std::vector<double> values(n);
    double sum = 0, squares = 0;
    for (double& x : values) {
        x = draw.below(1000) / 10.;
        sum += x, squares += x * x;
    }
    const double mean = sum / n, error = std::sqrt((squares / n - mean * mean) / n);
    const Interval a = bootstrap(values, 1), again = bootstrap(values, 1), other = bootstrap(values, 2);
    CHECK(a.mean == doctest::Approx(mean));
    CHECK(a.low == doctest::Approx(mean - 1.96 * error).epsilon(0.01));
    CHECK(a.high == doctest::Approx(mean + 1.96 * error).epsilon(0.01));
    CHECK((a.low == again.low && a.high == again.high));
    CHECK(a.low != other.low);
    const Interval same = bootstrap(std::vector<double>(n, 7), 1);
    CHECK((same.low == 7 && same.mean == 7 && same.high == 7));
}

// ----------------------------------------------------------------------------------------------- the command

static const char* PROGRAM = getenv("DATAGEN") ? getenv("DATAGEN") : "./datagen";

static Result run(Strings arguments) {
    arguments.insert(arguments.begin(), "score");
    return Process(PROGRAM, arguments).wait();
}
static std::string out_of(const std::vector<std::string>& arguments) {
    const Result r = run(arguments);
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r.out;
}
static void check_refused(const Strings& arguments, const std::string& word) { check_refusal(run(arguments), "datagen", word); }

static void check_means(sj::Value got, sj::Value want) {
    for (size_t m = 0; m < 4; m++) {
        const sj::Value x = got[METRICS[m]];
        CHECK(x["mean"].number(NAN) == doctest::Approx(want[m].number(NAN)).epsilon(1e-12));
        CHECK(x["low"].number(NAN) <= x["mean"].number(NAN));
        CHECK(x["high"].number(NAN) >= x["mean"].number(NAN));
    }
}

TEST_CASE("score: LLaMA-Factory's means, by id and by order, with and without --compat") {
    const Json expected(read_file(FIXTURES + "expected.json"));
    const sj::Value mean = expected.root()["mean"];
    const std::string answers = FIXTURES + "answers.jsonl", references = FIXTURES + "reference.jsonl";
    const Json plain(out_of({answers, references, "--json"}));
    const Json compat(out_of({"--compat", answers, references, "--json"}));
    check_means(plain.root()["answers"], mean["plain"]);
    check_means(plain.root()["blank_lines_counted"], mean["compat"]);
    check_means(plain.root()["question"], mean["question"]);
    check_means(compat.root()["answers"], mean["compat"]);
    check_means(compat.root()["blank_lines_dropped"], mean["plain"]);
    CHECK(plain.root()["matched_by"].str() == "id");
    CHECK(plain.root()["rows"].number() == expected.root()["rows"].size());
    CHECK(plain.root()["empty"].number() == 2);
    CHECK(plain.root()["worst"].size() == 3);

    // The references backwards: ids find them. Without ids the order counts; a wrong one is seen.
    Scratch scratch;
    std::string backwards, bare;
    const std::string text = read_file(references);
    for (size_t end = text.size(); end > 0;) {
        const size_t begin = end < 2 ? 0 : text.rfind('\n', end - 2) + 1;
        const std::string line = text.substr(begin, end - begin);
        backwards += line;
        bare = "{" + line.substr(line.find(", ") + 2) + bare;
        end = begin;
    }
    write_file(scratch / "backwards", backwards);
    write_file(scratch / "bare", bare);
    CHECK(out_of({answers, scratch / "backwards", "--json"}) == plain.text);
    const Json by_order(out_of({answers, scratch / "bare", "--json"}));
    CHECK(by_order.root()["matched_by"].str() == "order");
    CHECK(sj::dump(by_order.root()["answers"]) == sj::dump(plain.root()["answers"]));
    write_file(scratch / "wrong", bare.substr(bare.find('\n') + 1) + bare.substr(0, bare.find('\n') + 1));
    check_refused({answers, scratch / "wrong"}, "it answers another question");

    // seeds change the intervals and nothing else
    const Json seeded(out_of({answers, references, "--json", "--seed", "7"}));
    auto low = [](const Json& json) { return json.root()["answers"]["rouge-l"]["low"].number(NAN); };
    CHECK(low(seeded) != low(plain));
    check_means(seeded.root()["answers"], mean["plain"]);
}

TEST_CASE("score: the fields of other programs, the worst rows, and a terminal that stays whole") {
    Scratch scratch;
    const std::string a = scratch / "a", r = scratch / "r";
    write_file(r, R"({"instruction": "问", "input": "题一", "output": "共享内存很快"}

{"instruction": "问二", "output": "全局内存很慢"}
{"messages": [{"role": "user", "content": "问三"}, {"role": "assistant", "content": "<think>嗯</think>寄存器最快"}]}
{"instruction": "问四", "output": "线程束有32个线程"}
)");
    write_file(a, R"({"predict": "共享内存很快", "output": "x"}
{"output": "全局内存\u001b[31m很\u0085慢\n啊"}
{"answer": "<think>想\n</think>\n寄存器最快", "predict": "x"}
{"error": "too long"}
)");
    const Json json(out_of({a, r, "--json"}));
    const sj::Value worst = json.root()["worst"];
    CHECK(worst[0]["line"].number() == 4);
    CHECK(worst[0]["rouge-l"].number(NAN) == 0);
    CHECK(worst[0]["answer"].str() == "");
    CHECK(worst[1]["line"].number() == 2);
    CHECK(worst[1]["question"].str() == "问二");
    CHECK(worst[2]["rouge-1"].number() == 100);
    CHECK(json.root()["empty"].number() == 1);

    const std::string shown = out_of({a, r});
    CHECK(shown.find("4 rows matched by order; 1 empty") == 0);
    for (const char* word : {"\nrouge-1 ", "\nrouge-2 ", "\nrouge-l ", "\nbleu-4-char ", "\nrouge-score ", "the question as answer",
                             "\nblank lines counted:\n  rouge-1 ", "全局内存 [31m很 慢 啊", "问 题一"})
        CHECK(shown.find(word) != std::string::npos);
    CHECK(shown.find('\x1b') == std::string::npos);
    CHECK(shown.find("\u0085") == std::string::npos);
}

TEST_CASE("score: BLEU of words, facts, choices and both baselines, each over the rows that have it") {
    Scratch scratch;
    const std::string a = scratch / "a", r = scratch / "r", t = scratch / "t";
    write_file(r, R"({"instruction": "How wide is a warp?", "output": "A warp has 32 threads.", "facts": ["32"]}
{"instruction": "线程束有多少线程？", "output": "线程束有 32 个线程。", "facts": ["32", "线程|thread"]}
{"instruction": "选一个", "input": "A. 8\nB. 16\nC. 32", "output": "C. 32", "choices": ["8", "16", "32"], "choice": "C"}
{"instruction": "再选", "input": "A. 8\nB. 16", "output": "A", "choices": ["8", "16"], "choice": "A"}
{"instruction": "共享内存在哪里？", "output": "在芯片上。", "facts": []}
)");
    write_file(a, R"({"answer": "A warp has 64 threads."}
{"answer": "<think>32</think>有 32 个"}
{"answer": "答案是 C"}
{"answer": "16"}
{"answer": "在芯片上。"}
)");
    write_file(t, R"({"instruction": "一个线程束有多少个线程？", "output": "有 32 个线程。"}
{"instruction": "选一个吧", "output": "C"}
)");
    const Json json(out_of({a, r, "--train", t, "--json"}));
    auto cell = [&](const char* column, const char* metric) { return json.root()[column][metric]; };
    auto mean = [&](const char* column, const char* metric) { return cell(column, metric)["mean"].number(NAN); };
    CHECK(cell("answers", "rouge-l")["rows"].number() == 3); // not of the choices
    CHECK(cell("answers", "bleu-4-word")["rows"].number() == 1);
    CHECK(mean("answers", "bleu-4-word") ==
          rounded_percent(bleu4_words("A warp has 64 threads.", "A warp has 32 threads.")));
    CHECK(cell("answers", "facts")["rows"].number() == 2);
    CHECK(cell("answers", "rouge-score")["rows"].number() == 3);
    CHECK(mean("answers", "rouge-score") == doctest::Approx((80 + 100 + 0) / 3.)); // a warp has 32 threads; 32; none
    CHECK(mean("answers", "facts") == 25);
    CHECK(mean("question", "facts") == 25); // 线程
    CHECK(mean("nearest", "facts") == 50);  // (of the English question no word is known)
    CHECK(mean("answers_less_nearest", "facts") == -25);
    CHECK(mean("answers", "choice") == 50);
    CHECK(cell("answers", "choice")["low"].number(NAN) == doctest::Approx(wilson(1, 2).low));
    CHECK(mean("nearest", "choice") == 50);
    CHECK(json.root()["choices"]["no_letter"].number() == 1);
    CHECK(json.root()["choices"]["chance"].number(NAN) == doctest::Approx((50 + 100. / 3) / 2));
    const std::string shown = out_of({a, r, "--train", t});
    for (const char* words : {"2 choices: 1 answers name no letter", "nearest training answer", "answers less nearest",
                              "\nbleu-4-word      1 ",
                              "\nfacts            2   25.0000 [", "\nchoice           2   50.0000 ["})
        CHECK(shown.find(words) != std::string::npos);
    const Json without(out_of({a, r, "--json"}));
    CHECK(!without.root()["nearest"]);
    CHECK(sj::dump(without.root()["answers"]) == sj::dump(json.root()["answers"]));

    const std::string row = R"({"instruction": "q", "output": "o", )", one = scratch / "one";
    write_file(one, "{\"answer\": \"A\"}\n");
    const std::pair<const char*, const char*> faults[] = {
             {R"("facts": "32")", "facts: not a list"}, {R"("facts": [32])", "facts: not a string"},
             {R"("facts": [" "])", "facts: an empty one"}, {R"("choice": "A")", "choices: 2 to 26"},
             {R"("choice": "C", "choices": ["x", "y"])", "choice: not the letter"},
             {R"("choice": "AB", "choices": ["x", "y"])", "choice: not the letter"},
             {R"("choice": 1, "choices": ["x", "y"])", "choice: not a string"},
             {R"("choices": "xy")", "choices: not a list"}};
    for (auto& [fields, fault] : faults) {
        write_file(scratch / "bad", row + fields + "}\n");
        check_refused({one, scratch / "bad"}, fault);
    }
    check_refused({a, r, "--train", scratch / "none"}, "none: No such file");
    check_refused({a, r, "--train", a}, "a: line 1: instruction: missing");
}

TEST_CASE("score: faults are one line that names the file and the line") {
    Scratch scratch;
    auto file = [&](const char* name, const std::string& text) {
        write_file(scratch / name, text);
        return scratch / name;
    };
    const std::string one = R"({"instruction": "问", "output": "答"})", answer = "{\"answer\": \"答\"}\n";
    const std::string r = file("r", one), a = file("a", answer);
    CHECK(run({a, r}).status == 0);
    CHECK(run({"--help"}).out.find("--compat") != std::string::npos);
    check_refused({}, "usage: datagen score");
    check_refused({a, r, r}, "usage: datagen score");
    check_refused({a, r, "--best"}, "unknown option --best");
    for (const char* seed : {"x", "", "-1", "1x", "99999999999999999999"})
        check_refused({a, r, "--seed", seed}, "--seed");
    check_refused({a, r, "--dict"}, "--dict needs a value");
    check_refused({a, r, "--dict", a}, "not a jieba.bin");
    check_refused({scratch / "none", r}, "none: No such file");
    check_refused({file("empty", ""), r}, "no row in it");
    check_refused({file("blank", "\n \n"), r}, "no row in it");
    check_refused({file("two", answer + answer), r}, "two: 2 rows, but " + r + " has 1");
    check_refused({file("bad", answer + "{\"answer\": }\n"), r}, "bad: line 2: byte 11");
    check_refused({file("list", "[1]"), r}, "list: item 1: not an object");
    check_refused({file("nil", R"({"answers": "答"})"), r}, "nil: line 1: no answer, predict or output");
    check_refused({file("utf8", "{\"answer\": \"\xFF\"}"), r}, "invalid UTF-8");
    check_refused({a, file("q", R"({"output": "答"})")}, "q: line 1: instruction: missing");
    check_refused({a, file("o", R"({"instruction": "", "output": 1})")}, "o: line 1: output: not a string");
    check_refused({a, file("m", R"({"messages": [{"role": "user", "content": ""}]})")}, "the last one");
    check_refused({a, file("e", R"({"messages": []})")}, "not the assistant's");

    const std::string q1 = R"({"id": 1, "instruction": "", "output": ""})" "\n";
    const std::string q2 = R"({"id": 2, "messages": [{"role": "assistant", "content": ""}]})" "\n";
    const std::string q12 = file("q12", q1 + q2), q11 = file("q11", q1 + q1);
    const std::string a1 = "{\"id\": 1, \"answer\": \"\"}\n", a2 = "{\"id\": 2, \"answer\": \"\"}\n";
    CHECK(run({file("a21", a2 + a1), q12}).status == 0);
    check_refused({file("a11", a1 + a1), q12}, "a11: line 2: id 1 was there before, or is no row");
    check_refused({file("text", a1 + "{\"id\": \"2\", \"answer\": \"\"}"), q12}, "line 2: id \"2\"");
    check_refused({file("a12", a1 + a2), q11}, "q11: line 2: id 1 was there before");
    check_refused({file("some", a1 + answer), q12}, "some: line 2: no id, which other rows have");
}
