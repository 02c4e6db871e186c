// request.h: requests of OpenAI's API, with vLLM's additions, from JSON to jobs for the engine. Every field that either
// API documents is supported or refused by name: an ignored field would be noticed only later.
// docs/server.md has the table.
#pragma once
#include "search/documents.h"
#include "server/api/fields.h"
#include "server/api/service.h"
#include "server/engine/job.h"
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace server {

struct Pooled; // pooled.h: how hidden states are reported

// A parsed request.
struct Ask {
    bool chat = true, stream = false, usage = false, logprobs = false, echoes = false;
    int prompt_logprobs = -1; // alternatives to each of the prompt's tokens, as vLLM reports these; -1: not requested
    std::string id;
    AdapterPtr adapter{};    // of the requested model; null: the base model
    std::vector<Job> jobs;   // one per answer,
    size_t each = 1;         // ... so many per prompt
    size_t prompt_tokens = 0;
    std::vector<std::string> echo{}; // per prompt: the text its answers begin with, if echo is requested
    bool documents = false;          // the question gets passages of the documents
    std::vector<Source> sources{};   // ... these
    std::shared_ptr<const Pooled> pooled{}; // a request for vectors or a ranking, not text
};

// A job without its prompt and its reply.
Job job_from_json(const Service& service, const Fields& f, const Ask& ask, bool thinking, uint64_t salt);

// A part of the answer's id: the request's own, or a new one.
std::string request_name(const Fields& f);

// The refusal of an unknown model's name; it lists the known ones.
Refusal no_such_model(const Service& service);

// The adapter of the requested model; null: the base model.
AdapterPtr asked_adapter(const Service& service, const Fields& f);

// The whole request.
Ask ask_from_json(const Service& service, const Fields& f, bool chat);

// Reads a request's body. `salt`: the key whose prompts may share pages.
Ask read_ask(const Service& service, std::string_view body, bool chat, uint64_t salt);

} // namespace server
