// book/datagen/pack.h: `datagen pack`: packs the rows of a dataset into a file of tokens for the trainer.
#pragma once
#include "book/arguments.h"

namespace book {

int run_pack(const Arguments& a);

} // namespace book
