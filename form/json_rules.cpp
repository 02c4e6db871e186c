// form/json_rules.cpp: the rules of JSON, see json_rules.h.
#include "form/json_rules.h"
#include "form/magnitudes.h"
#include "model/utf8.h"
#include <string_view>
#include <vector>

int JsonRules::space(int next) { return g.call(rule("white space", [&] {
    const int end = Grammar::FINAL;
    ByteSet blank;
    blank.set(' '), blank.set('\t');
    const int line = g.repeat([&](int p) { return g.bytes(blank, p); }, 0, 20, end);
    return g.any_of({g.literal(" ", end), g.literal("\n", line), end});
}), next); }

int JsonRules::string(int next) { return g.call(rule("string", [&] {
    const int body = g.repeat([&](int p) { return character(p, true); }, 0, -1, g.literal("\"", Grammar::FINAL));
    return g.literal("\"", body);
}), next); }

int JsonRules::number(bool integer, int next) { return g.call(rule(integer ? "integer" : "number", [&] {
    const int end = integer ? Grammar::FINAL : exponent(Grammar::FINAL);
    Magnitudes any{g, end, {}, {}, true, true, false, integer};
    const int p = any.start();
    return g.split(g.literal("-", p), p);
}), next); }

int JsonRules::object(int next) { return g.call(rule("object", [&] {
    const int end = space(g.literal("}", Grammar::FINAL));
    auto pair = [&](int p) { return string(g.literal(":", space(value(p)))); };
    const int more = g.repeat([&](int p) { return g.literal(",", space(pair(p))); }, 0, -1, end);
    return g.literal("{", space(g.split(pair(more), end)));
}), next); }

int JsonRules::array(int next) { return g.call(rule("array", [&] {
    const int end = space(g.literal("]", Grammar::FINAL));
    const int more = g.repeat([&](int p) { return g.literal(",", space(value(p))); }, 0, -1, end);
    return g.literal("[", space(g.split(value(more), end)));
}), next); }

int JsonRules::value(int next) { return g.call(rule("value", [&] {
    const int end = Grammar::FINAL;
    const int word = g.words({"true", "false", "null"}, end);
    return g.any_of({object(end), array(end), string(end), number(false, end), word});
}), next); }

int JsonRules::character(int next, bool by_number) {
    const int short_forms = g.words({"\\\"", "\\\\", "\\/", "\\b", "\\f", "\\n", "\\r", "\\t"}, next);
    const int plain = g.character(complement({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}), next, RAW);
    if (!by_number) return g.split(plain, short_forms);
    ByteSet hex, not_d, low;
    for (char c : std::string("0123456789abcdefABCDEF")) {
        hex.set((uint8_t)c);
        if (c != 'd' && c != 'D') not_d.set((uint8_t)c);
        if (c >= '0' && c <= '7') low.set((uint8_t)c);
    }
    const int two = g.bytes(hex, g.bytes(hex, next));
    ByteSet d;
    d.set('d'), d.set('D');
    const int four = g.split(g.bytes(not_d, g.bytes(hex, two)), g.bytes(d, g.bytes(low, two)));
    return g.any_of({plain, short_forms, g.literal("\\u", four)});
}

int JsonRules::by_number(uint32_t unit, int next) { // a unit of UTF-16
    for (int i = 0; i < 4; i++, unit >>= 4) {
        ByteSet digit;
        digit.set((uint8_t)"0123456789abcdef"[unit & 15]), digit.set((uint8_t)"0123456789ABCDEF"[unit & 15]);
        next = g.bytes(digit, next);
    }
    return g.literal("\\u", next);
}

int JsonRules::spelled(uint32_t c, int next) { // in a string constant
    std::string text, quoted;
    utf8_append(text, c);
    sj::quote(quoted, text);
    const int plain = g.literal(std::string_view(quoted).substr(1, quoted.size() - 2), next);
    if (c < 0x80 && quoted.size() == 3) return plain;
    if (c < 0x10000) return g.split(plain, by_number(c, next));
    return g.split(plain, by_number(0xD800 + ((c - 0x10000) >> 10), by_number(0xDC00 + (c & 0x3FF), next)));
}

int JsonRules::constant(sj::Value v, int next) {
    g.spend(2 + v.raw().size() / 16, 64 + v.raw().size());
    auto text = [&](const std::string& s, int p) {
        std::vector<uint32_t> all;
        for (const char* c = s.data(); c < s.data() + s.size();) all.push_back(utf8_read(c));
        p = g.literal("\"", p);
        for (size_t i = all.size(); i-- > 0;) p = spelled(all[i], p);
        return g.literal("\"", p);
    };
    if (v.is(sj::String)) return text(v.str(), next);
    if (!v.is_container()) return g.literal(v.raw(), next);
    std::vector<sj::Member> parts; // of an array: without keys; of a repeated key, the last
    std::map<std::string, size_t> places;
    for (sj::Value item : v.items()) parts.push_back({"", item});
    for (auto [key, value] : v.members()) {
        const auto [place, fresh] = places.try_emplace(key, parts.size());
        if (fresh) parts.push_back({key, value});
        else parts[place->second].value = value;
    }
    int p = space(g.literal(v.is(sj::Array) ? "]" : "}", next));
    for (size_t i = parts.size(); i-- > 0;) {
        p = constant(parts[i].value, p);
        if (v.is(sj::Object)) p = text(parts[i].key, g.literal(":", space(p)));
        if (i > 0) p = g.literal(",", space(p));
    }
    return g.literal(v.is(sj::Array) ? "[" : "{", space(p));
}

int JsonRules::rule(const char* name, const std::function<int()>& body) {
    const auto found = known.find(name);
    if (found != known.end()) return found->second;
    const int r = known[name] = g.new_rule(name);
    const int start = body(); // (which creates more rules)
    g.rules[(size_t)r].start = start;
    return r;
}

int JsonRules::exponent(int next) {
    const int digits = g.bytes('0', '9', g.split(g.bytes('0', '9', next), next));
    const int sign = g.any_of({g.literal("+", digits), g.literal("-", digits), digits});
    ByteSet e;
    e.set('e'), e.set('E');
    return g.split(g.bytes(e, sign), next);
}
