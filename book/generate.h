// book/generate.h: `datagen generate`: asks an OpenAI-compatible endpoint, several requests at once. By libcurl.
#pragma once
#include "book/arguments.h"

namespace book {

int run_generate(const Arguments& a); // without libcurl: Error

} // namespace book
