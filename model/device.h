// model/device.h: where a model is computed: on the CPU, on a GPU, or by Book I's definitions.
#pragma once
#include "model/options.h"
#include "model/weights.h"

// What the computation runs on, for people.
inline std::string device_name(const Context& ctx) {
#ifdef __CUDACC__
    cudaDeviceProp properties;
    if (ctx.gpu && cudaGetDeviceProperties(&properties, 0) == cudaSuccess) return properties.name;
#endif
    return format("cpu, %s%s", ctx.plain ? "plain loops, " : "", counted((size_t)thread_count(), "thread").c_str());
}

// Compute in float? As the checkpoint is stored, unless --dtype says otherwise. The GPU computes in bf16.
inline bool wide(const ModelOptions& o, const ModelFile& file) {
    return o.dtype == "f32" || (o.dtype != "bf16" && o.device != "cuda" && file.is_float32());
}

#ifdef __CUDACC__
// The first GPU, or one line that says why there is none.
inline Context open_gpu(int device = 0) {
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
    ctx.gpu->hopper = wgmma;
    CUDA_CHECK(cudaStreamCreateWithFlags(&ctx.gpu->stream, cudaStreamNonBlocking));
    return ctx;
}
#endif

// The GPU, if it was asked for or is there and can do what is asked; else the CPU.
inline Context choose_device(const ModelOptions& o, [[maybe_unused]] const ModelFile& file) {
    const std::string& name = o.device;
    if (!name.empty() && name != "cpu" && name != "cuda" && name != "plain")
        DIE("--device %s: cpu or cuda, or plain for plain loops", name.c_str());
    const bool wanted = name == "cuda";
    Context ctx;
    ctx.plain = name == "plain";
    ctx.kv_fp8 = o.kv_dtype == "fp8";
    const bool rounds = o.activations == "fp8";
    if (rounds && !file.is_fp8()) DIE("%s: it has no FP8 weights, which --activations fp8 is for", file.path.c_str());
    if (rounds && (!o.packed || !o.dtype.empty()))
        DIE("--activations fp8 is for weights that stay packed (--packed, and no --dtype)");
    if (rounds && o.invariant) DIE("--activations fp8: not with --invariant, since only prompts are rounded");
    const auto on_cpu = [&] {
        if (rounds) DIE("--activations fp8 is for a GPU; this model runs on the CPU");
        if (o.one_kernel > Context::WHERE_FASTER) DIE("--one-kernel is for a GPU; this model runs on the CPU");
        return ctx;
    };
    if (wanted && o.dtype == "f32") DIE("--dtype f32: the GPU computes in bf16 (--device cpu)");
    if (!file.logits && o.one_kernel > Context::WHERE_FASTER) DIE("--one-kernel is for answers; this model gives none");
#ifdef __CUDACC__
    if (name == "cpu" || ctx.plain) return on_cpu();
    try {
        if (!wanted && wide(o, file)) return on_cpu();
        check_gpu(file.path, file.config, file.logits);
        if (!o.packed && (o.dtype == "int8" || file.is_int8()))
            DIE("%s: INT8 weights run on a GPU only with --packed (or --device cpu)", file.path.c_str());
        Context gpu = open_gpu(o.gpu);
        gpu.invariant = o.invariant, gpu.kv_fp8 = ctx.kv_fp8, gpu.fp8_activations = rounds;
        gpu.one_kernel = file.logits ? o.one_kernel : Context::OFF; // (nothing is drawn; there may be no head)
        return gpu;
    } catch (const Error&) {
        if (wanted) throw;
    }
#else
    if (wanted) DIE("--device cuda: this program was built without nvcc");
#endif
    return on_cpu();
}

// Quantised matrices stay as they are stored: on a CPU unless a --dtype is asked for, on a GPU with --packed.
template <class T> bool keeps_packed(const ModelOptions& o, const Context& ctx) {
    return std::is_same_v<T, bf16> && (!ctx.gpu || o.packed) && o.dtype.empty();
}

template <class T>
void to_device([[maybe_unused]] const Context& where, [[maybe_unused]] const ModelFile& file,
               [[maybe_unused]] Weights<T>& weights) {
#ifdef __CUDACC__
    if constexpr (HAS_GPU<T>)
        if (where.gpu) {
            Context ctx = where;
            if (file.is_quantized() && weights.layers[0].down.format == Format::PLAIN)
                fprintf(stderr, "%s: quantised; its weights are bfloat16 on the GPU\n", file.path.c_str());
            weights.upload(ctx, file);
        }
#endif
}

// On a CPU: see use_huge_pages.
template <class T> void decode_for_long(const Context& where, const ModelFile& file, const Weights<T>& weights) {
    if (!where.gpu) use_huge_pages(file, weights);
}
