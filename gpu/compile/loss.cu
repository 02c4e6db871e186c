// gpu/compile/loss.cu: compiles head_loss and head_backward of qwen3.cu, section 13, with the optional kernels.
#define PART_LOSS 1
#include "gpu/optional_products.h"
#include "qwen3.cu"
