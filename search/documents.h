// documents.h: answers from a folder of documents. Which files it has, their index (retrieval.h) kept up to date, and
// the prompt with the passages that a question is about.
//
//   const Documents docs({"notes", "", 4}, tell);             // makes the index, or brings the one there is up to date
//   std::vector<Source> sources = docs.find("什么是 warp？");
//   std::string asked = grounded("什么是 warp？", sources, room, measure);  // instruction, passages, question
//
// The index lies in the user's cache folder, under a name made of the folder's own, or where the user says. A file that
// cannot be used is left out, and said; nothing that lies in a folder can end the program.
// Limits: files of 1 GB and 2^24 lines; 2^20 files.
#pragma once
#include "base/options.h"
#include "search/retrieval.h"
#include "model/chat_template.h"
#include "sj.h"
#include <atomic>
#include <climits>
#include <ctime>
#include <dirent.h>
#include <memory>
#include <random>
#include <sys/file.h>
#include <unordered_set>

using Tell = std::function<void(const std::string&)>; // a line for the user

// Passages are sections, cut where they are longer than `most` characters: four of them and an answer fit 4,096 tokens.
inline const ChunkSizes PASSAGES = {1200, 200, 0, 120};
constexpr uint64_t WORD_RULES = 1; // another number where retrieval.h makes other words

// ===================================================================================================== 1 The files

struct DocumentFile {
    std::string name; // below the folder
    uint64_t size;
    int64_t time;
};
inline int64_t time_of(const struct stat& st) {
    return (int64_t)st.st_mtim.tv_sec * 1'000'000'000 + st.st_mtim.tv_nsec;
}

// Where the vectors of an index lie, by model: who tries another one finds those of the first again.
inline std::string vectors_path(const std::string& index, uint64_t model) {
    return index + format(".%016llx.vectors", (unsigned long long)model);
}
// Whether a path is that of an index, or of vectors of it: INDEX.HASH.vectors, maybe .partial.
inline bool is_of_index(const std::string& path, const std::string& index) {
    constexpr size_t HASH = 1 + 16;
    if (path.compare(0, index.size(), index) != 0) return false;
    const std::string rest = path.substr(index.size()), kind = rest.substr(std::min(HASH, rest.size()));
    const bool named = rest.find_first_not_of("0123456789abcdef", 1) == HASH;
    return rest.empty() || (named && rest[0] == '.' && (kind == ".vectors" || kind == ".vectors.partial"));
}
// ... or of such a file that is being written: then .tmp, digits and the like.
inline bool is_temporary(const std::string& path, const std::string& index) {
    const size_t at = path.find(".tmp", std::min(index.size(), path.size()));
    return at != path.npos && path.size() > at + 4 && is_of_index(path.substr(0, at), index) &&
           path.find_first_not_of("0123456789abcdef.tmp", at + 4) == path.npos;
}

// The regular files of a folder and of those in it, by name. Not those whose name begins with a dot. Symbolic links are
// not followed, so there is no circle, and no way out of the folder. `index` is no document, should it lie there.
inline std::vector<DocumentFile> list_files(const std::string& root, const std::string& index, const Tell& tell,
                                            size_t most = 1 << 20) {
    std::vector<DocumentFile> files;
    std::vector<std::string> folders = {""};
    std::string odd; // the first of what is neither file nor folder, or cannot be looked at
    size_t count = 0;
    while (!folders.empty()) {
        if (interrupted) DIE("interrupted");
        const std::string folder = std::move(folders.back());
        folders.pop_back();
        const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir((root + "/" + folder).c_str()), closedir);
        if (!entries && folder.empty()) DIE("%s: %s", root.c_str(), strerror(errno));
        if (!entries && !count++) odd = folder + ": " + strerror(errno);
        while (const dirent* entry = entries ? readdir(entries.get()) : nullptr) {
            if (entry->d_name[0] == '.') continue;
            const std::string name = folder + entry->d_name, path = root + "/" + name;
            struct stat st;
            const bool found = lstat(path.c_str(), &st) == 0;
            if (found && S_ISDIR(st.st_mode)) folders.push_back(name + "/");
            else if (found && S_ISREG(st.st_mode)) {
                if (is_of_index(path, index) || is_temporary(path, index)) continue;
                files.push_back({name, (uint64_t)st.st_size, time_of(st)});
            } else if (!count++) {
                odd = name + ": " + (!found ? strerror(errno) : S_ISLNK(st.st_mode) ? "a symbolic link" : "not a file");
            }
            if (files.size() > most) DIE("%s: more than %zu files; name a smaller folder", root.c_str(), most);
        }
    }
    if (count) tell(format("%s: not read: %s%s", root.c_str(), odd.c_str(),
                           count > 1 ? format("; and %zu more links and the like", count - 1).c_str() : ""));
    std::sort(files.begin(), files.end(), [](auto& a, auto& b) { return a.name < b.name; });
    return files;
}

// A file as it is read.
struct DocumentText {
    using Index = DocumentIndex;
    static constexpr uint64_t MOST = 1 << 30;
    static constexpr ptrdiff_t MOST_LINES = 1 << 24; // to cut them takes some 40 bytes each
    Index::File file{}; // without name and passages
    std::string text;
    size_t fault_at = 0; // of NOT_UTF8: the byte
    std::vector<Chunk> chunks;
    std::vector<uint32_t> lines; // where they begin

    // One that is written to at the same time is read again, up to three times.
    void read(const std::string& path) {
        file.fault = Index::CHANGING;
        for (int again = 0; again < 3 && file.fault == Index::CHANGING; again++) read_once(path);
        if (file.fault == Index::FINE && memchr(text.data(), 0, text.size())) file.fault = Index::BINARY;
        file.hash = fnv1a(text);
        for (size_t i = 0; i < text.size() && file.fault == Index::FINE;) {
            const int k = (uint8_t)text[i] < 0x80 ? 1 : utf8_length(&text[i], text.size() - i);
            if (k <= 0) file.fault = Index::NOT_UTF8, fault_at = i;
            i += (size_t)k;
        }
        if (file.fault == Index::FINE && std::count(text.begin(), text.end(), '\n') > MOST_LINES)
            file.fault = Index::TOO_MANY_LINES;
        if (file.fault != Index::FINE) std::string().swap(text);
    }
    void cut() {
        const std::string_view book = text;
        const size_t mark = book.substr(0, 3) == "\xEF\xBB\xBF" ? 3 : 0; // of byte order
        for (const Chunk& c : cut_chunks(book.substr(mark), PASSAGES)) {
            size_t begin = c.body + mark;
            const size_t end = c.end + mark;
            for (;;) { // a long fence is cut after a line; no step looks further than one passage
                size_t cut = begin;
                for (size_t n = 0; n < PASSAGES.most && cut < end; n++) cut = next_character(book, cut + 1);
                if (cut >= end) break;
                const size_t line = book.substr(begin, cut - begin).rfind('\n');
                if (line != book.npos) cut = begin + line + 1;
                add(begin, cut, c.chapter);
                begin = cut;
            }
            add(begin, end, c.chapter);
        }
    }

  private:
    size_t line = 1, line_at = 0; // of the text

    void add(size_t begin, size_t end, const std::string& heading) {
        if (is_blank_line(std::string_view(text).substr(begin, end - begin))) return;
        line += (size_t)std::count(text.begin() + (ptrdiff_t)line_at, text.begin() + (ptrdiff_t)begin, '\n');
        line_at = begin;
        chunks.push_back({begin, begin, end, heading});
        lines.push_back((uint32_t)line);
    }
    void read_once(const std::string& path) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // NONBLOCK: a FIFO must not hang us
        struct stat st, after;
        file.fault = Index::UNREADABLE;
        if (fd < 0) return;
        if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
            file.size = (uint64_t)st.st_size, file.time = time_of(st);
            file.fault = file.size > MOST ? Index::TOO_LARGE : Index::FINE;
            text.resize(std::min<uint64_t>(file.size, 8192)); // which tells most binaries
            if (file.fault == Index::FINE && !fill(fd, 0)) file.fault = Index::CHANGING;
            if (file.fault == Index::FINE && memchr(text.data(), 0, text.size())) file.fault = Index::BINARY;
            const size_t from = text.size();
            if (file.fault == Index::FINE) {
                text.resize(file.size);
                const bool whole = fill(fd, from) && fstat(fd, &after) == 0;
                if (!whole || after.st_size != st.st_size || time_of(after) != file.time) file.fault = Index::CHANGING;
            }
        }
        close(fd);
    }
    bool fill(int fd, size_t at) {
        while (at < text.size()) {
            const ssize_t n = ::read(fd, &text[at], text.size() - at);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return false;
            at += (size_t)n;
        }
        return true;
    }
};

// Why files were left out: how many for each reason, and the first of them.
struct LeftOut {
    std::array<size_t, DocumentIndex::FAULTS> count{};
    std::array<std::string, DocumentIndex::FAULTS> first{};

    void add(uint32_t fault, std::string_view name, size_t at) {
        if (fault == DocumentIndex::FINE || fault >= DocumentIndex::FAULTS || count[fault]++) return;
        first[fault] = name;
        if (fault == DocumentIndex::NOT_UTF8 && at) first[fault] += format(" at byte %zu", at);
    }
    std::string text() const {
        static const char* WHY[DocumentIndex::FAULTS] = {
            "", "binary (pdftotext -layout makes a text of a PDF)", "no UTF-8 (iconv -f GB18030 -t UTF-8 converts it)",
            "larger than 1 GB", "cannot be read", "written to while it was read", "of more than 16,777,216 lines"};
        std::string all;
        for (uint32_t f = 1; f < DocumentIndex::FAULTS; f++)
            if (count[f])
                all += format("%s%zu %s: %s", all.empty() ? "left out: " : "; ", count[f], WHY[f], first[f].c_str());
        return all;
    }
};

// Whether a file begins with these eight bytes.
inline bool begins_with(const std::string& path, const char* magic) {
    char first[8] = {};
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const bool same = fd >= 0 && read(fd, first, 8) == 8 && memcmp(first, magic, 8) == 0;
    if (fd >= 0) close(fd);
    return same;
}

// ===================================================================================================== 2 The index

// Brings the index of a folder up to date: of the files in it only those are read whose size or time changed, or that
// are new; those of them whose bytes are the same keep their passages.
struct IndexUpdate {
    using Index = DocumentIndex;
    const std::string root, path; // of the documents, and of the index
    const Jieba& jieba;
    const Tell& tell;
    const uint64_t maker; // other passages or words: another index
    size_t read = 0, unchanged = 0;
    LeftOut left_out{};
    std::string folder{}; // that names of files are below

    bool written = false; // the index, since something changed

    // The index, up to date.
    std::unique_ptr<Index> run() {
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
            read = unchanged = 0, left_out = {};
            written = update(files, nullptr);
        }
        return written ? std::make_unique<Index>(path) : std::move(index);
    }

  private:
    std::unique_ptr<Index> open_old() const {
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

    bool update(const std::vector<DocumentFile>& files, const Index* old) {
        std::unordered_map<std::string_view, uint64_t> known;
        for (uint64_t i = 0; old && i < old->header().files; i++) known[old->name_of(old->file_at(i))] = i;
        std::vector<std::optional<int64_t>> times(old ? old->header().files : 0); // of the files that stay
        std::vector<const DocumentFile*> fresh;
        bool touched = false;
        for (const DocumentFile& f : files) {
            const auto it = known.find(f.name);
            const Index::File* was = it == known.end() ? nullptr : &old->file_at(it->second);
            bool same = was && was->size == f.size;
            if (same && was->time != f.time) {
                DocumentText now;
                now.read(folder + "/" + f.name);
                same = now.file.hash == was->hash && now.file.fault == was->fault && now.file.time == f.time;
                touched |= same && was->fault == Index::FINE;
            }
            if (!same) {
                fresh.push_back(&f);
                continue;
            }
            times[it->second] = f.time, unchanged++;
            left_out.add(was->fault, f.name, 0);
        }
        if (old && !touched && only_faults(*old, times, fresh)) return false;
        remove_abandoned();
        // A name of its own: programs in two containers that share a cache may have the same pid.
        std::random_device random;
        const std::string made = path + format(".tmp%08x%08x", random(), random());
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

    // Whether all that is new or gone are files that cannot be used, such as a database that is written to all the
    // time: the index stays as it is.
    bool only_faults(const Index& old, const std::vector<std::optional<int64_t>>& times,
                     const std::vector<const DocumentFile*>& fresh) {
        for (uint64_t i = 0; i < times.size(); i++)
            if (!times[i] && old.file_at(i).fault == Index::FINE) return false;
        LeftOut all = left_out;
        for (const DocumentFile* f : fresh) {
            DocumentText now;
            now.read(folder + "/" + f->name);
            if (now.file.fault == Index::FINE) return false;
            all.add(now.file.fault, f->name, now.fault_at);
        }
        read = fresh.size(), left_out = all;
        return true;
    }

    // Calls f(i) for all i below n on all threads. (Nothing may be thrown out of a parallel loop.)
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
    void add_fresh(IndexBuilder& builder, const std::vector<const DocumentFile*>& fresh) {
        constexpr uint64_t BATCH = 32 << 20;
        uint64_t all = 0, done = 0;
        for (auto* f : fresh) all += f->size;
        double told = seconds();
        for (size_t begin = 0, end; begin < fresh.size(); begin = end) {
            uint64_t bytes = 0;
            for (end = begin; end < fresh.size() && bytes < BATCH && end - begin < 4096; end++)
                bytes += fresh[end]->size;
            std::vector<DocumentText> batch(end - begin);
            on_all_threads(batch.size(), [&](size_t i) {
                batch[i].read(folder + "/" + fresh[begin + i]->name);
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
    void add_batch(IndexBuilder& builder, const std::vector<DocumentText>& batch, const DocumentFile* const* files) {
        constexpr size_t SOME = 1 << 14; // passages
        std::vector<std::pair<size_t, size_t>> all; // file, chunk
        for (size_t i = 0; i < batch.size(); i++)
            for (size_t k = 0; k < batch[i].chunks.size(); k++) all.push_back({i, k});
        size_t begun = 0; // files
        auto begin_files = [&](size_t end) {
            for (; begun < end; begun++) {
                const Index::File& f = batch[begun].file;
                read++;
                left_out.add(f.fault, files[begun]->name, batch[begun].fault_at);
                const bool passing = f.fault == Index::UNREADABLE || f.fault == Index::CHANGING;
                if (passing) continue; // next time it may be another matter
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

    // What programs left behind that were ended while they wrote this index: what has not been written to for a day.
    void remove_abandoned() const {
        const std::string where = path.substr(0, path.rfind('/') + 1);
        const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(where.empty() ? "." : where.c_str()), closedir);
        while (const dirent* entry = entries ? readdir(entries.get()) : nullptr) {
            const std::string file = where + entry->d_name;
            struct stat st;
            if (!is_temporary(file, path) || lstat(file.c_str(), &st) != 0) continue;
            if (S_ISREG(st.st_mode) && st.st_mtime < time(nullptr) - 24 * 3600) unlink(file.c_str());
        }
    }
};

// Where the index of a folder lies, if the user does not say.
inline std::string default_index(const std::string& root) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    std::string folder;
    if (cache && *cache == '/') folder = std::string(cache) + "/qwen3";
    else if (home && *home == '/') folder = std::string(home) + "/.cache/qwen3";
    else DIE("neither XDG_CACHE_HOME nor HOME names a folder for the index (--index FILE does)");
    make_folder(folder);
    return folder + format("/docs-%016llx.index", (unsigned long long)fnv1a(root));
}

// The path without links, . and ..
inline std::string real_path(const std::string& path) {
    char real[PATH_MAX];
    if (!realpath(path.c_str(), real)) DIE("%s: %s", path.c_str(), strerror(errno));
    return real;
}

// ============================================================================================== 3 Vectors of passages

// A model that makes vectors, of length 1. (hybrid.h has one, which is Qwen3-Embedding.)
struct VectorModel {
    using Each = std::function<void(size_t i, const std::vector<float>& vector)>;
    virtual ~VectorModel() = default;
    virtual uint64_t hash() const = 0; // names what the vectors of passages depend on
    virtual size_t dimensions() const = 0;
    virtual void passages(const std::vector<std::string>& texts, const Each& each) = 0; // ends early if interrupted
    virtual std::vector<float> question(const std::string& text) = 0;
};
// A model that says how well passages answer a question: Qwen3-Reranker.
struct RankModel {
    virtual ~RankModel() = default;
    virtual uint64_t hash() const = 0;
    virtual std::vector<double> scores(const std::string& question, const std::vector<std::string>& passages) = 0;
};
struct DocumentModels {
    std::shared_ptr<VectorModel> vectors{}; // none: words alone
    std::shared_ptr<RankModel> ranks{};
};

// What a model is shown of a passage: its headings, too, as words are looked up in them.
inline std::string shown_passage(const DocumentIndex& index, uint64_t i) {
    const DocumentIndex::Passage& p = index.passage_at(i);
    std::string shown;
    utf8_repair(shown, std::string(index.heading_of(p)) + "\n" + std::string(index.text_of(p)), true);
    shown.resize(shown.find_last_not_of(" \t\r\n") + 1);
    return shown;
}

// Vectors as they are made, in a file: who is stopped loses none that is finished. One program at a time makes them;
// another one waits.
struct PartialVectors {
    const std::string path;
    const VectorFile::Header header;

    PartialVectors(const std::string& to, const VectorFile::Header& h, const Tell& tell) : path(to), header(h) {
        struct stat st, now;
        for (bool told = false;; usleep(100'000)) {
            if (interrupted) DIE("interrupted");
            fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
            must(fd >= 0);
            const bool locked = flock(fd, LOCK_EX | LOCK_NB) == 0; // ... and is it still the file of that name?
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
        must(ftruncate(fd, same ? (off_t)(size - (size - sizeof header) % stride) : 0) == 0); // whole ones stay
        if (!same) append({(const char*)&header, sizeof header});
    }
    PartialVectors(const PartialVectors&) = delete;
    ~PartialVectors() { if (fd >= 0) close(fd); }

    void append(std::string_view bytes) {
        errno = ENOSPC; // if only a part is written
        must(write(fd, bytes.data(), bytes.size()) == (ssize_t)bytes.size());
    }

  private:
    int fd = -1;
    void must(bool ok) const {
        if (!ok) DIE("%s: %s", path.c_str(), strerror(errno));
    }
};

// Brings the vectors of an index up to date: a passage whose text had one keeps it.
struct VectorUpdate {
    const std::string path;
    size_t made = 0;

    VectorUpdate(const DocumentIndex& of, VectorModel& by, const Tell& t)
        : path(vectors_path(of.path(), by.hash())), index(of), model(by), tell(t) {}

    std::unique_ptr<VectorFile> run() {
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

  private:
    const DocumentIndex& index;
    VectorModel& model;
    const Tell& tell;
    std::vector<uint64_t> keys;                          // of the passages
    std::vector<std::unique_ptr<VectorFile>> files;      // that are of use
    std::unordered_map<uint64_t, const uint16_t*> known; // the vectors in them, by key

    VectorFile::Header header() const {
        VectorFile::Header h;
        memcpy(h.magic, "qwen3vec", sizeof h.magic);
        h.made_by = model.hash(), h.passages = index.passages_hash();
        h.dimensions = model.dimensions(), h.count = index.header().passages;
        return h;
    }
    // The file, if it is there, whole, and has just these vectors.
    std::unique_ptr<VectorFile> current() const {
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

    // Takes what a file has. What it should have and has not is said.
    void know(const std::string& from) {
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

    // Makes the vectors that are not known, then writes all of them in the passages' order.
    void make(PartialVectors& partial) {
        const size_t n = (size_t)index.header().passages;
        keys.resize(n);
        for (size_t i = 0; i < n; i++) keys[i] = fnv1a(shown_passage(index, i));
        know(path), know(partial.path);
        std::vector<uint32_t> missing; // of equal passages the first
        std::unordered_set<uint64_t> seen;
        for (size_t i = 0; i < n; i++)
            if (!known.count(keys[i]) && seen.insert(keys[i]).second) missing.push_back((uint32_t)i);
        make_missing(partial, missing);
        know(partial.path); // with the new ones
        OutputFile out(path);
        const VectorFile::Header h = header();
        out.write(&h, sizeof h);
        for (uint64_t key : keys) out.write(VectorFile::record_of(key, known.at(key), (size_t)h.dimensions));
        out.commit();
    }
    void make_missing(PartialVectors& partial, const std::vector<uint32_t>& missing) {
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
};

// ============================================================================================ 4 Questions and sources

struct DocumentOptions {
    std::string docs, index; // a file or a folder; "": the default place
    size_t passages = 0;     // for a question, at most; 0: four
    std::string embed{}, rerank{}; // paths of models, maybe: see hybrid.h
};

// A passage that was found.
struct Source {
    std::string file, heading, text;
    uint32_t line;
    float score;
};

struct Documents {
    const DocumentOptions options;

    Documents(const DocumentOptions& o, const Tell& tell, const DocumentModels& with = {})
        : options{o.docs, o.index, o.passages ? o.passages : 4, o.embed, o.rerank}, models(with), jieba(find_jieba()) {
        const double start = seconds();
        const std::string root = real_path(o.docs);
        const uint64_t sizes[] = {WORD_RULES, PASSAGES.most, PASSAGES.least, PASSAGES.overlap, PASSAGES.title};
        const MappedFile dictionary(find_jieba());
        const std::string path = o.index.empty() ? default_index(root) : beside_its_folder(o.index);
        IndexUpdate update{root, path, jieba, tell, fnv1a(sizes, sizeof sizes, fnv1a(dictionary.text()))};
        index = update.run();
        const std::string left_out = update.left_out.text();
        const DocumentIndex::Header& h = index->header();
        if (h.passages == 0)
            DIE("%s: no text in it%s%s", o.docs.c_str(), left_out.empty() ? "" : "; ", left_out.c_str());
        if (!left_out.empty()) tell(o.docs + ": " + left_out);
        const std::string all = counted(h.passages, "passage") + " of " + counted(h.files, "file");
        tell(format("%s: %s (%.1f MB), %zu read and %zu unchanged; index %s%s, %.3f s", o.docs.c_str(), all.c_str(),
                    (double)h.text_bytes / 1e6, update.read, update.unchanged, path.c_str(), update.written ? " written" : "",
                    seconds() - start));
        if (models.vectors) open_vectors(tell);
    }

    // The best passages for a question. One that has no word of its own ("Why?") is looked up as the one before it.
    // With vectors two rankings are joined: by words, and by the vectors' products. A reranker orders the first of them.
    // Throws IndexFault if the postings are damaged.
    std::vector<Source> find(std::string_view question, std::string_view before = "") const {
        using Hit = DocumentIndex::Hit;
        WordCounts words;
        std::string text; // what is looked up
        for (std::string_view asked : {question, before}) {
            if (!words.empty()) break;
            text.clear();
            utf8_repair(text, asked.substr(0, MOST_ASKED), true);
            words = question_words(jieba, text);
        }
        if (words.empty()) return {};
        const size_t most = models.ranks ? std::max(RANKED, options.passages) : options.passages;
        std::vector<Hit> hits = index->search(words, vectors ? DEPTH : most);
        if (vectors) {
            const std::vector<float> products = vectors->products(models.vectors->question(text));
            hits = index->joined({hits, index->best(products, DEPTH, -INFINITY)}, most);
        }
        if (models.ranks && !hits.empty()) {
            std::vector<std::string> shown;
            for (const Hit& hit : hits) shown.push_back(shown_passage(*index, hit.passage));
            const std::vector<double> scores = models.ranks->scores(text, shown);
            for (size_t i = 0; i < hits.size(); i++) hits[i].score = (float)scores[i];
            std::stable_sort(hits.begin(), hits.end(), [](auto& a, auto& b) { return a.score > b.score; });
            hits.resize(std::min(hits.size(), options.passages));
        }
        std::vector<Source> found;
        for (const Hit& hit : hits) found.push_back(source_of(hit));
        return found;
    }

    // Names what answers depend on: all files that are used, in whatever order, and how much of them is shown.
    uint64_t hash() const {
        uint64_t sum = index->header().made_by + options.passages;
        if (models.vectors) sum += models.vectors->hash();
        if (models.ranks) sum += 3 * models.ranks->hash(); // (one model may be both)
        for (uint64_t i = 0; i < index->header().files; i++) {
            const DocumentIndex::File& f = index->file_at(i);
            if (f.fault == DocumentIndex::FINE) sum += fnv1a(index->name_of(f), f.hash);
        }
        return sum;
    }

  private:
    static constexpr size_t MOST_ASKED = 8192; // bytes of a question that are looked up: each word costs time
    static constexpr size_t DEPTH = 1000; // of rankings that are joined: a later passage would get less than 1 / 1,060
    static constexpr size_t RANKED = 20;  // passages that a reranker reads: as many prompts
    const DocumentModels models;
    const Jieba jieba;
    std::unique_ptr<DocumentIndex> index;
    std::unique_ptr<VectorFile> vectors;

    void open_vectors(const Tell& tell) {
        const double start = seconds();
        VectorUpdate update(*index, *models.vectors, tell);
        vectors = update.run();
        tell(format("%s: %s of %s (%.1f MB), %zu made; %s, %.3f s", options.docs.c_str(),
                    counted(vectors->size(), "vector").c_str(),
                    counted((size_t)vectors->header().dimensions, "number").c_str(),
                    (double)(vectors->size() * vectors->stride()) / 1e6, update.made, update.path.c_str(),
                    seconds() - start));
    }
    Source source_of(const DocumentIndex::Hit& hit) const {
        const DocumentIndex::Passage& p = index->passage_at(hit.passage);
        Source s = {"", "", "", p.line, hit.score};
        utf8_repair(s.file, index->name_of(index->file_at(p.file)), true);
        utf8_repair(s.heading, index->heading_of(p), true);
        utf8_repair(s.text, index->text_of(p), true);
        s.text.resize(s.text.find_last_not_of(" \t\r\n") + 1);
        return s;
    }

    static std::string beside_its_folder(const std::string& path) { // a real path, whether the file is there or not
        const size_t slash = path.rfind('/');
        return real_path(slash == path.npos ? "." : path.substr(0, slash + 1)) + "/" + path.substr(slash + 1);
    }
};

// "notes/08-reduction.md:35, Reduction > Trees"
inline std::string name_of(const Source& s) {
    return format("%s:%u%s%s", s.file.c_str(), s.line, s.heading.empty() ? "" : ", ", s.heading.c_str());
}

// Whether a question is rather Chinese: as many Han characters as words in Latin letters.
inline bool is_chinese(std::string_view text) {
    size_t han = 0, latin = 0;
    bool inside = false; // of a word
    for (char32_t c : decode(text)) {
        han += is_cjk(c);
        latin += is_latin(c) && !inside;
        inside = is_latin(c);
    }
    return han > 0 && han >= latin;
}

// The question with the passages before it, as many of the best as fit into `room`, by measure(text); one that is too
// long is cut, and is the last. Those that do not fit are taken from `sources`. Where nothing fits the question stays
// as it is: an instruction must not be what makes a prompt too long. Text of a passage is never more than
// text for the tokenizer; but a model may obey it: only documents that one trusts should be given.
template <class Measure>
std::string grounded(const std::string& question, std::vector<Source>& sources, size_t room, Measure measure) {
    static const char ENGLISH[] = "Answer the question from the passages below, and name those that you use by their "
                                  "number, like [1]. If the answer is not in them, say that it is not in the "
                                  "documents.\n\n";
    static const char CHINESE[] = "请根据下面的段落回答问题，并用编号（例如 [1]）注明依据。"
                                  "如果段落里没有答案，就回答“文档中没有提到”。\n\n";
    const bool chinese = is_chinese(question);
    std::string text = chinese ? CHINESE : ENGLISH;
    const std::string last = (chinese ? "问题：" : "Question: ") + question;
    if (sources.empty()) text += chinese ? "（没有找到相关段落。）\n\n" : "(No passage was found.)\n\n";
    const size_t used = measure(text + last);
    if (used > room) return sources.clear(), question;
    size_t left = room - used, n = 0;
    for (bool whole = true; n < sources.size() && whole; n++) {
        Source& s = sources[n];
        const std::string head = format("[%zu] %s\n", n + 1, name_of(s).c_str());
        size_t size = measure(head + s.text + "\n\n");
        while (size > left && s.text.size() > 100) { // cut between characters, about where it should fit
            whole = false;
            size_t end = std::min(s.text.size() * left / size, s.text.size() - 20);
            while (end > 0 && ((uint8_t)s.text[end] & 0xC0) == 0x80) end--;
            s.text.resize(end);
            size = measure(head + s.text + "\n\n");
        }
        if (size > left) break;
        text += head + s.text + "\n\n", left -= size;
    }
    const bool none_fits = n == 0 && !sources.empty();
    sources.resize(n, Source{});
    return none_fits ? question : text + last;
}

inline void write_sources(sj::Writer& w, const std::vector<Source>& sources) { // a member of an object
    w.key("sources").array();
    for (const Source& s : sources) {
        w.object().field("file", s.file).field("line", s.line).field("heading", s.heading);
        w.field("score", s.score).field("text", s.text).end();
    }
    w.end();
}

// Gives the last question of a conversation the passages that it is about, in as many tokens as are left of `most` when
// the conversation is rendered without them: `rendered` counts its tokens, `measure` those of a text. A conversation
// without a question stays as it is.
template <class Rendered, class Measure>
std::vector<Source> add_passages(const Documents& documents, std::vector<Message>& messages, size_t most,
                                 Rendered rendered, Measure measure) {
    const auto is_question = [](const Message& m) { return m.role == "user"; };
    const auto last = std::find_if(messages.rbegin(), messages.rend(), is_question);
    if (last == messages.rend()) return {};
    const auto before = std::find_if(last + 1, messages.rend(), is_question);
    const std::string question = last->content;
    std::vector<Source> sources = documents.find(question, before == messages.rend() ? "" : before->content);
    last->content.clear();
    const size_t others = rendered(messages);
    size_t room = most - std::min(most, others);
    for (;;) {
        last->content = grounded(question, sources, room, measure);
        const size_t all = rendered(messages); // seldom more than the sum of its parts
        if (all <= most) return sources;
        if (room == 0) return last->content = question, std::vector<Source>();
        room -= std::min(room, all - most);
    }
}
