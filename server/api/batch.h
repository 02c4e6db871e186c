// batch.h: a file of requests, and the file of their answers.
//
// OpenAI's Batch format: {"custom_id", "method", "url", "body"} a line in, {"id", "custom_id", "response", "error"} a
// line out. Answers go to FILE.partial as they come, and to FILE in the order of the requests when all are there.
// Whoever stops it loses what was under way: the same command goes on with what has no answer yet.
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

inline std::atomic<bool> stopping{false}; // a signal came (to any thread: `interrupted` of options.h is for one)

struct BatchRow {
    std::string_view line;
    std::string custom_id;
    bool answered = false; // in the partial file of an earlier run
};

// No batch, or not the one that was begun: unlike where the system fails, trying again does not help.
struct Unfit : Error {
    using Error::Error;
};

// A line of the partial file: a checksum (16 digits) and a blank, then the answer. Without the first two, or empty if
// the line is damaged.
std::string_view whole_line(std::string_view line);

constexpr const char* BATCHED = "/v1/chat/completions, /v1/completions, /v1/responses or /v1/embeddings";
inline bool is_batched(const std::string& url) {
    return url == CHAT || url == COMPLETION || url == RESPONSES || url == EMBEDDINGS;
}

// How a batch's requests are to be answered.
struct BatchHow {
    uint64_t salt = 1;        // of the key that asks
    int priority = 0;
    size_t most;              // answers in the engine's hands at once, about
    std::string endpoint{};   // the url of all; none: any
};

// A batch between its two files.
struct Batcher {
    const std::string out, partial;
    const MappedFile requests;
    std::set<std::string> models;           // that the rows name
    std::vector<BatchRow> rows;
    const std::string header;               // the partial file's first line: what the answers depend on
    std::unordered_map<std::string, size_t> by_id;
    std::unique_ptr<FILE, int (*)(FILE*)> file{nullptr, fclose};
    size_t have = 0, failed = 0, bytes = 0; // answers in the partial file; those that are errors; of all
    size_t tokens = 0;                      // of this run

    // `depends`: a JSON object of what the answers depend on, but for the requests and the adapters that they name, of
    // which `adapters` has the hashes.
    Batcher(const std::string& in, const std::string& out, const std::string& depends,
            const AdapterHashes& adapters = {}, size_t most = SIZE_MAX);

    // Answers what has no answer yet, until all have one or `note`, which is called now and then, says to end.
    void answer(const Service& service, Desk& desk, const BatchHow& how, const std::function<bool()>& note);

    // f(line, whether it is an answer) for all that are there, in the order of the requests.
    void collect(const std::function<void(std::string_view line, bool ok)>& f);

    // A run of --batch. Returns the exit status.
    int run(const Service& service, Desk& desk);

  private:
    std::string header_of(const std::string& depends, const AdapterHashes& adapters) const;
    void append(const std::string& line);
    // f(row, line, whether it is an answer) for every whole line of the partial file but the first. Returns where the
    // last of them ends.
    size_t each_answer(const MappedFile& map, const std::function<void(BatchRow&, std::string_view line, bool ok)>& f);
    void take_up();
    void finish();
};

} // namespace server
