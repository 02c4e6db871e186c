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

// A fault that a user can cause (a bad file, a bad option, a full disk). The message names the file and the fault.
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
void keep_descriptors();

// Prints one line of error on stderr. Names from files may hold any bytes: newlines and escapes are removed.
void print_error(const char* program, std::string line);

// Called by every main once its signals are set: runs the program. An error becomes one line and exit status 1. Signals
// that end the program remove its unfinished files.
int run_program(const char* program, int (*run)(int, char**), int argc, char** argv);

inline double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int thread_count();
