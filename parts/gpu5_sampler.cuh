// ====================================================================== 12 The sampler on a GPU, and a step as a graph
// Book I's `sample`, the same draws bit for bit, since probabilities are integers and every float step is rounded
// alike. What changes between draws lies in the GPU's memory, so that one graph serves them all.
struct Draw {
    Sampling how;
    int exist; // only ids below may be drawn
};
__device__ inline float usable(float logit) { return isnan(logit) ? -FLT_MAX : fminf(fmaxf(logit, -FLT_MAX), FLT_MAX); }
// A larger key is likelier: the logit, then the lower id.
__device__ inline unsigned long long draw_key(float logit, int id) {
    const uint32_t u = __float_as_uint(logit + 0.f); // -0 becomes 0
    return (unsigned long long)(u >> 31 ? ~u : u | 0x80000000) << 32 | (uint32_t)~id;
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
    uint32_t* seen;          // (R,V) or null
    volatile int* ring;      // (R, ring_size) in the host's memory, or null: id + 1 of the token at each position
    int ring_size;
};

// ---- sample_kernel: Book I's `sample`, and the next step's batch
// A block of 1024 threads owns a row of logits, a thread every 1024th id; 25 KB of shared memory. The likeliest ids go
// to a list in shared memory, in which all is decided by comparing everyone with everyone. If what may be drawn is more
// than the list holds (flat distributions without top-k), the least key that is kept is found by bisection over all ids
// instead, a pass for each bit. Bound by latency: passes over logits in the L2 cache, and a barrier after each.
constexpr int DRAW_THREADS = 1024;
constexpr int LIST = DRAW_THREADS; // a thread an entry
constexpr int BINS = 2048;         // of 1/64 of the exponent
constexpr float WEIGHT_ONE = 1099511627776.f; // of the likeliest id: weights are integers in steps of 2^-40

struct DrawList {
    unsigned long long keys[LIST], weights[LIST];
    unsigned long long top;  // the largest key of all
    uint32_t bins[BINS];     // how many ids each has
    int count, cut;          // entries; bins that go to the list
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
    __device__ float logit(int id) const { return usable(logits[id]); }
    __device__ unsigned long long key(int id) const { return draw_key(logit(id), id); }
    __device__ float exponent(int id) const { return (logit(id) - top) / how.temperature; }
    __device__ static unsigned long long weight(float exponent) { // e^-28 is below a step
        return exponent < -28.f ? 0ull : (unsigned long long)(exp_exact(exponent) * WEIGHT_ONE);
    }
    __device__ static int bin(float exponent) { return min(BINS - 1, (int)(exponent * -64)); }
};

// The largest key, to list.top: out of the head's blocks' (`best`), if they looked for it, else out of all logits.
__device__ __forceinline__ void find_likeliest(DrawList& list, const DrawRow& row, const unsigned long long* best,
                                               int blocks) {
    unsigned long long most = 0;
    if (best) {
        if ((int)threadIdx.x < blocks) most = best[threadIdx.x];
    } else {
        for (int id = threadIdx.x; id < row.exist; id += DRAW_THREADS) most = max(most, row.key(id));
    }
    for (int lane = 16; lane; lane /= 2) most = max(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0 && most) atomicMax(&list.top, most);
    __syncthreads();
}

// Counts the ids of each bin; the first `cut` bins, as many as the list holds or top-k needs, will go to the list.
// Returns the sum of all weights.
__device__ __forceinline__ unsigned long long count_bins(DrawList& list, const DrawRow& row) {
    unsigned long long all = 0;
    for (int id = threadIdx.x; id < row.exist; id += DRAW_THREADS) {
        const float x = row.exponent(id);
        const unsigned long long w = row.weight(x);
        all += w;
        if (w) atomicAdd(&list.bins[row.bin(x)], 1u);
    }
    all = block_sum(all);
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned enough = min(row.k(), LIST + 1);
        unsigned held = 0;
        int cut = 0;
        while (cut < BINS && held < enough && held + list.bins[cut] <= LIST) held += list.bins[cut++];
        list.cut = cut;
    }
    __syncthreads();
    return all;
}

// Their ids to the list, in any order. Returns the sum of their weights.
__device__ __forceinline__ unsigned long long fill_list(DrawList& list, const DrawRow& row) {
    unsigned long long sum = 0;
    for (int id = threadIdx.x; id < row.exist; id += DRAW_THREADS) {
        const float x = row.exponent(id);
        const unsigned long long w = row.weight(x);
        if (!w || row.bin(x) >= list.cut) continue;
        const int at = atomicAdd(&list.count, 1);
        list.keys[at] = row.key(id), list.weights[at] = w;
        sum += w;
    }
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
    for (int id = threadIdx.x; id < row.exist; id += DRAW_THREADS) {
        const unsigned long long w = row.weight(row.exponent(id));
        if (w && row.key(id) >= least) sum += count ? 1 : w;
    }
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
        const unsigned long long w = row.weight(row.exponent(id));
        return row.key(id) >= least && (row.how.min_p <= 0 || (double)w >= floor_weight) ? w : 0;
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

// The drawn token becomes the next step's batch, and goes to the host.
__device__ __forceinline__ void publish(const DrawState& state, int row, size_t V, int answer) {
    const int pos = state.pos[row] + 1, page = pos / PAGE;
    state.token[row] = answer;
    state.pos[row] = pos;
    if (page < state.max_pages)
        state.slot[row] = state.pages[(size_t)state.seq[row] * state.max_pages + page] * PAGE + pos % PAGE;
    if (state.seen) state.seen[row * V + answer]++;
    if (state.ring) state.ring[(size_t)row * state.ring_size + pos % state.ring_size] = answer + 1;
}

__global__ void __launch_bounds__(DRAW_THREADS)
sample_kernel(const float* all_logits,        // (R,V)
              size_t V, const Draw* draws,    // (R)
              const unsigned long long* best, // (R, BEST_BLOCKS) the likeliest id of each of the head's blocks; or null
              int best_blocks, DrawState state) {
    __shared__ DrawList list;
    let_next_start();
    wait_for_previous();
    const int r = blockIdx.x, i = threadIdx.x;
    if (state.seq[r] < 0) return;
    DrawRow row(all_logits + r * V, draws[r]);
    const Sampling& how = row.how;
    for (int bin = i; bin < BINS; bin += DRAW_THREADS) list.bins[bin] = 0;
    if (i == 0) list.top = 0, list.count = 0;
    __syncthreads();
    find_likeliest(list, row, best ? best + r * BEST_BLOCKS : nullptr, best_blocks);
    const int likeliest = (int)~(uint32_t)list.top;
    if (i == 0) list.answer = likeliest;
    if (how.temperature != 0 && row.exist > 1) {
        row.top = row.logit(likeliest);
        const unsigned long long all = count_bins(list, row), listed = fill_list(list, row);
        const Philox bits = philox(how.seed, (uint64_t)state.pos[r] + 1, STREAM_SAMPLE);
        const uint64_t random = (uint64_t)bits.v[1] << 32 | bits.v[0];
        // Nothing that may be drawn is missing from the list: top-k or top-p cuts within it, or it has all.
        const bool top_p_within = how.top_k <= 0 && how.top_p < 1 && (double)listed >= (double)how.top_p * (double)all;
        if (list.count >= row.k() || listed == all || top_p_within) draw_from_list(list, row, all, random);
        else draw_from_all(list, row, random);
    }
    __syncthreads();
    if (i == 0) publish(state, r, V, list.answer);
}

// ---- Drawing on a GPU: a step, from embedding to drawn token, is one CUDA graph, whose every changing number lies in
// the GPU's memory. Up to AHEAD steps are launched beyond the tokens that the caller has seen, which come through
// `ring` in the CPU's memory; what was computed past the last token that was accepted is overwritten later. A graph
// starts when the one launched before it has completed, all of it: what sample_kernel writes, the next graph's kernels
// may read early.
template <class T> struct GpuDraws {
    static constexpr int AHEAD = 8;
    Session<T>& session;
    Context& ctx;
    DrawState step = {};
    uint32_t* seen;
    Draw* draw_parameters;
    unsigned long long* best;
    volatile int* ring = nullptr;
    int launched = 0;                      // draws up to this position are on their way,
    int last = 0;                          // ... and up to this one will be wanted
    std::map<int, cudaGraphExec_t> graphs; // by splits and whether there are penalties
    bool penalties = false;

    explicit GpuDraws(Session<T>& s) : session(s), ctx(s.ctx) { ctx.gpu = std::make_shared<Gpu>(*ctx.gpu); }
    GpuDraws(const GpuDraws&) = delete;
    ~GpuDraws() {
        cudaStreamSynchronize(ctx.gpu->stream);
        for (auto& [key, graph] : graphs) cudaGraphExecDestroy(graph);
        if (ring) cudaFreeHost((void*)ring);
    }

    // The session's memory that only a GPU needs.
    void plan() {
        Arena& arena = session.arena;
        const Config& c = session.config;
        ctx.gpu->partial = arena.take<float>(PARTIAL_BYTES / sizeof(float));
        ctx.gpu->arrived = arena.take<int>(MAX_TILES);
        const int splits = (session.capacity - 1) / SPLIT + 1;
        ctx.gpu->attention = arena.take<float>(attention_scratch(ctx, 1, splits, c.H, c.D));
        ctx.gpu->attention_arrived = arena.take<int>(c.H);
        for (int** one : {&step.token, &step.pos, &step.slot}) *one = arena.take<int>(1);
        seen = arena.take<uint32_t>(c.V);
        draw_parameters = arena.take<Draw>(1);
        best = arena.take<unsigned long long>(BEST_BLOCKS);
    }

    void begin(size_t most) {
        CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream)); // steps that an answer before this one left behind
        const int capacity = session.capacity;
        if (!ring) {
            CUDA_CHECK(cudaHostAlloc((void**)&ring, ((size_t)capacity + 1) * sizeof(int), cudaHostAllocMapped));
            CUDA_CHECK(cudaHostGetDevicePointer((void**)&step.ring, (void*)ring, 0));
            step.ring_size = capacity + 1, step.seq = session.table; // table[0] = 0: sequence 0
            step.pages = session.table, step.max_pages = session.pages;
        }
        const auto& d = session.drawing;
        penalties = has_penalties(d.how);
        const int V = session.config.V;
        if (penalties) copy_in(ctx, seen, seen_counts(session.ids, d.answer, V).data(), (size_t)V);
        step.seen = penalties ? seen : nullptr;
        const int n = (int)session.ids.size(), pos = n - 1;
        const Draw parameters = {d.how, d.exist};
        copy_in(ctx, draw_parameters, &parameters, 1);
        copy_in(ctx, step.pos, &pos, 1);
        for (int p = 0; p <= capacity; p++) ring[p] = 0;
        last = (int)std::min((size_t)capacity, n + std::min(most, (size_t)capacity) - 1);
        launched = n;
        launch_draw(session.last_row);
    }

    int next() {
        const int p = (int)session.ids.size();
        while (launched < std::min(p + AHEAD, last)) launch_step();
        for (int spins = 0; !ring[p]; spins++)
            if (spins % 4096 == 4095) { // a fault of the GPU must not hang us
                const cudaError_t e = cudaStreamQuery(ctx.gpu->stream);
                if (e != cudaErrorNotReady) CUDA_CHECK(e);
            }
        return ring[p] - 1;
    }

  private:
    void launch_draw(const int* row) {
        const size_t V = session.config.V;
        const bf16 *x = session.activations.normed, *W = session.weights.head.w[0];
        const StreamArgs head = {x, row, nullptr, nullptr, 0, W, 1, session.config.C, (int)V};
        const DrawEpilogue epilogue{session.row_logits, V, draw_parameters, step.seen, best};
        const int blocks = stream_product(ctx, head, epilogue);
        launch(ctx, sample_kernel, 1, DRAW_THREADS, 0, session.row_logits, V, draw_parameters, best, blocks, step);
    }

    void launch_step() {
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
