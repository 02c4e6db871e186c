// form/json_rules.h: JSON texts as rules of a grammar.
#pragma once
#include "form/grammar.h"
#include "sj.h"
#include <cstdint>
#include <functional>
#include <map>
#include <string>

// The building blocks of JSON texts, as rules of a grammar, each created when first called.
struct JsonRules {
    Grammar& g;

    explicit JsonRules(Grammar& grammar) : g(grammar) {}

    int space(int next);
    int string(int next);
    int number(bool integer, int next);
    int object(int next);
    int array(int next);
    int value(int next);

    // A constant, in each of its spellings: blanks, and characters escaped by number where JSON or ASCII needs it.
    int constant(sj::Value v, int next);

    // A character of a string, also escaped by its number. (Not half a surrogate pair.)
    int character(int next, bool by_number);

  private:
    std::map<std::string, int> known{};
    int rule(const char* name, const std::function<int()>& body);
    int exponent(int next);
    int by_number(uint32_t unit, int next);
    int spelled(uint32_t c, int next);
};
