// model/adamw.h: the parameters of AdamW. The ops are adamw (qwen3.cu, 6) and adamw8 (model/moments.h).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

struct AdamW {
    float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0;
    float clip = 0;   // 0: off
    int64_t step = 0; // from 1
    float copy = 1;   // stored = copy * p: s for an adapter's B, else 1
};
// Constants of one step, as the type of sums.
template <class A> struct AdamWStep {
    A beta1, beta2;
    A root, keep, pace; // sqrt(v) / sqrt(v'); 1 - lr decay; lr m' / m
    A eps, clip, copy;
    explicit AdamWStep(const AdamW& a)
        : beta1(a.beta1), beta2(a.beta2), root((A)std::sqrt(1 - std::pow((double)a.beta2, (double)a.step))),
          keep((A)(1 - (double)a.lr * a.decay)), pace((A)a.lr / (A)(1 - std::pow((double)a.beta1, (double)a.step))),
          eps(a.eps), clip(a.clip), copy(a.copy) {}
    A scale(double norm) const { return (A)(clip > 0 ? std::min(1., clip / (norm + 1e-6)) : 1.); } // of g
};
