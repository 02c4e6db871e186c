// predict.h: POST /predict, the contract of a university course: {"prompt": "..."} -> {"response": "..."}, or a list of
// prompts and a list of as many responses. Answers are greedy, without thinking.
#pragma once
#include "server/api/asked.h"
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace server {

// The texts of {"response": ...}, in the order of the prompts.
struct PredictAnswer : Answer {
    bool list;                       // the request held a list
    std::vector<size_t> prompts;     // per choice: the index of its prompt
    std::vector<size_t> unanswered;  // indices of prompts that exceed the context; their response is ""

    PredictAnswer(const Service& service, const Ask& ask, bool list, std::vector<size_t> prompts,
                  std::vector<size_t> unanswered);
    bool told() const override { return ended; }
    std::string part() override;
    void log(sj::Writer& w) const override;

  private:
    size_t place = 0, choice = 0;    // of the next response
    const size_t end;
    bool ended = false;
    sj::Writer writer{};
};

// Reads the request's body. Fields other than `prompt` are ignored, as in the course's own server. `salt`: the key
// whose prompts may share pages. If no prompt can be answered, the result has no jobs. Throws Refusal.
Asked read_predict(const Service& service, std::string_view body, uint64_t salt);

} // namespace server
