// admit.cpp: slots, pages and the cached prefix of a prompt.
#include "server/engine/scheduler.h"
#include <algorithm>

namespace server {

bool Scheduler::admit(Sequence& q) {
    const size_t total = q.ids.size(), needed = q.pages_needed();
    q.chain = q.job.space ? q.job.space : q.job.salt;
    while ((q.pages.size() + 1) * PAGE < total) {
        const int p = pool.find(q.chain, &q.ids[q.pages.size() * PAGE], q.adapter());
        if (p < 0) break;
        pool.use(p);
        q.pages.push_back(p);
        q.chain = pool.pages[p].name;
    }
    const size_t found = q.pages.size();
    if (pool.available() < needed - found + running.size() && !running.empty()) {
        give_back_pages(q);
        return false;
    }
    q.known = found, q.computed = found * PAGE;
    while (q.pages.size() < needed) q.pages.push_back(pool.take());
    q.slot = free_slots[q.job.pooled].back();
    free_slots[q.job.pooled].pop_back();
    q.admission = ++admissions, q.resumed = q.answered();
    figures.looked_up += total, figures.found += q.computed;
    if (q.cached == SIZE_MAX) q.cached = q.computed, figures.prompt_tokens += total;
    if (found) // the step enters the pages of its own rows
        give(table + (size_t)q.slot * max_pages, q.pages.data(), found);
    if (ctx.gpu && !q.job.pooled) describe_to_gpu(q);
    return true;
}

void Scheduler::vacate(Sequence& q) {
    give_back_pages(q);
    if (q.slot >= 0) free_slots[q.job.pooled].push_back(q.slot);
    q.slot = -1;
}

void Scheduler::preempt(Running::iterator it) {
    Sequence& q = *it->second;
    vacate(q);
    q.pending = 0; // its results in flight are void; `computed` is set when it is admitted again
    figures.preempted++;
    auto back = std::move(it->second);
    if (q.job.adapter) q.job.adapter->running--;
    running.erase(it);
    join_line(std::move(back));
}

void Scheduler::remember(Sequence& q) {
    for (; (q.known + 1) * PAGE <= std::min(q.computed, q.ids.size()); q.known++)
        q.chain = pool.name(q.pages[q.known], q.chain, &q.ids[q.known * PAGE], q.adapter());
}

} // namespace server
