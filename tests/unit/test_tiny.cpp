// The default model, data/tiny/model.bin: its greedy answers to twelve questions are those in tests/fixtures/default, on
// the CPU: nine training questions, the README's first, one in other words, and greetings; also three to a conversation.
// After it is trained anew (make -C data tiny), `make -C data answers` asks them again; read what it says.
// Environment: QWEN3 names the program (default ./qwen3).
#include "sj.h"
#include "tests/process.h"

static const char* PROGRAM = getenv("QWEN3") ? getenv("QWEN3") : "./qwen3";
static const std::string MODEL = "data/tiny/model.bin";

TEST_CASE("greedy answers of the default model") {
    const MappedFile answers("tests/fixtures/default/answers.jsonl");
    size_t rows = 0;
    for (auto& line : lines(std::string(answers.text()))) {
        sj::Doc doc;
        REQUIRE(sj::parse(doc, line) == "");
        const std::string question = doc.root()["question"].str();
        const Result r = Process(PROGRAM, {MODEL, "-d", "cpu", "-t", "0", "-i", question}).wait();
        INFO(question << "\n" << r.err);
        CHECK(r.status == 0);
        CHECK(r.out == doc.root()["answer"].str() + "\n");
        CHECK(doc.root()["finish"].str() == "stop"); // it ends by itself
        rows++;
    }
    CHECK(rows == 12);
}

TEST_CASE("the default model answers a second and a third question of a conversation") {
    const MappedFile answers("tests/fixtures/default/answers.jsonl");
    const Strings rows = lines(std::string(answers.text()));
    REQUIRE(rows.size() == 12);
    for (size_t first = 0; first < rows.size(); first += 3) {
        std::string questions, expected;
        for (size_t i = first; i < first + 3; i++) {
            const Json row(rows[i]);
            questions += row["question"].str() + "\n", expected += row["answer"].str() + "\n";
        }
        const Result r = Process(PROGRAM, {MODEL, "-d", "cpu", "-t", "0"}, questions).wait();
        INFO(questions << "\n" << r.err);
        CHECK(r.status == 0);
        CHECK(r.out == expected);
    }
}

TEST_CASE("the default model is small, and finds the vocabulary beside it") {
    const MappedFile model(MODEL), vocabulary("data/tiny/tokenizer.bin");
    CHECK(model.size + vocabulary.size <= 20000000);
    const Result r = Process(PROGRAM, {MODEL, "-d", "cpu", "-n", "1", "-i", "什么是 warp？"}).wait();
    CHECK(r.status == 0);
}
