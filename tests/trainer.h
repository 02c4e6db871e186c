// Shared by the trainer's suites: names of programs, and gradients beside others'.
#pragma once
#include "model/distillation.h"
#include "model/session.h"
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
// A program whose threads sleep while they wait: those that spin starve each other on a busy machine.
inline Process start_program(const char* name, const Strings& arguments) {
    return Process(name, arguments, "", [] { setenv("OMP_WAIT_POLICY", "passive", 1); });
}
// ... to its end, which must be without a fault.
inline Result must(const char* name, const Strings& arguments) {
    const Result r = start_program(name, arguments).wait();
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r;
}
// train_lora (TRAIN_LORA, else the program here) with the small fixtures' vocabulary, on one thread.
inline const char* trainer() { return program("TRAIN_LORA", "./train_lora"); }
inline const Strings TINY_ON_ONE_THREAD = {"-z", "tests/fixtures/tiny/tokenizer.bin", "-j", "1"};
inline Process start_training(const Strings& arguments) { return start_program(trainer(), arguments + TINY_ON_ONE_THREAD); }
inline Result train(const Strings& arguments) { return must(trainer(), arguments + TINY_ON_ONE_THREAD); }
inline std::string adapter(const std::string& out) { return read_file(out + "/adapter_model.safetensors"); }
// The mean loss of a dataset's answers, by sessions.
inline double session_loss(const Config& c, const Weights<float>& weights, const Dataset& data) {
    double sum = 0;
    for (size_t i = 0; i < data.rows(); i++) {
        Session<float> session(c, weights, 64, Context());
        std::vector<int> ids;
        for (uint32_t word : data.row(i)) ids.push_back((int)(word & ~TRAIN));
        size_t at = 0;
        session.feed(ids, nullptr, [&](const float* row) {
            if (++at < ids.size() && data.row(i).first[at] & TRAIN) sum += log_sum(row, c.V, 1.f) - row[ids[at]];
        });
    }
    return sum / (double)data.trained();
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
