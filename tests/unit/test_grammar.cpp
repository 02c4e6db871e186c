// Grammars: what the automaton accepts and which tokens it allows, against brute force; JSON schemas against
// JSON-Schema-Test-Suite; hostile input. tests/fixtures/schema: tests/reference/make_schema_fixtures.py
#include "form/gbnf.h"
#include "base/stop_flag.h"
#include "form/matcher.h"
#include "form/regex.h"
#include "form/schema.h"
#include "model/tokenizer.h"
#include "tests/process.h"
#include "tests/sanitized.h"
#include "tests/schemas.h"
#include <arpa/inet.h>
#include <ctime>
#include <regex>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

using Shared = std::shared_ptr<Automaton>;

static std::shared_ptr<const Vocabulary> vocabulary(bool large = false) {
    static const Tokenizer small("data/tiny/tokenizer.bin"), whole("tokenizer.bin");
    static const auto of_small = std::make_shared<const Vocabulary>(small), of_whole = std::make_shared<const Vocabulary>(whole);
    return large ? of_whole : of_small;
}
static Shared automaton(Grammar&& g, bool large = false) { return std::make_shared<Automaton>(std::move(g), vocabulary(large)); }
static Shared from_schema(const std::string& text, bool large = false) {
    const Json json(text);
    return automaton(grammar_of_schema(json.root()), large);
}
static bool accepts(const Shared& a, std::string_view text) {
    Matcher m(a);
    return m.advance(text) && m.may_end();
}
static std::string refusal_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

namespace {
struct Random {
    uint64_t state;
    uint32_t below(uint32_t n) {
        state = state * 6364136223846793005 + 1442695040888963407;
        return (uint32_t)(state >> 33) % n;
    }
};
} // namespace

// The mask of a state, token by token: one is allowed if its bytes lead somewhere.
static void check_mask(Matcher& m) {
    const Vocabulary& v = *m.automaton->vocabulary;
    std::vector<uint32_t> bits(v.words());
    m.mask(bits.data());
    size_t wrong = 0, past = 0;
    for (int id = 0; id < v.tokenizer.size(); id++) {
        int s = m.state;
        for (char c : v.bytes(id)) s = s ? m.automaton->next(s, (uint8_t)c) : 0;
        if (id && v.bytes(id) == "\xFF") s = 0; // (this byte alone is no text)
        wrong += (s != 0) != (bits[(size_t)id / 32] >> id % 32 & 1);
    }
    for (size_t id = (size_t)v.tokenizer.size(); id < v.words() * 32; id++) past += bits[id / 32] >> id % 32 & 1;
    CHECK(wrong == 0);
    CHECK(past == 0);
}
// A text that the masks allow, token by token; every mask is checked if `check`.
static std::string random_text(const Shared& a, Random& random, size_t most, bool check) {
    Matcher m(a);
    const Vocabulary& v = *a->vocabulary;
    std::string text;
    std::vector<uint32_t> bits(v.words());
    for (size_t n = 0; n < most && !m.must_end(); n++) {
        if (m.may_end() && random.below(8) == 0) break;
        if (check) check_mask(m);
        m.mask(bits.data());
        std::vector<int> allowed;
        for (int id = 0; id < v.tokenizer.size(); id++)
            if (bits[(size_t)id / 32] >> id % 32 & 1) allowed.push_back(id);
        REQUIRE(!allowed.empty());
        const int id = allowed[random.below((uint32_t)allowed.size())];
        REQUIRE(m.advance(id));
        text += v.bytes(id);
    }
    return text;
}

TEST_CASE("grammar: random regular expressions accept what std::regex accepts") {
    Random random{1};
    const std::function<std::string(int)> make = [&](int depth) -> std::string {
        static const char* ATOMS[] = {"a", "b", "c", "[ab]", "[^a]", "\\w", "."};
        static const char* TIMES[] = {"*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?"};
        switch (random.below(depth > 0 ? 6 : 2)) {
        case 0: case 1: return ATOMS[random.below(7)];
        case 2: return make(depth - 1) + make(depth - 1);
        case 3: return "(?:" + make(depth - 1) + "|" + make(depth - 1) + ")";
        case 4: return "(" + make(depth - 1) + ")" + TIMES[random.below(8)];
        default: return "(?:" + make(depth - 1) + "|)" + make(depth - 1);
        }
    };
    size_t accepted = 0, checked = 0;
    for (int i = 0; i < 150; i++) {
        const std::string pattern = make(4);
        INFO(pattern);
        const Shared a = automaton(grammar_of_regex(pattern));
        const std::regex oracle(pattern);
        for (int n = 0; n < 363; n++) { // all texts of a, b, c up to five letters
            std::string text;
            int rest = n, length = 0;
            for (int all = 1; rest >= all; rest -= all, all *= 3) length++;
            for (int k = 0; k < length; k++, rest /= 3) text += (char)('a' + rest % 3);
            const bool wanted = std::regex_match(text, oracle);
            checked++, accepted += wanted;
            if (accepts(a, text) != wanted) {
                INFO(text);
                CHECK(accepts(a, text) == wanted);
            }
        }
    }
    CHECK(checked == 150 * 363);
    CHECK(accepted > 5000);
}

TEST_CASE("grammar: patterns of JSON Schema are searched for, and their text is written as JSON") {
    auto holds = [](const std::string& pattern, const std::string& json) {
        std::string quoted;
        sj::quote(quoted, pattern);
        return accepts(from_schema("{\"pattern\": " + quoted + "}"), json);
    };
    CHECK(holds("^a+$", "\"aaa\""));
    CHECK(!holds("^a+$", "\"aab\""));
    CHECK(holds("b", "\"aabcc\""));
    CHECK(!holds("b", "\"aacc\""));
    CHECK(holds("^a|b$", "\"axx\""));
    CHECK(holds("^a|b$", "\"xxb\""));
    CHECK(!holds("^a|b$", "\"xbx\""));
    CHECK(holds("^[\"\\\\]\\n$", "\"\\\"\\n\""));
    CHECK(!holds("^[\"\\\\]\\n$", "\"\"\\n\""));
    CHECK(holds("^.$", "\"线\""));
    CHECK(holds("^\\u7ebf\\x41$", "\"线A\""));
    CHECK(holds("^[^a]$", "\"\xf0\x9f\x98\x80\""));
    CHECK(!holds("^[^a]$", "\"a\""));
    CHECK(!holds("^[^a]$", "\"\xff\""));
}

TEST_CASE("grammar: characters are UTF-8: every code point, alone and in ranges") {
    Random random{2};
    for (int i = 0; i < 200; i++) {
        uint32_t low = random.below(LAST_CODE + 1) >> random.below(20), high = low + (random.below(LAST_CODE + 1 - low) >> random.below(20));
        Grammar g;
        g.rules[0].start = g.character({{low, high}}, Grammar::FINAL, RAW);
        auto surrogate = [](uint32_t c) { return c >= 0xD800 && c < 0xE000; };
        if (surrogate(low) && surrogate(high)) continue;
        g.finish();
        const Shared a = automaton(std::move(g));
        for (int k = 0; k < 40; k++) {
            const uint32_t near[] = {low, high, low - 1, high + 1, random.below(LAST_CODE + 1), low + random.below(high - low + 1)};
            const uint32_t c = near[random.below(6)];
            if (c > LAST_CODE || surrogate(c)) continue;
            std::string text;
            utf8_append(text, c);
            INFO(low << " " << high << " " << c);
            CHECK(accepts(a, text) == (low <= c && c <= high));
        }
    }
}

namespace {
// All texts that a GBNF grammar derives, up to a number of bytes: found by rewriting, without an automaton.
struct Derivations {
    std::map<std::string, std::vector<std::vector<std::string>>> rules; // words in '' are terminals
    std::set<std::string> all(size_t longest) const {
        std::set<std::string> found;
        std::set<std::vector<std::string>> seen;
        std::vector<std::vector<std::string>> todo = {{"root"}};
        while (!todo.empty()) {
            const std::vector<std::string> form = todo.back();
            todo.pop_back();
            if (!seen.insert(form).second) continue;
            size_t bytes = 0, first = form.size();
            std::string text;
            for (size_t i = form.size(); i-- > 0;)
                if (rules.count(form[i])) first = i;
                else bytes += form[i].size(), text = form[i] + text;
            if (bytes > longest || form.size() > 2 * longest + 4) continue;
            if (first == form.size()) { found.insert(text); continue; }
            for (auto& way : rules.at(form[first])) {
                std::vector<std::string> next = form;
                next.erase(next.begin() + (ptrdiff_t)first);
                next.insert(next.begin() + (ptrdiff_t)first, way.begin(), way.end());
                todo.push_back(next);
            }
        }
        return found;
    }
    std::string gbnf() const {
        std::string text;
        for (auto& [name, ways] : rules) {
            text += name + " ::= ";
            for (auto& way : ways) {
                text += &way == ways.data() ? "" : " | ";
                if (way.empty()) text += "\"\"";
                for (auto& word : way) text += (rules.count(word) ? word : "\"" + word + "\"") + " ";
            }
            text += "\n";
        }
        return text;
    }
};
} // namespace

TEST_CASE("grammar: random context-free grammars accept what they derive, and their masks are exact") {
    Random random{3};
    size_t compiled = 0, refused = 0, words = 0;
    for (int i = 0; i < 400; i++) {
        Derivations d;
        const char* NAMES[] = {"root", "r", "s"};
        for (const char* name : NAMES)
            for (uint32_t n = 1 + random.below(3); n > 0; n--) {
                std::vector<std::string> way;
                for (uint32_t k = random.below(4); k > 0; k--)
                    way.push_back(random.below(5) < 3 ? std::string(1, (char)('a' + random.below(3))) : NAMES[random.below(3)]);
                d.rules[name].push_back(way);
            }
        const std::string text = d.gbnf();
        INFO(text);
        Shared a;
        const std::string why = refusal_of([&] { a = automaton(grammar_of_gbnf(text)); });
        if (!a) {
            refused++;
            CHECK((why.find("can begin with itself") != why.npos || why == "nothing matches it"));
            continue;
        }
        compiled++;
        const std::set<std::string> language = d.all(5);
        words += language.size();
        for (int n = 0; n < 363; n++) {
            std::string word;
            int rest = n, length = 0;
            for (int all = 1; rest >= all; rest -= all, all *= 3) length++;
            for (int k = 0; k < length; k++, rest /= 3) word += (char)('a' + rest % 3);
            if (accepts(a, word) != language.count(word)) {
                INFO(word);
                CHECK(accepts(a, word) == language.count(word));
            }
        }
        if (i % 10 == 0) random_text(a, random, 6, true);
    }
    CHECK(compiled > 100);
    CHECK(refused > 50);
    CHECK(words > 500);
}

TEST_CASE("grammar: GBNF by hand") {
    const Shared a = automaton(grammar_of_gbnf("# a comment\nroot ::= greeting \", \" name ( \"!\" | \"?\" ){1,2}\n"
                                               "greeting ::= \"hi\" |\n  \"hello\" # another\nname ::= [A-Z] [a-z\\]]* | \"\\u7ebf\" | .\n"));
    CHECK(accepts(a, "hi, Bob!"));
    CHECK(accepts(a, "hello, B]b?!"));
    CHECK(accepts(a, "hi, 线!"));
    CHECK(accepts(a, "hi, 中!"));
    CHECK(!accepts(a, "hi, bob!"));
    CHECK(!accepts(a, "hi, Bob"));
    CHECK(!accepts(a, "hi, Bob!!!"));
    for (auto& row : std::vector<std::pair<std::string, std::string>>{
             {"root ::= r\nr ::= r \"a\" | \"b\"", "begin with itself"}, {"root ::= e r\ne ::= \"\"\nr ::= e root | \"a\"", "begin with itself"},
             {"root ::= r", "not defined"}, {"r ::= \"a\"", "no rule named root"}, {"root ::= \"a\" root", "nothing matches"},
             {"root ::= \"a", "without its end"}, {"root ::= [z-a]", "a range that is none"}, {"root ::= (\"a\"", "without its )"},
             {"root ::= \"a\"{2,1}", "wrong way round"}, {"root ::= \"\\q\"", "unknown escape"}, {"root ::= \"a\"\nroot ::= \"b\"", "second rule"},
             {"root = \"a\"", "expected ::="}, {"root ::= \"\xff\"", "UTF-8"}, {"", "no rule named root"}, {"root ::= \"a\"**", "repetition of"}}) {
        const std::string &text = row.first, &word = row.second;
        INFO(text);
        CHECK(refusal_of([&] { grammar_of_gbnf(text); }).find(word) != std::string::npos);
    }
    for (auto& row : std::vector<std::pair<std::string, std::string>>{
             {"(?=a)b", "looking around"}, {"(?<!a)b", "looking around"}, {"(a)\\1", "escape"}, {"a\\b", "\\b"}, {"a++", "possessive"},
             {"a**", "repetition of"}, {"(a", "without its )"}, {"a)", "without its ("}, {"[a", "without its ]"}, {"a{2,1}", "wrong way"},
             {"\\p{L}", "escape"}, {"*a", "nothing to repeat"}, {"a^b", "beginning and the end"}, {"[]", "nothing matches"}, {"\\", "at the end"},
             {"(?i)a", "flags"}, {"[\\d-z]", "range"}, {"\\ud800", "not a character"}}) {
        const std::string &text = row.first, &word = row.second;
        INFO(text);
        CHECK(refusal_of([&] { grammar_of_regex(text); }).find(word) != std::string::npos);
    }
}

TEST_CASE("grammar: masks are exact: strings, counts, words, escapes, both vocabularies") {
    Random random{4};
    const std::vector<std::string> schemas = {
        R"({"type": "object"})", R"({"type": "string", "maxLength": 40})", R"({"type": "string", "minLength": 3, "maxLength": 5})",
        R"({"type": "array", "items": {"type": "string", "pattern": "^[a-z ]{0,60}$"}, "maxItems": 40})",
        R"({"properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 18, "maximum": 120}, "tags": {"items": {"enum": ["a", "ab", "中文", "x\"y"]}}},
            "required": ["name", "age"], "additionalProperties": {"type": "boolean"}})"};
    for (auto& schema : schemas) {
        INFO(schema);
        const Shared a = from_schema(schema);
        for (int i = 0; i < 6; i++) random_text(a, random, 30, true);
    }
    for (const char* gbnf : {"root ::= word (\" \" word)*\nword ::= [a-z]+ | [0-9]{1,50}", "root ::= (\"a\" | \"aa\"){0,200} tail\ntail ::= \"b\"{30,200} | .*"}) {
        INFO(gbnf);
        const Shared a = automaton(grammar_of_gbnf(gbnf));
        for (int i = 0; i < 6; i++) random_text(a, random, 40, true);
    }
    const Shared large = from_schema(schemas[4], true);
    for (int i = 0; i < 2; i++) random_text(large, random, 12, true);
}

TEST_CASE("schemas: JSON-Schema-Test-Suite: nothing invalid is accepted; what is not supported is refused by name") {
    const std::string suite(MappedFile("tests/fixtures/schema/suite.jsonl").text());
    size_t compiled = 0, refused = 0, valid = 0, accepted = 0, invalid = 0;
    std::map<std::string, size_t> refused_in;
    for (auto& line : lines(suite)) {
        const Json row(line);
        INFO(row["file"].str() << ": " << row["schema"].raw());
        Shared a;
        const std::string why = refusal_of([&] { a = automaton(grammar_of_schema(row["schema"])); });
        if (!a) {
            refused++, refused_in[row["file"].str()]++;
            CHECK((why.find("support") != why.npos || why == "nothing matches it" || why.find("twice") != why.npos));
            continue;
        }
        compiled++;
        for (sj::Value text : row["valid"].items()) valid++, accepted += accepts(a, text.str());
        for (sj::Value text : row["invalid"].items()) {
            INFO(text.str());
            CHECK(!accepts(a, text.str()));
            invalid++;
        }
    }
    for (const char* whole : {"type", "enum", "const", "required", "minimum", "maximum", "minLength", "maxLength", "minItems", "pattern"}) {
        INFO(whole);
        CHECK(refused_in[whole] == 0);
    }
    CHECK(compiled == 135);
    CHECK(compiled + refused == lines(suite).size());
    CHECK(invalid > 300);
    // The others: properties in another order or beyond those named, 1.0 as an integer, all hosts and zones, ...
    CHECK(accepted >= 230);
    CHECK(valid < 400);
}

TEST_CASE("schemas: formats are those of their RFCs: texts that jsonschema has judged, and drawn ones") {
    auto quoted = [](const std::string& text) {
        std::string out;
        sj::quote(out, text);
        return out;
    };
    size_t valid = 0, invalid = 0;
    for (auto& line : lines(std::string(MappedFile("tests/fixtures/schema/formats.jsonl").text()))) {
        const Json row(line);
        INFO(row["format"].str());
        const Shared a = from_schema("{\"format\": " + quoted(row["format"].str()) + "}");
        for (sj::Value text : row["valid"].items()) CHECK_MESSAGE(accepts(a, text.raw()), text.raw());
        for (sj::Value text : row["invalid"].items()) CHECK_MESSAGE(!accepts(a, text.raw()), text.raw());
        valid += row["valid"].size(), invalid += row["invalid"].size();
    }
    CHECK(valid > 800);
    CHECK(invalid > 1500);
    // jsonschema asks of an address for an @ only. RFC 5321:
    const Shared email = from_schema(R"({"format": "email"})");
    const std::string longest(64, 'x');
    for (const std::string& good : Strings{"joe.bloggs@example.com", "a@b", "Te~st+tag/x=y@Sub.Example.ORG", "~!#$%&'*{|}?^_`@x.y", "\"joe bloggs\"@example.com", "\"joe..b\\\"@\\ggs\"@a",
                                          "joe@[127.0.0.1]", "joe@[IPv6:::1]", longest + "@a", "a.b.c.d.e.f.g@h", "a." + longest.substr(2) + "@a"})
        CHECK_MESSAGE(accepts(email, quoted(good)), good);
    for (const std::string& bad : Strings{"@", "a@", "@a", "a", ".a@b", "a.@b", "a..b@c", "a b@c", "a@b@c", "a@-b", "joe@[127.0.0.300]", "joe@127.0.0.1]", "\"a@b", "\"a\"b\"@c", longest + "x@a", "a." + longest.substr(1) + "@a", "\xc3\xa9@a"})
        CHECK_MESSAGE(!accepts(email, quoted(bad)), bad);

    Random random{9};
    Choices choose{[&] { return random.below(1 << 30); }};
    auto drawn = [&](const std::string& name, const std::function<bool(const std::string&)>& good) {
        const Shared a = from_schema("{\"format\": \"" + name + "\"}");
        size_t whole = 0;
        for (int i = 0; i < 600; i++) {
            const std::string text = draw_text(*a, choose, 300);
            if (text.empty()) continue;
            CHECK_MESSAGE(good(Json(text).root().str()), text);
            whole++;
        }
        CHECK_MESSAGE(whole > 500, name);
    };
    uint8_t address[16];
    drawn("ipv4", [&](const std::string& s) { return inet_pton(AF_INET, s.c_str(), address) == 1; });
    drawn("ipv6", [&](const std::string& s) { return inet_pton(AF_INET6, s.c_str(), address) == 1; });
    drawn("hostname", [&](const std::string& s) {
        static const std::regex LABELS("[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*");
        return s.size() <= 253 && std::regex_match(s, LABELS);
    });
    auto is_date = [](const std::string& s) { // by the C library's calendar
        tm day = {};
        if (s.size() < 10 || sscanf(s.c_str(), "%4d-%2d-%2d", &day.tm_year, &day.tm_mon, &day.tm_mday) != 3 || day.tm_year < 1) return false;
        day.tm_year -= 1900, day.tm_mon -= 1;
        tm same = day;
        timegm(&same);
        return same.tm_mday == day.tm_mday && same.tm_mon == day.tm_mon && same.tm_year == day.tm_year;
    };
    size_t leap = 0;
    drawn("date", [&](const std::string& s) { return leap += s.find("-02-29") == 4, s.size() == 10 && is_date(s); });
    drawn("date-time", [&](const std::string& s) { return is_date(s) && strchr("Tt", s[10]); });
    const Shared date = from_schema(R"({"format": "date"})");
    for (int year = 1; year <= 9999; year++) {
        const bool is = (year % 4 == 0 && year % 100) || year % 400 == 0;
        if (accepts(date, format("\"%04d-02-29\"", year)) != is) CHECK_MESSAGE(false, year);
    }
}

TEST_CASE("schemas: an object or a list of const and enum has the spellings of any other") {
    const Shared a = from_schema(R"({"enum": [{"k": [1, "\u00e9\n"], "l": {}}, ["a", null], "线", "b", 1e999, [], {"k": 1, "k": 2}]})");
    for (const char* good : {R"({"k": [1, "é\n"], "l": {}})", R"({"k":[1,"é\n"],"l":{}})", "{ \"k\": [\n  1,\n  \"\\u00E9\\u000a\"\n ],\n\"l\": { }\n}", R"(["a",null])", "[\n    \"a\",\n    null\n]",
                             "\"线\"", R"("\u7ebf")", R"("\u7EbF")", "\"b\"", "1e999", "[]", "[ ]", R"({"k":2})"})
        CHECK_MESSAGE(accepts(a, good), good);
    for (const char* bad : {R"({"l": {}, "k": [1, "é\n"]})", R"({"k": [1, "e\n"], "l": {}})", R"(["a"])", "[\"a\",  null]", R"({"k":1})", "\"线", R"("\u7ebe")", "Infinity", "\"é\""})
        CHECK_MESSAGE(!accepts(a, bad), bad);
    CHECK(accepts(from_schema(R"({"const": "\ud83d\ude00"})"), R"("\uD83d\uDE00")"));
    CHECK(accepts(from_schema(R"({"const": "😀"})"), "\"😀\""));
}

TEST_CASE("regular expressions: classes are what JavaScript, Python and RE2 share, and so are negated ones") {
    auto holds = [](const std::string& pattern, const std::string& text) { return accepts(automaton(grammar_of_regex(pattern)), text); };
    for (const char* blank : {" ", "\t", "\n", "\f", "\r"}) {
        CHECK(holds("\\s", blank));
        CHECK(!holds("\\S", blank));
        CHECK(!holds("[^\\s]", blank));
        CHECK(holds("[\\sx]", blank));
    }
    for (const char* unclear : {"\v", "\x1c", "\xc2\x85", "\xc2\xa0", "\xe2\x80\xa8", "\xe3\x80\x80", "\xef\xbb\xbf"}) // a blank in some of them
        for (const char* of : {"\\s", "\\S", "[^\\s]", "[\\s]", "[^\\S]", "[\\S]"}) CHECK(!holds(of, unclear));
    for (const char* unclear : {"\xd9\xa3", "\xe0\xa5\xa7", "\xef\xbc\x97"}) // digits of other scripts
        for (const char* of : {"\\d", "\\D", "[^\\d]", "[^\\D]"}) CHECK(!holds(of, unclear));
    for (const char* unclear : {"é", "线", "ß"})
        for (const char* of : {"\\w", "\\W", "[^\\w]", "[^\\W]"}) CHECK(!holds(of, unclear));
    for (const char* sign : {"-", " ", "。", "！", "…", "→", "😀", "\xc2\xa0"}) {
        CHECK(holds("\\W", sign));
        CHECK(holds("[^\\w]", sign));
        CHECK(!holds("[^\\W]", sign));
    }
    for (const char* other : {"a", "é", "线", "😀", "-"}) {
        CHECK(holds("\\D", other));
        CHECK(holds("[^\\d]", other));
        CHECK(holds("\\S", other));
        CHECK(holds("[^\\s]", other));
    }
    CHECK(holds("[^\\d\\sa]", "b"));
    CHECK(!holds("[^\\d\\sa]", "a"));
    CHECK(!holds("[^\\d\\sa]", " "));
    CHECK(!holds("[^\\d\\sa]", "7"));
}

TEST_CASE("schemas: numbers in ranges, against arithmetic") {
    Random random{5};
    for (int i = 0; i < 300; i++) {
        const bool integer = random.below(2), low_out = random.below(2), high_out = random.below(2), has_low = random.below(4), has_high = random.below(4);
        auto draw = [&] { return ((int)random.below(4001) - 2000) / (random.below(2) ? 10.0 : 1.0); };
        double low = draw(), high = draw();
        if (low > high) std::swap(low, high);
        sj::Writer w;
        w.object().field("type", integer ? "integer" : "number");
        if (has_low) w.field(low_out ? "exclusiveMinimum" : "minimum", low);
        if (has_high) w.field(high_out ? "exclusiveMaximum" : "maximum", high);
        w.end();
        INFO(w.text);
        auto inside = [&](double x) {
            return !(has_low && (low_out ? x <= low : x < low)) && !(has_high && (high_out ? x >= high : x > high));
        };
        Shared a;
        if (const std::string why = refusal_of([&] { a = from_schema(w.text); }); !a) {
            CHECK(why == "nothing matches it");
            for (double x = std::ceil(low); integer && x <= high; x++) CHECK(!inside(x));
            continue;
        }
        for (int k = 0; k < 60; k++) {
            const double near[] = {low, high, low + 1, high - 1, low - 0.1, high + 0.1, std::floor(low), std::ceil(high), draw(), 0};
            const double x = near[random.below(10)];
            const std::string text = x == std::floor(x) && random.below(2) ? format("%.0f", x) : format("%.1f", x);
            INFO(text);
            const bool fraction = text.find('.') != text.npos;
            if (!(integer && fraction)) CHECK(accepts(a, text) == inside(strtod(text.c_str(), nullptr)));
        }
        for (int k = 0; k < 5; k++) {
            const std::string text = random_text(a, random, 30, false);
            if (accepts(a, text)) CHECK(inside(strtod(text.c_str(), nullptr)));
        }
    }
}

TEST_CASE("schemas: every text that the masks lead to is JSON, and of the form that was asked for") {
    Random random{6};
    const Shared any = automaton(grammar_of_json_object());
    size_t whole = 0;
    for (int i = 0; i < 100; i++) {
        const std::string text = random_text(any, random, 60, false);
        if (!accepts(any, text)) continue;
        whole++;
        CHECK(Json(text).root().is(sj::Object));
    }
    CHECK(whole > 5);
    const Shared list = from_schema(R"({"$ref": "#/$defs/list", "$defs": {"list": {"type": ["object", "null"], "properties": {"value": {"type": "integer"},
        "next": {"$ref": "#/$defs/list"}}, "required": ["value", "next"], "additionalProperties": false}}})");
    CHECK(accepts(list, R"({"value": 1, "next": {"value": -2, "next": null}})"));
    CHECK(!accepts(list, R"({"value": 1, "next": {"value": -2}})"));
    CHECK(!accepts(list, R"({"value": 1, "next": {"value": -2, "next": null})"));
    const Shared union_ = from_schema(R"({"oneOf": [{"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]},
        {"properties": {"kind": {"const": "b"}, "y": {"type": "string"}}, "required": ["kind", "y"]}]})");
    CHECK(accepts(union_, R"({"kind": "b", "y": "z"})"));
    CHECK(!accepts(union_, R"({"kind": "a", "y": "z"})"));
    const Shared open = from_schema(R"({"properties": {"ab": {"type": "integer"}, "a": {"type": "null"}}, "additionalProperties": {"type": "string"}})");
    CHECK(accepts(open, R"({"ab": 1, "abc": "x", "b": "y", "": "z"})"));
    CHECK(!accepts(open, R"({"b": "y", "ab": "x"})")); // that name has another form
    CHECK(!accepts(open, R"({"a": "y"})"));
    CHECK(accepts(from_schema(R"({"type": "object"})"), "{\n    \"a\": [\n        1.5e3,\n        true  ]}") == false); // a blank, or a line
    CHECK(accepts(from_schema(R"({"type": "object"})"), "{\n    \"a\": [\n        1.5e3,\n        true\n    ]\n}"));
}

TEST_CASE("schemas: those that refer to themselves beside other keywords are kept, to any depth") {
    const Shared tree = from_schema(R"({"properties": {"x": {"properties": {"y": {"$ref": "#", "type": "object"}}}}})");
    std::string deep = "{}";
    for (int i = 0; i < 500; i++) deep = "{\"x\": {\"y\": " + deep + "}}";
    CHECK(accepts(tree, deep));
    CHECK(!accepts(tree, R"({"x": {"y": {"x": {"y": {"x": 1}}}}})"));
    const Shared one = from_schema(R"({"properties": {"y": {"$ref": "#", "type": "object"}}})");
    CHECK(accepts(one, R"({"y": {"y": {}}})"));
    CHECK(!accepts(one, R"({"y": {"y": []}})"));
    for (auto& row : std::vector<std::pair<std::string, std::string>>{ // what holds the recursion, and a text
             {R"({"type": "array", "items": {"allOf": [{"$ref": "#"}], "minItems": 1}})", "[[[[], []]]]"},
             {R"({"type": ["array", "null"], "prefixItems": [{"$ref": "#", "type": ["array", "null"]}, {"$ref": "#"}]})", "[[null, null], null]"},
             {R"({"additionalProperties": {"$ref": "#", "type": "object"}})", R"({"a": {"b": {}}})"},
             {R"({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#", "type": "object"}, {"type": "null"}]}}})", R"({"a": {"a": null}})"},
             {R"({"type": "object", "properties": {"a": {"type": ["object", "null"], "oneOf": [{"$ref": "#"}, {"type": "null"}]}}})", R"({"a": {"a": null}})"}}) {
        INFO(row.first);
        CHECK(accepts(from_schema(row.first), row.second) == (row.first.find("minItems") == row.first.npos));
    }
    for (const char* endless : {R"({"type": "object", "anyOf": [{"$ref": "#"}]})", R"({"minLength": 1, "oneOf": [{"$ref": "#"}, {"type": "null"}]})",
                                R"({"type": "object", "allOf": [{"anyOf": [{"$ref": "#"}, {"type": "null"}]}]})", R"({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})"}) {
        INFO(endless);
        CHECK(refusal_of([&] { from_schema(endless); }).find("itself") != std::string::npos);
    }
    std::string chain = R"({"type": "object", "$ref": "#/$defs/0", "$defs": {)"; // 5,000 anyOf, each in the one before
    for (int i = 0; i < 5000; i++) chain += format("\"%d\": {\"anyOf\": [{\"$ref\": \"#/$defs/%d\"}]}, ", i, i + 1);
    CHECK(refusal_of([&] { from_schema(chain + R"("5000": {}}})"); }).find("too large") != std::string::npos);
}

TEST_CASE("schemas: made of random numbers: every text is what the schema allows, by a validator") {
    size_t compiled = 0, refused = 0, texts = 0, long_ones = 0;
    for (uint64_t seed = 1; seed <= 2000; seed++) { // (fuzz_schema goes on)
        Random random{seed * 7919};
        Choices choose{[&] { return random.below(1 << 30); }};
        const Json schema(SchemaMaker{choose}.make());
        Shared a;
        const std::string why = refusal_of([&] { a = automaton(grammar_of_schema(schema.root())); });
        if (!a) {
            refused++;
            INFO(schema.root().raw());
            CHECK(why != "");
            continue;
        }
        compiled++;
        for (int i = 0; i < 4; i++) {
            const std::string text = draw_text(*a, choose, 400);
            if (text.empty()) continue;
            texts++, long_ones += text.size() > 40;
            const Json said(text);
            INFO(schema.root().raw());
            INFO(text);
            CHECK(Validator{schema.root()}.valid(schema.root(), said.root()));
        }
    }
    CHECK(compiled > 750);
    CHECK(refused > 150);
    CHECK(texts > 2000);
    CHECK(long_ones > 100);
}

// Of this program, which other programs may slow down.
static double cpu_seconds() { return (double)clock() / CLOCKS_PER_SEC; }

// Seconds of a core that f takes, with so many bytes of memory at most; f may throw Error. -1: it needs more of them.
static double cost_of(size_t bytes, const std::function<void()>& f) {
    const pid_t child = fork();
    if (child == 0) {
        size_t pages = 0;
        if (FILE* now = fopen("/proc/self/statm", "r")) (void)!fscanf(now, "%zu", &pages), fclose(now);
        const rlim_t most = pages * (size_t)sysconf(_SC_PAGESIZE) + bytes;
        const rlimit limit = {most, most};
        if (!SANITIZED) setrlimit(RLIMIT_AS, &limit);
        try {
            f();
        } catch (const Error& e) {
            _exit(strlen(e.what()) ? 0 : 1);
        } catch (const std::exception&) {
            _exit(1);
        }
        _exit(0);
    }
    int status = 1;
    rusage used;
    wait4(child, &status, 0, &used);
    auto time = [](const timeval& t) { return (double)t.tv_sec + 1e-6 * (double)t.tv_usec; };
    return status == 0 ? time(used.ru_utime) + time(used.ru_stime) : -1;
}

TEST_CASE("forms: memory and steps are bounded before they are taken, whatever asks for them") {
    auto many = [](size_t n, const std::function<std::string(size_t)>& one) {
        std::string all;
        for (size_t i = 0; i < n; i++) all += (i ? ", " : "") + one(i);
        return all;
    };
    auto number = [](size_t i) { return format("\"%zu\"", i); };
    double slowest = 0;
    auto check = [&](const std::function<void()>& f) {
        const double most = SANITIZED ? 30 : 1; // (0.4 s on a machine that has nothing else to do)
        double cost = cost_of(160 << 20, f);
        for (int again = 0; again < 2 && cost >= most; again++) cost = std::min(cost, cost_of(160 << 20, f));
        CHECK(cost >= 0);
        CHECK(cost < most);
        slowest = std::max(slowest, cost);
    };
    std::string long_refs = R"({"type": "object", "allOf": [)" + many(5000, [](size_t) { return std::string(R"({"$ref": "#/$defs/a"})"); }) + R"(], "$defs": {"a": {"enum": [)" + many(100000, number) + "]}}}";
    const std::string long_name(60000, 'a'), equal = many(400, number);
    const std::vector<std::pair<std::string, std::string>> schemas = {
        {"a long name", R"({"properties": {")" + long_name + R"(": {}}, "additionalProperties": true})"},
        {"many anyOf", R"({"allOf": [)" + many(4990, [](size_t) { return std::string(R"({"anyOf": [{}]})"); }) + "]}"},
        {"many $ref", R"({"anyOf": [)" + many(9000, [](size_t i) { return format("{\"$ref\": \"#/$defs/%zu\"}", 59999 - i); }) + R"(], "$defs": {)" +
                      many(60000, [](size_t i) { return format("\"%zu\": {\"const\": %zu}", i, i); }) + "}}"},
        {"oneOf of equal enums", R"({"oneOf": [)" + many(700, [&](size_t) { return "{\"enum\": [" + equal + "]}"; }) + "]}"},
        {"oneOf of other enums", R"({"oneOf": [)" + many(700, [&](size_t i) { return "{\"enum\": [" + many(400, [&](size_t k) { return format("\"%zu-%zu\"", k, i); }) + "]}"; }) + "]}"},
        {"oneOf of constants", R"({"oneOf": [)" + many(5000, [&](size_t i) { return format(R"({"properties": {"k": {"const": "%zu"}}, "required": ["k"]})", i); }) + "]}"},
        {"a long name in every branch", R"({"required": [")" + std::string(1000000, 'a') + R"("], "anyOf": [)" + many(5000, [](size_t) { return std::string("{}"); }) + "]}"},
        {"an enum by many $ref", long_refs},
        {"a property in each of many", R"({"allOf": [)" + many(5000, [](size_t i) { return format("{\"properties\": {\"%zu\": {}}}", i); }) + "]}"},
        {"much that is required", R"({"required": [)" + many(9000, number) + R"(], "properties": {)" + many(9000, [](size_t i) { return format("\"x%zu\": {}", i); }) + "}}"},
        {"unknown words in every branch", R"({"minimum": 1, "anyOf": [)" + many(5000, [](size_t) { return std::string(R"({"$ref": "#/$defs/a"})"); }) + R"(], "$defs": {"a": {)" + many(100000, [](size_t i) { return format("\"x%zu\": 1", i); }) + "}}}"},
        {"an enum of small values", "{\"enum\": [" + many(2000000, [](size_t) { return std::string("1"); }) + "]}"},
        {"a long word", "{\"const\": \"" + std::string(7000000, 'a') + "\"}"},
        {"long items of an enum", "{\"enum\": [[" + many(1000000, [](size_t) { return std::string("[]"); }) + "]]}"},
        {"names of other properties", R"({"additionalProperties": true, "properties": {)" + many(9999, [](size_t i) { return format("\"%zu-%zu\": {}", i * 7919 % 10000, i); }) + "}}"}};
    for (auto& row : schemas) {
        INFO(row.first);
        sj::Doc doc;
        REQUIRE(sj::parse(doc, row.second).empty());
        check([&] { grammar_of_schema(doc.root()); });
    }
    const std::string text(1 << 20, 'a');
    auto times = [](size_t n, const std::string& s) {
        std::string all;
        while (all.size() + s.size() <= n) all += s;
        return all;
    };
    for (const std::string& pattern : Strings{text.substr(1), times(1 << 20, "[a]"), times(1 << 20, "a|"), times(1 << 20, "\\W"), "[" + times((1 << 20) - 2, "\\d") + "]", "[" + times((1 << 20) - 2, "\\W") + "]",
                                       "(" + times(1 << 19, "[\u4e00-\u9fff]") + "){1000}", "((a?){1000}){1000}", "(((a{0}){1000}){1000}|b)*"}) {
        INFO(pattern.substr(0, 20));
        check([&] { grammar_of_regex(pattern); });
    }
    for (const std::string& rules : Strings{"root ::= \"" + text.substr(20) + "\"", "root ::= " + times((1 << 20) - 20, "a b "), "root ::= " + times((1 << 20) - 20, "[a-z] "), times(1 << 20, "a::=b\n")}) {
        INFO(rules.substr(0, 20));
        check([&] { grammar_of_gbnf(rules); });
    }
    MESSAGE("the slowest takes ", slowest, " s of a core");
    // Once the client has gone nothing goes on.
    StopFlag gone = 1;
    form_stop = &gone;
    CHECK(refusal_of([&] { from_schema(R"({"type": "object"})"); }).find("gone") != std::string::npos);
    form_stop = nullptr;
}

TEST_CASE("schemas: what is hostile is refused or bounded, and quickly") {
    const double start = cpu_seconds();
    auto schema = [](const std::string& text) { return refusal_of([&] { from_schema(text); }); };
    std::string values;
    for (int i = 0; i < 1000000; i++) values += format("%s%d", i ? ", " : "", i);
    CHECK(schema("{\"enum\": [" + values + "]}").find("too large") != std::string::npos);
    CHECK(schema(R"({"$ref": "#"})").find("itself") != std::string::npos);
    CHECK(schema(R"({"anyOf": [{"$ref": "#"}, {"type": "null"}]})").find("begin with itself") != std::string::npos);
    CHECK(schema(R"({"allOf": [{"$ref": "#"}]})").find("itself") != std::string::npos);
    CHECK(schema(R"({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})") == "nothing matches it");
    CHECK(schema(R"({"minLength": 100001})").find("minLength") != std::string::npos);
    CHECK(schema(R"({"pattern": "^((a{1000}){1000}){1000}$"})").find("too large") != std::string::npos);
    CHECK(schema(R"({"pattern": "^(((){100000}){100000}){100000}$"})").empty());
    CHECK(schema(R"({"minItems": 100000, "items": {"minItems": 100000, "items": {"minItems": 100000}}})").size() > 0);
    std::string groups = "{\"allOf\": [{}"; // 2^20 branches
    for (int i = 0; i < 20; i++) groups += ", {\"anyOf\": [{\"type\": \"string\"}, {\"type\": \"number\"}]}";
    CHECK(schema(groups + "]}").find("multiply") != std::string::npos);
    std::string names, empty; // each branch has all the names
    for (int i = 0; i < 9000; i++) names += format("%s\"%d\": {}", i ? ", " : "", i), empty += i ? ", {}" : "{}";
    CHECK(schema(R"({"type": "null", "anyOf": [)" + empty + R"(], "properties": {)" + names + "}}").find("too large") !=
          std::string::npos);
    CHECK(schema(R"({"type": "null", "properties": {"a": {}, )" + names + R"(}, "allOf": [{"properties": {"x": {}}}]})").empty());
    CHECK(schema(R"({"minimum": 1e99999})").find("minimum") != std::string::npos);
    std::string deep = "\"a\"";
    for (int i = 0; i < 1000; i++) deep = "(" + deep + ")";
    CHECK(refusal_of([&] { grammar_of_gbnf("root ::= " + deep); }).find("nested") != std::string::npos);
    CHECK(refusal_of([&] { grammar_of_regex(std::string(1000000, '(')); }).find("nested") != std::string::npos);
    const std::string letters(2000000, 'a');
    CHECK(refusal_of([&] { grammar_of_regex(letters); }).find("longer") != std::string::npos);
    CHECK(refusal_of([&] { grammar_of_gbnf("root ::= \"" + letters + "\""); }).find("longer") != std::string::npos);
    std::string chain = "root ::= r1\n";
    for (int i = 1; i < 20000; i++) chain += format("r%d ::= r%d\n", i, i + 1);
    CHECK(refusal_of([&] { grammar_of_gbnf(chain + "r20000 ::= \"a\""); }).empty());
    std::string callers = "root ::= a \"0\"", called = "a ::= b"; // each of the one may return to each of the other
    for (int i = 1; i < 10000; i++) callers += format(" | a \"%d\"", i), called += " | b";
    const double begun = cpu_seconds();
    CHECK(accepts(automaton(grammar_of_gbnf(callers + "\n" + called + "\nb ::= \"x\"")), "x9999"));
    CHECK(cpu_seconds() - begun < (SANITIZED ? 30 : 5));

    // Patterns whose deterministic automata are exponential, and a grammar that is as ambiguous as they come: each mask
    // in bounded time, and never empty.
    Random random{7};
    for (const char* gbnf : {"root ::= [ab]* \"a\" [ab]{40} \"c\"", "root ::= .* \"a\" .{300}", "root ::= s\ns ::= \"a\" s \"b\" | \"a\" s \"c\" | \"a\"",
                             "root ::= s+\ns ::= [a-z]* | [a-y]* \" \" | [b-z]* | s2 s2\ns2 ::= [a-z] s2? | \" \" s"}) {
        INFO(gbnf);
        const Shared a = automaton(grammar_of_gbnf(gbnf), true);
        Matcher m(a);
        std::vector<uint32_t> bits(a->vocabulary->words());
        double slowest = 0;
        for (int i = 0; i < 40 && !m.must_end(); i++) {
            const double before = cpu_seconds();
            m.mask(bits.data());
            slowest = std::max(slowest, cpu_seconds() - before);
            std::vector<int> allowed;
            for (size_t id = 0; id < bits.size() * 32; id++)
                if (bits[id / 32] >> id % 32 & 1) allowed.push_back((int)id);
            REQUIRE(!allowed.empty());
            REQUIRE(m.advance(allowed[random.below((uint32_t)allowed.size())]));
        }
        CHECK(slowest < 1);
    }
    CHECK(cpu_seconds() - start < (SANITIZED ? 300 : 60));
}

TEST_CASE("grammar: states with the same tokens share a mask, and bounded strings do not push out what others' are made of") {
    const Shared a = from_schema(R"({"type": "array", "items": {"type": "object", "properties": {"title": {"type": "string", "maxLength": 100},
        "text": {"type": "string", "minLength": 10, "maxLength": 400}}, "required": ["title", "text"], "additionalProperties": false}})", true);
    const std::string begin = "[{\"title\": \"", second = begin + "a\", \"text\": \"";
    size_t made = 0;
    for (bool first : {true, false}) { // all the places in both strings, as many answers may be at them
        for (size_t n = 0; n < 400; n++) {
            Matcher m(a);
            REQUIRE(m.advance((n < 100 ? begin : second) + std::string(n < 100 ? n : n - 90, 'x')));
            if (n % 40 == 0) check_mask(m);
            m.mask();
        }
        if (first) made = a->parts_made;
        else CHECK(a->parts_made == made);
    }
    CHECK(made > 128); // (tokens of up to 128 characters tell the places apart)
    CHECK(a->bytes() < Automaton::MOST_MEMORY);

    Matcher one(a), other(a), end(a);
    REQUIRE(one.advance(second + std::string(20, 'x')));
    REQUIRE(other.advance(second + std::string(200, 'y'))); // both are far from the end
    REQUIRE(end.advance(second + std::string(399, 'y')));
    CHECK(one.mask() == other.mask());
    CHECK(one.mask() != end.mask());
}

TEST_CASE("grammar: an automaton forgets what it has grown, and answers that are under way go on") {
    const Shared a = automaton(grammar_of_gbnf("root ::= \"[\" root? \"]\" | \"(\" root? \")\""));
    Matcher deep(a), other(a);
    Random random{8};
    REQUIRE(other.advance("[("));
    std::string text, rest;
    for (int i = 0; i < 100000; i++) { // each byte makes a state
        const bool round = random.below(2);
        text += round ? '(' : '[', rest += round ? ')' : ']';
    }
    size_t most = 0;
    for (size_t i = 0; i < text.size(); i += 100) {
        REQUIRE(deep.advance(text.substr(i, 100)));
        most = std::max(most, a->bytes());
    }
    CHECK(most < Automaton::MOST_MEMORY + (1 << 20));
    CHECK(a->state_count() < 100000);
    CHECK(!deep.may_end());
    std::reverse(rest.begin(), rest.end());
    REQUIRE(deep.advance(rest));
    CHECK(deep.may_end());
    CHECK(deep.must_end());
    CHECK(other.advance(")]"));
    CHECK(other.must_end());
    CHECK(!deep.advance("]"));
    CHECK(deep.must_end());
    deep.begin();
    CHECK(!deep.advance(std::string(1000000, '['))); // what it would have to remember is too much
    CHECK(a->bytes() < 2 * Automaton::MOST_MEMORY);
    Matcher next(a);
    CHECK(next.advance("[]"));

    // Also what a mask has made: no token need follow, since the answer may wait for its turn.
    const Tokenizer& tokenizer = vocabulary(true)->tokenizer;
    std::vector<std::string> words; // a state for each of their beginnings, with an edge for almost every byte
    for (int id = 0; id < tokenizer.size() && words.size() < 12000; id++)
        if (tokenizer.bytes(id).size() >= 8 && tokenizer.bytes(id).size() <= Vocabulary::SHORT)
            words.emplace_back(tokenizer.bytes(id));
    const Shared wide = automaton(grammar_of_choice(words), true);
    Matcher choosing(wide);
    std::vector<uint32_t> bits(wide->vocabulary->words());
    choosing.mask(bits.data());
    CHECK(wide->bytes() < Automaton::MOST_MEMORY);
    CHECK(choosing.advance(words[0]));
}
