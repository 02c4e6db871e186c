/* gpu/step/step.h: one kernel a token: Book II's decoding of 1 to 8 tokens as one persistent kernel. docs/one-kernel.md
   explains it: phases, packed weights, bytes in flight, words between blocks, several tokens, its bound.

   Ownership  One block a multiprocessor, all resident: 8 warps compute (consumers), and the producer fetches weights and
              pages in the order of their use into a ring in shared memory (1 warp with bulk copies; 4 with cp.async,
              before Hopper). The rows of a product are cut into tiles of 8, which are dealt to the blocks in turn.
   Phases     7 a layer: QKV, ATTEND, JOIN, O, ROUTE, GATE_UP, DOWN; then HEAD. `first` and `last` name those of a
              launch: all at once, or one a launch, with the same bits, for compute-sanitizer and emulation.
   Experts    ROUTE computes the router's scores, a row or two a block; then each block chooses the experts, and tells
              its producer. The rows of the k chosen gate_up follow each other, and so do the columns of their down.
   Words      16 bytes in global memory, written and read in one piece: four bf16, a float, the epoch. A reader reads a
              word until it has the epoch. A word is written again a layer later, when all its readers have read it.
   Faults     A wait of over a second sets *fault and ends all further waits.

   Beside it: plan.h, the plan; instructions.h; weights.h, how weights are packed and multiplied; attention.h, parts of
   attention; road.h, the host's part */
#pragma once
#include "gpu/step/attention.h"
#include "gpu/step/plan.h"
#include "gpu/step/weights.h"
#include "qwen3.cu"

#ifndef STEP_EMULATED
#include "gpu/step/instructions.h"
#endif

// ---- The kernel
// Tokens of a sequence whose contexts are split alike are attended together; mma's rows for their queries limit the
// number.
template <class S> __device__ inline void step_place(const StepArgs& p, StepDealt& dealt, int n) {
    StepPlace y;
    y.pos = p.b.pos[n], y.slot = p.b.slot[n], y.m0 = n, y.table = p.b.pages + (size_t)p.b.seq[n] * p.b.max_pages;
    while (y.m0 > 0 && p.b.seq[y.m0 - 1] == p.b.seq[n]) y.m0--;
    y.held = p.b.pos[y.m0], y.group = 0;
    // Items are assigned to blocks downwards from the last: these have the fewest weights. (The last have a tile of O
    // and of DOWN less than others, those before them one of QKV or GATE_UP.)
    const int blocks = gridDim.x, N = S::TOKENS == 1 ? 1 : p.b.N;
    int first = blocks - 1 - (int)blockIdx.x, leader = 0, item[2] = {first, first}, pages = 0, splits = 0;
    for (int m = 0; m < N; m++) {
        const int pages_m = step_split_pages(p, p.b.pos[m], S::WARPS);
        const int splits_m = (p.b.pos[m] / PAGE + pages_m) / pages_m;
        const bool leads = m == 0 || p.b.seq[m] != p.b.seq[m - 1] || pages_m != pages || splits_m != splits ||
                           m - leader == S::tokens_attended(p.G);
        pages = pages_m, splits = splits_m;
        if (leads) leader = m;
        if (m == n) y.pages = pages, y.splits = splits, y.item[0] = item[0], y.item[1] = item[1];
        y.group += leader == n;
        item[0] -= leads ? p.K * splits : 0, item[1] -= splits > p.joined ? p.H : 0;
    }
    for (int& item : y.item) item = (item % blocks + blocks) % blocks;
    y.kv = y.item[0] / y.splits, y.split = y.item[0] % y.splits;
    y.joined = y.splits > p.joined ? 0 : y.splits;
    y.attends = y.group && y.item[0] < p.K * y.splits, y.joins = !y.joined && y.item[1] < p.H;
    dealt.place[n] = y;
}
__device__ inline void step_deal(const StepArgs& p, StepDealt& dealt, int phase) {
    const int blocks = gridDim.x, shift = p.product[phase].shifted ? p.C / 8 % blocks : 0;
    const int first = ((int)blockIdx.x + blocks - shift) % blocks, units = p.product[phase].units;
    dealt.product[phase] = p.product[phase];
    dealt.first[phase] = first, dealt.units[phase] = units > first ? (units - first - 1) / blocks + 1 : 0;
}

// This block's items of ATTEND: KV heads x splits of every group of tokens. use(the group's place, its first token, KV
// head, split).
template <class S, class Use>
__device__ __forceinline__ void step_items(const StepArgs& p, const StepDealt& dealt, Use use) {
    const int N = S::TOKENS == 1 ? 1 : p.b.N;
    for (int n = 0; n < N; n++) {
        const StepPlace& y = dealt.place[n];
        const int splits = y.splits, first = y.item[0];
        for (int item = first; item < p.K * splits && y.group; item += gridDim.x)
            use(y, n, item == first ? y.kv : item / splits, item == first ? y.split : item % splits);
    }
}
// The end of a split's pages.
__device__ __forceinline__ int step_last_page(const StepPlace& y, int n, int split) {
    return min((split + 1) * y.pages, (y.held + n - y.m0 + y.group - 1) / PAGE + 1);
}
// Whether splits have so many pages that the cost of exchanging words matters less.
__device__ __forceinline__ bool step_long_context(const StepDealt& dealt) { return dealt.place[0].pages > 12; }
// Whether fewer copies are in flight during a wait for words.
template <class S> __device__ __forceinline__ bool step_hushed(const StepArgs& p, const StepDealt& dealt) {
    return p.C <= STEP_SMALL && (S::TOKENS > 1 || (dealt.place[0].splits > 2 && !step_long_context(dealt)));
}
// A consumer's waits for words, by lanes of a warp.
struct StepWaits {
    const StepArgs& p;
    int lane;
    bool gave_up = false; // waits are disabled
    __device__ StepWaits(const StepArgs& p, int lane) : p(p), lane(lane) {}
    __device__ uint4 await(const uint4* word, uint32_t epoch) {
        uint64_t since = 0;
        for (uint32_t spins = 1;; spins++) {
            const uint4 v = step_peek(word);
            if (v.w == epoch || gave_up) return v;
            if (spins % 1024 == 0) lose_patience(since);
        }
    }
    // Ends all waits if this wait, or one of another thread, has taken too long.
    __device__ __forceinline__ void lose_patience(uint64_t& since) {
        const uint64_t now = step_clock();
        if (!since) since = now;
        if (now - since > p.patience) *p.fault = 1;
        gave_up = *p.fault;
    }
    // Waits, with all lanes of the warp, for those of the words at(0), at(1) .. that are `there`. All missing words are
    // loaded together: one after another, each would cost a round trip to the L2 cache. Between the loads one lane
    // alone polls one of its words: polling by all lanes would delay the words.
    template <int COUNT, class At, class There>
    __device__ __forceinline__ void await_all(uint4 (&v)[COUNT], uint32_t epoch, At at, There there) {
        GPU_UNROLL
        for (int i = 0; i < COUNT; i++) v[i] = make_uint4(0, 0, 0, there(i) ? ~epoch : epoch);
        for (;;) {
            const uint4* missing = nullptr;
            GPU_UNROLL
            for (int i = 0; i < COUNT; i++)
                if (v[i].w != epoch) v[i] = step_peek(at(i));
            GPU_UNROLL
            for (int i = 0; i < COUNT; i++)
                if (v[i].w != epoch) missing = at(i);
            const uint32_t lanes = __ballot_sync(~0u, missing && !gave_up);
            if (!lanes) break;
            if (lane == __ffs((int)lanes) - 1) await(missing, epoch);
            __syncwarp();
        }
    }
};

// The producer: copies stage after stage of the phases from `first` on. ATTEND's are pages: keys, values, keys, ..
template <class S>
__device__ __forceinline__ void step_produce(const StepArgs& p, unsigned char* memory, const StepDealt& dealt,
                                             int first, int last) {
    StepBarrier *full = (StepBarrier*)memory, *empty = full + S::BARRIERS;
    const int i = threadIdx.x - S::CONSUMERS;
    int stage = 0, issued = 0;
    uint32_t parity = 1;
    const bool long_context = step_long_context(dealt), less = step_hushed<S>(p, dealt);
    bool attends = false; // this block, so it has more to fetch
    for (int n = 0; n < (S::TOKENS == 1 ? 1 : p.b.N); n++) attends |= dealt.place[n].attends;
    // Copies a stage's bytes. from(at, n): where those from `at` on are, n of them, or fewer if it sets n (of experts).
    auto fill = [&](int bytes, int each, int in_flight, auto from) {
        empty[stage].wait(parity);
        in_flight = max(1, (in_flight - (less && full[S::WAITS].is_odd()) + issued % 2) / 2);
        const int earlier = stage - in_flight;
        if (issued++ >= in_flight)
            full[earlier < 0 ? earlier + p.stages : earlier].wait(earlier < 0 ? parity : parity ^ 1);
        unsigned char* to = memory + p.ring_at + (size_t)stage * S::STAGE;
        if constexpr (S::BULK) {
            if (i == 0) full[stage].expect(bytes);
            __syncwarp();
            if constexpr (S::EXPERTS) {
                const int end = min((i + 1) * each, bytes);
                for (int at = i * each, n; at < end; at += n) {
                    n = end - at;
                    const void* bytes_there = from(at, n);
                    full[stage].copy(to + at, bytes_there, n);
                }
            } else if (int n = min(each, bytes - i * each); n > 0)
                full[stage].copy(to + i * each, from(i * each, n), n);
        } else {
            for (int at = i * 16; at < bytes; at += 128 * 16)
                if (int n = 16; true) StepBarrier::copy16(to + at, from(at, n));
            full[stage].arrive_with_copies();
        }
        if (++stage == p.stages) stage = 0, parity ^= 1;
    };
    for (int phase = first; phase < last; phase++) {
        const int layer = phase / STEP_PHASES, kind = layer < p.L ? phase % STEP_PHASES : (int)STEP_LOGITS;
        const StepProduct& q = dealt.product[kind];
        const int in_flight = layer == p.L ? q.in_flight : long_context ? p.in_flight_pages : q.in_flight + attends;
        if (kind == STEP_ATTEND)
            step_items<S>(p, dealt, [&](const StepPlace& y, int n, int kv, int split) {
                const int last = 2 * step_last_page(y, n, split);
                for (int half = 2 * split * y.pages; half < last; half += S::HALVES)
                    fill(min(S::HALVES, last - half) * S::HALF, S::HALF, p.in_flight_pages, [&](int at, int&) {
                        const int j = half + at / S::HALF;
                        const size_t page = kv_offset(y.table[j / 2], kv, 0, p.K, STEP_HEAD);
                        const bf16* from = (j % 2 ? p.values : p.keys) + layer * p.layer_size + page;
                        return (const unsigned char*)from + at % S::HALF;
                    });
            });
        const unsigned char* weights = p.packed + (layer < p.L ? layer * p.layer_bytes : 0) + q.at;
        const bool of_experts = S::EXPERTS && (kind == STEP_GATE_UP || kind == STEP_DOWN);
        if constexpr (S::EXPERTS) {
            if (kind == STEP_GATE_UP || (kind == STEP_DOWN && dealt.alone)) // this block's consumers choose
                full[S::CHOICE].wait(dealt.alone ? 0 : layer & 1);
            if (kind == STEP_DOWN) { // the k experts' columns of a tile
                const int each = q.steps / p.k * S::W::CHUNK;
                for (int u = 0; u < dealt.units[kind]; u++) {
                    const unsigned char* of_first = weights + (size_t)(dealt.first[kind] + u * gridDim.x) * each;
                    for (int step = 0; step < q.steps; step += S::STEPS)
                        fill(min(S::STEPS, q.steps - step) * S::W::CHUNK, 2048, in_flight, [&](int at, int& n) {
                            const int in_tile = step * S::W::CHUNK + at, j = (int)((unsigned)in_tile / (unsigned)each);
                            n = min(n, (j + 1) * each - in_tile);
                            return of_first + dealt.chosen[j] * p.expert_bytes + (in_tile - j * each);
                        });
                }
                continue;
            }
        }
        for (int u = 0; u < dealt.units[kind]; u++) {
            size_t unit = dealt.first[kind] + u * gridDim.x, expert = 0;
            if (of_experts) { // M / 8 units each
                const unsigned j = (unsigned)unit / (unsigned)(p.M / 8);
                unit -= j * (p.M / 8), expert = dealt.chosen[j] * p.expert_bytes;
            }
            const unsigned char* tile = weights + expert + unit * q.tiles * q.tile_bytes(S::W::CHUNK);
            for (int part = 0; part < q.tiles; part++)
                for (int step = 0; step < q.steps; step += S::STEPS) {
                    const int bytes = min(S::STEPS, q.steps - step) * S::W::CHUNK;
                    fill(bytes, 2048, in_flight, [&](int at, int&) { return tile + at; });
                    tile += bytes;
                }
        }
    }
}

// A consumer's thread.
template <class S> struct Step : StepWaits {
    using W = typename S::W;
    using Sum = typename W::Sum;
    static constexpr int D = STEP_HEAD, WARPS = S::WARPS, STEPS = S::STEPS, EACH = S::EACH;
    static constexpr int BATCH = S::BATCH, CONSUMERS = S::CONSUMERS, ROUND = S::ROUND, FOURS = S::FOURS;
    unsigned char* memory;
    StepDealt& dealt;
    const uint32_t before;            // steps taken
    const int N;
    int tid, warp, g, t;
    int n, hand;                      // of a round's tiles this warp hands over token n's sums of the hand-th four
    StepBarrier *full, *empty;
    bf16* work;
    int stage = 0;                    // of the ring: the next to be read,
    uint32_t parity = 0;              // ... and the parity of its phase
    int set = 0;                      // of sums; the other one's are still being published
    bool attends = false, joins = false; // this block has items of ATTEND, of JOIN
    const bool hushed;                // see step_hushed
    static constexpr int EARLY = 2;   // of a row of the router a lane loads so many words before its input
    uint2 router[STEP_ROUTED][EARLY]; // ... these,
    float score[STEP_ROUTED];         // and this lane's part of the rows' scores
    int row = 0;                      // this lane's, for the values that the warp publishes:
    uint32_t old = 0;                 // ... x before a product, as loaded: a float, or
    bool embedding = false;           // ... the embedding's bf16;
    uint16_t gain = 0;                // ... the weight of its successor's norm (bf16)
    float scale = 0;                  // 1 / rms of token n
    unsigned long long likeliest = 0; // key of this lane's logits, of token n

    __device__ Step(const StepArgs& p, StepDealt& dealt)
        : StepWaits(p, 0), dealt(dealt), before(*p.steps), N(S::TOKENS == 1 ? 1 : p.b.N),
          hushed(step_hushed<S>(p, dealt)) {
        for (int n = 0; n < N; n++) attends |= dealt.place[n].attends, joins |= dealt.place[n].joins;
    }
    // Called before each phase. (The compiler must not know that these are constant: it would compute all dependent
    // values once, ahead of all phases, and exceed the registers.)
    __device__ __forceinline__ void begin_phase() {
        const int zero = step_opaque(0);
        tid = threadIdx.x + zero, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
        memory = step_memory() + zero;
        full = (StepBarrier*)memory, empty = full + S::BARRIERS;
        n = warp % S::TOKENS, hand = warp / S::TOKENS;
        scale = 0;
        work = (bf16*)(memory + p.work_at);
    }

    __device__ __forceinline__ void meet() { step_meet(1, CONSUMERS); }
    __device__ __forceinline__ uint32_t epoch(int layer) const { return before * (uint32_t)p.L + (uint32_t)layer + 1; }

    // ---- Words
    // Waits for words of `splits` splits, and joins them: v[i] of at(i), at(i) + H D / 4 .. Loads AT_ONCE fours at a
    // time.
    template <int AT_ONCE, int COUNT, class At, class There>
    __device__ __forceinline__ void await_joined(uint4 (&v)[COUNT], int splits, uint32_t epoch, At at, There there) {
        constexpr int ONCE = AT_ONCE * StepJoin::ONCE;
        StepJoin of[COUNT];
        for (int from = 0; from < splits; from += ONCE) {
            uint4 of_split[COUNT * ONCE];
            await_all(of_split, epoch, [&](int i) { return at(i / ONCE) + (from + i % ONCE) * (p.H * (D / 4)); },
                      [&](int i) { return from + i % ONCE < splits && there(i / ONCE); });
            GPU_UNROLL
            for (int i = 0; i < COUNT; i++)
                GPU_UNROLL
                for (int j = 0; j < ONCE; j += StepJoin::ONCE)
                    if (from + j < splits) of[i].add(of_split + i * ONCE + j, splits - from - j);
        }
        GPU_UNROLL
        for (int i = 0; i < COUNT; i++) v[i] = of[i].word(epoch);
    }
    // A word of y of this lane's row and of its three neighbours'; `square`: x^2 of each. Lanes in fours.
    __device__ __forceinline__ void send(uint4* words, int row, float y, float square, uint32_t epoch, bool there) {
        const uint32_t pair = pack(y, __shfl_down_sync(~0u, y, 1)), next = __shfl_down_sync(~0u, pair, 2);
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        const uint4 word = make_uint4(pair, next, __float_as_uint(square), epoch);
        if (there && lane % 4 == 0) step_publish(words + row / 4, word);
    }

    // ---- Products
    // This warp's share of `chunks` chunks of a row or stage.
    __device__ __forceinline__ int chunks(int steps) const { return (unsigned)(steps - warp + WARPS - 1) / WARPS; }
    // Loads operands of `count` stages, which are then released. The first has `steps` chunks, the next `less` fewer.
    // Missing chunks become zeros: uninitialized, they would keep registers alive from one product to the next.
    __device__ __forceinline__ void load(typename W::Lane (&w)[BATCH][EACH], int count, int steps, int less) {
        GPU_UNROLL
        for (int i = 0; i < BATCH; i++) {
            const int each = i < count ? chunks(steps - i * less) : 0; // (or more)
            const unsigned char* from = memory + p.ring_at + stage * S::STAGE;
            if (i < count) full[stage].wait(parity);
            GPU_UNROLL
            for (int j = 0; j < EACH; j++)
                if (j < each) W::load(w[i][j], from, j * WARPS, warp, lane);
                else w[i][j] = {};
            if (i < count && ++stage == p.stages) stage = 0, parity ^= 1;
        }
        __syncwarp();
        const int free = stage - count + lane;
        if (lane < count) empty[free < 0 ? free + p.stages : free].arrive();
    }
    // sum[.][i] += W x^T of stage i < count: of one tile (SAME), whose k continue from stage to stage, s the first; or
    // of a tile each. (x: a lane's column; results of lanes without a token are unused.)
    template <bool SAME>
    __device__ __forceinline__ void multiply(Sum (&sum)[FOURS][BATCH], const typename W::Lane (&w)[BATCH][EACH],
                                             int count, int in, int s) {
        constexpr int AT_ONCE = 2; // stages: their chains overlap
        GPU_UNROLL
        for (int four = 0; four < FOURS; four++) {
            const bf16* x = work + min(4 * four + g / 2, N - 1) * S::row(in) + 8 * t + g % 2 * 4;
            typename W::X b[EACH];
            GPU_UNROLL
            for (int i = 0; i < BATCH; i++) {
                if (i % AT_ONCE == 0 && i >= count) break;
                const int first = (s + (SAME ? min(i, count - 1) : 0)) * STEPS + warp;
                GPU_UNROLL
                for (int j = 0; j < EACH && (SAME || i == 0); j++) {
                    if constexpr (W::PLAIN) b[j][0] = *(const uint2*)(x + (first + j * WARPS) * 32);
                    else W::load_x(b[j], (const unsigned char*)work + (first + j * WARPS) * W::X_BYTES, lane);
                }
                GPU_UNROLL
                for (int j = 0; j < EACH; j++) W::add(sum[four][i], w[i][j], b[j]);
            }
        }
    }
    __device__ __forceinline__ float* sums_of(int tile, int warp, int token) {
        return (float*)(memory + p.sums_at) + (((set * WARPS + warp) * ROUND + tile) * N + token) * 8;
    }
    __device__ __forceinline__ float* squares_of(int token) { // (of the product's first round's set)
        return (float*)(memory + p.squares_at) + (set * N + token) * WARPS;
    }
    // A tile's sums, which are of stages first .. last - 1.
    __device__ __forceinline__ void put(int tile, const Sum (&sum)[FOURS][BATCH], int first, int last) {
        GPU_UNROLL
        for (int four = 0; four < FOURS; four++) {
            float y = W::whole(sum[four][first]);
            GPU_UNROLL
            for (int i = first + 1; i < last; i++) y += W::whole(sum[four][i]);
            if (4 * four + t < N) sums_of(tile, warp, 4 * four + t)[g] = y;
        }
    }
    // One of this block's products: a round of tiles, then their sums are published.
    __device__ __forceinline__ void product(int kind, int layer) {
        const StepProduct& q = dealt.product[kind];
        const int tiles = dealt.units[kind] * q.tiles, stages = (q.steps + STEPS - 1) / STEPS;
        if (!tiles) return;
        const int less = stages == 1 ? 0 : STEPS;
        typename W::Lane w[BATCH][EACH];
        if constexpr (S::BATCHED) {
            if (S::TOKENS > 1)
                GPU_UNROLL
                for (int i = 0; i < BATCH; i++)
                    GPU_UNROLL
                    for (int j = 0; j < EACH; j++) w[i][j] = {};
            load(w, min(BATCH, stages == 1 ? tiles : stages), q.steps, less); // before the input has come
        }
        prepare(kind, layer, 0);
        if (hushed && tid == 0) full[S::WAITS].arrive();
        if (!S::EXPERTS || kind != STEP_GATE_UP || dealt.alone) input(kind, layer); // (ROUTE's is the same)
        if (hushed && tid == 0) full[S::WAITS].arrive();
        for (int tile = 0; tile < tiles; tile += ROUND) {
            const int count = min(ROUND, tiles - tile);
            if (tile) prepare(kind, layer, tile);
            if constexpr (S::BATCHED) multiply_round(w, tile, count, tiles, stages, less, q);
            else multiply_packed(count, q.steps);
            meet();
            if (hand < S::HANDS && n < N) {
                if (tile == 0) scale = rms_scale();
                hand_over(kind, layer, count);
            }
            set ^= 1;
        }
    }
    // In batches: the sums of tiles tile .. tile + count - 1 of `tiles`.
    __device__ __forceinline__ void multiply_round(typename W::Lane (&w)[BATCH][EACH], int tile, int count, int tiles,
                                                   int stages, int less, const StepProduct& q) {
        for (int i = 0; i < count && stages == 1; i += BATCH) {
            Sum sum[FOURS][BATCH] = {};
            multiply<false>(sum, w, count - i, q.in, 0);
            const int next = tile + i + BATCH;
            if (next < tiles) load(w, min(BATCH, tiles - next), q.steps, less);
            GPU_UNROLL
            for (int j = 0; j < BATCH; j++)
                if (i + j < count) put(i + j, sum, j, j + 1);
        }
        for (int i = 0; i < count && stages > 1; i++) {
            Sum sum[FOURS][BATCH] = {};
            for (int s = 0; s < stages; s += BATCH) {
                multiply<true>(sum, w, stages - s, q.in, s);
                const int next = s + BATCH < stages ? s + BATCH : 0;
                if (next || tile + i + 1 < tiles) load(w, min(BATCH, stages - next), q.steps - next * STEPS, less);
            }
            put(i, sum, 0, BATCH);
        }
    }
    // Stage by stage: the sums of `count` tiles. The number of chunks is a compile-time constant below, so that no
    // branch separates their loads, or their products: a short sequence of instructions.
    __device__ __forceinline__ void multiply_packed(int count, int steps) {
        const unsigned char* x = (const unsigned char*)work + warp * W::X_BYTES;
        if (steps <= STEPS) return multiply_tiles<EACH>(count, x, chunks(steps));
        for (int tile = 0; tile < count; tile++) {
            float sum[1] = {};
            for (int step = 0; step < steps; step += STEPS)
                multiply_stage<EACH>(sum, x + step * W::X_BYTES, chunks(steps - step));
            if (t == 0) sums_of(tile, warp, 0)[g] = sum[0];
        }
    }
    // Tiles of a stage each, of which this warp has `each` chunks, E at most; two tiles at a time if these are few.
    template <int E> __device__ __forceinline__ void multiply_tiles(int count, const unsigned char* x, int each) {
        if constexpr (E > 0)
            if (each < E) return multiply_tiles<E - 1>(count, x, each);
        constexpr int ONCE = E > 2 ? 1 : 2;
        int tile = 0;
        for (; tile + ONCE <= count; tile += ONCE) {
            float sum[ONCE] = {};
            multiply_stages<ONCE, E>(sum, x);
            GPU_UNROLL
            for (int i = 0; i < ONCE; i++)
                if (t == 0) sums_of(tile + i, warp, 0)[g] = sum[i];
        }
        if (tile == count) return;
        float sum[1] = {};
        multiply_stages<1, E>(sum, x);
        if (t == 0) sums_of(tile, warp, 0)[g] = sum[0];
    }
    // A stage, of which this warp has `each` chunks, or E if that is more.
    template <int E> __device__ __forceinline__ void multiply_stage(float (&sum)[1], const unsigned char* x, int each) {
        if constexpr (E > 0)
            if (each < E) return multiply_stage<E - 1>(sum, x, each);
        multiply_stages<1, E>(sum, x);
    }
    // sum[i] += W x^T of the E chunks of stage i, which is then released.
    template <int COUNT, int E>
    __device__ __forceinline__ void multiply_stages(float (&sum)[COUNT], const unsigned char* x) {
        typename W::Lane w[COUNT][E + 1];
        typename W::X of_x[E + 1];
        GPU_UNROLL
        for (int i = 0; i < COUNT; i++) {
            const unsigned char* from = memory + p.ring_at + stage * S::STAGE;
            full[stage].wait(parity);
            GPU_UNROLL
            for (int j = 0; j < E; j++) W::load(w[i][j], from, j * WARPS, warp, lane);
            if (++stage == p.stages) stage = 0, parity ^= 1;
        }
        GPU_UNROLL
        for (int j = 0; j < E; j++) W::load_x(of_x[j], x + j * WARPS * W::X_BYTES, lane);
        __syncwarp();
        const int free = stage - COUNT + lane;
        if (lane < COUNT) empty[free < 0 ? free + p.stages : free].arrive();
        GPU_UNROLL
        for (int i = 0; i < COUNT; i++)
            GPU_UNROLL
            for (int j = 0; j < E; j++) W::add(sum[i], w[i][j], of_x[j]);
    }
    // Before a round that begins with `tile`: loads the operands of hand_over. Row r of the hand's i-th tile is lane 8
    // i + r's.
    __device__ __forceinline__ void prepare(int kind, int layer, int tile) {
        const int tiles = dealt.product[kind].tiles, i = tile + 4 * hand + lane / 8;
        row = (dealt.first[kind] + (tiles == 2 ? i / 2 : i) * (int)gridDim.x) * 8 + lane % 8;
        if ((kind != STEP_O && kind != STEP_DOWN) || hand >= S::HANDS || n >= N || row >= p.C) return;
        embedding = kind == STEP_O && layer == 0 && (W::PLAIN || p.embed); // x is that still
        auto bits = [](const bf16& x) { return __builtin_bit_cast(uint16_t, x); };
        old = embedding ? bits(p.embed[(size_t)p.b.token[n] * p.C + row])
                        : __float_as_uint(p.residual[(size_t)n * p.C + row]);
        gain = bits(p.gains[kind == STEP_O ? p.gains_of(layer) + p.C + row : p.gains_of(layer + 1) + row]);
    }
    __device__ __forceinline__ float rms_scale() {
        const float* squares = squares_of(n);
        float sum = 0;
        GPU_UNROLL
        for (int w = 0; w < WARPS; w++) sum += squares[w];
        return rsqrtf(__fadd_rn(__fdividef(sum, (float)p.C), p.eps));
    }
    __device__ __forceinline__ void hand_over(int kind, int layer, int count) {
        const int mine = 4 * hand + lane / 8;
        const bool there = mine < count;
        float y = 0;
        if (there)
            GPU_UNROLL
            for (int w = 0; w < WARPS; w++) y += sums_of(mine, w, n)[lane % 8];
        if (kind != STEP_O && kind != STEP_DOWN) y = __fmul_rn(y, scale);
        const uint32_t e = epoch(layer);
        if (kind == STEP_QKV) {
            send(p.qkv + (size_t)n * (p.H + 2 * p.K) * (D / 4), row, y, 0, e, there);
        } else if (kind == STEP_GATE_UP) {
            const float up = __shfl_down_sync(~0u, y, 8);
            float h = __fdividef(y, 1 + exp2_fast(-LOG2E * y)) * up;
            if constexpr (S::EXPERTS) h *= dealt.share[min((unsigned)row / (unsigned)p.M, 31u)];
            send(p.hidden + (size_t)n * (p.F / 4), row, h, 0, e, there && lane / 8 % 2 == 0);
        } else if (kind != STEP_LOGITS) {
            const float x = __uint_as_float(embedding ? old << 16 : old) + y;
            if (there) p.residual[(size_t)n * p.C + row] = x;
            const float by = __uint_as_float((uint32_t)gain << 16);
            send((kind == STEP_O ? p.mid : p.out) + (size_t)n * (p.C / 4), row, x * by, __fmul_rn(x, x), e, there);
        } else if (there) {
            const Draw& draw = p.draw[n];
            if (p.seen) y = penalized(y, draw.how, p.seen[(size_t)n * p.V + row]);
            p.logits[(size_t)n * p.V + row] = y;
            if (row < draw.exist) likeliest = max(likeliest, draw_key(usable(y), row));
        }
    }
    // The words of a product's input. A warp loads those of the chunks that it multiplies, and waits for no other warp.
    struct Input {
        static constexpr int WORDS = S::NUMBERS / 4; // of a chunk's x
        const uint4* from;
        int warp, count, filled; // words that this warp loads; with the zeros behind them
        int mine;                // ... of whole chunks
        int joined;              // splits of attention to join
        uint32_t epoch;
        bool embeds, normed;     // words are of embeddings; their squares are summed before a norm
        int routes;              // the layer whose router takes them, or -1
        __device__ __forceinline__ int word(unsigned i) const { // this warp's i-th
            return (int)((warp + i / WORDS * WARPS) * WORDS + i % WORDS);
        }
    };
    __device__ __forceinline__ Input input_of(int kind, int layer) {
        const StepProduct& q = dealt.product[kind];
        constexpr int WORDS = Input::WORDS;
        const int words = q.in / 4, steps = (words + WORDS - 1) / WORDS; // the last of them may be short
        const int mine = steps > warp ? (steps - warp + WARPS - 1) / WARPS * WORDS : 0;
        const int count = mine - ((steps - 1) % WARPS == warp ? steps * WORDS - words : 0);
        const int filled = (q.steps + STEPS - 1) / STEPS * EACH * WORDS;
        const bool routes = S::EXPERTS && kind == STEP_ROUTE, mid = kind == STEP_GATE_UP || routes;
        const bool normed = kind == STEP_QKV || mid || kind == STEP_LOGITS;
        const uint4* from = kind == STEP_O ? p.att : kind == STEP_DOWN ? p.hidden : mid ? p.mid : p.out;
        const int joined = kind == STEP_O && S::TOKENS == 1 ? dealt.place[0].joined : 1;
        const uint32_t e = epoch(kind == STEP_QKV || kind == STEP_LOGITS ? layer - 1 : layer);
        return {from, warp, count, filled, mine, joined, e, kind == STEP_QKV && layer == 0, normed,
                routes ? layer : -1};
    }
    // Copies a product's input to `work`, before a norm also the words' squares.
    __device__ __forceinline__ void input(int kind, int layer) {
        const Input in = input_of(kind, layer);
        if constexpr (W::PLAIN) input_rows(in, kind);
        else input_packed(in);
        __syncwarp();
    }
    // For packed weights, in store_x's layout: all lanes together, as it requires; four words each if there are enough.
    __device__ __forceinline__ void input_packed(const Input& in) {
        const int all = S::BATCHED ? in.filled : in.mine;
        float square = 0;
        int done = 0;
        auto take = [&](auto once) {
            constexpr int ONCE = decltype(once)::value;
            uint4 v[ONCE];
            auto at = [&](int j) { return done + 32 * j + lane; };
            auto there = [&](int j) { return at(j) < in.count; };
            const auto word = [&](int j) { return in.from + in.word(at(j)); };
            if (in.embeds) {
                GPU_UNROLL
                for (int j = 0; j < ONCE; j++)
                    v[j] = there(j) ? embedded(0, in.word(at(j))) : make_uint4(0, 0, 0, 0);
            } else if (in.joined > 1) await_joined<1>(v, in.joined, in.epoch, word, there);
            else await_all(v, in.epoch, word, there);
            __syncwarp();
            GPU_UNROLL
            for (int j = 0; j < ONCE; j++) {
                square += __uint_as_float(v[j].z);
                if constexpr (S::EXPERTS)
                    if (in.routes >= 0 && there(j)) add_scores(in.routes, in.word(at(j)), j, done == 0, v[j]);
                W::store_x((unsigned char*)work + (warp + at(j) / in.WORDS * WARPS) * W::X_BYTES, at(j) % in.WORDS,
                           make_uint2(v[j].x, v[j].y), at(j) < all);
            }
            done += 32 * ONCE;
        };
        while (done + 4 * 32 <= all) take(std::integral_constant<int, 4>());
        if constexpr (S::EXPERTS)
            if (done + 2 * 32 <= all) take(std::integral_constant<int, 2>());
        while (done < all) take(std::integral_constant<int, 1>());
        if (!in.normed) return;
        square = warp_sum(square);
        if (lane == 0) squares_of(0)[warp] = square;
    }
    // A row a token. One in APART of the words are this lane's.
    __device__ __forceinline__ void input_rows(const Input& in, int kind) {
        const StepProduct& q = dealt.product[kind];
        constexpr int APART = 32 * WARPS, ONCE = S::TOKENS == 1 ? 4 : S::TOKENS < 8 ? 8 / S::TOKENS : 1;
        const int count = in.count, width = S::row(q.in);
        const int apart = kind == STEP_O ? p.att_words() : q.in / 4; // from token to token
        for (int i = count + lane; i < in.filled; i += 32)
            for (int m = 0; m < N; m++) *(uint2*)(work + m * width + 4 * in.word(i)) = make_uint2(0, 0);
        const uint4* own = in.from + in.word(lane);
        bf16* to = work + 4 * in.word(lane);
        float square[S::TOKENS] = {};
        auto take = [&](int m, int i, const uint4& v) { // the i-th
            *(uint2*)(to + m * width + 4 * i * APART) = make_uint2(v.x, v.y);
            square[m] += __uint_as_float(v.z);
        };
        if (in.embeds)
            GPU_UNROLL
            for (int m = 0; m < S::TOKENS; m++)
                for (int i = lane; i < count && m < N; i += 32) take(m, i / 32, embedded(m, in.word(i)));
        else if (S::TOKENS == 1 && in.joined > 1)
            for (int i = lane; i - lane < count; i += 64, own += 2 * APART, to += 8 * APART) {
                uint4 v[2];
                auto there = [&](int j) { return i + 32 * j < count; };
                await_joined<1>(v, in.joined, in.epoch, [&](int j) { return own + j * APART; }, there);
                GPU_UNROLL
                for (int j = 0; j < 2; j++)
                    if (there(j)) take(0, j, v[j]);
            }
        else if constexpr (S::TOKENS == 1) { // one lane polls, and the others look when its word has arrived
            if (lane == 0 && count) await(own, in.epoch);
            __syncwarp();
            for (int i = lane; i < count; i += ONCE * 32, own += ONCE * APART, to += ONCE * 4 * APART) {
                uint4 v[ONCE];
                GPU_UNROLL
                for (int j = 0; j < ONCE; j++)
                    if (i + j * 32 < count) v[j] = step_peek(own + j * APART);
                GPU_UNROLL
                for (int j = 0; j < ONCE; j++) {
                    if (i + j * 32 >= count) break;
                    if (v[j].w != in.epoch) v[j] = await(own + j * APART, in.epoch);
                    if constexpr (S::EXPERTS)
                        if (in.routes >= 0) add_scores(in.routes, in.word(i + j * 32), j, i == lane, v[j]);
                    take(0, j, v[j]);
                }
            }
        } else
            for (int i = lane; i - lane < count; i += ONCE * 32, own += ONCE * APART, to += ONCE * 4 * APART) {
                uint4 v[ONCE * S::TOKENS];
                auto there = [&](int j) { return j % S::TOKENS < N && i + j / S::TOKENS * 32 < count; };
                const auto at = [&](int j) { return own + j % S::TOKENS * apart + j / S::TOKENS * APART; };
                await_all(v, in.epoch, at, there);
                GPU_UNROLL
                for (int j = 0; j < ONCE * S::TOKENS; j++)
                    if (there(j)) take(j % S::TOKENS, j / S::TOKENS, v[j]);
            }
        if (!in.normed) return;
        constexpr int LANES = 32 / S::TOKENS; // of a token, at the end
        const float sum = sum_over_lanes(square);
        if (lane % LANES == 0 && lane / LANES < N) squares_of(lane / LANES)[warp] = sum;
    }
    // The warp's sums of COUNT numbers a lane: the m-th is in lanes m (32 / COUNT) and up. Same order as warp_sum.
    template <int COUNT> __device__ __forceinline__ float sum_over_lanes(float (&x)[COUNT]) {
        static_assert((COUNT & (COUNT - 1)) == 0);
        int other = 16;
        GPU_UNROLL
        for (int n = COUNT / 2; n > 0; n /= 2, other /= 2)
            GPU_UNROLL
            for (int i = 0; i < n; i++) {
                const bool upper = lane & other;
                const float give = upper ? x[i] : x[n + i], keep = upper ? x[n + i] : x[i];
                x[i] = keep + __shfl_xor_sync(~0u, give, other);
            }
        for (; other; other /= 2) x[0] += __shfl_xor_sync(~0u, x[0], other);
        return x[0];
    }
    // Four numbers of token m's embedding, in the form of DOWN's output.
    __device__ __forceinline__ uint4 embedded(int m, int word) {
        if (!W::PLAIN && !p.embed) {
            const float4 x = __ldcg((const float4*)(p.residual + (size_t)m * p.C) + word);
            return weighed(word, x.x, x.y, x.z, x.w);
        }
        const uint2 u = ((const uint2*)(p.embed + (size_t)p.b.token[m] * p.C))[word];
        return weighed(word, low(u.x), high(u.x), low(u.y), high(u.y));
    }
    __device__ __forceinline__ uint4 weighed(int word, float a, float b, float c, float d) {
        const uint2 w = ((const uint2*)p.gains)[word];
        return make_uint4(pack(a * low(w.x), b * high(w.x)), pack(c * low(w.y), d * high(w.y)),
                          __float_as_uint(fmaf(a, a, b * b) + fmaf(c, c, d * d)), 0);
    }

    __device__ __forceinline__ void phase(int kind, int layer) {
        if (kind == STEP_ATTEND ? !attends : kind == STEP_JOIN ? !joins : !S::EXPERTS && kind == STEP_ROUTE) return;
        begin_phase();
        if (kind == STEP_ATTEND)
            step_items<S>(p, dealt, [&](const StepPlace&, int n, int kv, int split) { attend(layer, n, kv, split); });
        else if (kind == STEP_JOIN) {
            for (int n = 0; n < N; n++) {
                const StepPlace& y = dealt.place[n];
                for (int h = y.item[1]; h < p.H && !y.joined; h += gridDim.x) join(layer, n, h, y.splits);
            }
        } else if (S::EXPERTS && kind == STEP_ROUTE) route(layer);
        else {
            if constexpr (S::EXPERTS)
                if (kind == STEP_GATE_UP || (kind == STEP_DOWN && dealt.alone)) choose(layer);
            product(kind, layer);
        }
    }

    // ---- Experts
    // Four numbers of row i of those that this block computes: blockIdx.x, blockIdx.x + gridDim.x, ..
    __device__ __forceinline__ uint2 router_word(int layer, int i, int word) const {
        const int e = blockIdx.x + i * gridDim.x;
        if (e >= p.E || word >= p.C / 4) return make_uint2(0, 0);
        return ((const uint2*)(p.router + ((size_t)layer * p.E + e) * p.C))[word];
    }
    // Adds what a word of the input contributes: the j-th of this lane's first ones, or a later one.
    __device__ __forceinline__ void add_scores(int layer, int word, int j, bool first, const uint4& x) {
        GPU_UNROLL
        for (int i = 0; i < STEP_ROUTED; i++) {
            const uint2 w = first && j < EARLY ? router[i][j % EARLY] : router_word(layer, i, word);
            score[i] += fmaf(low(w.x), low(x.x), high(w.x) * high(x.x)) +
                        fmaf(low(w.y), low(x.y), high(w.y) * high(x.y));
        }
    }
    // GATE_UP's input, and this block's scores.
    __device__ __forceinline__ void route(int layer) {
        const Input in = input_of(STEP_ROUTE, layer);
        GPU_UNROLL
        for (int i = 0; i < STEP_ROUTED; i++) {
            score[i] = 0;
            GPU_UNROLL
            for (int j = 0; j < EARLY; j++) router[i][j] = router_word(layer, i, in.word(lane + 32 * j));
        }
        input(STEP_ROUTE, layer);
        GPU_UNROLL
        for (int i = 0; i < STEP_ROUTED; i++) {
            const float sum = warp_sum(score[i]);
            if (lane == 0) dealt.routed[i][warp] = sum;
        }
        meet();
        const int e = blockIdx.x + lane * gridDim.x;
        if (warp || lane >= STEP_ROUTED || e >= p.E) return;
        float z = 0;
        GPU_UNROLL
        for (int w = 0; w < WARPS; w++) z += dealt.routed[lane][w];
        z *= rms_scale();
        const uint32_t bits = __float_as_uint(z);
        step_publish(p.scores + e, make_uint4(bits, bits, bits, epoch(layer)));
    }
    // The k experts of the largest scores, of equal ones the first: an expert's rank is the number of those before it.
    __device__ __forceinline__ void choose(int layer) {
        float* const z = sums_of(0, 0, 0); // (E), and -inf up to a multiple of 4; free until the next product's sums
        const int padded = (p.E + 3) / 4 * 4;
        for (int e = tid; e - lane < padded; e += CONSUMERS) {
            uint4 word[1];
            await_all(word, epoch(layer), [&](int) { return p.scores + e; }, [&](int) { return e < p.E; });
            const uint32_t bits = word[0].x & word[0].y & word[0].z; // the same in each, see step_peek
            if (e < padded) z[e] = e < p.E ? usable(__uint_as_float(bits)) : -INFINITY;
        }
        meet();
        for (int e = tid; e < p.E; e += CONSUMERS) {
            const float own = z[e];
            const auto before = [&](float other, int f) { return other > own || (other == own && f < e); };
            int rank = 0;
            for (int f = 0; f < p.E; f += 4) {
                const float4 v = *(const float4*)(z + f);
                rank += before(v.x, f) + before(v.y, f + 1) + before(v.z, f + 2) + before(v.w, f + 3);
            }
            if (rank < p.k) dealt.chosen[rank] = e, dealt.share[rank] = own;
        }
        float top = -INFINITY, all = 0;
        const auto weight = [&](float z) { return exp2_fast((z - top) * LOG2E); };
        if (warp == 0) {
            for (int e = lane; e < p.E; e += 32) top = fmaxf(top, z[e]);
            top = warp_max(top);
            for (int e = lane; e < p.E; e += 32) all += weight(z[e]);
        }
        meet();
        if (tid == 0) full[S::CHOICE].arrive(); // for the producer
        if (warp) return;
        const float own = lane < p.k ? weight(dealt.share[lane]) : 0;
        all = warp_sum(p.normed_shares ? own : all);
        if (lane < p.k) dealt.share[lane] = own / all;
        __syncwarp();
    }

    // ---- Attention
    // A KV head's queries of token n, or of the group that it leads, over a split. Tokens m0 .. end - 1 of the step
    // belong to one sequence: their keys and values are not in the cache yet but arrive as words. Shared memory holds
    // these, the queries, and the warps' parts.
    __device__ __forceinline__ void attend(int layer, int n, int kv, int split) {
        const StepPlace& y = dealt.place[n];
        const int group = S::TOKENS == 1 ? 1 : y.group, end = n + group;
        const int G = p.G, Q = G * group, held = y.held, m0 = y.m0;
        const int first = split * y.pages, count = step_last_page(y, n, split) - first;
        const int fresh = (first + count) * PAGE > held ? end - m0 : 0;
        const bool appends = (first + count) * PAGE >= held + fresh && fresh; // one split has the newest
        bf16 *new_keys = work, *new_values = new_keys + S::TOKENS * D, *queries = new_values + S::TOKENS * D;
        float* parts = (float*)(queries + Q * D);
        StepPage page = {}; // (see product)
        // Heads: the queries, token by token, then each new token's key and value.
        const int heads = Q + 2 * fresh;
        auto token_of = [&](int j) { return j >= Q ? m0 + (j - Q) / 2 : S::TOKENS == 1 ? n : n + j / G; };
        const int mine = (warp + WARPS - S::HANDS * S::TOKENS % WARPS) % WARPS; // the first; publishing warps are late
        auto turn_of = [&](int j) {
            return StepTurn(p.gains + p.gains_of(layer) + 2 * p.C + (j < Q ? 0 : D),
                            p.rope + (size_t)(held + token_of(j) - m0) * D, lane);
        };
        StepTurn turn = turn_of(min(mine, heads - 1));
        auto load = [&](int from) { // a round: pages from .. from + WARPS - 1, one a warp
            const int end = 2 * min(from + WARPS, count), keys = 2 * (from + warp); // (halves)
            for (int half = 2 * from, stages; half < end; half += stages * S::HALVES) {
                stages = min((end - half + S::HALVES - 1) / S::HALVES, p.stages); // a lane waits for one and frees it
                const bool again = stage + lane >= p.stages;
                const int own = again ? stage + lane - p.stages : stage + lane;
                if (lane < stages) full[own].wait(again ? parity ^ 1 : parity);
                __syncwarp();
                auto at = [&](int i) {
                    const int s = stage + i / S::HALVES;
                    const unsigned char* first = memory + p.ring_at + (s >= p.stages ? s - p.stages : s) * S::STAGE;
                    return (const bf16*)first + i % S::HALVES * (PAGE * D);
                };
                const int i = keys < end ? keys - half : stages * S::HALVES;
                if (i >= 0 && i < stages * S::HALVES) page.load_keys(at(i));
                if (i >= -1 && i < stages * S::HALVES - 1) page.load_values(at(i + 1));
                __syncwarp();
                if (lane < stages) empty[own].arrive();
                stage += stages;
                if (stage >= p.stages) stage -= p.stages, parity ^= 1;
            }
        };
        load(0); // before the words arrive
        const size_t slot = kv_offset(y.slot / PAGE, kv, y.slot % PAGE, p.K, D);
        auto word_of = [&](int j) {
            const bool query = j < Q, value = !query && (j - Q) % 2;
            const int h = query ? kv * G + (S::TOKENS == 1 ? j : j % G) : p.H + (value ? p.K : 0) + kv;
            return p.qkv + ((size_t)token_of(j) * (p.H + 2 * p.K) + h) * (D / 4) + lane;
        };
        auto take = [&](int j, const uint4& word) {
            const int m = token_of(j);
            const bool query = j < Q, value = !query && (j - Q) % 2;
            uint2 x = make_uint2(word.x, word.y);
            if (j != mine) turn = turn_of(j);
            if (!value) x = rotate(x, turn);
            bf16* to = query ? queries + j * D : (value ? new_values : new_keys) + (m - m0) * D;
            *(uint2*)(to + 4 * lane) = x;
            if (!appends || query || m < n) return;
            const int own = S::TOKENS == 1 ? 0 : dealt.place[m].slot;
            const size_t at = S::TOKENS == 1 ? slot : kv_offset(own / PAGE, kv, own % PAGE, p.K, D);
            *(uint2*)((value ? p.values : p.keys) + layer * p.layer_size + at + 4 * lane) = x;
        };
        if constexpr (S::TOKENS == 1)
            for (int j = mine; j < heads; j += WARPS) take(j, await(word_of(j), epoch(layer)));
        else {
            constexpr int MOST = (8 + 2 * S::TOKENS + WARPS - 1) / WARPS; // heads of a warp
            uint4 words[MOST];
            await_all(words, epoch(layer), [&](int i) { return word_of(mine + i * WARPS); },
                      [&](int i) { return mine + i * WARPS < heads; });
            GPU_UNROLL
            for (int i = 0; i < MOST; i++)
                if (mine + i * WARPS < heads) take(mine + i * WARPS, words[i]);
        }
        meet();

        const int row = min(g, Q - 1); // (the other lanes' results are not stored)
        const int pos = S::TOKENS == 1 ? y.pos : held + token_of(row) - m0;
        const bf16* query = queries + row * D + t * 8;
        StepSoftmax softmax;
        for (int from = 0; from < count; from += WARPS) {
            if (from) load(from);
            if (from + warp >= count) break;
            const int at = (first + from + warp) * PAGE;
            if (at + PAGE > held) page.renew(new_keys, new_values, at - held, fresh);
            softmax.template add<(S::TOKENS > 1)>(page, query, pos - at + 1);
        }
        softmax.store(parts + (size_t)warp * Q * (D + 4), Q);
        meet();
        publish_attention(parts, layer, n, Q, kv, split);
        meet(); // `work` is free
    }
    // Numbers 4 lane .. 4 lane + 3 of a head: rms norm, then the rotation of the planes (i, i + D / 2).
    __device__ __forceinline__ uint2 rotate(uint2 head, const StepTurn& turn) {
        const float x[4] = {low(head.x), high(head.x), low(head.y), high(head.y)};
        const float gain[4] = {low(turn.gain.x), high(turn.gain.x), low(turn.gain.y), high(turn.gain.y)};
        const float4* a = turn.angle;
        const float cosines[4] = {a[0].x, a[0].z, a[1].x, a[1].z}, sines[4] = {a[0].y, a[0].w, a[1].y, a[1].w};
        const float squares = warp_sum(fmaf(x[3], x[3], fmaf(x[2], x[2], fmaf(x[1], x[1], x[0] * x[0]))));
        const float scale = rsqrtf(fmaf(squares, 1.f / D, p.eps));
        float y[4];
        GPU_UNROLL
        for (int i = 0; i < 4; i++) {
            const float mine = x[i] * scale * gain[i], other = __shfl_xor_sync(~0u, mine, 16);
            y[i] = fmaf(mine, cosines[i], (lane < 16 ? -other : other) * sines[i]);
        }
        return make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
    }
    // Joins the warps' parts of Q queries.
    __device__ __forceinline__ void publish_attention(float* parts, int layer, int n, int Q, int kv, int split) {
        const int G = p.G;
        auto token_of = [&](int j) { return S::TOKENS == 1 ? n : n + j / G; };
        auto head_of = [&](int j) { return kv * G + (S::TOKENS == 1 ? j : j % G); };
        for (int i = tid; i < Q * (D / 4); i += CONSUMERS) {
            const int j = i / (D / 4), quad = i % (D / 4);
            float top, weights;
            const float4 x = step_join(parts + j * (D + 4), WARPS, Q * (D + 4), quad, top, weights);
            uint4* to = p.att_of(token_of(j), dealt.place[n].joined ? split : split + 1);
            step_publish(to + head_of(j) * (D / 4) + quad, StepJoin{top, weights, x}.word(epoch(layer)));
        }
    }
    // Joins a head's splits, if they are too many for O.
    __device__ __forceinline__ void join(int layer, int n, int h, int splits) {
        if (warp) return;
        const int word = h * (D / 4) + lane;
        uint4 v[1];
        await_joined<4>(v, splits, epoch(layer), [&](int) { return p.att_of(n, 1) + word; }, [](int) { return true; });
        step_publish(p.att_of(n, 0) + word, v[0]);
    }

    // ---- The end: each block's likeliest ids; the last block samples if requested, and counts the step.
    __device__ __forceinline__ void finish() {
        auto largest = [](unsigned long long x) {
            for (int other = 16; other; other /= 2) x = max(x, __shfl_xor_sync(~0u, x, other));
            return x;
        };
        auto* of_hands = (unsigned long long*)sums_of(0, 0, 0); // (hands, tokens)
        likeliest = largest(likeliest);
        if (lane == 0 && hand < S::HANDS && n < N) of_hands[warp] = likeliest;
        meet();
        if (tid < N)
            p.best[(size_t)tid * BEST_BLOCKS + blockIdx.x] =
                max(of_hands[tid], of_hands[tid + (S::HANDS - 1) * S::TOKENS]);
        meet();
        if (tid == 0) dealt.last = step_arrive(p.arrived) == (int)gridDim.x - 1;
        meet();
        if (!dealt.last) return;
        if (tid == 0) *p.arrived = 0, *p.steps = before + 1;
        if (!p.greedy || warp >= N) return;
        unsigned long long top = 0;
        for (int i = lane; i < (int)gridDim.x; i += 32) top = max(top, __ldcg(p.best + (size_t)warp * BEST_BLOCKS + i));
        top = largest(top);
        if (lane == 0) publish(p.next, warp, p.V, (int)~(uint32_t)top);
    }
};

// Phases first .. last - 1 of a step. Grid: any number of blocks; with more than one phase, all must be resident.
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1) step_kernel(const __grid_constant__ StepArgs p, int first, int last) {
    unsigned char* memory = step_memory();
    StepBarrier *full = (StepBarrier*)memory, *empty = full + S::BARRIERS;
    StepDealt& dealt = *(StepDealt*)(empty + S::BARRIERS);
    const int tid = threadIdx.x;
    if (tid < p.stages) full[tid].begin(S::BULK ? 1 : 128), empty[tid].begin(S::WARPS);
    if (tid < STEP_KINDS) step_deal(p, dealt, tid);
    if (tid == 0) full[S::WAITS].begin(1);
    if (S::EXPERTS && tid == 0) full[S::CHOICE].begin(1), dealt.alone = last - first == 1;
    if (tid < (S::TOKENS == 1 ? 1 : p.b.N)) step_place<S>(p, dealt, tid);
    StepBarrier::begun();
    step_meet(0, S::THREADS);
    if (tid >= S::CONSUMERS) {
        if constexpr (S::BULK) keep_registers<40>();
        if (S::BULK && tid >= S::CONSUMERS + 32) return; // one warp copies
        return step_produce<S>(p, memory, dealt, first, last);
    }
    if constexpr (S::BULK) take_registers<232>(); // 128 x 40 + 256 x 232 of 384 x 168
    Step<S> step(p, dealt);
    int layer = first / STEP_PHASES, kind = first % STEP_PHASES;
    for (int phase = first; phase < last; phase++) {
        if (layer == p.L) kind = STEP_LOGITS;
        step.phase(kind, layer);
        if (++kind == STEP_PHASES) kind = 0, layer++;
    }
    if (last == p.phases()) step.finish();
}
