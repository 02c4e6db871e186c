// ========================================================================================================= 10 Products
// Book I's product, y[n][r] = sum_i x[n][i] W[r][i], for N tokens n and `out` rows r of W; `in` is what is summed over.
// The blocks of a Linear lie one after another on a GPU (Weights::upload), so W is one matrix. A product of the
// backward pass has its own `in` and `out`: dx = dy W sums over W's rows, dW = dy^T x over the tokens.
// Two kernels compute them all: stream_kernel for up to 16 tokens, at the speed at which W comes from memory, and
// tile_kernel for more, at the speed of the tensor cores. What becomes of a sum is said by the kernel's epilogue.

// ---- Epilogues. A kernel takes its epilogue by value, so that each thread has a copy, and calls these functions of
// it. Here are the defaults. An epilogue for stream_kernel adds `one`, an epilogue for tile_kernel `four`:
//
//   one(inside, n, r, y, second)   Sum y of token n and row r, from one thread. Whole warps call it, eight neighbouring
//                                  lanes for the same n and rows 8 q .. 8 q + 7, so that they can shuffle; `inside`
//                                  is false where n or r is past the end.
//   four(n, r, y, second)          Sums of token n and rows r .. r + 3 (r % 4 = 0), from one thread; none past the end.
//
// `second` is with PAIR the sum of up (y is that of gate), with ADDS what old or old_four returned, else zero.
struct Epilogue {
    static constexpr bool PAIR = false;          // W is (2 out, in), gate over up: a thread gets the sums of both
    static constexpr bool ADDS = false;          // the sum is added to a number that the kernel asks for early
    static constexpr bool MASKS = false;         // tile_kernel masks the sums of the adapter's columns (see TileArgs)
    static constexpr bool PARTS = false;         // tile_kernel hands over what a softmax needs of each 64 rows
    static constexpr int MOST_BLOCKS = INT_MAX;  // stream_kernel is launched with no more blocks

    // stream_kernel: all threads, once, after wait_for_previous; a barrier follows before any `one`.
    __device__ void begin() {}
    // stream_kernel: all threads, once, after their last `one` (there is no barrier between).
    __device__ void end(int /* N */) {}
    // With ADDS, the number, or the four, that will be `second`. Asked for before the sums are complete, by the thread
    // that will hand them over; n and r are not past the end.
    __device__ float old(int /* n */, int /* r */) const { return 0; }
    __device__ float4 old_four(int /* n */, int /* r */) const { return {}; }
    // With MASKS, bit j: the adapter's sum of token n, row 8 r8 + j is kept, and multiplied by `scale`; else it becomes
    // 0. One lane asks for eight rows, and shares the answer with the other lanes that hold some of them. n < N.
    __device__ uint32_t kept(int /* n */, int /* r8 */) const { return 0xff; }
    static constexpr float scale = 1;
    // With PARTS, of the sums y of token n and rows 64 piece .. 64 piece + 63: the largest, and sum e^(y - largest).
    // From one thread, n and 64 piece not past the end.
    __device__ void part(int /* n */, int /* piece */, float /* largest */, float /* sum */) {}
};

__device__ inline void store_one(float* to, float y) { *to = y; }
__device__ inline void store_one(bf16* to, float y) { *to = round_bf16(y); }
__device__ inline void store_four(float* to, const float4& y) { *(float4*)to = y; }
__device__ inline void store_four(bf16* to, const float4& y) {
    *(uint2*)to = make_uint2(pack(y.x, y.y), pack(y.z, y.w));
}

template <class T> struct StoreEpilogue : Epilogue { // linear: out = y; in float the head's logits
    T* out; // (N, ld)
    size_t ld;
    StoreEpilogue(T* out, size_t ld) : out(out), ld(ld) {}
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
    __device__ void four(int n, int r, const float4& y, const float4& old) {
        store_four(out + n * ld + r, make_float4(old.x + y.x, old.y + y.y, old.z + y.z, old.w + y.w));
    }
};

// gate and up are rounded as Book I rounds them when it stores them.
__device__ inline float swiglu(float gate, float up) {
    const float g = to_acc(round_bf16(gate));
    return g / (1 + exp2_fast(-LOG2E * g)) * to_acc(round_bf16(up));
}
struct SwigluEpilogue : Epilogue { // norm_linear_swiglu
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
    __device__ void four(int n, int f, const float4& g, const float4& u) {
        const float4 y = {swiglu(g.x, u.x), swiglu(g.y, u.y), swiglu(g.z, u.z), swiglu(g.w, u.w)};
        store_four(out + n * F + f, y);
        if (gate_up) store_four(gate_up + n * 2 * F + f, g), store_four(gate_up + (n * 2 + 1) * F + f, u);
    }
};

struct LossEpilogue : StoreEpilogue<float> { // head_loss: logits, and the softmax's parts of each 64 of a row
    static constexpr bool PARTS = true;
    float2* parts; // (R, pieces)
    size_t pieces;
    LossEpilogue(float* logits, size_t V, float2* parts, size_t pieces)
        : StoreEpilogue(logits, V), parts(parts), pieces(pieces) {}
    __device__ void part(int n, int piece, float largest, float sum) { parts[n * pieces + piece] = {largest, sum}; }
};

struct ScatterEpilogue : Epilogue { // head_backward: the gradient of row n of the picked ones goes to row rows[n]
    bf16* out;       // (., C)
    const int* rows; // (R)
    size_t C;
    ScatterEpilogue(bf16* out, const int* rows, size_t C) : out(out), rows(rows), C(C) {}
    __device__ void four(int n, int c, const float4& y, const float4&) { store_four(out + rows[n] * C + c, y); }
};

struct DropEpilogue : StoreEpilogue<bf16> { // linear_backward_input of a module whose x was dropped on its way to A
    static constexpr bool MASKS = true;
    Dropout dropout;
    int module;
    float scale;
    DropEpilogue(bf16* out, size_t ld, const Dropout& dropout, int module, float scale)
        : StoreEpilogue(out, ld), dropout(dropout), module(module), scale(scale) {}
    __device__ uint32_t kept(int n, int r8) const { return dropout_mask(dropout, dropout.token[n], module, r8); }
};

struct LoraUpEpilogue : Epilogue { // lora_backward_weight: dB += s y, in the rows and columns that belong together
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
        norm_rows(normed, ld, p.stream, p.norm, pieces, p.N, p.in, p.eps);
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

// Returns the number of blocks.
template <int TILES, int M, bool NORM, class Epilogue>
int launch_stream(Context& ctx, StreamArgs p, Epilogue epilogue) {
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
    return blocks;
}
template <class Epilogue>
int stream_product(Context& ctx, const StreamArgs& p, Epilogue epilogue) {
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
    return 0; // (not reached: PAIR is always two)
}

// ---- Many tokens. Every product of more than 16 tokens, every product of the backward pass, products with an adapter.
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
// Who owns what. mma.sync: a warp owns S::WARP_TOKENS by S::WARP_ROWS of the tile. wgmma (S::WARPGROUP): the block's
// four warps own the tile together, each 16 of every 64 tokens and all rows. Either way a warp's part is made of
// fragments, 16 tokens by eight rows of W, spread over its lanes as mma leaves them: of fragment (i, j) lane 4 g + t
// holds sum[i][j][0 .. 3]: rows 2 t and 2 t + 1 of token g, then the same of token g + 8.
// PAIR: the tile has 16 rows of gate and 16 rows of up in turn, so that a lane holds the same columns of both, two
// fragments apart.
//
// An adapter's h and s B are further columns of x and W: `more` numbers of `in`, which come first, in stages of their
// own.
//
// Splits. If there are too few tiles to fill the GPU, `splits` blocks share a tile, each has a part of the stages, and
// the last one to arrive adds their sums in order.
constexpr int STAGE_IN = 64; // numbers of `in` in a stage

template <int TOKENS_, int ROWS_, int WARP_TOKENS_, int WARP_ROWS_, int STAGES_, bool WARPGROUP_ = false>
struct TileShape {
    static constexpr int TOKENS = TOKENS_, ROWS = ROWS_, STAGES = STAGES_;
    static constexpr int WARP_TOKENS = WARP_TOKENS_, WARP_ROWS = WARP_ROWS_;
    static constexpr bool WARPGROUP = WARPGROUP_;
    static int64_t tiles(int N, int rows) { return (int64_t)((N + TOKENS - 1) / TOKENS) * ((rows + ROWS - 1) / ROWS); }
    static constexpr int THREADS = TOKENS / WARP_TOKENS * (ROWS / WARP_ROWS) * 32;
    static constexpr int X_BYTES = TOKENS * STAGE_IN * 2, STAGE_BYTES = X_BYTES + ROWS * STAGE_IN * 2; // x, then W
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES + (WARPGROUP ? 1024 : 0);            // to align it
    // Fragments of tokens and of rows that a warp has, and the first token and row of its part.
    static constexpr int MF = WARPGROUP ? TOKENS / 64 : WARP_TOKENS / 16, NF = (WARPGROUP ? ROWS : WARP_ROWS) / 8;
    __device__ static int warp_token() {
        const int warp = threadIdx.x / 32;
        return WARPGROUP ? warp * 16 : warp % (TOKENS / WARP_TOKENS) * WARP_TOKENS;
    }
    __device__ static int warp_row() {
        const int warp = threadIdx.x / 32;
        return WARPGROUP ? 0 : warp / (TOKENS / WARP_TOKENS) * WARP_ROWS;
    }
    static_assert(!WARPGROUP || (THREADS == 128 && ROWS == 128), "one warpgroup");
};

struct TileArgs {
    const bf16 *x, *W;    // (N,in), X_COLS (in,N); (out,in), with PAIR (2 out, in), W_COLS (in,out)
    int N, in, out;
    const bf16 *more_x = nullptr, *more_W = nullptr; // (N,more); (out,more), W_COLS (more,out). Not with X_COLS
    int more = 0;
    int ldx = 0, ldw = 0; // numbers from one row of x and W to the next; 0: as many as a row has
    bool early = false;   // few blocks: those of the next kernel may come beside them from the start
    int splits = 1;
    float* partial = nullptr;
    int* arrived = nullptr;
};

// Which tile and which of its steps (stages of `in`) a block has.
template <class S, bool PAIR> struct TilePlace {
    int n0, r0;      // first token; first row, of gate and up together with PAIR
    int more_steps;  // over the adapter's columns, which come first
    int first, last; // this block's steps
    // Tiles are numbered in bands of 8 tiles of tokens: blocks that run at the same time share rows of both operands in
    // the L2 cache.
    __device__ __forceinline__ explicit TilePlace(const TileArgs& p) {
        const int rows = PAIR ? 2 * p.out : p.out;
        const int across = (rows + S::ROWS - 1) / S::ROWS, down = (p.N + S::TOKENS - 1) / S::TOKENS;
        const int band = blockIdx.x / (8 * across), in_band = blockIdx.x % (8 * across), high = min(8, down - band * 8);
        n0 = (band * 8 + in_band % high) * S::TOKENS, r0 = in_band / high * S::ROWS;
        more_steps = (p.more + STAGE_IN - 1) / STAGE_IN;
        const int steps = more_steps + (p.in + STAGE_IN - 1) / STAGE_IN;
        first = (int)((int64_t)steps * blockIdx.y / p.splits);
        last = (int)((int64_t)steps * (blockIdx.y + 1) / p.splits);
    }
    // This lane's token in rows g + 8 h of fragment i.
    __device__ __forceinline__ int token(int i, int h) const {
        return n0 + S::warp_token() + i * (S::WARPGROUP ? 64 : 16) + h * 8 + threadIdx.x % 32 / 4;
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
        const bool extra = step < at.more_steps;
        const int i = (extra ? step : step - at.more_steps) * STAGE_IN;
        return {extra ? more : own, extra ? more_ld : ld, extra ? p.more : p.in, i};
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
// The same by wgmma, which reads shared memory: 64 tokens, all rows, 16 numbers of `in` an instruction.
template <class S, bool X_COLS, bool W_COLS>
__device__ __forceinline__ void multiply_stage_wgmma(float (&sum)[S::MF][S::NF][4], uint32_t x_stage,
                                                     uint32_t w_stage) {
    constexpr int PANEL = STAGE_IN * 128, DOWN = 16 * 128, ALONG = 32; // bytes of 16 numbers of `in`, down and along
    wgmma_begin();
    #pragma unroll
    for (int k = 0; k < STAGE_IN / 16; k++)
        #pragma unroll
        for (int i = 0; i < S::MF; i++)
            wgmma<X_COLS, W_COLS>(sum[i], wgmma_operand(x_stage + i * 64 * 128 + k * (X_COLS ? DOWN : ALONG), PANEL),
                                  wgmma_operand(w_stage + k * (W_COLS ? DOWN : ALONG), PANEL));
    wgmma_end(sum);
}

// The main loop: sum += x W^T for steps from .. to - 1. The copies of the first STAGES - 1 stages are under way.
template <class S, bool X_COLS, bool W_COLS, bool PAIR>
__device__ __forceinline__ void multiply_steps(float (&sum)[S::MF][S::NF][4],
                                               const TileStages<S, X_COLS, W_COLS, PAIR>& stages, int from, int to) {
    for (int step = from; step < to; step++) {
        wait_for_copies<S::STAGES - 2>(); // this step's stage, as far as this thread copied it
        if (S::WARPGROUP) wgmma_see_shared();
        __syncthreads(); // ... as all did; and all are done with the stage before it, whose place the next copies take
        const int next = step + S::STAGES - 1;
        if (next < stages.at.last) stages.copy_x(next), stages.copy_w(next);
        commit_copies();
        const uint32_t x_stage = stages.x_stage(step), w_stage = x_stage + S::X_BYTES;
        if constexpr (S::WARPGROUP) multiply_stage_wgmma<S, X_COLS, W_COLS>(sum, x_stage, w_stage);
        else multiply_stage<S, X_COLS, W_COLS>(sum, x_stage, w_stage);
    }
}

// A mask of eight columns that lane e of a quad has: what it says of this lane's two, 2 t and 2 t + 1, in bits 0 and 1.
__device__ __forceinline__ uint32_t mask_of_lane(uint32_t mask, int e) {
    return __shfl_sync(~0u, mask, (threadIdx.x % 32 & ~3) + e) >> 2 * (threadIdx.x % 4);
}
// Epilogue::MASKS: sums that are not kept become zero, the others are scaled. Each lane of a quad asks about one of
// four fragments, which all four hold.
template <class S, class Epilogue, class Place>
__device__ __forceinline__ void mask_sums(float (&sum)[S::MF][S::NF][4], int N, const Place& at,
                                          const Epilogue& epilogue) {
    #pragma unroll
    for (int i = 0; i < S::MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++)
            #pragma unroll
            for (int j = 0; j < S::NF; j += 4) {
                const int n = at.token(i, h);
                const uint32_t mine = n < N ? epilogue.kept(n, (at.r0 + S::warp_row()) / 8 + j + threadIdx.x % 4) : 0;
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const uint32_t kept = mask_of_lane(mine, e);
                    float* y = &sum[i][j + e][2 * h];
                    y[0] = kept & 1 ? y[0] * epilogue.scale : 0, y[1] = kept & 2 ? y[1] * epilogue.scale : 0;
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
    if (!last_to_arrive(arrived + tile, splits)) return false;
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

// Epilogue::PARTS, of a lane's token n in fragments j0 .. j0 + 7 of `sum`, which are rows r0 .. r0 + 63. A quad of
// lanes has all of them. h: which of the fragment's two tokens a lane holds.
template <int NF, class Epilogue>
__device__ __forceinline__ void softmax_part(const float (&sum)[NF][4], int j0, int h, int n, int r0, int N, int out,
                                             Epilogue& epilogue) {
    const int t = threadIdx.x % 4;
    float largest = -1e30f, part = 0;
    #pragma unroll
    for (int j = 0; j < 8; j++)
        #pragma unroll
        for (int e = 0; e < 2; e++)
            if (r0 + j * 8 + 2 * t + e < out) largest = fmaxf(largest, sum[j0 + j][2 * h + e]);
    largest = quad_max(largest);
    #pragma unroll
    for (int j = 0; j < 8; j++)
        #pragma unroll
        for (int e = 0; e < 2; e++)
            if (r0 + j * 8 + 2 * t + e < out) part += exp2_fast((sum[j0 + j][2 * h + e] - largest) * LOG2E);
    part = quad_sum(part);
    if (t == 0 && n < N && r0 < out) epilogue.part(n, r0 / 64, largest, part);
}

// Four neighbouring columns of the 16 of two fragments, so that a quad of lanes writes whole sectors of 32 bytes:
// neighbours exchange two numbers. Lanes 0 1 2 3 of a quad get columns 0 .. 3, 8 .. 11, 4 .. 7, 12 .. 15.
__device__ __forceinline__ float4 four_columns(const float (&even)[4], const float (&odd)[4], int h) {
    const bool second = threadIdx.x % 2; // gets its four from the second fragment
    const float a = __shfl_xor_sync(~0u, second ? even[2 * h] : odd[2 * h], 1);
    const float b = __shfl_xor_sync(~0u, second ? even[2 * h + 1] : odd[2 * h + 1], 1);
    return second ? make_float4(a, b, odd[2 * h], odd[2 * h + 1]) : make_float4(even[2 * h], even[2 * h + 1], a, b);
}
// Hands a lane's sums of token n to the epilogue, four at a time; `first` is the first row of the warp's part.
template <int NF, class Epilogue>
__device__ __forceinline__ void finish_row(const float (&sum)[NF][4], int h, int n, int first, int N, int out,
                                           Epilogue& epilogue) {
    constexpr int EACH = Epilogue::PAIR ? 4 : 2; // fragments that give a lane four columns, of gate and up with PAIR
    const int t = threadIdx.x % 4;
    const auto row = [&](int j) {
        return (Epilogue::PAIR ? first / 2 + j * 4 : first + j * 8) + t / 2 * 4 + t % 2 * 8;
    };
    [[maybe_unused]] float4 old[Epilogue::ADDS ? NF / EACH : 1]; // all are asked for before the first is waited for
    if constexpr (Epilogue::ADDS)
        #pragma unroll
        for (int j = 0; j < NF; j += EACH)
            old[j / EACH] = n < N && row(j) < out ? epilogue.old_four(n, row(j)) : float4{};
    #pragma unroll
    for (int j = 0; j < NF; j += EACH) {
        const bool inside = n < N && row(j) < out;
        const float4 y = four_columns(sum[j], sum[j + 1], h);
        float4 second = {};
        if constexpr (Epilogue::PAIR) second = four_columns(sum[j + 2], sum[j + 3], h);
        if constexpr (Epilogue::ADDS) second = old[j / EACH];
        if (inside) epilogue.four(n, row(j), y, second);
    }
}

template <class S, bool X_COLS, bool W_COLS, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, S::WARPGROUP ? 2 : 1) tile_kernel(TileArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || !W_COLS, "gate and up are rows");
    static_assert(!Epilogue::PARTS || S::NF % 8 == 0, "a quad of lanes has whole pieces of 64");
    // Aligned so that no row straddles two lines of 128 bytes; wgmma's swizzle counts from multiples of 1024.
    extern __shared__ __align__(128) uint4 memory[];
    const uint32_t shared = S::WARPGROUP ? (shared_address(memory) + 1023) & ~1023u : shared_address(memory);
    const TilePlace<S, Epilogue::PAIR> at(p);
    const TileStages<S, X_COLS, W_COLS, Epilogue::PAIR> stages = {p, at, shared, {}, {}};

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
    if constexpr (Epilogue::MASKS) {
        multiply_steps(sum, stages, at.first, min(at.last, at.more_steps));
        if (at.first < at.more_steps) mask_sums<S>(sum, p.N, at, epilogue);
        if constexpr (S::WARPGROUP) wgmma_settle(sum);
    }
    multiply_steps(sum, stages, Epilogue::MASKS ? max(at.first, at.more_steps) : at.first, at.last);
    wait_for_copies<0>();
    if (!p.early) let_next_start(); // earlier, blocks of the next kernel would take the places of ours

    if (p.splits > 1 && !reduce_splits<S::THREADS>(sum, p.partial, p.arrived, blockIdx.x, blockIdx.y, p.splits)) return;
    const int first = at.r0 + S::warp_row();
    #pragma unroll
    for (int i = 0; i < S::MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = at.token(i, h);
            if constexpr (Epilogue::PARTS)
                #pragma unroll
                for (int j = 0; j < S::NF; j += 8) softmax_part(sum[i], j, h, n, first + j * 8, p.N, p.out, epilogue);
            finish_row(sum[i], h, n, first, p.N, p.out, epilogue);
        }
}

// Whether the scratch has room for the sums of so many splits.
template <class S> bool splits_fit(int64_t tiles, int splits) {
    return tiles <= MAX_TILES && tiles * splits * S::TOKENS * S::ROWS * 4 <= (int64_t)PARTIAL_BYTES;
}

template <class S, bool X_COLS = false, bool W_COLS = false, class Epilogue>
void launch_tiles(Context& ctx, TileArgs p, Epilogue epilogue) {
    const int rows = Epilogue::PAIR ? 2 * p.out : p.out;
    const int64_t tiles = S::tiles(p.N, rows);
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
    const dim3 grid((unsigned)tiles, (unsigned)p.splits);
    launch(ctx, tile_kernel<S, X_COLS, W_COLS, Epilogue>, grid, S::THREADS, S::SHARED, p, epilogue);
}

// ---- The choice of a tile
using Tile128x128 = TileShape<128, 128, 64, 64, 3>;
using Tile64x128 = TileShape<64, 128, 32, 64, 3>;
using Tile64x64 = TileShape<64, 64, 32, 32, 4>;
using Tile32x64 = TileShape<32, 64, 16, 32, 6>;
using TileHopper = TileShape<128, 128, 64, 64, 3, true>;

// The shape and the number of splits with the least predicted time in microseconds: the blocks that the busiest
// multiprocessor has, times a block's steps, plus what splits cost. The figures were fitted to an H100 (tests/bench_gpu
// sweep); what matters is their proportion. For 1,024 numbers of `in` a block takes `alone` if it is alone on its
// multiprocessor, and `full` if that has many.
struct TilePlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    template <class S> void consider(const Context& ctx, int index, double alone, double full, int N, int out, int in) {
        const int64_t tiles = S::tiles(N, out), area = S::TOKENS * S::ROWS;
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
        if (ctx.gpu->hopper) consider<TileHopper>(ctx, 4, 9.6, 8.6, N, out, in);
    }
};
template <bool X_COLS = false, bool W_COLS = false, class Epilogue>
void tile_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    const TilePlan plan(ctx, p.N, Epilogue::PAIR ? 2 * p.out : p.out, p.in + p.more, X_COLS);
    p.splits = plan.splits;
    switch (plan.shape) {
        case 0: return launch_tiles<Tile128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_tiles<Tile64x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_tiles<Tile64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: if constexpr (!X_COLS) return launch_tiles<Tile32x64, X_COLS, W_COLS>(ctx, p, epilogue); else break;
        case 4: return launch_tiles<TileHopper, X_COLS, W_COLS>(ctx, p, epilogue);
    }
    DIE("no tile of shape %d for this product", plan.shape);
}

// ---- The adapters' own kernels. What they need to know; masks are made anew wherever they are needed.
struct LoraArgs {
    const bf16* A; // (m * rank, in)
    int N, in, rank, modules, module[3];
    bool dropping;
    float scale = 1; // 1 / (1 - p)
    Dropout dropout = {};
    LoraArgs(const Linear<bf16>& W, int N)
        : A(W.adapter.A), N(N), in(W.in), rank(W.adapter.rank), modules(W.adapter.modules),
          dropping(W.adapter.dropout) {
        if (in % 8 || rank % 8) DIE("an adapter of rank %d on %d columns: the GPU takes multiples of 8", rank, in);
        for (int j = 0; j < 3; j++) module[j] = W.adapter.module[j];
        if (dropping) dropout = *W.adapter.dropout, scale = 1 / (1 - dropout.p);
    }
    int width() const { return modules * rank; }
    // (An index that is not constant would cost a copy of the array.)
    __device__ int name(int j) const { return j == 0 ? module[0] : j == 1 ? module[1] : module[2]; }
    // Eight neighbours of token n, from 8 i8 on, as a module sees them.
    __device__ uint4 drop(uint4 v, int n, int name, int i8) const {
        if (!dropping || n >= N) return v;
        const uint32_t kept = dropout_mask(dropout, dropout.token[n], name, i8);
        auto two = [&](uint32_t pair, int bit) {
            return pack(kept >> bit & 1 ? low(pair) * scale : 0, kept >> bit & 2 ? high(pair) * scale : 0);
        };
        return make_uint4(two(v.x, 0), two(v.y, 2), two(v.z, 4), two(v.w, 6));
    }
};

// lora_down: h_j = drop_j(x) A_j^T. Grid: (tokens / 32, modules * rank / 32), 8 warps. A block owns 32 tokens by 32
// rows of one module's A. Its warps take steps of 32 of `in` in turn; a lane reads its operands straight from memory,
// as in stream_kernel: eight numbers each of four tokens and of four rows. The warps' sums are added in shared memory,
// four a thread. Bound by the latency of the loads and, with dropout, by making the masks: there is little to multiply.
__global__ void __launch_bounds__(256, 2) lora_down_kernel(bf16* h, const bf16* x, LoraArgs p) {
    __shared__ float sums[8][32][32]; // (warp, token, row)
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, groups = (p.rank + 31) / 32;
    const int n0 = blockIdx.x * 32, j = blockIdx.y / groups, r0 = blockIdx.y % groups * 32, name = p.name(j);
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
        for (int m = 0; m < 4; m++) a[m] = p.drop(a[m], n0 + m * 8 + g, name, i / 8);
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
        store_four(h + (size_t)(n0 + n) * p.modules * p.rank + j * p.rank + r0 + r, all);
}

// linear_backward_input's second part, where several modules drop x each in its own way: dx += sum_j drop_j(dh_j A_j).
// Grid: (tokens / 64, columns / 64), 4 warps. A block owns 64 tokens by 64 columns, a warp 16 of the tokens. 32 rows of
// an A at a time pass through shared memory, swizzled as in tile_kernel; dh comes straight from memory. Bound by the
// masks.
__global__ void __launch_bounds__(128, 3) lora_backward_input_kernel(bf16* dx, const bf16* dh, LoraArgs p) {
    constexpr int CHUNKS = 8, F = CHUNKS; // of 16 bytes a row; fragments of eight columns
    __shared__ __align__(128) uint4 tile[32 * CHUNKS];
    const uint32_t shared = shared_address(tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * 64 + warp * 16, c0 = blockIdx.y * CHUNKS * 8;
    const size_t ld = (size_t)p.modules * p.rank;
    wait_for_previous();
    float sum[F][4];
    #pragma unroll
    for (int f = 0; f < F; f++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = n0 + h * 8 + g, c = c0 + f * 8 + 2 * t;
            const uint32_t old = n < p.N && c < p.in ? *(const uint32_t*)(dx + (size_t)n * p.in + c) : 0;
            sum[f][2 * h] = low(old), sum[f][2 * h + 1] = high(old);
        }
    for (int j = 0; j < p.modules; j++) {
        float part[F][4] = {};
        for (int r0 = 0; r0 < p.rank; r0 += 32) {
            __syncthreads();
            for (int i = threadIdx.x; i < 32 * CHUNKS; i += 128) {
                const int row = i / CHUNKS, chunk = i % CHUNKS, c = c0 + chunk * 8;
                const bf16* from = p.A + (size_t)(j * p.rank + r0 + row) * p.in + c;
                const bool inside = r0 + row < p.rank && c < p.in;
                tile[row * CHUNKS + (chunk ^ row % 8)] = inside ? *(const uint4*)from : uint4{};
            }
            __syncthreads();
            #pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t a[4], b[4];
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int n = n0 + e % 2 * 8 + g, r = r0 + k * 16 + e / 2 * 8 + 2 * t;
                    a[e] = n < p.N && r < p.rank ? *(const uint32_t*)(dh + n * ld + j * p.rank + r) : 0;
                }
                #pragma unroll
                for (int f = 0; f < F / 2; f++) {
                    ldmatrix_transposed(b, chunk_address(shared, k * 16 + lane % 16, f * 2 + lane / 16));
                    mma(part[2 * f], a[0], a[1], a[2], a[3], b[0], b[1]);
                    mma(part[2 * f + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
                }
            }
        }
        #pragma unroll
        for (int f = 0; f < F; f += 2) { // a lane of a quad makes the mask of one token and one fragment, for all four
            const int n = n0 + t % 2 * 8 + g;
            uint32_t mine = 0xff;
            if (p.dropping && n < p.N)
                mine = dropout_mask(p.dropout, p.dropout.token[n], p.name(j), (c0 >> 3) + f + t / 2);
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const uint32_t kept = mask_of_lane(mine, e);
                float *to = &sum[f + e / 2][e % 2 * 2], *from = &part[f + e / 2][e % 2 * 2];
                to[0] += kept & 1 ? from[0] * p.scale : 0, to[1] += kept & 2 ? from[1] * p.scale : 0;
            }
        }
    }
    let_next_start();
    #pragma unroll
    for (int f = 0; f < F; f++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = n0 + h * 8 + g, c = c0 + f * 8 + 2 * t;
            if (n < p.N && c < p.in) *(uint32_t*)(dx + (size_t)n * p.in + c) = pack(sum[f][2 * h], sum[f][2 * h + 1]);
        }
}

// lora_backward_weight's first part: dA_j += dh_j^T drop_j(x). Grid: (columns / 128, modules * rank / 32, splits of the
// tokens), 8 warps. A block owns 32 rows of an A by 128 columns, a warp 16 of the columns; 64 tokens at a time pass
// through shared memory, x dropped on its way. The blocks that share a tile add their sums as tile_kernel's do. Bound
// by the masks.
__global__ void __launch_bounds__(256) lora_down_weight_kernel(float* dA, const bf16* dh, const bf16* x, LoraArgs p,
                                                               float* partial, int* arrived) {
    __shared__ __align__(128) uint4 x_tile[64 * 16]; // rows of 256 bytes, swizzled
    __shared__ __align__(128) uint4 h_tile[64 * 5];  // rows of 64 bytes, 80 apart: eight of them in different banks
    const uint32_t x_at = shared_address(x_tile), h_at = shared_address(h_tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = (p.rank + 31) / 32;
    const int j = blockIdx.y / groups, r0 = blockIdx.y % groups * 32, c0 = blockIdx.x * 128, name = p.name(j);
    const size_t ld = (size_t)p.modules * p.rank;
    const int each = ((p.N + 63) / 64 + gridDim.z - 1) / gridDim.z * 64, last = min(p.N, (int)(blockIdx.z + 1) * each);
    const int row = threadIdx.x / 16, chunk = threadIdx.x % 16, h_row = threadIdx.x / 4, h_chunk = threadIdx.x % 4;
    wait_for_previous();
    float sum[2][2][4] = {};
    for (int n0 = blockIdx.z * each; n0 < last; n0 += 64) {
        uint4 v[4], h = {};
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = n0 + row + i * 16, c = c0 + chunk * 8;
            v[i] = n < last && c < p.in ? *(const uint4*)(x + (size_t)n * p.in + c) : uint4{};
        }
        if (n0 + h_row < last && r0 + h_chunk * 8 < p.rank)
            h = *(const uint4*)(dh + (n0 + h_row) * ld + j * p.rank + r0 + h_chunk * 8);
        #pragma unroll
        for (int i = 0; i < 4; i++) v[i] = p.drop(v[i], n0 + row + i * 16, name, c0 / 8 + chunk);
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 4; i++) x_tile[(row + i * 16) * 16 + (chunk ^ row % 8)] = v[i];
        h_tile[h_row * 5 + h_chunk] = h;
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t a[4], b[4];
            const int b_row = k * 16 + lane % 16, b_chunk = warp * 2 + lane / 16;
            ldmatrix_transposed(b, x_at + (b_row * 16 + (b_chunk ^ b_row % 8)) * 16);
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                ldmatrix_transposed(a, h_at + ((k * 16 + lane % 8 + lane / 16 * 8) * 5 + i * 2 + lane / 8 % 2) * 16);
                mma(sum[i][0], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma(sum[i][1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }
    let_next_start();
    const int tile = blockIdx.y * gridDim.x + blockIdx.x;
    if (gridDim.z > 1 && !reduce_splits<256>(sum, partial, arrived, tile, blockIdx.z, gridDim.z)) return;
    #pragma unroll
    for (int f = 0; f < 4; f++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = r0 + f / 2 * 16 + h * 8 + lane / 4, c = c0 + warp * 16 + f % 2 * 8 + lane % 4 * 2;
            if (r >= p.rank || c >= p.in) continue;
            float2* to = (float2*)(dA + (size_t)(j * p.rank + r) * p.in + c);
            const float2 old = *to;
            *to = make_float2(old.x + sum[f / 2][f % 2][2 * h], old.y + sum[f / 2][f % 2][2 * h + 1]);
        }
}

// ---- Launchers: the products of Book I, in its order.

inline void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N) {
    const LoraArgs p(W, N);
    launch(ctx, lora_down_kernel, dim3((N + 31) / 32, p.modules * ((p.rank + 31) / 32)), 256, 0, h, x, p);
}

// x W^T, with the kernel that suits N; an adapter's h and s B are further columns of x and W.
template <class Epilogue>
void product_gpu(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N) {
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    const Adapter<bf16>& a = W.adapter;
    if (N <= STREAM_TOKENS && !ctx.invariant && !a.rank) {
        stream_product(ctx, {x, nullptr, nullptr, nullptr, 0, W.w[0], N, W.in, out}, epilogue);
        return;
    }
    TileArgs p = {x, W.w[0], N, W.in, out};
    p.early = N <= 128;
    if (a.rank) {
        lora_down_gpu(ctx, a.h, x, W, N);
        p.more_x = a.h, p.more_W = a.B, p.more = (int)a.width();
    }
    tile_product(ctx, p, epilogue);
}
// The same of rmsnorm(stream). `normed` (N,in) holds that where the product does not make it for itself.
template <class Epilogue>
void norm_product_gpu(Context& ctx, Epilogue epilogue, bf16* normed, const float* stream, const bf16* norm,
                      const Linear<bf16>& W, int N, float eps) {
    if (N > NORM_TOKENS || ctx.invariant || W.adapter.rank) {
        rmsnorm_gpu(ctx, normed, stream, norm, N, W.in, eps);
        return product_gpu(ctx, epilogue, normed, W, N);
    }
    const int out = Epilogue::PAIR ? W.rows[0] : W.out();
    stream_product(ctx, {nullptr, nullptr, stream, norm, eps, W.w[0], N, W.in, out}, epilogue);
}

inline void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), x, W, N);
}
inline void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W,
                           int N) {
    product_gpu(ctx, AddEpilogue(out, residual, W.out()), x, W, N);
}
inline void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* x, const bf16* w,
                            const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, StoreEpilogue<bf16>(out, W.out()), normed, x, w, W, N, eps);
}

inline void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w,
                                   const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, SwigluEpilogue(out, gate_up, W.rows[0]), normed, x, w, W, N, eps);
}

inline void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W,
                     int R) {
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
    product_gpu(ctx, StoreEpilogue<float>(logits, W.out()), picked, W, R);
}

// Always in tiles of 128: their epilogue hands over the softmax's parts.
inline void head_loss_gpu(Context& ctx, float* loss, bf16* dlogits, float* logits, bf16* picked, float* parts,
                          const bf16* x, const int* rows, const int* target, float scale, const Linear<bf16>& W,
                          int R) {
    const int V = W.out(), pieces = (V + 63) / 64;
    float2* const of_64 = (float2*)parts;
    const LossEpilogue epilogue(logits, V, of_64, pieces);
    const TileArgs p = {picked, W.w[0], R, W.in, V};
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
    if (ctx.gpu->hopper) launch_tiles<TileHopper>(ctx, p, epilogue);
    else launch_tiles<Tile128x128>(ctx, p, epilogue);
    launch(ctx, cross_entropy_kernel, R, 1024, 0, loss, dlogits, logits, of_64, pieces, target, scale, V);
}

inline void head_backward_gpu(Context& ctx, bf16* dnormed, const bf16* dlogits, size_t ld, const int* rows,
                              const Linear<bf16>& W, int R) {
    TileArgs p = {dlogits, W.w[0], R, W.out(), W.in};
    p.ldx = (int)ld;
    tile_product<false, true>(ctx, p, ScatterEpilogue(dnormed, rows, W.in));
}

// The adapter's part is made in the product with W, whose further columns are dh and A, unless several modules share x
// and each drops it in its own way: then dy W is stored, rounded, and added to.
inline void linear_backward_input_gpu(Context& ctx, bf16* dx, bf16* dh, const bf16* dy, const Linear<bf16>& W, int N) {
    const LoraArgs lora(W, N);
    const int width = lora.width();
    const bool together = width && (lora.modules == 1 || !lora.dropping);
    if (width) tile_product<false, true>(ctx, {dy, W.adapter.B, N, W.out(), width}, StoreEpilogue<bf16>(dh, width));
    TileArgs p = {dy, W.w[0], N, W.out(), W.in};
    if (together) p.more_x = dh, p.more_W = W.adapter.A, p.more = width;
    if (together && lora.dropping)
        return tile_product<false, true>(ctx, p, DropEpilogue(dx, W.in, lora.dropout, lora.module[0], lora.scale));
    tile_product<false, true>(ctx, p, StoreEpilogue<bf16>(dx, W.in));
    if (width && !together)
        launch(ctx, lora_backward_input_kernel, dim3((N + 63) / 64, (W.in + 63) / 64), 128, 0, dx, dh, lora);
}

inline void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N,
                                       int out, int in) {
    TileArgs p = {dy, x, out, N, in};
    p.ldx = (int)ld;
    tile_product<true, true>(ctx, p, AddEpilogue(dW, dW, in));
}

inline void lora_backward_weight_gpu(Context& ctx, float* dA, float* dB, const bf16* dh, const bf16* dy, const bf16* x,
                                     const Linear<bf16>& W, int N) {
    const LoraArgs p(W, N);
    const int columns = (p.in + 127) / 128, groups = p.modules * ((p.rank + 31) / 32), tiles = columns * groups;
    if (tiles > MAX_TILES) DIE("an adapter of rank %d on %d columns is more than the GPU's kernels take", p.rank, p.in);
    const int most = (int)(PARTIAL_BYTES / (32 * 128 * sizeof(float) * tiles)); // splits that the scratch has room for
    const int splits = std::max(1, std::min({(N + 63) / 64, 6 * ctx.gpu->sms / tiles, most}));
    const dim3 grid(columns, groups, splits);
    launch(ctx, lora_down_weight_kernel, grid, 256, 0, dA, dh, x, p, ctx.gpu->partial, ctx.gpu->arrived);
    tile_product<true, true>(ctx, {dy, W.adapter.h, W.out(), N, p.width()}, LoraUpEpilogue(dB, W));
}
