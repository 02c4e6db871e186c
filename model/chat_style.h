// model/chat_style.h: how a model's own chat template differs from Qwen3's, read from its Jinja text.
//
// Templates of the Qwen3 family write the same texts (the literals in {{ }}); they differ in thoughts and in a default
// system prompt. These differences are followed. `strange` reports a template that writes other texts.
//     Qwen3                  thinks, can_be_off
//     Qwen3-Instruct-2507    nothing: it never thinks
//     Qwen3-Thinking-2507    thinks, opens: its prompts end in <think>
#pragma once
#include <string>
#include <string_view>

struct ChatStyle {
    bool thinks = true;      // an answer may begin with a thought
    bool can_be_off = true;  // ... unless enable_thinking is false: then the prompt has an empty one
    bool opens = false;      // the prompt ends in <think>: an answer is a thought from its first token on
    std::string system{};    // written where the conversation has no system prompt
    std::string strange{};   // the first text of the template that Qwen3's family does not write

    // Reads the text of a chat_template.jinja; "": Qwen3's own.
    static ChatStyle of(std::string_view jinja);
    // Whether answers think: the user's choice if the template leaves it open.
    bool thinking(bool asked) const { return thinks && (asked || !can_be_off); }
};
