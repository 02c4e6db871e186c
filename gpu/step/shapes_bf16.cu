// gpu/step/shapes_bf16.cu: one kernel a token, of bf16 weights.
#include "gpu/step/shapes.h"

STEP_SHAPE(1, StepPlain)
STEP_PACKING(StepPlain)
