// pace.h: how many tokens of prompts go into a step that running answers wait for. Included by serve.cu.
#pragma once

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
    size_t tokens(size_t least, size_t most) const {
        if (since >= STALE) return 0;
        const double fit = each > 0 ? (STRETCH - 1) * alone / each : 0;
        return fit > (double)most ? most : std::max(std::min(least, most), (size_t)fit);
    }
    // A step has taken so long.
    void learn(size_t singles, size_t prompts, double took) {
        if (singles) since = prompts ? since + 1 : 0;
        const double more = std::max(took - alone, took / 100) / (double)std::max<size_t>(prompts, 1);
        if (!prompts) { // that it takes longer now is believed when it has been seen twice; a GPU's first step is long
            const double sure = std::min(took, last == 0 ? took : last);
            alone = alone == 0 ? took : std::min((alone + sure) / 2, 2 * took), last = took;
        } else if (each == 0) {
            each = more;
        } else if (singles) {
            each += (more - each) / 8;
        }
    }
};
