// gpu/products/lora.cu: lora_down, and the masks of dropout.
#include "gpu/ops.h"
#include "gpu/products/lora.h"
#include "gpu/products/tiles.h"
#include "qwen3.cu"

// lora_down of few tokens, without dropout. Grid: (tokens / 32, groups), 8 warps. A block owns 32 tokens by 32 rows of
// one module's A. Its warps take steps of 32 of `in` in turn; a lane reads its operands straight from memory, as in
// stream_kernel: eight numbers each of four tokens and of four rows. The warps' sums are added in shared memory, four a
// thread. Bound by the latency of the loads.
__global__ void __launch_bounds__(256, 2) lora_down_few_kernel(bf16* h, const bf16* x, LoraArgs p) {
    __shared__ float sums[8][32][32]; // (warp, token, row)
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * 32, j = p.module_of(blockIdx.y), r0 = p.first_row(blockIdx.y);
    wait_for_previous();
    float sum[4][2][4] = {};
    for (int i = warp * 32 + 8 * t; i < (p.in + 31) / 32 * 32; i += 256) {
        uint4 a[4], b[4];
        #pragma unroll
        for (int m = 0; m < 4; m++) {
            const int n = n0 + m * 8 + g;
            a[m] = n < p.N && i < p.in ? *(const uint4*)(x + (size_t)n * p.in + i) : uint4{};
        }
        #pragma unroll
        for (int c = 0; c < 4; c++) {
            const int r = r0 + c * 8 + g;
            b[c] = r < p.rank && i < p.in ? *(const uint4*)(p.A + (size_t)(j * p.rank + r) * p.in + i) : uint4{};
        }
        #pragma unroll
        for (int c = 0; c < 4; c++)
            #pragma unroll
            for (int m = 0; m < 2; m++) mma_32(sum[c][m], a[2 * m], a[2 * m + 1], b[c]);
    }
    let_next_start();
    #pragma unroll
    for (int c = 0; c < 4; c++)
        #pragma unroll
        for (int e = 0; e < 4; e++) { // token e * 8 + g
            const float* v = &sum[c][e / 2][e % 2 * 2];
            *(float2*)&sums[warp][e * 8 + g][c * 8 + 2 * t] = make_float2(v[0], v[1]);
        }
    __syncthreads();
    const int n = threadIdx.x / 8, r = threadIdx.x % 8 * 4;
    float4 all = {};
    for (int w = 0; w < 8; w++) {
        const float4 v = *(const float4*)&sums[w][n][r];
        all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
    }
    if (n0 + n < p.N && r0 + r < p.rank)
        store_four(h + (size_t)(n0 + n) * p.width() + j * p.rank + r0 + r, all);
}

// rmsnorm of many tokens, and what dropout keeps of it for each module: it makes the masks while it waits for memory.
__global__ void __launch_bounds__(256) rmsnorm_masks_kernel(bf16* out, const float* x, const bf16* w, float eps,
                                                            const __grid_constant__ LoraArgs p) {
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x * 8 + threadIdx.x / 32;
    if (n >= p.N) return;
    const uint32_t name = p.dropout.token[n];
    norm_row(out + (size_t)n * p.in, x + (size_t)n * p.in, w, p.in, eps, [&] {
        for (int j = 0; j < p.modules; j++)
            for (int k = threadIdx.x % 32; k < 2 * p.kept.sixty_fours; k += 32) {
                uint32_t kept = 0;
                #pragma unroll
                for (int c = 0; c < 4; c++)
                    kept |= dropout_mask(p.dropout, p.keys, name, p.name(j), k * 4 + c) << 8 * c;
                p.kept.at(j, k / 2, n)[k % 2] = kept;
            }
    });
}

void rmsnorm_masks_gpu(Context& ctx, bf16* out, const float* x, const bf16* w, float eps, const LoraArgs& p, int N) {
    launch(ctx, rmsnorm_masks_kernel, (N + 7) / 8, 256, 0, out, x, w, eps, p);
}

// lora_down: h_j = drop_j(x) A_j^T, and what was kept, unless that is MADE. Grid: (tokens / 64, groups / GROUPS), 8 or
// 16 warps. A block walks along `in` in stages of a few panels of 64 numbers (see chunk_address) of x and of A; a warp
// owns 16 tokens by one of the panels, and masks its x in registers, once for each module. A lane makes half of a
// token's masks; the bits of a pair of numbers become a mask by one instruction. The panels' sums are added in shared
// memory.
// Bound by making the masks (Philox), without that by the memory's speed.
template <int GROUPS> struct LoraDownShape {
    static constexpr int TOKENS = 64, PANELS = GROUPS == 1 ? 4 : 2, STAGES = GROUPS == 2 ? 3 : 2;
    static constexpr int THREADS = PANELS * 128;
    static constexpr int X_PANEL = TOKENS * 128, PANEL = X_PANEL + GROUPS * 32 * 128, STAGE_BYTES = PANELS * PANEL;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE_BYTES;
};
template <int GROUPS, bool MADE>
__global__ void __launch_bounds__(LoraDownShape<GROUPS>::THREADS, 512 / LoraDownShape<GROUPS>::THREADS)
lora_down_kernel(bf16* h, const bf16* x, const __grid_constant__ LoraArgs p) {
    using S = LoraDownShape<GROUPS>;
    extern __shared__ __align__(128) uint4 memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * S::TOKENS, first = blockIdx.y * GROUPS, panel = warp / 4, token = warp % 4 * 16;
    const auto copy = [&](int step) {
        const int chunk = threadIdx.x % 8, row = threadIdx.x % 128 / 8; // (each panel's own threads copy it)
        const uint32_t to = shared + step % S::STAGES * S::STAGE_BYTES + panel * S::PANEL;
        const int i = (step * S::PANELS + panel) * 64 + chunk * 8;
        #pragma unroll
        for (int k = 0; k < S::TOKENS; k += 16) {
            const int n = n0 + row + k;
            copy_async(chunk_address(to, row + k, chunk), x + (size_t)n * p.in + i, i < p.in && n < p.N);
        }
        #pragma unroll
        for (int k = 0; k < GROUPS * 32; k += 16) {
            const int j = p.module_of(first + k / 32), r = p.first_row(first + k / 32) + k % 32 + row;
            copy_async(chunk_address(to + S::X_PANEL, k + row, chunk), p.A + (size_t)(j * p.rank + r) * p.in + i,
                       i < p.in && j < p.modules && r < p.rank);
        }
        commit_copies();
    };
    const int steps = (p.in + 64 * S::PANELS - 1) / (64 * S::PANELS);
    wait_for_previous();
    #pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++)
        if (s < steps) copy(s);
        else commit_copies();
    const int mine = n0 + token + lane % 16; // the token of whose masks this lane makes a half
    const uint32_t name = p.dropping && mine < p.N ? p.dropout.token[mine] : 0;
    uint32_t made[GROUPS]; // a step ahead
    const auto load_made = [&](int step) {
        const int i64 = step * S::PANELS + panel;
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int j = p.module_of(first + k);
            made[k] = j < p.modules && mine < p.N && i64 < p.kept.sixty_fours ? p.kept.at(j, i64, mine)[lane / 16] : 0;
        }
    };
    if (MADE) load_made(0);
    float sum[GROUPS][4][4] = {};
    for (int step = 0; step < steps; step++) {
        const int i64 = step * S::PANELS + panel;
        uint32_t kept[GROUPS];
        #pragma unroll
        for (int k = 0; k < GROUPS && MADE; k++) kept[k] = made[k];
        if (MADE) load_made(step + 1);
        #pragma unroll
        for (int k = 0; k < GROUPS && !MADE; k++) {
            const int j = p.module_of(first + k);
            kept[k] = ~0u;
            if (k && j == p.module_of(first + k - 1)) kept[k] = kept[k - 1];
            else if (p.dropping && j < p.modules) {
                kept[k] = 0;
                #pragma unroll
                for (int c = 0; c < 4; c++)
                    kept[k] |= dropout_mask(p.dropout, p.keys, name, p.name(j), i64 * 8 + lane / 16 * 4 + c)
                               << 8 * c;
                if (mine < p.N && i64 < p.kept.sixty_fours) p.kept.at(j, i64, mine)[lane / 16] = kept[k];
            }
        }
        wait_for_copies<S::STAGES - 2>();
        __syncthreads();
        if (step + S::STAGES - 1 < steps) copy(step + S::STAGES - 1);
        else commit_copies();
        const uint32_t x_at = shared + step % S::STAGES * S::STAGE_BYTES + panel * S::PANEL, A_at = x_at + S::X_PANEL;
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
                        ldmatrix(b[f], chunk_address(A_at, k * 32 + f * 16 + lane % 8 + lane / 16 * 8,
                                                     c + lane / 8 % 2));
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
    let_next_start();
    wait_for_copies<0>();
    __syncthreads(); // the ring is free
    float4* sums = (float4*)memory + threadIdx.x % 128; // (panel - 1, fragment, thread)
    #pragma unroll
    for (int i = 0; i < GROUPS * 4 && panel; i++) {
        const float(&v)[4] = sum[i / 4][i % 4];
        sums[((panel - 1) * GROUPS * 4 + i) * 128] = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < GROUPS * 4 && !panel; i++) {
        float(&v)[4] = sum[i / 4][i % 4];
        #pragma unroll
        for (int other = 0; other < S::PANELS - 1; other++) {
            const float4 y = sums[(other * GROUPS * 4 + i) * 128];
            v[0] += y.x, v[1] += y.y, v[2] += y.z, v[3] += y.w;
        }
        const int j = p.module_of(first + i / 4), r = p.first_row(first + i / 4) + i % 4 * 8 + 2 * t;
        const int n = n0 + token + g;
        uint32_t* to = (uint32_t*)(h + (size_t)n * p.width() + j * p.rank + r);
        if (j >= p.modules || r >= p.rank) continue;
        if (n < p.N) *to = pack(v[0] * p.scale, v[1] * p.scale);
        if (n + 8 < p.N) to[4 * p.width()] = pack(v[2] * p.scale, v[3] * p.scale);
    }
}

// h, with dropout or of more than 16 tokens (or as product_gpu says).
void lora_down_gpu(Context& ctx, bf16* h, const bf16* x, const Linear<bf16>& W, int N, bool made) {
    const LoraArgs p(W, N);
    if (!p.dropping && N < 64 * ctx.gpu->sms)
        return launch(ctx, lora_down_few_kernel, dim3((N + 31) / 32, p.groups()), 256, 0, h, x, p);
    in_groups(p.groups(), [&](auto groups) {
        using S = LoraDownShape<groups>;
        const dim3 grid((N + S::TOKENS - 1) / S::TOKENS, (p.groups() + groups - 1) / groups);
        const auto kernel = made ? lora_down_kernel<groups, true> : lora_down_kernel<groups, false>;
        launch(ctx, kernel, grid, S::THREADS, S::SHARED, h, x, p);
    });
}
