// form/schema.h: JSON schemas as grammars.
//
//   Grammar g = grammar_of_schema(text);
//
// Every text of the grammar is valid JSON that the schema allows; the converse does not hold. Properties are in the
// schema's order, numbers have at most 15 digits, and between tokens there is one blank, or a line break and blanks, or
// nothing. With `properties` and without `additionalProperties` no others are allowed. A missing type is derived from
// the keywords. A keyword that cannot be enforced is refused by name; one unknown to all drafts of JSON Schema is
// ignored.
#pragma once
#include "form/grammar.h"
#include "sj.h"

// Throws Error: an unsupported keyword, or a schema that no value satisfies.
Grammar grammar_of_schema(sj::Value schema);
Grammar grammar_of_json_object(); // any object
