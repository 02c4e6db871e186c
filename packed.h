/* packed.h: products with INT4, INT8 and FP8 weights on a GPU, as Linear has them. Included by qwen3.cu, section 10.

   Of up to 16 tokens packed_kernel streams the packed bytes, and converts them in registers: time is bytes. Of more
   tokens unpack_kernel makes bf16 numbers of a matrix, or of a part of it, in a scratch of fixed size, and the products
   of bf16 weights follow, forwards and backwards; so neither card nor host ever holds the whole model in bf16.

   How eight bytes become bf16 numbers. A bf16 has 7 bits of fraction: 0x4300 | u is 128 + u for u < 128. So the bits of
   a weight are put into the fraction of a number with that exponent, two weights at once, and a multiply-add of pairs
   takes off what they stand above zero. No conversion instruction, no shuffle, and nothing is rounded: q - zero (INT4),
   q (INT8) and e4m3 are bf16 numbers. A group's scale multiplies the float32 sum of the group's products.

   Every format is a struct with the same names, and the one template argument F of each kernel.

   On Hopper a product of many tokens with FP8 weights may have both operands in e4m3 (--activations fp8): round_kernel
   makes e4m3 of the tokens, as Book I's round_activations says, and hopper_kernel multiplies them by W as it is stored.

   Contents    1 Formats    2 Few tokens    3 Many tokens, embedding    4 Launchers */
#pragma once

// ======================================================================================================== 1 Formats

#ifdef __CUDACC__
// a b + c of pairs of bf16, each rounded once. PTX ISA: fma.rn.bf16x2
__device__ inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// 8 bytes of weights: as load_stream.
__device__ inline uint2 load_eight(const void* p, bool there) {
    uint2 v;
    asm volatile("{ .reg .pred there; setp.ne.u32 there, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;\n"
                 "@there ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2]; }"
                 : "=&r"(v.x), "=&r"(v.y) : "l"(p), "r"((uint32_t)there));
    return v;
}
#define PACKED_SHARED(name) extern __shared__ float name[]
#define PACKED_UNROLL _Pragma("unroll")
#endif

// A run: eight neighbouring columns of a row, the first a multiple of 8. A format says
//   RUNS     in 8 bytes: run j of a lane begins 32 j columns after its first
//   SCALES   groups that these runs can be of
//   LOADS    of 8 bytes that a lane has on their way, as many as there are registers for
//   byte     where in a row the 8 bytes of the run at `column` are
//   run      its eight numbers as bf16 pairs, but for the scale; `zero` is INT4's
//   Raw      a scale as it is stored, and to_float of it; BLOCKS: group_rows rows share it
struct PackedInt8 {
    static constexpr int RUNS = 1, SCALES = 1, LOADS = 8;
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
};

struct PackedFp8 {
    static constexpr int RUNS = 1, SCALES = 1, LOADS = 8;
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
};

// GROUPS: 2 where a group has 32 columns, so that the lower halves' is another than the upper halves'.
template <int GROUPS> struct PackedInt4 {
    static constexpr int RUNS = 2, SCALES = GROUPS, LOADS = 4;
    static constexpr bool ZEROS = true, BLOCKS = false;
    using Raw = uint16_t;
    __device__ static float to_float(Raw h) { // see half_to_float; no infinities
        return __uint_as_float((uint32_t)(h & 0x7fff) << 13) * 0x1p112f * (h & 0x8000 ? -1.f : 1.f);
    }
    __device__ static size_t byte(int column) { return (size_t)(column / 64 * 32 + column % 32); }
    __device__ static uint32_t two(uint32_t word, uint32_t bytes, uint32_t less) { // of the lower halves
        return fma_pair(__byte_perm(word, 0x43434343, bytes) & 0x430f430f, 0x3f803f80, less);
    }
    __device__ static uint4 run(const uint2& v, int upper, uint32_t zero) {
        const uint32_t less = 0xc300c300 | zero * 0x00010001, a = v.x >> 4 * upper, b = v.y >> 4 * upper;
        return {two(a, 0x4140, less), two(a, 0x4342, less), two(b, 0x4140, less), two(b, 0x4342, less)};
    }
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
// Calls f with W's format.
template <class Use> auto with_packing(const Linear<bf16>& W, Use f) {
    if (W.in % 8 || W.out() % 8) DIE("a packed matrix is (%d,%d): the GPU takes multiples of 8", W.out(), W.in);
    switch (W.format) {
        case Format::INT8: return f(PackedInt8());
        case Format::FP8: return f(PackedFp8());
        case Format::INT4: return W.group == GROUP ? f(PackedInt4<2>()) : f(PackedInt4<1>());
        default: DIE("a product with packed weights: W has none");
    }
}

#ifdef __CUDACC__
// Returns the number of blocks.
template <class F, int TILES, int M, class Epilogue>
int launch_packed(Context& ctx, PackedArgs p, Epilogue epilogue) {
    using Weights = PackedWeights<F, TILES, Epilogue::PAIR>;
    const int groups = (p.out + Weights::ROWS - 1) / Weights::ROWS, steps = (p.in + Weights::STEP - 1) / Weights::STEP;
    const int warps = std::min(8, std::max(4, steps * TILES / F::LOADS));
    p.steps = (steps + warps - 1) / warps;
    const size_t shared = 2 * (size_t)warps * TILES * M * 64 * sizeof(float);
    const int blocks = std::min({groups, ctx.gpu->sms * (16 / warps), Epilogue::MOST_BLOCKS});
    launch(ctx, packed_kernel<F, TILES, M, Epilogue>, blocks, warps * 32, shared, p, epilogue);
    return blocks;
}
template <class Epilogue>
int packed_product(Context& ctx, Epilogue epilogue, const bf16* x, const int* rows, const Linear<bf16>& W, int N) {
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
template <bool E4M3>
void launch_round(Context& ctx, uint8_t* q, float* scale, const bf16* x, int N, int in, int pitch, size_t numbers) {
    if (numbers > ctx.gpu->rounded_numbers || in % 8)
        DIE("rounding (%d,%d): the scratch has room for %zu numbers", N, in, ctx.gpu->rounded_numbers);
    const size_t groups = (size_t)N * ((in + FP8_GROUP - 1) / FP8_GROUP);
    launch(ctx, round_kernel<E4M3>, (unsigned)((groups + 15) / 16), 256, 0, ctx.gpu->rounded, q, scale, x, N, in,
           pitch);
}
// Scratch for `rows` tokens. (As bytes and scales x is smaller than as bf16.)
inline void plan_rounded(Context& ctx, Arena& arena, const Config& c, int rows) {
    if (!ctx.fp8_activations) return;
    ctx.gpu->rounded_numbers = (size_t)(rows + 127) / 128 * 128 * std::max({c.C, c.H * c.D, c.F});
    ctx.gpu->rounded = arena.take<bf16>(ctx.gpu->rounded_numbers);
}
// x rounded, in the scratch: valid until the next call.
inline const bf16* rounded(Context& ctx, const bf16* x, int N, int in) {
    launch_round<false>(ctx, nullptr, nullptr, x, N, in, 0, (size_t)N * in);
    return ctx.gpu->rounded;
}
// Whether tensor cores take W as it is stored.
inline bool takes_e4m3(const Context& ctx, const Linear<bf16>& W) {
    return ctx.gpu->hopper && W.group == FP8_GROUP && W.group_rows == FP8_GROUP && W.in % 16 == 0 && !W.adapter.rank;
}
// The same product of such a W up to the order of sums, without anything unpacked.
template <class Epilogue>
void e4m3_product(Context& ctx, Epilogue epilogue, const bf16* x, const Linear<bf16>& W, int N) {
    const int pitch = (N + 127) / 128 * 128;
    const size_t q_numbers = ((size_t)N * W.in / 2 + 63) / 64 * 64; // of two bytes
    float* const scale = (float*)(ctx.gpu->rounded + q_numbers);
    uint8_t* const q = (uint8_t*)ctx.gpu->rounded;
    launch_round<true>(ctx, q, scale, x, N, W.in, pitch, q_numbers + 2 * (size_t)W.groups() * pitch);
    TileArgs p = {(const bf16*)q, (const bf16*)W.q[0], N, W.in / 2, Epilogue::PAIR ? W.rows[0] : W.out()};
    p.x_scale = scale, p.W_scale = (const float*)W.scale[0], p.pitch = pitch;
    HopperPlan plan;
    const int rows = W.out();
    plan.consider<Hopper128x128>(2, 0.36, ctx.gpu->sms, MOST_SPLITS, N, rows, p.in);
    plan.consider<Hopper128x256>(0, 0.66, ctx.gpu->sms, MOST_SPLITS, N, rows, p.in);
    p.splits = plan.splits;
    if (plan.shape) launch_hopper<Hopper128x128, false, false, true>(ctx, p, epilogue);
    else launch_hopper<Hopper128x256, false, false, true>(ctx, p, epilogue);
}
#endif // __CUDACC__
