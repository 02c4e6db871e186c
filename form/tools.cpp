// form/tools.cpp: calls of functions, see tools.h.
#include "form/tools.h"
#include "base/error.h"
#include "form/json_rules.h"
#include "form/schema_reader.h"
#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>

std::vector<Tool> read_tools(sj::Value list) {
    if (!list.is(sj::Array)) DIE("tools must be a list");
    if (list.size() > MAX_TOOLS) DIE("at most %zu tools", MAX_TOOLS);
    std::vector<Tool> tools;
    std::set<std::string> names;
    for (sj::Value v : list.items()) {
        const sj::Value f = v["function"], strict = f["strict"];
        if (v["type"].str() != "function" || !f.is(sj::Object)) DIE("tools: only type \"function\" is supported");
        Tool t{f["name"].str(), f["parameters"], strict.boolean()};
        auto plain = [](char c) { return isalnum((unsigned char)c) || c == '-' || c == '_' || c == '.'; };
        if (t.name.empty() || t.name.size() > MAX_TOOL_NAME || !std::all_of(t.name.begin(), t.name.end(), plain))
            DIE("tools: a name must be 1 to %zu letters, digits, - _ and .", MAX_TOOL_NAME);
        if (!names.insert(t.name).second) DIE("tools: two named %s", t.name.c_str());
        if (strict && !strict.is(sj::Null) && !strict.is_bool()) DIE("tools: strict must be true or false");
        if (t.parameters.is(sj::Null)) t.parameters = {};
        tools.push_back(t);
    }
    return tools;
}

static const char* const ARGUMENTS = "\", \"arguments\": "; // after the name

// The text between the markers of a call, and the closing marker. all: the arguments of every tool follow their
// schema, not only those of strict tools.
static int call_body(JsonRules& json, const std::vector<Tool>& tools, bool all, int next) {
    Grammar& g = json.g;
    const int end = g.literal(std::string("}\n") + ADDED_TOKEN + CALL_CLOSE, next);
    std::vector<int> starts;
    for (const Tool& t : tools) {
        const bool own = t.parameters && (all || t.strict);
        int arguments;
        try {
            arguments = own ? SchemaReader(json, t.parameters).read(end) : json.object(end);
        } catch (const Error& e) {
            DIE("tools: %s: %s", t.name.c_str(), e.what());
        }
        starts.push_back(g.literal("\n{\"name\": \"" + t.name + ARGUMENTS, arguments));
    }
    return g.any_of(starts);
}

Grammar grammar_of_calls(const std::vector<Tool>& tools, bool several) {
    return grammar_of([&](Grammar& g, int end) {
        JsonRules json(g);
        const int rule = g.new_rule("call");
        const int body = call_body(json, tools, true, Grammar::FINAL);
        const int start = g.literal(ADDED_TOKEN + std::string(CALL_OPEN), body);
        g.rules[(size_t)rule].start = start;
        auto another = [&](int p) { return g.literal("\n", g.call(rule, p)); };
        return g.call(rule, several ? g.repeat(another, 0, -1, end) : end);
    });
}

Grammar grammar_of_call_body(const std::vector<Tool>& tools) {
    return grammar_of([&](Grammar& g, int end) {
        JsonRules json(g);
        return call_body(json, tools, false, end);
    });
}

void CallText::tell(std::vector<CallPart>& parts) {
    static const std::string before = "\n{\"name\": \"", tail = "}\n";
    if (!begun) {
        const size_t at = text.find(ARGUMENTS, before.size());
        if (at == std::string::npos) return;
        parts.push_back({text.substr(before.size(), at - before.size()), ""});
        begun = true, told = at + strlen(ARGUMENTS);
    }
    if (text.size() < told + tail.size()) return;
    size_t n = text.size() - told - tail.size(); // the tail may be the call's end
    while (n > 0 && ((uint8_t)text[told + n] & 0xC0) == 0x80) n--; // cut between characters
    if (n) parts.push_back({"", text.substr(told, n)});
    told += n;
}

bool CallText::read(const std::set<std::string>& names, std::vector<CallPart>& parts) const {
    sj::Doc doc;
    if (!sj::parse(doc, text).empty()) return false;
    const sj::Value name = doc.root()["name"], arguments = doc.root()["arguments"];
    if (!name.is(sj::String) || !names.count(name.str()) || !arguments.is(sj::Object)) return false;
    parts.push_back({name.str(), ""});
    parts.push_back({"", std::string(arguments.raw())});
    return true;
}
