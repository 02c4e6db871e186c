// book/grade_table.h: the grade of a hand-in: seconds, tokens a second, ROUGE-L of the answers, and whether it passes.
#pragma once
#include "book/grade_rows.h"
#include "book/jieba.h"
#include "book/text.h"
#include "model/tokenizer.h"
#include <cstddef>
#include <string>
#include <vector>

namespace book {

// The questions, asked once: one at a time, or all in one list.
struct GradeRound {
    bool list = false;
    double seconds = 0;
    Strings answers;   // of the first questions: a fault ends the round
    std::string fault; // "": none
};

// A graded server: its limits, its health, its rounds.
struct Grade {
    size_t health_limit = 0, predict_limit = 0; // seconds
    double least = 0;                           // ROUGE-L
    double health_seconds = 0;
    std::string status, fault; // of its health
    std::vector<GradeRound> rounds;
};

struct GradeReport {
    std::string text, json; // the table, and all of it as one JSON object; without the last newline
    bool passed;
};

// ROUGE-L is the mean over all questions; one without an answer has 0. A blank line is a word where it is one to
// rouge_chinese, and a thought is a part of the answer: a judge takes neither away.
GradeReport grade_report(const Jieba& jieba, const Tokenizer& tokenizer, const std::vector<GradeQuestion>& questions,
                         const Grade& grade);

} // namespace book
