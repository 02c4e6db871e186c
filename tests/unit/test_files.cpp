// base/: files that a signal leaves behind, paths that options name, texts in UTF-8.
#include "base/appended_file.h"
#include "base/file.h"
#include "base/options.h"
#include "base/temporary.h"
#include "base/text.h"
#include "tests/files.h"
#include "tests/process.h"
#include <csignal>
#include <memory>
#include <sys/wait.h>
#include <vector>

TEST_CASE("a text that does not fit a file leaves none of its bytes there") {
    Scratch s;
    const Result r = Process::of([&] { // files may have so many bytes only, as on a disk that is full
        signal(SIGXFSZ, SIG_IGN);
        const rlimit most = {10, 10};
        setrlimit(RLIMIT_FSIZE, &most);
        AppendedFile file(s / "a");
        auto fault_of = [&](const char* text) -> std::string {
            try {
                file.add(text);
                return "";
            } catch (const Error& e) {
                return e.what();
            }
        };
        const bool first = fault_of("12345\n").empty(), long_one = fault_of("7890\n") == (s / "a") + ": File too large";
        return first + 2 * long_one + 4 * fault_of("789\n").empty();
    });
    CHECK(r.status == 7);
    CHECK(read_file(s / "a") == "12345\n789\n");
    AppendedFile(s / "a").add("more\n");
    CHECK(read_file(s / "a") == "12345\n789\nmore\n");
    CHECK_THROWS_WITH_AS(AppendedFile(s / "a", true), doctest::Contains("/a: File exists"), Error);
}

TEST_CASE("an unfinished file or folder goes when a signal ends the program") {
    constexpr int SIGNALS[] = {SIGTERM, SIGHUP, SIGINT, SIGQUIT, SIGPIPE};
    Scratch s;
    auto written = [&](auto end) { // the status of a program that ends so while it writes
        return Process::of([&] {
            setenv("TMPDIR", s.path.c_str(), 1);
            for (int number : SIGNALS) signal(number, SIG_DFL); // (doctest has handlers)
            end_on_signals();
            OutputFile out(s / "file");
            out.write("some");
            const TemporaryFolder folder;
            write_file(folder.path + "/document", "text");
            if (s.count() != 2) return 1;
            return end(out);
        }).status;
    };
    for (int number : SIGNALS) {
        INFO("signal " << number);
        CHECK(written([&](OutputFile&) { return raise(number); }) == 1000 + number);
        CHECK(s.count() == 0);
    }
    CHECK(written([](OutputFile&) { // Ctrl-C, which the program hears, and again
        take_signals({SIGINT}, {});
        raise(SIGINT);
        return interrupted ? raise(SIGINT) : 2;
    }) == 1000 + SIGINT);
    CHECK(written([](OutputFile&) -> int { leave(5); }) == 5);
    CHECK(s.count() == 0);
    CHECK(written([](OutputFile& out) { // what is ignored (nohup) stays ignored; a child removes nothing of its parent
        signal(SIGHUP, SIG_IGN), end_on_signals(), raise(SIGHUP);
        if (const pid_t child = fork()) waitpid(child, nullptr, 0);
        else raise(SIGTERM);
        out.commit();
        return 0;
    }) == 0);
    CHECK(read_file(s / "file") == "some");
    CHECK(s.count() == 1);
    std::vector<std::unique_ptr<Unfinished>> many;
    for (int i = 0; i < 300; i++) many.push_back(std::make_unique<Unfinished>(s / std::to_string(i)));
    Unfinished(std::string(5000, 'x'));
}

TEST_CASE("paths of options are checked when they are read: one that is missing, one that is of another kind") {
    Scratch s;
    write_file(s / "file", "x");
    fs::create_directory(s / "folder");
    std::string to;
    auto fault = [&](const Setter& set, const std::string& path) {
        try {
            set("--x", path.c_str());
        } catch (const Error& e) {
            const std::string text = e.what(), before = "--x " + path + ": ";
            return text.compare(0, before.size(), before) ? text : text.substr(before.size());
        }
        return std::string(to == path ? "" : "not set");
    };
    CHECK(fault(existing(to), s / "file") == "");
    CHECK(fault(existing(to), s / "folder") == "");
    CHECK(fault(existing(to), s / "none") == "No such file or directory");
    CHECK(fault(existing_file(to), s / "folder") == "not a regular file");
    CHECK(fault(existing_file(to), s / "file/x") == "Not a directory");
    CHECK(fault(existing_file(to, true), "-") == "");
    CHECK(fault(existing_file(to), "-") == "No such file or directory");
    CHECK(fault(existing_file(to), "/dev/null") == "not a regular file"); // nor a FIFO without a writer, which would hang
    CHECK(fault(output_file(to), s / "file") == "");
    CHECK(fault(output_file(to), s / "new") == "");
    CHECK(fault(output_file(to), "new") == "");
    CHECK(fault(output_file(to), "/dev/null") == "");
    CHECK(fault(output_file(to), s / "folder") == "is a directory");
    CHECK(fault(output_file(to), s / "none/new") == "No such file or directory");
    CHECK(fault(output_file(to), s / "file/new") == "Not a directory");
    for (auto& set : {existing(to), existing_file(to), output_file(to)}) CHECK(fault(set, "") == "--x needs a value");
    for (const char* good : {"folder", "folder/", "a/b", "a/b/"}) CHECK_NOTHROW(must_be_writable("-o", s / good, true));
    CHECK_NOTHROW(must_be_writable("-o", "a/b", true));
    for (const char* bad : {"file", "file/a", "file/a/b"}) CHECK_THROWS_AS(must_be_writable("-o", s / bad, true), Error);
    CHECK_NOTHROW(must_be_new("-o", s / "new", false));
    CHECK_NOTHROW(must_be_new("-o", s / "file", true));
    CHECK_NOTHROW(must_be_new("-o", "/dev/null", false));
    CHECK_THROWS_WITH_AS(must_be_new("-o", s / "file", false), doctest::Contains("exists; --overwrite replaces it"), Error);
    CHECK(s.count() == 2);
}

TEST_CASE("texts that are not UTF-8 are refused") {
    Scratch s;
    std::string to;
    std::vector<std::string> all;
    for (const std::string bad : {"\xff", "warp \xe7\xba", "\xed\xa0\x80", "a\xc0\x80"}) {
        CHECK_THROWS_WITH_AS(text(to)("--x", bad.c_str()), doctest::Contains("--x: invalid UTF-8 at byte "), Error);
        CHECK_THROWS_AS(list(all)("--x", bad.c_str()), Error);
        write_file(s / "f", bad);
        CHECK_THROWS_WITH_AS(text_of(s / "f"), doctest::Contains("no UTF-8 at byte "), Error);
    }
    CHECK(invalid_utf8("ab\xff") == 2);
    for (const std::string good : {"warp 线程束 🐘", "\t\x7f"}) {
        text(to)("--x", good.c_str());
        CHECK(to == good);
        write_file(s / "f", "\xEF\xBB\xBF" + good);
        CHECK(text_of(s / "f") == good);
    }
    write_file(s / "f", std::string("\xff\xfe" "a\0", 4));
    CHECK_THROWS_WITH_AS(text_of(s / "f"), doctest::Contains("UTF-16"), Error);
}
