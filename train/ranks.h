// ranks.h: several processes that train one model together, on one host or on several: a rank each, and a GPU each if
// there are GPUs. Used by train_lora.
//
//   Ranks ranks("train_lora")                this process alone, as it begins
//   ranks.fork_here(2)                       --gpus 2: becomes two processes; or
//   ranks.join_launcher()                    one of those that torchrun, mpirun or Slurm has started
//   ranks.must_agree(facts)                  ends all if another rank has other facts
//   ranks.sum(x, n)                          a few numbers of the host, added up over all ranks in their order
//   ranks.begin(), ranks.add_up(...), ranks.finish()     the same of gradients, wherever they are
//   ranks.end(text)                          tells the others, and ends all of them
//   ranks.part()                             the work is done
//
// Rank 0 listens at MASTER_ADDR:MASTER_PORT, and every other rank has two connections to it. One is for what is said in
// turn (facts, sums of few numbers, and without GPUs the gradients). On the other a thread says every second that its
// rank lives; when a rank has gone, or says why it ends, rank 0 says so on stderr and to all others, and all end.
// Between GPUs gradients go by NCCL, whose library is looked for when it is needed: the program is built without it.
//
// Contents: 1 rows and buckets  2 connections  3 NCCL  4 ranks
#pragma once
#include "base/file.h"
#include <algorithm>
#include <atomic>
#include <csignal>
#ifdef __CUDACC__
#include <dlfcn.h>
#endif
#include <mutex>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <numeric>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <vector>

// ========================================================================================== 1 Rows and buckets

// Deals the rows of a step. tokens: how many of each row are trained. A list of places in the step for each rank, in
// order; no list is longer than it has to be. The row with the most tokens goes first, each to the rank that has the
// fewest so far.
inline std::vector<std::vector<size_t>> deal(const std::vector<size_t>& tokens, int ranks) {
    std::vector<std::vector<size_t>> hands((size_t)ranks);
    std::vector<size_t> order(tokens.size()), sum((size_t)ranks);
    std::iota(order.begin(), order.end(), (size_t)0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tokens[a] > tokens[b]; });
    const size_t room = (tokens.size() + (size_t)ranks - 1) / (size_t)ranks;
    for (size_t place : order) {
        size_t to = hands.size();
        for (size_t r = 0; r < hands.size(); r++)
            if (hands[r].size() < room && (to == hands.size() || sum[r] < sum[to])) to = r;
        hands[to].push_back(place), sum[to] += tokens[place];
    }
    for (auto& hand : hands) std::sort(hand.begin(), hand.end());
    return hands;
}

// An array of `count` gradients is added up in buckets, each as soon as its numbers are known. Where the optimizer's
// state is divided, rank r owns the r-th piece of each bucket, and keeps its pieces one after another.
struct Buckets {
    static constexpr size_t MOST = 16, UNIT = 64; // UNIT numbers of a piece: aligned whatever their type
    size_t count = 0, bucket = 0, n = 0, piece = 0;

    Buckets() = default;
    Buckets(size_t numbers, int ranks) : count(numbers) {
        const size_t step = UNIT * (size_t)ranks;
        bucket = std::max((count / MOST + step - 1) / step, (size_t)1) * step;
        n = (count + bucket - 1) / bucket, piece = bucket / (size_t)ranks;
    }
    size_t padded() const { return n * bucket; } // with what fills the last one
    // Calls f(first, at, numbers) for each piece of a rank: its place in the whole array, and among those of its owner.
    template <class F> void each_piece(int rank, F f) const {
        for (size_t b = 0; b < n; b++) {
            const size_t first = b * bucket + (size_t)rank * piece;
            if (first < count) f(first, b * piece, std::min(piece, count - first));
        }
    }
};

// ============================================================================================= 2 Connections

struct Gone {}; // thrown: the other end of a connection
struct Descriptor { // closed in the end
    const int fd;
    explicit Descriptor(int of) : fd(of) {}
    ~Descriptor() { close(fd); }
};

inline void send_all(int fd, const void* bytes, size_t n) {
    for (size_t sent = 0; sent < n;) {
        const ssize_t k = send(fd, (const char*)bytes + sent, n - sent, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) throw Gone();
        sent += (size_t)k;
    }
}
inline void receive_all(int fd, void* bytes, size_t n) {
    for (size_t got = 0; got < n;) {
        const ssize_t k = recv(fd, (char*)bytes + got, n - got, 0);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) throw Gone();
        got += (size_t)k;
    }
}
inline void send_text(int fd, const std::string& text) {
    const uint32_t n = (uint32_t)text.size();
    send_all(fd, &n, sizeof n), send_all(fd, text.data(), n);
}
inline std::string receive_text(int fd) {
    uint32_t n;
    receive_all(fd, &n, sizeof n);
    if (n > 1 << 20) throw Gone(); // not one of us
    std::string text(n, '\0');
    receive_all(fd, text.data(), n);
    return text;
}

// A TCP socket that listens at host:port or is connected to it; -1: it cannot be had now, and errno says why.
inline int open_socket(const std::string& host, int port, bool listening) {
    addrinfo hints = {}, *list = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int fault = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list))
        DIE("MASTER_ADDR %s: %s", host.c_str(), gai_strerror(fault));
    int fd = -1;
    for (addrinfo* a = list; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int on = 1;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        const bool good = fd >= 0 && (listening ? bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 1024) == 0
                                                : connect(fd, a->ai_addr, a->ai_addrlen) == 0);
        if (good || fd < 0) continue;
        const int fault = errno;
        close(fd), fd = -1, errno = fault;
    }
    freeaddrinfo(list);
    return fd;
}

// =================================================================================================== 3 NCCL
#ifdef __CUDACC__
// NVIDIA's library for sums between GPUs, as its documentation declares it; found when the program runs.
struct Nccl {
    struct Id { char bytes[128]; };
    enum { UINT8 = 1, FLOAT32 = 7, SUM = 0 }; // of ncclDataType_t and ncclRedOp_t
    using Comm = struct ncclComm*;
    using Reduce = int (*)(const void*, void*, size_t, int, int, Comm, cudaStream_t);
    const char* (*error)(int);
    int (*get_id)(Id*), (*init)(Comm*, int, Id, int), (*group_start)(), (*group_end)();
    Reduce all_reduce, reduce_scatter;
    int (*all_gather)(const void*, void*, size_t, int, Comm, cudaStream_t);
    Comm comm = nullptr;
    cudaStream_t main, stream; // the model's; our own, so that sums go on beside the backward pass
    cudaEvent_t ready;         // main is as far as the numbers to add up
    struct Wait { cudaEvent_t begun, ended; };
    std::vector<Wait> waits;   // of main for us, since the last look at them
    size_t waited = 0;         // of them in use

    explicit Nccl(cudaStream_t model) : main(model) {
        void* library = dlopen("libnccl.so.2", RTLD_NOW);
        if (!library)
            DIE("several GPUs need NCCL, and there is no libnccl.so.2 (apt-get install libnccl2; or pip install "
                "nvidia-nccl-cu%d, with its folder lib in LD_LIBRARY_PATH)", CUDART_VERSION / 1000);
        auto find = [&](auto& function, const char* name) {
            function = (std::decay_t<decltype(function)>)dlsym(library, name);
            if (!function) DIE("libnccl.so.2 has no %s: it is too old", name);
        };
        find(error, "ncclGetErrorString"), find(get_id, "ncclGetUniqueId"), find(init, "ncclCommInitRank");
        find(group_start, "ncclGroupStart"), find(group_end, "ncclGroupEnd"), find(all_reduce, "ncclAllReduce");
        find(reduce_scatter, "ncclReduceScatter"), find(all_gather, "ncclAllGather");
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    }
    void check(int result, const char* what) const {
        if (result) DIE("NCCL: %s: %s (NCCL_DEBUG=INFO tells more)", what, error(result));
    }
    void begin() {
        CUDA_CHECK(cudaEventRecord(ready, main));
        CUDA_CHECK(cudaStreamWaitEvent(stream, ready, 0));
    }
    void finish() { // main goes on when all sums are there
        if (waited == waits.size()) {
            waits.emplace_back();
            for (cudaEvent_t* e : {&waits.back().begun, &waits.back().ended}) CUDA_CHECK(cudaEventCreate(e));
        }
        const Wait& wait = waits[waited++];
        CUDA_CHECK(cudaEventRecord(ready, stream));
        CUDA_CHECK(cudaEventRecord(wait.begun, main));
        CUDA_CHECK(cudaStreamWaitEvent(main, ready, 0));
        CUDA_CHECK(cudaEventRecord(wait.ended, main));
    }
    // Seconds that main has waited since the last look; main has done all it had to.
    double look() {
        double sum = 0;
        for (; waited > 0; waited--) {
            float ms = 0;
            CUDA_CHECK(cudaEventElapsedTime(&ms, waits[waited - 1].begun, waits[waited - 1].ended));
            sum += ms * 1e-3;
        }
        return sum;
    }
};
#else
struct Nccl {};
#endif

// ================================================================================================== 4 Ranks

struct Ranks {
    static constexpr double PATIENCE = 120, SAVING = 8; // s that a rank has to come; to end a file
    static constexpr size_t CHUNK = 1 << 16;            // numbers sent at once
    const char* program;
    int rank = 0, size = 1, local = 0; // of all; which GPU of its host
    double silence = 20;               // s without a word after which a rank is taken for dead
    double waited = 0;                 // s spent in sums, for the others and for the numbers to travel

    explicit Ranks(const char* name) : program(name) {}
    Ranks(const Ranks&) = delete;
    ~Ranks() {
        parting = leaving = true;
        if (watcher.joinable()) watcher.join();
        for (const Peer& p : peers)
            for (int fd : {p.talk, p.life})
                if (fd >= 0) close(fd);
    }

    // ---- Becoming one of several

    // --gpus N: this process is rank 0 and forks the others. Before anything is asked of a GPU or of OpenMP's threads.
    void fork_here(int n) {
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

    // One of the processes of a launcher, if there is one: torchrun sets the first names, the others are of Open MPI
    // and Slurm, whose users set MASTER_ADDR.
    void join_launcher(double patience = PATIENCE) {
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
        // (Slurm may show each rank its own GPU only.)
        if (const char* seen = getenv("CUDA_VISIBLE_DEVICES"); seen && *seen && !strchr(seen, ',')) local = 0;
        int port = number({"MASTER_PORT"}, 29500, 1, 65535);
        // torchrun itself listens at that port then.
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

    // What is told to people, once.
    __attribute__((format(printf, 2, 3))) void tell(const char* text, ...) const {
        va_list args;
        va_start(args, text);
        if (rank == 0) vfprintf(stderr, text, args);
        va_end(args);
    }

    // ---- What is said in turn, by the main threads. All ranks do the same in the same order.

    // Adds up n numbers of the host over all ranks, in the order of the ranks.
    template <class N> void sum(N* x, size_t n) {
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

    // Facts are lines of a name, a tab and a value. Ends all if a rank has others than rank 0.
    void must_agree(const std::string& facts) {
        in_turn([&] {
            if (rank > 0) {
                send_text(peers[0].talk, facts);
                receive_text(peers[0].talk); // goes on when all have agreed
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

    // ---- Gradients and parameters, where they are: x and y on the GPU once there is one (use_gpu).

    // `f` calls some of the three below. finish: what they do has been done, for whatever is computed next.
    template <class F> void together([[maybe_unused]] F f) {
#ifdef __CUDACC__
        if (nccl) {
            nccl->begin();
            nccl->check(nccl->group_start(), "ncclGroupStart");
            f();
            return nccl->check(nccl->group_end(), "ncclGroupEnd");
        }
#endif
        f();
    }
    void finish() {
#ifdef __CUDACC__
        if (nccl) nccl->finish();
#endif
    }
    // x becomes its sum over all ranks.
    void add_up(float* x, size_t n) {
#ifdef __CUDACC__
        if (nccl) return nccl->check(nccl->all_reduce(x, x, n, Nccl::FLOAT32, Nccl::SUM, nccl->comm, nccl->stream),
                                     "ncclAllReduce");
#endif
        sum(x, n);
    }
    // own: this rank's piece of the sum of x, which is `size` pieces.
    void add_up_pieces(float* own, const float* x, size_t piece) {
#ifdef __CUDACC__
        if (nccl) return nccl->check(nccl->reduce_scatter(x, own, piece, Nccl::FLOAT32, Nccl::SUM, nccl->comm,
                                                          nccl->stream), "ncclReduceScatter");
#endif
        std::vector<float> all(x, x + piece * (size_t)size);
        sum(all.data(), all.size());
        std::copy_n(&all[piece * (size_t)rank], piece, own);
    }
    // all: the pieces of all ranks, `bytes` each. (own may be where it belongs in `all`.)
    void gather(void* all, const void* own, size_t bytes) {
#ifdef __CUDACC__
        if (nccl) return nccl->check(nccl->all_gather(own, all, bytes, Nccl::UINT8, nccl->comm, nccl->stream),
                                     "ncclAllGather");
#endif
        in_turn([&] {
            uint8_t* const to = (uint8_t*)all;
            memmove(to + bytes * (size_t)rank, own, bytes);
            if (rank > 0) send_all(peers[0].talk, own, bytes);
            if (rank > 0) return receive_all(peers[0].talk, to, bytes * (size_t)size);
            for (int r = 1; r < size; r++) receive_all(peers[r].talk, to + bytes * (size_t)r, bytes);
            for (int r = 1; r < size; r++) send_all(peers[r].talk, to, bytes * (size_t)size);
        });
    }
    // Brings `waited` up to date, once what was asked of the GPU has been done.
    void look_at_the_clock() {
#ifdef __CUDACC__
        if (nccl) waited += nccl->look();
#endif
    }
#ifdef __CUDACC__
    void use_gpu(cudaStream_t stream) {
        nccl = std::make_unique<Nccl>(stream);
        Nccl::Id id = {};
        if (rank == 0) nccl->check(nccl->get_id(&id), "ncclGetUniqueId");
        in_turn([&] {
            for (int r = 1; r < size && rank == 0; r++) send_all(peers[r].talk, &id, sizeof id);
            if (rank > 0) receive_all(peers[0].talk, &id, sizeof id);
        });
        nccl->check(nccl->init(&nccl->comm, size, id, rank), "ncclCommInitRank");
    }
#endif

    // ---- The end

    // Held while files are written: another rank's death waits for that, though not for long.
    std::unique_lock<std::timed_mutex> writing() { return std::unique_lock<std::timed_mutex>(files); }

    // All ranks are done. Rank 0 waits for those that it forked.
    void part() {
        parting = true;
        int done = 1;
        sum(&done, 1);
        for (pid_t child : children) waitpid(child, nullptr, 0);
    }

    // Ends every rank with status 1. Rank 0 says why.
    [[noreturn]] void end(const std::string& text) {
        speak_alone();
        if (rank == 0) print_error(program, text);
        else last_words = format("rank %d: %s", rank, text.c_str()), ending = true;
        const std::string said = "e" + text;
        bool heard = true;
        for (const Peer& p : peers)
            if (p.life >= 0) {
                heard &= send(p.life, said.data(), said.size(), MSG_NOSIGNAL) == (ssize_t)said.size();
                shutdown(p.life, SHUT_WR);
            }
        if (rank > 0) { // rank 0 says it, perhaps after its files; the watcher hears that, or that rank 0 has gone
            if (heard) std::this_thread::sleep_for(std::chrono::duration<double>(SAVING + 2));
            print_error(program, last_words);
            _exit(1);
        }
        for (const Peer& p : peers) { // they close when they have read it
            char rest[256];
            pollfd wait = {p.life, POLLIN, 0};
            while (p.life >= 0 && poll(&wait, 1, 2000) > 0 && recv(p.life, rest, sizeof rest, MSG_DONTWAIT) > 0) {}
        }
        _exit(1);
    }
    [[noreturn]] void wait_for_the_end() { // which another rank brings
        for (double start = seconds(); seconds() - start < 2 * silence;) usleep(100000);
        end(format("rank %d has waited in vain for the end", rank));
    }

  private:
    struct Peer { // of rank 0: every other rank; of these: rank 0
        int talk = -1, life = -1;
        int pid = 0;
        char host[64] = {};
    };
    struct Greeting {
        char magic[8] = {'q', 'w', 'e', 'n', '3', 'r', 'k', '1'};
        int rank, size, life, pid;
        char host[64] = {};
    };
    std::vector<Peer> peers;
    std::vector<pid_t> children;
    std::thread watcher;
    std::timed_mutex files;
    std::string last_words;          // of a rank that is not 0, once
    std::atomic<bool> ending{false}; // ... they are there
    std::atomic<bool> parting{false}, leaving{false}; // a rank that has gone is no fault any more; the watcher's end
    std::unique_ptr<Nccl> nccl;

    std::string name_of(int r) const {
        return format("rank %d (process %d on %s)", r, peers[r].pid, peers[r].host);
    }

    template <class F> void in_turn(F f) {
        if (size == 1) return;
        const double start = seconds();
        try {
            f();
        } catch (const Gone&) {
            usleep(1000000); // the watcher may know more
            if (rank == 0) end("another rank has gone");
            end_alone("rank 0 has gone");
        }
        waited += seconds() - start;
    }
    // Of the threads that end this process the first to come speaks, and the others stay here.
    static void speak_alone() {
        static std::mutex once;
        once.lock();
    }
    [[noreturn]] void end_alone(const std::string& text) {
        speak_alone();
        print_error(program, format("rank %d: %s", rank, text.c_str()));
        _exit(1);
    }

    void meet(const std::string& host, int port, int listener, double patience) {
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
    // A connection to rank 0.
    int come(const std::string& host, int port, bool life, double deadline) const {
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
    static void give_up_after(int fd, double s) { // 0: never
        const timeval limit = {(time_t)s, 0};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    }
    void receive_others(int listener, double deadline) {
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
    // False: it is none of ours, or not the first of its rank, and is closed.
    bool admit(int fd) {
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

    // The watcher's thread: says that we live, and hears it of the others.
    void watch() {
        std::vector<pollfd> list;
        std::vector<int> whose;
        for (int r = 0; r < size; r++)
            if (peers[r].life >= 0) list.push_back({peers[r].life, POLLIN, 0}), whose.push_back(r);
        std::vector<double> silent(list.size()); // s; the time in which we were stopped ourselves (Ctrl-Z) counts little
        double spoke = 0, last = seconds();
        while (!leaving) {
            if (seconds() - spoke >= 1) {
                spoke = seconds();
                for (const pollfd& p : list) send(p.fd, "h", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
            }
            poll(list.data(), list.size(), 100);
            const double passed = std::min(seconds() - last, 0.2);
            last = seconds();
            for (size_t i = 0; i < list.size(); i++) {
                silent[i] += passed;
                if (list[i].fd < 0 || (!list[i].revents && silent[i] < silence)) continue;
                if (list[i].revents && hear(list[i].fd, whose[i])) silent[i] = 0;
                else if (parting) list[i].fd = -1; // it is done, too
                else if (list[i].revents) lost(whose[i], "has gone");
                else lost(whose[i], format("has not been heard of for %g s", silence));
            }
        }
    }
    // False: the connection has ended.
    bool hear(int fd, int r) {
        char bytes[4096];
        const ssize_t n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (n <= 0) return false;
        const std::string_view said(bytes, (size_t)n);
        const size_t error = said.find('e');
        if (error == said.npos) return true;
        let_files_end();
        if (rank > 0) _exit(1); // rank 0 has said it
        end(format("rank %d: %s", r, std::string(said.substr(error + 1)).c_str()));
    }
    void lost(int r, const std::string& how) {
        let_files_end();
        if (rank > 0 && ending) print_error(program, last_words), _exit(1); // it did not hear them
        if (rank > 0) end_alone("rank 0 " + how);
        end(name_of(r) + " " + how);
    }
    void let_files_end() { // no file is left half written; the lock is kept
        if (files.try_lock_for(std::chrono::milliseconds((int)(SAVING * 1000)))) {}
    }
};
