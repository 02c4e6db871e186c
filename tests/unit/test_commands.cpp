// commands.h: what a model asks to be run in a chat. The words by themselves, programs that misbehave, then the chat
// (QWEN3, else ./qwen3) on a pseudo-terminal, with a model that answers "day" by a call (fixtures/calls).
#include "cli/commands.h"
#include "cli/screen.h"
#include "tests/files.h"
#include <doctest/doctest.h>
#include <csignal>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <utmp.h>

using cli::Command;
using cli::MAX_COMMAND_OUTPUT;
using cli::calls_of;
using cli::do_call;
using cli::read_commands;
using cli::run_command;
using cli::shown;

static const std::string SPOKEN = R"([{"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
    "command": ["echo", "{text}"]}])";
static std::vector<Command> commands_of(const std::string& json) {
    MemoryFile file(json);
    return read_commands(file.path);
}
static std::vector<std::string> words(const std::string& command, const std::string& arguments) {
    const std::string json = R"([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}, "command": )" + command + "}]";
    sj::Doc doc;
    REQUIRE(sj::parse(doc, arguments) == "");
    return commands_of(json)[0].with(doc.root());
}
using Words = std::vector<std::string>;

TEST_CASE("commands: an argument stays in its word, whatever is in it") {
    CHECK(words(R"(["p", "-x", "{a}", "b={b}!{a}"])", R"({"a": "1 2", "b": "$(id); `id` > x"})") == Words{"p", "-x", "1 2", "b=$(id); `id` > x!1 2"});
    CHECK(words(R"(["p", "{a}"])", R"({"a": "{b}"})") == Words{"p", "{b}"}); // once only
    CHECK(words(R"(["p", "{a}", "{b}", "{"])", R"({"a": 5.0, "b": [1, "x"]})") == Words{"p", "5.0", "[1, \"x\"]", "{"});
    CHECK(words(R"(["p", "--", "{a}"])", R"({"a": "-rf"})") == Words{"p", "--", "-rf"});
    CHECK(words(R"(["p", "--x={a}"])", R"({"a": "-rf"})") == Words{"p", "--x=-rf"});
    for (auto& [command, arguments] : std::vector<std::pair<std::string, std::string>>{
             {R"(["p", "{a}"])", R"({"a": "-rf"})"}, {R"(["p", "{b}{a}"])", R"({"b": "", "a": "--help"})"}, {R"(["p", "{a}"])", "{}"}, {R"(["p", "{a}"])", "5"},
             {R"(["p", "{a}"])", R"({"a": "x\u0000y"})"}})
        CHECK_THROWS_AS(words(command, arguments), Error);
    for (const char* bad : {"", "{", "{}", "[]", "[5]", R"([{"type": "function", "function": {"name": "f"}}])", R"([{"type": "function", "function": {"name": "f"}, "command": "ls"}])",
                            R"([{"type": "function", "function": {"name": "f"}, "command": []}])", R"([{"type": "function", "function": {"name": "f"}, "command": ["a", 1]}])",
                            R"([{"type": "function", "function": {"name": "f"}, "command": ["a", "{x}"]}])",
                            R"([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}, "command": ["{x}"]}])",
                            R"([{"type": "function", "function": {}, "command": ["a"]}])", R"([{"type": "function", "function": {"name": "f"}, "command": ["a\u0000"]}])",
                            R"([{"type": "function", "function": {"name": "f"}, "command": ["a"]}, {"type": "function", "function": {"name": "f"}, "command": ["a"]}])"})
        CHECK_THROWS_AS(commands_of(bad), Error);
    CHECK(commands_of(SPOKEN)[0].tool.find("command") == std::string::npos); // the model need not know
    CHECK(shown({"a b", "\"\n", "x\u202Ey\u200B", "线\x7f\xc2\x85"}) == R"("a b" "\"\n" "x\u202ey\u200b" "线\u007f\u0085")");
    // Characters without width, blanks and noncharacters: by Unicode's classes, one of each, and the issue's own.
    for (uint32_t c : {0x61C, 0xE0041, 0x3164, 0x2800, 0xFE0F, 0xE0100, 0x200D, 0x301, 0xA0, 0xAD, 0x34F, 0x115F, 0x1160, 0xFFA0, 0x17B4, 0x180E, 0x180B, 0x1680, 0x2003,
                       0x2007, 0x2028, 0x2029, 0x202E, 0x202F, 0x205F, 0x2060, 0x2064, 0x2069, 0x206F, 0x20E3, 0x3000, 0xFEFF, 0xFFF9, 0xFFFE, 0xFFFF, 0x1D173, 0x1BCA0,
                       0xE000, 0xF8FF, 0xF0000, 0x10FFFF, 0x378, 0x80, 0x9F, 0x7F}) {
        std::string word = "a";
        utf8_append(word, c);
        CHECK(shown({word}) == format(c < 0x10000 ? "\"a\\u%04x\"" : "\"a\\U%08x\"", c));
    }
    for (const char* word : {"线", "é", "😀", "Ü", "→", "한", "ا", "क", "~", "!", "\\u3164"}) CHECK(shown({word}) == (word == std::string("\\u3164") ? R"("\\u3164")" : "\"" + std::string(word) + "\""));
    // Answers keep what makes emoji and accents; what turns text around is shown.
    CHECK(cli::printable("a\u202Eb\u2066\u061C\u200F 👩\u200D🔬 e\u0301 ❤\uFE0F\u00A0\x1b") == "a\\u202eb\\u2066\\u061c\\u200f 👩\u200D🔬 e\u0301 ❤\uFE0F\u00A0␛");
}

TEST_CASE("commands: run without a shell, bounded in time and size") {
    auto never = [] { return false; };
    CHECK(run_command({"printf", "%s|", "a b", "$HOME", "*"}, never) == "a b|$HOME|*|");
    CHECK(run_command({"true"}, never) == "(no output)");
    CHECK(run_command({"sh", "-c", "echo out; echo err >&2; exit 3"}, never) == "out\nerr\n\n(exit status 3)");
    CHECK(run_command({"sh", "-c", "kill -9 $$"}, never) == "\n(ended by signal 9)");
    CHECK(run_command({"/no/such/program"}, never).find("No such file") != std::string::npos);
    CHECK(run_command({"cat"}, never) == "(no output)"); // it has no input
    CHECK(run_command({"printf", "a\\377b"}, never) == "a\uFFFDb");
    const std::string much = run_command({"sh", "-c", "yes | head -c 3000000"}, never);
    CHECK(much.size() == MAX_COMMAND_OUTPUT + strlen("\n(the rest is left out)"));
    const double start = seconds(); // a child of it that lives on, and one that is stopped
    CHECK(run_command({"sh", "-c", "sleep 50 & echo here"}, never) == "here\n");
    for (const char* writes_on : {"yes & exit 0", "setsid timeout 30 yes & sleep 0.2"}) // (the second leaves our group)
        CHECK(run_command({"sh", "-c", writes_on}, never).find("stopped") == std::string::npos);
    CHECK(run_command({"sleep", "50"}, [&] { return seconds() - start > 0.3; }) == "\n(stopped by the user)");
    CHECK(run_command({"sh", "-c", "exec >&- 2>&-; sleep 0.2"}, never) == "(no output)");
    CHECK(seconds() - start < 5);
}

TEST_CASE("commands: nothing runs that the user does not allow, and that is no call of a tool") {
    const std::vector<Command> commands = commands_of(SPOKEN);
    std::string asked;
    auto call = [&](const std::string& text, bool yes) {
        Message said{"assistant", ""};
        asked.clear();
        const std::string out = do_call(commands, text, said, [&](const std::string& words) { asked = words; return yes; }, [] { return false; });
        CHECK(said.tool_calls.size() == 1);
        return out;
    };
    CHECK(call("\n{\"name\": \"echo\", \"arguments\": {\"text\": \"$(id)\"}}\n", true) == "$(id)\n");
    CHECK(asked == "\"echo\" \"$(id)\"");
    CHECK(call("\n{\"name\": \"echo\", \"arguments\": {\"text\": \"x\"}}\n", false) == "not run: the user said no");
    for (const char* bad : {"", "{", "5", "{\"name\": \"rm\", \"arguments\": {}}", "{\"name\": \"echo\"}", "{\"name\": \"echo\", \"arguments\": {\"text\": \"-n\"}}", "{\"name\": 5}"}) {
        CHECK(call(bad, true).compare(0, 7, "not run") == 0);
        CHECK(asked == ""); // nothing to allow
    }
    const Tokenizer t("tests/fixtures/tiny/tokenizer.bin");
    const std::string one = "<tool_call>\n{}\n</tool_call>";
    CHECK(calls_of(t, t.encode("a" + one + "\n" + one + "b<tool_call>cut off", true)) == Words{"\n{}\n", "\n{}\n"});
    CHECK(calls_of(t, t.encode(one, false)).empty()); // text that looks like one
    CHECK(calls_of(t, t.encode("<think>" + one + "</think>\n\nNo.", true)).empty()); // only thought of
    CHECK(calls_of(t, {}).empty());
}

// The chat on a terminal.
struct Talk {
    Scratch scratch;
    int fd = -1;
    pid_t pid = -1;
    std::string all;
    explicit Talk(const char* kind) {
        write_file(scratch / "tools.json", SPOKEN);
        const std::string model = fs::absolute("tests/fixtures/calls/model.bin").string(), vocabulary = fs::absolute("tests/fixtures/tiny/tokenizer.bin").string();
        const std::string program = fs::absolute(getenv("QWEN3") ? getenv("QWEN3") : "./qwen3").string(), tools = scratch / "tools.json";
        winsize size = {24, 200, 0, 0};
        pid = forkpty(&fd, nullptr, nullptr, &size);
        REQUIRE(pid >= 0);
        if (pid) return;
        setenv("TERM", kind, 1), setenv("XDG_STATE_HOME", scratch.path.c_str(), 1), setenv("NO_COLOR", "1", 1);
        if (chdir(scratch.path.c_str())) _exit(126);
        execl(program.c_str(), program.c_str(), model.c_str(), "-z", vocabulary.c_str(), "--tools", tools.c_str(), "-t", "0", "-n", "100", "-j", "1", nullptr);
        _exit(127);
    }
    ~Talk() { kill(pid, SIGKILL), waitpid(pid, nullptr, 0), close(fd); }
    void type(const std::string& text) { REQUIRE(write(fd, text.data(), text.size()) == (ssize_t)text.size()); }
    bool comes(const std::string& text, double within) {
        for (const double start = seconds(); all.find(text) == std::string::npos;) {
            if (seconds() - start > within) return false;
            pollfd in = {fd, POLLIN, 0};
            char some[4096];
            if (poll(&in, 1, 20) <= 0) continue;
            const ssize_t n = read(fd, some, sizeof some);
            REQUIRE(n > 0);
            all.append(some, (size_t)n);
        }
        return true;
    }
    void wait_for(const std::string& text) { // and forget it, and what came before it
        const bool came = comes(text, 30);
        INFO(all);
        REQUIRE(came);
        all.erase(0, all.find(text) + text.size());
    }
};

TEST_CASE("chat: a command runs when the user says yes, and only then") {
    for (const char* kind : {"xterm", "dumb"}) {
        INFO(kind);
        Talk t(kind);
        const std::string question = R"(run "echo" "$(touch hacked); `id` 'q'"? [y/N] )";
        t.wait_for("> ");
        for (bool early = false; !early;) { // a yes that was typed before the question does not count
            t.type("day\r");
            t.wait_for("<tool_call>");
            kill(t.pid, SIGSTOP);
            early = !t.comes("[y/N]", 0.1);
            if (early) t.type("y\r");
            kill(t.pid, SIGCONT);
            if (!early) t.type("n\r"), t.wait_for("Pity."), t.wait_for("> "), t.type("/clear\r"), t.wait_for("> ");
        }
        t.wait_for(question);
        CHECK(!t.comes("Done.", 0.3));
        t.type("n\r");
        t.wait_for("not run: the user said no");
        t.wait_for("Pity.");
        t.wait_for("> ");
        t.type("/clear\r");
        t.wait_for("> ");
        t.type("day\r");
        t.wait_for(question);
        t.type("y\r");
        t.wait_for("$(touch hacked); `id` 'q'\r\n"); // what echo said
        t.wait_for("Done.");
        t.wait_for("> ");
        t.type("/clear\r");
        t.wait_for("> ");
        t.type("day\r");
        t.wait_for(question);
        t.type("\003"); // Ctrl-C is no, and takes the question back
        t.wait_for("is removed");
        t.wait_for("> ");
        CHECK(!fs::exists(t.scratch / "hacked"));
        t.type("/exit\r");
    }
}
