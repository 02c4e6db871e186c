// model/sampling.h: from logits to a token: penalties, temperature, top-k, top-p, min-p; and log-probabilities. The
// same bits on every machine, with any number of threads, and on a GPU.
#pragma once
#include "model/numbers.h"
#include "model/random.h"
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

// e^x for the sampler, every step one fmaf: the bits are the same on every machine and on a GPU. Relative error under
// 3e-7; 0 below -87; x <= 88. e^x = 2^k e^r with k = round(x / ln 2), |r| <= ln 2 / 2, and e^r by its Taylor series.
BOTH inline float exp_exact(float x) {
    const float shifted = fmaf(x, 1.44269504f, 12582912.f), k = shifted - 12582912.f; // 1.5 * 2^23: adding it rounds
    const float r = fmaf(k, -1.42860677e-6f, fmaf(k, -0.693145752f, x)); // ln 2 in two parts, the first with few bits
    float p = fmaf(1.f / 5040, r, 1.f / 720);
    p = fmaf(p, r, 1.f / 120);
    p = fmaf(p, r, 1.f / 24);
    p = fmaf(p, r, 1.f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.f);
    p = fmaf(p, r, 1.f);
    uint32_t bits, shift;
    memcpy(&shift, &shifted, 4);
    memcpy(&bits, &p, 4);
    bits += shift << 23; // k is in the low bits of `shifted`
    memcpy(&p, &bits, 4);
    return x < -87.f ? 0.f : p;
}


struct Sampling {
    float temperature = 0.7f; // 0: greedy
    int top_k = 20;           // 0: off
    float top_p = 0.8f;       // 1: off
    float min_p = 0;          // 0: off
    float repeat = 1;         // 1: off; divides (multiplies, where negative) the logits of ids seen in prompt or answer
    float presence = 0;       // is subtracted once from the logits of ids in the answer
    float frequency = 0;      // is subtracted as often as they occur there
    uint64_t seed = 0;
};
BOTH inline bool has_penalties(const Sampling& how) {
    return how.repeat != 1 || how.presence != 0 || how.frequency != 0;
}

// The logit of an id with the penalties. `seen`: IN_PROMPT if the prompt has it, plus its count in the answer.
constexpr uint32_t IN_PROMPT = 1u << 31;
BOTH inline float penalized(float logit, const Sampling& how, uint32_t seen) {
    if (seen && how.repeat != 1) logit = logit > 0 ? logit / how.repeat : logit * how.repeat;
    const uint32_t count = seen & ~IN_PROMPT;
    return count ? logit - fmaf(how.frequency, (float)count, how.presence) : logit;
}
// (V): `seen` of every id. ids: prompt and answer; the answer begins at ids[answer].
inline std::vector<uint32_t> seen_counts(const std::vector<int>& ids, size_t answer, int V) {
    std::vector<uint32_t> seen(V);
    for (size_t i = 0; i < answer; i++) seen[ids[i]] = IN_PROMPT;
    for (size_t i = answer; i < ids.size(); i++) seen[ids[i]]++;
    return seen;
}

// Applies them to logits (V).
inline void penalize(float* logits, const Sampling& how, const std::vector<int>& ids, size_t answer, int V) {
    if (!has_penalties(how)) return;
    const std::vector<uint32_t> seen = seen_counts(ids, answer, V);
    for (int id = 0; id < V; id++) logits[id] = penalized(logits[id], how, seen[id]);
}

// The comparison key of a logit: a NaN is below all numbers; infinities are only very large.
BOTH inline float usable(float logit) { return logit == logit ? fminf(fmaxf(logit, -FLT_MAX), FLT_MAX) : -FLT_MAX; }

// Samples an id from logits (V); only ids < exist are allowed. In this order: penalties (above), temperature, top-k,
// top-p, min-p; ties go to the lower id. `counter` is the position of the sampled token: the same seed, counter and
// logits give the same id. Probabilities are integers, e^(l - max) in steps of 2^-40: integer sums are the same in any
// order, so any number of threads, and a GPU, sample the same token.
inline int sample(const float* logits, int exist, const Sampling& how, uint64_t counter) {
    auto value = [&](int id) { return usable(logits[id]); };
    int best = 0;
    for (int id = 1; id < exist; id++)
        if (value(id) > value(best)) best = id;
    if (how.temperature == 0 || exist == 1) return best;

    struct Candidate { float logit; int id; uint64_t weight; };
    std::vector<Candidate> kept;
    const float top = value(best);
    for (int id = 0; id < exist; id++) {
        float x = (value(id) - top) / how.temperature;
        uint64_t weight = x < -28.f ? 0 : (uint64_t)(exp_exact(x) * 1099511627776.f); // 2^40; e^-28 is below 2^-40
        if (weight) kept.push_back({value(id), id, weight});
    }
    auto likelier = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    if (how.top_k > 0 && (size_t)how.top_k < kept.size()) {
        std::nth_element(kept.begin(), kept.begin() + how.top_k, kept.end(), likelier);
        kept.resize(how.top_k);
    }
    auto total = [&] {
        uint64_t sum = 0;
        for (auto& c : kept) sum += c.weight;
        return sum;
    };
    if (how.top_p < 1) { // the fewest likeliest tokens that together reach top_p
        std::sort(kept.begin(), kept.end(), likelier);
        double need = (double)how.top_p * (double)total();
        uint64_t sum = 0;
        size_t n = 0;
        while (n < kept.size() && (n == 0 || (double)sum < need)) sum += kept[n++].weight;
        kept.resize(n);
    }
    if (how.min_p > 0) { // at least min_p times as likely as the likeliest
        double need = (double)how.min_p * 1099511627776.;
        auto unlikely = [&](const Candidate& c) { return (double)c.weight < need; };
        kept.erase(std::remove_if(kept.begin(), kept.end(), unlikely), kept.end());
    }
    std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    Philox random = philox(how.seed, counter, STREAM_SAMPLE);
    uint64_t r = (uint64_t)random.v[1] << 32 | random.v[0];
    r = (uint64_t)((unsigned __int128)r * total() >> 64); // 0 <= r < total
    for (auto& c : kept) {
        if (r < c.weight) return c.id;
        r -= c.weight;
    }
    return best;
}

// Log-probabilities of a row of logits: logit - log_sum.
constexpr int MAX_LIKELIEST = 20;
struct Likeliest {
    float log_sum;              // log sum_id e^logit
    int count;                  // of the likeliest ids, the likeliest first; ties go to the lower id
    int id[MAX_LIKELIEST];
    float logit[MAX_LIKELIEST];
};
// Reads logits (V), only ids < exist. k <= MAX_LIKELIEST: how many ids are reported.
inline void likeliest(Likeliest& out, const float* logits, int exist, int k) {
    std::vector<int> ids(exist);
    for (int id = 0; id < exist; id++) ids[id] = id;
    std::sort(ids.begin(), ids.end(), [&](int a, int b) {
        const float x = usable(logits[a]), y = usable(logits[b]);
        return x != y ? x > y : a < b;
    });
    const float top = usable(logits[ids[0]]);
    double sum = 0;
    for (int id = 0; id < exist; id++) sum += std::exp((double)usable(logits[id]) - top);
    out.log_sum = (float)(top + std::log(sum));
    out.count = std::min(k, exist);
    for (int i = 0; i < out.count; i++) out.id[i] = ids[i], out.logit[i] = usable(logits[ids[i]]);
}
