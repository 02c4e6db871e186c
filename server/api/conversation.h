// conversation.h: a chat's messages from JSON. Tool results are matched to calls by id and sorted by call, since
// Qwen3's template shows no ids.
#pragma once
#include "model/chat_template.h"
#include "sj.h"
#include <vector>

namespace server {

// Throws Error: a result without a call, two different thoughts, assistant fields that would be lost.
std::vector<Message> conversation_from_json(sj::Value list);

} // namespace server
