// router.h: several engines behind one desk, a GPU each (or all on the CPU): which of them gets a job, and what becomes
// of an engine's jobs when it fails.
//
//   Window     what one engine takes its jobs from, and leaves its figures at
//   Router     where prompts that begin alike were sent
#pragma once
#include "server/engine/figures.h"
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

namespace server {

struct Job;

// What the desk has for one engine. `mutex` of the desk guards all but `load` and `figures`.
struct Window {
    Window();
    ~Window();
    std::vector<Job> inbox;       // not yet taken
    using Handed = std::unique_ptr<void, void (*)(void*)>;
    std::vector<Handed> handed;   // Engine::Sequences of an engine that failed
    size_t inside = 0;            // jobs that the engine has
    std::shared_ptr<const Figures> figures = std::make_shared<Figures>(); // as of the last step: see Desk::look_at_each
    bool gone = false;            // its engine has failed
    std::shared_ptr<std::atomic<size_t>> load = std::make_shared<std::atomic<size_t>>(0); // tokens of jobs not done

    // The tokens that a job is likely to take; counted here until it is destroyed.
    void count(Job& job);
};

// Prompts that begin alike go to the engine that has seen their beginning, if that is half of the prompt or more (so
// that a short system prompt which all share sends them not all to one) and if it has not far more to do than another;
// all else goes to the least loaded. What an engine has dropped meanwhile is not known here: then its prompt is computed.
struct Router {
    static constexpr size_t MOST = 1 << 18, AHEAD = 16384; // beginnings known; tokens a loaded engine may be ahead
    std::unordered_map<uint64_t, int> seen; // beginnings of whole pages: the engine
    std::deque<uint64_t> order;             // ... the oldest first
    size_t turn = 0;                        // who comes first of those that have equally little to do

    int choose(const Job& job, const std::vector<Window*>& windows);
};

} // namespace server
