// form/schema.cpp: the texts that a schema allows, as positions of a grammar; see schema.h. schema_keywords.cpp
// collects the keywords that apply to a value.
#include "form/schema.h"
#include "base/error.h"
#include "form/json_rules.h"
#include "form/magnitudes.h"
#include "form/regex.h"
#include "form/schema_reader.h"
#include "model/chat_template.h" // in_quotes
#include "model/utf8.h"
#include <algorithm>
#include <cmath>

int SchemaReader::read(int next) {
    const int p = here(root, next);
    while (!pending.empty()) {
        const auto [rule, v] = pending.back();
        pending.pop_back();
        const int start = here(v, Grammar::FINAL);
        g.rules[(size_t)rule].start = start;
    }
    return p;
}

// ---- From schemas to positions
// Whether the keyword's value may contain schemas: then it becomes a rule.
static bool has_schemas(const std::string& word) {
    static const std::set<std::string> all = {"$ref", "allOf", "anyOf", "oneOf", "properties", "additionalProperties",
                                              "items", "prefixItems", "additionalItems"};
    return all.count(word);
}

int SchemaReader::schema(sj::Value v, int next) {
    bool only_ref = v.is(sj::Object), plain = only_ref, deep = false; // plain: without a keyword
    sj::Value ref;
    for (auto [word, value] : v.members()) {
        g.spend(4 + word.size() / 16);
        if (word == "$ref") ref = value;
        else only_ref = only_ref && is_annotation(word);
        plain = plain && is_annotation(word);
        deep = deep || has_schemas(word);
    }
    if (only_ref && ref) return g.call(rule_for(resolve(ref)), next);
    if (plain) return json.value(next);
    return deep ? g.call(rule_for(v), next) : here(v, next);
}

int SchemaReader::here(sj::Value v, int next) {
    Keywords k;
    gather(v, k);
    return from(k, next);
}

int SchemaReader::from(const Keywords& k, int next) {
    if (!k.choices.empty()) return choice(k, next);
    if (k["const"] || k["enum"]) return constant(k, next);
    std::set<std::string> types;
    if (k.types) types = *k.types;
    else {
        static const std::pair<const char*, const char*> OF[] = {
            {"additionalProperties", "object"}, {"items", "array"}, {"prefixItems", "array"},
            {"additionalItems", "array"}, {"minItems", "array"}, {"maxItems", "array"}, {"minLength", "string"},
            {"maxLength", "string"}, {"pattern", "string"}, {"format", "string"}, {"minimum", "number"},
            {"maximum", "number"}, {"exclusiveMinimum", "number"}, {"exclusiveMaximum", "number"}};
        for (auto [word, type] : OF)
            if (k[word]) types.insert(type);
        if (k.with_properties || !k.required.empty()) types.insert("object");
        if (types.empty()) return json.value(next);
    }
    std::vector<int> starts;
    for (auto& type : types) {
        if (type == "null") starts.push_back(g.literal("null", next));
        if (type == "boolean") starts.push_back(g.words({"true", "false"}, next));
        if (type == "string") starts.push_back(string(k, next));
        if (type == "integer" || type == "number") starts.push_back(number(k, type == "integer", next));
        if (type == "array") starts.push_back(array(k, next));
        if (type == "object") starts.push_back(object(k, next));
    }
    return g.any_of(starts);
}

int SchemaReader::choice(Keywords k, int next) {
    if (++choosing > MAX_CHOOSING)
        DIE("the schema is too large: more than %d anyOf and oneOf for one value, or one that refers to itself",
            MAX_CHOOSING);
    const auto [word, list] = k.choices.back();
    k.choices.pop_back();
    const bool alone = k.words.empty() && k.choices.empty() && k.properties.empty() && k.required.empty() &&
                       !k.types;
    std::vector<int> starts;
    std::vector<Distinction> branches;
    std::map<std::string, int> numbers; // numbers of texts, for distinctions
    for (sj::Value part : list.items()) {
        if (alone && word == "anyOf") {
            starts.push_back(schema(part, next));
            continue;
        }
        Keywords branch = copy(k);
        gather(part, branch);
        if (word == "oneOf") branches.push_back(distinction(branch, numbers));
        starts.push_back(alone ? schema(part, next) : from(branch, next));
    }
    check_distinct(branches);
    choosing--;
    return g.any_of(starts);
}

int SchemaReader::constant(const Keywords& k, int next) {
    for (auto& [word, value] : k.words)
        if (word != "const" && word != "enum") DIE("%s beside const or enum is not supported", word.c_str());
    if (k["const"] && k["enum"]) DIE("const beside enum is not supported");
    if (k.with_properties || !k.required.empty()) DIE("properties beside const or enum are not supported");
    if (k["enum"] && (!k["enum"].is(sj::Array) || k["enum"].size() == 0)) DIE("enum must be a list");
    std::vector<std::string> all; // those with one spelling
    std::vector<int> starts;
    auto add = [&](sj::Value v) {
        static const char* NAMES[] = {"", "null", "boolean", "boolean", "number", "string", "array", "object"};
        int64_t n;
        const bool whole = v.is(sj::Number) && (v.integer(&n) || v.number() == std::floor(v.number()));
        g.spend(2 + v.raw().size() / 16, 48 + v.raw().size());
        if (k.types && !k.types->count(NAMES[v.type()]) && !(whole && k.types->count("integer"))) return;
        const std::string text = v.is(sj::Number) ? std::string(v.raw()) : v.is_container() ? "" : sj::dump(v);
        const bool plain = std::all_of(text.begin(), text.end(), [](char c) { return (uint8_t)c < 0x80 && c != '\\'; });
        if (plain && !v.is_container()) all.push_back(text);
        else starts.push_back(json.constant(v, next));
    };
    if (k["const"]) add(k["const"]);
    for (sj::Value v : k["enum"].items()) add(v);
    if (!all.empty()) starts.push_back(g.words(std::move(all), next));
    return g.any_of(starts);
}

int SchemaReader::count(const Keywords& k, const char* word, int otherwise) const {
    const sj::Value v = k[word];
    if (!v) return otherwise;
    const double n = v.number(-1);
    if (!(n >= 0 && n <= Grammar::MAX_REPEAT && n == std::floor(n)))
        DIE("%s must be an integer from 0 to %d", word, Grammar::MAX_REPEAT);
    return (int)n;
}

int SchemaReader::string(const Keywords& k, int next) {
    const bool bounded = k["minLength"] || k["maxLength"];
    if ((bool)k["pattern"] + (bool)k["format"] + bounded > 1)
        DIE("%s beside %s is not supported", k["pattern"] ? "pattern" : "format",
            bounded ? "minLength and maxLength" : "format");
    if (k["pattern"]) {
        if (!k["pattern"].is(sj::String)) DIE("pattern must be a string");
        return in_quotes_of(regex_within(g, k["pattern"].str()), next);
    }
    if (k["format"]) return formatted(k["format"].str(), next);
    if (!bounded) return json.string(next);
    const int least = count(k, "minLength", 0), most = count(k, "maxLength", -1);
    if (most >= 0 && most < least) return g.never();
    auto character = [&](int p) { return json.character(p, false); };
    return g.literal("\"", g.repeat(character, least, most, g.literal("\"", next)));
}

int SchemaReader::number(const Keywords& k, bool integer, int next) {
    const bool low_out = (bool)k["exclusiveMinimum"], high_out = (bool)k["exclusiveMaximum"];
    if ((low_out && k["minimum"]) || (high_out && k["maximum"]))
        DIE("%s beside %s is not supported", low_out ? "minimum" : "maximum",
            low_out ? "exclusiveMinimum" : "exclusiveMaximum");
    const char* low_word = low_out ? "exclusiveMinimum" : "minimum";
    const char* high_word = high_out ? "exclusiveMaximum" : "maximum";
    const bool has_low = (bool)k[low_word], has_high = (bool)k[high_word];
    if (!has_low && !has_high) return json.number(integer, next);
    const Decimal low = has_low ? Decimal::read(k[low_word], low_word) : Decimal();
    const Decimal high = has_high ? Decimal::read(k[high_word], high_word) : Decimal();
    std::vector<int> starts;
    if (!has_high || !high.negative) {
        const bool from_low = has_low && !low.negative;
        const Decimal least = from_low ? low : Decimal();
        Magnitudes up{g, next, least, high, !(from_low && low_out), !high_out, has_high, integer};
        starts.push_back(up.start());
    }
    if (!has_low || low.negative) {
        const bool from_high = has_high && (high.negative || high.zero());
        const Decimal least = from_high ? high : Decimal();
        Magnitudes down{g, next, least, low, !(from_high && high_out), !low_out, has_low, integer};
        starts.push_back(g.literal("-", down.start()));
    }
    return g.any_of(starts);
}

int SchemaReader::array(const Keywords& k, int next) {
    if (k.of_arrays.size() > 1) DIE("items of several schemas (allOf, anyOf, $ref) are not supported");
    std::vector<sj::Value> first;
    sj::Value rest = k["items"];
    const sj::Value list = rest.is(sj::Array) ? rest : k["prefixItems"];
    if (list && !list.is(sj::Array)) DIE("prefixItems must be a list");
    g.spend(list.size(), 16 * list.size());
    for (sj::Value v : list.items()) first.push_back(v);
    if (rest.is(sj::Array)) rest = k["additionalItems"];
    const int least = count(k, "minItems", 0), most = count(k, "maxItems", -1), n = (int)first.size();
    const bool open = rest ? !rest.is(sj::False) : n == 0 || least > n;
    if (most >= 0 && most < least) return g.never();
    const int end = json.space(g.literal("]", next));
    auto item = [&](int i, int p) {
        if (i < n) return schema(first[(size_t)i], p);
        return rest ? g.call(rule_for(rest), p) : json.value(p);
    };
    auto another = [&](int i, int p) { return g.literal(",", json.space(item(i, p))); };
    // From the end: the position after each number of items, and what may follow.
    const int fixed = std::max(n, 1);
    const bool more_than_fixed = open && (most < 0 || most > fixed);
    int after = least > fixed ? g.never() : end;
    if (more_than_fixed)
        after = g.repeat([&](int p) { return another(fixed, p); }, std::max(0, least - fixed),
                         most < 0 ? -1 : most - fixed, end);
    for (int i = fixed - 1; i >= 0; i--) {
        const bool may = (most < 0 || i < most) && (open || i < n), must = i < least;
        const int more = !may ? g.never() : i ? another(i, after) : item(0, after);
        after = must ? more : may ? g.split(more, end) : end;
    }
    return g.literal("[", json.space(after));
}

// The name of a property, in quotes, other than k's and these: of characters that need no escape.
int SchemaReader::other_name(const Keywords& k, const std::vector<std::string_view>& more, int next) {
    static const Codes ESCAPED = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}, PLAIN = complement(ESCAPED);
    const int quote = g.literal("\"", next);
    const int any = g.repeat([&](int p) { return g.character(PLAIN, p, RAW); }, 0, -1, quote);
    struct Begun { // a prefix of names
        std::map<uint32_t, size_t> on{}; // by the next character
        bool is_name = false;
        int start = 0;
    };
    std::vector<Begun> begun(1); // each after its own prefixes
    auto add = [&](std::string_view name) {
        size_t at = 0;
        for (const char* p = name.data(); p < name.data() + name.size();) {
            g.spend(2, sizeof(Begun) + 48);
            const auto [on, fresh] = begun[at].on.try_emplace(utf8_read(p), begun.size());
            at = on->second;
            if (fresh) begun.emplace_back();
        }
        begun[at].is_name = true;
    };
    for (auto& property : k.properties) add(property.first);
    for (auto& name : more) add(name);
    for (size_t i = begun.size(); i-- > 0;) {
        Codes known = ESCAPED;
        for (auto& [c, to] : begun[i].on) known.push_back({c, c});
        std::vector<int> ways = {g.character(complement(known), any, RAW)};
        if (!begun[i].is_name) ways.push_back(quote);
        for (auto& [c, to] : begun[i].on) {
            std::string character;
            utf8_append(character, c);
            if (c >= 0x20 && c != '"' && c != '\\') ways.push_back(g.literal(character, begun[to].start));
        }
        begun[i].start = g.any_of(ways);
    }
    return g.literal("\"", begun[0].start);
}

int SchemaReader::object(const Keywords& k, int next) {
    const sj::Value others = k["additionalProperties"];
    if (others && k.of_objects.size() > 1)
        DIE("additionalProperties beside the properties of another schema (allOf, anyOf, $ref) is not supported");
    if (!others && !k.with_properties && k.required.empty()) return json.object(next);
    const bool open = others ? !others.is(sj::False) : !k.with_properties;
    auto other_value = [&](int p) {
        return others && !others.is(sj::True) ? g.call(rule_for(others), p) : json.value(p);
    };
    auto properties = k.properties;
    std::vector<std::string_view> unlisted;
    g.spend(2 * (k.properties.size() + k.required.size()), 48 * (k.properties.size() + k.required.size()));
    for (std::string_view name : k.required)
        if (!k.property(name)) {
            if (others && !open) return g.never();
            properties.push_back({name, {}}), unlisted.push_back(name);
        }

    // From the end. `begun`, `fresh`: the position after at least one property, and after none.
    const int end = json.space(g.literal("}", next));
    int begun = end, fresh = end;
    if (open) {
        const int loop = g.add(Grammar::SPLIT, 0, end);
        const int pair = other_name(k, unlisted, g.literal(":", json.space(other_value(loop))));
        const int more = g.literal(",", json.space(pair));
        g.at[(size_t)loop].x = (uint32_t)more;
        begun = loop, fresh = g.split(pair, end);
    }
    for (size_t i = properties.size(); i-- > 0;) {
        const auto& [name, value] = properties[i];
        std::string key;
        sj::quote(key, name);
        const int pair = g.literal(key + ":", json.space(value ? schema(value, begun) : other_value(begun)));
        const int more = g.literal(",", json.space(pair));
        const bool must = k.required.count(name);
        begun = must ? more : g.split(more, begun);
        fresh = must ? pair : g.split(pair, fresh);
    }
    return g.literal("{", json.space(fresh));
}

// ---- The whole
Grammar grammar_of_schema(sj::Value schema) {
    return grammar_of([&](Grammar& g, int end) {
        JsonRules json(g);
        return SchemaReader(json, schema).read(end);
    });
}
Grammar grammar_of_json_object() {
    return grammar_of([](Grammar& g, int end) { return JsonRules(g).object(end); });
}
