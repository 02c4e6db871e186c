// emulate_tensor.h: for the tensor-core product of the notes on a CPU; check_code.py compiles such blocks with it.
//
// A function of a block that holds PTX is left out, and the one here of the same name takes its place: mma (m16n8k16, BF16)
// and ldmatrix4 exchange what the lanes hold as PTX's tables say; copy16 spoils its target at once and copies when the
// group is waited for, so that what is read too early is wrong.
#pragma once
#include "emulate.h"
#include <deque>
#define __align__(n) __attribute__((aligned(n)))
struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
static __nv_bfloat16 __float2bfloat16(float x) { // (of the numbers used here: to nearest, ties to even)
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return {(uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
static float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t u = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
static __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }

static uint32_t fragments[1024][6];
static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    for (int i = 0; i < 4; i++) fragments[running][i] = a[i];
    fragments[running][4] = b0, fragments[running][5] = b1;
    __syncwarp();
    const auto* lane = &fragments[running / 32 * 32];
    const auto half = [](uint32_t pair, int odd) { return __bfloat162float({(uint16_t)(pair >> 16 * odd)}); };
    for (int e = 0; e < 4; e++) { // row and column of c[e]; lane 4 r + k / 2 % 4 holds element k of row (column) r
        const int row = lane_of() / 4 + e / 2 * 8, col = lane_of() % 4 * 2 + e % 2;
        for (int k = 0; k < 16; k++)
            c[e] += half(lane[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * half(lane[col * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    __syncwarp();
}
static const void* rows[1024];
template <class T> void ldmatrix4(uint32_t (&r)[4], const T* row) {
    if ((uintptr_t)row % 16) std::puts("FALSE: a row of ldmatrix is not aligned"), std::exit(1);
    rows[running] = row;
    __syncwarp();
    for (int i = 0; i < 4; i++)
        std::memcpy(&r[i], (const char*)rows[running / 32 * 32 + i * 8 + lane_of() / 4] + lane_of() % 4 * 4, 4);
    __syncwarp();
}
struct Copy { void* to; const void* from; bool there; };
static std::deque<std::vector<Copy>> groups[1024];
static std::vector<Copy> open_group[1024];
static void copy16(void* to, const void* from, bool there) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) std::puts("FALSE: a copy is not aligned"), std::exit(1);
    std::memset(to, 0xff, 16); // NaN
    open_group[running].push_back({to, from, there});
}
static void copies_commit() { groups[running].push_back(std::move(open_group[running])), open_group[running].clear(); }
static void wait_all_but(size_t last) {
    for (; groups[running].size() > last; groups[running].pop_front())
        for (auto& c : groups[running].front()) c.there ? std::memcpy(c.to, c.from, 16) : std::memset(c.to, 0, 16);
}
