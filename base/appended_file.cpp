// base/appended_file.cpp: whole texts or none of their bytes.
#include "base/appended_file.h"
#include "base/error.h"
#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

void append_whole(int fd, const std::string& path, std::string_view text) {
    const off_t before = lseek(fd, 0, SEEK_END); // -1: a FIFO
    while (!text.empty()) {
        const ssize_t n = write(fd, text.data(), text.size());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            const int fault = errno;
            if (before >= 0 && ftruncate(fd, before) != 0) {} // the first fault is reported
            DIE("%s: %s", path.c_str(), strerror(fault));
        }
        text.remove_prefix((size_t)n);
    }
}

AppendedFile::AppendedFile(const std::string& p, bool is_new)
    : path(p), fd(open(p.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | (is_new ? O_EXCL : 0), 0666)) {
    if (fd < 0) DIE("%s: %s", p.c_str(), strerror(errno));
}
AppendedFile::~AppendedFile() { close(fd); }
