// gpu/compile/draws.cu: compiles the sampler of qwen3.cu, section 12.
#define PART_DRAWS 1
#include "qwen3.cu"
