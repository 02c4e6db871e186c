// gpu/backward/lora_weight.cu: lora_backward_weight.
#include "qwen3.cu"

// lora_backward_weight: dA_j += dh_j^T drop_j(x). Grid: (columns / 128, groups / GROUPS, splits of the
// tokens), 8 warps. A block owns 32 GROUPS rows of the A by 128 columns, a warp 16 of the columns; 64 tokens at a time
// pass through a ring in shared memory: x, dh, and what was kept. A warp masks its x in registers, once for each
// module. lora_weight_sums_kernel adds the splits' sums in order, on all multiprocessors (the last block of a tile
// would take longer, alone). Bound by the memory's speed.
template <int GROUPS> struct LoraWeightShape {
    static constexpr int STAGES = 3, X_BYTES = 64 * 256;       // rows of 256 bytes, swizzled
    static constexpr int H_ROW = GROUPS * 64 + 16;             // eight rows of dh begin in different banks
    static constexpr int KEPT_BYTES = 2 * 64 * 8;              // of a module: two columns of 64 words
    static constexpr int H_AT = X_BYTES, KEPT_AT = H_AT + 64 * H_ROW;
    static constexpr int STAGE_BYTES = KEPT_AT + GROUPS * KEPT_BYTES;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES, TILE_BYTES = GROUPS * 32 * 128 * sizeof(float);
};
// Two neighbours of fragment f of a thread's sums, f = 4 group + 2 (16 rows) + (8 columns), are added to dA.
__device__ __forceinline__ void add_to_dA(float* dA, const LoraArgs& p, int first, int c0, int f, int thread, int half,
                                          float2 sum) {
    const int j = p.module_of(first + f / 4), g = thread % 32 / 4, t = thread % 4;
    const int r = p.first_row(first + f / 4) + f / 2 % 2 * 16 + half * 8 + g;
    const int c = c0 + thread / 32 * 16 + f % 2 * 8 + 2 * t;
    if (j >= p.modules || r >= p.rank || c >= p.in) return;
    float2* to = (float2*)(dA + (size_t)(j * p.rank + r) * p.in + c);
    const float2 old = *to;
    *to = make_float2(fmaf(p.scale, sum.x, old.x), fmaf(p.scale, sum.y, old.y));
}
template <int GROUPS>
__global__ void __launch_bounds__(256, 2) lora_weight_kernel(float* dA, const bf16* dh, const bf16* x, LoraArgs p,
                                                             float* partial) {
    using S = LoraWeightShape<GROUPS>;
    extern __shared__ __align__(128) uint4 memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.y * GROUPS, c0 = blockIdx.x * 128;
    const int share = ((p.N + 63) / 64 + gridDim.z - 1) / gridDim.z * 64, begin = blockIdx.z * share;
    const int end = min(p.N, begin + share), steps = (end - begin + 63) / 64;
    const auto copy = [&](int step) {
        const uint32_t stage = shared + step % S::STAGES * S::STAGE_BYTES;
        const int n0 = begin + step * 64;
        #pragma unroll
        for (int k = 0; k < 64; k += 16) {
            const int row = threadIdx.x / 16 + k, chunk = threadIdx.x % 16, c = c0 + chunk * 8;
            copy_async(stage + row * 256 + ((chunk ^ row % 8) << 4), x + (size_t)(n0 + row) * p.in + c,
                       n0 + row < end && c < p.in);
        }
        const int row = threadIdx.x / 4, chunk = threadIdx.x % 4;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int j = p.module_of(first + k), r = p.first_row(first + k) + chunk * 8;
            copy_async(stage + S::H_AT + row * S::H_ROW + k * 64 + chunk * 16,
                       dh + (size_t)(n0 + row) * p.width() + j * p.rank + r,
                       n0 + row < end && j < p.modules && r < p.rank);
            if (!p.dropping || threadIdx.x >= 128) continue;
            const int i64 = c0 / 64 + threadIdx.x / 64, n = n0 + threadIdx.x % 64; // (two words: N may be odd)
            copy_few_async<8>(stage + S::KEPT_AT + k * S::KEPT_BYTES + threadIdx.x * 8, p.kept.at(j, i64, n),
                         n < end && j < p.modules && i64 < p.kept.sixty_fours);
        }
        commit_copies();
    };
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++)
        if (s < steps) copy(s);
        else commit_copies();
    float sum[GROUPS * 2][2][4] = {};
    for (int step = 0; step < steps; step++) {
        wait_for_copies<S::STAGES - 2>();
        __syncthreads();
        if (step + S::STAGES - 1 < steps) copy(step + S::STAGES - 1);
        else commit_copies();
        const int at = step % S::STAGES * S::STAGE_BYTES;
        const uint32_t x_at = shared + at, h_at = x_at + S::H_AT;
        // Lane 16 c + 4 i + t fetches the masks of tokens 16 i + 2 t + {0, 1, 8, 9} and of the warp's eight columns c.
        uint32_t kept[GROUPS];
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            kept[k] = ~0u;
            if (!p.dropping) continue;
            const uint8_t* bytes = (const uint8_t*)memory + at + S::KEPT_AT + k * S::KEPT_BYTES + warp / 4 * 64 * 8 +
                                   (lane / 4 % 4 * 16 + t * 2) * 8 + warp % 4 * 2 + lane / 16;
            kept[k] = bytes[0] | bytes[8] << 8 | bytes[64] << 16 | (uint32_t)bytes[72] << 24;
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) { // 16 tokens
            uint32_t b[4];            // tokens 2 t .., 2 t + 8 .. by eight columns, and by the next eight
            const int row = i * 16 + lane % 16, chunk = warp * 2 + lane / 16;
            ldmatrix_transposed(b, x_at + row * 256 + ((chunk ^ row % 8) << 4));
            #pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                uint32_t y[4];
                #pragma unroll
                for (int c = 0; c < 2; c++) {
                    const uint32_t top = __shfl_sync(~0u, kept[k], c * 16 + i * 4 + t) << (7 - g);
                    y[2 * c] = b[2 * c] & spread_bits(top, top, 0x9988);
                    y[2 * c + 1] = b[2 * c + 1] & spread_bits(top, top, 0xbbaa);
                }
                #pragma unroll
                for (int f = 0; f < 2; f++) {
                    uint32_t a[4];
                    ldmatrix_transposed(a, h_at + (i * 16 + lane % 8 + lane / 16 * 8) * S::H_ROW +
                                               (k * 4 + f * 2 + lane / 8 % 2) * 16);
                    mma(sum[2 * k + f][0], a[0], a[1], a[2], a[3], y[0], y[1]);
                    mma(sum[2 * k + f][1], a[0], a[1], a[2], a[3], y[2], y[3]);
                }
            }
        }
    }
    wait_for_copies<0>();
    let_next_start();
    const size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * gridDim.z + blockIdx.z;
    #pragma unroll
    for (int f = 0; f < GROUPS * 4; f++) {
        const float(&v)[4] = sum[f / 2][f % 2];
        if (gridDim.z > 1) {
            ((float4*)partial)[(at * GROUPS * 4 + f) * 256 + threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
            continue;
        }
        for (int half = 0; half < 2; half++)
            add_to_dA(dA, p, first, c0, f, threadIdx.x, half, make_float2(v[2 * half], v[2 * half + 1]));
    }
}
// Grid: (8 groups, columns / 128, groups / GROUPS). A thread owns two numbers of a tile.
__global__ void __launch_bounds__(256) lora_weight_sums_kernel(float* dA, LoraArgs p, const float* partial,
                                                               int splits) {
    let_next_start();
    wait_for_previous();
    const int groups = gridDim.x / 8, i = blockIdx.x * 256 + threadIdx.x; // as lora_weight_kernel's threads leave them
    const size_t tile = (size_t)blockIdx.z * gridDim.y + blockIdx.y, numbers = (size_t)groups * 2048;
    const float2* part = (const float2*)partial + tile * splits * numbers + i;
    float2 sum = {};
    #pragma unroll 12
    for (int split = 0; split < splits; split++) {
        const float2 v = __ldcg(part + split * numbers);
        sum.x += v.x, sum.y += v.y;
    }
    add_to_dA(dA, p, blockIdx.z * groups, blockIdx.y * 128, i / 512, i / 2 % 256, i % 2, sum);
}

void lora_backward_weight_gpu(Context& ctx, float* dA, const bf16* dh, const bf16* x, const Linear<bf16>& W,
                                     int N) {
    const LoraArgs p(W, N);
    in_groups(p.groups(), [&](auto groups) {
        using S = LoraWeightShape<groups>;
        const int columns = (p.in + 127) / 128, rows = (p.groups() + groups - 1) / groups, tiles = columns * rows;
        const int most = (int)(PARTIAL_BYTES / (S::TILE_BYTES * tiles)); // splits that the scratch has room for
        const int splits = std::max(1, std::min({(N + 63) / 64, 2 * ctx.gpu->sms / tiles, most}));
        float* const partial = ctx.gpu->partial;
        launch(ctx, lora_weight_kernel<groups>, dim3(columns, rows, splits), 256, S::SHARED, dA, dh, x, p, partial);
        if (splits > 1)
            launch(ctx, lora_weight_sums_kernel, dim3(8 * groups, columns, rows), 256, 0, dA, p, partial, splits);
    });
}
