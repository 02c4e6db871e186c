// search/quote.h: an answer without generation. Small models write gibberish after a prompt with passages; instead the
// best passage itself is the answer, with its source.
#pragma once
#include "model/tensors.h"
#include "model/tokenizer.h"
#include "search/documents.h"
#include <cstddef>
#include <string>
#include <vector>

// Parameters of a model that is expected to use passages. Our 8.4 M model answers worse with passages than without
// (docs/retrieval.md); 0.6 B is the smallest Qwen3, and no dense model lies between them.
constexpr size_t LEAST_TO_USE_PASSAGES = 200'000'000;

// Whether a model quotes: as --quote says, otherwise by its size.
bool would_quote(const DocumentOptions& o, const Config& c);
// ... which it does with --docs only. Quoting is reported through `tell`.
bool quotes(const DocumentOptions& o, const Config& c, const Tell& tell);

struct Quote {
    std::string text, stop; // stop: the stop string that ended it
    std::vector<int> ids;
    const char* finish;     // "stop" or "length"
};

// The passage in at most `room` tokens, cut behind a sentence or a line, and its source. A stop string or `most`
// tokens end it, as they end a model's answer.
Quote quote(const Source& source, const Tokenizer& tokenizer, size_t room, const std::vector<std::string>& stops,
            size_t most);
