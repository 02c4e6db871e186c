// forms.cpp: grammars from schemas, expressions, choices and calls.
#include "form/gbnf.h"
#include "form/matcher.h"
#include "form/regex.h"
#include "form/schema.h"
#include "form/tools.h"
#include "model/chat_template.h"
#include "model/tokenizer.h"
#include "server/api/forms.h"
#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace server {

static std::shared_ptr<Automaton> form_of(const Service& service, const char* field, const std::string& kind, sj::Value v) {
    return blame(field, [&] {
        return service.forms->get(*service.tokenizer, kind + std::string(v.raw()), [&] {
            if (kind == "object") return grammar_of_json_object();
            if (kind == "json") {
                sj::Doc doc;
                const std::string text = v.str(); // vLLM accepts a string, too
                if (!v.is(sj::String)) return grammar_of_schema(v);
                if (const std::string fault = sj::parse(doc, text); !fault.empty()) DIE("not JSON: %s", fault.c_str());
                return grammar_of_schema(doc.root());
            }
            if (kind == "choice") {
                std::vector<std::string> words;
                if (!v.is(sj::Array) || v.size() == 0) DIE("choice must be a list of strings");
                for (sj::Value word : v.items())
                    if (word.str().empty()) DIE("choice must be a list of strings that are not empty");
                    else words.push_back(word.str());
                return grammar_of_choice(words);
            }
            if (!v.is(sj::String)) DIE("%s must be a string", kind.c_str());
            return kind == "regex" ? grammar_of_regex(v.str()) : grammar_of_gbnf(v.str());
        });
    });
}

std::shared_ptr<Automaton> form_from_json(const Service& service, const Fields& f) {
    std::vector<std::tuple<const char*, std::string, sj::Value>> wanted; // field, kind, value
    if (const sj::Value v = f["response_format"]) {
        const char* field = "response_format";
        const std::string type = v["type"].str();
        if (!v.is(sj::Object)) throw Refusal(400, "response_format must be an object", field);
        if (type == "json_object") wanted.push_back({field, "object", {}});
        else if (type == "json_schema") {
            const sj::Value schema = v["json_schema"]["schema"];
            if (!schema) throw Refusal(400, "response_format: json_schema has no schema", field);
            wanted.push_back({field, "json", schema});
        } else if (type != "text")
            throw Refusal(400, "response_format: type must be text, json_object or json_schema", field);
    }
    static const char *const KINDS[] = {"json", "regex", "choice", "grammar"};
    if (const sj::Value v = f["structured_outputs"]) {
        const char* field = "structured_outputs";
        const Fields all(v, field);
        for (auto& [name, value] : all.all) {
            const bool known = std::find(std::begin(KINDS), std::end(KINDS), name) != std::end(KINDS);
            if (value.is(sj::Null) || (!known && value.is(sj::False))) continue;
            if (known) wanted.push_back({field, name, value});
            else if (name == "json_object" && value.is(sj::True)) wanted.push_back({field, "object", {}});
            else throw Refusal(400, format("structured_outputs: %s is not supported", in_quotes(name).c_str()), field);
        }
    }
    static const std::pair<const char*, const char*> OLDER[] = {
        {"guided_json", "json"}, {"guided_regex", "regex"}, {"guided_choice", "choice"}, {"guided_grammar", "grammar"}};
    for (auto [field, kind] : OLDER)
        if (f[field]) wanted.push_back({field, kind, f[field]});
    if (wanted.empty()) return nullptr;
    const auto& [field, kind, what] = wanted.back();
    if (wanted.size() > 1) throw Refusal(400, "more than one form is asked for", field);
    return form_of(service, field, kind, what);
}

void add_tools(const Service& service, const Fields& f, const Ask& ask, Job& job) {
    const bool parallel = f.boolean("parallel_tool_calls", true);
    const sj::Value choice = f["tool_choice"];
    const std::string word = choice.str("auto");
    const bool named = choice.is(sj::Object), some = f["tools"] && f["tools"].size() > 0;
    if (!named && word != "none" && word != "auto" && word != "required")
        throw Refusal(400, "tool_choice must be none, auto, required or a function", "tool_choice");
    if (!some) {
        if (named || word == "required") throw Refusal(400, "tool_choice needs tools", "tool_choice");
        if (f["tools"] && !f["tools"].is(sj::Array)) throw Refusal(400, "tools must be a list", "tools");
        return;
    }
    if (!ask.chat) throw Refusal(400, "tools are for /v1/chat/completions", "tools");
    std::vector<Tool> tools = blame("tools", [&] { return read_tools(f["tools"]); });
    const int open = service.tokenizer->id(CALL_OPEN), close = service.tokenizer->id(CALL_CLOSE);
    if (open < 0 || close < 0) throw Refusal(400, "the model's vocabulary has no <tool_call>", "tools");
    if (word == "none" && !named) return job.bias.push_back({open, BAN});
    if (job.form) throw Refusal(400, "a form of the answer is not supported beside tools", "tools");
    if (ask.logprobs) throw Refusal(400, "logprobs is not supported beside tools", "logprobs");
    std::set<std::string> names;
    for (const Tool& t : tools) names.insert(t.name);
    job.tools = std::make_shared<const std::set<std::string>>(names);
    std::string key = std::string(f["tools"].raw()) + std::string(choice.raw()) + (parallel ? "+" : "1");
    if (named) {
        const std::string name = choice["function"]["name"].str();
        if (choice["type"].str() != "function" || !names.count(name))
            throw Refusal(400, "tool_choice: no such function", "tool_choice");
        tools.erase(std::remove_if(tools.begin(), tools.end(), [&](auto& t) { return t.name != name; }), tools.end());
    }
    job.one_call = named || !parallel;
    const bool strict = std::any_of(tools.begin(), tools.end(), [](auto& t) { return t.strict; });
    if (!named && word == "auto" && !strict) return;
    job.sure_calls = true, job.form_of_calls = !named && word == "auto";
    job.form = blame("tools", [&] {
        return service.forms->get(*service.tokenizer, "tools" + key, [&] {
            return job.form_of_calls ? grammar_of_call_body(tools) : grammar_of_calls(tools, !job.one_call);
        });
    });
}

} // namespace server
