// pace.h: how many prompt tokens a step takes while answers run; whether reading pages pays.
#pragma once
#include <cstddef>

namespace server {

// As many as keep the step, estimated from earlier steps, within STRETCH times a step of single tokens alone. At least
// `least`, so that prompts always advance. While prompts never pause, one step in STALE takes none of them, to measure
// a step without them.
struct PromptPace {
    static constexpr double STRETCH = 1.7;
    static constexpr int STALE = 32;
    double alone = 0, each = 0; // seconds: of a step of single tokens, and per prompt token added; 0: unknown
    double last = 0;            // duration of the last step of single tokens
    int since = STALE;          // steps with single tokens since then

    // Prompt tokens beside single tokens.
    size_t tokens(size_t least, size_t most) const;
    // Records the duration of a step.
    void learn(size_t singles, size_t prompts, double took);
};

// Pages are read from the disk as long as that has taken less time than computing them: on a fast GPU, a small model's
// prompt may be computed faster than a disk reads it. Only long prompts are measured. While nothing is read, the
// measured time of reading fades, so that it is tried again.
struct ReadPace {
    static constexpr size_t LONG = 256;  // tokens
    double computing = 0, reading = 0;   // seconds a token; 0: unknown

    void learn(double& each, size_t tokens, double took) const {
        if (tokens >= LONG) each = each == 0 ? took / (double)tokens : (each + took / (double)tokens) / 2;
    }
    bool pays() {
        const bool yes = computing == 0 || reading <= computing;
        if (!yes) reading *= 0.95;
        return yes;
    }
};

} // namespace server
