// book/score_rows.h: the files that `datagen score` compares: answers, references, and which belong together.
#pragma once
#include "base/file.h"
#include "sj.h"
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace book {

// The rows of a JSONL file: where they are, and their ids as JSON ("": none).
struct ScoreFile {
    struct Row {
        std::string_view text;
        size_t line;
        std::string id;
    };
    MappedFile file;
    std::vector<Row> rows;
    bool has_ids = false;

    explicit ScoreFile(const std::string& path);
    [[noreturn]] void fail(const Row& row, const std::string& fault) const;
    sj::Value parse(sj::Doc& doc, const Row& row) const;
};

// What a row of reference.jsonl asks and what it wants to hear: Alpaca's {instruction, input?, output} or
// OpenAI's {messages}, the last of which is the reference. It may have `facts`, a list of texts that a right answer
// holds, or `choices`, a list, and `choice`, the letter of the right one.
struct ScoreReference {
    std::string question, answer;
    std::vector<std::string> facts; // in fact_form
    size_t choices = 0;
    char choice = 0;                // 0: no such question

    ScoreReference(const ScoreFile& file, const ScoreFile::Row& row);
};

// A row of answers.jsonl: what `qwen3 --eval` writes, or anything with the answer as `answer`, `predict` (as
// in LLaMA-Factory's generated_predictions.jsonl) or `output`. A row that --eval had to skip has none: it is
// wrong.
std::string score_answer(const ScoreFile& file, const ScoreFile::Row& row, const std::string& reference);

// For each row of `answers` the row of `references` that belongs to it: by id if both files have ids, else by
// order.
std::vector<size_t> match_rows(const ScoreFile& answers, const ScoreFile& references, bool by_id);

} // namespace book
