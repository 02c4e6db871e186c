// base/appended_file.h: files that grow by whole texts, such as a log.
#pragma once
#include <string>
#include <string_view>

// Appends to a file that was opened with O_APPEND and that nobody else writes. A text that does not fit (a full disk)
// leaves none of its bytes behind. Throws Error: "PATH: the fault".
void append_whole(int fd, const std::string& path, std::string_view text);

// A file for append_whole, created if it is missing. Throws Error: "PATH: the fault".
struct AppendedFile {
    const std::string path;
    const int fd;

    explicit AppendedFile(const std::string& p, bool is_new = false); // is_new: it must not exist
    AppendedFile(const AppendedFile&) = delete;
    ~AppendedFile();
    void add(std::string_view text) { append_whole(fd, path, text); }
};
