// desk.h: the interface between HTTP threads and engine threads: jobs, and metrics.
#pragma once
#include "server/engine/budget.h"
#include "server/engine/reply.h"
#include "server/engine/router.h"
#include <condition_variable>
#include <map>
#include <mutex>
#include <vector>

namespace server {

// The queue of jobs: any thread adds them, the engine takes them. It is also the window of the first engine.
struct Desk : Window {
    std::mutex mutex;
    std::condition_variable news;
    std::vector<Window*> windows{this}; // of all engines
    Router router;
    size_t limit = 0;                 // most jobs in total
    size_t keys = 1;                  // API keys; when the queue is full, each may still use its share of the limit
    size_t texts = 0, text_tokens = 0; // pooled jobs among all jobs, and their tokens
    size_t lookups = 0;               // requests whose lookup runs or waits: places for answers
    struct Held { size_t jobs = 0, tokens = 0; }; // unfinished jobs, lookups included; tokens of pooled texts
    std::map<uint64_t, Held> held;    // by line
    bool closed = false;              // no more jobs follow
    std::atomic<bool> failed{false};  // no engine is left: all replies were cancelled
    Budget unsent{256 << 20};         // pieces and answers not yet fetched

    // Adds the jobs of one request. False: no room now. Ready answers go to their reply at once.
    bool submit(std::vector<Job>&& jobs);
    void deliver(Reply& reply, Piece&& piece, double now);
    void place(Job&& job); // `mutex` is held
    size_t answers() const; // `mutex` is held
    bool empty() const;     // no engine has a job, or will get one that was placed; `mutex` is held

    // A lookup reserves a place for the answer that follows it, until leave. False: there is none.
    bool enter(uint64_t line);
    void leave(uint64_t line);
    void close();
    // Per engine; summed. Readers wait neither for an engine nor for `mutex`: the figures are swapped as a whole.
    std::vector<Figures> look_at_each() const;
    Figures look() const;
};

} // namespace server
