// With SUITES_ARE_PROGRAMS (Makefile) a suite that includes a whole program is that program as well, under its name:
// half of what sanitizers take to compile.
#pragma once
#include <map>
#include <string>

using Main = int (*)(int, char**);
std::map<std::string, Main>& programs(); // by name
inline bool add_program(const char* name, Main main) { return programs().emplace(name, main).second; }
