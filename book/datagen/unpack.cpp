#include "book/datagen/unpack.h"
#include "book/datagen/training_rows.h"
#include "book/report.h"
#include "book/rows.h"
#include "book/text.h"
#include "model/chat_template.h"
#include "model/dataset.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <algorithm>
#include <string>
#include <vector>

namespace book {

namespace {

// Prints a packed row as messages or text; a pair as prompt and two answers, in TRL's form; a labelled answer as
// messages and kto_tag.
struct Unpacker {
    const Tokenizer& tokenizer;
    const int start = tokenizer.id("<|im_start|>"), end = tokenizer.id("<|im_end|>");

    using Ids = std::vector<int>;
    bool is_text(DatasetRow row) const { return (int)(*row.begin() & ~TRAIN) != start; }
    std::string text(Ids ids) const {
        if (!ids.empty() && ids.back() == tokenizer.id("<|endoftext|>")) ids.pop_back();
        return tokenizer.decode(ids, false);
    }
    static Ids ids_of(DatasetRow row) {
        Ids ids;
        for (uint32_t word : row) ids.push_back((int)(word & ~TRAIN));
        return ids;
    }

    std::vector<Message> messages(DatasetRow row) const { // <|im_start|>role\ncontent<|im_end|>\n
        const std::string no_thought = "<think>\n\n</think>\n\n";
        const Ids ids = ids_of(row);
        std::vector<Message> all;
        for (auto from = ids.begin(); from != ids.end();) {
            const auto to = std::find(from, ids.end(), end);
            std::string text = tokenizer.decode({from + (*from == start), to}, false);
            from = to == ids.end() ? to : to + 1;
            if (text == "\n" && from == ids.end() && !all.empty()) break; // after the last message
            if (text[0] == '\n') text.erase(0, 1);
            if (text.compare(0, 12, "<|im_start|>") == 0) text.erase(0, 12);
            const size_t line = std::min(text.find('\n'), text.size());
            std::string content = text.substr(std::min(line + 1, text.size()));
            if (content.compare(0, no_thought.size(), no_thought) == 0) content.erase(0, no_thought.size());
            all.push_back({text.substr(0, line), content});
        }
        return all;
    }
    static void write(sj::Writer& w, const char* key, const std::vector<Message>& messages) {
        w.key(key).array();
        for (auto& m : messages) w.object().field("role", m.role).field("content", m.content).end();
        w.end();
    }

    void write_row(sj::Writer& w, DatasetRow row) const {
        if (is_text(row)) w.field("text", text(ids_of(row)));
        else write(w, "messages", messages(row));
    }
    void write_pair(sj::Writer& w, DatasetRow chosen, DatasetRow rejected) const {
        for (DatasetRow row : {chosen, rejected}) {
            const bool first = row.begin() == chosen.begin();
            const char* key = first ? "chosen" : "rejected";
            if (is_text(row)) {
                const auto answer = std::find_if(row.begin(), row.end(), [](uint32_t word) { return word & TRAIN; });
                if (first) w.field("prompt", text(ids_of({row.begin(), answer})));
                w.field(key, text(ids_of({answer, row.end()})));
                continue;
            }
            std::vector<Message> before = messages(row), last = {before.back()};
            before.pop_back();
            if (first) write(w, "prompt", before);
            write(w, key, last);
        }
    }
};

} // namespace

int run_unpack(const Arguments& a) {
    const Tokenizer tokenizer(a.tokenizer());
    const Dataset data(a.files[0]);
    data.must_match(tokenizer.hash(), template_hash(), "-z names the one that pack had");
    const Unpacker unpacker = {tokenizer};
    Output out(a.output());
    Progress progress;
    for (size_t i = 0; i < data.rows(); i += data.group()) {
        progress.show("unpack", i, (double)i / (double)data.rows());
        const DatasetRow row = data.row(i), last = data.row(i + data.group() - 1);
        sj::Writer w;
        w.object().field("hash", hex(data.hash(i)));
        w.field("tokens", row.size() + (data.pairs() ? last.size() : 0));
        w.field("trained", count_trained(row) + (data.pairs() ? count_trained(last) : 0));
        if (data.pairs()) unpacker.write_pair(w, row, last);
        else unpacker.write_row(w, row);
        if (data.labelled()) w.field("kto_tag", data.desirable(i / 2));
        out.line(w.end().text);
    }
    out.commit();
    return 0;
}

} // namespace book
