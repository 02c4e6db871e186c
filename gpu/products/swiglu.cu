// gpu/products/swiglu.cu: compiles norm_linear_swiglu of qwen3.cu, section 10, with the optional kernels.
#define QWEN3_PART PART_SWIGLU
#include "qwen3.cu"
