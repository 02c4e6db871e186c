// gpu/compile/norms_backward.cu: compiles norms, backward of qwen3.cu, section 13.
#define PART_NORMS_BACKWARD 1
#include "qwen3.cu"
