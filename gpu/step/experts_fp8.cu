// gpu/step/experts_fp8.cu: one kernel a token of a mixture of experts, of FP8 weights.
#include "gpu/step/shapes.h"

STEP_EXPERTS(StepPacked<PackedFp8, 1>)
