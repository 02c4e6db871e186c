// filing.h: OpenAI's Files and Batches over HTTP, kept in a folder (--files DIR). Batcher answers a file of requests.
//
// Each key has its own folder there, named by a hash of the key:
//     file-ID          the bytes of a file, and
//     file-ID.json     ... its metadata
//     batch_ID.json    a batch, as the API reports it
//     batch_ID.partial its answers so far
// Every file there is complete: it is written under another name and renamed, metadata after the bytes. So a server
// that is killed at any moment continues at its next start.
#pragma once
#include "base/file.h"
#include "server/api/service.h"
#include "server/engine/desk.h"
#include "sj.h"
#include <cstdint>
#include <ctime>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace server {

constexpr size_t MAX_UPLOAD = 64 << 20;       // bytes of an uploaded file
constexpr size_t MAX_FILED_BYTES = 1 << 30;   // bytes of a key's files, answers included
constexpr size_t MAX_FILED = 1000;            // files per key; batches per key
constexpr size_t MAX_BATCH_ROWS = 50'000;     // requests per batch
constexpr size_t MAX_UNDER_WAY = 64;          // waiting batches per key

struct Filed { // a response: JSON, or a file
    std::string json, path{};
};

class Filing {
    struct File {
        std::string id, name, purpose;
        size_t bytes;
        long created;
        std::string json() const;
    };
    struct Batch {
        std::string id, input, endpoint, metadata, status, output{}, errors{}, fault{};
        std::map<std::string, long> at{}; // when it reached a status
        size_t total = 0, completed = 0, failed = 0;

        bool under_way() const {
            return status == "validating" || status == "in_progress" || status == "cancelling" ||
                   status == "finalizing";
        }
        void become(const std::string& what) { status = what, at[what] = (long)time(nullptr); }
        std::string json() const;
    };
    struct Owner {
        std::string folder;
        std::map<std::string, File> files{};
        std::map<std::string, Batch> batches{};
        size_t reserved = 0;    // bytes of files being written
        std::thread worker{};   // answers its batches, one after the other
        bool working = false;

        std::string path(const std::string& id) const { return folder + "/" + id; }
        size_t bytes() const {
            size_t n = reserved;
            for (auto& [id, f] : files) n += f.bytes;
            return n;
        }
    };
    std::mutex mutex;           // guards all below
    std::vector<Owner> owners;  // by key number, from 1 on
    int lock = -1;
    const Service* service = nullptr;
    Desk* desk = nullptr;
    std::string depends;        // state that answers depend on, as JSON

  public:
    using Argument = std::optional<std::string>;
    using EachAnswer = std::function<void(std::string_view line, bool ok)>;

    // keys: the API keys; empty: one owner for all.
    Filing(const std::string& folder, const std::vector<std::string>& keys);
    Filing(const Filing&) = delete;
    ~Filing();

    // Starts to answer batches.
    void start(const Service& s, Desk& d, const std::string& what);
    // Once `stopping` is set: unfinished batches are left to the next start.
    void stop();

    // Handles a request of `caller` to /v1/files or /v1/batches. type: its Content-Type. argument: of the query.
    Filed handle(uint64_t caller, const std::string& method, const std::string& path, const std::string& type,
                 std::string_view body, const std::function<Argument(const char* name)>& argument);

  private:
    static std::string new_id(const char* kind);

    // ---- The folder
    static void only_ours(const std::string& folder) {
        if (chmod(folder.c_str(), 0700)) DIE("%s: %s", folder.c_str(), strerror(errno));
    }
    void read_folder(Owner& o);

    // ---- Requests
    template <class T> T& find(std::map<std::string, T>& all, const std::string& id);
    template <class T> std::string look(Owner&, std::map<std::string, T>& all, const std::string& id);
    static long created(const File& f) { return f.created; }
    static long created(const Batch& b) { return b.at.at("validating"); }
    static std::string purpose_of(const File& f) { return f.purpose; }
    static std::string purpose_of(const Batch&) { return ""; }

    // Latest first.
    template <class T> std::string list(const std::map<std::string, T>& all, const Argument& after,
                                        const Argument& limit, const Argument& purpose);

    std::string upload(Owner& o, const std::string& type, std::string_view body);
    // Adds a file whose content `write` produces.
    void add(Owner& o, const File& f, const std::function<void(OutputFile&)>& write);
    Filed content(Owner& o, const std::string& id);
    std::string remove(Owner& o, const std::string& id);

    std::string create(Owner& o, std::string_view body);
    static void check_metadata(sj::Value v);
    void forget_oldest(Owner& o); // among the ended batches
    std::string cancel(Owner& o, const std::string& id);

    // ---- The work
    void wake(Owner& o); // `mutex` is held
    void work(Owner& o);
    // Records that the batch has ended.
    void end(Owner& o, const std::string& id, const std::string& fault);
    void answer(Owner& o, const std::string& id);
    // f(line, success) for the stored answers of a batch that cannot continue, in file order.
    static void each_kept(const std::string& partial, const EachAnswer& f);
    // Stores the answers as two files: successes and errors. Their ids derive from the batch's, so that a repeat
    // writes the same files. collect(f) calls f(line, success) for all.
    void keep_answers(Owner& o, const std::string& id, const std::function<void(const EachAnswer&)>& collect);
};

} // namespace server
