// cli/state.h: the folder that keeps lines and conversations from one chat to the next.
#pragma once
#include <string>
#include <string_view>

namespace cli {

// The folder for the user's lines and for conversations not saved explicitly, readable by this user only. "": no home
// folder.
std::string state_folder();
// The same, created if missing. Throws Error.
std::string make_state_folder();
// A file that only this user may read.
void write_private(const std::string& path, std::string_view text);

// ~ as a shell has it.
std::string expanded(const std::string& path);

} // namespace cli
