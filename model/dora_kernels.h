// model/dora_kernels.h: DoRA's kernels. Their launchers are in qwen3.cu.
#ifndef QWEN3_CU
#include "qwen3.cu" // which includes this file where DropoutMasks are known
#elif !defined(DORA_KERNELS_H)
#define DORA_KERNELS_H

// ---- dora_product: LoRA's product, to u; dora_kernel: y, by the epilogue.
__device__ inline float4 load_four(const bf16* from) {
    const uint2 v = *(const uint2*)from;
    return {low(v.x), high(v.x), low(v.y), high(v.y)};
}
// The product's last step: y = c u - off (u is rounded before), four rows of a token a thread (PAIR: of gate and of up),
// to the epilogue. off, if not null, is W (drop(x) - x): then u, still without it, receives it, too. Bound by memory
// bandwidth.
template <class E>
__global__ void __launch_bounds__(256) dora_kernel(E epilogue, bf16* u, const bf16* off, const float* c, int N,
                                                   int out) {
    let_next_start();
    wait_for_previous();
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x, each = (size_t)out / (E::PAIR ? 8 : 4);
    const int n = (int)(i / each), r = (int)(i % each) * 4;
    if (n >= N) return;
    const auto four = [&](int row) {
        const size_t at = (size_t)n * out + row;
        const float4 by = *(const float4*)(c + row);
        float4 y = load_four(u + at), o = {};
        if (off) {
            o = load_four(off + at), y = {y.x + o.x, y.y + o.y, y.z + o.z, y.w + o.w};
            store_four(u + at, y);
        }
        return float4{by.x * y.x - o.x, by.y * y.y - o.y, by.z * y.z - o.z, by.w * y.w - o.w};
    };
    const float4 second = E::PAIR ? four(out / 2 + r) : E::ADDS ? epilogue.old_four(n, r) : float4{};
    epilogue.four(n, r, four(r), second);
}

// y = drop(x) - x of the adapter's module j; ADD: y += that. Eight numbers of a token a thread. masks: of the module.
template <bool ADD>
__global__ void __launch_bounds__(256) dropped_kernel(bf16* y, const bf16* x, DropoutMasks masks, int j, float scale,
                                                      int N, int in) {
    let_next_start();
    wait_for_previous();
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    const int n = (int)(i / (in / 8)), k = (int)(i % (in / 8)) * 8;
    if (n >= N) return;
    const uint32_t kept = masks.at(j, k / 64, n)[k % 64 / 32] >> k % 32;
    for (int half = 0; half < 8; half += 4) {
        const size_t at = (size_t)n * in + k + half;
        const float4 v = load_four(x + at), old = ADD ? load_four(y + at) : float4{};
        const auto by = [&](int b) { return (kept >> (half + b) & 1 ? scale : 0) - 1; };
        store_four(y + at, float4{old.x + v.x * by(0), old.y + v.y * by(1), old.z + v.z * by(2), old.w + v.w * by(3)});
    }
}

#if COMPILED(PART_LINEAR) || defined(QWEN3_EMULATED)
// dora_norm of a module's rows of W, from `first` on; j < 0: of rows without a module. Grid: rows / 8, 128 threads. A
// block has eight rows, a thread two of every 256 columns; s B of the rows lies in shared memory, (rank, 8). Bound by
// multiplications: 2 rank a number of W.
inline constexpr int DORA_ROWS = 8, DORA_THREADS = 128;
__global__ void __launch_bounds__(DORA_THREADS)
dora_norm_kernel(Adapter<bf16> a, const bf16* W, int in, int j, int first) {
    SHARED_FLOATS(b);
    __shared__ float parts[DORA_THREADS / 32][DORA_ROWS];
    let_next_start();
    wait_for_previous();
    const int t = (int)threadIdx.x, r0 = first + (int)blockIdx.x * DORA_ROWS, width = a.modules * a.rank;
    for (int i = t; i < a.rank * DORA_ROWS && j >= 0; i += DORA_THREADS)
        b[i] = to_acc(a.B[(size_t)(r0 + i % DORA_ROWS) * width + j * a.rank + i / DORA_ROWS]);
    __syncthreads();
    float squares[DORA_ROWS] = {};
    for (int i = 2 * t; i < in && j >= 0; i += 2 * DORA_THREADS) {
        float2 sum[DORA_ROWS] = {};
        const bf16* A = a.A + (size_t)j * a.rank * in + i;
        for (int k = 0; k < a.rank; k++, A += in) {
            const uint32_t pair = *(const uint32_t*)A;
            const float4 *by = (const float4*)(b + k * DORA_ROWS), low_by = by[0], high_by = by[1];
            const float each[] = {low_by.x, low_by.y, low_by.z, low_by.w, high_by.x, high_by.y, high_by.z, high_by.w};
            GPU_UNROLL
            for (int q = 0; q < DORA_ROWS; q++)
                sum[q].x = fmaf(each[q], low(pair), sum[q].x), sum[q].y = fmaf(each[q], high(pair), sum[q].y);
        }
        GPU_UNROLL
        for (int q = 0; q < DORA_ROWS; q++) {
            const uint32_t pair = *(const uint32_t*)(W + (size_t)(r0 + q) * in + i);
            const float x = low(pair) + sum[q].x, y = high(pair) + sum[q].y;
            squares[q] = fmaf(x, x, fmaf(y, y, squares[q]));
        }
    }
    GPU_UNROLL
    for (int q = 0; q < DORA_ROWS; q++) {
        const float sum = warp_sum(squares[q]);
        if (t % 32 == 0) parts[t / 32][q] = sum;
    }
    __syncthreads();
    if (t >= DORA_ROWS) return;
    float sum = 0;
    for (int w = 0; w < DORA_THREADS / 32; w++) sum += parts[w][t];
    a.dora.norm[r0 + t] = j < 0 ? INFINITY : sqrtf(sum);
    a.dora.c[r0 + t] = j < 0 ? 1 : a.dora.m[r0 + t] / sqrtf(sum);
}
#endif
#if COMPILED(PART_NORMS_BACKWARD) || defined(QWEN3_EMULATED)
// dora_backward: du = c dy, off = (c - 1) dy (null: not wanted), and sums of dy u / norm over splits of `each` tokens.
// Grid: (out / 256, splits), 8 warps. A warp has every eighth token of the split, a lane eight rows of W. Bound by
// memory bandwidth.
__global__ void __launch_bounds__(256)
dora_backward_kernel(bf16* du, float* partial, const bf16* dy, Dora<bf16> d, int N, int out, int each) {
    __shared__ float sums[8][256];
    let_next_start();
    wait_for_previous();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = blockIdx.x * 256 + lane * 8;
    float sum[8] = {}, by[8];
    for (int i = 0; i < 8; i++) by[i] = r < out ? d.c[r + i] : 0;
    for (int n = blockIdx.y * each + warp; n < min(N, ((int)blockIdx.y + 1) * each) && r < out; n += 8)
        GPU_UNROLL
        for (int i = 0; i < 8; i += 4) {
            const size_t at = (size_t)n * out + r + i;
            const float4 y = load_four(dy + at), v = load_four(d.u + at);
            sum[i] = fmaf(y.x, v.x, sum[i]), sum[i + 1] = fmaf(y.y, v.y, sum[i + 1]);
            sum[i + 2] = fmaf(y.z, v.z, sum[i + 2]), sum[i + 3] = fmaf(y.w, v.w, sum[i + 3]);
            const auto scaled = [&](float less) {
                return float4{(by[i] - less) * y.x, (by[i + 1] - less) * y.y, (by[i + 2] - less) * y.z,
                              (by[i + 3] - less) * y.w};
            };
            store_four(du + at, scaled(0));
            if (d.off) store_four(d.off + at, scaled(1));
        }
    for (int i = 0; i < 8; i++) sums[warp][lane * 8 + i] = sum[i];
    __syncthreads();
    float all = 0;
    for (int w = 0; w < 8; w++) all += sums[w][threadIdx.x];
    const int row = blockIdx.x * 256 + threadIdx.x;
    if (row < out) partial[(size_t)blockIdx.y * out + row] = all / d.norm[row];
}
#endif
#endif
