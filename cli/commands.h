// cli/commands.h: programs that a model may ask for in a chat (qwen3 --tools FILE). FILE is a JSON list of OpenAI's
// tools with a command each:
//     [{"type": "function",
//       "function": {"name": "day", "description": "The date of a day",
//                    "parameters": {"type": "object", "properties": {"which": {"type": "string"}}}},
//       "command": ["date", "-d", "{which}"]}]
// {NAME} in a word of the command stands for that argument. A word stays one word, and is passed to the program
// unchanged: no shell sees the model's text. The caller must ask the user before it runs a program.
#pragma once
#include "model/chat_template.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace cli {

constexpr size_t MAX_COMMAND_OUTPUT = 16 << 10; // bytes of output that the model sees

struct Command {
    std::string name, tool;         // the tool as shown to the model
    std::vector<std::string> words; // program and arguments
    std::vector<std::string> parameters;

    // The words with the arguments inserted. Throws Error if one is missing, or could be parsed as an option.
    std::vector<std::string> with(sj::Value arguments) const;
};

// Throws Error where the file is not such a list.
std::vector<Command> read_commands(const std::string& path);

// The texts of the calls in an answer: between the tokens <tool_call> and </tool_call>, after a thought.
std::vector<std::string> calls_of(const Tokenizer& tokenizer, const std::vector<int>& ids);

// The words as a list that shows every character: invisible ones, and blanks other than the space, by their code
// points.
std::string shown(const std::vector<std::string>& words);

// Runs a program; returns its output, cut to the model's limit, and its exit status. `stopped` is polled.
std::string run_command(const std::vector<std::string>& words, const std::function<bool()>& stopped);

// The result of a call: the program's output if `confirm` allows it, else the reason why there is none. The call is
// appended to `said`.
std::string do_call(const std::vector<Command>& commands, const std::string& text, Message& said,
                    const std::function<bool(const std::string& words)>& confirm,
                    const std::function<bool()>& stopped);

} // namespace cli
