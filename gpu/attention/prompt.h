// gpu/attention/prompt.h: attention for prompts and training, on any card.
#pragma once
#include "gpu/attention/tiles.h"
#include "qwen3.cu"

// ---- Attention for prompts: Book I's `attention` (Dao, "FlashAttention-2", 2023)
// A block of 128 threads owns 128 query rows: all G heads of 128 / G neighbouring tokens that share a KV head. Keys and
// values pass through shared memory, 64 at a time, in two stages. A warp owns 32 of the rows, with their scores and
// sums in registers; a thread has two columns of every eight, of four rows (see mma). The tokens of a tile may belong
// to several sequences: these are taken one after another, each computing all rows and keeping its own. Where tiles are
// too few for the GPU, the keys are split: blocks that share a tile leave parts, which attention_sum_kernel joins.
// Grid (K, tiles of tokens, splits); shared memory (128 + 4 x 64) rows of D numbers: 96 KB for D = 128, two blocks a
// multiprocessor. Bound by the tensor cores and by registers: for D = 128 all 255 are in use.
constexpr int QUERY_ROWS = 128, KEYS = 64;

struct AttentionArgs {
    bf16* out;        // (N,HD)
    float* lse;       // (N,H) or null
    const bf16* q;    // (N,HD)
    const bf16 *keys, *values; // one layer's cache
    Batch b;
    int first, H, K;  // tokens from `first` on
    float* partial;   // (N - first, H, splits, D + 2): see join_splits
};

// The rows that a block owns: row r is head kv G + r % G of token begin + r / G.
struct QueryTile {
    int kv, G, begin, end; // of tokens begin .. end - 1
    __device__ QueryTile(const AttentionArgs& p, int kv, int tile) : kv(kv), G(p.H / p.K) {
        const int tokens = QUERY_ROWS / G;
        begin = p.first + tile * tokens, end = min(p.b.N, begin + tokens);
    }
    __device__ int token(int r) const { return begin + r / G; }
    __device__ size_t row(int r, int n, int H) const { return (size_t)n * H + kv * G + r - (n - begin) * G; } // of q
};

template <int D>
__device__ __forceinline__ void load_queries(const AttentionArgs& p, const QueryTile& tile, uint32_t q_tile) {
    const HeadRows<D> mine;
    for (int r = mine.row; r < QUERY_ROWS; r += mine.STEP) {
        const int n = tile.token(r);
        const bool there = n < tile.end;
        const bf16* from = there ? p.q + tile.row(r, n, p.H) * D + mine.chunk * 8 : p.q;
        copy_async(q_tile + HeadTile<D>::at(r, mine.chunk), from, there);
    }
}

// Passes keys and values of a sequence, up to position `to`, through two stages of shared memory. A tile has four
// pages, whose numbers are read a tile ahead of the copies that need them.
template <int D> struct PassingPages {
    static constexpr int TILE = KEYS * HeadTile<D>::ROW;
    const AttentionArgs& p;
    const int* table; // the sequence's pages
    int kv, to;
    uint32_t k_tiles, v_tiles;
    HeadRows<D> mine;
    int page[KEYS / PAGE];

    __device__ __forceinline__ static uint32_t stage(int key0) { return key0 / KEYS % 2 * TILE; }
    __device__ __forceinline__ void next_pages(int key0) {
        #pragma unroll
        for (int j = 0; j < KEYS / PAGE; j++) page[j] = key0 + j * PAGE < to ? table[key0 / PAGE + j] : 0;
    }
    __device__ __forceinline__ void copy(uint32_t tile, const bf16* cache, int key0) const {
        #pragma unroll
        for (int i = 0; i < KEYS / mine.STEP; i++) {
            const int r = mine.row + i * mine.STEP; // of page r / PAGE, the same for all threads
            const size_t at = kv_offset(page[i * mine.STEP / PAGE], kv, r % PAGE, p.K, D) + mine.chunk * 8;
            copy_async(tile + HeadTile<D>::at(r, mine.chunk), cache + at, key0 + r < to);
        }
        commit_copies();
    }
    __device__ __forceinline__ void copy(int key0) const {
        copy(k_tiles + stage(key0), p.keys, key0);
        copy(v_tiles + stage(key0), p.values, key0);
    }
};

// A lane's part of its warp's 32 rows: [i][h] belongs to row 16 i + 8 h + lane / 4; mixed has the layout of
// multiply_rows' s.
template <int D> struct RowSums {
    float maximum[2][2], sum[2][2] = {}, mixed[2][D / 8][4] = {};
    __device__ __forceinline__ RowSums() { // (a row may see no key of a split: infinities would make it NaN)
        #pragma unroll
        for (int i = 0; i < 2; i++) maximum[i][0] = maximum[i][1] = -1e30f;
    }
};

// The online softmax: scores s become weights 2^(scale (s - maximum)); what was summed so far shrinks to the new
// maximum. `sum` has this lane's columns alone: the four lanes of a row are added at the end.
template <int D>
__device__ __forceinline__ void online_softmax(RowSums<D>& rows, float (&s)[2][KEYS / 8][4], float scale) {
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float& maximum = rows.maximum[i][h];
            float top = maximum;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
            top = quad_max(top);
            const float shrink = exp2_fast((maximum - top) * scale), base = top * scale;
            maximum = top;
            float weights = 0;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                #pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    weights += s[i][j][e] = exp2_fast(fmaf(s[i][j][e], scale, -base));
            rows.sum[i][h] = rows.sum[i][h] * shrink + weights;
            #pragma unroll
            for (int j = 0; j < D / 8; j++) rows.mixed[i][j][2 * h] *= shrink, rows.mixed[i][j][2 * h + 1] *= shrink;
        }
}

// Rows of tokens n0 .. n1 - 1 go to `out`, or, if the keys are split, to `partial`.
template <int D>
__device__ __forceinline__ void store_rows(const AttentionArgs& p, const QueryTile& tile, const RowSums<D>& rows,
                                           int n0, int n1, float scale) {
    const int first_row = threadIdx.x / 32 * 32;
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float total = quad_sum(rows.sum[i][h]), maximum = rows.maximum[i][h];
            const int r = first_row + score_row(i, 2 * h), n = tile.token(r);
            if (n < n0 || n >= n1) continue;
            const size_t row = tile.row(r, n, p.H);
            if (gridDim.z > 1) {
                float* part = p.partial + ((row - (size_t)p.first * p.H) * gridDim.z + blockIdx.z) * (D + 2);
                #pragma unroll
                for (int j = 0; j < D / 8; j++)
                    *(float2*)(part + score_column(j, 0)) = *(const float2*)&rows.mixed[i][j][2 * h];
                *(float2*)(part + D) = make_float2(maximum * scale, total);
                continue;
            }
            store_row(p.out + row * D, rows.mixed[i], h, 1 / total);
            if (p.lse) p.lse[row] = maximum / sqrtf((float)D) + logf(total); // all four lanes of a row
        }
}

// All rows of the tile with the keys of one sequence, whose tokens are n0 .. n1 - 1.
template <int D>
__device__ __forceinline__ void attend_sequence(const AttentionArgs& p, const QueryTile& tile, int n0, int n1,
                                                uint32_t q_tile) {
    constexpr int ROW = HeadTile<D>::ROW;
    const Batch& b = p.b;
    const float scale = LOG2E / sqrtf((float)D); // powers of 2, not of e
    const int longest = b.pos[n1 - 1] + 1, shortest = b.pos[n0] + 1; // keys that the last and the first token see
    const int key_tiles = (longest + KEYS - 1) / KEYS, splits = gridDim.z, split = blockIdx.z;
    const int from = key_tiles * split / splits * KEYS, to = min(longest, key_tiles * (split + 1) / splits * KEYS);
    const int first_row = threadIdx.x / 32 * 32; // of this warp
    int limit[2][2]; // keys that this lane's rows see; rows of other sequences compute what nobody keeps
    #pragma unroll
    for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = tile.token(first_row + score_row(i, 2 * h));
            limit[i][h] = n >= n0 && n < n1 ? b.pos[n] + 1 : to;
        }
    const uint32_t k_tiles = q_tile + QUERY_ROWS * ROW, v_tiles = k_tiles + 2 * KEYS * ROW;
    PassingPages<D> pages = {p, b.pages + (size_t)b.seq[n0] * b.max_pages, tile.kv, to, k_tiles, v_tiles};
    RowSums<D> rows;
    __syncthreads(); // the sequence before this one is done with the tiles
    pages.next_pages(from);
    pages.copy(from);
    pages.next_pages(from + KEYS);
    for (int key0 = from; key0 < to; key0 += KEYS) {
        wait_for_copies<0>();
        __syncthreads();
        pages.copy(key0 + KEYS);
        pages.next_pages(key0 + 2 * KEYS);
        float s[2][KEYS / 8][4] = {};
        multiply_rows<D, 2, KEYS / 16>(s, q_tile + first_row * ROW, k_tiles + pages.stage(key0));
        if (key0 + KEYS > shortest)
            each_score(s, [&](float& x, int i, int j, int e) {
                if (key0 + score_column(j, e) >= limit[i][e / 2]) x = -INFINITY;
            });
        online_softmax(rows, s, scale);
        add_weighted_rows<D, 2, KEYS / 16>(rows.mixed, s, v_tiles + pages.stage(key0));
    }
    wait_for_copies<0>();
    store_rows(p, tile, rows, n0, n1, scale);
}

template <int D> __global__ void __launch_bounds__(128, 2) attention_kernel(AttentionArgs p) {
    extern __shared__ __align__(128) uint4 tiles[]; // of queries; two stages of keys, two of values
    const QueryTile tile(p, blockIdx.x, gridDim.y - 1 - blockIdx.y); // later tokens see more keys: long blocks first
    wait_for_previous();
    load_queries<D>(p, tile, shared_address(tiles));
    for (int n0 = tile.begin, n1; n0 < tile.end; n0 = n1) {
        for (n1 = n0 + 1; n1 < tile.end && p.b.seq[n1] == p.b.seq[n0]; n1++) {}
        if (p.b.seq[n0] >= 0) attend_sequence<D>(p, tile, n0, n1, shared_address(tiles));
    }
}

constexpr int BLOCKS_A_SM = 2;  // blocks of attention_kernel that share a multiprocessor
// Keys that are worth a block of their own: writing and joining parts takes 20 us, on Hopper as long as 1,024 keys.
constexpr int LEAST_KEYS = 256, HOPPER_LEAST_KEYS = 1024;
