// base/progress.h: progress of a long operation, on stderr.
#pragma once
#include "base/error.h"
#include <cstddef>
#include <string>
#include <unistd.h>

// A line on stderr that is overwritten once a second; if stderr is not a terminal, a new one every half minute.
struct Progress {
    const bool terminal = isatty(2);
    const double start = seconds();
    double told = start;

    ~Progress();

    // Prints `line(seconds so far)` when `done` of `all` is done.
    template <class F> void show(size_t done, size_t all, F line) {
        const double now = seconds();
        if (now - told >= (terminal ? 1 : 30)) tell(done, all, now, line(now - start));
    }

  private:
    void tell(size_t done, size_t all, double now, const std::string& line);
};
