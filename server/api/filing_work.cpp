// filing_work.cpp: answers batches, one at a time per key.
#include "model/utf8.h"
#include "server/api/batch.h"
#include "server/api/filing.h"
#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <sys/stat.h>

namespace server {

void Filing::wake(Owner& o) {
    if (o.working || !service || stopping) return;
    if (o.worker.joinable()) o.worker.join(); // it does not use `mutex` any more
    o.working = true;
    o.worker = std::thread([this, &o] { work(o); });
}

void Filing::work(Owner& o) {
    for (;;) {
        std::string id;
        {
            std::lock_guard guard(mutex);
            const Batch* first = nullptr;
            for (auto& [name, b] : o.batches)
                if (b.under_way() && (!first || created(b) < created(*first))) first = &b;
            if (!first || stopping) {
                o.working = false;
                return;
            }
            id = first->id;
        }
        try {
            answer(o, id);
        } catch (const std::exception& e) { // a full disk: answers are kept until the next wake or start
            {
                std::lock_guard guard(mutex);
                o.working = false;
            }
            print_error("serve", format("%s: %s", id.c_str(), e.what()));
            return;
        }
    }
}

void Filing::end(Owner& o, const std::string& id, const std::string& fault) {
    std::lock_guard guard(mutex);
    Batch b = o.batches.at(id);
    std::string text = fault; // may name a file by its path; the client knows ids only
    for (size_t at; (at = text.find(o.folder + "/")) != text.npos;) text.erase(at, o.folder.size() + 1);
    utf8_repair(b.fault, text, true);
    b.become(!fault.empty() ? "failed" : b.at.count("cancelling") ? "cancelled" : "completed");
    write_text(o.path(id + ".json"), b.json());
    o.batches.at(id) = b; // if the write failed, the batch stays open
    unlink(o.path(id + ".partial").c_str()); // may be missing, if the batch could not begin
}

void Filing::answer(Owner& o, const std::string& id) {
    Batch b;
    const uint64_t caller = (uint64_t)(&o - owners.data()) + 1;
    {
        std::lock_guard guard(mutex);
        b = o.batches.at(id);
    }
    std::unique_ptr<Batcher> made;
    Service own = *service; // a snapshot of the adapters, unaffected by later loads and unloads
    own.adapters = std::make_shared<Adapters>();
    try {
        AdapterHashes hashes;
        const auto adapters = service->adapters->now();
        for (auto& [name, one] : adapters) hashes[name] = one->hash;
        made = std::make_unique<Batcher>(o.path(b.input), o.path(id), depends, hashes, MAX_BATCH_ROWS);
        for (auto& [name, one] : adapters)
            if (made->models.count(name)) own.adapters->add(one);
    } catch (const Error& e) {
        const bool gone = access(o.path(b.input).c_str(), F_OK) && errno == ENOENT;
        if (!gone && !dynamic_cast<const Unfit*>(&e)) throw;
        auto collect = [&](const EachAnswer& f) { each_kept(o.path(id + ".partial"), f); };
        size_t n[2] = {}; // errors, successes
        collect([&](std::string_view, bool ok) { n[ok]++; });
        {
            std::lock_guard guard(mutex);
            Batch& now = o.batches.at(id);
            now.failed = n[0], now.completed = n[1], now.total = std::max(now.total, n[0] + n[1]);
        }
        keep_answers(o, id, collect);
        return end(o, id, e.what());
    }
    Batcher& batcher = *made;
    std::string fault;
    auto note = [&] { // updates the counts; true: stop
        std::lock_guard guard(mutex);
        Batch& now = o.batches.at(id);
        now.total = batcher.rows.size(), now.failed = batcher.failed, now.completed = batcher.have - batcher.failed;
        if (o.bytes() + batcher.bytes > MAX_FILED_BYTES)
            fault = format("the files of a key may have %zu bytes together", MAX_FILED_BYTES);
        return stopping || now.at.count("cancelling") || !fault.empty();
    };
    auto become = [&](const char* status) {
        std::lock_guard guard(mutex);
        Batch& now = o.batches.at(id);
        if (now.status == "cancelling" && !strcmp(status, "in_progress")) return;
        now.become(status);
        write_text(o.path(id + ".json"), now.json());
    };
    // A batch that was finalizing without all its answers may have room for them now.
    const bool more = b.status == "finalizing" && !note() && batcher.have < batcher.rows.size();
    if (b.status == "validating" || more) become("in_progress");
    const size_t most = std::max<size_t>(1, desk->limit / (4 * owners.size()));
    batcher.answer(own, *desk, {caller, INT_MAX, most, b.endpoint}, note);
    if (note() && stopping && batcher.have < batcher.rows.size()) return;
    become("finalizing");
    keep_answers(o, id, [&](const EachAnswer& f) { batcher.collect(f); });
    end(o, id, fault);
}

void Filing::each_kept(const std::string& partial, const EachAnswer& f) {
    struct stat st;
    if (stat(partial.c_str(), &st) == 0 ? st.st_size == 0 : errno == ENOENT) return;
    const MappedFile map(partial);
    const std::string_view text = map.text();
    for (size_t at = text.find('\n') + 1, end; (end = text.find('\n', at)) != text.npos; at = end + 1) {
        const std::string_view line = whole_line(text.substr(at, end + 1 - at));
        sj::Doc doc;
        if (line.empty() || !sj::parse(doc, line).empty()) continue; // damaged
        f(line, doc.root()["response"]["status_code"].number() == 200);
    }
}

void Filing::keep_answers(Owner& o, const std::string& id, const std::function<void(const EachAnswer&)>& collect) {
    for (bool good : {true, false}) {
        File f{"file-" + id.substr(6) + (good ? "-output" : "-errors"),
               id + (good ? "_output.jsonl" : "_error.jsonl"), "batch_output", 0, (long)time(nullptr)};
        collect([&](std::string_view line, bool ok) { f.bytes += ok == good ? line.size() : 0; });
        if (f.bytes == 0) continue;
        add(o, f, [&](OutputFile& out) {
            collect([&](std::string_view line, bool ok) {
                if (ok == good) out.write(line);
            });
        });
        std::lock_guard guard(mutex);
        (good ? o.batches.at(id).output : o.batches.at(id).errors) = f.id;
    }
}

} // namespace server
