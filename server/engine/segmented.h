// segmented.h: products whose rows have different adapters, on a GPU: sums = s B (A x) of all rows, in floats, by two
// kernels, and a product that adds them. Each adapter's matrices are read once for up to eight adjacent rows that use
// it. The rows' adapters are read from memory, so that one graph serves every mix. segmented.cu launches the kernels.
// tests/unit/test_segmented.cpp runs the kernels by emulation, tests/gpu/test_gpu.cpp on a GPU.
//
// A segment is one to eight adjacent rows with the same adapter that do not cross a multiple of eight. The kernels
// find the beginnings of segments from the rows' adapters in memory. The operands of mma are read as stream_kernel
// does: a lane takes eight numbers of a row at once, and no number is moved between memory and mma.
//
//   Rows    RowAdapters, or a test's: of[n] identifies row n's adapter, at(n) returns it (or null)
#pragma once
#ifdef __CUDACC__
#include "qwen3.cu" // emulation includes what it needs
#endif

constexpr int SEGMENT = 8; // the tokens of one mma

// The rows of the segment that begins at row n; 0: none begins there, or it has no adapter.
template <class Rows> __device__ inline int segment_at(const Rows& rows, int n, int N) {
    if (!rows.of[n] || (n % SEGMENT && rows.of[n - 1] == rows.of[n])) return 0;
    int count = 1;
    while ((n + count) % SEGMENT && n + count < N && rows.of[n + count] == rows.of[n]) count++;
    return count;
}

// lora_down: h = A x. Grid: (4, rows), 8 warps. A block owns the segment that begins at its row, if one does, and
// takes 16 rows of A at a time. Its warps take steps of 32 of `in` in turn; their sums are added in shared memory.
// Bound by latency, and by reading A.
template <class Rows>
__global__ void __launch_bounds__(256) segment_down_kernel(const bf16* x, Rows rows, int N, int in) {
    __shared__ float sums[8][16][SEGMENT]; // (warp, row of A, token)
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n0 = blockIdx.y;
    let_next_start();
    wait_for_previous();
    const int tokens = segment_at(rows, n0, N);
    if (tokens == 0) return;
    const auto* a = rows.at(n0);
    const int width = a->modules * a->rank;
    for (int c0 = blockIdx.x * 16; c0 < width; c0 += gridDim.x * 16) {
        float d[4] = {}; // of rows g and g + 8 of A, tokens 2 t and 2 t + 1
        for (int i = warp * 32 + 8 * t; i < (in + 31) / 32 * 32; i += 256) {
            auto eight = [&](const bf16* row, bool there) {
                return there && i < in ? *(const uint4*)(row + i) : uint4{0, 0, 0, 0};
            };
            const int c = c0 + g;
            const uint4 low = eight(a->A + (size_t)c * in, c < width);
            const uint4 high = eight(a->A + (size_t)(c + 8) * in, c + 8 < width);
            mma_32(d, low, high, eight(x + (size_t)(n0 + g) * in, g < tokens));
        }
        for (int e = 0; e < 4; e++) sums[warp][g + e / 2 * 8][2 * t + e % 2] = d[e];
        __syncthreads();
        const int c = threadIdx.x / SEGMENT, n = threadIdx.x % SEGMENT;
        if (c < 16 && c0 + c < width && n < tokens) {
            float sum = 0;
            for (int w = 0; w < 8; w++) sum += sums[w][c][n];
            a->h[(size_t)(n0 + n) * width + c0 + c] = round_bf16(sum);
        }
        __syncthreads();
    }
}

// sums = (residual, or 0) + s B h. Grid: (out / 128, rows / SEGMENT), 8 warps. A warp owns 16 rows of W's and SEGMENT
// tokens. The tokens of each segment among them are multiplied by the B of its adapter, the others by zeros. A module
// covers one block of output rows; where a warp's 16 rows pass the end of a block, B is zero there. Bound by reading
// B.
template <class Rows>
__global__ void __launch_bounds__(256) segment_up_kernel(const float* residual, Rows rows, int N, int out, int block1,
                                                         int block2) { // row at which the second and third block begin
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int r0 = (blockIdx.x * 8 + warp) * 16, n0 = blockIdx.y * SEGMENT;
    let_next_start();
    wait_for_previous();
    if (r0 >= out) return;
    float d[4] = {}; // of rows g and g + 8, tokens 2 t and 2 t + 1
    for (int n = n0; n < min(N, n0 + SEGMENT); n++) {
        const int tokens = segment_at(rows, n, N);
        if (tokens == 0) continue;
        const auto* a = rows.at(n);
        const int rank = a->rank, width = a->modules * rank;
        const bool mine = n0 + g >= n && n0 + g < n + tokens;
        for (int j = 0; j < a->modules; j++) {
            const int block = a->block[j];
            const int first = block == 0 ? 0 : block == 1 ? block1 : block2;
            const int last = block == 0 ? block1 : block == 1 ? block2 : out;
            if (first >= r0 + 16 || last <= r0) continue;
            for (int i = 8 * t; i < (rank + 31) / 32 * 32; i += 32) {
                auto eight = [&](const bf16* row, bool there) {
                    return there && i < rank ? *(const uint4*)(row + j * rank + i) : uint4{0, 0, 0, 0};
                };
                const int r = r0 + g;
                const uint4 low = eight(a->B + (size_t)r * width, r < out);
                const uint4 high = eight(a->B + (size_t)(r + 8) * width, r + 8 < out);
                mma_32(d, low, high, eight(a->h + (size_t)(n0 + g) * width, mine));
            }
        }
    }
    for (int e = 0; e < 4; e++) {
        const int r = r0 + g + e / 2 * 8, n = n0 + 2 * t + e % 2;
        if (r >= out || n >= N) continue;
        rows.sums[(size_t)n * out + r] = (residual ? residual[(size_t)n * out + r] : 0) + d[e];
    }
}
