// cli/questions.cpp: the rows of a QA file.
#include "cli/questions.h"
#include "book/conversations.h"
#include "book/rows.h"
#include "cli/answer.h"
#include "sj.h"
#include <algorithm>
#include <utility>

namespace cli {

static QuestionRow question_row(const Options& o, const Tokenizer& tokenizer, const std::string& where, sj::Value v) {
    book::Question q = book::read_question(v);
    if (std::none_of(q.messages.begin(), q.messages.end(), [](auto& m) { return m.role == "user"; }))
        DIE("messages: nobody asks");
    QuestionRow row;
    row.where = where, row.question = q.question, row.reference = q.reference;
    if (!o.system.empty() && q.messages[0].role != "system")
        q.messages.insert(q.messages.begin(), {"system", o.system});
    if (!book::is_absent(v["id"])) row.id = sj::dump(v["id"]);
    tokenizer.encode(row.trained, row.reference, false);
    row.trained.push_back(tokenizer.id("<|im_end|>"));
    tokenizer.encode(row.trained, "\n", false);
    row.before = render_chat(tokenizer, q.messages, {false, true}, q.tools);
    row.messages = std::move(q.messages), row.tools = std::move(q.tools);
    return row;
}

std::vector<QuestionRow> read_questions(const Options& o, const Tokenizer& tokenizer, const std::string& path) {
    std::vector<QuestionRow> rows;
    for (book::Reader in(path); in.next();) {
        const sj::Value v = in.need();
        try {
            rows.push_back(question_row(o, tokenizer, in.where(), v));
        } catch (const Error& e) {
            DIE("%s: %s", in.where().c_str(), e.what());
        }
    }
    if (rows.empty()) DIE("%s: no row in it", path.c_str());
    return rows;
}

void look_up(const Options& o, const Tokenizer& tokenizer, size_t context, QuestionRow& row) {
    const size_t room = std::max(room_for_answer(o, context), row.trained.size());
    row.sources = add_passages(o, tokenizer, row.messages, context, room, row.tools);
    row.prompt = render_chat(tokenizer, row.messages, {o.think == 1, true}, row.tools);
    row.before = render_chat(tokenizer, row.messages, {false, true}, row.tools);
}

} // namespace cli
