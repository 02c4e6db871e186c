// schema.h: JSON schemas as grammars, and so the calls of tools. See grammar.h.
//
//   Grammar g = grammar_of_schema(text);
//
// Every text of the grammar is JSON that the schema allows; not the other way round. Properties come in the schema's
// order, numbers have 15 digits at most, and between tokens there is one blank, or a line break and blanks, or nothing.
// Where `properties` are given and `additionalProperties` is not, there are no others. Where no type is given it is
// that of the keywords. What cannot be kept is refused by its keyword's name; what no draft of JSON Schema knows is
// ignored.
#pragma once
#include "form/grammar.h"
#include <optional>

// Decimal digits of a number, without an exponent.
struct Decimal {
    bool negative = false;
    std::string whole = "0", fraction; // no zeros at the outer ends

    static Decimal read(sj::Value v, const std::string& keyword) {
        if (!v.is(sj::Number)) DIE("%s must be a number", keyword.c_str());
        const std::string raw(v.raw());
        const size_t e = std::min(raw.find_first_of("eE"), raw.size()), sign = raw[0] == '-';
        const long exponent = e < raw.size() ? strtol(raw.c_str() + e + 1, nullptr, 10) : 0;
        if (std::labs(exponent) > 40 || e > 60) DIE("%s is too large or too exact", keyword.c_str());
        std::string digits = raw.substr(sign, e - sign);
        const size_t dot = std::min(digits.find('.'), digits.size());
        if (dot < digits.size()) digits.erase(dot, 1);
        long point = (long)dot + exponent;
        if (point < 0) digits.insert(0, (size_t)-point, '0'), point = 0;
        if (point > (long)digits.size()) digits.append((size_t)point - digits.size(), '0');
        Decimal d{sign == 1, digits.substr(0, (size_t)point), digits.substr((size_t)point)};
        d.whole.erase(0, std::min(d.whole.find_first_not_of('0'), d.whole.size()));
        d.fraction.resize(d.fraction.find_last_not_of('0') + 1);
        if (d.whole.empty()) d.whole = "0";
        if (d.zero()) d.negative = false;
        return d;
    }
    bool zero() const { return whole == "0" && fraction.empty(); }
};

// The digits of all numbers from low to high, both without their signs.
struct Magnitudes {
    static constexpr size_t DIGITS = 15; // a double tells all numbers of so many apart

    Grammar& grammar;
    int next;
    Decimal low, high;
    bool low_in, high_in, bounded; // whether the bounds themselves are meant; whether there is an upper one
    bool integer;
    size_t places = 0;
    std::map<std::array<size_t, 4>, int> made{};

    int start() {
        std::vector<int> starts;
        const size_t longest = bounded ? high.whole.size() : std::max(DIGITS, low.whole.size());
        for (size_t n = low.whole.size(); n <= longest; n++) {
            places = integer || n >= DIGITS ? 0 : DIGITS - n;
            made.clear();
            starts.push_back(whole(n, 0, n == low.whole.size(), bounded && n == high.whole.size()));
        }
        return grammar.any_of(starts);
    }

  private:
    // One more digit. at_low, at_high: those before it are the bound's.
    template <class F> int digit(char from, char to, bool at_low, bool at_high, F rest) {
        std::map<std::pair<bool, bool>, ByteSet> ways;
        for (char d = from; d <= to; d++) ways[{at_low && d == from, at_high && d == to}].set((uint8_t)d);
        std::vector<int> starts;
        for (auto& [flags, set] : ways) starts.push_back(grammar.bytes(set, rest(flags.first, flags.second)));
        return grammar.any_of(starts);
    }
    int whole(size_t n, size_t i, bool at_low, bool at_high) {
        if (i == n) return fraction(0, at_low, at_high);
        const auto [known, fresh] = made.try_emplace({0, i, at_low, at_high}, 0);
        if (!fresh) return known->second;
        const char from = at_low ? low.whole[i] : i == 0 && n > 1 ? '1' : '0', to = at_high ? high.whole[i] : '9';
        const int p = digit(from, to, at_low, at_high, [&](bool l, bool h) { return whole(n, i + 1, l, h); });
        return made[{0, i, at_low, at_high}] = p;
    }
    int fraction(size_t i, bool at_low, bool at_high) { // i digits of it are there
        const auto [known, fresh] = made.try_emplace({1, i, at_low, at_high}, 0);
        if (!fresh) return known->second;
        std::vector<int> starts;
        const bool below = at_low && low.fraction.size() > i, is_low = at_low && !below;
        const bool is_high = at_high && high.fraction.size() <= i;
        if (!below && (!is_low || low_in) && (!is_high || high_in)) starts.push_back(next);
        if (i < places) {
            const char from = at_low && i < low.fraction.size() ? low.fraction[i] : '0';
            const char to = !at_high ? '9' : i < high.fraction.size() ? high.fraction[i] : '0';
            const int p = digit(from, to, at_low, at_high, [&](bool l, bool h) { return fraction(i + 1, l, h); });
            starts.push_back(i == 0 ? grammar.literal(".", p) : p);
        }
        return made[{1, i, at_low, at_high}] = grammar.any_of(starts);
    }
};

// What all JSON texts are made of, as rules of a grammar, each made when it is first called.
struct JsonRules {
    Grammar& g;

    int space(int next) { return g.call(rule("white space", [&] {
        const int end = Grammar::FINAL;
        ByteSet blank;
        blank.set(' '), blank.set('\t');
        const int line = g.repeat([&](int p) { return g.bytes(blank, p); }, 0, 20, end);
        return g.any_of({g.literal(" ", end), g.literal("\n", line), end});
    }), next); }
    int string(int next) { return g.call(rule("string", [&] {
        const int body = g.repeat([&](int p) { return character(p, true); }, 0, -1, g.literal("\"", Grammar::FINAL));
        return g.literal("\"", body);
    }), next); }
    int number(bool integer, int next) { return g.call(rule(integer ? "integer" : "number", [&] {
        const int end = integer ? Grammar::FINAL : exponent(Grammar::FINAL);
        Magnitudes any{g, end, {}, {}, true, true, false, integer};
        const int p = any.start();
        return g.split(g.literal("-", p), p);
    }), next); }
    int object(int next) { return g.call(rule("object", [&] {
        const int end = space(g.literal("}", Grammar::FINAL));
        auto pair = [&](int p) { return string(g.literal(":", space(value(p)))); };
        const int more = g.repeat([&](int p) { return g.literal(",", space(pair(p))); }, 0, -1, end);
        return g.literal("{", space(g.split(pair(more), end)));
    }), next); }
    int array(int next) { return g.call(rule("array", [&] {
        const int end = space(g.literal("]", Grammar::FINAL));
        const int more = g.repeat([&](int p) { return g.literal(",", space(value(p))); }, 0, -1, end);
        return g.literal("[", space(g.split(value(more), end)));
    }), next); }
    int value(int next) { return g.call(rule("value", [&] {
        const int end = Grammar::FINAL;
        const int word = g.words({"true", "false", "null"}, end);
        return g.any_of({object(end), array(end), string(end), number(false, end), word});
    }), next); }

    // A character of a string, also one that is written by its number. (Not half a surrogate pair.)
    int character(int next, bool by_number) {
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

  private:
    std::map<std::string, int> known{};
    template <class F> int rule(const char* name, F body) {
        const auto found = known.find(name);
        if (found != known.end()) return found->second;
        const int r = known[name] = g.new_rule(name);
        const int start = body(); // (which makes more rules)
        g.rules[(size_t)r].start = start;
        return r;
    }
    int exponent(int next) {
        const int digits = g.bytes('0', '9', g.split(g.bytes('0', '9', next), next));
        const int sign = g.any_of({g.literal("+", digits), g.literal("-", digits), digits});
        ByteSet e;
        e.set('e'), e.set('E');
        return g.split(g.bytes(e, sign), next);
    }

  public:
    explicit JsonRules(Grammar& g) : g(g) {}
};

// The keywords of a schema, together with those of the schemas that it refers to and of its allOf.
struct Keywords {
    std::map<std::string, sj::Value> words{};
    std::vector<std::pair<std::string, sj::Value>> properties{}; // name and schema
    std::vector<std::pair<std::string, sj::Value>> choices{};    // anyOf or oneOf, and its list
    std::set<std::string> required{};
    std::optional<std::set<std::string>> types{};
    bool with_properties = false;
    std::set<const sj::Node*> of_objects{}, of_arrays{}; // the schemas that say what else may be in one

    sj::Value operator[](const char* word) const {
        const auto found = words.find(word);
        return found == words.end() ? sj::Value{} : found->second;
    }
    sj::Value property(const std::string& name) const {
        for (auto& [known, schema] : properties)
            if (known == name) return schema;
        return {};
    }
};

struct SchemaReader {
    Grammar& g;
    JsonRules& json;
    const sj::Value root;

    SchemaReader(JsonRules& rules, sj::Value schema) : g(rules.g), json(rules), root(schema) {}

    int read(int next) {
        const int p = schema(root, next);
        while (!pending.empty()) {
            const auto [rule, v] = pending.back();
            pending.pop_back();
            const int start = schema(v, Grammar::FINAL, true);
            g.rules[(size_t)rule].start = start;
        }
        return p;
    }

  private:
    std::map<const sj::Node*, int> rule_of;
    std::vector<std::pair<int, sj::Value>> pending;
    int merges = 0;
    size_t copied = 0; // names of properties
    static constexpr int MAX_MERGES = 10000;
    static constexpr size_t MAX_NAMES = 10000, MAX_COPIED = 1 << 20;

    static bool is_annotation(const std::string& word) {
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

    // ---- Which schema it is
    sj::Value resolve(sj::Value ref) const {
        const std::string path = ref.str();
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
            at = at.is(sj::Array) ? at[(size_t)strtoul(step.c_str(), nullptr, 10)] : at[std::string_view(step)];
            i = end;
        }
        if (!at) DIE("$ref: there is no %s", in_quotes(path).c_str());
        return at;
    }
    int rule_for(sj::Value v) {
        const auto known = rule_of.find(v.node);
        if (known != rule_of.end()) return known->second;
        const int r = rule_of[v.node] = g.new_rule("schema");
        pending.push_back({r, v});
        return r;
    }

    // Before so many copies of k are made.
    void limit(const Keywords& k, size_t copies) {
        const size_t names = k.properties.size() + k.required.size();
        copied += copies * names;
        if (names > MAX_NAMES || copied > MAX_COPIED) DIE("the schema is too large: too many properties");
    }
    void gather(sj::Value v, Keywords& k, int depth = 0) {
        if (depth > 32) DIE("$ref: a schema that refers to itself");
        if (++merges > MAX_MERGES) DIE("the schema is too large: its anyOf, oneOf and allOf multiply");
        if (v.is(sj::True)) return;
        if (v.is(sj::False)) return k.types.emplace(), void();
        if (!v.is(sj::Object)) DIE("a schema must be an object, true or false");
        for (auto [word, value] : v.members()) {
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
    void gather_one(const std::string& word, sj::Value value, sj::Value owner, Keywords& k) {
        if (word == "type") gather_types(value, k);
        else if (word == "properties") {
            if (!value.is(sj::Object)) DIE("properties must be an object");
            k.with_properties = true;
            k.of_objects.insert(owner.node);
            std::map<std::string, sj::Value> last; // of those with one name
            std::set<std::string> known;
            for (auto& property : k.properties) known.insert(property.first);
            for (auto [name, schema] : value.members()) last[name] = schema;
            for (auto [name, schema] : value.members()) {
                auto one = last.extract(name);
                if (!one) continue;
                if (known.count(name)) DIE("properties: %s is described twice", in_quotes(name).c_str());
                k.properties.push_back({name, one.mapped()});
            }
            limit(k, 1);
        } else if (word == "required") {
            if (!value.is(sj::Array)) DIE("required must be a list");
            for (sj::Value name : value.items())
                if (!name.is(sj::String)) DIE("required must be a list of strings");
                else k.required.insert(name.str());
            limit(k, 0);
        } else if (is_refused(word)) {
            if (word == "uniqueItems" && value.is(sj::False)) return;
            DIE("%s is not supported", word.c_str());
        } else if (is_known(word)) {
            if (k.words.count(word) && k.words[word].raw() != value.raw())
                DIE("%s is given twice, by allOf, anyOf, oneOf or $ref", word.c_str());
            k.words[word] = value;
            if (word == "additionalProperties") k.of_objects.insert(owner.node);
            if (word == "items" || word == "prefixItems" || word == "additionalItems") k.of_arrays.insert(owner.node);
        } else if ((word == "$id" || word == "id") && owner.node != root.node && value.is(sj::String)) {
            DIE("%s is supported at the root only", word.c_str());
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
        if (k.types) { // both
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

    // ---- From schemas to positions
    int schema(sj::Value v, int next, bool here = false) { // here: not by another rule
        if (v.is(sj::Object) && !here) {
            bool only_ref = (bool)v["$ref"], plain = true; // plain: without a keyword
            for (auto [word, value] : v.members()) {
                only_ref = only_ref && (word == "$ref" || is_annotation(word));
                plain = plain && is_annotation(word);
            }
            if (only_ref) return g.call(rule_for(resolve(v["$ref"])), next);
            if (plain) return json.value(next);
        }
        Keywords k;
        gather(v, k);
        return from(k, next);
    }

    int from(const Keywords& k, int next) {
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

    int choice(Keywords k, int next) {
        const auto [word, list] = k.choices.back();
        k.choices.pop_back();
        const bool alone = k.words.empty() && k.choices.empty() && k.properties.empty() && k.required.empty() &&
                           !k.types;
        std::vector<int> starts;
        std::vector<Keywords> branches;
        for (sj::Value part : list.items()) {
            limit(k, 1);
            branches.push_back(k);
            gather(part, branches.back());
            starts.push_back(alone ? schema(part, next) : from(branches.back(), next));
        }
        if (word == "oneOf")
            for (size_t i = 0; i < branches.size(); i++)
                for (size_t j = 0; j < i; j++)
                    if (!differ(branches[i], branches[j]))
                        DIE("oneOf is supported where the branches differ in type, or in the constant of a required "
                            "property; anyOf may do");
        return g.any_of(starts);
    }

    // Whether no value has both forms, as far as it is plain to see.
    bool differ(const Keywords& a, const Keywords& b) {
        if (++merges > 100 * MAX_MERGES) DIE("the schema is too large: oneOf");
        const std::set<std::string> x = values_of(a), y = values_of(b);
        auto apart = [](const std::set<std::string>& x, const std::set<std::string>& y) {
            return std::none_of(x.begin(), x.end(), [&](auto& one) { return y.count(one); });
        };
        if (!x.empty() && !y.empty()) return apart(x, y);
        auto with_integers = [](std::set<std::string> types) {
            if (types.count("number")) types.insert("integer");
            return types;
        };
        if (a.types && b.types && apart(with_integers(*a.types), with_integers(*b.types))) return true;
        const std::set<std::string> object = {"object"};
        if (a.types.value_or(object) != object || b.types.value_or(object) != object) return false;
        for (auto& [name, schema] : a.properties) {
            if (!a.required.count(name) || !b.required.count(name) || !b.property(name)) continue;
            Keywords p, q;
            gather(schema, p), gather(b.property(name), q);
            const std::set<std::string> x = values_of(p), y = values_of(q);
            if (!x.empty() && !y.empty() && apart(x, y)) return true;
        }
        return false;
    }
    static std::set<std::string> values_of(const Keywords& k) { // of const or enum, if they are strings
        std::set<std::string> all;
        if (k["const"].is(sj::String)) all.insert(k["const"].str());
        else for (sj::Value v : k["enum"].items())
            if (v.is(sj::String)) all.insert(v.str());
            else return {};
        return all;
    }

    int constant(const Keywords& k, int next) {
        for (auto& [word, value] : k.words)
            if (word != "const" && word != "enum") DIE("%s beside const or enum is not supported", word.c_str());
        if (k["const"] && k["enum"]) DIE("const beside enum is not supported");
        if (k.with_properties || !k.required.empty()) DIE("properties beside const or enum are not supported");
        if (k["enum"] && (!k["enum"].is(sj::Array) || k["enum"].size() == 0)) DIE("enum must be a list");
        std::vector<std::string> all;
        auto add = [&](sj::Value v) {
            static const char* NAMES[] = {"", "null", "boolean", "boolean", "number", "string", "array", "object"};
            int64_t n;
            const bool whole = v.is(sj::Number) && (v.integer(&n) || v.number() == std::floor(v.number()));
            if (!k.types || k.types->count(NAMES[v.type()]) || (whole && k.types->count("integer")))
                all.push_back(v.is(sj::Number) ? std::string(v.raw()) : sj::dump(v));
        };
        if (k["const"]) add(k["const"]);
        for (sj::Value v : k["enum"].items()) add(v);
        return g.words(std::move(all), next);
    }

    int count(const Keywords& k, const char* word, int otherwise) const {
        const sj::Value v = k[word];
        if (!v) return otherwise;
        const double n = v.number(-1);
        if (!(n >= 0 && n <= Grammar::MAX_REPEAT && n == std::floor(n)))
            DIE("%s must be an integer from 0 to %d", word, Grammar::MAX_REPEAT);
        return (int)n;
    }
    int in_quotes_of(const Pattern& p, int next) {
        return g.literal("\"", g.emit(p, g.literal("\"", next), IN_STRING));
    }

    int string(const Keywords& k, int next) {
        const bool bounded = k["minLength"] || k["maxLength"];
        if ((bool)k["pattern"] + (bool)k["format"] + bounded > 1)
            DIE("%s beside %s is not supported", k["pattern"] ? "pattern" : "format",
                bounded ? "minLength and maxLength" : "format");
        if (k["pattern"]) {
            if (!k["pattern"].is(sj::String)) DIE("pattern must be a string");
            return in_quotes_of(RegexReader(g, k["pattern"].str()).within(), next);
        }
        if (k["format"]) return in_quotes_of(RegexReader(g, form(k["format"].str())).whole(), next);
        if (!bounded) return json.string(next);
        const int least = count(k, "minLength", 0), most = count(k, "maxLength", -1);
        if (most >= 0 && most < least) return g.never();
        auto character = [&](int p) { return json.character(p, false); };
        return g.literal("\"", g.repeat(character, least, most, g.literal("\"", next)));
    }

    static std::string form(const std::string& name) {
        const std::string date = "(?:[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-"
                                 "(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])))";
        const std::string time = "(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?"
                                 "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))";
        const std::string label = "[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?", host = label + "(?:\\." + label + "){0,4}";
        const std::string byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])", group = "[0-9a-f]{1,4}";
        const std::string n = "[0-9]{1,4}", days = n + "D", months = n + "M(?:" + days + ")?", seconds = n + "S";
        const std::string minutes = n + "M(?:" + seconds + ")?";
        const std::string clock = "(?:" + n + "H(?:" + minutes + ")?|" + minutes + "|" + seconds + ")";
        const std::map<std::string, std::string> all = {
            {"date", date}, {"time", time}, {"date-time", date + "T" + time},
            {"duration", "P(?:" + n + "W|(?:" + days + "|" + months + "|" + n + "Y(?:" + months + ")?)(?:T" + clock +
                         ")?|T" + clock + ")"},
            {"email", "[A-Za-z0-9_+-]{1,32}(?:\\.[A-Za-z0-9_+-]{1,32}){0,3}@" + host}, {"hostname", host},
            {"ipv4", byte + "(?:\\." + byte + "){3}"}, {"ipv6", group + "(?::" + group + "){7}"},
            {"uuid", "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"},
        };
        const auto found = all.find(name);
        if (found == all.end()) DIE("format: %s is not supported", in_quotes(name).c_str());
        return found->second;
    }

    int number(const Keywords& k, bool integer, int next) {
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

    int array(const Keywords& k, int next) {
        if (k.of_arrays.size() > 1) DIE("items of several schemas (allOf, anyOf, $ref) are not supported");
        std::vector<sj::Value> first;
        sj::Value rest = k["items"];
        const sj::Value list = rest.is(sj::Array) ? rest : k["prefixItems"];
        if (list && !list.is(sj::Array)) DIE("prefixItems must be a list");
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
        // From the end: after how many items one is, and what may follow.
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

    int object(const Keywords& k, int next) {
        const sj::Value others = k["additionalProperties"];
        if (others && k.of_objects.size() > 1)
            DIE("additionalProperties beside the properties of another schema (allOf, anyOf, $ref) is not supported");
        if (!others && !k.with_properties && k.required.empty()) return json.object(next);
        const bool open = others ? !others.is(sj::False) : !k.with_properties;
        auto other_value = [&](int p) {
            return others && !others.is(sj::True) ? g.call(rule_for(others), p) : json.value(p);
        };
        auto properties = k.properties;
        std::vector<std::string> names;
        for (auto& name : k.required)
            if (!k.property(name)) {
                if (others && !open) return g.never();
                properties.push_back({name, {}});
            }
        for (auto& [name, schema] : properties) names.push_back(name);

        // From the end. `begun`, `fresh`: where one is after some of the properties, and after none.
        const int end = json.space(g.literal("}", next));
        int begun = end, fresh = end;
        if (open) {
            const int loop = g.add(Grammar::SPLIT, 0, end);
            const int pair = other_name(names, g.literal(":", json.space(other_value(loop))));
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

    // A property's name that is none of these, in quotes: of characters that need no escape.
    int other_name(std::vector<std::string> names, int next) {
        static const Codes ESCAPED = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
        const int quote = g.literal("\"", next), any = g.repeat([&](int p) {
            return g.character(complement(ESCAPED), p, RAW);
        }, 0, -1, quote);
        std::map<std::string, std::pair<bool, Codes>> branches; // by what is begun: is it a name; what goes on
        branches[""];
        for (auto& name : names) {
            std::string begun;
            for (const char* p = name.data(); p < name.data() + name.size();) {
                const char* from = p;
                const uint32_t c = utf8_read(p);
                branches[begun].second.push_back({c, c});
                begun.append(from, (size_t)(p - from));
                branches[begun];
            }
            branches[begun].first = true;
        }
        std::map<std::string, int> made;
        for (auto it = branches.rbegin(); it != branches.rend(); ++it) { // longer ones first
            const auto& [begun, branch] = *it;
            std::vector<int> ways = {g.character(without(complement(ESCAPED), branch.second), any, RAW)};
            if (!branch.first) ways.push_back(quote);
            for (auto [c, same] : tidy_singles(branch.second)) {
                std::string character;
                utf8_append(character, c);
                if (c >= 0x20 && c != '"' && c != '\\') ways.push_back(g.literal(character, made[begun + character]));
            }
            made[begun] = g.any_of(ways);
        }
        return g.literal("\"", made[""]);
    }
    static Codes tidy_singles(Codes c) {
        std::sort(c.begin(), c.end());
        c.erase(std::unique(c.begin(), c.end()), c.end());
        return c;
    }
};

// -------------------------------------------------------------------------------------- grammars of all that is asked
template <class F> Grammar grammar_of(F root) { // root(grammar, where to go on): the position where it begins
    Grammar g;
    const int start = root(g, Grammar::FINAL);
    g.rules[0].start = start;
    g.finish();
    return g;
}
inline Grammar grammar_of_schema(sj::Value schema) {
    return grammar_of([&](Grammar& g, int end) {
        JsonRules json(g);
        return SchemaReader(json, schema).read(end);
    });
}
inline Grammar grammar_of_json_object() {
    return grammar_of([](Grammar& g, int end) { return JsonRules(g).object(end); });
}
inline Grammar grammar_of_regex(std::string_view pattern) {
    return grammar_of([&](Grammar& g, int end) { return g.emit(RegexReader(g, pattern).whole(), end, RAW); });
}
inline Grammar grammar_of_choice(const std::vector<std::string>& words) {
    return grammar_of([&](Grammar& g, int end) { return g.words(words, end); });
}
inline Grammar grammar_of_gbnf(std::string_view text) {
    Grammar g;
    GbnfReader(g, text).read();
    g.finish();
    return g;
}
