// pace.h: how many tokens of prompts go into a step that running answers wait for.
#pragma once
#include <cstddef>

namespace server {

// As many as keep the step, by what steps have taken so far, within STRETCH times one of single tokens alone. At least
// `least`, so that prompts always go on. Where prompts come without a pause, one step in STALE takes none of them: what
// a step takes without them has to be known.
struct PromptPace {
    static constexpr double STRETCH = 1.7;
    static constexpr int STALE = 32;
    double alone = 0, each = 0; // seconds: of a step of single tokens, and more for each token of a prompt; 0: unknown
    double last = 0;            // what the last step of single tokens took
    int since = STALE;          // steps with single tokens since then

    // Beside single tokens.
    size_t tokens(size_t least, size_t most) const;
    // A step has taken so long.
    void learn(size_t singles, size_t prompts, double took);
};

} // namespace server
