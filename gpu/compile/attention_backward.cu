// gpu/compile/attention_backward.cu: compiles attention_backward of qwen3.cu, section 13.
#define PART_BACKWARD_ATTENTION 1
#include "qwen3.cu"
