// proposals.cpp: tokens proposed by prompt lookup (lookup.h).
#include "server/engine/scheduler.h"
#include <algorithm>
#include <utility>

namespace server {

void Scheduler::add_proposal(Step& s) {
    Sequence& q = drawn_for(s, 0);
    if (!may_propose(q)) return;
    s.alone = true;
    know(q);
    if (s.token[0] < 0) return;
    if (q.pages.size() * PAGE < q.computed + (size_t)lookup.most && pool.available() > running.size() &&
        q.pages.size() < (size_t)max_pages)
        q.pages.push_back(pool.take());
    const size_t end = std::min(q.pages.size() * PAGE, (size_t)options.context);
    const size_t room = std::min({q.job.max_tokens - q.answered(), (size_t)max_rows - 1, end - q.computed});
    s.proposed = lookup.propose(q.ids, room);
    size_t at = q.computed;
    for (int id : s.proposed) {
        s.token.push_back(id), s.pos.push_back((int)at), s.seq.push_back(q.slot);
        s.slot.push_back(q.pages[at / PAGE] * PAGE + (int)(at % PAGE)), at++;
    }
    if (!s.proposed.empty()) s.singles = 0; // no row is the only one of its sequence now
    s.parts.back().rows += (int)s.proposed.size();
    service[q.job.line()] += s.proposed.size();
}

bool Scheduler::awaits_proposal() {
    if (under_way.empty()) return false;
    if (!under_way.back().proposed.empty()) return true;
    if (!lookup.most || running.size() != 1 || in_lines > 0) return false;
    Sequence& q = *running.begin()->second;
    if (q.pending != 1 || q.answered() == q.job.max_tokens || !may_propose(q)) return false;
    know(q);
    const std::vector<int> next = lookup.propose(q.ids, q.job.max_tokens - q.answered() - 1);
    if (!next.empty()) expected = next[0];
    return !next.empty();
}

bool Scheduler::may_propose(const Sequence& q) const {
    if (q.matcher || !ctx.gpu) return !q.matcher;
    return !q.job.pooled && !q.job.adapter && q.job.alternatives < 0 && !has_penalties(q.job.how) &&
           q.job.bias.empty() && !q.restrained;
}

bool Scheduler::take_proposed(Step& s, Sequence& q) {
    for (size_t i = 0; i < s.proposed.size(); i++) {
        const bool right = q.ids.back() == s.proposed[i];
        lookup.judged(right);
        if (!right) return false;
        q.computed++, q.pending++;
        if (accept(q, ctx.gpu ? TokenInfo{s.ids[i + 1], 0, "", {}}
                              : draw_row(q, logits + (i + 1) * (size_t)config.V, nullptr))) return true;
    }
    return false;
}

} // namespace server
