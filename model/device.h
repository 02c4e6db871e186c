// model/device.h: where a model is computed: on the CPU, on a GPU, or by Book I's definitions.
#pragma once
#include "model/options.h"
#include "model/weights.h"
#include "qwen3.cu"
#include <string>
#include <type_traits>

// The device's name, for messages.
std::string device_name(const Context& ctx);

// Whether to compute in float: the checkpoint's stored type decides, unless --dtype is given. The GPU computes in bf16.
bool wide(const ModelOptions& o, const ModelFile& file);

// model/gpu.cu defines these, in CUDA builds only.
// GPU `device` with a stream of its own; it becomes this thread's GPU. Throws Error, one line with the reason, if there
// is none.
Context open_gpu(int device);
// Throws Error if the kernels cannot compute a model of this shape. logits: it has a head.
void check_gpu(const std::string& name, const Config& c, bool logits);
std::string gpu_name(int device); // as its maker calls it; empty: there is no such GPU
void gpu_use(int device);          // this thread's calls go to that GPU from here on
size_t gpu_free_memory();          // bytes
size_t gpu_all_memory();           // bytes
void gpu_synchronize(const Context& ctx); // waits for all work of the context's stream
// The same GPU with a stream of its own, which ends with the last copy of this context.
Context with_own_stream(const Context& ctx);
// The same GPU and stream, with separate scratch: plans made there do not change the other's.
Context with_own_scratch(const Context& ctx);

// The GPU, if it was requested, or exists and supports the request; else the CPU.
Context choose_device(const ModelOptions& o, const ModelFile& file);

// The format that --dtype makes of matrices; PLAIN: none.
inline Format made_format(const ModelOptions& o) {
    return o.dtype == "int8" ? Format::INT8 : o.dtype == "fp8" ? Format::FP8 : Format::PLAIN;
}
// Quantised matrices stay as they are stored: on a CPU unless a --dtype is asked for, on a GPU with --packed.
template <class T> bool keeps_packed(const ModelOptions& o, const Context& ctx) {
    return std::is_same_v<T, bf16> && (!ctx.gpu || o.packed) && o.dtype.empty();
}

// The weights go to the GPU, if that is where they are used.
template <class T> void to_device(const Context& where, const ModelFile& file, Weights<T>& weights);

// On a CPU: see use_huge_pages.
template <class T> void decode_for_long(const Context& where, const ModelFile& file, const Weights<T>& weights) {
    if (!where.gpu) use_huge_pages(file, weights);
}
