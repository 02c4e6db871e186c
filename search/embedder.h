// search/embedder.h: the hidden states of many texts, packed into ragged batches; no head is computed.
#pragma once
#include "base/stop_flag.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

// Packs whole texts into batches of `chunk` tokens. Only a text longer than a batch is cut, and takes several batches.
// On a CPU a text's numbers do not depend on its neighbours.
template <class T> struct Embedder {
    static constexpr int MOST = 256; // texts in a batch
    Context ctx;
    const Config& config;
    const Weights<T>& weights;
    const int capacity; // most tokens of a text

    Embedder(const Config& c, const Weights<T>& w, int longest, const Context& where);
    Embedder(const Embedder&) = delete;

    using Each = std::function<void(size_t i, const std::vector<float>& hidden)>;
    // Calls f(i, hidden) for every text in order, each of 1 .. capacity ids. Stops early when *stop becomes non-zero.
    void run(const std::vector<std::vector<int>>& texts, const StopFlag* stop, const Each& f);

  private:
    struct Last { size_t text; int row; }; // the end of a text in a batch
    int chunk, max_pages;
    Arena arena;
    Activations<T> activations;
    KVCache<T> cache;
    acc<T>* rope;
    int *token, *pos, *seq, *slot, *table; // a Batch

    void plan();
    std::vector<Last> compute(const std::vector<std::vector<int>>& texts, size_t& next, size_t& done,
                              const StopFlag* stop);
};

// The vectors of documents; with a task, of queries.
template <class T>
std::vector<std::vector<float>> embed_texts(Embedder<T>& model, const Tokenizer& tokenizer,
                                            const std::vector<std::string>& texts, const std::string& task = "");
