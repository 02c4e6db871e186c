// disk_pages.h: pages of the KV cache as files in a folder, which a restart finds again.
#pragma once
#include "base/sha256.h"
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace server {

using Bytes = std::shared_ptr<uint8_t[]>; // of one page

// Buffers of one page each. A buffer is free again when its last owner is gone.
struct PageBuffers {
    PageBuffers() = default;
    PageBuffers(Bytes memory, size_t bytes, size_t n); // n buffers of `bytes`
    Bytes take(); // null: all are in use

  private:
    struct Free {
        std::mutex mutex;
        std::vector<uint8_t*> all;
        Bytes memory;
    };
    std::shared_ptr<Free> free;
};

// Pages that one prompt waits for: the disk's threads add them, the engine takes them in order.
struct PageInbox {
    void put(size_t number, Bytes page); // null: it could not be read
    bool take(size_t number, Bytes& page); // false: it is not here yet
    void wait(size_t number, double most); // seconds
    bool closed(); // nobody takes pages any more
    void close();

  private:
    std::mutex mutex;
    std::condition_variable news;
    std::map<size_t, Bytes> pages;
    bool over = false;
};

// A folder of pages, one file each, named by the page's key: a SHA-256 of everything that its bytes depend on, so equal
// keys mean equal bytes. The least recently used pages are removed beyond `limit` bytes. All calls return at once;
// threads read and write. Faults are told in one line until the next success, and cost nothing but the cache.
//
// A file is trusted only after its header and checksum have been compared. (They protect against damage. A forged file
// can make the model say anything.) A damaged file is removed, but never one without our name and our magic. One
// server at a time writes and removes (flock); others on the same folder only read, until it ends and one takes over.
struct DiskPages {
    // Seconds: between attempts after a fault, and to take over from another server; to write at the end.
    static constexpr double RETRY = 10, TAKE_OVER = 0.5, LAST = 5;
    struct Counts {
        uint64_t pages = 0, bytes = 0;                            // of the folder's files
        uint64_t read = 0, written = 0, removed = 0, damaged = 0; // since the start: bytes, bytes; pages, pages
    };

    // depends: a text of everything that all pages depend on, except tokens, adapter and API key. api_keys: by number.
    DiskPages(const std::string& folder, size_t limit, std::string_view depends,
              const std::vector<std::string>& api_keys, std::function<void(const std::string&)> tell);
    DiskPages(const DiskPages&) = delete;
    ~DiskPages();

    // The key before the first page of an API key's prompts (from 1 on) with this cache_salt and adapter; of the page
    // with these ids behind the page of that key.
    Digest root(uint64_t api_key, const Digest& cache_salt, uint64_t adapter) const;
    static Digest after(const Digest& before, const int* ids, size_t n);

    bool has(const Digest& key) const;
    bool use(const Digest& key);         // the same; the page is now the most recently used
    bool may_write() const;              // false: another server has the folder, or writing failed just now
    bool wants(const Digest& key) const; // whether it is neither there nor on its way
    void read(const Digest& key, Bytes to, size_t bytes, size_t number, std::shared_ptr<PageInbox> inbox);
    void write(const Digest& key, Bytes from, size_t bytes);
    Counts counts() const;
    std::string told() const; // the folder's contents, for the log

  private:
    struct Header { // of a file; the page follows
        char magic[8] = {'q', 'w', 'e', 'n', '3', 'p', 'g', 0};
        uint64_t version = 1;
        Digest key;
        uint64_t bytes, sum; // of the page
    };
    struct Entry { Digest key; size_t bytes; double stamped; }; // stamped: when its file was last marked as used
    struct Hash {
        size_t operator()(const Digest& d) const {
            size_t h;
            memcpy(&h, d.data(), sizeof h);
            return h;
        }
    };
    struct Read { Digest key; Bytes to; size_t bytes, number; std::shared_ptr<PageInbox> inbox; };
    struct Write { Digest key; Bytes from; size_t bytes; };

    const std::string folder;
    const size_t limit;
    const Digest depends;
    std::vector<Digest> scopes; // of API keys
    const std::function<void(const std::string&)> tell;
    mutable std::mutex mutex;
    std::condition_variable reads_news, writes_news;
    std::list<Entry> entries; // the least recently used first
    std::unordered_map<Digest, std::list<Entry>::iterator, Hash> index;
    std::unordered_set<Digest, Hash> coming; // being written, or waiting for it
    std::deque<Read> reads;
    std::deque<Write> writes;
    std::vector<Digest> used; // their files are to be marked
    Counts count;
    bool read_fault = false, write_fault = false, closing = false; // the faults that have been told
    double retry = 0, last = 0; // no write before; no write after
    int lock = -1;              // the lock file
    bool owned = false;         // ... is locked: this server writes
    std::vector<std::thread> threads;

    std::string path(const Digest& key) const { return folder + "/" + hex(key) + ".kv"; }
    void read_all();
    void write_all();
    bool load(const Digest& key, uint8_t* to, size_t bytes);
    bool store(const Write& w); // false: to be tried again
    bool own();
    void find_files();
    void make_room(size_t bytes);
    void forget(const Digest& key);
    void cannot_read(int fault);
    void cannot_write(const std::string& why, double pause = RETRY);
};

} // namespace server
