// book/datagen/grade_table.h: the grade of a hand-in: seconds, tokens per second, ROUGE-L, passed or failed.
#pragma once
#include "book/datagen/grade_rows.h"
#include "book/jieba.h"
#include "book/text.h"
#include "model/tokenizer.h"
#include <cstddef>
#include <string>
#include <vector>

namespace book {

// One round of the questions: one at a time, or all in one list.
struct GradeRound {
    bool list = false;
    double seconds = 0;
    Strings answers;   // of the first questions: a fault ends the round
    std::string fault; // "": none
};

// A graded server: its limits, health and rounds.
struct Grade {
    size_t health_limit = 0, predict_limit = 0; // seconds
    double least = 0;                           // required ROUGE-L
    double health_seconds = 0;
    std::string status, fault; // of its health
    std::vector<GradeRound> rounds;
};

struct GradeReport {
    std::string text, json; // the table, and the same as one JSON object; without the last newline
    bool passed;
};

// ROUGE-L is the mean over all questions; one without an answer counts 0. Blank lines count as words where
// rouge_chinese counts them, and a thought is part of the answer: a judge removes neither.
GradeReport grade_report(const Jieba& jieba, const Tokenizer& tokenizer, const std::vector<GradeQuestion>& questions,
                         const Grade& grade);

} // namespace book
