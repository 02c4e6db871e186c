// prompts.cpp: renders conversations, with passages of the documents.
#include "search/grounding.h"
#include "search/hybrid.h"
#include "search/index.h"
#include "search/quote.h"
#include "server/api/conversation.h"
#include "server/api/limits.h"
#include "server/api/prompts.h"
#include "server/api/request.h"
#include "server/api/shelf.h"
#include <algorithm>
#include <climits>
#include <cstring>

namespace server {

constexpr size_t NFC_SHRINKS = 4;    // bytes of a text per byte of its NFC, at most (U+1FBE U+0308 U+0301: 7 to 2)

std::vector<int> ids_from_json(const Service& service, sj::Value list, const char* name) {
    std::vector<int> ids;
    for (sj::Value v : list.items()) {
        int64_t id = -1;
        if (!v.integer(&id) || id < 0 || id >= service.tokenizer->size())
            throw Refusal(400, format("%s: a token must be an integer from 0 to %d", name,
                                      service.tokenizer->size() - 1), name);
        ids.push_back((int)id);
    }
    return ids;
}

// The passages for the question, such that `room` tokens of the context are left for the answer.
static std::vector<Source> add_passages(const Service& service, const Documents& documents,
                                        std::vector<Message>& messages, const PromptOptions& o,
                                        const std::vector<std::string>& tools, size_t room) {
    const Tokenizer& tokenizer = *service.tokenizer;
    auto rendered = [&](const std::vector<Message>& m) { return render_chat(tokenizer, m, o.chat, tools).size(); };
    auto measure = [&](std::string_view s) { return tokenizer.encode(s, false).size(); };
    const size_t context = (size_t)service.context;
    try {
        if (service.quotes) {
            std::vector<Source> found = find_passages(documents, messages);
            if (!found.empty() && found[0].score == 0) found.clear(); // only the beginning of a conversation's texts
            return found;
        }
        return add_passages(documents, messages, context - std::min(context, room), rendered, measure);
    } catch (const LookupStopped&) {
        throw Refusal(503, "the lookup in documents was given up");
    } catch (const IndexFault& e) { // not the request's fault; the client must not see the path
        print_error("serve", e.what());
        throw Refusal(500, "the documents cannot be looked up");
    }
}

void check_length(const Service& service, size_t bytes, const PromptOptions& o, const char* name) {
    const size_t most = service.tokenizer->longest() * NFC_SHRINKS * (size_t)service.context;
    if (!o.truncate && bytes > most)
        throw Refusal(400, format("the context is %d tokens: %zu bytes cannot fit", service.context, bytes), name,
                      "context_length_exceeded");
}

std::vector<std::vector<int>> prompts_from_json(const Service& service, sj::Value v, const PromptOptions& o) {
    std::vector<std::vector<int>> prompts;
    auto encode = [&](const std::string& text) {
        check_length(service, text.size(), o, "prompt");
        return service.tokenizer->encode(text, false);
    };
    const auto first = v.items().begin();
    const bool of_ids = v.size() && (*first).is(sj::Number);
    if (v.is(sj::String)) return {encode(v.str())};
    if (!v.is(sj::Array) || v.size() == 0)
        throw Refusal(400, "prompt must be a string, a list of strings or of token ids", "prompt");
    if (of_ids) return {ids_from_json(service, v, "prompt")};
    if (v.size() > MAX_CHOICES) throw Refusal(400, format("at most %d prompts in a request", MAX_CHOICES), "prompt");
    for (sj::Value p : v.items()) {
        if (!p.is(sj::String) && !p.is(sj::Array))
            throw Refusal(400, "prompt: neither a string nor a list of token ids", "prompt");
        prompts.push_back(p.is(sj::String) ? encode(p.str()) : ids_from_json(service, p, "prompt"));
    }
    return prompts;
}

std::vector<int> chat_prompt(const Service& service, const Fields& f, const PromptOptions& o, Ask* ask) {
    try {
        std::vector<Message> messages = conversation_from_json(f["messages"]);
        for (Message& m : messages)
            if (m.role == "developer") m.role = "system";
        if (!service.system.empty() && (messages.empty() || messages[0].role != "system"))
            messages.insert(messages.begin(), {"system", service.system});
        size_t bytes = 0;
        for (const Message& m : messages) bytes += m.content.size();
        const std::vector<std::string> tools = tools_from_json(f["tools"]);
        for (auto& tool : tools) bytes += tool.size();
        check_length(service, bytes, o, "messages");
        if (ask && ask->documents) {
            const int64_t quarter = service.context / 4, most = f.integer("max_tokens", 1, INT_MAX, quarter);
            const size_t room = (size_t)f.integer("max_completion_tokens", 1, INT_MAX, most);
            const std::shared_ptr<const Documents> documents =
                has_documents(f) ? service.shelf->get(documents_from_json(f["documents"])) : service.documents;
            ask->sources = add_passages(service, *documents, messages, o, tools, room);
        }
        return render_chat(*service.tokenizer, messages, o.chat, tools);
    } catch (const Refusal&) {
        throw;
    } catch (const Error& e) {
        throw Refusal(400, e.what(), "messages");
    }
}

void quote_passage(const Service& service, std::vector<Source>& sources, Job& job) {
    if (!service.quotes) return;
    if (job.form || job.tools || job.alternatives >= 0 || job.prompt_alternatives >= 0) sources.clear();
    if (sources.empty()) return;
    Quote q = quote(sources[0], *service.tokenizer, (size_t)service.context / 4, job.stops, job.max_tokens);
    auto piece = std::make_shared<Piece>();
    piece->choice = job.choice, piece->text = std::move(q.text), piece->stop = std::move(q.stop);
    piece->finish = q.finish, piece->count = q.ids.size() + !strcmp(q.finish, "stop");
    job.given = piece;
}

ChatOptions chat_options_from_json(const Service& service, const Fields& f) {
    ChatOptions o{service.thinking, true};
    const std::string effort = f.text("reasoning_effort");
    if (!effort.empty()) { // the model has no degrees of effort
        const bool little = effort == "none" || effort == "minimal";
        const bool much = effort == "high" || effort == "xhigh" || effort == "max";
        if (!little && !much && effort != "low" && effort != "medium")
            throw Refusal(400, "reasoning_effort must be none, minimal, low, medium, high, xhigh or max",
                          "reasoning_effort");
        o.thinking = !little;
    }
    if (f["chat_template_kwargs"]) {
        const Fields kwargs(f["chat_template_kwargs"], "chat_template_kwargs");
        for (auto& [name, value] : kwargs.all)
            if (name != "enable_thinking")
                throw Refusal(400, "chat_template_kwargs: only enable_thinking is supported", "chat_template_kwargs");
        const bool wanted = kwargs.boolean("enable_thinking", o.thinking);
        if (!effort.empty() && wanted != o.thinking)
            throw Refusal(400, "reasoning_effort contradicts enable_thinking", "reasoning_effort");
        o.thinking = wanted;
    }
    o.continue_final = f.boolean("continue_final_message", false);
    o.generation_prompt = f.boolean("add_generation_prompt", !o.continue_final);
    if (o.continue_final && o.generation_prompt)
        throw Refusal(400, "continue_final_message needs add_generation_prompt: false", "add_generation_prompt");
    return o;
}

} // namespace server
