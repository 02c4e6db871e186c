// filing.cpp: the folder, and requests to it.
#include "model/chat_template.h"
#include "model/utf8.h"
#include "server/api/batch.h"
#include "server/api/fields.h"
#include "server/api/filing.h"
#include "server/api/form_data.h"
#include "server/api/refusal.h"
#include "server/engine/random_bits.h"
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <dirent.h>
#include <sys/file.h>
#include <sys/stat.h>

namespace server {

std::string Filing::File::json() const {
    sj::Writer w;
    w.object().field("id", id).field("object", "file").field("bytes", bytes).field("created_at", created);
    return w.field("filename", name).field("purpose", purpose).field("status", "processed").end().text;
}

std::string Filing::Batch::json() const {
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

template <class T> T& Filing::find(std::map<std::string, T>& all, const std::string& id) {
    const auto it = all.find(id);
    if (it == all.end()) throw Refusal(404, format("there is no %s", in_quotes(id).c_str()), "id");
    return it->second;
}

template <class T> std::string Filing::look(Owner&, std::map<std::string, T>& all, const std::string& id) {
    std::lock_guard guard(mutex);
    return find(all, id).json();
}

template <class T> std::string Filing::list(const std::map<std::string, T>& all, const Argument& after,
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

Filing::Filing(const std::string& folder, const std::vector<std::string>& keys) {
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

Filing::~Filing() {
    stop();
    if (lock >= 0) close(lock);
}

void Filing::start(const Service& s, Desk& d, const std::string& what) {
    std::lock_guard guard(mutex);
    service = &s, desk = &d, depends = what;
    for (Owner& o : owners) wake(o);
}

void Filing::stop() {
    for (Owner& o : owners) {
        std::thread worker;
        {
            std::lock_guard guard(mutex);
            worker = std::move(o.worker);
        }
        if (worker.joinable()) worker.join();
    }
}

Filed Filing::handle(uint64_t caller, const std::string& method, const std::string& path, const std::string& type,
                     std::string_view body, const std::function<Argument(const char* name)>& argument) {
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

void Filing::read_folder(Owner& o) {
    const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(o.folder.c_str()), closedir);
    if (!dir) DIE("%s: %s", o.folder.c_str(), strerror(errno));
    std::vector<std::string> names;
    while (const dirent* entry = readdir(dir.get())) names.push_back(entry->d_name);
    for (auto& name : names) {
        if (name.find(".tmp") != name.npos) { // left by a killed server
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
    for (auto& name : names) { // left by a server killed between two files
        const std::string id = name.substr(0, name.rfind('.'));
        const auto batch = o.batches.find(id);
        const bool ended = name == id + ".partial" && (batch == o.batches.end() || !batch->second.under_way());
        const bool unknown = name == id && name.compare(0, 5, "file-") == 0 && !o.files.count(id);
        if (ended || unknown) unlink(o.path(name).c_str());
    }
}

std::string Filing::new_id(const char* kind) {
    return format("%s%016llx%08x", kind, (unsigned long long)random_bits(), (unsigned)random_bits());
}

std::string Filing::upload(Owner& o, const std::string& type, std::string_view body) {
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

void Filing::add(Owner& o, const File& f, const std::function<void(OutputFile&)>& write) {
    {
        std::lock_guard guard(mutex);
        if (f.purpose == "batch" && (o.files.size() >= MAX_FILED || o.bytes() + f.bytes > MAX_FILED_BYTES))
            throw Refusal(413, format("a key may have %zu files of %zu bytes together: delete some", MAX_FILED,
                                      MAX_FILED_BYTES), "file");
        o.reserved += f.bytes;
    }
    struct Release { // on every way out
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

Filed Filing::content(Owner& o, const std::string& id) {
    std::lock_guard guard(mutex);
    return {"", o.path(find(o.files, id).id)};
}

std::string Filing::remove(Owner& o, const std::string& id) {
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

std::string Filing::create(Owner& o, std::string_view body) {
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

void Filing::check_metadata(sj::Value v) {
    bool good = v.is(sj::Object) && v.size() <= 16;
    for (auto [name, value] : v.members())
        good = good && name.size() <= 64 && value.is(sj::String) && value.raw().size() <= 1024;
    if (!good) throw Refusal(400, "metadata must be an object of at most 16 short strings", "metadata");
}

void Filing::forget_oldest(Owner& o) {
    const Batch* oldest = nullptr;
    for (auto& [id, b] : o.batches)
        if (!b.under_way() && (!oldest || created(b) < created(*oldest))) oldest = &b;
    if (!oldest) return;
    unlink(o.path(oldest->id + ".json").c_str());
    o.batches.erase(std::string(oldest->id));
}

std::string Filing::cancel(Owner& o, const std::string& id) {
    std::lock_guard guard(mutex);
    Batch& b = find(o.batches, id);
    if (!b.under_way() || b.status == "finalizing")
        throw Refusal(409, format("it is %s", b.status.c_str()), "id");
    if (b.status != "cancelling") b.become("cancelling");
    write_text(o.path(id + ".json"), b.json());
    wake(o);
    return b.json();
}

} // namespace server
