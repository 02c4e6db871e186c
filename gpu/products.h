// gpu/products.h: Book II's products, few tokens and many, on any card and on Hopper.
#pragma once
#include "qwen3.cu"

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
// What becomes of four sums, each by itself, is up to OUTPUTS times four numbers: values(y, second, put) calls put(k,
// four) for each k, and they belong at output(k). So hopper_kernel can have whole boxes of them written in the
// background.
// `second` is with PAIR the sum of up (y is that of gate), with ADDS what old or old_four returned, else zero.
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

__device__ inline void store_one(float* to, float y) { *to = y; }
__device__ inline void store_one(bf16* to, float y) { *to = round_bf16(y); }
__device__ inline void store_four(float* to, const float4& y) { *(float4*)to = y; }
__device__ inline void store_four(bf16* to, const float4& y) {
    *(uint2*)to = make_uint2(pack(y.x, y.y), pack(y.z, y.w));
}

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

// d += a b for 32 numbers of `in`. Lane 4 g + t holds eight of them, of tokens g (a0), g + 8 (a1) and of row g of W.
__device__ __forceinline__ void mma_32(float (&d)[4], const uint4& a0, const uint4& a1, const uint4& b) {
    mma(d, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
    mma(d, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
}

// What a lane holds of a group's rows: LOADS steps.
template <int TILES, bool PAIR> struct StreamWeights {
    static constexpr int LOADS = STREAM_LOADS / TILES, ROWS = PAIR ? 8 : 8 * TILES;
    uint4 w[LOADS][TILES];
    // Of LOADS steps from `step` on; zeros from step `last` on.
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

// What stream_kernel has in shared memory after its sums, with NORM.
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

// How a product's rows were dealt: `rows` neighbours at a time to its blocks in turn, the first ones to block `shift`.
// blocks 0: they were not.
struct RowsDealt {
    int blocks = 0, rows = 0, shift = 0;
};
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

// ---- Many tokens. Every product of more than 16 tokens and of the backward pass; of fewer those with dropout, with an
// adapter of many columns, or with `invariant`.
// Grid: (tiles, splits). A block owns a tile of the output: S::TOKENS tokens by S::ROWS rows of W (PAIR: half of them
// of gate, half of up). It walks along `in` in stages of 64 numbers, which cp.async copies to a ring of S::STAGES
// stages in shared memory while the tensor cores work on an earlier one. Bound by the tensor cores; by the memory if
// there are few tokens.
//
// Layouts. A forward product has `in` along the rows of both operands: x is (N,in), W is (out,in). Of the backward
// products dx = dy W has `in` down W's columns, W (in,out): W_COLS; and dW = dy^T x down both, x (in,N) also: X_COLS.
// The tensor core takes such an operand transposed.
//
// A stage in shared memory. A row has the 128 bytes of a cache line. `in` along the rows: a row of the operand's 64
// numbers each. `in` down the columns: 64 neighbouring columns at one i, 64 such rows to a panel, a panel for every 64
// columns of the tile. A row's eight chunks of 16 bytes are swizzled: chunk c of row r lies in place c ^ r % 8. So
// ldmatrix, which reads the same chunk of eight rows at once, meets eight different groups of banks; wgmma wants the
// same order.
//
// Who owns what. A warp owns S::WARP_TOKENS by S::WARP_ROWS of the tile, made of fragments, 16 tokens by eight rows of
// W, spread over its lanes as mma leaves them: of fragment (i, j) lane 4 g + t holds sum[i][j][0 .. 3]: rows 2 t and
// 2 t + 1 of token g, then the same of token g + 8.
// PAIR: the tile has 16 rows of gate and 16 rows of up in turn, so that a lane holds the same columns of both, two
// fragments apart.
//
// An adapter's h and s B are further columns of x and W: `more` numbers of `in`, in stages of their own, which come
// first, or last.
//
// Splits. If there are too few tiles to fill the GPU, `splits` blocks share a tile, each has a part of the stages, and
// the last one to arrive adds their sums in order.
constexpr int STAGE_IN = 64; // numbers of `in` in a stage

template <int TOKENS_, int ROWS_, int WARP_TOKENS_, int WARP_ROWS_, int STAGES_> struct TileShape {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_, STAGES = STAGES_, SHARING = 1;
    static constexpr int WARP_TOKENS = WARP_TOKENS_, WARP_ROWS = WARP_ROWS_;
    static constexpr int THREADS = TOKENS / WARP_TOKENS * (ROWS / WARP_ROWS) * 32, CONSUMERS = THREADS;
    static constexpr int X_BYTES = TOKENS * STAGE_IN * 2, STAGE_BYTES = X_BYTES + ROWS * STAGE_IN * 2; // x, then W
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES;
    // Fragments of tokens and of rows that a warp has, and the first token and row of its part.
    static constexpr int MF = WARP_TOKENS / 16, NF = WARP_ROWS / 8;
    static constexpr int BAND = 8, UP = 2; // tiles of tokens to a band; from a fragment of gate to that of up
    __device__ static int warp_token() { return threadIdx.x / 32 % (TOKENS / WARP_TOKENS) * WARP_TOKENS; }
    __device__ static int warp_row() { return threadIdx.x / 32 / (TOKENS / WARP_TOKENS) * WARP_ROWS; }
};
// How many tiles it takes, or pairs of them.
template <class S> int64_t count_tiles(int N, int rows) {
    constexpr int TOKENS = S::TOKENS * S::SHARING;
    return (int64_t)((N + TOKENS - 1) / TOKENS) * ((rows + S::ROWS - 1) / S::ROWS);
}

struct TileArgs {
    const bf16 *x, *W;    // (N,in), X_COLS (in,N); (out,in), with PAIR (2 out, in), W_COLS (in,out)
    int N, in, out;
    const bf16 *more_x = nullptr, *more_W = nullptr; // (N,more); (out,more), W_COLS (more,out). Not with X_COLS
    int more = 0;
    bool more_last = false;
    int ldx = 0, ldw = 0; // numbers from one row of x and W to the next; 0: as many as a row has
    bool early = false;   // few blocks: those of the next kernel may come beside them from the start
    int splits = 1;
    // Set by launch_hopper: stages of the ring; with splits, whether sums that a block receives have their own memory.
    int stages = 0;
    bool apart = false;
    // Of e4m3 operands (see multiply_groups), two of which then count as one number: W's scales of 128 rows by 128
    // columns (., groups), x's of 128 numbers of a token (groups, pitch). What is past the end may be read.
    const float *x_scale = nullptr, *W_scale = nullptr;
    int pitch = 0;
    float* partial = nullptr;
    int* arrived = nullptr;
};

// Which tile and which of its steps (stages of `in`) a block has.
template <class S, bool PAIR> struct TilePlace {
    int n0, r0;                  // first token; first row, of gate and up together with PAIR
    int first_more, past_more;   // steps over the adapter's columns
    int first, last;             // this block's steps
    // Tiles are numbered in bands of so many tiles of tokens: blocks that run at the same time share rows of both
    // operands in the L2 cache.
    __device__ __forceinline__ TilePlace(const TileArgs& p, int tile, int split) {
        const int rows = PAIR ? 2 * p.out : p.out;
        constexpr int TOKENS = S::TOKENS * S::SHARING;
        const int across = (rows + S::ROWS - 1) / S::ROWS, down = (p.N + TOKENS - 1) / TOKENS;
        if (down == 1) n0 = 0, r0 = tile * S::ROWS; // (a division takes as long as a copy from the L2 cache)
        else {
            const int band = tile / (S::BAND * across), in_band = tile % (S::BAND * across);
            const int high = min(S::BAND, down - band * S::BAND);
            n0 = (band * S::BAND + in_band % high) * TOKENS, r0 = in_band / high * S::ROWS;
        }
        if (S::SHARING > 1) n0 += blockIdx.x % 2 * S::TOKENS;
        const int own = (p.in + STAGE_IN - 1) / STAGE_IN, steps = (p.more + STAGE_IN - 1) / STAGE_IN + own;
        first_more = p.more_last ? own : 0, past_more = first_more + steps - own;
        first = 0, last = steps;
        if (p.splits > 1) first = steps * split / p.splits, last = steps * (split + 1) / p.splits;
    }
    // Whether a step is over the adapter's columns; the first number of `in`, or column, of it.
    __device__ __forceinline__ bool more(int step) const { return step >= first_more && step < past_more; }
    __device__ __forceinline__ int number(int step) const {
        return (step < first_more ? step : step < past_more ? step - first_more : step - past_more + first_more) *
               STAGE_IN;
    }
    // This lane's token in rows g + 8 h of fragment i.
    __device__ __forceinline__ int token(int i, int h) const {
        return n0 + S::warp_token() + i * 16 + h * 8 + threadIdx.x % 32 / 4;
    }
};

// Where in an operand's stage a chunk of 16 bytes lies. With `in` along the rows there are eight chunks, one panel.
__device__ __forceinline__ uint32_t chunk_address(uint32_t stage, int row, int chunk) {
    return stage + row * 128 + ((chunk ^ row % 8) << 4);
}
__device__ __forceinline__ uint32_t panel_address(uint32_t stage, int row, int chunk) {
    return chunk_address(stage + chunk / 8 * (STAGE_IN * 128), row, chunk % 8);
}

// What one thread copies of an operand's stage: `chunk` of COUNT rows, STEP rows apart, from `row` on.
template <int ROWS, bool COLS, int THREADS> struct TileCopy {
    static constexpr int CHUNKS = (COLS ? ROWS : STAGE_IN) / 8, ALL = COLS ? STAGE_IN : ROWS;
    static constexpr int STEP = THREADS / CHUNKS, COUNT = ALL / STEP;
    static_assert(STEP % 8 == 0 && COUNT * STEP == ALL && (!COLS || ROWS % 64 == 0), "every thread copies the same");
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const uint32_t offset = panel_address(0, row, chunk); // STEP is a multiple of 8: the same swizzle in every row
};

// Copies stages to shared memory. A chunk past the end of `in`, of the tokens or of the rows becomes zeros.
template <class S, bool X_COLS, bool W_COLS, bool PAIR> struct TileStages {
    const TileArgs& p;
    const TilePlace<S, PAIR>& at;
    uint32_t shared;
    TileCopy<S::TOKENS, X_COLS, S::THREADS> cx;
    TileCopy<S::ROWS, W_COLS, S::THREADS> cw;

    // What a step copies from: the adapter's columns, or the operand's own, from number i of `in` numbers on.
    struct Source {
        const bf16* from;
        int ld, in, i;
    };
    __device__ __forceinline__ Source source(int step, const bf16* own, int ld, const bf16* more, int more_ld) const {
        const bool extra = at.more(step);
        return {extra ? more : own, extra ? more_ld : ld, extra ? p.more : p.in, at.number(step)};
    }
    __device__ __forceinline__ uint32_t x_stage(int step) const { return shared + step % S::STAGES * S::STAGE_BYTES; }
    __device__ __forceinline__ uint32_t w_stage(int step) const { return x_stage(step) + S::X_BYTES; }

    // `in` down the columns: 64 rows, of which a thread copies one chunk of columns.
    template <class Copy>
    __device__ __forceinline__ void copy_columns(uint32_t stage, const Copy& c, const Source& s, bool wanted, int first,
                                                 int end) const {
        const uint32_t to = stage + c.offset;
        const int i = s.i + c.row, column = first + c.chunk * 8;
        const bf16* from = s.from + (size_t)i * s.ld + column;
        #pragma unroll
        for (int k = 0; k < c.COUNT; k++) {
            const bool inside = wanted && i + k * c.STEP < s.in && column < end;
            copy_async(to + k * c.STEP * 128, from + (size_t)k * c.STEP * s.ld, inside);
        }
    }
    __device__ __forceinline__ void copy_x(int step) const {
        if constexpr (X_COLS) {
            copy_columns(x_stage(step), cx, {p.x, p.ldx, p.in, step * STAGE_IN}, step < at.last, at.n0, p.N);
        } else {
            const Source s = source(step, p.x, p.ldx, p.more_x, p.more);
            const uint32_t to = x_stage(step) + cx.offset;
            const int i = s.i + cx.chunk * 8, n = at.n0 + cx.row;
            const bool inside = step < at.last && i < s.in;
            const bf16* from = s.from + (size_t)n * s.ld + i;
            #pragma unroll
            for (int k = 0; k < cx.COUNT; k++)
                copy_async(to + k * cx.STEP * 128, from + (size_t)k * cx.STEP * s.ld, inside && n + k * cx.STEP < p.N);
        }
    }
    __device__ __forceinline__ void copy_w(int step) const {
        const Source s = source(step, p.W, p.ldw, p.more_W, W_COLS ? p.out : p.more);
        if constexpr (W_COLS) copy_columns(w_stage(step), cw, s, step < at.last, at.r0, p.out);
        else {
            const uint32_t to = w_stage(step) + cw.offset;
            const int i = s.i + cw.chunk * 8;
            const bool inside = step < at.last && i < s.in;
            #pragma unroll
            for (int k = 0; k < cw.COUNT; k++) {
                const int row = cw.row + k * cw.STEP; // of the tile; r: of W, or of gate or up
                const int r = PAIR ? at.r0 / 2 + row / 32 * 16 + row % 16 : at.r0 + row;
                const bf16* from = s.from + i + (size_t)(PAIR && row / 16 % 2 ? p.out + r : r) * s.ld;
                copy_async(to + k * cw.STEP * 128, from, inside && r < p.out);
            }
        }
    }
};

// sum += x W^T for one stage, by mma.sync: operands go through registers, 16 numbers of `in` at a time.
template <class S, bool X_COLS, bool W_COLS>
__device__ __forceinline__ void multiply_stage(float (&sum)[S::MF][S::NF][4], uint32_t x_stage, uint32_t w_stage) {
    const int lane = threadIdx.x % 32, warp_token = S::warp_token(), warp_row = S::warp_row();
    #pragma unroll
    for (int k = 0; k < STAGE_IN / 16; k++) {
        uint32_t a[S::MF][4], b[S::NF / 2][4];
        #pragma unroll
        for (int i = 0; i < S::MF; i++) {
            const int token = warp_token + i * 16;
            if constexpr (X_COLS) {
                const int row = k * 16 + lane % 8 + lane / 16 * 8;
                ldmatrix_transposed(a[i], panel_address(x_stage, row, token / 8 + lane / 8 % 2));
            } else {
                ldmatrix(a[i], chunk_address(x_stage, token + lane % 16, 2 * k + lane / 16));
            }
        }
        #pragma unroll
        for (int j = 0; j < S::NF / 2; j++) {
            const int row = warp_row + j * 16;
            if constexpr (W_COLS)
                ldmatrix_transposed(b[j], panel_address(w_stage, k * 16 + lane % 16, row / 8 + lane / 16));
            else
                ldmatrix(b[j], chunk_address(w_stage, row + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
        }
        #pragma unroll
        for (int i = 0; i < S::MF; i++)
            #pragma unroll
            for (int j = 0; j < S::NF; j++)
                mma(sum[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}
// The main loop: calls multiply(x, w) for the stages of steps from .. to - 1. The copies of the first STAGES - 1 stages
// are under way.
template <class S, bool X_COLS, bool W_COLS, bool PAIR, class Multiply>
__device__ __forceinline__ void walk_steps(const TileStages<S, X_COLS, W_COLS, PAIR>& stages, int from, int to,
                                           Multiply multiply) {
    for (int step = from; step < to; step++) {
        wait_for_copies<S::STAGES - 2>(); // this step's stage, as far as this thread copied it
        __syncthreads(); // ... as all did; and all are done with the stage before it, whose place the next copies take
        const int next = step + S::STAGES - 1;
        if (next < stages.at.last) stages.copy_x(next), stages.copy_w(next);
        commit_copies();
        multiply(stages.x_stage(step), stages.w_stage(step));
    }
}

// Epilogue::MASKS: what each of up to three modules keeps of a warp's part of a tile. A quad of lanes shares out the
// pairs of words (64 rows of a token) that all four need. They come from far, so they are asked for before the tile is
// multiplied: where they are needed, the compiler asks for each just before its use, and waits.
template <class S> struct KeptWords {
    static constexpr int PAIRS = S::NF > 8 ? S::NF / 8 : 1, ALL = S::MF * 2 * PAIRS, EACH = (ALL + 3) / 4;
    uint2 pairs[3][EACH];
    template <class Place>
    __device__ __forceinline__ KeptWords(const Place& at, const DropoutMasks& masks, int modules) {
        #pragma unroll
        for (int module = 0; module < 3; module++)
            #pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int pair = k * 4 + threadIdx.x % 4, r64 = (at.r0 + S::warp_row()) / 64 + pair % PAIRS;
                const int n = at.token(pair / PAIRS / 2, pair / PAIRS % 2);
                const bool there = module < modules && pair < ALL && n < masks.N && r64 < masks.sixty_fours;
                pairs[module][k] = there ? *(const uint2*)masks.at(module, r64, n) : uint2{};
            }
    }
    // (An index that is not constant would cost a copy of the array.)
    __device__ __forceinline__ void pick(uint2 (&of)[EACH], int module) const {
        #pragma unroll
        for (int k = 0; k < EACH; k++)
            of[k] = module == 0 ? pairs[0][k] : module == 1 ? pairs[1][k] : pairs[2][k];
    }
    // Of the 32 rows from row 32 j of the part on, this lane's from bit 0 on. All lanes of the warp call it.
    __device__ __forceinline__ static uint32_t rows(const uint2 (&of)[EACH], int i, int h, int j) {
        const int pair = (i * 2 + h) * PAIRS + j / 2, lane = threadIdx.x % 32;
        const uint32_t word = (S::warp_row() / 32 + j) % 2 ? of[pair / 4].y : of[pair / 4].x;
        return __shfl_sync(~0u, word, lane / 4 * 4 + pair % 4) >> 2 * (lane % 4);
    }
};

// Epilogue::MASKS: a stage of the further columns, from number `first` of them on, by mma.sync. Up to 32 of a module's
// at a time: of these a fragment's sums are made, masked, and added to `sum`, so that they take only their own
// registers. x's are zero where columns do not belong to the module. (`sum` cannot be indexed, so this is straight
// code, and wgmma idles meanwhile: hence few instructions.)
template <class S, class Epilogue>
__device__ __forceinline__ void add_masked_stage(float (&sum)[S::MF][S::NF][4], uint32_t x_stage, uint32_t w_stage,
                                                 int first, const KeptWords<S>& words, const TileArgs& p,
                                                 const Epilogue& epilogue) {
    const int lane = threadIdx.x % 32, warp_row = S::warp_row();
    const int last = min(STAGE_IN, p.more - first);
    int end;
    #pragma unroll 1
    for (int begin = 0; begin < last; begin = end) {
        const int module = (first + begin) / epilogue.rank, window = min(begin / 16 * 16, STAGE_IN - 32);
        end = min(min(last, (module + 1) * epilogue.rank - first), window + 32);
        const uint32_t w_rows = w_stage + (window + lane % 16) * 128; // in each panel
        uint2 pairs[KeptWords<S>::EACH];
        words.pick(pairs, module);
        #pragma unroll
        for (int i = 0; i < S::MF; i++) {
            uint32_t a[2][4];
            #pragma unroll
            for (int k = 0; k < 2; k++) {
                ldmatrix(a[k], chunk_address(x_stage, S::warp_token() + i * 16 + lane % 16,
                                             window / 8 + 2 * k + lane / 16));
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int column = window + k * 16 + e / 2 * 8;
                    if (column < begin || column >= end) a[k][e] = 0;
                }
            }
            #pragma unroll
            for (int j = 0; j < S::NF; j += 4) { // four fragments: their chains overlap
                float part[4][4] = {};
                uint32_t b[2][2][4];
                const uint32_t kept[2] = {words.rows(pairs, i, 0, j / 4), words.rows(pairs, i, 1, j / 4)};
                #pragma unroll
                for (int k = 0; k < 2; k++)
                    #pragma unroll
                    for (int two = 0; two < 2; two++) {
                        const int chunk = warp_row / 8 + j + 2 * two + lane / 16;
                        ldmatrix_transposed(b[k][two], w_rows + chunk / 8 * (STAGE_IN * 128) + k * 16 * 128 +
                                                           ((chunk % 8 ^ lane % 8) << 4));
                    }
                #pragma unroll
                for (int k = 0; k < 2; k++)
                    #pragma unroll
                    for (int f = 0; f < 4; f++)
                        mma(part[f], a[k][0], a[k][1], a[k][2], a[k][3], b[k][f / 2][f % 2 * 2],
                            b[k][f / 2][f % 2 * 2 + 1]);
                #pragma unroll
                for (int e = 0; e < 16; e++) { // of each two columns of two tokens (with `if` for ?, `scale` is fetched
                                               // anew for every sum)
                    float& y = sum[i][j + e / 4][e % 4];
                    const uint32_t bit = 1u << (e / 4 * 8 + e % 2);
                    const float more = fmaf(part[e / 4][e % 4], epilogue.scale, y);
                    y = kept[e / 2 % 2] & bit ? more : y;
                }
            }
        }
    }
}

// The sums of the blocks that share a tile, in order, for the last one to arrive: true for that one. In `partial` they
// lie as the threads hold them: (tile, split, fragment, thread, 4).
template <int THREADS, int M, int N>
__device__ __forceinline__ bool reduce_splits(float (&sum)[M][N][4], float* partial, int* arrived, int tile, int split,
                                              int splits) {
    float4* part = (float4*)partial + (size_t)tile * splits * M * N * THREADS + threadIdx.x;
    float4* mine = part + (size_t)split * M * N * THREADS;
    #pragma unroll
    for (int f = 0; f < M * N; f++) {
        float(&v)[4] = sum[f / N][f % N];
        mine[f * THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        v[0] = v[1] = v[2] = v[3] = 0;
    }
    if (!last_to_arrive<THREADS>(arrived + tile, splits)) return false;
    #pragma unroll 1
    for (int s = 0; s < splits; s++, part += M * N * THREADS)
        #pragma unroll
        for (int f = 0; f < M * N; f++) {
            const float4 other = __ldcg(part + f * THREADS);
            float(&v)[4] = sum[f / N][f % N];
            v[0] += other.x, v[1] += other.y, v[2] += other.z, v[3] += other.w;
        }
    return true;
}

// Four neighbouring columns of the 16 of two fragments, so that a quad of lanes writes whole sectors of 32 bytes:
// neighbours exchange two numbers. Lanes 0 1 2 3 of a quad get columns 0 .. 3, 8 .. 11, 4 .. 7, 12 .. 15. `lanes`: who
// calls it.
__device__ __forceinline__ float4 four_columns(float2 even, float2 odd, uint32_t lanes = ~0u) {
    const bool second = threadIdx.x % 2; // gets its four from the second fragment
    const float a = __shfl_xor_sync(lanes, second ? even.x : odd.x, 1);
    const float b = __shfl_xor_sync(lanes, second ? even.y : odd.y, 1);
    return second ? make_float4(a, b, odd.x, odd.y) : make_float4(even.x, even.y, a, b);
}
__device__ __forceinline__ float4 four_columns(const float (&even)[4], const float (&odd)[4], int h,
                                               uint32_t lanes = ~0u) {
    return four_columns(make_float2(even[2 * h], even[2 * h + 1]), make_float2(odd[2 * h], odd[2 * h + 1]), lanes);
}
// With PARTS, what a lane of a quad, which has whole pieces of 64 rows, makes of its sums of token n, fragment after
// fragment; `first` is the first row of the warp's part.
struct WeightSums {
    int n, first, chosen;
    float from, right = 0, largest = -1e30f, part = 0;
    template <class Epilogue>
    __device__ __forceinline__ void begin(int n_, int first_, int N, const Epilogue& epilogue) {
        n = n_, first = first_;
        chosen = n < N ? epilogue.chosen_row(n) - first - (int)threadIdx.x % 4 * 2 : -1;
        from = n < N ? epilogue.from(n) * LOG2E : 0;
    }
    // Four weights, two of fragment j and two of j + 1.
    __device__ __forceinline__ float4 next(const float (&even)[4], const float (&odd)[4], int h, int j, int out) {
        float w[4];
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = (j + e / 2) * 8;
            const float y = (e / 2 ? odd : even)[2 * h + e % 2];
            w[e] = exp2_fast(fmaf(y, LOG2E, -from));
            if (first + row < out) largest = fmaxf(largest, y), part += w[e];
            right = chosen == row + e % 2 ? y : right;
        }
        return make_float4(w[0], w[1], w[2], w[3]);
    }
    // The eight fragments from j0 on.
    template <class Epilogue> __device__ __forceinline__ void end_piece(int j0, int N, int out, Epilogue& epilogue) {
        largest = quad_max(largest), part = quad_sum(part);
        if (threadIdx.x % 4 == 0 && n < N && first + j0 * 8 < out)
            epilogue.part(n, (first + j0 * 8) / 64, largest, part);
        largest = -1e30f, part = 0;
    }
    template <class Epilogue> __device__ __forceinline__ void end(int fragments, Epilogue& epilogue) {
        if (chosen >= 0 && chosen < fragments * 8 && chosen % 8 < 2) epilogue.chosen(n, right);
    }
};
template <class S, class Epilogue>
__device__ __forceinline__ void finish_weights(const float (&sum)[S::NF][4], int h, int n, int first, int N, int out,
                                               Epilogue& epilogue) {
    WeightSums weights;
    weights.begin(n, first, N, epilogue);
    #pragma unroll
    for (int j = 0; j < S::NF; j += 2) {
        const float4 w = weights.next(sum[j], sum[j + 1], h, j, out);
        const float4 y = four_columns(make_float2(w.x, w.y), make_float2(w.z, w.w));
        const int t = threadIdx.x % 4, r = first + j * 8 + t / 2 * 4 + t % 2 * 8;
        if (n < N && r < out) epilogue.four(n, r, y, {});
        if (j % 8 == 6) weights.end_piece(j - 6, N, out, epilogue);
    }
    weights.end(S::NF, epilogue);
}
// Hands a lane's sums of token n to the epilogue, four at a time; `first` is the first row of the warp's part.
template <class S, class Epilogue>
__device__ __forceinline__ void finish_row(const float (&sum)[S::NF][4], int h, int n, int first, int N, int out,
                                           Epilogue& epilogue) {
    if constexpr (Epilogue::PARTS) return finish_weights<S>(sum, h, n, first, N, out, epilogue);
    constexpr int EACH = Epilogue::PAIR ? 4 : 2; // fragments that give a lane four columns, of gate and up with PAIR
    constexpr int FOURS = S::NF / EACH;
    const int t = threadIdx.x % 4;
    const auto row = [&](int i) { return (Epilogue::PAIR ? first / 2 : first) + i * 16 + t / 2 * 4 + t % 2 * 8; };
    constexpr int AHEAD = Epilogue::ADDS && FOURS > 8 ? FOURS / 2 : FOURS; // asked for before the first is waited for
    #pragma unroll
    for (int i0 = 0; i0 < FOURS; i0 += AHEAD) {
        [[maybe_unused]] float4 old[Epilogue::ADDS ? AHEAD : 1];
        if constexpr (Epilogue::ADDS)
            #pragma unroll
            for (int i = 0; i < AHEAD; i++)
                old[i] = n < N && row(i0 + i) < out ? epilogue.old_four(n, row(i0 + i)) : float4{};
        #pragma unroll
        for (int i = i0; i < i0 + AHEAD; i++) {
            const bool inside = n < N && row(i) < out;
            const int j = Epilogue::PAIR && S::UP == 2 ? 4 * i : 2 * i;
            float4 y = four_columns(sum[j], sum[j + 1], h), second = {};
            if constexpr (Epilogue::PAIR) second = four_columns(sum[j + S::UP], sum[j + S::UP + 1], h);
            if constexpr (Epilogue::ADDS) second = old[i - i0];
            if (inside) epilogue.four(n, row(i), y, second);
        }
    }
}

template <class S, bool X_COLS, bool W_COLS, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, 1) tile_kernel(TileArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || !W_COLS, "gate and up are rows");
    static_assert(!Epilogue::PARTS || S::NF % 8 == 0, "a quad of lanes has whole pieces of 64");
    extern __shared__ __align__(128) uint4 memory[]; // no row straddles two lines of 128 bytes
    if (epilogue.skipped()) return;
    const TilePlace<S, Epilogue::PAIR> at(p, blockIdx.x, blockIdx.y);
    const TileStages<S, X_COLS, W_COLS, Epilogue::PAIR> stages = {p, at, shared_address(memory), {}, {}};

    // The first stages. Weights may be read before the previous kernels have ended, as in stream_kernel; with W_COLS W
    // may be an activation (dW = dy^T x), which may not.
    if (!W_COLS)
        for (int s = 0; s < S::STAGES - 1; s++) stages.copy_w(at.first + s);
    if (p.early) let_next_start();
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++) {
        if (W_COLS) stages.copy_w(at.first + s);
        stages.copy_x(at.first + s);
        commit_copies(); // (the first of these groups has all of the weights above)
    }
    float sum[S::MF][S::NF][4] = {};
    const auto multiply = [&](uint32_t x, uint32_t w) { multiply_stage<S, X_COLS, W_COLS>(sum, x, w); };
    if constexpr (Epilogue::MASKS) {
        const KeptWords<S> words(at, epilogue.masks, p.more / epilogue.rank);
        walk_steps(stages, at.first, min(at.last, at.first_more), multiply);
        int step = max(at.first, at.first_more);
        walk_steps(stages, step, at.last, [&](uint32_t x, uint32_t w) {
            add_masked_stage<S>(sum, x, w, at.number(step++), words, p, epilogue);
        });
    } else walk_steps(stages, at.first, at.last, multiply);
    wait_for_copies<0>();
    if (!p.early) let_next_start(); // earlier, blocks of the next kernel would take the places of ours

    if (p.splits > 1 && !reduce_splits<S::THREADS>(sum, p.partial, p.arrived, blockIdx.x, blockIdx.y, p.splits)) return;
    const int first = at.r0 + S::warp_row();
    #pragma unroll
    for (int i = 0; i < S::MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = at.token(i, h);
            finish_row<S>(sum[i], h, n, first, p.N, p.out, epilogue);
        }
}

// Whether the scratch has room for the sums of so many splits.
template <class S> bool splits_fit(int64_t tiles, int splits) {
    return tiles <= MAX_TILES && tiles * splits * S::TOKENS * S::ROWS * 4 <= (int64_t)PARTIAL_BYTES;
}

// A product that is to be launched in tiles: what it left open is filled in. Its number of tiles.
template <class S, bool X_COLS, bool W_COLS, class Epilogue> int plan_tiles(Context& ctx, TileArgs& p) {
    const int rows = Epilogue::PAIR ? 2 * p.out : p.out;
    const int64_t tiles = count_tiles<S>(p.N, rows);
    if (!p.ldx) p.ldx = X_COLS ? p.N : p.in;
    if (!p.ldw) p.ldw = W_COLS ? p.out : p.in;
    // A chunk of 16 bytes is inside or past the end as a whole.
    bool eights = p.out % 8 == 0 && p.more % 8 == 0 && p.ldx % 8 == 0 && p.ldw % 8 == 0;
    eights &= X_COLS ? p.N % 8 == 0 : p.in % 8 == 0;
    if (!eights || p.N < 1 || p.in < 1 || p.out < 1)
        DIE("a product of (%d,%d) and (%d,%d): the GPU's kernels take multiples of 8", p.N, p.in, p.out, p.in);
    if (X_COLS && p.more) DIE("a product whose x lies in columns takes no further columns of an adapter");
    if (tiles > INT_MAX) DIE("a product of %d tokens and %d rows has too many tiles", p.N, rows);
    if (p.splits < 1 || (p.splits > 1 && !splits_fit<S>(tiles, p.splits)))
        DIE("a product of %lld tiles in %d splits has more sums than there is scratch", (long long)tiles, p.splits);
    p.partial = ctx.gpu->partial, p.arrived = ctx.gpu->arrived;
    return (int)tiles;
}
template <class S, bool X_COLS = false, bool W_COLS = false, class Epilogue>
void launch_tiles(Context& ctx, TileArgs p, Epilogue epilogue) {
    const int tiles = plan_tiles<S, X_COLS, W_COLS, Epilogue>(ctx, p);
    const dim3 grid(tiles, p.splits);
    launch(ctx, tile_kernel<S, X_COLS, W_COLS, Epilogue>, grid, S::THREADS, S::SHARED, p, epilogue);
}

// ---- The same on Hopper. Grid: as many blocks as are resident at once; a block takes tiles in turn. One warp, the
// producer, has the Tensor Memory Accelerator copy stage after stage to a ring in shared memory, as far ahead as there
// is room, through the ends of tiles too. The others, the consumers, are a warpgroup for every 64 tokens of the tile:
// it multiplies them by all rows with wgmma, and says when it has done with a stage. So copies, products and a part of
// the epilogues run at the same time. Bound by the tensor cores.
//
// Layouts, stages, further columns, splits and fragments are tile_kernel's; PAIR: the tile's first half are rows of
// gate, its second half the same rows of up.
//
// SHARING: two blocks, a cluster, have neighbouring tiles of tokens and the same rows of W, of which each copies half
// to both: a stage is filled again when the consumers of both have left it, and what the other block has copied may
// count before this one says how many bytes it expects, since the phase still lacks that arrival. Products one after
// another take the card to the limit of its power, so it is bytes, here those from the L2 cache, that cost clocks.
constexpr int MOST_SPLITS = 8; // blocks that every GPU takes as a cluster
template <int TOKENS_, int ROWS_, int STAGES_, int MOST_ = TOKENS_, int SHARING_ = 1> struct HopperShape {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_, STAGES = STAGES_;
    static constexpr int SHARING = SHARING_; // blocks that share W: 1 or 2
    static constexpr int MOST = MOST_; // less than TOKENS: of N, and a stage has no more of x; wgmma reads on into W
    static constexpr int X_BYTES = MOST * STAGE_IN * 2, STAGE_BYTES = X_BYTES + ROWS * STAGE_IN * 2;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES + 1024; // the swizzle counts from multiples of 1024
    static constexpr int MF = 1, NF = ROWS / 8;
    static constexpr int BAND = 2048 / TOKENS / SHARING, UP = NF / 2;
    static constexpr int CONSUMERS = TOKENS / 64 * 128; // threads
    // Where three warpgroups could not have registers enough each, the producer is one, and leaves the others most.
    static constexpr bool MOVES_REGISTERS = ROWS > 128;
    static constexpr int THREADS = CONSUMERS + (MOVES_REGISTERS ? 128 : 32);
    static constexpr int BLOCKS = 2 * SHARED < 225 * 1024 ? 2 : 1; // of a multiprocessor
    static constexpr size_t ROOM = BLOCKS == 2 ? 112 * 1024 : 226 * 1024; // what a block may have
    // Whether the ring may be shorter than STAGES by one, which a block's received sums take.
    static constexpr bool GIVES = BLOCKS == 1 && TOKENS * ROWS <= 128 * 64;
    // Two boxes of 16 tokens by 64 columns for each warp, where there is room.
    static constexpr int BOX = 16 * 128, STAGING = CONSUMERS / 32 * 2 * BOX;
    static constexpr bool STAGED = BLOCKS == 1 && CONSUMERS == 256 && ROWS >= 128 && SHARED + STAGING <= 227 * 1024;
    __device__ static int warp_token() { return threadIdx.x / 32 * 16; }
    __device__ static int warp_row() { return 0; }
};
struct TileMaps {
    CUtensorMap x, W, more_x, more_W, out[3];
};

// A stage's two halves. copy_w: two boxes with PAIR; down the columns a box of 64 columns is a panel.
template <class S, bool X_COLS>
__device__ __forceinline__ void copy_x_boxes(const TileMaps& maps, uint32_t to, int i, int n0, bool more,
                                             uint32_t filled) {
    if constexpr (X_COLS)
        #pragma unroll
        for (int c = 0; c < S::TOKENS; c += 64) copy_box(to + c * STAGE_IN * 2, maps.x, filled, n0 + c, i);
    else copy_box(to, more ? maps.more_x : maps.x, filled, i, n0);
}
template <class S, bool W_COLS, bool PAIR>
__device__ __forceinline__ void copy_w_boxes(const TileMaps& maps, uint32_t to, int i, int r0, int out, bool more,
                                             uint32_t filled, uint64_t policy) {
    const CUtensorMap& map = more ? maps.more_W : maps.W;
    constexpr int OWN = S::ROWS / S::SHARING;
    const int mine = S::SHARING > 1 ? (int)(blockIdx.x % 2) * OWN : 0;
    const auto copy = [&](int place, int x, int y) {
        if (S::SHARING > 1) copy_box_to_both(policy, to + place, map, filled, x, y);
        else copy_box_by(policy, to + place, map, filled, x, y);
    };
    if constexpr (W_COLS)
        #pragma unroll
        for (int c = 0; c < OWN; c += 64) copy((mine + c) * STAGE_IN * 2, r0 + mine + c, i);
    else if constexpr (S::SHARING > 1) copy(mine * STAGE_IN * 2, i, !PAIR ? r0 + mine : mine ? out + r0 / 2 : r0 / 2);
    else if constexpr (PAIR) copy(0, i, r0 / 2), copy(S::ROWS * STAGE_IN, i, out + r0 / 2);
    else copy(0, i, r0);
}

// The shared memory of a block, and the barriers of its stages.
template <class S> struct HopperStages {
    uint32_t shared, filled, emptied; // the stages; two arrays of mbarriers
    int given;
    __device__ __forceinline__ int count() const { return S::GIVES ? given : S::STAGES; }
    __device__ __forceinline__ uint32_t x(int s) const { return shared + s * S::STAGE_BYTES; }
    __device__ __forceinline__ uint32_t w(int s) const { return x(s) + S::X_BYTES; }
    __device__ __forceinline__ uint32_t full(int s) const { return filled + 8 * s; }
    __device__ __forceinline__ uint32_t empty(int s) const { return emptied + 8 * s; }
    __device__ __forceinline__ void done_with(int s) const { // a warp; both blocks that fill the stage are told
        const int lane = threadIdx.x % 32;
        if (lane >= S::SHARING) return;
        if (S::SHARING == 1) barrier_arrive(empty(s));
        else barrier_arrive_there(block_address(empty(s), lane));
    }
};

// One thread. Weights may be read before the previous kernels have ended, as in stream_kernel; with W_COLS W may be an
// activation (dW = dy^T x), which may not. Where each block has one tile, W leaves the L2 cache to the activations.
// (Blocks that go on to further tiles lose by it: a copy brings 256 bytes of a row to that cache, a stage takes 128.)
template <class S, bool X_COLS, bool W_COLS, bool PAIR>
__device__ __forceinline__ void produce(const TileMaps& maps, const TileArgs& p, const HopperStages<S>& stages,
                                        int units) {
    Ring<S::STAGES> ring;
    const uint64_t policy = !W_COLS && units <= (int)gridDim.x / S::SHARING ? EVICT_FIRST : EVICT_NORMAL;
    const int first = blockIdx.x / S::SHARING;
    for (int u = first; u < units; u += gridDim.x / S::SHARING) {
        const TilePlace<S, PAIR> at(p, u / p.splits, u % p.splits);
        const auto copy_w = [&](int step, int s) {
            barrier_arrive_expecting(stages.full(s), S::STAGE_BYTES);
            copy_w_boxes<S, W_COLS, PAIR>(maps, stages.w(s), at.number(step), at.r0, p.out, at.more(step),
                                          stages.full(s), policy);
        };
        const auto copy_x = [&](int step, int s) {
            copy_x_boxes<S, X_COLS>(maps, stages.x(s), at.number(step), at.n0, at.more(step), stages.full(s));
        };
        int step = at.first;
        if (u == first) { // the ring is empty
            const int ready = min(at.last - at.first, stages.count());
            if (W_COLS) wait_for_previous();
            for (int s = 0; s < ready; s++) copy_w(at.first + s, s);
            if (!W_COLS) wait_for_previous();
            for (; step < at.first + ready; step++, ring.next(stages.count())) copy_x(step, ring.stage);
        }
        for (; step < at.last; step++, ring.next(stages.count())) {
            barrier_wait(stages.empty(ring.stage), ring.parity ^ 1);
            copy_w(step, ring.stage), copy_x(step, ring.stage);
        }
    }
}

// sum = x W^T over `steps` stages, of which there is one at least. One group of wgmma is under way while the next stage
// is waited for.
template <class S, bool X_COLS, bool W_COLS>
__device__ __forceinline__ void multiply_steps_wgmma(float (&sum)[1][S::NF][4], const HopperStages<S>& stages,
                                                     Ring<S::STAGES>& ring, int steps) {
    constexpr int PANEL = STAGE_IN * 128, DOWN = 16 * 128, ALONG = 32; // bytes of 16 numbers of `in`, down and along
    const uint32_t my_x = threadIdx.x / 128 * (64 * STAGE_IN * 2);
    const auto multiply = [&](bool add) {
        barrier_wait(stages.full(ring.stage), ring.parity);
        const uint32_t x = stages.x(ring.stage) + my_x, w = stages.w(ring.stage);
        wgmma_begin();
        #pragma unroll
        for (int k = 0; k < STAGE_IN / 16; k++)
            wgmma<S::ROWS, X_COLS, W_COLS>(sum[0], wgmma_operand(x + k * (X_COLS ? DOWN : ALONG), PANEL),
                                           wgmma_operand(w + k * (W_COLS ? DOWN : ALONG), PANEL), add || k);
        wgmma_commit();
    };
    multiply(false);
    int before = ring.stage;
    ring.next(stages.count());
    for (int step = 1; step < steps; step++) {
        multiply(true);
        wgmma_wait<1>();
        stages.done_with(before);
        before = ring.stage;
        ring.next(stages.count());
    }
    wgmma_wait<0>();
    wgmma_settle(sum);
    stages.done_with(before);
}

// The same of e4m3. A stage is a group of 128 numbers of `in`, and two e4m3 are to the copies one number of two bytes.
// A wgmma of e4m3 keeps of its 32 products, and of the sum before, what is less than about 14 bits behind the largest
// one's first, so what it makes of 128 rows of W and a group is added to the sums in float, times the scales of both
// operands, which are asked for a stage ahead. Meanwhile the other warpgroup's wgmma is under way.
template <class S, bool PAIR>
__device__ __forceinline__ void multiply_groups(float (&sum)[1][S::NF][4], const HopperStages<S>& stages,
                                                Ring<S::STAGES>& ring, const TileArgs& p,
                                                const TilePlace<S, PAIR>& at) {
    static_assert(S::ROWS % 128 == 0, "a wgmma has 128 rows");
    const uint32_t my_x = threadIdx.x / 128 * (64 * STAGE_IN * 2);
    const int groups = (p.in + STAGE_IN - 1) / STAGE_IN, last = ((PAIR ? 2 : 1) * p.out - 1) / 128;
    // Each half of the tile's rows has one scale.
    const int first = (PAIR ? at.r0 / 2 : at.r0) / 128, second = (PAIR ? p.out + at.r0 / 2 : at.r0 + S::ROWS / 2) / 128;
    const float* const of_x = p.x_scale + at.token(0, 0);
    const float *const of_w[2] = {p.W_scale + (size_t)first * groups, p.W_scale + (size_t)min(second, last) * groups};
    float x[2], w[2]; // of this lane's two tokens, and of the halves
    const auto load = [&](int step) {
        #pragma unroll
        for (int i = 0; i < 2; i++) x[i] = of_x[(size_t)step * p.pitch + i * 8], w[i] = of_w[i][step];
    };
    load(at.first);
    #pragma unroll
    for (int j = 0; j < S::NF * 4; j++) sum[0][j / 4][j % 4] = 0;
    for (int step = at.first; step < at.last; step++, ring.next(stages.count())) {
        barrier_wait(stages.full(ring.stage), ring.parity);
        float factor[2][2];
        #pragma unroll
        for (int f = 0; f < S::NF; f += 16) { // fragments of 128 rows
            const uint32_t from_x = stages.x(ring.stage) + my_x, from_w = stages.w(ring.stage) + f * (8 * STAGE_IN * 2);
            float part[1][16][4];
            wgmma_begin();
            #pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma_e4m3(part[0], wgmma_operand(from_x + k * 32, 0), wgmma_operand(from_w + k * 32, 0), k);
            wgmma_commit();
            if (f == 0) {
                #pragma unroll
                for (int i = 0; i < 4; i++) factor[i / 2][i % 2] = x[i / 2] * w[i % 2];
                if (step + 1 < at.last) load(step + 1);
            }
            wgmma_wait<0>();
            wgmma_settle(part);
            if (f + 16 == S::NF) stages.done_with(ring.stage);
            #pragma unroll
            for (int j = 0; j < 16; j++)
                #pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[0][f + j][e] = fmaf(part[0][j][e], factor[e / 2][2 * (f + j) / S::NF], sum[0][f + j][e]);
        }
    }
}

// The blocks of a cluster share a tile, and each has the sums of some of its steps. Block b adds up the tile's pieces
// b, b + splits, .., in the order of blocks; all send it theirs, to its memory at `received`, and its barrier `came`
// counts the bytes. A piece: the fragments that give a lane four columns of each of its two tokens. Nobody reads
// another block's memory, so none has to wait at its end. Consumers only.
template <class S, class Epilogue> struct ClusterPieces {
    static constexpr int EACH = Epilogue::PAIR ? 4 : 2, PIECES = S::NF / EACH; // fragments of a piece; pieces of a tile
    static constexpr int BYTES = EACH * S::CONSUMERS * 16;                     // of a piece
    BOTH static int most(int splits) { return (PIECES + splits - 1) / splits; } // that a block adds up
    __device__ static int count(int split, int splits) { return (PIECES - split + splits - 1) / splits; }
};
template <class S, class Epilogue, class Place>
__device__ __forceinline__ void finish_in_cluster(const float (&sum)[1][S::NF][4], uint32_t received, uint32_t came,
                                                  int split, const TileArgs& p, const Place& at, Epilogue& epilogue) {
    using C = ClusterPieces<S, Epilogue>;
    const int t = threadIdx.x % 4, splits = p.splits;
    const uint32_t mine = received + threadIdx.x * 16;
    const auto row = [&](int piece) {
        return (Epilogue::PAIR ? at.r0 / 2 : at.r0) + piece * 16 + t / 2 * 4 + t % 2 * 8;
    };
    const auto inside = [&](int piece, int h) {
        return piece < C::PIECES && at.token(0, h) < p.N && row(piece) < p.out;
    };
    const auto old = [&](int piece, int h) {
        return Epilogue::ADDS && inside(piece, h) ? epilogue.old_four(at.token(0, h), row(piece)) : float4{};
    };
    if (!p.apart) cluster_arrive();
    cluster_wait(); // all have begun; or all have used their stages, in whose place the sums come
    int owner = 0, turn = 0;
    #pragma unroll
    for (int piece = 0; piece < C::PIECES; piece++) {
        const uint32_t to = block_address(mine + (turn * splits + split) * C::BYTES, owner);
        const uint32_t barrier = block_address(came, owner);
        #pragma unroll
        for (int e = 0; e < C::EACH; e++)
            send_block(to + e * (S::CONSUMERS * 16), sum[0][piece * 2 + e % 2 + e / 2 * S::UP], barrier);
        if (++owner == splits) owner = 0, turn++;
    }
    float4 next[2] = {old(split, 0), old(split, 1)};
    if (split < C::PIECES) barrier_wait(came, 0);
    uint32_t from = mine;
    for (int piece = split; piece < C::PIECES; piece += splits, from += splits * C::BYTES) {
        float4 second[2] = {next[0], next[1]};
        if constexpr (Epilogue::ADDS) next[0] = old(piece + splits, 0), next[1] = old(piece + splits, 1);
        float v[C::EACH][4] = {};
        #pragma unroll
        for (int e = 0; e < C::EACH; e++) {
            uint4 part[MOST_SPLITS];
            #pragma unroll
            for (int s = 0; s < MOST_SPLITS; s++)
                if (s < splits) part[s] = load_shared(from + s * C::BYTES + e * (S::CONSUMERS * 16));
            #pragma unroll
            for (int s = 0; s < MOST_SPLITS; s++)
                if (s < splits) {
                    v[e][0] += __uint_as_float(part[s].x), v[e][1] += __uint_as_float(part[s].y);
                    v[e][2] += __uint_as_float(part[s].z), v[e][3] += __uint_as_float(part[s].w);
                }
        }
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 y = four_columns(v[0], v[1], h);
            if constexpr (Epilogue::PAIR) second[h] = four_columns(v[2], v[3], h);
            if (inside(piece, h)) epilogue.four(at.token(0, h), row(piece), y, second[h]);
        }
    }
}

// Hands a warp's sums to an epilogue with outputs, whose boxes of 128 bytes a token go through shared memory, each in
// one of the warp's two places there in turn: a lane's own stores would write eight pieces of 32 bytes at a time, and
// the warp would wait for them. What the epilogue adds to is asked for 64 columns ahead.
template <class S, class Epilogue> struct Boxes {
    static constexpr int FRAGMENTS = Epilogue::PAIR ? S::UP : S::NF;
    const TilePlace<S, Epilogue::PAIR>& at;
    const int N, out, mine = threadIdx.x % 4 / 2 * 4 + threadIdx.x % 2 * 8, n0 = at.token(0, 0);
    float4 old[2][4];
    using Kept = uint2[FRAGMENTS < 8 ? 1 : FRAGMENTS / 8][2][4]; // with ROUNDS: the numbers of output 0
    __device__ __forceinline__ int row(int j0, int i) const {
        return (Epilogue::PAIR ? at.r0 / 2 : at.r0) + j0 * 8 + i * 16 + mine;
    }
    __device__ __forceinline__ void load(int j0, const Epilogue& epilogue) {
        if constexpr (Epilogue::ADDS)
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const int n = n0 + k / 4 * 8, r = row(j0, k % 4);
                old[k / 4][k % 4] = n < N && r < out ? epilogue.old_four(n, r) : float4{};
            }
    }
    // store(place) to shared memory, then the box goes to column x of an output.
    template <class Store>
    __device__ __forceinline__ void put(const CUtensorMap& map, uint32_t places, int& turn, int x, Store store) const {
        const int lane = threadIdx.x % 32;
        const uint32_t place = places + turn * S::BOX;
        if (lane == 0) wait_for_boxes<1>();
        __syncwarp();
        #pragma unroll
        for (int h = 0; h < 2; h++) store(place, h, h * 8 + lane / 4);
        shared_to_async();
        __syncwarp();
        if (lane == 0) store_box(map, place, x, n0 - lane / 4), commit_boxes();
        turn ^= 1;
    }
    __device__ __forceinline__ void finish(const float (&sum)[S::NF][4], const TileMaps& maps, uint32_t places,
                                           int& turn, Epilogue& epilogue) {
        const int first = row(0, 0) - mine, t = threadIdx.x % 4;
        [[maybe_unused]] WeightSums weights[2];
        if constexpr (Epilogue::PARTS)
            weights[0].begin(n0, first, N, epilogue), weights[1].begin(n0 + 8, first, N, epilogue);
        [[maybe_unused]] Kept kept;
        #pragma unroll
        for (int j0 = 0; j0 < FRAGMENTS; j0 += 8) {
            Boxes next = *this;
            if (j0 + 8 < FRAGMENTS) next.load(j0 + 8, epilogue);
            typename Epilogue::Four four[Epilogue::OUTPUTS][2][4];
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int j = j0 + 2 * i;
                    const auto two = [&](int j) { // if nothing is added, two of a fragment and two of the next will do
                        return make_float4(sum[j][2 * h], sum[j][2 * h + 1], sum[j + 1][2 * h], sum[j + 1][2 * h + 1]);
                    };
                    float4 y, second = {};
                    if constexpr (Epilogue::PARTS) y = weights[h].next(sum[j], sum[j + 1], h, j, out);
                    else if constexpr (Epilogue::ADDS) y = four_columns(sum[j], sum[j + 1], h), second = old[h][i];
                    else y = two(j);
                    if constexpr (Epilogue::PAIR) second = two(j + S::UP);
                    epilogue.values(y, second, [&](int k, const float4& v) { round_four(four[k][h][i], v); });
                }
                if constexpr (Epilogue::PARTS) weights[h].end_piece(j0, N, out, epilogue);
                if constexpr (Epilogue::ROUNDS)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) kept[j0 / 8][h][i] = four[0][h][i];
            }
            #pragma unroll
            for (int k = 0; k < Epilogue::OUTPUTS; k++) {
                if (!epilogue.output(k).at) continue;
                if constexpr (Epilogue::ADDS) // of float
                    #pragma unroll
                    for (int i0 = 0; i0 < 4; i0 += 2)
                        put(maps.out[k], places, turn, first + j0 * 8 + i0 * 16, [&](uint32_t place, int h, int row) {
                            #pragma unroll
                            for (int i = 0; i < 2; i++)
                                store_shared(chunk_address(place, row, 4 * i + mine / 4), four[k][h][i0 + i]);
                        });
                else
                    put(maps.out[k], places, turn, first + j0 * 8, [&](uint32_t place, int h, int row) {
                        #pragma unroll
                        for (int i = 0; i < 4; i++) {
                            store_shared(chunk_address(place, row, 2 * i) + t * 4, four[k][h][i].x);
                            store_shared(chunk_address(place, row, 2 * i + 1) + t * 4, four[k][h][i].y);
                        }
                    });
            }
            #pragma unroll
            for (int k = 0; k < 8; k++) old[k / 4][k % 4] = next.old[k / 4][k % 4];
        }
        if constexpr (Epilogue::PARTS) weights[0].end(S::NF, epilogue), weights[1].end(S::NF, epilogue);
        if constexpr (Epilogue::ROUNDS) round(kept, maps, places, turn, first, epilogue);
    }
    // The tile's columns are a group: a box of e4m3, two of which count as one number.
    __device__ __forceinline__ void round(const Kept& kept, const TileMaps& maps,
                                          uint32_t places, int& turn, int first, Epilogue& epilogue) {
        static_assert(FRAGMENTS == 16, "a group has 128 numbers");
        put(maps.out[1], places, turn, first / 2, [&](uint32_t place, int h, int row) {
            uint32_t largest = 0;
            #pragma unroll
            for (int k = 0; k < 8; k++)
                largest = larger(larger(largest, kept[k / 4][h][k % 4].x), kept[k / 4][h][k % 4].y);
            const GroupRounding rounding(largest_of<4>(largest));
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const uint32_t at = chunk_address(place, row, k) + threadIdx.x % 4 * 2;
                store_shared_half(at, rounding.two(kept[k / 4][h][k % 4].x));
                store_shared_half(at + 8, rounding.two(kept[k / 4][h][k % 4].y));
            }
            const int n = n0 + h * 8;
            if (threadIdx.x % 4 == 0 && n < N)
                epilogue.rounded.scale[(size_t)(first / 128) * epilogue.rounded.pitch + n] = rounding.factor;
        });
    }
};

template <class S, bool X_COLS, bool W_COLS, bool E4M3, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
hopper_kernel(const __grid_constant__ TileMaps maps, const __grid_constant__ TileArgs p, int units, Epilogue epilogue) {
#ifdef HAVE_WGMMA
    using C = ClusterPieces<S, Epilogue>;
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[2 * S::STAGES + 1];
    if (epilogue.skipped()) return;
    const uint32_t at_barriers = shared_address(barriers), came = at_barriers + 16 * S::STAGES;
    const HopperStages<S> stages = {(shared_address(memory) + 1023) & ~1023u, at_barriers, at_barriers + 8 * S::STAGES,
                                    p.stages};
    if (threadIdx.x == S::CONSUMERS) prefetch_map(maps.W), prefetch_map(maps.x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages.count(); s++)
            barrier_begin(stages.full(s), 1), barrier_begin(stages.empty(s), S::SHARING * S::CONSUMERS / 32);
        barrier_begin(came, 1);
        barriers_begun();
    }
    __syncthreads();
    if (p.apart || S::SHARING > 1) cluster_arrive();
    if (S::SHARING > 1) cluster_wait(); // both have begun their barriers
    let_next_start(); // all our blocks have their places
    if (threadIdx.x >= S::CONSUMERS) {
        if (S::MOVES_REGISTERS) keep_registers<40>();
        if (threadIdx.x == S::CONSUMERS) produce<S, X_COLS, W_COLS, Epilogue::PAIR>(maps, p, stages, units);
        return;
    }
    if (S::MOVES_REGISTERS) take_registers<232>();
    if (p.splits > 1 && threadIdx.x == 0)
        barrier_arrive_expecting(came, C::count(blockIdx.x % p.splits, p.splits) * p.splits * C::BYTES);
    wait_for_previous(); // whose results an epilogue may add to
    Ring<S::STAGES> ring;
    [[maybe_unused]] const uint32_t places = stages.shared + S::STAGES * S::STAGE_BYTES + threadIdx.x / 32 * 2 * S::BOX;
    [[maybe_unused]] int turn = 0;
    for (int u = blockIdx.x / S::SHARING; u < units; u += gridDim.x / S::SHARING) {
        const TilePlace<S, Epilogue::PAIR> at(p, u / p.splits, u % p.splits);
        float sum[1][S::NF][4];
        [[maybe_unused]] Boxes<S, Epilogue> boxes = {at, p.N, p.out};
        constexpr bool STAGED = S::STAGED && Epilogue::OUTPUTS > 0, LATE = E4M3 || Epilogue::MASKS; // (registers)
        if constexpr (STAGED && !LATE)
            if (p.splits == 1) boxes.load(0, epilogue);
        if constexpr (Epilogue::MASKS) { // (then there are no splits)
            const KeptWords<S> words(at, epilogue.masks, p.more / epilogue.rank);
            multiply_steps_wgmma<S, X_COLS, W_COLS>(sum, stages, ring, at.first_more);
            for (int step = at.first_more; step < at.last; step++, ring.next(stages.count())) {
                barrier_wait(stages.full(ring.stage), ring.parity);
                const uint32_t x = stages.x(ring.stage), w = stages.w(ring.stage);
                add_masked_stage<S>(sum, x, w, at.number(step), words, p, epilogue);
                __syncwarp();
                stages.done_with(ring.stage);
            }
            wgmma_settle(sum);
        } else if constexpr (E4M3) multiply_groups(sum, stages, ring, p, at);
        else multiply_steps_wgmma<S, X_COLS, W_COLS>(sum, stages, ring, at.last - at.first);
        if (p.splits > 1) { // (then this is the block's only unit)
            const uint32_t received = stages.shared + (p.apart ? p.stages * S::STAGE_BYTES : 0);
            finish_in_cluster<S>(sum, received, came, u % p.splits, p, at, epilogue);
            return;
        }
        if constexpr (STAGED) {
            if constexpr (LATE) boxes.load(0, epilogue);
            boxes.finish(sum[0], maps, places, turn, epilogue);
        } else
            #pragma unroll
            for (int h = 0; h < 2; h++) finish_row<S>(sum[0], h, at.token(0, h), at.r0, p.N, p.out, epilogue);
    }
    wait_for_boxes<0>(); // before the memory they lie in goes away
    // ... or barriers at which the other block arrives. (A thread that has ended counts as there.)
    if (S::SHARING > 1) cluster_arrive(), cluster_wait();
#endif
}

template <class S, bool X_COLS = false, bool W_COLS = false, bool E4M3 = false, class Epilogue>
void launch_hopper(Context& ctx, TileArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || !W_COLS, "gate and up are rows");
    const int tiles = plan_tiles<S, X_COLS, W_COLS, Epilogue>(ctx, p), units = tiles * p.splits;
    if (Epilogue::MASKS && !(p.more && p.more_last))
        DIE("a product that masks further columns needs some, as its last");
    if (p.splits > (Epilogue::MASKS || Epilogue::PARTS ? 1 : MOST_SPLITS))
        DIE("this product takes no %d splits", p.splits);
    if (p.splits > (p.more + STAGE_IN - 1) / STAGE_IN + (p.in + STAGE_IN - 1) / STAGE_IN)
        DIE("a product of %d numbers has not %d splits", p.in + p.more, p.splits);
    if (S::MOST < S::TOKENS && p.N > S::MOST) DIE("a tile of %d tokens has not %d", S::MOST, p.N);
    constexpr int X_BOX = X_COLS ? STAGE_IN : S::MOST;
    constexpr int W_BOX = W_COLS ? STAGE_IN : Epilogue::PAIR || S::SHARING > 1 ? S::ROWS / 2 : S::ROWS;
    static_assert(S::SHARING == 1 || S::ROWS % 128 == 0, "a panel has one who copies it");
    const int rows = Epilogue::PAIR ? 2 * p.out : p.out;
    const auto map = [](const bf16* matrix, int rows, int columns, int ld, int box) {
        return tensor_map(matrix, {{(size_t)columns, 1, STAGE_IN}, {(size_t)rows, (size_t)ld, box}});
    };
    const auto map_x = [&](const bf16* x, int in, int ld) {
        return X_COLS ? map(x, in, p.N, ld, X_BOX) : map(x, p.N, in, ld, X_BOX);
    };
    const auto map_w = [&](const bf16* W, int in, int ld) {
        return W_COLS ? map(W, in, p.out, ld, W_BOX) : map(W, rows, in, ld, W_BOX);
    };
    TileMaps maps = {map_x(p.x, p.in, p.ldx), map_w(p.W, p.in, p.ldw), {}, {}, {}};
    constexpr bool STAGED = S::STAGED && Epilogue::OUTPUTS > 0;
    if constexpr (STAGED)
        for (int k = 0; k < Epilogue::OUTPUTS; k++)
            if (const auto to = epilogue.output(k); to.at) {
                const int wide = 128 / (int)sizeof(*to.at);
                maps.out[k] = tensor_map(to.at, {{(size_t)p.out, 1, wide}, {(size_t)p.N, to.ld, 16}});
            }
    if constexpr (Epilogue::ROUNDS) {
        static_assert(STAGED && S::ROWS == 256);
        if (p.splits > 1 || p.out % 128) DIE("a product that rounds takes whole groups, and no splits");
        const size_t half = (size_t)p.out / 2;
        maps.out[1] = tensor_map((const bf16*)epilogue.rounded.q, {{half, 1, 64}, {(size_t)p.N, half, 16}});
    }
    if (p.more) {
        maps.more_x = map_x(p.more_x, p.more, p.more);
        maps.more_W = map_w(p.more_W, p.more, W_COLS ? p.out : p.more);
    }
    if (S::SHARING > 1 && p.splits > 1) DIE("blocks that share W have no splits");
    const int blocks =
        p.splits > 1 ? units : std::min(units, S::BLOCKS * ctx.gpu->sms / S::SHARING) * S::SHARING;
    using C = ClusterPieces<S, Epilogue>;
    const size_t received = p.splits > 1 ? (size_t)C::most(p.splits) * p.splits * C::BYTES : 0;
    p.stages = S::GIVES && received + S::SHARED > S::ROOM ? S::STAGES - 1 : S::STAGES;
    const size_t ring = S::SHARED - (size_t)(S::STAGES - p.stages) * S::STAGE_BYTES;
    p.apart = received && ring + received <= S::ROOM;
    if (!p.apart) p.stages = S::STAGES;
    if (!p.apart && received > (size_t)S::STAGES * S::STAGE_BYTES)
        DIE("a tile of %d x %d has no room for the sums of %d splits", S::TOKENS, S::ROWS, p.splits);
    const size_t shared = p.apart ? ring + received : S::SHARED + (STAGED && p.splits == 1 ? S::STAGING : 0);
    launch_clusters(ctx, ctx.gpu->overlap, p.splits * S::SHARING, hopper_kernel<S, X_COLS, W_COLS, E4M3, Epilogue>,
                    blocks, S::THREADS, shared, maps, p, units, epilogue);
}

// ---- The choice of a tile
using Tile128x128 = TileShape<128, 128, 64, 64, 3>;
using Tile64x128 = TileShape<64, 128, 32, 64, 3>;
using Tile64x64 = TileShape<64, 64, 32, 32, 4>;
using Tile32x64 = TileShape<32, 64, 16, 32, 6>;

// The shape and the number of splits with the least predicted time in microseconds: the blocks that the busiest
// multiprocessor has, times a block's steps, plus what splits cost. The figures were fitted to an H100 (tests/bench_gpu
// sweep); what matters is their proportion. For 1,024 numbers of `in` a block takes `alone` if it is alone on its
// multiprocessor, and `full` if that has many.
struct TilePlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    template <class S> void consider(const Context& ctx, int index, double alone, double full, int N, int out, int in) {
        const int64_t tiles = count_tiles<S>(N, out), area = S::TOKENS * S::ROWS;
        for (int s = 1; s <= 12; s++) {
            if (s > 1 && (s * 128 > in || !splits_fit<S>(tiles, s))) break;
            const double blocks = (double)((tiles * s + ctx.gpu->sms - 1) / ctx.gpu->sms); // of the busiest
            double time = 1 + std::max(alone, blocks * full) * in / 1024 / s;
            if (s > 1) time += 0.85 + s * (0.22 + 0.93 * (double)area / 16384) + (double)(tiles * s * area) * 8 / 5.5e6;
            if (time < least) shape = index, splits = s, least = time;
        }
    }
    // With X_COLS tiles of 32 tokens are not to be had; of many tokens they were never the best.
    TilePlan(const Context& ctx, int N, int out, int in, bool x_cols = false) {
        if (ctx.invariant) return;
        consider<Tile128x128>(ctx, 0, 13, 9.8, N, out, in);
        consider<Tile64x128>(ctx, 1, 9.1, 6.5, N, out, in);
        consider<Tile64x64>(ctx, 2, 9, 3.4, N, out, in);
        if (!x_cols && N <= 128) consider<Tile32x64>(ctx, 3, 5.8, 2.6, N, out, in);
    }
};
// On Hopper: the shape and the number of splits with the least predicted time in microseconds, that of the busiest
// multiprocessor. A step of 128 x 256 takes 0.55 on an H100; a narrower tile reads more than it multiplies.
using Hopper128x256 = HopperShape<128, 256, 4>;
using Hopper128x192 = HopperShape<128, 192, 5>;
using HopperPairs = HopperShape<128, 256, 4, 128, 2>; // of four waves or more; of fewer it is slower
using Hopper128x128 = HopperShape<128, 128, 6>;
using Hopper64x64 = HopperShape<64, 64, 6>; // two blocks a multiprocessor
// For few blocks, forward: with room for most of what they read, so that the weights of the next product are on their
// way to half of the multiprocessors while this one's multiply in the other half, and for sums they receive.
using Hopper32x64 = HopperShape<64, 64, 16, 32>;
using Hopper64x64Deep = HopperShape<64, 64, 14>;
using Hopper64x128 = HopperShape<64, 128, 9>;
using Hopper128x64 = HopperShape<128, 64, 9>;
using Hopper128x96 = HopperShape<128, 96, 8>;
struct HopperPlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    HopperPlan() = default;
    template <class S> void consider(int index, double step, int sms, int most, int N, int out, int in) {
        const int64_t tiles = count_tiles<S>(N, out), steps = (in + STAGE_IN - 1) / STAGE_IN;
        const bool small = S::TOKENS * S::ROWS == 64 * 64;
        if (S::BLOCKS == 1) most = std::min(most, 2); // large clusters of such blocks find no places
        for (int s = 1; s <= std::min<int64_t>(most, steps); s *= 2) {
            if (s > 1 && tiles * s > S::BLOCKS * (sms - 4)) break;
            const double each = (double)(tiles * s) / (sms / S::SHARING);
            const double waves = S::BLOCKS > 1 ? std::max(1., each) : std::ceil(each);
            // Blocks of few tokens also take places in which those of the next product could begin.
            const double sums = s > 1 ? 0.8 + 0.6 * S::TOKENS * S::ROWS / 4096 + 0.05 * s : 0;
            const double places = small ? each / 2 : 0;
            choose(index, s, waves * (double)((steps + s - 1) / s) * step + sums + places);
        }
    }
    // Of one of the shapes for few blocks, a tile each. Blocks take places in which the next product's could begin, and
    // large clusters of them, or clusters of large ones, find none if they need more than two thirds of the GPU.
    template <class S> void consider_few(int index, double step, int sms, int most, int N, int out, int in) {
        const int64_t tiles = count_tiles<S>(N, out), steps = (in + STAGE_IN - 1) / STAGE_IN;
        for (int s = 1; s <= std::min<int64_t>(std::min(most, 4), steps); s *= 2) {
            const int64_t each = (steps + s - 1) / s;
            if (tiles * s > (s == 1 ? sms : s > 2 || S::ROWS > 64 ? sms * 2 / 3 : sms - 4)) break;
            if (each > (s > 1 ? 96 : 64)) continue; // they stream less well
            const double sums = s > 1 ? 0.3 + 0.3 * S::ROWS / 64 + 0.05 * s : 0;
            choose(index, s, (double)each * step + sums + 1.1 * (double)(tiles * s) / sms);
        }
    }
    void choose(int index, int s, double time) {
        if (time < least) shape = index, splits = s, least = time;
    }
    HopperPlan(const Context& ctx, int most, int N, int out, int in, bool few) {
        const int sms = ctx.gpu->sms;
        consider<Hopper128x128>(2, 0.32, sms, ctx.invariant ? 1 : most, N, out, in);
        if (ctx.invariant) return;
        consider<Hopper128x256>(0, 0.55, sms, most, N, out, in);
        if (count_tiles<HopperPairs>(N, out) >= 2 * sms) consider<HopperPairs>(9, 0.53, sms, 1, N, out, in);
        consider<Hopper128x192>(1, 0.419, sms, most, N, out, in);
        consider<Hopper64x64>(3, 0.17, sms, most, N, out, in);
        if (!few) return;
        if (N <= Hopper32x64::MOST) consider_few<Hopper32x64>(8, 0.1, sms, most, N, out, in);
        consider_few<Hopper64x64Deep>(4, 0.115, sms, most, N, out, in);
        consider_few<Hopper64x128>(5, 0.147, sms, most, N, out, in);
        consider_few<Hopper128x64>(6, 0.15, sms, most, N, out, in);
        consider_few<Hopper128x96>(7, 0.21, sms, 1, N, out, in);
    }
};
template <bool X_COLS, bool W_COLS, class Epilogue> void hopper_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    constexpr bool FEW = !X_COLS && !W_COLS && !Epilogue::MASKS && !Epilogue::PARTS;
    const int most = Epilogue::MASKS || Epilogue::PARTS ? 1 : MOST_SPLITS;
    const HopperPlan plan(ctx, most, p.N, Epilogue::PAIR ? 2 * p.out : p.out, p.in + p.more, FEW);
    p.splits = plan.splits;
    if constexpr (FEW)
        switch (plan.shape) {
            case 4: return launch_hopper<Hopper64x64Deep>(ctx, p, epilogue);
            case 5: return launch_hopper<Hopper64x128>(ctx, p, epilogue);
            case 6: return launch_hopper<Hopper128x64>(ctx, p, epilogue);
            case 7: return launch_hopper<Hopper128x96>(ctx, p, epilogue);
            case 8: return launch_hopper<Hopper32x64>(ctx, p, epilogue);
        }
    switch (plan.shape) {
        case 0: return launch_hopper<Hopper128x256, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_hopper<Hopper128x192, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_hopper<Hopper128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: return launch_hopper<Hopper64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 9: return launch_hopper<HopperPairs, X_COLS, W_COLS>(ctx, p, epilogue);
    }
    DIE("no tile of shape %d for this product", plan.shape);
}
template <bool X_COLS = false, bool W_COLS = false, class Epilogue>
void tile_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    if (ctx.gpu->hopper) return hopper_product<X_COLS, W_COLS>(ctx, p, epilogue);
    const TilePlan plan(ctx, p.N, Epilogue::PAIR ? 2 * p.out : p.out, p.in + p.more, X_COLS);
    p.splits = plan.splits;
    switch (plan.shape) {
        case 0: return launch_tiles<Tile128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_tiles<Tile64x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_tiles<Tile64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: if constexpr (!X_COLS) return launch_tiles<Tile32x64, X_COLS, W_COLS>(ctx, p, epilogue); else break;
    }
    DIE("no tile of shape %d for this product", plan.shape);
}

// ---- The adapters' own kernels. A's rows pass them in groups of 32, so that one pass over x serves up to three
// modules (q, k, v; gate, up) of rank 32. What they need to know:
struct LoraArgs {
    const bf16* A; // (m * rank, in)
    int N, in, rank, modules, module[3];
    bool dropping;
    float scale = 1; // 1 / (1 - p)
    Dropout dropout = {};
    PhiloxKeys keys = PhiloxKeys(0); // (as arguments they cost nothing; adding them up is a quarter of a mask's work)
    DropoutMasks kept;
    LoraArgs(const Linear<bf16>& W, int N)
        : A(W.adapter.A), N(N), in(W.in), rank(W.adapter.rank), modules(W.adapter.modules),
          dropping(W.adapter.dropout), kept{W.adapter.kept, (W.in + 63) / 64, N} {
        if (in % 8 || rank % 8) DIE("an adapter of rank %d on %d columns: the GPU takes multiples of 8", rank, in);
        for (int j = 0; j < 3; j++) module[j] = W.adapter.module[j];
        if (!dropping) return;
        if (!kept.words) DIE("dropout on a GPU needs room for what it keeps");
        dropout = *W.adapter.dropout, keys = PhiloxKeys(dropout.seed), scale = 1 / (1 - dropout.p);
    }
    BOTH int width() const { return modules * rank; }
    BOTH int each() const { return (rank + 31) / 32; } // groups of a module
    BOTH int groups() const { return modules * each(); }
    // (An index that is not constant would cost a copy of the array.)
    __device__ int name(int j) const { return j == 0 ? module[0] : j == 1 ? module[1] : module[2]; }
    __device__ int module_of(int group) const { return group / each(); }
    __device__ int first_row(int group) const { return group % each() * 32; } // of its module's
};

// lora_down of few tokens, without dropout. Grid: (tokens / 32, groups), 8 warps. A block owns 32 tokens by 32 rows of
// one module's A. Its warps take steps of 32 of `in` in turn; a lane reads its operands straight from memory, as in
// stream_kernel: eight numbers each of four tokens and of four rows. The warps' sums are added in shared memory, four a
// thread. Bound by the latency of the loads.
__global__ void __launch_bounds__(256, 2) lora_down_few_kernel(bf16* h, const bf16* x, LoraArgs p) {
    __shared__ float sums[8][32][32]; // (warp, token, row)
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * 32, j = p.module_of(blockIdx.y), r0 = p.first_row(blockIdx.y);
    wait_for_previous();
    float sum[4][2][4] = {};
    for (int i = warp * 32 + 8 * t; i < (p.in + 31) / 32 * 32; i += 256) {
        uint4 a[4], b[4];
        #pragma unroll
        for (int m = 0; m < 4; m++) {
            const int n = n0 + m * 8 + g;
            a[m] = n < p.N && i < p.in ? *(const uint4*)(x + (size_t)n * p.in + i) : uint4{};
        }
        #pragma unroll
        for (int c = 0; c < 4; c++) {
            const int r = r0 + c * 8 + g;
            b[c] = r < p.rank && i < p.in ? *(const uint4*)(p.A + (size_t)(j * p.rank + r) * p.in + i) : uint4{};
        }
        #pragma unroll
        for (int c = 0; c < 4; c++)
            #pragma unroll
            for (int m = 0; m < 2; m++) mma_32(sum[c][m], a[2 * m], a[2 * m + 1], b[c]);
    }
    let_next_start();
    #pragma unroll
    for (int c = 0; c < 4; c++)
        #pragma unroll
        for (int e = 0; e < 4; e++) { // token e * 8 + g
            const float* v = &sum[c][e / 2][e % 2 * 2];
            *(float2*)&sums[warp][e * 8 + g][c * 8 + 2 * t] = make_float2(v[0], v[1]);
        }
    __syncthreads();
    const int n = threadIdx.x / 8, r = threadIdx.x % 8 * 4;
    float4 all = {};
    for (int w = 0; w < 8; w++) {
        const float4 v = *(const float4*)&sums[w][n][r];
        all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
    }
    if (n0 + n < p.N && r0 + r < p.rank)
        store_four(h + (size_t)(n0 + n) * p.width() + j * p.rank + r0 + r, all);
}

// The top bits of four bytes, each eight times. `which`: in hexadecimal, from the last digit on, 8 + the number of a
// byte of a (0 .. 3) or b (4 .. 7).
__device__ __forceinline__ uint32_t spread_bits(uint32_t a, uint32_t b, uint32_t which) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(which));
    return y;
}

// rmsnorm of many tokens, and what dropout keeps of it for each module: it makes the masks while it waits for memory.
__global__ void __launch_bounds__(256) rmsnorm_masks_kernel(bf16* out, const float* x, const bf16* w, float eps,
                                                            const __grid_constant__ LoraArgs p) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x * 8 + threadIdx.x / 32;
    if (n >= p.N) return;
    const uint32_t name = p.dropout.token[n];
    norm_row(out + (size_t)n * p.in, x + (size_t)n * p.in, w, p.in, eps, [&] {
        for (int j = 0; j < p.modules; j++)
            for (int k = threadIdx.x % 32; k < 2 * p.kept.sixty_fours; k += 32) {
                uint32_t kept = 0;
                #pragma unroll
                for (int c = 0; c < 4; c++)
                    kept |= dropout_mask(p.dropout, p.keys, name, p.name(j), k * 4 + c) << 8 * c;
                p.kept.at(j, k / 2, n)[k % 2] = kept;
            }
    });
}

// lora_down: h_j = drop_j(x) A_j^T, and what was kept, unless that is MADE. Grid: (tokens / 64, groups / GROUPS), 8 or
// 16 warps. A block walks along `in` in stages of a few panels of 64 numbers (see chunk_address) of x and of A; a warp
// owns 16 tokens by one of the panels, and masks its x in registers, once for each module. A lane makes half of a
// token's masks; the bits of a pair of numbers become a mask by one instruction. The panels' sums are added in shared
// memory.
// Bound by making the masks (Philox), without that by the memory's speed.
template <int GROUPS> struct LoraDownShape {
    static constexpr int TOKENS = 64, PANELS = GROUPS == 1 ? 4 : 2, STAGES = GROUPS == 2 ? 3 : 2;
    static constexpr int THREADS = PANELS * 128;
    static constexpr int X_PANEL = TOKENS * 128, PANEL = X_PANEL + GROUPS * 32 * 128, STAGE_BYTES = PANELS * PANEL;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES;
};
template <int GROUPS, bool MADE>
__global__ void __launch_bounds__(LoraDownShape<GROUPS>::THREADS, 512 / LoraDownShape<GROUPS>::THREADS)
lora_down_kernel(bf16* h, const bf16* x, const __grid_constant__ LoraArgs p) {
    using S = LoraDownShape<GROUPS>;
    extern __shared__ __align__(128) uint4 memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * S::TOKENS, first = blockIdx.y * GROUPS, panel = warp / 4, token = warp % 4 * 16;
    const auto copy = [&](int step) {
        const int chunk = threadIdx.x % 8, row = threadIdx.x % 128 / 8; // (each panel's own threads copy it)
        const uint32_t to = shared + step % S::STAGES * S::STAGE_BYTES + panel * S::PANEL;
        const int i = (step * S::PANELS + panel) * 64 + chunk * 8;
        #pragma unroll
        for (int k = 0; k < S::TOKENS; k += 16) {
            const int n = n0 + row + k;
            copy_async(chunk_address(to, row + k, chunk), x + (size_t)n * p.in + i, i < p.in && n < p.N);
        }
        #pragma unroll
        for (int k = 0; k < GROUPS * 32; k += 16) {
            const int j = p.module_of(first + k / 32), r = p.first_row(first + k / 32) + k % 32 + row;
            copy_async(chunk_address(to + S::X_PANEL, k + row, chunk), p.A + (size_t)(j * p.rank + r) * p.in + i,
                       i < p.in && j < p.modules && r < p.rank);
        }
        commit_copies();
    };
    const int steps = (p.in + 64 * S::PANELS - 1) / (64 * S::PANELS);
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++)
        if (s < steps) copy(s);
        else commit_copies();
    const int mine = n0 + token + lane % 16; // the token of whose masks this lane makes a half
    const uint32_t name = p.dropping && mine < p.N ? p.dropout.token[mine] : 0;
    uint32_t made[GROUPS]; // a step ahead
    const auto load_made = [&](int step) {
        const int i64 = step * S::PANELS + panel;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int j = p.module_of(first + k);
            made[k] = j < p.modules && mine < p.N && i64 < p.kept.sixty_fours ? p.kept.at(j, i64, mine)[lane / 16] : 0;
        }
    };
    if (MADE) load_made(0);
    float sum[GROUPS][4][4] = {};
    for (int step = 0; step < steps; step++) {
        const int i64 = step * S::PANELS + panel;
        uint32_t kept[GROUPS];
        #pragma unroll
        for (int k = 0; k < GROUPS && MADE; k++) kept[k] = made[k];
        if (MADE) load_made(step + 1);
        #pragma unroll
        for (int k = 0; k < GROUPS && !MADE; k++) {
            const int j = p.module_of(first + k);
            kept[k] = ~0u;
            if (k && j == p.module_of(first + k - 1)) kept[k] = kept[k - 1];
            else if (p.dropping && j < p.modules) {
                kept[k] = 0;
                #pragma unroll
                for (int c = 0; c < 4; c++)
                    kept[k] |= dropout_mask(p.dropout, p.keys, name, p.name(j), i64 * 8 + lane / 16 * 4 + c)
                               << 8 * c;
                if (mine < p.N && i64 < p.kept.sixty_fours) p.kept.at(j, i64, mine)[lane / 16] = kept[k];
            }
        }
        wait_for_copies<S::STAGES - 2>();
        __syncthreads();
        if (step + S::STAGES - 1 < steps) copy(step + S::STAGES - 1);
        else commit_copies();
        const uint32_t x_at = shared + step % S::STAGES * S::STAGE_BYTES + panel * S::PANEL, A_at = x_at + S::X_PANEL;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t even[GROUPS][2], odd[GROUPS][2]; // of tokens g and g + 8: top bits for columns 2 t and 2 t + 1
            #pragma unroll
            for (int k = 0; k < GROUPS; k++)
                #pragma unroll
                for (int e = 0; e < 2; e++) {
                    const uint32_t word = __shfl_sync(~0u, kept[k], half * 16 + e * 8 + g) >> 2 * t;
                    even[k][e] = word << 7, odd[k][e] = word << 6;
                }
            #pragma unroll
            for (int e = 0; e < 2; e++) { // 16 numbers of `in`
                const int c = (half * 2 + e) * 2;
                uint32_t a[4], b[2][4];
                ldmatrix(a, chunk_address(x_at, token + lane % 16, c + lane / 16));
                #pragma unroll
                for (int k = 0; k < GROUPS; k++) {
                    #pragma unroll
                    for (int f = 0; f < 2; f++)
                        ldmatrix(b[f], chunk_address(A_at, k * 32 + f * 16 + lane % 8 + lane / 16 * 8,
                                                     c + lane / 8 % 2));
                    uint32_t y[4];
                    #pragma unroll
                    for (int q = 0; q < 4; q++)
                        y[q] = a[q] & spread_bits(even[k][q % 2], odd[k][q % 2], 0xcc88 + (2 * e + q / 2) * 0x1111);
                    #pragma unroll
                    for (int f = 0; f < 4; f++)
                        mma(sum[k][f], y[0], y[1], y[2], y[3], b[f / 2][f % 2 * 2], b[f / 2][f % 2 * 2 + 1]);
                }
            }
        }
    }
    let_next_start();
    wait_for_copies<0>();
    __syncthreads(); // the ring is free
    float4* sums = (float4*)memory + threadIdx.x % 128; // (panel - 1, fragment, thread)
    #pragma unroll
    for (int i = 0; i < GROUPS * 4 && panel; i++) {
        const float(&v)[4] = sum[i / 4][i % 4];
        sums[((panel - 1) * GROUPS * 4 + i) * 128] = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < GROUPS * 4 && !panel; i++) {
        float(&v)[4] = sum[i / 4][i % 4];
        #pragma unroll
        for (int other = 0; other < S::PANELS - 1; other++) {
            const float4 y = sums[(other * GROUPS * 4 + i) * 128];
            v[0] += y.x, v[1] += y.y, v[2] += y.z, v[3] += y.w;
        }
        const int j = p.module_of(first + i / 4), r = p.first_row(first + i / 4) + i % 4 * 8 + 2 * t;
        const int n = n0 + token + g;
        uint32_t* to = (uint32_t*)(h + (size_t)n * p.width() + j * p.rank + r);
        if (j >= p.modules || r >= p.rank) continue;
        if (n < p.N) *to = pack(v[0] * p.scale, v[1] * p.scale);
        if (n + 8 < p.N) to[4 * p.width()] = pack(v[2] * p.scale, v[3] * p.scale);
    }
}

#include "packed.h" // the same with packed weights
