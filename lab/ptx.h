// ptx.h: the instructions without a name in CUDA C++ that the laboratories use, each wrapped once (PTX ISA). Under g++
// the functions of the same names in data/course/emulate_tensor.h take their place: there a copy spoils its target at
// once and comes when it is waited for, so that what is read too early is wrong.
#pragma once
#include "lab.h"
#ifdef __CUDACC__
#include <cuda.h>
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_HOPPER // wgmma, setmaxnreg: sm_90a only. Elsewhere these functions do nothing, and harness and kernels
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__) // see to it that nobody calls them.
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
// 2 t + 1; of a rows g (a[0], a[2]) and g + 8 (a[1], a[3]), pairs of columns from 2 t (a[0], a[1]) and 2 t + 8 (a[2], a[3])
// on; of b column g, pairs of rows from 2 t (b0) and 2 t + 8 (b1) on.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices of bf16 from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// 16 bytes from global to shared memory in the background; zeros if not `there`.
__device__ inline void copy16(void* to, const void* from, bool there) {
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LAST> __device__ inline void copies_wait() { // until all groups but the last few have come
    asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
}

// ---- mbarriers and the Tensor Memory Accelerator: Hopper
// A phase of an mbarrier ends when `arrivals` have arrived and all bytes expected in it have come. Who waits names the
// parity of the phase that is to end: 0 for the first, 1 for the second. Before the first has ended, 1 is past.
__device__ inline void barrier_init([[maybe_unused]] uint64_t* b, [[maybe_unused]] int arrivals) {
    HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ inline void barriers_ready() { // all threads and copies see them after the block's next __syncthreads
    HOPPER_ASM("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void barrier_expect([[maybe_unused]] uint64_t* b, [[maybe_unused]] int bytes) { // arrives, too
    HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
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
#else
template <int LAST> void copies_wait() { wait_all_but(LAST); }
inline CUtensorMap tensor_map(const void* array, int rows, int columns, int box_rows) {
    return {(const bf16*)array, rows, columns, box_rows};
}
#endif
// Swizzles count from multiples of 1,024 bytes: who wants such a place asks for 1,024 bytes more.
template <class T> __device__ inline T* aligned_1024(T* p) {
    return (T*)((char*)p + (-(size_t)__cvta_generic_to_shared(p) & 1023));
}
} // namespace lab
