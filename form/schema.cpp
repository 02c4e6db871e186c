// form/schema.cpp: grammars of JSON, see schema.h.
#include "form/schema.h"
#include "form/json_rules.h"
#include "form/schema_reader.h"

Grammar grammar_of_schema(sj::Value schema) {
    return grammar_of([&](Grammar& g, int end) {
        JsonRules json(g);
        return SchemaReader(json, schema).read(end);
    });
}
Grammar grammar_of_json_object() {
    return grammar_of([](Grammar& g, int end) { return JsonRules(g).object(end); });
}
