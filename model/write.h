// model/write.h: models written: converted, or merged with an adapter. A file is complete or not there (OutputFile).
#pragma once
#include "model/adapters.h"

// The type in which a tensor of a model is written: its own, or BF16 if it is quantised.
const char* written_type(const std::string& name, const Tensor& t);
void write_tensor(OutputFile& out, const std::string& name, const Tensor& t);

// The file's tensors; our own INT8 matrices are listed as packed ones, whose numbers can be read.
Tensors readable_tensors(const ModelFile& file);

// Writes the model as one model.bin, in the order of the layers' work; quantised tensors as bf16. Returns its bytes.
size_t write_model(const ModelFile& file, const std::string& path);

// Writes the model with the adapter merged into it: a model.bin if the path ends in .bin, else a Hugging Face folder,
// with copies of the base folder's tokenizer files for other programs. Tensors without an adapter keep their bytes, or
// become bf16 if they are quantised.
void write_merged(const ModelFile& file, const AdapterFile& adapter, const std::string& path);
