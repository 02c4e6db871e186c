#include "book/datagen/score_rows.h"
#include "book/conversations.h"
#include "book/datagen/facts_and_choices.h"
#include "book/rows.h"
#include <unordered_map>

namespace book {

ScoreFile::ScoreFile(const std::string& p) : path(p) {
    for (Reader in(p); in.next();) {
        const sj::Value id = in.need()["id"];
        rows.push_back({std::string(in.text), in.number, in.where(), is_absent(id) ? "" : sj::dump(id)});
        has_ids |= !rows.back().id.empty();
    }
    if (rows.empty()) DIE("%s: no row in it", path.c_str());
    for (auto& row : rows)
        if (has_ids && row.id.empty()) fail(row, "no id, which other rows have");
}

void ScoreFile::fail(const Row& row, const std::string& fault) const {
    DIE("%s: %s", row.where.c_str(), fault.c_str());
}

sj::Value ScoreFile::parse(sj::Doc& doc, const Row& row) const {
    sj::parse(doc, row.text);
    return doc.root();
}

ScoreReference::ScoreReference(const ScoreFile& file, const ScoreFile::Row& row) {
    sj::Doc doc;
    const sj::Value v = file.parse(doc, row);
    auto text = [&](sj::Value s, const char* name) {
        if (!s.is(sj::String)) file.fail(row, std::string(name) + (s ? ": not a string" : ": missing"));
        return s.str();
    };
    try {
        const Question q = read_question(v);
        question = q.question, answer = q.reference;
    } catch (const Error& e) {
        file.fail(row, e.what());
    }
    for (const char* name : {"facts", "choices"})
        if (!is_absent(v[name]) && !v[name].is(sj::Array))
            file.fail(row, std::string(name) + ": not a list");
    for (sj::Value fact : v["facts"].items()) {
        facts.push_back(fact_form(text(fact, "facts")));
        if (facts.back().find_first_not_of("[|]") == std::string::npos) file.fail(row, "facts: an empty one");
    }
    if (is_absent(v["choice"])) return;
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
    if (is_absent(v["error"])) file.fail(row, "no answer, predict or output");
    return "";
}

std::vector<size_t> match_rows(const ScoreFile& answers, const ScoreFile& references, bool by_id) {
    if (answers.rows.size() != references.rows.size())
        DIE("%s: %zu rows, but %s has %zu", answers.path.c_str(), answers.rows.size(),
            references.path.c_str(), references.rows.size());
    std::unordered_map<std::string_view, size_t> row_of;
    std::vector<size_t> match;
    for (size_t i = 0; i < references.rows.size() && by_id; i++)
        if (!row_of.emplace(references.rows[i].id, i).second)
            references.fail(references.rows[i], "id " + references.rows[i].id + " was there before");
    for (size_t i = 0; i < answers.rows.size(); i++) {
        const auto found = row_of.find(answers.rows[i].id);
        if (by_id && found == row_of.end()) // missing, or already used by an earlier answer
            answers.fail(answers.rows[i], "id " + answers.rows[i].id + " was there before, or is no row of " +
                                              references.path);
        match.push_back(by_id ? found->second : i);
        if (by_id) row_of.erase(found);
    }
    return match;
}

} // namespace book
