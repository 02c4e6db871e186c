// model/options.h: the options that all programs around a model have, and the files they name.
#pragma once
#include "base/options.h"
#include "model/adapters.h"
#include "model/model_file.h"
#include "model/tokenizer.h"
#include "qwen3.cu"
#include <string>
#include <vector>

struct ModelOptions {
    std::string model, tokenizer, device, dtype, adapter, kv_dtype, activations;
    int threads = 0; // 0: all
    int gpu = 0;     // which one of this host
    bool invariant = false, help = false;
    std::string rope_scaling; // "": the config's own
    double rope_scale = 0;
    int rope_original = 0;
    bool packed = false; // on a GPU
    Context::OneKernel one_kernel = Context::WHERE_FASTER;

    void add_to(std::vector<Option>& table, bool inference);
    Option one_kernel_option(const char* what);
    void use_threads() const; // each thread has its own number
};

// ------------------------------------------------------------------------------------------------------ Files

// The model, with --rope-scaling.
ModelFile open_model(const ModelOptions& o);
// tokenizer.bin: the given path, or beside the model, beside the program, in the working folder. "": none was found.
std::string find_tokenizer(const std::string& named, const std::string& model);
std::string tokenizer_beside(const std::string& model); // "": there is none
// The same; throws Error if there is none.
std::string tokenizer_path(const ModelOptions& o);
// Rows are padded up (151,669 ids, 151,936 rows); another model's tokenizer differs by much more. A GGUF file's own
// tokenizer and a folder's tokenizer.json must be equal, except for added tokens.
bool fits(const std::string& path, const ModelFile& file);
// Whether the ids of two models are those of this tokenizer.bin, and of the other's own beside it.
bool same_ids(const std::string& path, const ModelFile& model, const ModelFile& other);
// A tokenizer.bin with the ids that the model has rows for, further added tokens of the model's own tokenizer.json, and
// its chat template's style. Throws Error if it is not the model's.
Tokenizer tokenizer_of(const std::string& path, const ModelFile& file);
// A message if conversations differ from the model's own chat template; "": they do not.
std::string template_note(const ModelFile& file, const Tokenizer& t);

// If the model is an adapter's folder, as written by train_lora: its base model and the adapter.
void open_adapter(ModelOptions& o);
// Describes an adapter's effect on a model: its matrices, and their scaling.
uint64_t adapter_hash(const AdapterFile& a, uint64_t seed);
