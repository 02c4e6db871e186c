#include "book/datagen/collect.h"
#include "base/error.h"
#include "book/characters.h"
#include "book/datagen/prompt.h"
#include "book/datagen/score.h"
#include "book/datagen/taught.h"
#include "book/report.h"
#include "book/rows.h"
#include "sj.h"
#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>
#include <unordered_set>

namespace book {

// A member by its name, case-insensitive.
static sj::Value member(sj::Value object, std::string_view name) {
    sj::Value found;
    auto same = [](char a, char b) { return lower((uint8_t)a) == (uint8_t)b; };
    for (auto [key, value] : object.members())
        if (key.size() == name.size() && std::equal(key.begin(), key.end(), name.begin(), same)) found = value;
    return found;
}

static void add_items(ReplyItems& out, sj::Value v) {
    const sj::Value question = member(v, "question"), answer = member(v, "answer");
    if (question || answer) {
        const bool good = !trimmed(question.str()).empty() && !trimmed(answer.str()).empty();
        if (good) out.items.push_back({question.str(), answer.str()});
        else out.bad++;
        return;
    }
    for (sj::Value item : v.items()) add_items(out, item);
    for (auto [key, value] : v.members()) add_items(out, value);
}

ReplyItems::ReplyItems(std::string_view reply) {
    const sj::Repaired repaired = sj::repair(without_thought(reply));
    sj::Doc doc;
    sj::parse(doc, repaired.text);
    repairs = repaired.repairs, cut = repaired.cut, json = doc.root().size() > 0;
    add_items(*this, doc.root());
    if (cut && bad) bad--; // the item that was cut off
}

namespace {

struct ChunkFields { std::string source, chapter, lang; };

struct Collector {
    std::unordered_map<std::string, ChunkFields> chunks = {};
    Reader in;
    Report report;
    Output out;
    std::unordered_set<std::string> seen = {};
    std::map<std::string, size_t> repairs = {};
    size_t repaired = 0, cut = 0, replies = 0, lost = 0; // lost: replies without a question

    explicit Collector(const Arguments& a)
        : in(a.files[0]), report(a.dropped(), {"line", "custom_id", "repeated", "status", "reply", "json", "item"}),
          out(a.output()) {
        for (Reader r(a.need("--chunks")); r.next();) {
            const sj::Value v = r.need();
            chunks[v["id"].str()] = {v["source"].str(), v["chapter"].str(), v["lang"].str()};
        }
    }

    void lose(const char* rule, const std::string& why) {
        report.drop(rule, why, in);
        lost++;
    }

    void add(sj::Value row) {
        const sj::Value response = row["response"], choice = response["body"]["choices"][0];
        const std::string id = row["custom_id"].str();
        const size_t hash = id.rfind('.'), dot = hash ? id.rfind('.', hash - 1) : id.npos;
        const std::string chunk = id.substr(0, dot < hash ? dot : 0); // "chunk.difficulty.hash"
        const std::string difficulty = dot < hash ? id.substr(dot + 1, hash - dot - 1) : "";
        const bool ours = std::count(std::begin(DIFFICULTIES), std::end(DIFFICULTIES), difficulty);
        int64_t status = 0;
        response["status_code"].integer(&status);
        const std::string content = choice["message"]["content"].str();
        const bool full = choice["finish_reason"].str() == "length"; // the reply reached its max_tokens
        const char* ending = full ? "cut off at max_tokens: " : "";
        if (!ours || !chunks.count(chunk))
            return report.drop("custom_id", "names no chunk of these, or no difficulty", in);
        if (!seen.insert(id).second) return report.drop("repeated", "this custom_id was answered before", in);
        replies++;
        if (status / 100 != 2) return lose("status", format("status %lld", (long long)status));
        if (trimmed(content).empty()) return lose("reply", ending + std::string("no choices[0].message.content"));
        const ReplyItems reply(content);
        cut += full || reply.cut;
        repaired += !reply.repairs.empty();
        for (auto* repair : reply.repairs) repairs[repair]++;
        const std::string bad = "an item is not {\"question\": text, \"answer\": text}";
        if (reply.items.empty())
            return lose("json", ending + (reply.cut ? "no whole question in it" : !reply.json ? "no list in it"
                                          : reply.bad ? bad : "no question and answer in it"));
        for (size_t i = 0; i < reply.bad; i++) report.drop("item", bad, in);
        const ChunkFields& c = chunks[chunk];
        size_t number = 0;
        for (auto& [question, answer] : reply.items) {
            sj::Writer w;
            w.object().field("id", id + format(".%zu", ++number));
            w.field("instruction", question).field("input", "").field("output", answer);
            w.field("chunk", chunk).field("source", c.source).field("chapter", c.chapter);
            out.line(w.field("difficulty", difficulty).field("lang", c.lang).end().text);
            report.kept++;
        }
    }

    void tell(const Arguments& a) {
        report.finish("questions", "The model has to answer with a JSON list of questions and answers.");
        std::string what;
        for (auto& [repair, n] : repairs) what += format("%s%s %zu", what.empty() ? "" : ", ", repair.c_str(), n);
        if (repaired) say(format("%zu of %zu replies were repaired: %s", repaired, replies, what.c_str()));
        if (cut)
            say(format("%zu of %zu replies were cut off; of these the whole questions are kept "
                       "(prompt --max-tokens N gives more room)", cut, replies));
        if (lost)
            say(format("%zu of %zu replies have no question that can be used; this asks them again:\n"
                       "  datagen generate REQUESTS --url URL --again %s -o %s", lost, replies, a.dropped().c_str(),
                       a.files[0].c_str()));
    }
};

} // namespace

int run_collect(const Arguments& a) {
    if (a.has("--rows")) return collect_taught(a);
    Collector collector(a);
    Progress progress;
    Reader& in = collector.in;
    while (in.next()) {
        progress.show("collect", collector.report.kept, in.share());
        if (in.fault.empty() && in.row().is(sj::Object)) collector.add(in.row());
        else collector.report.drop("line", in.fault.empty() ? "not an object" : in.fault, in);
    }
    collector.out.commit();
    collector.tell(a);
    return 0;
}

} // namespace book
