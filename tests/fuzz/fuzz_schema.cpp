// libFuzzer: bytes become a JSON schema, not a text that may be one; every whole text of its grammar is a value that it
// allows, by a validator that knows nothing of grammars. A schema is refused by a line that says why.
#include "base/error.h"
#include "form/schema.h"
#include "model/tokenizer.h"
#include "tests/schemas.h"
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Tokenizer tokenizer("tests/fixtures/tiny/tokenizer.bin");
    static const auto vocabulary = std::make_shared<const Vocabulary>(tokenizer);
    size_t at = 0;
    Choices choose{[&] { return at < size ? (uint32_t)data[at++] : 0; }};
    const std::string text = SchemaMaker{choose}.make();
    sj::Doc doc, said;
    if (!sj::parse(doc, text).empty()) abort();
    std::shared_ptr<Automaton> automaton;
    try {
        automaton = std::make_shared<Automaton>(grammar_of_schema(doc.root()), vocabulary);
    } catch (const Error& e) {
        if (strlen(e.what()) == 0) abort();
        return 0;
    }
    uint32_t random = (uint32_t)size + 1;
    Choices draws{[&] { return (random = random * 1664525 + 1013904223) >> 8; }};
    for (int i = 0; i < 6; i++) {
        const std::string answer = draw_text(*automaton, draws, 300);
        if (answer.empty()) continue;
        if (sj::parse(said, answer).empty() && Validator{doc.root()}.valid(doc.root(), said.root())) continue;
        fprintf(stderr, "schema: %s\nanswer: %s\n", text.c_str(), answer.c_str());
        abort();
    }
    return 0;
}
