// cli/perplexity.h: --ppl, the model's perplexity on a text; --against, its distance from another model.
#pragma once
#include "cli/options.h"
#include "model/loaded.h"
#include "model/tokenizer.h"

namespace cli {

// -ln softmax(logits)[id]: over all V rows as in transformers, ids that do not exist included; in double, in one order.
double negative_log_likelihood(const float* logits, int V, int id);

// --ppl: the mean negative log-likelihood of a text's tokens and its exponential, over windows as in "Perplexity of
// fixed-length models" (https://huggingface.co/docs/transformers/perplexity): each window begins --stride tokens after
// the one before and scores its new tokens; the others are their context. The first token of the text has no context
// and is not scored; with a stride of a whole window no window's first token is. Every scored token counts the same
// (the loop printed there gives tokens of later windows a little less weight). The text is plain: names of special
// tokens in it stay text.
int perplexity(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer);

// --ppl with --against: the divergence of this model's distributions from another one's on each token of a text, in
// windows without shared context: KL(other || this), how often the likeliest token is the same, both perplexities.
int compare(const Options& o, const LoadedModel& model, const ModelFile& other, const Tokenizer& tokenizer);

} // namespace cli
