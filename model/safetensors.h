// model/safetensors.h: files of tensors, read and written.
// https://huggingface.co/docs/safetensors: 8 bytes, the length of the header (little-endian); the header, a JSON object
// {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ..}; the tensors' bytes, in which offsets
// count from 0. "__metadata__" is no tensor but an object of strings.

#pragma once
#include "base/file.h"
#include "model/quantized.h"
#include "sj.h"
#include <map>
#include <set>

using Metadata = std::map<std::string, std::string>;

// ---- Read

// Adds the tensors of a safetensors file to `out` and its __metadata__ to `metadata`. Accepts what the reference
// implementation accepts: a header of at most 100 MB that is a UTF-8 JSON object; for every tensor begin <= end and
// end - begin = its shape times the size of its type; together the tensors cover the data without hole or overlap.
void read_safetensors(const MappedFile& map, Tensors& out, Metadata& metadata);

// ---- Write

// A tensor to be written; `write` writes its bytes when they are due.
struct OutTensor {
    std::string name;
    const char* dtype; // as safetensors writes it
    Shape shape;
    std::function<void(OutputFile&)> write;
    size_t bytes() const { return dtype_named(dtype)->size * count_of(shape); }
};

// The tensors, in this order. Returns the bytes of the file.
size_t write_safetensors(const std::string& path, const Metadata& metadata,
                         const std::vector<OutTensor>& tensors);
