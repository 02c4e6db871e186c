/* draws.h: Book II's end, from logits to tokens: the sampler on a GPU, and a step as a graph. qwen3.cu includes it.

   The sampler is Book I's `sample`, the same draws bit for bit, since probabilities are integers and every float step
   is rounded alike. What changes between draws lies in the GPU's memory, so that one graph serves them all.

   Contents    1 The sampler    2 A step as a graph, and step.h, which makes it one kernel */
#pragma once

// ======================================================================================================= 1 The sampler
struct Draw {
    Sampling how;
    int exist; // only ids below may be drawn
};
// A larger key is likelier: the logit, then the lower id.
__device__ inline unsigned long long draw_key(float logit, int id) {
    const uint32_t u = __float_as_uint(logit + 0.f); // -0 becomes 0
    return (unsigned long long)(u >> 31 ? ~u : u | 0x80000000) << 32 | (uint32_t)~id;
}
__device__ inline float logit_of(unsigned long long key) {
    const uint32_t u = (uint32_t)(key >> 32);
    return __uint_as_float(u >> 31 ? u & 0x7fffffff : ~u);
}

// The head's product: logits with the penalties, and the likeliest id of each block's rows. `best` has room for
// BEST_BLOCKS blocks, and sample_kernel has a thread for each of them: MOST_BLOCKS holds stream_product to that.
constexpr int BEST_BLOCKS = 1024;
struct DrawEpilogue : Epilogue {
    static constexpr int MOST_BLOCKS = BEST_BLOCKS;
    float* out;                // (R,V)
    size_t V;
    const Draw* draw;          // (R)
    const uint32_t* seen;      // (R,V), or null: no penalties
    unsigned long long* best;  // (R, BEST_BLOCKS)
    DrawEpilogue(float* out, size_t V, const Draw* draw, const uint32_t* seen, unsigned long long* best)
        : out(out), V(V), draw(draw), seen(seen), best(best) {}
    __device__ static unsigned long long* shared_best() {
        __shared__ unsigned long long best[STREAM_TOKENS];
        return best;
    }
    __device__ void begin() {
        if (threadIdx.x < STREAM_TOKENS) shared_best()[threadIdx.x] = 0; // a barrier comes before its first use
    }
    __device__ void one(bool inside, int n, int r, float y, float) {
        unsigned long long key = 0;
        if (inside) {
            const Sampling& how = draw[n].how;
            const uint32_t s = seen ? seen[n * V + r] : 0;
            out[n * V + r] = y = penalized(y, how, s);
            if (r < draw[n].exist) key = draw_key(usable(y), r);
        }
        for (int other = 1; other < 8; other *= 2) key = max(key, __shfl_xor_sync(~0u, key, other));
        if (threadIdx.x % 8 == 0 && key) atomicMax(shared_best() + n, key);
    }
    __device__ void end(int N) {
        __syncthreads();
        if (threadIdx.x < N) best[threadIdx.x * BEST_BLOCKS + blockIdx.x] = shared_best()[threadIdx.x];
    }
};

// The sum over the threads before this one.
__device__ inline unsigned long long block_sum_before(unsigned long long x) {
    __shared__ unsigned long long parts[32];
    unsigned long long sum = x;
    for (int lane = 1; lane < 32; lane *= 2) {
        const unsigned long long other = __shfl_up_sync(~0u, sum, lane);
        if ((int)threadIdx.x % 32 >= lane) sum += other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 31) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    for (int w = 0; w < (int)threadIdx.x / 32; w++) sum += parts[w];
    return sum - x;
}

// Where draws go, and the batch of the next step.
struct DrawState {
    int *token, *pos, *slot; // (R) of the token just drawn, out; pos: in, that of the token before
    const int *seq, *pages;  // (R), (., max_pages)
    int max_pages;
    uint32_t* seen;          // (sequences, V) or null
    volatile int* ring;      // (R, ring_size) in the host's memory, or null: id + 1 of the token at each position
    int ring_size;
    int* last;               // (sequences) what was drawn last, or null
};

// ---- sample_kernel: Book I's `sample`, and the next step's batch
// A block of 1024 threads owns a row of logits, a thread every 1024th id; 29 KB of shared memory. The likeliest ids go
// to a list in shared memory, in which all is decided by comparing everyone with everyone. Which are the likeliest:
// with top-k those from the k-th of the likeliest ids of disjoint groups on, at least k and hardly more: where the
// groups are those of the head's blocks, they are in the few blocks whose likeliest is among them. Else as many as the
// list holds, by bins of their exponents. If what may be drawn is more than the list holds (flat distributions without
// top-k), the least key that is kept is found by bisection over all ids instead, a pass for each bit. Bound by what one
// multiprocessor reads from the L2 cache: 5 us a pass over 151,936 logits.
constexpr int DRAW_THREADS = 1024;
constexpr int LIST = DRAW_THREADS; // a thread an entry
constexpr int GROUPS = 256;        // of ids: those of four threads, or of some of the head's blocks
constexpr int BINS = 2048;         // of 1/64 of the exponent
constexpr float WEIGHT_ONE = 1099511627776.f; // of the likeliest id: weights are integers in steps of 2^-40

struct DrawList {
    unsigned long long keys[LIST], weights[LIST];
    unsigned long long groups[GROUPS]; // the largest key of each
    unsigned long long top, least;     // the largest key of all; the k-th of the groups', 0: there are fewer
    uint16_t blocks[BEST_BLOCKS];      // of the head's, those that have ids from `least` on
    uint32_t bins[BINS];     // how many ids each has
    int count, cut;          // entries; bins that go to the list
    int block_count;
    int answer;              // the id that is drawn
};

// What is drawn from.
struct DrawRow {
    const float* logits;
    const int exist;
    const Sampling how;
    float top = 0; // the largest logit, once it is known
    __device__ DrawRow(const float* logits, const Draw& draw) : logits(logits), exist(draw.exist), how(draw.how) {}
    __device__ int k() const { return how.top_k > 0 ? how.top_k : INT_MAX; }
    __device__ float exponent(float logit) const { return (logit - top) / how.temperature; }
    // f(id, its logit) for this thread's ids, with eight loads on their way at once.
    template <class F> __device__ __forceinline__ void each(F f) const {
        constexpr int LOADS = 8;
        for (int first = threadIdx.x; first < exist; first += LOADS * DRAW_THREADS) {
            float x[LOADS];
            UNROLL for (int i = 0, id = first; i < LOADS; i++, id += DRAW_THREADS) x[i] = id < exist ? logits[id] : 0;
            UNROLL for (int i = 0, id = first; i < LOADS; i++, id += DRAW_THREADS)
                if (id < exist) f(id, usable(x[i]));
        }
    }
    // The same for the ids of list.blocks, of which a warp has one at a time, and a lane four neighbours.
    template <class F>
    __device__ __forceinline__ void each_of(const DrawList& list, const RowsDealt& dealt, F f) const {
        constexpr int LOADS = 3;
        const int fours = dealt.rows / 4;
        for (int b = threadIdx.x / 32; b < list.block_count; b += DRAW_THREADS / 32) {
            const int first = (list.blocks[b] + dealt.blocks - dealt.shift) % dealt.blocks;
            auto id_of = [&](int i) { return (first + i / fours * dealt.blocks) * dealt.rows + i % fours * 4; };
            for (int i = threadIdx.x % 32; id_of(i) < exist; i += LOADS * 32) {
                float4 x[LOADS];
                UNROLL for (int l = 0; l < LOADS; l++) {
                    const int id = id_of(i + l * 32);
                    x[l] = id < exist ? *(const float4*)(logits + id) : float4{};
                }
                UNROLL for (int l = 0; l < LOADS; l++) {
                    const int id = id_of(i + l * 32);
                    const float four[4] = {x[l].x, x[l].y, x[l].z, x[l].w};
                    UNROLL for (int j = 0; j < 4; j++) if (id + j < exist) f(id + j, usable(four[j]));
                }
            }
        }
    }
    __device__ static unsigned long long weight(float exponent) { // e^-28 is below a step
        return exponent < -28.f ? 0ull : (unsigned long long)(exp_exact(exponent) * WEIGHT_ONE);
    }
    __device__ static int bin(float exponent) { return min(BINS - 1, (int)(exponent * -64)); }
};

// The largest key, to list.top, and of each group: out of the head's blocks' (`best`), if they looked for it, else out
// of all logits. Returns the largest key that this thread saw: its block's, or of its ids.
__device__ __forceinline__ unsigned long long find_likeliest(DrawList& list, const DrawRow& row,
                                                             const unsigned long long* best, int blocks) {
    unsigned long long mine = 0;
    if (best) {
        if ((int)threadIdx.x < blocks) mine = best[threadIdx.x];
    } else {
        row.each([&](int id, float logit) { mine = max(mine, draw_key(logit, id)); });
    }
    unsigned long long most = mine;
    if (most) atomicMax(&list.groups[threadIdx.x % GROUPS], most);
    for (int lane = 16; lane; lane /= 2) most = max(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0 && most) atomicMax(&list.top, most);
    __syncthreads();
    return mine;
}

// For top-k: the ids from list.least on to the list, in any order, their weight to `listed`. False: there are fewer
// groups than k, or more ids than the list holds. Weights fall with keys: if the list gets fewer than k ids then no
// other id has a weight. dealt: to the head's blocks, of which this thread's has `mine`; or to none.
__device__ __forceinline__ bool list_from_kth(DrawList& list, const DrawRow& row, const RowsDealt& dealt,
                                              unsigned long long mine, unsigned long long& listed) {
    const int groups = dealt.blocks ? min(GROUPS, dealt.blocks) : GROUPS;
    if ((int)threadIdx.x < groups) {
        const unsigned long long own = list.groups[threadIdx.x];
        int rank = 0;
        for (int other = 0; other < groups; other++) rank += list.groups[other] > own;
        if (own && rank == row.k() - 1) list.least = own;
    }
    __syncthreads();
    if (!list.least) return false;
    if (dealt.blocks) {
        if (mine >= list.least) list.blocks[atomicAdd(&list.block_count, 1)] = (uint16_t)threadIdx.x;
        __syncthreads();
    }
    const float floor = logit_of(list.least);
    unsigned long long sum = 0;
    const auto take = [&](int id, float logit) {
        if (logit < floor || draw_key(logit, id) < list.least) return;
        const unsigned long long w = row.weight(row.exponent(logit));
        if (!w) return;
        const int at = atomicAdd(&list.count, 1);
        if (at < LIST) list.keys[at] = draw_key(logit, id), list.weights[at] = w;
        sum += w;
    };
    if (dealt.blocks) row.each_of(list, dealt, take);
    else row.each(take);
    listed = block_sum(sum);
    __syncthreads();
    const bool fits = list.count <= LIST;
    __syncthreads(); // all have read it
    if (!fits && threadIdx.x == 0) list.count = 0;
    return fits;
}

// Counts the ids of each bin; the first `cut` bins, as many as the list holds or top-k needs, will go to the list.
// Returns the sum of all weights.
__device__ __forceinline__ unsigned long long count_bins(DrawList& list, const DrawRow& row) {
    unsigned long long all = 0;
    row.each([&](int, float logit) {
        const float x = row.exponent(logit);
        const unsigned long long w = row.weight(x);
        all += w;
        if (w) atomicAdd(&list.bins[row.bin(x)], 1u);
    });
    all = block_sum(all);
    __syncthreads();
    const unsigned enough = min(row.k(), LIST + 1);
    constexpr int EACH = BINS / DRAW_THREADS;
    unsigned own = 0;
    for (int i = 0; i < EACH; i++) own += list.bins[threadIdx.x * EACH + i];
    unsigned before = (unsigned)block_sum_before(own);
    for (int i = 0, bin = threadIdx.x * EACH; i < EACH; i++, bin++) {
        if (before >= enough || before + list.bins[bin] > LIST) atomicMin(&list.cut, bin);
        before += list.bins[bin];
    }
    __syncthreads();
    return all;
}

// Their ids to the list, in any order. Returns the sum of their weights.
__device__ __forceinline__ unsigned long long fill_list(DrawList& list, const DrawRow& row) {
    unsigned long long sum = 0;
    row.each([&](int id, float logit) {
        const float x = row.exponent(logit);
        const unsigned long long w = row.weight(x);
        if (!w || row.bin(x) >= list.cut) return;
        const int at = atomicAdd(&list.count, 1);
        list.keys[at] = draw_key(logit, id), list.weights[at] = w;
        sum += w;
    });
    sum = block_sum(sum);
    __syncthreads();
    return sum;
}

// Draws from the list, a thread an entry: its rank and the weight of all likelier ones decide whether it is kept, the
// weight of the kept ones with lower ids whether it is drawn. `all`: the weight of all ids, listed or not.
__device__ __forceinline__ void draw_from_list(DrawList& list, const DrawRow& row, unsigned long long all,
                                               uint64_t random) {
    const Sampling& how = row.how;
    const int i = threadIdx.x, n = list.count, k = row.k();
    const unsigned long long key = i < n ? list.keys[i] : 0, mine = i < n ? list.weights[i] : 0;
    int rank = 0;
    unsigned long long before = 0;
    for (int j = 0; i < n && j < n; j++)
        if (list.keys[j] > key) rank++, before += list.weights[j];
    bool kept = i < n && rank < k;
    const unsigned long long total = n >= k ? block_sum(kept ? mine : 0) : all; // after top-k
    if (how.top_p < 1) kept = kept && (rank == 0 || (double)before < (double)how.top_p * (double)total);
    if (how.min_p > 0) kept = kept && (double)mine >= (double)how.min_p * WEIGHT_ONE;
    const unsigned long long left = block_sum(kept ? mine : 0), r = __umul64hi(random, left);
    if (!kept && i < n) list.weights[i] = 0;
    __syncthreads();
    unsigned long long lower = 0;
    for (int j = 0; kept && j < n; j++)
        if ((uint32_t)list.keys[j] > (uint32_t)key) lower += list.weights[j]; // ids are inverted in keys
    if (kept && lower <= r && r < lower + mine) list.answer = (int)~(uint32_t)key;
}

// How many ids have keys from `least` on, or (!count) their weight.
__device__ __forceinline__ unsigned long long sum_from(const DrawRow& row, unsigned long long least, bool count) {
    unsigned long long sum = 0;
    row.each([&](int id, float logit) {
        const unsigned long long w = row.weight(row.exponent(logit));
        if (w && draw_key(logit, id) >= least) sum += count ? 1 : w;
    });
    return block_sum(sum);
}

// The least key that top-k and then top-p keep: the largest that is enough, found bit by bit, from the highest down.
__device__ __forceinline__ unsigned long long least_kept(const DrawRow& row, unsigned long long top) {
    unsigned long long least = 0;
    if (row.how.top_k > 0)
        for (int bit = 63; bit >= 0; bit--)
            if (sum_from(row, least | 1ull << bit, true) >= (unsigned long long)row.k()) least |= 1ull << bit;
    if (row.how.top_p < 1) {
        const double need = (double)row.how.top_p * (double)sum_from(row, least, false);
        unsigned long long found = 0;
        for (int bit = 63; bit >= 0; bit--)
            if ((double)sum_from(row, found | 1ull << bit, false) >= need) found |= 1ull << bit;
        least = max(least, min(found, top));
    }
    return least;
}

// Draws from all ids: those from `least` on, in order, a range of neighbours a thread.
__device__ __forceinline__ void draw_from_all(DrawList& list, const DrawRow& row, uint64_t random) {
    const unsigned long long least = least_kept(row, list.top);
    const double floor_weight = (double)row.how.min_p * WEIGHT_ONE;
    auto kept = [&](int id) {
        const float logit = usable(row.logits[id]);
        const unsigned long long w = row.weight(row.exponent(logit));
        return draw_key(logit, id) >= least && (row.how.min_p <= 0 || (double)w >= floor_weight) ? w : 0;
    };
    const int each = (row.exist + DRAW_THREADS - 1) / DRAW_THREADS;
    const int from = min(row.exist, (int)threadIdx.x * each), to = min(row.exist, from + each);
    unsigned long long sum = 0;
    for (int id = from; id < to; id++) sum += kept(id);
    const unsigned long long r = __umul64hi(random, block_sum(sum));
    unsigned long long lower = block_sum_before(sum);
    if (lower <= r && r < lower + sum)
        for (int id = from; id < to; id++) {
            const unsigned long long w = kept(id);
            if (r < lower + w) { list.answer = id; break; }
            lower += w;
        }
}

// The drawn token becomes the next step's batch, is counted and kept, and goes to the host.
__device__ __forceinline__ void publish(const DrawState& state, int row, size_t V, int answer) {
    const int pos = state.pos[row] + 1, page = pos / PAGE, seq = state.seq[row];
    state.token[row] = answer;
    state.pos[row] = pos;
    if (page < state.max_pages)
        state.slot[row] = state.pages[(size_t)seq * state.max_pages + page] * PAGE + pos % PAGE;
    if (state.seen) state.seen[seq * V + answer]++;
    if (state.last) state.last[seq] = answer;
    if (state.ring) state.ring[(size_t)row * state.ring_size + pos % state.ring_size] = answer + 1;
}

__global__ void __launch_bounds__(DRAW_THREADS, BLOCKS_OF_1024)
sample_kernel(const float* all_logits,        // (R,V)
              size_t V, const Draw* draws,    // (R)
              const unsigned long long* best, // (R, BEST_BLOCKS) the likeliest id of each of the head's blocks; or null
              RowsDealt dealt,                // ... to which its rows were dealt; V and `rows`: multiples of 4
              DrawState state) {
    __shared__ DrawList list;
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, i = threadIdx.x;
    if (state.seq[r] < 0) return;
    DrawRow row(all_logits + r * V, draws[r]);
    const Sampling& how = row.how;
    for (int bin = i; bin < BINS; bin += DRAW_THREADS) list.bins[bin] = 0;
    if (i < GROUPS) list.groups[i] = 0;
    if (i == 0) list.top = list.least = 0, list.count = list.block_count = 0, list.cut = BINS;
    __syncthreads();
    const unsigned long long mine = find_likeliest(list, row, best ? best + r * BEST_BLOCKS : nullptr, dealt.blocks);
    const int likeliest = (int)~(uint32_t)list.top;
    if (i == 0) list.answer = likeliest;
    if (how.temperature != 0 && row.exist > 1) {
        row.top = logit_of(list.top);
        const Philox bits = philox(how.seed, (uint64_t)state.pos[r] + 1, STREAM_SAMPLE);
        const uint64_t random = (uint64_t)bits.v[1] << 32 | bits.v[0];
        unsigned long long all, listed;
        bool within = how.top_k > 0 && list_from_kth(list, row, dealt, mine, listed);
        if (within) all = listed;
        else {
            all = count_bins(list, row), listed = fill_list(list, row);
            // Nothing that may be drawn is missing from the list: top-k or top-p cuts within it, or it has all.
            const bool top_p_within =
                how.top_k <= 0 && how.top_p < 1 && (double)listed >= (double)how.top_p * (double)all;
            within = list.count >= row.k() || listed == all || top_p_within;
        }
        if (within) draw_from_list(list, row, all, random);
        else draw_from_all(list, row, random);
    }
    __syncthreads();
    if (i == 0) publish(state, r, V, list.answer);
}

// ---- likeliest. A block of 1024 threads owns a row of logits, a thread every 1024th id. Each thread knows the
// likeliest of its own ids. The block takes the likeliest of these k times; after each time the warp of the thread
// whose id it was looks, all lanes together, for the next one among that thread's ids. So nothing is sorted, and no
// list can overflow. Bound by two passes over logits, mostly in the L2 cache, and by two barriers for each of the k.
__global__ void __launch_bounds__(DRAW_THREADS, BLOCKS_OF_1024)
likeliest_kernel(Likeliest* out,                        // (R)
                 const float* all_logits,               // (R,V)
                 size_t V, int exist, const int* seq,   // (R) -1: a spare row
                 const int* wanted) {                   // by seq: how many ids; -1: the row is left alone
    __shared__ unsigned long long tops[DRAW_THREADS / 32];
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (seq[r] < 0 || wanted[seq[r]] < 0) return;
    const float* logits = all_logits + r * V;
    auto key = [&](int id) { return draw_key(usable(logits[id]), id); };
    auto largest = [](unsigned long long x) {
        for (int other = 16; other; other /= 2) x = max(x, __shfl_xor_sync(~0u, x, other));
        return x;
    };
    auto largest_of_all = [&](unsigned long long x) { // for all threads
        x = largest(x);
        if (lane == 0) tops[warp] = x;
        __syncthreads();
        x = largest(tops[lane]);
        __syncthreads(); // before `tops` is written again
        return x;
    };
    unsigned long long own = 0; // the likeliest of this thread's ids that have not been taken; 0: all have
    for (int id = threadIdx.x; id < exist; id += DRAW_THREADS) own = max(own, key(id));
    unsigned long long best = largest_of_all(own);
    const float top = usable(logits[~(uint32_t)best]);
    float sum = 0;
    for (int id = threadIdx.x; id < exist; id += DRAW_THREADS) sum += expf(usable(logits[id]) - top);
    sum = block_sum(sum);
    const int count = min(min(wanted[seq[r]], MAX_LIKELIEST), exist);
    if (threadIdx.x == 0) out[r].log_sum = top + logf(sum), out[r].count = count;
    for (int i = 0; i < count; i++) {
        if (i > 0) best = largest_of_all(own);
        const int id = (int)~(uint32_t)best, owner = id % DRAW_THREADS;
        if (threadIdx.x == 0) out[r].id[i] = id, out[r].logit[i] = usable(logits[id]);
        if (owner / 32 != warp) continue;
        unsigned long long next = 0;
        for (int other = owner + lane * DRAW_THREADS; other < exist; other += 32 * DRAW_THREADS)
            if (key(other) < best) next = max(next, key(other));
        next = largest(next);
        if (lane == owner % 32) own = next;
    }
}
inline void likeliest_gpu(Context& ctx, Likeliest* out, const float* logits, size_t V, int exist, const int* seq,
                          const int* wanted, int R) {
    if (exist < 1 || (size_t)exist > V) DIE("likeliest: %d ids of %zu", exist, V);
    launch(ctx, likeliest_kernel, (unsigned)R, DRAW_THREADS, 0, out, logits, V, exist, seq, wanted);
}

// ================================================================================================= 2 A step as a graph
#include "gpu/step/step.h" // a step of 1 to 8 tokens as one kernel

// ---- Drawing on a GPU: a step, from embedding to drawn token, is one CUDA graph, whose every changing number lies in
// the GPU's memory. Up to AHEAD steps are launched beyond the tokens that the caller has seen, which come through
// `ring` in the CPU's memory; what was computed past the last token that was accepted is overwritten later. A graph
// starts when the one launched before it has completed, all of it: what sample_kernel writes, the next graph's kernels
// may read early.
//   With lookup, where a step is one kernel, two steps are ahead. When there is something to propose behind the tokens
// that have come, no more are launched; those under way complete, and show whether it goes on; then comes a step of all
// that is proposed, and so on while there are proposals. (Not with penalties: each row would need counts of its own.)
template <class T> struct GpuDraws {
    static constexpr int AHEAD = 8, ROWS = STEP_TOKENS;
    Session<T>& session;
    Context& ctx;
    DrawState step = {};                   // of ROWS rows; of a step of one token the first
    uint32_t* seen;
    Draw* draw_parameters;                 // (ROWS), all the same
    unsigned long long* best;
    int* seq;                              // (ROWS) zeros: the only sequence
    volatile int* ring = nullptr;          // (ROWS, ring_size)
    int* host_rows = nullptr;              // (3,ROWS) token, pos and slot on their way to `step`
    int launched = 0;                      // draws up to this position are on their way,
    int last = 0;                          // ... and up to this one will be wanted
    std::map<int, cudaGraphExec_t> graphs; // by splits and whether there are penalties; see also launch_step
    bool penalties = false;
    std::unique_ptr<StepRoad> road;        // if a step is one kernel
    bool asked = false;                    // ... which is known
    // With lookup:
    std::vector<int> text;                 // the session's ids and what was drawn and has come
    std::vector<int> proposed;             // in the step under way
    int expected = -1;                     // the proposed id for the token under way, if any
    bool row_known = true;                 // the first row of `step` is the one to go on from
    bool from_idle = false;                // nothing was under way when the step that is was launched,
    double started = 0;                    // ... which was then (s)

    explicit GpuDraws(Session<T>& s) : session(s), ctx(s.ctx) {}
    GpuDraws(const GpuDraws&) = delete;
    ~GpuDraws() {
        cudaStreamSynchronize(ctx.gpu->stream);
        for (auto& [key, graph] : graphs) cudaGraphExecDestroy(graph);
        if (ring) cudaFreeHost((void*)ring), cudaFreeHost(host_rows);
    }

    // The session's memory that only a GPU needs.
    void plan() {
        Arena& arena = session.arena;
        const Config& c = session.config;
        plan_scratch(ctx, arena, c, session.chunk, 1, session.capacity, session.pages);
        step.token = arena.take<int>(4 * ROWS), step.pos = step.token + ROWS, step.slot = step.pos + ROWS;
        seq = step.slot + ROWS;
        seen = arena.take<uint32_t>(c.V);
        draw_parameters = arena.take<Draw>(ROWS);
        best = arena.take<unsigned long long>(ROWS * BEST_BLOCKS);
    }
    // Of a step by one kernel, at most. Looks for the road first, which takes memory.
    int tokens() {
        if (!asked) road = StepRoad::find(ctx, session.config, session.weights), asked = true;
        return road ? std::min({road->most, session.chunk, Session<T>::ROWS}) : 1;
    }

    void begin(size_t most) {
        CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream)); // steps that an answer before this one left behind
        const int capacity = session.capacity;
        if (!ring) {
            const size_t ring_size = (size_t)capacity + 1;
            CUDA_CHECK(cudaHostAlloc((void**)&ring, ROWS * ring_size * sizeof(int), cudaHostAllocMapped));
            CUDA_CHECK(cudaHostGetDevicePointer((void**)&step.ring, (void*)ring, 0));
            CUDA_CHECK(cudaHostAlloc((void**)&host_rows, 3 * ROWS * sizeof(int), cudaHostAllocDefault));
            const std::vector<int> zeros(ROWS);
            copy_in(ctx, seq, zeros.data(), zeros.size());
            step.ring_size = capacity + 1, step.seq = seq;
            step.pages = session.table, step.max_pages = session.pages;
        }
        const auto& d = session.drawing;
        penalties = has_penalties(d.how);
        const int V = session.config.V;
        if (penalties) copy_in(ctx, seen, seen_counts(session.ids, d.answer, V).data(), (size_t)V);
        step.seen = penalties ? seen : nullptr;
        tokens(); // (finds the road)
        const int n = (int)session.ids.size(), pos = n - 1;
        const std::vector<Draw> parameters(ROWS, {d.how, d.exist});
        copy_in(ctx, draw_parameters, parameters.data(), parameters.size());
        copy_in(ctx, step.pos, &pos, 1);
        for (int p = 0; p <= capacity; p++) ring[p] = 0;
        last = (int)std::min((size_t)capacity, n + std::min(most, (size_t)capacity) - 1);
        launched = n;
        const bool looks_up = session.lookup.most && !penalties;
        for (int N = 1; looks_up && N <= tokens(); N++) road_step(N); // (else its first time would seem long)
        text = session.ids, proposed.clear(), expected = -1, from_idle = false, row_known = true;
        launch_draw(session.last_row);
    }

    int next() {
        const int p = (int)session.ids.size();
        if (session.lookup.most && !penalties) {
            while ((int)text.size() <= p) go_on(), take();
            go_on(); // before the caller takes its time
            return text[p];
        }
        while (launched < std::min(p + AHEAD, last)) launch_step();
        return wait(0, p);
    }

  private:
    // What a row drew for a position.
    int wait(int row, int pos) {
        const volatile int& drawn = ring[(size_t)row * step.ring_size + pos];
        for (int spins = 0; !drawn; spins++)
            if (spins % 4096 == 4095) { // a fault of the GPU must not hang us
                const cudaError_t e = cudaStreamQuery(ctx.gpu->stream);
                if (e != cudaErrorNotReady) CUDA_CHECK(e);
            }
        if (road) road->check();
        return drawn - 1;
    }
    // With lookup: launches what can be.
    void go_on() {
        const int known = (int)text.size(), under_way = launched + 1 - known;
        if (!proposed.empty() || under_way > 1 || launched >= last) return;
        const std::vector<int> next = session.lookup.propose(text, (size_t)std::min(last - known, tokens() - 1));
        if (!next.empty() && under_way) return void(expected = next[0]);
        if (!under_way) started = seconds();
        if (!next.empty()) return launch_proposed(next);
        if (!under_way) from_idle = true;
        if (!row_known) put_rows({text.back()});
        row_known = true;
        while (launched < std::min(known + 1, last)) launch_step();
    }
    // With lookup: waits for the oldest step under way.
    void take() {
        const int p = (int)text.size();
        LookUp& lookup = session.lookup;
        if (proposed.empty()) {
            text.push_back(wait(0, p));
            if (expected >= 0) lookup.foreseen(text.back() == expected);
            lookup.came(1, seconds(), started, from_idle);
            expected = -1, from_idle = false;
            return;
        }
        const int n = (int)proposed.size();
        std::vector<int> drawn;
        for (int r = 0; r <= n; r++) drawn.push_back(wait(r, p + r));
        lookup.came(drawn.size(), seconds(), started, true);
        for (int r = 0; r <= n; r++) {
            text.push_back(drawn[r]);
            if (r == n) break;
            lookup.judged(drawn[r] == proposed[r]);
            if (drawn[r] != proposed[r]) break;
        }
        launched = (int)text.size() - 1;
        proposed.clear();
    }
    // The last known token and what may follow it to the rows of `step`: from the last position of `text` on.
    void put_rows(const std::vector<int>& ids) {
        for (int r = 0; r < (int)ids.size(); r++) {
            host_rows[r] = ids[r];
            host_rows[ROWS + r] = host_rows[2 * ROWS + r] = (int)text.size() - 1 + r; // (the identity table)
        }
        CUDA_CHECK(cudaMemcpyAsync(step.token, host_rows, 3 * ROWS * sizeof(int), cudaMemcpyHostToDevice,
                                   ctx.gpu->stream));
    }
    void launch_proposed(const std::vector<int>& next) {
        std::vector<int> ids = {text.back()};
        ids.insert(ids.end(), next.begin(), next.end());
        for (size_t r = 0; r < ids.size(); r++) ring[r * (size_t)step.ring_size + text.size() + r] = 0;
        put_rows(ids);
        launch_road_step((int)ids.size());
        launched = (int)text.size() - 1 + (int)ids.size();
        proposed = next, row_known = false;
    }

    void launch_draw(const int* row) {
        const size_t V = session.config.V;
        const Linear<T>& W = session.weights.head;
        const bf16* x = session.activations.normed;
        const StreamArgs head = {x, row, nullptr, nullptr, 0, W.w[0], 1, session.config.C, (int)V};
        const DrawEpilogue epilogue{session.row_logits, V, draw_parameters, step.seen, best};
        const RowsDealt dealt = W.format == Format::PLAIN ? stream_product(ctx, head, epilogue)
                                                          : packed_product(ctx, epilogue, x, row, W, 1);
        launch(ctx, sample_kernel, 1, DRAW_THREADS, 0, session.row_logits, V, draw_parameters, best, dealt, step);
    }

    // A step of N tokens as one kernel, which draws too where that is greedy. Its graphs have negative numbers.
    void launch_road_step(int N) { CUDA_CHECK(cudaGraphLaunch(road_step(N), ctx.gpu->stream)); }
    cudaGraphExec_t road_step(int N) {
        cudaGraphExec_t& graph = graphs[-4 * N - penalties - 2 * greedy()];
        if (!graph) graph = record_graph(ctx, [&] { record_road_step(N); });
        return graph;
    }
    void record_road_step(int N) {
        StepArgs& a = road->args;
        road->use({N, 1, step.token, step.pos, step.seq, step.slot, session.table, session.pages, N == 1},
                  session.cache, session.rope, session.row_logits, draw_parameters, best);
        a.seen = step.seen, a.greedy = greedy(), a.next = step;
        road->launch_step();
        if (a.greedy) return;
        launch_kernel(ctx, false, sample_kernel, (unsigned)N, DRAW_THREADS, 0, session.row_logits, (size_t)a.V,
                      draw_parameters, best, road->dealt(), step);
    }
    bool greedy() const { return session.drawing.how.temperature == 0 || session.drawing.exist == 1; }

    void launch_step() {
        if (road) return launch_road_step(1), void(launched++);
        const int splits = splits_for_graph(launched, session.capacity);
        cudaGraphExec_t& graph = graphs[2 * splits + penalties];
        if (!graph) {
            ctx.stop = nullptr;
            graph = record_graph(ctx, [&] {
                const Batch batch = {1, 1, step.token, step.pos, step.seq, step.slot, session.table, session.pages, 1,
                                     splits};
                forward(ctx, session.config, session.weights, batch, session.activations, session.cache, session.rope);
                launch_draw(session.table); // row 0
            });
        }
        CUDA_CHECK(cudaGraphLaunch(graph, ctx.gpu->stream));
        launched++;
    }
};
