// gpu/backward/loss.cu: compiles head_loss and head_backward of qwen3.cu, section 13, with the optional kernels.
#define QWEN3_PART PART_LOSS
#include "qwen3.cu"
