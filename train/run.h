// train/run.h: a training run: steps, evaluations, checkpoints, and what it tells.
#pragma once
#include "model/dataset.h"
#include "train/options.h"

// Trains, and leaves adapter or model, state, log and curve in o.out. leaked: rows of `data` that are in `eval`.
// Returns the exit status: 130 if it was stopped by a signal.
template <class T>
int train(const TrainOptions& o, const Context& ctx, const ModelFile& file, const Dataset& data, const Dataset* eval,
          size_t leaked);
