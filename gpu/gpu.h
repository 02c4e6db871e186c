// gpu/gpu.h: all of Book II behind its small kernels.
#pragma once
#include "gpu/products.h"
#include "gpu/packed/packed.h"
#include "gpu/product_launch.h"
#include "gpu/attention.h"
#include "gpu/draws.h"
