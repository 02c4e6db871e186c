// cli/evaluate.cpp: the answers to the questions of a QA file, and the loss on the answers there.
#include "cli/evaluate.h"
#include "base/appended_file.h"
#include "base/file.h"
#include "base/options.h"
#include "base/progress.h"
#include "cli/answer.h"
#include "cli/perplexity.h"
#include "cli/questions.h"
#include "cli/screen.h"
#include "model/pace.h"
#include "model/session.h"
#include "search/documents.h"
#include "search/grounding.h"
#include "sj.h"
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <sys/file.h>
#include <unistd.h>
#include <vector>

namespace cli {

// --eval's output while it is written: FILE.partial holds a first line with all settings that the rows depend on, then
// the rows so far. A stop loses at most the current row: the next run continues after the last whole line, if its own
// first line would be the same.
struct PartialFile {
    const std::string path, partial, header;
    std::string rows; // that were there
    FILE* file;

    PartialFile(const std::string& path, const std::string& first)
        : path(path), partial(path + ".partial"), header(first + "\n") {
        must_not_exist(path);
        file = fopen(partial.c_str(), "a+b");
        must(file);
        must(flock(fileno(file), LOCK_EX | LOCK_NB) == 0, "another run is writing it");
        char some[65536];
        for (size_t n; (n = fread(some, 1, sizeof some, file)) > 0;) rows.append(some, n);
        must(!ferror(file));
        const size_t same = std::min(rows.size(), header.size());
        must(rows.compare(0, same, header, 0, same) == 0,
             "begun with another model, other rows or options; remove it to start anew");
        rows.resize(rows.rfind('\n') + 1); // none: npos + 1 is 0
        must(ftruncate(fileno(file), (off_t)rows.size()) == 0);
        if (rows.empty()) append(header);
        else rows.erase(0, header.size());
    }
    PartialFile(const PartialFile&) = delete;
    ~PartialFile() { fclose(file); }

    void append(std::string_view line) { append_whole(fileno(file), partial, line); }

    // All rows are there: renames the file, without the first line.
    void finish() {
        OutputFile out(path);
        out.write(MappedFile(partial).text().substr(header.size()));
        out.commit();
        unlink(partial.c_str());
    }

  private:
    void must(bool ok, const char* fault = nullptr) {
        if (!ok) DIE("%s: %s", partial.c_str(), fault ? fault : strerror(errno));
    }
};

// Totals of an output's rows, read from its lines.
struct EvalTotals {
    size_t rows = 0, skipped = 0, ended = 0, tokens = 0;
    double nll = 0;

    // False: not the line of the next row.
    bool add(std::string_view line) {
        sj::Doc doc;
        int64_t index = -1, count = 0;
        if (!sj::parse(doc, line).empty() || !doc.root()["index"].integer(&index)) return false;
        if (index != (int64_t)rows) return false;
        doc.root()["tokens"].integer(&count);
        rows++;
        skipped += (bool)doc.root()["error"];
        ended += doc.root()["finish"].str() == "stop";
        tokens += (size_t)count;
        if (sj::Value x = doc.root()["nll"]) nll += x.number(NAN); // null if the model gave NaN
        return true;
    }
};

// One row: the model's answer, then the loss of the reference after the same prompt. Training uses the answer's ids,
// then <|im_end|> and a newline; the same ids are counted here.
static std::string evaluate_row(const Options& o, Conversation& session, const Tokenizer& tokenizer, Generation g,
                                const QuestionRow& row, size_t index, ThreadPace& pace) {
    const int V = session.config().V;
    const size_t count = row.trained.size(), length = row.length();
    sj::Writer w;
    w.object().field("index", index);
    if (!row.id.empty()) w.key("id").text += row.id, w.comma = true;
    w.field("question", row.question).field("reference", row.reference);
    if (!row.sources.empty()) write_sources(w, row.sources);
    if (length > (size_t)session.capacity()) {
        w.field("error", format("%zu tokens, more than the context of %d", length, session.capacity()));
    } else {
        g.sampling.seed += index; // draws depend on the position only
        if (!quote_passage(o, &tokenizer, row.sources, (size_t)session.capacity(), g)) {
            feed_prompt(session, row.prompt);
            g.in_thought = opens_thought(tokenizer, row.prompt);
            speak(session, &tokenizer, g, pace, [](std::string_view) {});
        }
        feed_prompt(session, row.before);
        double nll = negative_log_likelihood(session.logits(), V, row.trained[0]);
        size_t next = 1;
        session.feed({row.trained.begin(), row.trained.end() - 1}, &interrupted, [&](const float* logits) {
            nll += negative_log_likelihood(logits, V, row.trained[next++]);
        });
        w.field("answer", g.text).field("finish", g.finish);
        w.field("loss", nll / (double)count).field("tokens", count).field("nll", nll);
    }
    return w.end().text + "\n";
}

// Totals of the rows that an earlier run left; there are `most` in all.
static EvalTotals totals_of(const PartialFile& out, size_t most) {
    EvalTotals totals;
    for (size_t at = 0; at < out.rows.size();) {
        const std::string_view line = std::string_view(out.rows).substr(at, out.rows.find('\n', at) - at);
        at += line.size() + 1;
        if (totals.rows == most || !totals.add(line))
            DIE("%s: line %zu is damaged; remove the file to start anew", out.partial.c_str(), totals.rows + 2);
    }
    return totals;
}

// The first line of an unfinished output: a run with another one does not continue it.
static std::string run_of(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer,
                          const Generation& how, size_t context) {
    const Sampling& s = how.sampling;
    const MappedFile qa(o.eval);
    auto hex = [](uint64_t hash) { return format("%016llx", (unsigned long long)hash); };
    sj::Writer w;
    w.object().field("qa", hex(fnv1a(qa.data, qa.size))).field("model", hex(model.file.hash()));
    w.field("variant", hex(o.variant)).field("bits", 8 * model.number_bytes());
    if (o.library) w.field("documents", hex(o.library->hash()));
    if (o.quotes) w.field("quotes", true);
    w.field("tokenizer", hex(tokenizer.hash())).field("system", o.system).field("think", o.think);
    w.field("context", context).field("max_tokens", how.max_tokens);
    w.key("sampling").array().value(s.temperature).value(s.top_k).value(s.top_p).value(s.min_p);
    w.value(s.repeat).value(s.presence).value(s.frequency).value(s.seed).end().key("stop").array();
    for (auto& stop : o.stops) w.value(stop);
    return w.end().end().text;
}

static void report(const Options& o, const EvalTotals& totals) {
    const double loss = totals.nll / (double)totals.tokens;
    say(format("%s: %s, %zu skipped (too long for the context), %s, loss %.6f over %s", o.output.c_str(),
               counted(totals.rows, "row").c_str(), totals.skipped, counted(totals.ended, "complete answer").c_str(),
               loss, counted(totals.tokens, "token").c_str()));
    sj::Writer all;
    all.object().field("rows", totals.rows).field("skipped", totals.skipped).field("ended", totals.ended);
    all.field("loss", loss).field("tokens", totals.tokens).end();
    write_stdout(o.json ? all.text + "\n" : format("rows %zu skipped %zu ended %zu loss %.6f tokens %zu\n", totals.rows,
                                                   totals.skipped, totals.ended, loss, totals.tokens));
}

int evaluate(const Options& o, const LoadedModel& model, const Tokenizer& tokenizer) {
    const Config& c = model.file.config;
    const int context = o.context ? o.context : std::min(4096, c.max_positions);
    const std::vector<QuestionRow> rows = read_questions(o, tokenizer, o.eval);
    if (std::none_of(rows.begin(), rows.end(), [&](auto& row) { return row.length() <= (size_t)context; }))
        DIE("%s: every row is longer than the context of %d tokens: nothing to measure (-c sets it)", o.eval.c_str(),
            context);
    const std::unique_ptr<Conversation> opened = model.open(context);
    Conversation& session = *opened;
    use_lookup(o, session);
    Generation how;
    how.sampling = sampling_of(o);
    if (o.temperature < 0) how.sampling.temperature = 0;
    how.sampling.seed = o.seed; // 0, not a random one: a resumed run must sample as before
    how.max_tokens = o.max_tokens >= 0 ? (size_t)o.max_tokens : 512;
    how.stops = o.stops;
    how.interrupt = &interrupted;

    PartialFile out(o.output, run_of(o, model, tokenizer, how, (size_t)session.capacity()));

    EvalTotals totals = totals_of(out, rows.size());
    const size_t before = totals.rows;
    if (before)
        say(format("%s: %zu of %s are there", out.partial.c_str(), before, counted(rows.size(), "row").c_str()));
    {
        Progress progress;
        ThreadPace pace(o, o.ctx);
        while (totals.rows < rows.size() && !interrupted) {
            QuestionRow row = rows[totals.rows];
            try {
                look_up(o, tokenizer, (size_t)context, row);
            } catch (const Error& e) {
                if (interrupted) break;
                DIE("%s: %s", row.where.c_str(), e.what());
            }
            const std::string line = evaluate_row(o, session, tokenizer, how, row, totals.rows, pace);
            if (interrupted) break;
            out.append(line);
            totals.add(line);
            progress.show(totals.rows - before, rows.size() - before, [&](double) {
                const double mean = totals.nll / (double)std::max<size_t>(1, totals.tokens); // (rows may be skipped)
                return format("%zu of %zu rows, loss %.4f", totals.rows, rows.size(), mean);
            });
        }
    }
    if (interrupted) {
        say(format("%s: %zu of %s; the same command goes on", out.partial.c_str(), totals.rows,
                   counted(rows.size(), "row").c_str()));
        return 130;
    }
    out.finish();
    report(o, totals);
    return 0;
}

} // namespace cli
