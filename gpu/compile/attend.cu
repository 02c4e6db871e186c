// gpu/compile/attend.cu: compiles attend of qwen3.cu, section 11.
#define PART_ATTEND 1
#include "qwen3.cu"
