// book/conversations.h: reads rows of the usual datasets as conversations, texts and preferences.
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

// Where a row of any of the usual datasets has its parts: LLaMA-Factory's names of columns and tags, each with the key
// that rows use. Its dataset_info.json may give other keys; then a column that it does not map ("") is not read.
struct Layout {
    std::string formatting; // alpaca, sharegpt or openai; "": detected per row
    bool ranking = false;   // with a formatting: rows are preferences
    std::map<std::string, std::string> name = {
        {"prompt", "instruction"}, {"query", "input"}, {"response", "output"}, {"system", "system"},
        {"history", "history"}, {"messages", "conversations"}, {"tools", "tools"}, {"role_tag", "from"},
        {"content_tag", "value"}, {"user_tag", "human"}, {"assistant_tag", "gpt"}, {"observation_tag", "observation"},
        {"function_tag", "function_call"}, {"system_tag", "system"}, {"chosen", "chosen"}, {"rejected", "rejected"},
        {"kto_tag", "kto_tag"}};
    Layout(); // (in the .cpp file, as the map above is much code at every `= {}`)
    ~Layout();

    bool shown() const { return formatting.empty(); }
    // A row's column; Missing if it is null or not mapped.
    sj::Value column(sj::Value row, const char* column) const;
    // The columns read for a kind of rows (Conversation's or Preference's), each with its key.
    std::vector<std::pair<std::string, std::string>> columns_of(const std::string& kind, bool pair) const;
};

struct Conversation {
    std::vector<Message> messages; // the last is the assistant's
    Strings tools;
    std::string kind;              // alpaca, openai (turns with role and content) or sharegpt
    std::string question, answer;  // all of the user's text, all of the assistant's
    std::map<std::string, std::set<std::string>> tags; // names of the turns' roles, by tag: user_tag: human
};

inline bool is_absent(sj::Value v) { return !v || v.is(sj::Null); }

Conversation read_conversation(sj::Value v, const Layout& layout = {});

// The conversation of the current row; a bad row ends the program.
Conversation need_conversation(const Reader& in, const Layout& layout = {});

// A conversation whose last answer serves as the reference for another one.
struct Question {
    std::vector<Message> messages; // up to the question
    Strings tools;
    std::string question, reference;
};
Question read_question(sj::Value v);

// Whether a message is empty apart from a thought. A tool call counts as content.
bool is_wordless(const Message& m);

// Whether it is a row of plain text: {"text": ...}, or with a dataset_info.json a prompt without a response column.
bool is_text(sj::Value v, const Layout& layout);
std::string read_text(sj::Value v, const Layout& layout);

// A preference: two answers to one prompt. LLaMA-Factory's rows are a conversation without its last answer, with
// `chosen` and `rejected` beside it: each a text, or one message. TRL's rows have `prompt`, `chosen` and `rejected`,
// all lists of messages, or all texts, which TRL continues without a chat template (kind "text"). Without `prompt` each
// list is a whole conversation, and the two differ in their last message.
struct Preference {
    std::vector<Message> prompt;
    Message chosen, rejected;
    Strings tools;
    std::string kind; // alpaca, openai or sharegpt as read by LLaMA-Factory; trl or text
    std::map<std::string, std::set<std::string>> tags; // as in a Conversation
};

// A conversation with a label for KTO: whether its last answer is desirable.
bool is_labelled(sj::Value v, const Layout& layout);
bool read_label(sj::Value v, const Layout& layout);

bool is_preference(sj::Value v, const Layout& layout);
Preference read_preference(sj::Value v, const Layout& layout);

} // namespace book
