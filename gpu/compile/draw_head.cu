// gpu/compile/draw_head.cu: compiles the head's product for draws of qwen3.cu, section 12.
#define PART_DRAW_HEAD 1
#include "gpu/optional_products.h"
#include "qwen3.cu"
