// desk.h: what passes between the threads of HTTP and those of engines: jobs, and the figures of what was done.
#pragma once
#include "server/engine/budget.h"
#include "server/engine/reply.h"
#include "server/engine/router.h"
#include <condition_variable>
#include <map>
#include <mutex>
#include <vector>

namespace server {

// Jobs go in here, from any thread, and the engine takes them out. It is the window of the first engine, too.
struct Desk : Window {
    std::mutex mutex;
    std::condition_variable news;
    std::vector<Window*> windows{this}; // of all engines
    Router router;
    size_t limit = 0;                 // most jobs there may be in all
    size_t keys = 1;                  // of API keys; when all is full, each may still have its share of the limit
    size_t texts = 0, text_tokens = 0; // of all jobs, those that are pooled, and the tokens of these
    size_t lookups = 0;               // requests whose documents are looked up, or will be: places for answers
    struct Held { size_t jobs = 0, tokens = 0; }; // that are not done, lookups too; tokens of texts
    std::map<uint64_t, Held> held;    // by line
    bool closed = false;              // nothing more will come
    Budget unsent{256 << 20};         // pieces and answers that nobody has taken yet

    // The jobs of one request. False: there is no room for them now. Answers that are given go to their reply at once.
    bool submit(std::vector<Job>&& jobs);
    void deliver(Reply& reply, Piece&& piece);
    void place(Job&& job); // with `mutex` held
    size_t answers() const; // `mutex` is held

    // A lookup keeps a place for the answer that comes of it, until leave. False: there is none.
    bool enter(uint64_t line);
    void leave(uint64_t line);
    void close();
    // Of each engine; of all. Nobody who asks for figures waits for an engine, nor for `mutex`: they are swapped whole.
    std::vector<Figures> look_at_each() const;
    Figures look() const;
};

} // namespace server
