// search/vector_update.cpp: makes missing vectors and writes all; see vector_update.h.
#include "search/vector_update.h"
#include "base/appended_file.h"
#include "base/error.h"
#include "base/file.h"
#include "base/options.h" // interrupted, counted
#include "model/utf8.h"
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unordered_set>
#include <utility>

std::string shown_passage(const DocumentIndex& index, uint64_t i) {
    const DocumentIndex::Passage& p = index.passage_at(i);
    std::string shown;
    utf8_repair(shown, std::string(index.heading_of(p)) + "\n" + std::string(index.text_of(p)), true);
    shown.resize(shown.find_last_not_of(" \t\r\n") + 1);
    return shown;
}

// New vectors, in a file: an interrupted program loses no finished one. One program at a time makes them; others
// wait.
struct PartialVectors {
    const std::string path;
    const VectorFile::Header header;

    PartialVectors(const std::string& to, const VectorFile::Header& h, const Tell& tell) : path(to), header(h) {
        struct stat st, now;
        for (bool told = false;; usleep(100'000)) {
            if (interrupted) DIE("interrupted");
            fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
            must(fd >= 0);
            const bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0; // ... and the path still names this file
            if (locked && fstat(fd, &st) == 0 && stat(path.c_str(), &now) == 0 && st.st_ino == now.st_ino) break;
            close(fd), fd = -1;
            if (!locked && !told) tell(path + ": another program makes these vectors; waiting for it"), told = true;
        }
        VectorFile::Header there = {};
        const size_t stride = 16 + 2 * (size_t)header.dimensions, size = (size_t)st.st_size;
        const ssize_t n = pread(fd, &there, sizeof there, 0);
        if (n != 0 && memcmp(there.magic, header.magic, sizeof header.magic) != 0)
            DIE("%s: no vectors of documents; it is not overwritten", path.c_str());
        const bool same = n == (ssize_t)sizeof there && memcmp(&there, &header, sizeof header) == 0;
        must(ftruncate(fd, same ? (off_t)(size - (size - sizeof header) % stride) : 0) == 0); // keeps whole records
        if (!same) append({(const char*)&header, sizeof header});
    }
    PartialVectors(const PartialVectors&) = delete;
    ~PartialVectors() { if (fd >= 0) close(fd); }

    void append(std::string_view bytes) { append_whole(fd, path, bytes); }

  private:
    int fd = -1;
    void must(bool ok) const {
        if (!ok) DIE("%s: %s", path.c_str(), strerror(errno));
    }
};

std::unique_ptr<VectorFile> VectorUpdate::run() {
    std::unique_ptr<VectorFile> all = current();
    if (all) return all;
    VectorFile::Header begun = header();
    begun.passages = begun.count = 0;
    PartialVectors partial(path + ".partial", begun, tell);
    all = current(); // another program may have made them meanwhile
    if (!all) make(partial), all = std::make_unique<VectorFile>(path);
    unlink(partial.path.c_str());
    return all;
}

VectorFile::Header VectorUpdate::header() const {
    VectorFile::Header h;
    memcpy(h.magic, "qwen3vec", sizeof h.magic);
    h.made_by = model.hash(), h.passages = index.passages_hash();
    h.dimensions = model.dimensions(), h.count = index.header().passages;
    return h;
}

// The file, if it exists, is complete, and has exactly these vectors.
std::unique_ptr<VectorFile> VectorUpdate::current() const {
    if (access(path.c_str(), F_OK) != 0) return nullptr;
    if (!begins_with(path, "qwen3vec")) DIE("%s: no vectors of documents; it is not overwritten", path.c_str());
    try {
        auto file = std::make_unique<VectorFile>(path);
        const VectorFile::Header wanted = header();
        const bool same = memcmp(&file->header(), &wanted, sizeof wanted) == 0 && file->has_all();
        if (same && file->count_good() == wanted.count) return file;
    } catch (const IndexFault&) {
    }
    return nullptr;
}

// Uses the vectors of a file. A damaged file is reported.
void VectorUpdate::know(const std::string& from) {
    if (access(from.c_str(), F_OK) != 0) return;
    try {
        auto file = std::make_unique<VectorFile>(from);
        const VectorFile::Header& h = file->header();
        if (h.made_by != model.hash() || h.dimensions != model.dimensions())
            throw IndexFault(from + ": vectors of another model");
        size_t good = 0;
        for (size_t i = 0; i < file->size(); i++)
            if (file->is_good(i)) good++, known.emplace(file->key(i), file->vector(i));
        files.push_back(std::move(file));
        if (good < h.count)
            throw IndexFault(from + ": " + counted((size_t)h.count - good, "vector") +
                             format(" of %llu damaged or missing", (unsigned long long)h.count));
    } catch (const IndexFault& e) {
        tell(std::string(e.what()) + "; made anew");
    }
}

// Makes the missing vectors, then writes all in the passages' order.
void VectorUpdate::make(PartialVectors& partial) {
    const size_t n = (size_t)index.header().passages;
    keys.resize(n);
    for (size_t i = 0; i < n; i++) keys[i] = fnv1a(shown_passage(index, i));
    know(path), know(partial.path);
    std::vector<uint32_t> missing; // of equal passages, the first
    std::unordered_set<uint64_t> seen;
    for (size_t i = 0; i < n; i++)
        if (!known.count(keys[i]) && seen.insert(keys[i]).second) missing.push_back((uint32_t)i);
    make_missing(partial, missing);
    know(partial.path); // including the new ones
    OutputFile out(path);
    const VectorFile::Header h = header();
    out.write(&h, sizeof h);
    for (uint64_t key : keys) out.write(VectorFile::record_of(key, known.at(key), (size_t)h.dimensions));
    out.commit();
}

void VectorUpdate::make_missing(PartialVectors& partial, const std::vector<uint32_t>& missing) {
    constexpr size_t SOME = 256;
    const double start = seconds();
    double told = start;
    for (size_t begin = 0; begin < missing.size() && !interrupted; begin += SOME) {
        std::vector<std::string> texts;
        for (size_t i = begin; i < std::min(begin + SOME, missing.size()); i++)
            texts.push_back(shown_passage(index, missing[i]));
        model.passages(texts, [&](size_t i, const std::vector<float>& v) {
            partial.append(VectorFile::record_of(keys[missing[begin + i]], v));
            made++;
            const double now = seconds(), spent = now - start;
            if (now - told < std::clamp(spent / 10, 5., 60.)) return;
            told = now;
            tell(format("%s: %zu of %zu vectors are made, %.0f s left", path.c_str(), made, missing.size(),
                        spent * (double)(missing.size() - made) / (double)made));
        });
    }
    if (interrupted)
        DIE("%s: %zu of %zu vectors are made; the same command goes on", path.c_str(), made, missing.size());
}
