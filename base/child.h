// base/child.h: a program in a process group of its own, whose output is read here.
#pragma once
#include "base/file.h"
#include <csignal>
#include <poll.h>
#include <sys/wait.h>
#include <vector>

struct Child {
    pid_t pid;
    int out; // the read end of its output

    // words: the program, its arguments. input: its standard input; -1: empty, not our terminal. both: its standard
    // error goes where its output goes. run: execvp looks for the program in PATH, execv takes the name as it is. If
    // run fails, the child reports why on its standard error.
    Child(const std::vector<std::string>& words, int input, bool both, int (*run)(const char*, char* const*));
    Child(const Child&) = delete;
    ~Child() { close(out); }

    // It may live on after it has closed its output.
    bool has_ended() const;
    // Kills its process group before the pid can be reused. Call it once. Returns the status of waitpid.
    int end() const;
};
