// train/run.h: a training run: steps, evaluations, checkpoints, and messages.
#pragma once
#include "model/dataset.h"
#include "train/options.h"

// Trains, and writes adapter or model, state, log and curve to o.out. leaked: rows of `data` that are also in `eval`.
// Returns the exit status: 130 if a signal stopped the run.
template <class T>
int train(const TrainOptions& o, const Context& ctx, const ModelFile& file, const Dataset& data, const Dataset* eval,
          size_t leaked);
