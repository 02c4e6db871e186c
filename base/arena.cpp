#include "base/arena.h"

size_t available_memory() {
    size_t bytes = SIZE_MAX, number;
    if (FILE* f = fopen("/proc/meminfo", "r")) {
        char line[128];
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "MemAvailable: %zu kB", &number) == 1) bytes = number * 1024;
        fclose(f);
    }
    for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"})
        if (FILE* f = fopen(file, "r")) {
            if (fscanf(f, "%zu", &number) == 1) bytes = std::min(bytes, number);
            fclose(f);
        }
    return bytes;
}

void Arena::allocate(const char* what) {
    if (gpu) {
        if constexpr (WITH_GPU) base = (uint8_t*)gpu_allocate(used, what);
    } else {
        const size_t have = available_memory();
        void* at = MAP_FAILED;
        constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        if (used <= have) at = mmap(nullptr, used, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED) DIE("%s needs %zu bytes of memory and %zu are available", what, used, have);
        madvise(at, used, MADV_HUGEPAGE); // fewer TLB misses; a wish, not a need
        base = (uint8_t*)at;
    }
    size = used, used = 0;
}

void Arena::release() {
    if (!base) return;
    if (!gpu) munmap(base, size);
    else if constexpr (WITH_GPU) gpu_release(base);
    base = nullptr;
}
