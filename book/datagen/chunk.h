// book/datagen/chunk.h: `datagen chunk`: books cut into chunks, one row each.
#pragma once
#include "book/arguments.h"

namespace book {

int run_chunk(const Arguments& a);

} // namespace book
