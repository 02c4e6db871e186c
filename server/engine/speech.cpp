// speech.cpp: the text that a token makes visible.
#include "server/engine/speech.h"
#include "model/chat_template.h"
#include <algorithm>
#include <utility>

namespace server {

Speech::Speech(const Tokenizer& t, const Job& job)
    : tokenizer(t), informed(job.alternatives >= 0), filter{job.stops, "", false},
      state(!job.thinking ? ANSWER : opens_thought(t, job.prompt) ? THOUGHT : BEGIN), open(t.id("<think>")),
      close(t.id("</think>")),
      call_open(t.id(CALL_OPEN)), call_close(t.id(CALL_CLOSE)), tools(job.tools), sure_calls(job.sure_calls),
      specials(job.specials) {
    if (job.min_tokens) filter.stops.clear(); // none until then
    skipping = state == THOUGHT;
}

void Speech::feed(Piece& piece, TokenInfo&& info) {
    const int id = info.id;
    if (state == BEGIN) {
        state = id == open ? THOUGHT : ANSWER;
        if (state == THOUGHT) { skipping = true; return; }
    }
    piece.thought = state == THOUGHT;
    if (state == THOUGHT && id == close) {
        show(piece, characters.flush());
        newlines.clear();
        state = ANSWER, skipping = true;
        return;
    }
    if (state == CALL) return say_call(piece, id);
    if (state == ANSWER && tools && id == call_open) {
        show(piece, filter.feed(characters.flush()));
        if (filter.stopped) return;
        show(piece, filter.flush());
        state = CALL, call = {};
        return;
    }
    info.text = tokenizer.is_special(id) && !specials ? "" : skip(characters.feed(tokenizer.bytes(id)));
    const std::string out = state == THOUGHT ? info.text : filter.feed(info.text);
    if (informed && state == ANSWER) held.push_back(std::move(info));
    show(piece, out);
}

void Speech::finish(Piece& piece) {
    piece.thought = state == THOUGHT;
    if (state == CALL) { // the call was cut off
        if (!sure_calls) take_as_text(piece, "");
        else characters.flush();
        state = ANSWER;
    }
    const std::string tail = skip(characters.flush());
    if (!held.empty()) held.back().text += tail;
    show(piece, state == THOUGHT ? tail : filter.feed(tail) + filter.flush());
    for (TokenInfo& t : held) { // tokens cut off by a stop string are not reported
        if (filter.stopped && given >= shown) break;
        const size_t length = std::min(t.text.size(), shown - given);
        given += length, t.text.resize(length);
        piece.tokens.push_back(std::move(t));
    }
    held.clear();
    if (state != THOUGHT && !filter.stopped) piece.text += std::exchange(newlines, {});
}

void Speech::say_call(Piece& piece, int id) {
    if (id != call_close) {
        call.text += characters.feed(tokenizer.bytes(id));
        if (sure_calls) call.tell(piece.calls);
        return;
    }
    call.text += characters.flush();
    state = ANSWER;
    if (!sure_calls && !call.read(*tools, piece.calls)) return take_as_text(piece, CALL_CLOSE);
    newlines.clear(), skipping = true;
    calls++;
}

void Speech::take_as_text(Piece& piece, const char* end) {
    state = ANSWER;
    show(piece, filter.feed(CALL_OPEN + call.text + end));
}

std::string Speech::skip(std::string text) {
    if (skipping) text.erase(0, std::min(text.find_first_not_of('\n'), text.size()));
    skipping = skipping && text.empty();
    return text;
}

void Speech::show(Piece& piece, std::string text) {
    if (state == THOUGHT || tools) {
        text.insert(0, std::exchange(newlines, {}));
        const size_t end = text.find_last_not_of('\n') + 1; // 0: nothing but newlines
        newlines = text.substr(end);
        piece.text += text.substr(0, end);
        return;
    }
    piece.text += text;
    shown += text.size();
    // Reports tokens whose text is out. Tokens that may get more text, from an incomplete character, wait.
    size_t end = given, ready = 0, sure = held.size() - (!held.empty() && !characters.held.empty());
    for (size_t i = 0; i < sure && (end += held[i].text.size()) <= shown; i++)
        if (!held[i].text.empty()) ready = i + 1;
    for (; ready > 0; ready--) {
        given += held.front().text.size();
        piece.tokens.push_back(std::move(held.front()));
        held.pop_front();
    }
}

TokenInfo describe(const Likeliest& row, int id, float logit) {
    auto logprob = [&](float logit) { // OpenAI's value for "never", which keeps it valid JSON
        const float l = usable(logit) - row.log_sum;
        return l > -9999 ? l : -9999.f;
    };
    TokenInfo info{id, logprob(logit), "", {}};
    for (int i = 0; i < row.count; i++) info.top.push_back({row.id[i], logprob(row.logit[i])});
    return info;
}

} // namespace server
