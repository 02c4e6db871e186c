// gpu/backward/lora_up.h: dh and dB of adapters of ranks up to 32 on Hopper, divided among blocks.
#pragma once
#include "gpu/hopper.h"
#include "qwen3.cu"

// dh and dB on Hopper, for ranks up to 32: a tile of dy comes from memory once, and wgmma uses it both ways. A block
// owns a unit, 1024 rows of a module's s B, which stay in shared memory, and a split of the tokens, which pass by 64 at
// a time in stages of 256 rows. Each of two warpgroups has half of a stage's rows: it sums dB of all its rows in
// registers, and dh of the 64 tokens; the first warpgroup adds both halves. One warp copies. lora_up_sums_kernel adds,
// in order, parts that several blocks have: dB's splits, and dh if a module has several units. Bound by memory
// bandwidth.
struct LoraUp {
    static constexpr int ROWS = 1024, TOKENS = 64, PIECE = 256, PIECES = ROWS / PIECE, RANK = 32, STAGES = 4;
    static constexpr int PANEL = TOKENS * 128, DY_BYTES = PIECE / 64 * PANEL;
    static constexpr int STAGE_BYTES = DY_BYTES + TOKENS * RANK * 2;
    static constexpr int B_BYTES = ROWS * RANK * 2, DH_BYTES = TOKENS * RANK * 4; // (dh in two buffers)
    static constexpr int SHARED = B_BYTES + STAGES * STAGE_BYTES + 2 * DH_BYTES + 1024;
    static constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128, SUMS = ROWS * RANK;
    static constexpr int LEAST_TILES = 4; // of 64 tokens, for a block
    bf16* dh;        // (N, width)
    float* dB;       // (out, width)
    float* dh_parts; // (parts, N, RANK): of each unit of the modules with several
    float* dB_parts; // (units, splits, SUMS), as the threads hold them
    float s;
    int N, rank, width, modules, splits;
    int first[4], last[4]; // rows of module j
    int unit[4], part[4];  // its first unit; the first of its parts of dh. [modules]: how many there are in all

    LoraUp(bf16* dh, float* dB, void* scratch, float* partial, const Linear<bf16>& W, int N, int sms)
        : dh(dh), dB(dB), dh_parts((float*)scratch), dB_parts(partial), s(W.adapter.s), N(N), rank(W.adapter.rank),
          width((int)W.adapter.width()), modules(W.adapter.modules), first(), last(), unit(), part() {
        for (int j = 0; j < modules; j++) {
            const int block = W.adapter.block[j], units = (W.rows[block] + ROWS - 1) / ROWS;
            first[j] = W.first_row(block), last[j] = first[j] + W.rows[block];
            unit[j + 1] = unit[j] + units, part[j + 1] = part[j] + (units > 1 ? units : 0);
        }
        splits = std::max(1, std::min(sms / unit[modules], tiles() / LEAST_TILES));
    }
    BOTH int tiles() const { return (N + TOKENS - 1) / TOKENS; }
    int units() const { return unit[modules]; }
    int parts() const { return part[modules]; }
    bool fits(size_t scratch) const {
        return rank <= RANK && (size_t)parts() * N * RANK * sizeof(float) <= scratch &&
               (size_t)units() * splits * SUMS * sizeof(float) <= PARTIAL_BYTES;
    }
    // (A variable index would put a copy of the array into local memory.)
    __device__ static int pick(const int (&x)[4], int j) { return j == 0 ? x[0] : j == 1 ? x[1] : x[2]; }
    __device__ int module_of(int u) const { return (modules > 1 && u >= unit[1]) + (modules > 2 && u >= unit[2]); }
    __device__ bool has_parts(int j) const { return (j == 0 ? part[1] : j == 1 ? part[2] : part[3]) > pick(part, j); }
};
