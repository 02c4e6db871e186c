/* model/quantize.h: makes a quantised model of another one, for `qwen3 --quantize` and `train_lora --merge-as`.

   The file is in a form that others have: INT4 as AWQ's packed words, FP8 as Qwen's own FP8 models, INT8 as export.py
   --int8 writes it. Embedding and head become INT8, or stay as they are.
*/
#pragma once
#include "model/model_file.h"
#include "model/quantize_matrix.h"
#include "model/write.h"
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

struct Quantization {
    Format format = Format::PLAIN;
    int group = 0;                // INT4: 32, 64 or 128
    bool keep_embedding = false;  // and head
    std::vector<int> text;        // calibration; none: to the nearest
    int window = 512;             // tokens
    size_t most_windows = 128;
    std::function<void(size_t done, size_t all, int layer)> progress = [](size_t, size_t, int) {};

    size_t windows() const { return std::min(most_windows, text.size() / (size_t)window); }
    size_t group_of() const { return format == Format::INT4 ? (size_t)group : format == Format::INT8 ? GROUP : 128; }
    // config.json's quantization_config as others write it; "": the format is ours alone.
    std::string config() const;
};

// Throws Error if a format cannot hold the model's shapes.
void check_groups(const ModelFile& file, const Quantization& how);

// H += X^T X, as calibration adds up the activations X (tokens,in). Its numbers are float: sums of products of a window's
// tokens, then of the windows.
template <class T> void add_squares(Context& ctx, acc<T>* H, const T* X, int tokens, int in);

// Experts of all layers by the calibration's tokens. A matrix with fewer tokens than columns is rounded to the nearest:
// its rounding errors would be moved to directions that no token shows, and other texts have them.
struct RoundedExperts {
    int all = 0, some = 0; // some: at least one of the matrices is rounded
    int unreached = 0;     // without any token
};

// The tensors of the quantised model, those with the widest numbers first, so that all are aligned. report: of a
// calibrated mixture of experts.
template <class T>
std::vector<OutTensor> quantize_model(const ModelFile& file, const Quantization& how, const Context& ctx,
                                      RoundedExperts* report = nullptr);

// The config's text with a quantization_config.
std::string quantized_config(const ModelFile& file, const Quantization& how);
