// cli/bench.h: --bench, this machine's speed beside its ceilings.
#pragma once
#include "cli/options.h"
#include "model/loaded.h"

namespace cli {

// --bench: prompts, and decoding at several positions, on this model and device.
void bench(const Options& o, const LoadedModel& model);

} // namespace cli
