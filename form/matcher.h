// form/matcher.h: one answer constrained by a form.
//
//   auto automaton = std::make_shared<Automaton>(grammar_of_regex("[0-9]{3}-[a-z]+"), vocabulary);
//   Matcher m(automaton);
//   m.mask();                         // one bit for each allowed token
//   m.advance(id);                    // false: the answer has left the grammar
//   m.may_end(), m.must_end();
//   m.forced(most, &over);            // the text that must come next
#pragma once
#include "form/automaton.h"
#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

// The position of one answer in an Automaton.
struct Matcher {
    explicit Matcher(std::shared_ptr<Automaton> a);
    Matcher(const Matcher&) = delete;
    ~Matcher();

    void begin();
    // False: the text has left the grammar; nothing may follow.
    bool advance(std::string_view bytes);
    bool advance(int id) { return advance(automaton->vocabulary->bytes(id)); }

    // The text that must come next, up to `most` bytes of it, and whether the answer is complete after it.
    std::string forced(size_t most, bool* over) const;

    std::shared_ptr<const Automaton::Mask> mask();
    void mask(uint32_t* out) { // (words)
        std::copy_n(mask()->begin(), automaton->vocabulary->words(), out);
    }
    bool may_end() const;
    bool must_end() const;

    std::shared_ptr<Automaton> automaton;
    int state; // (collect() changes it)
};
