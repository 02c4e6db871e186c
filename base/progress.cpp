// base/progress.cpp: progress of a long operation, on stderr.
#include "base/progress.h"
#include <cstdio>

Progress::~Progress() {
    if (terminal && told > start) fputc('\n', stderr);
}

void Progress::tell(size_t done, size_t all, double now, const std::string& line) {
    told = now;
    const double left = (now - start) * (double)(all - done) / (double)done;
    fprintf(stderr, terminal ? "\r%s, %.0f s left   " : "%s, %.0f s left\n", line.c_str(), left);
}
