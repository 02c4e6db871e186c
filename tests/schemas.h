// JSON schemas made of numbers (a fuzzer's bytes, a test's draws), texts that an automaton allows, and a validator that
// knows nothing of grammars: it judges a text by its schema, keyword by keyword.
#pragma once
#include "form/matcher.h"
#include "sj.h"
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

// Numbers to choose by; when they are used up, zeros: then all that is made is small.
struct Choices {
    std::function<uint32_t()> draw;
    uint32_t below(uint32_t n) { return draw() % n; }
    bool one_in(uint32_t n) { return draw() % n == n - 1; }
};

// Schemas with what grammars are made of: nested, with references to themselves and to $defs, alone and beside other
// keywords.
struct SchemaMaker {
    Choices& choose;
    size_t left = 40; // schemas that may still be made

    std::string make() {
        sj::Writer w;
        w.object();
        body(w, 0);
        w.key("$defs").object();
        for (const char* name : {"a", "b/c", "d"}) w.key(name), schema(w, 1);
        return w.end().end().text;
    }

  private:
    static constexpr int DEEPEST = 5;

    void schema(sj::Writer& w, int depth) {
        if (choose.one_in(12)) return (void)w.value(!choose.one_in(3));
        w.object();
        body(w, depth);
        w.end();
    }
    void list(sj::Writer& w, const char* word, int depth) {
        w.key(word).array();
        for (uint32_t n = 1 + choose.below(3); n > 0; n--) schema(w, depth + 1);
        w.end();
    }
    void reference(sj::Writer& w) {
        static const char* PATHS[] = {"#", "#/$defs/a", "#/$defs/b~1c", "#/$defs/d", "#/properties/a"};
        w.field("$ref", PATHS[choose.below(4 + choose.one_in(4))]);
    }
    void type(sj::Writer& w) {
        static const char* TYPES[] = {"null", "boolean", "integer", "number", "string", "array", "object"};
        if (choose.one_in(4)) {
            w.key("type").array();
            for (int i = 0; i < 2; i++) w.value(TYPES[choose.below(7)]);
            w.end();
        } else w.field("type", TYPES[choose.below(7)]);
    }

    void body(sj::Writer& w, int depth) {
        const bool leaf = depth >= DEEPEST || left == 0;
        if (left) left--;
        switch (choose.below(leaf ? 6 : 14)) {
        case 0: return type(w);
        case 1: return numbers(w);
        case 2: return strings(w);
        case 3: return constants(w);
        case 4: return reference(w);
        case 5: return reference(w), type(w);
        case 6: case 7: return object(w, depth);
        case 8: return array(w, depth);
        case 9: return list(w, "anyOf", depth);
        case 10: return list(w, "oneOf", depth);
        case 11: return list(w, "allOf", depth);
        case 12: return object(w, depth), list(w, choose.one_in(2) ? "anyOf" : "allOf", depth);
        default: reference(w), object(w, depth);
        }
    }
    void numbers(sj::Writer& w) {
        w.field("type", choose.one_in(2) ? "integer" : "number");
        auto bound = [&] { return ((int)choose.below(400) - 200) / (choose.one_in(3) ? 8.0 : 1.0); };
        if (choose.one_in(2)) w.field(choose.one_in(3) ? "exclusiveMinimum" : "minimum", bound());
        if (choose.one_in(2)) w.field(choose.one_in(3) ? "exclusiveMaximum" : "maximum", bound());
    }
    void strings(sj::Writer& w) {
        static const char* PATTERNS[] = {"^a+$", "^[ab]{2,3}$", "b", "^(x|yz)?$", "^\\d\\\\\"$"};
        if (choose.one_in(2)) w.field("type", "string");
        if (choose.one_in(3)) return (void)w.field("pattern", PATTERNS[choose.below(5)]);
        const uint32_t least = choose.below(4);
        w.field("minLength", least).field("maxLength", least + choose.below(4));
    }
    void constants(sj::Writer& w) {
        static const char* VALUES[] = {"\"a\"", "null", "1", "-2.5", "\"\\u00e9\\n\"", "true", "[]", "{}", "[1, \"b\"]",
                                       "{\"k\": [null], \"l\": {}}", "\"b\"", "1e2"};
        auto value = [&] { w.separate(), w.text += VALUES[choose.below(12)]; };
        if (choose.one_in(2)) return w.key("const"), value();
        w.key("enum").array();
        for (uint32_t n = 1 + choose.below(3); n > 0; n--) value();
        w.end();
    }
    void object(sj::Writer& w, int depth) {
        static const char* NAMES[] = {"a", "b", "ab", "k\xc3\xa9", "a\"b", "kind"};
        if (choose.one_in(2)) w.field("type", "object");
        const uint32_t used = choose.below(64), must = choose.below(64) & choose.below(64);
        w.key("properties").object();
        for (uint32_t i = 0; i < 6; i++)
            if (used >> i & 1) w.key(NAMES[i]), schema(w, depth + 1);
        w.end().key("required").array();
        for (uint32_t i = 0; i < 6; i++)
            if (must >> i & 1) w.value(NAMES[i]);
        w.end();
        if (choose.one_in(2)) w.key("additionalProperties"), schema(w, depth + 1);
    }
    void array(sj::Writer& w, int depth) {
        if (choose.one_in(2)) w.field("type", "array");
        if (choose.one_in(3)) list(w, "prefixItems", depth);
        if (!choose.one_in(3)) w.key("items"), schema(w, depth + 1);
        if (choose.one_in(2)) w.field("minItems", choose.below(4));
        if (choose.one_in(2)) w.field("maxItems", choose.below(5));
    }
};

// Whether a value is one that a schema allows, as the standard has it (draft 2020-12).
struct Validator {
    const sj::Value root;
    int depth = 0;

    bool valid(sj::Value schema, sj::Value v) {
        if (schema.is_bool()) return schema.is(sj::True);
        if (++depth > 2000) abort(); // it refers to itself
        bool all = true;
        for (auto [word, value] : schema.members()) all = all && holds(word, value, schema, v);
        depth--;
        return all;
    }

    static bool equal(sj::Value a, sj::Value b) {
        if (a.type() != b.type() || a.size() != b.size()) return false;
        if (a.is(sj::Number)) return a.number() == b.number();
        if (a.is(sj::String)) return a.str() == b.str();
        for (size_t i = 0; a.is(sj::Array) && i < a.size(); i++)
            if (!equal(a[i], b[i])) return false;
        for (auto [name, value] : a.members())
            if (!equal(value, b[name])) return false;
        return true;
    }

  private:
    static size_t characters(const std::string& s) {
        return (size_t)std::count_if(s.begin(), s.end(), [](char c) { return ((uint8_t)c & 0xC0) != 0x80; });
    }
    static bool is(sj::Value v, const std::string& type) {
        switch (v.type()) {
        case sj::Null: return type == "null";
        case sj::True: case sj::False: return type == "boolean";
        case sj::Number: return type == "number" || (type == "integer" && v.number() == std::floor(v.number()));
        case sj::String: return type == "string";
        case sj::Array: return type == "array";
        default: return type == "object";
        }
    }
    sj::Value resolve(const std::string& path) const {
        sj::Value at = root;
        for (size_t i = 2, end; i < path.size(); i = end + 1) {
            end = std::min(path.find('/', i), path.size());
            std::string step = path.substr(i, end - i);
            if (const size_t t = step.find("~1"); t != step.npos) step.replace(t, 2, "/");
            at = at[step];
        }
        return at;
    }
    size_t count(sj::Value list, sj::Value v) {
        size_t n = 0;
        for (sj::Value part : list.items()) n += valid(part, v);
        return n;
    }

    bool holds(const std::string& word, sj::Value x, sj::Value schema, sj::Value v) {
        if (word == "$ref") return valid(resolve(x.str()), v);
        if (word == "allOf") return count(x, v) == x.size();
        if (word == "anyOf") return count(x, v) > 0;
        if (word == "oneOf") return count(x, v) == 1;
        if (word == "const") return equal(x, v);
        if (word == "type" || word == "enum") {
            bool some = word == "type" && x.is(sj::String) && is(v, x.str());
            for (sj::Value one : x.items()) some = some || (word == "type" ? is(v, one.str()) : equal(one, v));
            return some;
        }
        if (v.is(sj::Number)) return number(word, x.number(), v.number());
        if (v.is(sj::String)) return text(word, x, v.str());
        if (v.is(sj::Array)) return array(word, x, schema, v);
        return !v.is(sj::Object) || object(word, x, schema, v);
    }
    static bool number(const std::string& word, double x, double v) {
        return word == "minimum" ? v >= x : word == "maximum" ? v <= x :
               word == "exclusiveMinimum" ? v > x : word == "exclusiveMaximum" ? v < x : true;
    }
    static bool text(const std::string& word, sj::Value x, const std::string& v) {
        if (word == "minLength") return (double)characters(v) >= x.number();
        if (word == "maxLength") return (double)characters(v) <= x.number();
        return word != "pattern" || std::regex_search(v, std::regex(x.str()));
    }
    bool array(const std::string& word, sj::Value x, sj::Value schema, sj::Value v) {
        if (word == "minItems") return (double)v.size() >= x.number();
        if (word == "maxItems") return (double)v.size() <= x.number();
        const size_t first = schema["prefixItems"].size();
        bool all = true;
        size_t i = 0;
        for (sj::Value item : v.items()) {
            if (word == "prefixItems" && i < first) all = all && valid(x[i], item);
            if (word == "items" && i >= first) all = all && valid(x, item);
            i++;
        }
        return all;
    }
    bool object(const std::string& word, sj::Value x, sj::Value schema, sj::Value v) {
        bool all = true;
        if (word == "required")
            for (sj::Value name : x.items()) all = all && v[name.str()];
        if (word == "properties")
            for (auto [name, inner] : x.members()) all = all && (!v[name] || valid(inner, v[name]));
        if (word == "additionalProperties")
            for (auto [name, value] : v.members()) all = all && (schema["properties"][name] || valid(x, value));
        return all;
    }
};

// A whole text of an automaton, byte by byte, with a liking for what closes it; or "", if it became too long.
inline std::string draw_text(Automaton& a, Choices& choose, size_t longest) {
    std::lock_guard lock(a.mutex);
    std::string text;
    for (int state = a.start(); text.size() < longest;) {
        if (a.ends(state) && (!a.goes_on(state) || choose.one_in(2))) return text;
        std::string all, closing;
        for (int b = 0; b < 255; b++) // (255 is a mark of tokens)
            if (a.next(state, (uint8_t)b)) (b && strchr("\"}]:,", b) ? closing : all) += (char)b;
        if (all.empty() && closing.empty()) abort(); // every state leads on
        const std::string& from = all.empty() || (!closing.empty() && choose.below(3)) ? closing : all;
        text += from[choose.below((uint32_t)from.size())];
        state = a.next(state, (uint8_t)text.back());
    }
    return "";
}
