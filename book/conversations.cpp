#include "book/conversations.h"
#include "base/error.h"
#include "book/characters.h"
#include <algorithm>

namespace book {

Layout::Layout() = default;
Layout::~Layout() = default;

sj::Value Layout::column(sj::Value row, const char* column) const {
    const std::string& key = name.at(column);
    const sj::Value v = key.empty() ? sj::Value() : row[key];
    return v.is(sj::Null) ? sj::Value() : v;
}

std::vector<std::pair<std::string, std::string>> Layout::columns_of(const std::string& kind, bool pair) const {
    Strings columns = {"chosen", "rejected"};
    if (!pair) columns.clear();
    std::vector<std::pair<std::string, std::string>> all;
    if (kind == "text" && shown() && !pair) return {{"prompt", "text"}};
    if ((kind == "text" || kind == "trl") && shown()) all.push_back({"prompt", "prompt"});
    else if (kind == "text") columns.insert(columns.end(), {"prompt", "query"});
    else if (kind == "alpaca") columns.insert(columns.end(), {"prompt", "query", "system", "history"});
    else columns.insert(columns.end(), {"messages", "system"});
    if (kind != "text") columns.push_back("tools");
    if (kind != "text" && !pair) columns.push_back("kto_tag");
    if (kind == "alpaca" && !pair) columns.push_back("response");
    for (auto& column : columns) {
        const std::string& key = name.at(column);
        if (column == "messages" && shown()) all.push_back({column, "messages"});
        if (!key.empty()) all.push_back({column, key});
    }
    return all;
}

bool is_wordless(const Message& m) {
    const std::u32string said = decode(split_thought(m).second);
    const size_t open = (size_t)(std::find_if_not(said.begin(), said.end(), is_space) - said.begin());
    const bool begun = said.compare(open, 7, U"<think>") == 0 && said.find(U"</think>") == said.npos;
    return m.tool_calls.empty() && (open == said.size() || begun);
}

// The non-empty texts of some columns, one per line.
static std::string joined(sj::Value v, const Layout& layout, std::initializer_list<const char*> columns) {
    std::string all;
    for (const char* column : columns) {
        const sj::Value s = layout.column(v, column);
        if (s && !s.is(sj::String)) DIE("%s: not a string", layout.name.at(column).c_str());
        if (const std::string text = s.str(); !text.empty()) all += (all.empty() ? "" : "\n") + text;
    }
    return all;
}

// Inserts the system prompt before the other messages, unless a turn gave one.
static void add_system(std::vector<Message>& messages, sj::Value v, const Layout& layout) {
    if (!messages.empty() && messages[0].role == "system") {
        if (!messages[0].content.empty()) return;
        messages.erase(messages.begin());
    }
    const std::string system = joined(v, layout, {"system"});
    if (!system.empty()) messages.insert(messages.begin(), {"system", system});
}

static Conversation read_alpaca(sj::Value v, const Layout& layout, bool answered) {
    Conversation c;
    c.kind = "alpaca";
    const std::string &prompt = layout.name.at("prompt"), &response = layout.name.at("response");
    if (layout.shown() && !v[prompt]) DIE("%s: missing", prompt.c_str());
    const sj::Value history = layout.column(v, "history");
    if (history && !history.is(sj::Array)) DIE("history: not a list");
    for (sj::Value turn : history.items()) {
        if (turn.size() != 2 || !turn[0].is(sj::String) || !(turn[1].is(sj::String) || turn[1].is(sj::Null)))
            DIE("history: not a list of [question, answer]");
        c.messages.push_back({"user", turn[0].str()});
        c.messages.push_back({"assistant", turn[1].str()});
    }
    c.messages.push_back({"user", joined(v, layout, {"prompt", "query"})});
    if (answered) {
        if (!v[response]) DIE("%s: missing", response.c_str());
        c.messages.push_back({"assistant", joined(v, layout, {"response"})});
    }
    add_system(c.messages, v, layout);
    return c;
}

// The keys of turns: OpenAI's keys and roles, ShareGPT's, or the tags of a dataset_info.json.
struct Turns {
    const Layout& layout;
    std::string kind;
    std::map<std::string, std::set<std::string>> tags;

    Message read(sj::Value turn, const std::string& where) {
        const bool openai = layout.shown() ? (bool)turn["role"] : layout.name.at("role_tag") == "role";
        auto key = [&](const char* tag, const char* openais) {
            return layout.shown() && openai ? openais : layout.name.at(tag);
        };
        kind = openai && key("content_tag", "content") == "content" ? "openai" : "sharegpt";
        const sj::Value role = turn[key("role_tag", "role")], content = turn[key("content_tag", "content")];
        if (!role.is(sj::String))
            DIE("%s: no %s", where.c_str(), layout.shown() ? "role" : layout.name.at("role_tag").c_str());
        const std::string name = role.str(), tag = tag_of(name);
        if (tag.empty()) DIE("%s: unknown role %s", where.c_str(), in_quotes(name).c_str());
        tags[tag].insert(name);
        if (tag == "function_tag") return {"assistant", "", {}, calls(content, name)};
        return message_from_json(turn, ROLES.at(tag), content, where);
    }

    std::vector<Message> read_all(sj::Value list, const std::string& where) {
        std::vector<Message> all;
        if (!list.is(sj::Array)) return {read(list, where)};
        for (sj::Value turn : list.items()) all.push_back(read(turn, format("%s[%zu]", where.c_str(), all.size())));
        return all;
    }

  private:
    static const std::map<std::string, std::string> ROLES, SHOWN;

    std::string tag_of(const std::string& name) const {
        for (auto& [tag, role] : ROLES)
            if (!layout.shown() && layout.name.at(tag) == name) return tag;
        const auto found = SHOWN.find(name);
        return layout.shown() && found != SHOWN.end() ? found->second : "";
    }

    // One call, or a list of them.
    static std::vector<ToolCall> calls(sj::Value content, const std::string& where) {
        const std::string text = content.is(sj::String) ? content.str() : sj::dump(content);
        sj::Doc doc;
        if (!sj::parse(doc, text).empty()) DIE("%s: a call that is no JSON", where.c_str());
        std::vector<ToolCall> all;
        if (!doc.root().is(sj::Array)) return {tool_call_from_json(doc.root(), where)};
        for (sj::Value call : doc.root().items()) all.push_back(tool_call_from_json(call, where));
        return all;
    }
};

const std::map<std::string, std::string> Turns::ROLES = {
    {"user_tag", "user"}, {"assistant_tag", "assistant"}, {"system_tag", "system"}, {"observation_tag", "tool"},
    {"function_tag", "assistant"}};
const std::map<std::string, std::string> Turns::SHOWN = {
    {"user", "user_tag"}, {"human", "user_tag"}, {"assistant", "assistant_tag"}, {"gpt", "assistant_tag"},
    {"system", "system_tag"}, {"tool", "observation_tag"}, {"observation", "observation_tag"},
    {"function_call", "function_tag"}};

// The messages of a row in any of the formats. answered false: without Alpaca's last answer.
static Conversation read_messages(sj::Value v, const Layout& layout, bool answered) {
    std::string key = layout.name.at("messages");
    if (layout.shown() && !is_absent(v["messages"])) key = "messages";
    if (layout.shown() ? is_absent(v[key]) : layout.formatting == "alpaca") return read_alpaca(v, layout, answered);
    if (!v[key].is(sj::Array)) DIE("%s: not a list", key.c_str());
    Conversation c;
    Turns turns = {layout, "openai", {}};
    c.messages = turns.read_all(v[key], key);
    c.kind = turns.kind, c.tags = turns.tags;
    add_system(c.messages, v, layout);
    return c;
}

static Strings read_tools(sj::Value v, const Layout& layout) {
    const sj::Value tools = layout.column(v, "tools");
    if (!tools.is(sj::String)) return tools_from_json(tools);
    const std::string text = tools.str(); // LLaMA-Factory stores them as JSON in a string
    sj::Doc doc;
    if (!text.empty() && !sj::parse(doc, text).empty()) DIE("tools: a string that is no JSON");
    return tools_from_json(doc.root());
}

// The messages, the answer last.
static Conversation read_answered(sj::Value v, const Layout& layout) {
    if (!v.is(sj::Object)) DIE("not an object");
    Conversation c = read_messages(v, layout, true);
    c.tools = read_tools(v, layout);
    if (c.messages.empty() || c.messages.back().role != "assistant")
        DIE("messages: the last one is not the assistant's");
    return c;
}

Conversation read_conversation(sj::Value v, const Layout& layout) {
    Conversation c = read_answered(v, layout);
    for (auto& m : c.messages)
        if (m.role == "user" || m.role == "assistant") {
            std::string& all = m.role == "user" ? c.question : c.answer;
            all += (all.empty() ? "" : "\n") + m.content;
        }
    if (c.question.empty()) DIE("messages: nobody asks");
    return c;
}

Question read_question(sj::Value v) {
    Conversation c = read_answered(v, {});
    if (c.kind == "alpaca" && is_absent(v["output"])) DIE("output: missing");
    if (!c.messages.back().tool_calls.empty())
        DIE("messages: the last one has tool calls, which cannot be a reference");
    Question q;
    q.reference = c.messages.back().content;
    c.messages.pop_back();
    for (auto& m : c.messages)
        if (m.role == "user") q.question = m.content;
    q.messages = std::move(c.messages), q.tools = std::move(c.tools);
    return q;
}

bool is_text(sj::Value v, const Layout& layout) {
    if (!layout.shown()) return layout.formatting == "alpaca" && !layout.ranking && layout.name.at("response").empty();
    return v["text"].is(sj::String) && is_absent(v["messages"]) && is_absent(v["conversations"]) &&
           is_absent(v["instruction"]);
}

std::string read_text(sj::Value v, const Layout& layout) {
    if (!v.is(sj::Object)) DIE("not an object");
    return layout.shown() ? v["text"].str() : joined(v, layout, {"prompt", "query"});
}

bool is_labelled(sj::Value v, const Layout& layout) {
    if (!layout.shown()) return !layout.name.at("kto_tag").empty();
    return v.is(sj::Object) && !is_absent(v["kto_tag"]);
}

bool read_label(sj::Value v, const Layout& layout) {
    const std::string& key = layout.name.at("kto_tag");
    if (is_absent(v[key])) DIE("%s: missing", key.c_str());
    if (!v[key].is(sj::True) && !v[key].is(sj::False)) DIE("%s: neither true nor false", key.c_str());
    return v[key].boolean();
}

bool is_preference(sj::Value v, const Layout& layout) {
    if (!layout.shown()) return layout.ranking;
    return v.is(sj::Object) && (!is_absent(v["chosen"]) || !is_absent(v["rejected"]));
}

Preference read_preference(sj::Value v, const Layout& layout) {
    Preference p;
    const std::string name[2] = {layout.name.at("chosen"), layout.name.at("rejected")};
    Message* const answer[2] = {&p.chosen, &p.rejected};
    for (auto& key : name)
        if (key.empty() || is_absent(v[key]))
            DIE("%s: missing; a pair has both answers", key.empty() ? "chosen and rejected" : key.c_str());
    const sj::Value prompt = is_absent(v["prompt"]) ? sj::Value() : v["prompt"];
    const bool lists = v[name[0]].is(sj::Array), text = prompt.is(sj::String);
    const bool others = !layout.shown() || !is_absent(v["instruction"]) || !is_absent(v["messages"]) ||
                        !is_absent(v["conversations"]);
    Turns read = {layout, "", {}};
    std::vector<Message> turns[2];
    for (int i : {0, 1}) {
        const sj::Value a = v[name[i]];
        if (a.is(sj::Array) != lists) DIE("%s and %s: only one is a list", name[0].c_str(), name[1].c_str());
        if (a.is(sj::String)) turns[i] = {{"assistant", a.str()}};
        else if (a.is(sj::Object) || a.is(sj::Array)) turns[i] = read.read_all(a, name[i]);
        else DIE("%s: neither a text nor a message", name[i].c_str());
        if (turns[i].empty()) DIE("%s: empty", name[i].c_str());
        *answer[i] = turns[i].back(), turns[i].pop_back();
        if (answer[i]->role != "assistant") DIE("%s: not the assistant's", name[i].c_str());
    }
    if (lists && !turns[0].empty() && (text || !prompt)) { // (some rows repeat the question as `prompt`)
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
        read.tags.insert(c.tags.begin(), c.tags.end());
    } else if (prompt.is(sj::Array)) p.prompt = read.read_all(prompt, "prompt"), p.kind = "trl";
    else if (text) p.prompt = {{"user", prompt.str()}}, p.kind = lists ? "trl" : "text";
    else DIE("no prompt: instruction, conversations, messages or prompt holds it");
    p.tools = read_tools(v, layout), p.tags = read.tags;
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
