// router.h: several engines behind one desk, one per GPU (or all on the CPU): selects the engine of a job, and moves
// the jobs of an engine that fails.
//
//   Window     an engine's inbox and its published figures
//   Router     where prompts with the same beginning were sent
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

// The desk's side of one engine. The desk's `mutex` guards all but `load` and `figures`.
struct Window {
    Window();
    ~Window();
    std::vector<Job> inbox;       // not yet taken
    using Handed = std::unique_ptr<void, void (*)(void*)>;
    std::vector<Handed> handed;   // Engine::Sequences of an engine that failed
    size_t inside = 0;            // jobs that the engine has taken
    std::shared_ptr<const Figures> figures = std::make_shared<Figures>(); // as of the last step: see Desk::look_at_each
    bool gone = false;            // its engine has failed
    std::shared_ptr<std::atomic<size_t>> load = std::make_shared<std::atomic<size_t>>(0); // tokens of unfinished jobs

    // Estimates the tokens of a job, which count as load until it is destroyed.
    void count(Job& job);
};

// Prompts with the same beginning go to the engine that has computed it, if that is half of the prompt or more (so that
// a short common system prompt does not send all of them to one engine) and if this engine is not much more loaded than
// another; all others go to the least loaded. Evictions are not known here: an evicted beginning is recomputed.
struct Router {
    static constexpr size_t MOST = 1 << 18, AHEAD = 16384; // known beginnings; tokens that an engine may be ahead
    std::unordered_map<uint64_t, int> seen; // beginnings, in whole pages, and their engine
    std::deque<uint64_t> order;             // ... the oldest first
    size_t turn = 0;                        // rotates among equally loaded engines

    int choose(const Job& job, const std::vector<Window*>& windows);
};

} // namespace server
