// gpu/compile/linear_add.cu: compiles linear_add of qwen3.cu, section 10, with the optional kernels.
#define PART_LINEAR_ADD 1
#include "gpu/optional_products.h"
#include "qwen3.cu"
