// train/loader.h: the units of a dataset in the order of steps, distributed to ranks and packed into batches.
// `datagen pack` has marked the trained tokens (book/datagen/training_rows.h).
#pragma once
#include "base/arena.h"
#include "model/dataset.h"
#include "qwen3.cu"
#include "train/grpo.h"
#include "train/options.h"
#include <vector>

// Calls f(row) for each row of some units. (From: Dataset, Half or Groups.)
template <class From, class F> void each_row(const From& from, const std::vector<size_t>& list, F f) {
    for (size_t i : list)
        for (size_t k = 0; k < from.group(); k++) f(from.row(i * from.group() + k));
}
// The number of trained tokens of these units.
template <class From> size_t trained_tokens(const From& from, const std::vector<size_t>& list) {
    size_t n = 0;
    each_row(from, list, [&](DatasetRow row) { for (uint32_t word : row) n += word >> 31; });
    return n;
}

// The first or the second row of each unit of a dataset: with --kto the labelled answer, or the mismatched one.
struct Half {
    const Dataset& data;
    size_t which;
    size_t group() const { return 1; }
    size_t rows() const { return data.rows() / 2; }
    DatasetRow row(size_t i) const { return data.row(2 * i + which); }
    const char* path() const { return data.path(); }
};

struct Loader {
    const TrainOptions& o;
    Ranks& ranks;
    Context& ctx;
    const Config& c;
    const Dataset& data;
    std::vector<size_t> rows, eval_rows; // of the datasets, the units that are not too long: rows, or pairs
    int64_t epoch_steps;                 // steps an epoch
    int most_tokens = 0, longest = 0;    // of a batch, of a row

    Loader(const TrainOptions& options, Context& where, const Config& config, const Dataset& train)
        : o(options), ranks(*o.ranks), ctx(where), c(config), data(train), unfed(!o.scores() && !o.rl.model_scores()) {}
    // Leaves out units that are too long, and reports them.
    void choose_rows(const Dataset* evaluation);

    const char* unit() const { return data.pairs() ? "pair" : o.grpo ? "prompt" : "row"; }
    size_t step_units() const { return (size_t)o.batch * o.accum * ranks.size; } // rows, pairs or prompts of a step
    size_t sequences() const { // of a batch, at most
        return (size_t)o.batch * (o.grpo ? o.rl.group : data.pairs() ? 2 : 1);
    }

    // ---- Steps
    // The units of a step. Each epoch's order is shuffled anew (Fisher and Yates, with Philox).
    std::vector<size_t> rows_of(int64_t k);
    // This rank's units of a step; `places` becomes their places in the step.
    std::vector<size_t> deal_step(const std::vector<size_t>& list);
    std::vector<size_t> places; // of this rank's units in the step; none: the order of the list
    // The place in the step of a unit of this rank, by its number in the rank's list.
    size_t place_in_step(size_t unit) const { return places.empty() ? unit : places[unit]; }

    // ---- Batches
    int *token, *pos, *seq, *slot, *pages, *named, *target; // a Batch, its trained rows and the targets after them
    uint32_t* place;       // Dropout::token
    float* bound;          // Noise::bound, with --neftune-alpha
    int outcomes = 0;      // of a trained token in taught rows, the tail last: see gather_outcomes; 0: no such rows
    int* outcome;          // (trained tokens, outcomes) ids; -1: none
    float* log_p;          // (trained tokens, outcomes) of the teacher
    int max_pages;         // of a row
    std::vector<int> ends; // end of each sequence's trained tokens in `named`
    void plan(Arena& arena);

    // Packs units list[0 .. n - 1]; the first is number `first` of its step, or of this rank's part of it. R: the
    // number of tokens to predict. (From: Dataset, Half or Groups.)
    // whole: a row's last token is fed too, and is the only one of the row in `named`.
    template <class From>
    Batch load(const From& from, const size_t* list, int n, int first, int& R, bool whole = false);

  private:
    const bool unfed; // a row's last token, in all batches
    std::vector<size_t> order;
    int64_t ordered = -1; // the epoch of this order

    void load_outcomes(const Dataset& from, const std::vector<size_t>& rows);
    std::vector<size_t> fitting(const Dataset& from); // short enough units; a row's last token is not fed
};
