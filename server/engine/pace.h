// pace.h: how many prompt tokens a step takes while answers run.
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

} // namespace server
