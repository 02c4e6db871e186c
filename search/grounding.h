// search/grounding.h: the prompt with the passages that a question is about, and these as JSON.
#pragma once
#include "model/chat_template.h"
#include "search/documents.h"
#include "sj.h"
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

using Measure = std::function<size_t(std::string_view)>;            // tokens of a text
using Rendered = std::function<size_t(const std::vector<Message>&)>; // tokens of a conversation

// Whether a question is rather Chinese: as many Han characters as words in Latin letters.
bool is_chinese(std::string_view text);

// The question with the passages before it, as many of the best as fit into `room`, by measure(text); one that is too
// long is cut, and is the last. Those that do not fit are taken from `sources`. Where nothing fits the question stays
// as it is: an instruction must not be what makes a prompt too long. Text of a passage is never more than
// text for the tokenizer; but a model may obey it: only documents that one trusts should be given.
std::string grounded(const std::string& question, std::vector<Source>& sources, size_t room, const Measure& measure);

void write_sources(sj::Writer& w, const std::vector<Source>& sources); // a member of an object

// What is found for the last question of a conversation.
std::vector<Source> find_passages(const Documents& documents, const std::vector<Message>& messages);

// Gives the last question of a conversation the passages that it is about, in as many tokens as are left of `most` when
// the conversation is rendered without them: `rendered` counts its tokens, `measure` those of a text. A conversation
// without a question stays as it is.
std::vector<Source> add_passages(const Documents& documents, std::vector<Message>& messages, size_t most,
                                 const Rendered& rendered, const Measure& measure);
