// pages.h: the pages of the KV cache, and what is found in them again.
#pragma once
#include "base/file.h"
#include "qwen3.cu"
#include "server/engine/random_bits.h"
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

namespace server {

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

    int take();
    void use(int p) {
        if (pages[p].users++ == 0) idle.erase(pages[p].idle_since);
    }
    void release(int p); // pages without a name are the first to be taken again
    // The page that holds these ids after that one, or -1.
    int find(uint64_t before, const int* ids, uint64_t adapter = 0) const;
    // Page p now holds these ids. Returns their name: if another page has it already, p stays without.
    uint64_t name(int p, uint64_t before, const int* ids, uint64_t adapter = 0);

  private:
    uint64_t start = random_bits(); // so that nobody can prepare texts that fall on each other
    uint64_t hash(uint64_t before, const int* ids, uint64_t adapter) const {
        return fnv1a(ids, PAGE * sizeof(int), fnv1a(&before, sizeof before, start ^ adapter));
    }
};

} // namespace server
