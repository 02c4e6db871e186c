// gpu/step/instructions.h: the instructions of one kernel a token (tests/emulate/step_emulation.h has them for a CPU).
#pragma once
#include "gpu/hopper.h"
#include "qwen3.cu"

// ---- Instructions
// An mbarrier (see barrier_begin), and copies that it waits for.
struct StepBarrier {
    uint64_t state;
    __device__ void begin(int arrivals) { barrier_begin(shared_address(this), arrivals); }
    __device__ void arrive() { barrier_arrive(shared_address(this)); }
    __device__ void wait(uint32_t parity) { barrier_wait(shared_address(this), parity); }
    __device__ bool is_odd() { // its phase
        uint32_t passed;
        asm volatile("{ .reg .pred passed; mbarrier.test_wait.parity.shared::cta.b64 passed, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, passed; }" : "=r"(passed) : "r"(shared_address(this)) : "memory");
        return passed;
    }
    __device__ void expect(int bytes) { barrier_arrive_expecting(shared_address(this), bytes); }
    __device__ static void begun() { barriers_begun(); }
    // Copies `bytes` by one thread (see expect); or 16 bytes, and an arrival when all of this thread's copies so far
    // are complete. Weights are read once, a page once for a group of tokens: they leave the L2 cache first.
    __device__ void copy([[maybe_unused]] void* to, [[maybe_unused]] const void* from, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
                     "r"(shared_address(this)), "l"(EVICT_FIRST) : "memory");
#endif
    }
    __device__ static void copy16(void* to, const void* from) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                     ::"r"(shared_address(to)), "l"(from), "l"(EVICT_FIRST) : "memory");
    }
    __device__ void arrive_with_copies() { barrier_arrive_with_copies(shared_address(this)); }
};
__device__ __forceinline__ int step_opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ inline unsigned char* step_memory() {
    extern __shared__ __align__(128) unsigned char step_bytes[];
    return step_bytes;
}
__device__ inline void step_meet(int barrier, int threads) { // bar.sync
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// A word, in one piece: if its reader uses all of it. ptxas loads parts that are used one by one, where others are not:
// then the epoch could be newer than a part.
__device__ inline uint4 step_peek(const uint4* word) {
    uint64_t a, b;
    asm volatile("{ .reg .b128 w; ld.relaxed.gpu.global.b128 w, [%2]; mov.b128 {%0, %1}, w; }"
                 : "=l"(a), "=l"(b) : "l"(word) : "memory");
    return make_uint4((uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32));
}
__device__ inline void step_publish(uint4* word, uint4 v) {
    const uint64_t a = v.x | (uint64_t)v.y << 32, b = v.z | (uint64_t)v.w << 32;
    asm volatile("{ .reg .b128 w; mov.b128 w, {%1, %2}; st.relaxed.gpu.global.b128 [%0], w; }"
                 ::"l"(word), "l"(a), "l"(b) : "memory");
}
__device__ inline uint64_t step_clock() { // ns
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
// Adds 1; a thread that reads the sum sees the other threads' writes made before theirs (release, acquire).
__device__ inline int step_arrive(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
