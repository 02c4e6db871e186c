// run.h: runs a server or a batch, from its options to its end.
#pragma once
#include "model/model_file.h"
#include "server/options.h"
#include <atomic>

namespace server {

inline std::atomic<bool> loading{true}; // a signal exits at once

// Serves, or answers the batch, until a signal. T: the type that the model computes in. start: of the program, in
// seconds(). Returns the exit status.
template <class T> int serve(Options& o, const ModelFile& file, double start);

} // namespace server
