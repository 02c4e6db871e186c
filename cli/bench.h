// cli/bench.h: --bench, what this machine does, and what it could.
#pragma once
#include "cli/options.h"
#include "model/loaded.h"

namespace cli {

// --bench: prompts, and decoding at several positions, on this model and device.
void bench(const Options& o, const LoadedModel& model);

} // namespace cli
