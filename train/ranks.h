// train/ranks.h: several processes that train one model together, on one host or several: one rank each, and one GPU
// each if there are GPUs.
//
//   Ranks ranks("train_lora")                this process alone, as it begins
//   ranks.fork_here(2)                       --gpus 2: becomes two processes; or
//   ranks.join_launcher()                    one of the processes started by torchrun, mpirun or Slurm
//   ranks.must_agree(facts)                  ends all if another rank has other facts
//   ranks.sum(x, n)                          a few numbers of the host, summed over all ranks in their order
//   ranks.together([] { add_up(...); }), ranks.finish()   the same for gradients, on host or GPU
//   ranks.end(text)                          reports to the others, and ends all of them
//   ranks.part()                             the work is done
//
// Rank 0 listens at MASTER_ADDR:MASTER_PORT, and every other rank has two connections to it. The first carries
// collective messages in order (facts, sums of few numbers, and without GPUs the gradients). On the second a thread
// sends a heartbeat every second, and perhaps a report, which is its last message. When a rank is lost, or reports why
// it ends, rank 0 reports it on stderr and to all others, and all end. Between GPUs gradients go by NCCL, which is
// loaded when it is needed: the program is built without it.
#pragma once
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <thread>
#include <vector>

struct Context;
struct Nccl;

struct Ranks {
    static constexpr double PATIENCE = 120, SAVING = 8; // s that a rank has to come; to end a file
    static constexpr size_t CHUNK = 1 << 16;            // numbers sent at once
    static constexpr size_t MOST_REPORTED = 1 << 20;    // bytes of a report
    const char* program;
    int rank = 0, size = 1, local = 0; // of all; which GPU of its host
    std::atomic<double> silence{20};   // s of silence after which a rank counts as lost
    double pulse = 1;                  // s between heartbeats
    double waited = 0;                 // s spent in sums, waiting for other ranks and for the transfer

    explicit Ranks(const char* name) : program(name) {}
    Ranks(const Ranks&) = delete;
    ~Ranks();

    // ---- Becoming one of several

    // --gpus N: this process is rank 0 and forks the others. Call it before any use of a GPU or of OpenMP's threads.
    void fork_here(int n);

    // Joins the processes of a launcher, if there is one. torchrun sets the first names; the others are Open MPI's and
    // Slurm's, whose users set MASTER_ADDR.
    void join_launcher(double patience = PATIENCE);

    // A message for users, printed once.
    __attribute__((format(printf, 2, 3))) void tell(const char* text, ...) const;

    // ---- Collective messages, from the main threads. All ranks make the same calls in the same order.

    // Sums n numbers of the host over all ranks, in the order of the ranks.
    template <class N> void sum(N* x, size_t n); // N: int, double, float

    // Facts are lines of a name, a tab and a value. Ends all if a rank has others than rank 0.
    void must_agree(const std::string& facts);

    // ---- Gradients and parameters, in their own memory: x and y on the GPU once there is one (use_gpu).

    // `f` calls some of the three below. finish: their results are complete, for any later computation.
    void together(const std::function<void()>& f);
    void finish();
    // x becomes its sum over all ranks.
    void add_up(float* x, size_t n);
    // own: this rank's piece of the sum of x, which is `size` pieces.
    void add_up_pieces(float* own, const float* x, size_t piece);
    // all: the pieces of all ranks, `bytes` each. (own may be where it belongs in `all`.)
    void gather(void* all, const void* own, size_t bytes);
    // Updates `waited`, once all launched work of the GPU is complete.
    void look_at_the_clock();
    void use_gpu(const Context& ctx); // all ranks have one

    // ---- The end

    // Held while files are written: the end after another rank's loss waits for it, with a time limit.
    std::unique_lock<std::timed_mutex> writing() { return std::unique_lock<std::timed_mutex>(files); }

    // All ranks are done. Rank 0 waits for those that it forked. A rank that is silent here is lost, too.
    void part();

    // Ends every rank with status 1. Rank 0 reports the text, and kills those that it forked and that do not end.
    [[noreturn]] void end(const std::string& text);
    [[noreturn]] void wait_for_the_end(); // another rank's message

  private:
    struct Peer { // rank 0: to every other rank; the others: to rank 0
        int talk = -1, life = -1;
        int pid = 0;
        char host[64] = {};
    };
    std::vector<Peer> peers;
    std::vector<pid_t> children;
    std::thread watcher;
    std::timed_mutex files;
    std::mutex speaking;             // on the second connections: a heartbeat must not get into a report
    bool reported = false;           // ... after which nothing follows
    std::string last_words;          // of a rank that is not 0, once
    std::atomic<bool> ending{false}; // ... they are there
    std::atomic<bool> parting{false}, leaving{false}; // a lost rank is no fault any more; the watcher's end
    std::shared_ptr<Nccl> nccl;      // between GPUs

    void kill_children(); // one that hangs would keep its GPU
    std::string name_of(int r) const;
    void in_turn(const std::function<void()>& f);
    [[noreturn]] void end_alone(const std::string& text);
    void meet(const std::string& host, int port, int listener, double patience);
    // A connection to rank 0.
    int come(const std::string& host, int port, bool life, double deadline) const;
    void receive_others(int listener, double deadline);
    // False: the connection is not ours, or not the first of its rank, and is closed.
    bool admit(int fd);

    // The watcher's thread: sends this rank's heartbeat and receives the others'.
    void watch();
    // False: the connection has ended.
    bool hear(int fd, int r);
    void lost(int r, const std::string& how);
    void let_files_end();
};
