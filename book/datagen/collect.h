// book/datagen/collect.h: `datagen collect`: makes rows of questions and answers from a model's replies; with
// --rows taught rows (book/datagen/taught.h).
#pragma once
#include "book/arguments.h"
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace book {

// The questions and answers of a reply, anywhere behind its thought: objects that have both, in any list, under any
// name. Unknown keys are skipped.
struct ReplyItems {
    std::vector<std::pair<std::string, std::string>> items; // question, answer
    std::vector<const char*> repairs; // made to its JSON
    size_t bad = 0;                   // objects with only one of the two, or with one that is no text
    bool json = false, cut = false;   // json: it holds a list or an object; cut: it ends inside one

    explicit ReplyItems(std::string_view reply);
};

int run_collect(const Arguments& a);

} // namespace book
