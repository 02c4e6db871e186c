// train/log.h: the log of a training run, its curve, and the answers to its questions.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct AppendedFile;
class EventFile;

std::string clock_text(double s); // as Python's str(timedelta)

// trainer_log.jsonl, with LLaMA-Factory's fields; the curve, which is drawn from it; trainer_answers.jsonl; an event
// file, if TensorBoard is to read the same numbers.
struct TrainLog {
    std::string folder, what; // "loss", "reward"
    std::unique_ptr<AppendedFile> file;
    std::unique_ptr<EventFile> events;
    struct Point { double step, value; };
    std::vector<Point> losses, evaluations;
    struct Answer {
        int64_t step;
        std::string question, reference, text; // reference "": none
        bool ended;                            // else it was cut
    };
    std::vector<Answer> answers; // in the order of steps
    using Listener = std::function<void(const std::string& line)>;
    Listener listener; // gets every line of both files, also those that exist already; none: nobody

    // Continues after the lines of the first `steps` steps, which exist already if there are any. Without `writes`
    // nothing is read or written.
    TrainLog(const std::string& out, const char* drawn, int64_t steps, bool writes, bool tensorboard,
             const Listener& hears = nullptr);
    TrainLog(const TrainLog&) = delete;
    ~TrainLog();

    void add(const std::string& line);
    void add(const std::vector<Answer>& more);

    // Steps across, loss or reward upwards: every step thin, their running mean thick, evaluations as dots.
    std::string curve(int64_t steps) const;
};
