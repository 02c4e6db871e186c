// base/lost_file.h: a mapped file that another program cuts short ends ours with a line that names the file.
//
// Reading past the end of a file that has become shorter raises SIGBUS. The handler looks the address up and writes
// PROGRAM: PATH: became shorter while it was in use; the exit status is 1. Any other SIGBUS has its default effect.
#pragma once
#include <cstddef>
#include <string>

// Records the mapping of a file until it is forgotten. (At most 1,024 at once; further ones are not named.)
void remember_mapping(const void* data, size_t bytes, const std::string& path);
void forget_mapping(const void* data);

// Sets the handler. Only programs call it: a library must not change signals.
void name_lost_files(const char* program);
