#include "book/datagen/filter.h"
#include "base/error.h"
#include "base/file.h"
#include "book/characters.h"
#include "book/conversations.h"
#include "book/datagen/ground.h"
#include "book/datagen/minhash.h"
#include "book/datagen/patterns.h"
#include "book/datagen/rouge_index.h"
#include "book/datagen/terms.h"
#include "book/report.h"
#include "book/rows.h"
#include "book/text.h"
#include "book/words.h"
#include "model/tokenizer.h"
#include "sj.h"
#include <array>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace book {

namespace {

// The rules run in order; the first that rejects a row drops it. One pass: a row is compared with the rows kept so far,
// so a dropped row cannot drop another. Memory: 196 bytes per row for exact duplicates (12), near duplicates (168) and
// its place (16), and for the questions' ROUGE-L some 11 bytes per word; texts are read again when two rows must be
// compared.
struct Filter {
    struct Row {
        sj::Value value;
        Conversation talk;
        std::u32string question, answer;
    };
    using Place = Reader::Place;
    using Rule = std::string (Filter::*)(Row&); // "" or the reason to drop the row

    const Arguments& a;
    const Limits limits = Limits(a);
    Reader in;
    const size_t most_rows;
    const Tokenizer tokenizer = Tokenizer(a.tokenizer());
    const Patterns references = Patterns(a.data("references.txt"));
    Patterns terms; // of the subject; if empty, rows need not name one
    std::set<std::string> skipped = {}; // disabled rules
    const std::string language = a.text("--lang");
    std::unordered_set<uint64_t> stop_words;
    std::unique_ptr<Reader> chunks;
    std::unordered_map<std::string, Place> chunk_places;
    std::string ground_id;          // the chunk of `ground`; rows of one chunk are adjacent
    std::unique_ptr<Ground> ground;
    HashTable exact_rows, near_rows;
    const MinHash minhash;
    RougeIndex rouge_index;
    std::vector<Place> kept;        // kept rows, by number
    std::array<uint64_t, MinHash::BANDS> bands; // of the current row, from near() and rouge() to keep()
    std::vector<uint32_t> words;

    explicit Filter(const Arguments& a)
        : a(a), in(a.files[0]), most_rows(count_rows()), exact_rows(most_rows), near_rows(most_rows * MinHash::BANDS),
          rouge_index(limits["filter.rouge"]) {
        if (!language.empty() && language != "zh" && language != "en")
            DIE("--lang %s: expected zh or en", language.c_str());
        std::string left = a.text("--skip");
        while (!left.empty()) { // comma-separated names
            const std::string name = left.substr(0, left.find(','));
            left.erase(0, name.size() + 1);
            std::string names;
            bool known = false;
            for (auto& r : rules()) {
                if (r.rule == &Filter::schema) continue; // all other rules need it
                known |= name == r.name;
                names += (names.empty() ? "" : ", ") + std::string(r.name);
            }
            if (!known) DIE("--skip %s: the rules are %s", name.c_str(), names.c_str());
            skipped.insert(name);
        }
        for_each_line(a.data("stopwords.txt"),
                      [&](std::string_view word, size_t) { stop_words.insert(word_hash(decode(word))); });
        if (a.has("--chunks")) {
            chunks = std::make_unique<Reader>(a.text("--chunks"));
            if (!chunks->seekable()) DIE("%s: is read in any order, so it has to be a file", chunks->path.c_str());
            while (chunks->next()) chunk_places[chunks->need()["id"].str()] = chunks->place();
        }
        if (a.text("--terms") == "auto") learn_terms();
        else if (a.has("--terms")) terms = Patterns(a.text("--terms"));
    }
    struct NamedRule { const char* name; Rule rule; };
    static const std::vector<NamedRule>& rules() {
        static const std::vector<NamedRule> all = {
            {"schema", &Filter::schema}, {"length", &Filter::length}, {"utf8", &Filter::utf8}, {"nfc", &Filter::nfc},
            {"language", &Filter::lang}, {"reference", &Filter::reference}, {"grounding", &Filter::grounding},
            {"terms", &Filter::term}, {"exact", &Filter::exact}, {"near", &Filter::near}, {"rouge-l", &Filter::rouge}};
        return all;
    }
    // For --terms auto.
    void learn_terms() {
        if (!chunks) DIE("--terms auto takes them from the book: --chunks FILE names it");
        BookTerms book(stop_words, a.data("common.txt"));
        for (Reader r(a.text("--chunks")); r.next();) book.learn(r.need());
        const Strings found = book.terms(limits);
        std::string some;
        for (size_t i = 0; i < found.size(); i++) {
            if (i < 10) some += (i ? ", " : ": ") + found[i];
            terms.add(found[i]);
            if (found[i].size() < 4 || !is_latin((uint8_t)found[i].back())) continue;
            terms.add(found[i].back() == 's' ? found[i].substr(0, found[i].size() - 1) : found[i] + "s");
        }
        say(format("%zu terms of the book%s%s", found.size(), some.c_str(), found.size() > 10 ? ", ..." : ""));
    }
    // First pass over the file: an upper limit for the number of rows, and the frequencies of the questions' words.
    size_t count_rows() {
        if (!in.seekable()) DIE("%s: is read twice, so it has to be a file", in.path.c_str());
        size_t n = 0;
        for (Reader r(a.files[0]); r.next_text(); n++)
            if (n % 4096 == 0) stop_if_interrupted();
        if (n >= UINT32_MAX) DIE("%s: more than 2^32 rows", in.path.c_str());
        return n;
    }
    void learn_words() {
        Reader r(a.files[0]);
        for (size_t n = 0; n < limits.count("filter.rouge_sample") && r.next(); n++)
            try {
                rouge_index.learn(word_hashes(decode(read_conversation(r.row()).question)));
            } catch (const Error&) {} // reported by the schema rule
    }

    std::string schema(Row& row) {
        try {
            row.talk = read_conversation(row.value);
        } catch (const Error& e) {
            return e.what();
        }
        row.question = decode(row.talk.question), row.answer = decode(row.talk.answer);
        return "";
    }
    std::string length(Row& row) {
        auto check = [&](const char* what, size_t n) -> std::string {
            const size_t least = limits.count(format("filter.%s.least", what).c_str());
            const size_t most = limits.count(format("filter.%s.most", what).c_str());
            return n >= least && n <= most ? "" : format("%s of %zu characters, not %zu to %zu", what, n, least, most);
        };
        const std::string fault = check("question", row.question.size());
        return fault.empty() ? check("answer", row.answer.size()) : fault;
    }
    // JSON is valid UTF-8, or the row would have no schema; bytes broken before it became JSON show as U+FFFD.
    std::string utf8(Row& row) {
        for (auto* text : {&row.question, &row.answer})
            for (char32_t c : *text) {
                const bool control = (c < 0x20 && c != '\n' && c != '\t' && c != '\r') || (c >= 0x7F && c < 0xA0);
                const bool nobodys = c == 0xFFFD || (c >= 0xE000 && c < 0xF900);
                if (control || nobodys) return format("U+%04X", (unsigned)c);
            }
        return "";
    }
    std::string nfc(Row& row) {
        for (auto* text : {&row.talk.question, &row.talk.answer})
            if (tokenizer.nfc(*text) != *text) return "is not in Unicode's form NFC";
        return "";
    }
    // --lang, otherwise the row's, otherwise the language of its question.
    std::string lang(Row& row) {
        const double question = cjk_share(row.question), answer = cjk_share(row.answer);
        const double zh = limits["lang.zh"], en = limits["lang.en"];
        std::string wanted = language.empty() ? row.value["lang"].str() : language;
        if (wanted.empty()) wanted = question >= zh ? "zh" : "en";
        for (double share : {question, answer})
            if (share >= 0 && (wanted == "zh" ? share < zh : share > en))
                return format("%.0f%% of the %s's words are Chinese, in %s", 100 * share,
                              share == question ? "question" : "answer", wanted.c_str());
        return "";
    }
    std::string reference(Row& row) {
        std::string found = references.find(row.question);
        return found.empty() ? references.find(row.answer) : found;
    }
    std::string grounding(Row& row) {
        if (!chunks) return "";
        const std::string id = row.value["chunk"].str();
        if (id != ground_id || !ground) {
            const auto place = chunk_places.find(id);
            if (place == chunk_places.end()) return "its chunk " + in_quotes(id) + " is not in " + chunks->path;
            ground = std::make_unique<Ground>(decode(chunks->again(place->second)->row()["text"].str()), stop_words);
            ground_id = id;
        }
        std::u32string_view question = row.question;
        std::unordered_set<std::string> asked; // an answer may repeat the question's names
        for_each_fact(question, [&](const std::string& run, bool) { asked.insert(run); });
        size_t facts = 0, found = 0, words = 0, common = 0;
        std::string missing;
        for_each_fact(row.answer, [&](const std::string& run, bool is_fact) {
            const bool number = run.find_first_not_of("0123456789") == run.npos;
            if (!is_fact || (number && strtod(run.c_str(), nullptr) <= limits["filter.free_number"])) return;
            const bool known = asked.count(run) || ground->has(run);
            facts++, found += known;
            if (!known) missing = run;
        });
        ground->for_each_content_word(row.answer, [&](uint64_t word) { words++, common += ground->words.count(word); });
        if (facts && (double)found < limits["filter.facts"] * (double)facts)
            return format("%zu of %zu numbers and identifiers are not in the chunk: %s", facts - found, facts,
                          missing.substr(0, 40).c_str());
        if (words && (double)common < limits["filter.overlap"] * (double)words)
            return format("%zu of %zu content words are in the chunk", common, words);
        return "";
    }
    std::string term(Row& row) {
        const bool named = !terms.find(row.question).empty() || !terms.find(row.answer).empty();
        return named || terms.empty() ? "" : "names nothing of the subject";
    }
    static uint64_t content_hash(const Row& row) { // the table uses both ends of it
        return mix(0, fnv1a(row.talk.answer, fnv1a(row.talk.question + "\n"))) * 0x9E3779B97F4A7C15;
    }
    std::string exact(Row& row) {
        size_t first = 0;
        const bool found = exact_rows.find(content_hash(row), [&](uint32_t other) {
            first = other;
            const Conversation o = read_conversation(in.again(kept[other])->row());
            return o.question == row.talk.question && o.answer == row.talk.answer;
        });
        return found ? name_of(first) : "";
    }
    std::vector<uint64_t> grams_of(const Conversation& c) const {
        return ngrams(decode(c.question + "\n" + c.answer), limits.count("filter.near_characters"));
    }
    std::string near(Row& row) {
        const std::vector<uint64_t> grams = grams_of(row.talk);
        bands = minhash.bands(grams);
        std::set<uint32_t> compared;
        std::string found;
        for (uint64_t band : bands)
            if (near_rows.find(band, [&](uint32_t other) {
                    if (!compared.insert(other).second) return false;
                    const double s = jaccard(grams, grams_of(read_conversation(in.again(kept[other])->row())));
                    if (s < limits["filter.near"]) return false;
                    found = format("%.2f alike: ", s) + name_of(other);
                    return true;
                })) break;
        return found;
    }
    std::string rouge(Row& row) {
        words = word_hashes(row.question);
        std::string found;
        rouge_index.find(words, [&](size_t other) { return found = name_of(other), false; });
        return found;
    }
    std::string name_of(size_t number) {
        const auto old = in.again(kept[number]);
        const sj::Value id = old->row()["id"];
        return id ? sj::dump(id) : format("the row at byte %zu", (size_t)kept[number].offset);
    }
    void keep(Row& row) {
        const uint32_t number = (uint32_t)kept.size();
        kept.push_back(in.place());
        exact_rows.add(content_hash(row), number);
        for (uint64_t band : bands) near_rows.add(band, number);
        rouge_index.add(words);
    }

    int run() {
        Strings names;
        for (auto& r : rules()) names.push_back(r.name);
        Report report(a.dropped(), names);
        Output out(a.output());
        if (!chunks) say("no --chunks: answers are not compared with their source");
        learn_words();
        Progress progress;
        const double start = seconds();
        size_t rows = 0;
        while (in.next()) {
            progress.show("filter", ++rows, in.share());
            Row row = {};
            row.value = in.row();
            std::string fault = in.fault.empty() ? "" : "not JSON: " + in.fault;
            size_t i = 0;
            for (; i < rules().size(); i++) {
                const double before = seconds();
                const Rule rule = rules()[i].rule; // apart: g++ 12's -fsanitize=bounds loses the i of (this->*a[i])()
                if (skipped.count(names[i])) continue;
                if (fault.empty()) fault = (this->*rule)(row);
                report.rules[i].seconds += seconds() - before;
                if (!fault.empty()) break;
            }
            if (!fault.empty()) {
                report.drop(fault.find("invalid UTF-8") != fault.npos ? "utf8" : names[i], fault, in);
                continue;
            }
            keep(row);
            report.kept++;
            out.line(one_line(in.text));
        }
        out.commit();
        report.finish("rows", "--skip %s turns the rule off.");
        say(format("%zu rows in %.1f s", rows, seconds() - start));
        return 0;
    }
};

} // namespace

int run_filter(const Arguments& a) {
    return Filter(a).run();
}

} // namespace book
