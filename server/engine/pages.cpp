// pages.cpp: takes, releases, names and finds pages.
#include "server/engine/pages.h"
#include <cstring>

namespace server {

int PagePool::take() {
    const int p = idle.begin()->second;
    idle.erase(idle.begin());
    if (pages[p].name) forget(p);
    pages[p].told.clear(), pages[p].alternatives = -1;
    pages[p].users = 1;
    return p;
}

void PagePool::forget(int p) {
    auto [at, end] = named.equal_range(hash(pages[p].before, pages[p].ids, pages[p].adapter));
    while (at->second != p) ++at;
    named.erase(at);
    pages[p].name = 0;
}

void PagePool::release(int p) {
    if (--pages[p].users) return;
    pages[p].idle_since = pages[p].name ? ++clock : p;
    idle[pages[p].idle_since] = p;
}

int PagePool::find(uint64_t before, const int* ids, uint64_t adapter) const {
    for (auto [at, end] = named.equal_range(hash(before, ids, adapter)); at != end; ++at) {
        const Page& page = pages[at->second];
        const bool same = page.before == before && page.adapter == adapter;
        if (same && !memcmp(page.ids, ids, sizeof page.ids)) return at->second;
    }
    return -1;
}

uint64_t PagePool::name(int p, uint64_t before, const int* ids, uint64_t adapter, int tells) {
    const int other = find(before, ids, adapter);
    const uint64_t known = other >= 0 ? pages[other].name : 0;
    if (known && (tells < 0 || pages[other].tells(tells))) return known;
    if (known) forget(other);
    Page& page = pages[p];
    memcpy(page.ids, ids, sizeof page.ids);
    page.before = before, page.adapter = adapter, page.name = known ? known : ++last_name;
    named.emplace(hash(before, ids, adapter), p);
    return page.name;
}

} // namespace server
