// gpu/step/shapes_int8.cu: one kernel a token, of INT8 weights.
#include "gpu/step/shapes.h"

STEP_SHAPE(1, StepPacked<PackedInt8, 2>)
STEP_PACKING(StepPacked<PackedInt8, 2>)
