// pages.h: the pages of the KV cache, and the prefix cache.
#pragma once
#include "base/file.h"
#include "qwen3.cu"
#include "server/engine/random_bits.h"
#include "server/engine/reply.h"
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

namespace server {

// Allocation of the KV cache's pages. A page is used by `users` sequences, or idle; a full page may have a name. A name
// identifies all tokens up to the page's end: each triple (name of the page before, these 16 ids, number of the adapter
// or 0) gets one name, which is never reused, so equal names mean equal content from the first token on. (The name
// before the first page is the salt.) An idle page keeps its name until it is reused; the page that has been idle for
// longest is reused first.
struct PagePool {
    struct Page {
        int users = 0, ids[PAGE];
        uint64_t name = 0, before = 0; // 0: no name
        uint64_t adapter = 0;
        uint64_t idle_since = 0;
        // Log-probabilities of its tokens, with so many alternatives; the engine then also keeps the hidden state of
        // the last one, which the first token of the next page is predicted from. Empty: not known.
        std::vector<TokenInfo> told{};
        int alternatives = -1;
        bool tells(int wanted) const { return !told.empty() && alternatives >= wanted; }
    };
    std::vector<Page> pages;
    std::map<uint64_t, int> idle;      // by idle_since
    std::unordered_multimap<uint64_t, int> named;
    uint64_t clock, last_name = 1ull << 32; // smaller numbers are salts

    explicit PagePool(int n) : pages(n), clock(n) {
        for (int p = 0; p < n; p++) idle[pages[p].idle_since = p] = p;
    }
    size_t available() const { return idle.size(); }

    int take();
    void use(int p) {
        if (pages[p].users++ == 0) idle.erase(pages[p].idle_since);
    }
    void release(int p); // pages without a name are reused first
    // The page with these ids behind the page of that name, or -1.
    int find(uint64_t before, const int* ids, uint64_t adapter = 0) const;
    // Names page p, which now holds these ids. Returns the name; if another page has it already, p stays unnamed.
    // tells >= 0: p will know log-probabilities with so many alternatives; it takes the name of a page that does not.
    uint64_t name(int p, uint64_t before, const int* ids, uint64_t adapter = 0, int tells = -1);

  private:
    void forget(int p); // its name
    uint64_t start = random_bits(); // random, so that no client can construct collisions
    uint64_t hash(uint64_t before, const int* ids, uint64_t adapter) const {
        return fnv1a(ids, PAGE * sizeof(int), fnv1a(&before, sizeof before, start ^ adapter));
    }
};

} // namespace server
