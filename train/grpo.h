// train/grpo.h: group relative policy optimization (Shao et al., "DeepSeekMath", 2024), for train_lora --grpo.
//
//   advantages    the rewards of a group, the answers to one prompt, relative to the group's mean
//   token_loss    the loss of a token, and its derivative by the token's log-probability
//   Groups        answers, their rewards, and the log-probability of each token when it was sampled
//   Rewarded      their statistics in the log
//
// rewards.h computes an answer's reward; answers.h samples answers; rollout.cpp combines them.
#pragma once
#include "model/dataset.h"
#include "sj.h"
#include <cstdint>
#include <string>
#include <vector>

struct Ranks;

struct GrpoOptions {
    std::vector<std::string> rewards; // see make_reward
    double timeout = 60;              // s for a program
    int group = 8, iterations = 1, max_tokens = 256;
    double kl_beta = 0, epsilon = 0.2, epsilon_high = -1; // -1: as epsilon
    std::string loss = "dapo", scale = "group";
    bool mask_truncated = false;
    double temperature = 1, top_p = 1;
    bool model_scores() const; // a reward is a reward model's
};

// reward - mean, divided by the group's standard deviation (of a sample) if requested. Equal rewards: zero.
struct Advantages { std::vector<double> of; double deviation; };
Advantages advantages(const double* reward, size_t n, bool scaled);

// The loss of a token with log-probability p now, `old` when it was sampled, `ref` by the reference; r = e^(p - old):
//   loss = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta kl,  kl = e^(ref - p) - (ref - p) - 1
// (equations 3 and 4 there; two limits: DAPO, Yu et al., 2025). `slope` is its derivative by p.
struct TokenLoss { double loss, slope, kl; bool low, high; };
TokenLoss token_loss(double p, double old, double ref, double A, const GrpoOptions& o);

// The answers of some prompts, `group` to each, as rows of a dataset: prompt, then the answer, which is trained.
struct Groups {
    size_t size = 1; // of a group
    std::vector<std::vector<uint32_t>> rows;
    std::vector<bool> ended;                     // by an end token, not by the limit
    std::vector<double> reward, advantage, each; // each: the sum of each kind of reward, without its weight
    std::vector<std::vector<float>> old, reference; // log-probabilities of the answers' tokens; empty: not known
    std::vector<size_t> places;                  // of the groups in their step

    size_t group() const { return size; }
    DatasetRow row(size_t i) const { return {rows[i].data(), rows[i].data() + rows[i].size()}; }
    size_t length(size_t i) const; // of an answer
    bool counts(size_t i, const GrpoOptions& o) const { return ended[i] || !o.mask_truncated; }

    std::string json() const;
    Groups() = default;
    Groups(const char* path, const std::string& text, size_t group, uint32_t V); // of json()
};

// Statistics of answers and their rewards, with TRL's names: per answer, group, token. Sums, then means; reward_std is
// a sum of squares first.
struct Rewarded {
    static constexpr const char* NAMES[] = {"reward", "completions/mean_length", "completions/clipped_ratio",
                                            "reward_std", "frac_reward_zero_std",
                                            "kl", "clip_ratio/low_mean", "clip_ratio/high_mean",
                                            "clip_ratio/region_mean"};
    static constexpr int REWARD = 0, LENGTH = 1, CUT = 2, SPREAD = 3, ALIKE = 4, KL = 5, LOW = 6, HIGH = 7, CLIPPED = 8,
                         N = 9;
    double value[N] = {}, answers = 0, groups = 0, tokens = 0;
    double drawn = 0, time = 0; // sampled tokens, time
    std::vector<double> each;   // kind of reward

    Rewarded() = default;
    explicit Rewarded(const Groups& g);
    void add(const TokenLoss& t);
    void sum_over(Ranks& ranks);
    void divide();
    void write(sj::Writer& w, const GrpoOptions& o, bool evaluated) const;
    std::string text() const;
};

// A row is a prompt; the trained part at its end is the reference answer of rewards.
const uint32_t* answer_in(DatasetRow row);
std::vector<int> prompt_of(DatasetRow row);
