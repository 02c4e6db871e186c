// form/matcher.cpp: an answer's path through its automaton, see matcher.h.
#include "form/matcher.h"

Matcher::Matcher(std::shared_ptr<Automaton> a) : automaton(std::move(a)) {
    std::lock_guard lock(automaton->mutex);
    automaton->matchers.insert(this);
    state = automaton->start();
}

Matcher::~Matcher() {
    std::lock_guard lock(automaton->mutex);
    automaton->matchers.erase(this);
}

void Matcher::begin() {
    std::lock_guard lock(automaton->mutex);
    state = automaton->start();
}

bool Matcher::advance(std::string_view bytes) {
    std::lock_guard lock(automaton->mutex);
    for (size_t i = 0; i < bytes.size() && state; i++) {
        state = automaton->next(state, (uint8_t)bytes[i]);
        if (automaton->bytes() > automaton->limit()) automaton->collect();
    }
    return state != 0;
}

std::string Matcher::forced(size_t most, bool* over) const {
    {
        std::lock_guard lock(automaton->mutex);
        if (automaton->only_byte(state) < 0) return "";
    }
    Matcher ahead(automaton);
    std::lock_guard lock(automaton->mutex);
    ahead.state = state;
    std::string text;
    while (text.size() < most) {
        const int byte = automaton->only_byte(ahead.state);
        if (byte < 0 || byte == (uint8_t)ADDED_TOKEN) break;
        ahead.state = automaton->next(ahead.state, (uint8_t)byte);
        if (ahead.state == 0) break; // (limits reached)
        text += (char)byte;
        if (automaton->bytes() > automaton->limit()) automaton->collect();
    }
    *over = ahead.state && !automaton->goes_on(ahead.state);
    return text;
}

std::shared_ptr<const Automaton::Mask> Matcher::mask() {
    std::lock_guard lock(automaton->mutex);
    auto bits = automaton->mask(state);
    if (automaton->bytes() > automaton->limit()) automaton->collect(); // (a walk may create many states)
    return bits;
}

bool Matcher::may_end() const {
    std::lock_guard lock(automaton->mutex);
    return automaton->ends(state);
}

bool Matcher::must_end() const {
    std::lock_guard lock(automaton->mutex);
    return !automaton->goes_on(state);
}
