// gpu/step/shapes_fp8.cu: one kernel a token, of FP8 weights.
#include "gpu/step/shapes.h"

STEP_SHAPE(1, StepPacked<PackedFp8, 1>)
STEP_PACKING(StepPacked<PackedFp8, 1>)
