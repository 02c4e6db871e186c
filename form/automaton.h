// form/automaton.h: the position of an answer in its grammar, and the tokens that may come next.
//
// - A state of the Automaton is a set of threads. A thread is a position in a rule, and a node: where it returns to. A
//   node is a set of threads, too: all calls of one rule from one state share a node, so that states stay small however
//   ambiguous a grammar is (as in Earley's parser). States and nodes are unique by content. They are created when first
//   needed, and so are the transitions between states.
// - A mask comes from a walk over the trie of all tokens (masks.cpp). The walk does not depend on nodes: it runs once
//   per set of positions, and records where a token would return from the rule in which it began. Only the walk behind
//   such returns runs for each state anew. So all strings of a JSON text share one walk.
// - In x{0,1000} the copies of x that are further from the end than the longest token share a mask.
//
// Limits. A grammar may be hostile: a state has at most MAX_THREADS, a mask is made within MAX_WORK, and an automaton
// that grows beyond its share of memory forgets what it can recompute. Tokens beyond the limits on threads and work are
// not allowed. Some token is always allowed, since every position leads to an end and the tokens of one byte are tried
// first.
#pragma once
#include "form/grammar.h"
#include "form/vocabulary.h"
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

// Sorted lists of numbers, each stored once and identified by its index.
struct Lists {
    std::vector<uint64_t> items{};
    std::vector<size_t> begins{0};
    std::unordered_multimap<uint64_t, int> by_hash{};

    size_t size() const { return begins.size() - 1; }
    const uint64_t* begin(int i) const { return items.data() + begins[(size_t)i]; }
    const uint64_t* end(int i) const { return items.data() + begins[(size_t)i + 1]; }
    int intern(const std::vector<uint64_t>& list);
    size_t bytes() const { return items.size() * sizeof(uint64_t) + size() * 64; }
};

// A set of numbers that is cleared often.
struct Seen {
    struct Slot { uint64_t x; uint32_t round; };
    std::vector<Slot> slots = std::vector<Slot>(64, Slot{0, 0});
    size_t used = 0;
    uint32_t round = 1;

    void clear() { round++, used = 0; }
    bool insert(uint64_t x); // false: already there

  private:
    void grow();
};

struct Matcher; // matcher.h

// The states of a grammar, created when needed. All answers with the same form share it; a user must hold
// `mutex`, as a Matcher does.
struct Automaton {
    static constexpr size_t MAX_THREADS = 4096;    // per state
    static constexpr size_t MAX_CALLERS = 1 << 16; // that nodes copy from others, when a state is created
    static constexpr size_t MAX_WORK = 100'000;    // per mask: threads of the states that it visits or creates,
    static constexpr size_t MAX_STEPS = 2'000'000; // ... and nodes of the tries
    static constexpr size_t ALL_MEMORY = 512 << 20, LEAST_MEMORY = 1 << 20, MOST_MEMORY = 16 << 20;
    static constexpr size_t MAX_MASKS = 128;       // cached; their parts are limited by bytes
    using Mask = std::vector<uint32_t>;            // one bit per token, and a word for TokenTrie's `none`

    const Grammar grammar;
    const std::shared_ptr<const Vocabulary> vocabulary;
    std::mutex mutex;
    std::set<Matcher*> matchers;
    static inline std::atomic<size_t> alive{0}, grammar_bytes{0}; // of all automata

    Automaton(Grammar&& g, std::shared_ptr<const Vocabulary> v);
    Automaton(const Automaton&) = delete;
    ~Automaton() { alive--, grammar_bytes -= own_bytes(); }

    int start();
    // The state behind a byte. 0: the byte is not allowed.
    int next(int state, uint8_t byte) {
        const size_t e = (size_t)state * (size_t)grammar.classes + grammar.byte_class[byte];
        return edges[e].to >= 0 ? edges[e].to : make(state, byte);
    }
    bool ends(int state) const; // the text may end here
    // The byte that must come next. -1: several may, or the text may end.
    int only_byte(int state) const;
    bool goes_on(int state) const { return states.end(state) - states.begin(state) > ends(state); }

    // The tokens that may come next. States with the same tokens mostly share a mask.
    std::shared_ptr<const Mask> mask(int state);
    size_t bytes() const {
        return states.bytes() + nodes.bytes() + edges.size() * sizeof(Edge) + mask_of.size() * 48 +
               masks.size() * vocabulary->words() * 4 + local_bytes[0] + local_bytes[1] + local_bytes[2];
    }
    size_t limit() const { return std::clamp(ALL_MEMORY / alive, LEAST_MEMORY, MOST_MEMORY); }
    // Forgets all states and nodes except those of running answers. An answer whose own states are too large (nested
    // hundreds of thousands deep) fails: its state becomes 0.
    void collect();
    size_t state_count() const { return states.size(); }
    size_t parts_made = 0; // parts of masks, each made by a walk over a trie

  private:
    // A thread: a position, and the node with the threads that it returns to. Nodes below FIRST hold none: at BOTTOM
    // the text ends; the UNKNOWN ones stand for any node, in states that masks are made from. A thread that returns to
    // one moves to MARK.
    static constexpr int BOTTOM = 0, UNKNOWN = 1, FIRST = 32;
    static constexpr uint32_t MARK = UINT32_MAX, LAST_CALL = 1u << 31; // (LAST_CALL and a rule: see drain)
    static constexpr uint64_t thread(uint32_t position, int node) { return (uint64_t)position << 32 | (uint32_t)node; }
    static uint32_t position_of(uint64_t t) { return (uint32_t)(t >> 32); }
    static int node_of(uint64_t t) { return (int)(uint32_t)t; }

    struct Edge {
        int to = -1;       // not created yet
        uint32_t walk = 0; // the last walk that passed it
        uint32_t work = 0; // cost of creating it, in threads of a state
    };
    // The part common to all states with threads at the same positions: the tokens that stay within the rules in which
    // they began, and the trie nodes that return, with the node that they return from.
    struct Local {
        const std::vector<uint32_t>* words = nullptr;      // these tokens, as a set of the vocabulary's; or null,
        std::vector<std::pair<uint32_t, uint32_t>> bits{}; // ... and the nonzero words of a mask
        std::vector<std::pair<uint32_t, int>> returns{};
    };

    const std::array<std::vector<uint32_t>, 2> like; // positions with the same masks: of short tokens, of all tokens
    Lists states, nodes; // nodes are numbered from FIRST
    std::vector<Edge> edges; // (states, classes)
    std::vector<uint8_t> returning; // (states) has threads at MARK
    std::array<std::unordered_map<int, std::shared_ptr<Local>>, Vocabulary::KINDS> locals; // by form,
    std::array<size_t, Vocabulary::KINDS> local_bytes{};
    std::map<std::vector<int>, std::shared_ptr<Mask>> masks; // by the parts that they depend on
    std::unordered_map<int, std::shared_ptr<Mask>> mask_of;  // by state
    uint32_t walks = 0;
    size_t work = 0, steps = 0;

    // Scratch of settle().
    std::vector<uint64_t> found;
    Seen seen;
    size_t room = 0, spent = 0; // remaining for callers; positions and callers visited
    std::map<int, std::vector<uint64_t>> calls; // callers, by the rule's rank
    std::vector<int> by_rank;

    size_t own_bytes() const {
        return grammar.at.size() * (sizeof(Grammar::Position) + 8) + grammar.sets.size() * 96 + (1 << 16);
    }

    void forget();
    int intern_state(const std::vector<uint64_t>& threads);
    int make(int state, uint8_t byte);
    int settle(std::vector<uint64_t>& todo, bool may_return);
    void drain(std::vector<uint64_t>& todo, bool may_return);
    std::shared_ptr<Mask> make_mask(int state);
    int form_of(int state, const std::vector<uint32_t>& like, std::vector<int>& known);
    int returned(int node);
    void make_local(Local& local, Vocabulary::Kind kind, int form);
    uint32_t none() const { return (uint32_t)vocabulary->words() * 32; } // its bit has a word of its own
    static void allow(Mask& bits, uint32_t token) { bits[token / 32] |= 1u << token % 32; }
    int free_characters(int state);
    int after_any_character(int state, bool* some);
    template <class F> void walk(const TokenTrie& trie, uint32_t n, int state, Mask& bits, F on_return);
};
