// search/words.h: the words of texts and questions, as an index knows them.
//
// Words: what jieba makes of Chinese; runs of letters and digits of other scripts in lower case, English without
// plural; of identifiers also the parts (cudaMemcpyAsync: cuda, memcpy, async); pairs of kana and Hangul. A question is
// without those that say nothing about its subject (what, I, 什么).
#pragma once
#include "book/jieba.h"
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

// Calls f(word) for the words of a text of valid UTF-8.
void index_words(const Jieba& jieba, std::string_view text, const std::function<void(std::string_view)>& f);

// Of each different word how often it stands there, by hash, sorted.
using WordCounts = std::vector<std::pair<uint64_t, uint32_t>>;
WordCounts count_words(const Jieba& jieba, std::string_view text, uint32_t& length); // length: all words of it

// Words that say nothing about a subject, in English as index_words gives them ("thi"): those that only ask, pronouns,
// prepositions, auxiliaries. Some are rare in the texts, and would weigh much.
bool says_nothing(std::string_view word);
WordCounts question_words(const Jieba& jieba, std::string_view question); // without these
