// base/unfinished.h: files and folders under temporary names. A signal that ends the program removes them.
//
//   const Unfinished name(path);    before the file or folder is made; until it is renamed or removed
//   end_on_signals()                called by every main (run_program)
#pragma once
#include <string>

// A name in a table that a signal handler can read. (At most 256 at once; further ones, and names of more than 4,095
// bytes, stay when a signal comes.) Names of a parent process are not a child's.
struct Unfinished {
    explicit Unfinished(const std::string& path);
    Unfinished(const Unfinished&) = delete;
    ~Unfinished();

    struct Slot;

  private:
    Slot* slot;
};

// SIGINT, SIGTERM, SIGHUP and the other signals that end a program from outside remove the table's files, then have
// their default effect. Ignored signals, and those with a handler, stay as they are. Only programs call it: a library
// must not change signals.
void end_on_signals();

// For handlers of signals.
void remove_unfinished();
[[noreturn]] void leave(int status); // without destructors
[[noreturn]] void end_by_signal(int signal);
