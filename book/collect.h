// book/collect.h: `datagen collect`: rows of questions and answers out of the replies of a model.
#pragma once
#include "book/arguments.h"
#include <string_view>

namespace book {

// What the model said without a think block before it and a code fence around it.
std::string_view bare_reply(std::string_view s);

// The replies are JSON, [{"question": ..., "answer": ...}, ...], or they are kept aside.
int run_collect(const Arguments& a);

} // namespace book
