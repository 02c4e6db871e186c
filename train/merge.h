// train/merge.h: an adapter merged into its model, and the tokenizer beside a model that was made.
#pragma once
#include "model/dataset.h"
#include "train/options.h"
#include <string>

// Puts the tokenizer of the model beside what was made of the model, so that it needs no -z. One that is there and
// another is replaced only if `replace`; else a line says what to do.
void give_tokenizer(const TrainOptions& o, const ModelFile& file, const std::string& folder, bool replace);

// What would make a merge fail, asked before hours of training.
void check_merge(const TrainOptions& o, const ModelFile& file);

// Merges, then compares the model with the adapter and the merged model: the mean KL divergence over the positions of a
// prompt, and how many tokens of their greedy texts after it are the same.
template <class T>
void merge_adapter(const TrainOptions& o, Context ctx, const ModelFile& file, const std::string& folder,
                   const Dataset* data);
