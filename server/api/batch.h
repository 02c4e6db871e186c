// batch.h: a file of requests, and the file of their answers.
//
// OpenAI's Batch format: {"custom_id", "method", "url", "body"} a line in, {"id", "custom_id", "response", "error"} a
// line out. Answers go to FILE.partial as they come, and to FILE in the order of the requests when all are there.
// Stopping it loses the answers in progress. The same command then continues with the requests that have no answer.
#pragma once
#include "base/file.h"
#include "server/api/paths.h"
#include "server/api/service.h"
#include "server/engine/adapters.h"
#include "server/engine/desk.h"
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace server {

inline std::atomic<bool> stopping{false}; // set by a signal on any thread (`interrupted` of options.h is per thread)

struct BatchRow {
    std::string_view line;
    std::string custom_id;
    bool answered = false; // in the partial file of an earlier run
};

// Not a batch, or not the one that was begun. Unlike after a system failure, a retry does not help.
struct Unfit : Error {
    using Error::Error;
};

// The answer in a line of the partial file: a checksum (16 digits) and a blank precede it. Empty if the line is
// damaged.
std::string_view whole_line(std::string_view line);

constexpr const char* BATCHED = "/v1/chat/completions, /v1/completions, /v1/responses or /v1/embeddings";
inline bool is_batched(const std::string& url) {
    return url == CHAT || url == COMPLETION || url == RESPONSES || url == EMBEDDINGS;
}

// How to answer the requests of a batch.
struct BatchHow {
    uint64_t salt = 1;        // of the requesting key
    int priority = 0;
    size_t most;              // answers in the engine at once, approximately
    std::string endpoint{};   // the url that all requests must have; "": any
};

// A batch: its input file, the partial file, its output file.
struct Batcher {
    const std::string out, partial;
    const MappedFile requests;
    std::set<std::string> models;           // named by the rows
    std::vector<BatchRow> rows;
    const std::string header;               // the partial file's first line: everything that the answers depend on
    std::unordered_map<std::string, size_t> by_id;
    std::unique_ptr<FILE, int (*)(FILE*)> file{nullptr, fclose};
    size_t have = 0, failed = 0, bytes = 0; // answers in the partial file; errors among them; bytes of all
    size_t tokens = 0;                      // sampled in this run

    // depends: a JSON object of everything the answers depend on, except the requests and the adapters that they name.
    // `adapters` has the hashes of these.
    Batcher(const std::string& in, const std::string& out, const std::string& depends,
            const AdapterHashes& adapters = {}, size_t most = SIZE_MAX);

    // Answers the open requests. Returns when all are answered, or when `note`, called regularly, returns true.
    void answer(const Service& service, Desk& desk, const BatchHow& how, const std::function<bool()>& note);

    // f(line, success) for every stored answer, in the order of the requests.
    void collect(const std::function<void(std::string_view line, bool ok)>& f);

    // A run of --batch. Returns the exit status.
    int run(const Service& service, Desk& desk);

  private:
    std::string header_of(const std::string& depends, const AdapterHashes& adapters) const;
    void append(const std::string& line);
    // f(row, line, success) for every intact line of the partial file but the first. Returns where the last of them
    // ends.
    size_t each_answer(const MappedFile& map, const std::function<void(BatchRow&, std::string_view line, bool ok)>& f);
    void take_up();
    void finish();
};

} // namespace server
