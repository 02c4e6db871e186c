// cli/commands.h: programs that a model may ask for in a chat (qwen3 --tools FILE). FILE is a JSON list of OpenAI's
// tools with a command each:
//     [{"type": "function",
//       "function": {"name": "day", "description": "The date of a day",
//                    "parameters": {"type": "object", "properties": {"which": {"type": "string"}}}},
//       "command": ["date", "-d", "{which}"]}]
// {NAME} in a word of the command stands for that argument. A word stays one word, and goes to the program as it is: no
// shell ever sees what the model wrote. Whoever runs one asks the user first.
#pragma once
#include "model/chat_template.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace cli {

constexpr size_t MAX_COMMAND_OUTPUT = 16 << 10; // bytes that the model is told

struct Command {
    std::string name, tool;         // the tool as the model is shown it
    std::vector<std::string> words; // program and arguments
    std::vector<std::string> parameters;

    // The words with the arguments in their places. Throws Error if one is missing, or could be taken for an option.
    std::vector<std::string> with(sj::Value arguments) const;
};

// Throws Error where the file is not such a list.
std::vector<Command> read_commands(const std::string& path);

// The texts of the calls in an answer: what is between the tokens <tool_call> and </tool_call>, after a thought.
std::vector<std::string> calls_of(const Tokenizer& tokenizer, const std::vector<int>& ids);

// The words as a list that shows every character of them: those that cannot be seen, and blanks but the space, by
// their numbers.
std::string shown(const std::vector<std::string>& words);

// Runs a program; what it writes, as far as the model is told it, and how it ended. `stopped` is asked now and then.
std::string run_command(const std::vector<std::string>& words, const std::function<bool()>& stopped);

// What comes of a call: the program's output if `confirm` allows it, else why there is none. The call is noted in
// `said`.
std::string do_call(const std::vector<Command>& commands, const std::string& text, Message& said,
                    const std::function<bool(const std::string& words)>& confirm,
                    const std::function<bool()>& stopped);

} // namespace cli
