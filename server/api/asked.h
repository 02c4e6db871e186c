// asked.h: the ways to ask for an answer and to be told it: chats and completions, OpenAI's Responses
// (/v1/responses), Anthropic's Messages (/v1/messages), vectors and rankings, a course's /predict. A request of another
// dialect becomes the body of a chat completion, which request.h reads and checks; the pieces of its answer become
// items, whole or as events. Nothing is kept from one request to the next.
//
// What the documents of the dialects have and is not done here is refused by name; so is every field that is in none.
#pragma once
#include "server/api/answer.h"
#include "server/api/request.h"
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace server {

// The body of a request to one of these, and how it will be answered.
struct Asked {
    Ask ask;
    std::unique_ptr<Answer> answer;
};
Asked read_asked(const Service& service, const std::string& path, std::string_view body, uint64_t salt);

// {"input_tokens"} of what would be a message; all else of the request must be right, too.
std::string count_message_tokens(const Service& service, std::string_view body);

} // namespace server
