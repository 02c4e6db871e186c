// gpu/products/head.cu: compiles head of qwen3.cu, section 10, with the optional kernels.
#define QWEN3_PART PART_HEAD
#include "qwen3.cu"
