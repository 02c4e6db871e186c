// search/rerank.h: how well documents answer a query, as Qwen3-Reranker says it: it is this model, asked a question of
// yes or no. https://huggingface.co/Qwen/Qwen3-Reranker-0.6B says what is shown and how it is read.
#pragma once
#include "model/tokenizer.h"
#include "model/weights.h"
#include <cstddef>
#include <string>
#include <vector>

// How the reranker is asked: does the document answer the query? The next token would be yes or no.
struct RerankPrompt {
    std::vector<int> before, after;
    int yes, no;

    explicit RerankPrompt(const Tokenizer& t);
    size_t length() const { return before.size() + after.size(); }

    // The part that all documents of a query share. (A line's end is always the end of a token.)
    std::vector<int> query_ids(const Tokenizer& t, const std::string& task, const std::string& query) const {
        return t.encode("<Instruct>: " + task + "\n<Query>: " + query + "\n", false);
    }
    // The whole. most: ids that stay, of which only those of the two texts can go; 0: all.
    std::vector<int> ids(const Tokenizer& t, const std::vector<int>& query_ids, const std::string& document,
                         size_t most = 0, bool keep_last = false) const;
};

// The probability of yes, where only yes and no are possible. Of the head it needs these two rows.
struct Relevance {
    std::vector<float> yes, no; // (C)

    template <class T> Relevance(const Context& where, const Weights<T>& w, const RerankPrompt& prompt);
    double operator()(const std::vector<float>& hidden) const;
};
