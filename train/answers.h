// train/answers.h: samples answers during training: a paged cache; all answers to a prompt share the prompt's pages.
#pragma once
#include "qwen3.cu"
#include <vector>

struct Draw; // qwen3.cu

// Samples answers to several prompts at once, with the current weights. The full pages of a prompt are computed once
// and shared by all answers to it; each answer has its own pages for the rest of the prompt and for itself.
template <class T> struct AnswerEngine {
    Context& ctx;
    const Config& c;
    const Weights<T>& w;
    int tokens = 0, sequences = 0, pages = 0; // at once, at most; pages a sequence can have
    size_t all_pages = 0;                     // ... and all sequences together
    const acc<T>* rope = nullptr;             // (positions, D/2, 2)
    Activations<T> a;
    KVCache<T> kv;
    acc<T>* logits;                           // (sequences, V)
    T* picked;                                // (sequences, C)
    int *token, *pos, *seq, *slot, *named, *table; // a Batch, the rows to sample from
    Draw* draws;                                   // (sequences) these and the next on a GPU only
    int *drawn, *draw_pos, *draw_seq, *unused;     // (sequences)

    AnswerEngine(Context& where, const Config& config, const Weights<T>& weights) : ctx(where), c(config), w(weights) {}
    void plan(Arena& arena);

    struct Asked { const std::vector<int>* prompt; Sampling how; };
    struct Row { int token, pos, seq; };
    std::vector<int> pages_of; // the table, as the host has it

    // The answers to asked[0], asked[1], .., each at most `most` tokens with its end token. Neighbours with the same
    // prompt share its pages. Undefined if it was interrupted.
    std::vector<std::vector<int>> answer(const std::vector<Asked>& asked, int most, int exist);

    // Feeds rows; the rows of a sequence are neighbours. With `next` samples the token after each sequence's last.
    void compute(const std::vector<Row>& rows, const std::vector<Asked>& asked, std::vector<Row>* next, int exist);

    // Samples from rows last[0], last[1], .. of the batch.
    void draw(const Row* rows, const std::vector<int>& last, const std::vector<Asked>& asked, std::vector<Row>& next,
              int exist);
    void draw_gpu(const Row* rows, const std::vector<int>& last, const std::vector<Asked>& asked, std::vector<int>& ids,
                  int exist);
};
