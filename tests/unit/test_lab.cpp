// lab/: every step of every laboratory gives what its definition gives, at odd sizes, by emulation
// (data/course/emulate.h: threads one after the other, from the first to the last and from the last to the first).
#define LAB_NO_MAIN
#include "lab/matmul.cu"
#include "lab/reduce_scan.cu"
#include "lab/transpose_copy.cu"
#include "tests/emulate/laboratory.h"

TEST_CASE("lab: transpose_copy") {
    every_step(transpose_copy::laboratory(), {{1, 1, 1}, {67, 45, 1}, {32, 64, 1}, {33, 130, 1}});
    every_exercise(transpose_copy::laboratory());
    every_name(transpose_copy::laboratory());
}
// (130 x 260 x 200: tiles that are full and tiles that are not, for three blocks that take them in turn.)
TEST_CASE("lab: matmul") {
    every_step(matmul::laboratory(), {{1, 1, 1}, {130, 260, 200}});
    every_exercise(matmul::laboratory());
    every_name(matmul::laboratory());
}

TEST_CASE("lab: reduce_scan") {
    every_step(reduce_scan::laboratory(), {{1, 1, 1}, {9001, 2057, 1}});
    every_exercise(reduce_scan::laboratory());
    every_name(reduce_scan::laboratory());
}
// By emulation blocks run one after another, so all tiles before a block's have their full sum. Here most have not.
__global__ void both_ways(const unsigned long long* status, int tile, int* out) {
    const int before = reduce_scan::window(status, tile);
    out[threadIdx.x] = before;
    if (threadIdx.x == 0) out[32] = reduce_scan::walk(status, tile);
}
TEST_CASE("lab: looking back over tiles that know only their own sum") {
    for (int full : {0, 1, 41, 67, 98, 99})
        for (int tile : {100, 132}) {
            INFO("tile " << tile << ", the last full sum at " << full);
            Array<unsigned long long> status(tile);
            Array<int> out(33);
            int want = 0;
            for (int p = 0; p < tile; p++) {
                const bool all = p <= full;
                reduce_scan::publish(status, p, all ? reduce_scan::OF_ALL : reduce_scan::OF_TILE, all ? -1000 + p : -p);
                want = all ? -1000 + p : want - p;
            }
            launch(both_ways, dim3(1), dim3(32), 0, status, tile, out);
            for (int got : out.get()) CHECK(got == want);
        }
}
// The bank conflicts that the comments give, as emulate.h counts them: the most words of one bank that the lanes of a
// warp request.
TEST_CASE("lab: bank conflicts are as many as the steps say") {
    using namespace transpose_copy;
    CHECK(conflict_ways([](int lane) { return place<PLAIN>(lane, 5); }) == 32);
    CHECK(conflict_ways([](int lane) { return place<PADDED>(lane, 5); }) == 1);
    CHECK(conflict_ways([](int lane) { return place<SWIZZLED>(lane, 5); }) == 1);
    for (int k = 0; k < 4; k++) {
        CHECK(conflict_ways([&](int lane) { return place<SWIZZLED>(8 + lane / 8, lane % 8 * 4 + k); }) == 1);
        CHECK(conflict_ways([&](int lane) { return place<SWIZZLED>(lane % 8 * 4 + k, 8 + lane / 8); }) == 1);
        CHECK(conflict_ways([&](int lane) { return box_place(8 + lane % 2 * 4 + k, 16 + lane / 2); }) == 1);
    }
    // (of bf16 a word has two: step 9 reads pairs of 8 rows)
    CHECK(conflict_ways([](int lane) { return matmul::place<false>(lane / 4, lane % 4 * 2) / 2; }) == 8);
    for (int row = 0; row < 32; row += 8) // a quarter of ldmatrix: a row of 16 bytes from each of eight lanes
        CHECK(conflict_ways([&](int lane) { return matmul::place<true>(row + lane / 4, 24) / 2 + lane % 4; }) == 1);
    CHECK(conflict_ways([](int lane) { return reduce_scan::padded(lane * reduce_scan::EACH + 3); }) == 1);
}
TEST_CASE("lab: a wrong step ends the program with 1, a right one with 0") {
    using transpose_copy::Copy;
    Laboratory l("test", "the harness", {8, 8, 1}, {8, 8, 1});
    l.step<Copy>("right", "copies", [](Copy& m) { memcpy(m.out.p, m.in.p, m.in.n * sizeof(float)); }, COPY, "", "");
    l.step<Copy>("late", "all but the last", [](Copy& m) { memcpy(m.out.p, m.in.p, m.in.n * 4 - 4); }, COPY, "", "");
    l.step<Copy>("idle", "nothing", [](Copy&) {}, COPY, "", "");
    for (const auto& [step, status] : {std::pair{"1", 0}, {"2", 1}, {"3", 1}}) {
        std::string words[] = {"test", step, "--size", "12x5"};
        char* argv[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data()};
        CHECK(l.main(4, argv) == status);
    }
    CHECK(parse_shape("7").z == 7);
    CHECK(parse_shape("7x9").y == 9);
    CHECK(parse_shape("7x9x2").z == 2);
}
