// lab/: attention and the products of decoding: every step gives what its definition gives, at odd sizes, by emulation
// (see test_lab.cpp); the definition of the gradients; sums that have the same bits each time.
#define LAB_NO_MAIN
#include "../../lab/attention.cu"
#include "../../lab/decode.cu"
#include "../laboratory.h"

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
