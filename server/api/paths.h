// paths.h: the paths that return answers.
#pragma once
#include <string>

namespace server {

constexpr const char *CHAT = "/v1/chat/completions", *COMPLETION = "/v1/completions", *RESPONSES = "/v1/responses",
                     *MESSAGES = "/v1/messages", *COUNT_TOKENS = "/v1/messages/count_tokens",
                     *EMBEDDINGS = "/v1/embeddings", *PREDICT = "/predict";

inline bool is_ranking(const std::string& path) {
    return path == "/v1/rerank" || path == "/v2/rerank" || path == "/rerank";
}
inline bool is_asked(const std::string& path) { // returns answers
    return path == CHAT || path == COMPLETION || path == RESPONSES || path == MESSAGES || path == EMBEDDINGS ||
           path == PREDICT || is_ranking(path);
}

} // namespace server
