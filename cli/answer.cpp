// cli/answer.cpp: generates an answer.
#include "cli/answer.h"
#include "base/error.h"
#include "base/options.h"
#include "cli/screen.h"
#include "search/grounding.h"
#include "search/quote.h"
#include <algorithm>

namespace cli {

std::vector<Source> add_passages(const Options& o, const Tokenizer& tokenizer, std::vector<Message>& messages,
                                 size_t context, size_t room, const std::vector<std::string>& tools) {
    if (!o.library || (o.quotes && !tools.empty())) return {};
    if (o.quotes) return find_passages(*o.library, messages);
    auto rendered = [&](const std::vector<Message>& m) {
        return render_chat(tokenizer, m, {o.think == 1, true}, tools).size();
    };
    auto measure = [&](std::string_view s) { return tokenizer.encode(s, false).size(); };
    return ::add_passages(*o.library, messages, context - std::min(context, room), rendered, measure);
}

void say_sources(const std::vector<Source>& sources) {
    if (sources.empty()) say("no passage of the documents was used");
    for (size_t i = 0; i < sources.size(); i++) say(format("[%zu] %s", i + 1, name_of(sources[i]).c_str()));
}

bool quote_passage(const Options& o, const Tokenizer* tokenizer, const std::vector<Source>& sources, size_t context,
                   Generation& g) {
    if (!o.quotes || sources.empty()) return false;
    Quote q = quote(sources[0], *tokenizer, context / 4, g.stops, g.max_tokens);
    g.text = std::move(q.text), g.ids = std::move(q.ids), g.finish = q.finish;
    return true;
}

size_t room_for_answer(const Options& o, size_t context) {
    return std::min(o.max_tokens >= 0 ? (size_t)o.max_tokens : context, context / 4);
}

void use_lookup(const Options& o, Conversation& session) {
    if (o.lookup > 0 && !session.can_look_up())
        DIE("--lookup %d: on a GPU it needs --one-kernel (bf16 weights and keys, room for a copy) or --invariant, or "
            "the answer could change", o.lookup);
    session.lookup().most = o.lookup >= 0 ? o.lookup : o.ctx.gpu && session.step_tokens() == 1 ? 0 : LookUp::MOST;
}

std::string told(const LookUp& lookup) {
    return lookup.proposed ? format(", %zu of %zu looked up were right", lookup.right, lookup.proposed) : "";
}

size_t feed_prompt(Conversation& session, const std::vector<int>& prompt) {
    const size_t most = std::min(session.ids().size(), prompt.size() - 1);
    size_t same = 0;
    while (same < most && prompt[same] == session.ids()[same]) same++;
    session.rewind(same);
    session.feed({prompt.begin() + (ptrdiff_t)same, prompt.end()}, &interrupted);
    return same;
}

void speak(Conversation& session, const Tokenizer* tokenizer, Generation& g, ThreadPace& pace,
           const std::function<void(std::string_view)>& show) {
    pace.begin();
    session.generate(tokenizer, g, [&](std::string_view text) {
        pace.end();
        show(text);
        pace.begin();
    });
    pace.end();
}

} // namespace cli
