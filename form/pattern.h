// form/pattern.h: sets of characters, and patterns over characters and rules. The readers of regular expressions and of
// GBNF create patterns; a Grammar is made of them.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

using Codes = std::vector<std::pair<uint32_t, uint32_t>>; // code points: ranges, first and last
constexpr uint32_t LAST_CODE = 0x10FFFF;

// Sorted, without overlaps.
Codes tidy(Codes c);
Codes complement(const Codes& c);
Codes without(const Codes& a, const Codes& b);

// A pattern over characters and rules: the parsed form of regular expressions and GBNF.
struct Pattern {
    enum Kind { CHARACTER, SEQUENCE, CHOICE, REPEAT, CALL, BEGIN, END } kind = SEQUENCE;
    std::vector<Pattern> parts{};
    Codes codes{};
    int least = 0, most = 0; // of REPEAT; most -1: any number
    int rule = 0;

    static Pattern character(Codes c) { return {CHARACTER, {}, std::move(c)}; }
    static Pattern repeat(Pattern p, int least, int most) { return {REPEAT, {std::move(p)}, {}, least, most}; }
};

// How characters are written: as they are, or as in a JSON string.
enum Coding { RAW, IN_STRING };
