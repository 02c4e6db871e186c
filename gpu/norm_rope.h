// gpu/norm_rope.h: a head in a warp: norm and RoPE, rows of an FP8 cache, and the kernel of qknorm_rope_kv.
#pragma once
#include "qwen3.cu"

// ---- qknorm_rope_kv. A head of D numbers in a warp: lane l holds P = D / 64 pairs of its planes, u = head[i] and v =
// head[i + D/2] for i = P l .. P l + P - 1.
template <int P> struct WarpAngles { // of those planes
    struct alignas(8 * P) Stored { float x[2 * P]; } both;
    __device__ explicit WarpAngles(const float* angles) : both(((const Stored*)angles)[threadIdx.x % 32]) {}
    __device__ float cosine(int p) const { return both.x[2 * p]; }
    __device__ float sine(int p) const { return both.x[2 * p + 1]; }
};
template <int D> struct WarpHead {
    static constexpr int P = D / 64;
    float u[P], v[P];

    struct alignas(2 * P) Stored { bf16 x[P]; }; // (what a lane has lies together: one access)
    __device__ void load(const bf16* head) {
        const Stored a = ((const Stored*)head)[threadIdx.x % 32], b = ((const Stored*)head)[threadIdx.x % 32 + 32];
        for (int p = 0; p < P; p++) u[p] = to_acc(a.x[p]), v[p] = to_acc(b.x[p]);
    }
    __device__ void store(bf16* head) const {
        Stored a, b;
        for (int p = 0; p < P; p++) a.x[p] = round_bf16(u[p]), b.x[p] = round_bf16(v[p]);
        ((Stored*)head)[threadIdx.x % 32] = a, ((Stored*)head)[threadIdx.x % 32 + 32] = b;
    }
    // `weights` have been loaded as a head is.
    __device__ void norm_rope(const WarpHead& weights, const WarpAngles<P>& angle, float eps) {
        float squares = 0;
        for (int p = 0; p < P; p++) squares += u[p] * u[p] + v[p] * v[p];
        const float scale = 1 / sqrtf(warp_sum(squares) / D + eps);
        for (int p = 0; p < P; p++) {
            const float a = u[p] * scale * weights.u[p], b = v[p] * scale * weights.v[p];
            u[p] = a * angle.cosine(p) - b * angle.sine(p), v[p] = b * angle.cosine(p) + a * angle.sine(p);
        }
    }
};

// The rows of a page and head in a layer's FP8 cache (KVRow).
template <int D> __device__ uint8_t* fp8_block(bf16* cache, int page, int head, int K) {
    return (uint8_t*)cache + ((size_t)page * K + head) * PAGE * (D + 1);
}
// A WarpHead, rounded to bf16, as a row of such a cache (Book I's store_kv): numbers, and the byte of their exponent.
template <int D> struct WarpFp8Head {
    static constexpr int P = D / 64;
    uint8_t u[P], v[P], byte;
    __device__ explicit WarpFp8Head(const WarpHead<D>& head) {
        float largest = 0;
        bool finite = true;
        const auto look = [&](float x) {
            x = fabsf(to_acc(round_bf16(x)));
            finite &= x < INFINITY, largest = fmaxf(largest, x);
        };
        for (int p = 0; p < P; p++) look(head.u[p]), look(head.v[p]);
        for (int other = 16; other > 0; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
        finite = __all_sync(~0u, finite);
        const int e = kv_exponent(finite ? largest : 0);
        const auto round = [&](float x) { return float_to_e4m3(ldexpf(to_acc(round_bf16(x)), -e)); };
        for (int p = 0; p < P; p++) u[p] = round(head.u[p]), v[p] = round(head.v[p]);
        byte = (uint8_t)(finite ? e + 128 : 0);
    }
    __device__ void store(uint8_t* row, uint8_t* exponent) const {
        for (int p = 0; p < P; p++) {
            const int i = threadIdx.x % 32 * P + p;
            row[i] = u[p], row[i + D / 2] = v[p];
        }
        if (threadIdx.x % 32 == 0) *exponent = byte;
    }
    __device__ void store(bf16* cache, int slot, int head, int K) const {
        uint8_t* const block = fp8_block<D>(cache, slot / PAGE, head, K);
        store(block + slot % PAGE * D, block + PAGE * D + slot % PAGE);
    }
};
// 2^(e - 128), of which 0 says that the row is NaN
__device__ inline float fp8_factor(int e) { return e ? __uint_as_float((uint32_t)(e - 1) << 23) : NAN; }

// A warp two heads of a token, from row `first` on: four loads on their way, before it is known whether the row is
// spare (one wait instead of two; of spare rows nothing is stored). Bound by the memory's speed.
template <int D, bool FP8>
__global__ void qknorm_rope_kv_kernel(bf16* q, bf16* keys, bf16* values, const bf16* qkv, const bf16* q_weight,
                                      const bf16* k_weight, const float* rope, Batch b, int first, int H, int K,
                                      float eps) {
    let_next_start();
    wait_for_previous();
    const int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, heads = H + 2 * K, twos = (heads + 1) / 2;
    const int n = first + task / twos, h0 = task % twos * 2;
    if (n >= b.N) return;
    const int slot = b.slot[n], pos = b.pos[n];
    const bool spare = b.seq[n] < 0;
    WarpHead<D> head[2], weights[2];
    GPU_UNROLL
    for (int i = 0; i < 2; i++) {
        const int h = min(h0 + i, heads - 1);
        head[i].load(qkv + ((size_t)n * heads + h) * D);
        weights[i].load(h < H ? q_weight : k_weight);
    }
    const WarpAngles<D / 64> angle(rope + (size_t)(spare ? 0 : pos) * D);
    GPU_UNROLL
    for (int i = 0; i < 2; i++) {
        const int h = h0 + i;
        if (h < H + K) head[i].norm_rope(weights[i], angle, eps);
        if (spare || h >= heads) return;
        const size_t at = h < H ? 0 : kv_offset(slot / PAGE, (h - H) % K, slot % PAGE, K, D);
        if (FP8 && h >= H) {
            WarpFp8Head<D>(head[i]).store(h < H + K ? keys : values, slot, (h - H) % K, K);
            continue;
        }
        head[i].store(h < H ? q + ((size_t)n * H + h) * D : h < H + K ? keys + at : values + at);
    }
}
