// gpu/step/weights.h: the packing of weights for one kernel a token, and a warp's products with them.
#pragma once
#include "gpu/packed/formats.h"
#include "gpu/step/plan.h"
#include "qwen3.cu"

// ---- Packing. A chunk is of 8 rows of W (see step.h). Run j of lane 4 g + t is numbers 8 t .. 8 t + 7 of the j-th 32
// of row g: in registers four words of two bf16 each. They are mma's operand a without moves: two words for its row g,
// two for its row g + 8 (for bf16 the first two, else words 0 and 2). x is operand b: for token n column 2 n has the
// former two, column 2 n + 1 the latter. So lane 4 g + t gets row g's sum for token t in two halves, d[0] and d[3];
// d[1] and d[2] are products of unrelated numbers and unused. (INT4 has another order, see there.) A packing defines
//   RUNS    that a lane has of a chunk         CHUNK   bytes of one
//   Lane    of a chunk, in registers           Sum     of a tile: row g for token t of four
//   load    of chunk number + warp of a stage
//   add     sum += the chunk's W x^T; x: the operand of its runs
//   piece   the i-th 16 bytes of a chunk, for rows `row` .. `row` + 7
__device__ __forceinline__ void step_mma(float (&sum)[4], const uint4& w, const uint2& x) {
    mma(sum, w.x, w.y, w.z, w.w, x.x, x.y);
}
struct StepPlain { // bf16
    static constexpr int RUNS = 1, CHUNK = 512;
    static constexpr bool PLAIN = true;
    using Lane = uint4;
    using Sum = float[4];
    using X = uint2[RUNS];
    __device__ __forceinline__ static void load(Lane& w, const unsigned char* first, int number, int warp, int lane) {
        w = ((const uint4*)first + warp * 32 + lane)[number * 32];
    }
    __device__ __forceinline__ static void add(Sum& sum, const Lane& w, const uint2 (&x)[RUNS]) {
        mma(sum, w.x, w.z, w.y, w.w, x[0].x, x[0].y); // (so x[0] is 8 bytes of x in memory order)
    }
    __device__ __forceinline__ static float whole(const Sum& sum) { return sum[0] + sum[3]; }

    // With an adapter W + s B A is packed, with DoRA c times it, rounded once: the speed is the same.
    struct Source {
        const bf16* W; // (rows, in)
        int in, width = 0; // rows of A, or 0
        const bf16 *A = nullptr, *B = nullptr; // (width, in); s B (rows, width)
        const float* c = nullptr; // (rows), or null: 1
    };
    __device__ static uint4 piece(const Source& from, size_t row, int chunk, int i) {
        const int k = chunk * 32 + i % 4 * 8;
        const size_t r = row + i / 4;
        if (k >= from.in) return make_uint4(0, 0, 0, 0);
        const uint4 w = *(const uint4*)(from.W + r * from.in + k);
        if (!from.width) return w;
        float more[8] = {};
        for (int c = 0; c < from.width; c++) {
            const float b = to_acc(from.B[r * from.width + c]);
            const uint4 a = *(const uint4*)(from.A + (size_t)c * from.in + k);
            const uint32_t pairs[4] = {a.x, a.y, a.z, a.w};
            GPU_UNROLL
            for (int j = 0; j < 8; j++) more[j] = fmaf(b, j % 2 ? high(pairs[j / 2]) : low(pairs[j / 2]), more[j]);
        }
        const float by = from.c ? from.c[r] : 1;
        const auto pair = [&](uint32_t p, int j) {
            return pack(by * (low(p) + more[j]), by * (high(p) + more[j + 1]));
        };
        return make_uint4(pair(w.x, 0), pair(w.y, 2), pair(w.z, 4), pair(w.w, 6));
    }
};
// A format of packed/formats.h, whose groups of columns are parts of chunks: GROUPS per chunk, with a scale each for 8
// rows (or for all of them), and zero points. These follow the 512 bytes: a row's scales by group, then a row's zero
// points by group. mma's sums of a group are multiplied by its scale.
template <class F, int GROUPS> struct StepPacked {
    using Raw = typename F::Raw;
    static constexpr int RUNS = 2 * F::RUNS, NUMBERS = 32 * RUNS;
    static constexpr int SCALES = GROUPS * (F::BLOCKS ? 1 : 8) * (int)sizeof(Raw), ZEROS = F::ZEROS ? 8 * GROUPS : 0;
    static constexpr int CHUNK = 512 + (SCALES + ZEROS + 15) / 16 * 16;
    static constexpr bool PLAIN = false;
    static_assert(F::BLOCKS ? GROUPS == 1 && sizeof(Raw) == 4 : sizeof(Raw) == 2, "two groups' scales are a word");
    struct Lane { // row g's
        uint4 w;
        uint32_t scale[(GROUPS + 1) / 2], zeros; // a byte each
    };
    using Sum = float;
    __device__ __forceinline__ static void load(Lane& to, const unsigned char* first, int number, int warp, int lane) {
        const unsigned char* chunk = first + (number + warp) * CHUNK;
        to.w = ((const uint4*)chunk)[lane];
        const unsigned char* scales = chunk + 512 + (F::BLOCKS ? 0 : lane / 4 * GROUPS * 2);
        GPU_UNROLL
        for (int j = 0; j < (GROUPS + 1) / 2; j++)
            to.scale[j] = SCALES == 16 ? *(const uint16_t*)scales : ((const uint32_t*)scales)[j];
        const unsigned char* zeros = chunk + 512 + SCALES + lane / 4 * GROUPS;
        if (F::ZEROS) to.zeros = GROUPS == 4 ? *(const uint32_t*)zeros : GROUPS == 2 ? *(const uint16_t*)zeros : *zeros;
    }
    __device__ __forceinline__ static float scale(const Lane& w, int group) {
        if constexpr (F::BLOCKS) return __uint_as_float(w.scale[group]);
        else return F::to_float((Raw)(w.scale[group / 2] >> group % 2 * 16));
    }
    // x of a chunk in the lanes' layout: for each of the eight (g % 2, t) 16 bytes for runs 0 and 1, then (INT4) 16 for
    // runs 2 and 3; then INT4's sums of groups. store_x is called by all lanes of a warp together: each has its numbers
    // 4 i .. 4 i + 3, if they are `there`.
    static constexpr int X_BYTES = 2 * NUMBERS + (F::ZEROS ? 16 : 0);
    struct X {
        uint4 v[RUNS / 2];
        float sum[F::ZEROS ? GROUPS : 1];
    };
    __device__ __forceinline__ static void load_x(X& x, const unsigned char* chunk, int lane) {
        GPU_UNROLL
        for (int i = 0; i < RUNS / 2; i++) x.v[i] = ((const uint4*)chunk)[i * 8 + lane % 8];
        if (F::ZEROS)
            GPU_UNROLL
            for (int j = 0; j < GROUPS; j++) x.sum[j] = ((const float*)(chunk + 2 * NUMBERS))[j];
    }
    __device__ __forceinline__ static void store_x(unsigned char* chunk, int i, uint2 v, bool there) {
        const int run = i / 8, t = i % 8 / 2;
        if constexpr (!F::ZEROS) {
            unsigned char* to = chunk + t * 16 + run * 8 + i % 2 * 4;
            if (there) *(uint32_t*)to = v.x, *(uint32_t*)(to + 64) = v.y;
            return;
        }
        unsigned char* to = chunk + run / 2 * 128 + (run % 2 * 4 + t) * 16 + i % 2 * 8;
        if (there) *(uint2*)to = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632));
        constexpr int LANES = NUMBERS / GROUPS / 4; // of a group
        float sum = (low(v.x) + high(v.x)) + (low(v.y) + high(v.y));
        GPU_UNROLL
        for (int other = 1; other < LANES; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (there && i % LANES == 0) ((float*)(chunk + 2 * NUMBERS))[i / LANES] = sum;
    }
    __device__ __forceinline__ static void add(Sum& sum, const Lane& w, const X& x) {
        if constexpr (F::ZEROS) return add_nibbles(sum, w, x);
        float part[2][4] = {};
        GPU_UNROLL
        for (int run = 0; run < 2; run++) {
            const uint2 bytes = run ? make_uint2(w.w.z, w.w.w) : make_uint2(w.w.x, w.w.y);
            const uint2 of_x = run ? make_uint2(x.v[0].z, x.v[0].w) : make_uint2(x.v[0].x, x.v[0].y);
            step_mma(part[GROUPS == 2 ? run : 0], F::run(bytes, 0, 0), of_x);
        }
        sum = fmaf(StepPlain::whole(part[0]), scale(w, 0), sum);
        if (GROUPS == 2) sum = fmaf(StepPlain::whole(part[1]), scale(w, 1), sum);
    }
    // INT4: 0x430 followed by q is 128 + q in bf16; so a group's sum is too large by 128 + zero times the sum of its x.
    // A word has numbers 8 t .. 8 t + 3 or 8 t + 4 .. 8 t + 7 of two runs, the first in its bytes' lower halves: of
    // each run the pairs (0, 2) and (1, 3); x has the same order.
    __device__ __forceinline__ static void add_word(float (&part)[4], uint32_t w, uint32_t x0, uint32_t x1) {
        constexpr uint32_t LOW = 0x000f000f, ONE = 0x43004300;
        mma(part, and_or(w, LOW, ONE), and_or(w >> 4, LOW, ONE), and_or(w >> 8, LOW, ONE), and_or(w >> 12, LOW, ONE),
            x0, x1);
    }
    __device__ __forceinline__ static void add_nibbles(Sum& sum, const Lane& w, const X& x) {
        float part[2][4] = {};
        auto& second = part[GROUPS > 1];
        add_word(part[0], w.w.x, x.v[0].x, x.v[0].y), add_word(part[0], w.w.y, x.v[0].z, x.v[0].w);
        add_word(second, w.w.z, x.v[RUNS / 2 - 1].x, x.v[RUNS / 2 - 1].y);
        add_word(second, w.w.w, x.v[RUNS / 2 - 1].z, x.v[RUNS / 2 - 1].w);
        GPU_UNROLL
        for (int j = 0; j < GROUPS; j++) {
            const float y = GROUPS == 4 ? part[j / 2][j % 2 * 3] : StepPlain::whole(part[j]);
            const float more = __uint_as_float((w.zeros >> 8 * j & 0xff) << 16 | 0x43000000); // 128 + zero
            sum = fmaf(fmaf(-more, x.sum[j], y), scale(w, j), sum);
        }
    }
    __device__ __forceinline__ static float whole(Sum sum) { return sum; }

    using Source = PackedArgs;
    __device__ static uint4 piece(const Source& from, size_t row, int chunk, int i) {
        uint32_t words[4];
        for (int part = 0; part < 4; part++) {
            const int at = i * 16 + part * 4 - 512; // in the bytes behind the weights
            uint32_t& word = words[part] = 0;
            auto group = [&](int j) { return chunk * NUMBERS + j * (NUMBERS / GROUPS); }; // its first column
            if (at < 0) {
                const int k = chunk * NUMBERS + part / 2 * (NUMBERS / 2) + i % 4 * 8;
                const size_t byte = (row + i / 4) * from.row_bytes + F::byte(k) + part % 2 * 4;
                if (k < from.in) word = *(const uint32_t*)(from.q + byte);
            } else if (at < SCALES) {
                const Raw* scales = (const Raw*)from.scale;
                const auto raw = [&](int i) {
                    const int r = i / GROUPS, j = i % GROUPS;
                    return group(j) < from.in ? scales[from.scale_at<F>((int)row + r, group(j))] : Raw(0);
                };
                if constexpr (F::BLOCKS) word = __float_as_uint(raw(0));
                else word = raw(at / 2) | (uint32_t)raw(at / 2 + 1) << 16;
            } else
                for (int b = 0; b < 4; b++) {
                    const int zero = at - SCALES + b, j = zero % GROUPS, r = zero / GROUPS;
                    if (zero < ZEROS && group(j) < from.in) word |= from.zero_at<F>((int)row + r, group(j)) << 8 * b;
                }
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// ---- Packing: 16 bytes a thread. Tile `tile` has rows 8 tile .. of W; of a unit of two the second begins with row
// `second`.
template <class W> struct StepPacking {
    unsigned char* to;
    typename W::Source from;
    StepProduct product;
    size_t second;
};
template <class W> __global__ void step_pack_kernel(StepPacking<W> p) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.product.bytes(W::CHUNK) / 16) return;
    constexpr int PIECES = W::CHUNK / 16;
    const int steps = p.product.steps, chunk = (int)(i / PIECES % steps);
    const size_t tile = i / PIECES / steps, row = tile / p.product.tiles * 8 + tile % p.product.tiles * p.second;
    ((uint4*)p.to)[i] = W::piece(p.from, row, chunk, (int)(i % PIECES));
}
