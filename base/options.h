// base/options.h: the command line of every program here. A program's options are one table, by which it parses and from
// which it prints --help.
//
//     std::vector<Option> table = {{"-o", "--output", "FILE", "where it goes", file_name(o.output)}, ...};
//     std::vector<std::string> words = parse(table, argc, argv);     arguments that are not options
//     print_help("usage: ...\n", table);
//     counted(2, "file")                                             "2 files"
//     told_version("qwen3", argc, argv)                              for --version
//
// Values follow as the next word or after `=` (--name=value); `--` ends the options; a lone - is no option.
#pragma once
#include "base/file.h"
#include "base/stop_flag.h"
#include "qwen3.h" // QWEN3_VERSION
#include <cctype>
#include <climits>
#include <csignal> // the numbers that take_signals takes
#include <functional>
#include <vector>

// ---- Ctrl-C
inline StopFlag interrupted = 0;

// Signals of `stop` set `interrupted`, and end the program when they come again. Those of `ignored` do nothing. So with
// SIGPIPE writing to a pipe without a reader is an error of write, as a full disk is; with SIGXFSZ a file at its limit.
void take_signals(std::initializer_list<int> stop, std::initializer_list<int> ignored);

// ---- Numbers
double parse_number(const char* option, const char* text, double low, double high);
int64_t parse_integer(const char* option, const char* text, int64_t low, int64_t high);

// ---- The table
// Applies an option's value ("" if it takes none). `option`: its name as the user wrote it.
using Setter = std::function<void(const char* option, const char* value)>;

struct Option {
    const char* brief; // "-o" or ""
    const char* name;  // "--output"; "": no option, but a heading of --help
    const char* value; // what --help calls its value; "": takes none; "A B": two; "[word]": the next word if it is this
    const char* help;  // a newline begins another line
    Setter set;
};

inline Setter flag(bool& to, bool value = true) { return [&to, value](const char*, const char*) { to = value; }; }
Setter text(std::string& to);              // valid UTF-8
Setter list(std::vector<std::string>& to); // the same, each time one more
Setter file_name(std::string& to);         // or of a folder
Setter existing(std::string& to);          // a file or folder that is read
Setter existing_file(std::string& to, bool or_stdin = false); // ... that can be mapped; or -, standard input
Setter output_file(std::string& to);       // that can be written
template <class Whole> Setter whole(Whole& to, int64_t low, int64_t high) {
    return [&to, low, high](const char* option, const char* v) { to = (Whole)parse_integer(option, v, low, high); };
}
template <class Float> Setter number(Float& to, double low, double high) {
    return [&to, low, high](const char* option, const char* v) { to = (Float)parse_number(option, v, low, high); };
}
Setter one_of(std::string& to, std::vector<std::string> names);

// Applies the words that are options; returns the others.
std::vector<std::string> parse(const std::vector<Option>& table, int argc, char** argv);

// "1 thread", "2 threads".
inline std::string counted(size_t n, const char* thing) { return format("%zu %s%s", n, thing, n == 1 ? "" : "s"); }

// Called when standard output took no more. If its reader has left, the program ends by SIGPIPE without a message, as
// other filters do; else Error.
[[noreturn]] void stdout_failed();
void write_stdout(std::string_view text);

// `PROGRAM --version`: prints the version and returns true if it was given.
bool told_version(const char* program, int argc, char** argv);

// Prints the table as --help.
std::string help_text(const std::vector<Option>& table);
inline void print_help(const char* usage, const std::vector<Option>& table) { write_stdout(usage + help_text(table)); }
