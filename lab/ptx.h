// ptx.h: the instructions without a name in CUDA C++ that the laboratories use, each wrapped once (PTX ISA). Under g++
// the functions of the same names in data/course/emulate_tensor.h take their place: there a copy spoils its target at
// once and comes when it is waited for, so that what is read too early is wrong.
#pragma once
#include "lab/lab.h"
#ifdef __CUDACC__
#include <cuda.h>
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_HOPPER // wgmma, setmaxnreg: sm_90a only. Elsewhere these functions do nothing, and harness and kernels
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__) // see to it that they are not called.
#else
#define HOPPER_ASM(...)
#endif
#else
#define HAVE_HOPPER
#endif

namespace lab {
#ifdef __CUDACC__
__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- mma.sync and what feeds it, from sm_80 on
// c (16,8) += a (16,16) b (16,8): lane 4 g + t holds of c rows g (c[0], c[1]) and g + 8 (c[2], c[3]), columns 2 t and
// 2 t + 1; of a rows g (a[0], a[2]) and g + 8 (a[1], a[3]), pairs of columns from 2 t (a[0], a[1]) and 2 t + 8 (a[2],
// a[3]) on; of b column g, pairs of rows from 2 t (b0) and 2 t + 8 (b1) on.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of bf16 from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ inline void ldmatrix4_transposed(uint32_t (&r)[4], const void* row) { // rows become columns
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// 16 bytes from global to shared memory in the background; zeros if not `there`.
__device__ inline void copy16(void* to, const void* from, bool there) {
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LAST> __device__ inline void copies_wait() { // until all groups but the last few have come
    asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
}

__device__ inline float exp2_fast(float x) { // 2^x, relative error 2^-22; 0 for -infinity
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A kernel that is launched early (launch_early) may run beside the end of the one before it, up to its wait; that one
// says when its own blocks have their places. sm_90 and up; elsewhere kernels follow each other anyway.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Eight bytes that come and go as one: no fence is needed where a number and the sign that it is there are one word.
__device__ inline void put_word(uint64_t* to, uint64_t word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ inline uint64_t get_word(const uint64_t* from) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

// ---- mbarriers and the Tensor Memory Accelerator: Hopper
// A phase of an mbarrier ends when `arrivals` have arrived and all bytes expected in it have come. A wait names the
// parity of the phase that is to end: 0 for the first, 1 for the second. Before the first has ended, 1 is past.
__device__ inline void barrier_init([[maybe_unused]] uint64_t* b, [[maybe_unused]] int arrivals) {
    HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ inline void barriers_ready() { // all threads and copies see them after the block's next __syncthreads
    HOPPER_ASM("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void barrier_expect([[maybe_unused]] uint64_t* b, [[maybe_unused]] int bytes) { // arrives, too
    HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive([[maybe_unused]] uint64_t* b) {
    HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ inline void barrier_wait([[maybe_unused]] uint64_t* b, [[maybe_unused]] uint32_t parity) {
    HOPPER_ASM("{ .reg .pred done;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again; }" ::"r"(shared_address(b)), "r"(parity) : "memory");
}
// A box of the map's array comes to shared memory: 64 columns of 2 bytes from `column` on, box_rows rows from `row` on,
// zeros past the end. Rows have 128 bytes, and chunk c of 16 bytes of row r lies in place c ^ r % 8.
__device__ inline void tma_load([[maybe_unused]] void* to, [[maybe_unused]] const CUtensorMap& map,
                                [[maybe_unused]] uint64_t* b, [[maybe_unused]] int column, [[maybe_unused]] int row) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];"
               ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(b)), "r"(column), "r"(row) : "memory");
}
// ---- Clusters: PAIR blocks on neighbouring multiprocessors, which reach each other's shared memory
constexpr int PAIR = 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTERS_OF_PAIR __cluster_dims__(2, 1, 1) // of a kernel
#else
#define CLUSTERS_OF_PAIR
#endif
__device__ inline int cluster_rank() {
    uint32_t rank = 0;
    HOPPER_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}
__device__ inline void cluster_sync() { // of all threads that have not ended
    HOPPER_ASM("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// At the mbarrier in the same place of block `rank`.
__device__ inline void barrier_arrive_at([[maybe_unused]] uint64_t* b, [[maybe_unused]] int rank) {
    HOPPER_ASM("{ .reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
               ::"r"(shared_address(b)), "r"(rank) : "memory");
}
// As tma_load, to the same place in all blocks of the cluster, each of which has its mbarrier told.
__device__ inline void tma_load_to_all([[maybe_unused]] void* to, [[maybe_unused]] const CUtensorMap& map,
                                       [[maybe_unused]] uint64_t* b, [[maybe_unused]] int column,
                                       [[maybe_unused]] int row) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%3,%4}], [%2], %5;"
               ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(b)), "r"(column), "r"(row),
                 "h"((uint16_t)((1 << PAIR) - 1)) : "memory");
}
// So many bytes, a multiple of 16, as they lie.
__device__ inline void bulk_load([[maybe_unused]] void* to, [[maybe_unused]] const void* from,
                                 [[maybe_unused]] int bytes, [[maybe_unused]] uint64_t* b) {
    HOPPER_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
// The map of an array of (rows, columns) numbers of two bytes; a row must be a multiple of 16 bytes.
inline CUtensorMap tensor_map(const void* array, int rows, int columns, int box_rows) {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    GPU_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
    const cuuint64_t size[] = {(cuuint64_t)columns, (cuuint64_t)rows}, row_bytes[] = {(cuuint64_t)columns * 2};
    const cuuint32_t box[] = {64, (cuuint32_t)box_rows}, step[] = {1, 1};
    CUtensorMap map;
    if (((decltype(&cuTensorMapEncodeTiled))encode)(
            &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)array, size, row_bytes, box, step,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        fail("the driver has no map for an array of %d x %d", rows, columns);
    return map;
}

// ---- wgmma: four warps multiply what lies in shared memory, in the background
// An operand: rows of 64 bf16 in the order in which TMA leaves them, eight rows 1,024 bytes from the next eight.
// If it is transposed, rows are of the contraction, and the next 64 columns lie `panel` bytes on.
__device__ inline uint64_t wgmma_operand(const void* p, int panel = 16) {
    return (uint64_t)(shared_address(p) & 0x3ffff) >> 4 | (uint64_t)panel >> 4 << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}
// c (64,N) = a (64,16) b (N,16)^T, added to c if `add`. Warp w has rows 16 w .. 16 w + 15, a lane what mma gives it:
// c[4 j .. 4 j + 3] are of columns 8 j .. 8 j + 7.
#define C4(j) "+f"(c[j]), "+f"(c[j + 1]), "+f"(c[j + 2]), "+f"(c[j + 3])
#define C16(j) C4(j), C4(j + 4), C4(j + 8), C4(j + 12)
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
template <int N>
__device__ inline void wgmma_64x([[maybe_unused]] float (&c)[N / 2], [[maybe_unused]] const void* a,
                                 [[maybe_unused]] const void* b, [[maybe_unused]] int add) {
    static_assert(N == 128 || N == 256, "two shapes are written out");
    if constexpr (N == 128)
        HOPPER_ASM("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
                   "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5)
                   "%60,%61,%62,%63}, %64, %65, p, 1, 1, 0, 0; }"
                   : C16(0), C16(16), C16(32), C16(48)
                   : "l"(wgmma_operand(a)), "l"(wgmma_operand(b)), "r"(add) : "memory");
    else
        HOPPER_ASM("{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"
                   "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5)
                   TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11)
                   "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, 0, 0; }"
                   : C16(0), C16(16), C16(32), C16(48), C16(64), C16(80), C16(96), C16(112)
                   : "l"(wgmma_operand(a)), "l"(wgmma_operand(b)), "r"(add) : "memory");
}
// c (64,128) = a (64,16) b (16,128), added to c if `add`: a in registers, as mma has it; b transposed.
__device__ inline void wgmma_registers_64x128([[maybe_unused]] float (&c)[64], [[maybe_unused]] const uint32_t (&a)[4],
                                              [[maybe_unused]] const void* b, [[maybe_unused]] int panel,
                                              [[maybe_unused]] int add) {
    HOPPER_ASM("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5)
               "%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, p, 1, 1, 1; }"
               : C16(0), C16(16), C16(32), C16(48)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(wgmma_operand(b, panel)), "r"(add) : "memory");
}
#undef TEN
#undef C16
#undef C4
__device__ inline void wgmma_fence() { HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory"); } // c has been written
__device__ inline void wgmma_commit() { HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LAST> __device__ inline void wgmma_wait() { // until all groups but the last few are done
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(LAST) : "memory");
}
template <int N> __device__ inline void settle(float (&c)[N]) { // the compiler moves no use of c across this
    UNROLL for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}
// Makes shared memory that threads wrote (also by cp.async) visible to wgmma and TMA after the block's next barrier.
__device__ inline void shared_to_async() { HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }
// Registers move between the warpgroups of a block: all four warps say it; a multiple of 8 a thread.
template <int REGISTERS> __device__ inline void keep_registers() {
    HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ inline void take_registers() {
    HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
#else
inline void let_next_start() {}
inline void wait_for_previous() {}
inline void put_word(uint64_t* to, uint64_t word) { *to = word; }
inline uint64_t get_word(const uint64_t* from) { return wait_at(Coroutine::READY), *from; } // (others go on meanwhile)
inline void shared_to_async() {}
template <int> void keep_registers() {}
template <int> void take_registers() {}
template <int LAST> void copies_wait() { wait_all_but(LAST); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline CUtensorMap tensor_map(const void* array, int rows, int columns, int box_rows) {
    return {(const bf16*)array, rows, columns, box_rows};
}
#endif
// Swizzles count from multiples of 1,024 bytes: to align a place, allocate 1,024 bytes more.
template <class T> __device__ inline T* aligned_1024(T* p) {
    return (T*)((char*)p + (-(size_t)__cvta_generic_to_shared(p) & 1023));
}
} // namespace lab
