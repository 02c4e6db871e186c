// base/child.h: a program in a process group of its own, whose output is read here.
#pragma once
#include "base/file.h"
#include <csignal>
#include <poll.h>
#include <sys/wait.h>
#include <vector>

struct Child {
    pid_t pid;
    int out; // what it writes comes here

    // words: the program, its arguments. input: its standard input, or -1: empty, and not our terminal. both: its
    // standard error goes where its output goes.
    // run: execvp looks for the program in PATH, execv takes the name as it is. What fails in the child is told there.
    Child(const std::vector<std::string>& words, int input, bool both, int (*run)(const char*, char* const*));
    Child(const Child&) = delete;
    ~Child() { close(out); }

    // It may live on after it has closed its output.
    bool has_ended() const;
    // Ends it and all that it has started, before its number may become another's. Once. Its status, as of waitpid.
    int end() const;
};
