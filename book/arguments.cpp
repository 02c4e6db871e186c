#include "book/arguments.h"
#include "base/file.h"
#include "base/json_lines.h"
#include "model/utf8.h"
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <sys/stat.h>
#include <unistd.h>

namespace book {

std::string Arguments::text(const std::string& name, const std::string& otherwise) const {
    return has(name) ? given.at(name) : otherwise;
}

std::string Arguments::need(const std::string& name) const {
    if (!has(name)) DIE("%s is needed", name.c_str());
    return given.at(name);
}

size_t Arguments::number(const std::string& name, size_t otherwise, size_t low, size_t high) const {
    if (!has(name)) return otherwise;
    const std::string& s = given.at(name);
    errno = 0;
    const unsigned long long n = strtoull(s.c_str(), nullptr, 10);
    if (s.empty() || s.find_first_not_of("0123456789") != s.npos || errno || n < low || n > high)
        DIE("%s %s: expected a whole number from %zu to %zu", name.c_str(), s.c_str(), low, high);
    return (size_t)n;
}

std::string Arguments::dropped() const {
    if (files[0] == "-" && !has("--dropped")) DIE("--dropped is needed, since standard input has no name");
    return text("--dropped", files[0] + ".dropped");
}

std::string Arguments::data(const std::string& name) const {
    if (has("--data")) return given.at("--data") + "/" + name;
    return beside("data/datagen/" + name);
}

std::string Arguments::beside(const std::string& name) {
    if (access(name.c_str(), F_OK) == 0) return name;
    const std::string there = program_folder() + "/" + name;
    return access(there.c_str(), F_OK) == 0 ? there : name;
}

std::string Arguments::beside_program(const std::string& name) {
    std::string folder = program_folder();
    for (int up = 0; up < 4 && !folder.empty(); up++) { // (build/MODE/tests is three below the repository)
        if (access((folder + "/" + name).c_str(), F_OK) == 0) return folder + "/" + name;
        folder.resize(folder.find_last_of('/'));
    }
    DIE("%s: not in the program's folder, nor in the three above it", name.c_str());
}
std::string Arguments::filter() const {
    return has("--data") ? given.at("--data") + "/book.lua" : beside_program("data/datagen/book.lua");
}

void for_each_line(const std::string& path, const std::function<void(std::string_view line, size_t number)>& f) {
    struct stat st;
    if (stat(path.c_str(), &st) == 0 && st.st_size == 0 && (S_ISREG(st.st_mode) || S_ISCHR(st.st_mode))) return;
    const MappedFile file(path);
    each_numbered_line(file.text(), [&](std::string_view line, size_t number) {
        line = line.substr(0, line.find(';'));
        const size_t first = std::min(line.find_first_not_of(" \t\r"), line.size());
        line = line.substr(first, line.find_last_not_of(" \t\r") + 1 - first);
        for (size_t i = 0; i < line.size(); i++)
            if (int k = utf8_length(&line[i], line.size() - i); k > 0) i += (size_t)k - 1;
            else DIE("%s: line %zu: invalid UTF-8", path.c_str(), number);
        if (!line.empty()) f(line, number);
    });
}

Limits::Limits(const Arguments& a) : path(a.data("limits.txt")) {
    for_each_line(path, [&](std::string_view line, size_t number) {
        const std::string all(line), name = all.substr(0, all.find(' '));
        char* end;
        const double x = strtod(all.c_str() + name.size(), &end);
        if (*end || name.size() == all.size() || !std::isfinite(x) || x < 0)
            DIE("%s: line %zu: expected a name and a number of 0 or more", path.c_str(), number);
        value[name] = x;
    });
}

double Limits::operator[](const char* name) const {
    const auto found = value.find(name);
    if (found == value.end()) DIE("%s: %s is missing", path.c_str(), name);
    return found->second;
}

} // namespace book
