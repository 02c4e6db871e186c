// train/teacher.h: the teacher of --teacher: a model that is not trained, and its logits for a batch of the student's.
#pragma once
#include "base/arena.h"
#include "model/distillation.h"
#include "model/model_file.h"
#include <string>

struct DistilOptions : Distillation {
    double on_policy = 0; // share of steps on the student's own answers
};

template <class T> struct Teacher {
    using A = acc<T>;
    const ModelFile file;
    const Config& c;
    Context ctx; // the student's, with scratch of its own
    Weights<T> w;
    double time = 0; // s, that it has computed

    // Throws Error if its vocabulary is not the student's.
    Teacher(const std::string& path, const Context& where, const ModelFile& student);
    size_t bytes() const; // of its weights

    // Memory for batches of up to N tokens in `pages` pages, rows of up to `longest` tokens, logits of `rows` tokens.
    void plan(Arena& arena, int N, size_t pages, int longest, int rows);
    void fill();

    void forward(const Batch& b);
    const A* logits_of(const int* rows, int R); // (R,V) of some tokens of the batch, until the next call
    const T* normed() const { return a.normed; } // (N,C) after the final norm
    // Multiplications and additions, times two: of N tokens with `pairs` of a query and a key, logits of R of them.
    double flops(double N, double pairs, double R) const;

  private:
    Activations<T> a;
    KVCache<T> kv;
    A *rope, *logits;
    T* picked;
    int positions = 0;

    template <class F> void timed(F compute);
};
