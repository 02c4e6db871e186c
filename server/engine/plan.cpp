// plan.cpp: the rows of a step.
#include "server/engine/scheduler.h"
#include <algorithm>

namespace server {

Step Scheduler::plan_step() {
    Step s;
    drop_cancelled();
    yield(false);
    const bool first = yield(true); // whose prompts come first: pooled texts' or answers'
    if (awaits_proposal()) return s;
    bool awaited = false; // a client waits for some answer's next token
    for (auto it = running.begin(); it != running.end(); ++it) {
        Sequence& q = *it->second;
        if (q.job.pooled || q.left() != 1 || q.answered() == q.job.max_tokens) continue;
        if (q.computed / PAGE == q.pages.size()) {
            while (pool.available() == 0 && std::prev(running.end()) != it) preempt(std::prev(running.end()));
            if (pool.available() == 0) { preempt(it); break; }
            q.pages.push_back(pool.take());
        }
        add(s, q, 1);
        awaited |= !q.job.bulk;
    }
    s.singles = (int)s.token.size();
    size_t budget = (size_t)(awaited ? options.chunk : options.burst);
    if (awaited && options.paced) budget = prompt_pace.tokens(budget, (size_t)options.burst);
    odd = !odd; // half of 1 is alternately 1 and 0
    const size_t part = std::max((budget + odd) / 2, budget - wanted(!first, budget));
    budget -= add_prompts(s, first, part, 0);
    add_prompts(s, !first, budget, first ? 0 : reserved());
    if (lookup.most && s.token.size() == 1 && s.draws.size() == 1) add_proposal(s);
    group_rows(s);
    return s;
}

void Scheduler::group_rows(Step& s) {
    if (std::none_of(s.parts.begin(), s.parts.end(), [](auto& p) { return p.adapter; })) return s.parts.clear();
    auto place = [&](const auto& p) { return std::pair(p.first >= s.singles, p.adapter ? p.adapter->number : 0); };
    std::stable_sort(s.parts.begin(), s.parts.end(), [&](auto& a, auto& b) { return place(a) < place(b); });
    std::vector<int> from, to(s.token.size()); // rows by new position, and by old position
    for (auto& p : s.parts) {
        const int old = std::exchange(p.first, (int)from.size());
        for (int i = 0; i < p.rows; i++) to[(size_t)(old + i)] = (int)from.size(), from.push_back(old + i);
    }
    for (auto* numbers : {&s.token, &s.pos, &s.seq, &s.slot}) {
        const std::vector<int> old = *numbers;
        for (size_t i = 0; i < from.size(); i++) (*numbers)[i] = old[(size_t)from[i]];
    }
    for (auto* rows : {&s.draws, &s.kept})
        for (auto& d : *rows) d.row = to[(size_t)d.row];
    for (auto& t : s.targets)
        if (t.row >= 0) t.row = to[(size_t)t.row];
    std::vector<Step::Part> joined;
    for (auto& p : s.parts)
        if (!joined.empty() && joined.back().adapter == p.adapter) joined.back().rows += p.rows;
        else joined.push_back(p);
    s.parts.swap(joined);
}

size_t Scheduler::wanted(bool texts, size_t most) const {
    size_t n = 0, slots = free_slots[texts].size(), needed = running.size();
    for (auto& [rank, q] : running)
        if (q->job.pooled == texts) n += q->prompt_left();
    for (auto line = waiting.lower_bound(texts ? Job::TEXTS : 0); line != waiting.end(); ++line) {
        if (!texts && line->first >= Job::TEXTS) break;
        for (auto& [place, q] : line->second) {
            needed += q->pages_needed();
            if (n >= most || slots-- == 0 || needed > pool.available()) return std::min(n, most);
            n += q->ids.size();
        }
    }
    return std::min(n, most);
}

size_t Scheduler::reserved() {
    const auto line = next_line(false);
    if (line == waiting.end() || free_slots[0].empty()) return 0;
    const size_t needed = line->second.begin()->second->pages_needed();
    const bool there = pool.available() >= needed + running.size();
    return there || free_slots[1].size() < (size_t)options.texts ? needed : 0;
}

size_t Scheduler::add_prompts(Step& s, bool texts, const size_t budget, const size_t kept) {
    size_t left = budget;
    auto chunk = [&](Sequence& q) {
        const size_t n = std::min(q.left(), left);
        add(s, q, n);
        left -= n;
    };
    for (auto& [rank, q] : running)
        if (q->job.pooled == texts && q->prompt_left() > 0 && left > 0) chunk(*q);
    while (left > 0 && !free_slots[texts].empty() && later.size() < 64) { // (each step looks at them)
        const auto line = next_line(texts);
        if (line == waiting.end()) break;
        const auto first = line->second.begin();
        if (awaits_pages(*first->second) || awaits_disk(*first->second)) {
            later.push_back(leave_line(line->first, first));
            continue;
        }
        if (kept && pool.available() < kept + first->second->pages_needed() + running.size() + 1) break;
        if (!admit(*first->second)) break;
        auto q = leave_line(line->first, first);
        if (!q->rank) q->rank = ++ranks;
        chunk(*q);
        const uint64_t rank = q->rank;
        if (q->job.adapter) q->job.adapter->running++;
        running[rank] = std::move(q);
    }
    for (auto& q : later) join_line(std::move(q));
    later.clear();
    return budget - left;
}

void Scheduler::add(Step& s, Sequence& q, size_t n) {
    service[q.job.line()] += n;
    s.parts.push_back({(int)s.token.size(), (int)n, q.job.adapter});
    if (q.telling()) add_targets(s, q, n);
    for (size_t i = 0; i < n; i++, q.computed++) {
        s.token.push_back(q.computed < q.ids.size() ? q.ids[q.computed] : -1);
        s.pos.push_back((int)q.computed);
        s.seq.push_back(q.slot);
        s.slot.push_back(q.pages[q.computed / PAGE] * PAGE + (int)(q.computed % PAGE));
    }
    if (q.left() > 0) return;
    const bool draws = !q.job.pooled && q.job.max_tokens > 0;
    (q.job.pooled ? s.kept : draws ? s.draws : s.over).push_back({q.rank, q.admission, (int)s.token.size() - 1});
    q.pending += draws;
}

void Scheduler::add_targets(Step& s, Sequence& q, size_t n) {
    const int k = q.job.prompt_alternatives, first = (int)s.token.size();
    if (const int from = std::exchange(q.told_from, -1); from >= 0)
        s.targets.push_back({q.rank, q.admission, q.ids[q.computed], k, -1, from, -1});
    for (size_t i = 0, at = q.computed; i < n && at + 1 < q.prompt; i++, at++) {
        const int page_ended = at % PAGE == PAGE - 1 ? q.pages[at / PAGE] : -1;
        s.targets.push_back({q.rank, q.admission, q.ids[at + 1], k, first + (int)i, -1, page_ended});
    }
}

} // namespace server
