// gpu/device.h: the GPU's device, memory and streams for host code, without CUDA's types.
#pragma once
#include "model/device.h" // open_gpu, check_gpu, gpu_name

void gpu_use(int device);          // this thread's calls go to that GPU from here on
size_t gpu_free_memory();          // bytes
size_t gpu_all_memory();           // bytes
void gpu_synchronize(const Context& ctx); // waits for all that was launched in the context's stream
// The same GPU with a stream of its own, which ends with the last copy of this context.
Context with_own_stream(const Context& ctx);
// The same GPU and stream, and room for scratch of its own: what is planned there leaves the other's alone.
Context with_own_scratch(const Context& ctx);
