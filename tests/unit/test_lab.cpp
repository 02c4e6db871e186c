// lab/: every step of every laboratory gives what its definition gives, at odd sizes, by emulation (data/course/emulate.h:
// threads one after the other, from the first to the last and from the last to the first).
#define LAB_NO_MAIN
#include "../../lab/matmul.cu"
#include "../../lab/transpose_copy.cu"
#include <doctest/doctest.h>

using namespace lab;
using namespace std::literals;

static void every_step(const Laboratory& l, std::initializer_list<Shape> shapes) {
    for (const Step& step : l.steps)
        for (const Shape& shape : shapes) {
            const auto p = step.make(shape);
            for (bool order : {false, true}) {
                INFO(l.name << " " << step.name << " at " << shape.x << "x" << shape.y << "x" << shape.z
                            << ", threads " << (order ? "backwards"s : "forwards"s));
                backwards = order;
                const double error = Laboratory::try_step(step, *p);
                backwards = false;
                CHECK(error <= p->tolerance);
                p->spoil();
                CHECK_FALSE(p->error() <= p->tolerance); // (a step that writes nothing would be found)
            }
        }
}
// The answer to each exercise is a number, and another is refused.
static void every_exercise(Laboratory l) {
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

TEST_CASE("lab: transpose_copy") {
    every_step(transpose_copy::laboratory(), {{1, 1, 1}, {67, 45, 1}, {32, 64, 1}, {33, 130, 1}});
    every_exercise(transpose_copy::laboratory());
}
// (130 x 260 x 200: tiles that are full and tiles that are not, for three blocks that take them in turn.)
TEST_CASE("lab: matmul") {
    every_step(matmul::laboratory(), {{1, 1, 1}, {70, 41, 51}, {130, 260, 200}});
    every_exercise(matmul::laboratory());
}
