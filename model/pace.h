// model/pace.h: fewer threads while other programs need the cores.
#pragma once
#include "base/error.h"
#include "model/options.h"

// OpenMP's threads wait for each other at the end of every product, spinning. That is fast as long as each has a core
// of its own. Beside another program one of them always lacks a core while the others spin for it: a step of one
// millisecond then takes whole time slices of the system's scheduler, ten times as long and more. Waiting without
// spinning costs system calls in every product, on a small model more than the threads gain. So the number of threads
// follows the number of cores. CPU time divided by wall time gives the cores in use, since a waiting thread uses CPU
// time too. From time to time all threads are tried again.
// Disabled if the user chose: -j, OMP_NUM_THREADS, OMP_WAIT_POLICY, GOMP_SPINCOUNT, KMP_BLOCKTIME.
struct ThreadPace {
    // The number of threads for the next stretch, after one of `length` seconds that used `cores` cores.
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

    // Encloses the computation, on the thread that computes.
    void begin();
    void end();
    void step() { end(), begin(); } // of threads that compute all the time

    static bool chosen_by_user();

  private:
    double wall = 0, cpu = 0; // of this stretch
    void set(int threads);
};
