/* model/model_file.h: a model's files, opened and checked.

   A model is a Hugging Face folder (config.json, generation_config.json, model.safetensors or an index and its shards),
   or a model.bin: one safetensors file of the same tensors, whose __metadata__ holds the two configs as texts; or a
   GGUF file (gguf.h). Its matrices may be quantised (quantized.h).

   Files are not trusted: every type, shape, offset and setting is checked before it is used. A fault is thrown as
   Error: one line that names the file.
*/
#pragma once
#include "model/gguf.h"
#include "model/safetensors.h"
#include "model/tensors.h"

// Experts of a token, of which kernels keep a list; and of a whole model, each of which has three tensors.
constexpr int MOST_CHOSEN = 32, MOST_EXPERTS = 1 << 16;

// Reads config.json (or its text in model.bin). Every key that changes the computation is either read or must have the
// one value that this program computes; keys of training and bookkeeping are ignored.
Config parse_config(const std::string& file, std::string_view text, std::string_view generation_text);

// The __metadata__ of a model.bin.
Metadata model_metadata(const std::string& config_text, const std::string& generation_text,
                        const std::string& chat_template = "");

// Starters are questions that a model can answer: a chat begins by offering them. The __metadata__ of its safetensors
// file, or of an adapter's, holds them as a JSON list, "starters".
using Starters = std::vector<std::string>;
void check_starters(const std::string& where, const Starters& starters); // an option or a file
Starters read_starters(const std::string& file, const Metadata& metadata); // none there: none
void add_starters(Metadata& metadata, const Starters& starters);

// The files of a model, mapped. The config is checked; tensors are found by name, and checked when they are loaded.
struct ModelFile {
    std::string path;
    std::vector<MappedFile> maps;
    Tensors tensors;
    Config config;
    std::string config_text, generation_text;   // the first without quantization_config
    std::string chat_template;                  // Jinja, as the files have it; "": they have none
    Starters starters;
    std::unique_ptr<GgufVocabulary> vocabulary; // of a GGUF file
    bool logits = true; // false: only its hidden states are used, and a bare model without a head is accepted
    bool bare = false;  // a Qwen3Model, which need not have a head

    static bool exists(const std::string& f) { return access(f.c_str(), F_OK) == 0; }
    // The path is that of a folder with a model in it.
    static bool in_folder(const std::string& p) { return exists(p + "/config.json") || exists(p + "/model.bin"); }

    // path: a model.bin, a GGUF file, a Hugging Face folder, or a folder with a model.bin (and no Hugging Face model).
    explicit ModelFile(const std::string& p);

    // The checkpoint's own type is its embedding's. (F16 is read as bf16.)
    bool is_int8() const { return embedding_type() == Dtype::I8; } // (with a quantization_config it is Packed)
    bool is_quantized() const {
        return std::any_of(tensors.begin(), tensors.end(), [](auto& t) { return t.second.is_quantized(); });
    }
    bool is_fp8() const;
    bool is_float32() const { return embedding_type() == Dtype::F32; }
    bool is_float16() const { return embedding_type() == Dtype::F16; }

    // The __metadata__ of a model.bin made of this model, with this config.
    Metadata metadata(const std::string& with_config) const;

    // How the file's own tokenizer differs from t; "": no difference, or the file has none.
    std::string difference(const Tokenizer& t) const { return vocabulary ? vocabulary->difference(t) : ""; }

    // Changes the config, and its text: --rope-scaling. original: positions of training; 0: the config's.
    void scale_rope(const std::string& type, double factor, int original);

    // Names this config and these weights. It reads only 16 samples of 256 bytes of each tensor, evenly spread (2 of a
    // mixture of experts): this takes milliseconds, and is enough, since training moves every number. Models that
    // differ only between the samples have the same hash.
    uint64_t hash() const;

  private:
    // chat_template.jinja, or tokenizer_config.json's chat_template, of which there may be several with names.
    void read_chat_template();
    void open_one(const std::string& file);
    void open_gguf();
    // Reads quantization_config and removes it from the config's text: models written from these weights are not
    // quantised.
    std::optional<QuantizationConfig> take_quantization(const std::string& file);
    void finish(const std::optional<QuantizationConfig>& quantization);
    // Qwen3 has no biases. AutoGPTQ writes zeros.
    void drop_biases();
    // A tensor of weights or biases without a place in the config would change the computation: a layer past the number
    // of layers, a separate head where the embedding is tied, a part of another architecture.
    void check_superfluous() const;
    // A bare Qwen3Model, as Qwen3-Embedding is published, has no "model." before its tensors' names.
    void name_as_usual();
    // transformers 5 and GGUF keep the matrices of all experts of a layer in one tensor: it becomes a tensor for each.
    void cut_experts();
    Dtype embedding_type() const;
    void add(const std::string& file, Metadata& metadata);
    // model.safetensors.index.json: {"weight_map": {"TENSOR": "FILE", ..}}; the files are in the same folder.
    void add_shards(const std::string& file, Metadata& metadata);
};
