// gpu/attention/decode.cu: compiles attention of sequences of one new token of qwen3.cu, section 11.
#define QWEN3_PART PART_DECODE
#include "qwen3.cu"
