// form/schema_reader.h: compiles a JSON schema to positions of a grammar. schema_keywords.cpp collects the keywords
// that apply to a value, schema.cpp builds the texts that they allow.
#pragma once
#include "form/grammar.h"
#include "form/json_rules.h"
#include "sj.h"
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

// The keywords of a schema, merged with those of the schemas that it refers to and of its allOf. Names of properties
// are stored in the reader.
struct Keywords {
    std::map<std::string, sj::Value> words{};
    std::vector<std::pair<std::string_view, sj::Value>> properties{}; // name and schema
    std::map<std::string_view, size_t> places{};                      // of the names in `properties`
    std::vector<std::pair<std::string, sj::Value>> choices{};         // anyOf or oneOf, and its list
    std::set<std::string_view> required{};
    std::optional<std::set<std::string>> types{};
    bool with_properties = false;
    std::set<const sj::Node*> of_objects{}, of_arrays{}; // the schemas that define additional members

    sj::Value operator[](const char* word) const;
    sj::Value property(std::string_view name) const;
    size_t bytes() const;
};

// Distinguishes a branch of oneOf: the texts that its value is one of, its types, and such texts of its required
// properties.
struct Distinction {
    using Texts = std::vector<int>; // numbers of texts, sorted
    Texts values{};
    unsigned types = 0; // one bit per type; 0: none given
    bool object = false;
    std::map<std::string_view, Texts> constants{};
};

// Throws Error: an unsupported keyword, or a schema that is too large.
//
// Recursion depth is bounded by constants: a nested schema that may itself contain schemas becomes a rule, and rules
// are read one after the other.
struct SchemaReader {
    Grammar& g;
    JsonRules& json;
    const sj::Value root;

    SchemaReader(JsonRules& rules, sj::Value schema) : g(rules.g), json(rules), root(schema) {}

    int read(int next); // returns the position where an allowed value begins

  private:
    using Members = std::unordered_map<std::string, sj::Value>;
    std::unordered_map<const sj::Node*, int> rule_of;
    std::vector<std::pair<int, sj::Value>> pending;
    std::unordered_map<const sj::Node*, sj::Value> resolved;  // by the string of a $ref
    std::unordered_map<const sj::Node*, Members> members_of;  // objects on the paths to them
    std::set<std::string, std::less<>> names;
    int merges = 0, choosing = 0;
    static constexpr int MAX_MERGES = 10000, MAX_CHOOSING = 64;
    static constexpr size_t MAX_NAMES = 10000;

    static bool is_annotation(const std::string& word);
    sj::Value resolve(sj::Value ref);
    sj::Value member(sj::Value v, const std::string& step);
    std::string_view name_of(const std::string& text);
    int rule_for(sj::Value v);
    Keywords copy(const Keywords& k);
    void gather(sj::Value v, Keywords& k, int depth = 0);
    void gather_one(const std::string& word, sj::Value value, sj::Value owner, Keywords& k);
    void gather_properties(sj::Value value, sj::Value owner, Keywords& k);
    int schema(sj::Value v, int next);
    int here(sj::Value v, int next);
    int from(const Keywords& k, int next);
    int choice(Keywords k, int next);
    Distinction distinction(const Keywords& k, std::map<std::string, int>& numbers);
    Distinction::Texts texts_of(const Keywords& k, std::map<std::string, int>& numbers);
    void check_distinct(const std::vector<Distinction>& all);
    bool differ(const Distinction& a, const Distinction& b);
    int constant(const Keywords& k, int next);
    int count(const Keywords& k, const char* word, int otherwise) const;
    int in_quotes_of(const Pattern& p, int next) {
        return g.literal("\"", g.emit(p, g.literal("\"", next), IN_STRING));
    }
    int string(const Keywords& k, int next);
    int formatted(const std::string& name, int next);
    int number(const Keywords& k, bool integer, int next);
    int array(const Keywords& k, int next);
    int object(const Keywords& k, int next);
    int other_name(const Keywords& k, const std::vector<std::string_view>& more, int next);
};
