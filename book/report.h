// book/report.h: a step's messages on stderr: progress, and the dropped rows with the reasons; and Ctrl-C.
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

// A progress line on stderr, overwritten once a second; if it is no terminal, a new line every ten seconds.
struct Progress {
    const bool terminal = isatty(2);
    const double start = seconds();
    double told = start;

    ~Progress() { if (terminal && told > start) fputc('\n', stderr); }
    bool due(); // whether to write another line now
    void line(const std::string& text) const;
    void show(const char* what, size_t rows, double share);
};

// Dropped rows: counted by rule, in the order in which the rules were named, and written with their rule to a file.
struct Report {
    struct Rule {
        std::string name;
        size_t dropped = 0;
        double seconds = 0;     // time spent on the rule
        std::string first = {}; // why it dropped its first row
    };
    std::vector<Rule> rules;
    size_t kept = 0;
    Output side;
    const std::string path;

    Report(const std::string& side_path, const Strings& names);
    void drop(const std::string& rule, const std::string& why, const Reader& in);
    size_t dropped() const;
    // advice: for a rule that drops more than half, with its name in place of %s; null: no advice.
    void finish(const char* unit, const char* advice = nullptr);
};

} // namespace book
