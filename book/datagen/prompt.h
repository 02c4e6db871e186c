// book/datagen/prompt.h: `datagen prompt`: requests for questions about chunks, from data/datagen/prompts/.
#pragma once
#include "book/arguments.h"
#include "sj.h"
#include <string>

namespace book {

inline constexpr const char* DIFFICULTIES[] = {"easy", "medium", "hard"};

// A chapter's name without its sections.
std::string top_chapter(sj::Value row);

// Questions in proportion to a chunk's length, and the same mix of difficulties in every chapter, to within one:
// each question gets the difficulty that is furthest behind. A chapter's quota thins its chunks evenly.
int run_prompt(const Arguments& a);

} // namespace book
