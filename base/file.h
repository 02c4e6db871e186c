// base/file.h: hostile files in, whole files out; hashes.
//
//   MappedFile m(path)      the bytes of a file, read-only, for as long as m lives
//   OutputFile o(path)      a file that appears under its name only when it is complete
//   write_text(path, text), make_folder(path), same_file(path, path)
//   text_of(path), must_exist(option, path), must_be_writable(option, path), must_be_new(option, path, overwrite)
#pragma once
#include "base/error.h"
#include "base/unfinished.h"
#include <cerrno>
#include <optional>
#include <sys/mman.h>
#include <sys/stat.h>

// A whole file mapped read-only. Throws Error if it is missing, unreadable, not a regular file or empty.
struct MappedFile {
    std::string path;
    const uint8_t* data = nullptr;
    size_t size = 0; // bytes

    MappedFile() = default;
    explicit MappedFile(const std::string& p);
    MappedFile(MappedFile&& o) noexcept { swap(o); }
    MappedFile& operator=(MappedFile&& o) noexcept { swap(o); return *this; }
    ~MappedFile();

    std::string_view text() const { return {(const char*)data, size}; }
    void swap(MappedFile& o) noexcept { path.swap(o.path); std::swap(data, o.data); std::swap(size, o.size); }
};

// A file written under a temporary name in the same folder and renamed by commit(): readers see the whole
// new file or the old one, never half of it. Without commit() the destructor removes the file, as a signal does.
// A path that exists and is no regular file (/dev/stdout, a FIFO) is written in place.
struct OutputFile {
    std::string path, temporary;
    FILE* file = nullptr;
    std::optional<Unfinished> unfinished;

    explicit OutputFile(const std::string& p);
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;
    ~OutputFile();
    void write(const void* bytes, size_t n) {
        if (n && fwrite(bytes, 1, n, file) != n) DIE("%s: %s", path.c_str(), strerror(errno));
    }
    void write(std::string_view text) { write(text.data(), text.size()); }
    void commit();
};

// FNV-1a, 64 bits.
uint64_t fnv1a(const void* bytes, size_t n, uint64_t hash = 0xcbf29ce484222325);
inline uint64_t fnv1a(std::string_view s, uint64_t hash = fnv1a(nullptr, 0)) { return fnv1a(s.data(), s.size(), hash); }

// Like FNV-1a, but on words of 8 bytes, since it must keep up with a disk. Every step is invertible, so damage within
// one word is always detected. `bytes` is a multiple of 8.
uint64_t checksum(uint64_t hash, const void* data, size_t bytes);

void write_text(const std::string& path, std::string_view text);

std::string program_folder(); // of the running program, without a last slash; "": not known
// Makes a folder and its missing parents.
void make_folder(const std::string& path);

// The text of a file in UTF-8, without a byte order mark. Another encoding is refused.
std::string text_of(const std::string& path);
void must_be_text(const std::string& path, std::string_view bytes); // those of the file

// ---- The paths of options, checked before a model is loaded. Error: "OPTION PATH: the fault".
// A file or folder that can be read. is_file: it can be mapped.
void must_exist(const char* option, const std::string& path, bool is_file);
// A file that can be written; as a folder, it and its parents may be missing.
void must_be_writable(const char* option, const std::string& path, bool is_folder = false);
// The same for a file that no command makes again in seconds: without `overwrite` an existing one is refused.
void must_be_new(const char* option, const std::string& path, bool overwrite);
void must_not_exist(const std::string& path); // the same for answers, which have no --overwrite

// True if both exist and are the same file or folder.
bool same_file(const std::string& a, const std::string& b);
