// gpu_kernels.h: the kernels of an engine's steps: a step's inputs, penalties and masks, reported logits.
#pragma once
#include "qwen3.cu"
#include "server/engine/job.h"

namespace server {

constexpr int MAX_BIAS = 1024 + 1 + 2 * MAX_ENDS; // ids a job may name, <tool_call>, and ends that are banned for now

// GPU state of the sequence in each slot.
struct Slots {
    int* last;        // (slots) the token sampled last
    Draw* draw;       // (slots)
    uint32_t* seen;   // (slots,V) for the penalties; undefined for slots without penalties
    int* biases;      // (slots) number of biased ids
    int* bias_id;     // (slots, MAX_BIAS)
    float* bias;      // (slots, MAX_BIAS)
    int* wanted;      // (slots) alternatives to report, or -1
};

// The inputs of a step: N rows of the batch, R draws.
struct StepNumbers {
    int *token, *pos, *seq, *slot;       // (N)
    int *draw_row, *draw_seq, *draw_pos; // (R) row of the batch; of the block table; position of that row's token
    StepNumbers(int* at, int N, int R)
        : token(at), pos(at + N), seq(at + 2 * N), slot(at + 3 * N),
          draw_row(at + 4 * N), draw_seq(draw_row + R), draw_pos(draw_seq + R) {}
};
// Copies the inputs from the CPU's memory and completes them, one thread per row or draw: tokens that the host has not
// seen yet, the block table, sampling parameters.
__global__ void prepare_kernel(StepNumbers to, StepNumbers from, int N, int R, int* table, int max_pages, Draw* draws,
                               Slots slots) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) {
        const int token = from.token[i], pos = from.pos[i], seq = from.seq[i], slot = from.slot[i];
        to.token[i] = token < 0 && seq >= 0 ? slots.last[seq] : token;
        to.pos[i] = pos, to.seq[i] = seq, to.slot[i] = slot;
        if (seq >= 0) table[(size_t)seq * max_pages + pos / PAGE] = slot / PAGE;
    }
    if (i < R) {
        const int row = from.draw_row[i], seq = from.draw_seq[i], pos = from.draw_pos[i];
        to.draw_row[i] = row, to.draw_seq[i] = seq, to.draw_pos[i] = pos;
        if (seq >= 0) draws[i] = slots.draw[seq];
    }
}

// Allowed tokens as bits, for the draws of a step that are constrained by a form.
struct Masks {
    const int* row;       // (R) row of `bits`, or -1: any token; null: no draw of the step has a form
    const uint32_t* bits; // (rows, words)
    int words;
};

// Applies penalties, biases and masks as the CPU does, one block per draw.
__global__ void adjust_kernel(float* all_logits, size_t V, const int* draw_seq, Slots slots, Masks masks) {
    let_next_start();
    wait_for_previous();
    const int s = draw_seq[blockIdx.x];
    if (s < 0) return;
    float* logits = all_logits + blockIdx.x * V;
    const Sampling& how = slots.draw[s].how;
    if (has_penalties(how))
        for (size_t id = threadIdx.x; id < V; id += blockDim.x)
            logits[id] = penalized(logits[id], how, slots.seen[s * V + id]);
    __syncthreads();
    const int* ids = slots.bias_id + (size_t)s * MAX_BIAS;
    for (int i = threadIdx.x; i < slots.biases[s]; i += blockDim.x)
        logits[ids[i]] += slots.bias[(size_t)s * MAX_BIAS + i];
    if (!masks.row || masks.row[blockIdx.x] < 0) return;
    __syncthreads(); // a thread masks logits that other threads have adjusted
    const uint32_t* bits = masks.bits + (size_t)masks.row[blockIdx.x] * masks.words;
    for (size_t id = threadIdx.x; id < V; id += blockDim.x)
        if (id / 32 >= (size_t)masks.words || !(bits[id / 32] >> id % 32 & 1)) logits[id] = -INFINITY;
}

// The model's own logit of each sampled token, where it is reported: `logits` may hold adjusted ones. One warp per
// draw. A head has run(y, r, k, C): the RUN numbers of row r, of C, from k on.
struct PlainHead {
    static constexpr int RUN = 1;
    const bf16* W; // (V,C)
    __device__ void run(float (&y)[1], int r, int k, int C) const { y[0] = to_acc(W[(size_t)r * C + k]); }
};
template <class Head>
__global__ void drawn_logit_kernel(float* out, const int* drawn, const int* draw_seq, const int* wanted, const bf16* x,
                                   const int* draw_row, Head W, int C) {
    constexpr int RUN = Head::RUN;
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, s = draw_seq[r];
    if (s < 0 || wanted[s] < 0) return;
    const bf16* token = x + (size_t)draw_row[r] * C;
    float y = 0;
    for (int k = threadIdx.x * RUN; k < C; k += 32 * RUN) {
        float row[RUN];
        W.run(row, drawn[r], k, C);
        for (int i = 0; i < RUN; i++) y += row[i] * to_acc(token[k + i]);
    }
    y = warp_sum(y);
    if (threadIdx.x == 0) out[r] = y;
}

} // namespace server
