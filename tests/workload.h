// nano-vllm's benchmark (bench.py there), to the number: what Python's `random` gives after seed(0).
#pragma once
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

// Python seeds its Mersenne Twister (the same MT19937 as C++'s) with the number's 32-bit words as a key: init_by_array of
// Matsumoto and Nishimura's mt19937ar.c, here for a key of one word.
struct PythonSeed {
    using result_type = uint32_t;
    uint32_t key;

    // C++'s engine asks a seed sequence for its 624 words of state.
    template <class It> void generate(It x, It end) const {
        const uint32_t n = (uint32_t)(end - x);
        auto mixed = [&](uint32_t i, uint32_t factor) { return x[i] ^ ((x[i - 1] ^ (x[i - 1] >> 30)) * factor); };
        x[0] = 19650218;
        for (uint32_t i = 1; i < n; i++) x[i] = 1812433253 * (x[i - 1] ^ (x[i - 1] >> 30)) + i;
        uint32_t i = 1;
        auto next = [&] { if (++i == n) x[0] = x[n - 1], i = 1; };
        for (uint32_t k = 0; k < n; k++, next()) x[i] = mixed(i, 1664525) + key;
        for (uint32_t k = 1; k < n; k++, next()) x[i] = mixed(i, 1566083941) - i;
        x[0] = 1u << 31;
    }
};

struct PythonRandom {
    std::mt19937 twister;
    explicit PythonRandom(uint32_t seed) {
        PythonSeed words{seed};
        twister.seed(words);
    }
    // random.randint(low, high): as many bits as the count of numbers has, until they are below it.
    int randint(int low, int high) {
        const uint32_t count = (uint32_t)(high - low) + 1;
        int bits = 1;
        while (count >> bits) bits++;
        for (;;)
            if (const uint32_t r = twister() >> (32 - bits); r < count) return low + (int)r;
    }
};

struct Work {
    std::vector<int> prompt; // ids
    int answer;              // tokens
};

// As bench.py draws them: prompt by prompt its length and its ids, then the lengths of all answers.
inline std::vector<Work> nano_workload() {
    PythonRandom random(0);
    std::vector<Work> all(256);
    for (Work& w : all) {
        w.prompt.resize((size_t)random.randint(100, 1024));
        for (int& id : w.prompt) id = random.randint(0, 10'000);
    }
    for (Work& w : all) w.answer = random.randint(100, 1024);
    return all;
}
