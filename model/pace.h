// model/pace.h: fewer threads while other programs need the cores.
#pragma once
#include "base/error.h"
#include "model/options.h"

// OpenMP's threads wait for each other at the end of every product, spinning. That is fast as long as each has a core
// of its own. Beside another program one of them is always without a core while the others spin for it: a step that
// takes a millisecond then takes whole time slices of the system's scheduler, ten times as long and more. Waiting
// without spinning costs system calls in every product, which on a small model is more than the threads gain.
// So: as many threads as have cores. The CPU time of a stretch of wall time says how many those are, since a thread
// that waits uses it too. From time to time all threads are tried again.
// It keeps away where the user chose: -j, OMP_NUM_THREADS, OMP_WAIT_POLICY, GOMP_SPINCOUNT, KMP_BLOCKTIME.
struct ThreadPace {
    // How many threads next, after a stretch of `length` seconds that had `cores` at work.
    struct Rule {
        int all, now = all;
        double patience = 0.25, waited = 0; // s until all are tried again
        bool trying = false;

        int next(double cores, double length);
    };
    static constexpr double STRETCH = 0.02; // s: several time slices
    Rule rule{thread_count()};
    const bool on;

    ThreadPace(const ModelOptions& o, const Context& ctx);
    ThreadPace(const ThreadPace&) = delete;
    ~ThreadPace() { set(rule.all); }

    // Around what computes, by the thread that does.
    void begin();
    void end();
    void step() { end(), begin(); } // of what computes all the time

    static bool chosen_by_user();

  private:
    double wall = 0, cpu = 0; // of this stretch
    void set(int threads);
};
