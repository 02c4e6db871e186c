#define CUDA_CHECK(call) cuda_check((call), #call)
inline void cuda_check(cudaError_t e, const char* call) {
    if (e != cudaSuccess) DIE("%.60s: %s", call, cudaGetErrorString(e));
}

// What launches need to know of the GPU, and scratch. Whoever has scratch of their own has a copy of their own.
struct Gpu {
    cudaStream_t stream = nullptr;
    int sm = 0, sms = 0;         // 10 x compute capability; multiprocessors
    bool hopper = false;         // sm_90a, and this binary was built for it: wgmma
    bool overlap = false;        // sm_90 and up: a kernel may start before the one ahead of it has ended
    float* partial = nullptr;    // of products whose sums several blocks share, PARTIAL_BYTES
    int* arrived = nullptr;      // ... and how many of them are done: (MAX_TILES), zero between kernels
    float* attention = nullptr;  // the same for attention, see attention_scratch
    int* attention_arrived = nullptr;
};
constexpr size_t PARTIAL_BYTES = 32 << 20;
constexpr int MAX_TILES = 4096;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA
__device__ int has_wgmma = 1; // whether the code that this GPU runs has the instructions of sm_90a
#else
__device__ int has_wgmma = 0;
#endif

// Launches a kernel. With `overlap` (programmatic dependent launch) its blocks may start as soon as every block of the
// kernel before it has called let_next_start or ended: what comes before its own wait_for_previous then runs beside
// that kernel. Every block of every kernel waits, even one with nothing to do, and writes nothing before: so when a
// kernel has completed, all kernels before it have.
//
// What may be read before the wait? The kernel before may have called let_next_start before its own wait, and so on:
// many kernels can be under way at once, back to the last launch_after_all, copy, memset or beginning of a graph. That
// one starts when all before it has completed, and what follows starts later than it. Hence the rule: before its wait a
// kernel reads only what no kernel since then writes. forward begins with launch_after_all (embed); so these are safe:
// - the batch (tokens, positions, sequences, slots, block table): written by copies, by serve's prepare_kernel or by the
//   sample_kernel of the step before, all of which are ahead of embed;
// - weights: adamw_kernel writes them, after backward, and the next forward begins with embed;
// - keys and values of earlier forwards. Those of this one's own tokens are read after the wait.
// Whoever reads anything else early puts a launch_after_all between that and its writer.
template <class... P, class... A>
void launch_kernel(Context& ctx, bool overlap, void (*kernel)(P...), dim3 grid, int threads, size_t shared, A... args) {
    if (shared > 40 * 1024) // with a kernel's own arrays it may pass the 48 KB that need no asking
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
    config.stream = ctx.gpu->stream, config.attrs = &attribute, config.numAttrs = overlap;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, P(args)...));
    CUDA_CHECK(cudaGetLastError());
}
template <class... P, class... A>
void launch(Context& ctx, void (*kernel)(P...), dim3 grid, int threads, size_t shared, A... args) {
    launch_kernel(ctx, ctx.gpu->overlap, kernel, grid, threads, shared, args...);
}
// Starts when everything before it in the stream has completed. Kernels after it may still overlap with it.
template <class... P, class... A>
void launch_after_all(Context& ctx, void (*kernel)(P...), dim3 grid, int threads, size_t shared, A... args) {
    launch_kernel(ctx, false, kernel, grid, threads, shared, args...);
}

// What f launches, as a graph that can be launched again and again.
template <class F> cudaGraphExec_t record_graph(Context& ctx, F f) {
    cudaGraph_t recorded;
    cudaGraphExec_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(ctx.gpu->stream, cudaStreamCaptureModeThreadLocal));
    f();
    CUDA_CHECK(cudaStreamEndCapture(ctx.gpu->stream, &recorded));
    CUDA_CHECK(cudaGraphInstantiate(&graph, recorded, 0));
    cudaGraphDestroy(recorded);
    return graph;
}

// griddepcontrol (PTX ISA, "Parallel Synchronization and Communication Instructions")
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes of weights: read once, so they should not push anything out of the first-level cache. Zeros if not `there`,
// by a predicate and not by a jump, so that many are asked for in a row.
__device__ inline uint4 load_stream(const void* p, bool there = true) {
    uint4 v;
    asm volatile("{ .reg .pred there; setp.ne.u32 there, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
                 "@there ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((uint32_t)there));
    return v;
}

// Two neighbours: the first is in the lower half.
__device__ inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
__device__ inline uint32_t pack(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ inline bf16 round_bf16(float x) { return {(uint16_t)pack(x, 0)}; }

// d += a b with a (16,16), b (16,8), d (16,8) spread over a warp: lane 4g + t holds of d rows g (d[0], d[1]) and
// g + 8 (d[2], d[3]), columns 2t, 2t + 1; of a rows g (a0, a2) and g + 8 (a1, a3), pairs of columns 2t (a0, a1) and
// 2t + 8 (a2, a3); of b column g, pairs of rows 2t (b0) and 2t + 8 (b1). PTX ISA: mma.m16n8k16, .bf16
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of bf16 from shared memory; lane l names row l % 8 of matrix l / 8. As mma wants them, or
// transposed.
__device__ inline void ldmatrix(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}
__device__ inline void ldmatrix_transposed(uint32_t (&m)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}

// ---- wgmma, Hopper's product (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): 128 threads multiply what lies
// in shared memory, without ldmatrix and at the full rate of the tensor cores. sm_90a only.
// The operand at `shared`, 128 bytes a row in the 128-byte swizzle (chunk c of 16 bytes of row r lies in place c ^ r % 8),
// groups of eight rows 1024 bytes apart (SBO). If it is transposed, rows are steps of the contraction, and panels of 64
// columns lie `panel` bytes apart (LBO).
__device__ inline uint64_t wgmma_operand(uint32_t shared, int panel) {
    return (uint64_t)(shared >> 4 & 0x3fff) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// d (64,128) += a (64,16) b (16,128). Warp w of the four has rows 16 w .. 16 w + 15, each lane what mma gives it; d[j] is of
// columns 8 j .. 8 j + 7. It reads shared memory and runs on after the instruction: "memory" keeps the compiler from moving
// stores to shared memory past it, wgmma_end from using d too early.
template <bool A_COLS, bool B_COLS> __device__ inline void wgmma(float (&d)[16][4], uint64_t a, uint64_t b) {
#ifdef HAVE_WGMMA
#define D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
                 "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
                 "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, %66, %67;"
                 : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13),
                   D4(14), D4(15)
                 : "l"(a), "l"(b), "n"((int)A_COLS), "n"((int)B_COLS)
                 : "memory");
#undef D4
#endif
}
// What was written to shared memory is visible to wgmma.
__device__ inline void wgmma_see_shared() {
#ifdef HAVE_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Before the first wgmma of a group: the sums' registers have been written.
__device__ inline void wgmma_begin() {
#ifdef HAVE_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// The compiler moves no use of the sums across this.
template <int M> __device__ inline void wgmma_settle(float (&d)[M][16][4]) {
    #pragma unroll
    for (int i = 0; i < M * 64; i++) asm volatile("" : "+f"(d[i / 64][i / 4 % 16][i % 4])::"memory");
}
// Waits until all wgmma of the group are done.
template <int M> __device__ inline void wgmma_end(float (&d)[M][16][4]) {
#ifdef HAVE_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
    wgmma_settle(d);
#endif
}

// 16 bytes from global to shared memory in the background; zeros if not `there`.
__device__ inline void copy_async(uint32_t shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void copy_async_4(uint32_t shared, const void* global, bool there) { // 4 bytes
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(there ? 4 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int YOUNGER> __device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGER) : "memory"); }

__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

constexpr float LOG2E = 1.44269504f;
__device__ inline float exp2_fast(float x) { // 2^x, relative error 2^-22; 0 for -infinity
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float warp_sum(float x) {
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// Over the four lanes of a quad, which hold a row of mma's d between them; for all four.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The sum over a block, in one order, for all its threads.
template <class N> __device__ inline N block_sum(N x) {
    __shared__ N parts[32];
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0;
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// One block of several is the last to come here: it may then read what all of them wrote before. `arrived` counts
// from zero and is zero again afterwards. All threads of the block call it.
// (One thread's release and acquire are enough: barriers order the others' accesses before and after it. What is read
// must come from the L2 cache: __ldcg.)
__device__ inline bool last_to_arrive(int* arrived, int blocks) {
    __shared__ int last;
    __syncthreads();
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
        last = before == blocks - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    return last;
}

// ---- Memory
inline void* gpu_allocate(size_t bytes, const char* what) {
    size_t have = 0, all = 0;
    void* base = nullptr;
    CUDA_CHECK(cudaMemGetInfo(&have, &all));
    if (bytes > have || cudaMalloc(&base, bytes) != cudaSuccess)
        DIE("%s needs %.2f GB of GPU memory and %.2f of its %.2f GB are free", what, (double)bytes / 1e9,
            (double)have / 1e9, (double)all / 1e9);
    CUDA_CHECK(cudaMemset(base, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize()); // our streams do not wait for the one that clears it
    return base;
}
inline void gpu_release(void* p) { cudaFree(p); }
inline void gpu_copy(Context& ctx, void* to, const void* from, size_t bytes, bool to_host) {
    const cudaMemcpyKind kind = to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice; // (not pinned: `from` is read
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, ctx.gpu->stream));                   // before this returns)
    if (to_host) CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream));
}
inline void gpu_clear(Context& ctx, void* p, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, ctx.gpu->stream));
}

