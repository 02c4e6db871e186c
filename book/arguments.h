// book/arguments.h: the command line's values, and the lists of data/datagen/ that it names: limits and others.
#pragma once
#include "book/text.h"
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace book {

// The command line's values: files, and options by name.
struct Arguments {
    Strings files;
    std::map<std::string, std::string> given;

    bool has(const std::string& name) const { return given.count(name); }
    std::string text(const std::string& name, const std::string& otherwise = "") const;
    std::string need(const std::string& name) const;
    size_t number(const std::string& name, size_t otherwise, size_t low, size_t high) const;
    std::string output() const { return text("-o", "-"); }
    std::string dropped() const;
    // The path of a file in data/datagen/: in the working folder, otherwise beside the program; or in --data.
    std::string data(const std::string& name) const;
    std::string tokenizer() const { return text("-z", beside("tokenizer.bin")); }
    static std::string beside(const std::string& name);
    // A file that pandoc executes: in the program's folder or above it. Never in the current one, which a stranger may
    // have filled.
    static std::string beside_program(const std::string& name);
    std::string filter() const; // of pandoc: book.lua of --data, or beside the program
};

// Calls f with the lines of a list in data/datagen/, without comments (from ';' on) and surrounding blanks.
void for_each_line(const std::string& path, const std::function<void(std::string_view line, size_t number)>& f);

// data/datagen/limits.txt: a name and a number per line.
struct Limits {
    std::string path;
    std::map<std::string, double> value;
    explicit Limits(const Arguments& a);
    double operator[](const char* name) const;
    size_t count(const char* name) const { return (size_t)std::min((*this)[name], 1e12); }
};

} // namespace book
