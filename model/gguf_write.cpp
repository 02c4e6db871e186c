// model/gguf_write.cpp: GGUF's header, blocks of 32 columns, the tokenizer, the adapter.
#include "model/gguf_write.h"
#include "base/text.h"
#include "model/chat_template.h"
#include "model/write.h"

// ------------------------------------------------------------------------------------------------------- Container

static const size_t ALIGNMENT = 32; // the format's default

struct GgufPairs { // the header's keys and values
    std::string bytes;
    uint64_t count = 0;

    template <class U> static std::string raw(U u) { return {(const char*)&u, sizeof u}; }
    static std::string raw_text(std::string_view s) { return raw((uint64_t)s.size()) + std::string(s); }

    void add(const std::string& key, GgufValue::Type type, const std::string& value) {
        bytes += raw_text(key) + raw((uint32_t)type) + value;
        count++;
    }
    void number(const std::string& key, int64_t n) { add(key, GgufValue::U32, raw((uint32_t)n)); }
    void real(const std::string& key, double x) { add(key, GgufValue::F32, raw((float)x)); }
    void text(const std::string& key, std::string_view s) { add(key, GgufValue::STRING, raw_text(s)); }
    void array(const char* key, GgufValue::Type item, uint64_t n, const std::string& items) {
        add(key, GgufValue::ARRAY, raw((uint32_t)item) + raw(n) + items);
    }
};

struct OutGgufTensor {
    std::string name; // llama.cpp's
    Dtype dtype;
    Shape shape;
    std::function<void(OutputFile&)> write;

    uint32_t type() const { return gguf_number(dtype); }
    size_t bytes() const { return count_of(shape) / gguf_type(type())->count * gguf_type(type())->bytes; }
};

static std::string padding(size_t size) { return std::string((ALIGNMENT - size % ALIGNMENT) % ALIGNMENT, '\0'); }

static void write_container(GgufWritten& written, const std::string& path, const GgufPairs& pairs,
                            const std::vector<OutGgufTensor>& tensors) {
    using P = GgufPairs;
    std::string header = "GGUF" + P::raw(3u) + P::raw((uint64_t)tensors.size()) + P::raw(pairs.count) + pairs.bytes;
    uint64_t at = 0;
    std::map<uint32_t, size_t> types;
    for (const OutGgufTensor& t : tensors) {
        header += P::raw_text(t.name) + P::raw((uint32_t)t.shape.size());
        for (size_t d = t.shape.size(); d-- > 0;) header += P::raw((uint64_t)t.shape[d]); // the row's first
        header += P::raw(t.type()) + P::raw(at);
        at += t.bytes() + padding(t.bytes()).size();
        types[t.type()]++;
    }
    header += padding(header.size());
    OutputFile out(path);
    out.write(header);
    for (const OutGgufTensor& t : tensors) t.write(out), out.write(padding(t.bytes()));
    out.commit();
    written.bytes = header.size() + at;
    for (auto [type, n] : types)
        written.types += format("%s%zu x %s", written.types.empty() ? "" : ", ", n, gguf_type(type)->name);
}

// -------------------------------------------------------------------------------------------------------- Matrices

// How far numbers of the file are from the model's.
struct GgufLosses {
    size_t scales = 0, rounded_scales = 0, offsets = 0, rounded_offsets = 0, widened = 0;
    double scale = 0, offset = 0; // the largest: relative; in steps, which are scales

    void report(std::vector<std::string>& notes) const {
        if (rounded_scales)
            notes.push_back(format("%zu of %zu scales of INT8 are not halves: rounded, by %.2g%% at most",
                                   rounded_scales, scales, 100 * scale));
        if (rounded_offsets)
            notes.push_back(format("%zu of %zu offsets of Q4_1 are not halves: rounded, by %.2g of a step at most",
                                   rounded_offsets, offsets, offset));
        if (widened)
            notes.push_back(format("%zu quantised matrices are BF16: GGUF has no type for their numbers", widened));
    }
};

static bool all_zeros_are_8(const Packed& p) {
    bool all = true;
    p.with_method([&](auto method) {
        constexpr Method M = decltype(method)::value;
        if constexpr (M == Method::AWQ || M == Method::GPTQ)
            for (size_t g = 0; g < (p.in + p.group - 1) / p.group; g++)
                for (size_t r = 0; r < p.rows; r++) all &= p.zero<M>(r, g) == 8;
    });
    return all;
}

// The type for a matrix.
static Dtype type_of(const Tensor& t) {
    if (!t.packed) return t.dtype;
    if (t.shape.back() % 32) return Dtype::BF16;
    const Kept kept = kept_as(t);
    if (kept.format == Format::INT8) return Dtype::Q8_0;
    if (kept.format != Format::INT4) return Dtype::BF16;
    return all_zeros_are_8(*t.packed) ? Dtype::Q4_0 : Dtype::Q4_1;
}

// The type for the matrices of a layer's experts, which are one tensor of the file.
static Dtype type_of(const std::string& name, const std::vector<const Tensor*>& experts) {
    Dtype type = type_of(*experts[0]);
    const auto four_bits = [](Dtype t) { return t == Dtype::Q4_0 || t == Dtype::Q4_1; };
    for (const Tensor* t : experts) {
        const Dtype other = type_of(*t);
        if (other == type) continue;
        if (!t->packed || !experts[0]->packed)
            DIE("%s: tensor %s: its type is not that of the layer's other experts", t->file.c_str(), name.c_str());
        type = four_bits(type) && four_bits(other) ? Dtype::Q4_1 : Dtype::BF16;
    }
    return type;
}

// The matrix in blocks of 32 columns. Losses are added up.
static std::string blocks_of(const std::string& name, const Tensor& t, Dtype type, GgufLosses& losses) {
    const Packed& p = *t.packed;
    const size_t size = gguf_type(gguf_number(type))->bytes, across = p.in / 32;
    const size_t groups = (p.in + p.group - 1) / p.group;
    std::string all(p.rows * across * size, '\0');
    size_t rounded_scales = 0, rounded_offsets = 0;
    double worst_scale = 0, worst_offset = 0;
    p.with_method([&](auto method) {
        constexpr Method M = decltype(method)::value;
        if constexpr (M != Method::FP8) {
            #pragma omp parallel for schedule(static) reduction(+ : rounded_scales, rounded_offsets) \
                reduction(max : worst_scale, worst_offset)
            for (size_t i = 0; i < p.rows * across; i++) {
                const size_t r = i / across, k = i % across * 32, g = k / p.group;
                uint8_t* const b = (uint8_t*)&all[i * size];
                const float scale = plain_number(p.scales, M == Method::INT8 ? r * groups + g : g * p.rows + r);
                const uint16_t d = float_to_half(scale);
                memcpy(b, &d, 2);
                if constexpr (M == Method::INT8) {
                    if (half_to_float(d) != scale) {
                        rounded_scales++;
                        worst_scale = std::max(worst_scale, std::fabs((double)half_to_float(d) / scale - 1));
                    }
                    memcpy(b + 2, p.q.data + r * p.in + k, 32);
                } else {
                    if (type == Dtype::Q4_1) {
                        const float offset = -(float)p.zero<M>(r, g) * scale;
                        const uint16_t m = float_to_half(offset);
                        memcpy(b + 2, &m, 2);
                        if (const double off = (double)half_to_float(m) - offset; off != 0) {
                            rounded_offsets++;
                            worst_offset = std::max(worst_offset, std::fabs(off / scale));
                        }
                    }
                    uint8_t* const q = b + size - 16;
                    for (size_t j = 0; j < 16; j++)
                        q[j] = (uint8_t)(p.value<M>(r, k + j) | p.value<M>(r, k + 16 + j) << 4);
                }
            }
        }
    });
    if (!std::isfinite(worst_scale) || !std::isfinite(worst_offset))
        DIE("%s: tensor %s: a scale or an offset is too large for F16", t.file.c_str(), name.c_str());
    losses.rounded_scales += rounded_scales, losses.rounded_offsets += rounded_offsets;
    (type == Dtype::Q8_0 ? losses.scales : losses.offsets) += p.rows * across;
    losses.scale = std::max(losses.scale, worst_scale), losses.offset = std::max(losses.offset, worst_offset);
    return all;
}

// ------------------------------------------------------------------------------------------------- Model's metadata

// A file's or folder's name; of a model.bin its folder's.
static std::string name_of(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    const std::string usual = "/model.bin";
    if (ends_in(path, usual)) path.resize(path.size() - usual.size());
    path = path.substr(path.rfind('/') + 1);
    for (const char* end : {".bin", ".gguf"})
        if (ends_in(path, end)) path.resize(path.rfind('.'));
    return path;
}

static const char* architecture(const Config& c) { return c.E ? "qwen3moe" : "qwen3"; }

static void add_rope_scaling(GgufPairs& h, const ModelFile& file, const std::string& prefix) {
    const RopeScaling& s = file.config.rope_scaling;
    if (s.type == RopeScaling::NONE) return;
    const bool yarn = s.type == RopeScaling::YARN;
    const bool usual = std::fabs(s.attention - (0.1 * std::log(s.factor) + 1)) < 1e-9;
    if (s.type == RopeScaling::LLAMA3 || (yarn && (!usual || !s.truncate)))
        DIE("%s: rope_scaling: GGUF's metadata cannot hold %s", file.path.c_str(),
            !yarn ? "llama3's" : usual ? "truncate = false" : "this attention_factor");
    if (s.factor != (double)(float)s.factor)
        DIE("%s: rope_scaling's factor = %.17g is no float, as GGUF stores it", file.path.c_str(), s.factor);
    h.text(prefix + "rope.scaling.type", yarn ? "yarn" : "linear");
    h.real(prefix + "rope.scaling.factor", s.factor);
    if (!yarn) return;
    h.number(prefix + "rope.scaling.original_context_length", s.original);
    if (s.fast != 32) h.real(prefix + "rope.scaling.yarn_beta_fast", s.fast);
    if (s.slow != 1) h.real(prefix + "rope.scaling.yarn_beta_slow", s.slow);
}

static void add_config(GgufPairs& h, const ModelFile& file) {
    const Config& c = file.config;
    if ((double)(float)c.rope_theta != c.rope_theta)
        DIE("%s: rope_theta = %.17g is no float, as GGUF stores it", file.path.c_str(), c.rope_theta);
    const std::string prefix = architecture(c) + std::string(".");
    h.number(prefix + "block_count", c.L);
    h.number(prefix + "context_length", c.max_positions);
    h.number(prefix + "embedding_length", c.C);
    h.number(prefix + "feed_forward_length", c.F);
    h.number(prefix + "attention.head_count", c.H);
    h.number(prefix + "attention.head_count_kv", c.K);
    h.real(prefix + "rope.freq_base", c.rope_theta);
    add_rope_scaling(h, file, prefix);
    h.real(prefix + "attention.layer_norm_rms_epsilon", c.eps);
    h.number(prefix + "attention.key_length", c.D);
    h.number(prefix + "attention.value_length", c.D);
    if (c.E) {
        for (int l = 0; l < c.L; l++)
            if (!c.sparse(l)) DIE("%s: layer %d has no experts, as GGUF's qwen3moe must", file.path.c_str(), l);
        if (!c.normed_shares)
            DIE("%s: norm_topk_prob is false; llama.cpp divides the shares by their sum", file.path.c_str());
        h.number(prefix + "expert_count", c.E);
        h.number(prefix + "expert_used_count", c.k);
        h.number(prefix + "expert_feed_forward_length", c.M);
    }
    sj::Doc doc;
    sj::parse(doc, file.config_text);
    if (file.bare || doc.root()["architectures"][(size_t)0].str() == "Qwen3Model")
        h.number(prefix + "pooling_type", 3); // of a text's vectors the last is its embedding
    sj::Doc generation;
    if (!file.generation_text.empty()) sj::parse(generation, file.generation_text);
    for (auto [ours, key] : {std::pair("temperature", "general.sampling.temp"), {"top_p", "general.sampling.top_p"},
                             {"min_p", "general.sampling.min_p"}})
        if (const sj::Value v = generation.root()[ours]; v.is(sj::Number)) h.real(key, v.number());
    if (int64_t k; generation.root()["top_k"].integer(&k))
        h.add("general.sampling.top_k", GgufValue::I32, GgufPairs::raw((int32_t)k));
}

// The number of the type of most of the model's numbers, as llama.cpp counts files (llama.h, llama_ftype).
static int file_type(const std::vector<OutGgufTensor>& tensors) {
    std::map<Dtype, size_t> numbers;
    for (const OutGgufTensor& t : tensors) numbers[t.dtype] += count_of(t.shape);
    const auto more = [](auto& a, auto& b) { return a.second < b.second; };
    switch (std::max_element(numbers.begin(), numbers.end(), more)->first) {
        case Dtype::F16: return 1;
        case Dtype::Q4_0: return 2;
        case Dtype::Q4_1: return 3;
        case Dtype::Q8_0: return 7;
        case Dtype::Q5_0: return 8;
        case Dtype::Q5_1: return 9;
        case Dtype::Q4_K: return 15;
        case Dtype::Q5_K: return 17;
        case Dtype::Q6_K: return 18;
        case Dtype::BF16: return 32;
        default: return 0; // F32
    }
}

static void add_tokenizer(GgufPairs& h, const ModelFile& file, const Tokenizer& t) {
    enum { NORMAL = 1, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5 };
    std::string tokens, types, merges;
    for (int i = 0; i < file.config.V; i++) {
        const std::string_view bytes = t.bytes(i);
        const bool padding = i >= t.size(), added = !padding && t.id(bytes) == i;
        // As llama.cpp's converter: what looks like <|markup|> is never text, whatever the tokenizer says of it.
        const bool markup = added && bytes.substr(0, 2) == "<|" && ends_in(bytes, "|>");
        const int type = padding ? UNUSED : !added ? NORMAL : markup || t.is_special(i) ? CONTROL : USER_DEFINED;
        types += GgufPairs::raw((int32_t)type);
        tokens += GgufPairs::raw_text(padding ? format("[PAD%d]", i) : added ? std::string(bytes)
                                                                             : characters_of(bytes));
    }
    for (size_t i = 0; i < t.merges(); i++) {
        const auto [a, b] = t.merged(i);
        merges += GgufPairs::raw_text(characters_of(t.bytes(a)) + " " + characters_of(t.bytes(b)));
    }
    h.text("tokenizer.ggml.model", "gpt2");
    h.text("tokenizer.ggml.pre", "qwen2");
    h.array("tokenizer.ggml.tokens", GgufValue::STRING, (uint64_t)file.config.V, tokens);
    h.array("tokenizer.ggml.token_type", GgufValue::I32, (uint64_t)file.config.V, types);
    h.array("tokenizer.ggml.merges", GgufValue::STRING, t.merges(), merges);
    const int text_end = t.id("<|endoftext|>"), turn_end = t.id("<|im_end|>");
    std::vector<int> ends = file.config.end_tokens;
    if (ends.empty()) ends = {turn_end >= 0 ? turn_end : text_end};
    if (ends[0] < 0 || ends[0] >= file.config.V) DIE("%s: it has no end token, which GGUF needs", file.path.c_str());
    // llama.cpp ends at the tokens of these two names, at eos and at eot.
    h.number("tokenizer.ggml.eos_token_id", ends[0]);
    const auto known = [&](int id) { return id == text_end || id == turn_end || id == ends[0]; };
    const auto other = std::find_if_not(ends.begin(), ends.end(), known);
    if (other != ends.end()) {
        h.number("tokenizer.ggml.eot_token_id", *other);
        if (!std::all_of(other + 1, ends.end(), [&](int id) { return known(id) || id == *other; }))
            DIE("%s: it has more end tokens than GGUF has places for", file.path.c_str());
    }
    // No token goes before a text; but without bos_token_id llama.cpp takes another vocabulary's.
    h.number("tokenizer.ggml.bos_token_id", text_end >= 0 ? text_end : ends[0]);
    h.number("tokenizer.ggml.padding_token_id", text_end >= 0 ? text_end : ends[0]);
    h.add("tokenizer.ggml.add_bos_token", GgufValue::BOOL, std::string(1, '\0'));
    h.text("tokenizer.chat_template", file.chat_template.empty() ? QWEN3_JINJA : file.chat_template);
}

static void write_as(OutputFile& out, const std::string& name, const Tensor& t, Dtype type, GgufLosses& losses) {
    if (t.dtype == type) return out.write(t.data, t.bytes);
    if (type == Dtype::BF16) return write_tensor(out, name, t);
    if (type != Dtype::F32) return out.write(blocks_of(name, t, type, losses));
    std::vector<float> numbers(count_of(t.shape));
    if (!read_numbers(numbers.data(), t))
        DIE("%s: tensor %s has an infinity or a NaN", t.file.c_str(), name.c_str());
    out.write(numbers.data(), numbers.size() * sizeof(float));
}

GgufWritten write_gguf(const ModelFile& file, const Tokenizer& tokenizer, const std::string& path) {
    const Tensors from = readable_tensors(file);
    GgufWritten written;
    GgufLosses losses;
    std::vector<OutGgufTensor> tensors;
    for (const ModelTensor& m : model_tensors(file.config)) {
        if (m.kind == HEAD && file.bare && !from.count(m.name())) continue;
        if (m.expert > 0) continue; // with expert 0
        std::vector<const Tensor*> parts;
        for (int e = 0; e < (m.expert < 0 ? 1 : file.config.E); e++) {
            ModelTensor part = m;
            part.expert += e;
            const auto found = from.find(part.name());
            if (found == from.end()) DIE("%s: no tensor %s", file.path.c_str(), part.name().c_str());
            const Tensor& t = found->second;
            need_shape(part.name(), t, part.shape());
            if (!t.is_float())
                DIE("%s: tensor %s is not BF16, F16 or F32, and not quantised", t.file.c_str(), part.name().c_str());
            parts.push_back(&t);
        }
        // (The router is F32, as llama.cpp's converter has it.)
        const Dtype type = m.columns && m.kind != ROUTER ? type_of(m.name(), parts) : Dtype::F32;
        for (const Tensor* t : parts) losses.widened += t->packed && type == Dtype::BF16;
        Shape shape = m.shape();
        if (m.expert >= 0) shape.insert(shape.begin(), file.config.E);
        tensors.push_back({gguf_name(m), type, shape, [parts, &losses, type, name = m.name()](OutputFile& out) {
            for (const Tensor* t : parts) write_as(out, name, *t, type, losses);
        }});
    }
    GgufPairs h;
    h.text("general.architecture", architecture(file.config));
    h.text("general.type", "model");
    h.text("general.name", name_of(file.path));
    add_config(h, file);
    h.number("general.file_type", file_type(tensors));
    h.number("general.quantization_version", 2);
    add_tokenizer(h, file, tokenizer);
    write_container(written, path, h, tensors);
    losses.report(written.notes);
    if (!file.starters.empty()) written.notes.push_back("the questions that a chat begins with are left out");
    return written;
}

// --------------------------------------------------------------------------------------------------------- Adapter

GgufWritten write_gguf_adapter(const AdapterFile& adapter, const Config& c, const std::string& path) {
    std::vector<OutGgufTensor> tensors;
    if (adapter.config.saves())
        DIE("%s: its own embedding or head (modules_to_save) has no place in a GGUF adapter; merge it",
            adapter.path.c_str());
    if (adapter.config.dora)
        DIE("%s: DoRA (use_dora) has no place in a GGUF adapter; merge it", adapter.path.c_str());
    for (const ModelTensor& m : targeted(c, adapter.config))
        for (const char matrix : {'A', 'B'}) {
            if (m.expert >= 0) DIE("%s: an adapter of experts is not written as GGUF", adapter.path.c_str());
            const Tensor& t = adapter.tensors.at(adapter_tensor(m, matrix));
            tensors.push_back({gguf_name(m) + (matrix == 'A' ? ".lora_a" : ".lora_b"), t.dtype, t.shape,
                               [&t](OutputFile& out) { out.write(t.data, t.bytes); }});
        }
    GgufPairs h;
    h.text("general.architecture", architecture(c));
    h.text("general.type", "adapter");
    h.text("general.name", name_of(adapter.path));
    h.text("adapter.type", "lora");
    h.real("adapter.lora.alpha", adapter.config.scale() * adapter.config.rank);
    h.number("general.file_type", file_type(tensors));
    h.number("general.quantization_version", 2);
    GgufWritten written;
    write_container(written, path, h, tensors);
    if (!adapter.starters.empty()) written.notes.push_back("the questions that a chat begins with are left out");
    return written;
}
