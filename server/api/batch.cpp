// batch.cpp: submits the requests of a batch and stores their answers.
#include "base/appended_file.h"
#include "base/json_lines.h"
#include "base/options.h"
#include "server/api/asked.h"
#include "server/api/batch.h"
#include "server/api/limits.h"
#include "server/api/refusal.h"
#include "server/engine/job.h"
#include "server/engine/random_bits.h"
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <sys/file.h>
#include <sys/stat.h>

namespace server {

// models: receives the model names of the rows.
static std::vector<BatchRow> read_batch(const MappedFile& file, size_t most, std::set<std::string>& models) try {
    std::vector<BatchRow> rows;
    std::set<std::string> seen;
    each_json_line(file, [&](size_t line, std::string_view text, sj::Value request) {
        const std::string id = request["custom_id"].str();
        if (id.empty()) DIE("%s: line %zu: no custom_id", file.path.c_str(), line);
        if (!seen.insert(id).second) DIE("%s: line %zu: its custom_id is taken", file.path.c_str(), line);
        if (rows.size() == most) DIE("%s: more than %zu requests", file.path.c_str(), most);
        rows.push_back({text, id});
        models.insert(request["body"]["model"].str());
    });
    if (rows.empty()) DIE("%s: no request in it", file.path.c_str());
    return rows;
} catch (const Error& e) {
    throw Unfit(e.what());
}

static std::string batch_line(const std::string& custom_id, int status, const std::string& body) {
    const std::string id = format("%016llx", (unsigned long long)random_bits());
    sj::Writer w;
    w.object().field("id", "batch_req_" + id).field("custom_id", custom_id).key("response").object();
    w.field("status_code", status).field("request_id", "req_" + id).key("body").separate();
    w.text += body; // already JSON
    return w.end().field("error", nullptr).end().text + "\n";
}

static std::string checksum(std::string_view line) { return format("%016llx ", (unsigned long long)fnv1a(line)); }

std::string_view whole_line(std::string_view line) {
    const std::string_view answer = line.substr(std::min<size_t>(line.size(), 17));
    return line.substr(0, 17) == checksum(answer) ? answer : std::string_view();
}

static Asked read_batch_line(const Service& service, std::string_view line, const BatchHow& how) {
    sj::Doc doc;
    sj::parse(doc, line);
    const std::string url = doc.root()["url"].str(), method = doc.root()["method"].str("POST");
    if (method != "POST") throw Refusal(405, "method must be POST", "method");
    if (!is_batched(url)) throw Refusal(404, format("url must be %s", BATCHED), "url");
    if (!how.endpoint.empty() && url != how.endpoint) throw Refusal(400, "url is not the batch's endpoint", "url");
    const sj::Value body = doc.root()["body"];
    if (body["stream"].is(sj::True)) throw Refusal(400, "stream is not for batches", "stream"); // before a form is read
    Asked asked = read_asked(service, url, body.raw(), how.salt);
    for (Job& job : asked.ask.jobs) {
        job.bulk = true;
        if (how.priority) job.priority = how.priority;
    }
    return asked;
}

Batcher::Batcher(const std::string& in, const std::string& out, const std::string& depends,
                 const AdapterHashes& adapters, size_t most)
    : out(out), partial(out + ".partial"), requests(in), rows(read_batch(requests, most, models)),
      header(header_of(depends, adapters)) {
    for (size_t i = 0; i < rows.size(); i++) by_id[rows[i].custom_id] = i;
    auto exists = [&] { return access(out.c_str(), F_OK) == 0; };
    must_not_exist(out);
    file.reset(fopen(partial.c_str(), "a+b"));
    struct stat st;
    if (!file) DIE("%s: %s", partial.c_str(), strerror(errno));
    if (flock(fileno(file.get()), LOCK_EX | LOCK_NB)) DIE("%s: another run is at work on it", partial.c_str());
    if (fstat(fileno(file.get()), &st)) DIE("%s: %s", partial.c_str(), strerror(errno));
    if (exists()) DIE("%s: exists; another run has just ended", out.c_str());
    if (st.st_size > 0) take_up();
    else append(header);
}

void Batcher::answer(const Service& service, Desk& desk, const BatchHow& how, const std::function<bool()>& note) {
    // Submits enough requests that the engine never runs dry. Each enters `finished` when it completes.
    struct Open { std::shared_ptr<Reply> reply; std::unique_ptr<Answer> answer; };
    std::mutex mutex;
    std::condition_variable news;
    std::vector<size_t> finished;
    struct OpenOnes : std::map<size_t, Open> { // on every way out, the engine must stop calling back
        ~OpenOnes() {
            for (auto& [index, o] : *this) {
                std::lock_guard lock(o.reply->mutex);
                o.reply->wake = nullptr, o.reply->cancelled = true;
            }
        }
    } open;
    constexpr double PATIENCE = 600; // seconds with no request of ours in progress, until a 503 becomes the answer
    size_t next = 0, jobs = 0;
    double refused = 0;              // when the next row first got a 503, which is temporary
    auto keep = [&](const BatchRow& row, int status, const std::string& body) {
        const std::string line = batch_line(row.custom_id, status, body);
        append(checksum(line) + line);
        have++, failed += status != 200;
    };
    auto begin = [&](size_t index) { // false: no room now
        auto [ask, answer] = read_batch_line(service, rows[index].line, how);
        if (!ask.pooled && ask.jobs.size() > desk.limit)
            throw Refusal(400, format("the queue has room for %zu answers", desk.limit), "n");
        const size_t n = ask.jobs.size();
        Open o = {ask.jobs[0].reply, std::move(answer)};
        o.reply->wake = [&mutex, &finished, &news, index, reply = o.reply.get()] {
            if (reply->left) return;
            std::lock_guard lock(mutex);
            finished.push_back(index);
            news.notify_one();
        };
        const std::shared_ptr<Reply> reply = o.reply;
        open[index] = std::move(o);
        if (!desk.submit(std::move(ask.jobs))) return open.erase(index), false;
        jobs += n;
        return true;
    };
    auto some_finished = [&] {
        std::lock_guard lock(mutex);
        return !finished.empty();
    };
    while (have < rows.size() && !note()) {
        // Thousands may be refused or looked up in documents, each after a while. Stops when an answer has finished.
        while (next < rows.size() && jobs < how.most && !some_finished() && !note()) {
            const size_t index = next++;
            if (rows[index].answered) continue;
            bool begun = false;
            try {
                begun = begin(index);
            } catch (const Refusal& r) {
                if (r.status == 503 && refused == 0) refused = seconds();
                begun = r.status != 503 || (open.empty() && !interrupted && seconds() - refused > PATIENCE);
                if (begun) keep(rows[index], r.status, error_json(r));
            }
            if (!begun) { // retry later
                next = index;
                break;
            }
            refused = 0;
        }
        std::vector<size_t> ready;
        if (have < rows.size()) {
            std::unique_lock lock(mutex);
            news.wait_for(lock, std::chrono::milliseconds(200), [&] { return !finished.empty(); });
            ready.swap(finished);
        }
        for (size_t index : ready) {
            Open& o = open[index];
            {
                std::lock_guard lock(o.reply->mutex); // waits until the engine has left `wake`
                o.reply->wake = nullptr;
                for (Piece& piece : o.reply->pieces) o.answer->add(std::move(piece));
            }
            jobs -= o.answer->choices.size(), tokens += o.answer->count();
            if (o.answer->broken()) keep(rows[index], 500, error_json(500, o.answer->broken()));
            else keep(rows[index], 200, o.answer->whole());
            open.erase(index);
        }
    }
}

void Batcher::collect(const std::function<void(std::string_view line, bool ok)>& f) {
    const MappedFile map(partial);
    std::vector<std::pair<std::string_view, bool>> answers(rows.size());
    each_answer(map, [&](BatchRow& row, std::string_view line, bool ok) {
        answers[(size_t)(&row - rows.data())] = {line, ok};
    });
    for (auto& [line, ok] : answers)
        if (!line.empty()) f(line, ok);
}

int Batcher::run(const Service& service, Desk& desk) {
    const size_t before = have, failed_before = failed;
    const bool terminal = isatty(2);
    const double start = seconds();
    double told = start;
    auto show = [&] {
        const double spent = seconds() - start, share = (double)have / (double)rows.size();
        const double left = have > before ? spent * (double)(rows.size() - have) / (double)(have - before) : 0;
        const std::string bar((size_t)(share * 24), '=');
        fprintf(stderr, "%s[%-24s] %zu of %zu, %.0f tok/s, %.0f s left   %s", terminal ? "\r" : "", bar.c_str(),
                have, rows.size(), (double)desk.look().answer_tokens / spent, left, terminal ? "" : "\n");
        told = seconds();
    };
    answer(service, desk, {1, 0, desk.limit / 2}, [&] { // `limit` was chosen for that
        if (seconds() - told >= (terminal ? 1 : 30)) show();
        return stopping.load();
    });
    const double spent = seconds() - start;
    show();
    if (terminal) fputc('\n', stderr);
    if (have < rows.size()) {
        fprintf(stderr, "%s: %zu of %zu answers; the same command goes on\n", partial.c_str(), have, rows.size());
        return 130;
    }
    finish();
    fprintf(stderr, "%s: %zu answers, %zu errors among those of this run; %zu tokens in %.2f s, %.1f tok/s\n",
            out.c_str(), rows.size(), failed - failed_before, tokens, spent, (double)tokens / spent);
    return 0;
}

std::string Batcher::header_of(const std::string& depends, const AdapterHashes& adapters) const {
    sj::Writer w;
    w.object();
    for (auto& [name, hash] : adapters)
        if (models.count(name)) w.field(name, hash);
    const std::string used = w.end().text;
    return depends.substr(0, depends.size() - 1) + ", \"lines\": \"fnv1a\", \"adapters\": " + used + "}\n";
}

void Batcher::append(const std::string& line) {
    append_whole(fileno(file.get()), partial, line);
    bytes += line.size();
}

size_t Batcher::each_answer(const MappedFile& map,
                            const std::function<void(BatchRow&, std::string_view line, bool ok)>& f) {
    const size_t whole = map.text().rfind('\n') + 1;
    if (map.text().substr(0, std::min(whole, header.size())) != header.substr(0, whole))
        throw Unfit(partial + ": begun with another model, other requests or options; remove it to start anew");
    for (size_t at = header.size(), number = 2; at < whole; number++) {
        const std::string_view kept = map.text().substr(at, map.text().find('\n', at) + 1 - at);
        const std::string_view line = whole_line(kept);
        at += kept.size();
        sj::Doc doc;
        if (!line.empty()) sj::parse(doc, line);
        const auto row = by_id.find(doc.root()["custom_id"].str());
        if (row == by_id.end())
            throw Unfit(partial + format(": line %zu is damaged; remove it, or the file to start anew", number));
        f(rows[row->second], line, doc.root()["response"]["status_code"].number() == 200);
    }
    return whole;
}

void Batcher::take_up() {
    const size_t whole = each_answer(MappedFile(partial), [&](BatchRow& row, std::string_view line, bool ok) {
        bytes += line.size();
        if (std::exchange(row.answered, true)) return;
        have++, failed += !ok;
    });
    // A partial last line is cut off; its request is sent again.
    if (ftruncate(fileno(file.get()), (off_t)whole)) DIE("%s: %s", partial.c_str(), strerror(errno));
    if (whole == 0) append(header);
    fprintf(stderr, "%s: %zu of %zu answers are there\n", partial.c_str(), have, rows.size());
}

void Batcher::finish() {
    OutputFile whole(out);
    collect([&](std::string_view line, bool) { whole.write(line); });
    whole.commit();
    unlink(partial.c_str());
}

} // namespace server
