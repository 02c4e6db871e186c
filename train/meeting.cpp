// train/meeting.cpp: processes become ranks, and a watcher detects a lost rank.
#include "base/error.h"
#include "base/unfinished.h"
#include "train/ranks.h"
#include "train/sockets.h"
#include <algorithm>
#include <cerrno>
#include <climits>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

using namespace sockets;

void Ranks::fork_here(int n) {
    const int listener = open_socket("127.0.0.1", 0, true);
    sockaddr_in at = {};
    socklen_t length = sizeof at;
    if (listener < 0 || getsockname(listener, (sockaddr*)&at, &length) != 0)
        DIE("no socket for %d ranks: %s", n, strerror(errno));
    fflush(nullptr);
    for (int r = 1; r < n && rank == 0; r++) {
        const pid_t child = fork();
        if (child < 0) DIE("--gpus %d: %s", n, strerror(errno));
        if (child == 0) rank = r, children.clear();
        else children.push_back(child);
    }
    size = n, local = rank;
    if (rank > 0) close(listener);
    meet("127.0.0.1", ntohs(at.sin_port), rank > 0 ? -1 : listener, PATIENCE);
}

void Ranks::join_launcher(double patience) {
    auto number = [](std::initializer_list<const char*> names, long otherwise, long low, long high) {
        for (const char* name : names)
            if (const char* text = getenv(name)) {
                char* end;
                const long value = strtol(text, &end, 10);
                if (end == text || *end || value < low || value > high)
                    DIE("%s=%.40s is not a whole number from %ld to %ld", name, text, low, high);
                return (int)value;
            }
        return (int)otherwise;
    };
    const char* host = getenv("MASTER_ADDR");
    if (!host) return;
    size = number({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"}, 1, 1, 65536);
    rank = number({"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}, 0, 0, size - 1);
    local = number({"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}, 0, 0, 65535);
    // (Slurm may show each rank only its own GPU.)
    if (const char* seen = getenv("CUDA_VISIBLE_DEVICES"); seen && *seen && !strchr(seen, ',')) local = 0;
    int port = number({"MASTER_PORT"}, 29500, 1, 65535);
    // Then torchrun itself listens at that port.
    if (const char* taken = getenv("TORCHELASTIC_USE_AGENT_STORE"); taken && !strcmp(taken, "True"))
        port += port < 65535 ? 1 : -1;
    if (size == 1) return;
    int listener = -1;
    if (rank == 0) {
        listener = open_socket(host, port, true);
        if (listener < 0 && errno == EADDRNOTAVAIL) listener = open_socket("0.0.0.0", port, true); // behind a NAT
        if (listener < 0) DIE("MASTER_ADDR %s, MASTER_PORT %d: %s", host, port, strerror(errno));
    }
    meet(host, port, listener, patience);
}

// ---- Connections to rank 0

namespace {
struct Greeting {
    char magic[8] = {'q', 'w', 'e', 'n', '3', 'r', 'k', '1'};
    int rank, size, life, pid;
    char host[64] = {};
};
} // namespace

void Ranks::meet(const std::string& host, int port, int listener, double patience) {
    peers.resize((size_t)size);
    const double deadline = seconds() + patience;
    if (rank > 0) {
        peers[0].talk = come(host, port, false, deadline), peers[0].life = come(host, port, true, deadline);
    } else {
        const Descriptor closed(listener);
        receive_others(listener, deadline);
    }
    watcher = std::thread([this] { watch(); });
}

int Ranks::come(const std::string& host, int port, bool life, double deadline) const {
    int fd;
    while ((fd = open_socket(host, port, false)) < 0) {
        if (seconds() > deadline)
            DIE("rank %d: no rank 0 at %s:%d: %s", rank, host.c_str(), port, strerror(errno));
        usleep(100000);
    }
    Greeting me;
    me.rank = rank, me.size = size, me.life = life, me.pid = (int)getpid();
    gethostname(me.host, sizeof me.host - 1);
    std::string answer;
    try {
        give_up_after(fd, std::max(deadline - seconds(), 1.));
        send_all(fd, &me, sizeof me);
        answer = receive_text(fd);
        give_up_after(fd, 0);
    } catch (const Gone&) {
        DIE("rank %d: what answers at %s:%d is no rank 0", rank, host.c_str(), port);
    }
    if (!answer.empty()) DIE("rank %d: %s", rank, answer.c_str());
    return fd;
}

void Ranks::receive_others(int listener, double deadline) {
    for (int left = 2 * (size - 1); left > 0;) {
        pollfd wait = {listener, POLLIN, 0};
        if (poll(&wait, 1, 100) <= 0) {
            for (size_t i = 0; i < children.size(); i++)
                if (waitpid(children[i], nullptr, WNOHANG) > 0) DIE("rank %zu ended as it began", i + 1);
            if (seconds() < deadline) continue;
            int missing = 1;
            while (peers[missing].life >= 0 && peers[missing].talk >= 0) missing++;
            DIE("rank %d of %d has not come", missing, size);
        }
        const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), on = 1;
        if (fd < 0) continue;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        left -= admit(fd);
    }
}

bool Ranks::admit(int fd) {
    Greeting it, mine;
    try {
        give_up_after(fd, 5);
        receive_all(fd, &it, sizeof it);
        give_up_after(fd, 0);
        std::string fault;
        if (memcmp(it.magic, mine.magic, sizeof mine.magic) != 0) throw Gone();
        if (it.size != size) fault = format("WORLD_SIZE is %d there and %d here", it.size, size);
        else if (it.rank < 1 || it.rank >= size) fault = "no such rank";
        else if ((it.life ? peers[it.rank].life : peers[it.rank].talk) >= 0) fault = "another process is this rank";
        send_text(fd, fault);
        if (!fault.empty()) throw Gone();
    } catch (const Gone&) {
        close(fd);
        return false;
    }
    Peer& peer = peers[it.rank];
    (it.life ? peer.life : peer.talk) = fd;
    peer.pid = it.pid;
    memcpy(peer.host, it.host, sizeof peer.host - 1);
    return true;
}

// ---- The watcher

void Ranks::watch() {
    std::vector<pollfd> list;
    std::vector<int> whose;
    for (int r = 0; r < size; r++)
        if (peers[r].life >= 0) list.push_back({peers[r].life, POLLIN, 0}), whose.push_back(r);
    std::vector<double> silent(list.size()); // s; time in which this process was stopped (Ctrl-Z) counts little
    double spoke = 0, last = seconds();
    while (!leaving) {
        if (std::unique_lock lock(speaking, std::defer_lock); seconds() - spoke >= pulse && lock.try_lock()) {
            spoke = seconds();
            for (const pollfd& p : list)
                if (!reported) send(p.fd, "h", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        poll(list.data(), list.size(), (int)std::min(100., 1000 * pulse));
        const double passed = std::min(seconds() - last, 0.2);
        last = seconds();
        for (size_t i = 0; i < list.size(); i++) {
            silent[i] += passed;
            if (list[i].fd < 0 || (!list[i].revents && silent[i] < silence)) continue;
            if (list[i].revents && hear(list[i].fd, whose[i])) silent[i] = 0;
            else if (list[i].revents && parting) list[i].fd = -1; // that rank is done, too
            else if (list[i].revents) lost(whose[i], "has gone");
            else lost(whose[i], format("has not been heard of for %g s", silence.load()));
        }
    }
}

bool Ranks::hear(int fd, int r) {
    char bytes[4096];
    const ssize_t n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) return false;
    const std::string_view said(bytes, (size_t)n);
    const size_t error = said.find('e');
    if (error == said.npos) return true;
    std::string report(said.substr(error + 1)); // up to the connection's end
    pollfd wait = {fd, POLLIN, 0};
    for (ssize_t more; report.size() < MOST_REPORTED && poll(&wait, 1, 2000) > 0 &&
                       (more = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0;)
        report.append(bytes, (size_t)more);
    let_files_end();
    if (rank > 0) leave(1); // rank 0 has reported it
    end(format("rank %d: %s", r, report.c_str()));
}

void Ranks::lost(int r, const std::string& how) {
    let_files_end();
    if (rank > 0 && ending) print_error(program, last_words), leave(1); // rank 0 did not receive it
    if (rank > 0) end_alone("rank 0 " + how);
    end(name_of(r) + " " + how);
}

void Ranks::let_files_end() { // no file is left half written; the lock is kept
    if (files.try_lock_for(std::chrono::milliseconds((int)(SAVING * 1000)))) {}
}
