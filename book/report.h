// book/report.h: what a step says on stderr: progress, and which rows were not passed on and why; and Ctrl-C.
#pragma once
#include "base/error.h"
#include "book/rows.h"
#include "book/text.h"
#include <string>
#include <unistd.h>
#include <vector>

namespace book {

struct Interrupted {}; // thrown where it is safe to stop; main returns 130
void stop_if_interrupted();

void say(const std::string& line);

// A line on stderr that is written over once a second; on anything but a terminal a new one every ten.
struct Progress {
    const bool terminal = isatty(2);
    const double start = seconds();
    double told = start;

    ~Progress() { if (terminal && told > start) fputc('\n', stderr); }
    bool due(); // is it time for another line? It will be written.
    void line(const std::string& text) const;
    void show(const char* what, size_t rows, double share);
};

// Rows that are not passed on: counted by rule in the order the rules were named, kept with their rule in a file.
struct Report {
    struct Rule {
        std::string name;
        size_t dropped = 0;
        double seconds = 0;     // spent on it
        std::string first = {}; // why it dropped its first row
    };
    std::vector<Rule> rules;
    size_t kept = 0;
    Output side;
    const std::string path;

    Report(const std::string& side_path, const Strings& names);
    void drop(const std::string& rule, const std::string& why, const Reader& in);
    size_t dropped() const;
    // advice: what to do about a rule that drops more than half, with its name where %s is; null: that is no matter.
    void finish(const char* unit, const char* advice = nullptr);
};

} // namespace book
