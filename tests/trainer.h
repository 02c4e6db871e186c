// Shared by the trainer's suites: names of programs, and gradients beside others'.
#pragma once
#include "tests/process.h"
#include "train/trainer.h"
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <doctest/doctest.h>
#include <thread>

inline const char* program(const char* variable, const char* otherwise) {
    return getenv(variable) ? getenv(variable) : otherwise;
}
// train_lora (TRAIN_LORA, else the program here) with the small fixtures' vocabulary, on one thread.
inline Process start_training(const Strings& arguments) {
    const Strings more = {"-z", "tests/fixtures/tiny/tokenizer.bin", "-j", "1"};
    return Process(program("TRAIN_LORA", "./train_lora"), arguments + more, "",
                   [] { setenv("OMP_WAIT_POLICY", "passive", 1); });
}
inline Result train(const Strings& arguments) {
    const Result r = start_training(arguments).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r;
}
// Interrupts a run that writes to `folder` once its log has this step.
inline void interrupt_at_step(int step, Process& p, const std::string& folder) {
    const std::string logged = "\"current_steps\": " + std::to_string(step) + ",";
    for (int ms = 0; read_file_if(folder + "/trainer_log.jsonl").find(logged) == std::string::npos; ms++) {
        REQUIRE(ms < 60000);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    kill(p.pid, SIGINT);
    CHECK(p.wait().status == 130);
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
