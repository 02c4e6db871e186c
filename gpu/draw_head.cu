// gpu/draw_head.cu: compiles the head's product for draws of qwen3.cu, section 12.
#define QWEN3_PART PART_DRAW_HEAD
#include "qwen3.cu"
