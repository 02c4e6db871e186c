// gpu/step/experts_bf16.cu: one kernel a token of a mixture of experts, of bf16 weights.
#include "gpu/step/shapes.h"

STEP_EXPERTS(StepPlain)
