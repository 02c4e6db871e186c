#include "model/chat_template.h"

const char* const QWEN3_JINJA = R"jinja({%- set last = namespace(query=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
    {%- set s = m.content if m.content is string else '' %}
    {%- if not last.found and m.role == 'user' and not (s.startswith('<tool_response>') and s.endswith('</tool_response>')) %}
        {%- set last.query = messages | length - 1 - loop.index0 %}
        {%- set last.found = true %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- for one in m.tool_calls %}
                {%- set call = one.function if one.function else one %}
                {%- if content or not loop.first %}
                    {{- '\n' }}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- call.name }}
                {{- '", "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %})jinja";

ChatText& ChatText::text(std::string_view s) {
    if (parts.empty() || parts.back().special) parts.push_back({false, ""});
    parts.back().text += s;
    return *this;
}

ChatText& ChatText::markup(std::string_view s) {
    static const std::string_view specials[] = {"<|im_start|>", "<|im_end|>", "<think>", "</think>",
        "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"};
    while (!s.empty()) {
        size_t n = 0;
        for (std::string_view name : specials)
            if (s.substr(0, name.size()) == name) n = name.size();
        if (n > 0) parts.push_back({true, std::string(s.substr(0, n))});
        else text(s.substr(0, 1));
        s.remove_prefix(n > 0 ? n : 1);
    }
    return *this;
}

std::pair<std::string_view, std::string_view> split_thought(const Message& m) {
    const std::string_view open = "<think>", close = "</think>";
    std::string_view content = m.content;
    if (m.reasoning) return {*m.reasoning, content};
    size_t first = content.find(close);
    if (first == content.npos) return {"", content};
    std::string_view thought = content.substr(0, first);
    if (size_t at = thought.rfind(open); at != thought.npos) thought.remove_prefix(at + open.size());
    content.remove_prefix(content.rfind(close) + close.size());
    return {strip_newlines(thought), skip_newlines(content)};
}

std::string in_quotes(std::string_view s) {
    std::string out;
    sj::quote(out, s.size() <= 40 ? s : "...");
    return out;
}

bool opens_thought(const Tokenizer& tokenizer, const std::vector<int>& prompt) {
    size_t n = prompt.size();
    while (n && tokenizer.bytes(prompt[n - 1]).find_first_not_of('\n') == std::string_view::npos) n--;
    return n && n < prompt.size() && prompt[n - 1] == tokenizer.id("<think>");
}

ChatText render(const std::vector<Message>& messages, const ChatOptions& options,
                const std::vector<std::string>& tools, const ChatStyle& style) {
    const size_t n = messages.size();
    if (n == 0) DIE("messages: a conversation needs at least one");
    auto is = [&](size_t i, const char* role) { return i < n && messages[i].role == role; };
    for (size_t i = 0; i < n; i++)
        if (!is(i, "system") && !is(i, "user") && !is(i, "assistant") && !is(i, "tool"))
            DIE("messages[%zu]: unknown role %s", i, in_quotes(messages[i].role).c_str());
    if (!style.system.empty() && !is(0, "system")) {
        std::vector<Message> all = {{"system", style.system}};
        all.insert(all.end(), messages.begin(), messages.end());
        return render(all, options, tools, style);
    }

    const bool may_be_continued = (is(n - 1, "user") || is(n - 1, "assistant")) && messages[n - 1].tool_calls.empty();
    if (options.continue_final && !may_be_continued)
        DIE("messages: only a last message of the user or the assistant, without tool calls, can be continued");

    ChatText out;
    if (!tools.empty()) {
        out.markup("<|im_start|>system\n");
        if (is(0, "system")) out.text(messages[0].content).markup("\n\n");
        out.markup("# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
                   "You are provided with function signatures within <tools></tools> XML tags:\n<tools>");
        for (auto& tool : tools) out.markup("\n").text(tool);
        out.markup("\n</tools>\n\n"
                   "For each function call, return a json object with function name and arguments within "
                   "<tool_call></tool_call> XML tags:\n<tool_call>\n"
                   "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"
                   "</tool_call><|im_end|>\n");
    } else if (is(0, "system")) {
        out.markup("<|im_start|>system\n").text(messages[0].content).markup("<|im_end|>\n");
    }

    // The last question written by a user, not a tool's answer sent in the user's name. Thoughts before it are left
    // out. Thoughts after it, between the assistant's calls that serve the answer, are kept.
    auto wraps_tool_response = [](std::string_view s) {
        const std::string_view open = "<tool_response>", close = "</tool_response>";
        return s.substr(0, open.size()) == open && s.size() >= close.size() &&
               s.substr(s.size() - close.size()) == close;
    };
    size_t last_query = n - 1;
    for (size_t i = n; i-- > 0;) {
        if (is(i, "user") && !wraps_tool_response(messages[i].content)) {
            last_query = i;
            break;
        }
    }

    for (size_t i = 0; i < n; i++) {
        const Message& m = messages[i];
        if (is(i, "user") || (is(i, "system") && i > 0)) {
            out.markup("<|im_start|>").text(m.role).markup("\n").text(m.content);
            if (options.continue_final && i == n - 1) return out;
            out.markup("<|im_end|>\n");
        } else if (is(i, "assistant")) {
            std::pair<std::string_view, std::string_view> both = {"", m.content}; // a thought is text like any
            if (style.thinks) both = split_thought(m);
            const auto [thought, content] = both;
            out.markup("<|im_start|>assistant\n");
            if (style.thinks && i > last_query && (i == n - 1 || !thought.empty())) {
                out.markup("<think>\n").text(strip_newlines(thought)).markup("\n</think>\n\n");
                out.text(skip_newlines(content));
            } else {
                out.text(content);
            }
            if (options.continue_final && i == n - 1) return out;
            bool newline = !content.empty();
            for (auto& call : m.tool_calls) {
                if (newline) out.text("\n");
                out.markup("<tool_call>\n{\"name\": \"").text(call.name);
                out.markup("\", \"arguments\": ").text(call.arguments).markup("}\n</tool_call>");
                newline = true;
            }
            out.markup("<|im_end|>\n");
        } else if (is(i, "tool")) {         // neighbours share one turn of the user
            if (i == 0 || !is(i - 1, "tool")) out.markup("<|im_start|>user");
            out.markup("\n<tool_response>\n").text(m.content).markup("\n</tool_response>");
            if (!is(i + 1, "tool")) out.markup("<|im_end|>\n");
        }
    }
    if (options.generation_prompt) {
        out.markup("<|im_start|>assistant\n");
        if (style.thinks && !style.thinking(options.thinking)) out.markup("<think>\n\n</think>\n\n");
        else if (style.opens) out.markup("<think>\n");
    }
    return out;
}

std::string render_text(const std::vector<Message>& messages, const ChatOptions& options,
                        const std::vector<std::string>& tools) {
    std::string all;
    for (auto& part : render(messages, options, tools).parts) all += part.text;
    return all;
}

std::vector<int> render_chat(const Tokenizer& tokenizer, const std::vector<Message>& messages,
                             const ChatOptions& options,
                             const std::vector<std::string>& tools) {
    std::vector<int> ids;
    for (auto& part : render(messages, options, tools, tokenizer.chat).parts) {
        if (part.special) {
            const int id = tokenizer.id(part.text);
            if (id < 0) DIE("the chat template needs %s, which the tokenizer has not", part.text.c_str());
            ids.push_back(id);
        } else {
            tokenizer.encode(ids, part.text, false);
        }
    }
    return ids;
}

uint64_t template_hash() {
    std::vector<Message> messages = {
        {"system", "s"}, {"user", "u"}, {"assistant", "<think>\nt\n</think>\n\na"}, {"system", "s"},
        {"user", "u"}, {"assistant", "a", "\nt\n", {{"f", "{}"}, {"g", "{}"}}}, {"tool", "r"}, {"tool", "r"},
        {"user", "<tool_response>r</tool_response>"}, {"assistant", "", "", {{"f", "{}"}}}, {"tool", "r"},
        {"assistant", "a"}};
    uint64_t hash = 0xCBF29CE484222325;
    for (bool thinking : {false, true})
        for (auto& tools : {std::vector<std::string>{}, {"{}", "{}"}})
            for (char c : render_text(messages, {thinking, true}, tools))
                hash = (hash ^ uint8_t(c)) * 0x100000001B3;
    return hash;
}

// Text, or OpenAI's list of parts. where: "messages[3].content", for the error.
static std::string content_from_json(sj::Value v, const std::string& where) {
    if (v.is(sj::String)) return v.str();
    if (!v) DIE("%s: missing", where.c_str());
    if (!v.is(sj::Array)) DIE("%s: neither a string nor a list of parts", where.c_str());
    std::string all;
    size_t i = 0;
    for (sj::Value part : v.items()) {
        std::string at = where + "[" + std::to_string(i++) + "]", type = part["type"].str();
        if (type != "text")
            DIE("%s: type %s is not supported, only \"text\"", at.c_str(), in_quotes(type).c_str());
        if (!part["text"].is(sj::String)) DIE("%s: a part without text", at.c_str());
        all += part["text"].str();
    }
    return all;
}

ToolCall tool_call_from_json(sj::Value v, const std::string& where) {
    sj::Value call = v["function"].size() ? v["function"] : v, arguments = call["arguments"];
    if (!call["name"].is(sj::String)) DIE("%s: a tool call without a name", where.c_str());
    if (!arguments) DIE("%s: a tool call without arguments", where.c_str());
    return {call["name"].str(), arguments.is(sj::String) ? arguments.str() : sj::dump(arguments)};
}

Message message_from_json(sj::Value turn, const std::string& role, sj::Value content, const std::string& where) {
    auto absent = [](sj::Value v) { return !v || v.is(sj::Null); };
    Message m{role, ""};
    const bool assistant = role == "assistant";
    if (!assistant || !absent(content)) m.content = content_from_json(content, where + ".content");
    if (!assistant) return m; // the original does not look at the others
    const sj::Value reasoning = turn["reasoning_content"], calls = turn["tool_calls"];
    if (!absent(reasoning)) {
        if (!reasoning.is(sj::String)) DIE("%s.reasoning_content: not a string", where.c_str());
        m.reasoning = reasoning.str();
    }
    if (absent(calls)) return m;
    if (!calls.is(sj::Array)) DIE("%s.tool_calls: not a list", where.c_str());
    for (sj::Value call : calls.items())
        m.tool_calls.push_back(
            tool_call_from_json(call, where + ".tool_calls[" + std::to_string(m.tool_calls.size()) + "]"));
    return m;
}

std::vector<Message> messages_from_json(sj::Value list) {
    if (!list.is(sj::Array)) DIE("messages: not a list");
    std::vector<Message> messages;
    for (sj::Value v : list.items()) {
        const std::string where = "messages[" + std::to_string(messages.size()) + "]";
        if (!v["role"].is(sj::String)) DIE("%s: no role", where.c_str());
        messages.push_back(message_from_json(v, v["role"].str(), v["content"], where));
    }
    return messages;
}

std::vector<std::string> tools_from_json(sj::Value list) {
    std::vector<std::string> tools;
    if (!list || list.is(sj::Null)) return tools;
    if (!list.is(sj::Array)) DIE("tools: not a list");
    for (sj::Value v : list.items()) {
        if (!v.is(sj::Object)) DIE("tools[%zu]: not an object", tools.size());
        tools.push_back(sj::dump(v));
    }
    return tools;
}
