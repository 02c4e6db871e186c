// The trainer for its suites (or by common.h, if TRAIN_NO_MAIN is there before).
#pragma once
#include "tests/process.h"
#ifndef TRAIN_NO_MAIN
#ifdef SUITES_ARE_PROGRAMS
#include "tests/programs.h"
#define main train_main
#include "train_lora.cu"
#undef main
static const bool is_train_lora = add_program("train_lora", train_main);
#else
#define TRAIN_NO_MAIN
#include "train_lora.cu"
#endif
#endif

inline const char* program(const char* variable, const char* otherwise) {
    return getenv(variable) ? getenv(variable) : otherwise;
}
// How many of the trainer's gradients are among `theirs`, by prefix + name: each of more than nothing, and within `off`
// of its norm.
inline int same_gradients(Trainer<float>& t, const Tensors& theirs, const std::string& prefix, double nothing,
                          double off) {
    int compared = 0;
    t.each_tensor([&](const ModelTensor& tensor, size_t at) {
        const auto want = theirs.find(prefix + tensor.name());
        if (want == theirs.end()) return;
        REQUIRE(want->second.bytes == 4 * tensor.size());
        double different = 0, size = 0;
        for (size_t i = 0; i < tensor.size(); i++) {
            const double x = number(want->second, i);
            different += std::pow(t.gradient[at + i] - x, 2), size += x * x;
        }
        INFO(tensor.name());
        CHECK(size > nothing);
        CHECK(std::sqrt(different / size) < off);
        compared++;
    });
    return compared;
}
