// tests/emulate/tensor.h: for the tensor-core products of the notes on a CPU; check_code.py compiles their blocks with it.
//
// A function of a block that holds PTX is left out, and the one here of the same name takes its place: mma (m16n8k16,
// BF16) and ldmatrix4 exchange what the lanes hold as PTX's tables say; copy16 and tma_load spoil their target at once
// and copy when they are waited for, and wgmma multiplies when it is waited for: what is read, released or overwritten
// too early gives wrong sums. Descriptors are not tried: wgmma is given the addresses.
#pragma once
#include "tests/emulate/emulate.h"
#include <deque>
#include <map>
#define __align__(n) __attribute__((aligned(n)))
struct __nv_bfloat16 { uint16_t bits; COUNTED(2) };
struct __nv_bfloat162 { COUNTED_HALF x, y; COUNTED(4) };
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
            c[e] += half(lane[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                    half(lane[col * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    __syncwarp();
}
static const void* rows[1024];
template <class T> void ldmatrix4(uint32_t (&r)[4], const T* row) {
    if ((uintptr_t)row % 16) std::puts("FALSE: a row of ldmatrix is not aligned"), std::exit(1);
    touches(row, 16, false), rows[running] = row;
    __syncwarp();
    for (int i = 0; i < 4; i++)
        std::memcpy(&r[i], (const char*)rows[running / 32 * 32 + i * 8 + lane_of() / 4] + lane_of() % 4 * 4, 4);
    __syncwarp();
}
template <class T> void ldmatrix4_transposed(uint32_t (&r)[4], const T* row) { // (rows 2 t, 2 t + 1 of column g)
    if ((uintptr_t)row % 16) std::puts("FALSE: a row of ldmatrix is not aligned"), std::exit(1);
    touches(row, 16, false), rows[running] = row;
    __syncwarp();
    for (int i = 0; i < 8; i++)
        std::memcpy((char*)&r[i / 2] + i % 2 * 2,
                    (const char*)rows[running / 32 * 32 + i / 2 * 8 + lane_of() % 4 * 2 + i % 2] + lane_of() / 4 * 2,
                    2);
    __syncwarp();
}
struct Copy { void* to; const void* from; bool there; };
static std::deque<std::vector<Copy>> groups[1024];
static std::vector<Copy> open_group[1024];
static void copy16(void* to, const void* from, bool there) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) std::puts("FALSE: a copy is not aligned"), std::exit(1);
    touches(to, 16, true);
    if (there) touches(from, 16, false);
    std::memset(to, 0xff, 16); // NaN
    open_group[running].push_back({to, from, there});
}
static void copies_commit() { groups[running].push_back(std::move(open_group[running])), open_group[running].clear(); }
static void wait_all_but(size_t last) {
    for (; groups[running].size() > last; groups[running].pop_front())
        for (auto& c : groups[running].front()) c.there ? std::memcpy(c.to, c.from, 16) : std::memset(c.to, 0, 16);
}

// ---- Hopper
#define __grid_constant__
static size_t __cvta_generic_to_shared(const void* p) { return (size_t)((const char*)p - dynamic_shared); }
struct CUtensorMap { const __nv_bfloat16* p; int rows, columns, box_rows; }; // boxes of 64 columns, swizzled
struct Arrivals {
    int expected, missing, bytes = 0;
    unsigned phase = 0;
    std::vector<std::function<int()>> copies; // under way: each says its bytes
    void settle() {
        if (missing == 0 && bytes == 0) phase++, missing = expected;
    }
};
static std::map<uint64_t*, Arrivals> arrivals;
static void barriers_ready() {}
static void barrier_init(uint64_t* b, int count) { arrivals[b] = {count, count, 0, 0, {}}; }
static void barrier_expect(uint64_t* b, int bytes) {
    Arrivals& a = arrivals.at(b);
    a.bytes += bytes, a.missing--, a.settle();
}
static void barrier_arrive(uint64_t* b) { arrivals.at(b).missing--, arrivals.at(b).settle(); }
static void barrier_wait(uint64_t* b, uint32_t parity) {
    for (Arrivals& a = arrivals.at(b); (a.phase & 1) == parity; wait_at(Coroutine::READY)) {
        for (auto& copy : a.copies) a.bytes -= copy();
        if (!a.copies.empty()) a.copies.clear(), a.settle();
    }
}
// The byte of element (r, c) in rows of 128 bytes: bits 4 to 6 of the address, exclusive-or bits 7 to 9.
static unsigned char* swizzled_at(const void* tile, int r, int c) {
    const size_t linear = __cvta_generic_to_shared(tile) + (size_t)r * 128 + (size_t)c * 2;
    return (unsigned char*)dynamic_shared + (linear ^ (linear >> 7 & 7) << 4);
}
static void tma_load(void* to, const CUtensorMap& map, uint64_t* b, int column, int row) {
    std::memset(to, 0xff, (size_t)map.box_rows * 128);
    arrivals.at(b).copies.push_back([=] {
        for (int r = 0; r < map.box_rows; r++)
            for (int c = 0; c < 64; c++) {
                const bool inside = row + r < map.rows && column + c < map.columns;
                const uint16_t x = inside ? map.p[(size_t)(row + r) * map.columns + column + c].bits : 0;
                std::memcpy(swizzled_at(to, r, c), &x, 2);
            }
        return map.box_rows * 128;
    });
}
// A cluster is one block here.
#define CLUSTERS_OF_PAIR
constexpr int PAIR = 1;
static int cluster_rank() { return 0; }
static void cluster_sync() {}
static void barrier_arrive_at(uint64_t* b, int) { barrier_arrive(b); }
static void tma_load_to_all(void* to, const CUtensorMap& map, uint64_t* b, int column, int row) {
    tma_load(to, map, b, column, row);
}
static void bulk_load(void* to, const void* from, int bytes, uint64_t* b) { // 16 bytes or a multiple
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16)
        std::puts("FALSE: a bulk copy is not aligned"), std::exit(1);
    std::memset(to, 0xff, bytes);
    arrivals.at(b).copies.push_back([=] { return std::memcpy(to, from, bytes), bytes; });
}
static std::deque<std::vector<std::function<void()>>> products[1024];
static std::vector<std::function<void()>> open_products[1024];
template <int N> void wgmma_64x(float (&sums)[N / 2], const void* a, const void* b, int add) {
    float* c = sums;
    const int row = (int)running % 128 / 32 * 16 + lane_of() / 4, col = lane_of() % 4 * 2;
    open_products[running].push_back([=] {
        const auto at = [](const void* tile, int r, int k) {
            __nv_bfloat16 x;
            std::memcpy(&x, swizzled_at(tile, r, k), 2);
            return __bfloat162float(x);
        };
        for (int i = 0; i < N / 2; i++) {
            float sum = add ? c[i] : 0;
            for (int k = 0; k < 16; k++) sum += at(a, row + i % 4 / 2 * 8, k) * at(b, col + i / 4 * 8 + i % 2, k);
            c[i] = sum;
        }
    });
}
// c (64,128) += a (64,16) b (16,128): a in registers, which are read when the product is made, as mma has them; b in
// two panels of 64 columns, the second so many bytes after the first.
static const uint32_t* operands[1024];
static void wgmma_registers_64x128(float (&sums)[64], const uint32_t (&a)[4], const void* b, int panel, int add) {
    operands[running] = a;
    __syncwarp();
    const uint32_t* quad[4];
    for (int t = 0; t < 4; t++) quad[t] = operands[running / 4 * 4 + t];
    __syncwarp();
    float* c = sums;
    const int col = lane_of() % 4 * 2;
    open_products[running].push_back([=, q0 = quad[0], q1 = quad[1], q2 = quad[2], q3 = quad[3]] {
        const uint32_t* const quad[] = {q0, q1, q2, q3};
        for (int i = 0; i < 64; i++) {
            const int n = col + i / 4 * 8 + i % 2;
            float sum = add ? c[i] : 0;
            for (int k = 0; k < 16; k++) {
                const uint32_t pair = quad[k % 8 / 2][i % 4 / 2 + k / 8 * 2];
                __nv_bfloat16 y;
                std::memcpy(&y, swizzled_at((const char*)b + n / 64 * panel, k, n % 64), 2);
                sum += __bfloat162float({(uint16_t)(pair >> 16 * (k % 2))}) * __bfloat162float(y);
            }
            c[i] = sum;
        }
    });
}
static void wgmma_64x128(float (&sums)[64], const void* a, const void* b, int add) { wgmma_64x<128>(sums, a, b, add); }
static void wgmma_fence() {}
static void wgmma_commit() {
    products[running].push_back(std::move(open_products[running])), open_products[running].clear();
}
template <int LAST> void wgmma_wait() {
    for (; products[running].size() > LAST; products[running].pop_front())
        for (auto& product : products[running].front()) product();
    __syncwarp(); // all lanes have: one of them may now say that the operands are free
}
template <int N> void settle(float (&)[N]) {}
static const bool forgets = (block_begins = [] {
    for (int i = 0; i < 1024; i++)
        groups[i].clear(), open_group[i].clear(), products[i].clear(), open_products[i].clear();
}, true);
