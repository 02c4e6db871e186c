// cli/state.cpp: the folder that keeps lines and conversations from one chat to the next.
#include "cli/state.h"
#include "base/file.h"
#include <cstdio>
#include <cstdlib>
#include <sys/stat.h>

namespace cli {

std::string state_folder() {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    if (state && *state == '/') return std::string(state) + "/qwen3";
    if (home && *home == '/') return std::string(home) + "/.local/state/qwen3";
    return "";
}

std::string make_state_folder() {
    const std::string folder = state_folder();
    if (folder.empty()) DIE("neither XDG_STATE_HOME nor HOME names a folder");
    make_folder(folder.substr(0, folder.rfind('/')));
    mkdir(folder.c_str(), 0700);
    make_folder(folder); // throws Error with the reason if it is missing
    return folder;
}

void write_private(const std::string& path, std::string_view text) {
    OutputFile out(path);
    fchmod(fileno(out.file), 0600);
    out.write(text);
    out.commit();
}

std::string expanded(const std::string& path) {
    const char* home = getenv("HOME");
    const bool begins = path == "~" || path.compare(0, 2, "~/") == 0;
    return begins && home ? home + path.substr(1) : path;
}

} // namespace cli
