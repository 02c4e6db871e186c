// gpu/products/lora.cu: compiles the kernels of adapters of qwen3.cu, section 10 and 13.
#define QWEN3_PART PART_LORA
#include "qwen3.cu"
