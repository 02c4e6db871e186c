// gpu/attention/attend.cu: compiles attend and scratch of qwen3.cu, section 11.
#define QWEN3_PART PART_ATTEND
#include "qwen3.cu"
