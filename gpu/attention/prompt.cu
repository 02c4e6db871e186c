// gpu/attention/prompt.cu: compiles attention of qwen3.cu, section 11.
#define QWEN3_PART PART_PROMPT
#include "qwen3.cu"
