#include "model/write.h"

const char* written_type(const std::string& name, const Tensor& t) {
    if (t.is_quantized()) return "BF16";
    for (const char* type : {"BF16", "F16", "F32", "I8"})
        if (t.dtype == dtype_named(type)->dtype) return type;
    DIE("%s: tensor %s is not BF16, F16, F32 or I8", t.file.c_str(), name.c_str());
}

void write_tensor(OutputFile& out, const std::string& name, const Tensor& t) {
    if (!t.is_quantized()) return out.write(t.data, t.bytes);
    std::vector<bf16> numbers(count_of(t.shape));
    if (!read_numbers(numbers.data(), t))
        DIE("%s: tensor %s has an infinity or a NaN", t.file.c_str(), name.c_str());
    out.write(numbers.data(), numbers.size() * sizeof(bf16));
}

Tensors readable_tensors(const ModelFile& file) {
    Tensors all = file.tensors;
    const QuantizationConfig none = {};
    Packer{file.path, all, none}.pack_bytes();
    return all;
}

// Writes W + s B A, with DoRA its rows at length m, computed in float32 and rounded once, to the type of W (if W is
// quantised: to bf16).
static void write_merged_matrix(OutputFile& out, const std::string& name,
                         const Tensor& W, // (rows, in)
                         const Tensor& A, // (rank, in)
                         const Tensor& B, // (rows, rank)
                         const Tensor* m, // (rows), or null
                         float s) {
    const int64_t rows = W.shape[0], in = W.shape[1], rank = A.shape[0];
    std::vector<float> a((size_t)(rank * in)), merged((size_t)(rows * in));
    for (size_t i = 0; i < a.size(); i++) a[i] = number(A, i);
    #pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        float* row = &merged[(size_t)(r * in)];
        for (int64_t j = 0; j < rank; j++) {
            const float b = number(B, (size_t)(r * rank + j));
            for (int64_t i = 0; i < in; i++) row[i] += b * a[(size_t)(j * in + i)];
        }
    }
    each_tile(W, 0, (size_t)rows, [&](const Tile& tile, const float* numbers) {
        for (size_t r = 0; r < tile.rows; r++)
            for (size_t k = 0; k < tile.columns; k++) {
                float& x = merged[(tile.r + r) * (size_t)in + tile.k + k];
                x = numbers[r * Tile::COLUMNS + k] + s * x;
            }
    });
    for (int64_t r = 0; r < rows && m; r++) {
        float *row = &merged[(size_t)(r * in)], sum = 0;
        for (int64_t i = 0; i < in; i++) sum += row[i] * row[i];
        const float c = number(*m, (size_t)r) / std::sqrt(sum);
        for (int64_t i = 0; i < in; i++) row[i] *= c;
    }
    if (W.is_quantized() && !std::all_of(merged.begin(), merged.end(), [](float x) { return std::isfinite(x); }))
        DIE("%s: tensor %s has an infinity or a NaN", W.file.c_str(), name.c_str());
    if (W.dtype == Dtype::F32) return out.write(merged.data(), merged.size() * 4);
    std::vector<uint16_t> rounded(merged.size());
    for (size_t i = 0; i < merged.size(); i++) {
        rounded[i] = W.dtype == Dtype::F16 ? float_to_half(merged[i]) : to_bf16(merged[i]).bits;
        if (W.dtype == Dtype::F16 && (rounded[i] & 0x7c00) == 0x7c00)
            DIE("%s: tensor %s: %g is too large for F16", out.path.c_str(), name.c_str(), merged[i]);
    }
    out.write(rounded.data(), rounded.size() * 2);
}

size_t write_model(const ModelFile& file, const std::string& path) {
    std::vector<OutTensor> tensors;
    auto add = [&](const std::string& name) {
        const auto at = file.tensors.find(name);
        if (at == file.tensors.end()) return false;
        const Tensor& t = at->second;
        tensors.push_back({name, written_type(name, t), t.shape, [&t, name](OutputFile& out) {
            write_tensor(out, name, t);
        }});
        return true;
    };
    for (const ModelTensor& t : model_tensors(file.config)) {
        const std::string name = t.name();
        if (t.kind == HEAD && file.bare && !file.tensors.count(name)) continue;
        if (!add(name)) DIE("%s: no tensor %s", file.path.c_str(), name.c_str());
        need_shape(name, file.tensors.at(name), t.shape());
        add(name + "_scale");
    }
    return write_safetensors(path, file.metadata(file.config_text), tensors);
}

// An adapter's matrix, rounded to the type of the one in its place.
static void write_as(OutputFile& out, const Tensor& t, const std::string& type) {
    std::vector<float> all(count_of(t.shape));
    for (size_t i = 0; i < all.size(); i++) all[i] = number(t, i);
    if (type == "F32") return out.write(all.data(), all.size() * 4);
    std::vector<uint16_t> rounded(all.size());
    for (size_t i = 0; i < all.size(); i++) {
        rounded[i] = type == "F16" ? float_to_half(all[i]) : to_bf16(all[i]).bits;
        if (type == "F16" && (rounded[i] & 0x7c00) == 0x7c00)
            DIE("%s: a saved matrix: %g is too large for F16", out.path.c_str(), all[i]);
    }
    out.write(rounded.data(), rounded.size() * 2);
}

// A tied model whose adapter has an embedding or a head of its own is tied no more.
static std::string untied(const std::string& config) {
    sj::Doc doc;
    sj::parse(doc, config);
    sj::Writer w;
    w.object();
    for (auto [key, value] : doc.root().members())
        if (key != "tie_word_embeddings") w.key(key).value(value);
    return w.field("tie_word_embeddings", false).end().text;
}

void write_merged(const ModelFile& file, const AdapterFile& adapter, const std::string& path) {
    const Tensors from = readable_tensors(file);
    std::map<std::string, ModelTensor> modules; // by name
    for (const ModelTensor& t : targeted(file.config, adapter.config)) {
        const auto found = from.find(t.name());
        if (found == from.end()) DIE("%s: no tensor %s", file.path.c_str(), t.name().c_str());
        need_shape(t.name(), found->second, t.shape());
        modules.emplace(t.name(), t);
    }
    std::vector<OutTensor> tensors;
    const bool unties = file.config.tied && adapter.config.saves();
    const std::string config = unties ? untied(file.config_text) : file.config_text;
    const std::string embed = ModelTensor{EMBED, -1, 0, 0}.name(), head = ModelTensor{HEAD, -1, 0, 0}.name();
    const Tensor& table = from.at(embed);
    auto add_saved = [&](const std::string& name, const Tensor& W) { // in the type of W
        const Tensor& own = adapter.tensors.at("base_model.model." + name);
        const char* type = written_type(name, W);
        tensors.push_back({name, type, W.shape, [&own, type](OutputFile& out) { write_as(out, own, type); }});
    };
    auto add_plain = [&](const std::string& name, const Tensor& W) {
        tensors.push_back({name, written_type(name, W), W.shape, [&W, name](OutputFile& out) {
            write_tensor(out, name, W);
        }});
    };
    if (unties && !from.count(head)) adapter.config.head ? add_saved(head, table) : add_plain(head, table);
    for (auto& entry : from) {
        const std::string& name = entry.first;
        const Tensor& W = entry.second;
        if ((name == embed && adapter.config.embed) || (name == head && adapter.config.head)) {
            add_saved(name, W);
            continue;
        }
        const auto at = modules.find(name);
        if (at == modules.end()) {
            add_plain(name, W);
            continue;
        }
        const char* dtype = written_type(name, W);
        const Tensor& A = adapter.tensors.at(adapter_tensor(at->second, 'A'));
        const Tensor& B = adapter.tensors.at(adapter_tensor(at->second, 'B'));
        const Tensor* m = adapter.config.dora ? &adapter.tensors.at(adapter_tensor(at->second, 'm')) : nullptr;
        tensors.push_back({name, dtype, W.shape, [&, m, s = (float)adapter.config.scale()](OutputFile& out) {
            write_merged_matrix(out, name, W, A, B, m, s);
        }});
    }
    const bool one_file = path.size() > 4 && path.compare(path.size() - 4, 4, ".bin") == 0;
    Metadata metadata = one_file ? file.metadata(config) : Metadata{{"format", "pt"}};
    add_starters(metadata, adapter.starters.empty() ? file.starters : adapter.starters);
    if (one_file) return write_safetensors(path, metadata, tensors), void();
    make_folder(path);
    write_text(path + "/config.json", config);
    if (!file.generation_text.empty()) write_text(path + "/generation_config.json", file.generation_text);
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt",
                             "vocab.json", "special_tokens_map.json", "added_tokens.json"})
        if (const std::string from = file.path + "/" + name; access(from.c_str(), F_OK) == 0)
            write_text(path + "/" + name, MappedFile(from).text());
    write_safetensors(path + "/model.safetensors", metadata, tensors);
}
