// tests/emulate/accesses.h: how the warps of an emulated kernel use memory: sectors of global memory, bank conflicts.
//
// The kernel's source is compiled by `g++ -fsanitize=thread`, which puts a call before each load and store. The runtime
// of ThreadSanitizer is not linked: accesses.cpp has these functions, and is compiled without the option itself. When
// the lanes of a warp come to the same place in the source for the k-th time, by the same calls, that is one access. So
// the counts are exact where no lane skips a round of a loop that others have.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace accesses {
struct Count { // of warps
    long loads = 0, stores = 0;
    long turns = 0, least = 0; // global: sectors of 32 bytes, and those that are enough; shared: wavefronts
    long bad = 0;              // global: uncoalesced, more than half as many sectors again; shared: with conflicts
    int most = 0;              // sectors, or ways of a conflict, of one access
};
struct Line { std::string place; bool shared, store; Count count; }; // of the source
struct Report {
    Count global, shared;
    std::vector<Line> bad; // the worst lines first
    bool complete = false; // false: there is no addr2line
};

void begin(const size_t* thread);                   // the index of the thread that runs, in its block
void not_shared(const void* p, size_t bytes);       // static variables are shared memory but for these
void array(void* p, size_t bytes); // an array of global memory; 0: it is gone
void touch(const void* p, size_t bytes, bool store);
void block_ends();
Report end(const std::string& source); // lines of this file, by addr2line
} // namespace accesses
