// conversation.h: a chat's messages from JSON: results of tools belong to calls by their ids, and come in the order of
// these, since Qwen3's template shows no ids.
#pragma once
#include "model/chat_template.h"
#include "sj.h"
#include <vector>

namespace server {

// Throws Error: a result of no call, two thoughts that differ, fields of an assistant's message that would be lost.
std::vector<Message> conversation_from_json(sj::Value list);

} // namespace server
