// On the GPU the blocks of a Linear lie behind one another (see Weights::upload): one matrix W of R rows. What
// becomes of a sum is the epilogue's business. PAIR: W is gate over up, and the epilogue gets both of a column. ADDS: it adds
// to what is there, which `old` asks for. MASKS: of the further columns' sums only what `kept` says counts. PARTS: of every
// 64 sums of a row it gets what a softmax needs. `ask` comes before the sums are there: what `one` will need can be on its way.
struct StoreEpilogue {
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = false;
    bf16* out; // (N,R)
    size_t R;
    __device__ void begin() {}
    __device__ void ask(bool, int, int) {}
    __device__ void one(bool there, int n, int r, float y, bool) { if (there) out[n * R + r] = round_bf16(y); }
    __device__ void four(int n, int r, const float* y) { *(uint2*)(out + n * R + r) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3])); }
    __device__ void end(int) {}
};
struct AddEpilogue {
    static constexpr bool PAIR = false, ADDS = true, MASKS = false, PARTS = false;
    float* out;            // (N,R)
    const float* residual; // (N,R), may be out
    size_t R;
    float ahead = 0;
    __device__ void begin() {}
    __device__ void ask(bool there, int n, int r) { ahead = there ? residual[n * R + r] : 0; }
    __device__ void one(bool there, int n, int r, float y, bool asked) {
        if (there) out[n * R + r] = (asked ? ahead : residual[n * R + r]) + y;
    }
    __device__ float4 old(int n, int r) const { return *(const float4*)(residual + n * R + r); }
    __device__ void four(int n, int r, const float* y, float4 old) {
        *(float4*)(out + n * R + r) = make_float4(old.x + y[0], old.y + y[1], old.z + y[2], old.w + y[3]);
    }
    __device__ void end(int) {}
};
// gate and up are rounded as the CPU rounds them when it stores them.
__device__ inline float swiglu(float gate, float up) {
    const float g = to_acc(round_bf16(gate));
    return g / (1 + exp2_fast(-LOG2E * g)) * to_acc(round_bf16(up));
}
struct SwigluEpilogue {
    static constexpr bool PAIR = true, ADDS = false, MASKS = false, PARTS = false;
    bf16* out;     // (N,F)
    bf16* gate_up; // (N,2F) for the backward pass, or null
    size_t F;
    __device__ void begin() {}
    __device__ void ask(bool, int, int) {}
    __device__ void one(bool there, int n, int f, float gate, float up) {
        if (!there) return;
        out[n * F + f] = round_bf16(swiglu(gate, up));
        if (gate_up) gate_up[n * 2 * F + f] = round_bf16(gate), gate_up[(n * 2 + 1) * F + f] = round_bf16(up);
    }
    __device__ void four(int n, int f, const float* g, const float* u) {
        *(uint2*)(out + n * F + f) = make_uint2(pack(swiglu(g[0], u[0]), swiglu(g[1], u[1])), pack(swiglu(g[2], u[2]), swiglu(g[3], u[3])));
        if (!gate_up) return;
        *(uint2*)(gate_up + n * 2 * F + f) = make_uint2(pack(g[0], g[1]), pack(g[2], g[3]));
        *(uint2*)(gate_up + (n * 2 + 1) * F + f) = make_uint2(pack(u[0], u[1]), pack(u[2], u[3]));
    }
    __device__ void end(int) {}
};

// ---- Few tokens: the weights are streamed once, at the memory's speed.
// A block owns groups of TILES x 8 rows of W; its warps share out K in steps of 32. A step of a tile is one 16-byte
// load a lane: lane 4g + t holds k = 8t .. 8t + 7 of row g. Taken in pairs these are two b operands of mma, if a
// holds the same k of the tokens: any order of k will do that both agree on. So no number is moved or converted
// between memory and tensor core, and 1 to 8 M tokens cost the same. K and R are multiples of 8. All of a group's first LOADS steps are asked
// for before anything is waited for, the first group's before the kernel ahead has ended.
// A sum is taken in an order that depends on K only: a row of tokens has the same bits whatever M is.
// NORM: x is `norm_rows` of `stream`, made by each block for itself.
constexpr int STREAM_TOKENS = 16, NORM_TOKENS = 4, STREAM_LOADS = 8;

struct StreamArgs {
    const bf16* x;      // (., K)
    const int* rows;    // (N) rows of x, or null: the first N
    const float* stream; // (N,K) with NORM
    const bf16* norm;   // (K)
    float eps;
    const bf16* W;      // (R,K), with PAIR (2R,K)
    int N, K, R;
    int steps = 0;      // of K, a warp: set by launch_stream
};

template <int TILES, int M, bool NORM, class Epilogue>
__global__ void __launch_bounds__(384, 2) stream_kernel(StreamArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || TILES == 2, "a tile of gate, a tile of up");
    constexpr int LOADS = STREAM_LOADS / TILES, SUMS = TILES * M * 64; // (tile, token, row)
    extern __shared__ float shared[]; // two sets of (warps, SUMS), taken in turn; pieces of norm_rows; its output
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const int first = warp * p.steps, last = min((p.K + 31) / 32, first + p.steps);
    const int rows = Epilogue::PAIR ? 8 : 8 * TILES, groups = (p.R + rows - 1) / rows;
    uint4 w[LOADS][TILES];
    auto load = [&](int group, int step) {
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int r = Epilogue::PAIR ? min(group * 8 + g, p.R - 1) + tile * p.R : min(group * rows + tile * 8 + g, p.R - 1);
            const bf16* at = p.W + (size_t)r * p.K + step * 32 + 8 * t;
            #pragma unroll
            for (int i = 0; i < LOADS; i++) w[i][tile] = load_stream(at + i * 32, step + i < last && (step + i) * 32 + 8 * t < p.K);
        }
    };
    int group = blockIdx.x;
    load(group, first);
    let_next_start();
    wait_for_previous();
    epilogue.begin();
    const bf16* x = p.x;
    int ld = p.K;
    if (NORM) {
        float* pieces = shared + 2 * warps * SUMS;
        bf16* normed = (bf16*)(pieces + (p.N * ((p.K + 127) / 128) + 3) / 4 * 4);
        ld = p.K + 8; // rows that begin in different banks
        norm_rows(normed, ld, p.stream, p.norm, pieces, p.N, p.K, p.eps);
        x = normed;
    }
    const bf16* token[M]; // this lane's rows of a: tokens g and g + 8; beyond the last one it computes what nobody keeps
    #pragma unroll
    for (int m = 0; m < M; m++) {
        const int n = min(g + 8 * m, p.N - 1);
        token[m] = x + (size_t)(!NORM && p.rows ? p.rows[n] : n) * ld;
    }
    float* sums = shared;
    for (; group < groups; group += gridDim.x) {
        // This thread's first output: tokens 8 M, rows 8, of each tile.
        const int o0 = threadIdx.x, n0 = o0 / 8 % (8 * M), at0 = group * rows + o0 / (64 * M) * 8 + o0 % 8;
        epilogue.ask(o0 < SUMS && n0 < p.N && at0 < p.R, n0, at0);
        float sum[TILES][4] = {};
        for (int step = first; step < last; step += LOADS) {
            if (step > first) load(group, step);
            #pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int k = min((step + i) * 32 + 8 * t, p.K - 8); // behind the end w is zero
                uint4 a[2] = {};
                #pragma unroll
                for (int m = 0; m < M; m++) a[m] = *(const uint4*)(token[m] + k);
                #pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    mma(sum[tile], a[0].x, a[1].x, a[0].y, a[1].y, w[i][tile].x, w[i][tile].y);
                    mma(sum[tile], a[0].z, a[1].z, a[0].w, a[1].w, w[i][tile].z, w[i][tile].w);
                }
            }
        }
        if (group + (int)gridDim.x < groups) load(group + gridDim.x, first);
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            #pragma unroll
            for (int m = 0; m < M; m++)
                *(float2*)(sums + warp * SUMS + ((tile * M + m) * 8 + g) * 8 + 2 * t) = make_float2(sum[tile][2 * m], sum[tile][2 * m + 1]);
        __syncthreads();
        for (int o = threadIdx.x; o < (Epilogue::PAIR ? SUMS / 2 : SUMS); o += blockDim.x) {
            const int n = o / 8 % (8 * M), r = group * rows + o / (64 * M) * 8 + o % 8;
            float y = 0, up = 0;
            #pragma unroll 4
            for (int v = 0; v < warps; v++) {
                y += sums[v * SUMS + o];
                if (Epilogue::PAIR) up += sums[v * SUMS + SUMS / 2 + o];
            }
            const bool there = n < p.N && r < p.R;
            if constexpr (Epilogue::PAIR) epilogue.one(there, n, r, y, up);
            else epilogue.one(there, n, r, y, o == o0); // eight lanes in a row have the same n
        }
        sums = sums == shared ? shared + warps * SUMS : shared;
    }
    epilogue.end(p.N);
}

// Returns the number of blocks.
template <int TILES, int M, bool NORM, class Epilogue>
int launch_stream(Context& ctx, StreamArgs p, Epilogue epilogue) {
    const int rows = Epilogue::PAIR ? 8 : 8 * TILES, groups = (p.R + rows - 1) / rows, steps = (p.K + 31) / 32;
    const int warps = std::min(12, std::max(4, steps * TILES / STREAM_LOADS));
    p.steps = (steps + warps - 1) / warps;
    size_t shared = 2 * (size_t)warps * TILES * M * 64 * sizeof(float);
    if (NORM) shared += (p.N * ((p.K + 127) / 128) + 3) / 4 * 4 * sizeof(float) + (size_t)p.N * (p.K + 8) * sizeof(bf16);
    const int blocks = std::min(groups, ctx.gpu->sms * (24 / warps)); // what is resident at once: 85 registers a thread
    launch(ctx, stream_kernel<TILES, M, NORM, Epilogue>, blocks, warps * 32, shared, p, epilogue);
    return blocks;
}
template <class Epilogue>
int stream_product(Context& ctx, const StreamArgs& p, Epilogue epilogue) {
    constexpr bool PAIR = Epilogue::PAIR;
    const bool two = PAIR || p.K <= 1024;
    if (p.stream) {
        if (two) return launch_stream<2, 1, true>(ctx, p, epilogue);
        if constexpr (!PAIR) return launch_stream<1, 1, true>(ctx, p, epilogue);
    } else if (p.N <= 8) {
        if (two) return launch_stream<2, 1, false>(ctx, p, epilogue);
        if constexpr (!PAIR) return launch_stream<1, 1, false>(ctx, p, epilogue);
    }
    if (two) return launch_stream<2, 2, false>(ctx, p, epilogue);
    if constexpr (!PAIR) return launch_stream<1, 2, false>(ctx, p, epilogue);
    return 0;
}

// ---- Many tokens: tiles of BM tokens by BN rows of W, a block each. Both operands pass through shared memory, BK numbers
// of K a stage, copied STAGES - 1 stages ahead of their use. y[n][r] = sum_k x[n][k] W[r][k], and the backward pass has
// two more: x and W can each lie with K running down (X_COLS: x is (K,N), W_COLS: W is (K,R)); the tensor core takes
// them transposed.
// A row of a stage is the 128 bytes of a cache line. Of an operand with K along its rows a row of shared memory holds
// one row; of one with K down it, 64 columns at one k, a panel of BK such rows for every 64. The row's chunks of 16 bytes
// are exchanged by row % 8, so that the 8 rows which are read at once lie in different banks.
// Roads: mma.sync, a warp owns WM by WN of the tile; or wgmma (S::WARPGROUP), the block's four warps own it together.
// A lane's sums lie in pairs of columns, 2t and 2t + 1 of eight: two neighbours exchange one of two pairs each, so that
// each has four columns in a row, and a quad of lanes writes whole sectors. With PAIR 16 rows of gate and 16 of up
// take turns: a lane's sums of both are of the same columns.
// splits > 1: as many blocks share a tile, each with a part of K; the last to arrive adds their sums in order.
constexpr int BK = 64;


template <int BM_, int BN_, int WM_, int WN_, int STAGES_, bool WARPGROUP_ = false> struct TileShape {
    static constexpr int BM = BM_, BN = BN_, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr bool WARPGROUP = WARPGROUP_;
    static constexpr int THREADS = BM / WM * (BN / WN) * 32;
    static constexpr size_t SHARED = (size_t)STAGES * (BM + BN) * BK * sizeof(bf16) + (WARPGROUP ? 1024 : 0);
};

struct TileArgs {
    const bf16 *x, *W;  // (N,K); (R,K), with PAIR (2R,K)
    int N, K, R;
    const bf16 *more_x = nullptr, *more_W = nullptr; // (N,more), (R,more): further columns of both (an adapter's), taken first;
                                                     // W_COLS: more_W is (more,R)
    int more = 0;
    int ldx = 0, ldw = 0; // numbers from one row of x and W to the next; 0: as many as a row has
    bool early = false;   // few blocks: the next kernel's may come beside them from the start
    int splits = 1;
    float* partial = nullptr;
    int* arrived = nullptr;
};

// Copies what one thread does of an operand's stage to shared memory. Chunks of 16 bytes: `chunk` of every STEPth row.
template <int ROWS, bool COLS, int THREADS> struct TileCopy {
    static constexpr int CHUNKS = COLS ? ROWS / 8 : BK / 8, STEP = THREADS / CHUNKS, COUNT = (COLS ? BK : ROWS) / STEP;
    static_assert(STEP % 8 == 0 && COUNT * STEP == (COLS ? BK : ROWS) && (!COLS || ROWS % 64 == 0), "every thread copies the same");
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const uint32_t at = (COLS ? chunk / 8 * (BK * 128) : 0) + row * 128 + ((chunk % 8 ^ row % 8) << 4);
};

template <class S, bool X_COLS, bool W_COLS, class Epilogue>
__global__ void __launch_bounds__(S::THREADS, S::WARPGROUP ? 2 : 1) tile_kernel(TileArgs p, Epilogue epilogue) {
    constexpr int BM = S::BM, BN = S::BN, WM = S::WM, WN = S::WN, STAGES = S::STAGES, THREADS = S::THREADS;
    constexpr int MF = S::WARPGROUP ? BM / 64 : WM / 16, NF = S::WARPGROUP ? BN / 8 : WN / 8, STAGE = (BM + BN) * BK * 2, W_AT = BM * BK * 2;
    static_assert(!S::WARPGROUP || (THREADS == 128 && BN == 128), "one warpgroup");
    static_assert(!Epilogue::PAIR || !W_COLS, "gate and up are rows");
    extern __shared__ __align__(128) uint4 stages[]; // rows that straddle two lines of 128 bytes cost three times as much
    const uint32_t shared = S::WARPGROUP ? (shared_address(stages) + 1023) & ~1023u : shared_address(stages);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int R = Epilogue::PAIR ? 2 * p.R : p.R;
    // Bands of 8 tiles of tokens: blocks that run at the same time share rows of both operands in the L2 cache.
    const int across = (R + BN - 1) / BN, down = (p.N + BM - 1) / BM, band = blockIdx.x / (8 * across), in_band = blockIdx.x % (8 * across);
    const int high = min(8, down - band * 8), n0 = (band * 8 + in_band % high) * BM, r0 = in_band / high * BN;
    const int ahead = (p.more + BK - 1) / BK, steps = ahead + (p.K + BK - 1) / BK; // of further columns, and all
    const int first = (int)((int64_t)steps * blockIdx.y / p.splits), last = (int)((int64_t)steps * (blockIdx.y + 1) / p.splits);

    const TileCopy<BM, X_COLS, THREADS> cx;
    const TileCopy<BN, W_COLS, THREADS> cw;
    auto copy_x = [&](int step) {
        const uint32_t to = shared + step % STAGES * STAGE + cx.at;
        if constexpr (X_COLS) {
            const int k = step * BK + cx.row, n = n0 + cx.chunk * 8;
            const bf16* from = p.x + (size_t)k * p.ldx + n;
            #pragma unroll
            for (int i = 0; i < cx.COUNT; i++) copy_async(to + i * cx.STEP * 128, from + (size_t)i * cx.STEP * p.ldx, step < last && k + i * cx.STEP < p.K && n < p.N);
        } else {
            const bool extra = step < ahead;
            const int k = (extra ? step : step - ahead) * BK + cx.chunk * 8, n = n0 + cx.row, ld = extra ? p.more : p.ldx;
            const bool inside = step < last && k < (extra ? p.more : p.K);
            const bf16* from = (extra ? p.more_x : p.x) + (size_t)n * ld + k;
            #pragma unroll
            for (int i = 0; i < cx.COUNT; i++) copy_async(to + i * cx.STEP * 128, from + (size_t)i * cx.STEP * ld, inside && n + i * cx.STEP < p.N);
        }
    };
    auto copy_w = [&](int step) {
        const uint32_t to = shared + step % STAGES * STAGE + W_AT + cw.at;
        if constexpr (W_COLS) {
            const bool extra = step < ahead;
            const int k = (extra ? step : step - ahead) * BK + cw.row, r = r0 + cw.chunk * 8, ld = extra ? p.R : p.ldw, end = extra ? p.more : p.K;
            const bf16* from = (extra ? p.more_W : p.W) + (size_t)k * ld + r;
            #pragma unroll
            for (int i = 0; i < cw.COUNT; i++) copy_async(to + i * cw.STEP * 128, from + (size_t)i * cw.STEP * ld, step < last && k + i * cw.STEP < end && r < R);
        } else {
            const bool extra = step < ahead;
            const int k = (extra ? step : step - ahead) * BK + cw.chunk * 8, ld = extra ? p.more : p.ldw;
            const bool inside = step < last && k < (extra ? p.more : p.K);
            const bf16* from = (extra ? p.more_W : p.W) + k;
            #pragma unroll
            for (int i = 0; i < cw.COUNT; i++) {
                const int w = cw.row + i * cw.STEP, r = Epilogue::PAIR ? r0 / 2 + w / 32 * 16 + w % 16 : r0 + w;
                copy_async(to + i * cw.STEP * 128, from + (size_t)(Epilogue::PAIR && w / 16 % 2 ? p.R + r : r) * ld, inside && r < p.R);
            }
        }
    };
    // Weights depend on no kernel ahead.
    if (!W_COLS)
        for (int s = 0; s < STAGES - 1; s++) copy_w(first + s);
    if (p.early) let_next_start();
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (W_COLS) copy_w(first + s);
        copy_x(first + s);
        commit_copies(); // (the first of these groups has all of the weights above)
    }
    const int warp_m = S::WARPGROUP ? warp * 16 : warp % (BM / WM) * WM, warp_n = S::WARPGROUP ? 0 : warp / (BM / WM) * WN, t = lane % 4;
    const auto row_of = [&](int i, int h) { return n0 + warp_m + i * (S::WARPGROUP ? 64 : 16) + h * 8 + lane / 4; };
    float sum[MF][NF][4] = {};
    const auto multiply = [&](int from, int to) {
        for (int step = from; step < to; step++) {
            wait_for_copies<STAGES - 2>();
            if (S::WARPGROUP) wgmma_see_shared();
            __syncthreads();
            if (step + STAGES - 1 < last) copy_x(step + STAGES - 1), copy_w(step + STAGES - 1);
            commit_copies();
            const uint32_t x_stage = shared + step % STAGES * STAGE, w_stage = x_stage + W_AT;
            if constexpr (S::WARPGROUP) {
                wgmma_begin();
                #pragma unroll
                for (int k = 0; k < BK / 16; k++)
                    #pragma unroll
                    for (int i = 0; i < MF; i++)
                        wgmma<X_COLS, W_COLS>(sum[i], wgmma_operand(x_stage + i * 64 * 128 + k * (X_COLS ? 16 * 128 : 32), BK * 128),
                                              wgmma_operand(w_stage + k * (W_COLS ? 16 * 128 : 32), BK * 128));
                wgmma_end(sum);
            } else {
                #pragma unroll
                for (int k = 0; k < BK / 16; k++) {
                    uint32_t a[MF][4], b[NF / 2][4];
                    #pragma unroll
                    for (int i = 0; i < MF; i++) {
                        if constexpr (X_COLS) { // four 8 x 8: k down, rows of x across
                            const int row = k * 16 + lane % 8 + lane / 16 * 8, chunk = (warp_m + i * 16) / 8 + lane / 8 % 2;
                            ldmatrix_transposed(a[i], x_stage + chunk / 8 * (BK * 128) + row * 128 + ((chunk % 8 ^ row % 8) << 4));
                        } else {
                            const int row = warp_m + i * 16 + lane % 16;
                            ldmatrix(a[i], x_stage + row * 128 + (((2 * k + lane / 16) ^ row % 8) << 4));
                        }
                    }
                    #pragma unroll
                    for (int j = 0; j < NF / 2; j++) {
                        if constexpr (W_COLS) {
                            const int row = k * 16 + lane % 16, chunk = (warp_n + j * 16) / 8 + lane / 16;
                            ldmatrix_transposed(b[j], w_stage + chunk / 8 * (BK * 128) + row * 128 + ((chunk % 8 ^ row % 8) << 4));
                        } else {
                            const int row = warp_n + j * 16 + lane % 8 + lane / 16 * 8;
                            ldmatrix(b[j], w_stage + row * 128 + (((2 * k + lane / 8 % 2) ^ row % 8) << 4));
                        }
                    }
                    #pragma unroll
                    for (int i = 0; i < MF; i++)
                        #pragma unroll
                        for (int j = 0; j < NF; j++) mma(sum[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    };
    if constexpr (Epilogue::MASKS) {
        multiply(first, min(last, ahead));
        if (first < ahead)
            #pragma unroll
            for (int i = 0; i < MF; i++)
                #pragma unroll
                for (int h = 0; h < 2; h++)
                    #pragma unroll
                    for (int f = 0; f < NF; f += 4) { // each lane of a quad asks about eight columns, for all four
                        const uint32_t mine = row_of(i, h) < p.N ? epilogue.kept(row_of(i, h), (r0 + warp_n) / 8 + f + t) : 0;
                        #pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const uint32_t kept = __shfl_sync(~0u, mine, (lane & ~3) + e) >> 2 * t;
                            float* y = &sum[i][f + e][2 * h];
                            y[0] = kept & 1 ? y[0] * epilogue.scale : 0, y[1] = kept & 2 ? y[1] * epilogue.scale : 0;
                        }
                    }
        if constexpr (S::WARPGROUP) wgmma_settle(sum);
    }
    multiply(Epilogue::MASKS ? max(first, ahead) : first, last);
    wait_for_copies<0>();
    if (!p.early) let_next_start(); // earlier, blocks of the next kernel would take the places of ours

    if (p.splits > 1) { // sums lie in the scratch as the threads hold them
        float4* part = (float4*)p.partial + (size_t)blockIdx.x * p.splits * MF * NF * THREADS + threadIdx.x;
        float4* mine = part + (size_t)blockIdx.y * MF * NF * THREADS;
        #pragma unroll
        for (int f = 0; f < MF * NF; f++) {
            float(&v)[4] = sum[f / NF][f % NF];
            mine[f * THREADS] = make_float4(v[0], v[1], v[2], v[3]);
            v[0] = v[1] = v[2] = v[3] = 0;
        }
        if (!last_to_arrive(p.arrived + blockIdx.x, p.splits)) return;
        #pragma unroll 1
        for (int split = 0; split < p.splits; split++, part += MF * NF * THREADS)
            #pragma unroll
            for (int f = 0; f < MF * NF; f++) {
                const float4 more = __ldcg(part + f * THREADS);
                float(&v)[4] = sum[f / NF][f % NF];
                v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
            }
    }
    #pragma unroll
    for (int i = 0; i < MF; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = row_of(i, h);
            if constexpr (Epilogue::PARTS) {
                static_assert(NF % 8 == 0, "a quad of lanes has whole pieces of 64");
                #pragma unroll
                for (int f0 = 0; f0 < NF; f0 += 8) {
                    const int c0 = r0 + warp_n + f0 * 8;
                    float top = -1e30f, part = 0;
                    #pragma unroll
                    for (int f = f0; f < f0 + 8; f++)
                        #pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (c0 + (f - f0) * 8 + 2 * t + e < p.R) top = fmaxf(top, sum[i][f][2 * h + e]);
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                    #pragma unroll
                    for (int f = f0; f < f0 + 8; f++)
                        #pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (c0 + (f - f0) * 8 + 2 * t + e < p.R) part += exp2_fast((sum[i][f][2 * h + e] - top) * LOG2E);
                    part += __shfl_xor_sync(~0u, part, 1);
                    part += __shfl_xor_sync(~0u, part, 2);
                    if (t == 0 && n < p.N && c0 < p.R) epilogue.part(n, c0 / 64, top, part);
                }
            }
            // Four columns in a row, of the 16 of sums f and f + 1: lanes 0 1 2 3 of a quad get those from 0, 8, 4, 12 on.
            const auto row = [&](int f) {
                const float *even = &sum[i][f][2 * h], *odd = &sum[i][f + 1][2 * h];
                const float a = __shfl_xor_sync(~0u, t % 2 ? even[0] : odd[0], 1), b = __shfl_xor_sync(~0u, t % 2 ? even[1] : odd[1], 1);
                return t % 2 ? make_float4(a, b, odd[0], odd[1]) : make_float4(even[0], even[1], a, b);
            };
            constexpr int EACH = Epilogue::PAIR ? 4 : 2;
            const auto column = [&](int j) { return (Epilogue::PAIR ? (r0 + warp_n) / 2 + j * 4 : r0 + warp_n + j * 8) + t / 2 * 4 + t % 2 * 8; };
            [[maybe_unused]] float4 old[Epilogue::ADDS ? NF / EACH : 1]; // all of a row is asked for before the first of it is waited for
            if constexpr (Epilogue::ADDS)
                #pragma unroll
                for (int j = 0; j < NF; j += EACH) old[j / EACH] = n < p.N && column(j) < p.R ? epilogue.old(n, column(j)) : float4{};
            #pragma unroll
            for (int j = 0; j < NF; j += EACH) {
                const bool there = n < p.N && column(j) < p.R;
                const float4 y = row(j);
                if constexpr (Epilogue::PAIR) {
                    const float4 up = row(j + 2);
                    if (there) epilogue.four(n, column(j), &y.x, &up.x);
                } else if constexpr (Epilogue::ADDS) {
                    if (there) epilogue.four(n, column(j), &y.x, old[j / EACH]);
                } else {
                    if (there) epilogue.four(n, column(j), &y.x);
                }
            }
        }
}

using Tile128x128 = TileShape<128, 128, 64, 64, 3>;
using Tile64x128 = TileShape<64, 128, 32, 64, 3>;
using Tile64x64 = TileShape<64, 64, 32, 32, 4>;
using Tile32x64 = TileShape<32, 64, 16, 32, 6>;
using TileHopper = TileShape<128, 128, 64, 64, 3, true>;

// The shape and the number of splits with the least predicted time in microseconds. The figures were fitted to an
// H100 (tests/bench_gpu sweep); what matters is their proportion. Of 1,024 of K a block takes `alone` if it is alone on
// its multiprocessor, and `full` if that has many.
struct TilePlan {
    int shape = 0, splits = 1;
    double least = 1e30;
    template <class S> void consider(const Context& ctx, int index, double alone, double full, int N, int R, int K) {
        const int64_t tiles = (int64_t)((N + S::BM - 1) / S::BM) * ((R + S::BN - 1) / S::BN), area = S::BM * S::BN;
        for (int s = 1; s <= 12; s++) {
            if (s > 1 && (s * 128 > K || tiles > MAX_TILES || tiles * s * area * 4 > (int64_t)PARTIAL_BYTES)) break;
            const double blocks = (double)((tiles * s + ctx.gpu->sms - 1) / ctx.gpu->sms); // of the busiest multiprocessor
            double time = 1 + std::max(alone, blocks * full) * K / 1024 / s;
            if (s > 1) time += 0.85 + s * (0.22 + 0.93 * (double)area / 16384) + (double)(tiles * s * area) * 8 / 5.5e6;
            if (time < least) shape = index, splits = s, least = time;
        }
    }
    // x_cols: K runs down x, which tiles of 32 tokens cannot take; of many tokens they were never the best.
    TilePlan(const Context& ctx, int N, int R, int K, bool x_cols = false) {
        if (ctx.invariant) return;
        consider<Tile128x128>(ctx, 0, 13, 9.8, N, R, K);
        consider<Tile64x128>(ctx, 1, 9.1, 6.5, N, R, K);
        consider<Tile64x64>(ctx, 2, 9, 3.4, N, R, K);
        if (!x_cols && N <= 128) consider<Tile32x64>(ctx, 3, 5.8, 2.6, N, R, K);
        if (ctx.gpu->hopper) consider<TileHopper>(ctx, 4, 9.6, 8.6, N, R, K);
    }
};

template <class S, bool X_COLS = false, bool W_COLS = false, class Epilogue>
void launch_tiles(Context& ctx, TileArgs p, Epilogue epilogue) {
    const int R = Epilogue::PAIR ? 2 * p.R : p.R;
    const dim3 grid((unsigned)((p.N + S::BM - 1) / S::BM * ((R + S::BN - 1) / S::BN)), (unsigned)p.splits);
    p.partial = ctx.gpu->partial, p.arrived = ctx.gpu->arrived;
    if (!p.ldx) p.ldx = X_COLS ? p.N : p.K;
    if (!p.ldw) p.ldw = W_COLS ? p.R : p.K;
    launch(ctx, tile_kernel<S, X_COLS, W_COLS, Epilogue>, grid, S::THREADS, S::SHARED, p, epilogue);
}
template <bool X_COLS = false, bool W_COLS = false, class Epilogue>
void tile_product(Context& ctx, TileArgs p, Epilogue epilogue) {
    const TilePlan plan(ctx, p.N, Epilogue::PAIR ? 2 * p.R : p.R, p.K + p.more, X_COLS);
    p.splits = plan.splits;
    switch (plan.shape) {
        case 0: return launch_tiles<Tile128x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 1: return launch_tiles<Tile64x128, X_COLS, W_COLS>(ctx, p, epilogue);
        case 2: return launch_tiles<Tile64x64, X_COLS, W_COLS>(ctx, p, epilogue);
        case 3: if constexpr (!X_COLS) return launch_tiles<Tile32x64, X_COLS, W_COLS>(ctx, p, epilogue); else break;
        default: return launch_tiles<TileHopper, X_COLS, W_COLS>(ctx, p, epilogue);
    }
}

// ---- lora_down. What the adapter's kernels need to know; masks are made anew wherever they are needed.
struct LoraArgs {
    const bf16* A;   // (m * rank, K)
    int N, K, rank, modules, module[3];
    bool dropping;
    float scale = 1; // 1 / (1 - p)
    Dropout dropout = {};
    LoraArgs(const Linear<bf16>& W, int N) : A(W.adapter.A), N(N), K(W.in), rank(W.adapter.rank), modules(W.adapter.modules), dropping(W.adapter.dropout) {
        for (int j = 0; j < 3; j++) module[j] = W.adapter.module[j];
        if (dropping) dropout = *W.adapter.dropout, scale = 1 / (1 - dropout.p);
    }
    __device__ int name(int j) const { return j == 0 ? module[0] : j == 1 ? module[1] : module[2]; } // (an index would cost a copy)
    // Eight neighbours of token n as a module sees them.
    __device__ uint4 drop(uint4 v, int n, int name, int k8) const {
        if (!dropping || n >= N) return v;
        const uint32_t kept = dropout_mask(dropout, dropout.token[n], name, k8);
        auto two = [&](uint32_t pair, int bit) { return pack(kept >> bit & 1 ? low(pair) * scale : 0, kept >> bit & 2 ? high(pair) * scale : 0); };
        return make_uint4(two(v.x, 0), two(v.y, 2), two(v.z, 4), two(v.w, 6));
    }
};
// A block owns 32 tokens by 32 rows of a module's A; its warps take K in turns, 32 at a time, with operands straight from
// memory as in stream_kernel.
__global__ void __launch_bounds__(256, 2) lora_down_kernel(bf16* h, const bf16* x, LoraArgs p) {
    __shared__ float sums[8][32][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, groups = (p.rank + 31) / 32;
    const int n0 = blockIdx.x * 32, j = blockIdx.y / groups, r0 = blockIdx.y % groups * 32, name = p.name(j);
    wait_for_previous();
    float sum[4][2][4] = {};
    for (int k = warp * 32 + 8 * t; k < (p.K + 31) / 32 * 32; k += 256) {
        uint4 a[4], b[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = n0 + i * 8 + g < p.N && k < p.K ? *(const uint4*)(x + (size_t)(n0 + i * 8 + g) * p.K + k) : uint4{};
        #pragma unroll
        for (int c = 0; c < 4; c++) b[c] = r0 + c * 8 + g < p.rank && k < p.K ? *(const uint4*)(p.A + (size_t)(j * p.rank + r0 + c * 8 + g) * p.K + k) : uint4{};
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = p.drop(a[i], n0 + i * 8 + g, name, k / 8);
        #pragma unroll
        for (int c = 0; c < 4; c++)
            #pragma unroll
            for (int m = 0; m < 2; m++) {
                mma(sum[c][m], a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y, b[c].x, b[c].y);
                mma(sum[c][m], a[2 * m].z, a[2 * m + 1].z, a[2 * m].w, a[2 * m + 1].w, b[c].z, b[c].w);
            }
    }
    let_next_start();
    #pragma unroll
    for (int c = 0; c < 4; c++)
        #pragma unroll
        for (int e = 0; e < 4; e++) // token e * 8 + g
            *(float2*)&sums[warp][e * 8 + g][c * 8 + 2 * t] = make_float2(sum[c][e / 2][e % 2 * 2], sum[c][e / 2][e % 2 * 2 + 1]);
    __syncthreads();
    const int n = threadIdx.x / 8, r = threadIdx.x % 8 * 4;
    float4 all = {};
    for (int w = 0; w < 8; w++) {
        const float4 v = *(const float4*)&sums[w][n][r];
        all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
    }
    if (n0 + n < p.N && r0 + r < p.rank)
        *(uint2*)(h + (size_t)(n0 + n) * p.modules * p.rank + j * p.rank + r0 + r) = make_uint2(pack(all.x, all.y), pack(all.z, all.w));
}
inline void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N) {
    const LoraArgs p(W, N);
    launch(ctx, lora_down_kernel, dim3((N + 31) / 32, p.modules * ((p.rank + 31) / 32)), 256, 0, h, x, p);
}

// x W^T, by the road that suits N; an adapter's h and s B are further columns of x and W.
template <class Epilogue>
void product_gpu(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N) {
    const int R = Epilogue::PAIR ? W.rows[0] : W.out();
    const Adapter<bf16>& a = W.adapter;
    if (N <= STREAM_TOKENS && !ctx.invariant && !a.rank) {
        stream_product(ctx, {x, nullptr, nullptr, nullptr, 0, W.w[0], N, W.in, R}, epilogue);
        return;
    }
    TileArgs p = {x, W.w[0], N, W.in, R};
    p.early = N <= 128;
    if (a.rank) {
        lora_down_gpu(ctx, a.h, x, W, N);
        p.more_x = a.h, p.more_W = a.B, p.more = a.modules * a.rank;
    }
    tile_product(ctx, p, epilogue);
}
// The same of norm_rows(stream); `normed` (N,K) holds these where the product does not make them on its way.
template <class Epilogue>
void norm_product_gpu(Context& ctx, Epilogue epilogue, bf16* normed, const float* stream, const bf16* norm, const Linear<bf16>& W, int N, float eps) {
    if (N > NORM_TOKENS || ctx.invariant || W.adapter.rank) {
        rmsnorm_gpu(ctx, normed, stream, norm, N, W.in, eps);
        return product_gpu(ctx, epilogue, normed, W, N);
    }
    stream_product(ctx, {nullptr, nullptr, stream, norm, eps, W.w[0], N, W.in, Epilogue::PAIR ? W.rows[0] : W.out()}, epilogue);
}

inline void linear_gpu(Context& ctx, bf16* out, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, StoreEpilogue{out, (size_t)W.out()}, x, W, N);
}
inline void linear_add_gpu(Context& ctx, float* out, const float* residual, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, AddEpilogue{out, residual, (size_t)W.out()}, x, W, N);
}
inline void norm_linear_gpu(Context& ctx, bf16* out, bf16* normed, const float* stream, const bf16* norm, const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, StoreEpilogue{out, (size_t)W.out()}, normed, stream, norm, W, N, eps);
}

inline void linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, const bf16* x, const Linear<bf16>& W, int N) {
    product_gpu(ctx, SwigluEpilogue{out, gate_up, (size_t)W.rows[0]}, x, W, N);
}
inline void norm_linear_swiglu_gpu(Context& ctx, bf16* out, bf16* gate_up, bf16* normed, const float* x, const bf16* w, const Linear<bf16>& W, int N, float eps) {
    norm_product_gpu(ctx, SwigluEpilogue{out, gate_up, (size_t)W.rows[0]}, normed, x, w, W, N, eps);
}

struct LogitsEpilogue {
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = false;
    float* out; // (R,V)
    size_t V;
    __device__ void begin() {}
    __device__ void ask(bool, int, int) {}
    __device__ void one(bool there, int n, int r, float y, bool) { if (there) out[n * V + r] = y; }
    __device__ void four(int n, int r, const float* y) { *(float4*)(out + n * V + r) = make_float4(y[0], y[1], y[2], y[3]); }
    __device__ void end(int) {}
};

inline void head_gpu(Context& ctx, float* logits, bf16* picked, const bf16* x, const int* rows, const Linear<bf16>& W, int R) {
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
    product_gpu(ctx, LogitsEpilogue{logits, (size_t)W.out()}, picked, W, R);
}

struct LossEpilogue { // logits, and of every 64 of a row the largest and sum e^(logit - largest)
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = true;
    float* out; // (R,V)
    size_t V;
    float2* parts; // (R,pieces)
    size_t pieces;
    __device__ void four(int n, int r, const float* y) { *(float4*)(out + n * V + r) = make_float4(y[0], y[1], y[2], y[3]); }
    __device__ void part(int n, int piece, float top, float sum) { parts[n * pieces + piece] = make_float2(top, sum); }
};

inline void head_loss_gpu(Context& ctx, float* loss, bf16* dlogits, float* logits, bf16* picked, float* parts, const bf16* x, const int* rows, const int* target, float scale,
                          const Linear<bf16>& W, int R) {
    const int V = W.out(), pieces = (V + 63) / 64;
    const LossEpilogue epilogue = {logits, (size_t)V, (float2*)parts, (size_t)pieces};
    const TileArgs p = {picked, W.w[0], R, W.in, V};
    launch(ctx, pick_rows_kernel, R, 256, 0, picked, x, rows, W.in);
    if (ctx.gpu->hopper) launch_tiles<TileHopper>(ctx, p, epilogue);
    else launch_tiles<Tile128x128>(ctx, p, epilogue);
    launch(ctx, cross_entropy_kernel, R, 1024, 0, loss, dlogits, logits, (const float2*)parts, pieces, target, scale, V);
}

struct ScatterEpilogue {
    static constexpr bool PAIR = false, ADDS = false, MASKS = false, PARTS = false;
    bf16* out;       // (., C)
    const int* rows; // (R)
    size_t C;
    __device__ void four(int n, int i, const float* y) { *(uint2*)(out + rows[n] * C + i) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3])); }
};
inline void head_backward_gpu(Context& ctx, bf16* dnormed, const bf16* dlogits, size_t ld, const int* rows, const Linear<bf16>& W, int R) {
    TileArgs p = {dlogits, W.w[0], R, W.out(), W.in};
    p.ldx = (int)ld;
    tile_product<false, true>(ctx, p, ScatterEpilogue{dnormed, rows, (size_t)W.in});
}

struct DropEpilogue { // stores the sum, whose further columns were dropped as a module's input was
    static constexpr bool PAIR = false, ADDS = false, MASKS = true, PARTS = false;
    bf16* out; // (N,R)
    size_t R;
    Dropout dropout;
    int module;
    float scale;
    __device__ uint32_t kept(int n, int k8) const { return dropout_mask(dropout, dropout.token[n], module, k8); }
    __device__ void four(int n, int r, const float* y) { *(uint2*)(out + n * R + r) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3])); }
};
// dx[n][k] += sum_j drop_j(A_j^T dh_j[n])[k]. A block owns 64 tokens by 64 columns, a warp 16 of the tokens; 32 rows of
// an A pass through shared memory at a time.
__global__ void __launch_bounds__(128, 3) lora_backward_input_kernel(bf16* dx, const bf16* dh, LoraArgs p) {
    constexpr int CHUNKS = 8, F = CHUNKS; // of 16 bytes a row, eights of columns
    __shared__ __align__(128) uint4 tile[32 * CHUNKS];
    const uint32_t shared = shared_address(tile);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n0 = blockIdx.x * 64 + warp * 16, c0 = blockIdx.y * CHUNKS * 8;
    const size_t ld = (size_t)p.modules * p.rank;
    wait_for_previous();
    float sum[F][4];
    #pragma unroll
    for (int f = 0; f < F; f++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = n0 + h * 8 + g, c = c0 + f * 8 + 2 * t;
            const uint32_t old = n < p.N && c < p.K ? *(const uint32_t*)(dx + (size_t)n * p.K + c) : 0;
            sum[f][2 * h] = low(old), sum[f][2 * h + 1] = high(old);
        }
    for (int j = 0; j < p.modules; j++) {
        float part[F][4] = {};
        for (int r0 = 0; r0 < p.rank; r0 += 32) {
            __syncthreads();
            for (int i = threadIdx.x; i < 32 * CHUNKS; i += 128) {
                const int row = i / CHUNKS, chunk = i % CHUNKS;
                const bool there = r0 + row < p.rank && c0 + chunk * 8 < p.K;
                tile[row * CHUNKS + (chunk ^ row % 8)] = there ? *(const uint4*)(p.A + (size_t)(j * p.rank + r0 + row) * p.K + c0 + chunk * 8) : uint4{};
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
                    const int row = k * 16 + lane % 16, chunk = f * 2 + lane / 16;
                    ldmatrix_transposed(b, shared + (row * CHUNKS + (chunk ^ row % 8)) * 16);
                    mma(part[2 * f], a[0], a[1], a[2], a[3], b[0], b[1]);
                    mma(part[2 * f + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
                }
            }
        }
        #pragma unroll
        for (int f = 0; f < F; f += 2) { // a lane of a quad makes the mask of one token and one eight columns, for all four
            const int n = n0 + t % 2 * 8 + g;
            const uint32_t mine = p.dropping && n < p.N ? dropout_mask(p.dropout, p.dropout.token[n], p.name(j), (c0 >> 3) + f + t / 2) : 0xff;
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const uint32_t kept = __shfl_sync(~0u, mine, (lane & ~3) + e) >> 2 * t;
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
            if (n < p.N && c < p.K) *(uint32_t*)(dx + (size_t)n * p.K + c) = pack(sum[f][2 * h], sum[f][2 * h + 1]);
        }
}
// What the adapter adds rides in the product with W, as columns of dh and rows of A, unless modules share x and each
// drops it in its own way: then dy W is stored, rounded, and added to.
inline void linear_backward_input_gpu(Context& ctx, bf16* dx, bf16* dh, const bf16* dy, const Linear<bf16>& W, int N) {
    const LoraArgs lora(W, N);
    const int columns = lora.modules * lora.rank;
    const bool rides = columns && (lora.modules == 1 || !lora.dropping);
    if (columns) tile_product<false, true>(ctx, {dy, W.adapter.B, N, W.out(), columns}, StoreEpilogue{dh, (size_t)columns});
    TileArgs p = {dy, W.w[0], N, W.out(), W.in};
    if (rides) p.more_x = dh, p.more_W = W.adapter.A, p.more = columns;
    if (rides && lora.dropping) return tile_product<false, true>(ctx, p, DropEpilogue{dx, (size_t)W.in, lora.dropout, lora.module[0], lora.scale});
    tile_product<false, true>(ctx, p, StoreEpilogue{dx, (size_t)W.in});
    if (columns && !rides) launch(ctx, lora_backward_input_kernel, dim3((N + 63) / 64, (W.in + 63) / 64), 128, 0, dx, dh, lora);
}

inline void linear_backward_weight_gpu(Context& ctx, float* dW, const bf16* dy, size_t ld, const bf16* x, int N, int out, int in) {
    TileArgs p = {dy, x, out, N, in};
    p.ldx = (int)ld;
    tile_product<true, true>(ctx, p, AddEpilogue{dW, dW, (size_t)in});
}

struct LoraUpEpilogue { // dB, of the rows and columns that belong together
    static constexpr bool PAIR = false, ADDS = true, MASKS = false, PARTS = false;
    float* dB; // (out, m * rank)
    float s;
    int rank, columns, first[3], last[3]; // rows of module j
    __device__ bool own(int r, int c) const { return r >= first[c / rank] && r < last[c / rank]; }
    __device__ float4 old(int r, int c) const { return own(r, c) ? *(const float4*)(dB + (size_t)r * columns + c) : float4{}; }
    __device__ void four(int r, int c, const float* y, float4 old) {
        if (own(r, c)) *(float4*)(dB + (size_t)r * columns + c) = make_float4(old.x + s * y[0], old.y + s * y[1], old.z + s * y[2], old.w + s * y[3]);
    }
};
// dA_j += dh_j^T drop_j(x). A block owns 32 rows of an A by 128 columns and a part of the tokens, 64 at a time through
// shared memory; a warp owns 16 of the columns. The last block of a tile to arrive adds the parts in order.
__global__ void __launch_bounds__(256) lora_down_weight_kernel(float* dA, const bf16* dh, const bf16* x, LoraArgs p, float* partial, int* arrived) {
    __shared__ __align__(128) uint4 x_tile[64 * 16];
    __shared__ __align__(128) uint4 h_tile[64 * 5]; // rows of 64 bytes, 80 apart: eight of them in different banks
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
        for (int i = 0; i < 4; i++) v[i] = n0 + row + i * 16 < last && c0 + chunk * 8 < p.K ? *(const uint4*)(x + (size_t)(n0 + row + i * 16) * p.K + c0 + chunk * 8) : uint4{};
        if (n0 + h_row < last && r0 + h_chunk * 8 < p.rank) h = *(const uint4*)(dh + (n0 + h_row) * ld + j * p.rank + r0 + h_chunk * 8);
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
    if (gridDim.z > 1) {
        float4 *part = (float4*)partial + (size_t)tile * gridDim.z * 1024 + threadIdx.x, *mine = part + (size_t)blockIdx.z * 1024;
        #pragma unroll
        for (int f = 0; f < 4; f++) {
            float(&v)[4] = sum[f / 2][f % 2];
            mine[f * 256] = make_float4(v[0], v[1], v[2], v[3]);
            v[0] = v[1] = v[2] = v[3] = 0;
        }
        if (!last_to_arrive(arrived + tile, gridDim.z)) return;
        for (int z = 0; z < (int)gridDim.z; z++, part += 1024)
            #pragma unroll
            for (int f = 0; f < 4; f++) {
                const float4 more = __ldcg(part + f * 256);
                float(&v)[4] = sum[f / 2][f % 2];
                v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
            }
    }
    #pragma unroll
    for (int f = 0; f < 4; f++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = r0 + f / 2 * 16 + h * 8 + lane / 4, c = c0 + warp * 16 + f % 2 * 8 + lane % 4 * 2;
            if (r >= p.rank || c >= p.K) continue;
            float2* to = (float2*)(dA + (size_t)(j * p.rank + r) * p.K + c);
            const float2 old = *to;
            *to = make_float2(old.x + sum[f / 2][f % 2][2 * h], old.y + sum[f / 2][f % 2][2 * h + 1]);
        }
}
inline void lora_backward_weight_gpu(Context& ctx, float* dA, float* dB, const bf16* dh, const bf16* dy, const bf16* x, const Linear<bf16>& W, int N) {
    const LoraArgs p(W, N);
    const Adapter<bf16>& a = W.adapter;
    const int columns = (p.K + 127) / 128, groups = p.modules * ((p.rank + 31) / 32), tiles = columns * groups;
    if (tiles > MAX_TILES) DIE("an adapter of rank %d on %d columns is more than the GPU's kernels take", p.rank, p.K);
    const int parts = std::max(1, std::min({(N + 63) / 64, 6 * ctx.gpu->sms / tiles, (int)(PARTIAL_BYTES / (16384 * (size_t)tiles))}));
    launch(ctx, lora_down_weight_kernel, dim3(columns, groups, parts), 256, 0, dA, dh, x, p, ctx.gpu->partial, ctx.gpu->arrived);
    LoraUpEpilogue up = {dB, a.s, a.rank, a.modules * a.rank, {}, {}};
    for (int j = 0; j < a.modules; j++) {
        for (int b = 0; b < a.block[j]; b++) up.first[j] += W.rows[b];
        up.last[j] = up.first[j] + W.rows[a.block[j]];
    }
    tile_product<true, true>(ctx, {dy, a.h, W.out(), N, up.columns}, up);
}
