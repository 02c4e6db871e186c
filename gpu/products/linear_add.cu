// gpu/products/linear_add.cu: compiles linear_add of qwen3.cu, section 10, with the optional kernels.
#define QWEN3_PART PART_LINEAR_ADD
#include "qwen3.cu"
