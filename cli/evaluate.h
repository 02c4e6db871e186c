// cli/evaluate.h: --eval.
#pragma once
#include "cli/options.h"
#include "model/loaded.h"
#include "model/tokenizer.h"

namespace cli {

// --eval: the model's answers to the questions of a QA file, and its loss on the reference answers. Greedy, unless -t
// is given.
int evaluate(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer);

} // namespace cli
