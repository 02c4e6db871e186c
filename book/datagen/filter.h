// book/datagen/filter.h: `datagen filter`: keeps the good rows, once.
#pragma once
#include "book/arguments.h"

namespace book {

int run_filter(const Arguments& a);

} // namespace book
