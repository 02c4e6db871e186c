// cli/quantize.h: --quantize, the model in fewer bits.
#pragma once
#include "cli/options.h"

namespace cli {

// asks_more: the options also request another operation on the model.
int quantize(const Options& o, bool asks_more);

} // namespace cli
