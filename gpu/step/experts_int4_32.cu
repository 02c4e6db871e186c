// gpu/step/experts_int4_32.cu: one kernel a token of a mixture of experts, of INT4 weights in groups of 32.
#include "gpu/step/shapes.h"

STEP_EXPERTS(StepPacked<PackedInt4<1>, 4>)
