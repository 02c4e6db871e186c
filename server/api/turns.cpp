// turns.cpp: turns, tool results, and the differences between the dialects.
#include "server/api/turns.h"
#include <algorithm>
#include <iterator>

namespace server {

Fields members_of(sj::Value v, const char* field, FieldList known) {
    const Fields inner(v, field);
    for (auto& [key, value] : inner.all)
        if (!value.is(sj::Null) && std::find(known.begin(), known.end(), key) == known.end())
            throw Refusal(400, format("%s: %s is not supported", field, in_quotes(key).c_str()), field);
    return inner;
}

void refuse_unknown(const Fields& f, FieldList known) {
    for (auto& [key, value] : f.all) {
        auto is = [&key = key](const char* name) { return key == name; };
        if (value.is(sj::Null) || std::any_of(known.begin(), known.end(), is)) continue;
        if (std::none_of(std::begin(SHARED_FIELDS), std::end(SHARED_FIELDS), is)) refuse_name(key);
    }
}

void write_raw(sj::Writer& w, const char* name, sj::Value v) {
    w.key(name).separate();
    w.text += v.raw();
}

Turns::Turn& Turns::assistant(bool fresh) {
    if (fresh || all.empty() || all.back().role != "assistant") all.push_back({"assistant"});
    return all.back();
}

void Turns::call(const std::string& id, const std::string& name, std::string_view arguments) {
    if (id.empty() || name.empty()) refuse("a call needs an id and a name");
    Turn& turn = assistant(false);
    turn.calls.push_back({name, std::string(arguments)}), turn.ids.push_back(id);
}

std::string Turns::known_role(const std::string& role, FieldList known) const {
    if (std::none_of(known.begin(), known.end(), [&](const char* name) { return role == name; }))
        refuse("unknown role " + in_quotes(role));
    return role;
}

std::string Turns::text_of(sj::Value v, FieldList types) const {
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

void Turns::write(sj::Writer& w) const {
    w.key("messages").array();
    for (const Turn& t : all) {
        w.object().field("role", t.role).field("content", t.content);
        if (!t.thought.empty()) w.field("reasoning_content", t.thought);
        if (!t.calls.empty()) {
            w.key("tool_calls").array();
            for (size_t i = 0; i < t.calls.size(); i++)
                w.object().field("id", t.ids[i]).field("name", t.calls[i].name)
                    .field("arguments", t.calls[i].arguments).end();
            w.end();
        } else if (!t.ids.empty()) w.field("tool_call_id", t.ids[0]);
        w.end();
    }
    w.end();
}

void write_tool(sj::Writer& w, sj::Value tool, const char* schema) {
    members_of(tool, "tools", {"type", "name", "description", schema, "strict", "cache_control"});
    w.object().field("type", "function").key("function").object();
    for (auto [name, value] : tool.members())
        if (name != "type" && name != "cache_control" && !value.is(sj::Null))
            write_raw(w, name == schema ? "parameters" : name.c_str(), value);
    w.end().end();
}

} // namespace server
