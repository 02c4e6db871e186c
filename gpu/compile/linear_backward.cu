// gpu/compile/linear_backward.cu: compiles linear_backward_input of qwen3.cu, section 13, with the optional kernels.
#define PART_BACKWARD_LINEAR 1
#include "gpu/optional_products.h"
#include "qwen3.cu"
