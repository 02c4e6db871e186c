// model/moments.h: AdamW with moments of 8 bits: definitions, as in Book I.
#pragma once
#include "qwen3.cu"

// Moments of 8 bits (Dettmers et al., "8-bit optimizers via block-wise quantization", 2022). A block of MOMENT_BLOCK
// numbers is its largest magnitude times codes: 256 values of [-1,1] or [0,1] whose steps grow with the magnitude. The
// decade below 10^(i - 6) has n = 2^i values (2^(i + 1) without a sign), the middles of n equal parts of [0.1,1] times
// 10^(i - 6); beside them are 0 and 1. Not v but sqrt(v) is stored, which has as many decades as m.
inline constexpr int MOMENT_BLOCK = 256;
struct Moments8 {
    uint8_t *m, *root;              // (n) codes of m, with a sign, and of sqrt(v)
    float *scale_m, *scale_root;    // (ceil(n / MOMENT_BLOCK))
    Moments8 at(size_t i) const {   // i: a multiple of MOMENT_BLOCK
        return {m + i, root + i, scale_m + i / MOMENT_BLOCK, scale_root + i / MOMENT_BLOCK};
    }
};
// Value c = 0 .. 255 of a code, in ascending order. All numbers are exact up to the division.
BOTH inline float moment_code(int c, bool sign) {
    const int k = !sign ? c + 1 : c < 127 ? 127 - c : c - 127; // number of the magnitude, with 2^i before a decade
    if (c == 255 || k == (sign ? 0 : 1)) return c == 255;
    int i = 0, tenth = 1000000;
    for (; k >> (i + 1 + !sign); i++) tenth /= 10;
    const int n = 1 << (i + !sign), j = k - n;
    const float x = (float)(2 * n + 18 * j + 9) / ((float)(20 * n) * (float)tenth);
    return sign && c < 127 ? -x : x;
}
// The value nearest to x, of two equally near ones the smaller.
BOTH inline int nearest_code(const float* code, float x) {
    int c = 0;
    for (int step = 128; step > 0; step /= 2)
        if (code[c + step] <= x) c += step;
    return c < 255 && code[c + 1] - x < x - code[c] ? c + 1 : c;
}
// ---- adamw8: adamw with moments of 8 bits, which are decoded, updated, used, and then encoded.
template <class T>
void adamw8(T* stored,          // (n) out: copy * p, which the products read
            acc<T>* p,          // (n) in place
            const Moments8& to, // (n) in place
            const acc<T>* g,    // (n)
            const double* norm, // (1) of all gradients
            size_t n,
            size_t decayed,     // numbers that have a.decay; those behind them have none
            const AdamW& a) {
    using A = acc<T>;
    if (!std::isfinite(*norm)) return;
    float code_m[256], code_root[256];
    for (int c = 0; c < 256; c++) code_m[c] = moment_code(c, true), code_root[c] = moment_code(c, false);
    const AdamWStep<A> s(a);
    const A scale = s.scale(*norm);
    #pragma omp parallel for schedule(static) if (n > 2000)
    for (size_t b = 0; b < (n + MOMENT_BLOCK - 1) / MOMENT_BLOCK; b++) {
        const size_t first = b * MOMENT_BLOCK;
        const int count = (int)std::min<size_t>(MOMENT_BLOCK, n - first);
        float m[MOMENT_BLOCK], root[MOMENT_BLOCK], top_m = 0, top_root = 0;
        for (int k = 0; k < count; k++) {
            const size_t i = first + k;
            const A gi = g[i] * scale, was_m = code_m[to.m[i]] * to.scale_m[b];
            const A was_root = code_root[to.root[i]] * to.scale_root[b];
            const A mi = was_m + (gi - was_m) * (1 - s.beta1);
            const A ri = std::sqrt(was_root * was_root * s.beta2 + gi * gi * (1 - s.beta2));
            p[i] = p[i] * (i < decayed ? s.keep : 1) - s.pace * (mi / (ri / s.root + s.eps));
            stored[i] = to_stored<T>(p[i] * s.copy);
            m[k] = (float)mi, root[k] = (float)ri;
            top_m = std::max(top_m, std::fabs(m[k])), top_root = std::max(top_root, root[k]);
        }
        to.scale_m[b] = top_m, to.scale_root[b] = top_root;
        for (int k = 0; k < count; k++) {
            to.m[first + k] = (uint8_t)nearest_code(code_m, top_m > 0 ? m[k] / top_m : 0);
            to.root[first + k] = (uint8_t)nearest_code(code_root, top_root > 0 ? root[k] / top_root : 0);
        }
    }
}
