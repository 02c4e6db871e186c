// run.h: a server, or a batch, from its options to its end.
#pragma once
#include "model/model_file.h"
#include "server/options.h"
#include <atomic>

namespace server {

inline std::atomic<bool> loading{true}; // a signal ends all at once

// Serves, or answers the batch, until a signal comes. T: what the model computes in. start: of the program, as
// seconds() has it. Returns the exit status.
template <class T> int serve(Options& o, const ModelFile& file, double start);

} // namespace server
