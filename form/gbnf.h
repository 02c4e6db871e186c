// form/gbnf.h: grammars in GBNF.
#pragma once
#include "form/grammar.h"
#include <string_view>

// llama.cpp's notation, which vLLM's structured_outputs.grammar accepts, too:
//     root ::= "yes" | "no" reason?      # a comment
//     reason ::= ", because " [^.]+ "."
// Strings and classes accept \n \r \t \\ \" \[ \] \- \^ \xHH \uHHHH \UHHHHHHHH; . is any character; ( ) | * + ? {m,n}.
// Throws Error with the line.
Grammar grammar_of_gbnf(std::string_view text);
