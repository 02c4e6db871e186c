// gpu/compile/attention_decode.cu: compiles attention of sequences of one new token of qwen3.cu, section 11.
#define PART_DECODE 1
#include "qwen3.cu"
