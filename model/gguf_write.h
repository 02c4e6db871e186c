/* model/gguf_write.h: models and adapters written as GGUF, with the names, keys and types of llama.cpp's converters.

   Matrices keep their numbers where GGUF has a type for them:
       F32, F16, BF16, GGUF's blocks    the same bytes
       INT8                             Q8_0: scales become halves, which most bf16 scales are
       INT4 (AWQ, GPTQ, see kept_as)    Q4_0 if all zero points are 8; else Q4_1, whose offset -zero * scale is rounded
                                        to a half
   A group of more than 32 columns becomes several blocks with the same scale. Matrices of other formats, and of rows
   that are not whole blocks, become BF16. Vectors become F32, which is exact.
*/
#pragma once
#include "model/adapters.h"
#include "model/gguf.h"

struct GgufWritten {
    size_t bytes = 0;               // of the file
    std::string types;              // "197 x Q8_0, 113 x F32"
    std::vector<std::string> notes; // a line for each loss: numbers that differ from the model's
};

// Writes the model with its tokenizer and its chat template (if it has none: QWEN3_JINJA). Throws Error if the model
// has what GGUF cannot hold, or if the file cannot be written.
GgufWritten write_gguf(const ModelFile& file, const Tokenizer& tokenizer, const std::string& path);

// Writes the adapter, in the types that it is stored in. llama.cpp scales it by alpha / rank: with use_rslora alpha is
// changed so that the scale is the same.
GgufWritten write_gguf_adapter(const AdapterFile& adapter, const Config& c, const std::string& path);
