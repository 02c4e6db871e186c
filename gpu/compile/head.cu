// gpu/compile/head.cu: compiles head of qwen3.cu, section 10, with the optional kernels.
#define PART_HEAD 1
#include "gpu/optional_products.h"
#include "qwen3.cu"
