// The chat and the prompt cache, from outside: the program (QWEN3, else ./qwen3) on a pseudo-terminal and on pipes,
// with the random model in fixtures/tiny. What it says is babble, so nothing here expects certain words: runs are
// compared with each other, and what the program understood is read from /save.
// Where many tokens are wanted, a presence penalty of -100 makes an answer repeat its first token without end.
#include "cli/screen.h"
#include "model/chat_template.h"
#include "sj.h"
#include "tests/files.h"
#include "tests/starters.h"
#include <chrono>
#include <csignal>
#include <doctest/doctest.h>
#include <poll.h>
#include <pty.h>
#include <set>
#include <sstream>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <tuple>
#include <utmp.h>

using Strings = std::vector<std::string>;

static const std::string MODEL = "tests/fixtures/tiny/model.bin";
static const Strings ENDLESS = {"-n", "1000000", "-t", "0", "--presence-penalty", "-100"};

static Strings operator+(Strings a, const Strings& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}
static bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }
static bool ends(std::string_view text, std::string_view part) {
    return text.size() >= part.size() && text.substr(text.size() - part.size()) == part;
}
static int count(std::string_view text, std::string_view part) {
    int n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) n++;
    return n;
}
static long lines_of(std::string_view text) { return std::count(text.begin(), text.end(), '\n'); }
// The number before (or, negative, behind) some words of the program's.
static long number_after(std::string_view text, std::string_view words) {
    const size_t at = text.find(words);
    return at == text.npos ? -1 : atol(std::string(text.substr(at + words.size(), 20)).c_str());
}

// Replaces this (forked) process. Its state folder is state + "/qwen3".
[[noreturn]] static void become(const Strings& arguments, const std::string& model, const std::string& state) {
    const char* program = getenv("QWEN3");
    setenv("XDG_STATE_HOME", state.c_str(), 1);
    Strings all = Strings{program ? program : "./qwen3", model, "-j", "1"} + arguments;
    std::vector<char*> argv;
    for (auto& a : all) argv.push_back(a.data());
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    _exit(127);
}

static int status_of(pid_t pid) {
    int status = 0;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

// ------------------------------------------------------------------------------------------- without a terminal

struct Result {
    int status;
    std::string out, err;
};

static Result run(const Strings& arguments, std::string_view input = "", const std::string& model = MODEL) {
    Scratch scratch;
    write_file(scratch / "in", input);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        setenv("TERM", "xterm", 1);
        dup2(open((scratch / "in").c_str(), O_RDONLY), 0);
        dup2(open((scratch / "out").c_str(), O_WRONLY | O_CREAT, 0600), 1);
        dup2(open((scratch / "err").c_str(), O_WRONLY | O_CREAT, 0600), 2);
        become(arguments, model, scratch / "state");
    }
    const int status = status_of(pid);
    return {status, read_file(scratch / "out"), read_file(scratch / "err")};
}

// ---------------------------------------------------------------------------------------------- with a terminal

struct Terminal {
    Scratch own;
    const std::string state; // what the program gets as XDG_STATE_HOME
    int fd = -1;
    pid_t pid = -1;
    std::string all, fresh; // what it has shown; of this, what the last wait saw
    bool edits = false;     // with libedit

    explicit Terminal(const Strings& arguments, const std::string& kind = "xterm", bool chat = true, const std::string& state_home = "",
                      const char* no_color = nullptr, const std::string& model = MODEL,
                      unsigned short columns = 200)
        : state(state_home.empty() ? own.path.string() : state_home) {
        winsize size = {24, columns, 0, 0};
        pid = forkpty(&fd, nullptr, nullptr, &size);
        REQUIRE(pid >= 0);
        if (pid == 0) {
            setenv("TERM", kind.c_str(), 1);
            setenv("LC_ALL", "C", 1); // UTF-8 must work all the same
            no_color ? setenv("NO_COLOR", no_color, 1) : unsetenv("NO_COLOR");
            become(arguments, model, state);
        }
        if (!chat) return;
        prompt();
        edits = has(all, "\033[?2004h");
    }
    ~Terminal() {
        if (pid > 0) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
        close(fd);
    }

    // Reads until `enough`; false when the program has closed the terminal.
    template <class F> bool wait(F enough) {
        fresh.clear();
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (!enough()) {
            INFO(all);
            REQUIRE(std::chrono::steady_clock::now() < deadline);
            pollfd in = {fd, POLLIN, 0};
            char some[4096];
            if (poll(&in, 1, 100) <= 0) continue;
            ssize_t n = read(fd, some, sizeof some);
            if (n <= 0) return false;
            all.append(some, (size_t)n), fresh.append(some, (size_t)n);
        }
        return true;
    }
    // Waits for a prompt and returns what came before it.
    std::string prompt(const std::string& mark = ">") {
        INFO(all);
        const std::string plain = mark + " ", coloured = "\033[1;32m" + mark + "\033[0m ";
        REQUIRE(wait([&] {
            for (const char* before : {"\n", "\033[?2004h"})
                if (ends(fresh, before + plain) || ends(fresh, before + coloured)) return true;
            return false;
        }));
        return fresh;
    }
    std::string wait_for(const std::string& text) {
        INFO(text);
        REQUIRE(wait([&] { return has(fresh, text); }));
        return fresh;
    }
    void type(std::string_view text) { REQUIRE(write(fd, text.data(), text.size()) == (ssize_t)text.size()); }
    std::string send(const std::string& line) { // types a line and returns what came of it
        type(line + "\r");
        return prompt();
    }
    int end() { // the status it ends with
        wait([] { return false; });
        return status_of(std::exchange(pid, -1));
    }
};

static std::string without_breaks(std::string s) { // nor blanks: a line break takes their place
    s.erase(std::remove_if(s.begin(), s.end(), [](char c) { return c == '\r' || c == '\n' || c == ' '; }), s.end());
    return s;
}

// Text of the model as a terminal shows it.
static std::string on_screen(std::string_view text) {
    std::string out;
    for (char c : text) {
        if (c == '\n') out += "\r\n";
        else if (c == 0x7F) out += "\u2421";
        else if ((uint8_t)c < 0x20 && c != '\t') utf8_append(out, 0x2400u + (uint8_t)c);
        else out += c;
    }
    return out;
}

// The file that /save wrote.
struct Saved {
    std::string system;
    bool think;
    std::vector<Message> messages;

    explicit Saved(const std::string& path) {
        const std::string text = read_file(path);
        sj::Doc doc;
        REQUIRE(sj::parse(doc, text) == "");
        REQUIRE(doc.root()["system"].is(sj::String));
        REQUIRE(doc.root()["think"].is_bool());
        system = doc.root()["system"].str();
        think = doc.root()["think"].boolean();
        messages = messages_from_json(doc.root()["messages"]);
    }
    Strings questions() const {
        Strings all;
        for (auto& m : messages)
            if (m.role == "user") all.push_back(m.content);
        return all;
    }
};

static Saved saved_by(Terminal& t) {
    Scratch scratch;
    CHECK(has(t.send("/save " + (scratch / "chat")), "chat: saved"));
    return Saved(scratch / "chat");
}

static const Tokenizer& tokenizer() {
    static const Tokenizer t("tests/fixtures/tiny/tokenizer.bin");
    return t;
}

struct Answer {
    std::string text, finish;
    std::vector<int> ids;
};

// The answer to a prompt in a process of its own.
static Answer fresh_answer(const std::vector<int>& prompt, const Strings& arguments) {
    std::string list;
    for (int id : prompt) list += std::to_string(id) + ",";
    Result r = run(Strings{"--ids", list, "--json"} + arguments);
    INFO(r.err);
    REQUIRE(r.status == 0);
    sj::Doc doc;
    REQUIRE(sj::parse(doc, r.out) == "");
    Answer a{doc.root()["text"].str(), doc.root()["finish_reason"].str(), {}};
    for (sj::Value id : doc.root()["ids"].items()) a.ids.push_back((int)id.number());
    return a;
}

// ------------------------------------------------------------------------------------------------------- the chat

TEST_CASE("what is typed is what is received") {
    for (const std::string kind : {"xterm", "dumb"}) {
        INFO(kind);
        Terminal t({"-s", "1", "-n", "4"}, kind);
        t.send("你好，世界");
        t.send("漢字\177x");                      // one backspace takes one Chinese character,
        t.send("a漢\177\177b");                   // two take it and the letter before it
        t.send("é漢😀\177\177\177c");
        t.type("one\\\r");
        t.prompt("…");
        t.type("two\\\r");
        t.prompt("…");
        t.send("三");
        t.send("first\rsecond line\r\r第四行");   // pasted: one message
        t.send("");                               // no message
        t.send("a\\b");
        CHECK(saved_by(t).questions() == Strings{"你好，世界", "漢x", "b", "c", "one\ntwo\n三", "first\nsecond line\n\n第四行", "a\\b"});
        t.type("/exit\r");
        CHECK(t.end() == 0);
    }
}

TEST_CASE("the editor: history, arrows, bracketed paste") {
    Terminal t({"-s", "1", "-n", "4"});
    if (!t.edits) {
        printf("skipped: this build has no libedit\n");
        return;
    }
    t.send("中文b\033[D\033[Da");                  // two to the left
    t.type("\033[200~one\rtwo\tthree\r\033[201~"); // not sent before Enter, even if it ends in a newline
    t.wait_for("three↵");
    t.send("four");
    t.send("\033[A\033[A\033[A!");                 // up three times stops at the oldest of two
    t.send("\033[A\033[A?");                       // a message of several lines comes back whole
    CHECK(saved_by(t).questions() == Strings{"中a文b", "one\ntwo\tthree\nfour", "中a文b!", "one\ntwo\tthree\nfour?"});
    CHECK(count(t.all, "\033[?2004h") == count(t.all, "\033[?2004l") + 1); // the terminal is told when a prompt is over
}

// The screen's text, without spaces (some are there to wrap a line) and without control sequences.
static std::string visible(std::string_view shown) {
    std::string out;
    for (size_t i = 0; i < shown.size(); i++) {
        if (shown[i] == '\033') {
            while (i + 1 < shown.size() && !isalpha((unsigned char)shown[i])) i++;
        } else if (shown[i] != '\r' && shown[i] != '\n' && shown[i] != '\b' && shown[i] != ' ') {
            out += shown[i];
        }
    }
    return out;
}

TEST_CASE("a window of another size, and back from Ctrl-Z: a long line is drawn anew from its first row, and stays whole") {
    Terminal t({"-s", "1", "-n", "4"});
    if (!t.edits) {
        printf("skipped: this build has no libedit\n");
        return;
    }
    std::string line;
    for (int i = 0; i < 12; i++) line += format("word%02d 漢字 ", i); // 12 columns each
    t.type(line + "end");
    t.wait_for("end");
    const std::string drawn = visible("> " + line + "end");
    struct { unsigned short columns; int row; } windows[] = {{40, 3}, {60, 2}, {30, 5}, {200, 0}}; // row: of the line's end
    for (auto& w : windows) {
        INFO(w.columns);
        winsize size = {24, w.columns, 0, 0};
        REQUIRE(ioctl(t.fd, TIOCSWINSZ, &size) == 0); // sends SIGWINCH, too
        REQUIRE(t.wait([&] { return has(t.fresh, "\033[J") && ends(visible(t.fresh), drawn); }));
        CHECK(has(t.fresh, (w.row ? format("\033[%dA", w.row) : "") + "\r\033[J"));
    }
    REQUIRE(kill(t.pid, SIGCONT) == 0); // as a shell does that wrote lines of its own: nothing above is touched
    REQUIRE(t.wait([&] { return has(t.fresh, "\033[J") && ends(visible(t.fresh), drawn); }));
    CHECK(!has(t.fresh, "A\r\033[J"));
    t.send("!");
    CHECK(saved_by(t).questions() == Strings{line + "end!"});
}

// The chats that a state folder keeps.
static Strings kept_in(const std::string& state) {
    Strings all;
    if (fs::exists(state + "/qwen3"))
        for (auto& entry : fs::directory_iterator(state + "/qwen3"))
            if (has(entry.path().filename().string(), "chat-")) all.push_back(entry.path().string());
    auto stem = [](const std::string& path) { return path.substr(0, path.size() - 5); };
    std::sort(all.begin(), all.end(), [&](auto& a, auto& b) { return stem(a) < stem(b); }); // X is before X-2
    return all;
}
static mode_t mode_of(const std::string& path) {
    struct stat st;
    REQUIRE(stat(path.c_str(), &st) == 0);
    return st.st_mode & 0777;
}

TEST_CASE("however a chat ends, the conversation is kept, for nobody else to read, and can be taken up again") {
    for (const std::string how : {"/exit\r", "/bye\r", "/quit\r", "\004", "\003", "HUP", "TERM", "KILL"}) {
        INFO(how);
        Terminal t({"-n", "3"});
        t.send("线程束是什么？");
        t.send("And a block?");
        if (how == "\003") t.type(how), t.prompt();
        const bool killed = how == "HUP" || how == "TERM" || how == "KILL";
        if (killed) kill(t.pid, how == "HUP" ? SIGHUP : how == "TERM" ? SIGTERM : SIGKILL);
        else t.type(how);
        CHECK(t.end() == (how == "HUP" ? 128 + SIGHUP : how == "TERM" ? 128 + SIGTERM : how == "KILL" ? 1000 + SIGKILL : 0));
        const Strings kept = kept_in(t.state);
        REQUIRE(kept.size() == 1);
        if (how != "KILL") CHECK(has(t.all, "the conversation is in " + kept[0]));
        CHECK(Saved(kept[0]).questions() == Strings{"线程束是什么？", "And a block?"});
        CHECK(mode_of(kept[0]) == 0600);
        CHECK(mode_of(t.state + "/qwen3") == 0700);
    }
    Terminal nothing({"-n", "3"}); // and a chat without a question leaves nothing
    nothing.type("/exit\r");
    CHECK(nothing.end() == 0);
    CHECK(!has(nothing.all, "the conversation is"));
    CHECK(kept_in(nothing.state).empty());
}

TEST_CASE("/load lists what is kept and takes it up by number or name; /clear and /save leave one file of each conversation") {
    Scratch state, files;
    Strings names;
    for (const char* question : {"An older question", "A newer question, so long that the list shows only the beginning of it, and no more"}) {
        Terminal t({"-n", "3"}, "dumb", true, state.path.string());
        CHECK(has(t.send("/load"), names.empty() ? "no conversation is kept" : "  1  chat-"));
        t.send(question);
        t.type("/exit\r");
        CHECK(t.end() == 0);
        for (auto& file : kept_in(state.path.string()))
            if (std::find(names.begin(), names.end(), file) == names.end()) names.push_back(file);
    }
    REQUIRE(names.size() == 2);
    write_file(state / "qwen3/chat-00000000-000000.json", "{");
    Terminal t({"-n", "3"}, "dumb", true, state.path.string());
    const std::string list = t.send("/load");
    CHECK(has(list, "1 question: An older question"));
    CHECK(has(list, "1 question: A newer question, so long that the list shows only…"));
    CHECK(has(list, "  3  chat-00000000-000000  damaged"));
    CHECK(list.find("A newer") < list.find("An older"));
    const std::string taken = t.send("/load 2"); // with its last question and answer
    CHECK(has(taken, names[0] + ": 2 messages\r\n> An older question\r\n"));
    CHECK(has(without_breaks(taken), without_breaks(on_screen(Saved(names[0]).messages.back().content))));
    const std::string name = fs::path(names[1]).stem().string();
    CHECK(has(t.send("/load " + name), names[1] + ": 2 messages"));
    CHECK(has(t.send("/load 4"), "4: No such file"));
    t.send("more"); // goes on where it is
    CHECK(Saved(names[1]).questions().back() == "more");
    CHECK(Saved(names[1]).questions().size() == 2);
    CHECK(Saved(names[0]).questions() == Strings{"An older question"});
    CHECK(kept_in(state.path.string()).size() == 3);
    // A new conversation is another file; one that the user saved is his, and not kept twice.
    CHECK(has(t.send("/clear"), "the conversation is in " + names[1]));
    t.send("third");
    CHECK(kept_in(state.path.string()).size() == 4);
    t.send("/save " + (files / "mine"));
    CHECK(kept_in(state.path.string()).size() == 3);
    t.type("/exit\r");
    CHECK(t.end() == 0);
    CHECK(has(t.all, "the conversation is in " + (files / "mine") + "\r\n"));
    CHECK(Saved(files / "mine").questions() == Strings{"third"});
    // No folder to keep it in: it is said, and the chat goes on.
    write_file(files / "file", "");
    Terminal none({"-n", "3"}, "dumb", true, files / "file");
    CHECK(has(none.send("Hello"), "the conversation is not kept: " + (files / "file") + ": not a folder"));
    CHECK(saved_by(none).questions() == Strings{"Hello"});
}

TEST_CASE("/save writes over a chat and nothing else; ~ is the home folder") {
    Scratch home;
    setenv("HOME", home.path.c_str(), 1);
    Terminal t({"-n", "3"}, "dumb");
    t.send("one");
    CHECK(has(t.send("/save ~/chat"), (home / "chat") + ": saved"));
    t.send("two");
    CHECK(has(t.send("/save ~/chat "), (home / "chat") + ": saved"));
    CHECK(Saved(home / "chat").questions() == Strings{"one", "two"});
    for (const char* text : {"", "my diary\n", "{\"messages\": 1}"}) {
        write_file(home / "diary", text);
        CHECK(has(t.send("/save " + (home / "diary")), "diary: exists and is no chat: not overwritten"));
        CHECK(read_file(home / "diary") == text);
    }
    CHECK(has(t.send("/save ~"), "is a directory"));
    CHECK(has(t.send("/load ~/chat"), "chat: 4 messages"));
    CHECK(has(t.send("/save ~nobody/x"), "~nobody/x: No such file"));
}

TEST_CASE("keys typed during an answer are not shown in it; each line that waits is a message of its own") {
    for (const std::string kind : {"xterm", "dumb"}) {
        INFO(kind);
        bool caught = false; // the program is stopped meanwhile, so that the answer cannot end before they are typed
        for (int i = 0; i < 10 && !caught; i++) {
            Terminal t({"-s", "1", "-n", "300", "-t", "0", "--presence-penalty", "-100"}, kind);
            t.type("eins\r");
            t.wait([&] { return t.fresh.size() > 100; });
            REQUIRE(kill(t.pid, SIGSTOP) == 0);
            siginfo_t stopped;
            REQUIRE(waitid(P_PID, (id_t)t.pid, &stopped, WSTOPPED | WNOWAIT) == 0);
            for (pollfd in = {t.fd, POLLIN, 0}; poll(&in, 1, 200) > 0;) { // what it showed before, until nothing more comes
                char some[4096];
                const ssize_t n = read(t.fd, some, sizeof some);
                REQUIRE(n > 0);
                t.all.append(some, (size_t)n);
            }
            caught = count(t.all, ">") == 1; // the first prompt's
            const size_t before = t.all.size();
            const std::string keys = "zwei\rdrei\\\rvier\r";
            t.type(keys);
            termios now; // a shell that had the terminal meanwhile left it with its own settings
            REQUIRE(tcgetattr(t.fd, &now) == 0);
            CHECK((now.c_lflag & ECHO) == 0);
            now.c_lflag |= ICANON | ECHO;
            if (t.edits) {
                const int other = open(ptsname(t.fd), O_RDWR | O_NOCTTY); // the program's end: the keys must be there first
                const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
                for (int n = 0; n < (int)keys.size(); usleep(1000)) {
                    REQUIRE(std::chrono::steady_clock::now() < deadline);
                    REQUIRE(ioctl(other, FIONREAD, &n) == 0);
                }
                close(other);
                REQUIRE(tcsetattr(t.fd, TCSANOW, &now) == 0);
            }
            REQUIRE(kill(t.pid, SIGCONT) == 0);
            if (!caught) continue;
            REQUIRE(t.wait([&] { return count(t.fresh, ">") == 3 && count(t.fresh, "…") == 1 && ends(t.fresh, " "); }));
            const std::string rest = t.all.substr(before), first = rest.substr(0, rest.find(">"));
            CHECK(!has(first, "zwei"));
            CHECK(count(rest, "zwei") == 1); // at its prompt
            REQUIRE(tcgetattr(t.fd, &now) == 0);
            CHECK((now.c_lflag & (ICANON | ECHO)) == (t.edits ? 0 : ICANON | ECHO));
            CHECK(saved_by(t).questions() == Strings{"eins", "zwei", "drei\nvier"});
        }
        CHECK(caught);
    }
}

TEST_CASE("the history of messages outlives the program") {
    Scratch state;
    const std::string file = state / "qwen3/history";
    for (int session = 0; session < 3; session++) {
        Terminal t({"-n", "3"}, "xterm", true, state.path.string());
        if (!t.edits) {
            printf("skipped: this build has no libedit\n");
            return;
        }
        if (session == 0) t.send("第一"), t.send("one\rtwo");
        else t.send("\033[A!"), t.type("/exit\r"), t.end();
        if (session == 1) CHECK(Saved(kept_in(state.path.string()).back()).questions() == Strings{"one\ntwo!"});
    }
    CHECK(read_file(file) == "第一\none↵two\none↵two!\n/exit\n/exit!\n/exit\n");
    CHECK(mode_of(file) == 0600);
    std::string many;
    for (int i = 0; i < 3000; i++) many += format("line %d\n", i);
    write_file(file, many + "\xff\xfe\n");
    Terminal t({"-n", "3"}, "xterm", true, state.path.string());
    t.send("\033[A\033[A?");
    CHECK(saved_by(t).questions() == Strings{"line 2999?"});
    CHECK(std::count(many.begin(), many.end(), '\n') == 3000);
    CHECK(lines_of(read_file(file)) < 1010); // it was cut
}

TEST_CASE("the prompt has a colour, unless NO_COLOR or the terminal is against it") {
    struct { const char *kind, *no_color; bool coloured; } cases[] = {
        {"xterm", nullptr, true}, {"xterm", "", true}, {"xterm", "1", false}, {"dumb", nullptr, false}};
    for (auto& c : cases) {
        INFO(c.kind << " " << c.coloured);
        Terminal t({"-n", "3"}, c.kind, true, "", c.no_color);
        CHECK(has(t.all, "\033[1;32m>\033[0m ") == c.coloured);
        CHECK(has(t.all, "\033[1;32m") == c.coloured);
    }
}

TEST_CASE("an answer is drawn as Markdown on a terminal, unless --markdown 0, NO_COLOR or the terminal is against it") {
    Scratch scratch;
    const std::string chat = scratch / "chat.json", command = "/load " + chat;
    write_file(chat, R"({"messages":[{"role":"user","content":"a **question**"},{"role":"assistant","content":"a **warp**\n- of 32"}]})");
    const std::string drawn = "> a **question**\r\na \033[0;1mwarp\033[0m\r\n• of 32\r\n", plain = "> a **question**\r\na **warp**\r\n- of 32\r\n";
    CHECK(has(Terminal({}).send(command), drawn));
    CHECK(has(Terminal({"--markdown", "0"}).send(command), plain));
    CHECK(has(Terminal({}, "xterm", true, "", "1").send(command), plain));
    CHECK(has(Terminal({}, "dumb").send(command), plain));
    const Result piped = run({}, command + "\n"); // where stdout has answers and nothing else
    CHECK(piped.out == "");
    CHECK(has(piped.err, "> a **question**\na **warp**\n- of 32\n"));
    CHECK(has(run({"--markdown", "2"}, "x\n").err, "--markdown: 2 is not"));
}

TEST_CASE("Ctrl-C stops an answer and the chat goes on") {
    for (const std::string kind : {"xterm", "dumb"}) {
        INFO(kind);
        Terminal t(ENDLESS, kind);
        Strings shown; // before Ctrl-C, which makes the kernel drop what is on its way
        for (const char* question : {"What is a warp?", "And a block?"}) {
            t.type(std::string(question) + "\r");
            t.wait([&] { return t.fresh.size() > 200; });
            const std::string line = t.edits ? "\r\n\033[?2004l" : "\r\n";
            shown.push_back(t.fresh.substr(t.fresh.find(line) + line.size()));
            t.type("\003");
            t.prompt();
        }
        CHECK(has(t.send("/stats"), "(interrupt)"));
        Saved s = saved_by(t);
        CHECK(s.questions() == Strings{"What is a warp?", "And a block?"});
        REQUIRE(s.messages.size() == 4);
        for (int i : {0, 1}) { // what was shown is what was kept, but for line breaks
            const std::string kept = without_breaks(on_screen(s.messages[2 * i + 1].content)), seen = without_breaks(shown[i]);
            CHECK(seen.size() > 100);
            CHECK(kept.substr(0, seen.size()) == seen);
        }
        t.type("/exit\r");
        CHECK(t.end() == 0);
    }
}

TEST_CASE("Ctrl-C at the prompt drops what is typed; again, with nothing typed, it leaves, as Ctrl-D does at once") {
    for (const std::string kind : {"xterm", "dumb"})
        for (bool asked : {false, true}) {
            INFO(kind << " " << asked);
            Terminal t({"-n", "3"}, kind);
            if (asked) t.send("Hello");
            t.type("\004");
            CHECK(t.end() == 0);
            CHECK(ends(t.all, "\n"));

            Terminal u({"-n", "3"}, kind);
            if (asked) u.send("Hello");
            auto type = [&](const std::string& text) { u.type(text), u.wait_for(text); };
            auto stop = [&] {
                u.type("\003");
                CHECK(has(u.prompt(), "\nCtrl-C again leaves\r\n"));
            };
            type("half"), stop();
            if (u.edits) type("other half"), stop(); // (a line that the terminal edits is not seen before Enter)
            u.send("whole");
            u.type("one\\\r"), u.prompt("…"), type("two"), stop(); // all lines of the message
            const Strings questions = saved_by(u).questions();
            CHECK(questions == (asked ? Strings{"Hello", "whole"} : Strings{"whole"}));
            stop();
            u.type("\003");
            CHECK(u.end() == 0);
            CHECK(ends(u.all, "\n"));
        }
}

TEST_CASE("the terminal gets its settings back") {
    for (const std::string kind : {"xterm", "dumb"})
        for (const char* key : {"/exit\r", "\003", "\004"}) {
            Scratch state;
            int master, slave;
            REQUIRE(openpty(&master, &slave, nullptr, nullptr, nullptr) == 0);
            termios before, during, after;
            REQUIRE(tcgetattr(slave, &before) == 0);
            before.c_iflag &= ~(tcflag_t)IUTF8;
            REQUIRE(tcsetattr(slave, TCSANOW, &before) == 0);
            const pid_t pid = fork();
            if (pid == 0) {
                close(master);
                login_tty(dup(slave));
                setenv("TERM", kind.c_str(), 1);
                become({"-n", "3"}, MODEL, state.path.string());
            }
            std::string shown;
            char some[4096];
            auto prompt = [&] {
                for (shown.clear(); !ends(shown, "> ") && !ends(shown, ">\033[0m ");) {
                    ssize_t n = read(master, some, sizeof some);
                    REQUIRE(n > 0);
                    shown.append(some, (size_t)n);
                }
            };
            prompt();
            REQUIRE(tcgetattr(slave, &during) == 0);
            CHECK((during.c_iflag & IUTF8) != 0);
            REQUIRE(write(master, key, strlen(key)) == (ssize_t)strlen(key));
            if (*key == '\003') { // it takes two
                prompt();
                REQUIRE(write(master, key, 1) == 1);
            }
            CHECK(status_of(pid) == 0);
            REQUIRE(tcgetattr(slave, &after) == 0);
            CHECK(after.c_iflag == before.c_iflag);
            CHECK(after.c_lflag == before.c_lflag);
            CHECK(after.c_oflag == before.c_oflag);
            close(master), close(slave);
        }
}

TEST_CASE("commands") {
    Scratch scratch;
    Terminal t({"-s", "5", "-n", "10", "-t", "1.5", "-p", "1", "-y", "Be brief."});
    CHECK(has(t.all, "seed 5"));
    CHECK(has(t.send("/stats"), "conversation 0 tokens, context 4096; no answer yet; seed 5"));
    CHECK(has(t.send("/regen"), "no question to answer again"));
    std::string help = t.send("/help");
    for (const char* name : {"/exit", "/clear", "/system", "/think", "/no_think", "/regen", "/save", "/load", "/stats", "/bye", "/quit"}) CHECK(has(help, name));

    t.send("one");
    t.send("two");
    Saved s = saved_by(t);
    CHECK(s.system == "Be brief.");
    CHECK(!s.think);
    CHECK(s.questions() == Strings{"one", "two"});

    // Another answer to the same question, and not the same one each time.
    std::set<std::string> answers = {s.messages[3].content};
    for (int i = 0; i < 4; i++) {
        t.send("/regen");
        Saved again = saved_by(t);
        CHECK(again.questions() == Strings{"one", "two"});
        CHECK(again.messages[1].content == s.messages[1].content);
        answers.insert(again.messages[3].content);
    }
    CHECK(answers.size() >= 4);

    CHECK(has(t.send("/think"), "thinking"));
    CHECK(saved_by(t).think);
    CHECK(has(t.send("/no_think"), "not thinking"));
    CHECK(!saved_by(t).think);
    t.send("/system 你是老师。 Two words");
    CHECK(saved_by(t).system == "你是老师。 Two words");
    t.send("/system");
    CHECK(saved_by(t).system == "");
    t.send("/clear");
    CHECK(saved_by(t).messages.empty());
    CHECK(has(t.send("/stats"), "conversation 0 tokens"));

    // An unknown command is refused, with the list; other text is a message.
    for (const char* line : {"/exits", "/Exit", "/savex y", "/hello", "/x-y"}) {
        INFO(line);
        const std::string said = t.send(line);
        CHECK(has(said, std::string(line, strcspn(line, " ")) + " is none of /help /exit /bye /quit /clear "));
    }
    for (const char* line : {"/exit please", "/stats now", "/regen 1", "/clear all"}) CHECK(has(t.send(line), "stands alone"));
    const Strings plain = {" /exit", "/clear\n/exit", "/", "/ 2", "/usr/bin/env is what?", "/* a comment */", "/system\nx"};
    for (auto& line : plain) {
        std::string typed = line;
        for (char& c : typed)
            if (c == '\n') c = '\r'; // pasted
        t.send(typed);
    }
    CHECK(saved_by(t).questions() == plain);
    CHECK(has(t.send("/stats "), "conversation ")); // a space more is no argument
    CHECK(has(t.send("/save"), "/save needs a FILE"));
    CHECK(has(t.send("/save " + (scratch / "no/such/folder")), "No such file or directory"));
    CHECK(saved_by(t).questions() == plain);
    t.type("/exit\r");
    CHECK(t.end() == 0);
}

// The text from `first` to `last`, and its words.
static std::pair<Strings, std::string> said_between(const std::string& all, const std::string& first,
                                                    const std::string& last) {
    const size_t begin = all.rfind(first), end = all.find(last, begin);
    INFO(all);
    REQUIRE(end != std::string::npos);
    std::istringstream text(all.substr(begin, end + last.size() - begin)), again(text.str());
    Strings lines;
    std::string line, words;
    while (std::getline(text, line)) lines.push_back(line.substr(0, line.find('\r')));
    while (again >> line) words += line + " ";
    return {lines, words};
}

TEST_CASE("lines for the user fit 80 columns, and break between words in a narrower terminal") {
    Terminal wide({"-s", "1"}), narrow({"-s", "1"}, "xterm", true, "", nullptr, MODEL, 20);
    for (auto& [command, first, last] : {std::tuple("/help", "/exit  /bye", "Ctrl-C stops"),
                                         std::tuple("/stats", "conversation", "seed")}) {
        const auto whole = said_between(wide.send(command), first, last);
        const auto broken = said_between(narrow.send(command), first, last);
        for (auto& line : whole.first) CHECK(line.size() <= 80);
        CHECK(broken.second == whole.second); // no word is broken
        CHECK(broken.first.size() > whole.first.size());
        for (auto& line : broken.first) CHECK(line.size() <= 20);
    }
}

TEST_CASE("/think changes the prompt and the draws") {
    Strings how = {"-s", "3", "-n", "12"};
    const std::vector<Message> question = {{"user", "Why?"}};
    for (bool think : {false, true}) {
        Terminal t(how);
        t.send(think ? "/think" : "/no_think");
        t.send("Why?");
        Answer a = fresh_answer(render_chat(tokenizer(), question, {think, true}), how + Strings{"-r", think ? "1" : "0"});
        Message m = saved_by(t).messages[1];
        CHECK(a.text == m.content);
        CHECK(has(t.send("/stats"), format("answer %zu tokens", a.ids.size())));
    }
}

TEST_CASE("the same seed and input give the same chat") {
    const std::string input = "one\ntwo\n/regen\nthree\n";
    Result a = run({"-s", "7", "-n", "20"}, input), b = run({"-s", "7", "-n", "20"}, input), c = run({"-s", "8", "-n", "20"}, input);
    CHECK(a.status == 0);
    CHECK(a.out == b.out);
    CHECK(a.out != c.out);
}

TEST_CASE("a saved chat goes on in another process as if it had not stopped") {
    Scratch scratch;
    const std::string file = scratch / "chat.json";
    const Strings how = {"-t", "0", "-n", "30", "-y", "Kurz \"und\" gut.\n"};
    Result first = run(how, "Was ist ein Warp?\nUnd ein Block?\n/save " + file + "\nWarum?\n/save " + file + "2\n");
    REQUIRE(first.status == 0);
    Result second = run({"-t", "0", "-n", "30"}, "something else\n/load " + file + "\nWarum?\n/save " + file + "3\n");
    REQUIRE(second.status == 0);
    CHECK(read_file(file + "2") == read_file(file + "3"));
    CHECK(Saved(file + "3").questions() == Strings{"Was ist ein Warp?", "Und ein Block?", "Warum?"});
    CHECK(Saved(file + "3").system == "Kurz \"und\" gut.\n");
}

TEST_CASE("a file that is no chat is one line of error, and the chat goes on") {
    Scratch scratch;
    struct { const char *json, *error; } cases[] = {
        {"", "the file is empty"},
        {"{", "line 1"},
        {"[]", "messages: not a list"},
        {"{}", "messages: not a list"},
        {"{\"messages\": {}}", "messages: not a list"},
        {"{\"messages\": [1]}", "messages[0]: no role"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", "the last question has no answer"},
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}, {\"role\": \"user\", \"content\": \"a\"}]}", "in turn"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"tool\", \"content\": \"a\"}]}", "in turn"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"tool_calls\": "
         "[{\"name\": \"f\", \"arguments\": {}}]}]}", "in turn"},
        {"{\"messages\": [], \"system\": 1}", "system is not a string"},
        {"{\"messages\": [], \"think\": 1}", "think is neither true nor false"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\xff\"}]}", "line 1"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"\u009b\\u001b[2J\"}]}]}", "is not supported"},
    };
    Terminal t({"-n", "3", "-y", "s"}, "dumb");
    t.send("mine");
    for (auto& c : cases) {
        INFO(c.json);
        write_file(scratch / "f", c.json);
        std::string said = t.send("/load " + (scratch / "f"));
        CHECK(has(said, scratch / "f: "));
        CHECK(has(said, c.error));
        CHECK(count(said, "\n") == 2); // the command's echo and the error
        CHECK(!has(said, "\033"));
        CHECK(!has(said, "\u009b"));
    }
    CHECK(has(t.send("/load " + (scratch / "none")), "none: No such file or directory"));
    CHECK(has(t.send("/load " + scratch.path.string()), "not a regular file"));
    Saved s = saved_by(t);
    CHECK(s.questions() == Strings{"mine"});
    CHECK(s.system == "s");
    // Files of other programs: the system prompt as the first message, content in parts, other keys.
    write_file(scratch / "f", "{\"model\": \"x\", \"messages\": [{\"role\": \"system\", \"content\": \"S\"}, {\"role\": \"user\", \"content\": "
                              "[{\"type\": \"text\", \"text\": \"Q\"}]}, {\"role\": \"assistant\", \"content\": \"A\", \"reasoning_content\": \"R\"}]}");
    t.send("/load " + (scratch / "f"));
    Saved loaded = saved_by(t);
    CHECK(loaded.system == "S");
    CHECK(loaded.questions() == Strings{"Q"});
    CHECK(loaded.messages[1].content == "A");
    CHECK(loaded.messages[1].reasoning == "R");
}

TEST_CASE("a full context loses its oldest turns and says so") {
    Scratch scratch;
    const int context = 200;
    const Strings how = {"-c", "200", "-n", "20", "-t", "0", "--presence-penalty", "-100", "-y", "Be brief."};
    std::string input;
    for (int i = 0; i < 12; i++) input += "question " + std::to_string(i) + "\n/stats\n/save " + (scratch / std::to_string(i)) + "\n";
    Result r = run(how, input);
    REQUIRE(r.status == 0);
    CHECK(has(r.err, "the context is full: the oldest messages went"));
    size_t dropped = 0;
    for (int i = 0; i < 12; i++) {
        INFO(i);
        Saved s(scratch / std::to_string(i));
        CHECK(s.system == "Be brief.");
        Strings left = s.questions();
        REQUIRE(!left.empty());
        CHECK(left.back() == "question " + std::to_string(i)); // the newest stay, in order
        CHECK(left.front() == "question " + std::to_string(i + 1 - (int)left.size()));
        dropped = i + 1 - left.size();
        // The answer is what the rest of the conversation gives.
        std::vector<Message> rest = s.messages;
        Message answer = rest.back();
        rest.pop_back();
        rest.insert(rest.begin(), {"system", s.system});
        std::vector<int> prompt = render_chat(tokenizer(), rest);
        CHECK((int)prompt.size() + 20 <= context);
        CHECK(fresh_answer(prompt, how).text == answer.content);
    }
    CHECK(dropped >= 4);
    CHECK(count(r.err, "the oldest messages went") <= 5); // each time it frees more than it needs

    // A message that can never fit.
    std::string longest;
    for (int i = 0; i < context; i++) longest += "漢 ";
    r = run(how, "before\n" + longest + "\nafter\n/save " + (scratch / "long") + "\n");
    CHECK(r.status == 0);
    CHECK(has(r.err, "the message is too long"));
    CHECK(Saved(scratch / "long").questions() == Strings{"before", "after"});

    // An answer that runs into the end of the context.
    r = run(Strings{"-c", "64"} + ENDLESS, "first\nsecond\n/save " + (scratch / "end") + "\n");
    CHECK(r.status == 0);
    CHECK(count(r.err, "the context is full: the answer ends here") == 2);
    CHECK(has(r.err, "the oldest messages went, 2 of 3"));
    CHECK(Saved(scratch / "end").questions() == Strings{"second"});
}

TEST_CASE("only what changed is computed, and the answers are those of a fresh start") {
    Scratch scratch;
    for (const Strings& how : {Strings{"-n", "25", "-t", "0"}, Strings{"-n", "25", "-s", "11", "--repeat-penalty", "1.3", "--stop", "g"},
                               Strings{"-n", "25", "-s", "11", "-r", "1"}}) {
        const bool think = how.back() == "1";
        std::string input;
        const Strings questions = {"What is a warp?", "线程束是什么？", "And then?", "Why is that so?"};
        for (auto& q : questions) input += q + "\n/stats\n";
        Result r = run(how + Strings{"-y", "You are a teacher."}, input + "/save " + (scratch / "chat") + "\n");
        REQUIRE(r.status == 0);
        Saved s(scratch / "chat");
        REQUIRE(s.questions() == questions);

        std::vector<int> held; // by the session
        std::string_view stats = r.err;
        std::vector<Message> said = {{"system", "You are a teacher."}};
        for (size_t i = 0; i < questions.size(); i++) {
            INFO(how[2] << " " << how.back() << ", question " << i);
            said.push_back(s.messages[2 * i]);
            std::vector<int> prompt = render_chat(tokenizer(), said, {think, true});
            const Strings seed = i && how[2] == "-s" ? Strings{"-s", std::to_string(11 + i)} : Strings{};
            Answer fresh = fresh_answer(prompt, how + seed);
            const Message& answer = s.messages[2 * i + 1];
            CHECK(ends(fresh.text, answer.content));
            if (!answer.reasoning) CHECK(fresh.text == answer.content);
            said.push_back(s.messages[2 * i + 1]);

            size_t same = 0;
            while (same < held.size() && same + 1 < prompt.size() && held[same] == prompt[same]) same++;
            if (i) CHECK(same > held.size() / 2);
            const size_t at = stats.find("reused ");
            REQUIRE(at != stats.npos);
            CHECK(number_after(stats, "prompt ") == (long)prompt.size());
            CHECK(number_after(stats, "reused ") == (long)same);
            CHECK(number_after(stats, "answer ") == (long)fresh.ids.size());
            stats.remove_prefix(at + 7);
            stats.remove_prefix(stats.find('\n'));
            held = prompt;
            held.insert(held.end(), fresh.ids.begin(), fresh.ids.end());
            if (fresh.finish != "stop") held.pop_back(); // the last token before -n is not computed
        }
    }
}

TEST_CASE("without a terminal: no prompts, no colours, a message a line") {
    Scratch scratch;
    const Strings how = {"-s", "1", "-n", "12", "-r", "1"};
    Result r = run(how, "one\r\n\ntwo\\\nmore\n/save " + (scratch / "f") + "\nlast without newline");
    CHECK(r.status == 0);
    CHECK(!has(r.err, "\033"));
    CHECK(!has(r.err, "> "));
    CHECK(Saved(scratch / "f").questions() == Strings{"one", "two\nmore"});

    // stdout is the answers, each with a newline, and nothing else
    Result again = run(how, "one\n/stats\n/help\n/nothing here\n /nothing here\n");
    CHECK(has(again.err, "/nothing is none of /help"));
    std::string expected;
    std::vector<Message> said;
    for (const char* q : {"one", " /nothing here"}) {
        said.push_back({"user", q});
        Answer a = fresh_answer(render_chat(tokenizer(), said, {true, true}), Strings{"-n", "12", "-r", "1", "-s", said.size() == 1 ? "1" : "2"});
        expected += a.text + "\n";
        said.push_back({"assistant", a.text});
    }
    CHECK(again.out == expected);
    for (const char* nothing : {"", "\n", "   \n", "\t\n \\\n \n"}) CHECK(run(how, nothing).out == "");
    CHECK(run(how, "/exit\none\n").out == "");
    CHECK(run({"--json"}, "x\n").status == 1);
    CHECK(run({"--raw"}, "x\n").status == 1);
}

// Drawn almost evenly, any token comes up soon: a seed with which the answer to "x" is `wanted`, and that answer as
// a pipe gets it. `hint` was such a seed on some machine, and most likely is one on any other.
template <class F> std::pair<std::string, std::string> find_answer(const Strings& how, int hint, F wanted) {
    for (int i = 0; i < 1000; i++) {
        const std::string seed = std::to_string(i ? i : hint);
        Result r = run(how + Strings{"-i", "x", "-s", seed});
        REQUIRE(r.status == 0);
        if (wanted(r.out)) return {seed, r.out};
    }
    FAIL("no seed gives the answer that is wanted");
    return {};
}

TEST_CASE("control characters of the model never reach a terminal") {
    const Strings even = {"-t", "100", "-k", "0", "-p", "1", "-n", "300"};
    const auto [seed, raw] = find_answer(even, 8, [](std::string_view s) { return has(s, "\033"); });
    for (bool chat : {true, false}) {
        INFO(chat);
        Terminal t(even + Strings{"-s", seed} + (chat ? Strings{} : Strings{"-i", "x"}), "dumb", chat);
        std::string shown;
        if (chat) shown = t.send("x");
        else {
            CHECK(t.end() == 0);
            shown = t.all;
        }
        CHECK(count(shown, "␛") == count(raw, "\033"));
        for (size_t i = 0; i < shown.size(); i++) {
            const uint8_t c = (uint8_t)shown[i];
            const bool c1 = c == 0xC2 && (uint8_t)shown[i + 1] < 0xA0;
            if ((c < 0x20 && c != '\n' && c != '\t' && c != '\r') || c == 0x7F || c1) FAIL("byte " << int(c) << " at " << i);
        }
        CHECK(count(shown, "\r") == count(shown, "\r\n")); // only those that the terminal adds to a newline
    }
}

TEST_CASE("a thought is dim on a terminal, and kept apart") {
    const Strings even = {"-t", "100", "-k", "0", "-p", "1", "-n", "400", "-r", "1"};
    const auto [seed, raw] = find_answer(even, 30, [](std::string_view s) {
        return count(s, "think>") == 2 && has(s, "</think>") && s.find("<think>") < s.find("</think>");
    });
    const std::string tail = raw.substr(raw.find("</think>") + 8);
    for (const std::string kind : {"xterm", "dumb"}) {
        INFO(kind);
        const bool dims = kind == "xterm";
        Terminal t(even + Strings{"-s", seed}, kind);
        std::string shown = t.send("x");
        CHECK(count(shown, "\033[2m") == dims);
        CHECK(count(shown, "\033[0m") == 2 * dims); // one of them ends the prompt's colour
        CHECK(has(shown, "<think>") == !dims);
        CHECK(has(shown, "</think>") == !dims);
        if (dims) CHECK(shown.find("\033[2m") < shown.find("\033[0m"));
        Message m = saved_by(t).messages[1];
        REQUIRE(m.reasoning);
        CHECK(!has(*m.reasoning, "think>"));
        CHECK(m.content + "\n" == skip_newlines(tail));
        // With the next question the thought is gone from the prompt, as the template has it.
        t.send("y");
        CHECK(number_after(t.send("/stats"), "prompt ") ==
              (long)render_chat(tokenizer(), {{"user", "x"}, {"assistant", m.content}, {"user", "y"}}, {true, true}).size());
    }
    setenv("NO_COLOR", "1", 1);
    Result r = run(even + Strings{"-s", seed}, "x\n");
    unsetenv("NO_COLOR");
    CHECK(r.out == raw);
}

// ----------------------------------------------------------------------------------------------- the prompt cache

static const std::string QUESTION = "What is a warp, and why does it have 32 lanes?";

static std::string restored(long n) { return format("(%ld from the prompt cache)", n); }

TEST_CASE("with and without a prompt cache: the same answer") {
    Scratch scratch;
    const Strings how = {"-s", "3", "-n", "30", "-i", QUESTION, "-y", "You are a teacher of CUDA."}, kept = {"--prompt-cache", scratch / "kv"};
    Result plain = run(how), first = run(how + kept);
    const long tokens = number_after(plain.err, "\nprompt ");
    CHECK(tokens > 20);
    CHECK(first.status == 0);
    CHECK(first.out == plain.out);
    CHECK(has(first.err, restored(0)));
    const std::string bytes = read_file(scratch / "kv");

    Result second = run(how + kept);
    CHECK(second.status == 0);
    CHECK(second.out == plain.out);
    CHECK(has(second.err, restored(tokens - 1)));

    // Another question begins alike. The file stays as it is.
    Strings other = {"-s", "3", "-n", "30", "-i", "Else?", "-y", "You are a teacher of CUDA."};
    Result third = run(other + kept);
    CHECK(third.out == run(other).out);
    const long shared = number_after(third.err, " tokens (");
    CHECK(shared > 8);
    CHECK(shared < tokens - 5);
    CHECK(read_file(scratch / "kv") == bytes);

    // The first question of a chat, on a terminal or not.
    Result chat = run({"-s", "3", "-n", "30", "-y", "You are a teacher of CUDA.", "--prompt-cache", scratch / "kv"}, QUESTION + "\n/stats\n");
    CHECK(chat.out == plain.out);
    CHECK(has(chat.err, format("reused %ld,", tokens - 1)));
    // A chat writes it, too: after its first prompt.
    chat = run({"-s", "3", "-n", "30", "-y", "You are a teacher of CUDA.", "--prompt-cache", scratch / "kv2"}, QUESTION + "\nmore\n");
    CHECK(chat.status == 0);
    CHECK(read_file(scratch / "kv2") == bytes);
    // -n 0 only makes the file.
    CHECK(run({"-n", "0", "-i", QUESTION, "-y", "You are a teacher of CUDA.", "--prompt-cache", scratch / "kv3"}).status == 0);
    CHECK(read_file(scratch / "kv3") == bytes);
}

TEST_CASE("a prompt that grows") {
    Scratch scratch;
    const std::string file = scratch / "kv";
    std::vector<int> prompt;
    long had = 0;
    for (int tokens : {1, 2, 15, 16, 17, 33, 600}) { // odd and even, on, before and behind the border of a page; in two pieces
        INFO(tokens);
        while ((int)prompt.size() < tokens) prompt.push_back(300 + (int)prompt.size() * 7 % 400);
        std::string list;
        for (int id : prompt) list += std::to_string(id) + ",";
        const Strings how = {"--ids", list, "-n", "10", "-t", "0"}, kept = {"--prompt-cache", file};
        Result plain = run(how), grown = run(how + kept), again = run(how + kept);
        REQUIRE(plain.status == 0);
        CHECK(grown.out == plain.out);
        CHECK(has(grown.err, restored(had)));
        CHECK(again.out == plain.out);
        CHECK(has(again.err, restored(tokens - 1)));
        had = tokens;
    }
    // A context that holds only part of the file.
    std::string list;
    for (int i = 0; i < 50; i++) list += std::to_string(prompt[i]) + ",";
    const Strings how = {"--ids", list, "-n", "4", "-t", "0", "-c", "54"};
    Result part = run(how + Strings{"--prompt-cache", file});
    CHECK(part.status == 0);
    CHECK(part.out == run(how).out);
    CHECK(has(part.err, restored(49)));
}

TEST_CASE("a prompt cache that is damaged or of another model is refused") {
    Scratch scratch;
    const std::string file = scratch / "kv";
    const Strings how = {"-t", "0", "-n", "3", "-i", "Hi", "--prompt-cache", file};
    REQUIRE(run(how).status == 0);
    const std::string good = read_file(file);
    auto refused = [&](std::string_view bytes, const char* why) {
        write_file(file, bytes);
        Result r = run(how);
        CHECK(r.status == 1);
        CHECK(r.out == "");
        CHECK(has(r.err, "qwen3: " + file + ": "));
        CHECK(has(r.err, why));
        CHECK(ends(r.err, "\n"));
        CHECK(read_file(file) == bytes); // nor is it written over
    };
    auto flipped = [&](size_t at) {
        std::string bad = good;
        bad[at] = (char)(bad[at] ^ 1 << at % 8);
        return bad;
    };
    for (size_t i = 0; i < 48; i++) {
        INFO(i);
        refused(flipped(i), "");
    }
    for (size_t i = 48; i < good.size(); i += good.size() / 20) {
        INFO(i);
        refused(flipped(i), "damaged: its checksum");
    }
    refused(flipped(good.size() - 1), "damaged");
    for (size_t n : {(size_t)0, (size_t)1, (size_t)47, (size_t)48, (size_t)49, good.size() / 2, good.size() - 8, good.size() - 1}) {
        INFO(n);
        refused(good.substr(0, n), n == 0 ? "the file is empty" : n < 48 ? "not a prompt cache" : "damaged");
    }
    refused(good + std::string(8, '\0'), "damaged");
    refused(std::string(100, 'x'), "not a prompt cache");
    refused(read_file(MODEL), "not a prompt cache");
    // In a chat as well, before the first question.
    Result chat = run({"--prompt-cache", file}, "Hi\n");
    CHECK(chat.status == 1);
    CHECK(chat.out == "");

    // Another model: another shape; or the same with one weight changed.
    write_file(file, good);
    Result other = run({"--ids", "1,2,3", "-n", "3", "--prompt-cache", file}, "", "tests/fixtures/tied_bf16");
    CHECK(other.status == 1);
    CHECK(has(other.err, "the prompt cache of another model"));
    std::string model = read_file(MODEL);
    model.back() ^= 1;
    write_file(scratch / "model.bin", model);
    fs::copy_file("tests/fixtures/tiny/tokenizer.bin", scratch / "tokenizer.bin");
    other = run(how, "", scratch / "model.bin");
    CHECK(other.status == 1);
    CHECK(has(other.err, "the prompt cache of another model"));
    CHECK(run(how).status == 0);
    for (const char* dtype : {"int8", "f32"}) {
        other = run(how + Strings{"--dtype", dtype});
        CHECK(other.status == 1);
        CHECK(has(other.err, "the prompt cache of another model or --dtype"));
    }

    Result nowhere = run({"-n", "3", "-i", "Hi", "--prompt-cache", scratch / "no/such/file"});
    CHECK(nowhere.status == 1);
    CHECK(has(nowhere.err, "No such file or directory"));
}

TEST_CASE("a chat in a terminal begins with the model's starters; over a pipe there are none") {
    Scratch scratch;
    const std::string model = with_starters(MODEL, {"什么是 warp？", "What is \033[2J?"}, scratch / "m.bin");
    Terminal t({"-z", "tests/fixtures/tiny/tokenizer.bin"}, "dumb", true, "", nullptr, model);
    CHECK(has(t.all, "/help lists the commands\r\nQuestions that this model knows:\r\n"
                     "  什么是 warp？\r\n  What is ␛[2J?\r\n"));
    CHECK(!has(Terminal({"-z", "tests/fixtures/tiny/tokenizer.bin"}, "dumb").all, "Questions"));
    const Result piped = run({"-z", "tests/fixtures/tiny/tokenizer.bin", "-n", "1"}, "warp?\n", model);
    CHECK(piped.status == 0);
    CHECK(!has(piped.out + piped.err, "Questions"));
}
