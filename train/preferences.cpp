// train/preferences.cpp: the losses of preferences, and the trainer's part: the reference, gradients of a batch.
#include "train/preferences.h"
#include "base/options.h"
#include "model/instances.h"
#include "model/pace.h"
#include "train/trainer.h"
#include <algorithm>
#include <cmath>

SigmoidLoss sigmoid_loss(double x, double smoothing) {
    auto minus_log_sigmoid = [](double x) { return std::max(-x, 0.) + std::log1p(std::exp(-std::fabs(x))); };
    const double loss = (1 - smoothing) * minus_log_sigmoid(x) + smoothing * minus_log_sigmoid(-x);
    return {loss, smoothing / (1 + std::exp(-x)) - (1 - smoothing) / (1 + std::exp(x))};
}

PairLoss dpo_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected) {
    const SigmoidLoss s = sigmoid_loss(o.beta * chosen.gain() - o.beta * rejected.gain(), o.smoothing);
    return {s.loss, o.beta * s.slope, -o.beta * s.slope};
}

PairLoss ipo_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected) {
    const double x = chosen.gain() / chosen.tokens - rejected.gain() / rejected.tokens - 1 / (2 * o.beta);
    return {x * x, 2 * x / chosen.tokens, -2 * x / rejected.tokens};
}

PairLoss simpo_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected) {
    const SigmoidLoss s = sigmoid_loss(o.beta * (chosen.mean() - rejected.mean()) - o.gamma);
    return {s.loss, o.beta * s.slope / chosen.tokens, -o.beta * s.slope / rejected.tokens};
}

PairLoss orpo_loss(const PreferenceOptions& o, const Likelihood& chosen, const Likelihood& rejected) {
    auto other = [](double m) { return std::max(-std::expm1(m), 1e-12); }; // 1 - e^m; 0 if the answer is certain
    const double c = chosen.mean(), r = rejected.mean();
    const SigmoidLoss s = sigmoid_loss((c - std::log(other(c))) - (r - std::log(other(r))));
    return {-c + o.beta * s.loss, (o.beta * s.slope / other(c) - 1) / chosen.tokens,
            -o.beta * s.slope / other(r) / rejected.tokens};
}

PairLoss bradley_terry_loss(const PreferenceOptions&, const Likelihood& chosen, const Likelihood& rejected) {
    const SigmoidLoss s = sigmoid_loss(chosen.logp - rejected.logp);
    return {s.loss, s.slope, -s.slope};
}

AnswerLoss kto_loss(const PreferenceOptions& o, const Likelihood& answer, double kl, bool desirable) {
    const double sign = desirable ? 1 : -1, weight = desirable ? o.desirable : o.undesirable;
    const double x = sign * o.beta * (answer.gain() - kl), up = 1 / (1 + std::exp(-x)), down = 1 / (1 + std::exp(x));
    return {weight * down, -weight * sign * o.beta * up * down};
}

void Preferences::add(bool rejected, double reward, double logp) {
    value[rejected] += reward, value[4 + rejected] += logp, count[rejected]++;
}
void Preferences::divide() {
    for (int k : {0, 1}) value[k] /= count[k], value[4 + k] /= count[k];
    value[ACCURACY] /= count[0], value[MARGIN] = value[0] - value[1];
}
void Preferences::write(sj::Writer& w, const std::string& before, bool pairs) const {
    for (int i = 0; i < N; i++)
        if (!std::isnan(value[i]) && (pairs || i != ACCURACY)) w.field(before + NAMES[i], value[i]);
    if (!pairs) w.field(before + "kl", kl);
}
std::string Preferences::text(bool pairs) const {
    const std::string margin = std::isnan(value[MARGIN]) ? "" : format("  %s %.4f", NAMES[MARGIN], value[MARGIN]);
    return margin + (pairs ? format("  %s %.3f", NAMES[ACCURACY], value[ACCURACY]) : format("  kl %.4f", kl));
}

// ---- The trainer on preferences

template <class T> void Trainer<T>::make_reference() {
    auto seen_from = [&](int64_t k) {
        std::set<size_t> seen;
        for (; k < steps && seen.size() < loader.rows.size(); k++)
            for (size_t pair : loader.rows_of(k)) seen.insert(pair);
        return seen;
    };
    // In the same batches whichever step is next: a GPU's bits depend on the batch.
    const std::set<size_t> all = seen_from(0), left = seen_from(step);
    use_dropout(false);
    const std::vector<size_t> list(all.begin(), all.end());
    if (o.preference->pairs()) {
        reference = reference_of(data, list, &left);
        if (eval) eval_reference = reference_of(*eval, loader.eval_rows, nullptr);
        return;
    }
    reference = reference_of(Half{data, 0}, list, &left), mismatched = reference_of(Half{data, 1}, list, &left);
    if (!eval) return;
    eval_reference = reference_of(Half{*eval, 0}, loader.eval_rows, nullptr);
    eval_mismatched = reference_of(Half{*eval, 1}, loader.eval_rows, nullptr);
}

template <class T> template <class From>
std::vector<double> Trainer<T>::reference_of(const From& from, const std::vector<size_t>& list,
                                             const std::set<size_t>* wanted) {
    const double start = seconds();
    double told = start;
    const size_t group = from.group();
    std::vector<double> out(from.rows());
    std::set<size_t> mine; // every rank computes some of the batches
    for (size_t i = 0; i < list.size(); i++)
        if (i / o.batch % ranks.size == (size_t)ranks.rank && (!wanted || wanted->count(list[i])))
            mine.insert(list[i]);
    ThreadPace pace(o, ctx);
    pace.begin();
    each_batch(from, list, [&](const Batch& b, size_t first, int R) {
        const std::vector<double> p = log_probabilities(b, R);
        pace.step();
        for (size_t s = 0; s < p.size(); s++) out[list[first + s / group] * group + s % group] = p[s];
        const size_t done = first + p.size() / group;
        if (done < list.size() && seconds() - told < 10) return;
        told = seconds();
        ranks.tell("%s: the reference of %zu/%zu %ss, %.1f s\n", from.path(), done, list.size(), loader.unit(),
                   told - start);
    }, &mine);
    ranks.sum(out.data(), out.size());
    return out;
}

// Log-probabilities of the answers of a batch, after its forward pass.
template <class T> std::vector<double> Trainer<T>::log_probabilities(const Batch& b, int R) {
    const std::vector<A> losses = losses_of(b, R);
    std::vector<double> sums;
    int r = 0;
    for (int end : loader.ends) for (sums.push_back(0); r < end; r++) sums.back() -= (double)losses[r];
    return sums;
}

// KTO's reference point: the mean of log p - log p_ref over the mismatched rows of all ranks' units, at least 0.
// TRL takes it anew for each batch of a step, so that its gradient depends on how a step is cut.
template <class T> void Trainer<T>::find_kl(const Dataset& from, const std::vector<size_t>& list, bool of_step,
                                            size_t all) {
    const std::vector<double>& ref = &from == &data ? mismatched : eval_mismatched;
    double sum = 0;
    each_batch(Half{from, 1}, list, [&](const Batch& b, size_t first, int R) {
        const std::vector<double> p = log_probabilities(b, R);
        for (size_t s = 0; s < p.size(); s++) sum += p[s] - ref[list[first + s]];
    });
    if (of_step) ranks.sum(&sum, 1);
    kl = std::max(sum / (double)all, 0.); // (a NaN stays one)
    preferences.kl = ranks.rank == 0 ? kl : 0;
}

// Derivatives of the summed loss by the log-probabilities of a batch's answers, which belong to the units list[0],
// list[1], .. The sum is added to `loss`, statistics to `preferences`.
template <class T>
std::vector<double> Trainer<T>::preference_slopes(const Dataset& from, const size_t* list,
                                                  const std::vector<double>& p, double& loss) {
    const PreferenceLoss& how = *o.preference;
    const std::vector<double>& ref = &from == &data ? reference : eval_reference;
    const size_t group = how.pairs() ? 2 : 1;
    std::vector<Likelihood> l;
    std::vector<double> by;
    for (size_t s = 0; s < p.size(); s++) {
        const int tokens = loader.ends[s] - (s ? loader.ends[s - 1] : 0);
        l.push_back({p[s], how.has_reference ? ref[list[s / group] * group + s % group] : 0, (double)tokens});
        const bool rejected = how.pairs() ? s % 2 : !from.desirable(list[s]);
        preferences.add(rejected, how.reward(o.pref, l[s]), how.logp(l[s]));
    }
    for (size_t s = 0; s < p.size() && how.pairs(); s += 2) {
        const PairLoss pair = how.of_pair(o.pref, l[s], l[s + 1]);
        loss += pair.loss, by.push_back(pair.by_chosen), by.push_back(pair.by_rejected);
        preferences.value[Preferences::ACCURACY] += how.reward(o.pref, l[s]) > how.reward(o.pref, l[s + 1]);
    }
    for (size_t s = 0; s < p.size() && !how.pairs(); s++) {
        const AnswerLoss one = kto_loss(o.pref, l[s], kl, from.desirable(list[s]));
        loss += one.loss, by.push_back(one.by_logp);
    }
    return by;
}

// Adds up the losses of a batch's units, which are list[0], list[1], .., and their statistics. With `to` also computes
// d.normed and the head's gradient, of `scale` times that sum.
template <class T>
double Trainer<T>::preferences_backward(const Dataset& from, const size_t* list, const Batch& b, int R,
                                        const Gradients<T>* to, A scale) {
    const std::vector<int>& ends = loader.ends;
    double sum = 0;
    if (o.scores()) {
        const std::vector<double> by = preference_slopes(from, list, scores(R), sum);
        if (to) scores_backward(b, by, scale);
        return sum;
    }
    const std::vector<double> by = preference_slopes(from, list, log_probabilities(b, R), sum);
    for (size_t s = 0; to && s < by.size(); s++) { // cross entropy is the negative log-probability
        const int first = s ? ends[s - 1] : 0;
        const LossRows<A> answer = {loader.named + first, loader.target + first, (A)((double)scale * -by[s]), nullptr,
                                    ends[s] - first};
        loss_backward(ctx, c, w, a, d, to, loss + first, answer, s ? 0 : b.N);
        // (The first call clears all of d.normed; N = 0 clears nothing of it.)
    }
    return sum;
}

#define INSTANTIATE(T) \
    template void Trainer<T>::make_reference(); \
    template void Trainer<T>::find_kl(const Dataset&, const std::vector<size_t>&, bool, size_t); \
    template double Trainer<T>::preferences_backward(const Dataset&, const size_t*, const Batch&, int, \
                                                     const Gradients<T>*, acc<T>);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
