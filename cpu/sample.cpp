// cpu/sample.cpp: drawing a token and finding the likeliest ones, on the CPU.
#include "cpu/lanes.h"
#include "cpu/ops.h"
#include <cfloat>
#include <cmath>
#include <functional>
#include <vector>

#ifndef QWEN3_DOUBLE
// Samples as `sample` does, which is called on only those logits that top-k may keep: all that are at least the k-th
// largest of the block maxima.
int sample_cpu(const Context&, const float* logits, int exist, const Sampling& how, uint64_t counter) {
    constexpr int BLOCK = 512; // whole vectors
    const int k = how.temperature == 0 ? 1 : how.top_k, blocks = exist / BLOCK;
    if (k <= 0 || k > blocks) return sample(logits, exist, how, counter);
    std::vector<float> tops(blocks), kept;
    for (int b = 0; b < blocks; b++) {
        float top[LANES];
        std::fill_n(top, LANES, -FLT_MAX);
        for (int i = 0; i < BLOCK; i += LANES)
            for (int l = 0; l < LANES; l++) top[l] = std::max(top[l], logits[b * BLOCK + i + l]); // (not a NaN)
        tops[b] = *std::max_element(top, top + LANES);
    }
    std::nth_element(tops.begin(), tops.begin() + k - 1, tops.end(), std::greater<float>());
    const float least = tops[k - 1];
    if (least == -FLT_MAX) return sample(logits, exist, how, counter);
    std::vector<int> ids;
    for (int id = 0; id < exist; id++)
        if (logits[id] >= least) ids.push_back(id), kept.push_back(logits[id]);
    return ids[sample(kept.data(), (int)kept.size(), how, counter)];
}

// Returns the result of `likeliest`. One pass finds the largest logit of each block. A second pass adds up, and
// searches only blocks whose maximum is at least the k-th largest maximum.
void likeliest_cpu(const Context&, Likeliest& out, const float* logits, int exist, int k) {
    constexpr int BLOCK = 512; // whole vectors
    const int blocks = (exist + BLOCK - 1) / BLOCK;
    std::vector<float> tops(blocks);
    auto load = [&](float (&v)[LANES], int i, int n) { // n usable logits; the others do not exist
        std::fill(v + n, v + LANES, -INFINITY);
        for (int l = 0; l < n; l++) v[l] = std::min(std::max(-FLT_MAX, logits[i + l]), FLT_MAX); // (not a NaN)
    };
    auto each = [&](int b, auto f) {
        const int end = std::min(exist, (b + 1) * BLOCK);
        int i = b * BLOCK;
        for (; i + LANES <= end; i += LANES) f(i, LANES);
        if (i < end) f(i, end - i);
    };
    for (int b = 0; b < blocks; b++) {
        float top[LANES], v[LANES];
        std::fill_n(top, LANES, -FLT_MAX);
        each(b, [&](int i, int n) {
            load(v, i, n);
            for (int l = 0; l < LANES; l++) top[l] = std::max(top[l], v[l]);
        });
        tops[b] = *std::max_element(top, top + LANES);
    }
    std::vector<float> order = tops;
    const float top = *std::max_element(tops.begin(), tops.end());
    float least = k > 0 ? -FLT_MAX : INFINITY;
    if (k > 0 && k <= blocks) {
        std::nth_element(order.begin(), order.begin() + k - 1, order.end(), std::greater<float>());
        least = order[k - 1];
    }
    double sum = 0;
    std::vector<int> ids;
    for (int b = 0; b < blocks; b++) {
        float16v part = {}, x;
        each(b, [&](int i, int n) {
            float v[LANES];
            load(v, i, n);
            memcpy(&x, v, sizeof x);
            x -= top;
            exp_lanes(x);
            part += x;
        });
        sum += sum_lanes(part);
        for (int id = b * BLOCK; tops[b] >= least && id < std::min(exist, (b + 1) * BLOCK); id++)
            if (usable(logits[id]) >= least) ids.push_back(id);
    }
    out.log_sum = (float)(top + std::log(sum));
    out.count = std::min(k, exist);
    std::partial_sort(ids.begin(), ids.begin() + out.count, ids.end(), [&](int a, int b) {
        const float x = usable(logits[a]), y = usable(logits[b]);
        return x != y ? x > y : a < b;
    });
    for (int i = 0; i < out.count; i++) out.id[i] = ids[i], out.logit[i] = usable(logits[ids[i]]);
}
#endif
