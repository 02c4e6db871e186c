// gpu/backward/norms.cu: compiles norms, backward of qwen3.cu, section 13.
#define QWEN3_PART PART_NORMS_BACKWARD
#include "qwen3.cu"
