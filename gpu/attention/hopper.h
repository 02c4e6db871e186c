// gpu/attention/hopper.h: attention for prompts and training, on Hopper.
#pragma once
#include "gpu/hopper.h"
#include "qwen3.cu"

// ---- Attention of prompts (qwen3.cu, attention_kernel) on Hopper, for D = 128. Grid: as many blocks as there are
// multiprocessors; a block takes the next tile of 128 query rows when it has room for one; each of two warpgroups owns
// 64 of them. Queries, keys and values, 128 at a time, pass through shared memory in two stages each; the lanes of a
// warp issue a TMA copy per page. A warpgroup multiplies the scores of the next keys and the values of the last ones at
// the same time, and computes weights from scores while the latter runs. Bound by the tensor cores and by the
// exponentials; short sequences by memory.
//
// A page's keys, 16 rows of 128 numbers, lie as (2 groups, 2 halves, 8 rows, 64 numbers), so that all groups of eight
// keys of a tile are equally far apart, and so do its values. Page contents past a sequence's end have weight 0, and
// are finite.
struct HopperAttention {
    static constexpr int D = 128, KEYS = 128, GROUP = 2048, HALF = 1024;     // bytes from a group, a half, to the next
    static constexpr int TILE = 128 * D * 2, SHARED = 6 * TILE + 1024;
    static constexpr int QUERIES = 0, KEYS_AT = 2, VALUES = 4; // the first of two tiles each
    static constexpr int CONSUMERS = 256, THREADS = 384;
    struct Maps {
        CUtensorMap q, keys, values;
    };
    const AttentionArgs& p;
    int tiles, splits;
    int* taken; // units taken from the counter; blocks that have ended
    struct Shared { // shared among the warps of a block
        int unit[2]; // owner of the queries in each of the two stages, -1 at the end
        Ring<2> queries, keys, values; // where the next copies go
        bool ended;
    };
    Shared& told;
    uint32_t shared, barriers; // tiles, and a pair of mbarriers for each
    __device__ uint32_t tile(int i) const { return shared + i * TILE; }
    __device__ uint32_t full(int i) const { return barriers + 16 * i; }
    __device__ uint32_t empty(int i) const { return barriers + 16 * i + 8; }

    // A unit is a KV head's tile of queries and a split of its keys. The last tokens come first: those of a long
    // sequence have the most keys, so the last units are short.
    __device__ QueryTile tile_of(int unit) const { return QueryTile(p, unit % p.K, tiles - 1 - unit / p.K / splits); }
    __device__ int split_of(int unit) const { return unit / p.K % splits; }

    // f(n0, n1, from, to) for each sequence in the tile: its tokens there, and the split's keys.
    template <class F> __device__ __forceinline__ void each_sequence(const QueryTile& t, int split, F f) const {
        for (int n0 = t.begin, n1; n0 < t.end; n0 = n1) {
            if (p.b.seq[t.end - 1] == p.b.seq[n0]) n1 = t.end; // (the common case)
            else
                for (n1 = n0 + 1; n1 < t.end && p.b.seq[n1] == p.b.seq[n0]; n1++) {}
            const int longest = p.b.pos[n1 - 1] + 1, key_tiles = (longest + KEYS - 1) / KEYS;
            const int from = key_tiles * split / splits * KEYS;
            if (p.b.seq[n0] >= 0) f(n0, n1, from, min(longest, key_tiles * (split + 1) / splits * KEYS));
        }
    }

    // Two producer warps alternate units: while one copies, the other looks up the page numbers of its unit. A block's
    // first two units give an even start, a long one and a short one; the others come from a counter.
    __device__ __forceinline__ void produce(const Maps& maps, int me) const {
        const int lane = threadIdx.x % 32, blocks = gridDim.x, count = tiles * splits * p.K;
        const auto copy = [&](int first, const CUtensorMap& map, Ring<2>& ring, int page, int kv) {
            const int i = first + ring.stage;
            barrier_wait(empty(i), ring.parity ^ 1);
            if (lane == 0) barrier_arrive_expecting(full(i), TILE);
            __syncwarp();
            if (lane < KEYS / PAGE) copy_box(tile(i) + lane * (TILE / 8), map, full(i), 0, 0, 0, (page * p.K + kv) * 2);
            ring.next();
        };
        if (me) pass_turn(0);
        for (int unit = me ? 2 * blocks - 1 - (int)blockIdx.x : blockIdx.x;;) {
            const QueryTile t = tile_of(unit);
            const auto page_of = [&](int n, int key0, int to) { // this lane's; past the end the last one again
                const int* table = p.b.pages + (size_t)p.b.seq[n] * p.b.max_pages;
                return lane < KEYS / PAGE ? table[min(key0 / PAGE + lane, (to - 1) / PAGE)] : 0;
            };
            if (unit < count) // from here on it is in the first-level cache
                each_sequence(t, split_of(unit), [&](int n0, int, int from, int to) {
                    if (from < to) asm volatile("" ::"r"(page_of(n0, from, to)));
                });
            wait_for_turn(me);
            if (unit >= count) break;
            int after = -1; // the unit after the other warp's
            Ring<2> queries = told.queries, keys = told.keys, values = told.values;
            const int q = QUERIES + queries.stage;
            barrier_wait(empty(q), queries.parity ^ 1);
            if (lane == 0) {
                told.unit[queries.stage] = unit;
                barrier_arrive_expecting(full(q), QUERY_ROWS / t.G * t.G * D * 2);
                for (int c = 0; c < D; c += 64)
                    copy_box(tile(q) + c * QUERY_ROWS * 2, maps.q, full(q), c, t.kv * t.G, t.begin);
            }
            queries.next();
            each_sequence(t, split_of(unit), [&](int n0, int, int from, int to) {
                int page = from < to ? page_of(n0, from, to) : 0;
                for (int key0 = from; key0 < to; key0 += KEYS) {
                    const int next = key0 + KEYS < to ? page_of(n0, key0 + KEYS, to) : 0;
                    if (key0 == from) copy(KEYS_AT, maps.keys, keys, page, t.kv);
                    if (key0 + KEYS < to) copy(KEYS_AT, maps.keys, keys, next, t.kv);
                    else if (lane == 0 && after < 0) after = atomicAdd(taken, 1); // (late: a free block takes it)
                    copy(VALUES, maps.values, values, page, t.kv);
                    page = next;
                }
            });
            if (lane == 0 && after < 0) after = atomicAdd(taken, 1);
            unit = 2 * blocks + __shfl_sync(~0u, after, 0);
            if (lane == 0) told.queries = queries, told.keys = keys, told.values = values;
            pass_turn(!me);
        }
        const Ring<2> queries = told.queries;
        if (!told.ended && lane == 0) {
            barrier_wait(empty(QUERIES + queries.stage), queries.parity ^ 1);
            told.unit[queries.stage] = -1;
            barrier_arrive(full(QUERIES + queries.stage));
            if (atomicAdd(taken + 1, 1) == blocks - 1) taken[0] = taken[1] = 0; // no block takes another unit
        }
        if (told.ended) return;
        __syncwarp();
        if (lane == 0) told.ended = true;
        pass_turn(!me);
    }
    __device__ static void wait_for_turn(int me) { asm volatile("barrier.sync %0, 64;" ::"r"(2 + me) : "memory"); }
    __device__ static void pass_turn(int to) { asm volatile("barrier.arrive %0, 64;" ::"r"(2 + to) : "memory"); }

    // s = q k^T of this warpgroup's 64 rows and a tile of keys; mixed += weights v. Both run asynchronously.
    using Scores = float[1][KEYS / 8][4];
    using Mixed = float[1][D / 8][4];
    __device__ __forceinline__ void multiply_keys(Scores& s, int queries, int i) const {
        const uint32_t q = tile(queries) + threadIdx.x / 128 * (64 * 128), k = tile(i);
        wgmma_begin();
        #pragma unroll
        for (int d = 0; d < D / 16; d++)
            wgmma<KEYS, false, false>(s[0], wgmma_operand(q + d / 4 * (QUERY_ROWS * 128) + d % 4 * 32, 0),
                                      wgmma_operand(k + d / 4 * HALF + d % 4 * 32, 0, GROUP), d);
        wgmma_commit();
    }
    __device__ __forceinline__ void add_values(Mixed& mixed, const uint32_t (&weights)[KEYS / 16][4], int i,
                                               bool more) const {
        wgmma_begin();
        #pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            wgmma<128, true>(mixed[0], weights[k], wgmma_operand(tile(i) + k * 2 * GROUP, HALF, GROUP), more || k);
        wgmma_commit();
    }

    // Scores of keys from key0 on become weights; rows see keys below limit[h]. shrink[h]: factor of the earlier sums.
    __device__ __forceinline__ static void soften(Scores& s, float (&maximum)[2], float (&sum)[2], float (&shrink)[2],
                                                  const int (&limit)[2], bool masked, int key0, float scale) {
        if (masked)
            each_score(s, [&](float& x, int, int j, int e) {
                if (key0 + score_column(j, e) >= limit[e / 2]) x = -INFINITY;
            });
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = maximum[h], weights = 0;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(s[0][j][2 * h], s[0][j][2 * h + 1]));
            top = quad_max(top);
            shrink[h] = exp2_fast((maximum[h] - top) * scale), maximum[h] = top;
            const float base = top * scale;
            #pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                #pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++)
                    weights += s[0][j][e] = exp2_fast(fmaf(s[0][j][e], scale, -base));
            sum[h] = sum[h] * shrink[h] + weights;
        }
    }
    // The warp's rows of tokens n0 .. n1 - 1, to `out` or, if the keys are split, to `partial`.
    __device__ __forceinline__ void store(const QueryTile& t, int split, int n0, int n1, const Mixed& mixed,
                                          const float (&maximum)[2], const float (&sum)[2], float scale) const {
        const int quad = threadIdx.x % 4;
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const float total = quad_sum(sum[h]), by = splits > 1 ? 1 : 1 / total;
            const int r = threadIdx.x / 32 * 16 + score_row(0, 2 * h), n = t.token(r);
            const bool mine = n >= n0 && n < n1;
            const size_t row = mine ? t.row(r, n, p.H) : 0;
            float* part = p.partial + ((row - (size_t)p.first * p.H) * splits + split) * (D + 2);
            #pragma unroll
            for (int j = 0; j < D / 8; j += 2) {
                float4 y = four_columns(mixed[0][j], mixed[0][j + 1], h);
                const int d = j * 8 + quad / 2 * 4 + quad % 2 * 8;
                y = make_float4(y.x * by, y.y * by, y.z * by, y.w * by);
                if (!mine) continue;
                if (splits > 1) *(float2*)(part + d) = {y.x, y.y}, *(float2*)(part + d + 2) = {y.z, y.w};
                else store_four(p.out + row * D + d, y);
            }
            if (mine && splits > 1) *(float2*)(part + D) = make_float2(maximum[h] * scale, total);
            if (mine && p.lse) p.lse[row] = maximum[h] / sqrtf((float)D) + logf(total);
        }
    }

    // Two warpgroups.
    __device__ __forceinline__ void consume() const {
        const float scale = LOG2E / sqrtf((float)D);
        Ring<2> queries, keys, values;
        const auto leave = [&](int i) { if (threadIdx.x % 32 == 0) barrier_arrive(empty(i)); };
        for (;;) {
            const int q = QUERIES + queries.stage;
            barrier_wait(full(q), queries.parity);
            const int unit = told.unit[queries.stage];
            if (unit < 0) return;
            __syncwarp(); // all lanes have read it before any of them leaves the stage
            const QueryTile t = tile_of(unit);
            const int split = split_of(unit);
            each_sequence(t, split, [&](int n0, int n1, int from, int to) {
                int limit[2];
                #pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int n = t.token(threadIdx.x / 32 * 16 + score_row(0, 2 * h));
                    limit[h] = n >= n0 && n < n1 ? p.b.pos[n] + 1 : to;
                }
                const int shortest = p.b.pos[n0] + 1;
                float maximum[2] = {-1e30f, -1e30f}, sum[2] = {}, shrink[2];
                Mixed mixed;
                if (from >= to) { // a split without keys
                    each_score(mixed, [](float& x, int, int, int) { x = 0; });
                    return store(t, split, n0, n1, mixed, maximum, sum, scale);
                }
                uint32_t weights[KEYS / 16][4];
                {
                    Scores s;
                    barrier_wait(full(KEYS_AT + keys.stage), keys.parity);
                    multiply_keys(s, q, KEYS_AT + keys.stage);
                    wgmma_wait<0>();
                    wgmma_settle(s);
                    leave(KEYS_AT + keys.stage), keys.next();
                    soften(s, maximum, sum, shrink, limit, from + KEYS > shortest, from, scale);
                    round_weights(weights, s);
                }
                for (int key0 = from + KEYS; key0 < to; key0 += KEYS) {
                    Scores s;
                    barrier_wait(full(KEYS_AT + keys.stage), keys.parity);
                    multiply_keys(s, q, KEYS_AT + keys.stage);
                    barrier_wait(full(VALUES + values.stage), values.parity);
                    add_values(mixed, weights, VALUES + values.stage, key0 > from + KEYS);
                    wgmma_wait<1>();
                    wgmma_settle(s);
                    leave(KEYS_AT + keys.stage), keys.next();
                    soften(s, maximum, sum, shrink, limit, key0 + KEYS > shortest, key0, scale);
                    wgmma_wait<0>();
                    wgmma_settle(mixed);
                    leave(VALUES + values.stage), values.next();
                    each_score(mixed, [&](float& x, int, int, int e) { x *= shrink[e / 2]; });
                    round_weights(weights, s);
                }
                barrier_wait(full(VALUES + values.stage), values.parity);
                add_values(mixed, weights, VALUES + values.stage, to > from + KEYS);
                wgmma_wait<0>();
                wgmma_settle(mixed);
                leave(VALUES + values.stage), values.next();
                store(t, split, n0, n1, mixed, maximum, sum, scale);
            });
            leave(q), queries.next();
        }
    }
};
