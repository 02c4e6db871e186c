// search/grounding.h: the prompt with passages for a question, and the passages as JSON.
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

// Whether a question is mostly Chinese: at least as many Han characters as words in Latin letters.
bool is_chinese(std::string_view text);

// The question, preceded by as many of the best passages as fit into `room`, by measure(text). A passage that is too
// long is cut, and is the last. Passages that do not fit are removed from `sources`. If none fits, the question is
// returned unchanged: an instruction must not make a prompt too long. A passage's text never becomes a special
// token; but a model may follow instructions in it: use trusted documents only.
std::string grounded(const std::string& question, std::vector<Source>& sources, size_t room, const Measure& measure);

void write_sources(sj::Writer& w, const std::vector<Source>& sources); // a member of an object

// Searches for the last question of a conversation.
std::vector<Source> find_passages(const Documents& documents, const std::vector<Message>& messages);

// Inserts passages before the last question of a conversation, in the tokens that the rendered conversation leaves of
// `most`: `rendered` counts a conversation's tokens, `measure` those of a text. A conversation without a question is
// unchanged.
std::vector<Source> add_passages(const Documents& documents, std::vector<Message>& messages, size_t most,
                                 const Rendered& rendered, const Measure& measure);
