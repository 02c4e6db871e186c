// prompts.h: the ids of prompts, from texts, ids or conversations.
#pragma once
#include "model/chat_template.h"
#include "search/documents.h"
#include "server/api/fields.h"
#include "server/api/service.h"
#include <vector>

namespace server {

struct Ask;
struct Job;

std::vector<int> ids_from_json(const Service& service, sj::Value list, const char* name);

// How a conversation is rendered and a prompt cut.
struct PromptOptions {
    ChatOptions chat{};
    size_t truncate = 0; // tokens of the prompt that stay, its last; 0: all
};

// A text that is too long for the context whatever its tokens are is refused before they are made.
void check_length(const Service& service, size_t bytes, const PromptOptions& o, const char* name);

// A string, a list of strings, of ids, or of lists of ids. Text stays text, whatever it looks like.
std::vector<std::vector<int>> prompts_from_json(const Service& service, sj::Value v, const PromptOptions& o);

// `ask`: gets the sources, if it wants passages of the documents.
std::vector<int> chat_prompt(const Service& service, const Fields& f, const PromptOptions& o, Ask* ask = nullptr);

// The best passage becomes the job's answer, if there is one and plain text is wanted. Else `sources` are none.
void quote_passage(const Service& service, std::vector<Source>& sources, Job& job);

// Whether it thinks: as the request says in one of two ways, else as the server does.
ChatOptions chat_options_from_json(const Service& service, const Fields& f);

} // namespace server
