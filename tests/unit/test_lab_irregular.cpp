// lab/: the laboratories of neighbours, sparse matrices, launches, few bits and spikes: every step gives what its
// definition gives, at odd sizes, by emulation (see test_lab.cpp); the definitions themselves, and the kernels that
// stand in the course's notes too.
#define LAB_NO_MAIN
#include "lab/convolution_stencil.cu"
#include "lab/dynamic.cu"
#include "lab/low_precision.cu"
#include "lab/snn.cu"
#include "lab/sparse.cu"
#include "lab/waves.cu"
#include "tests/files.h"
#include "tests/emulate/laboratory.h"
#include <regex>

TEST_CASE("lab: convolution_stencil") {
    using namespace convolution_stencil;
    const Laboratory l = laboratory();
    every_step(l, {{45, 13, 9}, {3, 3, 1}});
    every_step_of(l, Image(70, 37));
    every_step_of(l, Image(5, 41));
    every_step_of(l, Layer(3, 5, 7));
    every_step_of(l, Layer(5, 70, 9));
    // Planes in several parts: a thread walks 4 of 11.
    Grid g(13);
    for (auto kernel : {stencil_registers, stencil_slide}) {
        g.spoil();
        launch(kernel, dim3(1, 2, 3), dim3(TX, TY), 0, g.in, g.out, g.N, 4, g.c0, g.c1);
        CHECK(g.error() == 0);
    }
    every_exercise(l);
    every_name(l);
}
TEST_CASE("lab: sparse") {
    using namespace sparse;
    const Laboratory l = laboratory();
    every_step(l, {{1, 1, 1}, {197, 101, 13}, {300, 150, 40}, {5, 50, 700}});
    // Empty rows at both ends and between, and one that goes through several blocks of spmv_merge.
    for (auto lengths :
         {std::vector<int>{0, 0, 5, 0, 5000, 1, 0, 0, 9, 0}, std::vector<int>(2500, 0), {1, 1023, 1022}}) {
        every_step_of(l, Skewed(Host((int)lengths.size(), 77, lengths, 77)));
        every_step_of(l, Even(Host((int)lengths.size(), 77, lengths, 77)));
    }
    every_exercise(l);
    every_name(l);
}
TEST_CASE("lab: waves") {
    using namespace waves;
    const Laboratory l = laboratory();
    every_step_of(l, OneWave({50, 1, 1}));
    every_step_of(l, OneMore({53, 1, 1}));
    every_step_of(l, OneMore({1, 1, 1}));
    every_step_of(l, Numbers(size_t(30011)));
    every_step_of(l, Launched({1, 1, 1}));
    every_step_of(l, Graphed({1, 1, 1}));
    every_step_of(l, Pieces({20, 1, 1}));
    every_step_of(l, Gate(size_t(777)));
    every_step_of(l, Training(size_t(777)));
    every_exercise(l);
    every_name(l);
}
TEST_CASE("lab: dynamic") {
    every_step(dynamic::laboratory(), {{29, 150, 300}, {3, 5000, 7}});
    every_exercise(dynamic::laboratory());
    every_name(dynamic::laboratory());
}
TEST_CASE("lab: snn") {
    every_step(snn::laboratory(), {{1, 1, 1}, {70, 45, 9}, {1100, 20, 2}});
    every_exercise(snn::laboratory());
    every_name(snn::laboratory(), false);
}
TEST_CASE("lab: snn follows a kernel's spikes, and finds those that its potential does not say") {
    using namespace snn;
    const Laboratory l = laboratory();
    Forward p({70, 45, 9});
    CHECK(Laboratory::try_step(l.steps[4], p) <= p.tolerance);
    const auto u = p.u.get();
    const auto s = p.s.get();
    const size_t spikes = std::count(s.begin(), s.end(), 1);
    CHECK(spikes > s.size() / 50);
    CHECK(spikes < s.size() / 2);
    for (size_t k : {size_t(0), s.size() / 2, s.size() - 1}) {
        p.s.p[k] ^= 1;
        CHECK(p.error() > 1); // (u >= 1 says something else)
        p.s.p[k] ^= 1;
        p.u.p[k] += 0.001f;
        CHECK(p.error() > 0.0009);
        p.u.p[k] = u[k];
    }
    CHECK(p.error() <= p.tolerance);
}
TEST_CASE("lab: low_precision") {
    every_step(low_precision::laboratory(), {{37, 200, 1}, {1, 1, 1}, {9, 700, 1}});
    every_exercise(low_precision::laboratory());
    every_name(low_precision::laboratory());
}
// Against a search through all codes, and with the bits where a kernel puts them.
TEST_CASE("lab: low_precision's E4M3 is the nearest") {
    using namespace low_precision;
    for (unsigned code = 0; code < 256; code++)
        if ((code & 0x7f) != 0x7f) {
            CHECK(e4m3(code) == from_e4m3(code));
            CHECK(from_e4m3(to_e4m3(from_e4m3(code))) == from_e4m3(code));
        }
    CHECK(from_e4m3(0x7e) == 448);
    CHECK(from_e4m3(0x01) == std::ldexp(1.f, -9));
    CHECK(from_e4m3(to_e4m3(1e9f)) == 448);
    CHECK(from_e4m3(to_e4m3(17)) == 16); // a tie: to the even code
    CHECK(from_e4m3(to_e4m3(-19)) == -20);
    for (float w : random_numbers(500, 5)) {
        w *= std::ldexp(w, 9);
        double least = INFINITY;
        for (unsigned code = 0; code < 256; code++)
            if ((code & 0x7f) != 0x7f) least = std::min(least, std::fabs((double)from_e4m3(code) - w));
        INFO(w);
        CHECK(std::fabs((double)from_e4m3(to_e4m3(w)) - w) == least);
    }
}
// With fire(u) = x / (1 + ALPHA |x|), x = u - 1, in place of the step, fire' is the surrogate, and the network has a
// true gradient.
TEST_CASE("lab: snn's gradient is that of the network whose spikes are soft") {
    using namespace snn;
    Forward l({6, 3, 5});
    const std::vector<float> noise = random_numbers((size_t)l.T * B * l.O, 9);
    const std::vector<double> g(noise.begin(), noise.end());
    std::vector<double> w(l.weights.begin(), l.weights.end()), u(g.size());
    const auto loss = [&] { // sum of g s
        double sum = 0;
        for (int t = 0; t < l.T; t++)
            for (int b = 0; b < B; b++)
                for (int o = 0; o < l.O; o++) {
                    const auto fire = [](double v) { return (v - 1) / (1 + ALPHA * std::fabs(v - 1)); };
                    const size_t row = (size_t)t * B + b, k = row * l.O + o, before = k - (size_t)B * l.O;
                    u[k] = t ? BETA * (u[before] - fire(u[before])) : 0;
                    for (int i = 0; i < l.I; i++) u[k] += l.dense[row * l.I + i] * w[i * l.O + o];
                    sum += g[k] * fire(u[k]);
                }
        return sum;
    };
    loss();
    const auto d = Backward::gradient(u, g, (size_t)B * l.O);
    double most = 0;
    for (int i = 0; i < l.I; i++)
        for (int o = 0; o < l.O; o++) {
            double dw = 0;
            for (int r = 0; r < l.T * B; r++) dw += l.dense[(size_t)r * l.I + i] * d[(size_t)r * l.O + o];
            const double at = w[i * l.O + o], h = 1e-5;
            w[i * l.O + o] = at + h;
            const double above = loss();
            w[i * l.O + o] = at - h;
            const double below = loss();
            w[i * l.O + o] = at;
            INFO("weight " << i << ", " << o);
            CHECK(dw == doctest::Approx((above - below) / (2 * h)).epsilon(1e-5));
            most = std::max(most, std::fabs(dw));
        }
    CHECK(most > 0.1);
}
static std::string without_comments(const std::string& code) {
    return std::regex_replace(code, std::regex("\n *//[^\n]*| *//[^\n]*"), ""); // (a line of its own goes)
}
// Kernels that the course's notes have are the laboratories' own: one source, seen twice, with comments in two languages.
TEST_CASE("lab: kernels of the notes") {
    struct Shared { const char *note, *lab; std::vector<std::string> kernels; };
    for (const Shared& s : {Shared{"07-convolution", "convolution_stencil", {"conv2d_const", "conv2d_tiled", "im2col"}},
                            {"18-stencil", "convolution_stencil", {"stencil_basic", "stencil_slide"}},
                            {"09-sparse-matrices", "sparse",
                             {"spmv_coo", "spmv_csr_scalar", "spmv_csr_warp", "spmv_ell"}},
                            {"10-dynamic-parallelism", "dynamic", {"child", "parent", "persistent", "step"}},
                            {"15-low-precision-and-optimisation", "waves", {"swiglu"}},
                            {"15-low-precision-and-optimisation", "low_precision", {"gemv_int4"}}}) {
        std::string note = without_comments(read_file("data/course/notes/"s + s.note + ".md"));
        const std::string lab = without_comments(read_file("lab/"s + s.lab + ".cu"));
        const auto replace = [&](const std::string& from, const std::string& to) { // what cannot be the same
            for (size_t at; (at = note.find(from)) != std::string::npos;) note.replace(at, from.size(), to);
        };
        replace("taps[", "filt[");
        replace("child<<<(n + 255) / 256, 256>>>(data",
                "LAUNCH(child, (n + 255) / 256, 256, cudaStreamFireAndForget, data");
        for (const std::string& kernel : s.kernels) {
            INFO(s.note << ": " << kernel);
            size_t from = note.find("__global__ void " + kernel + "(");
            while (from != std::string::npos && note.find('{', from) > note.find(';', from))
                from = note.find("__global__ void " + kernel + "(", from + 1); // (a declaration)
            REQUIRE(from != std::string::npos);
            CHECK(lab.find(note.substr(from, note.find("\n}\n", from) + 3 - from)) != std::string::npos);
        }
    }
}
