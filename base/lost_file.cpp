// base/lost_file.cpp: which file is mapped where, in a form that a signal handler can read.
#include "base/lost_file.h"
#include "base/unfinished.h"
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unistd.h>

namespace {
struct Mapping {
    std::atomic<const uint8_t*> begin; // null: free
    size_t bytes;
    char* path;
};
Mapping mappings[1024];
std::mutex mapping_mutex;
const char* program_name = "";

void say(const char* text) {
    if (write(2, text, strlen(text)) < 0) {}
}

void on_bus_error(int, siginfo_t* info, void*) {
    const uint8_t* at = (const uint8_t*)info->si_addr;
    for (const Mapping& m : mappings) {
        const uint8_t* begin = m.begin.load(std::memory_order_acquire);
        if (!begin || info->si_code != BUS_ADRERR || at < begin || at >= begin + m.bytes) continue;
        say(program_name), say(": "), say(m.path), say(": became shorter while it was in use\n");
        leave(1);
    }
    signal(SIGBUS, SIG_DFL), raise(SIGBUS);
}
} // namespace

void remember_mapping(const void* data, size_t bytes, const std::string& path) {
    std::lock_guard lock(mapping_mutex);
    for (Mapping& m : mappings) {
        if (m.begin.load(std::memory_order_relaxed)) continue;
        m.bytes = bytes, m.path = strdup(path.c_str());
        if (!m.path) return;
        for (char* c = m.path; *c; c++)
            if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = ' ';
        m.begin.store((const uint8_t*)data, std::memory_order_release);
        return;
    }
}

void forget_mapping(const void* data) {
    std::lock_guard lock(mapping_mutex);
    for (Mapping& m : mappings)
        if (m.begin.load(std::memory_order_relaxed) == data) {
            m.begin.store(nullptr, std::memory_order_release);
            free(m.path);
            return;
        }
}

void name_lost_files(const char* program) {
    program_name = program;
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
}
