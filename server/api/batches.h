// batches.h: OpenAI's Files and Batches over HTTP, kept in a folder (--files DIR). Included by serve.cu, whose Batcher
// answers a file of requests.
//
// Each key has a folder of its own there, named by a hash of the key:
//     file-ID          the bytes of a file, and
//     file-ID.json     ... what is known of it
//     batch_ID.json    a batch, as the API tells it
//     batch_ID.partial its answers so far
// What appears there is complete: it is written under another name and renamed, what is known of a file after its
// bytes. So a server that ends at any moment goes on where it was at its next start.
#pragma once
#include <dirent.h>
#include <optional>

constexpr size_t MAX_UPLOAD = 64 << 20;       // bytes of a file that comes in
constexpr size_t MAX_FILED_BYTES = 1 << 30;   // of all files of a key, answers too
constexpr size_t MAX_FILED = 1000;            // files of a key; and batches
constexpr size_t MAX_BATCH_ROWS = 50'000;     // requests of a batch
constexpr size_t MAX_UNDER_WAY = 64;          // batches that a key may have waiting

// ---- multipart/form-data (RFC 7578)
struct FormPart {
    std::string name, filename;
    std::string_view bytes;
};

// The value of name="..." among the parameters of a header.
inline std::string header_parameter(std::string_view line, const std::string& name) {
    size_t at = 0, before;
    do {
        at = line.find(name + "=", at + 1);
        if (at == line.npos) return "";
        before = line.find_last_not_of(" \t", at - 1);
    } while (before == line.npos || line[before] != ';');
    std::string_view value = line.substr(at + name.size() + 1);
    if (value.substr(0, 1) != "\"") return std::string(value.substr(0, value.find_first_of("; \t")));
    value.remove_prefix(1);
    return std::string(value.substr(0, value.find('"')));
}

inline std::vector<FormPart> read_form(const std::string& type, std::string_view body) {
    constexpr size_t MAX_PARTS = 16, MAX_BOUNDARY = 70;
    auto refuse = [](const char* why) { throw Refusal(400, format("the form is malformed: %s", why)); };
    std::string boundary = header_parameter(type, "boundary");
    if (boundary.empty() || boundary.size() > MAX_BOUNDARY) refuse("no boundary");
    boundary = "\r\n--" + boundary;
    std::vector<FormPart> parts;
    size_t at = boundary.size() - 2; // of what follows a boundary; nothing is before the first
    if (body.substr(0, at) != std::string_view(boundary).substr(2)) refuse("it does not begin with its boundary");
    while (body.substr(at, 2) == "\r\n") {
        at += 2;
        const size_t head = body.find("\r\n\r\n", at), end = head == body.npos ? head : body.find(boundary, head + 2);
        if (end == body.npos) refuse("a part without its end");
        if (parts.size() == MAX_PARTS) refuse("too many parts");
        FormPart part;
        for (size_t line = at, next; line < head; line = next + 2) {
            next = std::min(body.find("\r\n", line), head);
            const std::string_view text = body.substr(line, next - line), wanted = "content-disposition:";
            if (text.size() < wanted.size() || strncasecmp(text.data(), wanted.data(), wanted.size())) continue;
            part.name = header_parameter(text, "name"), part.filename = header_parameter(text, "filename");
        }
        part.bytes = body.substr(std::min(head + 4, end), end - std::min(head + 4, end));
        parts.push_back(part);
        at = end + boundary.size();
    }
    if (body.substr(at, 2) != "--") refuse("it does not end with its boundary");
    return parts;
}

// ---- What is kept
struct Filed { // an answer: JSON, or a file
    std::string json, path{};
};

class Filing {
    struct File {
        std::string id, name, purpose;
        size_t bytes;
        long created;
        std::string json() const {
            sj::Writer w;
            w.object().field("id", id).field("object", "file").field("bytes", bytes).field("created_at", created);
            return w.field("filename", name).field("purpose", purpose).field("status", "processed").end().text;
        }
    };
    struct Batch {
        std::string id, input, endpoint, metadata, status, output{}, errors{}, fault{};
        std::map<std::string, long> at{}; // when it came to a status
        size_t total = 0, completed = 0, failed = 0;

        bool under_way() const {
            return status == "validating" || status == "in_progress" || status == "cancelling" ||
                   status == "finalizing";
        }
        void become(const std::string& what) { status = what, at[what] = (long)time(nullptr); }
        std::string json() const {
            sj::Writer w;
            auto text = [&](const char* name, const std::string& s) {
                if (s.empty()) w.field(name, nullptr);
                else w.field(name, s);
            };
            w.object().field("id", id).field("object", "batch").field("endpoint", endpoint).key("errors");
            if (fault.empty()) w.value(nullptr);
            else {
                w.object().field("object", "list").key("data").array().object().field("code", "batch_failed");
                w.field("message", fault).field("param", nullptr).field("line", nullptr).end().end().end();
            }
            w.field("input_file_id", input).field("completion_window", "24h").field("status", status);
            text("output_file_id", output), text("error_file_id", errors);
            for (auto [name, field] : {std::pair{"validating", "created_at"}, {"in_progress", "in_progress_at"},
                                       {"finalizing", "finalizing_at"}, {"completed", "completed_at"},
                                       {"failed", "failed_at"}, {"cancelling", "cancelling_at"},
                                       {"cancelled", "cancelled_at"}}) {
                const auto it = at.find(name);
                if (it == at.end()) w.field(field, nullptr);
                else w.field(field, it->second);
            }
            w.field("expired_at", nullptr).field("expires_at", nullptr).key("request_counts").object();
            w.field("total", total).field("completed", completed).field("failed", failed).end();
            w.key("metadata").separate();
            w.text += metadata;
            return w.end().text;
        }
    };
    struct Owner {
        std::string folder;
        std::map<std::string, File> files{};
        std::map<std::string, Batch> batches{};
        size_t reserved = 0;    // bytes that are being written
        std::thread worker{};   // at its batches, one after the other
        bool working = false;

        std::string path(const std::string& id) const { return folder + "/" + id; }
        size_t bytes() const {
            size_t n = reserved;
            for (auto& [id, f] : files) n += f.bytes;
            return n;
        }
    };
    std::mutex mutex;           // of all below
    std::vector<Owner> owners;  // by the key's number, from 1 on
    int lock = -1;
    const Service* service = nullptr;
    Desk* desk = nullptr;
    std::string depends;        // what answers depend on, as JSON

  public:
    // keys: the texts of the API keys; none: one owner for all.
    Filing(const std::string& folder, const std::vector<std::string>& keys) {
        const bool there = access(folder.c_str(), F_OK) == 0;
        make_folder(folder);
        if (!there) only_ours(folder);
        lock = open((folder + "/lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
        if (lock < 0) DIE("%s/lock: %s", folder.c_str(), strerror(errno));
        if (flock(lock, LOCK_EX | LOCK_NB)) DIE("%s: another server is at work on it", folder.c_str());
        owners.resize(std::max<size_t>(1, keys.size()));
        for (size_t i = 0; i < owners.size(); i++) {
            const std::string name = keys.empty() ? "open" : format("%016llx", (unsigned long long)fnv1a(keys[i]));
            owners[i].folder = folder + "/" + name;
            make_folder(owners[i].folder);
            only_ours(owners[i].folder);
            read_folder(owners[i]);
        }
    }
    Filing(const Filing&) = delete;
    ~Filing() {
        stop();
        if (lock >= 0) close(lock);
    }

    // From now on batches are answered.
    void start(const Service& s, Desk& d, const std::string& what) {
        std::lock_guard guard(mutex);
        service = &s, desk = &d, depends = what;
        for (Owner& o : owners) wake(o);
    }
    // Once `stopping` is set: what is under way is left to the next start.
    void stop() {
        for (Owner& o : owners) {
            std::thread worker;
            {
                std::lock_guard guard(mutex);
                worker = std::move(o.worker);
            }
            if (worker.joinable()) worker.join();
        }
    }

    // A request of `caller` to /v1/files or /v1/batches. type: its Content-Type. argument: of the query.
    template <class F> Filed handle(uint64_t caller, const std::string& method, const std::string& path,
                                    const std::string& type, std::string_view body, F argument) {
        Owner& o = owners.at(caller - 1);
        const bool files = path.compare(0, 9, "/v1/files") == 0;
        const std::string rest = path.substr(files ? 9 : 11); // "", "/ID", "/ID/what"
        const size_t slash = rest.find('/', 1);
        const std::string id = rest.empty() ? "" : rest.substr(1, slash - 1);
        const std::string what = slash == rest.npos ? "" : rest.substr(slash + 1);
        auto only = [&](std::initializer_list<const char*> methods) {
            std::string all;
            for (const char* m : methods) {
                if (method == m) return;
                all += (all.empty() ? "" : ", ") + std::string(m);
            }
            throw Refusal(405, format("%s takes %s only", path.c_str(), all.c_str()), all);
        };
        try {
            if (rest.empty()) {
                only({"GET", "POST"});
                if (method == "POST") return {files ? upload(o, type, body) : create(o, body)};
                const auto after = argument("after"), limit = argument("limit"), purpose = argument("purpose");
                if (argument("order")) throw Refusal(400, "order is not supported", "order");
                return {files ? list(o.files, after, limit, purpose) : list(o.batches, after, limit, purpose)};
            }
            if (files && what == "content") return only({"GET"}), content(o, id);
            if (!files && what == "cancel") return only({"POST"}), Filed{cancel(o, id)};
            if (!what.empty()) throw Refusal(404, "there is nothing here");
            if (!files) return only({"GET"}), Filed{look(o, o.batches, id)};
            only({"GET", "DELETE"});
            return {method == "GET" ? look(o, o.files, id) : remove(o, id)};
        } catch (const Refusal&) {
            throw;
        } catch (const Error& e) {
            print_error("serve", e.what());
            throw Refusal(507, "the server cannot write its files");
        }
    }

  private:
    static std::string new_id(const char* kind) {
        return format("%s%016llx%08x", kind, (unsigned long long)random_bits(), (unsigned)random_bits());
    }

    // ---- The folder
    static void only_ours(const std::string& folder) {
        if (chmod(folder.c_str(), 0700)) DIE("%s: %s", folder.c_str(), strerror(errno));
    }
    void read_folder(Owner& o) {
        const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(o.folder.c_str()), closedir);
        if (!dir) DIE("%s: %s", o.folder.c_str(), strerror(errno));
        std::vector<std::string> names;
        while (const dirent* entry = readdir(dir.get())) names.push_back(entry->d_name);
        for (auto& name : names) {
            if (name.find(".tmp") != name.npos) { // of a server that was killed
                unlink(o.path(name).c_str());
                continue;
            }
            if (name.size() < 6 || name.compare(name.size() - 5, 5, ".json")) continue;
            const MappedFile file(o.path(name));
            sj::Doc doc;
            if (!sj::parse(doc, file.text()).empty()) DIE("%s: not JSON", file.path.c_str());
            const sj::Value v = doc.root();
            const std::string id = name.substr(0, name.size() - 5);
            if (v["id"].str() != id) DIE("%s: of another name", file.path.c_str());
            if (v["object"].str() == "file") {
                o.files[id] = {id, v["filename"].str(), v["purpose"].str(), (size_t)v["bytes"].number(),
                               (long)v["created_at"].number()};
            } else {
                Batch b{id, v["input_file_id"].str(), v["endpoint"].str(), sj::dump(v["metadata"]), v["status"].str(),
                        v["output_file_id"].str(), v["error_file_id"].str(),
                        v["errors"]["data"][(size_t)0]["message"].str()};
                for (auto [field, at] : v.members())
                    if (field.size() > 3 && field.compare(field.size() - 3, 3, "_at") == 0 && at.is(sj::Number))
                        b.at[field == "created_at" ? "validating" : field.substr(0, field.size() - 3)] =
                            (long)at.number();
                b.total = (size_t)v["request_counts"]["total"].number();
                b.completed = (size_t)v["request_counts"]["completed"].number();
                b.failed = (size_t)v["request_counts"]["failed"].number();
                o.batches[id] = std::move(b);
            }
        }
        for (auto& name : names) { // of a server that was killed between two files
            const std::string id = name.substr(0, name.rfind('.'));
            const auto batch = o.batches.find(id);
            const bool ended = name == id + ".partial" && (batch == o.batches.end() || !batch->second.under_way());
            const bool unknown = name == id && name.compare(0, 5, "file-") == 0 && !o.files.count(id);
            if (ended || unknown) unlink(o.path(name).c_str());
        }
    }

    // ---- Requests
    template <class T> T& find(std::map<std::string, T>& all, const std::string& id) {
        const auto it = all.find(id);
        if (it == all.end()) throw Refusal(404, format("there is no %s", in_quotes(id).c_str()), "id");
        return it->second;
    }
    template <class T> std::string look(Owner&, std::map<std::string, T>& all, const std::string& id) {
        std::lock_guard guard(mutex);
        return find(all, id).json();
    }
    static long created(const File& f) { return f.created; }
    static long created(const Batch& b) { return b.at.at("validating"); }
    static std::string purpose_of(const File& f) { return f.purpose; }
    static std::string purpose_of(const Batch&) { return ""; }

    // The latest first.
    using Argument = std::optional<std::string>;
    template <class T> std::string list(const std::map<std::string, T>& all, const Argument& after,
                                        const Argument& limit, const Argument& purpose) {
        size_t most = MAX_FILED;
        if (limit) {
            char* end;
            const long n = strtol(limit->c_str(), &end, 10);
            if (!isdigit((unsigned char)(*limit)[0]) || *end || n < 1 || n > 10'000)
                throw Refusal(400, "limit must be an integer from 1 to 10000", "limit");
            most = (size_t)n;
        }
        std::lock_guard guard(mutex);
        std::vector<const T*> sorted;
        for (auto& [id, one] : all)
            if (!purpose || purpose_of(one) == *purpose) sorted.push_back(&one);
        std::sort(sorted.begin(), sorted.end(), [](const T* a, const T* b) {
            return std::pair(created(*b), b->id) < std::pair(created(*a), a->id);
        });
        size_t first = 0;
        if (after) {
            while (first < sorted.size() && sorted[first]->id != *after) first++;
            if (first == sorted.size()) throw Refusal(400, "after: there is no such id", "after");
            first++;
        }
        const size_t end = std::min(sorted.size(), first + most);
        sj::Writer w;
        w.object().field("object", "list").key("data").array();
        for (size_t i = first; i < end; i++) w.separate(), w.text += sorted[i]->json();
        w.end();
        if (first < end) w.field("first_id", sorted[first]->id).field("last_id", sorted[end - 1]->id);
        return w.field("has_more", end < sorted.size()).end().text;
    }

    std::string upload(Owner& o, const std::string& type, std::string_view body) {
        const FormPart* file = nullptr;
        std::string purpose;
        const std::vector<FormPart> parts = read_form(type, body);
        for (auto& part : parts)
            if (part.name == "file") file = &part;
            else if (part.name == "purpose") purpose = part.bytes;
            else refuse_name(part.name);
        if (!file) throw Refusal(400, "file is missing", "file");
        if (purpose != "batch") throw Refusal(400, "purpose: only \"batch\" is supported", "purpose");
        if (file->bytes.empty()) throw Refusal(400, "file is empty", "file");
        File f{new_id("file-"), "", purpose, file->bytes.size(), (long)time(nullptr)};
        utf8_repair(f.name, file->filename.substr(0, 255), true);
        add(o, f, [&](OutputFile& out) { out.write(file->bytes); });
        return f.json();
    }
    // A file that `write` writes.
    template <class F> void add(Owner& o, const File& f, F write) {
        {
            std::lock_guard guard(mutex);
            if (f.purpose == "batch" && (o.files.size() >= MAX_FILED || o.bytes() + f.bytes > MAX_FILED_BYTES))
                throw Refusal(413, format("a key may have %zu files of %zu bytes together: delete some", MAX_FILED,
                                          MAX_FILED_BYTES), "file");
            o.reserved += f.bytes;
        }
        struct Release { // whatever happens
            std::mutex& mutex;
            size_t& reserved;
            const size_t n;
            ~Release() {
                std::lock_guard guard(mutex);
                reserved -= n;
            }
        } release{mutex, o.reserved, f.bytes};
        OutputFile out(o.path(f.id));
        write(out);
        out.commit();
        write_text(o.path(f.id + ".json"), f.json());
        std::lock_guard guard(mutex);
        o.files[f.id] = f;
    }
    Filed content(Owner& o, const std::string& id) {
        std::lock_guard guard(mutex);
        return {"", o.path(find(o.files, id).id)};
    }
    std::string remove(Owner& o, const std::string& id) {
        std::lock_guard guard(mutex);
        find(o.files, id);
        for (auto& [name, b] : o.batches)
            if (b.under_way() && b.input == id) throw Refusal(409, format("%s reads it", name.c_str()), "id");
        unlink(o.path(id + ".json").c_str());
        unlink(o.path(id).c_str());
        o.files.erase(id);
        wake(o); // there is room again
        sj::Writer w;
        return w.object().field("id", id).field("object", "file").field("deleted", true).end().text;
    }

    std::string create(Owner& o, std::string_view body) {
        sj::Doc doc;
        const Fields f(parse_body(doc, body));
        refuse_others(f, {"input_file_id", "endpoint", "completion_window", "metadata"});
        const std::string input = f.text("input_file_id"), endpoint = f.text("endpoint");
        if (f.text("completion_window") != "24h")
            throw Refusal(400, "completion_window must be 24h", "completion_window");
        if (!is_batched(endpoint)) throw Refusal(400, format("endpoint must be %s", BATCHED), "endpoint");
        if (f["metadata"]) check_metadata(f["metadata"]);
        std::lock_guard guard(mutex);
        if (!o.files.count(input)) throw Refusal(400, "there is no such input_file_id", "input_file_id");
        const auto waits = [](auto& b) { return b.second.under_way(); };
        if ((size_t)std::count_if(o.batches.begin(), o.batches.end(), waits) >= MAX_UNDER_WAY)
            throw Refusal(429, format("a key may have %zu batches under way", MAX_UNDER_WAY), "",
                          "rate_limit_exceeded");
        if (o.files.size() >= MAX_FILED) throw Refusal(413, format("a key may have %zu files: delete some", MAX_FILED));
        if (o.batches.size() >= MAX_FILED) forget_oldest(o);
        Batch b{new_id("batch_"), input, endpoint, f["metadata"] ? sj::dump(f["metadata"]) : "null", ""};
        b.become("validating");
        write_text(o.path(b.id + ".json"), b.json());
        o.batches[b.id] = b;
        wake(o);
        return b.json();
    }
    static void check_metadata(sj::Value v) {
        bool good = v.is(sj::Object) && v.size() <= 16;
        for (auto [name, value] : v.members())
            good = good && name.size() <= 64 && value.is(sj::String) && value.raw().size() <= 1024;
        if (!good) throw Refusal(400, "metadata must be an object of at most 16 short strings", "metadata");
    }
    void forget_oldest(Owner& o) { // of the batches that have ended
        const Batch* oldest = nullptr;
        for (auto& [id, b] : o.batches)
            if (!b.under_way() && (!oldest || created(b) < created(*oldest))) oldest = &b;
        if (!oldest) return;
        unlink(o.path(oldest->id + ".json").c_str());
        o.batches.erase(std::string(oldest->id));
    }
    std::string cancel(Owner& o, const std::string& id) {
        std::lock_guard guard(mutex);
        Batch& b = find(o.batches, id);
        if (!b.under_way() || b.status == "finalizing")
            throw Refusal(409, format("it is %s", b.status.c_str()), "id");
        if (b.status != "cancelling") b.become("cancelling");
        write_text(o.path(id + ".json"), b.json());
        wake(o);
        return b.json();
    }

    // ---- The work
    void wake(Owner& o) { // `mutex` is held
        if (o.working || !service || stopping) return;
        if (o.worker.joinable()) o.worker.join(); // (it has let go of `mutex` for good)
        o.working = true;
        o.worker = std::thread([this, &o] { work(o); });
    }
    void work(Owner& o) {
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
            } catch (const std::exception& e) { // a full disk: its answers stay, until there is news or the next start
                {
                    std::lock_guard guard(mutex);
                    o.working = false;
                }
                print_error("serve", format("%s: %s", id.c_str(), e.what()));
                return;
            }
        }
    }
    // The batch is no longer under way.
    void end(Owner& o, const std::string& id, const std::string& fault) {
        std::lock_guard guard(mutex);
        Batch b = o.batches.at(id);
        std::string text = fault; // of a file, which the client knows by its id only
        for (size_t at; (at = text.find(o.folder + "/")) != text.npos;) text.erase(at, o.folder.size() + 1);
        utf8_repair(b.fault, text, true);
        b.become(!fault.empty() ? "failed" : b.at.count("cancelling") ? "cancelled" : "completed");
        write_text(o.path(id + ".json"), b.json());
        o.batches.at(id) = b; // (if it could not be written it stays under way)
        unlink(o.path(id + ".partial").c_str()); // (where it could not be begun there is none)
    }
    void answer(Owner& o, const std::string& id) {
        Batch b;
        const uint64_t caller = (uint64_t)(&o - owners.data()) + 1;
        {
            std::lock_guard guard(mutex);
            b = o.batches.at(id);
        }
        std::unique_ptr<Batcher> made;
        Service own = *service; // with the adapters as they are now, whatever is loaded and unloaded meanwhile
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
            auto collect = [&](auto f) { each_kept(o.path(id + ".partial"), f); };
            size_t n[2] = {}; // those that are errors, and the others
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
        auto note = [&] { // the figures, and whether it is to end
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
        // (One that is being finalized without all its answers may have room for them now.)
        const bool more = b.status == "finalizing" && !note() && batcher.have < batcher.rows.size();
        if (b.status == "validating" || more) become("in_progress");
        const size_t most = std::max<size_t>(1, desk->limit / (4 * owners.size()));
        batcher.answer(own, *desk, {caller, INT_MAX, most, b.endpoint}, note);
        if (note() && stopping && batcher.have < batcher.rows.size()) return;
        become("finalizing");
        keep_answers(o, id, [&](auto f) { batcher.collect(f); });
        end(o, id, fault);
    }
    // f(line, whether it is an answer) for what a batch has that cannot go on, in the order of the answers.
    template <class F> static void each_kept(const std::string& partial, F f) {
        struct stat st;
        if (stat(partial.c_str(), &st) == 0 ? st.st_size == 0 : errno == ENOENT) return;
        const MappedFile map(partial);
        const std::string_view text = map.text();
        for (size_t at = text.find('\n') + 1, end; (end = text.find('\n', at)) != text.npos; at = end + 1) {
            const std::string_view line = text.substr(at, end + 1 - at);
            sj::Doc doc;
            if (!sj::parse(doc, line).empty()) continue; // damaged
            f(line, doc.root()["response"]["status_code"].number() == 200);
        }
    }
    // As two files: those that are good, and the others. Their ids follow from the batch's, so that doing it again
    // makes the same. collect(f): calls f(line, whether it is an answer) for all.
    template <class C> void keep_answers(Owner& o, const std::string& id, C collect) {
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
};
