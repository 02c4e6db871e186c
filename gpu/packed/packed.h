/* packed.h: products with INT4, INT8 and FP8 weights on a GPU, as Linear has them. Included by qwen3.cu, section 10.

   Of up to 16 tokens packed_kernel streams the packed bytes, and converts them in registers: time is bytes. Of more
   tokens unpack_kernel makes bf16 numbers of a matrix, or of a part of it, in a scratch of fixed size, and the products
   of bf16 weights follow, forwards and backwards; so neither card nor host ever holds the whole model in bf16.

   How eight bytes become bf16 numbers. A bf16 has 7 bits of fraction: 0x4300 | u is 128 + u for u < 128. So the bits of
   a weight are put into the fraction of a number with that exponent, two weights at once, and a multiply-add of pairs
   takes off what they stand above zero. No conversion instruction, no shuffle, and nothing is rounded: q - zero (INT4),
   q (INT8) and e4m3 are bf16 numbers. A group's scale multiplies the float32 sum of the group's products.

   Every format is a struct with the same names, and the one template argument F of each kernel.

   On Hopper products of up to 128 tokens stream the packed bytes, too; and one of many tokens with FP8 weights may have
   both operands in e4m3 (--activations fp8): the tokens are made e4m3, as Book I's round_activations says, by the norm
   or the SwiGLU that makes them, or else by round_kernel, and hopper_kernel multiplies them by W as it is stored.

   Contents    1 Formats    2 Few tokens    3 Many tokens, embedding    4 Launchers    5 17 to 128 tokens, on Hopper */
#pragma once

// ======================================================================================================== 1 Formats

#ifdef __CUDACC__
// a b + c of pairs of bf16, each rounded once. PTX ISA: fma.rn.bf16x2
__device__ inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// a & b | c. PTX ISA: lop3.b32 (of two constants the compiler makes two instructions)
__device__ inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ inline float half_value(uint16_t h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
// 8 bytes of weights: as load_stream.
__device__ inline uint2 load_eight(const void* p, bool there) {
    uint2 v;
    asm volatile("{ .reg .pred there; setp.ne.u32 there, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;\n"
                 "@there ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2]; }"
                 : "=&r"(v.x), "=&r"(v.y) : "l"(p), "r"((uint32_t)there));
    return v;
}
#define PACKED_SHARED(name) extern __shared__ __align__(16) float name[]
#define PACKED_UNROLL _Pragma("unroll")
#endif

// A scale as two bf16, twice each: what a bf16 has of it, and of the rest; and a pair of weights times their sum.
__device__ inline void two_words(uint32_t (&words)[2], float s) {
    const uint32_t first = pack(s, s);
    const float rest = s - low(first);
    words[0] = first, words[1] = pack(rest, rest);
}
__device__ inline uint32_t times_two(uint32_t pair, const uint32_t (&words)[2]) {
    return fma_pair(pair, words[0], fma_pair(pair, words[1], 0x80008000));
}

// A run: eight neighbouring columns of a row, the first a multiple of 8. A format says
//   RUNS     in 8 bytes: run j of a lane begins 32 j columns after its first
//   SCALES   groups that these runs can be of
//   LOADS    of 8 bytes that a lane has on their way, as many as there are registers for
//   byte     where in a row the 8 bytes of the run at `column` are
//   run      its eight numbers as bf16 pairs, but for the scale; `zero` is INT4's
//   pair     two of them, whose bytes are both bytes of the halves of `twice`
//   SLOTS    scales that 128 columns of a row, a stage of section 5, have; WORDS of 32 bits each
//   scaled   such a pair times its scale, rounded once as unpack_run rounds it; words: scale_words of the scale
//   Raw      a scale as it is stored, and to_float of it; BLOCKS: group_rows rows share it
struct PackedInt8 {
    static constexpr int RUNS = 1, SCALES = 1, LOADS = 8, SLOTS = 4, WORDS = 1;
    static constexpr bool ZEROS = false, BLOCKS = false;
    using Raw = uint16_t;
    __device__ static float to_float(Raw s) { return to_acc(bf16{s}); }
    __device__ static size_t byte(int column) { return (size_t)column; }
    // A byte with its sign is u - 128 (sign), u < 128. Behind a byte 0x43 its sign is the last bit of the exponent: 128
    // + u where it is 0. So with the bit taken out: (128 + u) - (sign ? 256 : 128).
    __device__ static uint32_t two(uint32_t word, uint32_t bytes) {
        const uint32_t raised = __byte_perm(word, 0x43434343, bytes);
        return fma_pair(raised & 0x43804380, 0xbf80bf80, raised & 0x437f437f); // times -1
    }
    __device__ static uint4 run(const uint2& v, int, uint32_t) {
        return {two(v.x, 0x4140), two(v.x, 0x4342), two(v.y, 0x4140), two(v.y, 0x4342)};
    }
    __device__ static uint32_t pair(uint32_t twice, int, uint32_t) {
        return fma_pair(and_or(twice, 0x00800080, 0x43004300), 0xbf80bf80, and_or(twice, 0x007f007f, 0x43004300));
    }
    __device__ static void scale_words(uint32_t (&words)[1], Raw s) { words[0] = s * 0x10001u; }
    __device__ static uint32_t scaled(uint32_t pair, const uint32_t (&words)[1]) {
        return fma_pair(pair, words[0], 0x80008000);
    }
};

struct PackedFp8 {
    static constexpr int RUNS = 1, SCALES = 1, LOADS = 8, SLOTS = 1, WORDS = 2;
    static constexpr bool ZEROS = false, BLOCKS = true;
    using Raw = float;
    __device__ static float to_float(Raw s) { return s; }
    __device__ static size_t byte(int column) { return (size_t)column; }
    // Exponent and fraction, moved to bf16's places, are the number times 2^-120, subnormals too.
    __device__ static uint32_t two(uint32_t word, uint32_t bytes) {
        const uint32_t high = __byte_perm(word, 0, bytes); // each in the upper byte of its half
        return fma_pair((high & 0x80008000) | (high >> 4 & 0x07f007f0), 0x7b807b80, 0x80008000); // 2^120, -0
    }
    __device__ static uint4 run(const uint2& v, int, uint32_t) {
        return {two(v.x, 0x1404), two(v.x, 0x3424), two(v.y, 0x1404), two(v.y, 0x3424)};
    }
    __device__ static uint32_t pair(uint32_t twice, int, uint32_t) {
        return fma_pair((twice & 0x80008000) | (twice >> 4 & 0x07f007f0), 0x7b807b80, 0x80008000);
    }
    // (The scale has more bits than two bf16, so near the middle of two numbers it may be rounded the other way.)
    __device__ static void scale_words(uint32_t (&words)[2], Raw s) { two_words(words, s); }
    __device__ static uint32_t scaled(uint32_t pair, const uint32_t (&words)[2]) { return times_two(pair, words); }
};

// GROUPS: 2 where a group has 32 columns, so that the lower halves' is another than the upper halves'.
template <int GROUPS> struct PackedInt4 {
    static constexpr int RUNS = 2, SCALES = GROUPS, LOADS = 4, SLOTS = GROUPS == 2 ? 4 : 1, WORDS = 2;
    static constexpr bool ZEROS = true, BLOCKS = false;
    using Raw = uint16_t;
    __device__ static float to_float(Raw h) { return half_value(h); }
    __device__ static size_t byte(int column) { return (size_t)(column / 64 * 32 + column % 32); }
    __device__ static uint32_t two(uint32_t word, uint32_t bytes, uint32_t less) { // of the lower halves
        return fma_pair(__byte_perm(word, 0x43434343, bytes) & 0x430f430f, 0x3f803f80, less);
    }
    __device__ static uint4 run(const uint2& v, int upper, uint32_t zero) {
        const uint32_t less = 0xc300c300 | zero * 0x00010001, a = v.x >> 4 * upper, b = v.y >> 4 * upper;
        return {two(a, 0x4140, less), two(a, 0x4342, less), two(b, 0x4140, less), two(b, 0x4342, less)};
    }
    __device__ static uint32_t pair(uint32_t twice, int upper, uint32_t less) { // less: as in `run`
        return fma_pair(and_or(twice >> 4 * upper, 0x000f000f, 0x43004300), 0x3f803f80, less);
    }
    // (A half is a bf16 and a rest of three bits; a weight, of five, times that rest is a bf16.)
    __device__ static void scale_words(uint32_t (&words)[2], Raw h) { two_words(words, to_float(h)); }
    __device__ static uint32_t scaled(uint32_t pair, const uint32_t (&words)[2]) { return times_two(pair, words); }
};

// A packed matrix, its blocks one after another, and what it is multiplied by.
struct PackedArgs {
    const uint8_t* q;    // (out, row_bytes), with PAIR (2 out, row_bytes)
    const void* scale;   // (out / group_rows, groups)
    const uint8_t* zero; // INT4: (out, groups), or null: all 8
    size_t row_bytes;
    int in, out, group, groups, group_rows;
    int shift; // group = 1 << shift, or -1
    const bf16* x = nullptr;    // (., in)
    const int* rows = nullptr;  // (N) rows of x, or null: the first N
    int N = 0, steps = 0;       // steps a warp: set by launch_packed

    // The scale, and the zero point, that a column of row r has.
    template <class F> __device__ size_t scale_at(int r, int column) const {
        const int g = shift < 0 ? column / group : column >> shift;
        return (size_t)(F::BLOCKS ? r / group_rows : r) * groups + min(g, groups - 1);
    }
    template <class F> __device__ uint32_t zero_at(int r, int column) const {
        return zero ? zero[scale_at<F>(r, column)] : 8;
    }
};

// ===================================================================================================== 2 Few tokens
// As stream_kernel, whose comments hold here, with 4 to 8 warps a block: the grid, groups of TILES x 8 rows of W that a
// block's warps share, each with its steps of `in`; mma_32, whose a and b operands hold the same columns; the warps'
// sums in shared memory.
// A step has 32 RUNS columns. Lane 4 g + t loads 8 bytes of row g of each tile: columns 8 t .. 8 t + 7 of the step,
// INT4 also 32 columns further. A lane's sums are of rows 2 t and 2 t + 1 of the tile, so it loads these rows' scales;
// and row g's zero points, which its weights need. All of a group's loads are on their way before any is waited for.
template <class F, int TILES, bool PAIR> struct PackedWeights {
    static constexpr int LOADS = F::LOADS / TILES, ROWS = PAIR ? 8 : 8 * TILES, STEP = 32 * F::RUNS;
    uint2 w[LOADS][TILES];
    typename F::Raw scale[LOADS][TILES][F::SCALES][2];
    uint32_t zero[LOADS][TILES][F::SCALES]; // of row g; 0 where w is not there
    // Of LOADS steps from `step` on; zeros from step `last` on.
    __device__ __forceinline__ void load(const PackedArgs& p, int group, int step, int last) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        PACKED_UNROLL
        for (int tile = 0; tile < TILES; tile++) {
            const int first = group * ROWS + (PAIR ? 0 : tile * 8), base = PAIR ? tile * p.out : 0;
            const int r = base + min(first + g, p.out - 1);
            const int r0 = base + min(first + 2 * t, p.out - 1), r1 = base + min(first + 2 * t + 1, p.out - 1);
            const typename F::Raw* scales = (const typename F::Raw*)p.scale;
            PACKED_UNROLL
            for (int i = 0; i < LOADS; i++) {
                const int k = (step + i) * STEP + 8 * t;
                const bool there = step + i < last && k < p.in;
                w[i][tile] = load_eight(p.q + (size_t)r * p.row_bytes + F::byte(k), there);
                PACKED_UNROLL
                for (int j = 0; j < F::SCALES; j++) {
                    const int column = (step + i) * STEP + 32 * j;
                    scale[i][tile][j][0] = scales[p.template scale_at<F>(r0, column)];
                    scale[i][tile][j][1] = scales[p.template scale_at<F>(r1, column)];
                    if (F::ZEROS) zero[i][tile][j] = there ? p.template zero_at<F>(r, column) : 0;
                }
            }
        }
    }
    // sum += W x^T for these steps; token[m]: this lane's rows of x.
    template <int M>
    __device__ __forceinline__ void multiply(float (&sum)[TILES][4], const bf16* const (&token)[M], int in,
                                             int step) const {
        PACKED_UNROLL
        for (int i = 0; i < LOADS; i++) {
            float part[TILES][4] = {}; // of one group
            PACKED_UNROLL
            for (int j = 0; j < F::RUNS; j++) {
                const int column = (step + i) * STEP + 32 * j + 8 * (int)(threadIdx.x % 4);
                const int s = F::SCALES == 1 ? 0 : j;
                uint4 a[2] = {}; // zeros past the end of the row
                PACKED_UNROLL
                for (int m = 0; m < M; m++)
                    if (column < in) a[m] = *(const uint4*)(token[m] + column);
                PACKED_UNROLL
                for (int tile = 0; tile < TILES; tile++) {
                    mma_32(part[tile], a[0], a[1], F::run(w[i][tile], j, F::ZEROS ? zero[i][tile][s] : 0));
                    if (F::SCALES == 1 && j + 1 < F::RUNS) continue;
                    PACKED_UNROLL
                    for (int e = 0; e < 4; e++) {
                        sum[tile][e] = fmaf(part[tile][e], F::to_float(scale[i][tile][s][e % 2]), sum[tile][e]);
                        part[tile][e] = 0;
                    }
                }
            }
        }
    }
};

template <class F, int TILES, int M, class Epilogue>
__global__ void __launch_bounds__(256, 2) packed_kernel(PackedArgs p, Epilogue epilogue) {
    static_assert(!Epilogue::PAIR || TILES == 2, "a tile of gate, a tile of up");
    constexpr int SUMS = TILES * M * 64; // (tile, token, row)
    PACKED_SHARED(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    using Weights = PackedWeights<F, TILES, Epilogue::PAIR>;
    constexpr int ROWS = Weights::ROWS;
    const int first = warp * p.steps, last = min((p.in + Weights::STEP - 1) / Weights::STEP, first + p.steps);
    const int groups = (p.out + ROWS - 1) / ROWS;
    Weights weights;
    int group = blockIdx.x;
    weights.load(p, group, first, last); // (no kernel of a forward writes weights)
    let_next_start();
    wait_for_previous();
    epilogue.begin();
    const bf16* token[M]; // tokens g and g + 8, this lane's rows of a; past the last one it computes what nobody keeps
    PACKED_UNROLL
    for (int m = 0; m < M; m++) {
        const int n = min(g + 8 * m, p.N - 1);
        token[m] = p.x + (size_t)(p.rows ? p.rows[n] : n) * p.in;
    }
    float* sums = shared;
    for (; group < groups; group += gridDim.x) {
        float sum[TILES][4] = {};
        for (int step = first; step < last; step += Weights::LOADS) {
            if (step > first) weights.load(p, group, step, last);
            weights.multiply(sum, token, p.in, step);
        }
        if (group + (int)gridDim.x < groups) weights.load(p, group + gridDim.x, first, last);
        PACKED_UNROLL
        for (int tile = 0; tile < TILES; tile++)
            PACKED_UNROLL
            for (int m = 0; m < M; m++) {
                float* to = sums + warp * SUMS + ((tile * M + m) * 8 + g) * 8 + 2 * t;
                *(float2*)to = make_float2(sum[tile][2 * m], sum[tile][2 * m + 1]);
            }
        __syncthreads();
        for (int o = threadIdx.x; o < (Epilogue::PAIR ? SUMS / 2 : SUMS); o += blockDim.x) {
            const int n = o / 8 % (8 * M), r = group * ROWS + o / (64 * M) * 8 + o % 8;
            const bool inside = n < p.N && r < p.out;
            float y = 0, second = 0;
            for (int v = 0; v < warps; v++) {
                y += sums[v * SUMS + o];
                if (Epilogue::PAIR) second += sums[v * SUMS + SUMS / 2 + o];
            }
            if constexpr (Epilogue::ADDS) second = inside ? epilogue.old(n, r) : 0;
            epilogue.one(inside, n, r, y, second);
        }
        sums = sums == shared ? shared + warps * SUMS : shared;
    }
    epilogue.end(p.N);
}

// ========================================================================================== 3 Many tokens, embedding
// The eight numbers of a run: W.at of them, in float.
template <class F> __device__ __forceinline__ void unpack_run(float (&y)[8], const PackedArgs& p, int r, int column) {
    const uint2 v = *(const uint2*)(p.q + (size_t)r * p.row_bytes + F::byte(column));
    const uint4 pairs = F::run(v, F::RUNS == 2 ? column / 32 % 2 : 0,
                               F::ZEROS ? p.zero_at<F>(r, column) : 0);
    const float s = F::to_float(((const typename F::Raw*)p.scale)[p.scale_at<F>(r, column)]);
    const uint32_t pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    PACKED_UNROLL
    for (int i = 0; i < 4; i++) y[2 * i] = low(pair[i]) * s, y[2 * i + 1] = high(pair[i]) * s;
}

// to (rows, columns) = bf16 of W from row r0 and column k0 on. A thread a run. Bound by the memory's speed.
template <class F>
__global__ void __launch_bounds__(256) unpack_kernel(bf16* to, PackedArgs p, int r0, int rows, int k0, int columns) {
    let_next_start();
    wait_for_previous(); // products that read what was here before
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x, runs = (size_t)columns / 8;
    if (i >= runs * rows) return;
    const int r = (int)(i / runs), k = (int)(i % runs) * 8;
    float y[8];
    unpack_run<F>(y, p, r0 + r, k0 + k);
    *(uint4*)(to + (size_t)r * columns + k) =
        make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
}

// round_activations, to bf16; or with E4M3 to bytes q (N,in), and scales (groups, pitch). A group in 16 lanes, eight
// numbers each. Bound by the memory's speed.
template <bool E4M3>
__global__ void __launch_bounds__(256) round_kernel(bf16* rounded, uint8_t* q, float* scale, const bf16* x, int N,
                                                    int in, int pitch) {
    let_next_start();
    wait_for_previous();
    const int groups = (in + FP8_GROUP - 1) / FP8_GROUP;
    const size_t all = (size_t)blockIdx.x * 16 + threadIdx.x / 16;
    const int n = (int)min(all / groups, (size_t)N - 1), g = (int)(all % groups); // (whole warps stay together)
    const int column = g * FP8_GROUP + threadIdx.x % 16 * 8;
    const size_t at = (size_t)n * in + column;
    const uint4 v = column < in ? *(const uint4*)(x + at) : uint4{};
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
    uint32_t largest = 0; // bits, without sign; from 0x7f80 on not finite
    PACKED_UNROLL
    for (int i = 0; i < 8; i++) largest = max(largest, pair[i / 2] >> i % 2 * 16 & 0x7fff);
    PACKED_UNROLL
    for (int other = 8; other; other /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, other));
    const bool finite = largest < 0x7f80;
    const int e = kv_exponent(finite ? low(largest) : 0);
    const float by = __uint_as_float((uint32_t)(127 - e) << 23);
    const float factor = finite ? __uint_as_float((uint32_t)(127 + e) << 23) : NAN;
    uint32_t two[4];
    PACKED_UNROLL
    for (int i = 0; i < 4; i++) two[i] = pack_e4m3(low(pair[i]) * by, high(pair[i]) * by);
    if (column >= in || all / groups >= (size_t)N) return;
    const uint2 eight = {two[0] | two[1] << 16, two[2] | two[3] << 16};
    if (E4M3) {
        *(uint2*)(q + at) = eight;
        if (threadIdx.x % 16 == 0) scale[(size_t)g * pitch + n] = factor;
        return;
    }
    const uint4 y = PackedFp8::run(eight, 0, 0);
    const auto times = [&](uint32_t pair) { return pack(low(pair) * factor, high(pair) * factor); };
    *(uint4*)(rounded + at) = make_uint4(times(y.x), times(y.y), times(y.z), times(y.w));
}

// embed. A block a token.
template <class F> __global__ void packed_embed_kernel(float* x, PackedArgs p, Batch b) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    if (b.seq[n] < 0) return;
    for (int k = threadIdx.x * 8; k < p.in; k += blockDim.x * 8) {
        float y[8];
        unpack_run<F>(y, p, b.token[n], k);
        for (int i = 0; i < 8; i++) x[(size_t)n * p.in + k + i] = y[i];
    }
}

// ======================================================================================================= 4 Launchers
inline PackedArgs packed_args(const Linear<bf16>& W) {
    // (FP8's blocks of rows run on from block to block of a Linear: upload sees to it.)
    const int shift = W.group & (W.group - 1) ? -1 : __builtin_ctz((unsigned)W.group);
    return {(const uint8_t*)W.q[0], W.scale[0], W.zero[0], W.row_bytes(), W.in, W.out(), W.group, W.groups(),
            W.group_rows, shift};
}
// Calls f with W's format. INT4 of groups of up to `few` columns goes as if they were of 32.
template <class Use> auto with_packing(const Linear<bf16>& W, Use f, int few = GROUP) {
    if (W.in % 8 || W.out() % 8) DIE("a packed matrix is (%d,%d): the GPU takes multiples of 8", W.out(), W.in);
    switch (W.format) {
        case Format::INT8: return f(PackedInt8());
        case Format::FP8: return f(PackedFp8());
        case Format::INT4: return W.group <= few ? f(PackedInt4<2>()) : f(PackedInt4<1>());
        default: DIE("a product with packed weights: W has none");
    }
}

#ifdef __CUDACC__
template <class F, int TILES, int M, class Epilogue>
RowsDealt launch_packed(Context& ctx, PackedArgs p, Epilogue epilogue) {
    using Weights = PackedWeights<F, TILES, Epilogue::PAIR>;
    const int groups = (p.out + Weights::ROWS - 1) / Weights::ROWS, steps = (p.in + Weights::STEP - 1) / Weights::STEP;
    const int warps = std::min(8, std::max(4, steps * TILES / F::LOADS));
    p.steps = (steps + warps - 1) / warps;
    const size_t shared = 2 * (size_t)warps * TILES * M * 64 * sizeof(float);
    const int blocks = std::min({groups, ctx.gpu->sms * (16 / warps), Epilogue::MOST_BLOCKS});
    launch(ctx, packed_kernel<F, TILES, M, Epilogue>, blocks, warps * 32, shared, p, epilogue);
    return {blocks, Weights::ROWS};
}
template <class Epilogue>
RowsDealt packed_product(Context& ctx, Epilogue epilogue, const bf16* x, const int* rows, const Linear<bf16>& W,
                         int N) {
    if (N < 1 || N > STREAM_TOKENS) DIE("packed_product: %d tokens", N);
    return with_packing(W, [&](auto format) {
        using F = decltype(format);
        PackedArgs p = packed_args(W);
        p.x = x, p.rows = rows, p.N = N;
        if (Epilogue::PAIR) p.out = W.rows[0];
        // Two tiles share what is read of x, where every multiprocessor still has a group.
        if constexpr (!Epilogue::PAIR)
            if (p.out < 16 * ctx.gpu->sms)
                return N <= 8 ? launch_packed<F, 1, 1>(ctx, p, epilogue) : launch_packed<F, 1, 2>(ctx, p, epilogue);
        return N <= 8 ? launch_packed<F, 2, 1>(ctx, p, epilogue) : launch_packed<F, 2, 2>(ctx, p, epilogue);
    });
}

inline void packed_embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b) {
    with_packing(table, [&](auto format) { // (without overlap: see embed_gpu)
        launch_kernel(ctx, false, packed_embed_kernel<decltype(format)>, b.N, 128, 0, x, packed_args(table), b);
    });
}

// A part of W as bf16, in the scratch: valid until the next call.
inline const bf16* unpack(Context& ctx, const Linear<bf16>& W, int r0, int rows, int k0, int columns) {
    const size_t numbers = (size_t)rows * columns;
    if (numbers > ctx.gpu->unpacked_numbers)
        DIE("unpacking (%d,%d) of a matrix: the scratch has room for %zu numbers", rows, columns,
            ctx.gpu->unpacked_numbers);
    const unsigned blocks = (unsigned)((numbers / 8 + 255) / 256);
    with_packing(W, [&](auto format) {
        launch(ctx, unpack_kernel<decltype(format)>, blocks, 256, 0, ctx.gpu->unpacked, packed_args(W), r0, rows, k0,
               columns);
    });
    return ctx.gpu->unpacked;
}

// While it lives and W is packed, no kernel starts before all ahead of it have ended: products read weights early, and
// these are written by unpack_kernel just before.
struct AfterUnpacking {
    Gpu& gpu;
    const bool was;
    AfterUnpacking(Context& ctx, const Linear<bf16>& W) : gpu(*ctx.gpu), was(gpu.overlap) {
        if (W.format != Format::PLAIN) gpu.overlap = false;
    }
    AfterUnpacking(const AfterUnpacking&) = delete;
    ~AfterUnpacking() { gpu.overlap = was; }
};

// W as a product of many tokens takes it.
inline const bf16* unpacked(Context& ctx, const Linear<bf16>& W) {
    return W.format == Format::PLAIN ? W.w[0] : unpack(ctx, W, 0, W.out(), 0, W.in);
}
// A matrix that may be larger than the scratch: calls f(first, count, weights) for parts of its rows; or, with columns,
// of its columns, of all rows each. Parts begin at multiples of 64.
template <class Use> void each_part(Context& ctx, const Linear<bf16>& W, bool columns, Use f) {
    const int all = columns ? W.in : W.out(), other = columns ? W.out() : W.in;
    if (W.format == Format::PLAIN) return f(0, all, W.w[0]);
    const int most = (int)std::min<size_t>((size_t)all, ctx.gpu->unpacked_numbers / (size_t)other / 64 * 64);
    if (!most) DIE("unpacking (%d,%d): 64 of its %s are more than the scratch", W.out(), W.in,
                   columns ? "columns" : "rows");
    for (int first = 0, n; first < all; first += n) {
        n = std::min(most, all - first);
        f(first, n, columns ? unpack(ctx, W, 0, other, first, n) : unpack(ctx, W, first, n, 0, other));
    }
}

// ---- FP8 activations (Context::fp8_activations), of any number of tokens.
inline bool rounds_activations(const Context& ctx, const Linear<bf16>& W, int N) {
    return ctx.fp8_activations && W.format == Format::FP8 && N > STREAM_TOKENS;
}
// Scratch for `rows` tokens.
inline void plan_rounded(Context& ctx, Arena& arena, const Config& c, int rows) {
    if (!ctx.fp8_activations) return;
    ctx.gpu->rounded_numbers = (size_t)(rows + 127) / 128 * 128 * std::max({c.C, c.H * c.D, c.F});
    ctx.gpu->rounded = arena.take<bf16>(ctx.gpu->rounded_numbers);
}
// Where x is as e4m3: at the beginning of the scratch, or, if the product that made x left it so too, at the end, since
// that product's own x was at the beginning.
inline size_t e4m3_bytes(int N, int in) { // bytes, then scales
    const size_t pitch = (size_t)(N + 127) / 128 * 128, groups = (size_t)(in + FP8_GROUP - 1) / FP8_GROUP;
    return ((size_t)N * in + 127) / 128 * 128 + groups * pitch * sizeof(float);
}
inline E4M3Rows e4m3_at(uint8_t* at, int N, int in) {
    return {at, (float*)(at + ((size_t)N * in + 127) / 128 * 128), (N + 127) / 128 * 128};
}
inline void need_rounding_room(Context& ctx, size_t bytes, int N, int in) {
    if (bytes > 2 * ctx.gpu->rounded_numbers || in % 8)
        DIE("rounding (%d,%d): the scratch has room for %zu numbers", N, in, ctx.gpu->rounded_numbers);
}
inline E4M3Rows first_rows(Context& ctx, int N, int in) {
    need_rounding_room(ctx, e4m3_bytes(N, in), N, in);
    return e4m3_at((uint8_t*)ctx.gpu->rounded, N, in);
}
inline E4M3Rows last_rows(Context& ctx, int N, int in) {
    return e4m3_at((uint8_t*)(ctx.gpu->rounded + ctx.gpu->rounded_numbers) - e4m3_bytes(N, in), N, in);
}
// Where a product of `used` bytes of x leaves its output, beside the output itself; null: there is no room.
inline E4M3Rows round_ahead(Context& ctx, const bf16* output, int N, int out, size_t used) {
    if (used + e4m3_bytes(N, out) > 2 * ctx.gpu->rounded_numbers) return {};
    ctx.gpu->ahead = {output, N, out};
    return last_rows(ctx, N, out);
}
template <bool E4M3> void launch_round(Context& ctx, const E4M3Rows& to, const bf16* x, int N, int in) {
    const size_t groups = (size_t)N * ((in + FP8_GROUP - 1) / FP8_GROUP);
    launch(ctx, round_kernel<E4M3>, (unsigned)((groups + 15) / 16), 256, 0, ctx.gpu->rounded, to.q, to.scale, x, N, in,
           to.pitch);
}
// x rounded, in the scratch: valid until the next call.
inline const bf16* rounded(Context& ctx, const bf16* x, int N, int in) {
    need_rounding_room(ctx, (size_t)N * in * sizeof(bf16), N, in);
    launch_round<false>(ctx, {}, x, N, in);
    return ctx.gpu->rounded;
}
inline E4M3Rows e4m3_rows(Context& ctx, const bf16* x, int N, int in) {
    const auto ahead = ctx.gpu->ahead;
    ctx.gpu->ahead = {};
    if (ahead.x == x && ahead.N == N && ahead.in == in) return last_rows(ctx, N, in);
    const E4M3Rows to = first_rows(ctx, N, in);
    launch_round<true>(ctx, to, x, N, in);
    return to;
}
// Whether tensor cores take W as it is stored.
inline bool takes_e4m3(const Context& ctx, const Linear<bf16>& W) {
    return ctx.gpu->hopper && W.group == FP8_GROUP && W.group_rows == FP8_GROUP && W.in % 16 == 0 && !W.adapter.rank;
}
// The same product of such a W up to the order of sums, without anything unpacked.
template <class Epilogue>
void e4m3_product(Context& ctx, Epilogue epilogue, const E4M3Rows& x, const Linear<bf16>& W, int N) {
    TileArgs p = {(const bf16*)x.q, (const bf16*)W.q[0], N, W.in / 2, Epilogue::PAIR ? W.rows[0] : W.out()};
    p.x_scale = x.scale, p.W_scale = (const float*)W.scale[0], p.pitch = x.pitch;
    HopperPlan plan;
    const int rows = W.out();
    plan.consider<Hopper128x128>(2, 0.36, ctx.gpu->sms, MOST_SPLITS, N, rows, p.in);
    plan.consider<Hopper128x256>(0, 0.66, ctx.gpu->sms, MOST_SPLITS, N, rows, p.in);
    p.splits = plan.splits;
    if (plan.shape) return launch_hopper<Hopper128x128, false, false, true>(ctx, p, epilogue);
    if constexpr (std::is_same_v<Epilogue, SwigluEpilogue>)
        if (p.splits == 1 && !epilogue.gate_up && p.out % FP8_GROUP == 0)
            if (const E4M3Rows to = round_ahead(ctx, epilogue.out, N, p.out, e4m3_bytes(N, W.in)); to.q)
                return launch_hopper<Hopper128x256, false, false, true>(ctx, p, RoundedSwigluEpilogue(epilogue, to));
    launch_hopper<Hopper128x256, false, false, true>(ctx, p, epilogue);
}
// ===================================================================================== 5 17 to 128 tokens, on Hopper
// The packed bytes come to shared memory and are converted on their way to the tensor core. Rows of W are wgmma's rows
// and tokens its columns: so what a lane converts is its own part of operand a, which wgmma takes from registers, and
// no number is written back. Bound by the memory's speed; beside it the L2 cache, from which each block reads x, the
// tensor cores and the conversions all have most of their time's work.
//
// Grid: tiles of rows, each for all tokens, times splits of `in`, the blocks of a cluster; without splits as many
// blocks as are resident at once, and a block takes tiles in turn. A block's warpgroups have 64 rows of the tile each,
// or, in tiles of few rows, several have the same rows and take stages in turn: while one converts, others multiply.
// One more warp, the producer, has the Tensor Memory Accelerator copy stage after stage to a ring: PACKED_IN columns of
// x, in two panels of 64 as hopper_kernel's stages, and of the packed rows, swizzled in theirs.
//
// Who owns what. Of the 16 rows of a warp's operand a, lane 4 g + t holds rows g and g + 8: rows half a tile apart, so
// that with PAIR they are one of gate and the same of up. Of each eight columns it holds the pair 2 t and 2 t + 1, as
// mma has it. All lanes of a quad load the same 16 bytes, and each picks its pairs.
constexpr int PACKED_IN = 128, PACKED_STAGES = 12; // columns of a stage; stages at most

template <class F, int TOKENS> struct PackedTile {
    // Warpgroups, for more of which there are not registers enough; the producer is one, and leaves the others most.
    static constexpr int WARPGROUPS = TOKENS == 64 ? 4 : 3, THREADS = (WARPGROUPS + 1) * 128;
    static constexpr int REGISTERS = TOKENS == 64 ? 112 : 152, PRODUCERS = 32;
    static constexpr int X_BYTES = TOKENS * PACKED_IN * 2, ROW_BYTES = PACKED_IN / F::RUNS; // of a stage
    BOTH static int stage_bytes(int rows) { return X_BYTES + rows * ROW_BYTES; }
};
struct PackedTiles {
    CUtensorMap x, W;
    int units, splits, stages; // tiles x splits; of the ring
    int rows, turns;           // of a tile; warpgroups that have the same rows
};

// The scales and zero points that a lane's two rows have in a stage, loaded a stage ahead: one, or one for each quarter
// of its columns, of which each lane of a quad has one.
template <class F> struct PackedScales {
    int at[2];
    typename F::Raw next[2];
    uint32_t next_zero[2], less[2], words[2][F::WORDS];
    __device__ __forceinline__ PackedScales(const PackedArgs& p, int row, int other)
        : at{(int)p.template scale_at<F>(row, 0), (int)p.template scale_at<F>(other, 0)} {}
    __device__ __forceinline__ void load(const PackedArgs& p, int step) {
        const int column = step * PACKED_IN + (int)threadIdx.x % F::SLOTS * 32;
        const int g = min(column >> p.shift, p.groups - 1);
        PACKED_UNROLL
        for (int h = 0; h < 2; h++) {
            next[h] = ((const typename F::Raw*)p.scale)[at[h] + g];
            if (F::ZEROS) next_zero[h] = p.zero ? p.zero[at[h] + g] : 8;
        }
    }
    __device__ __forceinline__ void take() { // what was loaded
        PACKED_UNROLL
        for (int h = 0; h < 2; h++) {
            F::scale_words(words[h], next[h]);
            if (F::ZEROS) less[h] = 0xc300c300 | next_zero[h] * 0x00010001;
        }
    }
    __device__ __forceinline__ uint32_t of(uint32_t mine, int quarter) const { // all lanes of a warp
        return F::SLOTS == 1 ? mine : __shfl_sync(~0u, mine, (threadIdx.x & 28) | quarter);
    }
};

// A quarter of a stage as operand a, for two wgmma of 16 columns each: W.at, rounded. w: where chunk 0 (of 16 bytes) of
// a lane's row g is, swizzled; its other row is `apart` bytes further. Of eight bytes a lane picks two, twice each.
// INT4: an odd quarter is in the upper halves of the bytes that the one before picked.
template <class F>
__device__ __forceinline__ void convert_quarter(uint32_t (&a)[2][4], uint32_t (&picked)[2][2][2], uint32_t w,
                                                uint32_t apart, uint32_t pick, int quarter,
                                                const PackedScales<F>& scales) {
    const int upper = F::RUNS == 2 ? quarter % 2 : 0;
    PACKED_UNROLL
    for (int h = 0; h < 2; h++) {
        const uint32_t less = F::ZEROS ? scales.of(scales.less[h], quarter) : 0;
        uint32_t words[F::WORDS];
        PACKED_UNROLL
        for (int i = 0; i < F::WORDS; i++) words[i] = scales.of(scales.words[h][i], quarter);
        PACKED_UNROLL
        for (int k = 0; k < 2; k++) {
            if (!upper) {
                const uint4 v = load_shared(w + h * apart ^ (quarter / F::RUNS * 2 + k) * 16);
                picked[h][k][0] = __byte_perm(v.x, v.y, pick), picked[h][k][1] = __byte_perm(v.z, v.w, pick);
            }
            PACKED_UNROLL
            for (int i = 0; i < 2; i++)
                a[k][2 * i + h] = F::scaled(F::pair(picked[h][k][i], upper, less), words);
        }
    }
}

// Of two fragments, 16 tokens, and row h of a lane: four neighbouring rows of one token. Four lanes, 4 apart, have
// these rows, each of four tokens: they transpose. Lane 16 a + 4 i + t gets rows 4 a .. 4 a + 3 of token 2 t + i % 2 +
// 8 (i / 2).
__device__ __forceinline__ float4 four_rows(const float (&even)[4], const float (&odd)[4], int h) {
    const bool second = threadIdx.x & 4, third = threadIdx.x & 8;
    const float2 e = {even[2 * h], even[2 * h + 1]}, o = {odd[2 * h], odd[2 * h + 1]};
    const float from_e = __shfl_xor_sync(~0u, second ? e.x : e.y, 4);
    const float from_o = __shfl_xor_sync(~0u, second ? o.x : o.y, 4);
    const float2 a = second ? make_float2(from_e, e.y) : make_float2(e.x, from_e);
    const float2 b = second ? make_float2(from_o, o.y) : make_float2(o.x, from_o);
    const float x = __shfl_xor_sync(~0u, third ? a.x : b.x, 8), y = __shfl_xor_sync(~0u, third ? a.y : b.y, 8);
    return third ? make_float4(x, y, b.x, b.y) : make_float4(a.x, a.y, x, y);
}

// Hands the sums of a lane's rows to the epilogue.
// Warpgroups of the same rows, in a block and its cluster, have the sums of some stages each. They leave them in shared
// memory (stages that all have been used), where each adds up some pieces, of 16 tokens, in order.
template <int TOKENS, class Epilogue>
__device__ __forceinline__ void finish_packed(const float (&sum)[TOKENS / 8][4], uint32_t shared,
                                              const PackedTiles& tiles, int unit, int N, int out, Epilogue& epilogue) {
    constexpr int PIECES = TOKENS / 16, MOST_TURNS = 4;
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(unit)); // what follows needs no registers before
    const int lane = thread % 32, rows = tiles.rows, same = rows * 2, threads = same * tiles.turns; // of a turn; all
    const int split = unit % tiles.splits, r0 = unit / tiles.splits * rows, apart = Epilogue::PAIR ? 0 : rows / 2;
    const int r = (Epilogue::PAIR ? r0 / 2 : r0) + thread / 32 * 8 % (rows / 2) + lane / 16 * 4; // the first of four
    const int own = lane % 4 * 2 + lane / 4 % 2 + lane / 8 % 2 * 8; // token of a piece
    const auto inside = [&](int piece, int h) { return piece * 16 + own < N && r + h * apart < out; };
    const auto old = [&](int piece, int h) {
        return Epilogue::ADDS && inside(piece, h) ? epilogue.old_four(piece * 16 + own, r + h * apart) : float4{};
    };
    const auto hand = [&](int piece, const float (&even)[4], const float (&odd)[4], const float4 (&before)[2]) {
        const float4 y[2] = {four_rows(even, odd, 0), four_rows(even, odd, 1)};
        const int n = piece * 16 + own;
        if constexpr (Epilogue::PAIR) {
            if (inside(piece, 0)) epilogue.four(n, r, y[0], y[1]);
        } else
            for (int h = 0; h < 2; h++)
                if (inside(piece, h)) epilogue.four(n, r + h * apart, y[h], before[h]);
    };
    const int parts = tiles.splits * tiles.turns;
    if (parts == 1) {
        PACKED_UNROLL
        for (int first = 0; first < PIECES; first += 2) {
            float4 before[2][2]; // asked for before the first is waited for
            PACKED_UNROLL
            for (int i = 0; i < 2; i++) before[i][0] = old(first + i, 0), before[i][1] = old(first + i, 1);
            PACKED_UNROLL
            for (int i = 0; i < 2; i++) hand(first + i, sum[2 * (first + i)], sum[2 * (first + i) + 1], before[i]);
        }
        return;
    }
    const auto meet = [&] { asm volatile("barrier.sync 1, %0;" ::"r"(threads) : "memory"); };
    meet(); // all have read the stages
    PACKED_UNROLL
    for (int f = 0; f < TOKENS / 8; f++) store_shared(shared + (f * threads + thread) * 16, sum[f]);
    const int first = split * tiles.turns + thread / same;
    float4 before[2] = {old(first, 0), old(first, 1)};
    if (tiles.splits == 1) meet();
    else cluster_arrive(), cluster_wait();
    for (int piece = first; piece < PIECES; piece += parts) {
        const uint32_t at = shared + (2 * piece * threads + thread % same) * 16;
        float v[2][4] = {};
        for (int s = 0; s < tiles.splits; s++) {
            float part[MOST_TURNS][2][4] = {};
            PACKED_UNROLL
            for (int i = 0; i < MOST_TURNS * 2; i++)
                if (i / 2 < tiles.turns) read_block(part[i / 2][i % 2], at + (i % 2 * threads + i / 2 * same) * 16, s);
            PACKED_UNROLL
            for (int i = 0; i < MOST_TURNS * 8; i++) v[i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
        }
        hand(piece, v[0], v[1], before);
        before[0] = old(piece + parts, 0), before[1] = old(piece + parts, 1);
    }
    if (tiles.splits > 1) cluster_arrive(), cluster_wait(); // no block's memory goes away while others read it
}

template <class F, int TOKENS, class Epilogue>
__global__ void __launch_bounds__(PackedTile<F, TOKENS>::THREADS, 1)
packed_hopper_kernel(const __grid_constant__ PackedTiles tiles, const __grid_constant__ PackedArgs p,
                     Epilogue epilogue) {
#ifdef HAVE_WGMMA
    using Tile = PackedTile<F, TOKENS>;
    constexpr bool PAIR = Epilogue::PAIR;
    constexpr int PANEL = TOKENS * 128; // bytes of 64 columns of x
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[2 * PACKED_STAGES];
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u, at_barriers = shared_address(barriers);
    const int consumers = blockDim.x - 128, rows = tiles.rows, all = PAIR ? 2 * p.out : p.out;
    const int bytes = Tile::stage_bytes(rows);
    const auto stage = [&](int s) { return shared + s * bytes; };
    const auto full = [&](int s) { return at_barriers + 8 * s; };
    const auto empty = [&](int s) { return at_barriers + 8 * (PACKED_STAGES + s); };
    const int steps = (p.in + PACKED_IN - 1) / PACKED_IN;
    const auto step_at = [&](int split) { return (int)((int64_t)steps * split / tiles.splits); };
    if (threadIdx.x == consumers) prefetch_map(tiles.W), prefetch_map(tiles.x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < tiles.stages; s++) barrier_begin(full(s), 1), barrier_begin(empty(s), rows / 16);
        barriers_begun();
    }
    __syncthreads();
    let_next_start(); // all our blocks have their places
    Ring<PACKED_STAGES> ring;
    if (threadIdx.x >= consumers) {
        keep_registers<Tile::PRODUCERS>();
        if (threadIdx.x > consumers) return;
        for (int u = blockIdx.x; u < tiles.units; u += gridDim.x) {
            const int r0 = u / tiles.splits * rows, split = u % tiles.splits, last = step_at(split + 1);
            const auto copy_w = [&](int step, int s) {
                const uint32_t to = stage(s) + Tile::X_BYTES;
                barrier_arrive_expecting(full(s), bytes);
                copy_box(to, tiles.W, full(s), step * Tile::ROW_BYTES, PAIR ? r0 / 2 : r0);
                if (PAIR)
                    copy_box(to + rows / 2 * Tile::ROW_BYTES, tiles.W, full(s), step * Tile::ROW_BYTES, p.out + r0 / 2);
            };
            const auto copy_x = [&](int step, int s) {
                for (int c = 0; c < 2; c++)
                    copy_box(stage(s) + c * PANEL, tiles.x, full(s), step * PACKED_IN + c * 64, 0);
            };
            int step = step_at(split);
            if (u == blockIdx.x) { // the ring is empty, and weights may be read early, as in stream_kernel
                const int first = step, ready = min(last - first, tiles.stages);
                for (int s = 0; s < ready; s++) copy_w(first + s, s);
                wait_for_previous();
                for (; step < first + ready; step++, ring.next(tiles.stages)) copy_x(step, ring.stage);
            }
            for (; step < last; step++, ring.next(tiles.stages)) {
                barrier_wait(empty(ring.stage), ring.parity ^ 1);
                copy_w(step, ring.stage), copy_x(step, ring.stage);
            }
        }
        return;
    }
    take_registers<Tile::REGISTERS>();
    const int turn = threadIdx.x / (2 * rows), in_tile = threadIdx.x / 32 * 8 % (rows / 2); // rows h = 0
    const int g = threadIdx.x % 32 / 4, apart = PAIR ? p.out : rows / 2;
    uint32_t pick = 0x1100 + 0x2222 * (threadIdx.x % 4), ring_at = shared;
    uint32_t w_at = Tile::X_BYTES + (in_tile + g) * Tile::ROW_BYTES + g / F::RUNS * 16;
    asm volatile("" : "+r"(pick), "+r"(ring_at), "+r"(w_at)); // not computed again and again
    ring.next(tiles.stages, turn);
    const auto done_with = [&](int s) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(s));
    };
    for (int u = blockIdx.x; u < tiles.units; u += gridDim.x) {
        const int r0 = u / tiles.splits * rows, split = u % tiles.splits, last = step_at(split + 1);
        const int mine = (PAIR ? r0 / 2 : r0) + in_tile;
        int step = step_at(split) + turn;
        PackedScales<F> scales(p, min(mine + g, all - 1), min(mine + g + apart, all - 1));
        scales.load(p, step);
        wait_for_previous(); // whose results an epilogue may add to
        float sum[1][TOKENS / 8][4] = {};
        int before = -1;
        for (; step < last; step += tiles.turns, ring.next(tiles.stages, tiles.turns)) {
            scales.take();
            scales.load(p, step + tiles.turns); // (past the end: the row's last)
            // A barrier two phases behind looks full, and we may be a ring ahead of another turn, whose data for this
            // place have not come yet: first wait until they have been used.
            barrier_wait(empty(ring.stage), ring.parity ^ 1);
            barrier_wait(full(ring.stage), ring.parity);
            const uint32_t at = ring_at + ring.stage * bytes;
            const uint64_t x = wgmma_operand(at, 0);
            const auto x_at = [&](int chunk) { return x >> 32 << 32 | (uint32_t)((uint32_t)x + chunk); };
            uint32_t picked[2][2][2];
            PACKED_UNROLL
            for (int quarter = 0; quarter < 4; quarter++) { // while the last one's products run
                uint32_t a[2][4];
                convert_quarter<F>(a, picked, at + w_at, rows / 2 * Tile::ROW_BYTES, pick, quarter, scales);
                wgmma_begin();
                PACKED_UNROLL
                for (int k = 0; k < 2; k++)
                    wgmma<TOKENS, false>(sum[0], a[k], x_at(quarter / 2 * PANEL / 16 + quarter % 2 * 4 + k * 2), true);
                wgmma_commit();
                wgmma_wait<1>();
                if (quarter == 0 && before >= 0) done_with(before);
            }
            before = ring.stage;
        }
        wgmma_wait<0>();
        wgmma_settle(sum);
        if (before >= 0) done_with(before);
        finish_packed<TOKENS>(sum[0], ring_at, tiles, u, p.N, p.out, epilogue);
    }
#endif
}

// Rows of a tile, in warpgroups, and blocks that share it. Measured on an H100: a block a tile of 64 rows, whose
// warpgroups all work on it, as long as there are multiprocessors enough; else larger tiles, in turn. Two blocks a tile
// pay where half of the multiprocessors would be idle and rows are long.
struct PackedPlan {
    int warpgroups = 1, splits = 1;
    static PackedPlan best(int sms, int rows, int in) {
        const int tiles = (rows + 63) / 64;
        return {std::min(3, (tiles + sms - 1) / sms), 2 * tiles <= sms - 4 && in >= 3072 ? 2 : 1};
    }
};

template <class F, int TOKENS, class Epilogue>
void launch_packed_hopper(Context& ctx, const PackedArgs& p, PackedPlan plan, Epilogue epilogue) {
    static_assert(!Epilogue::MASKS && !Epilogue::PARTS, "finish_packed has neither");
    using Tile = PackedTile<F, TOKENS>;
    const int all = Epilogue::PAIR ? 2 * p.out : p.out, rows = 64 * plan.warpgroups;
    const int bytes = Tile::stage_bytes(rows), units = (all + rows - 1) / rows * plan.splits;
    const bool once = plan.splits > 1 || units <= ctx.gpu->sms; // a block has one tile, and the ring's memory for sums
    const int turns = once ? Tile::WARPGROUPS / plan.warpgroups : 1;
    const int stages = std::min(PACKED_STAGES, 225 * 1024 / bytes);
    if (stages <= turns) // each turn holds one until it has its next
        DIE("stages of %d bytes: a ring has too few for %d turns", bytes, turns);
    PackedTiles tiles = {{}, {}, units, plan.splits, stages, rows, turns};
    tiles.x = tensor_map(p.x, {{(size_t)p.in, 1, 64}, {(size_t)p.N, (size_t)p.in, TOKENS}});
    tiles.W = tensor_map(p.q, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1,
                         Tile::ROW_BYTES == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                         {{p.row_bytes, 1, Tile::ROW_BYTES},
                          {(size_t)all, p.row_bytes, Epilogue::PAIR ? rows / 2 : rows}});
    launch_clusters(ctx, ctx.gpu->overlap, plan.splits, packed_hopper_kernel<F, TOKENS, Epilogue>,
                    once ? units : ctx.gpu->sms, rows * 2 * turns + 128, (size_t)tiles.stages * bytes + 1024, tiles, p,
                    epilogue);
}

// Whether a product of N tokens is one of these. (The Tensor Memory Accelerator wants rows of whole 16 bytes; a group
// of columns is found by a shift.)
inline bool streams_packed(const Context& ctx, const Linear<bf16>& W, int N) {
    return W.format != Format::PLAIN && ctx.gpu->hopper && !ctx.invariant && !W.adapter.rank && N <= 128 &&
           W.row_bytes() % 16 == 0 && (W.group & (W.group - 1)) == 0 &&
           (W.format != Format::FP8 || W.group >= PACKED_IN);
}
template <class Epilogue>
void packed_hopper_product(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N) {
    with_packing(W, [&](auto format) {
        using F = decltype(format);
        PackedArgs p = packed_args(W);
        p.x = x, p.N = N;
        if (Epilogue::PAIR) p.out = W.rows[0];
        const PackedPlan plan = PackedPlan::best(ctx.gpu->sms, W.out(), W.in);
        if (N <= 64) launch_packed_hopper<F, 64>(ctx, p, plan, epilogue);
        else launch_packed_hopper<F, 128>(ctx, p, plan, epilogue);
    }, PACKED_IN - 1);
}
#endif // __CUDACC__
