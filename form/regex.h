// form/regex.h: regular expressions as patterns: the common subset of JavaScript, Python and RE2.
#pragma once
#include "form/grammar.h"
#include <string_view>

// All throw Error with the byte. whole: the whole text matches.
Pattern regex_whole(Grammar& g, std::string_view regex);
// ... a part of the text matches, as for JSON Schema's "pattern".
Pattern regex_within(Grammar& g, std::string_view regex);
Grammar grammar_of_regex(std::string_view regex); // the whole
