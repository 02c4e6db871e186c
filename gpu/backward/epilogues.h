// gpu/backward/epilogues.h: what becomes of the sums of the backward pass's products.
#pragma once
#include "qwen3.cu"

// ========================================================================================================== 2 Products
// dx = dy W, dW = dy^T x and the head's products are tile_product's, in other layouts and with these epilogues.

// head_loss: what cross_entropy_kernel wants.
struct LossEpilogue : Epilogue {
    static constexpr bool PARTS = true;
    bf16* weights;      // (R,ld), or null
    float2* parts;      // (R,pieces)
    float* right;       // (R)
    const int* target;  // (R)
    const float* since; // (R)
    const int* again;   // null: the first time
    size_t ld, pieces;
    int first; // of the head's rows
    __device__ bool skipped() const {
        if (again) wait_for_previous();
        return again && !*again;
    }
    __device__ float from(int n) const { return again ? since[n] : 0; }
    __device__ void part(int n, int piece, float largest, float sum) { parts[n * pieces + piece] = {largest, sum}; }
    __device__ int chosen_row(int n) const { return target[n] - first; }
    __device__ void chosen(int n, float y) { right[n] = y; }
    static constexpr int OUTPUTS = 1;
    BOTH Output<bf16> output(int) const { return {weights, ld}; }
    template <class Put> __device__ void values(const float4& y, const float4&, Put put) { put(0, y); }
    __device__ void four(int n, int r, const float4& y, const float4& second) { put_values(*this, n, r, y, second); }
};

// head_backward: the gradient of row n of the picked ones goes to row rows[n].
struct ScatterEpilogue : Epilogue {
    bf16* out;           // (., C)
    const float* factor; // (R)
    const int* rows;     // (R)
    size_t C;
    ScatterEpilogue(bf16* out, const float* factor, const int* rows, size_t C)
        : out(out), factor(factor), rows(rows), C(C) {}
    __device__ void four(int n, int c, const float4& y, const float4&) {
        const float by = factor[n];
        store_four(out + rows[n] * C + c, make_float4(y.x * by, y.y * by, y.z * by, y.w * by));
    }
};

struct DropEpilogue : StoreEpilogue<bf16> { // linear_backward_input where x was dropped on its way to the modules' A
    static constexpr bool MASKS = true;
    DropoutMasks masks;
    int rank;
    float scale;
    DropEpilogue(bf16* out, size_t ld, const DropoutMasks& masks, int rank, float scale)
        : StoreEpilogue(out, ld), masks(masks), rank(rank), scale(scale) {}
};

// linear_backward_swiglu: a sum is dhidden's; `second` is what gate_up has there, as bits.
template <bool DROPS> struct SwigluBackwardEpilogue : Epilogue {
    static constexpr bool ADDS = true, MASKS = DROPS;
    bf16 *dgate_up, *hidden; // (N,2F); (N,F), or null
    const bf16* gate_up;     // (N,2F)
    size_t F;
    DropoutMasks masks;
    int rank;
    float scale;
    SwigluBackwardEpilogue(bf16* dgate_up, bf16* hidden, const bf16* gate_up, size_t F, const LoraArgs& lora)
        : dgate_up(dgate_up), hidden(hidden), gate_up(gate_up), F(F), masks(lora.kept), rank(lora.rank),
          scale(lora.scale) {}
    __device__ float4 old_four(int n, int f) const {
        const float2 g = *(const float2*)(gate_up + n * 2 * F + f), u = *(const float2*)(gate_up + (n * 2 + 1) * F + f);
        return make_float4(g.x, g.y, u.x, u.y);
    }
    __device__ void four(int n, int f, const float4& y, const float4& old) {
        const float d4[] = {y.x, y.y, y.z, y.w};
        const uint32_t gates[] = {__float_as_uint(old.x), __float_as_uint(old.y)};
        const uint32_t ups[] = {__float_as_uint(old.z), __float_as_uint(old.w)};
        float out[4], dg[4], du[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float g = i % 2 ? high(gates[i / 2]) : low(gates[i / 2]);
            const float u = i % 2 ? high(ups[i / 2]) : low(ups[i / 2]), d = to_acc(round_bf16(d4[i]));
            const float sigma = __fdividef(1, 1 + exp2_fast(-LOG2E * g)), silu = g * sigma;
            out[i] = silu * u, dg[i] = d * u * sigma * (1 + g * (1 - sigma)), du[i] = d * silu;
        }
        if (hidden) store_four(hidden + n * F + f, make_float4(out[0], out[1], out[2], out[3]));
        store_four(dgate_up + n * 2 * F + f, make_float4(dg[0], dg[1], dg[2], dg[3]));
        store_four(dgate_up + (n * 2 + 1) * F + f, make_float4(du[0], du[1], du[2], du[3]));
    }
};

struct LoraUpEpilogue : Epilogue { // linear_backward_input: dB += s y, in the rows and columns that belong together
    static constexpr bool ADDS = true;
    float* dB; // (out, m * rank)
    float s;
    int rank, columns, first[3], last[3]; // rows of module j
    LoraUpEpilogue(float* dB, const Linear<bf16>& W)
        : dB(dB), s(W.adapter.s), rank(W.adapter.rank), columns((int)W.adapter.width()), first(), last() {
        for (int j = 0; j < W.adapter.modules; j++) {
            const int block = W.adapter.block[j];
            first[j] = W.first_row(block), last[j] = first[j] + W.rows[block];
        }
    }
    __device__ bool own(int r, int c) const { return r >= first[c / rank] && r < last[c / rank]; }
    __device__ float4 old_four(int r, int c) const {
        return own(r, c) ? *(const float4*)(dB + (size_t)r * columns + c) : float4{};
    }
    __device__ void four(int r, int c, const float4& y, const float4& old) {
        if (!own(r, c)) return;
        const float4 sum = {old.x + s * y.x, old.y + s * y.y, old.z + s * y.z, old.w + s * y.w};
        store_four(dB + (size_t)r * columns + c, sum);
    }
};
