// model/expert_products.h: products of rows with their experts' weights on a GPU, for model/experts.cu (bf16) and
// gpu/packed/experts.cu: kernels, epilogues and launches.
//
// Nothing here depends on a decision of the CPU, so a step is one graph: grids have the size that the worst routing
// needs, and a block finds its expert in `first`. Only the chosen experts' weights are read. The experts of a layer lie
// at equal distances in memory (Weights::upload), so a kernel takes the first one and these distances.
//
// Weights: StreamArgs (bf16), or a packed format's arguments. For these a source defines ExpertStream, go_to and
// ExpertCopies.
#pragma once
#ifdef QWEN3_GPU
#include "model/experts.h"
#include "model/experts_backward.h"
#include "qwen3.cu"
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

struct ExpertsArgs {
    const int *first, *pair; // of Routed
    int E, k;
    bool by_token;           // row i of a block is x[pair[i] / k]; else x[first + i]
    size_t apart[3] = {};    // bytes from an expert's weights (scales, zero points) to the next one's
    bf16* room = nullptr;    // by_token: scratch for x in the order of `pair`
    // An adapter's h and s B as further columns of x and W (dh and A with W_COLS), see TileArgs. x has the order of
    // `pair`, W is the first expert's, `apart` in bytes; ld: from one row of A to the next.
    struct { const bf16 *x, *W; int n, ld; size_t apart; } more = {};
};
// Places at most, of so many pairs.
inline int most_places(int pairs, int E, int each) { return std::min(pairs, std::min(pairs, E) + pairs / each); }

// ---- Epilogues: rows of a block are pairs from `first` on.
struct ExpertSwiglu : SwigluEpilogue { // hidden, and gate_up unless null, in the order of `pair`
    ExpertSwiglu(bf16* out, bf16* gate_up, size_t F) : SwigluEpilogue(out, gate_up, F) {}
    __device__ void at(int first) {
        out += first * F;
        if (gate_up) gate_up += first * 2 * F;
    }
};
template <class T> struct ExpertStore : Epilogue { // the output of each pair, by its number
    T* out; // (N k, ld)
    const int* pair;
    size_t ld;
    ExpertStore(T* out, const int* pair, size_t ld) : out(out), pair(pair), ld(ld) {}
    __device__ void at(int first) { pair += first; }
    __device__ void one(bool inside, int n, int r, float y, float) { if (inside) store_one(out + pair[n] * ld + r, y); }
    __device__ void four(int n, int r, const float4& y, const float4&) { store_four(out + pair[n] * ld + r, y); }
};
struct AddRoundedEpilogue : Epilogue { // out = sum + y
    static constexpr bool ADDS = true;
    bf16* out;        // (N, ld)
    const float* sum; // (N, ld)
    size_t ld;
    AddRoundedEpilogue(bf16* out, const float* sum, size_t ld) : out(out), sum(sum), ld(ld) {}
    __device__ float4 old_four(int n, int r) const { return *(const float4*)(sum + n * ld + r); }
    __device__ void four(int n, int r, const float4& y, const float4& old) {
        store_four(out + n * ld + r, make_float4(old.x + y.x, old.y + y.y, old.z + y.z, old.w + y.w));
    }
};

struct ExpertRowsStore : StoreEpilogue<bf16> { // the output of each pair, in the order of `pair`
    ExpertRowsStore(bf16* out, size_t ld) : StoreEpilogue(out, ld) {}
    __device__ void at(int first) { out += first * ld; }
};

// ---- bf16 weights. A step of stream_kernel has STEP columns.
struct ExpertColumns : StreamArgs { // of a transposed product y = x W: W (in, ld), of which `out` columns from W on
    int ld;
};
template <class Weights> struct Adapted : Weights {}; // ... and `more` of ExpertsArgs
template <class Weights> constexpr bool ADAPTED = false;
template <class Weights> constexpr bool ADAPTED<Adapted<Weights>> = true;
template <class Weights> struct Bare { using Type = Weights; };
template <class Weights> struct Bare<Adapted<Weights>> { using Type = Weights; };
template <class Weights, int TILES, bool PAIR> struct ExpertStream;
template <int TILES, bool PAIR> struct ExpertStream<StreamArgs, TILES, PAIR> {
    using Loads = StreamWeights<TILES, PAIR>;
    static constexpr int STEP = 32, WARPS = 12;
};
__device__ inline void go_to(StreamArgs& p, const ExpertsArgs& of, int e) { // expert e's weights
    p.W = (const bf16*)((const uint8_t*)p.W + e * of.apart[0]);
}
template <class Stages, class Weights> struct ExpertCopies { // of W's stages, in order
    const Stages& stages;
    __device__ ExpertCopies(const Stages& stages, const Weights&) : stages(stages) {}
    __device__ __forceinline__ void copy(int step) { stages.copy_w(step); }
};

// ---- Few tokens an expert: stream_kernel's loop (see there) for the experts that have tokens. Grid: (blocks that
// share an expert's rows of W, places of 8 M pairs). No weight is read before the previous kernels have ended: they
// choose.
template <class Weights, int TILES, int M, class Epilogue>
__global__ void __launch_bounds__(ExpertStream<Weights, TILES, Epilogue::PAIR>::WARPS * 32, 2)
expert_stream_kernel(Weights p, ExpertsArgs of, Epilogue epilogue) {
    using Stream = ExpertStream<Weights, TILES, Epilogue::PAIR>;
    constexpr int SUMS = TILES * M * 64; // (tile, token, row)
    extern __shared__ float shared[];
    let_next_start();
    wait_for_previous();
    const ExpertRows rows = expert_rows<8 * M>(of.first, of.E);
    if (!rows.n) return;
    go_to(p, of, rows.e);
    p.N = rows.n;
    epilogue.at(rows.first);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const int first = warp * p.steps, last = min((p.in + Stream::STEP - 1) / Stream::STEP, first + p.steps);
    typename Stream::Loads weights;
    constexpr int ROWS = Stream::Loads::ROWS;
    const int groups = (p.out + ROWS - 1) / ROWS;
    int group = blockIdx.x;
    weights.load(p, group, first, last);
    const bf16* token[M];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        const int n = rows.first + min(g + 8 * m, p.N - 1);
        token[m] = p.x + (size_t)(of.by_token ? of.pair[n] / of.k : n) * p.in;
    }
    float* sums = shared;
    for (; group < groups; group += gridDim.x) {
        float sum[TILES][4] = {};
        for (int step = first; step < last; step += Stream::Loads::LOADS) {
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
            for (int v = 0; v < warps; v++) {
                y += sums[v * SUMS + o];
                if (Epilogue::PAIR) second += sums[v * SUMS + SUMS / 2 + o];
            }
            epilogue.one(n < p.N && r < p.out, n, r, y, second);
        }
        sums = sums == shared ? shared + warps * SUMS : shared;
    }
}
template <int M, class Weights, class Epilogue>
void launch_expert_stream(Context& ctx, Weights p, const ExpertsArgs& of, int pairs, Epilogue epilogue) {
    constexpr int TILES = 2;
    using Stream = ExpertStream<Weights, TILES, Epilogue::PAIR>;
    const int groups = (p.out + Stream::Loads::ROWS - 1) / Stream::Loads::ROWS;
    const int steps = (p.in + Stream::STEP - 1) / Stream::STEP, places = most_places(pairs, of.E, 8 * M);
    // As few warps as do a group's steps in the fewest rounds of loads.
    const int loads = (steps + Stream::Loads::LOADS - 1) / Stream::Loads::LOADS;
    const int rounds = (loads + Stream::WARPS - 1) / Stream::WARPS, warps = std::max(4, (loads + rounds - 1) / rounds);
    p.steps = (steps + warps - 1) / warps;
    // The blocks of the experts that have tokens, if the pairs' experts are random, fill the multiprocessors once.
    const int resident = ctx.gpu->sms * (2 * Stream::WARPS / warps);
    const double chosen = of.E * (1 - std::pow(1 - 1.0 / of.E, pairs)), some = std::max({1.0, chosen, (double)of.k});
    const int blocks = std::min(groups, std::max(1, (int)(resident / some)));
    launch(ctx, expert_stream_kernel<Weights, TILES, M, Epilogue>, dim3(blocks, places), warps * 32,
           2 * (size_t)warps * TILES * M * 64 * sizeof(float), p, of, epilogue);
}

// ---- More tokens, or `invariant`, and the backward products (W_COLS): tile_kernel's loop (see there). Grid: (tiles of
// the rows of W, places of S::TOKENS pairs). Copies of x gather the tokens of the pairs.
template <class S, bool W_COLS, bool PAIR> struct ExpertStages : TileStages<S, false, W_COLS, PAIR> {
    using Base = TileStages<S, false, W_COLS, PAIR>;
    static constexpr bool COLS = W_COLS, PAIRS = PAIR;
    using Copy = TileCopy<S::TOKENS, false, S::THREADS>;
    int row[Copy::COUNT]; // of x, for each of this thread's copies
    __device__ ExpertStages(const TileArgs& p, const TilePlace<S, PAIR>& at, uint32_t shared, const ExpertRows& rows,
                            const ExpertsArgs& of)
        : Base{p, at, shared, {}, {}} {
        #pragma unroll
        for (int k = 0; k < Copy::COUNT; k++) {
            const int n = rows.first + min(this->cx.row + k * Copy::STEP, rows.n - 1);
            row[k] = of.by_token ? of.pair[n] / of.k : n;
        }
    }
    __device__ __forceinline__ void copy_x(int step) const {
        const uint32_t to = this->x_stage(step) + this->cx.offset;
        const int i = this->at.number(step) + this->cx.chunk * 8;
        const bool inside = step < this->at.last && i < this->p.in;
        #pragma unroll
        for (int k = 0; k < Copy::COUNT; k++)
            copy_async(to + k * Copy::STEP * 128, this->p.x + (size_t)row[k] * this->p.ldx + (inside ? i : 0),
                       inside && this->cx.row + k * Copy::STEP < this->p.N);
    }
    __device__ __forceinline__ void copy_more(int step, int ld) const { // an adapter's columns: rows as they come
        Base::copy_x(step);
        const auto& p = this->p;
        if constexpr (W_COLS)
            this->copy_columns(this->w_stage(step), this->cw, {p.more_W, ld, p.more, this->at.number(step)},
                               step < this->at.last, this->at.r0, p.out);
        else this->copy_w(step);
    }
};

// How a block walks along `in`: copy(step) starts the copies of a step, or none past the end.
struct MmaWalk {
    static constexpr int ALIGN = 128; // of the stages
    template <class S, bool X_COLS, bool W_COLS, class Stages, class Copy>
    __device__ __forceinline__ static void run(float (&sum)[S::MF][S::NF][4], const Stages& stages, Copy copy) {
        #pragma unroll
        for (int s = 0; s < S::STAGES - 1; s++) copy(stages.at.first + s), commit_copies();
        walk_ring<S::STAGES>(stages.at.first, stages.at.last, copy, [&](int step) {
            multiply_stage<S, X_COLS, W_COLS>(sum, stages.x_stage(step), stages.w_stage(step));
        });
        wait_for_copies<0>();
    }
};

template <class S, bool W_COLS, class Walk, class Weights, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, 1)
expert_tile_kernel(Weights weights, ExpertsArgs of, Epilogue epilogue) {
    constexpr bool PAIR = Epilogue::PAIR;
    extern __shared__ __align__(128) uint4 memory[];
    let_next_start();
    wait_for_previous();
    const ExpertRows rows = expert_rows<S::TOKENS>(of.first, of.E);
    if (!rows.n) return;
    go_to(weights, of, rows.e);
    epilogue.at(rows.first);
    TileArgs p = {weights.x, nullptr, rows.n, weights.in, weights.out};
    p.ldx = p.ldw = p.in;
    if constexpr (std::is_base_of_v<StreamArgs, Weights>) p.W = weights.W;
    if constexpr (std::is_base_of_v<ExpertColumns, Weights>) p.ldw = weights.ld;
    if constexpr (ADAPTED<Weights>) {
        p.more_x = of.more.x + (size_t)rows.first * of.more.n, p.more = of.more.n;
        p.more_W = (const bf16*)((const uint8_t*)of.more.W + rows.e * of.more.apart);
    }
    const TilePlace<S, PAIR> at(p, blockIdx.x, 0);
    const uint32_t shared = (shared_address(memory) + Walk::ALIGN - 1) & ~(Walk::ALIGN - 1u);
    const ExpertStages<S, W_COLS, PAIR> stages(p, at, shared, rows, of);
    ExpertCopies<ExpertStages<S, W_COLS, PAIR>, typename Bare<Weights>::Type> of_w(stages, weights);
    float sum[S::MF][S::NF][4] = {};
    Walk::template run<S, false, W_COLS>(sum, stages, [&](int step) {
        if (step >= at.last) return;
        if constexpr (ADAPTED<Weights>) if (at.more(step)) return stages.copy_more(step, of.more.ld);
        of_w.copy(step);
        stages.copy_x(step);
    });
    const int first = at.r0 + S::warp_row();
    #pragma unroll
    for (int i = 0; i < S::MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) finish_row<S>(sum[i], h, at.token(i, h), first, p.N, p.out, epilogue);
}
template <class S, bool W_COLS, class Walk = MmaWalk, class Weights, class Epilogue>
void launch_expert_tiles(Context& ctx, const Weights& p, const ExpertsArgs& of, int pairs, Epilogue epilogue) {
    const int rows = Epilogue::PAIR ? 2 * p.out : p.out, places = most_places(pairs, of.E, S::TOKENS);
    if (places > 65535)
        DIE("experts: %d pairs in one step; the GPU's grid ends at 65,535 places of %d", pairs, S::TOKENS);
    launch(ctx, expert_tile_kernel<S, W_COLS, Walk, Weights, Epilogue>, dim3((rows + S::ROWS - 1) / S::ROWS, places),
           S::THREADS, S::SHARED + Walk::ALIGN - 128, p, of, epilogue);
}

// A product of the pairs' rows with their experts' W, (out,in) or with PAIR (2 out, in); with W_COLS (in,out). N
// tokens.
template <bool W_COLS, class Weights, class Epilogue>
void expert_product(Context& ctx, const Weights& p, const ExpertsArgs& of, int N, Epilogue epilogue) {
    const int pairs = N * of.k, each = pairs / of.E; // on average
    if (of.more.n) {
        if (Optional::expert_tiles<W_COLS>(ctx, Adapted<Weights>{p}, of, pairs, epilogue)) return;
        return launch_expert_tiles<Tile64x128, W_COLS>(ctx, Adapted<Weights>{p}, of, pairs, epilogue);
    }
    if constexpr (!W_COLS) if ((N <= STREAM_TOKENS || each < 10) && !ctx.invariant) {
        if (N <= 8 || each < 4) return launch_expert_stream<1>(ctx, p, of, pairs, epilogue);
        return launch_expert_stream<2>(ctx, p, of, pairs, epilogue);
    }
    if (Optional::expert_tiles<W_COLS>(ctx, p, of, pairs, epilogue)) return;
    if (each >= 192 || ctx.invariant) return launch_expert_tiles<Tile128x128, W_COLS>(ctx, p, of, pairs, epilogue);
    if (each >= 40) return launch_expert_tiles<Tile64x128, W_COLS>(ctx, p, of, pairs, epilogue);
    return launch_expert_tiles<Tile32x64, W_COLS>(ctx, p, of, pairs, epilogue);
}

using WhichMatrix = Linear<bf16> Expert<bf16>::*;
// The distance between the experts' arrays, in bytes, which must be equal; array(W): of one.
template <class Array>
size_t distance_of_experts(const std::vector<Expert<bf16>>& experts, WhichMatrix which, Array array) {
    const auto at = [&](size_t e) { return (const uint8_t*)array(experts[e].*which); };
    const size_t step = experts.size() > 1 ? (size_t)(at(1) - at(0)) : 0;
    for (size_t e = 0; e < experts.size(); e++) {
        const Linear<bf16>&W = experts[e].*which, &first = experts[0].*which;
        if (W.format != first.format || W.group != first.group || W.group_rows != first.group_rows)
            DIE("experts on a GPU: they are not all of one format");
        if (W.adapter.width() != first.adapter.width()) DIE("experts on a GPU: their adapters are not all alike");
        if (at(e) != (at(0) ? at(0) + e * step : nullptr)) DIE("experts on a GPU: they are not at equal distances");
    }
    return step;
}

// Adapters of experts (model/experts.cu). Their h, or dh, dA and dB; `of` gets their columns, with h (of `first` on)
// and s B, or dh and A; without an adapter none. x and dy, the input and the gradient of the output of W's rows, have
// the order of `pair`, or are by token.
struct ExpertInput {
    const bf16* at;
    bool by_token;
};
void expert_lora_down(Context& ctx, ExpertsArgs& of, const std::vector<Expert<bf16>>& experts, WhichMatrix which,
                      const ExpertInput& x, int N);
void expert_lora_backward(Context& ctx, ExpertsArgs& of, const std::vector<Expert<bf16>>& experts, WhichMatrix which,
                          float* dA, float* dB, bf16* dh, const ExpertInput& dy, const ExpertInput& x, int N);

inline ExpertsArgs experts_args(const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int k) {
    const int C = experts[0].gate_up.in, M = experts[0].down.in;
    if (C % 8 || M % 8) DIE("experts of (%d,%d): the GPU's kernels take multiples of 8", M, C);
    return {to.first, to.pair, (int)experts.size(), k, true};
}
// Calls use(first, n) for parts of the C columns that the outputs of all pairs have: as many as the scratch, of T,
// holds.
template <class T, class Use> void each_scratch_part(int N, int C, int k, Use use) {
    const size_t columns = expert_scratch(N, C, k) * sizeof(float) / sizeof(T) / ((size_t)N * k);
    const int most = columns < (size_t)C ? (int)(columns / 128 * 128) : C;
    for (int first = 0, n; first < C; first += n) n = std::min(most, C - first), use(first, n);
}

// expert_mlp. product(which, x, first, rows, of, epilogue): the product with rows `first` on of each expert's matrix.
// The outputs of all pairs, or of as many columns as the scratch y holds, are added up afterwards.
template <class Product>
void expert_mlp_by(Context& ctx, float* out, bf16* gate_up, bf16* hidden, float* y, const float* residual,
                   const bf16* x, const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k,
                   Product product) {
    const int C = experts[0].gate_up.in, M = experts[0].down.in;
    ExpertsArgs of = experts_args(experts, to, k);
    of.room = (bf16*)y;
    expert_lora_down(ctx, of, experts, &Expert<bf16>::gate_up, {x, true}, N);
    product(&Expert<bf16>::gate_up, x, 0, M, of, ExpertSwiglu(hidden, gate_up, M));
    of.by_token = false;
    expert_lora_down(ctx, of, experts, &Expert<bf16>::down, {hidden, false}, N);
    const bf16* const B = of.more.W;
    each_scratch_part<float>(N, C, k, [&](int first, int n) {
        if (B) of.more.W = B + (size_t)first * of.more.n;
        product(&Expert<bf16>::down, hidden, first, n, of, ExpertStore<float>(y, to.pair, n));
        const dim3 grid(N, (n + 511) / 512);
        launch(ctx, add_shares_kernel<Routed<bf16>>, grid, 128, 0, out, residual, y, to, k, C, first, n);
    });
}

// experts_backward, the experts' part: d.share and d.sum, and adapters' gradients. product(which, dy, first, columns,
// of, epilogue): dy W, with columns `first` on of each expert's matrix. The product with down takes dout without the
// share. Its adapter has the share in the input instead, hidden times share, which is in d.gate_up's memory until then.
template <class Product>
void experts_backward_by(Context& ctx, const Flow<bf16>& d, const ExpertsBackward& in,
                         const std::vector<Expert<bf16>>& experts, const Routed<bf16>& to, int N, int k,
                         Product product) {
    const int E = (int)experts.size(), C = experts[0].gate_up.in, M = experts[0].down.in;
    const unsigned blocks = (unsigned)(N * k + 7) / 8;
    const auto gate_up = &Expert<bf16>::gate_up, down = &Expert<bf16>::down;
    bf16* const y = (bf16*)in.rows;
    ExpertsArgs of = experts_args(experts, to, k);
    if (experts[0].down.adapter.rank)
        launch(ctx, expert_hidden_kernel<Routed<bf16>>, dim3(blocks), 256, 0, d.gate_up, in.gate_up, to, E, M);
    expert_lora_backward(ctx, of, experts, down, in.down_A, in.down_B, d.h, {d.y, true}, {d.gate_up, false}, N);
    product(down, d.y, 0, M, of, ExpertStore<bf16>(in.hidden, to.pair, M));
    launch(ctx, expert_swiglu_backward_kernel<Routed<bf16>>, dim3(blocks), 256, 0, d.gate_up, d.share, in.hidden,
           in.gate_up, to, E, M);
    of.by_token = false;
    expert_lora_backward(ctx, of, experts, gate_up, in.up_A, in.up_B, d.h, {d.gate_up, false}, {in.x, true}, N);
    const bf16* const A = of.more.W;
    each_scratch_part<bf16>(N, C, k, [&](int first, int n) {
        if (A) of.more.W = A + first;
        product(gate_up, d.gate_up, first, n, of, ExpertStore<bf16>(y, to.pair, n));
        launch(ctx, add_pairs_kernel<Routed<bf16>>, dim3(N), 128, 0, d.sum, y, to, k, C, first, n);
    });
}
#endif
