// form/regex.h: regular expressions as patterns: the part that JavaScript, Python and RE2 agree on.
#pragma once
#include "form/grammar.h"
#include <string_view>

// All throw Error, which names the byte. whole: the text that matches is all of it.
Pattern regex_whole(Grammar& g, std::string_view regex);
// ... or holds it somewhere, as JSON Schema's "pattern" means it.
Pattern regex_within(Grammar& g, std::string_view regex);
Grammar grammar_of_regex(std::string_view regex); // the whole
