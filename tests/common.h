// Shared by the suites: random inputs, poisoned outputs, a paged cache with scattered pages.
#pragma once
#include "cpu/instruction_set.h"
#include "qwen3.cu"
#include "tests/batch.h"
#include "tests/numbers.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <doctest/doctest.h>
#include <string>
#include <type_traits>
#include <vector>

inline Context& cpu() {
    static Context ctx;
    return ctx;
}

// Outputs begin as NaN, so that a number that is never written shows.
template <class T> std::vector<T> poisoned(size_t n) {
    std::vector<T> v(n);
    std::fill_n((unsigned char*)v.data(), n * sizeof(T), 0xff);
    return v;
}

// The largest change of x by one rounding to T: half a unit of its last place.
template <class T> double rounding(double x) {
    return std::fabs(x) * (std::is_same_v<T, bf16> ? 1. / 256 : std::is_same_v<T, float> ? 1. / (1 << 24) : 1e-15);
}
// The error bound of a sum in acc<T> whose terms' magnitudes add up to `size`.
template <class T> double sum_error(double size) { return size * (std::is_same_v<acc<T>, float> ? 1e-6 : 1e-14); }

// Counts the numbers of `got` that are not within `tolerance(i)` of `want`; a NaN is not.
template <class T, class F> int wrong(const std::vector<T>& got, const std::vector<double>& want, F tolerance) {
    REQUIRE(got.size() == want.size());
    int n = 0;
    for (size_t i = 0; i < want.size(); i++)
        if (!(std::fabs(to_acc(got[i]) - want[i]) <= tolerance(i))) {
            if (n++ < 3) MESSAGE("at " << i << ": " << to_acc(got[i]) << ", not " << want[i] << " +- " << tolerance(i));
        }
    return n;
}

template <class T> bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// CALL(op, ...) is Book I's definition of an op, or the code of cpu/. A test that begins with EACH_WAY runs with each.
inline bool as_defined = false;
#define CALL(op, ...) (as_defined ? op(__VA_ARGS__) : op##_cpu(cpu(), __VA_ARGS__))
#define EACH_WAY \
    struct Restore { ~Restore() { as_defined = false; } } restore_way; \
    SUBCASE("as defined") { as_defined = true; } \
    SUBCASE("by cpu/") { as_defined = false; }

// Says once what this CPU has not got: run.sh lists it.
inline void tell_missing_instructions() {
    static bool told = false;
    for (int set = best_instruction_set() + 1; set <= ISA_LAST && !told; set++)
        printf("skipped: cpu/'s code for %s: this CPU has not got it\n", instruction_set_name((InstructionSet)set));
    told = true;
}

// Calls f once for every instruction set of this machine.
template <class F> void on_every_instruction_set(F f) {
    const InstructionSet best = best_instruction_set();
    tell_missing_instructions();
    struct Restore { ~Restore() { instruction_set = best_instruction_set(); } } restore; // also when a REQUIRE leaves f
    for (int set = ISA_PLAIN; set <= (as_defined ? ISA_PLAIN : best); set++) { // (a definition has but one way)
        instruction_set = (InstructionSet)set;
        const std::string name = instruction_set_name(set);
        INFO("instruction set " << name);
        f();
    }
}

// A Linear's numbers as doubles, whatever they are stored as, for the definitions to compute on; or their magnitudes:
// what these add up to measures a sum's error.
struct WideLinear : Linear<double> {
    std::vector<double> all;
    template <class T> explicit WideLinear(const Linear<T>& W, bool magnitudes = false)
        : all(wide_numbers(W, magnitudes)) {
        in = W.in;
        for (int b = 0; b < 3; b++)
            if ((rows[b] = W.rows[b])) w[b] = all.data() + (size_t)W.first_row(b) * in;
    }
    WideLinear(const WideLinear&) = delete;
    std::vector<double> operator()(const std::vector<double>& x, int N) const { // x W^T
        std::vector<double> y((size_t)N * out());
        linear(y.data(), x.data(), *this, N);
        return y;
    }
};

// Products of W with rows of x: whether `count` rows from `first` on, computed by themselves, have the bits that they
// have among all N.
template <class T> auto same_in_any_batch(const Linear<T>& W, const std::vector<T>& x, int N) {
    auto product = [&W, &x](int first, int count) {
        const std::vector<acc<T>> zero((size_t)count * W.out());
        auto y = poisoned<acc<T>>((size_t)count * W.out());
        linear_add_cpu(cpu(), y.data(), zero.data(), x.data() + (size_t)first * W.in, W, count);
        return y;
    };
    return [&W, product, whole = product(0, N)](int first, int count) {
        const size_t begin = (size_t)first * W.out(), size = (size_t)count * W.out() * sizeof(acc<T>);
        return memcmp(product(first, count).data(), &whole[begin], size) == 0;
    };
}
