// gpu/packed/unpack.cu: unpacking and rounding, launched; packed embeddings.
#include "gpu/packed/packed.h"
#include "gpu/packed/unpack.h"
#include "qwen3.cu"

void packed_embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b) {
    with_packing(table, [&](auto format) { // (without overlap: see embed_gpu)
        launch_kernel(ctx, false, packed_embed_kernel<decltype(format)>, b.N, 128, 0, x, packed_args(table), b);
    });
}

// A part of W as bf16, in the scratch: valid until the next call.
const bf16* unpack(Context& ctx, const Linear<bf16>& W, int r0, int rows, int k0, int columns) {
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

// ---- FP8 activations (Context::fp8_activations), of any number of tokens.
bool rounds_activations(const Context& ctx, const Linear<bf16>& W, int N) {
    return ctx.fp8_activations && W.format == Format::FP8 && N > STREAM_TOKENS;
}
// Scratch for `rows` tokens.
void plan_rounded(Context& ctx, Arena& arena, const Config& c, int rows) {
    if (!ctx.fp8_activations) return;
    ctx.gpu->rounded_numbers = (size_t)(rows + 127) / 128 * 128 * std::max({c.C, c.H * c.D, c.F});
    ctx.gpu->rounded = arena.take<bf16>(ctx.gpu->rounded_numbers);
}
// Address of x as e4m3: the beginning of the scratch; or its end for a product's output, since the product's own x is at
// the beginning.
size_t e4m3_bytes(int N, int in) { // bytes, then scales
    const size_t pitch = (size_t)(N + 127) / 128 * 128, groups = (size_t)(in + FP8_GROUP - 1) / FP8_GROUP;
    return ((size_t)N * in + 127) / 128 * 128 + groups * pitch * sizeof(float);
}
E4M3Rows e4m3_at(uint8_t* at, int N, int in) {
    return {at, (float*)(at + ((size_t)N * in + 127) / 128 * 128), (N + 127) / 128 * 128};
}
void need_rounding_room(Context& ctx, size_t bytes, int N, int in) {
    if (bytes > 2 * ctx.gpu->rounded_numbers || in % 8)
        DIE("rounding (%d,%d): the scratch has room for %zu numbers", N, in, ctx.gpu->rounded_numbers);
}
E4M3Rows first_rows(Context& ctx, int N, int in) {
    need_rounding_room(ctx, e4m3_bytes(N, in), N, in);
    return e4m3_at((uint8_t*)ctx.gpu->rounded, N, in);
}
E4M3Rows last_rows(Context& ctx, int N, int in) {
    return e4m3_at((uint8_t*)(ctx.gpu->rounded + ctx.gpu->rounded_numbers) - e4m3_bytes(N, in), N, in);
}
// Place for the output of a product of `used` bytes of x, in addition to the normal output; null: there is no room.
E4M3Rows output_rows(Context& ctx, int N, int out, size_t used) {
    if (used + e4m3_bytes(N, out) > 2 * ctx.gpu->rounded_numbers) return {};
    return last_rows(ctx, N, out);
}
template <bool E4M3> void launch_round(Context& ctx, const E4M3Rows& to, const bf16* x, int N, int in) {
    const size_t groups = (size_t)N * ((in + FP8_GROUP - 1) / FP8_GROUP);
    launch(ctx, round_kernel<E4M3>, (unsigned)((groups + 15) / 16), 256, 0, ctx.gpu->rounded, to.q, to.scale, x, N, in,
           to.pitch);
}
template void launch_round<true>(Context&, const E4M3Rows&, const bf16*, int, int);
// x rounded, in the scratch: valid until the next call.
const bf16* round_to_bf16(Context& ctx, const bf16* x, int N, int in) {
    need_rounding_room(ctx, (size_t)N * in * sizeof(bf16), N, in);
    launch_round<false>(ctx, {}, x, N, in);
    return ctx.gpu->rounded;
}
E4M3Rows e4m3_rows(Context& ctx, const bf16* x, int N, int in) {
    const E4M3Rows to = first_rows(ctx, N, in);
    launch_round<true>(ctx, to, x, N, in);
    return to;
}
// Whether tensor cores read W as it is stored.
bool takes_e4m3(const Linear<bf16>& W) {
    static const bool multiplies = [] { // this binary has code for sm_89 or later, and the GPU runs it
        cudaFuncAttributes code;
        CUDA_CHECK(cudaFuncGetAttributes(&code, round_kernel<true>));
        return code.ptxVersion >= 89 && code.binaryVersion >= 89;
    }();
    return multiplies && W.group == FP8_GROUP && W.group_rows == FP8_GROUP && W.in % 16 == 0 && !W.adapter.rank;
}

bool streams_packed(const Context& ctx, const Linear<bf16>& W, int N) {
    return W.format != Format::PLAIN && ctx.gpu->hopper && !ctx.invariant && !W.adapter.rank && N < UNPACKED_FROM &&
           W.row_bytes() % 16 == 0 && (W.group & (W.group - 1)) == 0 &&
           (W.format != Format::FP8 || W.group >= PACKED_IN);
}

// ---- rmsnorm to e4m3. A block a token.
__global__ void rmsnorm_rounded_kernel(E4M3Rows out, const float* x, const bf16* w, int C, float eps) {
    extern __shared__ float pieces[];
    let_next_start();
    wait_for_previous();
    const int n = blockIdx.x;
    norm_rows(RoundedRow{out, n, C}, x + (size_t)n * C, w, pieces, 1, C, eps);
}
void rmsnorm_rounded_gpu(Context& ctx, const E4M3Rows& out, const float* x, const bf16* w, int N, int C, float eps) {
    launch(ctx, rmsnorm_rounded_kernel, N, norm_threads(C), (C + 127) / 128 * sizeof(float), out, x, w, C, eps);
}

bool Optional::embed(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b) {
    if (table.format == Format::PLAIN) return false;
    packed_embed_gpu(ctx, x, table, b);
    return true;
}
void Optional::plan(Context& ctx, Arena& arena, const Config& c, int rows) { plan_rounded(ctx, arena, c, rows); }
