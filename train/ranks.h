// train/ranks.h: several processes that train one model together, on one host or on several: a rank each, and a GPU
// each if there are GPUs.
//
//   Ranks ranks("train_lora")                this process alone, as it begins
//   ranks.fork_here(2)                       --gpus 2: becomes two processes; or
//   ranks.join_launcher()                    one of those that torchrun, mpirun or Slurm has started
//   ranks.must_agree(facts)                  ends all if another rank has other facts
//   ranks.sum(x, n)                          a few numbers of the host, added up over all ranks in their order
//   ranks.together([] { add_up(...); }), ranks.finish()   the same of gradients, wherever they are
//   ranks.end(text)                          tells the others, and ends all of them
//   ranks.part()                             the work is done
//
// Rank 0 listens at MASTER_ADDR:MASTER_PORT, and every other rank has two connections to it. One is for what is said in
// turn (facts, sums of few numbers, and without GPUs the gradients). On the other a thread says every second that its
// rank lives; when a rank has gone, or says why it ends, rank 0 says so on stderr and to all others, and all end.
// Between GPUs gradients go by NCCL, whose library is looked for when it is needed: the program is built without it.
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
    const char* program;
    int rank = 0, size = 1, local = 0; // of all; which GPU of its host
    double silence = 20;               // s without a word after which a rank is taken for dead
    double waited = 0;                 // s spent in sums, for the others and for the numbers to travel

    explicit Ranks(const char* name) : program(name) {}
    Ranks(const Ranks&) = delete;
    ~Ranks();

    // ---- Becoming one of several

    // --gpus N: this process is rank 0 and forks the others. Before anything is asked of a GPU or of OpenMP's threads.
    void fork_here(int n);

    // One of the processes of a launcher, if there is one: torchrun sets the first names, the others are of Open MPI
    // and Slurm, whose users set MASTER_ADDR.
    void join_launcher(double patience = PATIENCE);

    // What is told to people, once.
    __attribute__((format(printf, 2, 3))) void tell(const char* text, ...) const;

    // ---- What is said in turn, by the main threads. All ranks do the same in the same order.

    // Adds up n numbers of the host over all ranks, in the order of the ranks.
    template <class N> void sum(N* x, size_t n); // N: int, double, float

    // Facts are lines of a name, a tab and a value. Ends all if a rank has others than rank 0.
    void must_agree(const std::string& facts);

    // ---- Gradients and parameters, where they are: x and y on the GPU once there is one (use_gpu).

    // `f` calls some of the three below. finish: what they do has been done, for whatever is computed next.
    void together(const std::function<void()>& f);
    void finish();
    // x becomes its sum over all ranks.
    void add_up(float* x, size_t n);
    // own: this rank's piece of the sum of x, which is `size` pieces.
    void add_up_pieces(float* own, const float* x, size_t piece);
    // all: the pieces of all ranks, `bytes` each. (own may be where it belongs in `all`.)
    void gather(void* all, const void* own, size_t bytes);
    // Brings `waited` up to date, once what was asked of the GPU has been done.
    void look_at_the_clock();
    void use_gpu(const Context& ctx); // all ranks have one

    // ---- The end

    // Held while files are written: another rank's death waits for that, though not for long.
    std::unique_lock<std::timed_mutex> writing() { return std::unique_lock<std::timed_mutex>(files); }

    // All ranks are done. Rank 0 waits for those that it forked.
    void part();

    // Ends every rank with status 1. Rank 0 says why.
    [[noreturn]] void end(const std::string& text);
    [[noreturn]] void wait_for_the_end(); // which another rank brings

  private:
    struct Peer { // of rank 0: every other rank; of these: rank 0
        int talk = -1, life = -1;
        int pid = 0;
        char host[64] = {};
    };
    std::vector<Peer> peers;
    std::vector<pid_t> children;
    std::thread watcher;
    std::timed_mutex files;
    std::string last_words;          // of a rank that is not 0, once
    std::atomic<bool> ending{false}; // ... they are there
    std::atomic<bool> parting{false}, leaving{false}; // a rank that has gone is no fault any more; the watcher's end
    std::shared_ptr<Nccl> nccl;      // between GPUs

    std::string name_of(int r) const;
    void in_turn(const std::function<void()>& f);
    [[noreturn]] void end_alone(const std::string& text);
    void meet(const std::string& host, int port, int listener, double patience);
    // A connection to rank 0.
    int come(const std::string& host, int port, bool life, double deadline) const;
    void receive_others(int listener, double deadline);
    // False: it is none of ours, or not the first of its rank, and is closed.
    bool admit(int fd);

    // The watcher's thread: says that we live, and hears it of the others.
    void watch();
    // False: the connection has ended.
    bool hear(int fd, int r);
    void lost(int r, const std::string& how);
    void let_files_end();
};
