// gpu/packed/packed.h: packed weights made bf16, and activations made e4m3, for products of many tokens.
#pragma once
#include "gpu/packed/round.h"
#include "qwen3.cu"
#include <algorithm>

void packed_embed_gpu(Context& ctx, float* x, const Linear<bf16>& table, const Batch& b); // embed of a packed table

// A part of W as bf16, in the scratch: valid until the next call.
const bf16* unpack(Context& ctx, const Linear<bf16>& W, int r0, int rows, int k0, int columns);

// While it lives and W is packed, no kernel starts before all earlier ones have ended: products read weights early, and
// unpack_kernel writes these just before.
struct AfterUnpacking {
    Gpu& gpu;
    const bool was;
    AfterUnpacking(Context& ctx, const Linear<bf16>& W) : gpu(*ctx.gpu), was(gpu.overlap) {
        if (W.format != Format::PLAIN) gpu.overlap = false;
    }
    AfterUnpacking(const AfterUnpacking&) = delete;
    ~AfterUnpacking() { gpu.overlap = was; }
};
// W as the operand of a product of many tokens.
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
bool rounds_activations(const Context& ctx, const Linear<bf16>& W, int N);
// Scratch for `rows` tokens.
void plan_rounded(Context& ctx, Arena& arena, const Config& c, int rows);
// Address of x as e4m3: the beginning of the scratch; or its end for a product's output, since the product's own x is at
// the beginning.
size_t e4m3_bytes(int N, int in); // bytes, then scales
E4M3Rows first_rows(Context& ctx, int N, int in);
E4M3Rows last_rows(Context& ctx, int N, int in);
// Place for the output of a product of `used` bytes of x, in addition to the normal output; null: there is no room.
E4M3Rows output_rows(Context& ctx, int N, int out, size_t used);
// x rounded, in the scratch: valid until the next call.
const bf16* round_to_bf16(Context& ctx, const bf16* x, int N, int in);
// x as e4m3, in the scratch: valid until the next call.
E4M3Rows e4m3_rows(Context& ctx, const bf16* x, int N, int in);
// To e4m3 at `to`; or to bf16 in the scratch.
template <bool E4M3> void launch_round(Context& ctx, const E4M3Rows& to, const bf16* x, int N, int in);
// Whether tensor cores read W as it is stored.
bool takes_e4m3(const Linear<bf16>& W);

constexpr int PACKED_IN = 128; // columns of a stage of packed_hopper_kernel
// Tokens from which it takes less time to unpack W first. Measured on an H200: at 1,024 in every format more, at 2,048
// as much with 8B's matrices, and less with 0.6B's.
constexpr int UNPACKED_FROM = 2048;
// Whether a product of N tokens is one of packed_hopper_kernel's. (The Tensor Memory Accelerator requires rows of whole
// 16 bytes; a group of columns is found by a shift.)
bool streams_packed(const Context& ctx, const Linear<bf16>& W, int N);
