// search/rerank.cpp: a reranker's prompt, and the two rows of its head; see rerank.h.
#include "search/rerank.h"
#include "base/error.h"
#include "model/instances.h"
#include "search/embed.h" // cut_text
#include <algorithm>
#include <cmath>
#include <utility>

#ifndef QWEN3_DOUBLE

RerankPrompt::RerankPrompt(const Tokenizer& t) {
    before = t.encode("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
                      "and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n"
                      "<|im_start|>user\n", true);
    after = t.encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", true);
    const std::vector<int> words[] = {t.encode("yes", false), t.encode("no", false)};
    if (words[0].size() != 1 || words[1].size() != 1)
        DIE("\"yes\" and \"no\" are not one token each in the vocabulary");
    yes = words[0][0], no = words[1][0];
}

std::vector<int> RerankPrompt::ids(const Tokenizer& t, const std::vector<int>& query_ids, const std::string& document,
                                   size_t most, bool keep_last) const {
    std::vector<int> texts = query_ids, all = before;
    t.encode(texts, "<Document>: " + document, false);
    if (most) cut_text(texts, most - std::min(most, length()), keep_last);
    all.insert(all.end(), texts.begin(), texts.end());
    all.insert(all.end(), after.begin(), after.end());
    return all;
}

double Relevance::operator()(const std::vector<float>& hidden) const {
    double lead = 0; // of yes over no, in logits
    for (size_t i = 0; i < hidden.size(); i++) lead += ((double)yes[i] - no[i]) * hidden[i];
    return 1 / (1 + std::exp(-lead));
}
#endif

template <class T> Relevance::Relevance(const Context& where, const Weights<T>& w, const RerankPrompt& prompt) {
    Context ctx = where;
    for (auto [row, id] : {std::pair(&yes, prompt.yes), std::pair(&no, prompt.no)}) {
        std::vector<T> stored((size_t)w.head.in);
        if (!w.head.in) DIE("the model has no head, which says yes or no");
        if (id >= w.head.out()) DIE("id %d is not in the vocabulary of %d", id, w.head.out());
        if (ctx.gpu && w.head.format != Format::PLAIN) DIE("a reranker's weights do not stay packed on a GPU");
        if (ctx.gpu) copy_out(ctx, stored.data(), w.head.w[0] + (size_t)id * stored.size(), stored.size());
        for (int i = 0; i < w.head.in; i++) row->push_back(ctx.gpu ? to_acc(stored[(size_t)i]) : w.head.at(id, i));
    }
}

#define INSTANTIATE(T) template Relevance::Relevance(const Context&, const Weights<T>&, const RerankPrompt&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
