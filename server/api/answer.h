// answer.h: from pieces to OpenAI's JSON. Part of serve.cu.
#pragma once

inline std::string error_json(int status, const std::string& message, const std::string& param = "",
                              const std::string& code = "") {
    std::string valid;
    utf8_repair(valid, message, true); // it may name what it complains of, cut anywhere
    sj::Writer w;
    w.object().key("error").object().field("message", valid);
    w.field("type", status == 401 ? "authentication_error" : status == 429 ? "rate_limit_error"
                    : status < 500 ? "invalid_request_error" : "server_error");
    if (param.empty()) w.field("param", nullptr);
    else w.field("param", param);
    if (code.empty()) w.field("code", nullptr);
    else w.field("code", code);
    return w.end().end().text;
}
inline std::string error_json(const Refusal& r) { return error_json(r.status, r.what(), r.param, r.code); }

// A token by itself: its text and its bytes. (One that is not whole characters is U+FFFD, but its bytes are its own.)
inline std::string token_text(const Tokenizer& t, int id) {
    std::string text;
    utf8_repair(text, t.bytes(id), true);
    return text;
}

// One request's answers as JSON: whole, in parts as they can be sent, or in chunks as they come.
struct Answer {
    const Tokenizer& tokenizer;
    std::string id, model;
    bool chat, usage, logprobs;
    size_t prompt_tokens, each;
    long created = (long)time(nullptr);
    struct Choice {
        std::string text, thought;
        std::vector<TokenInfo> tokens;
        std::vector<CallPart> calls{}; // whole
        size_t calls_begun = 0;        // of a stream
        bool begun = false;
        size_t offset = 0, count = 0, cached = 0, thoughts = 0;
        std::string stop{};
        const char* finish = nullptr;
    };
    std::vector<Choice> choices;
    std::vector<std::string> echo;         // of each prompt, or none
    bool documents;                        // sources are told,
    std::vector<Source> sources;           // ... of a stream with its first event
    std::shared_ptr<const Pooled> how;     // of `pooled`
    std::unique_ptr<PooledAnswer> pooled;  // vectors or a ranking; null: text
    uint64_t call_seed = random_bits();
    static constexpr size_t PART = 1 << 16; // bytes, about

    Answer(const Service& service, const Ask& ask)
        : tokenizer(*service.tokenizer), id(ask.id), model(ask.adapter ? ask.adapter->name : service.name),
          chat(ask.chat), usage(ask.usage), logprobs(ask.logprobs), prompt_tokens(ask.prompt_tokens), each(ask.each),
          choices(ask.jobs.size()),
          echo(ask.echo), documents(ask.documents), sources(ask.sources), how(ask.pooled),
          pooled(how ? std::make_unique<PooledAnswer>(*how, ask.jobs.size()) : nullptr) {}
    virtual ~Answer() = default;

    bool complete() const {
        return std::all_of(choices.begin(), choices.end(), [](const Choice& c) { return c.finish; });
    }
    size_t count() const {
        size_t n = 0;
        for (auto& c : choices) n += c.count;
        return n;
    }
    const char* broken() const { return pooled ? pooled->broken : nullptr; } // why it cannot be told
    size_t cached() const { // of each prompt, by the first of its answers
        size_t n = 0;
        for (size_t i = 0; i < choices.size(); i += each) n += choices[i].cached;
        return n;
    }

    // Takes a piece, to be told as a whole later.
    virtual void add(Piece&& piece) {
        Choice& c = note(piece);
        if (pooled) return pooled->add((size_t)piece.choice, piece.hidden);
        (piece.thought ? c.thought : c.text) += piece.text;
        std::move(piece.tokens.begin(), piece.tokens.end(), std::back_inserter(c.tokens));
        for (CallPart& part : piece.calls)
            if (!part.name.empty()) c.calls.push_back(std::move(part));
            else c.calls.back().arguments += part.arguments;
    }
    std::string whole() {
        std::string all;
        while (!told()) all += part();
        return all;
    }

    // The whole in parts: what comes next, until all is told. What has been told of log-probabilities is let go.
    virtual bool told() const { return place.told; }
    virtual std::string part() {
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
            if (tells(c.tokens)) {
                write_some(w, c, c.tokens);
                if (place.column < columns()) continue;
            } else {
                w.value(nullptr);
            }
            w.field("finish_reason", c.finish).end();
            std::vector<TokenInfo>().swap(c.tokens);
            place.choice++, place.column = place.token = 0;
        }
        if (place.choice == choices.size()) {
            w.end();
            write_usage(w);
            if (documents) write_sources(w, sources);
            w.end();
            place.told = true;
        }
        return std::exchange(w.text, {});
    }

    // A piece as server-sent events; after the last, what closes the stream.
    virtual std::string events(const Piece& piece) {
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
        if (!chat) event([](sj::Writer&) {}, piece.tokens, piece.finish);
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

  protected:
    Choice& note(const Piece& piece) {
        Choice& c = choices[(size_t)piece.choice];
        if (!piece.finish) return c;
        c.finish = piece.finish, c.count = piece.count, c.cached = piece.cached;
        c.thoughts = piece.thoughts, c.stop = piece.stop;
        return c;
    }

  private:
    // Theirs alone, since a client may keep calls of many answers in one list.
    std::string call_id(size_t choice, size_t index) const {
        return format("call_%016llx", (unsigned long long)(call_seed + (choice << 32) + index));
    }
    void write_calls(sj::Writer& w, const Choice& c, size_t choice) const {
        if (c.calls.empty()) return;
        w.key("tool_calls").array();
        for (size_t i = 0; i < c.calls.size(); i++) {
            w.object().field("id", call_id(choice, i)).field("type", "function").key("function").object();
            w.field("name", c.calls[i].name).field("arguments", c.calls[i].arguments).end().end();
        }
        w.end();
    }
    void begin(sj::Writer& w, const char* object) const {
        w.object().field("id", id).field("object", object).field("created", created).field("model", model);
        w.key("choices").array();
    }
    void write_usage(sj::Writer& w) const {
        w.key("usage").object().field("prompt_tokens", prompt_tokens).field("completion_tokens", count());
        w.field("total_tokens", prompt_tokens + count());
        w.key("prompt_tokens_details").object().field("cached_tokens", cached()).end().end();
    }
    const std::string& echo_of(size_t choice) const {
        static const std::string none;
        return echo.empty() ? none : echo[choice / each];
    }

    // Log-probabilities: an object of lists with an entry a token. A chat has one list, a completion has four.
    bool tells(const std::vector<TokenInfo>& tokens) const { return logprobs && !(chat && tokens.empty()); }
    size_t columns() const { return chat ? 1 : 4; }
    void write_logprobs(sj::Writer& w, Choice& c, const std::vector<TokenInfo>& tokens) {
        w.key("logprobs");
        if (!tells(tokens)) {
            w.value(nullptr);
            return;
        }
        for (place.column = place.token = 0; place.column < columns();) write_some(w, c, tokens);
        place.column = 0;
    }
    // From `place` on, about a PART of them.
    void write_some(sj::Writer& w, Choice& c, const std::vector<TokenInfo>& tokens) {
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
    void write_entry(sj::Writer& w, Choice& c, const TokenInfo& t) const {
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
        } else if (place.column == 1) {
            w.value(t.logprob);
        } else if (place.column == 2) {
            w.object();
            for (auto& a : t.top) w.field(token_text(tokenizer, a.id), a.logprob);
            w.end();
        } else {
            w.value(c.offset);
            for (char byte : t.text) c.offset += ((uint8_t)byte & 0xC0) != 0x80; // in characters
        }
    }

    sj::Writer writer{};
    struct { size_t choice = 0, column = 0, token = 0; bool told = false; } place; // of what is told next
};
