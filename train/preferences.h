// train/preferences.h: training on preferences: the table of losses, and the statistics in the log.
#pragma once
#include "sj.h"
#include <cmath>
#include <string>

// An answer's log-probability: by the model, by the reference (the model before the first step), and its tokens.
struct Likelihood {
    double logp, reference, tokens;
    double gain() const { return logp - reference; }
    double mean() const { return logp / tokens; }
};

struct PreferenceOptions { double beta = 0.1, smoothing = 0, gamma = 0.5, desirable = 1, undesirable = 1; };

// -log sigmoid(x), with label smoothing e: -(1 - e) log sigmoid(x) - e log sigmoid(-x). slope: its derivative by x.
struct SigmoidLoss { double loss, slope; };
SigmoidLoss sigmoid_loss(double x, double smoothing = 0);

// The losses of a pair, and their derivatives by the log-probabilities of both answers. Below, g is gain(), the log
// ratio to the reference; m is mean(), per token; n is tokens; c and r are the chosen and the rejected answer.
struct PairLoss { double loss, by_chosen, by_rejected; };
// Direct preference optimization (Rafailov et al., 2023, equation 7): -log sigmoid(beta (g_c - g_r)), with label
// smoothing (Mitchell, 2023).
PairLoss dpo_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected);
// Identity preference optimization (Azar et al., 2023, equation 17), per token as in TRL:
// (g_c / n_c - g_r / n_r - 1 / (2 beta))^2.
PairLoss ipo_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected);
// Simple preference optimization (Meng et al., 2024, equation 6): -log sigmoid(beta (m_c - m_r) - gamma).
PairLoss simpo_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected);
// Odds ratio preference optimization (Hong et al., 2024, equations 6 and 7): -m_c - beta log sigmoid(odds_c - odds_r),
// where odds is m - log(1 - e^m).
PairLoss orpo_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected);

// Kahneman-Tversky optimization (Ethayarajh et al., 2024, equation 8), of one answer with a label:
// w (1 - sigmoid(beta (g - kl))) if it is desirable, else w (1 - sigmoid(beta (kl - g))). kl: see Trainer::find_kl.
struct AnswerLoss { double loss, by_logp; };
AnswerLoss kto_loss(const PreferenceOptions& o, const Likelihood& answer, double kl, bool desirable);

// Reward models (Bradley and Terry, 1952; Ouyang et al., 2022, equation 1), where logp is a head's score of an answer:
// -log sigmoid(score_c - score_r).
PairLoss bradley_terry_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected);

struct PreferenceLoss {
    const char* name;
    bool has_reference; // else rewards and logged log-probabilities are per token, as in TRL
    PairLoss (*of_pair)(const PreferenceOptions&, const Likelihood& chosen, const Likelihood& rejected); // null: KTO
    bool scores = false; // answers have scores, no log-probabilities

    bool pairs() const { return of_pair != nullptr; }
    double logp(const Likelihood& l) const { return scores ? NAN : has_reference ? l.logp : l.mean(); }
    double reward(const PreferenceOptions& o, const Likelihood& l) const {
        return scores ? l.logp : o.beta * (has_reference ? l.gain() : l.mean());
    }
};
inline constexpr PreferenceLoss PREFERENCE_LOSSES[] = {{"dpo", true, dpo_loss},
                                                       {"ipo", true, ipo_loss},
                                                       {"simpo", false, simpo_loss},
                                                       {"orpo", false, orpo_loss},
                                                       {"kto", true, nullptr}};
inline constexpr PreferenceLoss REWARD_MODEL = {"reward-model", false, bradley_terry_loss, true};

// Statistics besides the loss, with TRL's names: sums, then means. With labels: chosen means desirable, rejected
// undesirable.
struct Preferences {
    static constexpr const char* NAMES[] = {"rewards/chosen", "rewards/rejected", "rewards/accuracies",
                                            "rewards/margins", "logps/chosen", "logps/rejected"};
    static constexpr int ACCURACY = 2, MARGIN = 3, N = 6;
    double value[N] = {}, count[2] = {}; // count: answers chosen, rejected
    double kl = 0;                       // with labels; of one rank

    void add(bool rejected, double reward, double logp);
    void divide(); // NaN: the mean of no answer
    void write(sj::Writer& w, const std::string& before, bool pairs) const;
    std::string text(bool pairs) const;
};
