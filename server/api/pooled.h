// pooled.h: vectors and rankings: how hidden states are reported.
#pragma once
#include "sj.h"
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct Relevance; // search/rerank.h

namespace server {

// How the hidden states of a request are reported.
struct Pooled {
    bool ranking = false;
    bool base64 = false;                 // vectors: little-endian float32 as text
    size_t dimensions = 0;               // ... the first so many numbers
    size_t most = 0;                     // a ranking: number of results
    bool documents_too = true;
    std::vector<std::string> documents{}; // ... and these, if they are returned
    std::shared_ptr<const Relevance> relevance{};
};

void write_base64(std::string& out, const void* bytes, size_t n);

// The answer, written in parts.
struct PooledAnswer {
    const char* broken = nullptr; // why there is no result
    const Pooled& how;

    PooledAnswer(const Pooled& how, size_t texts)
        : how(how), vectors(how.ranking ? 0 : texts), scores(how.ranking ? texts : 0) {}

    void add(size_t text, const std::vector<float>& hidden);

    // Writes about `bytes` more. The answer is complete when no bracket of w is open.
    void write_part(sj::Writer& w, const std::string& id, const std::string& model, long created, size_t tokens,
                    size_t bytes);

  private:
    std::vector<std::vector<float>> vectors;
    std::vector<std::pair<double, size_t>> scores; // score, document
    size_t next = 0;                               // the next result to write

    void write_result(sj::Writer& w);
    void write_vector(sj::Writer& w);
};

} // namespace server
