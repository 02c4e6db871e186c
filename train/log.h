// train/log.h: the log of a training run, and its curve.
#pragma once
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

class EventFile;

std::string clock_text(double s); // as Python's str(timedelta)

// trainer_log.jsonl, with LLaMA-Factory's fields; loss.svg, or reward.svg, which is drawn from it; an event file, if
// TensorBoard is to read the same numbers.
struct TrainLog {
    std::string folder, what; // "loss", "reward"
    FILE* file = nullptr;
    std::unique_ptr<EventFile> events;
    struct Point { double step, value; };
    std::vector<Point> losses, evaluations;

    // Continues after the lines of the first `steps` steps, which exist already if there are any. Without `writes`
    // nothing is read or written.
    TrainLog(const std::string& out, const char* drawn, int64_t steps, bool writes, bool tensorboard);
    TrainLog(const TrainLog&) = delete;
    ~TrainLog();

    void add(const std::string& line);

    // Steps across, loss or reward upwards: every step thin, their running mean thick, evaluations as dots.
    void draw(int64_t steps) const;
};
