// gpu/step/shapes_bf16_2.cu: one kernel a token, of bf16 weights, for up to 2 tokens.
#include "gpu/step/shapes.h"

STEP_SHAPE(2, StepPlain)
