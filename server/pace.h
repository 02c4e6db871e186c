// pace.h: how many tokens of prompts go into a step that running answers wait for. Included by serve.cu.
#pragma once

// As many as keep the step, by what steps have taken so far, within STRETCH times one of single tokens alone. At least
// `least`, so that prompts always go on. Where prompts come without a pause, one step in STALE takes none of them: what
// a step takes without them has to be known.
struct PromptPace {
    static constexpr double STRETCH = 1.7, WEIGHT = 0.125; // WEIGHT: of a step in the averages
    static constexpr int STALE = 32;
    double alone = 0, each = 0; // seconds: of a step of single tokens, and more for each token of a prompt. 0: not known
    int since = STALE;          // steps with single tokens since the last of them alone

    // Beside single tokens.
    size_t tokens(size_t least, size_t most) const {
        if (since >= STALE) return 0;
        const double fit = each > 0 ? (STRETCH - 1) * alone / each : 0;
        return fit > (double)most ? most : std::max(std::min(least, most), (size_t)fit);
    }
    // A step has taken so long.
    void learn(size_t singles, size_t prompts, double took) {
        if (singles) since = prompts ? since + 1 : 0;
        auto average = [](double& x, double next) { x = x == 0 ? next : x + WEIGHT * (next - x); };
        // (The first steps of a GPU record graphs; so what is shorter is believed sooner.)
        if (!prompts) average(alone, took), alone = std::min(alone, 2 * took);
        else if (singles) average(each, std::max(took - alone, took / 100) / (double)prompts);
        else if (each == 0) each = took / (double)prompts;
    }
};
