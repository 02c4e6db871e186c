// cli/embed.h: --embed, --rerank.
#pragma once
#include "cli/options.h"
#include "model/loaded.h"
#include "model/tokenizer.h"

namespace cli {

// --embed, --rerank: a line of JSON for each text: vectors in the order of the texts, scores from the best down.
int embed_or_rerank(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer);

} // namespace cli
