#include "base/temporary.h"
#include "base/error.h"
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

static std::string made_folder() {
    const char* place = getenv("TMPDIR");
    std::string name = std::string(place && *place == '/' ? place : "/tmp") + "/qwen3.XXXXXX";
    if (!mkdtemp(name.data())) DIE("%s: %s", name.c_str(), strerror(errno));
    return name;
}

TemporaryFolder::TemporaryFolder() : path(made_folder()), unfinished(path) {}

TemporaryFolder::~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
}
