// gpu/gpu.h: every header of Book II, for sources that instantiate its templates.
#pragma once
#include "qwen3.cu"
#include "gpu/attention/hopper.h"
#include "gpu/backward/hopper.h"
#include "gpu/backward/lora_up.h"
#include "gpu/device.h"
#include "gpu/draw_ahead.h"
#include "gpu/packed/unpack.h"
#include "gpu/optional.h"
#include "gpu/step/formats.h"
#include "gpu/step/step.h"
#include "gpu/upload.h"
