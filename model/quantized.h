/* model/quantized.h: how files store matrices, and what each format means. safetensors.h finds these tensors in a
   folder's files, gguf.h in a GGUF file.

   A quantised matrix is one Tensor like any other, whatever it is stored as: number(t, i) is its definition, and
   read_tile() reads many numbers at once. So all that loads, merges or converts a model takes them without knowing how.
   A CPU computes on some of them as they are (section 7); else they are made bf16 or float when a model is loaded.

   Contents    1 Number types    2 Tensor    3 Blocks: GGUF's formats, blocks.h    4 Packed: those of Hugging Face's folders
               5 Any tensor's numbers    6 quantization_config: which tensors a packed matrix is made of
               7 Kept: the formats that Linear has too
*/
#pragma once
#include "qwen3.cu"
#include "sj.h"
#include <atomic>
#include <map>
#include <memory>
#include <set>

// =================================================================================================== 1 Number types

struct DtypeName {
    const char* name; // as safetensors writes it
    size_t size;      // bytes of a number
    Dtype dtype;
};
// Null: there is no such type.
const DtypeName* dtype_named(std::string_view name);

// ========================================================================================================= 2 Tensor

using Shape = std::vector<int64_t>;
struct Packed; // section 4

struct Tensor {
    std::string file; // that holds it, for messages
    Dtype dtype = Dtype::Other;
    Shape shape;
    const uint8_t* data = nullptr; // at any address, also an odd one
    size_t bytes = 0;
    std::shared_ptr<const Packed> packed = nullptr; // with Dtype::Packed

    bool is_plain() const { return dtype == Dtype::BF16 || dtype == Dtype::F16 || dtype == Dtype::F32; }
    bool is_quantized() const { return dtype >= Dtype::Q4_0; }
    bool is_float() const { return is_plain() || is_quantized(); } // has numbers that can be read
};
using Tensors = std::map<std::string, Tensor>;

// Number i of a BF16, F16 or F32 tensor.
inline float plain_number(const Tensor& t, size_t i) {
    if (t.dtype == Dtype::F32) return load_as<float>(t.data + 4 * i);
    const uint16_t h = load_as<uint16_t>(t.data + 2 * i);
    return t.dtype == Dtype::F16 ? half_to_float(h) : to_acc(bf16{h});
}

std::string text_of(const Shape& shape);

size_t count_of(const Shape& shape);

// Throws unless the tensor has that shape.
void need_shape(const std::string& name, const Tensor& t, const Shape& shape);

// ========================================================================================================= 4 Packed
// A matrix W (rows, in) of several tensors of a safetensors file:
//     W[r][k] = (q - zero) * scale
// where groups of columns share zero and scale (FP8: blocks of rows and columns, without zero).
//
// INT8   NAME.weight (rows, in) of signed bytes, NAME.weight_scale (rows, groups) of bf16; our own
// FP8    NAME.weight (rows, in) of e4m3; NAME.weight_scale_inv (blocks of rows, blocks of columns)
// AWQ    NAME.qweight (in, rows / 8), NAME.qzeros (groups, rows / 8): words of 8 numbers of 4 bits, of which the first
//        four are rows 0, 2, 4, 6 of the eight, then 1, 3, 5, 7; NAME.scales (groups, rows)
// GPTQ   NAME.qweight (in * bits / 32, rows): words of columns, in their order; NAME.qzeros (groups, rows * bits / 32):
//        words of rows, of zero - 1 in the first version of the format; NAME.scales (groups, rows); NAME.g_idx (in) the
//        group of each column, which may be any, where columns were quantised in the order of their weight
// q - zero has 9 bits at most, so that its product with a half or a bf16 is exact in a float.
enum class Method { FP8, AWQ, GPTQ, INT8 };

struct Packed {
    Method method;
    size_t rows, in;
    size_t group, group_rows; // columns that share a scale; FP8: and rows
    int bits = 8, zero_offset = 0;
    Tensor q, scales, zeros, order; // order: GPTQ's g_idx

    template <Method M> float at(size_t r, size_t k) const {
        if (M == Method::FP8)
            return e4m3_to_float(q.data[r * in + k]) *
                   plain_number(scales, r / group_rows * ((in + group - 1) / group) + k / group);
        if (M == Method::INT8)
            return (float)(int8_t)q.data[r * in + k] * plain_number(scales, r * ((in + group - 1) / group) + k / group);
        const size_t g = order.data ? word(order, k) : k / group;
        return (float)(value<M>(r, k) - zero<M>(r, g)) * plain_number(scales, g * rows + r);
    }
    // AWQ and GPTQ: q, and the zero point of group g.
    template <Method M> int value(size_t r, size_t k) const {
        if (M == Method::AWQ) return (int)(word(q, k * (rows / 8) + r / 8) >> awq_shift(r) & 15);
        const size_t n = 32 / (size_t)bits;
        return (int)(word(q, k / n * rows + r) >> k % n * bits & ((1u << bits) - 1));
    }
    template <Method M> int zero(size_t r, size_t g) const {
        if (M == Method::AWQ) return (int)(word(zeros, g * (rows / 8) + r / 8) >> awq_shift(r) & 15);
        const size_t n = 32 / (size_t)bits;
        return (int)(word(zeros, g * (rows / n) + r / n) >> r % n * bits & ((1u << bits) - 1)) + zero_offset;
    }
    static uint32_t word(const Tensor& t, size_t i) { return load_as<uint32_t>(t.data + 4 * i); }
    static int awq_shift(size_t r) { return (int)(r % 8 / 2 + r % 2 * 4) * 4; }
    // Calls f with the method as a constant.
    template <class F> void with_method(F f) const {
        if (method == Method::FP8) f(std::integral_constant<Method, Method::FP8>());
        else if (method == Method::INT8) f(std::integral_constant<Method, Method::INT8>());
        else if (method == Method::AWQ) f(std::integral_constant<Method, Method::AWQ>());
        else f(std::integral_constant<Method, Method::GPTQ>());
    }
};

// =========================================================================================== 5 Any tensor's numbers

// Number i of a tensor that has numbers (is_float), in any stored type: the definition.
float number(const Tensor& t, size_t i);

// A tile of a matrix: rows from r, columns from k on, a multiple of 256, so that it begins with a block.
struct Tile {
    static constexpr size_t ROWS = 64, COLUMNS = 256;
    size_t r, k, rows, columns; // up to ROWS and COLUMNS, or where the matrix ends
};

// out[COLUMNS * row + column] of the tile becomes the number.
void read_tile(float* __restrict out, const Tensor& t, const Tile& tile);

// Calls f(tile, numbers) for all tiles of the rows from `first` up to `end`, on all threads.
template <class F> void each_tile(const Tensor& t, size_t first, size_t end, F f) {
    const size_t in = t.shape.empty() ? 1 : (size_t)t.shape.back();
    const size_t across = (in + Tile::COLUMNS - 1) / Tile::COLUMNS, down = (end - first + Tile::ROWS - 1) / Tile::ROWS;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < down * across; i++) {
        Tile tile = {first + i / across * Tile::ROWS, i % across * Tile::COLUMNS, 0, 0};
        tile.rows = std::min(Tile::ROWS, end - tile.r), tile.columns = std::min(Tile::COLUMNS, in - tile.k);
        float numbers[Tile::ROWS * Tile::COLUMNS];
        read_tile(numbers, t, tile);
        f(tile, (const float*)numbers);
    }
}

// All numbers of a tensor, rounded to T. False if one is not finite, as T stores it.
template <class T> bool read_numbers(T* out, const Tensor& t);

// ================================================================================ 6 quantization_config of config.json

// The settings for matrices. The file shows which of them are packed; modules_to_not_convert lists the others.
struct QuantizationConfig {
    Method method;
    int bits = 8;
    size_t group = 0, group_rows = 0; // group 0: a whole row
    int zero_offset = 0;
    bool ordered = false; // GPTQ: only g_idx gives the group of a column
};

QuantizationConfig parse_quantization(const char* name, sj::Value j);

// Assembles packed matrices, each under the name NAME.weight; their parts are then no longer listed as tensors.
// Everything that reading a number relies on is checked: types, shapes, groups, zero points; and scales, which must be
// finite.
struct Packer {
    const std::string& model; // for messages
    Tensors& tensors;
    const QuantizationConfig& config;

    void run();
    // Our own INT8 among them, as --quantize writes embedding and head.
    void pack_bytes();

  private:
    Tensor take(const std::string& name);
    static void fault(const std::string& name, const Tensor& t, const std::string& what) {
        DIE("%s: tensor %s %s", t.file.c_str(), name.c_str(), what.c_str());
    }
    static void need(const std::string& name, const Tensor& t, bool type, const char* types, const Shape& shape);
    static void need_finite(const std::string& name, const Tensor& t);
    void put(const std::string& weight, const Packed& p);

    void pack_fp8(const std::string& name);

    void pack_int8(const std::string& name);

    void pack_words(const std::string& name);
};

// ============================================================================================================== 7 Kept
// A CPU computes on these as they are, with the file's numbers, bit for bit (Linear has the formats), or with the
// nearest bf16 where its products take bf16 (cpu/tiles.h): our own INT8; FP8 in blocks of whole groups of 32 columns;
// AWQ, GPTQ with 4 bits and Q4_0 as INT4; GGUF's other blocks, where they are mapped. Not kept is a matrix that these
// formats cannot hold: columns in another order (GPTQ's act order), other groups, scales that are not halves,
// non-finite numbers.

// The memory layout of a kept matrix: INT4's bytes differ from the file's; all others are the file's.
struct Kept {
    Format format = Format::PLAIN; // PLAIN: it is not kept
    int group = GROUP, group_rows = 1;
    bool zeros = false;            // INT4: else all are 8
};

inline bool is_half(float x) { return std::isfinite(x) && half_to_float(float_to_half(x)) == x; }

Kept kept_as(const Tensor& t);

// The numbers of a matrix that is kept as INT4, as Linear has them.
void read_pairs(int8_t* q,       // (rows, ceil(in / 64) * 32) out
                uint16_t* scale, // (rows, ceil(in / group)) out, halves
                uint8_t* zero,   // the same out, if there are zeros
                const Tensor& t, const Kept& kept);
