// model/dropout.h: random changes of training: masks of dropout in front of LoRA's A, and noise on embeddings.
#pragma once
#include "model/random.h"
#include <cstddef>
#include <cstdint>
#include <vector>

template <class T> struct Linear; // qwen3.cu, 2

// Dropout of one training step. A mask is a function of (seed, step, token, module, column). `token` numbers the tokens
// of the step by row and position, so masks depend neither on packing nor on accumulation.
struct Dropout {
    float p;               // probability that a number is dropped
    uint64_t seed;
    uint32_t step;
    const uint32_t* token; // (N)
};
// Bit i: whether column 8 k8 + i of a token is kept for a module. One Philox gives eight numbers of 16 bits; a column
// is kept if its number is at least p 2^16.
BOTH inline uint32_t dropout_mask(const Dropout& d, const PhiloxKeys& keys, // of d.seed
                                  uint32_t token, uint32_t module, uint32_t k8) {
    const uint64_t counter = (uint64_t)token << 32 | module << 16 | k8;
    const Philox r = philox(keys, counter, STREAM_DROPOUT | (uint64_t)d.step << 8);
    const uint32_t limit = (uint32_t)(d.p * 65536 + 0.5f);
    uint32_t kept = 0;
    for (int i = 0; i < 8; i++) kept |= (uint32_t)((r.v[i / 2] >> i % 2 * 16 & 0xffff) >= limit) << i;
    return kept;
}
BOTH inline uint32_t dropout_mask(const Dropout& d, uint32_t token, uint32_t module, uint32_t k8) {
    return dropout_mask(d, PhiloxKeys(d.seed), token, module, k8);
}

// Whether column i of row n is kept for a module.
inline bool dropout_keeps(const Dropout& d, int n, int module, int i) {
    return dropout_mask(d, d.token[n], (uint32_t)module, (uint32_t)i / 8) >> (i % 8) & 1;
}

// Noise on the embeddings of one training step. A number is a function of (seed, step, token, channel); `token` numbers
// the tokens as in Dropout.
struct Noise {
    uint64_t seed;
    uint32_t step;
    const uint32_t* token; // (N)
    const float* bound;    // (N)
};
// Four numbers, uniform in [-1, 1): channels 4 i4 to 4 i4 + 3 of a token.
struct FourNumbers { float v[4]; };
BOTH inline FourNumbers noise_numbers(const PhiloxKeys& keys, uint32_t step, uint32_t token, uint32_t i4) {
    const Philox r = philox(keys, (uint64_t)token << 32 | i4, STREAM_NOISE | (uint64_t)step << 8);
    FourNumbers four;
    for (int i = 0; i < 4; i++) four.v[i] = (float)(r.v[i] >> 8) * (1.f / 8388608) - 1; // 2^23
    return four;
}
// ---- add_noise, a training op of Book I: x[n] += bound[n] u, u uniform in [-1, 1)^C (NEFTune; Jain et al., 2023)
//      x (N,C) +=
template <class A> void add_noise(A* x, const Noise& noise, int N, int C) {
    const PhiloxKeys keys(noise.seed);
    #pragma omp parallel for schedule(static) if (N > 4)
    for (int n = 0; n < N; n++)
        for (int i = 0; i < C; i++)
            x[(size_t)n * C + i] += noise.bound[n] * noise_numbers(keys, noise.step, noise.token[n], i / 4).v[i % 4];
}

// Stored masks of a Linear's x, one for each module of its adapter: two words for 64 columns, bit i % 32 of word i / 32
// for column i; tokens are adjacent. On a GPU lora_down writes them and the backward pass reads them.
struct DropoutMasks {
    uint32_t* words; // (modules, in / 64 rounded up, N, 2)
    int sixty_fours, N;
    BOTH static size_t size(int modules, int in, size_t N) { return modules * (((size_t)in + 63) / 64) * N * 2; }
    BOTH uint32_t* at(int module, int i64, int n) const {
        return words + (((size_t)module * sixty_fours + i64) * N + n) * 2;
    }
};

// An expert's matrix, for the n rows of its pairs. Row i belongs to token pair[i] / k, whose dropout mask it has.
template <class T> struct PairsProduct {
    Linear<T> W;
    Dropout dropout;
    std::vector<uint32_t> token;
    PairsProduct(const Linear<T>& of, const int* pair, int n, int k) : W(of) {
        if (!of.adapter.dropout) return;
        for (int i = 0; i < n; i++) token.push_back(of.adapter.dropout->token[pair[i] / k]);
        dropout = *of.adapter.dropout, dropout.token = token.data(), W.adapter.dropout = &dropout;
    }
    PairsProduct(const PairsProduct&) = delete;
};
