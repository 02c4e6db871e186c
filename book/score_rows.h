// book/score_rows.h: the files that `datagen score` compares: answers, references, and which belong together.
#pragma once
#include "sj.h"
#include <cstddef>
#include <string>
#include <vector>

namespace book {

// The rows of a file, lines or one array, and their ids as JSON ("": none).
struct ScoreFile {
    struct Row {
        std::string text;
        size_t line;       // or its place in the array
        std::string where; // "answers.jsonl: line 3"
        std::string id;
    };
    std::string path;
    std::vector<Row> rows;
    bool has_ids = false;

    explicit ScoreFile(const std::string& path);
    [[noreturn]] void fail(const Row& row, const std::string& fault) const;
    sj::Value parse(sj::Doc& doc, const Row& row) const;
};

// The question of a row of reference.jsonl and its answer, which is the reference: Alpaca's, OpenAI's or ShareGPT's row
// (book/conversations.h). It may have `facts`, a list of texts that a right answer
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
