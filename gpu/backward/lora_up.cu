// gpu/backward/lora_up.cu: dh and dB of adapters: compiles those of qwen3.cu, section 13, and has Hopper's.
#define PART_LORA_UP 1
#include "gpu/optional_products.h"
#include "qwen3.cu"
#include "gpu/backward/lora_up.h"

struct LoraUpMaps {
    CUtensorMap dy, h, B;
};
#ifdef HAVE_WGMMA
// A tile's dh: both warpgroups' halves, in alternating buffers (so one barrier a tile is enough), to memory.
__device__ __forceinline__ void store_dh(float (&dh)[1][4][4], const LoraUp& p, uint32_t buffers, int tile, int u,
                                         int j) {
    using S = LoraUp;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, c0 = j * p.rank;
    const uint32_t half = buffers + tile % 2 * S::DH_BYTES + threadIdx.x % 128 * 16;
    if (group)
        #pragma unroll
        for (int f = 0; f < 4; f++)
            store_shared(half + f * 128 * 16, dh[0][f]);
    asm volatile("barrier.sync 1, %0;" ::"n"(S::CONSUMERS) : "memory");
    if (group) return;
    #pragma unroll
    for (int f = 0; f < 4; f++) {
        const uint4 v = load_shared(half + f * 128 * 16);
        dh[0][f][0] += __uint_as_float(v.x), dh[0][f][1] += __uint_as_float(v.y);
        dh[0][f][2] += __uint_as_float(v.z), dh[0][f][3] += __uint_as_float(v.w);
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) { // of token e * 8 + lane / 4 columns c .. c + 3
        const int e = i % 2, n = tile * S::TOKENS + warp * 16 + e * 8 + lane / 4;
        const int c = i / 2 * 16 + lane % 4 / 2 * 4 + lane % 2 * 8;
        const float4 y = four_columns(dh[0][i / 2 * 2], dh[0][i / 2 * 2 + 1], e);
        if (n >= p.N) continue;
        if (p.has_parts(j)) {
            const int part = p.pick(p.part, j) + u - p.pick(p.unit, j);
            store_four(p.dh_parts + ((size_t)part * p.N + n) * S::RANK + c, y);
        } else if (c < p.rank) store_four(p.dh + (size_t)n * p.width + c0 + c, y);
    }
}
#endif
__global__ void __launch_bounds__(LoraUp::THREADS, 1)
lora_up_kernel(const __grid_constant__ LoraUpMaps maps, const __grid_constant__ LoraUp p) {
#ifdef HAVE_WGMMA
    using S = LoraUp;
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ uint64_t barriers[2 * S::STAGES + 1];
    const uint32_t B_at = (shared_address(memory) + 1023) & ~1023u, ring_at = B_at + S::B_BYTES;
    const uint32_t dh_at = ring_at + S::STAGES * S::STAGE_BYTES, B_there = shared_address(barriers + 2 * S::STAGES);
    const auto stage_at = [&](int s) { return ring_at + s * S::STAGE_BYTES; };
    const auto full = [&](int s) { return shared_address(barriers + s); };
    const auto empty = [&](int s) { return shared_address(barriers + S::STAGES + s); };
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::STAGES; s++)
            barrier_begin(full(s), 1), barrier_begin(empty(s), S::CONSUMERS / 32);
        barrier_begin(B_there, 1);
        barriers_begun();
    }
    __syncthreads();
    const int u = blockIdx.x / p.splits, split = blockIdx.x % p.splits, j = p.module_of(u);
    const int r0 = p.pick(p.first, j) + (u - p.pick(p.unit, j)) * S::ROWS, c0 = j * p.rank;
    const int begin = (int)((int64_t)p.tiles() * split / p.splits);
    const int end = (int)((int64_t)p.tiles() * (split + 1) / p.splits);
    Ring<S::STAGES> ring;
    if (threadIdx.x >= S::CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x > S::CONSUMERS) return;
        barrier_arrive_expecting(B_there, S::B_BYTES); // weights: before the previous kernel has ended
        for (int r = 0; r < S::ROWS; r += 256) copy_box(B_at + r * S::RANK * 2, maps.B, B_there, c0, r0 + r);
        wait_for_previous();
        for (int tile = begin; tile < end; tile++)
            for (int piece = 0; piece < S::PIECES; piece++, ring.next()) {
                barrier_wait(empty(ring.stage), ring.parity ^ 1);
                const uint32_t to = stage_at(ring.stage), filled = full(ring.stage);
                barrier_arrive_expecting(filled, S::STAGE_BYTES);
                for (int c = 0; c < S::PIECE / 64; c++)
                    copy_box(to + c * S::PANEL, maps.dy, filled, r0 + piece * S::PIECE + c * 64, tile * S::TOKENS);
                copy_box(to + S::DY_BYTES, maps.h, filled, c0, tile * S::TOKENS);
            }
        return;
    }
    take_registers<232>();
    wait_for_previous(); // whose scratch this kernel writes
    const int group = threadIdx.x / 128;
    const auto done_with = [&](int stage) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(stage));
    };
    barrier_wait(B_there, 0);
    float dB[2 * S::PIECES][4][4]; // of 64 rows each
    for (int tile = begin; tile < end; tile++) {
        float dh[1][4][4];
        int before = 0;
        #pragma unroll
        for (int piece = 0; piece < S::PIECES; piece++, ring.next()) {
            barrier_wait(full(ring.stage), ring.parity);
            const uint32_t h = stage_at(ring.stage) + S::DY_BYTES;
            wgmma_begin();
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t dy = stage_at(ring.stage) + (group * 2 + half) * S::PANEL;
                const uint32_t B = B_at + (piece * S::PIECE + (group * 2 + half) * 64) * S::RANK * 2;
                #pragma unroll
                for (int k = 0; k < 4; k++) // 16 rows; 16 tokens
                    wgmma<32, false, true>(dh[0], wgmma_operand(dy + k * 32, 0),
                                           wgmma_narrow_operand(B + k * 16 * S::RANK * 2), piece || half || k);
                #pragma unroll
                for (int k = 0; k < 4; k++)
                    wgmma<32, true, true>(dB[2 * piece + half], wgmma_operand(dy + k * 16 * 128, S::PANEL),
                                          wgmma_narrow_operand(h + k * 16 * S::RANK * 2), tile > begin || k);
            }
            wgmma_commit();
            if (piece) wgmma_wait<1>(), done_with(before);
            before = ring.stage;
        }
        wgmma_wait<0>();
        wgmma_settle(dh);
        done_with(before);
        store_dh(dh, p, dh_at, tile, u, j);
    }
    let_next_start();
    wgmma_settle(dB);
    #pragma unroll
    for (int f = 0; f < 8 * S::PIECES; f++) {
        const float(&v)[4] = dB[f / 4][f % 4];
        ((float4*)p.dB_parts)[((size_t)blockIdx.x * 8 * S::PIECES + f) * S::CONSUMERS + threadIdx.x] =
            make_float4(v[0], v[1], v[2], v[3]);
    }
#endif
}
// Grid: SUMS / 256 blocks for a unit's dB, a thread a number; then N / 32 for a module's dh, a thread four numbers.
__global__ void __launch_bounds__(256) lora_up_sums_kernel(const __grid_constant__ LoraUp p, int of_dB) {
    using S = LoraUp;
    let_next_start();
    wait_for_previous();
    if ((int)blockIdx.x < of_dB) {
        const int u = blockIdx.x / (S::SUMS / 256), j = p.module_of(u);
        const int i = blockIdx.x % (S::SUMS / 256) * 256 + threadIdx.x; // as lora_up_kernel's threads leave them
        const int e = i % 4, thread = i / 4 % 256, f = i / 1024, g = thread % 32 / 4, t = thread % 4;
        const int panel = f / 8 * 4 + thread / 128 * 2 + f / 4 % 2, c = f % 4 * 8 + 2 * t + e % 2;
        const int r = p.pick(p.first, j) + (u - p.pick(p.unit, j)) * S::ROWS + panel * 64 + thread / 32 % 4 * 16 +
                      e / 2 * 8 + g;
        const float* part = p.dB_parts + (size_t)u * p.splits * S::SUMS + i;
        if (r >= p.pick(p.last, j) || c >= p.rank) return;
        float* to = p.dB + (size_t)r * p.width + j * p.rank + c;
        float sum = 0;
        const float old = *to;
        #pragma unroll 12
        for (int split = 0; split < p.splits; split++) sum += __ldcg(part + (size_t)split * S::SUMS);
        *to = old + p.s * sum;
        return;
    }
    const int each = (p.N + 31) / 32, j = (blockIdx.x - of_dB) / each;
    const int n = (blockIdx.x - of_dB) % each * 32 + threadIdx.x / 8, c = threadIdx.x % 8 * 4;
    if (!p.has_parts(j) || n >= p.N || c >= p.rank) return;
    const int units = (j == 0 ? p.unit[1] : j == 1 ? p.unit[2] : p.unit[3]) - p.pick(p.unit, j);
    const float* part = p.dh_parts + ((size_t)p.pick(p.part, j) * p.N + n) * S::RANK + c;
    float4 sum = {};
    #pragma unroll 3
    for (int i = 0; i < units; i++) {
        const float4 v = __ldcg((const float4*)(part + (size_t)i * p.N * S::RANK));
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    store_four(p.dh + (size_t)n * p.width + j * p.rank + c, sum);
}

bool Optional::lora_up(Context& ctx, bf16* dh, float* dB, bf16* scratch, const bf16* dy, const Linear<bf16>& W, int N) {
    if (!ctx.gpu->hopper) return false;
    const Adapter<bf16>& a = W.adapter;
    const int width = (int)a.width(), out = W.out();
    const LoraUp p(dh, dB, scratch, ctx.gpu->partial, W, N, ctx.gpu->sms);
    if (!p.fits((size_t)N * W.in * sizeof(bf16))) return false;
    const auto map = [](const bf16* x, int rows, int columns, int wide, int high) {
        return tensor_map(x, {{(size_t)columns, 1, wide}, {(size_t)rows, (size_t)columns, high}});
    };
    const LoraUpMaps maps = {map(dy, N, out, 64, p.TOKENS), map(a.h, N, width, p.RANK, p.TOKENS),
                             map(a.B, out, width, p.RANK, 256)};
    launch(ctx, lora_up_kernel, p.units() * p.splits, p.THREADS, p.SHARED, maps, p);
    const int of_dB = p.units() * (p.SUMS / 256), of_dh = p.parts() ? p.modules * ((N + 31) / 32) : 0;
    launch(ctx, lora_up_sums_kernel, of_dB + of_dh, 256, 0, p, of_dB);
    return true;
}
