// model/pace.cpp: fewer threads while other programs need the cores.
#include "model/pace.h"
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#ifdef _OPENMP
#include <omp.h>
#endif

int ThreadPace::Rule::next(double cores, double length) {
    const int had = std::clamp((int)std::lround(cores), 1, now);
    if (had < now) {
        patience = trying ? std::min(2 * patience, 4.) : 0.25; // after failed attempts: less often
        waited = 0, trying = false;
        return now = had;
    }
    if (now == all) return patience = 0.25, trying = false, now;
    waited = cores < 0.9 * now ? 0 : waited + length; // no core is free: more threads do not help
    if (waited >= patience) trying = true, now = all;
    return now;
}

ThreadPace::ThreadPace(const ModelOptions& o, const Context& ctx)
    : on(!o.threads && !ctx.gpu && !chosen_by_user() && rule.all > 1) {}

static double cpu_seconds() { // of all threads
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void ThreadPace::begin() {
    if (on) wall -= seconds(), cpu -= cpu_seconds();
}

void ThreadPace::end() {
    if (!on) return;
    wall += seconds(), cpu += cpu_seconds();
    if (wall < STRETCH) return;
    set(rule.next(cpu / wall, wall));
    wall = cpu = 0;
}

bool ThreadPace::chosen_by_user() {
    for (const char* name : {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})
        if (getenv(name)) return true;
    return false;
}

void ThreadPace::set([[maybe_unused]] int threads) {
#ifdef _OPENMP
    if (on && threads != thread_count()) omp_set_num_threads(threads);
#endif
}
