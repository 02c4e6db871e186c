// book/datagen/score_rows.h: the input files of `datagen score`: answers and references, matched row by row.
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
        size_t line;       // or its index in the array
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

// The question of a row of reference.jsonl and its answer, the reference: an Alpaca, OpenAI or ShareGPT row
// (book/conversations.h). It may have `facts`, a list of texts that a right answer
// contains, or `choices`, a list, and `choice`, the letter of the right one.
struct ScoreReference {
    std::string question, answer;
    std::vector<std::string> facts; // in fact_form
    size_t choices = 0;
    char choice = 0;                // 0: not multiple choice

    ScoreReference(const ScoreFile& file, const ScoreFile::Row& row);
};

// The answer of a row of answers.jsonl: from `qwen3 --eval`, or anything with `answer`, `predict` (as in
// LLaMA-Factory's generated_predictions.jsonl) or `output`. A row that --eval had to skip has none: it is
// wrong.
std::string score_answer(const ScoreFile& file, const ScoreFile::Row& row, const std::string& reference);

// For each row of `answers` the matching row of `references`: by id if both files have ids, otherwise by
// order.
std::vector<size_t> match_rows(const ScoreFile& answers, const ScoreFile& references, bool by_id);

} // namespace book
