#include "book/datagen/chunk.h"
#include "base/file.h"
#include "book/characters.h"
#include "book/chunks.h"
#include "book/read_book.h"
#include "book/report.h"
#include "book/rows.h"
#include "book/words.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <memory>
#include <unordered_map>

namespace book {

int run_chunk(const Arguments& a) {
    const Limits limits(a);
    ChunkSizes sizes = {a.number("--characters", limits.count("chunk.characters"), 50, 1 << 24), 0,
                        a.number("--overlap", limits.count("chunk.overlap"), 0, 1 << 20), limits.count("chunk.title")};
    std::unique_ptr<Tokenizer> tokenizer;
    if (a.has("--tokens")) {
        if (a.has("--characters")) DIE("--tokens and --characters: one of them");
        tokenizer = std::make_unique<Tokenizer>(a.tokenizer());
        sizes.most = a.number("--tokens", 0, 50, 1 << 24);
        sizes.measure = [&](std::string_view text) { return tokenizer->encode(text, false).size(); };
    }
    sizes.least = (size_t)((double)sizes.most * limits["chunk.least_share"]);
    Output out(a.output());
    std::unordered_map<uint64_t, size_t> seen; // a text that occurs again in a book gets -2, -3 after its id
    size_t count = 0, long_fences = 0;
    const std::string clean = a.text("--clean", "auto");
    if (clean != "auto" && clean != "yes" && clean != "no") DIE("--clean %s: expected auto, yes or no", clean.c_str());
    for (auto& path : a.files) {
        const std::string text_of_book = read_book(path, {clean, a.filter()});
        const std::string_view book = text_of_book;
        const std::string source = path.substr(path.rfind('/') + 1);
        for (const Chunk& c : cut_chunks(book, sizes)) {
            stop_if_interrupted();
            const std::string_view text = book.substr(c.begin, c.end - c.begin);
            const uint64_t hash = fnv1a(text, fnv1a(c.chapter + "\n"));
            const size_t again = ++seen[hash];
            sj::Writer w;
            w.object().field("id", "c" + hex(hash) + (again > 1 ? format("-%zu", again) : "")).field("source", source);
            w.field("chapter", c.chapter).field("lang", cjk_share(decode(text)) >= limits["lang.zh"] ? "zh" : "en");
            w.field("characters", count_characters(text)).field("begin", c.begin).field("body", c.body);
            out.line(w.field("end", c.end).field("text", text).end().text);
            count++;
            long_fences += sizes.measure(book.substr(c.body, c.end - c.body)) > sizes.most;
        }
    }
    out.commit();
    auto s = [](size_t n) { return n == 1 ? "" : "s"; };
    say(format("%zu chunk%s from %zu file%s", count, s(count), a.files.size(), s(a.files.size())));
    if (long_fences) say(format("%zu are longer than asked, since a code fence is never cut", long_fences));
    return 0;
}

} // namespace book
