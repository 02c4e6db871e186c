// model/random.h: random numbers, the same on CPU and GPU: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", 2011). A number is a pure function of (seed, counter, stream), so any can be computed at any time.
#pragma once
#include "model/numbers.h"
#include <cstdint>

struct Philox {
    uint32_t v[4];
};
struct PhiloxKeys { // of each round
    uint32_t k[10][2];
    BOTH explicit PhiloxKeys(uint64_t seed) {
        for (uint32_t i = 0; i < 10; i++)
            k[i][0] = (uint32_t)seed + i * 0x9E3779B9, k[i][1] = (uint32_t)(seed >> 32) + i * 0xBB67AE85;
    }
};
BOTH inline Philox philox(const PhiloxKeys& keys, uint64_t counter, uint64_t stream) {
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)};
    for (auto& k : keys.k) {
        uint64_t a = (uint64_t)0xD2511F53 * c[0], b = (uint64_t)0xCD9E8D57 * c[2];
        uint32_t x = (uint32_t)(b >> 32) ^ c[1] ^ k[0], y = (uint32_t)(a >> 32) ^ c[3] ^ k[1];
        c[0] = x, c[1] = (uint32_t)b, c[2] = y, c[3] = (uint32_t)a;
    }
    return {{c[0], c[1], c[2], c[3]}};
}
BOTH inline Philox philox(uint64_t seed, uint64_t counter, uint64_t stream) {
    return philox(PhiloxKeys(seed), counter, stream);
}
// Each purpose has its own stream.
enum RandomStream : uint64_t {
    STREAM_SAMPLE = 1, STREAM_SYNTHESIZE = 2, STREAM_DROPOUT = 3, STREAM_INIT = 4, STREAM_SHUFFLE = 5,
    STREAM_ROLLOUT = 6, STREAM_NOISE = 7, STREAM_DISTIL = 8
};
