#include "book/datagen/taught.h"
#include "base/error.h"
#include "book/characters.h"
#include "book/report.h"
#include "book/rows.h"
#include "sj.h"
#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

namespace book {

// ---- Requests

// A row's custom_id: its place in the file, and a hash of its messages.
static std::string id_of(const Reader& in, const Question& q) {
    std::string all;
    for (auto& m : q.messages) all += m.role + "\n" + m.content + "\n";
    return format("row.%zu.", in.number) + hex(fnv1a(all)).substr(0, 8);
}

static void write_messages(sj::Writer& w, const std::vector<Message>& messages) {
    for (auto& m : messages) w.object().field("role", m.role).field("content", m.content).end();
}

static bool has_tools(const Question& q) {
    return !q.tools.empty() || std::any_of(q.messages.begin(), q.messages.end(), [](const Message& m) {
        return m.role == "tool" || !m.tool_calls.empty();
    });
}

// The question of the current row; a bad row ends the program.
static Question need_question(const Reader& in) {
    const sj::Value v = in.need();
    try {
        return read_question(v);
    } catch (const Error& e) {
        DIE("%s: %s", in.where().c_str(), e.what());
    }
}

int run_ask(const Arguments& a) {
    const Limits limits(a);
    const std::string model = a.text("--model");
    const size_t top = a.number("--top-logprobs", limits.count("ask.top_logprobs"), 1, MOST_OUTCOMES - 1);
    const size_t room = a.number("--max-tokens", 0, 0, 1 << 24);
    Reader in(a.files[0]);
    Report report(a.dropped(), {"tools"});
    Output out(a.output());
    while (in.next()) {
        const Question q = need_question(in);
        if (has_tools(q)) {
            report.drop("tools", "it has tools, which are not asked with", in);
            continue;
        }
        sj::Writer w;
        w.object().field("custom_id", id_of(in, q)).field("method", "POST").field("url", "/v1/chat/completions");
        w.key("body").object();
        if (!model.empty()) w.field("model", model);
        write_messages(w.key("messages").array(), q.messages);
        w.end().field("temperature", limits["request.temperature"]);
        if (room) w.field("max_tokens", room);
        out.line(w.field("logprobs", true).field("top_logprobs", top).end().end().text);
        report.kept++;
    }
    out.commit();
    report.finish("rows");
    return 0;
}

// ---- Replies

int collect_taught(const Arguments& a) {
    std::unordered_map<std::string, std::vector<Message>> asked; // by custom_id
    for (Reader rows(a.need("--rows")); rows.next();) {
        Question q = need_question(rows);
        const std::string id = id_of(rows, q);
        asked[id] = std::move(q.messages);
    }
    Reader in(a.files[0]);
    Report report(a.dropped(), {"line", "custom_id", "repeated", "status", "reply", "cut", "logprobs"});
    Output out(a.output());
    std::unordered_set<std::string> seen;
    Progress progress;
    while (in.next()) {
        progress.show("collect", report.kept, in.share());
        const sj::Value v = in.row(), response = v["response"], choice = response["body"]["choices"][0];
        const std::string id = v["custom_id"].str(), content = choice["message"]["content"].str();
        int64_t status = 0;
        response["status_code"].integer(&status);
        auto drop = [&](const char* rule, const std::string& why) { report.drop(rule, why, in); };
        if (!in.fault.empty() || !v.is(sj::Object)) drop("line", in.fault.empty() ? "not an object" : in.fault);
        else if (!asked.count(id)) drop("custom_id", "names no row of these");
        else if (!seen.insert(id).second) drop("repeated", "this custom_id was answered before");
        else if (status / 100 != 2) drop("status", format("status %lld", (long long)status));
        else if (trimmed(content).empty()) drop("reply", "no choices[0].message.content");
        else if (choice["finish_reason"].str() == "length") drop("cut", "cut off at max_tokens");
        else if (!choice["logprobs"]["content"].size())
            drop("logprobs", "the endpoint gave no log-probabilities (choices[0].logprobs.content)");
        else {
            sj::Writer w;
            write_messages(w.object().key("messages").array(), asked[id]);
            w.object().field("role", "assistant").field("content", content).end().end();
            out.line(w.key("logprobs").value(choice["logprobs"]).end().text);
            report.kept++;
        }
    }
    out.commit();
    report.finish("answers with log-probabilities", "`datagen ask` requests them; the endpoint has to give them.");
    return 0;
}

// ---- Tokens

bool is_taught(sj::Value row) { return row["logprobs"]["content"].is(sj::Array); }

// The bytes of a token or an alternative: as numbers, or of its text if the endpoint gives none.
static std::string bytes_of(sj::Value entry) {
    if (!entry["bytes"].is(sj::Array)) return entry["token"].str();
    std::string bytes;
    for (sj::Value v : entry["bytes"].items()) {
        int64_t byte;
        if (!v.integer(&byte) || byte < 0 || byte > 255) return "";
        bytes += (char)byte;
    }
    return bytes;
}

// A log-probability as stored: at least -100, since OpenAI writes -9999 for "never".
static float log_p_of(sj::Value entry) {
    return (float)std::min(0., std::max(-100., entry["logprob"].number()));
}

// One token with its alternatives. False: it is not in the vocabulary, or has no log-probability.
bool TaughtRow::add(const Tokenizer& tokenizer, sj::Value entry) {
    const std::string bytes = bytes_of(entry);
    const int id = tokenizer.id_of(bytes);
    if (id < 0) return fault = "the token " + in_quotes(bytes) + " is not in this vocabulary", false;
    if (!entry["logprob"].is(sj::Number)) return fault = "a token without a logprob", false;
    row.push_back((uint32_t)id | TRAIN);
    std::vector<Outcome> all = {{(uint32_t)id, log_p_of(entry)}};
    for (sj::Value other : entry["top_logprobs"].items()) {
        const int one = tokenizer.id_of(bytes_of(other));
        if (one < 0) foreign++;
        const bool known = std::any_of(all.begin(), all.end(), [&](const Outcome& o) { return (int)o.id == one; });
        if (one < 0 || known || all.size() == MOST_OUTCOMES || !(other["logprob"].number(-9999) > -100)) continue;
        all.push_back({(uint32_t)one, log_p_of(other)});
    }
    double sum = 0;
    for (auto& o : all) sum += std::exp((double)o.log_p);
    if (sum > 1.001) return fault = "probabilities that add up to more than 1", false;
    outcomes.push_back(all);
    return true;
}

TaughtRow::TaughtRow(const Tokenizer& tokenizer, const Conversation& c, sj::Value logprobs) {
    const Words own = render_rows(tokenizer, c).back();
    const auto trained = std::find_if(own.begin(), own.end(), [](uint32_t word) { return word & TRAIN; });
    row.assign(own.begin(), trained);
    std::string text, given; // of the answer, with its end
    for (auto word = trained; word != own.end(); ++word) text += tokenizer.bytes((int)(*word & ~TRAIN));
    bool begun = false, skipped = false;
    for (sj::Value entry : logprobs["content"].items()) {
        const std::string bytes = bytes_of(entry);
        if (!begun && bytes.find_first_not_of('\n') == bytes.npos) continue; // after a thought
        begun = true;
        if (bytes.empty() || bytes == "<|endoftext|>") { // another end of the answer
            skipped = true;
            continue;
        }
        if (skipped || text.compare(given.size(), bytes.size(), bytes) != 0) {
            fault = "its tokens are not those of the answer";
            return;
        }
        given += bytes;
        if (!add(tokenizer, entry)) return;
    }
    std::vector<uint32_t> rest; // not reported: <|im_end|> and the line's end, which are tokens of their own
    for (auto word = own.end(); word != trained && given.size() < text.size();) {
        const std::string_view bytes = tokenizer.bytes((int)(*--word & ~TRAIN));
        if (text.size() - bytes.size() < given.size() || rest.size() == 2) break;
        rest.insert(rest.begin(), *word), text.resize(text.size() - bytes.size());
    }
    if (given.size() != text.size()) fault = "its tokens are not all of the answer";
    for (uint32_t word : rest) row.push_back(word), outcomes.push_back({{word & ~TRAIN, 0}});
    recut = row != own;
}

} // namespace book
