// base/arena.h: memory that is planned once, of the CPU or of a GPU.
#pragma once
#include "base/error.h"
#include <algorithm>
#include <sys/mman.h>

// Bytes that can still be used, as the kernel says and a container's limit allows (SIZE_MAX where neither does).
size_t available_memory();

#ifdef QWEN3_GPU // the Makefile: compiled by nvcc
constexpr bool WITH_GPU = true;
#else
constexpr bool WITH_GPU = false;
#endif
void* gpu_allocate(size_t bytes, const char* what); // model/gpu.cu
void gpu_release(void* p);

// An arena is planned by running the same code twice: first without memory, to count; then to hand out.
struct Arena {
    uint8_t* base = nullptr;
    size_t used = 0, size = 0;
    bool gpu = false; // its memory is the GPU's

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() { release(); }

    // n numbers, 256-byte aligned, zero. (A GPU's lines have 128: all of a training step took 10% longer where arrays
    // began in the middle of one.)
    template <class T> T* take(size_t n) {
        size_t at = used, bytes;
        const bool overflow = __builtin_mul_overflow(n, sizeof(T), &bytes);
        if (overflow || bytes > SIZE_MAX / 2 - used) DIE("the memory plan overflows");
        used = (used + bytes + 255) / 256 * 256;
        return base ? (T*)(base + at) : nullptr;
    }

    // After counting: takes the memory and starts over. The system gives pages when they are first touched.
    void allocate(const char* what);

    void release();
};
