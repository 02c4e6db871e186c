// turns.h: translates a request of another dialect to the body of a chat completion: its fields and its conversation.
#pragma once
#include "model/chat_template.h"
#include "server/api/fields.h"
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace server {

// This server's own fields, common to all three dialects beside `model` and `stream`; they are passed on unchanged.
constexpr const char* SHARED_FIELDS[] = {
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids", "min_tokens",
    "ignore_eos", "skip_special_tokens", "chat_template_kwargs", "priority", "cache_salt", "request_id",
    "use_documents"};

// The members of a field, which may only have these.
Fields members_of(sj::Value v, const char* field, FieldList known);
inline Fields members_of(const Fields& f, const char* name, FieldList known) { // empty if the field is absent
    return f[name] ? members_of(f[name], name, known) : Fields();
}

void refuse_unknown(const Fields& f, FieldList known);

void write_raw(sj::Writer& w, const char* name, sj::Value v);

// The conversation, turn by turn.
struct Turns {
    struct Turn {
        std::string role, content{}, thought{};
        std::vector<ToolCall> calls{};
        std::vector<std::string> ids{}; // of the calls; for a tool's turn, of the call that it answers
    };
    const char* field; // the request's field, for errors
    std::vector<Turn> all{};

    Turn& assistant(bool fresh);
    void call(const std::string& id, const std::string& name, std::string_view arguments);
    void result(const std::string& id, const std::string& text) { all.push_back({"tool", text, "", {}, {id}}); }
    [[noreturn]] void refuse(const std::string& why) const {
        throw Refusal(400, format("%s: %s", field, why.c_str()), field);
    }
    std::string known_role(const std::string& role, FieldList known) const;
    // A string, or the joined texts of parts of these types.
    std::string text_of(sj::Value v, FieldList types) const;
    void write(sj::Writer& w) const;
};

// Rewrites {"type": "function", "name", ...} as a chat's {"type": "function", "function": {"name", ...}}. The order is
// kept, since the model sees it.
void write_tool(sj::Writer& w, sj::Value tool, const char* schema);

// Calls f, which reads the translated chat completion. Its errors get the field names of the original request.
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

} // namespace server
