// disk_pages.cpp: the folder, its files, and the threads that read and write them.
#include "server/engine/disk_pages.h"
#include "base/error.h"
#include "base/file.h"
#include <algorithm>
#include <cerrno>
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <utility>

namespace server {

// ---- Between the engine and the threads

PageBuffers::PageBuffers(Bytes memory, size_t bytes, size_t n) : free(std::make_shared<Free>()) {
    for (size_t i = 0; i < n; i++) free->all.push_back(memory.get() + i * bytes);
    free->memory = std::move(memory);
}

Bytes PageBuffers::take() {
    std::lock_guard guard(free->mutex);
    if (free->all.empty()) return nullptr;
    uint8_t* const one = free->all.back();
    free->all.pop_back();
    return Bytes(one, [free = free](uint8_t* p) {
        std::lock_guard guard(free->mutex);
        free->all.push_back(p);
    });
}

void PageInbox::put(size_t number, Bytes page) {
    std::lock_guard guard(mutex);
    if (!over) pages[number] = std::move(page);
    news.notify_all();
}
bool PageInbox::take(size_t number, Bytes& page) {
    std::lock_guard guard(mutex);
    const auto it = pages.find(number);
    if (it == pages.end()) return false;
    page = std::move(it->second);
    pages.erase(it);
    return true;
}
void PageInbox::wait(size_t number, double most) {
    std::unique_lock guard(mutex);
    news.wait_for(guard, std::chrono::duration<double>(most), [&] { return pages.count(number) > 0; });
}
bool PageInbox::closed() {
    std::lock_guard guard(mutex);
    return over;
}
void PageInbox::close() {
    std::lock_guard guard(mutex);
    over = true;
    pages.clear();
}

// ---- Keys

DiskPages::DiskPages(const std::string& folder, size_t limit, std::string_view depends,
                     const std::vector<std::string>& api_keys, std::function<void(const std::string&)> tell)
    : folder(folder), limit(limit), depends(sha256(depends)), tell(std::move(tell)) {
    for (auto& key : api_keys) scopes.push_back(sha256(key));
    make_folder(folder);
    if (!own()) find_files();
    const size_t readers = std::clamp<size_t>(std::thread::hardware_concurrency() / 2, 2, 8);
    for (size_t i = 0; i < readers; i++) threads.emplace_back([this] { read_all(); });
    threads.emplace_back([this] { write_all(); });
}

DiskPages::~DiskPages() {
    {
        std::lock_guard guard(mutex);
        closing = true, last = seconds() + LAST;
    }
    reads_news.notify_all(), writes_news.notify_all();
    for (std::thread& thread : threads) thread.join();
    if (lock >= 0) close(lock);
}

Digest DiskPages::root(uint64_t api_key, const Digest& cache_salt, uint64_t adapter) const {
    struct { Digest depends, scope, salt; uint64_t adapter; } all = {depends, {}, cache_salt, adapter};
    if (!scopes.empty()) all.scope = scopes.at((size_t)api_key - 1);
    return sha256(&all, sizeof all);
}

Digest DiskPages::after(const Digest& before, const int* ids, size_t n) {
    std::vector<uint8_t> all(before.begin(), before.end());
    all.insert(all.end(), (const uint8_t*)ids, (const uint8_t*)(ids + n));
    return sha256(all.data(), all.size());
}

// ---- The engine's calls

bool DiskPages::has(const Digest& key) const {
    std::lock_guard guard(mutex);
    return index.count(key) > 0;
}

bool DiskPages::use(const Digest& key) {
    constexpr double OFTEN = 60; // seconds: a file is marked no more often
    std::lock_guard guard(mutex);
    const auto it = index.find(key);
    if (it == index.end()) return false;
    entries.splice(entries.end(), entries, it->second);
    if (const double now = seconds(); owned && now - it->second->stamped > OFTEN) {
        it->second->stamped = now;
        used.push_back(key);
        writes_news.notify_one();
    }
    return true;
}

bool DiskPages::wants(const Digest& key) const {
    std::lock_guard guard(mutex);
    return !index.count(key) && !coming.count(key);
}

bool DiskPages::may_write() const {
    std::lock_guard guard(mutex);
    return owned && seconds() >= retry;
}

void DiskPages::read(const Digest& key, Bytes to, size_t bytes, size_t number, std::shared_ptr<PageInbox> inbox) {
    std::lock_guard guard(mutex);
    reads.push_back({key, std::move(to), bytes, number, std::move(inbox)});
    reads_news.notify_one();
}

void DiskPages::write(const Digest& key, Bytes from, size_t bytes) {
    std::lock_guard guard(mutex);
    if (index.count(key) || !coming.insert(key).second) return;
    writes.push_back({key, std::move(from), bytes});
    writes_news.notify_one();
}

DiskPages::Counts DiskPages::counts() const {
    std::lock_guard guard(mutex);
    return count;
}

std::string DiskPages::told() const {
    const Counts c = counts();
    return format("cache %s: %llu pages, %.3g of %.3g GB", folder.c_str(), (unsigned long long)c.pages,
                  (double)c.bytes / 1e9, (double)limit / 1e9);
}

// ---- Threads

void DiskPages::read_all() {
    for (;;) {
        Read r;
        {
            std::unique_lock guard(mutex);
            reads_news.wait(guard, [&] { return closing || !reads.empty(); });
            if (closing) return;
            r = std::move(reads.front());
            reads.pop_front();
        }
        if (r.inbox->closed()) continue;
        const bool good = load(r.key, r.to.get(), r.bytes);
        r.inbox->put(r.number, good ? std::move(r.to) : nullptr);
    }
}

void DiskPages::write_all() {
    for (;;) {
        Write w{};
        std::vector<Digest> marked;
        {
            std::unique_lock guard(mutex);
            const auto pause = std::chrono::duration<double>(TAKE_OVER);
            if (owned && writes.empty())
                writes_news.wait(guard, [&] { return closing || !writes.empty() || !used.empty(); });
            else if (seconds() < retry) writes_news.wait_for(guard, pause, [&] { return closing; });
            if (closing && (writes.empty() || write_fault || seconds() > last)) return;
            marked.swap(used);
            if (!writes.empty() && seconds() >= retry) w = std::move(writes.front()), writes.pop_front();
        }
        for (auto& key : marked) utimensat(AT_FDCWD, path(key).c_str(), nullptr, 0); // their order, for a restart
        const bool done = w.from ? store(w) : (own(), true);
        if (!w.from) continue;
        std::lock_guard guard(mutex);
        if (done) coming.erase(w.key);
        else writes.push_front(std::move(w));
    }
}

// ---- Files

// Reads up to n bytes; returns their number.
static size_t read_some(int fd, void* to, size_t n) {
    size_t have = 0;
    while (have < n) {
        const ssize_t got = ::read(fd, (uint8_t*)to + have, n - have);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        have += (size_t)got;
    }
    return have;
}

bool DiskPages::load(const Digest& key, uint8_t* to, size_t bytes) {
    const std::string name = path(key);
    const int fd = open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
        const int fault = errno;
        forget(key);
        if (fault != ENOENT || access(folder.c_str(), F_OK) != 0) cannot_read(fault);
        return false;
    }
    Header h{};
    const Header ours{};
    const size_t n = read_some(fd, &h, sizeof h);
    const bool magic = n >= sizeof h.magic && !memcmp(h.magic, ours.magic, sizeof h.magic);
    char more;
    const bool good = magic && n == sizeof h && h.version == ours.version && h.key == key && h.bytes == bytes &&
                      read_some(fd, to, bytes) == bytes && read_some(fd, &more, 1) == 0 &&
                      checksum(0, to, bytes) == h.sum;
    close(fd);
    if (!good) forget(key);
    if (!good && magic) unlink(name.c_str());
    std::lock_guard guard(mutex);
    count.damaged += !good, count.read += good ? bytes : 0;
    if (good) read_fault = false;
    return good;
}

bool DiskPages::store(const Write& w) {
    if (!own()) return false;
    if (has(w.key)) return true; // (own() may have found it: another server wrote it)
    Header h{};
    h.key = w.key, h.bytes = w.bytes, h.sum = checksum(0, w.from.get(), w.bytes);
    const size_t size = sizeof h + w.bytes;
    if (size > limit) return cannot_write("a page is larger than --cache-size"), true;
    make_room(size);
    const std::string name = path(w.key), temporary = name + format(".tmp%d", (int)getpid());
    const Unfinished unfinished(temporary);
    const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return cannot_write(strerror(errno)), false;
    // (Not flushed to the disk: a page lost to a power failure is found by its checksum.)
    const iovec parts[] = {{&h, sizeof h}, {w.from.get(), w.bytes}};
    const ssize_t n = writev(fd, parts, 2);
    int fault = n < 0 ? errno : n < (ssize_t)size ? ENOSPC : 0;
    if (close(fd) != 0 && !fault) fault = errno;
    if (!fault && rename(temporary.c_str(), name.c_str()) != 0) fault = errno;
    if (fault) {
        unlink(temporary.c_str());
        return cannot_write(strerror(fault)), false;
    }
    std::lock_guard guard(mutex);
    index[w.key] = entries.insert(entries.end(), {w.key, size, seconds()});
    count.pages++, count.bytes += size, count.written += w.bytes;
    write_fault = false;
    return true;
}

void DiskPages::make_room(size_t bytes) {
    for (;;) {
        Digest oldest;
        {
            std::lock_guard guard(mutex);
            if (entries.empty() || count.bytes + bytes <= limit) return;
            oldest = entries.front().key;
            count.removed++;
        }
        forget(oldest);
        unlink(path(oldest).c_str());
    }
}

void DiskPages::forget(const Digest& key) {
    std::lock_guard guard(mutex);
    const auto it = index.find(key);
    if (it == index.end()) return;
    count.pages--, count.bytes -= it->second->bytes;
    entries.erase(it->second);
    index.erase(it);
}

void DiskPages::cannot_read(int fault) {
    {
        std::lock_guard guard(mutex);
        if (std::exchange(read_fault, true)) return;
    }
    tell(format("%s: %s: its pages are computed again", folder.c_str(), strerror(fault)));
}

void DiskPages::cannot_write(const std::string& why, double pause) {
    {
        std::lock_guard guard(mutex);
        retry = seconds() + pause;
        if (std::exchange(write_fault, true)) return;
    }
    tell(format("%s: %s: no pages are written", folder.c_str(), why.c_str()));
}

bool DiskPages::own() {
    if (owned) return true;
    if (seconds() < retry) return false;
    if (lock < 0) lock = open((folder + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    const bool got = lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) == 0;
    if (!got && errno == EWOULDBLOCK) return cannot_write("another server has this cache", TAKE_OVER), false;
    if (!got) return cannot_write(strerror(errno)), false;
    {
        std::lock_guard guard(mutex);
        owned = true, write_fault = false;
    }
    find_files();
    return true;
}

// Whether a file's name is a key's; with `more` behind it, a temporary one.
static bool our_name(const std::string& name, const char* more) {
    const size_t n = 2 * Digest().size();
    const bool key = name.size() > n && name.find_first_not_of("0123456789abcdef") == n;
    const std::string end = key ? name.substr(n) : "";
    return *more ? end.compare(0, strlen(more), more) == 0 : end == ".kv";
}

void DiskPages::find_files() {
    std::vector<std::pair<timespec, Entry>> found;
    DIR* const dir = opendir(folder.c_str());
    if (!dir) return cannot_read(errno);
    while (const dirent* entry = readdir(dir)) {
        const std::string name = entry->d_name, whole = folder + "/" + name;
        const bool temporary = our_name(name, ".kv.tmp");
        if (!temporary && !our_name(name, "")) continue;
        const int fd = open(whole.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0) continue;
        struct stat st = {};
        Header h{};
        const Header ours{};
        const bool regular = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
        const size_t n = regular ? read_some(fd, &h, sizeof h) : 0;
        close(fd);
        if (n < sizeof h.magic || memcmp(h.magic, ours.magic, sizeof h.magic)) continue; // not ours
        const bool good = !temporary && n == sizeof h && h.version == ours.version && name == hex(h.key) + ".kv" &&
                          (uint64_t)st.st_size == sizeof h + h.bytes;
        if (good) found.push_back({st.st_mtim, {h.key, (size_t)st.st_size, 0}});
        else if (owned) unlink(whole.c_str());
        std::lock_guard guard(mutex);
        count.damaged += !good && !temporary;
    }
    closedir(dir);
    std::sort(found.begin(), found.end(), [](auto& a, auto& b) {
        return std::pair(a.first.tv_sec, a.first.tv_nsec) < std::pair(b.first.tv_sec, b.first.tv_nsec);
    });
    {
        std::lock_guard guard(mutex);
        entries.clear(), index.clear(), count.pages = found.size(), count.bytes = 0;
        for (auto& [time, entry] : found) {
            index[entry.key] = entries.insert(entries.end(), entry);
            count.bytes += entry.bytes;
        }
    }
    if (owned) make_room(0);
}

} // namespace server
