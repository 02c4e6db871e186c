// train/rollout.cpp: the trainer with --grpo: samples answers, computes rewards, adds up gradients.
#include "base/options.h"
#include "model/instances.h"
#include "model/options.h"
#include "train/trainer.h"
#include <algorithm>
#include <numeric>

template <class T> void Trainer<T>::open_rewards() {
    tokenizer = std::make_unique<Tokenizer>(tokenizer_path(o), c.V);
    for (auto& name : o.rl.rewards) rewards.push_back(make_reward(name, o.rl.timeout));
    for (const Dataset* from : {&data, eval})
        for (size_t i = 0; from && i < from->rows(); i++)
            for (auto& reward : rewards) try {
                if (reward.check) reward.check(question_of(from->row(i)));
            } catch (const Error& e) {
                DIE("%s: row %zu: --reward %s: %s", from->file.path.c_str(), i, reward.name.c_str(), e.what());
            }
}

// The sampled and trained model has its logits divided by the temperature: through its final norm, which LoRA does not
// train.
template <class T> void Trainer<T>::set_temperature() {
    if (o.rl.temperature == 1) return;
    std::vector<T> numbers;
    for (const ModelTensor& t : model_tensors(c))
        for (size_t i = 0; t.kind == FINAL_NORM && i < t.size(); i++)
            numbers.push_back(to_stored<T>((A)(number(file.tensors.at(t.name()), i) / o.rl.temperature)));
    copy_in(ctx, norm, numbers.data(), numbers.size());
    w.norm = norm;
}

template <class T> Answered Trainer<T>::question_of(DatasetRow row) const {
    std::vector<int> ids;
    for (const uint32_t* at = answer_in(row); at < row.end() && !is_end((int)(*at & ~TRAIN)); at++)
        ids.push_back((int)(*at & ~TRAIN));
    Answered a;
    a.prompt = tokenizer->decode(prompt_of(row), false), a.reference = tokenizer->decode(ids, true);
    return a;
}

// ---- Answers

template <class T>
Groups Trainer<T>::draw_groups(const Dataset& from, const std::vector<size_t>& list, size_t size, bool greedy) {
    Groups made;
    made.size = size;
    std::vector<Answered> answered;
    use_dropout(false);
    for (size_t first = 0, n; first < list.size() && !interrupted; first += n) {
        n = std::min(list.size() - first, std::max<size_t>(1, (size_t)engine.sequences / size));
        std::vector<std::vector<int>> prompts;
        std::vector<typename AnswerEngine<T>::Asked> asked;
        for (size_t i = first; i < first + n; i++) prompts.push_back(prompt_of(from.row(list[i])));
        for (size_t s = 0; s < n * size; s++) {
            const size_t place = loader.place_in_step(first + s / size) * size + s % size;
            const Philox bits = philox(o.seed, (uint64_t)(step / o.rl.iterations) << 32 | place, STREAM_ROLLOUT);
            Sampling how;
            how.temperature = greedy ? 0 : o.grpo ? 1 : (float)o.rl.temperature; // (see set_temperature)
            how.top_k = 0, how.top_p = (float)o.rl.top_p;
            how.seed = (uint64_t)bits.v[1] << 32 | bits.v[0];
            asked.push_back({&prompts[s / size], how});
        }
        auto answers = engine.answer(asked, o.rl.max_tokens, tokenizer->size());
        for (size_t s = 0; s < answers.size() && !interrupted; s++) {
            std::vector<int>& ids = answers[s];
            std::vector<uint32_t> words(prompts[s / size].begin(), prompts[s / size].end());
            for (int id : ids) words.push_back((uint32_t)id | TRAIN);
            answered.push_back(question_of(from.row(list[first + s / size])));
            Answered& a = answered.back();
            a.tokens = ids.size(), a.ended = is_end(ids.back());
            if (a.ended) ids.pop_back();
            a.text = tokenizer->decode(ids, true);
            made.rows.push_back(std::move(words)), made.ended.push_back(a.ended);
        }
    }
    made.reward.assign(answered.size(), 0), made.each.assign(rewards.size(), 0);
    size_t model = 0;
    for (size_t k = 0; k < rewards.size() && !answered.empty() && !interrupted; k++) {
        const std::vector<double> r = rewards[k].of ? rewards[k].of(answered) : scores_of(*reward_models[model++], made);
        for (size_t i = 0; i < r.size(); i++) made.reward[i] += rewards[k].weight * r[i], made.each[k] += r[i];
    }
    return made;
}

template <class T> void Trainer<T>::take_groups(const std::vector<size_t>& list) {
    double time = 0;
    if (step % o.rl.iterations == 0) {
        const double start = seconds();
        const std::vector<size_t> mine = loader.deal_step(list);
        groups = {};
        try {
            groups = draw_groups(data, mine, (size_t)o.rl.group, false);
        } catch (const Error& e) {
            fault = e.what(), interrupted = 1;
        }
        groups.places = loader.places;
        time = seconds() - start;
        for (size_t i = 0; i < groups.reward.size(); i += groups.size) {
            const Advantages some = advantages(&groups.reward[i], groups.size, o.rl.scale == "group");
            groups.advantage.insert(groups.advantage.end(), some.of.begin(), some.of.end());
        }
        if (first_stored) ask_reference();
    }
    loader.places = groups.places;
    rewarded = Rewarded(groups);
    rewarded.time = time;
}

template <class T> void Trainer<T>::ask_reference() {
    params.use(first_stored), params.find_norms();
    each_batch(groups, all_groups(), [&](const Batch& b, size_t, int R) {
        const std::vector<A> losses = losses_of(b, R);
        std::vector<std::vector<float>>& to = groups.reference;
        int r = 0;
        for (int end : loader.ends)
            for (to.emplace_back(); r < end; r++) to.back().push_back(-(float)losses[r]);
    });
    params.use(params.stored), params.find_norms();
}

template <class T> std::vector<size_t> Trainer<T>::all_groups() const {
    std::vector<size_t> list(groups.rows.size() / groups.size);
    std::iota(list.begin(), list.end(), (size_t)0);
    return list;
}

// ---- Gradients

// Adds up the loss of a batch's answers, the first of which is number `first`; its gradients go to d.normed and the
// head's. `answers` and `tokens`: the counts of the step, over all ranks.
template <class T>
double Trainer<T>::answers_backward(const Batch& b, int R, size_t first, double answers, double tokens) {
    const std::vector<A> losses = losses_of(b, R);
    const std::vector<int>& ends = loader.ends;
    std::vector<A> scale(R);
    double sum = 0;
    for (size_t s = 0, r = 0; s < ends.size(); s++) {
        const size_t i = first + s, n = (size_t)ends[s] - r;
        const double of = o.rl.loss == "grpo" ? answers * (double)n : o.rl.loss == "dapo" ? tokens
                                                                   : answers * o.rl.max_tokens;
        const double weight = groups.counts(i, o.rl) ? 1 / of : 0;
        const bool drawn_now = groups.old.size() == i;
        if (drawn_now) groups.old.emplace_back();
        for (size_t k = 0; k < n; k++, r++) {
            const float p = -(float)losses[r];
            if (drawn_now) groups.old[i].push_back(p);
            const double ref = groups.reference.empty() ? p : groups.reference[i][k];
            const TokenLoss token = token_loss(p, groups.old[i][k], ref, groups.advantage[i], o.rl);
            sum += weight * token.loss, scale[r] = (A)(-weight * token.slope); // cross entropy is -p
            if (weight > 0) rewarded.add(token);
        }
    }
    copy_in(ctx, by, scale.data(), scale.size());
    loss_backward<T>(ctx, c, w, a, d, &params.g, loss, {loader.named, loader.target, 1, by, R}, b.N);
    return sum;
}

// Adds up the loss of this rank's answers in results[0], and its gradients.
template <class T> void Trainer<T>::add_groups() {
    double all[] = {0, 0}; // answers, tokens that count
    for (size_t i = 0; i < groups.rows.size(); i++)
        all[0]++, all[1] += groups.counts(i, o.rl) ? (double)groups.length(i) : 0;
    ranks.sum(all, 2);
    clear(ctx, results, 2);
    const std::vector<size_t> list = all_groups();
    double sum = 0;
    each_batch(groups, list, [&](const Batch& b, size_t at, int R) {
        sum += answers_backward(b, R, at * groups.size, all[0], all[1]);
        params.last_batch = at + o.batch >= list.size();
        backward(ctx, c, w, b, a, d, params.g, kv, rope);
    });
    copy_in(ctx, results, &sum, 1);
}

template <class T> double Trainer<T>::mean_reward(const Dataset& from, const std::vector<size_t>& list) {
    try {
        rewarded = Rewarded(draw_groups(from, list, 1, true));
    } catch (const Error& e) {
        fault = e.what(), interrupted = 1;
    }
    rewarded.divide();
    return rewarded.value[Rewarded::REWARD];
}

#define INSTANTIATE(T) \
    template void Trainer<T>::open_rewards(); \
    template void Trainer<T>::set_temperature(); \
    template Groups Trainer<T>::draw_groups(const Dataset&, const std::vector<size_t>&, size_t, bool); \
    template void Trainer<T>::take_groups(const std::vector<size_t>&); \
    template void Trainer<T>::ask_reference(); \
    template std::vector<size_t> Trainer<T>::all_groups() const; \
    template void Trainer<T>::add_groups(); \
    template double Trainer<T>::mean_reward(const Dataset&, const std::vector<size_t>&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
