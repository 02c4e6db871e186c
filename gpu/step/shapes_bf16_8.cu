// gpu/step/shapes_bf16_8.cu: one kernel a token, of bf16 weights, for up to 8 tokens.
#include "gpu/step/shapes.h"

STEP_SHAPE(8, StepPlain)
