// messages.cpp: blocks in, blocks and events out.
#include "model/utf8.h"
#include "search/grounding.h"
#include "server/api/messages.h"
#include "server/api/turns.h"
#include <cstring>
#include <iterator>

namespace server {

static void read_block(Turns& turns, const std::string& role, sj::Value block) {
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
        if (turns.all.back().content.empty()) turns.all.pop_back(); // no text precedes the result
        turns.result(block["tool_use_id"].str(),
                     content && !content.is(sj::Null) ? turns.text_of(content, {"text"}) : "");
        turns.all.push_back({"user"});
    } else {
        turns.refuse(format("a block of type %s is not supported for %s", in_quotes(type).c_str(), role.c_str()));
    }
}

// The messages to turns. True if the last one is the assistant's: the answer continues it.
static bool read_messages(Turns& turns, sj::Value messages) {
    bool prefix = false;
    for (sj::Value message : messages.items()) {
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
            turns.all.pop_back(); // the turn held only tool results
    }
    return prefix;
}

// `thinking`'s type. `arguments`: chat_template_kwargs, which may not be given beside it.
static void write_thinking(sj::Writer& w, const std::string& type, sj::Value arguments) {
    if (type != "adaptive" && type != "disabled")
        throw Refusal(400, "thinking: only the types adaptive and disabled are supported", "thinking");
    if (!arguments)
        w.key("chat_template_kwargs").object().field("enable_thinking", type == "adaptive").end();
    else throw Refusal(400, "thinking and chat_template_kwargs say the same", "thinking");
}

static void write_tools(sj::Writer& w, sj::Value tools) {
    if (!tools.is(sj::Array)) throw Refusal(400, "tools must be a list", "tools");
    w.key("tools").array();
    for (sj::Value tool : tools.items()) {
        if (tool["type"].str("custom") != "custom" || !tool["input_schema"].is(sj::Object))
            throw Refusal(400, "tools: only those of type \"custom\" with an input_schema are supported", "tools");
        write_tool(w, tool, "input_schema");
    }
    w.end();
}

static void write_tool_choice(sj::Writer& w, const Fields& choice) {
    const std::string type = choice.text("type"), name = choice.text("name");
    if (type == "tool")
        w.key("tool_choice").object().field("type", "function").key("function").object()
            .field("name", name).end().end();
    else if (type == "any" || type == "auto" || type == "none")
        w.field("tool_choice", type == "any" ? "required" : type);
    else throw Refusal(400, "tool_choice: the type must be auto, any, tool or none", "tool_choice");
    if (choice.boolean("disable_parallel_tool_use", false)) w.field("parallel_tool_calls", false);
}

std::string chat_of_message(const Fields& f, bool counting) {
    refuse_unknown(f, {"messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking",
                       "metadata", "service_tier", "speed", "output_config", "cache_control"});
    refuse_values(f, {{"service_tier", {"\"auto\"", "\"standard_only\""}}, {"speed", {"\"standard\"", "\"fast\""}}});
    Turns turns{"messages"};
    if (f["system"]) turns.all.push_back({"system", Turns{"system"}.text_of(f["system"], {"text"})});
    if (!f["messages"].is(sj::Array) || f["messages"].size() == 0) turns.refuse("not a list of messages");
    const bool prefix = read_messages(turns, f["messages"]);

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
    if (f["thinking"]) write_thinking(w, thinking.text("type"), f["chat_template_kwargs"]);
    if (const sj::Value form = config["format"]) {
        if (form["type"].str() != "json_schema")
            throw Refusal(400, "output_config: format must be a json_schema", "output_config");
        w.key("response_format").object().field("type", "json_schema").key("json_schema").separate();
        w.text += form.raw();
        w.end();
    }
    if (const sj::Value tools = f["tools"]) write_tools(w, tools);
    if (f["tool_choice"])
        write_tool_choice(w, members_of(f, "tool_choice", {"type", "name", "disable_parallel_tool_use"}));
    turns.write(w);
    return w.end().text;
}

void MessageAnswer::write_usage(sj::Writer& w, size_t cached, size_t output) const {
    w.key("usage").object().field("input_tokens", prompt_tokens - cached).field("cache_creation_input_tokens", 0);
    w.field("cache_read_input_tokens", cached).field("output_tokens", output).end();
}

void MessageAnswer::write_stop(sj::Writer& w) const {
    const Choice& c = choices[0];
    const std::string finish = c.finish ? c.finish : "";
    w.field("stop_reason", finish == "length" ? "max_tokens" : finish == "tool_calls" ? "tool_use"
                           : !c.stop.empty() ? "stop_sequence" : "end_turn");
    w.key("stop_sequence");
    if (finish == "stop" && !c.stop.empty()) w.value(c.stop);
    else w.value(nullptr);
}

sj::Writer& MessageAnswer::write_head(sj::Writer& w) const {
    w.field("id", id).field("type", "message").field("role", "assistant").field("model", model);
    return w.key("content").array();
}

void MessageAnswer::write_block(sj::Writer& w, size_t i, const std::string& text, const std::string& input) const {
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

std::string MessageAnswer::whole_json() {
    sj::Writer w;
    write_head(w.object());
    for (size_t i = 0; i < items.size(); i++) {
        sj::Doc doc;
        const bool call = items[i].kind == Item::CALL;
        if (call && !sj::parse(doc, items[i].text).empty()) continue; // cut off: the input is not valid JSON
        write_block(w, i, items[i].text, items[i].text);
    }
    write_stop(w.end());
    write_usage(w, cached(), count());
    if (documents) write_sources(w, sources);
    return w.end().text;
}

void MessageAnswer::begin(const Piece& first) {
    event("message_start", [&](sj::Writer& w) {
        write_head(w.key("message").object()).end().field("stop_reason", nullptr).field("stop_sequence", nullptr);
        write_usage(w, first.cached, 0);
        if (documents) write_sources(w, sources);
        w.end();
    });
}

void MessageAnswer::open_item(size_t i) {
    event("content_block_start", [&](sj::Writer& w) {
        write_block(w.field("index", i).key("content_block"), i, "", "{}");
    });
}

void MessageAnswer::tell(size_t i, const std::string& more) {
    static const char* const NAMES[][2] = {
        {"thinking_delta", "thinking"}, {"text_delta", "text"}, {"input_json_delta", "partial_json"}};
    const auto& [type, member] = NAMES[items[i].kind];
    event("content_block_delta", [&, type = type, member = member](sj::Writer& w) {
        w.field("index", i).key("delta").object().field("type", type).field(member, more).end();
    });
}

void MessageAnswer::end() {
    event("message_delta", [&](sj::Writer& w) {
        write_stop(w.key("delta").object());
        write_usage(w.end(), cached(), count());
    });
    event("message_stop", [](sj::Writer&) {});
}

std::string message_error_json(const Refusal& r, const std::string& request_id) {
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

} // namespace server
