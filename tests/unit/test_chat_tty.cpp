// The chat and the prompt cache, from outside: the program (QWEN3, else ./qwen3) on a pseudo-terminal and on pipes,
// with the random model in fixtures/tiny. What it says is babble, so nothing here expects certain words: runs are
// compared with each other, and what the program understood is read from /save.
// Where many tokens are wanted, a presence penalty of -100 makes an answer repeat its first token without end.
#include "../../tokenizer.h"
#include "../files.h"
#include <chrono>
#include <csignal>
#include <doctest/doctest.h>
#include <poll.h>
#include <pty.h>
#include <set>
#include <sys/ioctl.h>
#include <sys/wait.h>
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
// The number before (or, negative, behind) some words of the program's.
static long number_after(std::string_view text, std::string_view words) {
    const size_t at = text.find(words);
    return at == text.npos ? -1 : atol(std::string(text.substr(at + words.size(), 20)).c_str());
}

// Replaces this (forked) process.
[[noreturn]] static void become(const Strings& arguments, const std::string& model) {
    const char* program = getenv("QWEN3");
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
        become(arguments, model);
    }
    const int status = status_of(pid);
    return {status, read_file(scratch / "out"), read_file(scratch / "err")};
}

// ---------------------------------------------------------------------------------------------- with a terminal

struct Terminal {
    int fd = -1;
    pid_t pid = -1;
    std::string all, fresh; // what it has shown; of this, what the last wait saw
    bool edits = false;     // with libedit

    explicit Terminal(const Strings& arguments, const std::string& kind = "xterm", bool chat = true) {
        winsize size = {24, 200, 0, 0};
        pid = forkpty(&fd, nullptr, nullptr, &size);
        REQUIRE(pid >= 0);
        if (pid == 0) {
            setenv("TERM", kind.c_str(), 1);
            setenv("LC_ALL", "C", 1); // UTF-8 must work all the same
            unsetenv("NO_COLOR");
            become(arguments, MODEL);
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
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
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
    std::string prompt(const std::string& mark = "> ") {
        INFO(all);
        REQUIRE(wait([&] { return ends(fresh, "\n" + mark) || ends(fresh, "\033[?2004h" + mark); }));
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

// What /save wrote.
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
        t.prompt("… ");
        t.type("two\\\r");
        t.prompt("… ");
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

TEST_CASE("a window of another size, and back from Ctrl-Z") {
    Terminal t({"-s", "1", "-n", "4"});
    t.type("ab");
    t.wait_for("ab");
    winsize size = {10, 60, 0, 0};
    REQUIRE(ioctl(t.fd, TIOCSWINSZ, &size) == 0);
    REQUIRE(kill(t.pid, SIGCONT) == 0);
    usleep(50000);
    t.send("cd");
    CHECK(saved_by(t).questions() == Strings{"abcd"});
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
        for (int i : {0, 1}) { // what was shown is what was kept
            const std::string kept = on_screen(s.messages[2 * i + 1].content);
            CHECK(shown[i].size() > 100);
            CHECK(kept.substr(0, shown[i].size()) == shown[i]);
        }
        t.type("/exit\r");
        CHECK(t.end() == 0);
    }
}

TEST_CASE("Ctrl-C and Ctrl-D leave at the prompt") {
    for (const std::string kind : {"xterm", "dumb"})
        for (const char* key : {"\003", "\004"})
            for (bool asked : {false, true}) {
                INFO(kind << " " << int(*key) << " " << asked);
                Terminal t({"-n", "3"}, kind);
                if (asked) t.send("Hello");
                t.type(key);
                CHECK(t.end() == 0);
                CHECK(ends(t.all, "\n"));
            }
    Terminal t({"-n", "3"}); // and with half a line typed
    t.type("half");
    t.wait_for("half");
    t.type("\003");
    CHECK(t.end() == 0);
}

TEST_CASE("the terminal gets its settings back") {
    for (const std::string kind : {"xterm", "dumb"})
        for (const char* key : {"/exit\r", "\003", "\004"}) {
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
                become({"-n", "3"}, MODEL);
            }
            std::string shown;
            char some[4096];
            while (!ends(shown, "> ")) {
                ssize_t n = read(master, some, sizeof some);
                REQUIRE(n > 0);
                shown.append(some, (size_t)n);
            }
            REQUIRE(tcgetattr(slave, &during) == 0);
            CHECK((during.c_iflag & IUTF8) != 0);
            REQUIRE(write(master, key, strlen(key)) == (ssize_t)strlen(key));
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
    for (const char* name : {"/exit", "/clear", "/system", "/think", "/no_think", "/regen", "/save", "/load", "/stats"}) CHECK(has(help, name));

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

    // A line is a command only if it is exactly one.
    const Strings plain = {"/exit please", " /exit", "/exits", "/clear\n/exit", "/", "/stats now", "/regen 1", "/system\nx", "/Exit", "/savex y"};
    for (auto& line : plain) {
        std::string typed = line;
        for (char& c : typed)
            if (c == '\n') c = '\r'; // pasted
        t.send(typed);
    }
    CHECK(saved_by(t).questions() == plain);
    CHECK(has(t.send("/save"), "/save needs a FILE"));
    CHECK(has(t.send("/load"), "/load needs a FILE"));
    CHECK(has(t.send("/save " + (scratch / "no/such/folder")), "No such file or directory"));
    CHECK(saved_by(t).questions() == plain);
    t.type("/exit\r");
    CHECK(t.end() == 0);
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
    // What others write: the system prompt as the first message, content in parts, other keys.
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
    Result again = run(how, "one\n/stats\n/help\n/nothing here\n");
    std::string expected;
    std::vector<Message> said;
    for (const char* q : {"one", "/nothing here"}) {
        said.push_back({"user", q});
        Answer a = fresh_answer(render_chat(tokenizer(), said, {true, true}), Strings{"-n", "12", "-r", "1", "-s", said.size() == 1 ? "1" : "2"});
        expected += a.text + "\n";
        said.push_back({"assistant", a.text});
    }
    CHECK(again.out == expected);
    CHECK(run(how, "").out == "");
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
        CHECK(count(shown, "\033[0m") == dims);
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
