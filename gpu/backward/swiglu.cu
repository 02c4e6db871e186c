// gpu/backward/swiglu.cu: compiles linear_backward_swiglu of qwen3.cu, section 13, with the optional kernels.
#define QWEN3_PART PART_BACKWARD_SWIGLU
#include "qwen3.cu"
