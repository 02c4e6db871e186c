// form/grammar.h: a grammar over bytes. Regular expressions, lists of choices, GBNF (regex.h, gbnf.h) and JSON schemas
// (schema.h) are compiled to one; an Automaton runs it.
//
// A Grammar is a set of rules. Each rule is a nondeterministic automaton over bytes, whose positions may call other
// rules. It may come from a hostile client: the number of positions is limited, and so are memory and steps of the
// construction (spend).
#pragma once
#include "base/stop_flag.h"
#include "form/pattern.h"
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

// An added token of the vocabulary ("<tool_call>") is written as ADDED_TOKEN and its name; no text holds this byte.
constexpr char ADDED_TOKEN = '\xFF';

using ByteSet = std::bitset<256>;

// Set by the server for the thread that reads a request: non-zero once the client has gone, which stops the building.
inline thread_local const StopFlag* form_stop = nullptr;

struct Grammar {
    // BYTES: a byte of set y, then x. SPLIT: x or y. CALL: rule y, then x. FINAL: the rule ends. NEVER: dead end.
    enum Op : uint8_t { BYTES, SPLIT, CALL, END, NEVER };
    struct Position {
        Op op;
        uint32_t x, y;
    };
    struct Rule {
        std::string name; // for error messages
        int start = -1;
        bool nullable = false; // the empty text matches
        int rank = 0;          // callers before callees
    };
    static constexpr size_t MAX_POSITIONS = 1 << 18;
    static constexpr size_t MAX_TEXT = 1 << 20;   // bytes of a pattern's source
    static constexpr size_t MAX_BYTES = 64 << 20; // allocated until the grammar is complete,
    static constexpr size_t MAX_STEPS = 4'000'000; // ... and steps of about 50 ns: allocations, comparisons
    static constexpr int FINAL = 0;         // the position where every rule ends
    static constexpr int MAX_REPEAT = 100000;

    std::vector<Position> at{{END, 0, 0}};
    std::vector<ByteSet> sets;
    std::vector<Rule> rules{{"root"}};      // the first is the start rule
    std::array<uint8_t, 256> byte_class{};  // bytes that no set distinguishes share a class
    int classes = 1;

    // Consecutive copies of the same positions, the last of the text first; `start` is where the first begins. Each
    // leads only to the one before it in the list, and (if it is optional) to where the first leads.
    struct Copies { uint32_t base, size, count, start; };
    std::vector<Copies> copies;

    // Counts steps and bytes of the construction. Throws if they exceed the limit, or if the client has gone.
    void spend(size_t steps, size_t bytes = 0);

    // ---- Building, from the end: the beginning of a text is made last. Each function takes the following position and
    // returns the position where its part begins.
    int add(Op op, int x, int y);
    int bytes(const ByteSet& set, int next);
    int bytes(uint32_t first, uint32_t last, int next);
    int split(int a, int b) { return add(SPLIT, a, b); }
    int call(int rule, int next) { return add(CALL, next, rule); }
    int never() { return add(NEVER, 0, 0); }
    int literal(std::string_view text, int next);
    int any_of(const std::vector<int>& starts);
    int words(std::vector<std::string> list, int next); // any one of the words, as a trie
    using Body = std::function<int(int)>; // makes one copy in front of a position
    int repeat(const Body& body, int least, int most, int next); // most -1: any number
    int emit(const Pattern& p, int next, Coding coding);
    int character(const Codes& codes, int next, Coding coding); // one of the set, as UTF-8
    int new_rule(const std::string& name);

    // ---- Completes all rules. Throws Error if nothing matches, or if a rule is left-recursive.
    void finish();

    // Groups positions that allow the same tokens of up to `longest` bytes, apart from where they return to. Returns
    // each position's representative, the first of its group.
    std::vector<uint32_t> alike(size_t longest) const;

  private:
    struct Hash { size_t operator()(const ByteSet& s) const { return std::hash<ByteSet>()(s); } };
    std::unordered_map<ByteSet, int, Hash> set_number;
    size_t steps = 0, bytes_taken = 0; // so far

    int in_copies(int count, int p, const Body& copy);
    bool passes_empty(const Copies& c) const;
    void utf8(std::vector<int>& starts, uint32_t low, uint32_t high, int n, uint32_t base, int* tails);
    std::vector<bool> least_fixpoint(bool any) const;
    std::set<int> called_first(const Rule& rule) const;
    void rank_rules();
    void find_classes();
};

// A whole grammar. root(grammar, following position) returns the position where it begins. Throws Error, as finish()
// does.
Grammar grammar_of(const std::function<int(Grammar&, int)>& root);
// One of the words.
Grammar grammar_of_choice(const std::vector<std::string>& words);
