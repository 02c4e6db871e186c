// cli/ask.h: one prompt and its answer, or its logits; without a prompt, a chat.
#pragma once
#include "cli/options.h"
#include "model/loaded.h"
#include "model/tokenizer.h"

namespace cli {

// Answers the prompt of the options on stdout; returns the exit status. tokenizer: null if none is needed. start: the
// program's start time, in seconds().
int ask(const Options& o, LoadedModel& model, const Tokenizer* tokenizer, double start);

} // namespace cli
