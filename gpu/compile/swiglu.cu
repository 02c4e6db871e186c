// gpu/compile/swiglu.cu: compiles norm_linear_swiglu of qwen3.cu, section 10, with the optional kernels.
#define PART_SWIGLU 1
#include "gpu/optional_products.h"
#include "qwen3.cu"
