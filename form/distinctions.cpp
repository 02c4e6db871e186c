// form/distinctions.cpp: whether the branches of a oneOf exclude each other, as far as simple checks show it.
#include "base/error.h"
#include "form/schema_reader.h"
#include <algorithm>
#include <iterator>

// The texts of const or enum, if all are strings.
Distinction::Texts SchemaReader::texts_of(const Keywords& k, std::map<std::string, int>& numbers) {
    Distinction::Texts all;
    auto add = [&](sj::Value v) {
        const std::string text = v.str();
        g.spend(6 + text.size() / 16, 112 + text.size());
        all.push_back(numbers.try_emplace(text, (int)numbers.size()).first->second);
    };
    if (k["const"].is(sj::String)) add(k["const"]);
    else for (sj::Value v : k["enum"].items())
        if (v.is(sj::String)) add(v);
        else return {};
    std::sort(all.begin(), all.end());
    return all;
}

constexpr unsigned NO_VALUE = 128; // a set of types

Distinction SchemaReader::distinction(const Keywords& k, std::map<std::string, int>& numbers) {
    static const std::map<std::string, unsigned> BITS = {{"null", 1}, {"boolean", 2}, {"object", 4}, {"array", 8},
                                                         {"string", 16}, {"integer", 32}, {"number", 32 | 64}};
    Distinction d;
    d.values = texts_of(k, numbers);
    if (k.types) {
        for (auto& type : *k.types) d.types |= BITS.at(type);
        if (k.types->empty()) d.types = NO_VALUE;
    }
    d.object = !k.types || d.types == BITS.at("object");
    if (!d.object) return d;
    for (std::string_view name : k.required) {
        g.spend(4);
        const sj::Value schema = k.property(name);
        if (!schema) continue;
        Keywords inner;
        gather(schema, inner);
        Distinction::Texts texts = texts_of(inner, numbers);
        if (!texts.empty()) d.constants[name] = std::move(texts);
    }
    return d;
}

static bool apart(const Distinction::Texts& a, const Distinction::Texts& b) { // no text is in both
    for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();)
        if (*x == *y) return false;
        else if (*x < *y) ++x;
        else ++y;
    return true;
}

bool SchemaReader::differ(const Distinction& a, const Distinction& b) {
    g.spend(1);
    if (!a.values.empty() && !b.values.empty()) return true; // compared by check_distinct
    if (a.types == NO_VALUE || b.types == NO_VALUE || (a.types && b.types && !(a.types & b.types))) return true;
    if (!a.object || !b.object) return false;
    for (auto& [name, texts] : a.constants) {
        const auto other = b.constants.find(name);
        g.spend(2);
        if (other == b.constants.end()) continue;
        g.spend((texts.size() + other->second.size()) / 8);
        if (apart(texts, other->second)) return true;
    }
    return false;
}

void SchemaReader::check_distinct(const std::vector<Distinction>& all) {
    auto fail = [] {
        DIE("oneOf is supported where the branches differ in type, or in the constant of a required property; anyOf "
            "may do");
    };
    std::map<int, size_t> owner; // of each text: the branch that contains it
    for (size_t i = 0; i < all.size(); i++)
        for (int text : all[i].values) {
            g.spend(2, 48);
            if (owner.try_emplace(text, i).first->second != i) fail();
        }
    for (size_t i = 0; i < all.size(); i++)
        for (size_t j = 0; j < i; j++)
            if (!differ(all[i], all[j])) fail();
}
