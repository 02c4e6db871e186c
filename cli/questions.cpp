// cli/questions.cpp: the rows of a QA file.
#include "cli/questions.h"
#include "base/json_lines.h"
#include "cli/answer.h"
#include "sj.h"
#include <algorithm>
#include <string_view>
#include <utility>

namespace cli {

static QuestionRow question_row(const Options& o, const Tokenizer& tokenizer, size_t line, sj::Value v) {
    if (!v.is(sj::Object)) DIE("not an object");
    QuestionRow row;
    row.line = line;
    std::vector<Message> messages;
    if (v["messages"]) {
        messages = messages_from_json(v["messages"]);
        if (messages.empty() || messages.back().role != "assistant")
            DIE("messages: the last one is not the assistant's");
        if (!messages.back().tool_calls.empty())
            DIE("messages: the last one has tool calls, which cannot be a reference");
        row.reference = messages.back().content;
        messages.pop_back();
        for (auto& m : messages)
            if (m.role == "user") row.question = m.content;
    } else {
        auto absent = [](sj::Value x) { return !x || x.is(sj::Null); };
        auto text = [&](const char* key, bool needed) {
            const sj::Value s = v[key];
            if (!s.is(sj::String) && (needed || !absent(s))) DIE("%s: %s", key, s ? "not a string" : "missing");
            return s.str();
        };
        row.question = text("instruction", true);
        row.reference = text("output", true);
        const std::string input = text("input", false), system = text("system", false);
        if (!input.empty()) row.question += "\n" + input;
        if (!system.empty()) messages.push_back({"system", system});
        if (!absent(v["history"]) && !v["history"].is(sj::Array)) DIE("history: not a list");
        for (sj::Value turn : v["history"].items()) {
            if (turn.size() != 2 || !turn[0].is(sj::String) || !turn[1].is(sj::String))
                DIE("history: not a list of [question, answer]");
            messages.push_back({"user", turn[0].str()});
            messages.push_back({"assistant", turn[1].str()});
        }
        messages.push_back({"user", row.question});
    }
    if (!o.system.empty() && (messages.empty() || messages[0].role != "system"))
        messages.insert(messages.begin(), {"system", o.system});
    if (v["id"]) row.id = sj::dump(v["id"]);
    const std::vector<std::string> tools = tools_from_json(v["tools"]);
    tokenizer.encode(row.trained, row.reference, false);
    row.trained.push_back(tokenizer.id("<|im_end|>"));
    tokenizer.encode(row.trained, "\n", false);
    row.before = render_chat(tokenizer, messages, {false, true}, tools);
    row.messages = std::move(messages), row.tools = tools;
    return row;
}

std::vector<QuestionRow> read_questions(const Options& o, const Tokenizer& tokenizer, const MappedFile& file) {
    std::vector<QuestionRow> rows;
    each_json_line(file, [&](size_t line, std::string_view, sj::Value row) {
        try {
            rows.push_back(question_row(o, tokenizer, line, row));
        } catch (const Error& e) {
            DIE("%s: line %zu: %s", file.path.c_str(), line, e.what());
        }
    });
    if (rows.empty()) DIE("%s: no row in it", file.path.c_str());
    return rows;
}

void look_up(const Options& o, const Tokenizer& tokenizer, size_t context, QuestionRow& row) {
    const size_t room = std::max(room_for_answer(o, context), row.trained.size());
    row.sources = add_passages(o, tokenizer, row.messages, context, room, row.tools);
    row.prompt = render_chat(tokenizer, row.messages, {o.think == 1, true}, row.tools);
    row.before = render_chat(tokenizer, row.messages, {false, true}, row.tools);
}

} // namespace cli
