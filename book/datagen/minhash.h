// book/datagen/minhash.h: finds rows that share most of their character n-grams, by MinHash and a table.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

namespace book {

// Rows by hash: open addressing, 8 bytes per slot, a third of the slots free. The announced number of rows is a limit.
struct HashTable {
    explicit HashTable(size_t most) : slots(most + most / 2 + 16), table((uint64_t*)calloc(slots, 8), free) {
        if (!table) throw std::bad_alloc();
    }
    void add(uint64_t hash, uint32_t row) {
        size_t i = first(hash);
        while (table.get()[i]) i = i + 1 < slots ? i + 1 : 0;
        table.get()[i] = hash << 32 | (row + 1);
    }
    // Calls f with every row of this hash (once in 2^32, also another row) until it returns true; then find does, too.
    template <class F> bool find(uint64_t hash, F f) const {
        for (size_t i = first(hash); uint64_t s = table.get()[i]; i = i + 1 < slots ? i + 1 : 0)
            if (s >> 32 == (hash & UINT32_MAX) && f((uint32_t)s - 1)) return true;
        return false;
    }

  private:
    const size_t slots;
    std::unique_ptr<uint64_t, decltype(&free)> table;
    size_t first(uint64_t hash) const { return (size_t)((__uint128_t)hash * slots >> 64); }
};

// The character n-grams of a text as hashes; case and blanks are ignored. A text shorter than n is one gram.
std::vector<uint64_t> ngrams(std::u32string_view s, size_t n);

double jaccard(std::vector<uint64_t> a, std::vector<uint64_t> b);

// MinHash with banding (Broder 1997; Leskovec et al., Mining of Massive Datasets, 3.4). Rows whose sets have a Jaccard
// similarity s agree in the minimum of a random order with probability s, in all r of a band with s^r, in at least one
// of b bands with 1 - (1 - s^r)^b: half of the pairs at s = 0.72 for 14 bands of 8. One hash per band.
struct MinHash {
    static constexpr size_t BANDS = 14, ROWS = 8;
    uint32_t factor[BANDS * ROWS], summand[BANDS * ROWS]; // the i-th order of 32-bit hashes x: factor x + summand

    MinHash();
    std::array<uint64_t, BANDS> bands(const std::vector<uint64_t>& grams) const;
};

} // namespace book
