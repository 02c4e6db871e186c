// model/chat_template.h: a conversation -> the ids that Qwen3 was trained on, as in Qwen's chat_template.jinja.
//
//   std::vector<int> ids = render_chat(tokenizer, {{"system", "Be brief."}, {"user", "Hello!"}});
//   ids = render_chat(tokenizer, messages_from_json(v["messages"]), {}, tools_from_json(v["tools"]));
//
// Templates of the same family (model/chat_style.h) are followed too, by the tokenizer's `chat`.
// Text and ids are those of Hugging Face's apply_chat_template, byte for byte, with one difference: special tokens
// (<|im_end|>, <think>, <tool_call>, ...) come from the template only. A caller's text never becomes one: a caller who
// could write <|im_end|> could write the system's or the assistant's words too. The think markers in an assistant's
// content are no exception: they are parsed as text, and the template writes its own.
//
// Refused (Error, one line), or different on purpose:
//   - a role other than system, user, assistant, tool: the original silently drops such a message, and the
//     answer would belong to another conversation;
//   - content must be a string, or OpenAI's list of {"type": "text"} parts, which are joined; an assistant's
//     may be null or missing, as OpenAI's clients send it beside tool calls: "" (the original fails);
//   - a tool call needs a name and arguments, a tool must be an object.
#pragma once
#include "model/tokenizer.h"
#include "sj.h"

struct ToolCall {
    std::string name;
    std::string arguments;                  // JSON, written as it is
};

struct Message {
    std::string role;                       // system, user, assistant or tool
    std::string content;                    // an assistant's may begin with <think>...</think>
    std::optional<std::string> reasoning{}; // the assistant's reasoning, if it is not in content
    std::vector<ToolCall> tool_calls{};     // the assistant's
};

struct ChatOptions {
    bool thinking = false;                  // may the answer begin with a thought?
    bool generation_prompt = true;          // end where the assistant's next answer begins
    bool continue_final = false;            // end after the last message's text, so that the answer goes on with it
};

// The same as a Jinja template, for a file whose readers need one and whose model has none of its own.
extern const char* const QWEN3_JINJA;

// A rendered conversation: runs of plain text with special tokens between them. Plain text of the template
// and of the caller is joined, since it is tokenized as one: "user\n" + "\nx" holds the single token "\n\n".
struct ChatText {
    struct Part {
        bool special;
        std::string text;
    };
    std::vector<Part> parts;

    // The caller's text: all of it plain.
    ChatText& text(std::string_view s);

    // The template's own text: the names of special tokens in it are tokens.
    ChatText& markup(std::string_view s);
};

// Python's s.lstrip('\n') and s.strip('\n').
inline std::string_view skip_newlines(std::string_view s) {
    return s.substr(std::min(s.find_first_not_of('\n'), s.size()));
}
inline std::string_view strip_newlines(std::string_view s) {
    return skip_newlines(s.substr(0, s.find_last_not_of('\n') + 1));
}

// An assistant's thought and answer. If content holds both, it is split as the original does: the thought is the text
// before the first </think>, from the last <think> in it on; the answer follows the last </think>.
std::pair<std::string_view, std::string_view> split_thought(const Message& m);

// A caller's text, shortened for a line of error.
std::string in_quotes(std::string_view s);

// Whether an answer to this prompt may begin with a thought.
inline bool may_think(const Tokenizer& t, const ChatOptions& o) {
    return !o.continue_final && t.chat.thinking(o.thinking);
}
// Whether the prompt has opened the thought: it ends in <think> and a newline.
bool opens_thought(const Tokenizer& tokenizer, const std::vector<int>& prompt);

// The template, branch by branch in the order of the original, in the style of the model's own.
ChatText render(const std::vector<Message>& messages, const ChatOptions& options,
                const std::vector<std::string>& tools, const ChatStyle& style = {});

// The conversation as text, for display and hashes: tokenizing it would make special tokens of a caller's text.
std::string render_text(const std::vector<Message>& messages, const ChatOptions& options = {},
                        const std::vector<std::string>& tools = {});

// The conversation as ids, in the tokenizer's style. tools: JSON texts, one a tool.
std::vector<int> render_chat(const Tokenizer& tokenizer, const std::vector<Message>& messages,
                             const ChatOptions& options = {},
                             const std::vector<std::string>& tools = {});

// A name for this template, kept in datasets: FNV-1a 64 of a conversation that passes through every branch.
uint64_t template_hash();

// ------------------------------------------------------------------------------------------------- from JSON

// OpenAI's {"function": {"name", "arguments"}}, or the inner object alone. Arguments are a string with JSON
// in it, or the JSON itself.
ToolCall tool_call_from_json(sj::Value v, const std::string& where);

// A message whose role has been read: its content; for the assistant also `reasoning_content` and `tool_calls`. where:
// "messages[3]", for the error.
Message message_from_json(sj::Value turn, const std::string& role, sj::Value content, const std::string& where);

// [{"role", "content", "reasoning_content"?, "tool_calls"?}, ...]; other keys (tool_call_id) are ignored.
std::vector<Message> messages_from_json(sj::Value list);

// [{"type": "function", "function": {...}}, ...] -> each as Python's json.dumps writes it.
std::vector<std::string> tools_from_json(sj::Value list);
