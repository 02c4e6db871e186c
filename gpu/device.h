// gpu/device.h: the GPU's device, memory and streams for host code, without CUDA's types.
#pragma once
#include "qwen3.cu"
#include <string>

// GPU `device`, with a stream of its own; it becomes this thread's. Throws Error, one line that says why there is none.
Context open_gpu(int device);
// Throws Error if the kernels cannot compute a model of this shape. logits: it has a head.
void check_gpu(const std::string& name, const Config& c, bool logits);
std::string gpu_name(int device);  // as its maker calls it; empty: there is no such GPU
int gpu_count();                   // GPUs that the driver shows; 0 without a driver
void gpu_use(int device);          // this thread's calls go to that GPU from here on
size_t gpu_free_memory();          // bytes
size_t gpu_all_memory();           // bytes
void gpu_synchronize(const Context& ctx); // waits for all that was launched in the context's stream
// The same GPU with a stream of its own, which ends with the last copy of this context.
Context with_own_stream(const Context& ctx);
// The same GPU and stream, and room for scratch of its own: what is planned there leaves the other's alone.
Context with_own_scratch(const Context& ctx);
