// lab/: attention and the products of decoding: every step gives what its definition gives, at odd sizes, by emulation
// (see test_lab.cpp); the definition of the gradients; sums that have the same bits each time.
#define LAB_NO_MAIN
#include "lab/attention.cu"
#include "lab/decode.cu"
#include "tests/emulate/laboratory.h"

static const Step& named(const Laboratory& l, const std::string& name) {
    for (const Step& step : l.steps)
        if (step.name == name) return step;
    FAIL("no step " << name);
    abort();
}
TEST_CASE("lab: attention") {
    using namespace attention;
    const Laboratory l = laboratory();
    every_step(l, {{1, 1, 1}, {9, 4, 2}, {33, 2, 1}});
    // Several tiles, the last one cut; three heads that share a KV head, so that two groups differ in their tokens.
    for (const char* name : {"mma.sync", "wgmma, TMA", "ping-pong"})
        for (Shape shape : {Shape{133, 2, 1}, {70, 3, 1}}) {
            INFO("at " << shape.x << "x" << shape.y << "x" << shape.z);
            try_both_orders(l, named(l, name), *named(l, name).make(shape));
        }
    Gradients g({70, 3, 1});
    try_both_orders(l, named(l, "backward: mma.sync"), g);
    every_exercise(l);
    every_name(l);
}
TEST_CASE("lab: attention's gradients are the slopes of its definition") {
    using namespace attention;
    Gradients p({9, 2, 1});
    p.error();
    const auto loss = [&] {
        double sum = 0, out[D];
        for (int n = 0; n < p.T; n++)
            for (int h = 0; h < p.H; h++) {
                const size_t row = ((size_t)n * p.H + h) * D;
                p.attend(&p.q[row], h, n, out);
                for (int d = 0; d < D; d++) sum += out[d] * p.dout[row + d];
            }
        return sum;
    };
    const int width = (p.H + 2 * p.K) * D;
    for (int i = 0; i < p.T * width; i += 97) {
        const int n = i / width, head = i % width / D, d = i % D;
        float& x = head < p.H ? p.q[((size_t)n * p.H + head) * D + d]
                              : (head == p.H ? p.k : p.v)[(size_t)n * D + d];
        const float before = x;
        double slope = 0;
        for (double step : {1. / 64, -1. / 64}) x = (float)(before + step), slope += loss() * (step > 0 ? 32 : -32);
        x = before;
        INFO("token " << n << " head " << head << " at " << d << ": " << p.want[i] << ", slope " << slope);
        CHECK(std::fabs(slope - p.want[i]) < p.bound[i] + 1e-4); // (out was rounded; step^2)
    }
}
TEST_CASE("lab: attention's gradients in order have the same bits each time, those by atomics have not") {
    using namespace attention;
    const Laboratory l = laboratory();
    Gradients p({17, 2, 1});
    const auto bits = [&](const char* name, auto get) { // in both orders of the threads
        std::string both[2];
        for (bool order : {false, true}) {
            backwards = order;
            named(l, name).run(p);
            backwards = false;
            const auto numbers = get();
            both[order].assign((const char*)numbers.data(), numbers.size() * sizeof numbers[0]);
        }
        return std::pair(both[0], both[1]);
    };
    for (const char* name : {"backward: in order", "backward: mma.sync"}) {
        const auto [one, other] = bits(name, [&] { return p.dqkv.get(); });
        INFO(std::string(name));
        CHECK(one == other);
    }
    const auto [one, other] = bits("backward: atomics", [&] { return p.sums->get(); });
    CHECK(one != other);
}

TEST_CASE("lab: decode") {
    const Laboratory l = decode::laboratory();
    every_step(l, {{1, 1, 1}, {3, 48, 1}, {1, 272, 1}});
    for (const char* name : {"bulk copies", "one kernel"}) // rows of two pieces
        try_both_orders(l, named(l, name), *named(l, name).make({1, 1040, 1}));
    every_exercise(l);
    every_name(l);
}
TEST_CASE("lab: decode's sums are exact, and each product turns its input round") {
    using namespace decode;
    Chain p({3, 64, 1});
    p.define();
    for (int r = 0; r < p.C; r++) {
        int from = r / 2, sign = 1;
        for (int l = p.L - 1; l >= 0; l--) sign *= (from * 13 + l) % 2 ? 1 : -1, from = (from + 7 * l + 3) % (p.C / 2);
        CHECK(p.want[r] == sign * __bfloat162float(p.first[2 * from]));
    }
}

// The figures are invented, to try the format: no GPU has made them.
TEST_CASE("lab: the table becomes a picture and fills a page") {
    Laboratory l("decode", "invented", {64, 2048, 1}, {1, 1, 1});
    struct Invented : Problem {
        explicit Invented(Shape) { bytes = 1e9, flops = 2e12; }
        void spoil() override {}
        double error() override { return 0; }
    } p({1, 1, 1});
    l.step<Invented>("a thread a row", "one loop", [](Invented&) {}, READ, "", "");
    l.step<Invented>("a name of 22 letters <", "the product", [](Invented&) {}, TENSOR, "", "");
    std::string table = "decode: an invented GPU, 64x2048x1\nceilings, measured now: read 1 GB/s\n    library: cuBLAS\n";
    table += table_row(1, l.steps[0], 0.01, p, 1e12, 0, 0) + "\n";      // 100 GB/s of 1,000
    table += table_row(2, l.steps[1], 0.0005, p, 5e15, 0.0004, 1) + "\n"; // 4,000 of 5,000 TFLOP/s, the library 5,000
    table += " 3  wrong one              WRONG: error 1\n10  one kernel             needs sm_90a\n";
    Scratch s;
    write_file(s / "table", table);
    write_file(s / "page.md", "## other\n\n| 1 a thread a row | x | y | not run yet |\n\n## decode\n\n| step | what | look | H100 |\n"
                              "|---|---|---|---|\n| 1 a thread a row | x | y | not run yet |\n| 2 another | x | y | not run yet |\n"
                              "| 10 one kernel | x | y | not run yet |\n");
    const auto run = [&](Strings files) { return Process("/usr/bin/env", Strings{"python3", "lab/plot.py"} + files).wait(); };
    for (int again = 0; again < 2; again++) { // (the second time changes nothing)
        const Result r = run({s / "table", s / "lab-decode.svg", s / "page.md"});
        INFO(r.err);
        REQUIRE(r.status == 0);
        CHECK(r.out == s / "page.md" + ": 2 of decode's 4 steps\n");
        CHECK(read_file(s / "page.md") ==
              "## other\n\n| 1 a thread a row | x | y | not run yet |\n\n## decode\n\n"
              "![decode: each step's share of the ceiling](lab-decode.svg)\n\n| step | what | look | H100 |\n|---|---|---|---|\n"
              "| 1 a thread a row | x | y | 10.00 ms, 100.0 GB/s, 10.0% |\n| 2 another | x | y | not run yet |\n"
              "| 10 one kernel | x | y | needs sm_90a |\n");
    }
    const std::string picture = read_file(s / "lab-decode.svg");
    INFO(picture);
    CHECK(picture.find("viewBox=\"0 0 920 178\"") != picture.npos); // four steps
    CHECK(picture.find("@media(prefers-color-scheme:dark)") != picture.npos);
    CHECK(picture.find("<rect class=\"bar\" x=\"210\" y=\"45\" width=\"44.0\"") != picture.npos); // 10% of 440
    CHECK(picture.find("<rect class=\"last\" x=\"210\" y=\"71\" width=\"352.0\"") != picture.npos); // 80%
    CHECK(picture.find("<path class=\"library\" d=\"M650.0 68v24\"/>") != picture.npos); // 100%
    CHECK(picture.find("2 a name of 22 letters &lt;</text>") != picture.npos);
    CHECK(picture.find("500.0 us · 4000.0 TFLOP/s · 80.0%") != picture.npos);
    CHECK(picture.find(">WRONG</text>") != picture.npos);
    CHECK(picture.find("NaN") == picture.npos);
    write_file(s / "empty", "decode, by emulation on the CPU at 3x48x1: right or wrong.\n 1  a thread a row right\n");
    const Result r = run({s / "empty", s / "none.svg"});
    CHECK(r.status == 1);
    CHECK(r.err == s / "empty" + ": no step with a time in it: the laboratory must have run on a GPU\n");
    CHECK(!fs::exists(s / "none.svg"));
    CHECK(s.count() == 4); // nothing temporary
}
