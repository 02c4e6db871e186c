// pages.h: the pages of the KV cache, and what is found in them again. Part of serve.cu.
#pragma once

// Who has which page of the KV cache. A page is in use by `users` sequences, or idle; a whole page may also be known by
// name. Its name stands for all tokens up to its end: it is given once, to the triple (name of the page before, these
// 16 ids, number of the adapter or 0), and never again, so that comparing it compares the content from the first token
// on. (The name before the first page is the salt.) An idle page keeps its name until it is taken for something else,
// the longest idle first.
struct PagePool {
    struct Page {
        int users = 0, ids[PAGE];
        uint64_t name = 0, before = 0; // 0: no name
        uint64_t adapter = 0;
        uint64_t idle_since = 0;
    };
    std::vector<Page> pages;
    std::map<uint64_t, int> idle;      // by idle_since
    std::unordered_multimap<uint64_t, int> named;
    uint64_t clock, last_name = 1ull << 32; // salts are below

    explicit PagePool(int n) : pages(n), clock(n) {
        for (int p = 0; p < n; p++) idle[pages[p].idle_since = p] = p;
    }
    size_t available() const { return idle.size(); }

    int take() {
        const int p = idle.begin()->second;
        idle.erase(idle.begin());
        if (pages[p].name) {
            auto [at, end] = named.equal_range(hash(pages[p].before, pages[p].ids, pages[p].adapter));
            while (at->second != p) ++at;
            named.erase(at);
            pages[p].name = 0;
        }
        pages[p].users = 1;
        return p;
    }
    void use(int p) {
        if (pages[p].users++ == 0) idle.erase(pages[p].idle_since);
    }
    void release(int p) { // pages without a name are the first to be taken again
        if (--pages[p].users) return;
        pages[p].idle_since = pages[p].name ? ++clock : p;
        idle[pages[p].idle_since] = p;
    }
    // The page that holds these ids after that one, or -1.
    int find(uint64_t before, const int* ids, uint64_t adapter = 0) const {
        for (auto [at, end] = named.equal_range(hash(before, ids, adapter)); at != end; ++at) {
            const Page& page = pages[at->second];
            const bool same = page.before == before && page.adapter == adapter;
            if (same && !memcmp(page.ids, ids, sizeof page.ids)) return at->second;
        }
        return -1;
    }
    // Page p now holds these ids. Returns their name: if another page has it already, p stays without.
    uint64_t name(int p, uint64_t before, const int* ids, uint64_t adapter = 0) {
        if (const int other = find(before, ids, adapter); other >= 0) return pages[other].name;
        Page& page = pages[p];
        memcpy(page.ids, ids, sizeof page.ids);
        page.before = before, page.adapter = adapter, page.name = ++last_name;
        named.emplace(hash(before, ids, adapter), p);
        return page.name;
    }

  private:
    uint64_t start = random_bits(); // so that nobody can prepare texts that fall on each other
    uint64_t hash(uint64_t before, const int* ids, uint64_t adapter) const {
        return fnv1a(ids, PAGE * sizeof(int), fnv1a(&before, sizeof before, start ^ adapter));
    }
};
