// cli/chat.h: qwen3 without -i, a conversation in a terminal or over pipes.
#pragma once
#include "cli/answer.h"
#include "cli/commands.h"
#include "cli/editor.h"
#include "cli/options.h"
#include "cli/prompt_cache.h"
#include "model/chat_template.h"
#include "model/loaded.h"
#include "model/pace.h"
#include "model/session.h"
#include "model/tokenizer.h"
#include "search/documents.h"
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

namespace cli {

// Questions and answers on one session. Each question renders the whole conversation anew, as the template requires (a
// thought is not repeated once the next question comes), and computes it from the first difference to the KV cache on.
// On a terminal there are prompts and an editor, and after each answer the conversation is written to the state folder:
// a crash or kill does not lose it. Otherwise each line of the input is a message, and stdout gets the answers and
// nothing else.
struct Chat {
    Options options; // /system, /think and /no_think change it
    Conversation& session;
    const Tokenizer& tokenizer;
    PromptCache& cache;
    ThreadPace& pace;
    const Generation how;            // each answer begins as a copy of it
    std::vector<Message> messages{}; // question, answer, question, answer, ...
    uint64_t answers = 0;            // ever given
    std::string last = "no answer yet";
    bool leave = false;
    std::string kept{}, saved{};     // where the conversation is: in the state folder, where the user wants it
    bool changed = false;            // since it was saved or loaded
    const bool terminal = isatty(0) && isatty(1);
    std::vector<Command> commands{}; // of --tools
    std::unique_ptr<Input> user{};

    int run();

  private:
    // Executes the line if it is a command: one line, / and a letter, no other / in the first word, which would make it
    // a path.
    bool command(const std::string& line);

    // Writes changes to the state folder. A chat continues without one.
    void keep();
    void tell_where();

    void clear();

    void save(const std::string& word);

    void load(const std::string& word);

    // Answers the last of `asked`; the conversation is then `asked` and the answer. After an Error or Ctrl-C before the
    // first token the conversation stays unchanged. If the model calls tools, it continues with their output; calls and
    // output are forgotten after the answer.
    void answer(std::vector<Message> asked);

    // Generates and shows the model's next text. False: stopped before the first token.
    bool speak_on(std::vector<Message>& asked, const std::vector<Message>& called, std::vector<Source>& sources,
                  Generation& g);

    std::vector<int> render(const std::vector<Message>& conversation, bool ask) const;

    // The ids of the conversation. If they leave the answer less than a quarter of the context (or less than -n), the
    // oldest questions and answers are dropped: enough to free half, since all that follows them must be computed
    // again. With --docs another quarter is for passages; they accompany the last question only, and are not part of
    // the conversation.
    std::vector<int> fit(std::vector<Message>& asked, const std::vector<Message>& called,
                         std::vector<Source>& sources) const;
};

} // namespace cli
