// gpu/products/epilogues.h: what becomes of the sums of a product.
#pragma once
#include "qwen3.cu"
#include <climits>

// ========================================================================================================= 10 Products
// Book I's product, y[n][r] = sum_i x[n][i] W[r][i], for N tokens n and `out` rows r of W; `in` is what is summed over.
// The blocks of a Linear lie one after another on a GPU (Weights::upload), so W is one matrix. A product of the
// backward pass has its own `in` and `out`: dx = dy W sums over W's rows, dW = dy^T x over the tokens.
// Three kernels compute them all: stream_kernel for up to 16 tokens, at the speed at which W comes from memory, and for
// more, at the speed of the tensor cores, tile_kernel, or on Hopper hopper_kernel. What becomes of a sum is said by the
// kernel's epilogue.

// ---- Epilogues. A kernel takes its epilogue by value, so that each thread has a copy, and calls these functions of
// it. Here are the defaults. An epilogue for stream_kernel adds `one`, one for tile_kernel and hopper_kernel `four`:
//
//   one(inside, n, r, y, second)   Sum y of token n and row r, from one thread. Whole warps call it, eight neighbouring
//                                  lanes for the same n and rows 8 q .. 8 q + 7, so that they can shuffle; `inside`
//                                  is false where n or r is past the end.
//   four(n, r, y, second)          Sums of token n and rows r .. r + 3 (r % 4 = 0), from one thread; none past the end.
//
// Four sums become up to OUTPUTS times four numbers: values(y, second, put) calls put(k, four) for each k, and these
// four belong at output(k). So hopper_kernel can write whole boxes of them in the background. `second` is with PAIR the
// sum of up (y is that of gate), with ADDS what old or old_four returned, else zero.
template <class T> struct Output {
    T* at; // or null: not wanted
    size_t ld;
    __device__ T* of(int n, int r) const { return at + n * ld + r; }
};
struct Epilogue {
    static constexpr int OUTPUTS = 0;            // `four` is of `values`; a new `four` needs 0
    using Four = uint2;                          // ... and they are bf16; with ADDS float4: float
    static constexpr bool PAIR = false;          // W is (2 out, in), gate over up: a thread gets the sums of both
    static constexpr bool ADDS = false;          // the sum is added to a number that the kernel asks for early
    static constexpr bool ADAPTS = true;         // W may have an adapter, see BesideAdapter
    static constexpr bool MASKS = false;         // `four`'s kernels mask the sums of each module of an adapter
    static constexpr bool PARTS = false;         // ... and make what a softmax needs of each 64 rows
    static constexpr bool ROUNDS = false;        // ... and leave output 0 as e4m3 too, in `rounded`: hopper_kernel
    static constexpr int MOST_BLOCKS = INT_MAX;  // stream_kernel is launched with no more blocks

    // stream_kernel: all threads, once, after wait_for_previous; a barrier follows before any `one`.
    __device__ void begin() {}
    // stream_kernel: all threads, once, after their last `one` (there is no barrier between).
    __device__ void end(int /* N */) {}
    // With ADDS, the number, or the four, that will be `second`. Asked for before the sums are complete, by the thread
    // that will hand them over; n and r are not past the end.
    __device__ float old(int /* n */, int /* r */) const { return 0; }
    __device__ float4 old_four(int /* n */, int /* r */) const { return {}; }
    // With MASKS: each `rank` of the further columns are a module's, whose sums are multiplied by `scale` where `masks`
    // keeps them (r being its number), else left out. The columns come after all others then (TileArgs::more_last).
    static constexpr DropoutMasks masks = {nullptr, 0, 0};
    static constexpr int rank = 0;
    static constexpr float scale = 1;
    // With PARTS `four` gets w = e^(y - from(n)) of the sums y of token n; part() of rows 64 piece .. 64 piece + 63 the
    // largest y and the sum of w: from one thread, n and 64 piece not past the end. And chosen(n, y) is called once,
    // with the sum of row chosen_row(n).
    __device__ float from(int /* n */) const { return 0; }
    __device__ void part(int /* n */, int /* piece */, float /* largest */, float /* sum */) {}
    __device__ int chosen_row(int /* n */) const { return -1; }
    __device__ void chosen(int /* n */, float /* y */) {}
    // tile_kernel, hopper_kernel: all threads, first. If true the kernel does nothing.
    __device__ bool skipped() const { return false; }
};

__device__ inline void round_four(float4& to, const float4& y) { to = y; }
__device__ inline void round_four(uint2& to, const float4& y) { to = make_uint2(pack(y.x, y.y), pack(y.z, y.w)); }
template <class Epilogue> // an epilogue's `four`, of `values`
__device__ __forceinline__ void put_values(Epilogue& epilogue, int n, int r, const float4& y, const float4& second) {
    epilogue.values(y, second, [&](int k, const float4& v) {
        const auto to = epilogue.output(k);
        if (to.at) store_four(to.of(n, r), v);
    });
}

template <class T> struct StoreEpilogue : Epilogue { // linear: out = y; in float the head's logits
    T* out; // (N, ld)
    size_t ld;
    static constexpr int OUTPUTS = std::is_same_v<T, bf16>;
    static constexpr bool ADAPTS = std::is_same_v<T, bf16>;
    StoreEpilogue(T* out, size_t ld) : out(out), ld(ld) {}
    BOTH Output<T> output(int) const { return {out, ld}; }
    template <class Put> __device__ void values(const float4& y, const float4&, Put put) { put(0, y); }
    __device__ void one(bool inside, int n, int r, float y, float) { if (inside) store_one(out + n * ld + r, y); }
    __device__ void four(int n, int r, const float4& y, const float4&) { store_four(out + n * ld + r, y); }
};

struct AddEpilogue : Epilogue { // linear_add: out = residual + y; linear_backward_weight: dW += y
    static constexpr bool ADDS = true;
    float* out;            // (N, ld)
    const float* residual; // (N, ld), may be out
    size_t ld;
    AddEpilogue(float* out, const float* residual, size_t ld) : out(out), residual(residual), ld(ld) {}
    __device__ float old(int n, int r) const { return residual[n * ld + r]; }
    __device__ float4 old_four(int n, int r) const { return *(const float4*)(residual + n * ld + r); }
    __device__ void one(bool inside, int n, int r, float y, float old) { if (inside) out[n * ld + r] = old + y; }
    static constexpr int OUTPUTS = 1;
    using Four = float4;
    BOTH Output<float> output(int) const { return {out, ld}; }
    template <class Put> __device__ void values(const float4& y, const float4& old, Put put) {
        put(0, make_float4(old.x + y.x, old.y + y.y, old.z + y.z, old.w + y.w));
    }
    __device__ void four(int n, int r, const float4& y, const float4& old) { put_values(*this, n, r, y, old); }
};

struct AddTransposedEpilogue : Epilogue { // linear_backward_weight: out, transposed, += y
    static constexpr bool ADDS = true;
    float* out; // (., ld)
    size_t ld;
    AddTransposedEpilogue(float* out, size_t ld) : out(out), ld(ld) {}
    __device__ float4 old_four(int n, int r) const {
        const float* at = out + r * ld + n;
        return make_float4(at[0], at[ld], at[2 * ld], at[3 * ld]);
    }
    __device__ void four(int n, int r, const float4& y, const float4& old) {
        float* at = out + r * ld + n;
        at[0] = old.x + y.x, at[ld] = old.y + y.y, at[2 * ld] = old.z + y.z, at[3 * ld] = old.w + y.w;
    }
};

// gate and up are rounded as Book I rounds them when it stores them.
__device__ inline float swiglu(float gate, float up) {
    const float g = to_acc(round_bf16(gate));
    return __fdividef(g, 1 + exp2_fast(-LOG2E * g)) * to_acc(round_bf16(up)); // (an exact division is a call)
}
struct SwigluEpilogue : Epilogue { // norm_linear_swiglu
    static constexpr int OUTPUTS = 3;
    static constexpr bool PAIR = true;
    bf16* out;     // (N,F)
    bf16* gate_up; // (N,2F) for the backward pass, or null
    size_t F;
    SwigluEpilogue(bf16* out, bf16* gate_up, size_t F) : out(out), gate_up(gate_up), F(F) {}
    __device__ void one(bool inside, int n, int f, float gate, float up) {
        if (!inside) return;
        out[n * F + f] = round_bf16(swiglu(gate, up));
        if (gate_up) gate_up[n * 2 * F + f] = round_bf16(gate), gate_up[(n * 2 + 1) * F + f] = round_bf16(up);
    }
    BOTH Output<bf16> output(int k) const {
        if (k == 0) return {out, F};
        return {gate_up && k == 2 ? gate_up + F : gate_up, 2 * F};
    }
    template <class Put> __device__ void values(const float4& g, const float4& u, Put put) {
        put(0, make_float4(swiglu(g.x, u.x), swiglu(g.y, u.y), swiglu(g.z, u.z), swiglu(g.w, u.w)));
        put(1, g), put(2, u);
    }
    __device__ void four(int n, int f, const float4& g, const float4& u) { put_values(*this, n, f, g, u); }
};
struct RoundedSwigluEpilogue : SwigluEpilogue { // ... and as the next product takes it; F in whole groups
    static constexpr int OUTPUTS = 1;
    static constexpr bool ROUNDS = true;
    E4M3Rows rounded;
    RoundedSwigluEpilogue(const SwigluEpilogue& e, const E4M3Rows& rounded) : SwigluEpilogue(e), rounded(rounded) {}
    template <class Put> __device__ void values(const float4& g, const float4& u, Put put) {
        SwigluEpilogue::values(g, u, [&](int k, const float4& y) { if (k == 0) put(0, y); });
    }
};

// Epilogue E of up to 16 tokens where W has an adapter, whose h has been computed: s B h is added to each sum before
// anything is rounded. A thread has an output and all of its row of B: bound by latency.
constexpr int MOST_BESIDE = 192; // columns of B: rank 64 of q, k, v; as far as it was measured faster than tiles
template <class E> struct BesideAdapter : E {
    const bf16 *B, *h; // s B (out or, with PAIR, 2 out, width), (N, width)
    int width, out;
    BesideAdapter(const E& epilogue, const Linear<bf16>& W)
        : E(epilogue), B(W.adapter.B), h(W.adapter.h), width((int)W.adapter.width()), out(W.rows[0]) {}
    __device__ float more(int n, int r) const {
        float sum = 0;
        for (int c = 0; c < width; c += 8) { // (ranks are multiples of 8)
            const uint4 u = *(const uint4*)(B + (size_t)r * width + c), v = *(const uint4*)(h + (size_t)n * width + c);
            const uint32_t b[4] = {u.x, u.y, u.z, u.w}, x[4] = {v.x, v.y, v.z, v.w};
            #pragma unroll
            for (int i = 0; i < 4; i++) sum = fmaf(high(b[i]), high(x[i]), fmaf(low(b[i]), low(x[i]), sum));
        }
        return sum;
    }
    __device__ void one(bool inside, int n, int r, float y, float second) {
        if (inside) y += more(n, r);
        if (inside && E::PAIR) second += more(n, out + r);
        E::one(inside, n, r, y, second);
    }
};
