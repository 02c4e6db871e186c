#include "book/score_rows.h"
#include "base/json_lines.h"
#include "book/facts_and_choices.h"
#include <unordered_map>

namespace book {

ScoreFile::ScoreFile(const std::string& path) : file(path) {
    each_numbered_line(file.text(), [&](std::string_view s, size_t line) {
        if (s.find_first_not_of(" \t\r") == s.npos) return;
        rows.push_back({s, line, ""});
        sj::Doc doc;
        const sj::Value id = parse(doc, rows.back())["id"];
        if (id && !id.is(sj::Null)) rows.back().id = sj::dump(id), has_ids = true;
    });
    if (rows.empty()) DIE("%s: no row in it", path.c_str());
    for (auto& row : rows)
        if (has_ids && row.id.empty()) fail(row, "no id, which other rows have");
}

void ScoreFile::fail(const Row& row, const std::string& fault) const {
    DIE("%s: line %zu: %s", file.path.c_str(), row.line, fault.c_str());
}

sj::Value ScoreFile::parse(sj::Doc& doc, const Row& row) const {
    const std::string fault = parse_line(doc, row.text);
    if (!fault.empty()) fail(row, fault);
    if (!doc.root().is(sj::Object)) fail(row, "not an object");
    return doc.root();
}

ScoreReference::ScoreReference(const ScoreFile& file, const ScoreFile::Row& row) {
    sj::Doc doc;
    const sj::Value v = file.parse(doc, row);
    auto text = [&](sj::Value s, const char* name) {
        if (!s.is(sj::String)) file.fail(row, std::string(name) + (s ? ": not a string" : ": missing"));
        return s.str();
    };
    if (v["messages"]) {
        sj::Value last;
        for (sj::Value m : v["messages"].items()) {
            if (m["role"].str() == "user") question = text(m["content"], "messages: content");
            last = m;
        }
        if (last["role"].str() != "assistant")
            file.fail(row, "messages: the last one is not the assistant's");
        answer = text(last["content"], "messages: content");
    } else {
        question = text(v["instruction"], "instruction");
        answer = text(v["output"], "output");
        const std::string input = v["input"].str();
        if (!input.empty()) question += "\n" + input;
    }
    for (const char* name : {"facts", "choices"})
        if (v[name] && !v[name].is(sj::Null) && !v[name].is(sj::Array))
            file.fail(row, std::string(name) + ": not a list");
    for (sj::Value fact : v["facts"].items()) {
        facts.push_back(fact_form(text(fact, "facts")));
        if (facts.back().find_first_not_of("[|]") == std::string::npos) file.fail(row, "facts: an empty one");
    }
    if (!v["choice"] || v["choice"].is(sj::Null)) return;
    choices = v["choices"].size();
    const std::string right = text(v["choice"], "choice");
    if (choices < 2 || choices > 26) file.fail(row, "choices: 2 to 26 are expected");
    if (right.size() != 1 || (size_t)(right[0] - 'A') >= choices)
        file.fail(row, "choice: not the letter of one of the choices");
    choice = right[0];
}

std::string score_answer(const ScoreFile& file, const ScoreFile::Row& row, const std::string& reference) {
    sj::Doc doc;
    const sj::Value v = file.parse(doc, row);
    if (v["reference"].is(sj::String) && v["reference"].str() != reference)
        file.fail(row, "it answers another question: its reference is not the reference file's");
    for (const char* key : {"answer", "predict", "output"})
        if (v[key].is(sj::String)) return v[key].str();
    if (!v["error"]) file.fail(row, "no answer, predict or output");
    return "";
}

std::vector<size_t> match_rows(const ScoreFile& answers, const ScoreFile& references, bool by_id) {
    if (answers.rows.size() != references.rows.size())
        DIE("%s: %zu rows, but %s has %zu", answers.file.path.c_str(), answers.rows.size(),
            references.file.path.c_str(), references.rows.size());
    std::unordered_map<std::string_view, size_t> row_of;
    std::vector<size_t> match;
    for (size_t i = 0; i < references.rows.size() && by_id; i++)
        if (!row_of.emplace(references.rows[i].id, i).second)
            references.fail(references.rows[i], "id " + references.rows[i].id + " was there before");
    for (size_t i = 0; i < answers.rows.size(); i++) {
        const auto found = row_of.find(answers.rows[i].id);
        if (by_id && found == row_of.end()) // not there, or taken by an answer before this one
            answers.fail(answers.rows[i], "id " + answers.rows[i].id + " was there before, or is no row of " +
                                              references.file.path);
        match.push_back(by_id ? found->second : i);
        if (by_id) row_of.erase(found);
    }
    return match;
}

} // namespace book
