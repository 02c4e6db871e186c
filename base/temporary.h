// base/temporary.h: a folder for temporary files.
#pragma once
#include <string>

// A new folder in TMPDIR or /tmp that only this user can read. It goes with its files.
struct TemporaryFolder {
    const std::string path;

    TemporaryFolder();
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    ~TemporaryFolder();
};
