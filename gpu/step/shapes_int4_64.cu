// gpu/step/shapes_int4_64.cu: one kernel a token, of INT4 weights in groups of 64.
#include "gpu/step/shapes.h"

STEP_SHAPE(1, StepPacked<PackedInt4<1>, 2>)
STEP_PACKING(StepPacked<PackedInt4<1>, 2>)
