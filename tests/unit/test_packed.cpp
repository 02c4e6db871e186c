// The GPU's kernels for packed weights (packed.h) by emulation (tests/emulate/emulate.h): every byte of every format becomes
// its number, products of few tokens are those of W.at at odd sizes with either order of the threads, and what is
// unpacked for many tokens has the bits of W.at.
#include <doctest/doctest.h>
#include "model/fp8_activations.h"
#include "tests/emulate/packed_emulation.h"
#include "tests/packed.h"

TEST_CASE("every byte becomes its number, nothing is rounded: INT8, FP8, INT4 with every zero point") {
    auto numbers = [](uint4 pairs) {
        std::vector<float> y;
        for (uint32_t pair : {pairs.x, pairs.y, pairs.z, pairs.w}) y.push_back(low(pair)), y.push_back(high(pair));
        return y;
    };
    was_rounded = false;
    for (int value = 0; value < 256; value++) {
        uint8_t bytes[8];
        for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(value + 37 * i);
        uint2 v;
        memcpy(&v, bytes, 8);
        const auto int8 = numbers(PackedInt8::run(v, 0, 0)), fp8 = numbers(PackedFp8::run(v, 0, 0));
        for (int i = 0; i < 8; i++) {
            REQUIRE(int8[(size_t)i] == (int8_t)bytes[i]);
            if ((bytes[i] & 0x7f) != 0x7f) REQUIRE(fp8[(size_t)i] == e4m3_to_float(bytes[i]));
        }
        for (uint32_t zero = 0; zero < 16; zero++)
            for (int upper : {0, 1}) {
                const auto int4 = numbers(PackedInt4<1>::run(v, upper, zero));
                for (int i = 0; i < 8; i++) REQUIRE(int4[(size_t)i] == (bytes[i] >> 4 * upper & 15) - (int)zero);
            }
    }
    CHECK(!was_rounded);
    for (int h = 0; h < 65536; h++) // scales
        if ((h & 0x7c00) != 0x7c00) REQUIRE(PackedInt4<1>::to_float((uint16_t)h) == half_to_float((uint16_t)h));
}

struct Epilogue {
    static constexpr bool PAIR = false, ADDS = false;
    void begin() {}
    void end(int) {}
    float old(int, int) const { return 0; }
};
struct Store : Epilogue {
    float* out;
    int ld;
    Store(float* out, int ld) : out(out), ld(ld) {}
    void one(bool inside, int n, int r, float y, float) { if (inside) out[n * ld + r] = y; }
};
struct Add : Epilogue {
    static constexpr bool ADDS = true;
    float* out;
    int ld;
    Add(float* out, int ld) : out(out), ld(ld) {}
    float old(int n, int r) const { return (float)(n - r); }
    void one(bool inside, int n, int r, float y, float old) { if (inside) out[n * ld + r] = y + old; }
};
struct Pair : Epilogue { // gate and up, one behind the other
    static constexpr bool PAIR = true;
    float* out;
    int ld;
    Pair(float* out, int ld) : out(out), ld(ld) {}
    void one(bool inside, int n, int r, float y, float second) { if (inside) out[n * 2 * ld + r] = y, out[n * 2 * ld + ld + r] = second; }
};

// The kernel on a few blocks of some warps, into NaN.
template <int TILES, class E> static std::vector<float> product(const Linear<bf16>& W, const std::vector<bf16>& x, const int* rows, int N, int warps) {
    const int out = E::PAIR ? W.rows[0] : W.out();
    std::vector<float> y((size_t)N * W.out(), NAN);
    with_packing(W, [&](auto format) {
        using F = decltype(format);
        PackedArgs p = packed_args(W);
        const int step = 32 * F::RUNS, steps = (p.in + step - 1) / step;
        p.x = x.data(), p.rows = rows, p.N = N, p.out = out, p.steps = (steps + warps - 1) / warps;
        E epilogue(y.data(), out);
        launch(dim3(2), dim3((unsigned)warps * 32), [&] {
            if (N <= 8) packed_kernel<F, TILES, 1>(p, epilogue);
            else packed_kernel<F, TILES, 2>(p, epilogue);
        });
    });
    CHECK(!stuck);
    return y;
}
static std::vector<bf16> random_x(Random& random, size_t n) {
    std::vector<bf16> x(n);
    for (bf16& b : x) b = to_bf16((float)(2 * random.uniform() - 1));
    return x;
}
struct Want { double y, size; };
static Want product_at(const Linear<bf16>& W, const bf16* x, int r) {
    Want w = {};
    for (int i = 0; i < W.in; i++) {
        const double term = (double)W.at(r, i) * to_acc(x[i]);
        w.y += term, w.size += std::fabs(term);
    }
    return w;
}

TEST_CASE("packed products of few tokens are those of W.at: odd sizes, every format, blocks, either order of threads") {
    Random random{81};
    struct Shape { std::vector<int> rows; int in; };
    for (const PackedKind& kind : PACKED_KINDS)
        for (const Shape& shape : {Shape{{8}, 8}, Shape{{24, 8, 16}, 40}, Shape{{40, 40}, 72}, Shape{{16}, 136}, Shape{{32}, 1096}})
            for (int N : {1, 8, 9, 16}) {
                if (shape.in > 1024 && N != 1 && N != 9) continue;
                const PackedLinear<bf16> host(random, kind.format, kind.group, kind.zeros, shape.rows, shape.in);
                const Uploaded on(host);
                const int out = host.out(), in = shape.in;
                const auto x = random_x(random, (size_t)16 * in);
                std::vector<int> named;
                for (int n = 0; n < N; n++) named.push_back(15 - n);
                backwards = N % 2;
                CAPTURE((int)kind.format);
                CAPTURE(kind.group);
                CAPTURE(in);
                CAPTURE(out);
                CAPTURE(N);
                const auto wide = product<1, Store>(on.W, x, nullptr, N, 4), two = product<2, Store>(on.W, x, named.data(), N, 5);
                const auto added = product<2, Add>(on.W, x, nullptr, N, 4);
                std::vector<float> pair;
                if (shape.rows.size() == 2) pair = product<2, Pair>(on.W, x, nullptr, N, 4);
                backwards = false;
                int wrong = 0;
                for (int n = 0; n < N; n++)
                    for (int r = 0; r < out; r++) {
                        const Want a = product_at(host, &x[(size_t)n * in], r), b = product_at(host, &x[(size_t)(15 - n) * in], r);
                        const size_t at = (size_t)n * out + r;
                        wrong += !(std::fabs(wide[at] - a.y) <= 1e-6 * a.size), wrong += !(std::fabs(two[at] - b.y) <= 1e-6 * b.size);
                        wrong += !(std::fabs(added[at] - (n - r) - a.y) <= 1e-6 * (a.size + 50));
                        if (!pair.empty()) wrong += !(std::fabs(pair[at] - a.y) <= 1e-6 * a.size);
                    }
                CHECK(wrong == 0);
                if (N > 1) CHECK(memcmp(product<1, Store>(on.W, x, nullptr, 1, 4).data(), wide.data(), (size_t)out * 4) == 0); // whatever N is
            }
}

TEST_CASE("what goes to the tensor core from registers has the bits of the unpacked matrix") {
    Random random{82};
    long others = 0, all = 0;
    for (const PackedKind& kind : PACKED_KINDS) {
        const PackedLinear<bf16> host(random, kind.format, kind.group, kind.zeros, {40}, 1056);
        const Uploaded on(host);
        CAPTURE((int)kind.format);
        CAPTURE(kind.group);
        with_packing(on.W, [&](auto format) {
            using F = decltype(format);
            const PackedArgs p = packed_args(on.W);
            for (int r = 0; r < 40; r++)
                for (int k = 0; k < 1056; k += 8) {
                    float want[8];
                    unpack_run<F>(want, p, r, k);
                    uint2 v;
                    memcpy(&v, p.q + (size_t)r * p.row_bytes + F::byte(k), 8);
                    const uint32_t less = F::ZEROS ? 0xc300c300 | p.template zero_at<F>(r, k) * 0x00010001 : 0;
                    uint32_t words[F::WORDS];
                    F::scale_words(words, ((const typename F::Raw*)p.scale)[p.template scale_at<F>(r, k)]);
                    for (uint32_t t = 0; t < 4; t++) {
                        const uint32_t twice = __byte_perm(v.x, v.y, 0x1100 + 0x2222 * t);
                        const uint32_t got = F::scaled(F::pair(twice, F::RUNS == 2 ? k / 32 % 2 : 0, less), words);
                        const uint32_t pair = pack(want[2 * t], want[2 * t + 1]);
                        if (kind.format == Format::FP8) { // now and then the other way, where the middle is near
                            REQUIRE(std::fabs(low(got) - low(pair)) <= std::ldexp(std::fabs(low(pair)), -7));
                            REQUIRE(std::fabs(high(got) - high(pair)) <= std::ldexp(std::fabs(high(pair)), -7));
                            others += (low(got) != low(pair)) + (high(got) != high(pair)), all += 2;
                            continue;
                        }
                        REQUIRE(low(got) == low(pair)); // (a zero may have either sign)
                        REQUIRE(high(got) == high(pair));
                    }
                }
        });
    }
    CHECK(others * 100 < all);
}

TEST_CASE("unpacked for many tokens, and embedded: the bits of W.at, of any part of a matrix") {
    Random random{82};
    for (const PackedKind& kind : PACKED_KINDS)
        for (int in : {8, 40, 200}) {
            const PackedLinear<bf16> host(random, kind.format, kind.group, kind.zeros, {24, 7, 9}, in);
            const Uploaded on(host);
            for (int part : {0, 1}) {
                const int r0 = part ? 5 : 0, rows = part ? 30 : 40, k0 = part && in > 8 ? 8 : 0, columns = in - k0 - (part && in > 100 ? 48 : 0);
                std::vector<bf16> got((size_t)rows * columns + 8, bf16{0x7fc1});
                with_packing(on.W, [&](auto format) {
                    const unsigned blocks = (unsigned)((rows * columns / 8 + 255) / 256);
                    launch(dim3(blocks), dim3(256), [&] { unpack_kernel<decltype(format)>(got.data(), packed_args(on.W), r0, rows, k0, columns); });
                });
                int wrong = 0;
                for (int r = 0; r < rows; r++)
                    for (int k = 0; k < columns; k++) wrong += got[(size_t)r * columns + k].bits != to_bf16(host.at(r0 + r, k0 + k)).bits;
                CAPTURE((int)kind.format);
                CAPTURE(in);
                CHECK(wrong == 0);
                for (int i = 0; i < 8; i++) CHECK(got[(size_t)rows * columns + i].bits == 0x7fc1); // nothing past the end
            }
            const std::vector<int> token = {3, 39, 0, 3}, seq = {0, 1, -1, 2};
            Batch b = {4, 4, token.data(), nullptr, seq.data(), nullptr, nullptr, 0};
            std::vector<float> x((size_t)4 * in, 7);
            with_packing(on.W, [&](auto format) { launch(dim3(4), dim3(32), [&] { packed_embed_kernel<decltype(format)>(x.data(), packed_args(on.W), b); }); });
            for (int n = 0; n < 4; n++)
                for (int i = 0; i < in; i++) REQUIRE(x[(size_t)n * in + i] == (n == 2 ? 7 : host.at(token[(size_t)n], i)));
        }
}

TEST_CASE("round_kernel: activations have the bits of round_activations, as bf16 and as e4m3 with scales") {
    Random random{83};
    for (int in : {8, 128, 200, 392})
        for (int N : {1, 5, 33}) {
            std::vector<bf16> x = random_x(random, (size_t)N * in), want(x.size());
            for (int i = 0; i < in; i++) x[(size_t)i].bits &= 0x8000; // zeros
            if (N > 2) x[(size_t)in + 3] = {0x7f80}, x[(size_t)2 * in + 7] = {0x7fc0};
            for (int i = 0; i < in && N > 4; i++)
                x[(size_t)3 * in + i] = {(uint16_t)random.below(300)}, x[(size_t)4 * in + i] = {(uint16_t)(0x7f7f - random.below(900))};
            round_activations(want.data(), x.data(), N, in);
            const int groups = (in + 127) / 128, pitch = N + 3;
            std::vector<bf16> rounded(x.size() + 8, bf16{0x7fc1});
            std::vector<uint8_t> q(x.size() + 8, 0xaa);
            std::vector<float> scale((size_t)groups * pitch, -1);
            const unsigned blocks = (unsigned)(N * groups + 15) / 16;
            launch(dim3(blocks), dim3(256), [&] { round_kernel<false>(rounded.data(), nullptr, nullptr, x.data(), N, in, 0); });
            launch(dim3(blocks), dim3(256), [&] { round_kernel<true>(nullptr, q.data(), scale.data(), x.data(), N, in, pitch); });
            int wrong = 0;
            for (int n = 0; n < N; n++)
                for (int i = 0; i < in; i++) {
                    const size_t at = (size_t)n * in + i;
                    const float a = to_acc(rounded[at]), w = to_acc(want[at]), b = e4m3_to_float(q[at]) * scale[(size_t)(i / 128) * pitch + n];
                    wrong += std::isnan(w) ? !std::isnan(a) || !std::isnan(b) : rounded[at].bits != want[at].bits || to_bf16(b).bits != want[at].bits;
                }
            CAPTURE(in);
            CAPTURE(N);
            CHECK(wrong == 0);
            for (size_t i = x.size(); i < q.size(); i++) CHECK((q[i] == 0xaa && rounded[i].bits == 0x7fc1)); // nothing past the end
            for (int g = 0; g < groups; g++) CHECK(scale[(size_t)g * pitch + N] == -1);
        }
}
