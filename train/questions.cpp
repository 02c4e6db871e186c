// train/questions.cpp: chooses a run's questions; the trainer's answers to them.
#include "train/questions.h"
#include "base/options.h" // interrupted
#include "model/chat_template.h"
#include "model/instances.h"
#include "model/options.h"
#include "train/trainer.h"
#include <algorithm>
#include <string_view>

Questions::Questions(const TrainOptions& o, const Config& c, const Dataset* eval) {
    if (o.questions.empty() && !eval) return;
    tokenizer = std::make_unique<Tokenizer>(tokenizer_path(o), c.V);
    const size_t limit = (size_t)std::min(o.max_len, c.max_positions);
    for (auto& text : o.questions) {
        add({text, "", render_chat(*tokenizer, {{"user", text}})});
        if (list.back().prompt.size() >= limit)
            DIE("--ask %.40s ..: more than %zu tokens (%s)", text.c_str(), limit,
                o.max_len > c.max_positions ? "the model's limit" : "--max-len");
    }
    for (size_t i = 0; o.questions.empty() && i < eval->rows() / eval->group() && list.size() < DEFAULT; i++)
        if (eval->row(i * eval->group()).size() <= limit) read(*eval, i, c);
    size_t longest = 0;
    for (auto& q : list) longest = std::max(longest, q.prompt.size());
    positions = std::min((int)longest + TOKENS, c.max_positions), tokens = positions - (int)longest;
}

// The last question of a row's prompt. A plain text has none.
void Questions::read(const Dataset& eval, size_t unit, const Config& c) {
    const DatasetRow row = eval.row(unit * eval.group());
    const std::string_view role = "user\n";
    Question q = {"", "", prompt_of(row)};
    const auto mark = std::find(q.prompt.rbegin(), q.prompt.rend(), tokenizer->id("<|im_end|>"));
    const auto begin = std::find(mark, q.prompt.rend(), tokenizer->id("<|im_start|>"));
    if (begin == q.prompt.rend()) return;
    q.text = tokenizer->decode({begin.base(), mark.base() - 1}, false);
    if (q.text.compare(0, role.size(), role) != 0) return;
    q.text.erase(0, role.size());
    std::vector<int> answer;
    const auto ends = [&](int id) { return std::count(c.end_tokens.begin(), c.end_tokens.end(), id) > 0; };
    for (const uint32_t* at = answer_in(row); at < row.end() && !ends((int)(*at & ~TRAIN)); at++)
        answer.push_back((int)(*at & ~TRAIN));
    if (!eval.labelled() || eval.desirable(unit)) q.reference = tokenizer->decode(answer, true);
    add(std::move(q));
}

void Questions::add(Question&& q) {
    const auto same = [&](const Question& other) { return other.text == q.text; };
    if (std::none_of(list.begin(), list.end(), same)) list.push_back(std::move(q));
}

template <class T> std::vector<TrainLog::Answer> Trainer<T>::answer_questions() {
    use_dropout(false);
    std::vector<TrainLog::Answer> all;
    Sampling greedy;
    greedy.temperature = 0, greedy.top_k = 0;
    for (size_t first = 0; first < questions.list.size() && !interrupted; first += (size_t)engine.sequences) {
        const size_t end = std::min(first + (size_t)engine.sequences, questions.list.size());
        std::vector<typename AnswerEngine<T>::Asked> asked;
        for (size_t i = first; i < end; i++) asked.push_back({&questions.list[i].prompt, greedy});
        auto answers = engine.answer(asked, questions.tokens, questions.tokenizer->size());
        for (size_t i = first; i < end && !interrupted; i++) {
            std::vector<int>& ids = answers[i - first];
            const bool ended = is_end(ids.back());
            if (ended) ids.pop_back();
            const auto& q = questions.list[i];
            all.push_back({step, q.text, q.reference, questions.tokenizer->decode(ids, true), ended});
        }
    }
    return all;
}

#define INSTANTIATE(T) template std::vector<TrainLog::Answer> Trainer<T>::answer_questions();
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
