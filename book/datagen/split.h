// book/datagen/split.h: `datagen split`: rows into train and test, by chunk.
#pragma once
#include "book/arguments.h"

namespace book {

int run_split(const Arguments& a);

} // namespace book
