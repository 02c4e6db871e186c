#include "base/child.h"
#include <csignal>

Child::Child(const std::vector<std::string>& words, int input, bool both, int (*run)(const char*, char* const*)) {
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) DIE("a pipe: %s", strerror(errno));
    pid = fork(), out = ends[0];
    if (pid == 0) {
        setpgid(0, 0);
        dup2(input < 0 ? open("/dev/null", O_RDONLY) : input, 0), dup2(ends[1], 1);
        if (both) dup2(ends[1], 2);
        for (int signal_ : {SIGINT, SIGPIPE, SIGTERM, SIGHUP}) signal(signal_, SIG_DFL);
        run(argv[0], argv.data());
        dprintf(2, "%s: %s\n", argv[0], strerror(errno));
        _exit(127);
    }
    close(ends[1]);
    if (pid < 0) { close(out); DIE("a process: %s", strerror(errno)); }
    setpgid(pid, pid); // (parent and child both call it: either may run first)
}

bool Child::has_ended() const {
    siginfo_t end = {};
    waitid(P_PID, (id_t)pid, &end, WEXITED | WNOHANG | WNOWAIT);
    return end.si_pid == pid;
}

int Child::end() const {
    int status = 0;
    kill(-pid, SIGKILL);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    return status;
}
