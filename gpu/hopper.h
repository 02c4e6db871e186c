// gpu/hopper.h: instructions of Hopper (sm_90a), each wrapped once: mbarriers, the Tensor Memory Accelerator, clusters,
// wgmma.
#pragma once
#include "qwen3.cu"
#include <cuda.h> // CUtensorMap
#include <initializer_list>

// An mbarrier in shared memory (PTX ISA, "mbarrier"). A phase of it ends when the initial number of arrivals is reached
// and all expected bytes have come; then the next begins. A wait names the parity of the phase that is to end: 0 for
// the first, 1 for the second, 0 for the third. Before the first has ended, parity 1 counts as ended. From sm_80 on;
// bytes are expected from sm_90 on.
__device__ inline void barrier_begin(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barriers_begun() { // all threads and copies see it; before the block's next __syncthreads
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_expecting([[maybe_unused]] uint32_t barrier, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
#define BARRIER_WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define BARRIER_WAIT "mbarrier.test_wait.parity.shared::cta.b64"
#endif
    asm volatile("{ .reg .pred done;\n"
                 "again: " BARRIER_WAIT " done, [%0], %1;\n"
                 "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
#undef BARRIER_WAIT
}

// ---- Hopper's own instructions: sm_90a only, elsewhere nothing.
#ifdef HAVE_WGMMA
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER_ASM(...)
#endif

// Stages in shared memory that are filled and used in turn: the next stage, and the parity of its phase.
template <int STAGES> struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next(int stages = STAGES, int by = 1) { // stages: fewer of them, always the same
        if ((stage += by) >= stages) stage -= stages, parity ^= 1;
    }
};

// The Tensor Memory Accelerator copies a box of an array to shared memory (PTX ISA, "cp.async.bulk.tensor"): from place
// x, y, .. on the map's number of elements in each dimension, swizzled as wgmma needs them, zeros past the array's end.
// The barrier counts the bytes of the whole box. One thread issues it.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
__device__ inline void copy_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y, int z) {
    HOPPER_ASM("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3,%4,%5}], [%2];"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ inline void copy_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y, int z, int u) {
    HOPPER_ASM("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%3,%4,%5,%6}], [%2];"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u) : "memory");
}
// The same with a hint for the L2 cache (the values are CUTLASS's, cute::TMA::CacheHintSm90).
[[maybe_unused]] constexpr uint64_t EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12F0000000000000;
__device__ inline void copy_box_by(uint64_t policy, uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x,
                                   int y) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%3,%4}], [%2], %5;"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(policy) : "memory");
}
// ... to the same place in both blocks of a cluster of two; the barrier there in each block counts the bytes.
__device__ inline void copy_box_to_both(uint64_t policy, uint32_t shared, const CUtensorMap& map, uint32_t barrier,
                                        int x, int y) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               ".L2::cache_hint [%0], [%1, {%3,%4}], [%2], %6, %5;"
               ::"r"(shared), "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(policy), "h"((uint16_t)3) : "memory");
}
// ... and back, as a part of the group that ends at the next commit_boxes. Elements past the array's end are left out.
__device__ inline void store_box(const CUtensorMap& map, uint32_t shared, int x, int y) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];"
               ::"l"(&map), "r"(shared), "r"(x), "r"(y) : "memory");
}
__device__ inline void commit_boxes() { HOPPER_ASM("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's groups but the last few have finished reading shared memory.
template <int LAST> __device__ inline void wait_for_boxes() {
    HOPPER_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(LAST) : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
    HOPPER_ASM("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The blocks of a cluster (PTX ISA, "barrier.cluster"): a barrier of all threads that have not exited; shared memory
// written before it is visible to all after it. Numbers of the shared memory of block `rank`, at our own `address`.
__device__ inline void cluster_arrive() { HOPPER_ASM("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { HOPPER_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void read_block(float (&v)[4], uint32_t at, int rank) {
    HOPPER_ASM("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there]; }"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at), "r"(rank) : "memory");
}
// Our own `address` mapped to block `rank`, for send_block: four numbers go to `to` there, and `barrier`, there too,
// counts their bytes (PTX ISA, "st.async"). The block must have begun, and must wait for them before it ends.
__device__ inline uint32_t block_address(uint32_t address, int rank) {
    uint32_t there = 0;
    HOPPER_ASM("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Arrives at another block's barrier, by its block_address. (Not release.cluster, which would wait for all of the
// thread's stores: the following operations are TMA copies, which it does not order.)
__device__ inline void barrier_arrive_there(uint32_t barrier) {
    HOPPER_ASM("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void send_block(uint32_t to, const float (&v)[4], uint32_t barrier) {
    HOPPER_ASM("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}
// The map of an array of 2 to 4 dimensions, the first of them contiguous: for each its size, its stride in numbers (the
// first: 1), and the box's size; in the first dimension 64 or 32 numbers: rows of 128 or 64 bytes, swizzled
// accordingly.
struct Dimension {
    size_t size, step;
    int box;
};
inline CUtensorMap tensor_map(const void* array, CUtensorMapDataType type, int number_bytes, CUtensorMapSwizzle swizzle,
                              std::initializer_list<Dimension> dimensions) {
    static const auto encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
#else
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found));
#endif
        return (decltype(&cuTensorMapEncodeTiled))f;
    }();
    cuuint64_t size[4], bytes[4];
    cuuint32_t box[4], step[4] = {1, 1, 1, 1};
    int n = 0;
    for (const Dimension& d : dimensions) size[n] = d.size, bytes[n] = d.step * (size_t)number_bytes, box[n++] = d.box;
    CUtensorMap map;
    if (encode(&map, type, n, (void*)array, size, bytes + 1, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        DIE("the GPU's driver has no map for an array of %zu x %zu", (size_t)size[1], (size_t)size[0]);
    return map;
}
inline CUtensorMap tensor_map(const bf16* array, std::initializer_list<Dimension> dimensions) {
    const auto swizzle = dimensions.begin()->box == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
    return tensor_map(array, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, swizzle, dimensions);
}
inline CUtensorMap tensor_map(const float* array, std::initializer_list<Dimension> dimensions) {
    return tensor_map(array, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, CU_TENSOR_MAP_SWIZZLE_128B, dimensions);
}

// Registers move between the warpgroups of a block (all four warps of a warpgroup execute it; a multiple of 8 per
// thread).
template <int REGISTERS> __device__ inline void keep_registers() {
    HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ inline void take_registers() {
    HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): 128 threads multiply operands in shared memory,
// without ldmatrix and at the full rate of the tensor cores.
// The operand at `shared`: 128 bytes a row in the 128-byte swizzle (chunk c of 16 bytes of row r lies in place
// c ^ r % 8), groups of eight rows `group` bytes apart (SBO). If it is transposed, rows are steps of the contraction,
// and panels of 64 columns lie `panel` bytes apart (LBO).
__device__ inline uint64_t wgmma_operand(uint32_t shared, int panel, int group = 1024) {
    const uint64_t at = shared >> 4 & 0x3fff, lbo = panel >> 4, sbo = group >> 4, swizzle = 1;
    return at | lbo << 16 | sbo << 32 | swizzle << 62;
}
// 32 columns, transposed, of rows of 64 bytes in the 64-byte swizzle (chunk c of row r is at c ^ r / 2 % 4).
__device__ inline uint64_t wgmma_narrow_operand(uint32_t shared) {
    const uint64_t at = shared >> 4 & 0x3fff, sbo = 512 >> 4, swizzle = 2;
    return at | sbo << 32 | swizzle << 62;
}
// d (64,N) = a (64,16) b (16,N), added to d if `add`. Warp w of the four has rows 16 w .. 16 w + 15, in each lane the
// layout of mma; d[j] holds columns 8 j .. 8 j + 7. It reads shared memory and completes asynchronously: "memory" keeps
// the compiler from moving stores to shared memory past it, wgmma_settle from using d too early.
#define F1(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define F8(j) F1(j), F1(j + 1), F1(j + 2), F1(j + 3), F1(j + 4), F1(j + 5), F1(j + 6), F1(j + 7)
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define WGMMA(n, sums, a, b, add, a_cols, b_cols, ...) \
    HOPPER_ASM("{ .reg .pred add; setp.ne.b32 add, " add ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" sums "}, " \
               a ", " b ", add, 1, 1, " a_cols ", " b_cols "; }" \
               : __VA_ARGS__ : "l"(a_at), "l"(b_at), "r"((int)more), "n"((int)A_COLS), "n"((int)B_COLS) : "memory")
template <int N, bool A_COLS, bool B_COLS>
__device__ __forceinline__ void wgmma(float (&d)[N / 8][4], uint64_t a_at, uint64_t b_at, bool more) {
    if constexpr (N == 32)
        WGMMA("32", TEN() "%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19", "%20", F1(0), F1(1), F1(2), F1(3));
    else if constexpr (N == 64)
        WGMMA("64", TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", "%35", "%36", F8(0));
    else if constexpr (N == 96)
        WGMMA("96", TEN() TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47", "%48", "%49", "%50", "%51", "%52",
              F8(0), F1(8), F1(9), F1(10), F1(11));
    else if constexpr (N == 128)
        WGMMA("128", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65", "%66", "%67", "%68",
              F8(0), F8(8));
    else if constexpr (N == 192)
        WGMMA("192", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95", "%96",
              "%97", "%98", "%99", "%100", F8(0), F8(8), F8(16));
    else
        WGMMA("256", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11)
              "%120,%121,%122,%123,%124,%125,%126,%127", "%128", "%129", "%130", "%131", "%132",
              F8(0), F8(8), F8(16), F8(24));
}
// The same with a in registers, in the layout of mma.
#define WGMMA_REGISTERS(n, sums, a0, a1, a2, a3, b, add, b_cols, ...) \
    HOPPER_ASM("{ .reg .pred add; setp.ne.b32 add, " add ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" sums "}, " \
               "{" a0 "," a1 "," a2 "," a3 "}, " b ", add, 1, 1, " b_cols "; }" \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_at), "r"((int)more), "n"((int)B_COLS) \
               : "memory")
template <int N, bool B_COLS>
__device__ __forceinline__ void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b_at, bool more) {
    static_assert(N == 64 || N == 128 || N == 256, "a row of columns that somebody needs");
    if constexpr (N == 64)
        WGMMA_REGISTERS("64", TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", "%35", "%36", "%37", "%38", F8(0));
    else if constexpr (N == 128)
        WGMMA_REGISTERS("128", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65", "%66", "%67",
                        "%68", "%69", "%70", F8(0), F8(8));
    else
        WGMMA_REGISTERS("256", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11)
                        "%120,%121,%122,%123,%124,%125,%126,%127", "%128", "%129", "%130", "%131", "%132", "%133",
                        "%134", F8(0), F8(8), F8(16), F8(24));
}
// d (64,N) = a (64,32) b (32,N) of e4m3, added to d if `more`: a step has 32 numbers, and as many bytes.
#define WGMMA_E4M3(n, sums, a, b, add, ...) \
    HOPPER_ASM("{ .reg .pred add; setp.ne.b32 add, " add ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" sums "}, " a ", " b ", add, 1, 1; }" \
               : __VA_ARGS__ : "l"(a_at), "l"(b_at), "r"((int)more) : "memory")
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 8][4], uint64_t a_at, uint64_t b_at, bool more) {
    static_assert(N == 64 || N == 128, "rows of W in a tile, or half of them");
    if constexpr (N == 64) WGMMA_E4M3("64", TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", F8(0));
    else
        WGMMA_E4M3("128", TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65", "%66", F8(0),
                   F8(8));
}
#undef WGMMA_E4M3
#undef WGMMA_REGISTERS
#undef WGMMA
#undef TEN
#undef F8
#undef F1
// Before the first wgmma of a group: the sums' registers have been written.
__device__ inline void wgmma_begin() {
    HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}
// The group ends.
__device__ inline void wgmma_commit() {
    HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// wgmma may read all earlier writes to shared memory.
__device__ inline void shared_to_async() { HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }
// Waits until all groups but the last few are done.
template <int LAST> __device__ inline void wgmma_wait() {
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(LAST) : "memory");
}
// Compiler barrier: no use of the sums moves across it.
template <int M, int N> __device__ inline void wgmma_settle(float (&d)[M][N][4]) {
    #pragma unroll
    for (int i = 0; i < M * N * 4; i++) asm volatile("" : "+f"(d[i / 4 / N][i / 4 % N][i % 4])::"memory");
}

// Arrives, as one of the barrier's initial count, when all of this thread's copies so far have completed.
__device__ inline void barrier_arrive_with_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_shared(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ float load_shared_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ void store_shared(uint32_t at, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared_half(uint32_t at, uint32_t v) { // its lower 16 bits
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((uint16_t)v) : "memory");
}
// Four matrices of 8 x 8 bf16 in the layout of mma, each transposed: lane 8 m + i has the address of 16 bytes, for
// column i of matrix m. PTX ISA: stmatrix
__device__ __forceinline__ void store_transposed(uint32_t at, const uint32_t (&v)[4]) {
    HOPPER_ASM("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t at, const float4& v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t at, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}
