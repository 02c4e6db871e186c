// train/merge.h: merges an adapter into its model, and copies the tokenizer beside a written model.
#pragma once
#include "model/dataset.h"
#include "train/options.h"
#include <string>

// Copies the tokenizer of the model beside the written model, so that it needs no -z. A different tokenizer there is
// replaced only if `replace`; else a message says how to resolve it.
void give_tokenizer(const TrainOptions& o, const ModelFile& file, const std::string& folder, bool replace);

// Checks before hours of training whether a merge would fail.
void check_merge(const TrainOptions& o, const ModelFile& file);

// Merges, then compares the model with the adapter and the merged model: the mean KL divergence over the positions of a
// prompt, and how many tokens of their greedy continuations are the same.
template <class T>
void merge_adapter(const TrainOptions& o, Context ctx, const ModelFile& file, const std::string& folder,
                   const Dataset* data);
