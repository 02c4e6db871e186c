// model/chat_style.cpp: reads from a Jinja template its texts, its handling of thoughts and its default system prompt.
#include "model/chat_style.h"
#include "base/text.h"
#include <set>
#include <vector>

// The string literals in {{ }}, with their escapes resolved.
static std::vector<std::string> literals_of(std::string_view jinja) {
    std::vector<std::string> all;
    for (size_t at = 0; (at = jinja.find("{{", at)) != jinja.npos; at++) {
        char quote = 0; // that the literal began with
        std::string text;
        for (at += 2; at < jinja.size() && (quote || jinja.substr(at, 2) != "}}"); at++) {
            const char c = jinja[at];
            if (!quote && (c == '"' || c == '\'')) quote = c, text.clear();
            else if (!quote) continue;
            else if (c == quote) quote = 0, all.push_back(text);
            else if (c != '\\' || at + 1 == jinja.size()) text += c;
            else if (const char next = jinja[++at]; next == 'n' || next == 't') text += next == 'n' ? '\n' : '\t';
            else text += next;
        }
    }
    return all;
}

ChatStyle ChatStyle::of(std::string_view jinja) {
    ChatStyle style;
    if (jinja.empty()) return style;
    static const std::set<std::string_view> known = {
        "", "\n", "\n\n", "role", "content", "function", "name", "arguments", "reasoning_content",
        "<|im_start|>", "<|im_end|>", "<|im_end|>\n", "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>user",
        "<|im_start|>assistant\n", "<think>", "</think>", "<think>\n", "\n<think>\n", "\n</think>\n\n",
        "<think>\n\n</think>\n\n", "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>",
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>",
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
        "<args-json-object>}\n</tool_call><|im_end|>\n",
        "<tool_call>\n{\"name\": \"", "\n<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>",
        "\n<tool_response>\n", "\n</tool_response>"};
    const std::string_view head = "<|im_start|>system\n", tail = "<|im_end|>\n";
    const std::vector<std::string> all = literals_of(jinja);
    for (const std::string& s : all)
        if (s.size() > head.size() + tail.size() && s.compare(0, head.size(), head) == 0 && ends_in(s, tail) &&
            style.system.empty())
            style.system = s.substr(head.size(), s.size() - head.size() - tail.size());
    for (const std::string& s : all) {
        const bool of_system = !style.system.empty() && (s == style.system || s == style.system + "\n\n" ||
                                                         s == std::string(head) + style.system ||
                                                         s == std::string(head) + style.system + std::string(tail));
        if (style.strange.empty() && !known.count(s) && !of_system) style.strange = s;
    }
    if (style.strange.empty() && jinja.find("<|im_start|>") == jinja.npos) style.strange = jinja;
    const size_t prompt = std::min(jinja.rfind("add_generation_prompt"), jinja.size());
    const std::string_view end = jinja.substr(prompt); // start of the generation prompt
    style.thinks = jinja.find("<think>") != jinja.npos;
    style.can_be_off = end.find("enable_thinking") != end.npos;
    for (const std::string& s : literals_of(end)) {
        style.opens |= ends_in(s, "<think>\n");
        if (!style.can_be_off && ends_in(s, "</think>\n\n")) style.strange = s; // an empty thought, always
    }
    return style;
}
