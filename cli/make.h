// cli/make.h: --synthesize, --convert, --convert-adapter: writes model files.
#pragma once
#include "cli/options.h"
#include <cstdint>
#include <string>

namespace cli {

// --synthesize: a checkpoint of a real shape with seeded random weights, so that speed can be measured without
// a download. SHAPE is a size by name or a config.json. Matrices are drawn with standard deviation 0.02, norms
// around 1; stored as bf16, or float32 if the config says so.
void synthesize(const std::string& shape, const std::string& path, uint64_t seed, bool overwrite);

// --convert: writes any readable model as one model.bin, or as GGUF to a path that ends in .gguf.
void convert(const Options& o, bool asks_more);
// --convert-adapter: writes the adapter of --adapter as GGUF.
void convert_adapter(const Options& o, bool asks_more);

} // namespace cli
