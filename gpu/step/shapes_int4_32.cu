// gpu/step/shapes_int4_32.cu: one kernel a token, of INT4 weights in groups of 32.
#include "gpu/step/shapes.h"

STEP_SHAPE(1, StepPacked<PackedInt4<1>, 4>)
STEP_PACKING(StepPacked<PackedInt4<1>, 4>)
