// A program run from a test: its standard streams are files in memory; and JSON, lines, refusals.
#pragma once
#include "sj.h"
#include "tests/files.h"
#include <csignal>
#include <functional>
#include <sys/resource.h>
#include <sys/wait.h>
#include <vector>

using Strings = std::vector<std::string>;
inline Strings operator+(Strings a, const Strings& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

struct Result {
    int status; // 1000 + the signal that ended the program
    std::string out, err;
};

struct Process {
    MemoryFile in, out, err;
    pid_t pid;

    // prepare: what the child does before it becomes the program.
    Process(const char* program, const Strings& arguments, std::string_view input = "", const std::function<void()>& prepare = nullptr)
        : in(input) {
        std::vector<char*> argv = {(char*)program};
        for (auto& a : arguments) argv.push_back((char*)a.c_str());
        argv.push_back(nullptr);
        out.append_only(), err.append_only();
        pid = fork();
        REQUIRE(pid >= 0);
        if (pid) return;
        dup2(in.fd, 0), dup2(out.fd, 1), dup2(err.fd, 2);
        const rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        if (prepare) prepare();
        alarm(1500); // (a whole training on two slow cores)
        execv(argv[0], argv.data());
        _exit(127);
    }
    // A function as a program by itself: its streams are this Process's, its value is the exit status.
    static Result of(const std::function<int()>& f) {
        const auto run = [&] { _exit(f()); };
        return Process("", {}, "", run).wait();
    }
    // Ends a program that should be running: a fault with its messages if it has ended by itself.
    void kill_running() {
        int status;
        if (waitpid(pid, &status, WNOHANG) == pid) FAIL_CHECK("it ended by itself: ", err.text());
        else kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
    }
    Result wait() {
        int status;
        REQUIRE(waitpid(pid, &status, 0) == pid);
        return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status), out.text(), err.text()};
    }
};

// Refused: nothing on stdout, one line on stderr that begins with the program's name and speaks of `word`, exit status 1.
inline void check_refusal(const Result& r, const std::string& program, const std::string& word) {
    INFO("wanted: " << word << "\ngot: " << r.err);
    CHECK(r.status == 1);
    CHECK(r.out == "");
    CHECK(r.err.compare(0, program.size() + 2, program + ": ") == 0);
    CHECK(r.err.find('\n') == r.err.size() - 1);
    CHECK(r.err.find(word) != std::string::npos);
}

// The names of a program's options, as --help lists them.
inline std::vector<std::string> options_of(const char* program) {
    const std::string help = Process(program, {"--help"}).wait().out;
    std::vector<std::string> names;
    for (size_t at = 0; at < help.size(); at = help.find('\n', at) + 1) {
        const size_t name = help.find("--", at), end = help.find_first_of(" \n", name);
        const std::string before = help.substr(at, name - at);
        const bool brief = before.size() == 6 && before[2] == '-' && before[4] == ',';
        if (before == "      " || brief) names.push_back(help.substr(name, end - name));
        if (help.find('\n', at) == help.npos) break;
    }
    REQUIRE(names.size() > 20);
    return names;
}

// JSON that outlives its text.
struct Json {
    std::string text;
    sj::Doc doc;
    explicit Json(std::string s) : text(std::move(s)) {
        INFO(text);
        REQUIRE(sj::parse(doc, text) == "");
    }
    Json(const Json&) = delete;
    sj::Value root() const { return doc.root(); }
    sj::Value operator[](std::string_view key) const { return root()[key]; }
};

// The text's lines. Of what a program still writes only the `whole` ones can be trusted.
inline std::string whole(std::string text) { return text.resize(text.rfind('\n') + 1), text; }
inline Strings lines(const std::string& text) {
    Strings all;
    for (size_t at = 0, end; at < text.size(); at = end + 1) {
        end = text.find('\n', at);
        REQUIRE(end != std::string::npos); // the last one is whole
        all.push_back(text.substr(at, end - at));
    }
    return all;
}
// The numbers of a field in a folder's trainer_log.jsonl, of the lines that have it; nothing where there is none yet.
// While the trainer `runs`, its last line may be seen half written: only whole ones count.
inline std::vector<double> logged(const std::string& folder, const std::string& field, bool runs = false) {
    std::vector<double> v;
    const std::string log = read_file_if(folder + "/trainer_log.jsonl");
    for (auto& line : lines(runs ? whole(log) : log))
        if (const Json j(line); j[field]) v.push_back(j[field].number());
    return v;
}
