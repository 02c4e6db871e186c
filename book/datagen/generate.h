// book/datagen/generate.h: `datagen generate`: sends requests to an OpenAI-compatible endpoint by libcurl.
#pragma once
#include "book/arguments.h"

namespace book {

int run_generate(const Arguments& a); // without libcurl: Error

} // namespace book
