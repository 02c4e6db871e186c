// filing.h: OpenAI's Files and Batches over HTTP, kept in a folder (--files DIR). Batcher answers a file of requests.
//
// Each key has a folder of its own there, named by a hash of the key:
//     file-ID          the bytes of a file, and
//     file-ID.json     ... what is known of it
//     batch_ID.json    a batch, as the API tells it
//     batch_ID.partial its answers so far
// What appears there is complete: it is written under another name and renamed, what is known of a file after its
// bytes. So a server that ends at any moment goes on where it was at its next start.
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

constexpr size_t MAX_UPLOAD = 64 << 20;       // bytes of a file that comes in
constexpr size_t MAX_FILED_BYTES = 1 << 30;   // of all files of a key, answers too
constexpr size_t MAX_FILED = 1000;            // files of a key; and batches
constexpr size_t MAX_BATCH_ROWS = 50'000;     // requests of a batch
constexpr size_t MAX_UNDER_WAY = 64;          // batches that a key may have waiting

struct Filed { // an answer: JSON, or a file
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
        std::map<std::string, long> at{}; // when it came to a status
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
    using Argument = std::optional<std::string>;
    using EachAnswer = std::function<void(std::string_view line, bool ok)>;

    // keys: the texts of the API keys; none: one owner for all.
    Filing(const std::string& folder, const std::vector<std::string>& keys);
    Filing(const Filing&) = delete;
    ~Filing();

    // From now on batches are answered.
    void start(const Service& s, Desk& d, const std::string& what);
    // Once `stopping` is set: what is under way is left to the next start.
    void stop();

    // A request of `caller` to /v1/files or /v1/batches. type: its Content-Type. argument: of the query.
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

    // The latest first.
    template <class T> std::string list(const std::map<std::string, T>& all, const Argument& after,
                                        const Argument& limit, const Argument& purpose);

    std::string upload(Owner& o, const std::string& type, std::string_view body);
    // A file that `write` writes.
    void add(Owner& o, const File& f, const std::function<void(OutputFile&)>& write);
    Filed content(Owner& o, const std::string& id);
    std::string remove(Owner& o, const std::string& id);

    std::string create(Owner& o, std::string_view body);
    static void check_metadata(sj::Value v);
    void forget_oldest(Owner& o); // of the batches that have ended
    std::string cancel(Owner& o, const std::string& id);

    // ---- The work
    void wake(Owner& o); // `mutex` is held
    void work(Owner& o);
    // The batch is no longer under way.
    void end(Owner& o, const std::string& id, const std::string& fault);
    void answer(Owner& o, const std::string& id);
    // f(line, whether it is an answer) for what a batch has that cannot go on, in the order of the answers.
    static void each_kept(const std::string& partial, const EachAnswer& f);
    // As two files: those that are good, and the others. Their ids follow from the batch's, so that doing it again
    // makes the same. collect(f): calls f(line, whether it is an answer) for all.
    void keep_answers(Owner& o, const std::string& id, const std::function<void(const EachAnswer&)>& collect);
};

} // namespace server
