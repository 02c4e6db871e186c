// cli/perplexity.h: --ppl, how well the model foresees a text; --against, how far another model is from it.
#pragma once
#include "cli/options.h"
#include "model/loaded.h"
#include "model/tokenizer.h"

namespace cli {

// -ln softmax(logits)[id]: over all V rows as transformers takes it, the ids that do not exist among them; in
// double, and in one order.
double negative_log_likelihood(const float* logits, int V, int id);

// --ppl: the mean negative log-likelihood of a text's tokens and its exponential, over windows as in "Perplexity of
// fixed-length models" (https://huggingface.co/docs/transformers/perplexity): each window begins --stride tokens
// after the one before and scores the tokens that are new in it; the others are their context. The first token of
// the text has none and is not scored; with a stride of a whole window no window's first is. Every scored token
// counts the same (the loop printed there gives those of later windows a little less).
// The text is plain: names of special tokens in it stay text.
int perplexity(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer);

// --ppl with --against: how far this model's distributions are from another one's, on each token of a text, in windows
// that each begin anew: KL(other || this), how often both think the same token likeliest, both perplexities.
int compare(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer);

} // namespace cli
