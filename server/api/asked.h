// asked.h: one entry for all APIs: chats and completions, OpenAI's Responses (/v1/responses), Anthropic's Messages
// (/v1/messages), vectors and rankings, a course's /predict. A request in another dialect is translated to the body of
// a chat completion, which request.h reads and checks; the pieces of its answer become items, whole or as events. No
// state is kept between requests.
//
// A field that a dialect documents but this server lacks is refused by name, and so is an unknown field.
#pragma once
#include "server/api/answer.h"
#include "server/api/request.h"
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace server {

// The parsed body of a request, and the object that formats its answer.
struct Asked {
    Ask ask;
    std::unique_ptr<Answer> answer;
};
Asked read_asked(const Service& service, const std::string& path, std::string_view body, uint64_t salt);

// {"input_tokens"} of a message request. The rest of the request must be valid, too.
std::string count_message_tokens(const Service& service, std::string_view body);

} // namespace server
