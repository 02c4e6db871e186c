// gpu/compile/linear.cu: compiles linear and norm_linear of qwen3.cu, section 10, with the optional kernels.
#define PART_LINEAR 1
#include "gpu/optional_products.h"
#include "qwen3.cu"
