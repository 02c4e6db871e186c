// cli/state.h: the folder that keeps lines and conversations from one chat to the next.
#pragma once
#include <string>
#include <string_view>

namespace cli {

// The user's lines and the conversations that nobody saved, for this user's eyes only. "": there is no home for it.
std::string state_folder();
// The same, made if it is not there. Throws Error.
std::string make_state_folder();
// A file that only this user may read.
void write_private(const std::string& path, std::string_view text);

// ~ as a shell has it.
std::string expanded(const std::string& path);

} // namespace cli
