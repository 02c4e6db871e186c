// gpu/gpu.h: every header of Book II, for sources that instantiate its templates.
#pragma once
#include "qwen3.cu"
#include "gpu/attention/hopper.h"
#include "gpu/backward/hopper.h"
#include "gpu/backward/lora_up.h"
#include "model/device.h"
#include "model/draw_ahead.h"
#include "gpu/packed/unpack.h"
#include "gpu/optional.h"
#include "gpu/step/formats.h"
#include "gpu/step/step.h"
#include "model/upload.h"
