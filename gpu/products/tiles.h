// gpu/products/tiles.h: products of many tokens on any card: tiles, by mma.sync.
#pragma once
#include "gpu/products/epilogues.h"
#include "qwen3.cu"
#include <climits>

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
// Ownership. A warp owns S::WARP_TOKENS by S::WARP_ROWS of the tile, in fragments of 16 tokens by eight rows of W, in
// the layout of mma: lane 4 g + t holds sum[i][j][0 .. 3] of fragment (i, j): rows 2 t and 2 t + 1 of token g, then the
// same rows of token g + 8. PAIR: the tile has 16 rows of gate and 16 rows of up in turn, so that a lane holds the same
// columns of both, two fragments apart.
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
    // Scales of e4m3 operands (see multiply_groups; two e4m3 then count as one number): W's for 128 rows by 128 columns
    // (., groups), x's for 128 numbers of a token (groups, pitch). Scales past the end may be read.
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

// One thread's copies in a stage of an operand: `chunk` of COUNT rows, STEP rows apart, from `row` on.
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

    // The source of a step's copy: the adapter's columns or the operand's own, from number i of `in` numbers on.
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
    // The mask of 32 rows from row 32 j of the part on; this lane's rows begin at bit 0. All lanes of the warp call it.
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
