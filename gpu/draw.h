// gpu/draw.h: draws of tokens on a GPU: what is drawn and where it goes, for host code and kernels.
#pragma once
#include "qwen3.cu"

struct Draw {
    Sampling how;
    int exist; // only ids below may be drawn
};

// Where draws go, and the batch of the next step.
struct DrawState {
    int *token, *pos, *slot; // (R) of the token just drawn, out; pos: in, that of the token before
    const int *seq, *pages;  // (R), (., max_pages)
    int max_pages;
    uint32_t* seen;          // (sequences, V) or null
    volatile int* ring;      // (R, ring_size) in the host's memory, or null: id + 1 of the token at each position
    int ring_size;
    int* last;               // (sequences) what was drawn last, or null
};

// How a product's rows were dealt: `rows` neighbours at a time to its blocks in turn, the first ones to block `shift`.
// blocks 0: they were not.
struct RowsDealt {
    int blocks = 0, rows = 0, shift = 0;
};

// The likeliest id of each of the head's blocks: there is room for so many of them.
inline constexpr int BEST_BLOCKS = 1024;
// Groups of ids in the sampler: those of four of its threads, or of some of the head's blocks.
inline constexpr int DRAW_GROUPS = 256;

// ---- Launchers
// The logits of up to 16 rows of x, with the penalties of `draw` and `seen`; and the likeliest id of each block, to
// `best`. Returns how rows of W were dealt to blocks.
RowsDealt draw_head_gpu(Context& ctx,
                        float* logits,            // (R,V) out
                        const Draw* draw,         // (R)
                        const uint32_t* seen,     // (R,V), or null: no penalties
                        unsigned long long* best, // (R, BEST_BLOCKS) out
                        const bf16* x,            // (., C)
                        const int* rows,          // (R)
                        const Linear<bf16>& W, int R);
// Book I's `sample`, and the next step's batch. early: it may start before the kernel ahead has ended.
void sample_gpu(Context& ctx, bool early,
                const float* logits,            // (R,V)
                size_t V,
                const Draw* draws,              // (R)
                const unsigned long long* best, // (R, BEST_BLOCKS) of draw_head_gpu, or null
                const RowsDealt& dealt,         // ... which returned it
                const DrawState& state, int R);
// Book I's `likeliest`.
void likeliest_gpu(Context& ctx,
                   Likeliest* out,      // (R)
                   const float* logits, // (R,V)
                   size_t V, int exist,
                   const int* seq,      // (R) -1: a spare row
                   const int* wanted,   // by seq: how many ids; -1: the row is left alone
                   int R);

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
