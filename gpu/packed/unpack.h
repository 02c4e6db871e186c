// gpu/packed/unpack.h: kernels that unpack weights, look up packed embeddings and round activations.
#pragma once
#include "gpu/packed/formats.h"
#include "gpu/packed/round.h"
#include "qwen3.cu"

// ========================================================================================== 3 Many tokens, embedding
// The eight numbers of a run: W.at of them, in float.
template <class F> __device__ __forceinline__ void unpack_run(float (&y)[8], const PackedArgs& p, int r, int column) {
    const uint2 v = *(const uint2*)(p.q + (size_t)r * p.row_bytes + F::byte(column));
    const uint4 pairs = F::run(v, F::RUNS == 2 ? column / 32 % 2 : 0,
                               F::ZEROS ? p.zero_at<F>(r, column) : 0);
    const float s = F::to_float(((const typename F::Raw*)p.scale)[p.scale_at<F>(r, column)]);
    const uint32_t pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    GPU_UNROLL
    for (int i = 0; i < 4; i++) y[2 * i] = low(pair[i]) * s, y[2 * i + 1] = high(pair[i]) * s;
}

// The rows of a packed matrix, by runs.
template <class F> struct PackedRows {
    static constexpr int RUN = 8;
    PackedArgs p;
    __device__ void run(float (&y)[8], int r, int column, int) const { unpack_run<F>(y, p, r, column); }
};

// to (rows, columns) = bf16 of W from row r0 and column k0 on. A thread a run. Bound by the memory's speed.
template <class F>
__global__ void __launch_bounds__(256) unpack_kernel(bf16* to, PackedArgs p, int r0, int rows, int k0, int columns) {
    let_next_start();
    wait_for_previous(); // products that read the earlier contents
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x, runs = (size_t)columns / 8;
    if (i >= runs * rows) return;
    const int r = (int)(i / runs), k = (int)(i % runs) * 8;
    float y[8];
    unpack_run<F>(y, p, r0 + r, k0 + k);
    *(uint4*)(to + (size_t)r * columns + k) =
        make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
}

// round_activations, to bf16; or with E4M3 to bytes q (N,in), and scales (groups, pitch). A group in 16 lanes, eight
// numbers each. Bound by the memory's speed.
template <bool E4M3>
__global__ void __launch_bounds__(256) round_kernel(bf16* rounded, uint8_t* q, float* scale, const bf16* x, int N,
                                                    int in, int pitch) {
    let_next_start();
    wait_for_previous();
    const int groups = (in + FP8_GROUP - 1) / FP8_GROUP;
    const size_t all = (size_t)blockIdx.x * 16 + threadIdx.x / 16;
    const int n = (int)min(all / groups, (size_t)N - 1), g = (int)(all % groups); // (whole warps stay together)
    const int column = g * FP8_GROUP + threadIdx.x % 16 * 8;
    const size_t at = (size_t)n * in + column;
    const uint4 v = column < in ? *(const uint4*)(x + at) : uint4{};
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
    uint32_t largest = 0; // bits, without sign; from 0x7f80 on not finite
    GPU_UNROLL
    for (int i = 0; i < 8; i++) largest = max(largest, pair[i / 2] >> i % 2 * 16 & 0x7fff);
    GPU_UNROLL
    for (int other = 8; other; other /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, other));
    const bool finite = largest < 0x7f80;
    const int e = kv_exponent(finite ? low(largest) : 0);
    const float by = __uint_as_float((uint32_t)(127 - e) << 23);
    const float factor = finite ? __uint_as_float((uint32_t)(127 + e) << 23) : NAN;
    uint32_t two[4];
    GPU_UNROLL
    for (int i = 0; i < 4; i++) two[i] = pack_e4m3(low(pair[i]) * by, high(pair[i]) * by);
    if (column >= in || all / groups >= (size_t)N) return;
    const uint2 eight = {two[0] | two[1] << 16, two[2] | two[3] << 16};
    if (E4M3) {
        *(uint2*)(q + at) = eight;
        if (threadIdx.x % 16 == 0) scale[(size_t)g * pitch + n] = factor;
        return;
    }
    const uint4 y = PackedFp8::run(eight, 0, 0);
    const auto times = [&](uint32_t pair) { return pack(low(pair) * factor, high(pair) * factor); };
    *(uint4*)(rounded + at) = make_uint4(times(y.x), times(y.y), times(y.z), times(y.w));
}

// embed. A block a token.
template <class F> __global__ void packed_embed_kernel(float* x, PackedArgs p, Batch b) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    if (b.seq[n] < 0) return;
    for (int k = threadIdx.x * 8; k < p.in; k += blockDim.x * 8) {
        float y[8];
        unpack_run<F>(y, p, b.token[n], k);
        for (int i = 0; i < 8; i++) x[(size_t)n * p.in + k + i] = y[i];
    }
}
