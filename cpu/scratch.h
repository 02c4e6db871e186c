// cpu/scratch.h: memory that an op keeps from call to call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

// Memory for n numbers that an op keeps from call to call: it grows to the largest call, and stays. It begins with a
// cache line, since a vector that lies across two takes twice as long to load.
template <class U> U* at_least(std::vector<U>& kept, size_t n) {
    const size_t line = 64, spare = sizeof(U) < line ? line / sizeof(U) : 0;
    if (kept.size() < n + spare) kept.resize(n + spare);
    return spare ? (U*)(((uintptr_t)kept.data() + line - 1) / line * line) : kept.data();
}
