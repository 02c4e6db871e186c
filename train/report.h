// train/report.h: report.html: the curve, the recipe and the answers of a run, as one file to hand in.
#pragma once
#include "train/log.h"
#include <cstdint>
#include <string>
#include <vector>

struct RunFacts {
    std::string title, what, units, command; // what: "loss" or "reward"; units: "15 rows"
    std::vector<std::string> lines;          // about model, data and memory, as printed before the first step
    int64_t steps;                           // in all
};

// The first event of a page that shows the run live (train/watch.h).
std::string about_event(const RunFacts& run);

// A sentence about the run so far; elapsed: s.
std::string summary(const RunFacts& run, const TrainLog& log, int64_t step, double elapsed);

// The page loads nothing and has no script.
void write_report(const RunFacts& run, const TrainLog& log, const std::string& summary);
