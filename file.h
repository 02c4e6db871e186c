// file.h: errors, hostile files in, whole files out; time, hashes; memory that is planned once (Arena). Used by every
// program here.
//
//   DIE("%s: no such tensor", name)   throws Error; main prints its one line on stderr and exits with 1
//   MappedFile m(path)                the bytes of a file, read-only, for as long as m lives
//   OutputFile o(path)                a file that appears under its name only when it is complete
//   write_text(path, text), make_folder(path), same_file(path, path)
//   run_program(name, run, argc, argv)   what every main does; keep_descriptors(), print_error(...) are its parts
#pragma once
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <new>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdexcept>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// What a user can cause (a bad file, a bad option, a full disk). The message names the file and the fault.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The text of a printf format.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    std::string s((size_t)vsnprintf(nullptr, 0, fmt, args), '\0');
    vsnprintf(s.data(), s.size() + 1, fmt, again);
    va_end(again);
    va_end(args);
    return s;
}

#define DIE(...) throw Error(format(__VA_ARGS__))

// Standard descriptors that are closed stay taken, so that no file we write becomes one of them.
inline void keep_descriptors() {
    for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;)
        if (fd > 2) { close(fd); break; }
}

// The one line of error on stderr. Names out of files may hold anything: it stays one line, and no escapes.
inline void print_error(const char* program, std::string line) {
    for (char& c : line)
        if ((unsigned char)c < 0x20 || c == 0x7f) c = ' ';
    fprintf(stderr, "%s: %s\n", program, line.c_str());
}

// What every main does once its signals are set: runs the program, and makes of a fault one line and exit status 1.
inline int run_program(const char* program, int (*run)(int, char**), int argc, char** argv) {
    keep_descriptors();
    try {
        return run(argc, argv);
    } catch (const std::bad_alloc&) {
        print_error(program, "out of memory");
    } catch (const std::exception& e) {
        print_error(program, e.what());
    }
    return 1;
}

// A whole file mapped read-only. Throws Error if it is missing, unreadable, not a regular file or empty.
struct MappedFile {
    std::string path;
    const uint8_t* data = nullptr;
    size_t size = 0; // bytes

    MappedFile() = default;
    explicit MappedFile(const std::string& p) : path(p) {
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
            else data = (const uint8_t*)at, size = (size_t)st.st_size;
        }
        close(fd);
        if (fault) DIE("%s: %s", p.c_str(), fault);
    }
    MappedFile(MappedFile&& o) noexcept { swap(o); }
    MappedFile& operator=(MappedFile&& o) noexcept { swap(o); return *this; }
    ~MappedFile() { if (data) munmap((void*)data, size); }

    std::string_view text() const { return {(const char*)data, size}; }
    void swap(MappedFile& o) noexcept { path.swap(o.path); std::swap(data, o.data); std::swap(size, o.size); }
};

// A file written under a temporary name in the same folder and renamed by commit(): readers see the whole
// new file or the old one, never half of it. Without commit() the destructor removes what was written.
// A path that exists and is no regular file (/dev/stdout, a FIFO) is written in place.
struct OutputFile {
    std::string path, temporary;
    FILE* file = nullptr;

    explicit OutputFile(const std::string& p) : path(p) {
        struct stat st;
        bool special = stat(p.c_str(), &st) == 0 && !S_ISREG(st.st_mode);
        if (special && S_ISDIR(st.st_mode)) DIE("%s: is a directory", p.c_str());
        if (!special) temporary = p + format(".tmp%d", (int)getpid());
        file = fopen(special ? p.c_str() : temporary.c_str(), "wb");
        if (!file) DIE("%s: %s", p.c_str(), strerror(errno));
    }
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;
    ~OutputFile() {
        if (file) fclose(file);
        if (!temporary.empty()) unlink(temporary.c_str());
    }
    void write(const void* bytes, size_t n) {
        if (n && fwrite(bytes, 1, n, file) != n) DIE("%s: %s", path.c_str(), strerror(errno));
    }
    void write(std::string_view text) { write(text.data(), text.size()); }
    void commit() {
        bool ok = fflush(file) == 0 && (temporary.empty() || fsync(fileno(file)) == 0);
        int fault = errno;
        ok = fclose(file) == 0 && ok;
        file = nullptr;
        if (!ok) DIE("%s: %s", path.c_str(), strerror(fault));
        if (!temporary.empty() && rename(temporary.c_str(), path.c_str()) != 0)
            DIE("%s: %s", path.c_str(), strerror(errno));
        temporary.clear();
    }
};

inline double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline int thread_count() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// Bytes that can still be used, as the kernel says and a container's limit allows (SIZE_MAX where neither does).
inline size_t available_memory() {
    size_t bytes = SIZE_MAX, number;
    if (FILE* f = fopen("/proc/meminfo", "r")) {
        char line[128];
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "MemAvailable: %zu kB", &number) == 1) bytes = number * 1024;
        fclose(f);
    }
    for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"})
        if (FILE* f = fopen(file, "r")) {
            if (fscanf(f, "%zu", &number) == 1) bytes = std::min(bytes, number);
            fclose(f);
        }
    return bytes;
}

#ifdef __CUDACC__
constexpr bool WITH_GPU = true; // this program is nvcc's, and has qwen3.cu's Book II
#else
constexpr bool WITH_GPU = false;
#endif
inline void* gpu_allocate(size_t bytes, const char* what); // Book II's
inline void gpu_release(void* p);

// An arena is planned by running the same code twice: first without memory, to count; then to hand out.
struct Arena {
    uint8_t* base = nullptr;
    size_t used = 0, size = 0;
    bool gpu = false; // its memory is the GPU's

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() { release(); }

    // n numbers, 256-byte aligned, zero. (A GPU's lines have 128: all of a training step took 10% longer where arrays
    // began in the middle of one.)
    template <class T> T* take(size_t n) {
        size_t at = used, bytes;
        const bool overflow = __builtin_mul_overflow(n, sizeof(T), &bytes);
        if (overflow || bytes > SIZE_MAX / 2 - used) DIE("the memory plan overflows");
        used = (used + bytes + 255) / 256 * 256;
        return base ? (T*)(base + at) : nullptr;
    }

    // After counting: takes the memory and starts over. The system gives pages when they are first touched.
    void allocate(const char* what) {
        if (gpu) {
            if constexpr (WITH_GPU) base = (uint8_t*)gpu_allocate(used, what);
        } else {
            const size_t have = available_memory();
            void* at = MAP_FAILED;
            constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            if (used <= have) at = mmap(nullptr, used, PROT_READ | PROT_WRITE, flags, -1, 0);
            if (at == MAP_FAILED) DIE("%s needs %zu bytes of memory and %zu are available", what, used, have);
            madvise(at, used, MADV_HUGEPAGE); // fewer TLB misses; a wish, not a need
            base = (uint8_t*)at;
        }
        size = used, used = 0;
    }

    void release() {
        if (!base) return;
        if (!gpu) munmap(base, size);
        else if constexpr (WITH_GPU) gpu_release(base);
        base = nullptr;
    }
};

// FNV-1a, 64 bits.
inline uint64_t fnv1a(const void* bytes, size_t n, uint64_t hash = 0xcbf29ce484222325) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const uint8_t*)bytes)[i]) * 0x100000001b3;
    return hash;
}
inline uint64_t fnv1a(std::string_view s, uint64_t hash = fnv1a(nullptr, 0)) { return fnv1a(s.data(), s.size(), hash); }

inline void write_text(const std::string& path, std::string_view text) {
    OutputFile out(path);
    out.write(text);
    out.commit();
}

// A folder, and those it is in, if they are not there.
inline void make_folder(const std::string& path) {
    struct stat st;
    for (size_t at = 0; at != std::string::npos;) {
        at = path.find('/', at + 1);
        const std::string part = path.substr(0, at);
        if (mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) DIE("%s: %s", part.c_str(), strerror(errno));
    }
    if (stat(path.c_str(), &st) != 0 || !S_ISDIR(st.st_mode)) DIE("%s: not a folder", path.c_str());
}

// Both exist and are one, whatever they are called.
inline bool same_file(const std::string& a, const std::string& b) {
    struct stat one, other;
    return stat(a.c_str(), &one) == 0 && stat(b.c_str(), &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}
