// model/device.cpp: where a model is computed.
#include "model/device.h"
#include "base/error.h"
#include <cstdio>

std::string device_name(const Context& ctx) {
    if constexpr (WITH_GPU)
        if (const std::string name = ctx.gpu ? gpu_name(0) : ""; !name.empty()) return name;
    return format("cpu, %s%s", ctx.plain ? "plain loops, " : "", counted((size_t)thread_count(), "thread").c_str());
}

bool wide(const ModelOptions& o, const ModelFile& file) {
    return o.dtype == "f32" || (o.dtype != "bf16" && o.device != "cuda" && file.is_float32());
}

Context choose_device(const ModelOptions& o, const ModelFile& file) {
    const std::string& name = o.device;
    if (!name.empty() && name != "cpu" && name != "cuda" && name != "plain")
        DIE("--device %s: cpu or cuda, or plain for plain loops", name.c_str());
    const bool wanted = name == "cuda";
    Context ctx;
    ctx.plain = name == "plain";
    ctx.kv_fp8 = o.kv_dtype == "fp8";
    const bool rounds = o.activations == "fp8";
    const bool made_fp8 = made_format(o) == Format::FP8;
    if (rounds && !made_fp8 && !file.is_fp8())
        DIE("%s: it has no FP8 weights, which --activations fp8 is for (--dtype fp8 makes them)", file.path.c_str());
    if (rounds && !made_fp8 && (!o.packed || !o.dtype.empty()))
        DIE("--activations fp8 is for FP8 weights: --dtype fp8, or --packed and no --dtype");
    if (rounds && o.invariant) DIE("--activations fp8: not with --invariant, since only prompts are rounded");
    if (o.activations == "int8") {
        const bool packed = o.dtype.empty() && (file.is_int8() || (file.is_quantized() && !wide(o, file)));
        if (wanted) DIE("--activations int8 is for a CPU (--device cpu)");
        if (ctx.plain || !HAS_CPU<bf16>) DIE("--activations int8: not by plain loops (--device cpu)");
        if (made_format(o) != Format::INT8 && (!packed || file.is_fp8()))
            DIE("--activations int8 is for weights in INT8, INT4 or GGUF's blocks (--dtype int8 makes them)");
        ctx.int8_activations = true;
    }
    const auto on_cpu = [&] {
        if (rounds) DIE("--activations fp8 is for a GPU; this model runs on the CPU");
        if (o.one_kernel > Context::WHERE_FASTER) DIE("--one-kernel is for a GPU; this model runs on the CPU");
        return ctx;
    };
    if (wanted && o.dtype == "f32") DIE("--dtype f32: the GPU computes in bf16 (--device cpu)");
    if (!file.logits && o.one_kernel > Context::WHERE_FASTER) DIE("--one-kernel is for answers; this model gives none");
    if constexpr (WITH_GPU) {
        if (name == "cpu" || ctx.plain || ctx.int8_activations) return on_cpu();
        try {
            if (!wanted && wide(o, file)) return on_cpu();
            check_gpu(file.path, file.config, file.logits);
            if (!o.packed && file.is_int8() && made_format(o) == Format::PLAIN)
                DIE("%s: INT8 weights run on a GPU only with --packed (or --device cpu)", file.path.c_str());
            Context gpu = open_gpu(o.gpu);
            gpu.invariant = o.invariant, gpu.kv_fp8 = ctx.kv_fp8, gpu.fp8_activations = rounds;
            gpu.one_kernel = file.logits ? o.one_kernel : Context::OFF; // (nothing is drawn; there may be no head)
            return gpu;
        } catch (const Error&) {
            if (wanted) throw;
        }
    } else if (wanted) {
        DIE("--device cuda: this program was built without nvcc");
    }
    return on_cpu();
}

template <class T>
void to_device([[maybe_unused]] const Context& where, [[maybe_unused]] const ModelFile& file,
               [[maybe_unused]] Weights<T>& weights) {
    if constexpr (HAS_GPU<T>)
        if (where.gpu) {
            Context ctx = where;
            if (file.is_quantized() && last_product(weights.layers.back()).format == Format::PLAIN)
                fprintf(stderr, "%s: quantised; its weights are bfloat16 on the GPU\n", file.path.c_str());
            weights.upload(ctx, file);
        }
}

template void to_device<bf16>(const Context&, const ModelFile&, Weights<bf16>&);
template void to_device<float>(const Context&, const ModelFile&, Weights<float>&);
