// train/dpo.cpp: the loss of pairs, and the trainer with --dpo: the reference, the gradient of a batch of pairs.
#include "train/dpo.h"
#include "base/options.h"
#include "model/instances.h"
#include "model/pace.h"
#include "train/trainer.h"
#include <algorithm>
#include <cmath>

PairLoss dpo_loss(double margin, double smoothing) {
    auto minus_log_sigmoid = [](double x) { return std::max(-x, 0.) + std::log1p(std::exp(-std::fabs(x))); };
    const double loss = (1 - smoothing) * minus_log_sigmoid(margin) + smoothing * minus_log_sigmoid(-margin);
    return {loss, smoothing / (1 + std::exp(-margin)) - (1 - smoothing) / (1 + std::exp(margin))};
}

void Preferences::add(double reward_chosen, double reward_rejected, double chosen, double rejected) {
    const double more[] = {reward_chosen, reward_rejected, reward_chosen > reward_rejected ? 1. : 0.,
                           reward_chosen - reward_rejected, chosen, rejected};
    for (int i = 0; i < N; i++) value[i] += more[i];
}
void Preferences::write(sj::Writer& w, const std::string& before) const {
    for (int i = 0; i < N; i++) w.field(before + NAMES[i], value[i]);
}
std::string Preferences::text() const {
    return format("  %s %.4f  %s %.3f", NAMES[MARGIN], value[MARGIN], NAMES[ACCURACY], value[ACCURACY]);
}

// ---- The trainer with --dpo

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
    reference = reference_of(data, {all.begin(), all.end()}, &left);
    if (eval) eval_reference = reference_of(*eval, loader.eval_rows, nullptr);
}

template <class T>
std::vector<double> Trainer<T>::reference_of(const Dataset& from, const std::vector<size_t>& list,
                                             const std::set<size_t>* wanted) {
    const double start = seconds();
    double told = start;
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
        for (size_t s = 0; s < p.size(); s++) out[list[first + s / 2] * 2 + s % 2] = p[s];
        const size_t done = first + p.size() / 2;
        if (done < list.size() && seconds() - told < 10) return;
        told = seconds();
        ranks.tell("%s: the reference of %zu/%zu pairs, %.1f s\n", from.file.path.c_str(), done, list.size(),
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

// Adds up the losses of a batch's pairs, which are list[0], list[1], .., and their statistics. With `to` also computes
// d.normed and the head's gradient, of `scale` times that sum.
template <class T>
double Trainer<T>::pairs_backward(const Dataset& from, const size_t* list, const Batch& b, int R,
                                  const Gradients<T>* to, A scale) {
    const std::vector<double> p = log_probabilities(b, R);
    const std::vector<double>& ref = &from == &data ? reference : eval_reference;
    const std::vector<int>& ends = loader.ends;
    double sum = 0;
    for (size_t s = 0; s < p.size(); s += 2) {
        const double* q = &ref[list[s / 2] * 2];
        const double chosen = o.beta * (p[s] - q[0]), rejected = o.beta * (p[s + 1] - q[1]);
        const PairLoss pair = dpo_loss(chosen - rejected, o.label_smoothing);
        preferences.add(chosen, rejected, p[s], p[s + 1]);
        sum += pair.loss;
        for (size_t k = 0; to && k < 2; k++) { // cross entropy is the negative log-probability
            const int first = s + k ? ends[s + k - 1] : 0;
            const double by_loss = (k ? 1 : -1) * o.beta * pair.slope;
            loss_backward(ctx, c, w, a, d, to, loss + first, loader.named + first, loader.target + first,
                          (A)((double)scale * by_loss), s + k ? 0 : b.N, ends[s + k] - first);
            // (The first call clears all of d.normed; N = 0 clears nothing of it.)
        }
    }
    return sum;
}

#define INSTANTIATE(T) \
    template void Trainer<T>::make_reference(); \
    template double Trainer<T>::pairs_backward(const Dataset&, const size_t*, const Batch&, int, const Gradients<T>*, \
                                               acc<T>);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
