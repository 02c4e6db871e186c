// gpu/step/experts_int4_64.cu: one kernel a token of a mixture of experts, of INT4, groups of 64 weights.
#include "gpu/step/shapes.h"

STEP_EXPERTS(StepPacked<PackedInt4<1>, 2>)
