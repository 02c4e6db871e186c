// book/pack.h: `datagen pack`: rows of a dataset as a file of tokens for the trainer.
#pragma once
#include "book/arguments.h"

namespace book {

int run_pack(const Arguments& a);

} // namespace book
