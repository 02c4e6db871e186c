// gpu/products/head.cu: compiles head, and the head's product for draws, of qwen3.cu, sections 10 and 12, with the optional kernels.
#define QWEN3_PART PART_HEAD
#include "qwen3.cu"
