// gpu/gpu.h: every optional header, and the host code of a GPU in model/, for tests and benchmarks.
#pragma once
#include "gpu/attention/hopper.h"
#include "gpu/backward/hopper.h"
#include "gpu/backward/lora_up.h"
#include "gpu/optional_products.h"
#include "gpu/packed/unpack.h"
#include "gpu/step/formats.h"
#include "gpu/step/road.h"
#include "gpu/step/step.h"
#include "model/device.h"
#include "model/draw_ahead.h"
#include "model/upload.h"
#include "qwen3.cu"
