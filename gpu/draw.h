// gpu/draw.h: keys of logits, and where a drawn token goes.
#pragma once
#include "qwen3.cu"

#ifdef __device__ // nvcc, or emulation on a CPU
// A larger key is likelier: the logit, then the lower id.
__device__ inline unsigned long long draw_key(float logit, int id) {
    const uint32_t u = __float_as_uint(logit + 0.f); // -0 becomes 0
    return (unsigned long long)(u >> 31 ? ~u : u | 0x80000000) << 32 | (uint32_t)~id;
}
__device__ inline float logit_of(unsigned long long key) {
    const uint32_t u = (uint32_t)(key >> 32);
    return __uint_as_float(u >> 31 ? u & 0x7fffffff : ~u);
}

// The drawn token becomes the next step's batch, is counted and kept, and goes to the host.
__device__ __forceinline__ void publish(const DrawState& state, int row, size_t V, int answer) {
    const int pos = state.pos[row] + 1, page = pos / PAGE, seq = state.seq[row];
    state.token[row] = answer;
    state.pos[row] = pos;
    if (page < state.max_pages)
        state.slot[row] = state.pages[(size_t)seq * state.max_pages + page] * PAGE + pos % PAGE;
    if (state.seen) state.seen[seq * V + answer]++;
    if (state.last) state.last[seq] = answer;
    if (state.ring) state.ring[(size_t)row * state.ring_size + pos % state.ring_size] = answer + 1;
}
#endif
