// book/terms.h: a book's own terms, found in its chunks.
#pragma once
#include "book/arguments.h"
#include "book/jieba.h"
#include "book/text.h"
#include "sj.h"
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace book {

// A book's own terms: the words of its headings; words in capitals that are frequent; and words that come in clumps,
// often where they come at all, and not everywhere. Chinese is cut by jieba.
struct BookTerms {
    struct Use { size_t count = 0, chunks = 0, last = 0; bool heading = false, capitals = false; };
    std::unordered_map<std::string, Use> uses;
    std::unordered_set<uint64_t> nothing; // words that are no terms
    size_t chunks = 0;
    std::unique_ptr<Jieba> jieba;

    BookTerms(const std::unordered_set<uint64_t>& stop_words, const std::string& common);
    void learn(sj::Value chunk);
    Strings terms(const Limits& limits) const; // the frequent ones first

  private:
    void add(std::string_view valid, bool heading);
};

} // namespace book
