// search/index_update.cpp: reads new and changed files, takes over the rest; see index_update.h.
#include "search/index_update.h"
#include "base/error.h"
#include "base/file.h"
#include "base/options.h" // counted, interrupted
#include "base/temporary.h"
#include "book/read_book.h"
#include "search/words.h"
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dirent.h>
#include <new>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <random>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <unordered_map>
#include <utility>

std::unique_ptr<IndexUpdate::Index> IndexUpdate::run() {
    struct stat st;
    if (stat(root.c_str(), &st) != 0) DIE("%s: %s", root.c_str(), strerror(errno));
    std::vector<DocumentFile> files;
    if (S_ISREG(st.st_mode)) {
        const size_t slash = root.rfind('/');
        folder = slash == root.npos ? "." : root.substr(0, slash + 1);
        files.push_back({root.substr(slash + 1), (uint64_t)st.st_size, time_of(st)});
    } else {
        folder = root;
        files = list_files(root, path, tell);
    }
    std::unique_ptr<Index> index = open_old();
    try {
        written = update(files, index.get());
    } catch (const IndexFault& e) {
        if (!index) throw;
        tell(std::string(e.what()) + "; it is made anew");
        read = unchanged = 0, left_out = {}, known_texts.clear();
        written = update(files, nullptr);
    }
    return written ? std::make_unique<Index>(path) : std::move(index);
}

std::unique_ptr<IndexUpdate::Index> IndexUpdate::open_old() const {
    if (access(path.c_str(), F_OK) != 0) return nullptr;
    if (!begins_with(path, "qwen3idx")) DIE("%s: no index of documents; it is not overwritten", path.c_str());
    try {
        auto index = std::make_unique<Index>(path);
        if (index->header().made_by == maker) return index;
        tell(path + ": made for other passages or words; it is made anew");
    } catch (const Error& e) {
        tell(std::string(e.what()) + "; it is made anew");
    }
    return nullptr;
}

DocumentText IndexUpdate::text_of(const DocumentFile& f) const {
    DocumentText text;
    text.read(folder + "/" + f.name);
    return text;
}

bool IndexUpdate::update(const std::vector<DocumentFile>& files, const Index* old) {
    std::unordered_map<std::string_view, uint64_t> known;
    for (uint64_t i = 0; old && i < old->header().files; i++) known[old->name_of(old->file_at(i))] = i;
    std::vector<std::optional<int64_t>> times(old ? old->header().files : 0); // of the files to keep
    std::vector<const DocumentFile*> fresh;
    bool touched = false;
    for (const DocumentFile& f : files) {
        const auto it = known.find(f.name);
        const Index::File* was = it == known.end() ? nullptr : &old->file_at(it->second);
        bool same = was && was->size == f.size;
        if (same && was->time != f.time) {
            DocumentText now = text_of(f);
            same = now.file.hash == was->hash && now.file.fault == was->fault && now.file.time == f.time;
            touched |= same && (was->fault == Index::FINE || was->fault == Index::NO_TEXT);
            if (!same && now.converted) known_texts[&f] = std::move(now);
        }
        if (!same) {
            fresh.push_back(&f);
            continue;
        }
        times[it->second] = f.time, unchanged++;
        left_out.add(was->fault, f.name, "");
    }
    if (old && !touched && only_faults(*old, times, fresh)) return false;
    remove_abandoned();
    // A unique name: programs in two containers that share a cache may have the same pid.
    std::random_device random;
    const std::string made = path + format(".tmp%08x%08x", random(), random());
    const Unfinished unfinished(made);
    IndexBuilder builder(made, maker);
    if (old) builder.take_over(*old, times);
    add_fresh(builder, fresh);
    builder.finish();
    if (rename(made.c_str(), path.c_str()) != 0) {
        const int fault = errno;
        unlink(made.c_str());
        DIE("%s: %s", path.c_str(), strerror(fault));
    }
    return true;
}

// Whether all new and missing files are unusable ones, such as a database that is written to all the time:
// then the index stays as it is.
bool IndexUpdate::only_faults(const Index& old, const std::vector<std::optional<int64_t>>& times,
                              const std::vector<const DocumentFile*>& fresh) {
    for (uint64_t i = 0; i < times.size(); i++)
        if (!times[i] && old.file_at(i).fault == Index::FINE) return false;
    LeftOut all = left_out;
    for (const DocumentFile* f : fresh) {
        if (interrupted) DIE("interrupted");
        const auto known = known_texts.find(f);
        DocumentText now = known == known_texts.end() ? text_of(*f) : std::move(known->second);
        const uint32_t fault = now.file.fault;
        if (fault != Index::FINE && fault != Index::NO_TEXT) all.add(fault, f->name, now.detail);
        if (now.converted) known_texts[f] = std::move(now);
        if (fault == Index::FINE || fault == Index::NO_TEXT) return false; // (NO_TEXT is recorded)
    }
    read = fresh.size(), left_out = all;
    return true;
}

// Calls f(i) for all i below n on all threads. (Exceptions must not leave a parallel loop.)
template <class F> static void on_all_threads(size_t n, F f) {
    std::atomic<bool> full{false};
    #pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < n; i++) {
        try {
            f(i);
        } catch (const std::bad_alloc&) {
            full = true;
        }
    }
    if (full) throw std::bad_alloc();
    if (interrupted) DIE("interrupted");
}

// In batches, since texts and words wait in memory.
void IndexUpdate::add_fresh(IndexBuilder& builder, const std::vector<const DocumentFile*>& fresh) {
    constexpr uint64_t BATCH = 32 << 20;
    uint64_t all = 0, done = 0;
    size_t documents = 0;
    for (auto* f : fresh) all += f->size, documents += book::is_document(f->name, "");
    if (documents)
        tell(format("%s: pdftotext and pandoc convert %s", root.c_str(), counted(documents, "document").c_str()));
    double told = seconds();
    for (size_t begin = 0, end; begin < fresh.size(); begin = end) {
        uint64_t bytes = 0;
        for (end = begin; end < fresh.size() && bytes < BATCH && end - begin < 4096; end++)
            bytes += fresh[end]->size;
        std::vector<DocumentText> batch(end - begin);
        on_all_threads(batch.size(), [&](size_t i) {
            const auto known = known_texts.find(fresh[begin + i]);
            if (known == known_texts.end()) batch[i] = text_of(*fresh[begin + i]);
            else batch[i] = std::move(known->second); // (each thread another)
            batch[i].cut();
        });
        add_batch(builder, batch, &fresh[begin]);
        done += bytes;
        if (seconds() - told > 5 && end < fresh.size()) {
            told = seconds();
            tell(format("%s: %.0f of %.0f MB are indexed", root.c_str(), (double)done / 1e6, (double)all / 1e6));
        }
    }
}

void IndexUpdate::add_batch(IndexBuilder& builder, const std::vector<DocumentText>& batch,
                            const DocumentFile* const* files) {
    constexpr size_t SOME = 1 << 14; // passages
    std::vector<std::pair<size_t, size_t>> all; // file, chunk
    for (size_t i = 0; i < batch.size(); i++)
        for (size_t k = 0; k < batch[i].chunks.size(); k++) all.push_back({i, k});
    size_t begun = 0; // files
    auto begin_files = [&](size_t end) {
        for (; begun < end; begun++) {
            const Index::File& f = batch[begun].file;
            read++;
            left_out.add(f.fault, files[begun]->name, batch[begun].detail);
            const bool passing = f.fault == Index::UNREADABLE || f.fault == Index::CHANGING ||
                                 f.fault == Index::NOT_CONVERTED; // (the program may be installed next time)
            if (passing) continue; // it may be usable next time
            builder.add_file(files[begun]->name, f);
        }
    };
    auto text = [&](size_t i) {
        const Chunk& c = batch[all[i].first].chunks[all[i].second];
        return std::string_view(batch[all[i].first].text).substr(c.begin, c.end - c.begin);
    };
    for (size_t begin = 0; begin < all.size(); begin += SOME) {
        const size_t n = std::min(SOME, all.size() - begin), first = builder.count();
        std::vector<WordCounts> words(n);
        std::vector<uint32_t> lengths(n, 0);
        on_all_threads(n, [&](size_t i) {
            const std::string& heading = batch[all[begin + i].first].chunks[all[begin + i].second].chapter;
            words[i] = count_words(jieba, heading + "\n" + std::string(text(begin + i)), lengths[i]);
        });
        for (size_t i = 0; i < n; i++) {
            const auto [file, chunk] = all[begin + i];
            begin_files(file + 1);
            const DocumentText& from = batch[file];
            builder.add_passage(text(begin + i), from.chunks[chunk].chapter, from.lines[chunk], lengths[i]);
        }
        builder.add_words((uint32_t)first, words);
    }
    begin_files(batch.size());
}

// Removes files left by programs that ended while they wrote this index: those not written to for a day.
void IndexUpdate::remove_abandoned() const {
    const std::string where = path.substr(0, path.rfind('/') + 1);
    const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(where.empty() ? "." : where.c_str()), closedir);
    while (const dirent* entry = entries ? readdir(entries.get()) : nullptr) {
        const std::string file = where + entry->d_name;
        struct stat st;
        if (!is_temporary(file, path) || lstat(file.c_str(), &st) != 0) continue;
        if (S_ISREG(st.st_mode) && st.st_mtime < time(nullptr) - 24 * 3600) unlink(file.c_str());
    }
}

// Texts of one client are indexed by one thread: the others are the engine's.
struct OneThread {
#ifdef _OPENMP
    const int before = omp_get_max_threads();
    OneThread() { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before); }
#endif
};

std::unique_ptr<DocumentIndex> index_of(std::vector<DocumentText> texts, const std::vector<std::string>& names,
                                        const Jieba& jieba) {
    [[maybe_unused]] const OneThread one;
    const TemporaryFolder folder;
    std::vector<DocumentFile> files;
    std::vector<const DocumentFile*> listed;
    for (size_t i = 0; i < texts.size(); i++) {
        texts[i].file.size = texts[i].text.size(), texts[i].file.hash = fnv1a(texts[i].text);
        texts[i].cut();
        files.push_back({names[i], texts[i].file.size, 0});
    }
    for (auto& file : files) listed.push_back(&file);
    const Tell silent = [](auto&) {};
    const std::string path = folder.path + "/index";
    IndexUpdate update{"", path, jieba, silent, 0};
    IndexBuilder builder(path, 0);
    update.add_batch(builder, texts, listed.data());
    builder.finish();
    return std::make_unique<DocumentIndex>(path);
}

std::string default_index(const std::string& root) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    std::string folder;
    if (cache && *cache == '/') folder = std::string(cache) + "/qwen3";
    else if (home && *home == '/') folder = std::string(home) + "/.cache/qwen3";
    else DIE("neither XDG_CACHE_HOME nor HOME names a folder for the index (--index FILE does)");
    make_folder(folder);
    return folder + format("/docs-%016llx.index", (unsigned long long)fnv1a(root));
}

std::string real_path(const std::string& path) {
    char real[PATH_MAX];
    if (!realpath(path.c_str(), real)) DIE("%s: %s", path.c_str(), strerror(errno));
    return real;
}
