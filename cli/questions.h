// cli/questions.h: the rows of a QA file, ready to be asked.
#pragma once
#include "cli/options.h"
#include "model/chat_template.h"
#include "model/tokenizer.h"
#include "search/documents.h"
#include <cstddef>
#include <string>
#include <vector>

namespace cli {

// A row of a QA file, ready to be asked. Prompt and answer are tokenized apart, as in training.
struct QuestionRow {
    std::string where;                   // "qa.jsonl: line 3"
    std::string id, question, reference; // id: JSON, "" if the row has none
    std::vector<Message> messages;       // the question, and what comes before it
    std::vector<std::string> tools;
    std::vector<Source> sources;         // that go with the question
    std::vector<int> prompt;             // the reference answer
    std::vector<int> before, trained;    // the reference's prompt, an empty thought at its end; the reference's ids
    size_t length() const { return before.size() + trained.size(); }
};

// Rows of Alpaca, OpenAI or ShareGPT, as `datagen pack` reads them; the last answer is the reference. That is plain
// text: the assistant's thought before it is not scored. Throws Error.
std::vector<QuestionRow> read_questions(const Options& o, const Tokenizer& tokenizer, const std::string& path);

// Work deferred until the row is processed: a lookup in documents may take long.
void look_up(const Options& o, const Tokenizer& tokenizer, size_t context, QuestionRow& row);

} // namespace cli
