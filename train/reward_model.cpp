// train/reward_model.cpp: scores of answers: the trainer's part with --reward-model, and reward models in --grpo.
#include "train/reward_model.h"
#include "base/file.h"
#include "base/options.h" // interrupted
#include "model/instances.h"
#include "train/trainer.h"
#include <algorithm>
#include <numeric>

std::string reward_base(const std::string& folder) {
    const std::string path = folder + "/adapter_config.json";
    const MappedFile map(path);
    sj::Doc doc;
    if (!sj::parse(doc, map.text()).empty() || doc.root()["base_model_name_or_path"].str().empty())
        DIE("%s: no base_model_name_or_path", path.c_str());
    const std::string base(doc.root()["base_model_name_or_path"].str());
    if (!ModelFile::exists(base)) DIE("%s: an adapter of %s, which is not here", folder.c_str(), base.c_str());
    return base;
}

template <class T>
RewardModel<T>::RewardModel(const std::string& folder, const Context& where, const ModelFile& student, int tokens)
    : base(reward_base(folder), where, student) {
    const AdapterFile file(folder, base.c, false, true);
    adapter = std::make_unique<AttachedAdapter<T>>(base.ctx, base.w, file, tokens);
    for (int i = 0; i < base.c.C; i++) head.push_back((float)number(file.tensors.at(SCORE_TENSOR), (size_t)i));
}

template <class T>
std::vector<double> score_rows(Context& ctx, const T* x, const std::vector<int>& rows, const acc<T>* head, int C) {
    std::vector<double> scores;
    std::vector<T> row(C);
    for (int n : rows) {
        copy_out(ctx, row.data(), x + (size_t)n * C, row.size());
        double sum = 0;
        for (int i = 0; i < C; i++) sum += (double)head[i] * (double)to_acc(row[i]);
        scores.push_back(sum);
    }
    return scores;
}

template <class T> void Trainer<T>::open_reward_models() {
    for (auto& reward : rewards)
        if (!reward.of)
            reward_models.push_back(std::make_unique<RewardModel<T>>(reward.name, ctx, file, loader.most_tokens));
}

template <class T> std::vector<double> Trainer<T>::scores_of(RewardModel<T>& model, const Groups& made) {
    std::vector<double> all;
    const std::vector<acc<T>> head(model.head.begin(), model.head.end());
    std::vector<size_t> list(made.rows.size() / made.size);
    std::iota(list.begin(), list.end(), (size_t)0);
    for (size_t first = 0; first < list.size() && !interrupted; first += o.batch) {
        int R;
        const int n = (int)std::min((size_t)o.batch, list.size() - first);
        const Batch b = loader.load(made, &list[first], n, (int)first, R, true);
        model.base.forward(b);
        std::vector<int> rows(R);
        copy_out(ctx, rows.data(), loader.named, rows.size());
        const auto some = score_rows(ctx, model.base.normed(), rows, head.data(), model.base.c.C);
        all.insert(all.end(), some.begin(), some.end());
    }
    all.resize(made.rows.size(), 0); // (if it was interrupted)
    return all;
}

// Scores of a batch's rows, after its forward pass.
template <class T> std::vector<double> Trainer<T>::scores(int R) {
    std::vector<int> rows(R);
    std::vector<A> head(c.C);
    copy_out(ctx, rows.data(), loader.named, rows.size());
    copy_out(ctx, head.data(), params.p + params.score, head.size());
    return score_rows(ctx, a.normed, rows, head.data(), c.C);
}

// d.normed and the head's gradient, of scale times the sum of by[s] score[s].
template <class T> void Trainer<T>::scores_backward(const Batch& b, const std::vector<double>& by, A scale) {
    std::vector<int> rows(by.size());
    std::vector<A> head(c.C), gradient(c.C);
    std::vector<T> x(c.C);
    copy_out(ctx, rows.data(), loader.named, rows.size());
    copy_out(ctx, head.data(), params.p + params.score, head.size());
    copy_out(ctx, gradient.data(), params.gradient + params.score, gradient.size());
    clear(ctx, d.normed, (size_t)b.N * c.C);
    for (size_t s = 0; s < by.size(); s++) {
        const A factor = (A)((double)scale * by[s]);
        copy_out(ctx, x.data(), a.normed + (size_t)rows[s] * c.C, x.size());
        for (int i = 0; i < c.C; i++) gradient[i] += factor * to_acc(x[i]), x[i] = to_stored<T>(factor * head[i]);
        copy_in(ctx, d.normed + (size_t)rows[s] * c.C, x.data(), x.size());
    }
    copy_in(ctx, params.gradient + params.score, gradient.data(), gradient.size());
}

#define INSTANTIATE(T) \
    template struct RewardModel<T>; \
    template void Trainer<T>::open_reward_models(); \
    template std::vector<double> Trainer<T>::scores_of(RewardModel<T>&, const Groups&); \
    template std::vector<double> Trainer<T>::scores(int); \
    template void Trainer<T>::scores_backward(const Batch&, const std::vector<double>&, acc<T>);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
