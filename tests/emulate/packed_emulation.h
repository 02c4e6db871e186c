// The kernels of gpu/packed on a CPU: what they take of CUDA and of Book II, beside emulated.h.
#pragma once
#include "gpu/upload.h"
#include "qwen3.cu"
#include "tests/emulate/emulated.h"
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t bytes) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) out |= (uint32_t)(both >> 8 * (bytes >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
static bool was_rounded = false; // formats.h says that nothing is
static uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
    float half[2];
    for (int i = 0; i < 2; i++) {
        const int at = 16 * i;
        const double y = (double)low(a >> at) * low(b >> at) + low(c >> at);
        half[i] = (float)y, was_rounded |= to_acc(to_bf16(half[i])) != y;
    }
    return pack(half[0], half[1]);
}
static float half_value(uint16_t h) { return half_to_float(h); }
static uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }
static uint2 load_eight(const void* p, bool there) {
    uint2 v = {};
    if (there && (uintptr_t)p % 8) std::puts("FALSE: a load is not aligned"), std::exit(1);
    if (there) memcpy(&v, p, 8);
    return v;
}
static void mma_32(float (&d)[4], const uint4& a0, const uint4& a1, const uint4& b) {
    mma(d, a0.x, a1.x, a0.y, a1.y, b.x, b.y);
    mma(d, a0.z, a1.z, a0.w, a1.w, b.z, b.w);
}
static uint32_t pack_e4m3(float first, float second) {
    return float_to_e4m3(first) | (uint32_t)float_to_e4m3(second) << 8;
}
static void wait_for_previous() {}
static void let_next_start() {}
#define GPU_UNROLL
#define PACKED_SHARED(name) float* name = (float*)dynamic_shared
#include "gpu/packed/few.h"
#include "gpu/packed/formats.h"
#include "gpu/packed/unpack.h"
#pragma GCC diagnostic pop

// W as upload leaves it, in the CPU's memory.
struct Uploaded {
    Arena arena;
    Linear<bf16> W;
    explicit Uploaded(const Linear<bf16>& from) : W(from) {
        std::vector<UploadPiece> pieces;
        std::vector<std::vector<uint8_t>> made;
        place_packed(arena, W, nullptr, made);
        arena.allocate("a matrix");
        place_packed(arena, W, &pieces, made);
        for (auto& p : pieces) memcpy(arena.base + p.to, p.from, p.bytes);
    }
};
