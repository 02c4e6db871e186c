// train/dpo.h: direct preference optimization: the loss of a pair, and the statistics of pairs in the log.
#pragma once
#include "sj.h"
#include <string>

// Direct preference optimization (Rafailov et al., 2023, equation 7). The reward of an answer y to a prompt x is
// beta (log p(y|x) - log p_ref(y|x)); a pair's margin is the reward of the chosen answer less that of the rejected one;
//   loss = -log sigmoid(margin), with label smoothing e: -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)
// (Mitchell, 2023). `slope` is its derivative by the margin.
struct PairLoss { double loss, slope; };
PairLoss dpo_loss(double margin, double smoothing);

// Statistics of pairs besides the loss, with TRL's names; sums, then means.
struct Preferences {
    static constexpr const char* NAMES[] = {"rewards/chosen", "rewards/rejected", "rewards/accuracies",
                                            "rewards/margins", "logps/chosen", "logps/rejected"};
    static constexpr int ACCURACY = 2, MARGIN = 3, N = 6;
    double value[N] = {};

    void add(double reward_chosen, double reward_rejected, double chosen, double rejected);
    void divide(double n) { for (double& x : value) x /= n; }
    void write(sj::Writer& w, const std::string& before) const;
    std::string text() const;
};
