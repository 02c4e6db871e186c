// base/lost_file.h: a mapped file that another program cuts short ends ours with a line that names the file.
//
// Reading past the end of a file that has become shorter is SIGBUS. The handler knows what is mapped where, and writes
// PROGRAM: PATH: became shorter while it was in use; the exit status is 1. Any other SIGBUS is what it was.
#pragma once
#include <cstddef>
#include <string>

// The mapping of a file, until it is forgotten. (Of more than 1,024 at once the others have no name.)
void remember_mapping(const void* data, size_t bytes, const std::string& path);
void forget_mapping(const void* data);

// Sets the handler. Of programs only: a library leaves signals alone.
void name_lost_files(const char* program);
