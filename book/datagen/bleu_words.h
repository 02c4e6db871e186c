// book/datagen/bleu_words.h: sacrebleu's sentence BLEU over words, for languages with spaces.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace book {

// Whether a text separates its words by spaces: fewer than one in ten letters belongs to a script that does not (Han,
// kana, Thai, Lao, Tibetan, Burmese, Khmer). Fenced code is left out: it is in no language.
bool has_spaces(std::string_view text);

// The words of sacrebleu's tokenizer 13a, which is that of NIST's mteval-v13a: signs are separate words, except a point
// or comma within a number, an apostrophe, and a hyphen that does not follow a digit. Valid UTF-8.
std::vector<std::string> words_13a(std::string_view text);

// sacrebleu's sentence BLEU (13a, exponential smoothing, effective order), as a fraction.
double bleu4_words(std::string_view hypothesis, std::string_view reference);

} // namespace book
