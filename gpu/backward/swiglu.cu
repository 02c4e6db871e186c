// gpu/backward/swiglu.cu: linear_backward_swiglu.
#include "gpu/backward/epilogues.h"
#include "gpu/backward/input.h"
#include "qwen3.cu"

void linear_backward_swiglu_gpu(Context& ctx, bf16* dgate_up, bf16* hidden, bf16*, bf16* dh, float* dB,
                                       const bf16* dy, const bf16* gate_up, const Linear<bf16>& W, int N) {
    const LoraArgs lora(W, N);
    if (lora.width()) lora_up_backward(ctx, dh, dB, dgate_up, dy, W, N);
    input_product(ctx, dh, dy, W, lora, SwigluBackwardEpilogue<true>(dgate_up, hidden, gate_up, W.in, lora),
                  SwigluBackwardEpilogue<false>(dgate_up, hidden, gate_up, W.in, lora));
}
