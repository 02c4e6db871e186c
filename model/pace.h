// model/pace.h: fewer threads while other programs need the cores.
#pragma once
#include "model/options.h"
#include <ctime>

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

        int next(double cores, double length) {
            const int had = std::clamp((int)std::lround(cores), 1, now);
            if (had < now) {
                patience = trying ? std::min(2 * patience, 4.) : 0.25; // tried in vain: less often
                waited = 0, trying = false;
                return now = had;
            }
            if (now == all) return patience = 0.25, trying = false, now;
            waited = cores < 0.9 * now ? 0 : waited + length; // while there is no core for what runs, more are no use
            if (waited >= patience) trying = true, now = all;
            return now;
        }
    };
    static constexpr double STRETCH = 0.02; // s: several time slices
    Rule rule{thread_count()};
    const bool on;

    ThreadPace(const ModelOptions& o, const Context& ctx)
        : on(!o.threads && !ctx.gpu && !chosen_by_user() && rule.all > 1) {}
    ThreadPace(const ThreadPace&) = delete;
    ~ThreadPace() { set(rule.all); }

    // Around what computes, by the thread that does.
    void begin() {
        if (on) wall -= seconds(), cpu -= cpu_seconds();
    }
    void end() {
        if (!on) return;
        wall += seconds(), cpu += cpu_seconds();
        if (wall < STRETCH) return;
        set(rule.next(cpu / wall, wall));
        wall = cpu = 0;
    }
    void step() { end(), begin(); } // of what computes all the time

    static bool chosen_by_user() {
        for (const char* name : {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})
            if (getenv(name)) return true;
        return false;
    }

  private:
    double wall = 0, cpu = 0; // of this stretch

    static double cpu_seconds() { // of all threads
        timespec t;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    }
    void set([[maybe_unused]] int threads) {
#ifdef _OPENMP
        if (on && threads != thread_count()) omp_set_num_threads(threads);
#endif
    }
};
