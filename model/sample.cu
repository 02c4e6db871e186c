// model/sample.cu: sample (model/sampling.h) on a GPU, and the next step's batch. The bits are those of a CPU, since
// probabilities are integers and every float step is rounded alike.
#ifdef QWEN3_GPU
#include "qwen3.cu"

// A block of 1024 threads owns a row of logits, a thread every 1024th id; 29 KB of shared memory. The likeliest ids go
// to a list in shared memory, whose entries are all compared with each other. With top-k the list gets all ids from the
// k-th on of the likeliest ids of disjoint groups: at least k and hardly more. If the groups are those of the head's
// blocks, these ids are in the few blocks whose likeliest is among them. Without top-k it gets as many ids as it holds,
// by bins of their exponents. If more ids are candidates than the list holds (flat distributions without top-k),
// bisection over all ids finds the least key that is kept, a pass for each bit. Bound by the L2 cache bandwidth of one
// multiprocessor: 5 us a pass over 151,936 logits.
inline constexpr int DRAW_THREADS = 1024;
inline constexpr int LIST = DRAW_THREADS; // a thread an entry
inline constexpr int BINS = 2048;         // of 1/64 of the exponent
inline constexpr float WEIGHT_ONE = 1099511627776.f; // of the likeliest id: weights are integers in steps of 2^-40

// The logit of draw_key(logit, id).
__device__ inline float logit_of(unsigned long long key) {
    const uint32_t u = (uint32_t)(key >> 32);
    return __uint_as_float(u >> 31 ? u & 0x7fffffff : ~u);
}

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

struct DrawList {
    unsigned long long keys[LIST], weights[LIST];
    unsigned long long groups[DRAW_GROUPS]; // the largest key of each
    unsigned long long top, least;     // the largest key of all; the k-th of the groups', 0: there are fewer
    uint16_t blocks[BEST_BLOCKS];      // of the head's, those that have ids from `least` on
    uint32_t bins[BINS];     // how many ids each has
    int count, cut;          // entries; bins that go to the list
    int block_count;
    int answer;              // the sampled id
};

// One row of logits and how to sample from it.
struct DrawRow {
    const float* logits;
    const int exist;
    const Sampling how;
    float top = 0; // the largest logit, once it is known
    __device__ DrawRow(const float* logits, const Draw& draw) : logits(logits), exist(draw.exist), how(draw.how) {}
    __device__ int k() const { return how.top_k > 0 ? how.top_k : INT_MAX; }
    __device__ float exponent(float logit) const { return (logit - top) / how.temperature; }
    // f(id, its logit) for this thread's ids, with eight loads in flight at once.
    template <class F> __device__ __forceinline__ void each(F f) const {
        constexpr int LOADS = 8;
        for (int first = threadIdx.x; first < exist; first += LOADS * DRAW_THREADS) {
            float x[LOADS];
            GPU_UNROLL
            for (int i = 0, id = first; i < LOADS; i++, id += DRAW_THREADS) x[i] = id < exist ? logits[id] : 0;
            GPU_UNROLL for (int i = 0, id = first; i < LOADS; i++, id += DRAW_THREADS)
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
                GPU_UNROLL for (int l = 0; l < LOADS; l++) {
                    const int id = id_of(i + l * 32);
                    x[l] = id < exist ? *(const float4*)(logits + id) : float4{};
                }
                GPU_UNROLL for (int l = 0; l < LOADS; l++) {
                    const int id = id_of(i + l * 32);
                    const float four[4] = {x[l].x, x[l].y, x[l].z, x[l].w};
                    GPU_UNROLL for (int j = 0; j < 4; j++) if (id + j < exist) f(id + j, usable(four[j]));
                }
            }
        }
    }
    __device__ static unsigned long long weight(float exponent) { // e^-28 is below a step
        return exponent < -28.f ? 0ull : (unsigned long long)(exp_exact(exponent) * WEIGHT_ONE);
    }
    __device__ static int bin(float exponent) { return min(BINS - 1, (int)(exponent * -64)); }
};

// The largest key, to list.top, and of each group: from the likeliest of the head's blocks (`best`), if they were
// computed, else from all logits. Returns the largest key that this thread saw: its block's, or of its ids.
__device__ __forceinline__ unsigned long long find_likeliest(DrawList& list, const DrawRow& row,
                                                             const unsigned long long* best, int blocks) {
    unsigned long long mine = 0;
    if (best) {
        if ((int)threadIdx.x < blocks) mine = best[threadIdx.x];
    } else {
        row.each([&](int id, float logit) { mine = max(mine, draw_key(logit, id)); });
    }
    unsigned long long most = mine;
    if (most) atomicMax(&list.groups[threadIdx.x % DRAW_GROUPS], most);
    for (int lane = 16; lane; lane /= 2) most = max(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0 && most) atomicMax(&list.top, most);
    __syncthreads();
    return mine;
}

// For top-k: the ids from list.least on to the list, in any order, their weight to `listed`. False: there are fewer
// groups than k, or more ids than the list holds. Weights fall with keys: if the list gets fewer than k ids then no
// other id has a weight. dealt: the distribution to the head's blocks, of which this thread's has `mine`; or to none.
__device__ __forceinline__ bool list_from_kth(DrawList& list, const DrawRow& row, const RowsDealt& dealt,
                                              unsigned long long mine, unsigned long long& listed) {
    const int groups = dealt.blocks ? min(DRAW_GROUPS, dealt.blocks) : DRAW_GROUPS;
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

// Copies their ids to the list, in any order. Returns the sum of their weights.
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

// Samples from the list, a thread an entry: its rank and the weight of all likelier entries decide whether it is kept,
// the weight of the kept entries with lower ids whether it is sampled. `all`: the weight of all ids, listed or not.
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

// The number of ids with keys from `least` on, or (!count) their weight.
__device__ __forceinline__ unsigned long long sum_from(const DrawRow& row, unsigned long long least, bool count) {
    unsigned long long sum = 0;
    row.each([&](int id, float logit) {
        const unsigned long long w = row.weight(row.exponent(logit));
        if (w && draw_key(logit, id) >= least) sum += count ? 1 : w;
    });
    return block_sum(sum);
}

// The least key that top-k and then top-p keep: the largest that suffices, found bit by bit, from the highest down.
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

// Samples from all ids: those from `least` on, in order, a range of neighbours a thread.
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

// sample: see above.
__global__ void __launch_bounds__(DRAW_THREADS, BLOCKS_OF_1024)
sample_kernel(const float* all_logits,        // (R,V)
              size_t V, const Draw* draws,    // (R)
              const unsigned long long* best, // (R, BEST_BLOCKS) the likeliest id of each of the head's blocks; or null
              RowsDealt dealt,                // ... the distribution of its rows; V and `rows`: multiples of 4
              DrawState state) {
    __shared__ DrawList list;
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, i = threadIdx.x;
    if (state.seq[r] < 0) return;
    DrawRow row(all_logits + r * V, draws[r]);
    const Sampling& how = row.how;
    for (int bin = i; bin < BINS; bin += DRAW_THREADS) list.bins[bin] = 0;
    if (i < DRAW_GROUPS) list.groups[i] = 0;
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
            // The list holds every candidate: top-k or top-p cuts within it, or it has all ids.
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

void sample_gpu(Context& ctx, bool early, const float* logits, size_t V, const Draw* draws,
                const unsigned long long* best, const RowsDealt& dealt, const DrawState& state, int R) {
    launch_kernel(ctx, early && ctx.gpu->overlap, sample_kernel, (unsigned)R, DRAW_THREADS, 0, logits, V, draws, best,
                  dealt, state);
}
#endif
