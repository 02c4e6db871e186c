// book/conversations.h: rows of the usual datasets read as conversations, texts and preferences.
#pragma once
#include "book/rows.h"
#include "book/text.h"
#include "model/chat_template.h"
#include "sj.h"
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace book {

// Where a row of any of the usual datasets has its parts. LLaMA-Factory's names of columns and tags, each with the key
// that rows use; its dataset_info.json may give others, and then a column that it does not map ("") is not read.
struct Layout {
    std::string formatting; // alpaca, sharegpt or openai; "": each row shows what it is
    bool ranking = false;   // with a formatting: rows are preferences
    std::map<std::string, std::string> name = {
        {"prompt", "instruction"}, {"query", "input"}, {"response", "output"}, {"system", "system"},
        {"history", "history"}, {"messages", "conversations"}, {"tools", "tools"}, {"role_tag", "from"},
        {"content_tag", "value"}, {"user_tag", "human"}, {"assistant_tag", "gpt"}, {"observation_tag", "observation"},
        {"function_tag", "function_call"}, {"system_tag", "system"}, {"chosen", "chosen"}, {"rejected", "rejected"}};
    Layout(); // (apart, as the map above is much code at every `= {}`)
    ~Layout();

    bool shown() const { return formatting.empty(); }
    // A row's column; Missing if it is null or not mapped.
    sj::Value column(sj::Value row, const char* column) const;
    // The columns that rows of a kind (Conversation's or Preference's) are read from, each with its key.
    std::vector<std::pair<std::string, std::string>> columns_of(const std::string& kind, bool pair) const;
};

struct Conversation {
    std::vector<Message> messages; // the last is the assistant's
    Strings tools;
    std::string kind;              // alpaca, openai (turns with role and content) or sharegpt
    std::string question, answer;  // all that the user said, all that the assistant said
    std::map<std::string, std::set<std::string>> tags; // names of roles that turns have, by tag: user_tag: human
};

inline bool is_absent(sj::Value v) { return !v || v.is(sj::Null); }

Conversation read_conversation(sj::Value v, const Layout& layout = {});

// The row that was read, where a bad one ends the program.
Conversation need_conversation(const Reader& in, const Layout& layout = {});

// A conversation whose last answer is a reference for another one.
struct Question {
    std::vector<Message> messages; // up to the question
    Strings tools;
    std::string question, reference;
};
Question read_question(sj::Value v);

// Does a message say nothing, a thought aside? A call of a tool is something.
bool is_wordless(const Message& m);

// A row of plain text: {"text": ...}, or with a dataset_info.json a prompt where no column is the response.
bool is_text(sj::Value v, const Layout& layout);
std::string read_text(sj::Value v, const Layout& layout);

// A preference: two answers to one prompt. LLaMA-Factory's rows are a conversation that lacks its last answer, with
// `chosen` and `rejected` beside it: a text, or one message. TRL's have `prompt`, `chosen` and `rejected`, all of them
// lists of messages, or all of them texts, which TRL continues without a chat template (kind "text"). Without `prompt`
// each list is a whole conversation, and the two differ in their last message.
struct Preference {
    std::vector<Message> prompt;
    Message chosen, rejected;
    Strings tools;
    std::string kind; // alpaca, openai or sharegpt as LLaMA-Factory reads them; trl or text
    std::map<std::string, std::set<std::string>> tags; // as a Conversation's
};

bool is_preference(sj::Value v, const Layout& layout);
Preference read_preference(sj::Value v, const Layout& layout);

} // namespace book
