// model/experts.cu: experts on a GPU.
#ifdef QWEN3_GPU
#include "qwen3.cu"

// check_gpu refuses such a model before a kernel is launched.
void route_gpu(Context&, const Routed<bf16>&, const bf16*, const Linear<bf16>&, const Batch&, int, bool) {
    DIE("a mixture of experts runs on the CPU only");
}
void expert_mlp_gpu(Context&, float*, bf16*, bf16*, bf16*, const float*, const bf16*, const std::vector<Expert<bf16>>&,
                    const Routed<bf16>&, int, int) {
    DIE("a mixture of experts runs on the CPU only");
}
#endif
