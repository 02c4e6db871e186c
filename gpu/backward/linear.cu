// gpu/backward/linear.cu: linear_backward_input.
#include "gpu/backward/epilogues.h"
#include "gpu/backward/input.h"
#include "qwen3.cu"

void linear_backward_input_gpu(Context& ctx, bf16* dx, bf16* dh, float* dB, const bf16* dy,
                                      const Linear<bf16>& W, int N) {
    const LoraArgs lora(W, N);
    if (lora.width()) lora_up_backward(ctx, dh, dB, dx, dy, W, N);
    input_product(ctx, dh, dy, W, lora, DropEpilogue(dx, W.in, lora.kept, lora.rank, lora.scale),
                  StoreEpilogue<bf16>(dx, W.in));
}
