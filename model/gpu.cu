// model/gpu.cu: a GPU's memory, devices, streams and scratch.
#ifdef QWEN3_GPU
#include "model/device.h"
#include "qwen3.cu"
#include <algorithm>
#include <memory>

// ---- Memory of a GPU (base/arena.h, model/context.h)
void* gpu_allocate(size_t bytes, const char* what) {
    size_t have = 0, all = 0;
    void* base = nullptr;
    CUDA_CHECK(cudaMemGetInfo(&have, &all));
    if (bytes > have || cudaMalloc(&base, bytes) != cudaSuccess)
        DIE("%s needs %.2f GB of GPU memory and %.2f of its %.2f GB are free", what, (double)bytes / 1e9,
            (double)have / 1e9, (double)all / 1e9);
    CUDA_CHECK(cudaMemset(base, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize()); // our streams do not wait for the default stream, which clears it
    return base;
}
void gpu_release(void* p) { cudaFree(p); }
void* gpu_host_allocate(size_t bytes) {
    void* base = nullptr;
    CUDA_CHECK(cudaMallocHost(&base, bytes));
    return base;
}
void gpu_host_release(void* p) { cudaFreeHost(p); }
void gpu_copy(Context& ctx, void* to, const void* from, size_t bytes, bool to_host) {
    const cudaMemcpyKind kind = to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, ctx.gpu->stream)); // (the CPU's side is not pinned: it is read
    if (to_host) CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream));     // before this returns)
}
void gpu_clear(Context& ctx, void* p, size_t bytes) { CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, ctx.gpu->stream)); }
size_t gpu_free_memory() {
    size_t have = 0, all = 0;
    CUDA_CHECK(cudaMemGetInfo(&have, &all));
    return have;
}
size_t gpu_all_memory() {
    size_t have = 0, all = 0;
    CUDA_CHECK(cudaMemGetInfo(&have, &all));
    return all;
}

// ---- Devices and streams (model/device.h)
#ifdef HAVE_WGMMA
__device__ int has_wgmma = 1; // Whether the code that this GPU runs has the instructions of sm_90a.
#else
__device__ int has_wgmma = 0;
#endif

Context open_gpu(int device) {
    int n = 0, driver = 0, runtime = 0;
    const cudaError_t e = cudaGetDeviceCount(&n);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) DIE("no GPU here: there is no NVIDIA driver");
    if (e == cudaErrorInsufficientDriver || (e != cudaSuccess && driver / 1000 < runtime / 1000))
        DIE("the GPU's driver is for CUDA %d.%d, this program needs %d.%d", driver / 1000, driver % 100 / 10,
            runtime / 1000, runtime % 100 / 10);
    if (e != cudaSuccess || n == 0)
        DIE("no GPU here: %s", e == cudaSuccess ? "the driver sees none" : cudaGetErrorString(e));
    if (device >= n) DIE("no GPU %d here: there %s", device, n == 1 ? "is one" : format("are %d", n).c_str());
    CUDA_CHECK(cudaSetDevice(device)); // of this thread
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    Context ctx;
    ctx.gpu = std::make_shared<Gpu>();
    ctx.gpu->sm = properties.major * 10 + properties.minor;
    if (ctx.gpu->sm < 80) DIE("%s is sm_%d; the kernels need sm_80 (Ampere) or later", properties.name, ctx.gpu->sm);
    ctx.gpu->sms = properties.multiProcessorCount;
    ctx.gpu->overlap = ctx.gpu->sm >= 90;
    int wgmma = 0;
    CUDA_CHECK(cudaMemcpyFromSymbol(&wgmma, has_wgmma, sizeof wgmma));
    ctx.gpu->hopper = wgmma && Optional::HERE;
    CUDA_CHECK(cudaStreamCreateWithFlags(&ctx.gpu->stream, cudaStreamNonBlocking));
    return ctx;
}

void check_gpu(const std::string& name, const Config& c, bool logits) {
    const char* n = name.c_str();
    if (c.D != 64 && c.D != 128)
        DIE("%s: the GPU's kernels are for heads of 64 and 128, not %d (--device cpu)", n, c.D);
    if (c.H / c.K > 128)
        DIE("%s: %d query heads a key/value head; the GPU's kernels take 128 (--device cpu)", n, c.H / c.K);
    if (c.C % 8 || c.F % 8 || (c.V % 8 && logits))
        DIE("%s: the GPU's kernels need hidden size (%d), ffn size (%d) and vocabulary rows (%d) in multiples of 8 "
            "(--device cpu)", n, c.C, c.F, c.V);
    if (c.E % 8 || c.M % 8)
        DIE("%s: the GPU's kernels need experts (%d) and their ffn size (%d) in multiples of 8 (--device cpu)", n, c.E,
            c.M);
}

std::string gpu_name(int device) {
    cudaDeviceProp properties;
    return cudaGetDeviceProperties(&properties, device) == cudaSuccess ? properties.name : "";
}
void gpu_use(int device) { CUDA_CHECK(cudaSetDevice(device)); }
void gpu_synchronize(const Context& ctx) { CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream)); }

Context with_own_stream(const Context& ctx) {
    Context own = ctx;
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    own.gpu = std::shared_ptr<Gpu>(new Gpu(*ctx.gpu), [stream](Gpu* gpu) { cudaStreamDestroy(stream), delete gpu; });
    own.gpu->stream = stream;
    return own;
}
Context with_own_scratch(const Context& ctx) {
    Context own = ctx;
    own.gpu = std::make_shared<Gpu>(*ctx.gpu);
    return own;
}

// ---- Scratch
int splits_for_graph(int position, int context) {
    int splits = 1;
    while (splits * SPLIT <= position) splits *= 2;
    return std::min(splits, (context - 1) / SPLIT + 1);
}
// The sequences of one token have a part for each split where attention_decode_gpu launches at most 8 blocks of
// DECODE_ROWS heads a multiprocessor; else at most 3 such blocks a multiprocessor, and one more for each of their heads.
size_t attention_scratch(const Context& ctx, int singles, int splits, int H, int D) {
    const size_t most = (size_t)8 * ctx.gpu->sms * DECODE_ROWS + (size_t)singles * H;
    const size_t parts = std::min((size_t)singles * H * splits, most);
    return std::max(parts, (size_t)BLOCKS_A_SM * ctx.gpu->sms * QUERY_ROWS) * (D + 2);
}
size_t widened_numbers(const Config& c, size_t pages) { return 2 * pages * c.K * PAGE * c.D; }

void plan_scratch(Context& ctx, Arena& arena) {
    ctx.gpu = std::make_shared<Gpu>(*ctx.gpu);
    ctx.gpu->partial = arena.take<float>(PARTIAL_BYTES / sizeof(float));
    ctx.gpu->arrived = arena.take<int>(MAX_TILES);
}
void plan_scratch(Context& ctx, Arena& arena, const Config& c, int rows, int singles, int context, int pages) {
    plan_scratch(ctx, arena);
    ctx.gpu->attention = arena.take<float>(attention_scratch(ctx, singles, (context - 1) / SPLIT + 1, c.H, c.D));
    ctx.gpu->attention_arrived = arena.take<int>((size_t)singles * c.H);
    ctx.gpu->widened_numbers = ctx.kv_fp8 ? widened_numbers(c, (size_t)pages) : 0;
    ctx.gpu->widened = arena.take<bf16>(ctx.gpu->widened_numbers);
    Optional::plan(ctx, arena, c, rows);
}
#endif
