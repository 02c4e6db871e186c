// book/datagen/terms.h: finds a book's own terms in its chunks.
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

// A book's own terms: words of its headings; frequent words in capitals; and words that cluster: frequent in the
// chunks that have them, but not in all chunks. Chinese is cut by jieba.
struct BookTerms {
    struct Use { size_t count = 0, chunks = 0, last = 0; bool heading = false, capitals = false; };
    std::unordered_map<std::string, Use> uses;
    std::unordered_set<uint64_t> nothing; // words that are never terms
    size_t chunks = 0;
    std::unique_ptr<Jieba> jieba;

    BookTerms(const std::unordered_set<uint64_t>& stop_words, const std::string& common);
    void learn(sj::Value chunk);
    Strings terms(const Limits& limits) const; // most frequent first

  private:
    void add(std::string_view valid, bool heading);
};

} // namespace book
