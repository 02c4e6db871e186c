// libqwen3.so and qwen3.h: a program in plain C (test_library.c) and one in Python give the default model's answer.
// Environment: LIBRARY names the library, LIBRARY_C the C program.
#include "sj.h"
#include "tests/process.h"

static std::string variable(const char* name, const char* otherwise) { return getenv(name) ? getenv(name) : otherwise; }
static const std::string LIBRARY = variable("LIBRARY", "./libqwen3.so");
static const std::string C_PROGRAM = variable("LIBRARY_C", "build/g++/test_library_c");

static void check_answer(const std::string& program, const std::vector<std::string>& before) {
    const MappedFile answers("tests/fixtures/default/answers.jsonl");
    sj::Doc row;
    REQUIRE(sj::parse(row, answers.text().substr(0, answers.text().find('\n'))) == "");
    std::vector<std::string> arguments = before;
    arguments.push_back("data/tiny/model.bin");
    arguments.push_back(row.root()["question"].str());
    const Result r = Process(program.c_str(), arguments).wait();
    INFO(r.err);
    CHECK(r.status == 0);
    CHECK(r.out == row.root()["answer"].str() + "\n");
}

TEST_CASE("the C API from plain C: errors, tokens, logits, draws, two contexts in two threads, an answer") {
    check_answer(C_PROGRAM, {});
}

TEST_CASE("the C API opens a quantised model, which answers as it does in qwen3") {
    const Scratch s;
    const std::string qwen3 = variable("QWEN3", "./qwen3"), model = s / "int4.bin", question = "What is a warp?";
    REQUIRE(Process(qwen3.c_str(), {"data/tiny/model.bin", "--quantize", "int4", model}).wait().status == 0);
    fs::copy_file("data/tiny/tokenizer.bin", s / "tokenizer.bin");
    const Result r = Process(C_PROGRAM.c_str(), {model, question}).wait();
    INFO(r.err);
    CHECK(r.status == 0);
    CHECK(r.out == Process(qwen3.c_str(), {model, "-d", "cpu", "-t", "0", "-i", question}).wait().out);
}

static const bool NO_PYTHON = std::system("python3 -c pass >/dev/null 2>&1") != 0;
TEST_CASE("the Python package: answers, streams, tokens, logits, draws, errors, threads" * doctest::skip(NO_PYTHON)) {
    check_answer("/usr/bin/env", {"PYTHONPATH=capi/python", "PYTHONDONTWRITEBYTECODE=1", "QWEN3_LIBRARY=" + LIBRARY,
                                  "python3", "tests/unit/library.py"});
}

TEST_CASE("a wheel: its records are its files', its tag is what the library needs, and it answers" *
          doctest::skip(NO_PYTHON)) {
    const Scratch s;
    const Result made = Process("/usr/bin/env", {"python3", "capi/wheel.py", LIBRARY, s / "", "cpu"}).wait();
    INFO(made.err);
    REQUIRE(made.status == 0);
    check_answer("/usr/bin/env", {"PYTHONDONTWRITEBYTECODE=1", "python3", "tests/unit/wheel.py", s / ""});
    const Result none = Process("/usr/bin/env", {"python3", "capi/wheel.py", "qwen3.h", s / ""}).wait();
    CHECK(none.status == 1);
    CHECK(none.err == "qwen3.h: no 64-bit ELF library\n");
}
