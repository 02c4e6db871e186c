// book/collect.h: `datagen collect`: rows of questions and answers out of the replies of a model.
#pragma once
#include "book/arguments.h"
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace book {

// The questions and answers of a reply, wherever they stand in it, behind its thought: objects that have both, in
// whatever list, under whatever name. Keys that were not asked for are passed over.
struct ReplyItems {
    std::vector<std::pair<std::string, std::string>> items; // question, answer
    std::vector<const char*> repairs; // of its JSON
    size_t bad = 0;                   // objects that have one of the two, or not as a text
    bool json = false, cut = false;   // does it hold a list or an object; does it end inside one

    explicit ReplyItems(std::string_view reply);
};

int run_collect(const Arguments& a);

} // namespace book
