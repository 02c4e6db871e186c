// gpu/backward/attention.cu: compiles attention_backward of qwen3.cu, section 13.
#define QWEN3_PART PART_BACKWARD_ATTENTION
#include "qwen3.cu"
