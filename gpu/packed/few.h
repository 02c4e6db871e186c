// gpu/packed/few.h: products of up to 16 tokens with packed weights.
#pragma once
#include "gpu/packed/formats.h"
#include "qwen3.cu"

// ===================================================================================================== 2 Few tokens
// As stream_kernel, whose comments hold here, with 4 to 8 warps a block: the grid, groups of TILES x 8 rows of W that a
// block's warps share, each with its steps of `in`; mma_32, whose a and b operands hold the same columns; the warps'
// sums in shared memory.
// A step has 32 RUNS columns. Lane 4 g + t loads 8 bytes of row g of each tile: columns 8 t .. 8 t + 7 of the step,
// INT4 also 32 columns further. A lane's sums belong to rows 2 t and 2 t + 1 of the tile, so it loads these rows'
// scales; and row g's zero points, which its weights need. All of a group's loads are in flight before the first wait.
template <class F, int TILES, bool PAIR> struct PackedWeights {
    static constexpr int LOADS = F::LOADS / TILES, ROWS = PAIR ? 8 : 8 * TILES, STEP = 32 * F::RUNS;
    uint2 w[LOADS][TILES];
    typename F::Raw scale[LOADS][TILES][F::SCALES][2];
    uint32_t zero[LOADS][TILES][F::SCALES]; // of row g; 0 past the end of w
    // Loads LOADS steps from `step` on; zeros from step `last` on.
    __device__ __forceinline__ void load(const PackedArgs& p, int group, int step, int last) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        GPU_UNROLL
        for (int tile = 0; tile < TILES; tile++) {
            const int first = group * ROWS + (PAIR ? 0 : tile * 8), base = PAIR ? tile * p.out : 0;
            const int r = base + min(first + g, p.out - 1);
            const int r0 = base + min(first + 2 * t, p.out - 1), r1 = base + min(first + 2 * t + 1, p.out - 1);
            const typename F::Raw* scales = (const typename F::Raw*)p.scale;
            GPU_UNROLL
            for (int i = 0; i < LOADS; i++) {
                const int k = (step + i) * STEP + 8 * t;
                const bool there = step + i < last && k < p.in;
                w[i][tile] = load_eight(p.q + (size_t)r * p.row_bytes + F::byte(k), there);
                GPU_UNROLL
                for (int j = 0; j < F::SCALES; j++) {
                    const int column = (step + i) * STEP + 32 * j;
                    scale[i][tile][j][0] = scales[p.template scale_at<F>(r0, column)];
                    scale[i][tile][j][1] = scales[p.template scale_at<F>(r1, column)];
                    if (F::ZEROS) zero[i][tile][j] = there ? p.template zero_at<F>(r, column) : 0;
                }
            }
        }
    }
    // sum += W x^T for these steps; token[m]: this lane's rows of x.
    template <int M>
    __device__ __forceinline__ void multiply(float (&sum)[TILES][4], const bf16* const (&token)[M], int in,
                                             int step) const {
        GPU_UNROLL
        for (int i = 0; i < LOADS; i++) {
            float part[TILES][4] = {}; // of one group
            GPU_UNROLL
            for (int j = 0; j < F::RUNS; j++) {
                const int column = (step + i) * STEP + 32 * j + 8 * (int)(threadIdx.x % 4);
                const int s = F::SCALES == 1 ? 0 : j;
                uint4 a[2] = {}; // zeros past the end of the row
                GPU_UNROLL
                for (int m = 0; m < M; m++)
                    if (column < in) a[m] = *(const uint4*)(token[m] + column);
                GPU_UNROLL
                for (int tile = 0; tile < TILES; tile++) {
                    mma_32(part[tile], a[0], a[1], F::run(w[i][tile], j, F::ZEROS ? zero[i][tile][s] : 0));
                    if (F::SCALES == 1 && j + 1 < F::RUNS) continue;
                    GPU_UNROLL
                    for (int e = 0; e < 4; e++) {
                        sum[tile][e] = fmaf(part[tile][e], F::to_float(scale[i][tile][s][e % 2]), sum[tile][e]);
                        part[tile][e] = 0;
                    }
                }
            }
        }
    }
};

template <class F, int TILES, int M, class Epilogue>
__global__ void __launch_bounds__(256, 2) packed_kernel(PackedArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || TILES == 2, "a tile of gate, a tile of up");
    constexpr int SUMS = TILES * M * 64; // (tile, token, row)
    SHARED_FLOATS(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    using Weights = PackedWeights<F, TILES, Epilogue::PAIR>;
    constexpr int ROWS = Weights::ROWS;
    const int first = warp * p.steps, last = min((p.in + Weights::STEP - 1) / Weights::STEP, first + p.steps);
    const int groups = (p.out + ROWS - 1) / ROWS;
    Weights weights;
    int group = blockIdx.x;
    weights.load(p, group, first, last); // (no kernel of a forward pass writes weights)
    let_next_start();
    wait_for_previous();
    epilogue.begin();
    const bf16* token[M]; // tokens g and g + 8, this lane's rows of a; past the last token results are unused
    GPU_UNROLL
    for (int m = 0; m < M; m++) {
        const int n = min(g + 8 * m, p.N - 1);
        token[m] = p.x + (size_t)(p.rows ? p.rows[n] : n) * p.in;
    }
    float* sums = shared;
    for (; group < groups; group += gridDim.x) {
        float sum[TILES][4] = {};
        for (int step = first; step < last; step += Weights::LOADS) {
            if (step > first) weights.load(p, group, step, last);
            weights.multiply(sum, token, p.in, step);
        }
        if (group + (int)gridDim.x < groups) weights.load(p, group + gridDim.x, first, last);
        GPU_UNROLL
        for (int tile = 0; tile < TILES; tile++)
            GPU_UNROLL
            for (int m = 0; m < M; m++) {
                float* to = sums + warp * SUMS + ((tile * M + m) * 8 + g) * 8 + 2 * t;
                *(float2*)to = make_float2(sum[tile][2 * m], sum[tile][2 * m + 1]);
            }
        __syncthreads();
        for (int o = threadIdx.x; o < (Epilogue::PAIR ? SUMS / 2 : SUMS); o += blockDim.x) {
            const int n = o / 8 % (8 * M), r = group * ROWS + o / (64 * M) * 8 + o % 8;
            const bool inside = n < p.N && r < p.out;
            float y = 0, second = 0;
            for (int v = 0; v < warps; v++) {
                y += sums[v * SUMS + o];
                if (Epilogue::PAIR) second += sums[v * SUMS + SUMS / 2 + o];
            }
            if constexpr (Epilogue::ADDS) second = inside ? epilogue.old(n, r) : 0;
            epilogue.one(inside, n, r, y, second);
        }
        sums = sums == shared ? shared + warps * SUMS : shared;
    }
    epilogue.end(p.N);
}

#ifdef __CUDACC__
template <class F, int TILES, int M, class Epilogue>
RowsDealt launch_packed(Context& ctx, PackedArgs p, Epilogue epilogue) {
    using Weights = PackedWeights<F, TILES, Epilogue::PAIR>;
    const int groups = (p.out + Weights::ROWS - 1) / Weights::ROWS, steps = (p.in + Weights::STEP - 1) / Weights::STEP;
    const int warps = std::min(8, std::max(4, steps * TILES / F::LOADS));
    p.steps = (steps + warps - 1) / warps;
    const size_t shared = 2 * (size_t)warps * TILES * M * 64 * sizeof(float);
    const int blocks = std::min({groups, ctx.gpu->sms * (16 / warps), Epilogue::MOST_BLOCKS});
    launch(ctx, packed_kernel<F, TILES, M, Epilogue>, blocks, warps * 32, shared, p, epilogue);
    return {blocks, Weights::ROWS};
}
template <class Epilogue>
RowsDealt packed_product(Context& ctx, Epilogue epilogue, const bf16* x, const int* rows, const Linear<bf16>& W,
                         int N) {
    if (N < 1 || N > STREAM_TOKENS) DIE("packed_product: %d tokens", N);
    return with_packing(W, [&](auto format) {
        using F = decltype(format);
        PackedArgs p = packed_args(W);
        p.x = x, p.rows = rows, p.N = N;
        if (Epilogue::PAIR) p.out = W.rows[0];
        // Two tiles share the loads of x, if every multiprocessor still has a group.
        if constexpr (!Epilogue::PAIR)
            if (p.out < 16 * ctx.gpu->sms)
                return N <= 8 ? launch_packed<F, 1, 1>(ctx, p, epilogue) : launch_packed<F, 1, 2>(ctx, p, epilogue);
        return N <= 8 ? launch_packed<F, 2, 1>(ctx, p, epilogue) : launch_packed<F, 2, 2>(ctx, p, epilogue);
    });
}

#endif
