// run.h: runs a server or a batch, from its options to its end.
#pragma once
#include "model/model_file.h"
#include "server/options.h"
#include <atomic>
#include <string>

struct AdapterFile;
struct Documents;
struct Tokenizer;

namespace server {

inline std::atomic<bool> loading{true}; // a signal exits at once

// Serves, or answers the batch, until a signal. T: the type that the model computes in. start: of the program, in
// seconds(). Returns the exit status.
template <class T> int serve(Options& o, const ModelFile& file, double start);

// Everything the answers of a batch depend on, except the adapters that its requests name: a JSON object. (The model's
// hash covers --rope-scaling, that of the documents their options.) test_serve lists every option under it or not.
std::string batch_depends(const Options& o, const ModelFile& file, const AdapterFile* adapter,
                          const Tokenizer& tokenizer, const Documents* documents);

} // namespace server
