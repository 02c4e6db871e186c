// gpu/compile/attention_prompt.cu: compiles attention of qwen3.cu, section 11.
#define PART_PROMPT 1
#include "qwen3.cu"
