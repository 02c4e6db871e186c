#include "book/pack.h"
#include "base/error.h"
#include "book/characters.h"
#include "book/conversations.h"
#include "book/dataset_info.h"
#include "book/report.h"
#include "book/rows.h"
#include "book/training_rows.h"
#include "model/chat_template.h"
#include "model/dataset.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace book {

namespace {

// The packed form of one line.
struct Packed {
    std::string kind;
    std::map<std::string, std::set<std::string>> tags;
    std::vector<Words> rows;       // of a preference: the chosen, the rejected
    size_t wordless = 0;           // answers left out because they are empty
    bool pair = false, mark = false; // mark: a message contains a special token's name as text

    Packed(const Tokenizer& tokenizer, sj::Value v, const Layout& layout) {
        auto look = [&](const Message& m) { mark |= has_mark(tokenizer, m.content); };
        if ((pair = is_preference(v, layout))) {
            const Preference p = read_preference(v, layout);
            kind = p.kind, tags = p.tags;
            if (is_wordless(p.chosen) || is_wordless(p.rejected)) wordless = 1;
            else rows = render_pair(tokenizer, p);
            if (kind == "text") return;
            std::for_each(p.prompt.begin(), p.prompt.end(), look);
            look(p.chosen), look(p.rejected);
        } else if (is_text(v, layout)) {
            kind = "text";
            const std::string text = read_text(v, layout);
            if (is_wordless({"", text})) wordless = 1;
            else rows = {render_text_row(tokenizer, text)};
        } else {
            const Conversation c = read_conversation(v, layout);
            kind = c.kind, tags = c.tags, rows = render_rows(tokenizer, c), wordless = count_wordless(c);
            std::for_each(c.messages.begin(), c.messages.end(), look);
        }
    }
};

// Packs the rows of a file.
struct Packer {
    const Layout layout;
    const Tokenizer tokenizer;
    const size_t longest;
    const bool refuse; // fail on longer rows
    Reader in;
    Report report;
    DatasetWriter out;
    RowsRead read = {};
    std::set<std::string> kinds = {};
    size_t lines = 0, trained = 0, marked = 0;

    Packer(const Arguments& a, const Layout& layout, const std::string& input)
        : layout(layout), tokenizer(a.tokenizer()), longest(a.number("--max-len", 512, 2, 1 << 24)),
          refuse(a.text("--over", "drop") == "refuse"), in(input),
          report(a.text("--dropped", input + ".dropped"), {"no answer", "too long"}),
          out(a.files[1], tokenizer.hash(), template_hash()) {}

    void add(const Packed& packed) {
        if (lines == 1) read.pairs = packed.pair;
        if (packed.pair != read.pairs)
            DIE("%s", read.pairs ? "no chosen and rejected answer, which the rows before it have"
                                 : "a chosen and a rejected answer, and no row before it has them");
        kinds.insert(packed.kind);
        for (auto& [tag, names] : packed.tags) read.tags[tag].insert(names.begin(), names.end());
        for (auto [key, value] : in.row().members())
            if (!is_absent(value)) read.keys.insert(key);
        marked += packed.mark;
        for (size_t i = 0; i < packed.wordless; i++) report.drop("no answer", "an answer says nothing", in);
        const size_t together = read.pairs ? 2 : 1;
        for (size_t i = 0; i < packed.rows.size(); i += together)
            add_row(packed.rows[i], packed.rows[i + together - 1]);
    }
    void add_row(const Words& row, const Words& last) { // not a pair: the same row twice
        if (const size_t size = std::max(row.size(), last.size()); size > longest) {
            const std::string fault = format("%zu tokens, more than %zu", size, longest);
            if (refuse) DIE("%s (--over drop leaves such rows out)", fault.c_str());
            return report.drop("too long", fault, in);
        }
        if (read.pairs) out.add_pair(row, last);
        else out.add(row);
        report.kept++;
        trained += count_trained(view(row)) + (read.pairs ? count_trained(view(last)) : 0);
    }
    void add_all() {
        Progress progress;
        while (in.next()) {
            progress.show("pack", lines++, in.share());
            const sj::Value v = in.need();
            try {
                add(Packed(tokenizer, v, layout));
            } catch (const Error& e) {
                DIE("%s: %s", in.where().c_str(), e.what());
            }
        }
        if (!report.kept)
            DIE("%s: %s", in.path.c_str(), !lines ? "no row in it"
                : report.rules[1].dropped ? "all rows are too long" : "no answer says anything");
    }

    // "prompt <- question; not read: input, system"
    std::string columns() const {
        std::set<std::string> left = read.keys;
        std::string used, rest;
        for (auto& kind : kinds)
            for (auto& [column, key] : layout.columns_of(kind, read.pairs))
                if (left.erase(key)) used += (used.empty() ? "" : ", ") + column + " <- " + key;
        for (auto& key : left) rest += (rest.empty() ? "; not read: " : ", ") + score_excerpt(key, 40);
        return "columns: " + used + rest;
    }
    void tell(const std::string& path) const {
        say(format("%s: %zu %s, %llu tokens, %zu of them trained", path.c_str(), lines,
                   read.pairs ? "pairs" : "conversations", (unsigned long long)out.begins.back(), trained));
        say(columns());
        if (read.pairs && kinds.count("text"))
            say("a prompt that is a text is continued without the chat template, as TRL does; a list of messages is "
                "asked");
        if (marked)
            say(format("%zu %s names of special tokens, as <|im_end|>, in messages: there they are text", marked,
                       marked == 1 ? "row has" : "rows have"));
    }
    // Why the rows get no entry in a dataset_info.json; "": they get one.
    std::string no_entry() const {
        for (auto& [tag, names] : read.tags)
            if (names.size() > 1) return "roles with more than one name";
        if (kinds.size() != 1) return "rows of more than one kind";
        if (read.pairs && (kinds.count("trl") || kinds.count("text"))) return "it has no words for TRL's pairs";
        return "";
    }
};

} // namespace

int run_pack(const Arguments& a) {
    if (a.files.size() != 2) DIE("pack takes two files: the rows and the dataset to write");
    std::string input = a.files[0];
    const std::string info_name = "dataset_info.json", name = input.substr(input.rfind('/') + 1);
    const std::string over = a.text("--over", "drop");
    const bool by_info = name == info_name;
    if (over != "drop" && over != "refuse") DIE("--over %s: expected drop or refuse", over.c_str());
    const Layout layout = by_info ? read_dataset_info(input, a.need("--name"), &input) : Layout();
    Packer packer(a, layout, input);
    packer.add_all();
    packer.out.commit();
    packer.report.finish("rows");
    packer.tell(a.files[1]);
    const std::string info = a.text("--info", input.substr(0, input.rfind('/') + 1) + info_name);
    if (by_info || info == "none" || a.files[0] == "-") return 0;
    packer.read.kind = *packer.kinds.begin();
    const std::string why = packer.no_entry();
    if (why.empty()) write_dataset_info(info, name, packer.read);
    else say("no " + info_name + ": " + why);
    return 0;
}

} // namespace book
