// cli/saved_chat.h: a conversation as a file.
#pragma once
#include "model/chat_template.h"
#include <string>
#include <vector>

namespace cli {

// A conversation as a file: {"system": "...", "think": false, "messages": [{"role": "user", "content": "..."}, ...]},
// OpenAI's messages.
struct SavedChat {
    std::string system;
    int think = -1; // 0, 1; -1: it does not say
    std::vector<Message> messages; // question, answer, question, answer, ...

    // Any JSON with such messages; a first message of the system is the system prompt.
    static SavedChat read(const std::string& path);
    std::string text() const;

    // ---- Those that the state folder keeps: chat-YYYYMMDD-HHMMSS.json.

    // Their names without .json, the newest first.
    static std::vector<std::string> kept();
    static std::string new_name();
    // The file named by the user: an existing file, or a kept one, by its name or its number in the list.
    static std::string find(const std::string& word);
    static std::string list();
};

} // namespace cli
