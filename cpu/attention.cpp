// cpu/attention.cpp: attention on the CPU.
#include "cpu/lanes.h"
#include "cpu/ops.h"
#include "cpu/scratch.h"
#include "cpu/tiles.h"
#include "model/instances.h"
#include <cmath>
#include <limits>
#include <vector>

// ---- attention, page by page with a running maximum (Milakov & Gimelshein, "Online normalizer calculation for
// softmax", 2018): when it grows, the sums so far are scaled down. Every CPU_SPLIT keys the sums start anew, and are
// then added to the sums of earlier splits in the same way. So the splits of one row can be separate tasks if there are
// few rows (decoding at long contexts), with the same bits.
constexpr int ATTENTION_ROWS = 32; // query rows that share a page while it is in the first-level cache
constexpr int CPU_SPLIT = 512;     // keys; whole pages

namespace {
// Numerator and denominator of a softmax over some keys, both divided by e^maximum.
template <class T> struct AttentionSum {
    alignas(64) acc<T> out[MAX_HEAD];
    acc<T> maximum, sum;

    void clear(int D) {
        std::fill(out, out + D, (acc<T>)0);
        maximum = -std::numeric_limits<acc<T>>::infinity(), sum = 0;
    }
    void add(const AttentionSum& o, int D) { // other keys
        const acc<T> top = std::max(maximum, o.maximum);
        const acc<T> mine = std::exp(maximum - top), theirs = std::exp(o.maximum - top);
        for (int i = 0; i < D; i++) out[i] = out[i] * mine + o.out[i] * theirs;
        maximum = top, sum = sum * mine + o.sum * theirs;
    }
};
template <class T> struct AttentionRow { // a query head of a token
    alignas(64) acc<T> q[MAX_HEAD];
    AttentionSum<T> split, total;
    int length; // keys it sees
};

// One layer's attention. A task is up to ATTENTION_ROWS rows, `tokens` tokens by `heads` query heads of one KV head,
// and all their keys or one split of them.
template <class T> struct Attention {
    using A = acc<T>;
    T* out;
    A* lse;
    const T *q, *keys, *values;
    const Batch& b;
    int H, K, D, G, heads, tokens, head_tiles, token_tiles;
    size_t work = 0;                 // multiplications, about
    int splits = 1;                  // of a row into tasks: 1, or as many as the longest row has
    AttentionSum<T>* sums = nullptr; // (N,H,splits) if these are more than one
    template <class S> struct Page { const S *keys, *values; }; // (16,D) each, as they are stored or widened to A
    AttentionLoops<A, T> stored;
    AttentionLoops<A, A> widened;

    Attention(T* out, A* lse, const T* q, const LayerCache<T>& cache, const Batch& b, const HeadShape& s)
        : out(out), lse(lse), q(q), keys(cache.keys), values(cache.values), b(b), H(s.H), K(s.K), D(s.D), G(H / K) {
        const Loops<T>& loops = best_loops<T>();
        stored = loops.stored[D == 128], widened = loops.widened[D == 128];
        heads = std::min(G, ATTENTION_ROWS), tokens = ATTENTION_ROWS / heads;
        head_tiles = (G + heads - 1) / heads, token_tiles = (b.N + tokens - 1) / tokens;
        int longest = 1; // splits of the longest row
        for (int n = 0; n < b.N; n++) {
            if (b.seq[n] < 0) continue;
            work += (size_t)(b.pos[n] + 1) * H * D;
            longest = std::max(longest, b.pos[n] / CPU_SPLIT + 1);
        }
        if (b.N == 1 || (size_t)b.N * H * longest <= 8192) splits = longest; // few rows
        static thread_local std::vector<AttentionSum<T>> kept;
        if (splits > 1) sums = at_least(kept, (size_t)b.N * H * splits);
    }
    int tasks() const { return token_tiles * K * head_tiles * splits; }

    void store(size_t row, const AttentionSum<T>& a) const {
        for (int i = 0; i < D; i++) out[row * D + i] = to_stored<T>(a.out[i] / a.sum);
        if (lse) lse[row] = a.maximum + std::log(a.sum);
    }

    void task(int number) const {
        // Later tokens see more keys: long tasks first.
        const int split = number % splits, head_tile = number / splits % head_tiles;
        const int kv = number / (head_tiles * splits) % K, tile = token_tiles - 1 - number / (K * head_tiles * splits);
        const int h0 = kv * G + head_tile * heads, h1 = std::min(h0 + heads, (kv + 1) * G);
        const int end = std::min(b.N, (tile + 1) * tokens);
        for (int n0 = tile * tokens, n1; n0 < end; n0 = n1) { // the tokens of one sequence
            for (n1 = n0 + 1; n1 < end && b.seq[n1] == b.seq[n0]; n1++) {}
            if (b.seq[n0] >= 0) sequence(n0, n1, h0, h1, kv, split);
        }
    }

    // Tokens n0 .. n1 - 1, which are of one sequence; query heads h0 .. h1 - 1, which are KV head kv's.
    void sequence(int n0, int n1, int h0, int h1, int kv, int split) const {
        static thread_local std::vector<AttentionRow<T>> kept;
        AttentionRow<T>* rows = at_least(kept, (size_t)heads * std::min(tokens, b.N));
        const A scale = 1 / std::sqrt((A)D);
        int count = 0, longest = 0;
        for (int n = n0; n < n1; n++)
            for (int h = h0; h < h1; h++) {
                AttentionRow<T>& row = rows[count++];
                for (int i = 0; i < D; i++) row.q[i] = to_acc(q[((size_t)n * H + h) * D + i]) * scale;
                row.total.clear(D);
                row.length = b.pos[n] + 1;
                longest = std::max(longest, row.length);
            }
        add_pages(rows, count, kv, b.pages + (size_t)b.seq[n0] * b.max_pages, split * CPU_SPLIT,
                  splits > 1 ? std::min(longest, (split + 1) * CPU_SPLIT) : longest, longest);
        count = 0;
        for (int n = n0; n < n1; n++)
            for (int h = h0; h < h1; h++) {
                const size_t row = (size_t)n * H + h;
                if (splits > 1) sums[row * splits + split] = rows[count++].total;
                else store(row, rows[count++].total);
            }
    }

    // Adds keys first .. end - 1 to the rows' totals. `longest`: keys of the longest row.
    void add_pages(AttentionRow<T>* rows, int count, int kv, const int* table, int first, int end, int longest) const {
        static thread_local std::vector<A> kept;
        A *page_keys = at_least(kept, (size_t)2 * PAGE * D), *page_values = page_keys + PAGE * D; // (16,D) each
        for (; first < end; first += PAGE) {
            if (first % CPU_SPLIT == 0)
                for (int i = 0; i < count; i++) rows[i].split.clear(D);
            const size_t at = kv_offset(table[first / PAGE], kv, 0, K, D);
            const size_t held = (size_t)std::min(PAGE, longest - first) * D;
            if (!b.fp8 && count <= 2 && held == (size_t)PAGE * D) { // each load widens: the same numbers
                const size_t next = first + PAGE < end ? kv_offset(table[first / PAGE + 1], kv, 0, K, D) : at;
                const Page<T> page = {keys + at, values + at}, following = {keys + next, values + next};
                for (int i = 0; i < count; i++) add_page(rows[i], stored, page, i == 0 ? following : page, first);
            } else {
                // Keys past the end of the longest row are uninitialized: they count as zeros.
                if (b.fp8) {
                    widen_fp8(page_keys, keys, table[first / PAGE], kv, held);
                    widen_fp8(page_values, values, table[first / PAGE], kv, held);
                } else {
                    widen(page_keys, keys + at, held);
                    widen(page_values, values + at, held);
                }
                std::fill(page_keys + held, page_keys + PAGE * D, 0);
                std::fill(page_values + held, page_values + PAGE * D, 0);
                const Page<A> page = {page_keys, page_values};
                for (int i = 0; i < count; i++) add_page(rows[i], widened, page, page, first);
            }
            const bool complete = (first + PAGE) % CPU_SPLIT == 0 || first + PAGE >= end;
            for (int i = 0; i < count && complete; i++)
                if (rows[i].length > first / CPU_SPLIT * CPU_SPLIT) rows[i].total.add(rows[i].split, D);
        }
    }

    // The first `held` numbers of a page and head of an FP8 cache. (No e4m3 is a NaN: see KVRow.)
    void widen_fp8(A* page, const T* cache, int number, int kv, size_t held) const {
        for (size_t j = 0; j < held / D; j++) {
            const KVRow<T> row(cache, b.fp8, number, kv, (int)j, K, D);
            lanes<T> v;
            for (int i = 0; i < D; i += LANES) {
                const int n = std::min(LANES, D - i);
                load_some(v, (const e4m3*)row.q + i, n);
                v *= row.factor;
                memcpy(page + j * D + i, &v, n * sizeof(A));
            }
        }
    }

    // One page for one row.
    template <class S>
    void add_page(AttentionRow<T>& row, const AttentionLoops<A, S>& loops, const Page<S>& page, const Page<S>& next,
                  int first) const {
        const int n = row.length - first;
        if (n <= 0) return;
        AttentionSum<T>& a = row.split;
        A p[PAGE], top = a.maximum;
        loops.scores(p, row.q, page.keys, next.keys, D);
        for (int j = n; j < PAGE; j++) p[j] = -std::numeric_limits<A>::infinity();
        for (int j = 0; j < PAGE; j++) top = p[j] > top ? p[j] : top;
        const A scale = top == a.maximum ? 1 : std::exp(a.maximum - top);
        lanes<T> e;
        static_assert(PAGE == LANES, "a page's scores are one vector");
        load_lanes(e, p);
        e -= top;
        exp_lanes(e);
        memcpy(p, &e, sizeof e);
        a.maximum = top;
        a.sum = a.sum * scale + sum_lanes(e);
        loops.mix(a.out, scale, p, page.values, next.values, D);
    }

    // Joins rows whose splits were separate tasks.
    void join_splits() const {
        for (int n = 0; n < b.N && splits > 1; n++)
            for (int h = 0; h < H && b.seq[n] >= 0; h++) {
                const size_t row = (size_t)n * H + h;
                AttentionSum<T>& all = sums[row * splits];
                for (int split = 1; split <= b.pos[n] / CPU_SPLIT; split++) all.add(sums[row * splits + split], D);
                store(row, all);
            }
    }
};

} // namespace

template <class T>
void attention_cpu(Context&, T* out, acc<T>* lse, const T* q, const LayerCache<T>& cache, const Batch& b,
                   const HeadShape& shape) {
    const Attention<T> a(out, lse, q, cache, b, shape);
    #pragma omp parallel for schedule(dynamic) if (a.work > 20000)
    for (int task = 0; task < a.tasks(); task++) a.task(task);
    a.join_splits();
}

#define INSTANTIATE(T)                                                                                        \
    template void attention_cpu(Context&, T*, acc<T>*, const T*, const LayerCache<T>&, const Batch&, const HeadShape&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
