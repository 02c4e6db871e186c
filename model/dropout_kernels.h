// model/dropout_kernels.h: dropout's masks in kernels of adapters: lora_down, lora_backward_weight, and products whose
// epilogue has MASKS.
#ifndef QWEN3_CU
#include "qwen3.cu" // which includes this file where LoraArgs is known
#elif !defined(DROPOUT_KERNELS_H)
#define DROPOUT_KERNELS_H

// The top bits of four bytes, each eight times. `which`: in hexadecimal, from the last digit on, 8 + the number of a
// byte of a (0 .. 3) or b (4 .. 7).
__device__ __forceinline__ uint32_t spread_bits(uint32_t a, uint32_t b, uint32_t which) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(which));
    return y;
}

// ---- lora_down
// A lane's half of the masks of token n for the 64 numbers i64, a word a group: those that are made already; or new
// ones, which are stored.
template <int GROUPS>
__device__ __forceinline__ void load_masks(uint32_t (&kept)[GROUPS], const LoraArgs& p, int first, int n, int i64) {
    #pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        const int j = p.module_of(first + k);
        const bool there = j < p.modules && n < p.N && i64 < p.kept.sixty_fours;
        kept[k] = there ? p.kept.at(j, i64, n)[threadIdx.x % 32 / 16] : 0;
    }
}
template <int GROUPS>
__device__ __forceinline__ void make_masks(uint32_t (&kept)[GROUPS], const LoraArgs& p, int first, int n, uint32_t name,
                                           int i64) {
    const int half = threadIdx.x % 32 / 16;
    #pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        const int j = p.module_of(first + k);
        kept[k] = ~0u;
        if (k && j == p.module_of(first + k - 1)) kept[k] = kept[k - 1];
        else if (p.dropping && j < p.modules) {
            kept[k] = 0;
            #pragma unroll
            for (int c = 0; c < 4; c++)
                kept[k] |= dropout_mask(p.dropout, p.keys, name, p.name(j), i64 * 8 + half * 4 + c) << 8 * c;
            if (n < p.N && i64 < p.kept.sixty_fours) p.kept.at(j, i64, n)[half] = kept[k];
        }
    }
}
// sum += drop(x) A^T for one panel; x_at: the warp's 16 tokens.
template <int GROUPS>
__device__ __forceinline__ void multiply_dropped(float (&sum)[GROUPS][4][4], const uint32_t (&kept)[GROUPS],
                                                 uint32_t x_at, int token, uint32_t A_at) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t even[GROUPS][2], odd[GROUPS][2]; // of tokens g and g + 8: top bits for columns 2 t and 2 t + 1
        #pragma unroll
        for (int k = 0; k < GROUPS; k++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                const uint32_t word = __shfl_sync(~0u, kept[k], half * 16 + e * 8 + g) >> 2 * t;
                even[k][e] = word << 7, odd[k][e] = word << 6;
            }
        #pragma unroll
        for (int e = 0; e < 2; e++) { // 16 numbers of `in`
            const int c = (half * 2 + e) * 2;
            uint32_t a[4], b[2][4];
            ldmatrix(a, chunk_address(x_at, token + lane % 16, c + lane / 16));
            #pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                #pragma unroll
                for (int f = 0; f < 2; f++)
                    ldmatrix(b[f], chunk_address(A_at, k * 32 + f * 16 + lane % 8 + lane / 16 * 8, c + lane / 8 % 2));
                uint32_t y[4];
                #pragma unroll
                for (int q = 0; q < 4; q++)
                    y[q] = a[q] & spread_bits(even[k][q % 2], odd[k][q % 2], 0xcc88 + (2 * e + q / 2) * 0x1111);
                #pragma unroll
                for (int f = 0; f < 4; f++)
                    mma(sum[k][f], y[0], y[1], y[2], y[3], b[f / 2][f % 2 * 2], b[f / 2][f % 2 * 2 + 1]);
            }
        }
    }
}

// ---- Dropout: products whose epilogue has MASKS. `rank` columns of `more` belong to a module; their sums times
// `scale` are added where the module's mask keeps row r, else left out. These columns come last (TileArgs::more_last).
// The masks of up to three modules for a warp's part of a tile. The lanes of a quad divide the pairs
// of words (64 rows of a token) that all four need. Their latency is long, so they are loaded before the tile is
// multiplied: otherwise the compiler loads each just before its use, and waits.
template <class S> struct KeptWords {
    static constexpr int PAIRS = S::NF > 8 ? S::NF / 8 : 1, ALL = S::MF * 2 * PAIRS, EACH = (ALL + 3) / 4;
    uint2 pairs[3][EACH];
    template <class Place>
    __device__ __forceinline__ KeptWords(const Place& at, const DropoutMasks& masks, int modules) {
        #pragma unroll
        for (int module = 0; module < 3; module++)
            #pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int pair = k * 4 + threadIdx.x % 4, r64 = (at.r0 + S::warp_row()) / 64 + pair % PAIRS;
                const int n = at.token(pair / PAIRS / 2, pair / PAIRS % 2);
                const bool there = module < modules && pair < ALL && n < masks.N && r64 < masks.sixty_fours;
                pairs[module][k] = there ? *(const uint2*)masks.at(module, r64, n) : uint2{};
            }
    }
    // (A variable index would put a copy of the array into local memory.)
    __device__ __forceinline__ void pick(uint2 (&of)[EACH], int module) const {
        #pragma unroll
        for (int k = 0; k < EACH; k++)
            of[k] = module == 0 ? pairs[0][k] : module == 1 ? pairs[1][k] : pairs[2][k];
    }
    // The mask of 32 rows from row 32 j of the part on; this lane's rows begin at bit 0. All lanes of the warp call it.
    __device__ __forceinline__ static uint32_t rows(const uint2 (&of)[EACH], int i, int h, int j) {
        const int pair = (i * 2 + h) * PAIRS + j / 2, lane = threadIdx.x % 32;
        const uint32_t word = (S::warp_row() / 32 + j) % 2 ? of[pair / 4].y : of[pair / 4].x;
        return __shfl_sync(~0u, word, lane / 4 * 4 + pair % 4) >> 2 * (lane % 4);
    }
};

// A stage of the further columns, from number `first` of them on, by mma.sync. Up to 32 of a module's
// columns at a time: a fragment's sums over them are computed, masked, and added to `sum`, so they take only their own
// registers. x is zero in columns that do not belong to the module. (`sum` cannot be indexed, so this is straight-line
// code, and wgmma idles meanwhile: hence few instructions.)
template <class S, class Epilogue>
__device__ __forceinline__ void add_masked_stage(float (&sum)[S::MF][S::NF][4], uint32_t x_stage, uint32_t w_stage,
                                                 int first, const KeptWords<S>& words, const TileArgs& p,
                                                 const Epilogue& epilogue) {
    const int lane = threadIdx.x % 32, warp_row = S::warp_row();
    const int last = min(STAGE_IN, p.more - first);
    int end;
    #pragma unroll 1
    for (int begin = 0; begin < last; begin = end) {
        const int module = (first + begin) / epilogue.rank, window = min(begin / 16 * 16, STAGE_IN - 32);
        end = min(min(last, (module + 1) * epilogue.rank - first), window + 32);
        const uint32_t w_rows = w_stage + (window + lane % 16) * 128; // in each panel
        uint2 pairs[KeptWords<S>::EACH];
        words.pick(pairs, module);
        #pragma unroll
        for (int i = 0; i < S::MF; i++) {
            uint32_t a[2][4];
            #pragma unroll
            for (int k = 0; k < 2; k++) {
                ldmatrix(a[k], chunk_address(x_stage, S::warp_token() + i * 16 + lane % 16,
                                             window / 8 + 2 * k + lane / 16));
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int column = window + k * 16 + e / 2 * 8;
                    if (column < begin || column >= end) a[k][e] = 0;
                }
            }
            #pragma unroll
            for (int j = 0; j < S::NF; j += 4) { // four fragments: their chains overlap
                float part[4][4] = {};
                uint32_t b[2][2][4];
                const uint32_t kept[2] = {words.rows(pairs, i, 0, j / 4), words.rows(pairs, i, 1, j / 4)};
                #pragma unroll
                for (int k = 0; k < 2; k++)
                    #pragma unroll
                    for (int two = 0; two < 2; two++) {
                        const int chunk = warp_row / 8 + j + 2 * two + lane / 16;
                        ldmatrix_transposed(b[k][two], w_rows + chunk / 8 * (STAGE_IN * 128) + k * 16 * 128 +
                                                           ((chunk % 8 ^ lane % 8) << 4));
                    }
                #pragma unroll
                for (int k = 0; k < 2; k++)
                    #pragma unroll
                    for (int f = 0; f < 4; f++)
                        mma(part[f], a[k][0], a[k][1], a[k][2], a[k][3], b[k][f / 2][f % 2 * 2],
                            b[k][f / 2][f % 2 * 2 + 1]);
                #pragma unroll
                for (int e = 0; e < 16; e++) { // of each two columns of two tokens (with `if` for ?, `scale` is fetched
                                               // anew for every sum)
                    float& y = sum[i][j + e / 4][e % 4];
                    const uint32_t bit = 1u << (e / 4 * 8 + e % 2);
                    const float more = fmaf(part[e / 4][e % 4], epilogue.scale, y);
                    y = kept[e / 2 % 2] & bit ? more : y;
                }
            }
        }
    }
}
#endif
