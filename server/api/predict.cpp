// predict.cpp: turns prompts into chats of one turn; returns their answers in the order of the prompts.
#include "server/api/predict.h"
#include "server/api/fields.h"
#include "server/api/prompts.h"
#include "server/engine/random_bits.h"
#include <algorithm>
#include <utility>

namespace server {

PredictAnswer::PredictAnswer(const Service& service, const Ask& ask, bool list, std::vector<size_t> prompts,
                             std::vector<size_t> unanswered)
    : Answer(service, ask), list(list), prompts(std::move(prompts)), unanswered(std::move(unanswered)),
      end(this->prompts.size() + this->unanswered.size()) {}

std::string PredictAnswer::part() {
    sj::Writer& w = writer;
    if (place == 0) w.object().key("response");
    if (place == 0 && list) w.array();
    for (; place < end && w.text.size() < PART; place++) {
        const bool answered = choice < prompts.size() && prompts[choice] == place;
        w.value(answered ? choices[choice++].text : std::string());
    }
    if (place == end) {
        if (list) w.end();
        w.end(), ended = true;
    }
    return std::exchange(w.text, {});
}

void PredictAnswer::log(sj::Writer& w) const {
    if (unanswered.empty()) return;
    w.key("unanswered").array();
    for (size_t i = 0; i < std::min<size_t>(unanswered.size(), 100); i++) w.value(unanswered[i]); // a short log line
    w.end();
}

// The ids of a one-turn chat with `prompt`, with passages of the documents, if `ask` has any.
static std::vector<int> prompt_ids(const Service& service, const std::string& prompt, Ask& ask) {
    sj::Writer w;
    w.object().field("max_tokens", service.predicts.max_tokens).key("messages").array();
    if (!service.predicts.system.empty())
        w.object().field("role", "system").field("content", service.predicts.system).end();
    w.object().field("role", "user").field("content", prompt).end();
    const std::string chat = w.end().end().text;
    sj::Doc doc;
    PromptOptions how;
    how.chat = {false, true};
    return chat_prompt(service, Fields(parse_body(doc, chat)), how, &ask);
}

Asked read_predict(const Service& service, std::string_view body, uint64_t salt) {
    sj::Doc doc;
    const sj::Value prompt = Fields(parse_body(doc, body))["prompt"];
    const bool list = prompt.is(sj::Array);
    std::vector<std::string> texts;
    if (list)
        for (sj::Value one : prompt.items())
            if (one.is(sj::String)) texts.push_back(one.str());
    if (prompt.is(sj::String)) texts.push_back(prompt.str());
    if (list ? texts.size() != prompt.size() : texts.empty())
        throw Refusal(400, "prompt must be a string or a list of strings", "prompt");

    Asked a;
    a.ask.id = format("predict-%016llx", (unsigned long long)random_bits());
    a.ask.documents = (bool)service.documents;
    auto reply = std::make_shared<Reply>();
    reply->whole = true;
    const size_t context = (size_t)service.context;
    std::vector<size_t> prompts, unanswered;
    for (size_t i = 0; i < texts.size(); i++) {
        Job job;
        try {
            job.prompt = prompt_ids(service, texts[i], a.ask);
        } catch (const Refusal& r) {
            if (r.code != "context_length_exceeded") throw;
        }
        if (job.prompt.empty() || job.prompt.size() >= context) {
            unanswered.push_back(i);
            continue;
        }
        prompts.push_back(i);
        a.ask.prompt_tokens += job.prompt.size();
        job.reply = reply, job.choice = reply->left++, job.salt = salt;
        job.how.temperature = 0;
        job.max_tokens = std::min((size_t)service.predicts.max_tokens, context - job.prompt.size());
        job.bulk = list;
        quote_passage(service, a.ask.sources, job);
        a.ask.jobs.push_back(std::move(job));
    }
    a.ask.documents = false; // the response has no field for sources
    a.answer = std::make_unique<PredictAnswer>(service, a.ask, list, std::move(prompts), std::move(unanswered));
    return a;
}

} // namespace server
