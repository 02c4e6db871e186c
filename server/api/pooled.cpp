// pooled.cpp: writes in parts.
#include "search/embed.h"
#include "search/rerank.h"
#include "server/api/pooled.h"
#include <algorithm>
#include <cstdint>

namespace server {

void write_base64(std::string& out, const void* bytes, size_t n) {
    static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t* b = (const uint8_t*)bytes;
    for (size_t i = 0; i < n; i += 3) {
        const size_t left = n - i;
        uint32_t three = (uint32_t)b[i] << 16;
        if (left > 1) three |= (uint32_t)b[i + 1] << 8;
        if (left > 2) three |= b[i + 2];
        out += DIGITS[three >> 18], out += DIGITS[three >> 12 & 63];
        out += left > 1 ? DIGITS[three >> 6 & 63] : '=', out += left > 2 ? DIGITS[three & 63] : '=';
    }
}

void PooledAnswer::add(size_t text, const std::vector<float>& hidden) {
    if (!all_finite(hidden)) broken = "the model's numbers are not finite";
    else if (how.ranking) scores[text] = {(*how.relevance)(hidden), text};
    else vectors[text] = unit_vector(hidden, how.dimensions);
}

void PooledAnswer::write_part(sj::Writer& w, const std::string& id, const std::string& model, long created,
                              size_t tokens, size_t bytes) {
    const size_t all = how.ranking ? std::min(how.most, scores.size()) : vectors.size();
    if (w.open.empty()) {
        std::stable_sort(scores.begin(), scores.end(), [](auto& a, auto& b) { return a.first > b.first; });
        w.object().field("id", id);
        if (!how.ranking) w.field("object", "list").field("created", created);
        w.field("model", model).key(how.ranking ? "results" : "data").array();
    }
    for (; next < all && w.text.size() < bytes; next++) how.ranking ? write_result(w) : write_vector(w);
    if (next < all) return;
    w.end().key("usage").object().field("prompt_tokens", tokens).field("total_tokens", tokens).end().end();
}

void PooledAnswer::write_result(sj::Writer& w) {
    const auto [score, index] = scores[next];
    w.object().field("index", index);
    if (how.documents_too) w.key("document").object().field("text", how.documents[index]).end();
    w.field("relevance_score", score).end();
}

void PooledAnswer::write_vector(sj::Writer& w) {
    w.object().field("object", "embedding").field("index", next).key("embedding");
    if (how.base64) {
        w.text += '"';
        write_base64(w.text, vectors[next].data(), vectors[next].size() * sizeof(float)); // (little-endian)
        w.text += '"', w.comma = true;
    } else write_numbers(w.text, vectors[next]), w.comma = true;
    w.end();
    std::vector<float>().swap(vectors[next]);
}

} // namespace server
