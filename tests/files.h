// Files for tests: a folder that cleans up after itself, and files in memory, since thousands of small ones
// are slow on a disk.
#pragma once
#include "base/file.h"
#include <doctest/doctest.h>
#include <filesystem>

namespace fs = std::filesystem;

struct Scratch { // an empty folder that goes away with the test case
    fs::path path;
    Scratch() {
        std::string name = (fs::temp_directory_path() / "qwen3_test.XXXXXX").string();
        REQUIRE(mkdtemp(name.data()));
        path = name;
    }
    Scratch(const Scratch&) = delete;
    ~Scratch() { fs::remove_all(path); }
    std::string operator/(const std::string& name) const { return (path / name).string(); }
    size_t count() const { // of the files in it
        return (size_t)std::distance(fs::directory_iterator(path), fs::directory_iterator());
    }
};

// Programs that inherit it can open it by `path`, too.
struct MemoryFile {
    int fd = memfd_create("test", 0);
    std::string path = format("/proc/self/fd/%d", fd);
    explicit MemoryFile(std::string_view bytes = "") {
        REQUIRE(fd >= 0);
        write(0, bytes);
    }
    MemoryFile(const MemoryFile&) = delete;
    ~MemoryFile() { close(fd); }
    size_t size() const {
        struct stat st;
        REQUIRE(fstat(fd, &st) == 0);
        return (size_t)st.st_size;
    }
    std::string text() const {
        std::string s(size(), '\0');
        REQUIRE(pread(fd, s.data(), s.size(), 0) == (ssize_t)s.size());
        return s;
    }
    void write(size_t at, std::string_view bytes) {
        REQUIRE(pwrite(fd, bytes.data(), bytes.size(), (off_t)at) == (ssize_t)bytes.size());
    }
    void truncate(size_t n) { REQUIRE(ftruncate(fd, (off_t)n) == 0); }
    // For standard streams, which several processes may share: what two of them write in the same moment both stays.
    // (Without O_APPEND a write begins where the last one known to it ended: of files in memory the kernel locks no offset.)
    void append_only() const { REQUIRE(fcntl(fd, F_SETFL, O_APPEND) == 0); }
};

inline void write_file(const std::string& path, std::string_view bytes) {
    FILE* f = fopen(path.c_str(), "wb");
    REQUIRE(f);
    REQUIRE(fwrite(bytes.data(), 1, bytes.size(), f) == bytes.size());
    REQUIRE(fclose(f) == 0);
}
inline std::string read_file(const std::string& path) { // MappedFile takes no empty file
    return fs::exists(path) && fs::file_size(path) == 0 ? "" : std::string(MappedFile(path).text());
}
inline std::string read_file_if(const std::string& path) { return fs::exists(path) ? read_file(path) : ""; } // or nothing
