// limits.h: limits of a request.
#pragma once
#include <cstddef>

namespace server {

constexpr size_t MAX_BODY = 8 << 20; // bytes of a request
constexpr size_t MAX_CONVERTED = 32 << 20; // bytes of a document to convert
constexpr size_t MAX_DOCUMENTS = 64, MAX_DOCUMENT_BYTES = 4 << 20; // texts of `documents`; bytes of all
constexpr size_t MAX_NAME = 200;     // bytes of a document's name
constexpr int MAX_CHOICES = 128;     // answers to one request
constexpr size_t MAX_STOPS = 16, MAX_STOP = 128; // stop strings; bytes of one
constexpr int MAX_NAMED = 1024;      // ids that logit_bias, bad_words and allowed_token_ids may name in total
constexpr int MAX_ALTERNATIVES = 20;
constexpr size_t MAX_TOLD = 2 << 20; // log-probabilities per request; each takes about 100 bytes of JSON
constexpr size_t MAX_TOLD_AT_ONCE = 1 << 16; // ... of a prompt in a stream, where one event has them

} // namespace server
