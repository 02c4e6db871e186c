// cli/commands.cpp: programs that a model may ask for in a chat.
#include "cli/commands.h"
#include "base/child.h"
#include "base/error.h"
#include "base/file.h"
#include "cli/screen.h"
#include "model/utf8.h"
#include <algorithm>
#include <cstring>
#include <poll.h>
#include <string_view>
#include <sys/wait.h>
#include <unistd.h>

namespace cli {

static constexpr size_t MAX_COMMANDS = 64;
static constexpr double COMMAND_SECONDS = 60;

// f(text, whether it is a parameter's name) for the parts of a word.
template <class F> static void each_part(std::string_view word, F f) {
    while (!word.empty()) {
        const size_t open = std::min(word.find('{'), word.size()), close = word.find('}', open);
        if (open > 0) f(word.substr(0, open), false);
        if (open == word.size()) return;
        if (close == word.npos) return f(word.substr(open), false);
        f(word.substr(open + 1, close - open - 1), true);
        word.remove_prefix(close + 1);
    }
}

std::vector<std::string> Command::with(sj::Value arguments) const {
    std::vector<std::string> out;
    for (auto& word : words) {
        const bool after_options = std::find(out.begin(), out.end(), "--") != out.end();
        std::string& now = out.emplace_back();
        each_part(word, [&](std::string_view text, bool parameter) {
            if (!parameter) return void(now += text);
            const sj::Value v = arguments[text];
            const std::string value = v.is(sj::String) ? v.str() : std::string(v ? v.raw() : "");
            if (!v) DIE("the argument %.*s is missing", (int)text.size(), text.data());
            if (value.find('\0') != value.npos) DIE("an argument holds a zero byte");
            if (now.empty() && !after_options && value.substr(0, 1) == "-")
                DIE("the argument %.*s begins with -", (int)text.size(), text.data());
            now += value;
        });
    }
    return out;
}

std::vector<Command> read_commands(const std::string& path) {
    const MappedFile file(path);
    const char* name = path.c_str();
    sj::Doc doc;
    if (const std::string fault = sj::parse(doc, file.text()); !fault.empty()) DIE("%s: %s", name, fault.c_str());
    const sj::Value list = doc.root();
    if (!list.is(sj::Array) || list.size() == 0 || list.size() > MAX_COMMANDS)
        DIE("%s: not a list of 1 to %zu tools", name, MAX_COMMANDS);
    std::vector<Command> all;
    for (sj::Value v : list.items()) {
        const sj::Value f = v["function"], words = v["command"];
        Command c{f["name"].str(), "", {}, {}};
        if (v["type"].str() != "function" || c.name.empty())
            DIE("%s: tool %zu has no function with a name", name, all.size() + 1);
        const char* tool = c.name.c_str();
        for (auto& other : all)
            if (other.name == c.name) DIE("%s: two tools named %s", name, tool);
        for (auto [parameter, schema] : f["parameters"]["properties"].members()) c.parameters.push_back(parameter);
        if (!words.is(sj::Array) || words.size() == 0) DIE("%s: %s: command is not a list of words", name, tool);
        for (sj::Value word : words.items()) {
            if (!word.is(sj::String)) DIE("%s: %s: command is not a list of words", name, tool);
            c.words.push_back(word.str());
            if (c.words.back().find('\0') != std::string::npos) DIE("%s: %s: a zero byte in its command", name, tool);
            each_part(c.words.back(), [&](std::string_view text, bool parameter) {
                if (!parameter) return;
                if (c.words.size() == 1) DIE("%s: %s: the program must not depend on the model", name, tool);
                if (std::find(c.parameters.begin(), c.parameters.end(), text) == c.parameters.end())
                    DIE("%s: %s: {%.*s} is none of its parameters", name, tool, (int)text.size(), text.data());
            });
        }
        sj::Writer w;
        c.tool = w.object().field("type", "function").field("function", f).end().text;
        all.push_back(std::move(c));
    }
    return all;
}

std::vector<std::string> calls_of(const Tokenizer& tokenizer, const std::vector<int>& ids) {
    const int open = tokenizer.id("<tool_call>"), close = tokenizer.id("</tool_call>");
    const int thought = tokenizer.chat.thinks ? tokenizer.id("</think>") : -1;
    std::vector<std::string> calls;
    const auto after = std::find(ids.rbegin(), ids.rend(), thought).base(); // all of it, if there is no thought
    for (auto at = after == ids.begin() ? ids.begin() : after;;) {
        at = std::find(at, ids.end(), open);
        const auto end = std::find(at, ids.end(), close);
        if (at == ids.end() || end == ids.end() || open < 0) return calls;
        calls.push_back(tokenizer.decode({at + 1, end}, false));
        at = end;
    }
}

std::string shown(const std::vector<std::string>& words) {
    std::string plain, out;
    for (auto& word : words) sj::quote(plain += plain.empty() ? "" : " ", word);
    for (const char* at = plain.c_str(); *at;) {
        const int length = utf8_length(at, strlen(at));
        if (length <= 0) { out += "\uFFFD", at++; continue; }
        const char* next = at;
        const uint32_t c = utf8_read(next);
        if (c == ' ' || visible(c)) out.append(at, (size_t)length);
        else out += format(c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
        at += length;
    }
    return out;
}

std::string run_command(const std::vector<std::string>& words, const std::function<bool()>& stopped) {
    const Child child(words, -1, true, execvp);
    std::string out;
    const char* how = "";
    int status = 0;
    bool ended = false;
    for (const double start = seconds();;) {
        pollfd in = {child.out, POLLIN, 0};
        char some[4096];
        const bool ready = poll(&in, 1, ended ? 0 : 50) > 0;
        const ssize_t n = ready ? read(child.out, some, sizeof some) : 0;
        if (n > 0) out.append(some, std::min((size_t)n, MAX_COMMAND_OUTPUT - std::min(MAX_COMMAND_OUTPUT, out.size())));
        if (ended && (n <= 0 || out.size() == MAX_COMMAND_OUTPUT)) break; // (another process may write on)
        if (!ended) {
            ended = child.has_ended();
            const bool unwanted = !ended && stopped();
            if (unwanted) how = "\n(stopped by the user)";
            else if (!ended && seconds() - start > COMMAND_SECONDS) how = "\n(stopped: it took too long)";
            if (ended || *how) status = child.end();
            if (*how) break;
        }
        if (ready && n <= 0 && !ended) usleep(10'000); // it has closed its output
    }
    std::string text;
    utf8_repair(text, out, true);
    if (out.size() == MAX_COMMAND_OUTPUT) text += "\n(the rest is left out)";
    if (!*how && WIFEXITED(status) && WEXITSTATUS(status)) text += format("\n(exit status %d)", WEXITSTATUS(status));
    if (!*how && WIFSIGNALED(status)) text += format("\n(ended by signal %d)", WTERMSIG(status));
    text += how;
    return text.empty() ? "(no output)" : text;
}

std::string do_call(const std::vector<Command>& commands, const std::string& text, Message& said,
                    const std::function<bool(const std::string& words)>& confirm,
                    const std::function<bool()>& stopped) {
    sj::Doc doc;
    const std::string fault = sj::parse(doc, text);
    const std::string name = doc.root()["name"].str();
    const sj::Value arguments = doc.root()["arguments"];
    said.tool_calls.push_back({name, arguments ? sj::dump(arguments) : "{}"});
    if (!fault.empty()) return "not run: the call is not valid JSON";
    for (auto& command : commands) {
        if (command.name != name) continue;
        try {
            const std::vector<std::string> words = command.with(arguments);
            return confirm(shown(words)) ? run_command(words, stopped) : "not run: the user said no";
        } catch (const Error& e) {
            return std::string("not run: ") + e.what();
        }
    }
    return "not run: there is no such tool";
}

} // namespace cli
