// gpu/backward/linear.cu: compiles linear_backward_input of qwen3.cu, section 13, with the optional kernels.
#define QWEN3_PART PART_BACKWARD_LINEAR
#include "qwen3.cu"
