#include "book/pack.h"
#include "base/error.h"
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
#include <set>
#include <string>
#include <vector>

namespace book {

namespace {

// What a line of rows becomes.
struct Packed {
    std::string kind;
    std::vector<Words> rows; // of a preference the chosen and the rejected
    bool pair = false;

    Packed(const Tokenizer& tokenizer, sj::Value v, const Layout& layout) {
        if (v.is(sj::Object) && is_preference(v, layout)) {
            const Preference p = read_preference(v, layout);
            kind = p.kind, rows = render_pair(tokenizer, p), pair = true;
        } else if (v["text"].is(sj::String) && !v["messages"] && !v["conversations"] && !v[layout.name.at("prompt")]) {
            kind = "text", rows = {render_text_row(tokenizer, v["text"].str())};
        } else {
            const Conversation c = read_conversation(v, layout);
            kind = c.kind, rows = render_rows(tokenizer, c);
        }
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
    const size_t longest = a.number("--max-len", 512, 2, 1 << 24);
    const Tokenizer tokenizer(a.tokenizer());
    Reader in(input);
    Report report(a.text("--dropped", input + ".dropped"), {"too long"});
    DatasetWriter out(a.files[1], tokenizer.hash(), template_hash());
    Progress progress;
    std::set<std::string> kinds, columns;
    size_t conversations = 0, trained = 0;
    bool pairs = false;
    while (in.next()) {
        progress.show("pack", conversations++, in.share());
        const sj::Value v = in.need();
        const Packed packed = [&] {
            try {
                return Packed(tokenizer, v, layout);
            } catch (const Error& e) {
                DIE("%s: %s", in.where().c_str(), e.what());
            }
        }();
        if (conversations == 1) pairs = packed.pair;
        if (packed.pair != pairs)
            DIE("%s: %s", in.where().c_str(), pairs ? "no chosen and rejected answer, which the rows before it have"
                                                    : "a chosen and a rejected answer, and no row before it has them");
        kinds.insert(packed.kind);
        for (auto [key, value] : v.members())
            if (!is_absent(value)) columns.insert(key);
        const size_t together = pairs ? 2 : 1;
        for (size_t i = 0; i < packed.rows.size(); i += together) {
            const Words &row = packed.rows[i], &last = packed.rows[i + together - 1];
            if (const size_t size = std::max(row.size(), last.size()); size > longest) {
                const std::string fault = format("%zu tokens, more than %zu", size, longest);
                if (over == "refuse")
                    DIE("%s: %s (--over drop leaves such rows out)", in.where().c_str(), fault.c_str());
                report.drop("too long", fault, in);
                continue;
            }
            if (pairs) out.add_pair(row, last);
            else out.add(row);
            report.kept++;
            trained += count_trained(view(row)) + (pairs ? count_trained(view(last)) : 0);
        }
    }
    const uint64_t tokens = out.begins.back();
    if (!report.kept) DIE("%s: %s", input.c_str(), conversations ? "all rows are too long" : "no row in it");
    out.commit();
    report.finish("rows");
    say(format("%s: %zu %s, %llu tokens, %zu of them trained", a.files[1].c_str(), conversations,
               pairs ? "pairs" : "conversations", (unsigned long long)tokens, trained));
    if (pairs && kinds.count("text"))
        say("a prompt that is a text is continued without the chat template, as TRL does; a list of messages is asked");
    const std::string info = a.text("--info", input.substr(0, input.rfind('/') + 1) + info_name);
    if (by_info || info == "none" || a.files[0] == "-") return 0;
    if (kinds.size() != 1) say("no " + info_name + ": rows of more than one kind");
    else if (pairs && (kinds.count("trl") || kinds.count("text")))
        say("no " + info_name + ": it has no words for TRL's pairs");
    else write_dataset_info(info, name, *kinds.begin(), columns, pairs);
    return 0;
}

} // namespace book
