// model/quantized.cpp: numbers of tensors, and matrices assembled from several tensors; see quantized.h.
#include "model/quantized.h"
#include "model/blocks.h"

static_assert(Tile::COLUMNS % LONGEST_BLOCK == 0);

const DtypeName* dtype_named(std::string_view name) {
    static const DtypeName table[] = {
        {"BF16", 2, Dtype::BF16}, {"F16", 2, Dtype::F16}, {"F32", 4, Dtype::F32}, {"I8", 1, Dtype::I8},
        {"F8_E4M3", 1, Dtype::F8}, {"I32", 4, Dtype::I32},
        {"F64", 8, Dtype::Other}, {"I64", 8, Dtype::Other}, {"U64", 8, Dtype::Other}, {"U32", 4, Dtype::Other},
        {"I16", 2, Dtype::Other}, {"U16", 2, Dtype::Other}, {"U8", 1, Dtype::Other}, {"BOOL", 1, Dtype::Other},
        {"F8_E5M2", 1, Dtype::Other}};
    for (const DtypeName& row : table)
        if (name == row.name) return &row;
    return nullptr;
}

std::string text_of(const Shape& shape) {
    std::string s;
    for (int64_t d : shape) s += format("%s%lld", s.empty() ? "" : ",", (long long)d);
    return s;
}

size_t count_of(const Shape& shape) { // of its numbers
    size_t n = 1;
    for (int64_t d : shape) n *= (size_t)d;
    return n;
}

void need_shape(const std::string& name, const Tensor& t, const Shape& shape) {
    if (t.shape != shape)
        DIE("%s: tensor %s is (%s), the config needs (%s)", t.file.c_str(), name.c_str(), text_of(t.shape).c_str(),
            text_of(shape).c_str());
}

float block_number(Dtype type, const uint8_t* row, size_t i) {
    return with_block(type, [&](auto* block) {
        using Block = BLOCK_TYPE(block);
        constexpr int size = Block::COUNT / Block::GROUPS;
        const int at = (int)(i % Block::COUNT);
        return block_number(Block{row + i / Block::COUNT * Block::BYTES}, at / size, at % size);
    });
}

size_t block_row_bytes(Dtype type, size_t in) {
    return with_block(type, [&](auto* block) { return in / BLOCK_TYPE(block)::COUNT * BLOCK_TYPE(block)::BYTES; });
}

const char* block_name(Dtype type) {
    return with_block(type, [&](auto* block) { return BLOCK_TYPE(block)::NAME; });
}

float number(const Tensor& t, size_t i) {
    if (t.is_plain()) return plain_number(t, i);
    if (!t.packed) return block_number(t.dtype, t.data, i); // (a row is whole blocks)
    float f = 0;
    t.packed->with_method([&](auto method) { f = t.packed->at<method>(i / t.packed->in, i % t.packed->in); });
    return f;
}

void read_tile(float* __restrict out, const Tensor& t, const Tile& tile) {
    const size_t in = (size_t)t.shape.back();
    auto each = [&](auto at) {
        for (size_t r = 0; r < tile.rows; r++)
            for (size_t k = 0; k < tile.columns; k++) out[r * Tile::COLUMNS + k] = at(tile.r + r, tile.k + k);
    };
    if (t.packed)
        return t.packed->with_method([&](auto method) {
            each([&](size_t r, size_t k) { return t.packed->at<method>(r, k); });
        });
    if (t.is_plain()) return each([&](size_t r, size_t k) { return plain_number(t, r * in + k); });
    with_block(t.dtype, [&](auto* type) {
        using Block = BLOCK_TYPE(type);
        constexpr int count = Block::COUNT, size = count / Block::GROUPS;
        for (size_t r = 0; r < tile.rows; r++)
            for (size_t k = 0; k < tile.columns; k += count) {
                const Block block{t.data + ((tile.r + r) * in + tile.k + k) / count * Block::BYTES};
                float* to = out + r * Tile::COLUMNS + k;
                for (int g = 0; g < Block::GROUPS; g++)
                    for (int i = 0; i < size; i++) to[g * size + i] = block_number(block, g, i);
            }
    });
}

// Keys that change no number, or that the tensors show: the method of quantisation, the programs meant to load it.
static bool is_quantization_bookkeeping(const std::string& key) {
    static const std::set<std::string> keys = {
        "act_group_aware", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
        "damp_percent", "dataset", "dequantize", "disable_exllama", "do_fuse", "exllama_config", "expert_dtype",
        "fuse_max_seq_len", "gptaq", "ignored_layers", "lm_head", "max_input_length", "meta", "model_file_base_name",
        "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
        "modules_to_convert", "modules_to_fuse", "modules_to_not_convert", "mse", "pad_token_id", "parallel_packing",
        "quant_method", "quantizer", "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16",
        "use_exllama", "v2", "v2_alpha",
        // AutoRound's
        "amp", "autoround_version", "dynamic_max_gap", "enable_adam", "enable_alg_ext", "enable_minmax_tuning",
        "enable_norm_bias_tuning", "enable_quanted_input", "enable_torch_compile", "gradient_accumulate_steps", "iters",
        "low_cpu_mem_usage", "low_gpu_mem_usage", "lr", "minmax_lr", "model_free", "momentum", "not_use_best_mse",
        "nsamples", "provider", "quant_block_list", "scale_dtype", "seed", "seqlen", "supported_types",
        "to_quant_block_names"};
    return keys.count(key);
}

QuantizationConfig parse_quantization(const char* name, sj::Value j) {
    auto refuse = [&](const char* key) {
        DIE("%s: quantization_config has %s = %.60s, which is not supported", name, key,
            j[key] ? std::string(j[key].raw()).c_str() : "missing");
    };
    // A string whose case is ignored; missing: the first.
    auto one_of = [&](const char* key, std::initializer_list<const char*> values) {
        const std::string s = j[key] && !j[key].is(sj::Null) ? j[key].str() : *values.begin();
        for (const char* v : values)
            if (strcasecmp(s.c_str(), v) == 0) return std::string(v);
        return refuse(key), s;
    };
    auto off = [](sj::Value v) {
        return !v || v.is(sj::Null) || v.is(sj::False) || (v.is(sj::String) && v.str().empty()) ||
               (v.is_container() && v.size() == 0);
    };
    // An unknown key may change the computation: it must be off.
    auto only = [&](const std::set<std::string>& read) {
        for (auto [key, v] : j.members())
            if (!read.count(key) && !is_quantization_bookkeeping(key) && !off(v)) refuse(key.c_str());
    };
    auto integer = [&](const char* key, sj::Value v, int64_t low, int64_t high) {
        int64_t n = 0;
        if (!v.integer(&n) || n < low || n > high)
            DIE("%s: quantization_config: %s is not a whole number from %lld to %lld", name, key, (long long)low,
                (long long)high);
        return n;
    };
    if (!j.is(sj::Object)) DIE("%s: quantization_config is not a JSON object", name);
    QuantizationConfig q;
    std::string method = j["quant_method"].str();
    if (method == "fp8") {
        q.method = Method::FP8;
        only({"fmt", "activation_scheme", "weight_block_size", "scale_fmt"});
        one_of("fmt", {"e4m3"});
        one_of("scale_fmt", {"float"});
        one_of("activation_scheme", {"dynamic"}); // activations stay bf16 here
        const sj::Value block = j["weight_block_size"];
        if (!block.is(sj::Array) || block.size() != 2) refuse("weight_block_size");
        q.group_rows = (size_t)integer("weight_block_size", block[(size_t)0], 1, 1 << 20);
        q.group = (size_t)integer("weight_block_size", block[1], 1, 1 << 20);
        return q;
    }
    if (method == "auto-round") method = one_of("packing_format", {"", "auto_round:auto_gptq", "auto_round:auto_awq"});
    const size_t packing = method.find(":auto_");
    if (packing != method.npos) method.erase(0, packing + strlen(":auto_"));
    if (method != "awq" && method != "gptq")
        DIE("%s: quantization_config has quant_method = %.60s; fp8, awq and gptq are read", name,
            j["quant_method"] ? std::string(j["quant_method"].raw()).c_str() : "missing");
    const int64_t bits = integer("bits", j["bits"], 1, 16), group = integer("group_size", j["group_size"], -1, 1 << 20);
    q.bits = (int)bits, q.group = (size_t)std::max<int64_t>(group, 0);
    if (group == 0) refuse("group_size");
    one_of("pack_dtype", {"int32"});
    one_of("data_type", {"int"});
    one_of("method", {method.c_str()});
    // Matrices of 16 bits or more, and activations, are not quantised.
    auto at_least_16 = [](sj::Value v) { int64_t n; return v.integer(&n) && n >= 16; };
    if (!off(j["act_bits"]) && !at_least_16(j["act_bits"])) refuse("act_bits");
    for (auto [module, settings] : j["extra_config"].members())
        if (!at_least_16(settings["bits"])) refuse("extra_config");
    std::set<std::string> read = {"bits", "group_size", "pack_dtype", "data_type", "method", "format",
                                  "checkpoint_format", "backend", "packing_format", "act_bits", "extra_config"};
    if (method == "awq") {
        q.method = Method::AWQ;
        read.insert({"version", "zero_point"});
        only(read);
        if (bits != 4) refuse("bits");
        for (const char* key : {"version", "format", "checkpoint_format"}) one_of(key, {"gemm"});
        if (j["backend"].str() == "llm-awq") refuse("backend"); // packs words in another order
        if (j["zero_point"] && !j["zero_point"].is(sj::True)) refuse("zero_point");
        return q;
    }
    q.method = Method::GPTQ;
    read.insert("desc_act");
    only(read);
    if (bits != 4 && bits != 8) refuse("bits");
    auto given = [&](const char* key) { return j[key] && !j[key].is(sj::Null); };
    const std::string now = one_of("format", {"gptq", "gptq_v2"}); // and its older name
    const std::string before = one_of("checkpoint_format", {"gptq", "gptq_v2"});
    if (given("format") && given("checkpoint_format") && now != before)
        DIE("%s: quantization_config: format and checkpoint_format differ", name);
    q.zero_offset = now == "gptq" && before == "gptq";
    q.ordered = !off(j["desc_act"]);
    return q;
}

void Packer::run() {
    std::vector<std::string> found;
    const std::string end = config.method == Method::FP8 ? ".weight" : ".qweight";
    for (auto& [name, t] : tensors)
        if (name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0 &&
            (config.method != Method::FP8 || t.dtype == Dtype::F8))
            found.push_back(name.substr(0, name.size() - end.size()));
    for (const std::string& name : found) config.method == Method::FP8 ? pack_fp8(name) : pack_words(name);
    pack_bytes();
}

void Packer::pack_bytes() {
    std::vector<std::string> bytes;
    for (auto& [name, t] : tensors)
        if (t.dtype == Dtype::I8 && t.shape.size() == 2 && tensors.count(name + "_scale"))
            bytes.push_back(name);
    for (const std::string& name : bytes) pack_int8(name);
}

Tensor Packer::take(const std::string& name) {
    const auto at = tensors.find(name);
    if (at == tensors.end()) DIE("%s: no tensor %s", model.c_str(), name.c_str());
    const Tensor t = at->second;
    tensors.erase(at);
    return t;
}

void Packer::need(const std::string& name, const Tensor& t, bool type, const char* types, const Shape& shape) {
    if (!type) fault(name, t, format("is not %s", types));
    if (t.shape != shape)
        fault(name, t, "is (" + text_of(t.shape) + "), its matrix needs (" + text_of(shape) + ")");
}

void Packer::need_finite(const std::string& name, const Tensor& t) {
    for (size_t i = 0; i < t.bytes / (t.dtype == Dtype::F32 ? 4 : 2); i++)
        if (!std::isfinite(plain_number(t, i))) fault(name, t, "has an infinity or a NaN");
}

void Packer::put(const std::string& weight, const Packed& p) {
    Tensor t;
    t.file = p.q.file, t.dtype = Dtype::Packed, t.shape = {(int64_t)p.rows, (int64_t)p.in};
    t.data = p.q.data, t.bytes = p.q.bytes, t.packed = std::make_shared<Packed>(p);
    if (!tensors.emplace(weight, t).second) fault(weight, t, "is there packed and not packed");
}

void Packer::pack_fp8(const std::string& name) {
    const std::string scale_name = name + ".weight_scale_inv";
    Packed p;
    p.method = Method::FP8, p.group = config.group, p.group_rows = config.group_rows;
    p.q = take(name + ".weight"), p.scales = take(scale_name);
    if (p.q.shape.size() != 2) fault(name + ".weight", p.q, "is no matrix");
    p.rows = (size_t)p.q.shape[0], p.in = (size_t)p.q.shape[1];
    auto blocks = [](size_t n, size_t size) { return (int64_t)((n + size - 1) / size); };
    need(scale_name, p.scales, p.scales.is_plain(), "BF16, F16 or F32",
         {blocks(p.rows, p.group_rows), blocks(p.in, p.group)});
    need_finite(scale_name, p.scales);
    put(name + ".weight", p);
}

void Packer::pack_int8(const std::string& name) {
    const std::string scale_name = name + "_scale";
    Packed p;
    p.method = Method::INT8, p.group = GROUP, p.group_rows = 1;
    p.q = take(name), p.scales = take(scale_name);
    p.rows = (size_t)p.q.shape[0], p.in = (size_t)p.q.shape[1];
    need(scale_name, p.scales, p.scales.dtype == Dtype::BF16 && (uintptr_t)p.scales.data % 2 == 0,
         "BF16 at an even address", {p.q.shape[0], (int64_t)((p.in + GROUP - 1) / GROUP)});
    need_finite(scale_name, p.scales);
    put(name, p);
}

void Packer::pack_words(const std::string& name) {
    const std::string scale_name = name + ".scales", zero_name = name + ".qzeros", order_name = name + ".g_idx";
    Packed p;
    p.method = config.method, p.bits = config.bits, p.zero_offset = config.zero_offset, p.group_rows = 1;
    p.q = take(name + ".qweight"), p.zeros = take(zero_name), p.scales = take(scale_name);
    const size_t n = 32 / (size_t)p.bits; // numbers of a word
    const bool awq = config.method == Method::AWQ;
    if (p.q.shape.size() != 2 || p.q.dtype != Dtype::I32) fault(name + ".qweight", p.q, "is no matrix of I32");
    p.rows = (size_t)p.q.shape[1] * (awq ? n : 1), p.in = (size_t)p.q.shape[0] * (awq ? 1 : n);
    p.group = config.group ? config.group : std::max<size_t>(p.in, 1);
    if (p.rows % n || (awq && p.in % p.group))
        fault(name + ".qweight", p.q, format("(%zu,%zu) is not in words of %zu numbers and groups of %zu", p.rows,
                                             p.in, n, p.group));
    const int64_t groups = (int64_t)((p.in + p.group - 1) / p.group);
    need(zero_name, p.zeros, p.zeros.dtype == Dtype::I32, "I32", {groups, (int64_t)(p.rows / n)});
    need(scale_name, p.scales, p.scales.is_plain(), "BF16, F16 or F32", {groups, (int64_t)p.rows});
    need_finite(scale_name, p.scales);
    for (size_t i = 0; p.zero_offset && i < p.zeros.bytes; i++) { // a byte is one zero point, or two
        const uint8_t b = p.zeros.data[i];
        if (p.bits == 8 ? b == 255 : b >> 4 == 15 || (b & 15) == 15)
            fault(zero_name, p.zeros, format("has a zero point of %d, beyond %d bits", 1 << p.bits, p.bits));
    }
    if (config.ordered || (!awq && tensors.count(order_name))) {
        p.order = take(order_name);
        need(order_name, p.order, p.order.dtype == Dtype::I32, "I32", {(int64_t)p.in});
        for (size_t k = 0; k < p.in; k++)
            if (load_as<uint32_t>(p.order.data + 4 * k) >= (uint64_t)groups)
                fault(order_name, p.order, format("has a group beyond the %lld there are", (long long)groups));
    }
    put(name + ".weight", p);
}

// Whether a tensor is in GGUF's blocks, and all their halves are finite.
static bool is_finite_blocks(const Tensor& t) {
    return with_block(t.dtype, [&](auto* type) {
        using Block = BLOCK_TYPE(type);
        bool finite = true;
        #pragma omp parallel for schedule(static) reduction(& : finite)
        for (size_t i = 0; i < t.bytes; i += Block::BYTES) {
            const Block block{t.data + i};
            finite &= std::isfinite(block.d(0));
            if constexpr (Block::OFFSET) finite &= std::isfinite(block.m(0));
        }
        return finite;
    });
}

Kept kept_as(const Tensor& t) {
    Kept k;
    const size_t in = (size_t)t.shape.back();
    auto whole = [&](size_t group) { return group % GROUP == 0 || group >= in; };
    if (!t.packed) {
        if (is_finite_blocks(t)) k.format = t.dtype == Dtype::Q4_0 ? Format::INT4 : Format::BLOCKS;
        return k;
    }
    const Packed* p = t.packed.get();
    if (!whole(p->group)) return {};
    if (p->method == Method::FP8) {
        for (size_t i = 0, n = count_of(p->scales.shape); i < n; i++)
            if (std::fabs(plain_number(p->scales, i)) > 0x1p100f) return {}; // (a product may be infinite)
        uint8_t nan = 0;
        #pragma omp parallel for schedule(static) reduction(| : nan)
        for (size_t i = 0; i < t.bytes; i++) nan |= (t.data[i] & 0x7f) == 0x7f;
        if (nan) return {};
        k.format = Format::FP8, k.group = (int)std::min(p->group, (in + GROUP - 1) / GROUP * GROUP);
        k.group_rows = (int)p->group_rows; // (also of fewer rows: equal to that of its neighbours)
        return k;
    }
    if (p->method == Method::INT8) return k.format = Format::INT8, k;
    if (p->bits != 4) return {};
    for (size_t i = 0; i < in && p->order.data; i++)
        if (Packed::word(p->order, i) != i / p->group) return {};
    for (size_t i = 0, n = count_of(p->scales.shape); i < n; i++)
        if (!is_half(plain_number(p->scales, i))) return {};
    k.format = Format::INT4, k.zeros = true;
    k.group = p->group >= in || p->group % 128 == 0 ? 128 : p->group % 64 == 0 ? 64 : GROUP;
    return k;
}

void read_pairs(int8_t* q,       // (rows, ceil(in / 64) * 32) out
                uint16_t* scale, // (rows, ceil(in / group)) out, halves
                uint8_t* zero,   // the same out, if there are zeros
                const Tensor& t, const Kept& kept) {
    const size_t rows = (size_t)t.shape[0], in = (size_t)t.shape[1], row_bytes = (in + 63) / 64 * 32;
    const size_t groups = (in + kept.group - 1) / kept.group;
    auto read_row = [&](size_t r, auto value) {
        uint8_t* row = (uint8_t*)q + r * row_bytes;
        std::fill_n(row, row_bytes, 0);
        for (size_t k = 0; k < in; k++) row[k / 64 * 32 + k % 32] |= (uint8_t)(value(k) << (k / 32 % 2 * 4));
    };
    if (t.dtype == Dtype::Q4_0) {
        #pragma omp parallel for schedule(static)
        for (size_t r = 0; r < rows; r++) {
            const uint8_t* blocks = t.data + r * groups * BlockQ4_0::BYTES;
            read_row(r, [&](size_t k) {
                int q;
                nibbles(q, blocks + k / 32 * BlockQ4_0::BYTES + 2, (int)(k % 32));
                return q;
            });
            for (size_t g = 0; g < groups; g++)
                scale[r * groups + g] = load_as<uint16_t>(blocks + g * BlockQ4_0::BYTES);
        }
        return;
    }
    t.packed->with_method([&](auto method) {
        const Packed& p = *t.packed;
        #pragma omp parallel for schedule(static, 16)
        for (size_t r = 0; r < rows; r++) {
            read_row(r, [&](size_t k) { return p.value<method>(r, k); });
            for (size_t g = 0; g < groups; g++) {
                const size_t from = g * kept.group / p.group;
                scale[r * groups + g] = float_to_half(plain_number(p.scales, from * rows + r));
                zero[r * groups + g] = (uint8_t)p.zero<method>(r, from);
            }
        }
    });
}

template <class T> bool read_numbers(T* out, const Tensor& t) {
    const size_t in = t.shape.empty() ? 1 : (size_t)t.shape.back();
    size_t rows = 1;
    for (size_t d = 0; d + 1 < t.shape.size(); d++) rows *= (size_t)t.shape[d];
    std::atomic<bool> finite = true;
    each_tile(t, 0, rows, [&](const Tile& tile, const float* numbers) {
        bool all = true;
        for (size_t r = 0; r < tile.rows; r++)
            for (size_t k = 0; k < tile.columns; k++) {
                const T x = to_stored<T>((acc<T>)numbers[r * Tile::COLUMNS + k]);
                out[(tile.r + r) * in + tile.k + k] = x;
                all &= std::fabs(to_acc(x)) <= std::numeric_limits<float>::max();
            }
        if (!all) finite = false;
    });
    return finite;
}
template bool read_numbers(bf16*, const Tensor&);
template bool read_numbers(float*, const Tensor&);
template bool read_numbers(double*, const Tensor&);
