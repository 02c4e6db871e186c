// book/datagen/unpack.h: `datagen unpack`: a file of tokens as rows of JSON.
#pragma once
#include "book/arguments.h"

namespace book {

int run_unpack(const Arguments& a);

} // namespace book
