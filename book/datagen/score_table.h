// book/datagen/score_table.h: all measures of a row, and the table of their means with intervals.
#pragma once
#include "book/datagen/nearest_answer.h"
#include "book/datagen/score.h"
#include "book/datagen/score_rows.h"
#include "book/jieba.h"
#include "sj.h"
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace book {

// The first four measures are Scores.
constexpr size_t ROUGE_SCORE = 4, BLEU_WORD = 5, FACTS = 6, CHOICE = 7, METRIC_COUNT = 8;
inline constexpr const char* METRICS[METRIC_COUNT] = {"rouge-1",     "rouge-2",     "rouge-l", "bleu-4-char",
                                                      "rouge-score", "bleu-4-word", "facts",   "choice"};
using Measures = std::array<double, METRIC_COUNT>; // all of them; NAN: does not apply to this row

// The texts compared with the references, and one number of each kind per row.
constexpr size_t ANSWER = 0, OTHER_BLANKS = 1, ECHO = 2, NEAREST = 3, GAIN = 4, CANDIDATES = 5;
using ScoreRow = std::array<Measures, CANDIDATES>;

ScoreRow score_row(const Jieba& jieba, const ScoreReference& row, const ScoredText& answer,
                   const NearestAnswer* nearest, bool compat);

// The table, as text and as JSON. `keys` are the candidates' names in JSON.
std::string score_table(const std::vector<ScoreRow>& table, bool compat, bool trained, uint64_t seed, sj::Writer& w);

// The three worst rows, for reading.
std::vector<size_t> worst_rows(const std::vector<ScoreRow>& table);

} // namespace book
