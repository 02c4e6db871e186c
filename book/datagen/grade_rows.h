// book/datagen/grade_rows.h: the questions of `datagen grade`, with their references.
#pragma once
#include "book/arguments.h"
#include <string>
#include <vector>

namespace book {

struct GradeQuestion { std::string question, reference; };

// Reads the questions of a file: JSONL or a JSON array of rows, as `score` reads them or with a `question` and an
// `answer`; otherwise a text or document (book/read_book.h) of questions and answers. Throws Error without an answer.
std::vector<GradeQuestion> read_questions(const Arguments& a);

// The questions of a text. Each begins with a line that begins with 问题：, its answer with a line that begins with
// 答案：. The lines after it belong to it. Lines before the first question are skipped, and counted on stderr.
std::vector<GradeQuestion> questions_of(const std::string& text, const std::string& path);

} // namespace book
