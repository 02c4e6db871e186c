// gpu/step/plan.h: the plan of one kernel a token: shapes, products, shared memory.
#pragma once
#include "qwen3.cu"
#include <algorithm>

// ---- The plan: computed once by the host.
constexpr int STEP_HEAD = 128;   // D
constexpr int STEP_SMALL = 1024; // C of models whose exchanges take longer than their weights
constexpr int STEP_ROUTED = 2;   // rows of the router that a block computes, at most
enum StepPhase { STEP_QKV, STEP_ATTEND, STEP_JOIN, STEP_O, STEP_ROUTE, STEP_GATE_UP, STEP_DOWN, STEP_LOGITS };
constexpr int STEP_PHASES = STEP_LOGITS, STEP_KINDS = STEP_LOGITS + 1; // of a layer (ROUTE: of experts); and the head

// W, packed: `units` are distributed to blocks, each of `tiles` tiles of 8 rows (gate and up: one of each).
struct StepProduct {
    int units, tiles, in, steps; // chunks of a row
    bool shifted;                // not of C rows
    int in_flight;               // half stages: three are one and two in turns
    size_t at;                   // bytes from the layer's first; of the head from the first of all
    BOTH size_t tile_bytes(int chunk) const { return (size_t)steps * chunk; }
    BOTH size_t bytes(int chunk) const { return (size_t)units * tiles * tile_bytes(chunk); }
};

struct StepArgs {
    int C, F, H, K, V, L, G; // (G = H / K: a kernel divides slowly)
    int E, k, M;               // of experts, as Config; F is then k M, the chosen experts' rows one after another
    bool normed_shares;
    float eps;
    StepProduct product[STEP_KINDS]; // by phase; of ATTEND, JOIN and ROUTE nothing
    size_t expert_bytes;       // from one expert's weights to the next one's; product[].at are the first one's
    size_t layer_bytes;        // of packed weights
    const unsigned char* packed;
    const bf16* gains;         // (L, 2 C + 2 D), (C): norm1, norm2, q_norm, k_norm; the last norm
    const bf16* embed;         // (V,C); null: the tokens' rows of it are in `residual` (packed formats only)
    const bf16* router;        // (L,E,C)
    const float* rope;         // (positions, D/2, 2)
    bf16 *keys, *values;       // the cache; from one layer to the next:
    size_t layer_size;
    Batch b;                   // N rows; rows of a sequence are neighbours, in order of position
    float* residual;           // (N,C)
    uint4 *qkv, *mid, *hidden, *out; // words: (N, rows / 4)
    uint4* scores;             // words of one float each: (E)
    uint4* att;                // (N, most_splits + 1, H D / 4): splits; or first the output of JOIN, then these
    uint32_t* steps;           // finished so far
    int* arrived;              // blocks at their end; zero between kernels
    volatile int* fault;
    uint64_t patience;         // of a wait, ns
    int stages;
    int in_flight_pages;        // half stages, as StepProduct::in_flight
    int short_keys, most_splits; // up to so many keys have one split
    int joined;                // O itself joins up to so many splits
    float* logits;             // (N,V)
    const Draw* draw;          // (N)
    const uint32_t* seen;      // (N,V) or null: no penalties
    unsigned long long* best;  // (N, BEST_BLOCKS)
    bool greedy;               // the kernel samples: parameters
    DrawState next;            // destination of the draws
    size_t sums_at, squares_at, work_at, ring_at, shared; // in shared memory: see plan_step

    // A product's weights as they are packed: of one expert, not of k.
    StepProduct of_one(int phase) const {
        StepProduct q = product[phase];
        if (E && phase == STEP_GATE_UP) q.units /= k;
        if (E && phase == STEP_DOWN) q.in /= k, q.steps /= k;
        return q;
    }
    BOTH int phases() const { return STEP_PHASES * L + 1; }
    BOTH size_t gains_of(int layer) const { return (size_t)layer * (2 * C + 2 * STEP_HEAD); }
    BOTH int att_words() const { return (most_splits + 1) * H * (STEP_HEAD / 4); } // of a token
    BOTH uint4* att_of(int n, int i) const { return att + (size_t)n * att_words() + i * (H * (STEP_HEAD / 4)); }
};

// A block's work and the places of the tokens, in shared memory behind the ring's barriers.
struct StepPlace {
    int pos, slot;
    int m0, held;      // tokens m0 .. of the step are of its sequence, whose cache holds so many keys
    int splits, pages; // number of splits that O joins itself; 0: JOIN joins them
    int joined;        // so many splits O joins itself, or 0: JOIN does
    int item[2];       // this block's first one of ATTEND and of JOIN
    int kv, split;     // ... its data
    bool attends, joins; // whether it has any
    const int* table;
    int group;         // of ATTEND: number of tokens from this one on; 0: it belongs to an earlier one's group
};
struct StepDealt {
    int first[STEP_KINDS];  // of each product its first unit, every gridDim.x-th from there on,
    int units[STEP_KINDS];  // and their number
    int last;               // this block ends last
    StepProduct product[STEP_KINDS]; // (a kernel's argument is slow to index)
    StepPlace place[STEP_TOKENS];
    int alone;              // the launch has one phase: nothing of the phases before is in this block
    int chosen[32];         // the layer's experts
    float share[32];        // ... and their factors
    float routed[STEP_ROUTED][8]; // each warp's part of this block's scores
};

// Pages of a split at a position. The number of splits is the smallest that gives each warp at most a page, or the
// maximum.
BOTH inline int step_split_pages(const StepArgs& p, int pos, int warps) {
    const int pages = pos / PAGE + 1, wanted = (pages + warps - 1) / warps;
    const int splits = pos < p.short_keys ? 1 : wanted < p.most_splits ? wanted : p.most_splits;
    return (pages + splits - 1) / splits;
}

struct StepPlain;
// One of the kernel's shapes. Tests use fewer warps and shorter stages. W: the packing of the weights, StepPlain or
// StepPacked.
template <int WARPS_, int STEPS_, int TOKENS_, bool BULK_, class W_ = StepPlain, bool EXPERTS_ = false>
struct StepShape {
    using W = W_;
    static constexpr int WARPS = WARPS_;      // that compute
    static constexpr int STEPS = STEPS_;      // chunks of a stage
    static constexpr int TOKENS = TOKENS_;    // at most
    static constexpr bool BULK = BULK_;
    static constexpr bool EXPERTS = EXPERTS_; // the layers' MLPs are mixtures of experts
    static constexpr int FOURS = (TOKENS + 3) / 4; // of tokens: what one mma has
    static constexpr int EACH = STEPS / WARPS, STAGE = STEPS * W::CHUNK;
    static constexpr int HALF = PAGE * STEP_HEAD * 2, HALVES = STAGE / HALF; // of a page: its keys; its values
    static constexpr int NUMBERS = 32 * W::RUNS; // of a row, in a chunk
    static constexpr int BARRIERS = STAGE < 10000 ? 32 : 16; // of each kind; the ring's stages are fewer:
    static constexpr int WAITS = BARRIERS - 1; // so this one's phase is odd while warp 0 waits for a product's words
    static constexpr int CHOICE = BARRIERS - 2; // ... and this one counts the layers whose experts are chosen
    // How a block multiplies: stages in batches, whose operands are loaded before the input arrives; or, with INT4 and
    // with 8 bits in larger models, stage by stage.
    static constexpr bool BATCHED = W::PLAIN || (W::RUNS == 2 && STEPS < 32);
    // Stages whose operands are in registers at once: the largest number that fits.
    static constexpr int BATCH = BULK ? 4 : 2;
    static constexpr int HANDS = 2 * TOKENS > WARPS ? 1 : 2; // warps that publish a token's sums, of 4 tiles each,
    static constexpr int ROUND = 4 * HANDS;                  // ... of so many tiles at a time
    static constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 128; // (whole warpgroups)
    // Distance in numbers between tokens' rows of a product's input, up to whole stages: odd multiples of 64 bytes.
    BOTH static int row(int in) {
        return ((in + STEPS * NUMBERS - 1) / (STEPS * NUMBERS) * STEPS * W::RUNS | 1) * 32;
    }
    BOTH static size_t input_bytes(int in, int N) {
        if constexpr (W::PLAIN) return (size_t)N * row(in) * sizeof(bf16);
        else return (size_t)(in + STEPS * NUMBERS - 1) / (STEPS * NUMBERS) * STEPS * W::X_BYTES;
    }
    // Tokens of a group: their queries, G of a KV head, are rows of one operand.
    BOTH static int tokens_attended(int G) { return TOKENS == 1 ? 1 : TOKENS < 8 / G ? TOKENS : 8 / G; }
    static_assert(STEPS % WARPS == 0 && TOKENS <= WARPS && TOKENS <= STEP_TOKENS, "a warp hands over one token's sums");
    static_assert(!EXPERTS || (TOKENS == 1 && WARPS <= 8), "several tokens choose different experts");
    static_assert(HALVES > 0 && 2 * WARPS % HALVES == 0, "a stage has pages of one round of warps");
};

// All but pointers.
template <class S> StepArgs plan_step(const Config& c, int N, int blocks, size_t shared_limit) {
    StepArgs p = {};
    p.C = c.C, p.F = c.F, p.H = c.H, p.K = c.K, p.V = c.V, p.L = c.L, p.G = c.H / c.K, p.eps = c.eps;
    auto product = [&c](int rows, int in, int tiles, bool shifted) {
        const int steps = (in + S::NUMBERS - 1) / S::NUMBERS, stage = std::min(S::STEPS, steps) * S::W::CHUNK;
        const int in_flight = c.C > STEP_SMALL ? 2 * ((40 << 10) / stage) : ((S::BULK ? 48 : 32) << 10) / stage;
        return StepProduct{rows / 8 / tiles, tiles, in, steps, shifted, in_flight, 0};
    };
    p.product[STEP_QKV] = product((c.H + 2 * c.K) * c.D, c.C, 1, true);
    p.product[STEP_O] = product(c.C, c.H * c.D, 1, false);
    if (c.E) p.E = c.E, p.k = c.k, p.M = c.M, p.normed_shares = c.normed_shares, p.F = c.k * c.M;
    p.product[STEP_GATE_UP] = product(2 * p.F, c.C, 2, true);
    p.product[STEP_DOWN] = product(c.C, p.F, 1, false);
    p.product[STEP_ROUTE] = p.product[STEP_GATE_UP], p.product[STEP_ROUTE].units = 0; // it has the same input
    p.product[STEP_LOGITS] = product(c.V, c.C, 1, true);
    for (int phase = STEP_QKV; phase < STEP_LOGITS; phase++)
        p.product[phase].at = p.layer_bytes, p.layer_bytes += p.of_one(phase).bytes(S::W::CHUNK);
    p.expert_bytes = p.layer_bytes - p.product[STEP_GATE_UP].at;
    if (c.E) p.layer_bytes += (c.E - 1) * p.expert_bytes;
    p.product[STEP_LOGITS].at = p.layer_bytes * c.L;
    p.product[STEP_LOGITS].in_flight = (192 << 10) / (std::min(S::STEPS, p.product[STEP_LOGITS].steps) * S::W::CHUNK);
    if (c.E) p.product[STEP_GATE_UP].in_flight = p.product[STEP_LOGITS].in_flight; // memory was idle before the choice
    p.in_flight_pages = (64 << 10) / S::STAGE;
    p.patience = 1000000000, p.short_keys = 64;
    p.most_splits = std::max(1, std::min(64, blocks / c.K)), p.joined = S::TOKENS == 1 ? 4 : 1;
    // Shared memory: the ring's barriers; two sets of sums (tiles, warps, tokens, 8 rows), of squares (tokens, warps);
    // the data of the current phase (a product: its input; see Step::attend for the others); the ring has the rest.
    const size_t G = p.G, D = STEP_HEAD;
    const size_t input = S::input_bytes(std::max({c.C, p.F, c.H * c.D}), N);
    const size_t Q = S::tokens_attended(p.G) * G;
    const size_t attend = (2 * S::TOKENS + Q) * D * sizeof(bf16) + S::WARPS * Q * (D + 4) * sizeof(float);
    auto up = [](size_t n) { return (n + 127) / 128 * 128; };
    p.sums_at = up(2 * S::BARRIERS * sizeof(uint64_t) + sizeof(StepDealt));
    p.squares_at = p.sums_at + up(2 * S::ROUND * S::WARPS * N * 8 * sizeof(float));
    p.work_at = p.squares_at + up(2 * (size_t)N * S::WARPS * sizeof(float));
    p.ring_at = p.work_at + up(std::max(input, attend));
    const size_t room = p.ring_at < shared_limit ? (shared_limit - p.ring_at) / S::STAGE : 0;
    p.stages = (int)std::min<size_t>(room, S::BARRIERS * 3 / 4); // (fewer than S::CHOICE)
    auto bound = [&](int& halves) { halves = std::max(2, std::min(halves, 2 * (p.stages - 1))); };
    for (StepProduct& q : p.product) bound(q.in_flight);
    bound(p.in_flight_pages);
    p.shared = p.ring_at + (size_t)p.stages * S::STAGE;
    return p;
}

// Words of the exchanges for N tokens; step_words says where each begins.
inline size_t step_words(StepArgs& p, uint4* words, int N) {
    size_t at = 0;
    auto take = [&](uint4*& to, size_t each) { to = words + at, at += N * each; };
    take(p.qkv, (size_t)(p.H + 2 * p.K) * STEP_HEAD / 4);
    take(p.att, (size_t)p.att_words());
    take(p.mid, p.C / 4), take(p.hidden, p.F / 4), take(p.out, p.C / 4), take(p.scores, p.E);
    return at;
}

// Whether the kernel can compute this model with so many blocks; if not, the reason.
inline const char* step_refuses(const Config& c, int blocks) {
    if (c.D != STEP_HEAD) return "its heads are not of 128 numbers";
    if (c.H % c.K || c.H / c.K > 8) return "it has more than 8 query heads a KV head";
    if (c.C % 8 || (!c.E && c.F % 8) || c.V % 8) return "its sizes are not multiples of 8";
    if (!c.E) return nullptr;
    for (int l = 0; l < c.L; l++)
        if (!c.sparse(l)) return "some of its layers have no experts";
    if (c.M % 128) return "its experts' size is not a multiple of 128";
    if (c.k > 32 || c.E > std::min(256, STEP_ROUTED * blocks)) return "it has too many experts";
    return nullptr;
}
