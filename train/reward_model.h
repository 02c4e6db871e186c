// train/reward_model.h: a reward model of --reward DIR: a base that is not trained, an adapter and a head.
#pragma once
#include "model/adapters.h"
#include "train/teacher.h"
#include <memory>
#include <string>
#include <vector>

// The path of the model that the config of a reward model's folder names. Throws Error if it is not here.
std::string reward_base(const std::string& folder);

// The score of a row is head . x, of its last token's vector x after the final norm, as in transformers'
// Qwen3ForSequenceClassification. A row is at most `tokens` long together with the others of its batch.
template <class T> struct RewardModel {
    Teacher<T> base;
    std::unique_ptr<AttachedAdapter<T>> adapter;
    std::vector<float> head; // (C)

    // The base is the one that the adapter's config names.
    RewardModel(const std::string& folder, const Context& where, const ModelFile& student, int tokens);
    void plan(Arena& arena, int N, size_t sequences, int longest) {
        base.plan(arena, N, (size_t)N / PAGE + sequences, longest, 0);
    }
};

// head . x of some rows of x (., C).
template <class T>
std::vector<double> score_rows(Context& ctx, const T* x, const std::vector<int>& rows, const acc<T>* head, int C);
