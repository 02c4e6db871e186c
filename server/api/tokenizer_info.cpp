#include "server/api/tokenizer_info.h"
#include "model/chat_template.h"
#include "sj.h"

namespace server {

// lm-evaluation-harness renders templates so that a name without a value is an error. Qwen's and ours test `tools` and a
// message's `tool_calls` without asking first whether they are defined. The changed template renders the same texts.
static std::string strict(std::string jinja) {
    for (const std::string name : {"message.tool_calls", "m.tool_calls"}) {
        const std::string tests = "if " + name + " ", asks = "if " + name + " is defined and " + name + " ";
        for (size_t at = 0; (at = jinja.find(tests, at)) != std::string::npos; at += asks.size())
            jinja.replace(at, tests.size(), asks);
    }
    return "{%- set tools = tools | default(none) %}\n" + jinja;
}

std::string tokenizer_info(const ModelFile& file, const Tokenizer& tokenizer) {
    const std::vector<int>& ends = file.config.end_tokens;
    const int text_end = tokenizer.id("<|endoftext|>"), turn_end = tokenizer.id("<|im_end|>");
    sj::Writer w;
    auto token = [&](const char* name, int id) {
        if (const std::string_view text = tokenizer.bytes(id); !text.empty()) w.field(name, std::string(text));
        else w.field(name, nullptr);
    };
    w.object().field("tokenizer_class", "Qwen2Tokenizer").field("model_max_length", file.config.max_positions);
    token("bos_token", -1); // no token goes before a text
    token("eos_token", ends.empty() ? turn_end : ends[0]);
    token("pad_token", text_end);
    token("unk_token", -1);
    w.field("chat_template", strict(file.chat_template.empty() ? QWEN3_JINJA : file.chat_template));
    return w.end().text;
}

} // namespace server
