// admit.cpp: slots, pages and the cached prefix of a prompt.
#include "server/engine/disk_prefix.h"
#include "server/engine/scheduler.h"
#include <algorithm>
#include <cmath>

namespace server {

std::vector<int> Scheduler::cached_pages(const Sequence& q) const {
    std::vector<int> pages;
    uint64_t chain = q.space();
    while ((pages.size() + 1) * PAGE < q.ids.size()) {
        const int p = pool.find(chain, &q.ids[pages.size() * PAGE], q.adapter());
        if (p < 0 || (q.telling() && !pool.pages[p].tells(q.job.prompt_alternatives))) break;
        pages.push_back(p);
        chain = pool.pages[p].name;
    }
    return pages;
}

bool Scheduler::awaits_pages(const Sequence& q) const {
    if (!q.telling()) return false;
    size_t most = 0; // pages that q could share
    for (auto& [rank, r] : running) {
        const bool serves = r->telling() && r->job.prompt_alternatives >= q.job.prompt_alternatives;
        if (!serves || r->space() != q.space() || r->adapter() != q.adapter()) continue;
        const auto end = q.ids.begin() + (ptrdiff_t)std::min(q.prompt, r->prompt) - 1;
        const size_t shared = (size_t)(std::mismatch(q.ids.begin(), end, r->ids.begin()).first - q.ids.begin()) / PAGE;
        if (r->told.size() <= shared * PAGE) most = std::max(most, shared); // not yet known
    }
    return most > 0 && cached_pages(q).size() < most;
}

bool Scheduler::admit(Sequence& q) {
    const size_t total = q.ids.size(), needed = q.pages_needed();
    const bool telling = q.telling();
    q.pages = cached_pages(q);
    for (int p : q.pages) pool.use(p);
    const size_t found = q.pages.size();
    q.chain = found ? pool.pages[q.pages.back()].name : q.space();
    const bool alone = running.empty() && !(disk && disk->reading); // then there are pages for any prompt
    if (pool.available() < needed - found + running.size() && !alone) {
        give_back_pages(q);
        return false;
    }
    q.known = found, q.computed = found * PAGE;
    if (telling) {
        for (int p : q.pages)
            q.told.insert(q.told.end(), pool.pages[p].told.begin(), pool.pages[p].told.end());
        if (!found) q.told.push_back({q.ids[0], NAN, "", {}}); // nothing predicts it
        for (TokenInfo& t : q.told) t.top.resize(std::min(t.top.size(), (size_t)q.job.prompt_alternatives));
        q.told_pages = found, q.told_from = found ? q.pages.back() : -1;
    }
    while (q.pages.size() < needed) q.pages.push_back(pool.take());
    q.slot = free_slots[q.job.pooled].back();
    free_slots[q.job.pooled].pop_back();
    q.admission = ++admissions, q.resumed = q.answered();
    figures.looked_up += total, figures.found += q.computed;
    if (q.cached == SIZE_MAX) q.cached = q.computed, figures.prompt_tokens += total;
    if (found) // the step enters the pages of its own rows
        give(table + (size_t)q.slot * max_pages, q.pages.data(), found);
    if (ctx.gpu && !q.job.pooled) describe_to_gpu(q);
    if (disk) used_pages(q, found);
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
    q.looked = Sequence::NOT;
    q.pending = 0; // its results in flight are void; `computed` is set when it is admitted again
    if (q.telling()) q.told.clear();
    figures.preempted++;
    auto back = std::move(it->second);
    if (q.job.adapter) q.job.adapter->running--;
    running.erase(it);
    join_line(std::move(back));
}

void Scheduler::remember(Sequence& q) {
    for (; (q.known + 1) * PAGE <= std::min(q.computed, q.ids.size()); q.known++) {
        const bool tells = q.telling() && (q.known + 1) * PAGE < q.prompt; // (its last hidden state is kept)
        q.chain = pool.name(q.pages[q.known], q.chain, &q.ids[q.known * PAGE], q.adapter(),
                            tells ? q.job.prompt_alternatives : -1);
        if (disk && !q.job.pooled) may_save(q);
    }
}

} // namespace server
