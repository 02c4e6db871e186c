// search/words.h: the words of texts and questions, as an index stores them.
//
// Words: jieba's words of Chinese; runs of letters and digits of other scripts in lower case, English ones without
// plural; of identifiers also the parts (cudaMemcpyAsync: cuda, memcpy, async); pairs of kana and Hangul. Questions
// omit the words that say nothing about their subject (what, I, 什么).
#pragma once
#include "book/jieba.h"
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

// Calls f(word) for the words of a text of valid UTF-8.
void index_words(const Jieba& jieba, std::string_view text, const std::function<void(std::string_view)>& f);

// The number of occurrences of each different word, by hash, sorted.
using WordCounts = std::vector<std::pair<uint64_t, uint32_t>>;
WordCounts count_words(const Jieba& jieba, std::string_view text, uint32_t& length); // length: number of all words

// Words that say nothing about a subject, in English as index_words writes them ("thi"): question words, pronouns,
// prepositions, auxiliaries, verbs that ask (explain, 介绍). Some are rare in the texts, and would get a high weight.
bool says_nothing(std::string_view word);
WordCounts question_words(const Jieba& jieba, std::string_view question); // without these
