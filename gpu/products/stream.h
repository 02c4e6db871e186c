// gpu/products/stream.h: products of up to 16 tokens, at the speed at which the weights come from memory.
#pragma once
#include "gpu/draw.h"
#include "gpu/products/epilogues.h"
#include "qwen3.cu"

// ---- Few tokens. linear, linear_add, SwiGLU of them, the head, and with NORM the same of rmsnorm(stream).
// Grid: as many blocks as are resident at once, each of 4 to 12 warps. A block takes groups of TILES x 8 rows of W in
// turn (PAIR: 8 of gate and 8 of up), all of its warps together: `in` is cut into steps of 32, and a warp has p.steps
// of them. Lane 4 g + t reads row g of each tile, numbers 8 t .. 8 t + 7 of each step, in one load of 16 bytes.
// In halves these are two b operands of mma, if the a operands hold the same numbers of the tokens (mma_32): a sum does
// not ask in which order `in` is numbered, as long as both operands agree. So nothing is moved or converted between
// memory and tensor core. M: the a operand has room for 8 M tokens; fewer cost as much.
// Afterwards the warps' sums are added in shared memory, one (token, row) a thread, which calls the epilogue.
// Shared memory: two sets of (warps, TILES, 8 M, 8) sums, used in turn, so that one barrier a group is enough; with
// NORM what norm_rows needs, and its output (N, in + 8), whose rows begin in different banks.
// Bound by the memory's speed: each weight is read once, and all of a group's first STREAM_LOADS loads are on their way
// before any is waited for; those of the next group before the sums of this one are added.
// A sum's order depends on `in` only: a row of tokens has the same bits whatever N and M are.
constexpr int STREAM_TOKENS = 16, NORM_TOKENS = 4, STREAM_LOADS = 8;

struct StreamArgs {
    const bf16* x;       // (., in)
    const int* rows;     // (N) rows of x, or null: the first N
    const float* stream; // (N,in) with NORM
    const bf16* norm;    // (in)
    float eps;
    const bf16* W;       // (out,in), with PAIR (2 out, in)
    int N, in, out;
    int steps = 0;       // of 32 numbers of `in`, a warp: set by launch_stream
};

// A lane's part of a group's rows: LOADS steps.
template <int TILES, bool PAIR> struct StreamWeights {
    static constexpr int LOADS = STREAM_LOADS / TILES, ROWS = PAIR ? 8 : 8 * TILES;
    uint4 w[LOADS][TILES];
    // Loads LOADS steps from `step` on; zeros from step `last` on.
    __device__ __forceinline__ void load(const StreamArgs& p, int group, int step, int last) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int row = min(group * ROWS + (PAIR ? 0 : tile * 8) + g, p.out - 1);
            const int r = PAIR ? row + tile * p.out : row;
            const bf16* at = p.W + (size_t)r * p.in + step * 32 + 8 * t;
            #pragma unroll
            for (int i = 0; i < LOADS; i++)
                w[i][tile] = load_stream(at + i * 32, step + i < last && (step + i) * 32 + 8 * t < p.in);
        }
    }
    // sum += W x^T for these steps; token[m]: this lane's rows of x.
    template <int M>
    __device__ __forceinline__ void multiply(float (&sum)[TILES][4], const bf16* const (&token)[M], int in,
                                             int step) const {
        #pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int k = min((step + i) * 32 + 8 * (int)(threadIdx.x % 4), in - 8); // past the end w is zero
            uint4 a[2] = {};
            #pragma unroll
            for (int m = 0; m < M; m++) a[m] = *(const uint4*)(token[m] + k);
            #pragma unroll
            for (int tile = 0; tile < TILES; tile++) mma_32(sum[tile], a[0], a[1], w[i][tile]);
        }
    }
};

// Shared memory of stream_kernel behind its sums, with NORM.
BOTH inline int stream_norm_pieces(int N, int in) { return (N * ((in + 127) / 128) + 3) / 4 * 4; } // floats
constexpr int STREAM_NORM_PAD = 8; // numbers between two rows

template <int TILES, int M, bool NORM, class Epilogue>
__global__ void __launch_bounds__(384, 2) stream_kernel(StreamArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || TILES == 2, "a tile of gate, a tile of up");
    constexpr int SUMS = TILES * M * 64; // (tile, token, row)
    extern __shared__ float shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const int first = warp * p.steps, last = min((p.in + 31) / 32, first + p.steps);
    StreamWeights<TILES, Epilogue::PAIR> weights;
    constexpr int ROWS = weights.ROWS;
    const int groups = (p.out + ROWS - 1) / ROWS;
    int group = blockIdx.x;
    // Weights may be read before the previous kernels have ended: no kernel of a forward writes them, and the first
    // one, embed, starts only when all that was launched before it has ended (AdamW in training).
    weights.load(p, group, first, last);
    let_next_start();
    wait_for_previous();
    epilogue.begin();
    const bf16* x = p.x;
    int ld = p.in;
    if (NORM) {
        float* pieces = shared + 2 * warps * SUMS;
        bf16* normed = (bf16*)(pieces + stream_norm_pieces(p.N, p.in));
        ld = p.in + STREAM_NORM_PAD;
        norm_rows(PlainRows{normed, ld, p.in}, p.stream, p.norm, pieces, p.N, p.in, p.eps);
        x = normed;
    }
    const bf16* token[M]; // tokens g and g + 8, this lane's rows of a; past the last one it computes what nobody keeps
    #pragma unroll
    for (int m = 0; m < M; m++) {
        const int n = min(g + 8 * m, p.N - 1);
        token[m] = x + (size_t)(!NORM && p.rows ? p.rows[n] : n) * ld;
    }
    float* sums = shared;
    for (; group < groups; group += gridDim.x) {
        // The first (token, row) that this thread will hand over. A set of sums is (tile, token, row of the tile).
        const int o0 = threadIdx.x, n0 = o0 / 8 % (8 * M), r0 = group * ROWS + o0 / (64 * M) * 8 + o0 % 8;
        [[maybe_unused]] float old = 0;
        if constexpr (Epilogue::ADDS) old = o0 < SUMS && n0 < p.N && r0 < p.out ? epilogue.old(n0, r0) : 0;
        float sum[TILES][4] = {};
        for (int step = first; step < last; step += weights.LOADS) {
            if (step > first) weights.load(p, group, step, last);
            weights.multiply(sum, token, p.in, step);
        }
        if (group + (int)gridDim.x < groups) weights.load(p, group + gridDim.x, first, last);
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            #pragma unroll
            for (int m = 0; m < M; m++) {
                float* to = sums + warp * SUMS + ((tile * M + m) * 8 + g) * 8 + 2 * t;
                *(float2*)to = make_float2(sum[tile][2 * m], sum[tile][2 * m + 1]);
            }
        __syncthreads();
        for (int o = threadIdx.x; o < (Epilogue::PAIR ? SUMS / 2 : SUMS); o += blockDim.x) {
            const int n = o / 8 % (8 * M), r = group * ROWS + o / (64 * M) * 8 + o % 8;
            float y = 0, second = 0;
            #pragma unroll 4
            for (int v = 0; v < warps; v++) {
                y += sums[v * SUMS + o];
                if (Epilogue::PAIR) second += sums[v * SUMS + SUMS / 2 + o];
            }
            const bool inside = n < p.N && r < p.out;
            if constexpr (Epilogue::ADDS) second = o == o0 ? old : inside ? epilogue.old(n, r) : 0;
            epilogue.one(inside, n, r, y, second);
        }
        sums = sums == shared ? shared + warps * SUMS : shared;
    }
    epilogue.end(p.N);
}

template <int TILES, int M, bool NORM, class Epilogue>
RowsDealt launch_stream(Context& ctx, StreamArgs p, Epilogue epilogue) {
    constexpr int ROWS = StreamWeights<TILES, Epilogue::PAIR>::ROWS;
    const int groups = (p.out + ROWS - 1) / ROWS, steps = (p.in + 31) / 32;
    const int warps = std::min(12, std::max(4, steps * TILES / STREAM_LOADS));
    p.steps = (steps + warps - 1) / warps;
    const size_t normed = (size_t)p.N * (p.in + STREAM_NORM_PAD);
    size_t shared = 2 * (size_t)warps * TILES * M * 64 * sizeof(float);
    if (NORM) shared += stream_norm_pieces(p.N, p.in) * sizeof(float) + normed * sizeof(bf16);
    const int resident = ctx.gpu->sms * (24 / warps); // at once: 80 registers a thread leave room for 24 warps
    const int blocks = std::min({groups, resident, Epilogue::MOST_BLOCKS});
    launch(ctx, stream_kernel<TILES, M, NORM, Epilogue>, blocks, warps * 32, shared, p, epilogue);
    return {blocks, ROWS};
}
template <class Epilogue> RowsDealt stream_product(Context& ctx, const StreamArgs& p, Epilogue epilogue) {
    constexpr bool PAIR = Epilogue::PAIR;
    if (p.N < 1 || p.N > (p.stream ? NORM_TOKENS : STREAM_TOKENS)) DIE("stream_product: %d tokens", p.N);
    if (p.in % 8 || p.out % 8) DIE("stream_product: W is (%d,%d); its kernel takes multiples of 8", p.out, p.in);
    const bool two = PAIR || p.in <= 1024; // a warp has few steps of a short row; of two tiles it has as many loads
    if (p.stream) {
        if (two) return launch_stream<2, 1, true>(ctx, p, epilogue);
        if constexpr (!PAIR) return launch_stream<1, 1, true>(ctx, p, epilogue);
    } else if (p.N <= 8) {
        if (two) return launch_stream<2, 1, false>(ctx, p, epilogue);
        if constexpr (!PAIR) return launch_stream<1, 1, false>(ctx, p, epilogue);
    }
    if (two) return launch_stream<2, 2, false>(ctx, p, epilogue);
    if constexpr (!PAIR) return launch_stream<1, 2, false>(ctx, p, epilogue);
    return {}; // (not reached: PAIR is always two)
}
