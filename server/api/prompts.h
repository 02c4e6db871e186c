// prompts.h: prompt ids from texts, ids or conversations.
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

// How to render a conversation and to cut a prompt.
struct PromptOptions {
    ChatOptions chat{};
    size_t truncate = 0; // tokens to keep of the prompt, its last; 0: all
};

// Refuses, before tokenizing, a text too long for the context whatever its tokens are.
void check_length(const Service& service, size_t bytes, const PromptOptions& o, const char* name);

// A string, a list of strings, of ids, or of lists of ids. Strings never become special tokens.
std::vector<std::vector<int>> prompts_from_json(const Service& service, sj::Value v, const PromptOptions& o);

// ask: receives the sources, if it wants passages of the documents.
std::vector<int> chat_prompt(const Service& service, const Fields& f, const PromptOptions& o, Ask* ask = nullptr);

// The best passage becomes the job's answer, if there is one and plain text is wanted; otherwise clears `sources`.
void quote_passage(const Service& service, std::vector<Source>& sources, Job& job);

// Whether to think: as the request says in one of two ways, otherwise the server's default.
ChatOptions chat_options_from_json(const Service& service, const Fields& f);

} // namespace server
