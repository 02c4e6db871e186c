// request.h: a request of OpenAI's API, with vLLM's additions, from JSON to jobs for the engine. Every field that either
// of the two documents is done here or refused by name: what would be ignored would be missed only later.
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

struct Pooled; // pooled.h: how hidden states are told

// A request, understood.
struct Ask {
    bool chat = true, stream = false, usage = false, logprobs = false;
    std::string id;
    AdapterPtr adapter{};    // the model that is asked for; null: the base model
    std::vector<Job> jobs;   // one for each answer,
    size_t each = 1;         // ... so many to a prompt
    size_t prompt_tokens = 0;
    std::vector<std::string> echo{}; // of each prompt: what its answers begin with, if that is wanted
    bool documents = false;          // the question gets passages
    std::vector<Source> sources{};   // ... these
    std::shared_ptr<const Pooled> pooled{}; // vectors or a ranking are wanted, no text
};

// All of a job but its prompt and its reply.
Job job_from_json(const Service& service, const Fields& f, const Ask& ask, bool thinking, uint64_t salt);

// A part of the answer's id: the request's own, or a new one.
std::string request_name(const Fields& f);

// The adapter that is asked for, by the name of a model; null: the base model.
AdapterPtr asked_adapter(const Service& service, const Fields& f);

// What is asked for as a whole.
Ask ask_from_json(const Service& service, const Fields& f, bool chat);

// Reads a request's body. `salt`: whose prompts it may share pages with.
Ask read_ask(const Service& service, std::string_view body, bool chat, uint64_t salt);

} // namespace server
