// search/rerank.h: scores how well documents answer a query, as Qwen3-Reranker does: the same model, with a yes-or-no
// question. Source of the prompt and the score: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
#pragma once
#include "model/tokenizer.h"
#include "model/weights.h"
#include <cstddef>
#include <string>
#include <vector>

// The reranker's prompt: does the document answer the query? The next token would be yes or no.
struct RerankPrompt {
    std::vector<int> before, after;
    int yes, no;

    explicit RerankPrompt(const Tokenizer& t);
    size_t length() const { return before.size() + after.size(); }

    // The part shared by all documents of a query. (A line's end is always the end of a token.)
    std::vector<int> query_ids(const Tokenizer& t, const std::string& task, const std::string& query) const {
        return t.encode("<Instruct>: " + task + "\n<Query>: " + query + "\n", false);
    }
    // The whole prompt. most: ids to keep, cut from the two texts only; 0: all.
    std::vector<int> ids(const Tokenizer& t, const std::vector<int>& query_ids, const std::string& document,
                         size_t most = 0, bool keep_last = false) const;
};

// The probability of yes against no. Needs only these two rows of the head.
struct Relevance {
    std::vector<float> yes, no; // (C)

    template <class T> Relevance(const Context& where, const Weights<T>& w, const RerankPrompt& prompt);
    double operator()(const std::vector<float>& hidden) const;
};
