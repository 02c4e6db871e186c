// speech.h: from sampled ids to text: characters, stop strings, thoughts, calls, log-probabilities.
#pragma once
#include "form/tools.h"
#include "model/stop_filter.h"
#include "model/tokenizer.h"
#include "model/utf8.h"
#include "qwen3.cu"
#include "server/engine/job.h"
#include "server/engine/reply.h"
#include <deque>
#include <memory>
#include <set>
#include <string>

namespace server {

// The text of one answer. Characters are complete; a possible stop string is held back, and so are a thought's last
// newlines. The markers around a thought are ids, never text that looks like them.
struct Speech {
    const Tokenizer& tokenizer;
    bool informed;                    // log-probabilities are requested
    StopFilter filter;                // for the answer: a thought may contain stop strings
    enum { BEGIN, THOUGHT, ANSWER, CALL } state;
    int open, close;                  // ids of <think> and </think>,
    int call_open, call_close;        // ... <tool_call> and </tool_call>
    std::shared_ptr<const std::set<std::string>> tools;
    bool sure_calls;
    CallText call{};                  // in progress
    size_t calls = 0;                 // completed
    Utf8Stream characters{};
    bool skipping = false;            // skips newlines after a marker
    std::string newlines{};           // at the end of the thought so far, or of text before a possible call
    bool specials;                    // special tokens are text
    std::deque<TokenInfo> held{};     // not yet reported; their texts begin in the answer at byte `given`, or later
    size_t given = 0, shown = 0;      // bytes of the answer

    Speech(const Tokenizer& t, const Job& job);

    // Takes a token; adds the text that it makes visible to `piece`.
    void feed(Piece& piece, TokenInfo&& info);

    // The answer is over: adds the rest.
    void finish(Piece& piece);

  private:
    // A token of a call. The line breaks around a call are dropped.
    void say_call(Piece& piece, int id);
    // Turns an invalid call into text.
    void take_as_text(Piece& piece, const char* end);
    std::string skip(std::string text);
    void show(Piece& piece, std::string text);
};

// A token and its likeliest alternatives, with log-probabilities. `logit`: the token's own, before adjustments.
TokenInfo describe(const Likeliest& row, int id, float logit);

} // namespace server
