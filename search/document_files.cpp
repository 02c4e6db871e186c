// search/document_files.cpp: lists a folder, reads its files and cuts them into passages; see document_files.h.
#include "search/document_files.h"
#include "base/options.h" // interrupted
#include "book/arguments.h"
#include "book/read_book.h"
#include "model/utf8.h"
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <unistd.h>
#include <utility>

int64_t time_of(const struct stat& st) {
    return (int64_t)st.st_mtim.tv_sec * 1'000'000'000 + st.st_mtim.tv_nsec;
}

std::string vectors_path(const std::string& index, uint64_t model) {
    return index + format(".%016llx.vectors", (unsigned long long)model);
}

bool is_of_index(const std::string& path, const std::string& index) {
    constexpr size_t HASH = 1 + 16;
    if (path.compare(0, index.size(), index) != 0) return false;
    const std::string rest = path.substr(index.size()), kind = rest.substr(std::min(HASH, rest.size()));
    const bool named = rest.find_first_not_of("0123456789abcdef", 1) == HASH;
    return rest.empty() || (named && rest[0] == '.' && (kind == ".vectors" || kind == ".vectors.partial"));
}

bool is_temporary(const std::string& path, const std::string& index) {
    const size_t at = path.find(".tmp", std::min(index.size(), path.size()));
    return at != path.npos && path.size() > at + 4 && is_of_index(path.substr(0, at), index) &&
           path.find_first_not_of("0123456789abcdef.tmp", at + 4) == path.npos;
}

std::vector<DocumentFile> list_files(const std::string& root, const std::string& index, const Tell& tell,
                                     size_t most) {
    std::vector<DocumentFile> files;
    std::vector<std::string> folders = {""};
    std::string odd; // the first entry that is neither file nor folder, or cannot be read
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

void DocumentText::read(const std::string& path) {
    file.fault = Index::CHANGING;
    for (int again = 0; again < 3 && file.fault == Index::CHANGING; again++) read_once(path);
    if (file.fault == Index::FINE && memchr(text.data(), 0, text.size())) file.fault = Index::BINARY;
    file.hash = fnv1a(text);
    for (size_t i = 0; i < text.size() && file.fault == Index::FINE;) {
        const int k = (uint8_t)text[i] < 0x80 ? 1 : utf8_length(&text[i], text.size() - i);
        if (k <= 0) file.fault = Index::NOT_UTF8, detail = i ? format(" at byte %zu", i) : "";
        i += (size_t)k;
    }
    if (file.fault == Index::FINE && std::count(text.begin(), text.end(), '\n') > MOST_LINES)
        file.fault = Index::TOO_MANY_LINES;
    if (file.fault != Index::FINE) std::string().swap(text);
}

void DocumentText::cut() {
    const std::string_view book = text;
    const size_t mark = book.substr(0, 3) == "\xEF\xBB\xBF" ? 3 : 0; // byte order mark
    for (const Chunk& c : cut_chunks(book.substr(mark), PASSAGES)) {
        size_t begin = c.body + mark;
        const size_t end = c.end + mark;
        for (;;) { // cuts a long fence at line ends; each step looks at one passage only
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

void DocumentText::add(size_t begin, size_t end, const std::string& heading) {
    if (is_blank_line(std::string_view(text).substr(begin, end - begin))) return;
    line += (size_t)std::count(text.begin() + (ptrdiff_t)line_at, text.begin() + (ptrdiff_t)begin, '\n');
    line_at = begin;
    chunks.push_back({begin, begin, end, heading});
    lines.push_back((uint32_t)line);
}

void DocumentText::read_once(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // NONBLOCK: opening a FIFO must not block
    struct stat st, after;
    file.fault = Index::UNREADABLE;
    if (fd < 0) return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        file.size = (uint64_t)st.st_size, file.time = time_of(st);
        file.fault = file.size > MOST ? Index::TOO_LARGE : Index::FINE;
        text.resize(std::min<uint64_t>(file.size, 8192)); // enough to detect most binaries
        if (file.fault == Index::FINE && !fill(fd, 0)) file.fault = Index::CHANGING;
        const bool document = file.fault == Index::FINE && book::is_document(path, text);
        converted = document;
        if (document) convert(path);
        else if (file.fault == Index::FINE && memchr(text.data(), 0, text.size())) file.fault = Index::BINARY;
        const bool tried = file.fault == Index::NOT_CONVERTED || file.fault == Index::NO_TEXT;
        if (file.fault == Index::FINE || tried) {
            const size_t from = text.size();
            if (!document) text.resize(file.size);
            const bool whole = (document || fill(fd, from)) && fstat(fd, &after) == 0;
            if (!whole || after.st_size != st.st_size || time_of(after) != file.time) file.fault = Index::CHANGING;
        }
    }
    close(fd);
}

void DocumentText::convert(const std::string& path) {
    try {
        const book::Reading how = {"auto", book::Arguments::beside_program("data/datagen/book.lua"), false, [](auto&) {}};
        text = book::book_text(path, text, how);
        if (text.size() > MOST) file.fault = Index::TOO_LARGE;
    } catch (const book::NoText&) {
        file.fault = Index::NO_TEXT;
    } catch (const Error& e) {
        const std::string why = e.what(), before = path + ": ";
        detail = ": " + (why.compare(0, before.size(), before) == 0 ? why.substr(before.size()) : why);
        file.fault = Index::NOT_CONVERTED;
    } catch (const book::Interrupted&) {
        file.fault = Index::UNREADABLE; // the callers stop
    }
}

bool DocumentText::fill(int fd, size_t at) {
    while (at < text.size()) {
        const ssize_t n = ::read(fd, &text[at], text.size() - at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += (size_t)n;
    }
    return true;
}

void LeftOut::add(uint32_t fault, std::string_view name, const std::string& detail) {
    if (fault == DocumentIndex::FINE || fault >= DocumentIndex::FAULTS || count[fault]++) return;
    first[fault] = std::string(name) + detail;
}

std::string LeftOut::text() const {
    static const char* WHY[DocumentIndex::FAULTS] = {
        "", "binary", "no UTF-8 (iconv -f GB18030 -t UTF-8 converts it)", "larger than 1 GB", "cannot be read",
        "written to while it was read", "of more than 16,777,216 lines", "not converted",
        "without text (pictures of pages need OCR first)"};
    std::string all;
    for (uint32_t f = 1; f < DocumentIndex::FAULTS; f++)
        if (count[f])
            all += format("%s%zu %s: %s", all.empty() ? "left out: " : "; ", count[f], WHY[f], first[f].c_str());
    return all;
}

bool begins_with(const std::string& path, const char* magic) {
    char first[8] = {};
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const bool same = fd >= 0 && read(fd, first, 8) == 8 && memcmp(first, magic, 8) == 0;
    if (fd >= 0) close(fd);
    return same;
}
