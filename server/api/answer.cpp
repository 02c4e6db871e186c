// answer.cpp: choices, log-probabilities, calls and usage.
#include "model/utf8.h"
#include "search/grounding.h"
#include "server/api/answer.h"
#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>

namespace server {

std::string token_text(const Tokenizer& t, int id) {
    std::string text;
    utf8_repair(text, t.bytes(id), true);
    return text;
}

std::string token_name(const Tokenizer& t, int id) {
    const std::string_view bytes = t.bytes(id);
    std::string text = token_text(t, id);
    if (text == bytes) return text;
    text = "bytes:";
    for (char byte : bytes) text += format("\\x%02x", (unsigned)(uint8_t)byte);
    return text;
}

Answer::Answer(const Service& service, const Ask& ask)
    : tokenizer(*service.tokenizer), id(ask.id), model(ask.adapter ? ask.adapter->name : service.name),
      chat(ask.chat), usage(ask.usage), logprobs(ask.logprobs), echoes(ask.echoes),
      alternatives(ask.jobs.empty() ? -1 : ask.jobs[0].alternatives), prompt_logprobs(ask.prompt_logprobs),
      prompt_tokens(ask.prompt_tokens), each(ask.each), choices(ask.jobs.size()),
      echo(ask.echo), documents(ask.documents), sources(ask.sources), how(ask.pooled),
      pooled(how ? std::make_unique<PooledAnswer>(*how, ask.jobs.size()) : nullptr) {}

size_t Answer::count() const {
    size_t n = 0;
    for (auto& c : choices) n += c.count;
    return n;
}

size_t Answer::cached() const {
    size_t n = 0;
    for (size_t i = 0; i < choices.size(); i += each) n += choices[i].cached;
    return n;
}

size_t Answer::read() const {
    size_t n = 0;
    for (size_t i = 0; i < choices.size(); i += each) n += choices[i].read;
    return n;
}

void Answer::add(Piece&& piece) {
    Choice& c = note(piece);
    if (pooled) return pooled->add((size_t)piece.choice, piece.hidden);
    (piece.thought ? c.thought : c.text) += piece.text;
    std::vector<TokenInfo> tokens = echoes ? reported(piece) : std::move(piece.tokens);
    std::move(tokens.begin(), tokens.end(), std::back_inserter(c.tokens));
    if (prompt_logprobs >= 0 && !piece.prompt.empty()) c.prompt = std::move(piece.prompt);
    for (CallPart& part : piece.calls)
        if (!part.name.empty()) c.calls.push_back(std::move(part));
        else c.calls.back().arguments += part.arguments;
}

std::vector<TokenInfo> Answer::reported(const Piece& piece) const {
    std::vector<TokenInfo> all;
    if (echoes && logprobs) all = piece.prompt;
    for (TokenInfo& t : all) t.top.resize(std::min(t.top.size(), (size_t)alternatives));
    all.insert(all.end(), piece.tokens.begin(), piece.tokens.end());
    return all;
}

std::string Answer::whole() {
    std::string all;
    while (!told()) all += part();
    return all;
}

std::string Answer::part() {
    sj::Writer& w = writer;
    if (pooled) {
        pooled->write_part(w, id, model, created, prompt_tokens, PART);
        place.told = w.open.empty();
        return std::exchange(w.text, {});
    }
    if (w.open.empty()) begin(w, chat ? "chat.completion" : "text_completion");
    while (w.text.size() < PART && place.choice < choices.size()) {
        Choice& c = choices[place.choice];
        if (!place.column && !place.token) {
            w.object().field("index", place.choice);
            if (chat) {
                w.key("message").object().field("role", "assistant");
                if (c.calls.empty() || !c.text.empty()) w.field("content", c.text);
                else w.field("content", nullptr);
                if (!c.thought.empty()) w.field("reasoning_content", c.thought);
                write_calls(w, c, place.choice);
                w.end();
            } else {
                w.field("text", echo_of(place.choice) + c.text);
            }
            w.key("logprobs");
        }
        if (tells(c.tokens) && place.column < columns()) {
            write_some(w, c, c.tokens);
            if (place.column < columns()) continue;
        } else if (place.column < columns()) {
            w.value(nullptr), place.column = columns();
        }
        if (!chat && prompt_logprobs >= 0 && !write_prompt(w, c.prompt)) continue;
        w.field("finish_reason", c.finish).end();
        std::vector<TokenInfo>().swap(c.tokens);
        if (!chat) std::vector<TokenInfo>().swap(c.prompt);
        place.choice++, place.column = place.token = 0;
    }
    if (place.choice == choices.size()) {
        if (!place.token) w.end();
        if (chat && prompt_logprobs >= 0 && !write_prompt(w, choices[0].prompt)) return std::exchange(w.text, {});
        write_usage(w);
        if (documents) write_sources(w, sources);
        w.end();
        place.told = true;
    }
    return std::exchange(w.text, {});
}

std::string Answer::events(const Piece& piece) {
    Choice& c = note(piece);
    std::string out;
    auto event = [&](auto delta, const std::vector<TokenInfo>& tokens, const char* finish) {
        sj::Writer w;
        begin(w, chat ? "chat.completion.chunk" : "text_completion");
        w.object().field("index", piece.choice);
        if (chat) delta(w.key("delta").object()), w.end();
        else w.field("text", (std::exchange(c.begun, true) ? "" : echo_of((size_t)piece.choice)) + piece.text);
        write_logprobs(w, c, tokens);
        if (finish) w.field("finish_reason", finish);
        else w.field("finish_reason", nullptr);
        w.end().end();
        if (usage) w.field("usage", nullptr);
        if (std::exchange(documents, false)) write_sources(w, sources);
        out += "data: " + w.end().text + "\n\n";
    };
    if (chat && !std::exchange(c.begun, true))
        event([](sj::Writer& w) { w.field("role", "assistant").field("content", ""); }, {}, nullptr);
    if (chat && ((!piece.finish && piece.calls.empty()) || !piece.text.empty() || !piece.tokens.empty()))
        event([&](sj::Writer& w) { w.field(piece.thought ? "reasoning_content" : "content", piece.text); },
              piece.tokens, nullptr);
    for (const CallPart& part : piece.calls)
        event([&](sj::Writer& w) {
            if (!part.name.empty()) c.calls_begun++;
            const size_t index = c.calls_begun - 1;
            w.key("tool_calls").array().object().field("index", index);
            if (!part.name.empty()) w.field("id", call_id((size_t)piece.choice, index)).field("type", "function");
            w.key("function").object();
            if (!part.name.empty()) w.field("name", part.name);
            w.field("arguments", part.arguments).end().end().end();
        }, {}, nullptr);
    if (chat && piece.finish) event([](sj::Writer&) {}, {}, piece.finish);
    if (!chat) event([](sj::Writer&) {}, reported(piece), piece.finish);
    if (complete()) {
        if (usage) {
            sj::Writer w;
            begin(w, chat ? "chat.completion.chunk" : "text_completion");
            w.end();
            write_usage(w);
            out += "data: " + w.end().text + "\n\n";
        }
        out += "data: [DONE]\n\n";
    }
    return out;
}

Answer::Choice& Answer::note(const Piece& piece) {
    Choice& c = choices[(size_t)piece.choice];
    if (!piece.finish) return c;
    c.finish = piece.finish, c.count = piece.count, c.cached = piece.cached, c.read = piece.read;
    c.thoughts = piece.thoughts, c.stop = piece.stop;
    return c;
}

void Answer::write_calls(sj::Writer& w, const Choice& c, size_t choice) const {
    if (c.calls.empty()) return;
    w.key("tool_calls").array();
    for (size_t i = 0; i < c.calls.size(); i++) {
        w.object().field("id", call_id(choice, i)).field("type", "function").key("function").object();
        w.field("name", c.calls[i].name).field("arguments", c.calls[i].arguments).end().end();
    }
    w.end();
}

void Answer::begin(sj::Writer& w, const char* object) const {
    w.object().field("id", id).field("object", object).field("created", created).field("model", model);
    w.key("choices").array();
}

void Answer::write_usage(sj::Writer& w) const {
    w.key("usage").object().field("prompt_tokens", prompt_tokens).field("completion_tokens", count());
    w.field("total_tokens", prompt_tokens + count());
    w.key("prompt_tokens_details").object().field("cached_tokens", cached()).end().end();
}

const std::string& Answer::echo_of(size_t choice) const {
    static const std::string none;
    return echo.empty() ? none : echo[choice / each];
}

void Answer::write_logprobs(sj::Writer& w, Choice& c, const std::vector<TokenInfo>& tokens) {
    w.key("logprobs");
    if (!tells(tokens)) {
        w.value(nullptr);
        return;
    }
    for (place.column = place.token = 0; place.column < columns();) write_some(w, c, tokens);
    place.column = 0;
}

void Answer::write_some(sj::Writer& w, Choice& c, const std::vector<TokenInfo>& tokens) {
    static const char* NAMES[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    if (!place.column && !place.token) w.object();
    for (; place.column < columns(); place.column++, place.token = 0) {
        if (!place.token) w.key(chat ? "content" : NAMES[place.column]).array();
        for (; place.token < tokens.size(); place.token++) {
            if (w.text.size() >= PART && place.token) return;
            write_entry(w, c, tokens[place.token]);
        }
        w.end();
    }
    w.end();
}

void Answer::write_entry(sj::Writer& w, Choice& c, const TokenInfo& t) const {
    auto entry = [&](const std::string& text, int id, float logprob) -> sj::Writer& {
        w.object().field("token", text).field("logprob", logprob).key("bytes").array();
        for (char byte : tokenizer.bytes(id)) w.value((int)(uint8_t)byte);
        return w.end();
    };
    if (chat) {
        entry(t.text, t.id, t.logprob).key("top_logprobs").array();
        for (auto& a : t.top) entry(token_text(tokenizer, a.id), a.id, a.logprob).end();
        w.end().end();
    } else if (place.column == 0) {
        w.value(t.text);
    } else if (place.column < 3 && std::isnan(t.logprob)) { // a prompt's first token
        w.value(nullptr);
    } else if (place.column == 1) {
        w.value(t.logprob);
    } else if (place.column == 2) {
        // Keyed by name. The sampled token is always there; of other tokens that share a name, the likeliest.
        std::set<std::string> told;
        const std::string own = token_name(tokenizer, t.id);
        w.object();
        for (auto& a : t.top) {
            const std::string name = a.id == t.id ? own : token_name(tokenizer, a.id);
            if ((a.id == t.id || name != own) && told.insert(name).second) w.field(name, a.logprob);
        }
        if (!told.count(own)) w.field(own, t.logprob);
        w.end();
    } else {
        w.value(c.offset);
        for (char byte : t.text) c.offset += ((uint8_t)byte & 0xC0) != 0x80; // in characters
    }
}

bool Answer::write_prompt(sj::Writer& w, const std::vector<TokenInfo>& prompt) {
    if (!place.token) w.key("prompt_logprobs").array();
    for (; place.token < prompt.size(); place.token++) {
        if (w.text.size() >= PART && place.token) return false;
        const TokenInfo& t = prompt[place.token];
        if (!place.token) { // nothing predicts it
            w.value(nullptr);
            continue;
        }
        const size_t k = std::min(t.top.size(), (size_t)prompt_logprobs);
        size_t own = 0; // the token's rank - 1, or k: it is not among the likeliest
        while (own < k && t.top[own].id != t.id) own++;
        auto entry = [&](int id, float logprob, size_t rank) {
            w.key(std::to_string(id)).object().field("logprob", logprob);
            if (rank < k) w.field("rank", rank + 1);
            else w.field("rank", nullptr);
            w.field("decoded_token", token_text(tokenizer, id)).end();
        };
        w.object();
        entry(t.id, t.logprob, own);
        for (size_t i = 0; i < k; i++)
            if (i != own) entry(t.top[i].id, t.top[i].logprob, i);
        w.end();
    }
    w.end();
    return true;
}

} // namespace server
