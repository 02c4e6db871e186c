// book/datagen/score.h: scores a text against a reference, in the metrics that LLaMA-Factory reports.
//
//   Jieba jieba("data/datagen/jieba.bin");
//   ScoredText answer(jieba, "..."), reference(jieba, "...");
//   double rouge_l = score_pair(answer, reference)[0][ROUGE_L];         // percent; [1]: blank lines count
//
// ROUGE-1, ROUGE-2 and ROUGE-L of rouge_chinese 1.0.3 over the words of jieba 0.42.1, and BLEU-4 of nltk over
// characters; each row's in percent, rounded to 4 digits. rouge_chinese counts some blank lines as words (see
// rouge_words), which scores layout: scores are given without and with them. Google's rouge_score 0.1.2 over the
// same words of jieba is a different metric: see ascii_words.
//
// Limits: a row costs time proportional to the product of its texts' lengths (a 64th of a word's comparison each),
// memory proportional to their sum.
#pragma once
#include "book/characters.h"        // score_excerpt
#include "book/datagen/facts_and_choices.h" // other measures of an answer
#include "book/jieba.h"
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

constexpr size_t ROUGE_1 = 0, ROUGE_2 = 1, ROUGE_L = 2, BLEU_CHAR = 3;
using Scores = std::array<double, 4>; // percent

// A text, prepared for comparison.
struct ScoredText {
    std::string_view text;
    std::vector<uint32_t> characters;
    std::vector<std::string_view> words[2]; // rouge's, views of the text; [1]: with the blank ones
    std::vector<std::string> ascii;         // rouge_score's

    ScoredText(const Jieba& jieba, std::string_view of); // valid UTF-8
};

// Without blank words, and with them.
std::array<Scores, 2> score_pair(const ScoredText& hypothesis, const ScoredText& reference);

// An answer without the thought before it. An unclosed block was cut off: there is no answer. The opening marker
// may be missing, since it may have been part of the prompt.
std::string without_thought(std::string_view text);

// ---- The parts

namespace book {

// White space as Python's str.isspace() has it; s is one character of valid UTF-8, or \r\n.
bool is_blank(std::string_view s);

// The words that rouge_chinese counts in a text cut by jieba. It joins the pieces by spaces, splits the result into
// lines (after 。！？?, after six dots in a row, at line feeds) and these at white space. A line of white space
// alone, if it is not empty and something follows, becomes an empty word. `blanks`: whether
// to keep those.
std::vector<std::string_view> rouge_words(const std::vector<std::string_view>& pieces, bool blanks);

// Length of the longest common subsequence: the usual table, 64 columns at a time, a column a bit (H. Hyyrö,
// "Bit- parallel LCS-length computation revisited", 2004). A bit is 0 where the table grows by one from the
// column before. a and b hold numbers below `distinct`.
size_t lcs(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b, size_t distinct);

// The three of ROUGE, as fractions; 0 where a side has no word.
std::array<double, 3> rouge(const std::vector<std::string_view>& hypothesis,
                            const std::vector<std::string_view>& reference);

// The words that Google's rouge_score (its own tokenizer, no stemming) counts in jieba's words, joined by blanks:
// runs of a-z and 0-9 of the text in lower case. All other characters separate words: Chinese ones are in none.
std::vector<std::string> ascii_words(const std::vector<std::string_view>& pieces);

// rouge_score's F-measure of rougeL, as a fraction; 0 where a side has no word.
double rouge_score(const std::vector<std::string>& hypothesis, const std::vector<std::string>& reference);

// nltk's sentence_bleu with one reference, equal weights and smoothing method 3 (NIST's): the k-th order without
// a match counts as half of a match, to the power of k. An order longer than the hypothesis has no match; with
// `effective` it is left out, as in sacrebleu's sentence_bleu.
double bleu4(const std::vector<uint32_t>& hypothesis, const std::vector<uint32_t>& reference, bool effective = false);

// Percent, rounded to 4 digits as Python's round() does.
double rounded_percent(double fraction);

} // namespace book
