// form/schema_reader.h: a JSON schema as positions of a grammar. schema_keywords.cpp finds the keywords that hold for a
// value, schema.cpp makes the texts that they allow.
#pragma once
#include "form/grammar.h"
#include "form/json_rules.h"
#include "sj.h"
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

// The keywords of a schema, together with those of the schemas that it refers to and of its allOf.
struct Keywords {
    std::map<std::string, sj::Value> words{};
    std::vector<std::pair<std::string, sj::Value>> properties{}; // name and schema
    std::vector<std::pair<std::string, sj::Value>> choices{};    // anyOf or oneOf, and its list
    std::set<std::string> required{};
    std::optional<std::set<std::string>> types{};
    bool with_properties = false;
    std::set<const sj::Node*> of_objects{}, of_arrays{}; // the schemas that say what else may be in one

    sj::Value operator[](const char* word) const;
    sj::Value property(const std::string& name) const;
};

// Throws Error: a keyword that is not supported, a schema that is too large.
struct SchemaReader {
    Grammar& g;
    JsonRules& json;
    const sj::Value root;

    SchemaReader(JsonRules& rules, sj::Value schema) : g(rules.g), json(rules), root(schema) {}

    int read(int next); // the position where a value that the schema allows begins

  private:
    std::map<const sj::Node*, int> rule_of;
    std::vector<std::pair<int, sj::Value>> pending;
    int merges = 0;
    size_t copied = 0; // names of properties
    static constexpr int MAX_MERGES = 10000;
    static constexpr size_t MAX_NAMES = 10000, MAX_COPIED = 1 << 20;

    static bool is_annotation(const std::string& word);
    sj::Value resolve(sj::Value ref) const;
    int rule_for(sj::Value v);
    void limit(const Keywords& k, size_t copies);
    void gather(sj::Value v, Keywords& k, int depth = 0);
    void gather_one(const std::string& word, sj::Value value, sj::Value owner, Keywords& k);
    int schema(sj::Value v, int next, bool here = false);
    int from(const Keywords& k, int next);
    int choice(Keywords k, int next);
    bool differ(const Keywords& a, const Keywords& b);
    int constant(const Keywords& k, int next);
    int count(const Keywords& k, const char* word, int otherwise) const;
    int in_quotes_of(const Pattern& p, int next) {
        return g.literal("\"", g.emit(p, g.literal("\"", next), IN_STRING));
    }
    int string(const Keywords& k, int next);
    int number(const Keywords& k, bool integer, int next);
    int array(const Keywords& k, int next);
    int object(const Keywords& k, int next);
    int other_name(std::vector<std::string> names, int next);
};
