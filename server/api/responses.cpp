// responses.cpp: items in, items and events out.
#include "search/grounding.h"
#include "server/api/responses.h"
#include "server/api/turns.h"
#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace server {

constexpr size_t MAX_REPEATED = 16 << 10; // bytes of a request field that the answer repeats

static void read_response_item(Turns& turns, sj::Value item) {
    const std::string type = item["type"].str("message");
    if (type == "message") {
        const std::string role = turns.known_role(item["role"].str(), {"user", "system", "developer", "assistant"});
        const std::string text = turns.text_of(item["content"], {"input_text", "output_text", "text"});
        if (role != "assistant") turns.all.push_back({role, text});
        else { // behind its thought, if that precedes it
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

std::string chat_of_response(const Fields& f) {
    refuse_unknown(f, {"input", "instructions", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls",
                       "text", "reasoning", "metadata", "user", "safety_identifier", "prompt_cache_key",
                       "prompt_cache_retention", "prompt_cache_options", "store", "background", "include", "truncation",
                       "top_logprobs", "service_tier", "stream_options", "stop"});
    refuse_values(f, {{"store", {"false"}}, {"background", {"false"}}, {"include", {}}, {"top_logprobs", {"0"}},
                      {"truncation", {"\"disabled\""}}, {"service_tier", SERVICE_TIERS}});
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

ResponseAnswer::ResponseAnswer(const Service& service, const Ask& ask, const Fields& f)
    : ItemAnswer(service, ask) {
    sj::Writer w;
    const Sampling& how = ask.jobs[0].how;
    auto put = [&](const char* name, const std::string& otherwise) {
        std::string own = f[name] ? sj::dump(f[name]) : otherwise;
        sj::Doc doc; // JSON has no value for 1e999
        if (own.size() > MAX_REPEATED || !sj::parse(doc, own).empty()) own = otherwise;
        w.key(name).separate();
        w.text += own;
    };
    put("instructions", "null"), put("max_output_tokens", "null"), put("metadata", "{}");
    put("parallel_tool_calls", "true"), put("tool_choice", "\"auto\""), put("tools", "[]");
    put("text", "{\"format\": {\"type\": \"text\"}}"), put("reasoning", "{\"effort\": null, \"summary\": null}");
    put("user", "null");
    auto plain = [](float x) { return strtod(format("%g", x).c_str(), nullptr); }; // 0.7 instead of 0.699999988
    w.field("temperature", plain(how.temperature)).field("top_p", plain(how.top_p)).field("truncation", "disabled");
    w.field("store", false).field("background", false).field("previous_response_id", nullptr);
    w.field("service_tier", "default").field("top_logprobs", 0);
    repeated = w.text;
}

std::string ResponseAnswer::whole_json() {
    sj::Writer w;
    write_response(w);
    return w.text;
}

void ResponseAnswer::write_response(sj::Writer& w) const {
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

void ResponseAnswer::write_part(sj::Writer& w, size_t i, const std::string& text) const {
    const bool thought = items[i].kind == Item::THOUGHT;
    w.object().field("type", thought ? "reasoning_text" : "output_text").field("text", text);
    if (!thought) w.key("annotations").array().end().key("logprobs").array().end();
    w.end();
}

void ResponseAnswer::write_item(sj::Writer& w, size_t i, const char* status, bool whole) const {
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

void ResponseAnswer::item_event(const char* name, size_t i, const char* status, bool whole) {
    event(name, [&](sj::Writer& w) {
        w.field("sequence_number", number++).field("output_index", i).key("item");
        write_item(w, i, status, whole);
    });
}

std::string ResponseAnswer::inner(size_t i) const {
    static const char* const NAMES[] = {"response.reasoning_text.", "response.output_text.",
                                        "response.function_call_arguments."};
    return NAMES[items[i].kind];
}

void ResponseAnswer::begin(const Piece&) {
    response_event("response.created");
    response_event("response.in_progress");
}

void ResponseAnswer::open_item(size_t i) {
    item_event("response.output_item.added", i, "in_progress", false);
    if (items[i].kind != Item::CALL)
        inner_event("response.content_part.added", i, [&](sj::Writer& w) { write_part(w.key("part"), i, ""); });
}

void ResponseAnswer::close_item(size_t i) {
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

} // namespace server
