// base/unfinished.cpp: the table of temporary names, in a form that a signal handler can read.
#include "base/unfinished.h"
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

struct Unfinished::Slot {
    enum State { FREE, TAKEN, NAMED };
    std::atomic<int> state;
    pid_t owner;
    char path[4096];
};
static Unfinished::Slot unfinished_names[256];

Unfinished::Unfinished(const std::string& path) : slot(nullptr) {
    if (path.size() >= sizeof Slot::path) return;
    for (Slot& s : unfinished_names) {
        int free = Slot::FREE;
        if (!s.state.compare_exchange_strong(free, Slot::TAKEN)) continue;
        s.owner = getpid();
        memcpy(s.path, path.c_str(), path.size() + 1);
        s.state = Slot::NAMED, slot = &s;
        return;
    }
}

Unfinished::~Unfinished() {
    if (slot) slot->state = Slot::FREE;
}

// A folder and the files in it. (opendir allocates, which a handler of signals must not.)
static void remove_folder(const char* path) {
    struct Entry { // what the kernel writes: man 2 getdents64
        uint64_t inode;
        int64_t next;
        uint16_t length;
        uint8_t type;
        char name[1];
    };
    alignas(Entry) char some[4096];
    const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    for (long n; folder >= 0 && (n = syscall(SYS_getdents64, folder, some, sizeof some)) > 0;)
        for (long at = 0; at < n; at += ((const Entry*)(some + at))->length)
            unlinkat(folder, ((const Entry*)(some + at))->name, 0);
    if (folder >= 0) close(folder);
    rmdir(path);
}

void remove_unfinished() {
    for (const auto& s : unfinished_names)
        if (s.state == Unfinished::Slot::NAMED && s.owner == getpid() && unlink(s.path) != 0 && errno == EISDIR)
            remove_folder(s.path);
}

void leave(int status) {
    remove_unfinished();
    _exit(status);
}

void end_by_signal(int number) {
    remove_unfinished();
    signal(number, SIG_DFL);
    sigset_t all;
    sigemptyset(&all), sigaddset(&all, number);
    sigprocmask(SIG_UNBLOCK, &all, nullptr); // (it is blocked in its own handler)
    raise(number);
    _exit(128 + number);
}

void end_on_signals() {
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGXCPU, SIGXFSZ}) {
        struct sigaction now;
        if (sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) signal(number, end_by_signal);
    }
}
