// gpu/products/linear.cu: compiles linear and norm_linear of qwen3.cu, section 10, with the optional kernels.
#define QWEN3_PART PART_LINEAR
#include "qwen3.cu"
