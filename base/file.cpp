#include "base/file.h"
#include "base/json_lines.h" // mark_of
#include "base/lost_file.h"
#include "base/text.h"

MappedFile::MappedFile(const std::string& p) : path(p) {
    int fd = open(p.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // NONBLOCK: a FIFO must not hang us
    if (fd < 0) DIE("%s: %s", p.c_str(), strerror(errno));
    struct stat st;
    const char* fault = nullptr;
    if (fstat(fd, &st) != 0) fault = strerror(errno);
    else if (!S_ISREG(st.st_mode)) fault = "not a regular file";
    else if (st.st_size == 0) fault = "the file is empty";
    else {
        void* at = mmap(nullptr, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (at == MAP_FAILED) fault = strerror(errno);
        else data = (const uint8_t*)at, size = (size_t)st.st_size, remember_mapping(data, size, p);
    }
    close(fd);
    if (fault) DIE("%s: %s", p.c_str(), fault);
}

MappedFile::~MappedFile() {
    if (!data) return;
    forget_mapping(data);
    munmap((void*)data, size);
}

OutputFile::OutputFile(const std::string& p) : path(p) {
    struct stat st;
    bool special = stat(p.c_str(), &st) == 0 && !S_ISREG(st.st_mode);
    if (special && S_ISDIR(st.st_mode)) DIE("%s: is a directory", p.c_str());
    if (!special) unfinished.emplace(temporary = p + format(".tmp%d", (int)getpid()));
    file = fopen(special ? p.c_str() : temporary.c_str(), "wb");
    if (!file) DIE("%s: %s", p.c_str(), strerror(errno));
}

OutputFile::~OutputFile() {
    if (file) fclose(file);
    if (!temporary.empty()) unlink(temporary.c_str());
}

void OutputFile::commit() {
    bool ok = fflush(file) == 0 && (temporary.empty() || fsync(fileno(file)) == 0);
    int fault = errno;
    ok = fclose(file) == 0 && ok;
    file = nullptr;
    if (!ok) DIE("%s: %s", path.c_str(), strerror(fault));
    if (!temporary.empty() && rename(temporary.c_str(), path.c_str()) != 0)
        DIE("%s: %s", path.c_str(), strerror(errno));
    temporary.clear(), unfinished.reset();
}

uint64_t fnv1a(const void* bytes, size_t n, uint64_t hash) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const uint8_t*)bytes)[i]) * 0x100000001b3;
    return hash;
}

uint64_t checksum(uint64_t hash, const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word;
        memcpy(&word, (const uint8_t*)data + i, 8);
        hash = (hash ^ word) * 0x100000001b3;
        hash ^= hash >> 32; // else the upper bits would never reach the lower ones
    }
    return hash;
}

void write_text(const std::string& path, std::string_view text) {
    OutputFile out(path);
    out.write(text);
    out.commit();
}

void make_folder(const std::string& path) {
    struct stat st;
    for (size_t at = 0; at != std::string::npos;) {
        at = path.find('/', at + 1);
        const std::string part = path.substr(0, at);
        if (mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) DIE("%s: %s", part.c_str(), strerror(errno));
    }
    if (stat(path.c_str(), &st) != 0 || !S_ISDIR(st.st_mode)) DIE("%s: not a folder", path.c_str());
}

std::string text_of(const std::string& path) {
    const MappedFile file(path);
    must_be_text(path, file.text());
    return std::string(file.text().substr(mark_of(path, file.text())));
}

void must_be_text(const std::string& path, std::string_view bytes) {
    mark_of(path, bytes);
    if (const size_t at = invalid_utf8(bytes); at != bytes.npos)
        DIE("%s: no UTF-8 at byte %zu; convert it first: iconv -f GB18030 -t UTF-8", path.c_str(), at);
}

void must_exist(const char* option, const std::string& path, bool is_file) {
    struct stat st;
    if (access(path.c_str(), R_OK) != 0) DIE("%s %s: %s", option, path.c_str(), strerror(errno));
    if (is_file && stat(path.c_str(), &st) == 0 && !S_ISREG(st.st_mode))
        DIE("%s %s: not a regular file", option, path.c_str());
}

void must_be_writable(const char* option, const std::string& path, bool is_folder) {
    struct stat st;
    const char* name = path.c_str();
    const bool there = stat(name, &st) == 0;
    if (there && !is_folder && S_ISDIR(st.st_mode)) DIE("%s %s: is a directory", option, name);
    if (there && is_folder && !S_ISDIR(st.st_mode)) DIE("%s %s: not a folder", option, name);
    std::string in = path; // the folder that gets a new entry
    if (!is_folder || !there) do {
        in.resize(in.find_last_not_of('/') + 1); // none: npos + 1 is 0
        in.resize(in.rfind('/') + 1);
        if (in.empty()) in = ".";
    } while (is_folder && in != "." && stat(in.c_str(), &st) != 0 && errno == ENOENT);
    if (there && !is_folder && !S_ISREG(st.st_mode)) in = path; // it is written in place
    if (access(in.c_str(), W_OK) != 0) DIE("%s %s: %s", option, name, strerror(errno));
    if (in != path && stat(in.c_str(), &st) == 0 && !S_ISDIR(st.st_mode))
        DIE("%s %s: %s", option, name, strerror(ENOTDIR));
}

void must_be_new(const char* option, const std::string& path, bool overwrite) {
    struct stat st;
    must_be_writable(option, path);
    if (!overwrite && stat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode))
        DIE("%s %s: exists; --overwrite replaces it", option, path.c_str());
}

void must_not_exist(const std::string& path) {
    if (access(path.c_str(), F_OK) == 0) DIE("%s: exists; remove it or name another file", path.c_str());
}

bool same_file(const std::string& a, const std::string& b) {
    struct stat one, other;
    return stat(a.c_str(), &one) == 0 && stat(b.c_str(), &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

std::string program_folder() {
    char program[4096];
    const ssize_t n = readlink("/proc/self/exe", program, sizeof program);
    const std::string path(program, n > 0 ? (size_t)n : 0);
    return path.substr(0, std::min(path.find_last_of('/'), path.size()));
}
