// speech.h: from drawn ids to text: characters, stop strings, thoughts, calls, log-probabilities.
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

// The text of one answer. Characters are complete, what may become a stop string is held back, and so are a thought's
// last newlines; the markers around a thought are ids, never text that looks like them.
struct Speech {
    const Tokenizer& tokenizer;
    bool informed;                    // log-probabilities are wanted
    StopFilter filter;                // of the answer: a thought may say anything
    enum { BEGIN, THOUGHT, ANSWER, CALL } state;
    int open, close;                  // ids of <think> and </think>,
    int call_open, call_close;        // ... <tool_call> and </tool_call>
    std::shared_ptr<const std::set<std::string>> tools;
    bool sure_calls;
    CallText call{};                  // that is being said
    size_t calls = 0;                 // said
    Utf8Stream characters{};
    bool skipping = false;            // newlines after a marker
    std::string newlines{};           // at the end of a thought so far, or of what may come before a call
    bool specials;                    // they are text
    std::deque<TokenInfo> held{};     // their texts begin in the answer at byte `given`, or later
    size_t given = 0, shown = 0;      // bytes of the answer

    Speech(const Tokenizer& t, const Job& job);

    // Takes a token; `piece` gets what can be shown because of it.
    void feed(Piece& piece, TokenInfo&& info);

    // The answer is over: all that is left.
    void finish(Piece& piece);

  private:
    // A token of a call. The line breaks before and after it are not said.
    void say_call(Piece& piece, int id);
    // What should have been a call and is none.
    void take_as_text(Piece& piece, const char* end);
    std::string skip(std::string text);
    void show(Piece& piece, std::string text);
};

// A token and the likeliest ones in its place, with their log-probabilities. `logit`: its own, as the model made it.
TokenInfo describe(const Likeliest& row, int id, float logit);

} // namespace server
