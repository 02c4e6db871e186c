// gpu/step/experts_int4_128.cu: one kernel a token of a mixture of experts, of INT4, groups of 128 weights.
#include "gpu/step/shapes.h"

STEP_EXPERTS(StepPacked<PackedInt4<1>, 1>)
