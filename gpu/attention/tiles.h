/* gpu/attention/tiles.h: tiles, products of tiles and sums over the lanes of a row, of the kernels for Book I's
   `attention`.

   attention_kernel is for prompts (and training's forward), on Hopper a second one by wgmma; attention_decode_kernel is
   for sequences of one new token (with qknorm_rope_kv in it: all of `attend`). Where there are too few blocks for the
   GPU, the keys of a row are split: each block leaves a part (the largest score, the sum of weights, the weighted sum
   of values), and parts are joined in order. G = H / K query heads share a KV head. */
#pragma once
#include "gpu/attention/parts.h"
#include "qwen3.cu"

// ---- What they share: tiles, products of tiles, sums over the lanes of a row, parts
// A tile in shared memory has rows of D numbers in chunks of 16 bytes; chunk c of row r lies at c ^ (r % 8), so that
// the eight rows that an ldmatrix reads at a time are in different banks. A tile begins at a multiple of 128 bytes.
template <int D> struct HeadTile {
    static constexpr int ROW = D * 2, CHUNKS = D / 8; // bytes and chunks of a row
    __device__ static int at(int row, int chunk) { return row * ROW + ((chunk ^ row % 8) << 4); }
};
// The share of each of 128 threads in the copy of a tile: one chunk of every STEPth row.
template <int D> struct HeadRows {
    static constexpr int THREADS = 128, STEP = THREADS / HeadTile<D>::CHUNKS;
    const int row = threadIdx.x % THREADS / HeadTile<D>::CHUNKS, chunk = threadIdx.x % HeadTile<D>::CHUNKS;
};

// s += a b^T: each of 16 I rows of the warp's own with each of 16 J others, all of D numbers and in tiles. s[i][j] is
// rows 16 i .. of a by rows 8 j .. of b, spread over the warp as mma says.
template <int D, int I, int J>
__device__ __forceinline__ void multiply_rows(float (&s)[I][2 * J][4], uint32_t a_rows, uint32_t b_rows) {
    constexpr int ROW = HeadTile<D>::ROW;
    const int lane = threadIdx.x % 32;
    const uint32_t a_at = a_rows + HeadTile<D>::at(lane % 16, lane / 16);
    const uint32_t b_at = b_rows + HeadTile<D>::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    #pragma unroll
    for (int d = 0; d < D / 16; d++) {
        // Chunk 2d + c lies at (2d + c) ^ (r % 8) = ((c ^ r % 8) ^ 2 (d % 4)) + 8 (d / 4).
        const uint32_t flip = d % 4 << 5, far = d / 4 << 7;
        uint32_t a[I][4], b[4];
        #pragma unroll
        for (int i = 0; i < I; i++) ldmatrix(a[i], (a_at ^ flip) + far + i * 16 * ROW);
        #pragma unroll
        for (int j = 0; j < J; j++) {
            ldmatrix(b, (b_at ^ flip) + far + j * 16 * ROW);
            #pragma unroll
            for (int i = 0; i < I; i++) {
                mma(s[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                mma(s[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

// sum += w b: w (16 I, 16 J) as multiply_rows leaves its s, rounded to bf16 (s is the a operand as it lies); b is 16 J
// rows of D numbers of a tile.
template <int D, int I, int J>
__device__ __forceinline__ void add_weighted_rows(float (&sum)[I][D / 8][4], const float (&w)[I][2 * J][4],
                                                  uint32_t b_rows) {
    const int lane = threadIdx.x % 32;
    const uint32_t b_at = b_rows + HeadTile<D>::at(lane % 16, lane / 16);
    #pragma unroll
    for (int k = 0; k < J; k++) {
        uint32_t a[I][4], b[4];
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const float* pair = &w[i][2 * k + e / 2][e % 2 * 2];
                a[i][e] = pack(pair[0], pair[1]);
            }
        #pragma unroll
        for (int j = 0; j < D / 16; j++) {
            ldmatrix_transposed(b, (b_at ^ (j % 4 << 5)) + (j / 4 << 7) + k * 16 * HeadTile<D>::ROW);
            #pragma unroll
            for (int i = 0; i < I; i++) {
                mma(sum[i][2 * j], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                mma(sum[i][2 * j + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

// Where this lane's numbers of such an s are: row of s[i][.][e], column of s[.][j][e]; f(number, i, j, e) for each.
__device__ __forceinline__ int score_row(int i, int e) { return i * 16 + e / 2 * 8 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int score_column(int j, int e) { return j * 8 + threadIdx.x % 4 * 2 + e % 2; }
template <int I, int J, class F> __device__ __forceinline__ void each_score(float (&s)[I][J][4], F f) {
    #pragma unroll
    for (int i = 0; i < I; i++)
        #pragma unroll
        for (int j = 0; j < J; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) f(s[i][j][e], i, j, e);
}
// Such an s of 16 rows, rounded, as mma and wgmma take it for their a operand.
template <int K>
__device__ __forceinline__ void round_weights(uint32_t (&weights)[K][4], const float (&s)[1][2 * K][4]) {
    #pragma unroll
    for (int i = 0; i < 4 * K; i++)
        weights[i / 4][i % 4] = pack(s[0][i / 2][i % 2 * 2], s[0][i / 2][i % 2 * 2 + 1]);
}
// Stores a quad's numbers of one of the two rows in x = s[i], lane / 4 (h = 0) or lane / 4 + 8 (1), times `by`, to
// `row`.
template <int J> __device__ __forceinline__ void store_row(bf16* row, const float (&x)[J][4], int h, float by) {
    const int quad = threadIdx.x % 4, column = quad / 2 * 4 + quad % 2 * 8;
    #pragma unroll
    for (int j = 0; j < J; j += 2) {
        const float4 y = four_columns(x[j], x[j + 1], h, 0xfu << (threadIdx.x % 32 - quad));
        store_four(row + j * 8 + column, make_float4(y.x * by, y.y * by, y.z * by, y.w * by));
    }
}
