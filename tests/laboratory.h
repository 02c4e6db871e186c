// What each laboratory must do, at odd sizes and by emulation (data/course/emulate.h): every step gives what its
// definition gives, with the threads one after the other from the first to the last and from the last to the first.
#pragma once
#include "../lab/lab.h"
#include <doctest/doctest.h>

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
