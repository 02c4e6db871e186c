// scheduler.cpp: runs steps and publishes figures.
#include "server/engine/disk_prefix.h"
#include "server/engine/router.h"
#include "server/engine/scheduler.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <malloc.h>
#include <mutex>
#include <unistd.h>

namespace server {

Scheduler::Scheduler(const Config& c, const Tokenizer& t, Desk& d, const EngineOptions& o, const Context& where,
                     Window* own)
    : ctx(where), config(c), tokenizer(t), desk(d), window(own ? *own : d), options(o),
      max_rows(o.max_seqs + std::max(o.chunk, o.burst)), max_pages((o.context + PAGE - 1) / PAGE), pool(0) {
    for (int s = o.max_seqs - 1; s >= 0; s--) free_slots[0].push_back(s);
    for (int s = o.max_seqs + o.texts - 1; s >= o.max_seqs; s--) free_slots[1].push_back(s);
}
Scheduler::~Scheduler() = default;

bool Scheduler::busy() const {
    return !running.empty() || !waiting.empty() || !under_way.empty() || (disk && disk->reading);
}

void Scheduler::run(ThreadPace& pace) {
    for (double unsaved = 0;;) { // s until save_pages is called again; 0: nothing is to be saved
        bool idle;
        {
            std::unique_lock lock(desk.mutex);
            auto called = [&] { return !window.inbox.empty() || !window.handed.empty() || busy(); };
            auto over = [&] { return desk.closed && desk.empty(); }; // (until then another engine may fail)
            auto woken = [&] { return called() || over(); };
            if (unsaved > 0) desk.news.wait_for(lock, std::chrono::duration<double>(unsaved), woken);
            else desk.news.wait(lock, woken);
            idle = !called();
            if (idle && over()) break;
        }
        if (idle) {
            unsaved = save_pages();
            continue;
        }
        auto only_reads = [&] { return disk && disk->reading && running.empty(); };
        const bool paced = !only_reads(); // the pace is that of computing threads
        if (paced) pace.begin();
        unsaved = step();
        if (paced) pace.end();
        if (only_reads()) disk->wait();
    }
    double unsaved; // (what another server has is not waited for)
    for (const double end = seconds() + DiskPages::LAST;
         (unsaved = save_pages()) > 0 && unsaved < DiskPages::TAKE_OVER && seconds() < end;) usleep(500);
}

double Scheduler::step() {
    take_jobs();
    read_pages();
    Step next = plan_step();
    if (!next.token.empty()) {
        const double begun = seconds();
        next.from_idle = under_way.empty();
        compute(next);
        if (!next.alone) prompts_took += seconds() - begun;
        else if (!ctx.gpu) lookup.computed(next.token.size(), seconds() - begun);
        for (auto& [rank, q] : running) remember(*q);
    }
    const size_t ahead = ctx.gpu && !next.token.empty();
    if (!next.token.empty()) under_way.push_back(std::move(next));
    for (; under_way.size() > ahead; under_way.pop_front()) hand_out(under_way.front());
    // Draws with a form need the previous tokens first. The GPU computes `forward` meanwhile.
    if (ahead && under_way.back().masked) draw_masked(under_way.back());
    tell();
    deliver();
    return save_pages();
}

bool Scheduler::hand_over() {
    for (auto& q : later)
        if (q) join_line(std::move(q));
    tell();
    deliver(); // before another engine continues these answers
    under_way.clear();
    while (!running.empty()) preempt(running.begin());
    std::vector<std::unique_ptr<Sequence>> all;
    while (!waiting.empty()) all.push_back(leave_line(waiting.begin()->first, waiting.begin()->second.begin()));
    std::vector<std::shared_ptr<Reply>> lost;
    {
        std::lock_guard lock(desk.mutex);
        window.gone = true, window.inside = 0;
        auto stays = [](const Window* w) { return !w->gone; };
        desk.failed = std::none_of(desk.windows.begin(), desk.windows.end(), stays);
        desk.closed |= desk.failed;
        for (Window::Handed& one : std::exchange(window.handed, {})) all.emplace_back((Sequence*)one.release());
        for (Job& job : std::exchange(window.inbox, {}))
            if (desk.failed) lost.push_back(job.reply);
            else desk.place(std::move(job));
        for (auto& q : all) {
            if (desk.failed) {
                lost.push_back(q->job.reply);
                continue;
            }
            q->job.prompt = q->ids; // read by the router
            Window& to = *desk.windows[(size_t)desk.router.choose(q->job, desk.windows)];
            to.count(q->job);
            q->job.prompt.clear();
            to.handed.push_back({q.release(), [](void* p) { delete (Sequence*)p; }});
        }
        desk.news.notify_all();
    }
    for (auto& reply : lost) {
        std::lock_guard lock(reply->mutex);
        reply->cancelled = true;
        if (reply->wake) reply->wake();
    }
    tell();
    return !desk.failed;
}

void Scheduler::tell() {
    figures.running = running.size(), figures.waiting = in_lines;
#ifdef __GLIBC__
    if (in_lines == 0 && std::exchange(most_in_lines, 0) > 4096) malloc_trim(0);
#endif
    figures.pages_used = (size_t)pages - pool.available();
    std::atomic_store(&window.figures, std::make_shared<const Figures>(figures));
    std::lock_guard lock(desk.mutex);
    window.inside = figures.running + figures.waiting;
    for (auto [line, tokens] : ended) {
        Desk::Held& held = desk.held[line];
        held.jobs--;
        if (line >= Job::TEXTS) held.tokens -= tokens, desk.texts--, desk.text_tokens -= tokens;
    }
    ended.clear();
    if (desk.closed && desk.empty()) desk.news.notify_all(); // the engines end together
}

void Scheduler::deliver() {
    const double now = seconds();
    for (auto& [reply, piece] : outbox) desk.deliver(*reply, std::move(piece), now);
    outbox.clear();
}

} // namespace server
