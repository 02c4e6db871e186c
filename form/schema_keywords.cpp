// form/schema_keywords.cpp: collects the keywords that apply to a value. Merges references and allOf; an unsupported
// keyword is refused by its name.
#include "base/error.h"
#include "form/schema_reader.h"
#include "model/chat_template.h" // in_quotes
#include <algorithm>
#include <cstdlib>
#include <string_view>

sj::Value Keywords::operator[](const char* word) const {
    const auto found = words.find(word);
    return found == words.end() ? sj::Value{} : found->second;
}

sj::Value Keywords::property(std::string_view name) const {
    const auto found = places.find(name);
    return found == places.end() ? sj::Value{} : properties[found->second].second;
}

size_t Keywords::bytes() const { // approximate size of a copy
    return sizeof *this + 128 * words.size() + 112 * properties.size() + 64 * (choices.size() + required.size()) +
           48 * (of_objects.size() + of_arrays.size()) + 512;
}

bool SchemaReader::is_annotation(const std::string& word) {
    static const std::set<std::string> all = {"title", "description", "default", "examples", "$comment", "$schema",
        "$defs", "definitions", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType",
        "contentSchema", "$id", "id", "$anchor", "$vocabulary"};
    return all.count(word);
}

static bool is_refused(const std::string& word) {
    static const std::set<std::string> all = {"not", "if", "then", "else", "contains", "minContains", "maxContains",
        "uniqueItems", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
        "dependencies", "unevaluatedItems", "unevaluatedProperties", "multipleOf", "minProperties", "maxProperties",
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "divisibleBy", "disallow", "extends"};
    return all.count(word);
}

static bool is_known(const std::string& word) {
    static const std::set<std::string> all = {"enum", "const", "additionalProperties", "items", "prefixItems",
        "additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
    return all.count(word);
}

// ---- Which schema applies
// One step of a JSON pointer. An object's members are read once, however many pointers pass through it.
sj::Value SchemaReader::member(sj::Value v, const std::string& step) {
    if (v.is(sj::Array)) {
        const size_t i = strtoul(step.c_str(), nullptr, 10);
        g.spend(std::min(i, v.size()) / 4);
        return v[i];
    }
    if (!v.is(sj::Object)) return {};
    const auto [known, fresh] = members_of.try_emplace(v.node);
    if (fresh)
        for (auto [name, value] : v.members()) {
            g.spend(2 + name.size() / 16, 96 + name.size());
            known->second[name] = value;
        }
    const auto found = known->second.find(step);
    return found == known->second.end() ? sj::Value{} : found->second;
}

sj::Value SchemaReader::resolve(sj::Value ref) {
    const auto known = resolved.find(ref.node);
    if (known != resolved.end()) return known->second;
    const std::string path = ref.str();
    g.spend(4 + path.size() / 4, 64 + path.size());
    if (!ref.is(sj::String) || path.empty() || path[0] != '#' || (path.size() > 1 && path[1] != '/'))
        DIE("$ref: only references within the schema (#/...) are supported");
    sj::Value at = root;
    for (size_t i = 1; i < path.size();) {
        const size_t end = std::min(path.find('/', i + 1), path.size());
        std::string step;
        for (size_t k = i + 1; k < end; k++) {
            const bool escape = path[k] == '~' && k + 1 < end;
            const int high = path[k] == '%' && k + 2 < end ? sj::hex_digit(path[k + 1]) : -1;
            const int low = high >= 0 ? sj::hex_digit(path[k + 2]) : -1;
            if (low >= 0) step += (char)(high << 4 | low), k += 2;
            else step += escape ? (path[++k] == '1' ? '/' : '~') : path[k];
        }
        at = member(at, step);
        i = end;
    }
    if (!at) DIE("$ref: there is no %s", in_quotes(path).c_str());
    return resolved[ref.node] = at;
}

int SchemaReader::rule_for(sj::Value v) {
    const auto known = rule_of.find(v.node);
    if (known != rule_of.end()) return known->second;
    const int r = rule_of[v.node] = g.new_rule("schema");
    pending.push_back({r, v});
    return r;
}

std::string_view SchemaReader::name_of(const std::string& text) {
    const auto known = names.find(text);
    if (known != names.end()) return *known;
    g.spend(2, 96 + text.size());
    return *names.insert(text).first;
}

Keywords SchemaReader::copy(const Keywords& k) {
    const size_t bytes = k.bytes();
    g.spend(bytes / 64, bytes);
    return k;
}

void SchemaReader::gather(sj::Value v, Keywords& k, int depth) {
    if (depth > 32) DIE("$ref: a schema that refers to itself");
    if (++merges > MAX_MERGES) DIE("the schema is too large: its anyOf, oneOf and allOf multiply");
    g.spend(4);
    if (v.is(sj::True)) return;
    if (v.is(sj::False)) return k.types.emplace(), void();
    if (!v.is(sj::Object)) DIE("a schema must be an object, true or false");
    for (auto [word, value] : v.members()) {
        g.spend(8 + word.size() / 16); // (its name is looked for in two lists)
        if (word == "$ref") gather(resolve(value), k, depth + 1);
        else if (word == "allOf") {
            if (!value.is(sj::Array) || value.size() == 0) DIE("allOf must be a list");
            for (sj::Value part : value.items()) gather(part, k, depth + 1);
        } else if (word == "anyOf" || word == "oneOf") {
            if (!value.is(sj::Array) || value.size() == 0) DIE("%s must be a list", word.c_str());
            k.choices.push_back({word, value});
        } else gather_one(word, value, v, k);
    }
}

static void gather_types(sj::Value value, Keywords& k) {
    static const std::set<std::string> all = {"null", "boolean", "object", "array", "number", "string", "integer"};
    std::set<std::string> types;
    auto add = [&](sj::Value one) {
        if (!all.count(one.str())) DIE("type: %s is none", in_quotes(one.raw()).c_str());
        types.insert(one.str());
    };
    if (value.is(sj::Array)) for (sj::Value one : value.items()) add(one);
    else add(value);
    if (k.types) { // intersection
        std::set<std::string> both;
        for (auto& t : types) {
            if (k.types->count(t) || (t == "integer" && k.types->count("number"))) both.insert(t);
            if (t == "number" && k.types->count("integer")) both.insert("integer");
        }
        types = both;
    }
    if (types.count("number")) types.erase("integer");
    k.types = types;
}

static void check_names(const Keywords& k, size_t most) {
    if (k.properties.size() > most || k.required.size() > most) DIE("the schema is too large: too many properties");
}

// A name repeated within one object has its last schema.
void SchemaReader::gather_properties(sj::Value value, sj::Value owner, Keywords& k) {
    if (!value.is(sj::Object)) DIE("properties must be an object");
    k.with_properties = true;
    k.of_objects.insert(owner.node);
    const size_t before = k.properties.size();
    for (auto [text, schema] : value.members()) {
        g.spend(4 + text.size() / 16, 112);
        const std::string_view name = name_of(text);
        const auto [place, fresh] = k.places.try_emplace(name, k.properties.size());
        if (fresh) k.properties.push_back({name, schema});
        else if (place->second >= before) k.properties[place->second].second = schema;
        else DIE("properties: %s is described twice", in_quotes(text).c_str());
    }
    check_names(k, MAX_NAMES);
}

void SchemaReader::gather_one(const std::string& word, sj::Value value, sj::Value owner, Keywords& k) {
    if (word == "type") g.spend(2 * value.size()), gather_types(value, k);
    else if (word == "properties") gather_properties(value, owner, k);
    else if (word == "required") {
        if (!value.is(sj::Array)) DIE("required must be a list");
        g.spend(4 * value.size(), 64 * value.size());
        for (sj::Value name : value.items())
            if (!name.is(sj::String)) DIE("required must be a list of strings");
            else k.required.insert(name_of(name.str()));
        check_names(k, MAX_NAMES);
    } else if (is_refused(word)) {
        if (word == "uniqueItems" && value.is(sj::False)) return;
        DIE("%s is not supported", word.c_str());
    } else if (is_known(word)) {
        const auto [known, fresh] = k.words.try_emplace(word, value);
        if (!fresh && known->second.node != value.node) {
            g.spend(value.raw().size() / 64);
            if (known->second.raw() != value.raw())
                DIE("%s is given twice, by allOf, anyOf, oneOf or $ref", word.c_str());
        }
        if (word == "additionalProperties") k.of_objects.insert(owner.node);
        if (word == "items" || word == "prefixItems" || word == "additionalItems") k.of_arrays.insert(owner.node);
    } else if ((word == "$id" || word == "id") && owner.node != root.node && value.is(sj::String)) {
        DIE("%s is supported at the root only", word.c_str());
    }
}
