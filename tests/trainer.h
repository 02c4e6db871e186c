// Shared by the trainer's suites: names of programs, and gradients beside others'.
#pragma once
#include "tests/process.h"
#include "train/trainer.h"
#include <cmath>
#include <cstdlib>
#include <doctest/doctest.h>

inline const char* program(const char* variable, const char* otherwise) {
    return getenv(variable) ? getenv(variable) : otherwise;
}
// How many of the trainer's gradients are among `theirs`, by prefix + name: each of more than nothing, and within `off`
// of its norm.
inline int same_gradients(Trainer<float>& t, const Tensors& theirs, const std::string& prefix, double nothing,
                          double off) {
    int compared = 0;
    t.params.each_tensor([&](const ModelTensor& tensor, size_t at) {
        const auto want = theirs.find(prefix + tensor.name());
        if (want == theirs.end()) return;
        REQUIRE(want->second.bytes == 4 * tensor.size());
        double different = 0, size = 0;
        for (size_t i = 0; i < tensor.size(); i++) {
            const double x = number(want->second, i);
            different += std::pow(t.params.gradient[at + i] - x, 2), size += x * x;
        }
        INFO(tensor.name());
        CHECK(size > nothing);
        CHECK(std::sqrt(different / size) < off);
        compared++;
    });
    return compared;
}
