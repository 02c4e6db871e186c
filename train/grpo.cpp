// train/grpo.cpp: advantages, the loss of a token, and groups of answers in a state.
#include "train/grpo.h"
#include "base/error.h"
#include "train/ranks.h"
#include "train/rewards.h"
#include <algorithm>
#include <cmath>
#include <utility>

bool GrpoOptions::model_scores() const {
    return std::any_of(rewards.begin(), rewards.end(), [&](auto& name) { return !make_reward(name, timeout).of; });
}

Advantages advantages(const double* reward, size_t n, bool scaled) {
    double mean = 0, squares = 0;
    for (size_t i = 0; i < n; i++) mean += reward[i] / (double)n;
    const bool equal = std::all_of(reward, reward + n, [&](double r) { return r == reward[0]; });
    for (size_t i = 0; i < n && !equal; i++) squares += (reward[i] - mean) * (reward[i] - mean);
    Advantages a = {{}, std::sqrt(squares / (double)std::max<size_t>(n - 1, 1))};
    for (size_t i = 0; i < n; i++)
        a.of.push_back(equal ? 0 : (reward[i] - mean) / (scaled ? a.deviation + 1e-4 : 1));
    return a;
}

TokenLoss token_loss(double p, double old, double ref, double A, const GrpoOptions& o) {
    const double r = std::exp(p - old), d = ref - p;
    TokenLoss t = {};
    t.low = r < 1 - o.epsilon && A < 0, t.high = r > 1 + o.epsilon_high && A > 0; // clipped: a constant
    t.kl = std::exp(d) - d - 1;
    t.loss = -A * (t.low ? 1 - o.epsilon : t.high ? 1 + o.epsilon_high : r) + o.kl_beta * t.kl;
    t.slope = (t.low || t.high ? 0 : -A * r) + o.kl_beta * (1 - std::exp(d));
    return t;
}

// ---- Groups

size_t Groups::length(size_t i) const {
    return (size_t)std::count_if(rows[i].begin(), rows[i].end(), [](uint32_t word) { return word & TRAIN; });
}

std::string Groups::json() const {
    sj::Writer w;
    w.object().key("rows").array();
    for (auto& row : rows) {
        w.array();
        for (uint32_t word : row) w.value((int64_t)word);
        w.end();
    }
    w.end().key("ended").array();
    for (bool e : ended) w.value(e);
    for (auto [name, list] : {std::pair("reward", &reward), {"advantage", &advantage}, {"each", &each}}) {
        w.end().key(name).array();
        for (double x : *list) w.value(x);
    }
    for (auto [name, list] : {std::pair("old", &old), {"reference", &reference}}) {
        w.end().key(name).array();
        for (auto& row : *list) {
            w.array();
            for (float x : row) w.value((double)x);
            w.end();
        }
    }
    return w.end().end().text;
}

Groups::Groups(const char* path, const std::string& text, size_t group, uint32_t V) : size(group) {
    sj::Doc doc;
    bool good = sj::parse(doc, text).empty();
    const sj::Value v = doc.root();
    for (sj::Value row : v["rows"].items()) {
        rows.emplace_back();
        for (sj::Value word : row.items()) rows.back().push_back((uint32_t)word.number());
        const DatasetRow words = this->row(rows.size() - 1);
        good = good && !dataset_fault(words) && std::all_of(words.begin(), words.end(), [&](uint32_t word) {
            return (word & ~TRAIN) < V;
        });
    }
    for (sj::Value e : v["ended"].items()) ended.push_back(e.boolean());
    for (auto [name, list] : {std::pair("reward", &reward), {"advantage", &advantage}, {"each", &each}})
        for (sj::Value x : v[name].items()) list->push_back(x.number());
    for (auto [name, list] : {std::pair("old", &old), {"reference", &reference}})
        for (sj::Value row : v[name].items()) {
            list->emplace_back();
            for (sj::Value x : row.items()) list->back().push_back((float)x.number());
        }
    const size_t n = rows.size();
    good = good && n > 0 && n % size == 0 && ended.size() == n && reward.size() == n && advantage.size() == n;
    for (auto* list : {&old, &reference}) {
        good = good && (list->size() == n || (list == &reference && list->empty()));
        for (size_t i = 0; good && i < list->size(); i++) good = (*list)[i].size() == length(i);
    }
    if (!good) DIE("%s: its answers are damaged", path);
}

const uint32_t* answer_in(DatasetRow row) {
    const uint32_t* at = row.end();
    while (!(at[-1] & TRAIN)) at--;
    while (at[-1] & TRAIN) at--;
    return at;
}
std::vector<int> prompt_of(DatasetRow row) {
    std::vector<int> ids;
    for (const uint32_t* at = row.begin(); at < answer_in(row); at++) ids.push_back((int)(*at & ~TRAIN));
    return ids;
}

// ---- Statistics

Rewarded::Rewarded(const Groups& g) : each(g.each) {
    for (size_t i = 0; i < g.rows.size(); i++, answers++)
        value[REWARD] += g.reward[i], value[LENGTH] += (double)g.length(i), value[CUT] += !g.ended[i];
    for (double r : g.reward) value[SPREAD] += r * r;
    for (size_t i = 0; i < g.rows.size(); i += g.size, groups++)
        value[ALIKE] += advantages(&g.reward[i], g.size, false).deviation == 0;
    drawn = value[LENGTH];
}
void Rewarded::add(const TokenLoss& t) {
    tokens++, value[KL] += t.kl, value[LOW] += t.low, value[HIGH] += t.high;
    value[CLIPPED] += t.low || t.high;
}
void Rewarded::sum_over(Ranks& ranks) {
    for (double* x : {&answers, &groups, &tokens, &drawn, &time}) ranks.sum(x, 1);
    ranks.sum(value, N);
    ranks.sum(each.data(), each.size());
    time /= ranks.size;
}
void Rewarded::divide() {
    for (int i = 0; i < N; i++) value[i] /= std::max(1., i < ALIKE ? answers : i < KL ? groups : tokens);
    const double variance = std::max(0., value[SPREAD] - value[REWARD] * value[REWARD]);
    value[SPREAD] = std::sqrt(variance * answers / std::max(1., answers - 1)); // of a sample
    for (double& x : each) x /= std::max(1., answers);
}
void Rewarded::write(sj::Writer& w, const GrpoOptions& o, bool evaluated) const {
    const std::string before = evaluated ? "eval_" : "";
    for (int i = 0; i < (evaluated ? SPREAD : N); i++)
        if (i != KL || o.kl_beta > 0) w.field(before + NAMES[i], value[i]);
    for (size_t k = 0; k < each.size() && each.size() > 1; k++)
        w.field(before + "rewards/" + o.rewards[k] + "/mean", each[k]);
}
std::string Rewarded::text() const {
    return format("  %s %.4f  %s %.4f  length %.1f", NAMES[REWARD], value[REWARD], NAMES[SPREAD], value[SPREAD],
                  value[LENGTH]);
}
