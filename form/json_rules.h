// form/json_rules.h: JSON texts of any kind, as rules of a grammar.
#pragma once
#include "form/grammar.h"
#include "sj.h"
#include <cstdint>
#include <functional>
#include <map>
#include <string>

// What all JSON texts are made of, as rules of a grammar, each made when it is first called.
struct JsonRules {
    Grammar& g;

    explicit JsonRules(Grammar& grammar) : g(grammar) {}

    int space(int next);
    int string(int next);
    int number(bool integer, int next);
    int object(int next);
    int array(int next);
    int value(int next);

    // A given value, in each of its spellings: blanks, and characters by their numbers where JSON or ASCII asks for it.
    int constant(sj::Value v, int next);

    // A character of a string, also one that is written by its number. (Not half a surrogate pair.)
    int character(int next, bool by_number);

  private:
    std::map<std::string, int> known{};
    int rule(const char* name, const std::function<int()>& body);
    int exponent(int next);
    int by_number(uint32_t unit, int next);
    int spelled(uint32_t c, int next);
};
