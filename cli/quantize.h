// cli/quantize.h: --quantize, the model in fewer bits.
#pragma once
#include "cli/options.h"

namespace cli {

// asks_more: the options want something else of the model, too.
int quantize(const Options& o, bool asks_more);

} // namespace cli
