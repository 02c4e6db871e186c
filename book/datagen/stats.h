// book/datagen/stats.h: `datagen stats`: rows, tokens, lengths, difficulties by chapter.
#pragma once
#include "book/arguments.h"

namespace book {

int run_stats(const Arguments& a);

} // namespace book
