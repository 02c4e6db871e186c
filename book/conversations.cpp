#include "book/conversations.h"
#include "base/error.h"

namespace book {

Layout::Layout() = default;
Layout::~Layout() = default;

static Conversation read_alpaca(sj::Value v, const Layout& layout, bool answered) {
    Conversation c;
    c.kind = "alpaca";
    auto text = [&](const char* column, bool needed) {
        const std::string& key = layout.name.at(column);
        const sj::Value s = v[key];
        if (!s.is(sj::String) && (needed || !is_absent(s))) DIE("%s: %s", key.c_str(), s ? "not a string" : "missing");
        return s.str();
    };
    const std::string prompt = text("prompt", true), query = text("query", false), system = text("system", false);
    if (!system.empty()) c.messages.push_back({"system", system});
    const sj::Value history = v[layout.name.at("history")];
    if (!is_absent(history) && !history.is(sj::Array)) DIE("history: not a list");
    for (sj::Value turn : history.items()) {
        if (turn.size() != 2 || !turn[0].is(sj::String) || !turn[1].is(sj::String))
            DIE("history: not a list of [question, answer]");
        c.messages.push_back({"user", turn[0].str()});
        c.messages.push_back({"assistant", turn[1].str()});
    }
    c.messages.push_back({"user", query.empty() ? prompt : prompt + "\n" + query});
    if (answered) c.messages.push_back({"assistant", text("response", true)});
    return c;
}

static Message read_sharegpt_turn(sj::Value turn, const Layout& layout, const std::string& where) {
    auto name = [&](const char* key) { return layout.name.at(key); };
    const std::string role = turn[name("role_tag")].str();
    const sj::Value content = turn[name("content_tag")];
    if (!content.is(sj::String)) DIE("%s: a turn without %s", where.c_str(), name("content_tag").c_str());
    if (role == name("user_tag")) return {"user", content.str()};
    if (role == name("assistant_tag")) return {"assistant", content.str()};
    if (role == name("system_tag")) return {"system", content.str()};
    if (role == name("observation_tag")) return {"tool", content.str()};
    if (role != name("function_tag")) DIE("%s: unknown role %s", where.c_str(), in_quotes(role).c_str());
    const std::string text = content.str();
    sj::Doc call;
    if (!sj::parse(call, text).empty()) DIE("%s: a call that is no JSON", name("function_tag").c_str());
    return {"assistant", "", {}, {tool_call_from_json(call.root(), name("function_tag"))}};
}

static Conversation read_sharegpt(sj::Value v, const Layout& layout) {
    Conversation c;
    c.kind = "sharegpt";
    if (sj::Value s = v[layout.name.at("system")]; s.is(sj::String) && !s.str().empty())
        c.messages.push_back({"system", s.str()});
    const std::string& key = layout.name.at("messages");
    if (!v[key].is(sj::Array)) DIE("%s: not a list", key.c_str());
    for (sj::Value turn : v[key].items()) c.messages.push_back(read_sharegpt_turn(turn, layout, key));
    return c;
}

// The messages of a row in any of the three formats, and its tools. Not `answered`: Alpaca's last answer is not in it.
static Conversation read_messages(sj::Value v, const Layout& layout, bool answered) {
    const bool known = !layout.formatting.empty(), sharegpt = layout.formatting == "sharegpt";
    const bool openai = sharegpt && layout.name.at("role_tag") == "role" && layout.name.at("content_tag") == "content";
    Conversation c;
    if (known ? openai : (bool)v["messages"]) {
        c.messages = messages_from_json(v[known ? layout.name.at("messages") : "messages"]);
        c.kind = "openai";
    } else if (known ? sharegpt : (bool)v["conversations"]) c = read_sharegpt(v, layout);
    else c = read_alpaca(v, layout, answered);
    return c;
}

static Strings read_tools(sj::Value v, const Layout& layout) {
    const sj::Value tools = v[layout.name.at("tools")];
    if (!tools.is(sj::String)) return tools_from_json(tools);
    const std::string text = tools.str(); // LLaMA-Factory keeps them as JSON in a string
    sj::Doc doc;
    if (!text.empty() && !sj::parse(doc, text).empty()) DIE("tools: a string that is no JSON");
    return tools_from_json(doc.root());
}

Conversation read_conversation(sj::Value v, const Layout& layout) {
    if (!v.is(sj::Object)) DIE("not an object");
    Conversation c = read_messages(v, layout, true);
    c.tools = read_tools(v, layout);
    if (c.messages.empty() || c.messages.back().role != "assistant")
        DIE("messages: the last one is not the assistant's");
    for (auto& m : c.messages)
        if (m.role == "user" || m.role == "assistant") {
            std::string& all = m.role == "user" ? c.question : c.answer;
            all += (all.empty() ? "" : "\n") + m.content;
        }
    if (c.question.empty()) DIE("messages: nobody asks");
    return c;
}

bool is_preference(sj::Value v, const Layout& layout) {
    return !is_absent(v[layout.name.at("chosen")]) || !is_absent(v[layout.name.at("rejected")]);
}

// The messages of a list, or one that stands alone: OpenAI's or ShareGPT's.
static std::vector<Message> read_turns(sj::Value v, const Layout& layout, const std::string& where) {
    const std::string &role = layout.name.at("role_tag"), &content = layout.name.at("content_tag");
    const sj::Value first = v.is(sj::Array) ? v[0] : v;
    std::vector<Message> turns;
    if ((role != "role" || content != "content") && first[content].is(sj::String)) {
        if (!v.is(sj::Array)) return {read_sharegpt_turn(v, layout, where)};
        for (sj::Value turn : v.items()) turns.push_back(read_sharegpt_turn(turn, layout, where));
        return turns;
    }
    const std::string list = v.is(sj::Array) ? sj::dump(v) : "[" + sj::dump(v) + "]";
    sj::Doc doc;
    sj::parse(doc, list);
    return messages_from_json(doc.root());
}

Preference read_preference(sj::Value v, const Layout& layout) {
    Preference p;
    const std::string name[2] = {layout.name.at("chosen"), layout.name.at("rejected")};
    Message* const answer[2] = {&p.chosen, &p.rejected};
    for (auto& key : name)
        if (is_absent(v[key])) DIE("%s: missing; a pair has both answers", key.c_str());
    const sj::Value prompt = v["prompt"];
    const bool lists = v[name[0]].is(sj::Array), text = prompt.is(sj::String);
    const bool others = !layout.formatting.empty() || v["instruction"] || v["messages"] || v["conversations"];
    std::vector<Message> turns[2];
    for (int i : {0, 1}) {
        const sj::Value a = v[name[i]];
        if (a.is(sj::Array) != lists) DIE("%s and %s: only one is a list", name[0].c_str(), name[1].c_str());
        if (a.is(sj::String)) turns[i] = {{"assistant", a.str()}};
        else if (a.is(sj::Object) || a.is(sj::Array)) turns[i] = read_turns(a, layout, name[i]);
        else DIE("%s: neither a text nor a message", name[i].c_str());
        if (turns[i].empty()) DIE("%s: empty", name[i].c_str());
        *answer[i] = turns[i].back(), turns[i].pop_back();
        if (answer[i]->role != "assistant") DIE("%s: not the assistant's", name[i].c_str());
        if (answer[i]->tool_calls.empty() && answer[i]->content.find_first_not_of(" \t\r\n") == std::string::npos)
            DIE("%s: empty", name[i].c_str());
    }
    if (lists && !turns[0].empty() && (text || is_absent(prompt))) { // (some repeat the question as `prompt`)
        bool same = v[name[1]].size() == v[name[0]].size();
        for (size_t k = 0; same && k < turns[0].size(); k++)
            same = sj::dump(v[name[0]][k]) == sj::dump(v[name[1]][k]);
        if (!same) DIE("%s and %s: not the same up to the last message", name[0].c_str(), name[1].c_str());
        p.prompt = turns[0], p.kind = "trl";
    } else if (!turns[0].empty() || !turns[1].empty()) {
        DIE("%s: more than one message, where one answer is compared", name[turns[0].empty()].c_str());
    } else if (others) {
        const Conversation c = read_messages(v, layout, false);
        p.prompt = c.messages, p.kind = c.kind;
    } else if (prompt.is(sj::Array)) p.prompt = read_turns(prompt, layout, "prompt"), p.kind = "trl";
    else if (text) p.prompt = {{"user", prompt.str()}}, p.kind = lists ? "trl" : "text";
    else DIE("no prompt: instruction, conversations, messages or prompt holds it");
    p.tools = read_tools(v, layout);
    if (p.prompt.empty() || (p.prompt.back().role != "user" && p.prompt.back().role != "tool"))
        DIE("the prompt does not end with a question");
    if (p.kind == "text" && p.prompt[0].content.empty()) DIE("prompt: empty");
    return p;
}

Conversation need_conversation(const Reader& in, const Layout& layout) {
    const sj::Value v = in.need();
    try {
        return read_conversation(v, layout);
    } catch (const Error& e) {
        DIE("%s: %s", in.where().c_str(), e.what());
    }
}

} // namespace book
