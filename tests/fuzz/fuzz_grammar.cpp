// libFuzzer: a JSON schema, a regular expression or GBNF becomes a grammar, or an Error; then masks are asked for and
// followed at random: each has a token, and each of its tokens leads on.
#include "form/gbnf.h"
#include "form/matcher.h"
#include "form/regex.h"
#include "form/schema.h"
#include "form/tools.h"
#include "model/tokenizer.h"

static void must(bool ok) { if (!ok) abort(); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Tokenizer tokenizer("tests/fixtures/tiny/tokenizer.bin");
    static const auto vocabulary = std::make_shared<const Vocabulary>(tokenizer);
    if (size < 3 || size > 4096) return 0;
    const std::string_view text((const char*)data + 2, size - 2);
    std::shared_ptr<Automaton> automaton;
    try {
        sj::Doc doc;
        if (data[0] % 4 == 0) automaton = std::make_shared<Automaton>(grammar_of_regex(text), vocabulary);
        else if (data[0] % 4 == 1) automaton = std::make_shared<Automaton>(grammar_of_gbnf(text), vocabulary);
        else if (!sj::parse(doc, text).empty()) return 0;
        else if (data[0] % 4 == 2) automaton = std::make_shared<Automaton>(grammar_of_schema(doc.root()), vocabulary);
        else automaton = std::make_shared<Automaton>(grammar_of_calls(read_tools(doc.root()), data[1] % 2), vocabulary);
    } catch (const Error& e) {
        must(strlen(e.what()) > 0);
        return 0;
    }
    Matcher m(automaton);
    std::vector<uint32_t> bits(vocabulary->words());
    uint32_t random = data[1] * 2654435761u + 1;
    for (int step = 0; step < 24 && !m.must_end(); step++) {
        m.mask(bits.data());
        std::vector<int> allowed;
        for (int id = 0; id < tokenizer.size(); id++)
            if (bits[(size_t)id / 32] >> id % 32 & 1) allowed.push_back(id);
        must(!allowed.empty());
        random = random * 1664525 + 1013904223;
        must(m.advance(allowed[(random >> 8) % allowed.size()]));
    }
    must(automaton->bytes() < 2 * Automaton::MOST_MEMORY);
    return 0;
}
