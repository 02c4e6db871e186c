// gpu/compile/lora.cu: compiles the kernels of adapters of qwen3.cu, section 10 and 13.
#define PART_LORA 1
#include "qwen3.cu"
