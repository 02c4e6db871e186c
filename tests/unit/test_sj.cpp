// sj.h against RFC 8259 (what is accepted, what is refused and where) and Python's json.dumps and repr.
#include "sj.h"
#include "tests/sanitized.h"
#include <ctime>
#include <doctest/doctest.h>
#include <limits>

using namespace std::literals;      // ""sv may hold \0

static std::string fault_of(std::string_view text) {
    sj::Doc doc;
    std::string fault = sj::parse(doc, text);
    CHECK(bool(doc.root()) == fault.empty());
    return fault;
}

static std::string dumped(std::string_view text) {
    sj::Doc doc;
    std::string fault = sj::parse(doc, text);
    return fault.empty() ? sj::dump(doc.root()) : fault;
}

static std::string decoded(std::string_view text) {
    sj::Doc doc;
    std::string fault = sj::parse(doc, text);
    return fault.empty() ? doc.root().str() : fault;
}

static std::string nested(int depth, char open, char close) {
    std::string inner = open == '{' ? "{\"k\":" : "[", text;
    for (int i = 1; i < depth; i++) text += inner;
    return text + open + close + std::string(size_t(depth - 1), close);
}

TEST_CASE("accepted") {
    for (std::string_view text : {
             // structure and white space
             "[]"sv, "{}"sv, "[ ]"sv, "{ }"sv, " [1 , 2 ] "sv, "\t{\r\n\"a\"\n:\t1 }\n"sv, "[[]   ]"sv,
             "[[],{},[{}]]"sv, "{\"a\":{\"b\":{\"c\":[]}}}"sv, "{\"\":0}"sv, "{\"a\":1,\"a\":2}"sv,
             "[null,1,\"1\",{}]"sv,
             // scalars at the top
             "0"sv, "\"\""sv, "true"sv, "false"sv, "null"sv, " null "sv, "-1"sv,
             // numbers
             "-0"sv, "10"sv, "1234567890123456789012345678901234567890"sv, "0.0"sv, "-0.0"sv, "0e0"sv,
             "0e+1"sv, "1E22"sv, "1E-2"sv, "1E+2"sv, "1.5e007"sv, "123.456e78"sv, "1e-400"sv, "1e400"sv,
             "0.00000000000000000000000000001"sv,
             // strings
             "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\""sv, "\"\\u0000\""sv, "\"\\u00e9\\u00E9\""sv,
             "\"\\uD83D\\uDE00\""sv, "\"\\uDBFF\\uDFFF\""sv, "\"\\uFFFF\\uFDD0\""sv, "\"\x7f\""sv,
             "\"\xc2\x80\xdf\xbf\""sv, "\"\xe0\xa0\x80\""sv, "\"\xed\x9f\xbf\xee\x80\x80\""sv,
             "\"\xef\xbf\xbf\""sv, "\"\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\""sv, "\"\xe2\x80\xa8\""sv,
             "\"/* no */ // comment\""sv, "\"\\\\u0041\""sv}) {
        INFO(text);
        CHECK(fault_of(text) == "");
    }
    CHECK(fault_of(nested(256, '[', ']')) == "");
    CHECK(fault_of(nested(256, '{', '}')) == "");
    CHECK(fault_of("[" + nested(255, '[', ']') + "," + nested(255, '{', '}') + "]") == ""); // side by side
}

TEST_CASE("refused, with line, byte and fault") {
    struct { std::string_view text, fault; } cases[] = {
        {"", "line 1, byte 0: the text ends too early"},
        {" \n", "line 2, byte 2: the text ends too early"},
        {"\xef\xbb\xbf{}", "line 1, byte 0: expected a value"},             // byte order mark
        {"\0"sv, "line 1, byte 0: expected a value"},
        {"[]\0"sv, "line 1, byte 2: text after the end"},
        {"[] []", "line 1, byte 3: text after the end"},
        {"1 2", "line 1, byte 2: text after the end"},
        {"[\f]", "line 1, byte 1: expected a value"},                       // JSON has four white characters
        {"[\xc2\xa0]", "line 1, byte 1: expected a value"},
        {"# x\n1", "line 1, byte 0: expected a value"},
        {"[1] // x", "line 1, byte 4: text after the end"},
        {"/**/1", "line 1, byte 0: expected a value"},
        // arrays
        {"[", "line 1, byte 1: the text ends too early"},
        {"]", "line 1, byte 0: expected a value"},
        {"[1", "line 1, byte 2: the text ends too early"},
        {"[1,", "line 1, byte 3: the text ends too early"},
        {"[1,]", "line 1, byte 3: expected a value"},
        {"[,1]", "line 1, byte 1: expected a value"},
        {"[1,,2]", "line 1, byte 3: expected a value"},
        {"[1 2]", "line 1, byte 3: expected ',' or ']'"},
        {"[1}", "line 1, byte 2: expected ',' or ']'"},
        {"[1:2]", "line 1, byte 2: expected ',' or ']'"},
        {"[1]]", "line 1, byte 3: text after the end"},
        // objects
        {"{", "line 1, byte 1: the text ends too early"},
        {"{\"a\"", "line 1, byte 4: the text ends too early"},
        {"{\"a\":", "line 1, byte 5: the text ends too early"},
        {"{\"a\":1", "line 1, byte 6: the text ends too early"},
        {"{\"a\" 1}", "line 1, byte 5: expected ':' after a key"},
        {"{\"a\":}", "line 1, byte 5: expected a value"},
        {"{\"a\":1,}", "line 1, byte 7: expected a key in quotes"},
        {"{,\"a\":1}", "line 1, byte 1: expected a key in quotes"},
        {"{a:1}", "line 1, byte 1: expected a key in quotes"},
        {"{'a':1}", "line 1, byte 1: expected a key in quotes"},
        {"{1:1}", "line 1, byte 1: expected a key in quotes"},
        {"{null:1}", "line 1, byte 1: expected a key in quotes"},
        {"{\"a\":1]", "line 1, byte 6: expected ',' or '}'"},
        {"{\"a\":1 \"b\":2}", "line 1, byte 7: expected ',' or '}'"},
        {"{\"a\"::1}", "line 1, byte 5: expected a value"},
        {"{\n\"a\": 1,\n\"b\" = 2}", "line 3, byte 14: expected ':' after a key"},
        // words
        {"tru", "line 1, byte 0: expected a value"},
        {"True", "line 1, byte 0: expected a value"},
        {"truee", "line 1, byte 4: text after the end"},
        {"nul]", "line 1, byte 0: expected a value"},
        {"NaN", "line 1, byte 0: expected a value"},
        {"Infinity", "line 1, byte 0: expected a value"},
        {"undefined", "line 1, byte 0: expected a value"},
        // numbers
        {"+1", "line 1, byte 0: expected a value"},
        {".5", "line 1, byte 0: expected a value"},
        {"-", "line 1, byte 1: the text ends too early"},
        {"--1", "line 1, byte 1: expected a digit"},
        {"-Infinity", "line 1, byte 1: expected a digit"},
        {"01", "line 1, byte 1: a number may not begin with 0"},
        {"-01", "line 1, byte 2: a number may not begin with 0"},
        {"00", "line 1, byte 1: a number may not begin with 0"},
        {"1.", "line 1, byte 2: the text ends too early"},
        {"[1.]", "line 1, byte 3: expected a digit"},
        {"[1.e5]", "line 1, byte 3: expected a digit"},
        {"[-.5]", "line 1, byte 2: expected a digit"},
        {"[1e]", "line 1, byte 3: expected a digit"},
        {"[1e+]", "line 1, byte 4: expected a digit"},
        {"[1e-+1]", "line 1, byte 4: expected a digit"},
        {"[1e1.5]", "line 1, byte 4: expected ',' or ']'"},
        {"[1.2.3]", "line 1, byte 4: expected ',' or ']'"},
        {"[0x10]", "line 1, byte 2: expected ',' or ']'"},
        {"[1_000]", "line 1, byte 2: expected ',' or ']'"},
        {"[1 000]", "line 1, byte 3: expected ',' or ']'"},
        {"[\xef\xbc\x91]", "line 1, byte 1: expected a value"},             // a full-width 1
        // strings
        {"\"", "line 1, byte 1: the text ends too early"},
        {"\"a", "line 1, byte 2: the text ends too early"},
        {"\"\\\"", "line 1, byte 3: the text ends too early"},
        {"\"\\", "line 1, byte 2: the text ends too early"},
        {"\"\\u12", "line 1, byte 5: the text ends too early"},
        {"'a'", "line 1, byte 0: expected a value"},
        {"\"a\nb\"", "line 1, byte 2: a control character in a string"},
        {"\"\t\"", "line 1, byte 1: a control character in a string"},
        {"\"\0\""sv, "line 1, byte 1: a control character in a string"},
        {"\"\x1f\"", "line 1, byte 1: a control character in a string"},
        {"\"\\x41\"", "line 1, byte 2: an unknown escape"},
        {"\"\\'\"", "line 1, byte 2: an unknown escape"},
        {"\"\\a\"", "line 1, byte 2: an unknown escape"},
        {"\"\\U0041\"", "line 1, byte 2: an unknown escape"},
        {"\"\\\0\""sv, "line 1, byte 2: an unknown escape"},
        {"\"\\\xc3\xa9\"", "line 1, byte 2: an unknown escape"},
        {"\"\\u12g4\"", "line 1, byte 5: expected four hex digits"},
        {"\"\\u-123\"", "line 1, byte 3: expected four hex digits"},
        {"\"\\u123\"", "line 1, byte 6: expected four hex digits"},
        {"\"x\\ud800\"", "line 1, byte 2: half a surrogate pair"},
        {"\"\\ud800x\"", "line 1, byte 1: half a surrogate pair"},
        {"\"\\ud800\\n\"", "line 1, byte 1: half a surrogate pair"},
        {"\"\\ud800\\u0041\"", "line 1, byte 1: half a surrogate pair"},
        {"\"\\ud800\\ud800\"", "line 1, byte 1: half a surrogate pair"},
        {"\"\\udc00\\ud800\"", "line 1, byte 1: half a surrogate pair"},
        {"\"\\udfff\"", "line 1, byte 1: half a surrogate pair"},
        {"\"\\udc00\\udc00\"", "line 1, byte 1: half a surrogate pair"},
        {"\"\\ud800\\ue000\"", "line 1, byte 1: half a surrogate pair"},
        {"\"\\ud83d\\ude0\"", "line 1, byte 12: expected four hex digits"},
        // UTF-8
        {"\"a\x80\"", "line 1, byte 2: invalid UTF-8"},                     // a tail without a head
        {"\"\xff\"", "line 1, byte 1: invalid UTF-8"},
        {"\"\xc3\"", "line 1, byte 1: invalid UTF-8"},                      // cut
        {"\"\xe6\xbc\"", "line 1, byte 1: invalid UTF-8"},
        {"\"\xf0\x9f\x98\"", "line 1, byte 1: invalid UTF-8"},
        {"\"\xf0\x9f\x98", "line 1, byte 1: invalid UTF-8"},
        {"\"\xc0\x80\"", "line 1, byte 1: invalid UTF-8"},                  // overlong
        {"\"\xc1\xbf\"", "line 1, byte 1: invalid UTF-8"},
        {"\"\xe0\x9f\xbf\"", "line 1, byte 1: invalid UTF-8"},
        {"\"\xf0\x8f\xbf\xbf\"", "line 1, byte 1: invalid UTF-8"},
        {"\"\xed\xa0\x80\"", "line 1, byte 1: invalid UTF-8"},              // a surrogate
        {"\"\xf4\x90\x80\x80\"", "line 1, byte 1: invalid UTF-8"},          // above U+10FFFF
        {"\"\xf5\x80\x80\x80\"", "line 1, byte 1: invalid UTF-8"},
        {"\"\xf8\x88\x80\x80\x80\"", "line 1, byte 1: invalid UTF-8"},
        {"[\xc3\xa9]", "line 1, byte 1: expected a value"},                 // valid, but not in a string
    };
    for (auto& c : cases) {
        INFO(c.text);
        CHECK(fault_of(c.text) == c.fault);
    }
    CHECK(fault_of(nested(257, '[', ']')) == "line 1, byte 256: nested deeper than 256");
    CHECK(fault_of(nested(257, '{', '}')) == "line 1, byte 1280: nested deeper than 256");
    CHECK(fault_of(std::string(1 << 20, '[')) == "line 1, byte 256: nested deeper than 256");
}

TEST_CASE("every cut of a text is refused") {
    std::string_view text = R"({"a\u00e9": [1.5e-3, true, null, "\ud83d\ude00漢"], "b": {"c": false}})";
    CHECK(fault_of(text) == "");
    for (size_t n = 0; n < text.size(); n++) {
        std::string cut(text.substr(0, n));     // a copy, so that ASan sees a read behind it
        INFO(cut);
        CHECK(fault_of(cut) != "");
    }
}

TEST_CASE("strings are decoded") {
    CHECK(decoded(R"("")") == "");
    CHECK(decoded(R"("a\"\\\/\b\f\n\r\tz")") == "a\"\\/\b\f\n\r\tz");
    CHECK(decoded(R"("\u0041\u00e9\u6F22\uD83D\ude00\udbff\udfff\uffff")") == "Aé漢😀\U0010FFFF\xef\xbf\xbf");
    CHECK(decoded(R"("\u0000\u007f\u0080\u07ff\u0800")") == "\0\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80"sv);
    CHECK(decoded(R"("\\u0041\\\\n")") == R"(\u0041\\n)");
    CHECK(decoded("\"漢字 and 👩‍💻\"") == "漢字 and 👩‍💻");
}

TEST_CASE("values are found, walked and asked") {
    std::string text = R"({"name": "qwen", "n": [1, [2, 3], {"x": 4}], "t": true, "f": false, "nil": null,
        "b\u0061d": -2.5e3, "name": "twice", "": "empty"})";
    sj::Doc parsed;
    REQUIRE(sj::parse(parsed, text) == "");
    sj::Doc doc = std::move(parsed);
    sj::Value v = doc.root();

    CHECK(v.type() == sj::Object);
    CHECK(v.size() == 8);
    CHECK(v["name"].str() == "twice");                      // the last of its name
    CHECK(v[""].str() == "empty");
    CHECK(v["n"].type() == sj::Array);
    CHECK(v["n"].size() == 3);
    CHECK(v["n"][1][1].number() == 3);
    CHECK(v["n"][2]["x"].number() == 4);
    CHECK(v["bad"].number() == -2500);                      // the key is compared decoded
    CHECK(v["t"].type() == sj::True);
    CHECK(v["f"].type() == sj::False);
    CHECK(v["t"].boolean());
    CHECK(!v["f"].boolean(true));
    CHECK(v["nil"].is(sj::Null));
    CHECK(bool(v["nil"]));
    CHECK(v["n"].raw() == R"([1, [2, 3], {"x": 4}])");
    CHECK(v["n"][2].raw() == R"({"x": 4})");
    CHECK(v["bad"].raw() == "-2.5e3");
    CHECK(v.raw() == text);

    std::string keys, items;
    for (auto [key, value] : v.members())
        keys += key + (value.is(sj::Array) ? "[" : value.is_bool() ? "?" : ",");
    CHECK(keys == "name,n[t?f?nil,bad,name,,");     // in the order of the text, duplicates too
    for (sj::Value item : v["n"].items()) items += std::string(item.raw()) + ";";
    CHECK(items == R"(1;[2, 3];{"x": 4};)");

    // what is not there, or of another type
    CHECK(v["none"].type() == sj::Missing);
    CHECK(!v["none"]["deeper"][3]["still"]);
    CHECK(!v["n"][3]);
    CHECK(!v["n"]["x"]);
    CHECK(!v[0]);                                           // an object has members, not items
    CHECK(v["none"].str("otherwise") == "otherwise");
    CHECK(v["n"].str("otherwise") == "otherwise");
    CHECK(v["none"].number(7) == 7);
    CHECK(v["name"].number(7) == 7);
    CHECK(v["none"].boolean(true));
    CHECK(v["n"].boolean(true));
    CHECK(v["none"].raw() == "");
    CHECK(v["none"].size() == 0);
    CHECK(v["name"].size() == 0);
    for (sj::Value item : v["name"].items()) FAIL(item.raw());
    for (auto [key, value] : v["n"].members()) FAIL(key);
}

TEST_CASE("integers are exact or refused") {
    struct { std::string_view text; bool good; int64_t n; } cases[] = {
        {"0", true, 0}, {"-0", true, 0}, {"12", true, 12}, {"-7", true, -7},
        {"9007199254740993", true, 9007199254740993},       // not a double
        {"9223372036854775807", true, std::numeric_limits<int64_t>::max()},
        {"-9223372036854775808", true, std::numeric_limits<int64_t>::min()},
        {"9223372036854775808", false, 5}, {"-9223372036854775809", false, 5},
        {"99999999999999999999999", false, 5}, {"12.0", false, 5}, {"1e2", false, 5}, {"1E2", false, 5},
        {"\"12\"", false, 5}, {"true", false, 5}, {"[1]", false, 5},
    };
    for (auto& c : cases) {
        INFO(c.text);
        sj::Doc doc;
        REQUIRE(sj::parse(doc, c.text) == "");
        int64_t n = 5;
        CHECK(doc.root().integer(&n) == c.good);
        CHECK(n == c.n);                                    // untouched when refused
    }
    int64_t n = 5;
    CHECK(!sj::Value{}.integer(&n));
}

TEST_CASE("dump is json.dumps(json.loads(text), ensure_ascii=False)") {
    CHECK(dumped(" [ 1,2 ,[ ],{ } , null,true,false ] ") == "[1, 2, [], {}, null, true, false]");
    CHECK(dumped("{\"b\":1,\"a\":{\"d\":[],\"c\":2}}") == R"({"b": 1, "a": {"d": [], "c": 2}})");
    CHECK(dumped(R"({"a":1,"b":2,"\u0061":{"x":1,"x":2}})") == R"({"a": {"x": 2}, "b": 2})");
    CHECK(dumped(R"("\u0000\u001f\b\f\n\r\t\"\\\/\u007f\u00e9\u2028\ud83d\ude00")") ==
          "\"\\u0000\\u001f\\b\\f\\n\\r\\t\\\"\\\\/\x7fé\u2028😀\"");
    struct { std::string_view number, python; } cases[] = {
        {"-0", "0"}, {"123456789012345678901234567890", "123456789012345678901234567890"},
        {"0.0", "0.0"}, {"-0.0", "-0.0"}, {"-0e0", "-0.0"}, {"1.0", "1.0"}, {"1e0", "1.0"}, {"1.50", "1.5"},
        {"-2.5", "-2.5"}, {"0.1", "0.1"}, {"0.1000000000000000055511151231257827", "0.1"},
        {"0.30000000000000004", "0.30000000000000004"}, {"3.141592653589793", "3.141592653589793"},
        {"100.0", "100.0"}, {"1E2", "100.0"}, {"0.0001", "0.0001"}, {"0.00001", "1e-05"}, {"1e-7", "1e-07"},
        {"0.00012345", "0.00012345"}, {"1e15", "1000000000000000.0"}, {"1e16", "1e+16"},
        {"9999999999999998.0", "9999999999999998.0"}, {"12345678901234567.0", "1.2345678901234568e+16"},
        {"1.5e16", "1.5e+16"}, {"1e22", "1e+22"}, {"1e23", "1e+23"}, {"1e100", "1e+100"},
        {"5e-324", "5e-324"}, {"4e-324", "5e-324"}, {"2e-324", "0.0"},
        {"1.7976931348623157e308", "1.7976931348623157e+308"},
        {"2.2250738585072014e-308", "2.2250738585072014e-308"},
        {"1e-400", "0.0"}, {"1e999", "Infinity"}, {"-1e999", "-Infinity"},
        // powers of two whose nearest 16 digits do not read back, but the next 16 above do
        {"5.9604644775390625e-8", "5.960464477539063e-08"},
        {"5.6843418860808015e-14", "5.684341886080802e-14"},
        {"9007199254740992.0", "9007199254740992.0"}, {"9.5367431640625e-7", "9.5367431640625e-07"},
    };
    for (auto& c : cases) {
        INFO(c.number);
        CHECK(dumped(c.number) == c.python);
    }
    CHECK(sj::repr(std::numeric_limits<double>::quiet_NaN()) == "NaN");
}

TEST_CASE("repair: JSON as language models write it") {
    const struct { const char *text, *wanted, *repairs; } cases[] = {
        {R"([{"a": "b"}])", R"([[{"a": "b"}]])", ""}, {" {} ", "[{}]", ""}, {"", "[]", ""}, {"none", "[]", "text around it"},
        {"Sure, [3] of them: [1] Bye.", "[[3], [1]]", "text around it"},
        {"Here:\n```json\n[{\"a\": 1}]\n```\nBye.", R"([[{"a": 1}]])", "text around it"}, // a fence after a sentence
        {"{\"a\": 1}\n{\"a\": 2}\n", R"([{"a": 1}, {"a": 2}])", ""},                     // JSON lines
        {R"([{"a": 1}, {"a": 2},])", R"([[{"a": 1}, {"a": 2}]])", "a comma"}, {R"([,{"a": 1,},,{"b": 2}])", R"([[{"a": 1}, {"b": 2}]])", "a comma"},
        {R"([{"a": 1} {"a": 2}])", R"([[{"a": 1}, {"a": 2}]])", "a comma"}, {"{\"a\": \"x\"\n \"b\": 2}", R"([{"a": "x", "b": 2}])", "a comma"},
        {"{\"a\": \"x\ny\tz\x01\"}", R"([{"a": "x\ny\tz\u0001"}])", "a line break or another control character in a string"},
        {R"({"a": "\(x\) \alpha \' \ud800 \u00e9"})", R"([{"a": "\\(x\\) \\alpha ' \ufffd \u00e9"}])", "an escape"},
        {R"({'a': 'it\'s "b"', "c": 'd'})", R"([{"a": "it's \"b\"", "c": "d"}])", "quotes|an escape"},
        {R"({a: "x", b_2: "y"})", R"([{"a": "x", "b_2": "y"}])", "quotes"}, {"{“a”: “x”, \"b\": \"y\"}", R"([{"a": "x", "b": "y"}])", "quotes"},
        {R"({"a": "he said "go", and went", "b": "say "no""})", R"([{"a": "he said \"go\", and went", "b": "say \"no\""}])", "quotes"},
        {R"(["a "b" c", "d"])", R"([["a \"b\" c", "d"]])", "quotes"},
        {R"([True, False, None, -1.5e3])", R"([[true, false, null, -1.5e3]])", "a word of Python|a word that is not JSON's"},
        {"[1, // one\n /* two */ 2]", "[[1, 2]]", "a comment"}, {R"([{"a": [1, 2}, {"b": 3}])", R"([[{"a": [1, 2]}, {"b": 3}]])", "a bracket"},
        {R"([{"a": what}, {"b": "x"}])", R"([{"b": "x"}])", "text around it"}, {"[\"\xff\"]", "[[\"\xEF\xBF\xBD\"]]", "invalid UTF-8"},
        // An end that is missing: what is whole stays.
        {R"([{"a": "x"}, {"a": "y)", R"([[{"a": "x"}]])", "its end"}, {R"({"questions": [{"a": "x"}, {"a": "y"}, {"a)", R"([{"questions": [{"a": "x"}, {"a": "y"}]}])", "its end"},
        {R"([{"a": "x", "b": "y")", R"([[{"a": "x", "b": "y"}]])", "its end"}, {R"([{"a": "x", "b": 12)", R"([[{"a": "x"}]])", "its end"}, {"[", "[]", "its end"},
    };
    for (auto& c : cases) {
        INFO(c.text);
        const sj::Repaired r = sj::repair(c.text);
        std::string repairs;
        for (auto* what : r.repairs) repairs += (repairs.empty() ? "" : "|") + std::string(what);
        CHECK(r.text == c.wanted);
        CHECK(repairs == c.repairs);
        CHECK(r.cut == (repairs.find("its end") != repairs.npos));
    }
}

TEST_CASE("repair: of any bytes comes JSON, of JSON itself, of every cut what was whole before it") {
    const std::string base = R"([{"question": "a \"b\" c", "answer": "x\u00e9\ny"}, {"n": [1, -2.5e3, true, null], "o": {"p": "é"}}])";
    auto checked = [](const std::string& text) {
        const sj::Repaired r = sj::repair(text);
        sj::Doc doc;
        INFO(text << " -> " << r.text);
        REQUIRE(sj::parse(doc, r.text) == "");
        const sj::Repaired again = sj::repair(r.text);
        REQUIRE(again.text == "[" + r.text + "]");
        REQUIRE(again.repairs.empty());
        return r;
    };
    for (size_t n = 0; n <= base.size(); n++) {
        const sj::Repaired r = checked(base.substr(0, n));
        CHECK(r.cut == (n > 0 && n < base.size()));
        CHECK((r.text.find(R"({"question": "a \"b\" c", "answer": "x\u00e9\ny"})") != r.text.npos) == (n >= base.find("\"}") + 1));
    }
    uint32_t state = 1;
    auto draw = [&](size_t n) { return (state = state * 1664525 + 1013904223, (size_t)(state >> 8) % n); };
    const std::string letters = "[]{}\"',:\\ue1 \nab/*-\xe2\x80\x9c\xff";
    for (int i = 0; i < 15000; i++) { // (fuzz_repair goes on)
        std::string text = i % 2 ? base : "";
        for (size_t k = 1 + draw(i % 2 ? 4 : 24); k--;)
            if (const size_t at = draw(text.size() + 1); draw(3)) text.insert(at, 1, letters[draw(letters.size())]);
            else text.erase(at, 1 + draw(3));
        checked(text);
    }
    const sj::Repaired deep = checked(std::string(30000, '['));
    CHECK(deep.text.size() < 1000);
    for (const char* unit : {"[\"a,", "{\"a\": \"", "[/*", "{a:", "[1,", "\\\"", "[\"x\" , "}) { // time grows with the text
        std::string text;
        while (text.size() < (SANITIZED ? 1 << 13 : 1 << 15)) text += unit;
        const clock_t begin = clock(); // (of this program: other programs may slow it down)
        sj::repair(text);
        INFO(unit);
        CHECK((clock() - begin) / CLOCKS_PER_SEC < 10);
    }
}

TEST_CASE("the writer places commas, quotes and brackets") {
    sj::Doc doc;
    REQUIRE(sj::parse(doc, "{\"k\":[1,2]}") == "");
    sj::Writer w;
    std::string name = "a \"b\"\n漢";
    w.object().field("name", name).field("view", "x"sv).field("n", 3).field("big", ~uint64_t(0));
    w.field("loss", 0.5).field("nan", std::numeric_limits<double>::infinity());
    w.field("ok", true).field("nil", nullptr);
    w.field("copy", doc.root()).key("ids").array();
    for (int id : {1, -2}) w.value(id);
    w.array().end().object().end().end().key("k\t").object().field("x", 1).end().end();
    CHECK(w.text == R"({"name": "a \"b\"\n漢", "view": "x", "n": 3, "big": 18446744073709551615, )"
                    R"("loss": 0.5, "nan": null, "ok": true, "nil": null, "copy": {"k": [1, 2]}, )"
                    R"("ids": [1, -2, [], {}], "k\t": {"x": 1}})");
    CHECK(dumped(w.text) == w.text);
}

TEST_CASE("hostile texts of 8 MB take linear time and memory") {
    size_t bytes = 8 << 20;
    std::string arrays = "[", keys = "{", escapes = "\"";
    while (arrays.size() < bytes) arrays += "[],";
    while (keys.size() < bytes) keys += "\"a\":0,";
    while (escapes.size() < bytes) escapes += "\\ud83d\\ude00";
    arrays += "[]]", keys += "\"a\":1}", escapes += "\"";
    sj::Doc doc;
    CHECK(sj::parse(doc, arrays) == "");
    CHECK(doc.root().size() == (arrays.size() - 1) / 3);
    CHECK(doc.nodes.size() * sizeof(sj::Node) <= 11 * arrays.size());
    CHECK(sj::parse(doc, keys) == "");
    CHECK(sj::dump(doc.root()) == "{\"a\": 1}");
    CHECK(decoded(escapes).size() == (escapes.size() - 2) / 3);
    std::string digits(bytes, '7');
    CHECK(dumped(digits) == digits);
    CHECK(dumped(digits + ".0") == "Infinity");
}
