// Kernels of qwen3.cu and of gpu/packed on a CPU: CUDA and the toolbox of Book II for them, beside emulated.h. A suite
// includes this before qwen3.cu, whose kernels are compiled with it (QWEN3_KERNELS), without cpu/ and gpu/.
#pragma once
#ifdef QWEN3_CU
#error "qwen3.cu was included before its kernels could be emulated"
#endif
#define QWEN3_PLAIN
#define QWEN3_EMULATED
#include "model/bf16.h"
#include "model/formats.h"
#include "model/kv_cache.h"
#include "model/sampling.h"
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
static uint32_t pack_half(float first, float second) {
    return float_to_half(first) | (uint32_t)float_to_half(second) << 16;
}
static uint2 half_e4m3(uint32_t four) {
    const auto half = [&](int shift) {
        return pack_half(e4m3_to_float((uint8_t)(four >> shift)), e4m3_to_float((uint8_t)(four >> (shift + 8))));
    };
    return {half(0), half(16)};
}
static void mma_half(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    emulated_mma(d, a0, a1, a2, a3, b0, b1, half_to_float);
}
static void wait_for_previous() {}
static void let_next_start() {}
#define GPU_UNROLL
#define SHARED_FLOATS(name) float* name = (float*)dynamic_shared
#define __align__(bytes) __attribute__((aligned(bytes)))
constexpr float LOG2E = 1.44269504f;
static float exp2_fast(float x) { return exp2f(x); }
static bf16 round_bf16(float x) { return to_bf16(x); }
template <class T> static T __ldcg(const T* p) { return *p; }
static void __trap() { std::puts("FALSE: keys that no block owns"), std::exit(1); }
static float warp_sum(float x) {
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}
static float warp_max(float x) {
    for (int lane = 16; lane; lane /= 2) x = std::max(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}
template <class T> static void settle(T&) {}
static uint32_t shared_address(const void* p) {
    if ((const char*)p < dynamic_shared || (const char*)p >= dynamic_shared + sizeof dynamic_shared)
        std::puts("FALSE: not in shared memory"), std::exit(1);
    return (uint32_t)((const char*)p - dynamic_shared);
}
// A copy comes as late as it may: when it is waited for.
struct LateCopy { uint32_t to; const void* from; };
static std::vector<std::vector<LateCopy>> late[MOST_THREADS];
static void copy_async(uint32_t shared, const void* global, bool there) {
    if (shared % 16 || (there && (uintptr_t)global % 16)) std::puts("FALSE: a copy is not aligned"), std::exit(1);
    if (late[running].empty()) late[running].emplace_back();
    late[running].back().push_back({shared, there ? global : nullptr});
    memset(dynamic_shared + shared, 255, 16); // NaN, until then
}
static void commit_copies() { late[running].resize(std::max<size_t>(1, late[running].size()) + 1); }
template <int YOUNGER> static void wait_for_copies() {
    for (auto& all = late[running]; all.size() > YOUNGER + 1; all.erase(all.begin())) // (the last is not committed)
        for (auto [to, from] : all[0])
            if (from) memcpy(dynamic_shared + to, from, 16);
            else memset(dynamic_shared + to, 0, 16);
}
static void store_four(float* to, const float4& y) { memcpy(to, &y, 16); }
static void store_four(bf16* to, const float4& y) {
    to[0] = to_bf16(y.x), to[1] = to_bf16(y.y), to[2] = to_bf16(y.z), to[3] = to_bf16(y.w);
}
static float quad_max(float x) {
    x = std::max(x, __shfl_xor_sync(~0u, x, 1));
    return std::max(x, __shfl_xor_sync(~0u, x, 2));
}
static float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
static bool last_to_arrive(int* arrived, int blocks) {
    static bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = ++*arrived == blocks, *arrived = last ? 0 : *arrived;
    __syncthreads();
    return last;
}
#include "qwen3.cu"
#include "model/fp8_cache.cu"
#include "model/upload.h"
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
