// adapters.h: several LoRA adapters beside one model. Each has a name, which requests give as their model.
//
//   LoadedAdapter   one adapter, as requests, pages and metrics see it
//   Adapters        all adapters by name, loaded and unloaded while the engine computes
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

// A reference keeps the matrices alive: unloading removes only the name, and running answers finish.
struct LoadedAdapter {
    const std::string name, folder;
    const uint64_t number; // from 1 on; never reused, even for the same name
    const uint64_t hash;   // of its matrices
    const size_t bytes;    // ... in its file
    const long created = (long)time(nullptr);
    mutable std::atomic<size_t> waiting{0}, running{0}; // answers (and pooled texts) in the engine,
    mutable std::atomic<uint64_t> tokens{0};            // ... and all tokens sampled for them

    LoadedAdapter(const std::string& name, const std::string& folder, uint64_t hash, size_t bytes)
        : name(name), folder(folder), number(next()), hash(hash), bytes(bytes) { alive()++, alive_bytes() += bytes; }
    LoadedAdapter(const LoadedAdapter&) = delete;
    virtual ~LoadedAdapter() { alive()--, alive_bytes() -= bytes; }

    static std::atomic<size_t>& alive(); // all that hold memory, also those without a name
    static std::atomic<size_t>& alive_bytes();

  private:
    static uint64_t next();
};
using AdapterPtr = std::shared_ptr<const LoadedAdapter>; // null: the model as it is
using AdapterHashes = std::map<std::string, uint64_t>;   // by name

constexpr size_t MAX_ADAPTERS = 256; // adapters that hold memory

// A name is part of paths, labels and lists: hence few characters.
void check_adapter_name(const std::string& name);

class Adapters {
    mutable std::mutex mutex;
    std::map<std::string, AdapterPtr> all; // null: being loaded

  public:
    std::function<AdapterPtr(const std::string& name, const std::string& folder)> open{}; // reads an adapter

    AdapterPtr find(const std::string& name) const;
    std::map<std::string, AdapterPtr> now() const; // the loaded ones
    void add(const AdapterPtr& one);
    // May take long. If it throws, nothing has changed.
    AdapterPtr load(const std::string& name, const std::string& folder);
    bool unload(const std::string& name);
};

} // namespace server
