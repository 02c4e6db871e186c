// dialects.h: two other ways to ask for a chat and to be told it: OpenAI's Responses (/v1/responses) and Anthropic's
// Messages (/v1/messages). A request becomes the body of a chat completion, which request.h reads and checks; the
// pieces of its answer become items, whole or as events. Included by serve.cu. Nothing is kept from one request to the
// next.
//
// What the two documents have and is not done here is refused by name; so is every field that is in neither.
#pragma once

// The fields of this server that all three dialects share, beside `model` and `stream`: they are passed on as they are.
static const char* const SHARED_FIELDS[] = {
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids", "min_tokens",
    "ignore_eos", "skip_special_tokens", "chat_template_kwargs", "priority", "cache_salt", "request_id",
    "use_documents"};

// The members of a field that has only these.
inline Fields members_of(sj::Value v, const char* field, FieldList known) {
    const Fields inner(v, field);
    for (auto& [key, value] : inner.all)
        if (!value.is(sj::Null) && std::find(known.begin(), known.end(), key) == known.end())
            throw Refusal(400, format("%s: %s is not supported", field, in_quotes(key).c_str()), field);
    return inner;
}
inline Fields members_of(const Fields& f, const char* name, FieldList known) { // none if it is not there
    return f[name] ? members_of(f[name], name, known) : Fields();
}

inline void refuse_unknown(const Fields& f, FieldList known) {
    for (auto& [key, value] : f.all) {
        auto is = [&key = key](const char* name) { return key == name; };
        if (value.is(sj::Null) || std::any_of(known.begin(), known.end(), is)) continue;
        if (std::none_of(std::begin(SHARED_FIELDS), std::end(SHARED_FIELDS), is)) refuse_name(key);
    }
}

inline void write_raw(sj::Writer& w, const char* name, sj::Value v) {
    w.key(name).separate();
    w.text += v.raw();
}

// The conversation, turn by turn. Results of tools come in the order of their calls, since Qwen3's template shows no
// ids.
struct Turns {
    struct Turn {
        std::string role, content{}, thought{};
        std::vector<ToolCall> calls{};
        size_t call = 0; // of a tool's: which it answers
    };
    const char* field; // of the request, for errors
    std::vector<Turn> all{};
    std::map<std::string, size_t> ids{}; // of the calls

    Turn& assistant(bool fresh) {
        if (fresh || all.empty() || all.back().role != "assistant") all.push_back({"assistant"});
        return all.back();
    }
    void call(const std::string& id, const std::string& name, std::string_view arguments) {
        if (id.empty() || name.empty()) refuse("a call needs an id and a name");
        ids[id] = ids.size();
        assistant(false).calls.push_back({name, std::string(arguments)});
    }
    void result(const std::string& id, const std::string& text) {
        const auto it = ids.find(id);
        if (it == ids.end()) refuse(format("no call before it has the id %s", in_quotes(id).c_str()));
        all.push_back({"tool", text, "", {}, it->second});
    }
    void order_results() { // of each run of them; once at the end, since a client may send many in any order
        auto is_result = [](const Turn& t) { return t.role == "tool"; };
        for (auto end = all.begin(); end != all.end();) {
            const auto begin = std::find_if(end, all.end(), is_result);
            end = std::find_if_not(begin, all.end(), is_result);
            std::stable_sort(begin, end, [](const Turn& a, const Turn& b) { return a.call < b.call; });
        }
    }
    [[noreturn]] void refuse(const std::string& why) const {
        throw Refusal(400, format("%s: %s", field, why.c_str()), field);
    }
    std::string known_role(const std::string& role, FieldList known) const {
        if (std::none_of(known.begin(), known.end(), [&](const char* name) { return role == name; }))
            refuse("unknown role " + in_quotes(role));
        return role;
    }
    // A string, or the joined texts of parts of these types.
    std::string text_of(sj::Value v, FieldList types) const {
        if (v.is(sj::String)) return v.str();
        if (!v.is(sj::Array)) refuse("neither a string nor a list of parts");
        std::string all;
        for (sj::Value part : v.items()) {
            const std::string type = part["type"].str();
            if (std::none_of(types.begin(), types.end(), [&](const char* name) { return type == name; }))
                refuse(format("a part of type %s is not supported", in_quotes(type).c_str()));
            if (!part["text"].is(sj::String)) refuse("a part without text");
            all += part["text"].str();
        }
        return all;
    }
    void write(sj::Writer& w) {
        order_results();
        w.key("messages").array();
        for (const Turn& t : all) {
            w.object().field("role", t.role).field("content", t.content);
            if (!t.thought.empty()) w.field("reasoning_content", t.thought);
            if (!t.calls.empty()) {
                w.key("tool_calls").array();
                for (auto& c : t.calls) w.object().field("name", c.name).field("arguments", c.arguments).end();
                w.end();
            }
            w.end();
        }
        w.end();
    }
};

// What f, which reads the chat completion made of a request, complains of gets the name that it has in the request.
using Names = std::vector<std::pair<std::string, std::string>>;
template <class F> auto renamed(const Names& names, F f) {
    try {
        return f();
    } catch (const Refusal& r) {
        std::string message = r.what(), param = r.param;
        for (auto& [from, to] : names) {
            const bool same = message.compare(0, from.size(), from) == 0;
            if (same && strchr(": ", message.c_str()[from.size()])) message.replace(0, from.size(), to);
            if (param == from) param = to;
        }
        throw Refusal(r.status, message, param, r.code);
    }
}

// ---------------------------------------------------------------------------------------------------- what is told

// An answer as a list of items in the order in which they were said: thoughts, texts and calls.
struct ItemAnswer : Answer {
    struct Item {
        enum Kind { THOUGHT, TEXT, CALL } kind;
        std::string text{}, name{}; // text: of a call, its arguments
    };
    std::vector<Item> items;
    const bool stream;
    bool begun = false, closed = true; // closed: nothing more comes to the last item
    bool ending = false;               // all is said
    std::string out;                   // events

    ItemAnswer(const Service& service, const Ask& ask) : Answer(service, ask), stream(ask.stream) {}

    bool told() const override { return ending; }
    void add(Piece&& piece) override { take(piece); }
    std::string part() override {
        ending = true;
        return whole_json();
    }
    std::string events(const Piece& piece) override {
        if (!std::exchange(begun, true)) begin(piece);
        take(piece);
        if (complete()) ending = true, close(), end();
        return std::exchange(out, {});
    }

  protected:
    virtual std::string whole_json() = 0;
    virtual void begin(const Piece& first) = 0; // events of the answer,
    virtual void end() = 0;
    virtual void open_item(size_t i) = 0;       // ... and of an item
    virtual void tell(size_t i, const std::string& more) = 0;
    virtual void close_item(size_t i) = 0;

    // The last item of an answer that was cut off is not whole.
    bool cut(size_t i) const { return ending && i + 1 == items.size() && !strcmp(choices[0].finish, "length"); }
    std::string item_id(const char* kind, size_t i) const {
        return format("%s_%016llx", kind, (unsigned long long)(call_seed + i));
    }
    template <class F> void event(const char* name, F fill) {
        sj::Writer w;
        w.object().field("type", name);
        fill(w);
        out += format("event: %s\ndata: ", name) + w.end().text + "\n\n";
    }

  private:
    void take(const Piece& piece) {
        note(piece);
        if (!piece.text.empty()) say(piece.thought ? Item::THOUGHT : Item::TEXT, piece.text);
        for (const CallPart& part : piece.calls)
            if (!part.name.empty()) open({Item::CALL, "", part.name});
            else say(Item::CALL, part.arguments);
    }
    void say(typename Item::Kind kind, const std::string& more) {
        if (closed || items.back().kind != kind) open({kind});
        items.back().text += more;
        if (stream) tell(items.size() - 1, more);
    }
    void open(Item&& item) {
        close();
        items.push_back(std::move(item));
        closed = false;
        if (stream) open_item(items.size() - 1);
    }
    void close() {
        if (!std::exchange(closed, true) && stream) close_item(items.size() - 1);
    }
};

// -------------------------------------------------------------------------------------------------- OpenAI's Responses

constexpr size_t MAX_REPEATED = 16 << 10; // bytes of a field that its answer repeats

inline void read_response_item(Turns& turns, sj::Value item) {
    const std::string type = item["type"].str("message");
    if (type == "message") {
        const std::string role = turns.known_role(item["role"].str(), {"user", "system", "developer", "assistant"});
        const std::string text = turns.text_of(item["content"], {"input_text", "output_text", "text"});
        if (role != "assistant") turns.all.push_back({role, text});
        else { // after its thought, if that came before it
            const Turns::Turn* last = turns.all.empty() ? nullptr : &turns.all.back();
            turns.assistant(!last || !last->content.empty() || !last->calls.empty()).content = text;
        }
    } else if (type == "reasoning") {
        Turns::Turn& turn = turns.assistant(true);
        if (item["content"].is(sj::Array)) turn.thought = turns.text_of(item["content"], {"reasoning_text"});
        if (item["encrypted_content"].is(sj::String)) turns.refuse("encrypted_content is not supported");
    } else if (type == "function_call") {
        if (!item["arguments"].is(sj::String)) turns.refuse("a call without arguments");
        turns.call(item["call_id"].str(), item["name"].str(), item["arguments"].str());
    } else if (type == "function_call_output") {
        turns.result(item["call_id"].str(), turns.text_of(item["output"], {"input_text", "output_text", "text"}));
    } else {
        turns.refuse(format("an item of type %s is not supported", in_quotes(type).c_str()));
    }
}

// {"type": "function", "name", ...} as a chat has it: {"type": "function", "function": {"name", ...}}. The order stays,
// since the model sees it.
inline void write_tool(sj::Writer& w, sj::Value tool, const char* schema) {
    members_of(tool, "tools", {"type", "name", "description", schema, "strict", "cache_control"});
    w.object().field("type", "function").key("function").object();
    for (auto [name, value] : tool.members())
        if (name != "type" && name != "cache_control" && !value.is(sj::Null))
            write_raw(w, name == schema ? "parameters" : name.c_str(), value);
    w.end().end();
}

inline std::string chat_of_response(const Fields& f) {
    refuse_unknown(f, {"input", "instructions", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls",
                       "text", "reasoning", "metadata", "user", "safety_identifier", "prompt_cache_key",
                       "prompt_cache_retention", "store", "background", "include", "truncation", "top_logprobs",
                       "service_tier", "stream_options", "stop"});
    refuse_values(f, {{"store", {"false"}}, {"background", {"false"}}, {"include", {}}, {"top_logprobs", {"0"}},
                      {"truncation", {"\"disabled\""}}, {"service_tier", {"\"auto\"", "\"default\""}}});
    Turns turns{"input"};
    if (const std::string system = f.text("instructions"); !system.empty()) turns.all.push_back({"system", system});
    const sj::Value input = f["input"];
    if (input.is(sj::String)) turns.all.push_back({"user", input.str()});
    else if (!input.is(sj::Array) || input.size() == 0) turns.refuse("neither a string nor a list of items");
    for (sj::Value item : input.items()) read_response_item(turns, item);

    sj::Writer w;
    w.object();
    for (const char* name : SHARED_FIELDS)
        if (f[name]) write_raw(w, name, f[name]);
    for (const char* name : {"stop", "parallel_tool_calls", "stream_options", "user", "safety_identifier",
                             "prompt_cache_key", "prompt_cache_retention"})
        if (f[name]) write_raw(w, name, f[name]);
    if (f["max_output_tokens"]) w.field("max_completion_tokens", f.integer("max_output_tokens", 1, INT_MAX, 1));
    members_of(f, "stream_options", {"include_obfuscation"});
    if (f["metadata"]) Fields(f["metadata"], "metadata");
    const Fields text = members_of(f, "text", {"format", "verbosity"});
    const Fields thoughts = members_of(f, "reasoning", {"effort"});
    refuse_values(text, {{"verbosity", {"\"medium\""}}});
    if (thoughts["effort"]) write_raw(w, "reasoning_effort", thoughts["effort"]);
    if (const sj::Value form = text["format"]) {
        const std::string type = form["type"].str();
        w.key("response_format").object().field("type", type);
        if (type == "json_schema") w.key("json_schema").separate(), w.text += form.raw();
        w.end();
    }
    if (const sj::Value tools = f["tools"]) {
        if (!tools.is(sj::Array)) throw Refusal(400, "tools must be a list", "tools");
        w.key("tools").array();
        for (sj::Value tool : tools.items()) {
            if (tool["type"].str() != "function")
                throw Refusal(400, "tools: only type \"function\" is supported", "tools");
            write_tool(w, tool, "parameters");
        }
        w.end();
    }
    if (const sj::Value choice = f["tool_choice"]; choice.is(sj::Object))
        w.key("tool_choice").object().field("type", choice["type"].str()).key("function").object()
            .field("name", choice["name"].str()).end().end();
    else if (choice) write_raw(w, "tool_choice", choice);
    turns.write(w);
    return w.end().text;
}

struct ResponseAnswer : ItemAnswer {
    std::string repeated; // members of the request, as JSON
    size_t number = 0;    // of events

    ResponseAnswer(const Service& service, const Ask& ask, const Fields& f) : ItemAnswer(service, ask) {
        sj::Writer w;
        const Sampling& how = ask.jobs[0].how;
        auto put = [&](const char* name, const std::string& otherwise) {
            std::string own = f[name] ? sj::dump(f[name]) : otherwise;
            sj::Doc doc; // (1e999 would become what JSON has no word for)
            if (own.size() > MAX_REPEATED || !sj::parse(doc, own).empty()) own = otherwise;
            w.key(name).separate();
            w.text += own;
        };
        put("instructions", "null"), put("max_output_tokens", "null"), put("metadata", "{}");
        put("parallel_tool_calls", "true"), put("tool_choice", "\"auto\""), put("tools", "[]");
        put("text", "{\"format\": {\"type\": \"text\"}}"), put("reasoning", "{\"effort\": null, \"summary\": null}");
        put("user", "null");
        auto plain = [](float x) { return strtod(format("%g", x).c_str(), nullptr); }; // 0.7, and not 0.699999988
        w.field("temperature", plain(how.temperature)).field("top_p", plain(how.top_p)).field("truncation", "disabled");
        w.field("store", false).field("background", false).field("previous_response_id", nullptr);
        w.field("service_tier", "default").field("top_logprobs", 0);
        repeated = w.text;
    }

  protected:
    std::string whole_json() override {
        sj::Writer w;
        write_response(w);
        return w.text;
    }
    void write_response(sj::Writer& w) const {
        const char* finish = choices[0].finish;
        const bool limited = finish && !strcmp(finish, "length");
        w.object().field("id", id).field("object", "response").field("created_at", created).field("model", model);
        w.field("status", !finish ? "in_progress" : limited ? "incomplete" : "completed").field("error", nullptr);
        w.key("incomplete_details");
        if (limited) w.object().field("reason", "max_output_tokens").end();
        else w.value(nullptr);
        w.separate();
        w.text += repeated;
        w.key("output").array();
        for (size_t i = 0; finish && i < items.size(); i++) write_item(w, i, cut(i) ? "incomplete" : "completed", true);
        w.end().key("usage");
        if (!finish) return (void)w.value(nullptr).end();
        w.object().field("input_tokens", prompt_tokens).key("input_tokens_details").object();
        w.field("cached_tokens", cached()).field("cache_write_tokens", 0).end().field("output_tokens", count());
        w.key("output_tokens_details").object().field("reasoning_tokens", choices[0].thoughts).end();
        w.field("total_tokens", prompt_tokens + count()).end();
        if (documents) write_sources(w, sources);
        w.end();
    }
    const char* kind(size_t i) const {
        return items[i].kind == Item::THOUGHT ? "rs" : items[i].kind == Item::TEXT ? "msg" : "fc";
    }
    void write_part(sj::Writer& w, size_t i, const std::string& text) const {
        const bool thought = items[i].kind == Item::THOUGHT;
        w.object().field("type", thought ? "reasoning_text" : "output_text").field("text", text);
        if (!thought) w.key("annotations").array().end().key("logprobs").array().end();
        w.end();
    }
    void write_item(sj::Writer& w, size_t i, const char* status, bool whole) const {
        const Item& item = items[i];
        w.object().field("id", item_id(kind(i), i)).field("status", status);
        if (item.kind == Item::CALL) {
            w.field("type", "function_call").field("call_id", item_id("call", i)).field("name", item.name);
            return (void)w.field("arguments", whole ? item.text : "").end();
        }
        if (item.kind == Item::TEXT) w.field("type", "message").field("role", "assistant");
        else w.field("type", "reasoning").key("summary").array().end();
        w.key("content").array();
        if (whole) write_part(w, i, item.text);
        w.end().end();
    }

    // An event of the response as a whole, of an item as a whole, and of what is in it.
    void response_event(const char* name) {
        event(name, [&](sj::Writer& w) { write_response(w.field("sequence_number", number++).key("response")); });
    }
    void item_event(const char* name, size_t i, const char* status, bool whole) {
        event(name, [&](sj::Writer& w) {
            w.field("sequence_number", number++).field("output_index", i).key("item");
            write_item(w, i, status, whole);
        });
    }
    template <class F> void inner_event(const std::string& name, size_t i, F fill) {
        event(name.c_str(), [&](sj::Writer& w) {
            w.field("sequence_number", number++).field("item_id", item_id(kind(i), i)).field("output_index", i);
            if (items[i].kind != Item::CALL) w.field("content_index", 0);
            fill(w);
            if (items[i].kind == Item::TEXT && name.find("output_text") != name.npos) w.key("logprobs").array().end();
        });
    }
    std::string inner(size_t i) const {
        static const char* const NAMES[] = {"response.reasoning_text.", "response.output_text.",
                                            "response.function_call_arguments."};
        return NAMES[items[i].kind];
    }
    void begin(const Piece&) override {
        response_event("response.created");
        response_event("response.in_progress");
    }
    void open_item(size_t i) override {
        item_event("response.output_item.added", i, "in_progress", false);
        if (items[i].kind != Item::CALL)
            inner_event("response.content_part.added", i, [&](sj::Writer& w) { write_part(w.key("part"), i, ""); });
    }
    void tell(size_t i, const std::string& more) override {
        inner_event(inner(i) + "delta", i, [&](sj::Writer& w) { w.field("delta", more); });
    }
    void close_item(size_t i) override {
        const bool call = items[i].kind == Item::CALL;
        inner_event(inner(i) + "done", i, [&](sj::Writer& w) {
            if (call) w.field("name", items[i].name);
            w.field(call ? "arguments" : "text", items[i].text);
        });
        if (!call)
            inner_event("response.content_part.done", i, [&](sj::Writer& w) {
                write_part(w.key("part"), i, items[i].text);
            });
        item_event("response.output_item.done", i, cut(i) ? "incomplete" : "completed", true);
    }
    void end() override {
        response_event(strcmp(choices[0].finish, "length") ? "response.completed" : "response.incomplete");
    }
};

// ------------------------------------------------------------------------------------------------ Anthropic's Messages

inline void read_block(Turns& turns, const std::string& role, sj::Value block) {
    const std::string type = block["type"].str();
    auto text = [&](const char* name) {
        if (!block[name].is(sj::String)) turns.refuse(format("a block of type %s without %s", type.c_str(), name));
        return block[name].str();
    };
    const bool user = role == "user", own = role == "assistant";
    if (type == "text") turns.all.back().content += text("text");
    else if (type == "thinking" && own) turns.all.back().thought += text("thinking");
    else if (type == "tool_use" && own) {
        if (!block["input"].is(sj::Object)) turns.refuse("the input of a tool_use must be an object");
        turns.call(block["id"].str(), block["name"].str(), sj::dump(block["input"]));
    } else if (type == "tool_result" && user) {
        const sj::Value content = block["content"];
        if (turns.all.back().content.empty()) turns.all.pop_back(); // nothing has been said before it
        turns.result(block["tool_use_id"].str(),
                     content && !content.is(sj::Null) ? turns.text_of(content, {"text"}) : "");
        turns.all.push_back({"user"});
    } else {
        turns.refuse(format("a block of type %s is not supported for %s", in_quotes(type).c_str(), role.c_str()));
    }
}

inline std::string chat_of_message(const Fields& f, bool counting) {
    refuse_unknown(f, {"messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking",
                       "metadata", "service_tier", "output_config", "cache_control"});
    refuse_values(f, {{"service_tier", {"\"auto\"", "\"standard_only\""}}});
    Turns turns{"messages"};
    if (f["system"]) turns.all.push_back({"system", Turns{"system"}.text_of(f["system"], {"text"})});
    if (!f["messages"].is(sj::Array) || f["messages"].size() == 0) turns.refuse("not a list of messages");
    bool prefix = false; // the last message is the assistant's: the answer goes on with it
    for (sj::Value message : f["messages"].items()) {
        const std::string role = turns.known_role(message["role"].str(), {"user", "assistant", "system"});
        prefix = role == "assistant";
        turns.all.push_back({role});
        if (!message["content"].is(sj::Array)) {
            turns.all.back().content = turns.text_of(message["content"], {});
            continue;
        }
        for (sj::Value block : message["content"].items()) read_block(turns, role, block);
        if (role == "user" && turns.all.back().role == "user" && turns.all.back().content.empty() &&
            turns.all.size() > 1 && turns.all[turns.all.size() - 2].role == "tool")
            turns.all.pop_back(); // results of tools were all of it
    }

    sj::Writer w;
    w.object();
    for (const char* name : SHARED_FIELDS)
        if (f[name]) write_raw(w, name, f[name]);
    if (!f["max_tokens"] && !counting) throw Refusal(400, "max_tokens is missing", "max_tokens");
    for (auto [from, to] : {std::pair{"max_tokens", "max_tokens"}, {"stop_sequences", "stop"}})
        if (f[from]) write_raw(w, to, f[from]);
    if (f["stop_sequences"] && !f["stop_sequences"].is(sj::Array))
        throw Refusal(400, "stop_sequences must be a list", "stop_sequences");
    if (prefix) w.field("continue_final_message", true);
    members_of(f, "metadata", {"user_id"}).text("user_id");
    const Fields thinking = members_of(f, "thinking", {"type"}), config = members_of(f, "output_config", {"format"});
    if (const std::string type = thinking.text("type"); f["thinking"]) {
        if (type != "adaptive" && type != "disabled")
            throw Refusal(400, "thinking: only the types adaptive and disabled are supported", "thinking");
        if (!f["chat_template_kwargs"])
            w.key("chat_template_kwargs").object().field("enable_thinking", type == "adaptive").end();
        else throw Refusal(400, "thinking and chat_template_kwargs say the same", "thinking");
    }
    if (const sj::Value form = config["format"]) {
        if (form["type"].str() != "json_schema")
            throw Refusal(400, "output_config: format must be a json_schema", "output_config");
        w.key("response_format").object().field("type", "json_schema").key("json_schema").separate();
        w.text += form.raw();
        w.end();
    }
    if (const sj::Value tools = f["tools"]) {
        if (!tools.is(sj::Array)) throw Refusal(400, "tools must be a list", "tools");
        w.key("tools").array();
        for (sj::Value tool : tools.items()) {
            if (tool["type"].str("custom") != "custom" || !tool["input_schema"].is(sj::Object))
                throw Refusal(400, "tools: only those of type \"custom\" with an input_schema are supported", "tools");
            write_tool(w, tool, "input_schema");
        }
        w.end();
    }
    if (f["tool_choice"]) {
        const Fields choice = members_of(f, "tool_choice", {"type", "name", "disable_parallel_tool_use"});
        const std::string type = choice.text("type"), name = choice.text("name");
        if (type == "tool")
            w.key("tool_choice").object().field("type", "function").key("function").object()
                .field("name", name).end().end();
        else if (type == "any" || type == "auto" || type == "none")
            w.field("tool_choice", type == "any" ? "required" : type);
        else throw Refusal(400, "tool_choice: the type must be auto, any, tool or none", "tool_choice");
        if (choice.boolean("disable_parallel_tool_use", false)) w.field("parallel_tool_calls", false);
    }
    turns.write(w);
    return w.end().text;
}

struct MessageAnswer : ItemAnswer {
    using ItemAnswer::ItemAnswer;

  protected:
    void write_usage(sj::Writer& w, size_t cached, size_t output) const { // input_tokens are those not from the cache
        w.key("usage").object().field("input_tokens", prompt_tokens - cached).field("cache_creation_input_tokens", 0);
        w.field("cache_read_input_tokens", cached).field("output_tokens", output).end();
    }
    void write_stop(sj::Writer& w) const {
        const Choice& c = choices[0];
        const std::string finish = c.finish ? c.finish : "";
        w.field("stop_reason", finish == "length" ? "max_tokens" : finish == "tool_calls" ? "tool_use"
                               : !c.stop.empty() ? "stop_sequence" : "end_turn");
        w.key("stop_sequence");
        if (finish == "stop" && !c.stop.empty()) w.value(c.stop);
        else w.value(nullptr);
    }
    sj::Writer& write_head(sj::Writer& w) const {
        w.field("id", id).field("type", "message").field("role", "assistant").field("model", model);
        return w.key("content").array();
    }
    void write_block(sj::Writer& w, size_t i, const std::string& text, const std::string& input) const {
        const Item& item = items[i];
        w.object();
        if (item.kind == Item::THOUGHT) w.field("type", "thinking").field("thinking", text).field("signature", "");
        else if (item.kind == Item::TEXT) w.field("type", "text").field("text", text);
        else {
            w.field("type", "tool_use").field("id", item_id("toolu", i)).field("name", item.name);
            w.key("input").separate();
            w.text += input;
        }
        w.end();
    }
    std::string whole_json() override {
        sj::Writer w;
        write_head(w.object());
        for (size_t i = 0; i < items.size(); i++) {
            sj::Doc doc;
            const bool call = items[i].kind == Item::CALL;
            if (call && !sj::parse(doc, items[i].text).empty()) continue; // cut off: its input is no JSON
            write_block(w, i, items[i].text, items[i].text);
        }
        write_stop(w.end());
        write_usage(w, cached(), count());
        if (documents) write_sources(w, sources);
        return w.end().text;
    }
    void begin(const Piece& first) override {
        event("message_start", [&](sj::Writer& w) {
            write_head(w.key("message").object()).end().field("stop_reason", nullptr).field("stop_sequence", nullptr);
            write_usage(w, first.cached, 0);
            if (documents) write_sources(w, sources);
            w.end();
        });
    }
    void open_item(size_t i) override {
        event("content_block_start", [&](sj::Writer& w) {
            write_block(w.field("index", i).key("content_block"), i, "", "{}");
        });
    }
    void tell(size_t i, const std::string& more) override {
        static const char* const NAMES[][2] = {
            {"thinking_delta", "thinking"}, {"text_delta", "text"}, {"input_json_delta", "partial_json"}};
        const auto& [type, member] = NAMES[items[i].kind];
        event("content_block_delta", [&, type = type, member = member](sj::Writer& w) {
            w.field("index", i).key("delta").object().field("type", type).field(member, more).end();
        });
    }
    void close_item(size_t i) override {
        event("content_block_stop", [&](sj::Writer& w) { w.field("index", i); });
    }
    void end() override {
        event("message_delta", [&](sj::Writer& w) {
            write_stop(w.key("delta").object());
            write_usage(w.end(), cached(), count());
        });
        event("message_stop", [](sj::Writer&) {});
    }
};

inline std::string message_error_json(const Refusal& r, const std::string& request_id) {
    const char* type = r.status == 401 ? "authentication_error" : r.status == 403 ? "permission_error"
                     : r.status == 404 ? "not_found_error" : r.status == 413 ? "request_too_large"
                     : r.status == 429 ? "rate_limit_error" : r.status == 503 ? "overloaded_error"
                     : r.status < 500 ? "invalid_request_error" : "api_error";
    std::string message = r.what(), valid;
    if (!r.param.empty() && message.find(r.param) == std::string::npos) message = r.param + ": " + message;
    utf8_repair(valid, message, true);
    sj::Writer w;
    w.object().field("type", "error").key("error").object().field("type", type).field("message", valid).end();
    return w.field("request_id", request_id).end().text;
}

// ------------------------------------------------------------------------------------------------------- all dialects

static const char *const CHAT = "/v1/chat/completions", *const COMPLETION = "/v1/completions",
                  *const RESPONSES = "/v1/responses", *const MESSAGES = "/v1/messages",
                  *const COUNT_TOKENS = "/v1/messages/count_tokens";

inline bool is_asked(const std::string& path) { // there for answers
    return path == CHAT || path == COMPLETION || path == RESPONSES || path == MESSAGES || path == EMBEDDINGS ||
           is_ranking(path);
}

static const Names RESPONSE_NAMES = {{"messages", "input"}, {"max_completion_tokens", "max_output_tokens"},
                                     {"response_format", "text"}, {"reasoning_effort", "reasoning"}},
                   MESSAGE_NAMES = {{"response_format", "output_config"}, {"stop", "stop_sequences"},
                                    {"parallel_tool_calls", "tool_choice"}};

// The body of a request to one of these, and how it will be answered.
struct Asked {
    Ask ask;
    std::unique_ptr<Answer> answer;
};
inline Asked read_asked(const Service& service, const std::string& path, std::string_view body, uint64_t salt) {
    auto as_it_is = [&](Ask&& ask) {
        auto answer = std::make_unique<Answer>(service, ask);
        return Asked{std::move(ask), std::move(answer)};
    };
    const bool texts = path == EMBEDDINGS || is_ranking(path);
    if (!texts && !service.generates)
        throw Refusal(400, "this server makes no text (serve --task generate)", "model");
    if (path == CHAT || path == COMPLETION) return as_it_is(read_ask(service, body, path == CHAT, salt));
    sj::Doc doc;
    const Fields f(parse_body(doc, body));
    if (texts) return as_it_is(path == EMBEDDINGS ? read_embeddings(service, f, salt) : read_ranking(service, f, salt));

    const bool response = path == RESPONSES;
    const std::string chat = response ? chat_of_response(f) : chat_of_message(f, false);
    Asked a;
    a.ask = renamed(response ? RESPONSE_NAMES : MESSAGE_NAMES, [&] { return read_ask(service, chat, true, salt); });
    a.ask.id = (response ? "resp_" : "msg_") + a.ask.id.substr(a.ask.id.find('-') + 1);
    if (response) a.answer = std::make_unique<ResponseAnswer>(service, a.ask, f);
    else a.answer = std::make_unique<MessageAnswer>(service, a.ask);
    return a;
}

// {"input_tokens"} of what would be a message; all else of the request must be right, too.
inline std::string count_message_tokens(const Service& service, std::string_view body) {
    sj::Doc doc, chat;
    const Fields f(parse_body(doc, body));
    const std::string text = chat_of_message(f, true);
    const Fields translated(parse_body(chat, text));
    const size_t n = renamed(MESSAGE_NAMES, [&] {
        const PromptOptions any{chat_options_from_json(service, translated), SIZE_MAX};
        Ask ask = ask_from_json(service, translated, true);
        job_from_json(service, translated, ask, any.chat.thinking, 1);
        translated.integer("min_tokens", 0, translated.integer("max_tokens", 1, INT_MAX, INT_MAX), 0);
        return chat_prompt(service, translated, any, &ask).size();
    });
    sj::Writer w;
    return w.object().field("input_tokens", n).end().text;
}
