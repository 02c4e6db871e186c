// gpu/step/shapes_bf16_4.cu: one kernel a token, of bf16 weights, for up to 4 tokens.
#include "gpu/step/shapes.h"

STEP_SHAPE(4, StepPlain)
