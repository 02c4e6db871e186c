// form/pattern_reader.h: the reading position in a pattern's text, for the readers of regular expressions and GBNF.
#pragma once
#include "base/error.h"
#include "form/grammar.h"
#include <string>
#include <string_view>

struct PatternReader {
  protected:
    Grammar& grammar;
    std::string_view text;
    size_t at = 0;
    int depth = 0;
    static constexpr int MAX_DEPTH = 200;

    PatternReader(Grammar& g, std::string_view source, const char* kind);
    ~PatternReader() = default; // (never deleted through this type)
    virtual std::string place() const = 0; // for error messages
    [[noreturn]] void fail(const char* what) const { DIE("%s: %s", place().c_str(), what); }

    char peek(size_t ahead = 0) const { return at + ahead < text.size() ? text[at + ahead] : '\0'; }
    bool more() const { return at < text.size(); }
    bool accept(char c) { return more() && peek() == c ? (at++, true) : false; }
    // Called for each part of a pattern, before memory is allocated for it.
    void spend_part() { grammar.spend(1, sizeof(Pattern) + 64); }
    uint32_t code();
    int number();
    uint32_t hex(size_t n);
};
