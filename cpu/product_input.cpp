// cpu/product_input.cpp: x as the tiles of a product want it.
#include "cpu/product_input.h"
#include "cpu/scratch.h"
#include "model/instances.h"
#include <cstring>
#include <vector>

#if defined(HAVE_SIMD) && !defined(QWEN3_DOUBLE)
// x (N,in) to (N/16, in/2, 16) pairs, zeros for the tokens that are missing in the last 16. N = 1: x itself.
const bf16* amx_pack(const bf16* x, int N, int in) {
    if (N == 1) return x;
    static thread_local std::vector<uint32_t> kept;
    const int tiles = (N + 15) / 16;
    uint32_t* out = at_least(kept, (size_t)tiles * in * 8);
    #pragma omp parallel for schedule(static) if (N > 16)
    for (int t = 0; t < tiles; t++)
        for (int n = 0; n < 16; n++)
            for (int i = 0; i < in / 2; i++) {
                uint32_t pair = 0;
                if (t * 16 + n < N) memcpy(&pair, x + (size_t)(t * 16 + n) * in + 2 * i, 4);
                out[((size_t)t * in / 2 + i) * 16 + n] = pair;
            }
    return (const bf16*)out;
}
#endif

template <class T> static const acc<T>* widen_x(const T* x, size_t n) {
    static thread_local std::vector<acc<T>> kept;
    acc<T>* out = at_least(kept, n);
    #pragma omp parallel for schedule(static) if (n > 50000)
    for (size_t i = 0; i < n; i++) out[i] = to_acc(x[i]);
    return out;
}

template <class T>
ProductInput<T>::ProductInput(const Context& ctx, const Linear<T>& W, const T* x, int N) : N(N), in(W.in) {
    if (ctx.int8_activations && takes_bytes(W)) {
        static thread_local std::vector<int8_t> kept;
        static thread_local std::vector<RoundedGroup> kept_groups;
        const size_t of_row = in / GROUP;
        int8_t* q = at_least(kept, (size_t)N * in);
        RoundedGroup* group = at_least(kept_groups, N * of_row);
        #pragma omp parallel for schedule(static) if ((size_t)N * in > 20000)
        for (int n = 0; n < N; n++) round_to_bytes(q + (size_t)n * in, group + n * of_row, x + (size_t)n * in, in);
        bytes = q, groups = group, task_rows = TILE_ROWS;
#ifdef HAVE_SIMD
        if (instruction_set >= ISA_AVX2)
            byte_loops = instruction_set == ISA_AMX ? amx_bytes : instruction_set >= ISA_BF16 ? vnni_bytes : avx2_bytes;
#endif
#ifdef HAVE_ARM
        if (instruction_set >= ISA_ARM_DOT) byte_loops = arm_bytes;
#endif
        return;
    }
    if (!takes_bf16<T>()) {
        vectors = best_loops<T>().tile[(int)W.format], token_bytes = in * sizeof(acc<T>);
        if constexpr (std::is_same_v<T, acc<T>>) operand = (const uint8_t*)x;
        else operand = (const uint8_t*)widen_x(x, (size_t)N * in);
    }
#ifdef HAVE_SIMD
    if constexpr (std::is_same_v<T, bf16>) if (takes_bf16<T>()) {
        vectors = avx512_bf16_tile[(int)W.format], token_bytes = in * sizeof(T), operand = (const uint8_t*)x;
        if (in % 32 == 0 && instruction_set >= ISA_AMX) amx = amx_tile[(int)W.format], packed = amx_pack(x, N, in);
    }
#endif
#ifdef HAVE_ARM
    if constexpr (std::is_same_v<T, bf16>) if (takes_bf16<T>())
        vectors = arm_bf16_tile[(int)W.format], token_bytes = in * sizeof(T), operand = (const uint8_t*)x;
#endif
    // 32 rows; fewer for a single token, to balance the threads (AMX needs 32); more if there are so many tokens that
    // re-reading x has a cost, and the rows fit into the second-level cache.
    task_rows = N == 1 && !amx ? 8 : TILE_ROWS;
    while (N >= TILE_TOKENS && task_rows < 128 && W.out() / (2 * task_rows) >= 2 * thread_count() &&
           (!amx || W.format == Format::PLAIN || (size_t)task_rows * in <= 1 << 18)) task_rows *= 2;
}

template <class T>
void ProductInput<T>::tile(acc<T>* y, const WeightRows<T>& w, int rows, [[maybe_unused]] int place, int n,
                           int count) const {
    if (bytes) if constexpr (std::is_same_v<acc<T>, float>) {
        const int8_t* q = bytes + (size_t)n * in;
        const RoundedGroup* group = groups + (size_t)n * in / GROUP;
        const int done = byte_loops ? byte_loops(y, w.W, w.block, w.row_bytes, w.row, rows, q, group, count) : 0;
        return byte_products(y + done, TILE_ROWS, w.W, w.block, w.row + done, rows - done, q, group, count);
    }
#ifdef HAVE_SIMD
    if constexpr (std::is_same_v<T, bf16>)
        if (amx && rows == TILE_ROWS) {
            static thread_local std::vector<bf16> kept;
            const bool ring = N <= 32;
            AmxWide wide = {nullptr, ring, n > 0};
            if (w.W.format != Format::PLAIN)
                wide.tiles = ring ? at_least(kept, AMX_RING / sizeof(bf16))
                                  : at_least(kept, (size_t)task_rows * in) + (size_t)place * TILE_ROWS * in;
            return amx(y, w, wide, packed + (size_t)n * in, N == 1, count);
        }
#endif
    vectors(y, w, rows, operand + n * token_bytes, count);
}

#define INSTANTIATE(T) template struct ProductInput<T>;
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
