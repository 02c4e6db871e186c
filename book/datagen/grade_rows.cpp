#include "book/datagen/grade_rows.h"
#include "base/file.h"
#include "base/options.h"
#include "book/conversations.h"
#include "book/read_book.h"
#include "book/report.h"
#include "book/rows.h"

namespace book {

// Whether a file holds JSON; standard input does.
static bool is_json(const std::string& path) {
    if (path == "-") return true;
    const MappedFile file(path);
    const std::string_view text = file.text();
    const size_t mark = text.substr(0, 3) == "\xEF\xBB\xBF" ? 3 : 0, first = text.find_first_not_of(" \t\r\n", mark);
    return first != text.npos && (text[first] == '{' || text[first] == '[');
}

static std::vector<GradeQuestion> read_json(const std::string& path) {
    std::vector<GradeQuestion> all;
    size_t more = 0;
    for (Reader in(path); in.next();) {
        const sj::Value row = in.need();
        if (row["question"].is(sj::String) && row["answer"].is(sj::String) && is_absent(row["reference"])) {
            all.push_back({row["question"].str(), row["answer"].str()});
            continue;
        }
        try {
            const Question q = read_question(row);
            more += q.messages.size() > 1;
            all.push_back({q.question, q.reference});
        } catch (const Error& e) {
            DIE("%s: %s", in.where().c_str(), e.what());
        }
    }
    if (more)
        say(format("%s: %zu of %zu rows have a system prompt or earlier turns, which a judge does not send",
                   path.c_str(), more, all.size()));
    return all;
}

// Whether a line begins, after blanks, with a mark and either colon; `rest`: the text behind them.
static bool begins_with(std::string_view line, const std::string& mark, std::string_view& rest) {
    line = trimmed(line);
    for (const char* colon : {"：", ":"}) {
        const std::string whole = mark + colon;
        if (line.substr(0, whole.size()) != whole) continue;
        rest = line.substr(whole.size());
        return true;
    }
    return false;
}

std::vector<GradeQuestion> questions_of(const std::string& text, const std::string& path) {
    std::vector<GradeQuestion> all;
    std::string* part = nullptr; // the part that further lines belong to
    bool answered = true;
    size_t number = 0, before = 0;
    for (std::string_view line : lines_of(text)) {
        number++;
        std::string_view rest;
        if (begins_with(line, "问题", rest)) {
            if (!answered) DIE("%s: line %zu: a question, and the one before it has no answer", path.c_str(), number);
            all.push_back({std::string(rest), ""});
            part = &all.back().question, answered = false;
        } else if (begins_with(line, "答案", rest)) {
            if (answered) DIE("%s: line %zu: an answer without a question", path.c_str(), number);
            all.back().reference = rest;
            part = &all.back().reference, answered = true;
        } else if (part) {
            *part += "\n" + std::string(line);
        } else {
            before += !trimmed(line).empty();
        }
    }
    if (!answered) DIE("%s: the last question has no answer", path.c_str());
    if (before) say(format("%s: not read: %s before the first question", path.c_str(), counted(before, "line").c_str()));
    return all;
}

std::vector<GradeQuestion> read_questions(const Arguments& a) {
    const std::string& path = a.files[0];
    std::vector<GradeQuestion> all =
        is_json(path) ? read_json(path) : questions_of(read_book(path, {"no", a.filter(), true}), path);
    if (all.empty()) DIE("%s: no question in it; rows of JSON, or lines that begin with 问题： and 答案：", path.c_str());
    for (auto& q : all) {
        q.question = trimmed(q.question), q.reference = trimmed(q.reference);
        if (q.question.empty() || q.reference.empty())
            DIE("%s: question %zu: %s is empty", path.c_str(), (size_t)(&q - &all[0]) + 1,
                q.question.empty() ? "it" : "its answer");
    }
    return all;
}

} // namespace book
