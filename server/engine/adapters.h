// adapters.h: several LoRA adapters beside one model, each with a name of its own that requests give as their model.
//
//   LoadedAdapter   one of them, as requests, pages and figures know it
//   Adapters        those that can be asked for, by name: loaded and unloaded while the engine computes
#pragma once
#include <atomic>
#include <cstdint>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace server {

// Whoever holds it keeps its matrices: unloading takes its name away, and what runs with it comes to its end.
struct LoadedAdapter {
    const std::string name, folder;
    const uint64_t number; // from 1 on. No other one ever has it, also if it has the same name
    const uint64_t hash;   // of its matrices
    const size_t bytes;    // ... in its file
    const long created = (long)time(nullptr);
    mutable std::atomic<size_t> waiting{0}, running{0}; // answers (and texts) of the engine,
    mutable std::atomic<uint64_t> tokens{0};            // ... and all tokens drawn for them

    LoadedAdapter(const std::string& name, const std::string& folder, uint64_t hash, size_t bytes)
        : name(name), folder(folder), number(next()), hash(hash), bytes(bytes) { alive()++, alive_bytes() += bytes; }
    LoadedAdapter(const LoadedAdapter&) = delete;
    virtual ~LoadedAdapter() { alive()--, alive_bytes() -= bytes; }

    static std::atomic<size_t>& alive(); // all that hold memory, also those that have no name any more
    static std::atomic<size_t>& alive_bytes();

  private:
    static uint64_t next();
};
using AdapterPtr = std::shared_ptr<const LoadedAdapter>; // null: the model as it is
using AdapterHashes = std::map<std::string, uint64_t>;   // by name

constexpr size_t MAX_ADAPTERS = 256; // that hold memory

// A name goes into paths, labels and lists: hence few characters.
void check_adapter_name(const std::string& name);

class Adapters {
    mutable std::mutex mutex;
    std::map<std::string, AdapterPtr> all; // null: it is being loaded

  public:
    std::function<AdapterPtr(const std::string& name, const std::string& folder)> open{}; // reads one

    AdapterPtr find(const std::string& name) const;
    std::map<std::string, AdapterPtr> now() const; // those that are there
    void add(const AdapterPtr& one);
    // May take long. Where it throws, all is as it was.
    AdapterPtr load(const std::string& name, const std::string& folder);
    bool unload(const std::string& name);
};

} // namespace server
