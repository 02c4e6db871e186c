// form/grammar_finish.cpp: completes a grammar: nullable rules, dead positions, the call order of rules, byte classes,
// and positions that allow the same tokens.
#include "base/error.h"
#include "form/grammar.h"
#include "model/chat_template.h" // in_quotes

void Grammar::finish() {
    for (Rule& rule : rules)
        if (rule.start < 0) DIE("the rule %s is not defined", in_quotes(rule.name).c_str());
    const std::vector<bool> empty = least_fixpoint(false), leads_on = least_fixpoint(true);
    for (Rule& rule : rules) rule.nullable = empty[(size_t)rule.start];
    if (!leads_on[(size_t)rules[0].start]) DIE("nothing matches it");
    for (size_t p = 0; p < at.size(); p++) // so that every remaining thread can reach an end
        if (!leads_on[p]) at[p] = {NEVER, 0, 0};
    rank_rules();
    find_classes();
}

std::vector<uint32_t> Grammar::alike(size_t longest) const {
    std::vector<uint32_t> like(at.size());
    for (size_t p = 0; p < at.size(); p++) like[p] = (uint32_t)p;
    for (auto& c : copies) { // (inner ones were recorded before outer ones)
        if (c.count <= longest + 1 || passes_empty(c)) continue;
        const size_t from = c.base + longest * c.size;
        for (size_t p = from + c.size; p < c.base + (size_t)c.count * c.size; p++)
            like[p] = like[from + (p - c.base) % c.size];
    }
    return like;
}

// Whether a copy can be passed without a byte. (Apart from skipping it, if its first position makes it optional.)
bool Grammar::passes_empty(const Copies& c) const {
    uint32_t start = c.start;
    const Position& first = at[start];
    if (first.op == SPLIT && first.y < c.base) start = first.x;
    std::vector<uint32_t> todo = {start};
    std::set<uint32_t> seen;
    while (!todo.empty()) {
        const uint32_t p = todo.back();
        todo.pop_back();
        if (p < c.base || p >= c.base + c.size) return true;
        if (!seen.insert(p).second) continue;
        if (at[p].op == SPLIT || (at[p].op == CALL && rules[at[p].y].nullable)) todo.push_back(at[p].x);
        if (at[p].op == SPLIT) todo.push_back(at[p].y);
    }
    return false;
}

// The positions from which an end can be reached: without a byte, or (any) with any bytes.
std::vector<bool> Grammar::least_fixpoint(bool any) const {
    std::vector<std::vector<uint32_t>> users(at.size()), callers(rules.size());
    std::vector<bool> holds(at.size());
    std::vector<uint32_t> todo = {(uint32_t)FINAL};
    for (uint32_t p = 0; p < at.size(); p++) {
        if (at[p].op == END || at[p].op == NEVER) continue;
        users[at[p].x].push_back(p);
        if (at[p].op == SPLIT) users[at[p].y].push_back(p);
        if (at[p].op == CALL) callers[at[p].y].push_back(p);
    }
    std::vector<std::vector<uint32_t>> begins(at.size()); // rules
    for (uint32_t r = 0; r < rules.size(); r++) begins[(size_t)rules[r].start].push_back(r);
    auto now = [&](uint32_t p) {
        switch (at[p].op) {
        case END: return true;
        case BYTES: return any && holds[at[p].x];
        case SPLIT: return holds[at[p].x] || holds[at[p].y];
        case CALL: return holds[at[p].x] && holds[(size_t)rules[at[p].y].start];
        default: return false;
        }
    };
    while (!todo.empty()) {
        const uint32_t p = todo.back();
        todo.pop_back();
        if (holds[p] || !now(p)) continue;
        holds[p] = true;
        todo.insert(todo.end(), users[p].begin(), users[p].end());
        for (uint32_t r : begins[p]) todo.insert(todo.end(), callers[r].begin(), callers[r].end());
    }
    return holds;
}

// The rules that a rule may call before its first byte.
std::set<int> Grammar::called_first(const Rule& rule) const {
    std::set<int> called;
    std::set<uint32_t> seen;
    std::vector<uint32_t> todo = {(uint32_t)rule.start};
    while (!todo.empty()) {
        const uint32_t p = todo.back();
        todo.pop_back();
        if (!seen.insert(p).second) continue;
        if (at[p].op == SPLIT) todo.push_back(at[p].x), todo.push_back(at[p].y);
        if (at[p].op != CALL) continue;
        called.insert((int)at[p].y);
        if (rules[at[p].y].nullable) todo.push_back(at[p].x);
    }
    return called;
}

void Grammar::rank_rules() {
    std::vector<std::set<int>> calls;
    std::vector<int> callers(rules.size()), ready;
    for (auto& rule : rules) calls.push_back(called_first(rule));
    for (auto& list : calls)
        for (int r : list) callers[(size_t)r]++;
    for (size_t r = 0; r < rules.size(); r++)
        if (callers[r] == 0) ready.push_back((int)r);
    int rank = 0;
    while (!ready.empty()) {
        const int r = ready.back();
        ready.pop_back();
        rules[(size_t)r].rank = rank++;
        for (int next : calls[(size_t)r])
            if (--callers[(size_t)next] == 0) ready.push_back(next);
    }
    for (size_t r = 0; r < rules.size(); r++)
        if (callers[r]) DIE("the rule %s can begin with itself", in_quotes(rules[r].name).c_str());
}

void Grammar::find_classes() {
    for (auto& set : sets) {
        std::array<int, 512> part; // new classes: a class's bytes outside the set, and inside
        part.fill(-1);
        classes = 0;
        for (size_t b = 0; b < 256; b++) {
            int& now = part[2u * byte_class[b] + set[b]];
            if (now < 0) now = classes++;
            byte_class[b] = (uint8_t)now;
        }
    }
}
