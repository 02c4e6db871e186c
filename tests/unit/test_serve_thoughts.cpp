// Where a thought begins and ends in the server's answers: by what the prompt left open.
#include "model/chat_template.h"
#include "server/engine/speech.h"
#include <doctest/doctest.h>

using namespace server;

// The thought and the answer that these ids are, after a prompt that ends in `before`.
static std::pair<std::string, std::string> parts_of(bool thinking, const std::string& before, const std::string& text) {
    static const Tokenizer t("tests/fixtures/tiny/tokenizer.bin");
    Job job;
    job.thinking = thinking, job.prompt = t.encode("<|im_start|>assistant\n" + before, true);
    Speech speech(t, job);
    std::string thought, answer;
    auto take = [&](const Piece& piece) { (piece.thought ? thought : answer) += piece.text; };
    for (int id : t.encode(text, true)) {
        Piece piece;
        speech.feed(piece, TokenInfo{id, 0, "", {}});
        take(piece);
    }
    Piece piece;
    speech.finish(piece);
    take(piece);
    return {thought, answer};
}

TEST_CASE("serve: a thought is what the prompt has opened, or what begins with the mark where it may") {
    using Parts = std::pair<std::string, std::string>;
    CHECK(parts_of(true, "", "<think>\nSo.\n</think>\n\nYes.") == Parts("So.", "Yes."));
    CHECK(parts_of(true, "", "Yes.") == Parts("", "Yes."));
    CHECK(parts_of(true, "<think>\n", "So.\n</think>\n\nYes.") == Parts("So.", "Yes.")); // Thinking-2507
    CHECK(parts_of(true, "<think>\n", "\nSo.") == Parts("So.", ""));                      // cut off
    CHECK(parts_of(false, "", "<think>\nSo.\n</think>\n\nYes.").first == "");             // Instruct-2507
    CHECK(parts_of(false, "<think>\n\n</think>\n\n", "Yes.") == Parts("", "Yes."));
    CHECK(parts_of(true, "<think>\n\n</think>\n\n", "Yes.") == Parts("", "Yes."));
}
