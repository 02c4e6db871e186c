#include "book/collect.h"
#include "base/error.h"
#include "book/prompt.h"
#include "book/report.h"
#include "book/rows.h"
#include "sj.h"
#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

namespace book {

std::string_view bare_reply(std::string_view s) {
    auto trim = [&] {
        s.remove_prefix(std::min(s.find_first_not_of(" \t\r\n"), s.size()));
        s = s.substr(0, s.find_last_not_of(" \t\r\n") + 1);
    };
    trim();
    if (const size_t end = s.find("</think>"); end != s.npos && s.substr(0, 7) == "<think>") {
        s.remove_prefix(end + 8);
        trim();
    }
    if (s.size() > 6 && s.substr(0, 3) == "```" && s.substr(s.size() - 3) == "```" && s.find('\n') != s.npos) {
        s.remove_suffix(3);
        s.remove_prefix(s.find('\n')); // with the fence's language
        trim();
    }
    return s;
}

int run_collect(const Arguments& a) {
    struct ChunkFields { std::string source, chapter, lang; };
    std::unordered_map<std::string, ChunkFields> chunks;
    for (Reader in(a.need("--chunks")); in.next();) {
        const sj::Value v = in.need();
        chunks[v["id"].str()] = {v["source"].str(), v["chapter"].str(), v["lang"].str()};
    }
    Reader in(a.files[0]);
    Report report(a.dropped(), {"line", "custom_id", "repeated", "status", "reply", "json", "item"});
    Output out(a.output());
    Progress progress;
    std::unordered_set<std::string> seen;
    while (in.next()) {
        progress.show("collect", report.kept, in.share());
        if (!in.fault.empty() || !in.row().is(sj::Object)) {
            report.drop("line", in.fault.empty() ? "not an object" : in.fault, in);
            continue;
        }
        const sj::Value response = in.row()["response"], choice = response["body"]["choices"][0];
        const std::string id = in.row()["custom_id"].str();
        const size_t hash = id.rfind('.'), dot = hash ? id.rfind('.', hash - 1) : id.npos;
        const std::string chunk = id.substr(0, dot < hash ? dot : 0); // "chunk.difficulty.hash"
        const std::string difficulty = dot < hash ? id.substr(dot + 1, hash - dot - 1) : "";
        const bool ours = std::count(std::begin(DIFFICULTIES), std::end(DIFFICULTIES), difficulty);
        int64_t status = 0;
        response["status_code"].integer(&status);
        const std::string content = choice["message"]["content"].str();
        const std::string_view reply = bare_reply(content);
        sj::Doc doc;
        std::string fault;
        if (!ours || !chunks.count(chunk)) report.drop("custom_id", "names no chunk of these, or no difficulty", in);
        else if (!seen.insert(id).second) report.drop("repeated", "this custom_id was answered before", in);
        else if (status / 100 != 2) report.drop("status", format("status %lld", (long long)status), in);
        else if (content.empty()) report.drop("reply", "no choices[0].message.content", in);
        else if (fault = sj::parse(doc, reply); !fault.empty())
            report.drop("json", choice["finish_reason"].str() == "length" ? "cut off at max_tokens" : fault, in);
        else if (!doc.root().is(sj::Array)) report.drop("json", "not a list", in);
        else {
            size_t number = 0;
            for (sj::Value item : doc.root().items()) {
                number++;
                const std::string question = item["question"].str(), answer = item["answer"].str();
                if (item.size() != 2 || question.empty() || answer.empty()) {
                    report.drop("item", format("item %zu is not {\"question\": text, \"answer\": text}", number), in);
                    continue;
                }
                const ChunkFields& c = chunks[chunk];
                sj::Writer w;
                w.object().field("id", id + format(".%zu", number)).field("instruction", question).field("input", "");
                w.field("output", answer).field("chunk", chunk).field("source", c.source).field("chapter", c.chapter);
                out.line(w.field("difficulty", difficulty).field("lang", c.lang).end().text);
                report.kept++;
            }
        }
    }
    out.commit();
    report.finish("questions", "The model has to answer with a JSON list of questions and answers.");
    return 0;
}

} // namespace book
