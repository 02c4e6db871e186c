// Requirements of each laboratory, at odd sizes and by emulation (tests/emulate/emulate.h): every step gives the result
// of its definition, with the threads one after the other from the first to the last and from the last to the first.
#pragma once
#include "lab/lab.h"
#include "tests/process.h"
#include <doctest/doctest.h>
#include <regex>

using namespace lab;
using namespace std::literals;

inline void try_both_orders(const Laboratory& l, const Step& step, Problem& p) {
    for (bool order : {false, true}) {
        INFO(l.name << " " << step.name << ", threads " << (order ? "backwards"s : "forwards"s));
        backwards = order;
        const double error = Laboratory::try_step(step, p);
        backwards = false;
        CHECK(error <= p.tolerance);
        p.spoil();
        CHECK_FALSE(p.error() <= p.tolerance); // (a step that writes nothing would be found)
    }
}
inline void every_step(const Laboratory& l, std::initializer_list<Shape> shapes) {
    for (const Step& step : l.steps)
        for (const Shape& shape : shapes) {
            INFO("at " << shape.x << "x" << shape.y << "x" << shape.z);
            try_both_orders(l, step, *step.make(shape));
        }
}
// The steps of one kind, on a problem of any size.
template <class P> void every_step_of(const Laboratory& l, P&& p) {
    for (const Step& step : l.steps)
        if (step.kind == typeid(p)) try_both_orders(l, step, p);
}
// The answer to each exercise is a number, and another is refused.
inline void every_exercise(Laboratory l) {
    CHECK(l.exercises.size() == 3);
    for (size_t k = 1; k <= l.exercises.size(); k++) {
        const double answer = l.exercises[k - 1].answer();
        for (double given : {answer, answer * 1.5 + 1}) {
            INFO(l.name << " exercise " << k << ": " << given);
            std::string words[] = {"lab", "--exercise", std::to_string(k), "--answer", std::to_string(given)};
            char* argv[5];
            for (int i = 0; i < 5; i++) argv[i] = words[i].data();
            CHECK(l.main(5, argv) == (given != answer));
        }
    }
}

// Pages that name steps name those that there are: a row of docs' tables for each step, in its order, and the course's
// notes ("`lab/NAME` 第 3 步（name）"). qwen3.cu's own steps are not in a build by g++.
inline void every_name(const Laboratory& l, bool in_notes = true) {
    const auto check = [&](const std::string& page, const std::string& number, const std::string& name) {
        INFO(page << ": lab/" << l.name << " has no step " << number << " " << name);
        const size_t k = std::stoul(number);
        CHECK((k <= l.steps.size() ? l.steps[k - 1].name == name : name.find("qwen3.cu") != name.npos));
    };
    for (const Step& step : l.steps) { // of the table that is printed
        INFO(step.name << ": " << step.adds);
        CHECK(step.name.size() <= 22);
        CHECK(step.adds.size() <= 52);
    }
    size_t rows = 0, links = 0;
    for (const char* page : {"docs/lab.md", "docs/lab-irregular.md"}) {
        bool inside = false;
        for (const std::string& line : lines(read_file(page))) {
            if (line.compare(0, 3, "## ") == 0 || line.compare(0, 2, "**") == 0)
                inside = line == "## " + l.name || line.compare(0, l.name.size() + 5, "**" + l.name + ".**") == 0;
            std::smatch found;
            if (!inside || !std::regex_search(line, found, std::regex("^\\| ([0-9]+) ([^|]*) \\| "))) continue;
            check(page, found[1], found[2]), rows++;
        }
    }
    CHECK(rows >= l.steps.size());
    const auto after = [](const std::string& text, size_t at, const char* what) { // the place behind it, or npos
        const size_t found = text.find(what, at);
        return found == text.npos ? found : found + strlen(what);
    };
    for (auto& note : fs::directory_iterator("data/course/notes"))
        for (const std::string& line : lines(read_file(note.path().string()))) {
            if (line.find("> 实验：") != 0) continue;
            for (size_t at = 0; (at = after(line, at, ("`lab/" + l.name + "` ").c_str())) != line.npos;) {
                const std::string part = line.substr(at, line.find("；", at) - at);
                for (size_t i = 0; (i = after(part, i, "第 ")) != part.npos; links++) {
                    const size_t from = after(part, i, "步（");
                    REQUIRE(from != part.npos);
                    check(note.path().string(), part.substr(i, part.find(' ', i) - i),
                          part.substr(from, part.find("）", from) - from));
                }
            }
        }
    CHECK((links > 0) == in_notes);
}
