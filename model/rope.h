// model/rope.h: RoPE's table of cosines and sines, and scaled frequencies for positions beyond those of training. The
// rotation is qknorm_rope_kv in qwen3.cu. (YaRN: Peng et al., "YaRN: efficient context window extension of large
// language models", 2023.)
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace sj { struct Value; }

// A plane makes n turns in the `original` positions. A frequency is divided by `factor` where n < slow, stays where
// n > fast, and is between the two elsewhere. LINEAR divides all frequencies.
struct RopeScaling {
    static constexpr double TURN = 6.283185307179586; // radians
    enum Type { NONE, LINEAR, LLAMA3, YARN } type = NONE;
    double factor = 1;
    int original = 0;        // positions of training; 0: not known (LINEAR)
    double attention = 1;    // YARN: factor of cosines and sines: scores get its square
    double fast = 0, slow = 0;
    bool truncate = true;    // YARN: the planes that make `fast` and `slow` turns are rounded outwards

    // YARN: the planes, not whole numbers if not truncated, that make `fast` and `slow` turns.
    std::pair<double, double> range(int D, double theta) const;
    // The context: the positions of training times the factor, or the config's own limit if that is more.
    int reach(int max_positions) const;
    // For a line that names the context: ", RoPE by yarn, 4 x 32768 positions"; "": not scaled.
    std::string note() const;
};

// A config's rope_scaling (transformers 4) or rope_parameters (transformers 5), which both may have rope_theta. Types
// that change frequencies with a sequence's length, and keys that are not known, are refused by name. D: of a head.
RopeScaling parse_rope(const std::string& file, const sj::Value& config, int D, int max_positions, double& theta);

inline std::pair<double, double> RopeScaling::range(int D, double theta) const {
    auto plane = [&](double turns) { return D * std::log(original / (turns * TURN)) / (2 * std::log(theta)); };
    double low = plane(fast), high = plane(slow);
    if (truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.), high = std::min(high, D - 1.);
    return {low, low == high ? high + 0.001 : high};
}

// frequency (D/2): theta^(-2i/D). Each step is rounded to A where Hugging Face rounds it to float.
template <class A> void scale_frequencies(std::vector<A>& frequency, double theta, const RopeScaling& s) {
    const int D = 2 * (int)frequency.size();
    const A factor = (A)s.factor;
    const auto [low, high] = s.type == RopeScaling::YARN ? s.range(D, theta) : std::pair(0., 0.);
    for (int i = 0; i < D / 2; i++) {
        A& f = frequency[(size_t)i];
        if (s.type == RopeScaling::LINEAR) f /= factor;
        if (s.type == RopeScaling::YARN) {
            const A inverse = (A)std::pow(theta, (double)((A)(2 * i) / (A)D));
            const A ramp = std::clamp(((A)i - (A)low) / (A)(high - low), (A)0, (A)1), keep = 1 - ramp;
            f = 1 / (factor * inverse) * (1 - keep) + f * keep;
        }
        if (s.type == RopeScaling::LLAMA3) {
            const A length = (A)RopeScaling::TURN / f; // of a turn, in positions
            const A keep = ((A)s.original / length - (A)s.slow) / (A)(s.fast - s.slow);
            if (length > (A)(s.original / s.slow)) f /= factor;
            else if (!(length < (A)(s.original / s.fast))) f = (1 - keep) * f / factor + keep * f;
        }
    }
}

// ---- fill_rope: cosine and sine of p theta^(-2i/D), RoPE's angle at position p in plane i, the numbers i and i + D/2
// of a head. Each step is rounded where Hugging Face rounds it. `scaling` also changes the length of (cosine, sine).
//      rope (positions, D/2, 2)
template <class A> void fill_rope(A* rope, int positions, int D, double theta, const RopeScaling& scaling = {}) {
    std::vector<A> frequency(D / 2);
    for (int i = 0; i < D / 2; i++) frequency[i] = (A)1 / (A)std::pow(theta, (double)((A)(2 * i) / (A)D));
    scale_frequencies(frequency, theta, scaling);
    const A factor = (A)scaling.attention;
    #pragma omp parallel for schedule(static)
    for (int p = 0; p < positions; p++)
        for (int i = 0; i < D / 2; i++) {
            const A angle = (A)p * frequency[i];
            rope[(size_t)p * D + 2 * i] = std::cos(angle) * factor;
            rope[(size_t)p * D + 2 * i + 1] = std::sin(angle) * factor;
        }
}
