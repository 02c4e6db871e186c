// book/conversations.h: rows of the usual datasets read as conversations and preferences.
#pragma once
#include "book/rows.h"
#include "book/text.h"
#include "model/chat_template.h"
#include "sj.h"
#include <map>
#include <string>
#include <vector>

namespace book {

// A row of any of the usual datasets. LLaMA-Factory's names; its dataset_info.json may give others.
struct Layout {
    std::string formatting; // alpaca or sharegpt; "": each row shows what it is
    std::map<std::string, std::string> name = {
        {"prompt", "instruction"}, {"query", "input"}, {"response", "output"}, {"system", "system"},
        {"history", "history"}, {"messages", "conversations"}, {"tools", "tools"}, {"role_tag", "from"},
        {"content_tag", "value"}, {"user_tag", "human"}, {"assistant_tag", "gpt"}, {"observation_tag", "observation"},
        {"function_tag", "function_call"}, {"system_tag", "system"}, {"chosen", "chosen"}, {"rejected", "rejected"}};
    Layout(); // (apart, as the map above is much code at every `= {}`)
    ~Layout();
};
struct Conversation {
    std::vector<Message> messages; // the last is the assistant's
    Strings tools;
    std::string kind;              // alpaca, openai or sharegpt
    std::string question, answer;  // all that the user said, all that the assistant said
};

inline bool is_absent(sj::Value v) { return !v || v.is(sj::Null); }

Conversation read_conversation(sj::Value v, const Layout& layout = {});

// The row that was read, where a bad one ends the program.
Conversation need_conversation(const Reader& in, const Layout& layout = {});

// A preference: two answers to one prompt. LLaMA-Factory's rows are a conversation that lacks its last answer, with
// `chosen` and `rejected` beside it: a text, or one message. TRL's have `prompt`, `chosen` and `rejected`, all of them
// lists of messages, or all of them texts, which TRL continues without a chat template (kind "text"). Without `prompt`
// each list is a whole conversation, and the two differ in their last message.
struct Preference {
    std::vector<Message> prompt;
    Message chosen, rejected;
    Strings tools;
    std::string kind; // alpaca, openai or sharegpt as LLaMA-Factory reads them; trl or text
};

bool is_preference(sj::Value v, const Layout& layout);
Preference read_preference(sj::Value v, const Layout& layout);

} // namespace book
