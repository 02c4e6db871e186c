// gpu/draws.cu: compiles the sampler of qwen3.cu, section 12.
#define QWEN3_PART PART_DRAWS
#include "qwen3.cu"
