// gpu/backward/hopper.h: attention_backward on Hopper.
#pragma once
#include "gpu/hopper.h"
#include "qwen3.cu"

// ---- attention_backward (qwen3.cu, attention_backward_kernel) on Hopper, for D = 128. A block takes a unit after
// another: 128 keys of a KV head, whose dk and dv it sums, or 128 query rows, whose dq it sums. Either way it owns two
// tiles (keys and values; or q and dout) while two others pass by, 64 rows at a time (q and dout; or keys and values),
// and
//     s = own[0] passing[0]^T    dp = own[1] passing[1]^T    sum[0] += ds passing[0]    sum[1] += p passing[1] (keys)
// Each of two warpgroups owns 64 of the rows. A third one copies: the tiles that pass by, in two stages, and, while
// both are full, the next unit's own tiles. Bound by the tensor cores, and for a seventh of the time by waiting for
// tiles; the products of 64 x 64 take both operands from shared memory and use all of its bandwidth. The sums of keys
// take 128 registers.
struct HopperBackward {
    static constexpr int D = 128, OWN = 128, PASSING = 64, STAGES = 2;
    static constexpr int TILE = OWN * D * 2, SHARED = (2 * 2 + STAGES) * TILE + 1024; // (two tiles pass by as one)
    static constexpr int CONSUMERS = 256, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
    template <int ROWS> struct Numbers { // of query rows
        float lse[ROWS], delta[ROWS];
        int pos[ROWS];
    };
    struct Unit {
        int kv, first, from, to; // it owns keys, or rows, from `first` on; rows, or keys, from .. to - 1 pass by
        bool keys;
        // In tiles; the diagonal comes last, where only one warpgroup has work: the other one stores meanwhile.
        __device__ int count() const { return (to - from + PASSING - 1) / PASSING; }
        __device__ int tile(int i) const { return from + (keys ? count() - 1 - i : i) * PASSING; }
    };
    struct Shared {
        Numbers<OWN> own[2];
        Numbers<PASSING> passing[STAGES];
        Unit unit[2]; // kv -1 at the end
        int next[2];
        uint64_t barriers[2 * (2 + STAGES)];
    };
    const AttentionBackward& p;
    int* taken; // units taken from the counter; blocks that have ended
    Shared& told;
    uint32_t tiles; // in shared memory
    __device__ uint32_t own(int stage) const { return tiles + stage * 2 * TILE; }
    __device__ uint32_t passing(int stage) const { return tiles + (4 + stage) * TILE; }
    __device__ uint32_t full(int i) const { return shared_address(told.barriers + 2 * i); } // own 0, 1; passing 2 ..
    __device__ uint32_t empty(int i) const { return full(i) + 8; }

    // Keys, then rows; within a sequence, long units come first.
    BOTH static int units(int N, int H, int K) { return (N + OWN - 1) / OWN * (H + K); }
    __device__ __forceinline__ Unit unit_of(int number) const {
        const int G = p.H / p.K, all = units(p.b.N, p.H, p.K), lane = threadIdx.x % 32;
        const int of_keys = (p.b.N + OWN - 1) / OWN * p.K;
        const auto count = [](bool x) { return __popc(__ballot_sync(~0u, x)); };
        if (number >= all) return {-1, 0, 0, 0, false};
        Unit u = {number % p.K, 0, 0, 0, number < of_keys};
        u.first = (u.keys ? number : all - 1 - number) / p.K * OWN;
        if (u.keys) {
            u.from = u.first * G, u.to = G * end_of_queries<32>(p.b, u.first, min(u.first + OWN, p.b.N), count);
            return u;
        }
        const HeadQueries heads(p, u.kv);
        const int n0 = heads.token(u.first), n1 = heads.token(min(u.first + OWN, p.b.N * G) - 1);
        u.to = n0; // all later rows are spare
        for (int n = n0; n <= n1; n += 32) u.to += count(n + lane <= n1 && p.b.seq[n + lane] >= 0);
        u.from = u.to > n0 ? n0 - p.b.pos[n0] : u.to;
        return u;
    }

    // ---- The producer warpgroup. A tile of ROWS rows lies in two halves of 128 bytes a row.
    template <int ROWS> __device__ static int place(int r, int chunk) {
        return chunk / 8 * ROWS * 128 + r * 128 + ((chunk % 8 ^ r % 8) << 4);
    }
    template <int ROWS>
    __device__ __forceinline__ void copy_rows(uint32_t to, Numbers<ROWS>& numbers, int kv, int row0, int rows) const {
        const HeadQueries heads(p, kv);
        const HeadRows<D> mine;
        #pragma unroll 4
        for (int r = mine.row; r < ROWS; r += mine.STEP) {
            const int row = row0 + r, at = to + place<ROWS>(r, mine.chunk);
            const size_t from = row < rows ? (size_t)heads.place(row, heads.token(row)) * D + mine.chunk * 8 : 0;
            copy_async(at, p.q + from, row < rows);
            copy_async(at + ROWS * D * 2, p.dout + from, row < rows);
        }
        const int r = threadIdx.x % ROWS, row = row0 + r, n = heads.token(row), from = heads.place(row, n);
        const bool there = row < rows, first = threadIdx.x % PRODUCERS < ROWS;
        if (first) {
            copy_few_async<4>(shared_address(numbers.lse + r), p.lse + (there ? from : 0), there);
            copy_few_async<4>(shared_address(numbers.pos + r), p.b.pos + (there ? n : 0), there);
        }
        if (!first || ROWS == PRODUCERS)
            copy_few_async<4>(shared_address(numbers.delta + r), p.delta + (there ? from : 0), there);
    }
    // Looks up the place of the keys, then waits for `empty`.
    template <int ROWS>
    __device__ __forceinline__ void copy_keys(uint32_t to, int kv, int m0, int end, uint32_t empty, int parity) const {
        const HeadRows<D> mine;
        const int lane = threadIdx.x % 32;
        int slot[ROWS / 32];
        #pragma unroll
        for (int i = 0; i < ROWS / 32; i++) slot[i] = m0 + i * 32 + lane < end ? p.b.slot[m0 + i * 32 + lane] : -1;
        barrier_wait(empty, parity);
        #pragma unroll
        for (int i = 0; i < ROWS / mine.STEP; i++) {
            const int r = mine.row + i * mine.STEP, at = to + place<ROWS>(r, mine.chunk);
            const int its = __shfl_sync(~0u, slot[i * mine.STEP / 32], r % 32), s = max(its, 0);
            const size_t from = kv_offset(s / PAGE, kv, s % PAGE, p.K, D) + mine.chunk * 8;
            copy_async(at, p.keys + from, its >= 0);
            copy_async(at + ROWS * D * 2, p.values + from, its >= 0);
        }
    }
    __device__ __forceinline__ void copy_own(const Unit& u, Ring<2>& ring) const {
        const int stage = ring.stage, parity = ring.parity ^ 1, G = p.H / p.K;
        if (u.keys) copy_keys<OWN>(own(stage), u.kv, u.first, u.to / G, empty(stage), parity);
        else barrier_wait(empty(stage), parity);
        if (u.kv >= 0 && !u.keys) copy_rows(own(stage), told.own[stage], u.kv, u.first, u.to * G);
        barrier_arrive_with_copies(full(stage));
        if (threadIdx.x % PRODUCERS == 0) {
            told.unit[stage] = u;
            barrier_arrive(full(stage));
            told.next[stage] = u.kv < 0 ? 0 : gridDim.x + atomicAdd(taken, 1);
        }
        ring.next();
    }
    __device__ __forceinline__ void copy_passing(const Unit& u, int i, Ring<STAGES>& ring) const {
        const int stage = ring.stage, parity = ring.parity ^ 1;
        if (u.keys) {
            barrier_wait(empty(2 + stage), parity);
            copy_rows(passing(stage), told.passing[stage], u.kv, i, u.to);
        } else copy_keys<PASSING>(passing(stage), u.kv, i, u.to, empty(2 + stage), parity);
        barrier_arrive_with_copies(full(2 + stage));
        ring.next();
    }
    __device__ __forceinline__ void produce() const {
        Ring<2> owned;
        Ring<STAGES> ring;
        Unit u = unit_of(blockIdx.x);
        for (copy_own(u, owned); u.kv >= 0;) {
            const int count = u.count();
            int i = 0;
            for (; i < min(STAGES, count); i++) copy_passing(u, u.tile(i), ring);
            asm volatile("barrier.sync 1, %0;" ::"n"(PRODUCERS) : "memory");
            const Unit next = unit_of(told.next[owned.stage ^ 1]);
            copy_own(next, owned);
            for (; i < count; i++) copy_passing(u, u.tile(i), ring);
            u = next;
        }
        if (threadIdx.x % PRODUCERS == 0 && atomicAdd(taken + 1, 1) == (int)gridDim.x - 1)
            taken[0] = taken[1] = 0; // no block takes another unit
    }

    // ---- The two consumer warpgroups.
    using Scores = float[1][PASSING / 8][4];
    using Sums = float[1][D / 8][4];
    using Weights = uint32_t[PASSING / 16][4];
    // s = a b^T of this warpgroup's 64 rows and those that pass by; sum += weights b. Both run asynchronously.
    __device__ __forceinline__ static void multiply(Scores& s, uint32_t a, uint32_t b) {
        wgmma_begin();
        #pragma unroll
        for (int d = 0; d < D / 16; d++)
            wgmma<PASSING, false, false>(s[0], wgmma_operand(a + d / 4 * OWN * 128 + d % 4 * 32, 0),
                                         wgmma_operand(b + d / 4 * PASSING * 128 + d % 4 * 32, 0), d);
        wgmma_commit();
    }
    __device__ __forceinline__ static void add(Sums& sum, const Weights& weights, uint32_t b) {
        wgmma_begin();
        #pragma unroll
        for (int k = 0; k < PASSING / 16; k++)
            wgmma<128, true>(sum[0], weights[k], wgmma_operand(b + k * 16 * 128, PASSING * 128), true);
        wgmma_commit();
    }
    template <bool OF_KEYS>
    __device__ __forceinline__ void sum_unit(const Unit& u, int owned, Ring<STAGES>& ring) const {
        const HeadQueries heads(p, u.kv);
        const float scale = 1 / sqrtf((float)D);
        const int group = threadIdx.x / 128 * 64, warp = threadIdx.x / 32 * 16; // where their rows begin in the tile
        const uint32_t mine = own(owned) + group * 128;
        const auto leave = [&](int i) { // all lanes have read the tile, also if the warp skips it
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(empty(i));
        };
        const auto& ours = told.own[owned];
        // This warpgroup's first and last token, and the first token of the sequence of each.
        int oldest = 0, newest = -1, oldest_first = 0, newest_first = 0;
        const int own_rows = min(64, u.to * heads.G - u.first - group);
        if (!OF_KEYS && own_rows > 0) {
            oldest = heads.token(u.first + group), newest = heads.token(u.first + group + own_rows - 1);
            oldest_first = oldest - ours.pos[group], newest_first = newest - ours.pos[group + own_rows - 1];
        }
        Sums sum = {}, sum_p = {};
        for (int t = 0; t < u.count(); t++, leave(2 + ring.stage), ring.next()) {
            const int i = u.tile(t);
            barrier_wait(full(2 + ring.stage), ring.parity);
            shared_to_async();
            const auto& theirs = told.passing[ring.stage];
            int first_key = i, last_key = i + PASSING - 1;
            if (OF_KEYS) {
                const int last = min(PASSING, u.to - i) - 1;
                first_key = u.first + group, last_key = first_key + 63;
                oldest = heads.token(i), newest = heads.token(i + last);
                oldest_first = oldest - theirs.pos[0], newest_first = newest - theirs.pos[last];
            }
            if (first_key > newest || last_key < oldest_first) continue;
            uint32_t tile = passing(ring.stage), a = mine;
            asm volatile("" : "+r"(tile), "+r"(a)); // (else values derived from them occupy registers throughout)
            Scores s, ds;
            Weights weights, more;
            multiply(s, a, tile);
            multiply(ds, a + TILE, tile + TILE / 2);
            wgmma_wait<1>();
            wgmma_settle(s);
            probabilities(s, scale, [&](int, int j, int e) {
                return OF_KEYS ? theirs.lse[score_column(j, e)] : ours.lse[warp + score_row(0, e)];
            });
            if (last_key > oldest || first_key < newest_first)
                each_score(s, [&](float& x, int, int j, int e) {
                    const int row = warp + score_row(0, e), column = score_column(j, e);
                    const int n = heads.token(OF_KEYS ? i + column : u.first + row);
                    const int m = OF_KEYS ? u.first + row : i + column;
                    if ((uint32_t)(n - m) > (uint32_t)(OF_KEYS ? theirs.pos[column] : ours.pos[row])) x = 0;
                });
            if (OF_KEYS) {
                round_weights(weights, s);
                add(sum_p, weights, tile + TILE / 2);
                wgmma_wait<1>();
            } else wgmma_wait<0>();
            wgmma_settle(ds);
            each_score(ds, [&](float& x, int, int j, int e) {
                x -= OF_KEYS ? theirs.delta[score_column(j, e)] : ours.delta[warp + score_row(0, e)];
                x *= s[0][j][e];
            });
            round_weights(more, ds);
            add(sum, more, tile);
            wgmma_wait<0>();
            wgmma_settle(sum);
            if (OF_KEYS) wgmma_settle(sum_p);
        }
        const int first = u.first, kv = u.kv;
        leave(owned);
        if (OF_KEYS) store_key_value_gradients<D>(p, sum, sum_p, first + warp, min(first + OWN, p.b.N), kv, scale);
        else store_query_gradients<D>(p, HeadQueries(p, kv), sum, first + warp, scale);
    }
    __device__ __forceinline__ void consume() const {
        Ring<2> owned;
        Ring<STAGES> ring;
        for (;; owned.next()) {
            barrier_wait(full(owned.stage), owned.parity);
            shared_to_async();
            const Unit& u = told.unit[owned.stage];
            if (u.kv < 0) return;
            if (u.keys) sum_unit<true>(u, owned.stage, ring);
            else sum_unit<false>(u, owned.stage, ring);
        }
    }
};
