// base/temporary.h: a folder for temporary files.
#pragma once
#include "base/unfinished.h"
#include <string>

// A new folder in TMPDIR or /tmp that only this user can read. It goes with its files, also by a signal.
struct TemporaryFolder {
    const std::string path;
    const Unfinished unfinished;

    TemporaryFolder();
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    ~TemporaryFolder();
};
