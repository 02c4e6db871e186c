// model/likeliest.cu: likeliest (model/sampling.h) on a GPU, for log-probabilities.
#ifdef QWEN3_GPU
#include "qwen3.cu"

inline constexpr int LIKELIEST_THREADS = 1024;

// A block of 1024 threads owns a row of logits, a thread every 1024th id. Each thread keeps the
// likeliest of its own ids. The block takes the likeliest of these k times; after each time the warp of the thread that
// held it searches, all lanes together, for the next one among that thread's ids. So no sort is needed, and no list can
// overflow. Bound by two passes over logits, mostly in the L2 cache, and by two barriers for each of the k.
__global__ void __launch_bounds__(LIKELIEST_THREADS, BLOCKS_OF_1024)
likeliest_kernel(Likeliest* out,                        // (R)
                 const float* all_logits,               // (R,V)
                 size_t V, int exist, const int* seq,   // (R) -1: a spare row
                 const int* wanted) {                   // by seq: how many ids; -1: the row is left alone
    __shared__ unsigned long long tops[LIKELIEST_THREADS / 32];
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
    for (int id = threadIdx.x; id < exist; id += LIKELIEST_THREADS) own = max(own, key(id));
    unsigned long long best = largest_of_all(own);
    const float top = usable(logits[~(uint32_t)best]);
    float sum = 0;
    for (int id = threadIdx.x; id < exist; id += LIKELIEST_THREADS) sum += expf(usable(logits[id]) - top);
    sum = block_sum(sum);
    const int count = min(min(wanted[seq[r]], MAX_LIKELIEST), exist);
    if (threadIdx.x == 0) out[r].log_sum = top + logf(sum), out[r].count = count;
    for (int i = 0; i < count; i++) {
        if (i > 0) best = largest_of_all(own);
        const int id = (int)~(uint32_t)best, owner = id % LIKELIEST_THREADS;
        if (threadIdx.x == 0) out[r].id[i] = id, out[r].logit[i] = usable(logits[id]);
        if (owner / 32 != warp) continue;
        unsigned long long next = 0;
        for (int other = owner + lane * LIKELIEST_THREADS; other < exist; other += 32 * LIKELIEST_THREADS)
            if (key(other) < best) next = max(next, key(other));
        next = largest(next);
        if (lane == owner % 32) own = next;
    }
}
void likeliest_gpu(Context& ctx, Likeliest* out, const float* logits, size_t V, int exist, const int* seq,
                   const int* wanted, int R) {
    if (exist < 1 || (size_t)exist > V) DIE("likeliest: %d ids of %zu", exist, V);
    launch(ctx, likeliest_kernel, (unsigned)R, LIKELIEST_THREADS, 0, out, logits, V, exist, seq, wanted);
}
#endif
