// request.cpp: requests as jobs.
#include "form/tools.h"
#include "model/tokenizer.h"
#include "server/api/forms.h"
#include "server/api/limits.h"
#include "server/api/prompts.h"
#include "server/api/request.h"
#include "server/api/shelf.h"
#include "server/engine/random_bits.h"
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

namespace server {

// Fields that are supported, or that never change an answer.
static const std::set<std::string> DONE = {
    "model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "min_tokens",
    "stop", "stop_token_ids", "ignore_eos", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "logprobs",
    "top_logprobs", "prompt_logprobs", "skip_special_tokens", "echo", "best_of", "truncate_prompt_tokens",
    "truncation_side",
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "priority", "cache_salt", "request_id",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools",
    "tool_choice", "parallel_tool_calls", "documents", "use_documents", "user", "metadata", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "session_id"};

// Other fields are accepted only with values that change nothing; an empty one counts as absent.
static void refuse_what_is_not_done(const Fields& f) {
    static const Values NO = {"false"}, EITHER = {"true", "false"}, ONE = {"1", "1.0"};
    static const std::map<std::string, Values> ONLY = {
        {"function_call", {"\"none\"", "\"auto\""}}, {"add_special_tokens", EITHER}, {"use_beam_search", NO},
        {"length_penalty", ONE}, {"early_stopping", NO}, {"verbosity", {"\"medium\""}}, {"modalities", {"[\"text\"]"}},
        {"return_token_ids", NO}, {"return_tokens_as_token_ids", NO}, {"return_prompt_text", NO},
        {"include_stop_str_in_output", NO}, {"include_reasoning", {"true"}}, {"spaces_between_special_tokens", EITHER},
        {"stream_interval", ONE}, {"watermarking", NO}, {"store", NO}, {"return_token_offsets", NO},
        {"return_mm_kwargs", EITHER}, {"routed_experts_prompt_start", {"0"}}, {"thinking_token_budget", {"-1"}},
        {"service_tier", SERVICE_TIERS}};
    for (auto& [name, v] : f.all) {
        const bool empty = (v.is(sj::Array) && v.size() == 0) || (v.is(sj::String) && v.str().empty());
        if (v.is(sj::Null) || empty || DONE.count(name)) continue;
        const auto only = ONLY.find(name);
        if (only == ONLY.end()) refuse_name(name);
        refuse_value(name.c_str(), v, only->second);
    }
}

// The request's sampling parameters; Qwen's recommendations where it gives none.
static Sampling sampling_from_json(const Fields& f, bool thinking) {
    Sampling how;
    how.temperature = (float)f.number("temperature", 0, 2, thinking ? 0.6f : 0.7f);
    how.top_p = (float)f.number("top_p", 0, 1, thinking ? 0.95f : 0.8f);
    how.top_k = (int)std::max<int64_t>(0, f.integer("top_k", -1, INT_MAX, 20));
    how.min_p = (float)f.number("min_p", 0, 1, 0);
    how.repeat = (float)f.number("repetition_penalty", 0.01, 100, 1);
    how.presence = (float)f.number("presence_penalty", -2, 2, 0);
    how.frequency = (float)f.number("frequency_penalty", -2, 2, 0);
    how.seed = f["seed"] ? (uint64_t)f.integer("seed", INT64_MIN, INT64_MAX, 0) : random_bits();
    return how;
}

static std::vector<std::string> stops_from_json(sj::Value stop) {
    std::vector<std::string> stops;
    if (stop.is(sj::String)) stops.push_back(stop.str());
    else if (stop) {
        if (!stop.is(sj::Array) || stop.size() > MAX_STOPS)
            throw Refusal(400, format("stop must be a string or a list of at most %zu", MAX_STOPS), "stop");
        for (sj::Value s : stop.items()) stops.push_back(s.str());
    }
    for (auto& s : stops)
        if (s.empty() || s.size() > MAX_STOP)
            throw Refusal(400, format("stop: each must be a string of 1 to %zu bytes", MAX_STOP), "stop");
    return stops;
}

// Bans a word that is one token. As in vLLM, the word with a space before it is banned too, if that is one token.
static void ban_word(const Tokenizer& tokenizer, const std::string& word, std::map<int, float>& bias) {
    const std::vector<int> plain = tokenizer.encode(word, false), spaced = tokenizer.encode(" " + word, false);
    if (plain.size() != 1)
        throw Refusal(400, "bad_words: only words that are one token each are supported", "bad_words");
    bias[plain[0]] = BAN;
    if (spaced.size() == 1) bias[spaced[0]] = BAN;
}

// The biases of logits, from logit_bias, bad_words and allowed_token_ids.
static std::vector<std::pair<int, float>> biases_from_json(const Service& service, const Fields& f, const Sampling& how) {
    std::map<int, float> of;
    if (const sj::Value bias = f["logit_bias"]) {
        if (!bias.is(sj::Object) || bias.size() > MAX_NAMED)
            throw Refusal(400, format("logit_bias must be an object of at most %d members", MAX_NAMED), "logit_bias");
        for (auto [key, value] : bias.members()) {
            const double x = value.number(NAN);
            char* end;
            errno = 0;
            const long id = strtol(key.c_str(), &end, 10);
            const bool number = isdigit((unsigned char)key.c_str()[0]) && !*end && !errno;
            if (!number || id >= service.tokenizer->size() || !(x >= -100 && x <= 100))
                throw Refusal(400, "logit_bias must hold token ids and numbers from -100 to 100", "logit_bias");
            of[(int)id] = (float)x;
        }
    }
    if (const sj::Value list = f["allowed_token_ids"]) {
        if (!list.is(sj::Array) || list.size() == 0 || list.size() > MAX_NAMED)
            throw Refusal(400, format("allowed_token_ids must be a list of 1 to %d ids", MAX_NAMED),
                          "allowed_token_ids");
        if (has_penalties(how))
            throw Refusal(400, "allowed_token_ids is not supported beside penalties", "allowed_token_ids");
        const std::vector<int> ids = ids_from_json(service, list, "allowed_token_ids");
        for (int id : std::set<int>(ids.begin(), ids.end())) of[id] += ALLOW;
    }
    if (const sj::Value words = f["bad_words"]) {
        if (!words.is(sj::Array) || words.size() > MAX_NAMED)
            throw Refusal(400, format("bad_words must be a list of at most %d strings", MAX_NAMED), "bad_words");
        for (sj::Value word : words.items()) {
            if (word.str().empty() || word.str().size() > MAX_STOP)
                throw Refusal(400, format("bad_words: each must be a string of 1 to %zu bytes", MAX_STOP), "bad_words");
            ban_word(*service.tokenizer, word.str(), of);
        }
    }
    if (of.size() > MAX_NAMED)
        throw Refusal(400, format("at most %d ids in logit_bias, allowed_token_ids and bad_words together", MAX_NAMED),
                      "logit_bias");
    return {of.begin(), of.end()};
}

Job job_from_json(const Service& service, const Fields& f, const Ask& ask, bool thinking, uint64_t salt) {
    Job job;
    job.salt = salt, job.adapter = ask.adapter;
    if (const std::string name = f.text("cache_salt"); !name.empty()) job.use_cache_salt(name);
    else if (f["cache_salt"]) throw Refusal(400, "cache_salt must not be empty", "cache_salt");
    job.priority = (int)f.integer("priority", INT_MIN, INT_MAX, 0);
    job.thinking = thinking;
    job.how = sampling_from_json(f, thinking);
    job.ignore_eos = f.boolean("ignore_eos", false);
    job.specials = !f.boolean("skip_special_tokens", true);
    job.every = ask.stream;
    job.stops = stops_from_json(f["stop"]);
    job.bias = biases_from_json(service, f, job.how);
    job.form = form_from_json(service, f);
    add_tools(service, f, ask, job);
    if (const sj::Value list = f["stop_token_ids"]) {
        if (!list.is(sj::Array) || list.size() > MAX_ENDS)
            throw Refusal(400, format("stop_token_ids must be a list of at most %zu ids", MAX_ENDS), "stop_token_ids");
        job.ends = ids_from_json(service, list, "stop_token_ids");
    }
    if (ask.chat) {
        const int top = (int)f.integer("top_logprobs", 0, MAX_ALTERNATIVES, 0);
        if (f["top_logprobs"] && !ask.logprobs) throw Refusal(400, "top_logprobs needs logprobs: true", "top_logprobs");
        if (ask.logprobs) job.alternatives = top;
    } else if (ask.logprobs) {
        job.alternatives = (int)f.integer("logprobs", 0, MAX_ALTERNATIVES, 0);
        job.tells_end = true;
    }
    job.prompt_alternatives = std::max(ask.prompt_logprobs, ask.echoes ? job.alternatives : -1);
    return job;
}

std::string request_name(const Fields& f) {
    const std::string name = f.text("request_id");
    auto plain = [](char c) { return isalnum((unsigned char)c) || c == '-' || c == '_'; };
    if (name.size() > 64 || !std::all_of(name.begin(), name.end(), plain))
        throw Refusal(400, "request_id must be at most 64 letters, digits, - and _", "request_id");
    return name.empty() ? format("%016llx", (unsigned long long)random_bits()) : name;
}

Refusal no_such_model(const Service& service) {
    constexpr size_t MOST = 20;
    const auto adapters = service.adapters->now();
    std::string names = service.name;
    size_t listed = 0;
    for (auto& [name, adapter] : adapters)
        if (listed < MOST) names += ", " + name, listed++;
    if (adapters.size() > listed) names += format(" and %zu more (/v1/models)", adapters.size() - listed);
    return Refusal(404, "no such model; the server has: " + names, "model", "model_not_found");
}

AdapterPtr asked_adapter(const Service& service, const Fields& f) {
    const std::string model = f.text("model");
    if (model.empty() || model == service.name) return nullptr;
    AdapterPtr adapter = service.adapters->find(model);
    if (!adapter) throw no_such_model(service);
    return adapter;
}

Ask ask_from_json(const Service& service, const Fields& f, bool chat) {
    Ask ask;
    ask.adapter = asked_adapter(service, f);
    refuse_what_is_not_done(f);
    ask.chat = chat;
    ask.id = (chat ? "chatcmpl-" : "cmpl-") + request_name(f);
    ask.stream = f.boolean("stream", false);
    if (f["stream_options"]) {
        if (!ask.stream) throw Refusal(400, "stream_options is only for stream: true", "stream_options");
        const Fields o(f["stream_options"], "stream_options");
        ask.usage = o.boolean("include_usage", false);
        for (const char* more : {"continuous_usage_stats", "include_obfuscation"})
            if (o.boolean(more, false)) throw Refusal(400, format("stream_options: %s is not supported", more), more);
    }
    ask.logprobs = chat ? f.boolean("logprobs", false) : (bool)f["logprobs"];
    for (const char* label : {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
                              "session_id"})
        f.text(label);
    if (f["prompt_cache_options"]) Fields(f["prompt_cache_options"], "prompt_cache_options");
    const bool own = has_documents(f);
    ask.documents = f.boolean("use_documents", chat && (service.documents || own));
    if (own && !ask.documents) throw Refusal(400, "documents contradicts use_documents: false", "documents");
    if (own && !chat) throw Refusal(400, "documents is not for /v1/completions", "documents");
    if (ask.documents && !service.documents && !own)
        throw Refusal(400, "use_documents: the server has no documents (--docs)", "use_documents");
    if (ask.documents && !chat) throw Refusal(400, "use_documents is not for /v1/completions", "use_documents");
    ask.each = (size_t)f.integer("n", 1, MAX_CHOICES, 1);
    if (f.integer("best_of", 1, MAX_CHOICES, (int64_t)ask.each) != (int64_t)ask.each)
        throw Refusal(400, "best_of is not supported", "best_of");
    ask.echoes = f.boolean("echo", false);
    if (ask.echoes && chat) throw Refusal(400, "echo is not for chats", "echo");
    if (f["prompt_logprobs"]) ask.prompt_logprobs = (int)f.integer("prompt_logprobs", 0, MAX_ALTERNATIVES, 0);
    if (ask.prompt_logprobs >= 0 && ask.stream)
        throw Refusal(400, "prompt_logprobs is not supported beside stream: true", "prompt_logprobs");
    return ask;
}

Ask read_ask(const Service& service, std::string_view body, bool chat, uint64_t salt) {
    sj::Doc doc;
    const Fields f(parse_body(doc, body));
    Ask ask = ask_from_json(service, f, chat);
    PromptOptions how;
    if (chat) how.chat = chat_options_from_json(service, f);
    else how.chat.thinking = false;
    const Job job = job_from_json(service, f, ask, may_think(*service.tokenizer, how.chat), salt);

    const int64_t most = f.integer("max_tokens", chat, INT_MAX, chat ? INT_MAX : 16);
    const int64_t limit = f.integer("max_completion_tokens", chat, INT_MAX, most);
    const int64_t least = f.integer("min_tokens", 0, limit, 0);
    const bool limited = !chat || f["max_completion_tokens"] || f["max_tokens"];
    const int64_t wanted = limited ? std::max<int64_t>(1, limit) : 1;
    if (const int64_t k = f.integer("truncate_prompt_tokens", -1, service.context, 0); k != 0)
        how.truncate = (size_t)(k > 0 ? k : std::max<int64_t>(1, service.context - wanted)); // -1: what leaves room
    else if (f["truncate_prompt_tokens"])
        throw Refusal(400, "truncate_prompt_tokens must be -1 or positive", "truncate_prompt_tokens");
    const std::string side = f["truncation_side"].str("left"); // the side that is removed
    if (side != "left" && side != "right")
        throw Refusal(400, "truncation_side must be left or right", "truncation_side");

    std::vector<std::vector<int>> prompts;
    if (chat) prompts.push_back(chat_prompt(service, f, how, &ask));
    else prompts = prompts_from_json(service, f["prompt"], how);
    if (service.quotes && how.chat.continue_final) ask.sources.clear(); // the model continues its own words
    if (prompts.size() * ask.each > (size_t)MAX_CHOICES)
        throw Refusal(400, format("at most %d answers to a request", MAX_CHOICES), "n");
    auto reply = std::make_shared<Reply>();
    reply->whole = !ask.stream;
    size_t told = 0;
    for (auto& prompt : prompts) {
        if (how.truncate && prompt.size() > how.truncate) {
            if (side == "left") prompt.erase(prompt.begin(), prompt.end() - (ptrdiff_t)how.truncate);
            else prompt.resize(how.truncate);
        }
        const size_t room = (size_t)service.context - std::min((size_t)service.context, prompt.size());
        if (prompt.empty()) throw Refusal(400, "the prompt is empty", "prompt");
        if (room == 0 || (limited && (size_t)limit > room))
            throw Refusal(400, format("the context is %d tokens: the prompt has %zu%s", service.context, prompt.size(),
                                      room ? format(", and %lld are asked for", (long long)limit).c_str() : ""),
                          chat ? "messages" : "prompt", "context_length_exceeded");
        if (ask.echoes) ask.echo.push_back(service.tokenizer->decode(prompt, false));
        ask.prompt_tokens += prompt.size();
        for (size_t i = 0; i < ask.each; i++) {
            Job one = job;
            one.reply = reply, one.choice = reply->left++;
            one.prompt = prompt;
            one.how.seed += (uint64_t)one.choice;
            one.max_tokens = std::min((size_t)limit, room);
            one.min_tokens = std::min((size_t)least, one.max_tokens);
            quote_passage(service, ask.sources, one);
            if (chat && i > 0) one.prompt_alternatives = -1; // a chat reports its prompt once
            const size_t of_prompt = prompt.size() * (size_t)(one.prompt_alternatives + 1);
            if (ask.stream && of_prompt > MAX_TOLD_AT_ONCE)
                throw Refusal(400, format("at most %zu log-probabilities of a prompt in a stream", MAX_TOLD_AT_ONCE),
                              "echo");
            told += one.max_tokens * (size_t)(one.alternatives + 1) + of_prompt;
            ask.jobs.push_back(std::move(one));
        }
    }
    if (told > MAX_TOLD)
        throw Refusal(400, format("at most %zu log-probabilities to a request: ask for fewer answers, tokens or "
                                  "alternatives", MAX_TOLD),
                      ask.prompt_logprobs > job.alternatives ? "prompt_logprobs" : chat ? "top_logprobs" : "logprobs");
    return ask;
}

} // namespace server
