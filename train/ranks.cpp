// train/ranks.cpp: sums over all ranks, and the end of a run.
#include "train/ranks.h"
#include "base/arena.h"
#include "base/error.h"
#include "base/unfinished.h"
#include "train/nccl.h"
#include "train/sockets.h"
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

using namespace sockets;

Ranks::~Ranks() {
    kill_children();
    parting = leaving = true;
    if (watcher.joinable()) watcher.join();
    for (const Peer& p : peers)
        for (int fd : {p.talk, p.life})
            if (fd >= 0) close(fd);
}

void Ranks::tell(const char* text, ...) const {
    va_list args;
    va_start(args, text);
    if (rank == 0) vfprintf(stderr, text, args);
    va_end(args);
}

// ---- Collective messages

void Ranks::in_turn(const std::function<void()>& f) {
    if (size == 1) return;
    const double start = seconds();
    try {
        f();
    } catch (const Gone&) {
        usleep(1000000); // the watcher may know the reason
        if (rank == 0) end("another rank has gone");
        end_alone("rank 0 has gone");
    }
    waited += seconds() - start;
}

template <class N> void Ranks::sum(N* x, size_t n) {
    in_turn([&] {
        std::vector<N> theirs(std::min(n, CHUNK));
        for (size_t at = 0; at < n; at += CHUNK) {
            const size_t some = std::min(CHUNK, n - at);
            for (int r = 1; r < size && rank == 0; r++) {
                receive_all(peers[r].talk, theirs.data(), some * sizeof(N));
                for (size_t i = 0; i < some; i++) x[at + i] += theirs[i];
            }
            for (int r = 1; r < size && rank == 0; r++) send_all(peers[r].talk, x + at, some * sizeof(N));
            if (rank > 0) send_all(peers[0].talk, x + at, some * sizeof(N));
            if (rank > 0) receive_all(peers[0].talk, x + at, some * sizeof(N));
        }
    });
}
template void Ranks::sum(int*, size_t);
template void Ranks::sum(float*, size_t);
template void Ranks::sum(double*, size_t);

void Ranks::must_agree(const std::string& facts) {
    in_turn([&] {
        if (rank > 0) {
            send_text(peers[0].talk, facts);
            receive_text(peers[0].talk); // continues when all have agreed
        }
        for (int r = 1; r < size && rank == 0; r++) {
            const std::string theirs = receive_text(peers[r].talk);
            if (theirs == facts) continue;
            size_t at = 0; // where the first line that differs begins
            for (size_t i = 0; i < std::min(theirs.size(), facts.size()) && theirs[i] == facts[i]; i++)
                if (facts[i] == '\n') at = i + 1;
            auto value = [&](const std::string& all) {
                const size_t tab = std::min(all.find('\t', at), all.size());
                return tab == all.size() ? "none" : all.substr(tab + 1, all.find('\n', tab) - tab - 1);
            };
            end(format("%s: its %s is %s, and rank 0's is %s", name_of(r).c_str(),
                       facts.substr(at, facts.find('\t', at) - at).c_str(), value(theirs).c_str(),
                       value(facts).c_str()));
        }
        for (int r = 1; r < size && rank == 0; r++) send_text(peers[r].talk, "");
    });
}

// ---- Gradients and parameters

void Ranks::together(const std::function<void()>& f) {
    if constexpr (WITH_GPU) if (nccl) {
        nccl->begin();
        f();
        return nccl->end();
    }
    f();
}
void Ranks::finish() {
    if constexpr (WITH_GPU) if (nccl) nccl->finish();
}
void Ranks::add_up(float* x, size_t n) {
    if constexpr (WITH_GPU) if (nccl) return nccl->all_reduce(x, n);
    sum(x, n);
}
void Ranks::add_up_pieces(float* own, const float* x, size_t piece) {
    if constexpr (WITH_GPU) if (nccl) return nccl->reduce_scatter(own, x, piece);
    std::vector<float> all(x, x + piece * (size_t)size);
    sum(all.data(), all.size());
    std::copy_n(&all[piece * (size_t)rank], piece, own);
}
void Ranks::gather(void* all, const void* own, size_t bytes) {
    if constexpr (WITH_GPU) if (nccl) return nccl->all_gather(all, own, bytes);
    in_turn([&] {
        uint8_t* const to = (uint8_t*)all;
        memmove(to + bytes * (size_t)rank, own, bytes);
        if (rank > 0) send_all(peers[0].talk, own, bytes);
        if (rank > 0) return receive_all(peers[0].talk, to, bytes * (size_t)size);
        for (int r = 1; r < size; r++) receive_all(peers[r].talk, to + bytes * (size_t)r, bytes);
        for (int r = 1; r < size; r++) send_all(peers[r].talk, to, bytes * (size_t)size);
    });
}
void Ranks::look_at_the_clock() {
    if constexpr (WITH_GPU) if (nccl) waited += nccl->look();
}
void Ranks::use_gpu([[maybe_unused]] const Context& ctx) {
#ifdef QWEN3_GPU
    nccl = std::make_shared<Nccl>(ctx);
    Nccl::Id id = {};
    if (rank == 0) id = nccl->make_id();
    in_turn([&] {
        for (int r = 1; r < size && rank == 0; r++) send_all(peers[r].talk, &id, sizeof id);
        if (rank > 0) receive_all(peers[0].talk, &id, sizeof id);
    });
    nccl->join(size, id, rank);
#endif
}

// ---- The end

void Ranks::part() {
    parting = true;
    int done = 1;
    sum(&done, 1);
    for (size_t i = 0; i < children.size(); i++) {
        int status = 0;
        if (waitpid(children[i], &status, 0) > 0 && WIFSIGNALED(status)) end(name_of((int)i + 1) + " has gone");
    }
    silence = INFINITY; // no rank needs another one from here on
}

// The first of the threads that end this process writes the message; the others block here.
static void speak_alone() {
    static std::mutex once;
    once.lock();
}
void Ranks::end_alone(const std::string& text) {
    speak_alone();
    print_error(program, format("rank %d: %s", rank, text.c_str()));
    leave(1);
}
void Ranks::end(const std::string& text) {
    speak_alone();
    if (rank == 0) print_error(program, text);
    else last_words = format("rank %d: %s", rank, text.c_str()), ending = true;
    const std::string said = "e" + text;
    bool heard = true;
    {
        std::lock_guard lock(speaking);
        reported = true;
        for (const Peer& p : peers) {
            if (p.life < 0) continue;
            give_up_after(p.life, 2);
            try {
                send_all(p.life, said.data(), said.size());
            } catch (const Gone&) {
                heard = false;
            }
            shutdown(p.life, SHUT_WR);
        }
    }
    if (rank > 0) { // rank 0 reports it, perhaps after its files; the watcher hears the report, or the loss of rank 0
        if (heard) std::this_thread::sleep_for(std::chrono::duration<double>(SAVING + 2));
        print_error(program, last_words);
        leave(1);
    }
    const double until = seconds() + 2;
    for (const Peer& p : peers) { // they close when they have read it
        char rest[256];
        pollfd wait = {p.life, POLLIN, 0};
        auto left = [&] { return (int)std::max(0., 1000 * (until - seconds())); };
        while (p.life >= 0 && poll(&wait, 1, left()) > 0 && recv(p.life, rest, sizeof rest, MSG_DONTWAIT) > 0) {}
    }
    kill_children();
    leave(1);
}
void Ranks::kill_children() {
    for (pid_t child : children)
        if (waitpid(child, nullptr, WNOHANG) == 0) kill(child, SIGKILL);
}
void Ranks::wait_for_the_end() {
    for (double start = seconds(); seconds() - start < 2 * silence;) usleep(100000);
    end(format("rank %d has waited in vain for the end", rank));
}

std::string Ranks::name_of(int r) const {
    return format("rank %d (process %d on %s)", r, peers[r].pid, peers[r].host);
}
