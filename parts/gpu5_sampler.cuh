// ---- The sampler on the GPU: the same draws, bit for bit, since probabilities are integers and every float step is
// rounded alike. What changes between draws lies in the GPU's memory, so that one graph serves them all.
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

// The head's product, with the penalties, and each block's likeliest id on the way. `best` has room for BEST_BLOCKS blocks,
// and sample_kernel a thread for each of them: MOST_BLOCKS holds stream_product to that.
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
    int *token, *pos, *slot;      // (R) of the token just drawn; pos is the position of the one before on entry
    const int *seq, *pages;
    int max_pages;
    uint32_t* seen;               // (R,V) or null
    volatile int* ring;           // (R, ring_size) in the host's memory: id + 1 of the token at each position
    int ring_size;
};

// A block of 1024 threads a row. The likely ids go to a list in shared memory, in which all is decided by comparing
// everyone with everyone; if what may be drawn is more than the list holds (flat distributions without top-k), the
// cut is found by bisection over all ids instead, a pass each.
constexpr int LIST = 1024, BINS = 2048;
__global__ void __launch_bounds__(1024) sample_kernel(const float* all_logits, size_t V, const Draw* draws, const unsigned long long* best, int best_blocks, DrawState state) {
    __shared__ uint32_t bins[BINS];
    __shared__ unsigned long long keys[LIST], weights[LIST];
    __shared__ int listed, answer, cut;
    __shared__ unsigned long long top_key;
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x, i = threadIdx.x;
    if (state.seq[row] < 0) return;
    const float* logits = all_logits + row * V;
    const Sampling how = draws[row].how;
    const int exist = draws[row].exist;
    for (int bin = i; bin < BINS; bin += 1024) bins[bin] = 0;
    if (i == 0) top_key = 0, listed = 0;
    __syncthreads();
    unsigned long long most = 0;
    if (best) {
        if (i < best_blocks) most = best[row * BEST_BLOCKS + i];
    } else {
        for (int id = i; id < exist; id += 1024) most = max(most, draw_key(usable(logits[id]), id));
    }
    for (int lane = 16; lane; lane /= 2) most = max(most, __shfl_xor_sync(~0u, most, lane));
    if (i % 32 == 0 && most) atomicMax(&top_key, most);
    __syncthreads();
    const int likeliest = (int)~(uint32_t)top_key;
    if (i == 0) answer = likeliest;
    if (how.temperature != 0 && exist > 1) {
        const float top = usable(logits[likeliest]);
        auto exponent = [&](int id) { return (usable(logits[id]) - top) / how.temperature; };
        auto weight_of = [&](float x) { return x < -28.f ? 0ull : (unsigned long long)(exp_exact(x) * 1099511627776.f); };
        const int k = how.top_k > 0 ? how.top_k : INT_MAX;
        // How many there are in each step of 1/64 of the exponent, and how much in all.
        unsigned long long all = 0;
        for (int id = i; id < exist; id += 1024) {
            const float x = exponent(id);
            const unsigned long long w = weight_of(x);
            all += w;
            if (w) atomicAdd(&bins[min(BINS - 1, (int)(x * -64))], 1u);
        }
        all = block_sum(all);
        __syncthreads();
        if (i == 0) { // the first `cut` bins go to the list
            unsigned held = 0;
            cut = 0;
            while (cut < BINS && held < (unsigned)min(k, LIST + 1) && held + bins[cut] <= LIST) held += bins[cut++];
        }
        __syncthreads();
        unsigned long long in_list = 0;
        for (int id = i; id < exist; id += 1024) {
            const float x = exponent(id);
            const unsigned long long w = weight_of(x);
            if (!w || min(BINS - 1, (int)(x * -64)) >= cut) continue;
            const int at = atomicAdd(&listed, 1);
            keys[at] = draw_key(usable(logits[id]), id), weights[at] = w;
            in_list += w;
        }
        in_list = block_sum(in_list);
        __syncthreads();
        Philox random = philox(how.seed, (uint64_t)state.pos[row] + 1, STREAM_SAMPLE);
        const uint64_t r64 = (uint64_t)random.v[1] << 32 | random.v[0];
        const double floor_weight = (double)how.min_p * 1099511627776.;
        const int n = listed;
        const bool cut_by_k = n >= k, complete = cut_by_k || in_list == all || (how.top_k <= 0 && how.top_p < 1 && (double)in_list >= (double)how.top_p * (double)all);
        if (complete) {
            const unsigned long long key = i < n ? keys[i] : 0, mine = i < n ? weights[i] : 0;
            int rank = 0;
            unsigned long long before = 0;
            for (int j = 0; i < n && j < n; j++)
                if (keys[j] > key) rank++, before += weights[j];
            bool kept = i < n && rank < k;
            const unsigned long long total = cut_by_k ? block_sum(kept ? mine : 0) : all;
            if (how.top_p < 1) kept = kept && (rank == 0 || (double)before < (double)how.top_p * (double)total);
            if (how.min_p > 0) kept = kept && (double)mine >= floor_weight;
            const unsigned long long left = block_sum(kept ? mine : 0), r = __umul64hi(r64, left);
            if (!kept && i < n) weights[i] = 0;
            __syncthreads();
            unsigned long long lower = 0;
            for (int j = 0; kept && j < n; j++)
                if ((uint32_t)keys[j] > (uint32_t)key) lower += weights[j]; // ids are inverted in keys
            if (kept && lower <= r && r < lower + mine) answer = (int)~(uint32_t)key;
        } else {
            // The least key that is kept, by top-k and then by top-p: bit by bit, from the largest down.
            auto above = [&](unsigned long long least, bool count) {
                unsigned long long sum = 0;
                for (int id = i; id < exist; id += 1024) {
                    const unsigned long long w = weight_of(exponent(id));
                    if (w && draw_key(usable(logits[id]), id) >= least) sum += count ? 1 : w;
                }
                return block_sum(sum);
            };
            unsigned long long least = 0;
            if (k != INT_MAX) {
                unsigned long long found = 0; // the largest key that at least k keys reach
                for (int bit = 63; bit >= 0; bit--)
                    if (above(found | 1ull << bit, true) >= (unsigned long long)k) found |= 1ull << bit;
                least = found;
            }
            if (how.top_p < 1) {
                const double need = (double)how.top_p * (double)above(least, false);
                unsigned long long found = 0;
                for (int bit = 63; bit >= 0; bit--)
                    if ((double)above(found | 1ull << bit, false) >= need) found |= 1ull << bit;
                least = max(least, min(found, top_key));
            }
            auto kept = [&](int id) {
                const unsigned long long w = weight_of(exponent(id));
                return draw_key(usable(logits[id]), id) >= least && (how.min_p <= 0 || (double)w >= floor_weight) ? w : 0;
            };
            // Ids in order: a stretch a thread.
            const int each = (exist + 1023) / 1024, from = min(exist, i * each), to = min(exist, from + each);
            unsigned long long sum = 0;
            for (int id = from; id < to; id++) sum += kept(id);
            const unsigned long long r = __umul64hi(r64, block_sum(sum));
            unsigned long long lower = block_sum_before(sum);
            if (lower <= r && r < lower + sum)
                for (int id = from; id < to; id++) {
                    const unsigned long long w = kept(id);
                    if (r < lower + w) { answer = id; break; }
                    lower += w;
                }
        }
    }
    __syncthreads();
    if (i != 0) return;
    const int pos = state.pos[row] + 1;
    state.token[row] = answer;
    state.pos[row] = pos;
    if (pos / PAGE < state.max_pages) state.slot[row] = state.pages[(size_t)state.seq[row] * state.max_pages + pos / PAGE] * PAGE + pos % PAGE;
    if (state.seen) state.seen[row * V + answer]++;
    if (state.ring) state.ring[(size_t)row * state.ring_size + pos % state.ring_size] = answer + 1;
}

// ---- Drawing on a GPU: a step, from embedding to drawn token, is one CUDA graph, whose every changing number lies in the
// GPU's memory. Steps are launched AHEAD of the tokens the caller has seen, which come through `ring` in the CPU's memory;
// what was computed past the last token that was accepted is overwritten later.
template <class T> struct GpuDraws {
    static constexpr int AHEAD = 8;
    Session<T>& session;
    Context& ctx;
    DrawState step = {};
    uint32_t* seen;
    Draw* draw_parameters;
    unsigned long long* best;
    volatile int* ring = nullptr;
    int launched = 0, last = 0;              // draws up to these positions are on their way, will be wanted
    std::map<int, cudaGraphExec_t> graphs;   // by splits and whether there are penalties
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
        ctx.gpu->attention = arena.take<float>(attention_scratch(ctx, 1, (session.capacity - 1) / SPLIT + 1, c.H, c.D));
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
        if (penalties) copy_in(ctx, seen, seen_counts(session.ids, d.answer, session.config.V).data(), (size_t)session.config.V);
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
        const StreamArgs head = {session.activations.normed, row, nullptr, nullptr, 0, session.weights.head.w[0], 1, session.config.C, (int)V};
        const int blocks = stream_product(ctx, head, DrawEpilogue{session.row_logits, V, draw_parameters, step.seen, best});
        launch(ctx, sample_kernel, 1, 1024, 0, session.row_logits, V, draw_parameters, best, blocks, step);
    }

    void launch_step() {
        const int splits = splits_for_graph(launched, session.capacity);
        cudaGraphExec_t& graph = graphs[2 * splits + penalties];
        if (!graph) {
            ctx.stop = nullptr;
            graph = record_graph(ctx, [&] {
                const Batch batch = {1, 1, step.token, step.pos, step.seq, step.slot, session.table, session.pages, 1, splits};
                forward(ctx, session.config, session.weights, batch, session.activations, session.cache, session.rope);
                launch_draw(session.table); // row 0
            });
        }
        CUDA_CHECK(cudaGraphLaunch(graph, ctx.gpu->stream));
        launched++;
    }
};
