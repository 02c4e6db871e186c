// form/masks.cpp: finds the allowed tokens by walks over the vocabulary's tries; see automaton.h.
#include "form/automaton.h"
#include <algorithm>
#include <array>
#include <functional>
#include <set>

// Allows the tokens below node n that the state accepts. The limits do not depend on earlier walks: every edge counts
// on its first visit in this walk, whether it existed or not.
template <class F> void Automaton::walk(const TokenTrie& trie, uint32_t n, int state, Mask& bits, F on_return) {
    const size_t C = (size_t)grammar.classes;
    const TokenTrie::Node* const nodes = trie.nodes.data();
    const uint32_t end = nodes[n].end, depth = nodes[n].depth + 1u;
    if (state == 0) return;
    std::array<int, Vocabulary::LONG + 1> at;
    at[0] = state;
    Edge* edge = edges.data();
    for (uint32_t i = n + 1; i < end;) {
        const TokenTrie::Node node = nodes[i];
        const int from = at[node.depth - depth];
        const size_t e = (size_t)from * C + grammar.byte_class[node.byte];
        int to = edge[e].to;
        if (edge[e].walk != walks) {
            work += 1 + (size_t)(states.end(from) - states.begin(from));
            if (work > MAX_WORK) return;
            edge[e].walk = walks;
            to = next(from, node.byte);
            edge = edges.data();
            work += edge[e].work;
        }
        if (to == 0) { i = node.end; continue; }
        allow(bits, node.token);
        if (returning[(size_t)to]) on_return(i, to);
        at[node.depth - depth + 1] = to;
        i++;
        if (++steps > MAX_STEPS) return;
    }
}

std::shared_ptr<const Automaton::Mask> Automaton::mask(int state) {
    auto known = mask_of.find(state);
    if (known == mask_of.end()) {
        if (masks.size() >= MAX_MASKS) masks.clear(), mask_of.clear();
        for (size_t k = 0; k < Vocabulary::KINDS; k++)
            if (local_bytes[k] > limit() / 8) locals[k].clear(), local_bytes[k] = 0;
        known = mask_of.emplace(state, make_mask(state)).first;
    }
    return known->second;
}

std::shared_ptr<Automaton::Mask> Automaton::make_mask(int state) {
    std::array<int, Vocabulary::KINDS> forms;
    std::array<std::vector<int>, Vocabulary::KINDS> known; // the node that each UNKNOWN stands for
    std::vector<int> key;
    for (size_t k = 0; k < Vocabulary::KINDS; k++) {
        forms[k] = form_of(state, like[k == Vocabulary::LONG_ONES], known[k]);
        key.push_back(forms[k]);
        key.insert(key.end(), known[k].begin(), known[k].end());
        key.push_back(-1);
    }
    std::shared_ptr<Mask>& mask = masks[key];
    if (mask) return mask;
    mask = std::make_shared<Mask>(vocabulary->words() + 1);
    for (size_t k = 0; k < Vocabulary::KINDS; k++) {
        std::shared_ptr<Local>& local = locals[k][forms[k]];
        if (!local) {
            local = std::make_shared<Local>(), parts_made++;
            make_local(*local, (Vocabulary::Kind)k, forms[k]);
            local_bytes[k] += 8 * (local->bits.size() + local->returns.size()) + 128;
        }
        for (size_t w = 0; local->words && w < vocabulary->words(); w++) (*mask)[w] |= (*local->words)[w];
        for (auto [w, bits] : local->bits) (*mask)[w] |= bits;
        walks++, work = steps = 0;
        std::vector<int> after; // positions behind a return from the node
        for (int node : known[k]) after.push_back(returned(node));
        for (auto [n, i] : local->returns)
            walk(vocabulary->tries[k], n, after[(size_t)i], *mask, [](uint32_t, int) {});
    }
    return mask;
}

// The state with UNKNOWN in place of its nodes, in the order of first use. If there are too many: the state itself.
int Automaton::form_of(int state, const std::vector<uint32_t>& like, std::vector<int>& known) {
    std::vector<uint64_t> threads;
    for (const uint64_t* t = states.begin(state); t != states.end(state); t++)
        if (position_of(*t) != MARK) threads.push_back(thread(like[position_of(*t)], node_of(*t)));
    std::sort(threads.begin(), threads.end());
    for (uint64_t& t : threads) {
        size_t i = 0;
        while (i < known.size() && known[i] != node_of(t)) i++;
        if (i == known.size()) known.push_back(node_of(t));
        if (known.size() > FIRST - UNKNOWN) return known.clear(), state;
        t = thread(position_of(t), UNKNOWN + (int)i);
    }
    std::sort(threads.begin(), threads.end());
    threads.erase(std::unique(threads.begin(), threads.end()), threads.end());
    return intern_state(threads);
}

int Automaton::returned(int node) {
    if (node < FIRST) return 0;
    std::vector<uint64_t> todo(nodes.begin(node - FIRST), nodes.end(node - FIRST));
    return settle(todo, true);
}

// First the tokens of one byte, which exist for every byte, so that some token is allowed in any case.
void Automaton::make_local(Local& local, Vocabulary::Kind kind, int form) {
    const TokenTrie& trie = vocabulary->tries[kind];
    if (kind == Vocabulary::WORDS)
        if (const int n = free_characters(form); n >= 0) {
            local.words = &vocabulary->words_of[(size_t)n];
            return;
        }
    Mask bits(vocabulary->words() + 1);
    for (uint32_t n = 1; n < trie.nodes.size(); n = trie.nodes[n].end)
        if (trie.nodes[n].token < none() && next(form, trie.nodes[n].byte)) allow(bits, trie.nodes[n].token);
    walks++, work = steps = 0;
    walk(trie, 0, form, bits, [&](uint32_t n, int state) {
        for (const uint64_t* t = states.end(state); t > states.begin(state) && position_of(t[-1]) == MARK; t--)
            if (node_of(t[-1]) != BOTTOM) local.returns.push_back({n, node_of(t[-1]) - UNKNOWN});
    });
    auto settled = [&](std::pair<uint32_t, int> r) { // all tokens below are allowed already
        for (uint32_t n = r.first + 1; n < trie.nodes[r.first].end; n++)
            if (const uint32_t t = trie.nodes[n].token; t < none() && !(bits[t / 32] >> t % 32 & 1))
                return false;
        return true;
    };
    local.returns.erase(std::remove_if(local.returns.begin(), local.returns.end(), settled), local.returns.end());
    for (uint32_t w = 0; w < bits.size(); w++)
        if (bits[w]) local.bits.push_back({w, bits[w]});
    local.bits.shrink_to_fit();
}

// If any n characters of words may follow, but no more: n. (SHORT: any number.) Otherwise -1.
int Automaton::free_characters(int state) {
    for (int n = 0; n <= (int)Vocabulary::SHORT; n++) {
        if (n == (int)Vocabulary::SHORT) return n;
        if (states.end(state) - states.begin(state) > 16) return -1; // it would take long
        bool some = false;
        const int to = after_any_character(state, &some);
        if (to == state) return (int)Vocabulary::SHORT;
        if (!some) return n > 0 ? n : -1;
        if (to == 0 || returning[(size_t)to]) return -1;
        state = to;
    }
    return -1;
}

// The state behind any character of words. 0: it depends on the character; `some`: some character is accepted.
int Automaton::after_any_character(int state, bool* some) {
    struct Lead { int first, last, low, high, more; }; // bounds of the second byte; how many bytes follow it
    static const Lead LEADS[] = {{0xC2, 0xDF, 0x80, 0xBF, 0}, {0xE0, 0xE0, 0xA0, 0xBF, 1},
                                 {0xE1, 0xEC, 0x80, 0xBF, 1}, {0xED, 0xED, 0x80, 0x9F, 1},
                                 {0xEE, 0xEF, 0x80, 0xBF, 1}, {0xF0, 0xF0, 0x90, 0xBF, 2},
                                 {0xF1, 0xF3, 0x80, 0xBF, 2}, {0xF4, 0xF4, 0x80, 0x8F, 2}};
    int to = -1; // not known yet
    auto meets = [&](int where) {
        if (to < 0) to = where;
        return where && to == where;
    };
    std::set<std::array<int, 4>> seen;
    std::function<bool(int, int, int, int)> follow = [&](int from, int low, int high, int more) {
        if (!seen.insert({from, low, high, more}).second) return true;
        for (int byte = low; byte <= high; byte++) {
            const int where = next(from, (uint8_t)byte);
            if (where == 0 || !(more ? follow(where, 0x80, 0xBF, more - 1) : meets(where))) return false;
        }
        return true;
    };
    bool same = true;
    for (int byte = ' '; byte < 0x7F; byte++)
        if (Vocabulary::in_words((uint8_t)byte)) {
            const int where = next(state, (uint8_t)byte);
            *some = *some || where;
            same = meets(where) && same;
        }
    for (const Lead& l : LEADS)
        for (int lead = l.first; lead <= l.last; lead++) {
            const int where = next(state, (uint8_t)lead);
            *some = *some || where;
            same = same && where && follow(where, l.low, l.high, l.more);
        }
    return same ? to : 0;
}
