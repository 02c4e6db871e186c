// cli/answer.h: generates an answer: documents beside the question, prompt lookup, the tokens themselves.
#pragma once
#include "cli/options.h"
#include "model/chat_template.h"
#include "model/loaded.h"
#include "model/lookup.h"
#include "model/pace.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "search/documents.h"
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace cli {

// With --docs: adds to the last question the passages about it, as many as fit if `room` tokens of the context stay
// free.
std::vector<Source> add_passages(const Options& o, const Tokenizer& tokenizer, std::vector<Message>& messages,
                                 size_t context, size_t room, const std::vector<std::string>& tools = {});
void say_sources(const std::vector<Source>& sources);

// With --quote the best passage becomes the answer, if there is one. False: the model answers.
bool quote_passage(const Options& o, const Tokenizer* tokenizer, const std::vector<Source>& sources, size_t context,
                   Generation& g);

// Tokens of an answer that a prompt leaves room for.
size_t room_for_answer(const Options& o, size_t context);

// --lookup for this session. On a GPU a token has the same bits in steps of any number of tokens with step.h's kernels,
// or with --invariant.
void use_lookup(const Options& o, Conversation& session);
// The result, for messages.
std::string told(const LookUp& lookup);

// Makes the session hold this prompt and computes only the missing part: returns how many tokens it already held. The
// last token is always computed, since its logits are needed.
size_t feed_prompt(Conversation& session, const std::vector<int>& prompt);

// `generate`, with the threads that other programs leave free (ThreadPace); the time of `show` does not count.
void speak(Conversation& session, const Tokenizer* tokenizer, Generation& g, ThreadPace& pace,
           const std::function<void(std::string_view)>& show);

} // namespace cli
