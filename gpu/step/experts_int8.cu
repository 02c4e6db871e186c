// gpu/step/experts_int8.cu: one kernel a token of a mixture of experts, of INT8 weights.
#include "gpu/step/shapes.h"

STEP_EXPERTS(StepPacked<PackedInt8, 2>)
