#include "book/datagen/pack.h"
#include "base/error.h"
#include "book/characters.h"
#include "book/conversations.h"
#include "book/datagen/dataset_info.h"
#include "book/datagen/taught.h"
#include "book/datagen/training_rows.h"
#include "book/report.h"
#include "book/rows.h"
#include "model/chat_template.h"
#include "model/dataset.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <algorithm>
#include <map>
#include <memory>
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
    std::vector<std::vector<Outcome>> outcomes; // of a taught row's trained tokens
    std::string fault;                          // ... or why it cannot be taught
    size_t foreign = 0;                         // see TaughtRow
    bool pair = false, labelled = false, desirable = false, taught = false, recut = false;
    bool mark = false; // a message contains a special token's name as text

    Packed(const Tokenizer& tokenizer, sj::Value v, const Layout& layout) {
        auto look = [&](const Message& m) { mark |= has_mark(tokenizer, m.content); };
        labelled = is_labelled(v, layout);
        if ((pair = is_preference(v, layout))) {
            if (labelled) DIE("a pair, and a label (kto_tag): a row has one of them");
            const Preference p = read_preference(v, layout);
            kind = p.kind, tags = p.tags;
            if (is_wordless(p.chosen) || is_wordless(p.rejected)) wordless = 1;
            else rows = render_pair(tokenizer, p);
            if (kind == "text") return;
            std::for_each(p.prompt.begin(), p.prompt.end(), look);
            look(p.chosen), look(p.rejected);
        } else if (is_text(v, layout)) {
            if (labelled) DIE("a text, and a label (kto_tag): there is no prompt");
            kind = "text";
            const std::string text = read_text(v, layout);
            if (is_wordless({"", text})) wordless = 1;
            else rows = {render_text_row(tokenizer, text)};
        } else {
            const Conversation c = read_conversation(v, layout);
            kind = c.kind, tags = c.tags, rows = render_rows(tokenizer, c), wordless = count_wordless(c);
            std::for_each(c.messages.begin(), c.messages.end(), look);
            if ((taught = layout.shown() && is_taught(v))) teach(tokenizer, c, v["logprobs"]);
            if (!labelled) return;
            if (taught) DIE("logprobs, and a label (kto_tag): a row has one of them");
            desirable = read_label(v, layout), wordless = is_wordless(c.messages.back());
            if (wordless) rows.clear();
            else rows = {rows.back()}; // the label is of the last answer
        }
    }
    void teach(const Tokenizer& tokenizer, const Conversation& c, sj::Value logprobs) { // its last answer
        wordless = is_wordless(c.messages.back()), rows.clear();
        if (wordless) return;
        TaughtRow row(tokenizer, c, logprobs);
        fault = row.fault, foreign = row.foreign, recut = row.recut;
        if (fault.empty()) rows = {std::move(row.row)}, outcomes = std::move(row.outcomes);
    }
};

struct Source {
    Layout layout;
    std::string path;
};

// Packs the rows of some files into one.
struct Packer {
    const std::vector<Source>& sources;
    const Source* source = nullptr; // that is being read
    std::unique_ptr<Reader> reader;
    const Tokenizer tokenizer;
    const size_t longest, most; // tokens of a row; rows of a file
    const bool refuse;          // fail on longer rows
    Report report;
    DatasetWriter out;
    RowsRead read = {};
    std::set<std::string> kinds = {};
    bool labelled = false, taught = false, desirable = false; // of all rows; of this one
    const std::vector<std::vector<Outcome>>* outcomes = nullptr; // of this row
    Words last = {}, other = {};              // labelled rows: the one before; the last one with another prompt
    std::vector<std::pair<Words, bool>> waiting = {}; // ... those before any other prompt, with their labels
    size_t lines = 0, trained = 0, marked = 0, foreign = 0, recut = 0;

    Packer(const Arguments& a, const std::vector<Source>& from)
        : sources(from), tokenizer(a.tokenizer()), longest(a.number("--max-len", 512, 2, 1 << 24)),
          most(a.number("--max-rows", (size_t)1 << 40, 1, (size_t)1 << 40)),
          refuse(a.text("--over", "drop") == "refuse"),
          report(a.text("--dropped", from[0].path + ".dropped"), {"no answer", "too long", "logprobs"}),
          out(a.files[1], tokenizer.hash(), template_hash()) {}

    void add(const Packed& packed) {
        if (lines == 1) read.pairs = packed.pair, labelled = packed.labelled, taught = packed.taught;
        if (packed.taught != taught)
            DIE("%s", taught ? "logprobs: missing, which the rows before it have"
                             : "a teacher's logprobs, and no row before it has them");
        if (packed.labelled != labelled)
            DIE("%s", labelled ? "kto_tag: missing, which the rows before it have"
                               : "a label (kto_tag), and no row before it has one");
        if (packed.pair != read.pairs)
            DIE("%s", read.pairs ? "no chosen and rejected answer, which the rows before it have"
                                 : "a chosen and a rejected answer, and no row before it has them");
        kinds.insert(packed.kind);
        for (auto& [tag, names] : packed.tags) read.tags[tag].insert(names.begin(), names.end());
        for (auto [key, value] : reader->row().members())
            if (!is_absent(value)) read.keys.insert(key);
        marked += packed.mark;
        for (size_t i = 0; i < packed.wordless; i++) report.drop("no answer", "an answer says nothing", *reader);
        if (!packed.fault.empty()) report.drop("logprobs", packed.fault, *reader);
        desirable = packed.desirable, outcomes = &packed.outcomes;
        foreign += packed.foreign, recut += packed.recut;
        const size_t together = read.pairs ? 2 : 1;
        for (size_t i = 0; i < packed.rows.size(); i += together)
            add_row(packed.rows[i], packed.rows[i + together - 1]);
    }
    void add_row(const Words& row, const Words& second) { // not a pair: the same row twice
        if (const size_t size = std::max(row.size(), second.size()); size > longest) {
            const std::string fault = format("%zu tokens, more than %zu", size, longest);
            if (refuse) DIE("%s (--over drop leaves such rows out)", fault.c_str());
            return report.drop("too long", fault, *reader);
        }
        if (read.pairs) out.add_pair(row, second);
        else if (labelled) add_labelled(row);
        else if (taught) out.add_taught(row, *outcomes);
        else out.add(row);
        report.kept++;
        trained += count_trained(view(row)) + (read.pairs ? count_trained(view(second)) : 0);
    }
    // Beside a labelled row goes its prompt with the answer of the last row before it that has another prompt. The
    // first rows get the answer of the next such row.
    void add_labelled(const Words& row) {
        if (!last.empty() && !same_prompt(row, last)) {
            other = last;
            for (auto& [first, label] : waiting) out.add_labelled(first, mismatched_row(first, row, longest), label);
            waiting.clear();
        }
        if (other.empty()) waiting.emplace_back(row, desirable);
        else out.add_labelled(row, mismatched_row(row, other, longest), desirable);
        last = row;
    }
    void add_all() {
        Progress progress;
        for (auto& each : sources) {
            source = &each, reader = std::make_unique<Reader>(each.path);
            for (size_t n = 0; n < most && reader->next(); n++) {
                progress.show("pack", lines++, reader->share());
                const sj::Value v = reader->need();
                try {
                    add(Packed(tokenizer, v, each.layout));
                } catch (const Error& e) {
                    DIE("%s: %s", reader->where().c_str(), e.what());
                }
            }
        }
        if (!report.kept && report.rules[2].dropped)
            DIE("%s: no row's logprobs can be used; the first: %s", source->path.c_str(),
                report.rules[2].first.c_str());
        if (!report.kept)
            DIE("%s: %s", source->path.c_str(), !lines ? "no row in it"
                : report.rules[1].dropped ? "all rows are too long" : "no answer says anything");
        if (!waiting.empty())
            DIE("%s: labelled answers to one prompt only; KTO measures answers to other prompts, too",
                source->path.c_str());
    }

    // "prompt <- question; not read: input, system"
    std::string columns() const {
        std::set<std::string> left = read.keys;
        std::string used, rest;
        for (auto& each : sources)
            for (auto& kind : kinds)
                for (auto& [column, key] : each.layout.columns_of(kind, read.pairs))
                    if (left.erase(key)) used += (used.empty() ? "" : ", ") + column + " <- " + key;
        if (taught && left.erase("logprobs")) used += ", logprobs";
        for (auto& key : left) rest += (rest.empty() ? "; not read: " : ", ") + score_excerpt(key, 40);
        return "columns: " + used + rest;
    }
    void tell(const std::string& path) const {
        say(format("%s: %zu %s, %llu tokens, %zu of them trained", path.c_str(), lines,
                   read.pairs ? "pairs" : labelled ? "labelled answers, each with a mismatched row" : "conversations",
                   (unsigned long long)out.begins.back(), trained));
        say(columns());
        if (taught)
            say(format("a teacher's log-probabilities: %zu rows are cut into other tokens than this tokenizer's; %zu "
                       "alternatives are not in its vocabulary, and belong to the rest", recut, foreign));
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
        if (taught) return "it has no words for log-probabilities";
        if (read.pairs && (kinds.count("trl") || kinds.count("text"))) return "it has no words for TRL's pairs";
        return "";
    }
};

Strings split_names(const std::string& list) {
    Strings names;
    for (size_t at = 0, end; at <= list.size(); at = end + 1) {
        end = std::min(list.find(',', at), list.size());
        names.push_back(list.substr(at, end - at));
    }
    return names;
}

} // namespace

int run_pack(const Arguments& a) {
    if (a.files.size() != 2) DIE("pack takes two files: the rows and the dataset to write");
    const std::string input = a.files[0];
    const std::string info_name = "dataset_info.json", name = input.substr(input.rfind('/') + 1);
    const std::string over = a.text("--over", "drop");
    const bool by_info = name == info_name;
    if (over != "drop" && over != "refuse") DIE("--over %s: expected drop or refuse", over.c_str());
    std::vector<Source> sources;
    if (!by_info) sources.push_back({Layout(), input});
    else
        for (auto& entry : split_names(a.need("--name"))) {
            Source source;
            source.layout = read_dataset_info(a.files[0], entry, &source.path);
            sources.push_back(source);
        }
    Packer packer(a, sources);
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
