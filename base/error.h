// base/error.h: errors, and the clock.
//
//   DIE("%s: no such tensor", name)      throws Error; main prints its one line on stderr and exits with 1
//   run_program(name, run, argc, argv)   the body of every main; keep_descriptors() and print_error(...) are its parts
#pragma once
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
