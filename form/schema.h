// form/schema.h: JSON schemas as grammars.
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
#include "sj.h"

// Throws Error: a keyword that is not supported, or no value at all.
Grammar grammar_of_schema(sj::Value schema);
Grammar grammar_of_json_object(); // any object
