// book/datagen/facts_and_choices.h: the key facts that an answer contains, and the letter of the choice that it names.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

// The letter that an answer to a multiple-choice question names; 0: none. The rule, in this order:
//   1. the last letter announced by 答案, 选 (not 选项), 正确, "answer", "correct" or "\boxed", with only signs and
//      words like 是, 应该, 选项, "is", "the", "option" between;
//   2. the letter that the answer begins with, if a sign, a line end or the end follows; alone it may be lower case;
//   3. the only letter of the choices that is a separate word ("A" before a lower-case word is an article).
char chosen_letter(std::string_view answer, size_t choices);

namespace book {

// The normal form for comparing facts: ASCII for full-width signs and for − and –, lower case, no comma within a number
// (1,024), one blank between words of ASCII and none elsewhere. "[" and "]" enclose it.
std::string fact_form(std::string_view text);

// Whether an answer contains a key fact, both in fact_form. A fact is one text, or alternatives divided by "|". A word
// of ASCII must match as a whole word; so must a number, with its sign, point and exponent, but a unit may follow: 6 is
// in 6KB, not in 6.4, 16, -6, 10^6 or FP6.
bool fact_stands(const std::string& answer, std::string_view fact);

} // namespace book
