// book/facts_and_choices.h: the key facts that stand in an answer, and the letter of a choice that it names.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

// The letter that an answer to a question of several choices names; 0: none. The rule, in this order:
//   1. the last letter that is announced, by 答案, 选 (not 选项), 正确, "answer", "correct" or "\boxed", with nothing but
//      signs and words like 是, 应该, 选项, "is", "the", "option" between;
//   2. the letter that the answer begins with, if a sign, a line end or the end follows; alone it may be in lower case;
//   3. the only letter of the choices that stands alone anywhere ("A" before a lower-case word is an article).
char chosen_letter(std::string_view answer, size_t choices);

namespace book {

// A text in the form in which facts are looked for: ASCII for full-width signs and for − and –, lower case, no comma
// within a number (1,024), and one blank between words of ASCII, none elsewhere. "[" and "]" stand around it.
std::string fact_form(std::string_view text);

// Whether a key fact stands in an answer, both in fact_form. It is one text, or several divided by "|", any of which
// will do. A word of ASCII stands alone; so does a number, with its sign, point and exponent, but a unit may follow: 6
// is in 6KB, not in 6.4, 16, -6, 10^6 or FP6.
bool fact_stands(const std::string& answer, std::string_view fact);

} // namespace book
