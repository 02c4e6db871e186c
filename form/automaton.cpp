// form/automaton.cpp: states and nodes, created when first needed; see automaton.h. masks.cpp makes their masks.
#include "form/automaton.h"
#include "form/matcher.h"
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

int Lists::intern(const std::vector<uint64_t>& list) {
    uint64_t hash = list.size();
    for (uint64_t x : list) hash = (hash ^ x) * 0x9E3779B97F4A7C15, hash ^= hash >> 32;
    for (auto [it, last] = by_hash.equal_range(hash); it != last; ++it)
        if (std::equal(list.begin(), list.end(), begin(it->second), end(it->second))) return it->second;
    items.insert(items.end(), list.begin(), list.end());
    begins.push_back(items.size());
    by_hash.emplace(hash, (int)size() - 1);
    return (int)size() - 1;
}

bool Seen::insert(uint64_t x) {
    if (2 * used >= slots.size()) grow();
    size_t i = (x * 0x9E3779B97F4A7C15 >> 32) & (slots.size() - 1);
    for (; slots[i].round == round; i = (i + 1) & (slots.size() - 1))
        if (slots[i].x == x) return false;
    slots[i] = {x, round}, used++;
    return true;
}

void Seen::grow() {
    std::vector<Slot> old(2 * slots.size(), Slot{0, 0});
    old.swap(slots);
    used = 0;
    for (const Slot& s : old)
        if (s.round == round) insert(s.x);
}

Automaton::Automaton(Grammar&& g, std::shared_ptr<const Vocabulary> v)
    : grammar(std::move(g)), vocabulary(std::move(v)),
      like{grammar.alike(Vocabulary::SHORT), grammar.alike(vocabulary->tries[Vocabulary::LONG_ONES].longest)} {
    alive++, grammar_bytes += own_bytes();
    forget();
}

int Automaton::start() {
    std::vector<uint64_t> todo = {thread((uint32_t)grammar.rules[0].start, BOTTOM)};
    // The first rule may end before its first byte if it is nullable: no caller exists that could skip it.
    return settle(todo, true);
}

bool Automaton::ends(int state) const {
    const uint64_t *first = states.begin(state), *last = states.end(state);
    return std::binary_search(first, last, thread(MARK, BOTTOM));
}

int Automaton::only_byte(int state) const {
    ByteSet all;
    for (const uint64_t* t = states.begin(state); t != states.end(state); t++) {
        if (position_of(*t) == MARK) return -1;
        all |= grammar.sets[grammar.at[position_of(*t)].y];
        if (all.count() > 1) return -1;
    }
    for (int byte = 0; byte < 256; byte++)
        if (all[(size_t)byte]) return byte;
    return -1;
}

void Automaton::forget() {
    states = nodes = Lists();
    edges.clear(), returning.clear(), locals = {}, local_bytes = {}, masks.clear(), mask_of.clear();
    intern_state({}); // 0
    by_rank.resize(grammar.rules.size());
    for (size_t r = 0; r < grammar.rules.size(); r++) by_rank[(size_t)grammar.rules[r].rank] = (int)r;
}

int Automaton::intern_state(const std::vector<uint64_t>& threads) {
    const int s = states.intern(threads);
    if (returning.size() < states.size()) {
        edges.resize(states.size() * (size_t)grammar.classes);
        returning.push_back(!threads.empty() && position_of(threads.back()) == MARK);
    }
    return s;
}

int Automaton::make(int state, uint8_t byte) {
    std::vector<uint64_t> todo;
    for (const uint64_t* t = states.begin(state); t != states.end(state); t++) {
        if (position_of(*t) == MARK) continue;
        const Grammar::Position& p = grammar.at[position_of(*t)];
        if (grammar.sets[p.y][byte]) todo.push_back(thread(p.x, node_of(*t)));
    }
    const int to = settle(todo, true);
    Edge& edge = edges[(size_t)state * (size_t)grammar.classes + grammar.byte_class[byte]];
    edge.work = (uint32_t)(spent / 16); // (most transitions need no more than their threads)
    return edge.to = to;
}

// The state of these threads after all steps that take no byte. First the threads that took a byte: they may return
// from their rule. Then the called rules, callers before callees: so all callers of a rule are known when its
// node is created. A rule that may end before its first byte was skipped by its caller already.
int Automaton::settle(std::vector<uint64_t>& todo, bool may_return) {
    seen.clear(), found.clear(), calls.clear(), room = MAX_CALLERS, spent = 0;
    drain(todo, may_return);
    while (!calls.empty()) {
        const int rule = by_rank[(size_t)calls.begin()->first];
        std::vector<uint64_t> callers = std::move(calls.begin()->second);
        calls.erase(calls.begin());
        std::sort(callers.begin(), callers.end());
        callers.erase(std::unique(callers.begin(), callers.end()), callers.end());
        spent += callers.size();
        const int node = FIRST + nodes.intern(callers);
        todo = {thread((uint32_t)grammar.rules[(size_t)rule].start, node)};
        drain(todo, false);
    }
    spent += seen.used;
    std::sort(found.begin(), found.end());
    return intern_state(found);
}

void Automaton::drain(std::vector<uint64_t>& todo, bool may_return) {
    while (!todo.empty() && found.size() < MAX_THREADS) {
        const uint64_t t = todo.back();
        todo.pop_back();
        if (!seen.insert(t)) continue;
        const Grammar::Position& p = grammar.at[position_of(t)];
        const int node = node_of(t);
        switch (p.op) {
        case Grammar::NEVER: break;
        case Grammar::BYTES: found.push_back(t); break;
        case Grammar::SPLIT:
            todo.push_back(thread(p.x, node)), todo.push_back(thread(p.y, node));
            break;
        case Grammar::CALL: {
            const Grammar::Rule& rule = grammar.rules[p.y];
            std::vector<uint64_t>& callers = calls[rule.rank];
            if (p.x != Grammar::FINAL || node < FIRST) callers.push_back(thread(p.x, node));
            else if (seen.insert(thread(LAST_CALL | p.y, node))) { // it returns where its own rule would
                const uint64_t *first = nodes.begin(node - FIRST), *last = nodes.end(node - FIRST);
                const size_t some = std::min((size_t)(last - first), std::max<size_t>(room, 1));
                callers.insert(callers.end(), first, first + some);
                room -= std::min(room, some);
            }
            if (rule.nullable) todo.push_back(thread(p.x, node));
            break;
        }
        case Grammar::END:
            if (!may_return) break;
            if (node < FIRST) found.push_back(thread(MARK, node));
            else todo.insert(todo.end(), nodes.begin(node - FIRST), nodes.end(node - FIRST));
        }
    }
}

void Automaton::collect() {
    std::map<int, std::vector<uint64_t>> kept; // states to keep, and their threads
    std::vector<bool> wanted(nodes.size());
    auto want = [&](uint64_t t) {
        if (node_of(t) >= FIRST) wanted[(size_t)(node_of(t) - FIRST)] = true;
    };
    for (Matcher* m : matchers) kept[m->state].assign(states.begin(m->state), states.end(m->state));
    for (auto& [state, threads] : kept)
        for (uint64_t t : threads) want(t);
    for (size_t i = wanted.size(); i-- > 0;) // a node refers only to older ones
        if (wanted[i])
            for (const uint64_t* t = nodes.begin((int)i); t != nodes.end((int)i); t++) want(*t);
    const Lists old = std::move(nodes);
    forget();
    std::vector<int> moved(wanted.size());
    auto renamed = [&](const uint64_t* first, const uint64_t* last) {
        std::vector<uint64_t> list(first, last);
        for (uint64_t& t : list)
            if (node_of(t) >= FIRST) t = thread(position_of(t), FIRST + moved[(size_t)(node_of(t) - FIRST)]);
        std::sort(list.begin(), list.end());
        return list;
    };
    for (size_t i = 0; i < wanted.size(); i++)
        if (wanted[i]) moved[i] = nodes.intern(renamed(old.begin((int)i), old.end((int)i)));
    std::map<int, int> now;
    for (auto& [state, threads] : kept)
        now[state] = bytes() > limit() / 2 ? 0 : intern_state(renamed(threads.data(), threads.data() + threads.size()));
    for (Matcher* m : matchers) m->state = now[m->state];
}
