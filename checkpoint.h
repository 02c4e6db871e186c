/* checkpoint.h: a model's files, read and written. Included by qwen3.cu, whose Config, Weights and Adapter it fills.

   A model is a Hugging Face folder (config.json, generation_config.json, model.safetensors or an index and its shards),
   or a model.bin: one safetensors file of the same tensors, whose __metadata__ holds the two configs as texts; or a
   GGUF file (gguf.h). Its matrices may be quantised (quantized.h). An adapter is a folder in PEFT's format:
   adapter_config.json and adapter_model.safetensors.

   Files are not trusted: every type, shape, offset and setting is checked before it is used. A fault is thrown as
   Error: one line that names the file. What is written is complete or not there at all (OutputFile).

   Contents    1 Numbers and tensors: quantized.h, gguf.h    2 safetensors: read, write
               3 The model's tensors: names, shapes, places    4 Config and ModelFile    5 INT8
               6 Weights of a checkpoint    7 Adapters    8 Models written: converted, merged    9 Weights to a GPU
*/
#include <atomic>
#include <set>
#include <strings.h>

// =============================================================================================== 1 Numbers and tensors
#include "quantized.h"
#include "gguf.h"

// ======================================================================================================= 2 safetensors
// https://huggingface.co/docs/safetensors: 8 bytes, the length of the header (little-endian); the header, a JSON object
// {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ..}; the tensors' bytes, in which offsets
// count from 0. "__metadata__" is no tensor but an object of strings.

using Metadata = std::map<std::string, std::string>;

// ---- Read

// The value v of one tensor's name in the header: its type, shape and place, which must lie within the data.
inline Tensor read_tensor_entry(const std::string& file, const std::string& tensor, sj::Value v, const uint8_t* data,
                                uint64_t data_size) {
    const char *name = file.c_str(), *k = tensor.c_str();
    const sj::Value at = v["data_offsets"];
    if (!v.is(sj::Object) || !v["dtype"].is(sj::String) || !v["shape"].is(sj::Array) || !at.is(sj::Array))
        DIE("%s: tensor %s lacks dtype, shape or data_offsets", name, k);
    const DtypeName* type = dtype_named(v["dtype"].str());
    if (!type) DIE("%s: tensor %s has the unknown dtype %.40s", name, k, v["dtype"].str().c_str());
    Tensor t;
    t.file = file;
    t.dtype = type->dtype;
    auto natural = [](sj::Value x, int64_t* n) { return x.integer(n) && x.raw()[0] != '-'; }; // (-0 is none either)
    uint64_t bytes = type->size;
    for (sj::Value d : v["shape"].items()) {
        int64_t n;
        if (!natural(d, &n)) DIE("%s: tensor %s has a bad shape", name, k);
        if (__builtin_mul_overflow(bytes, (uint64_t)n, &bytes))
            DIE("%s: the shape of tensor %s overflows 64 bits", name, k);
        t.shape.push_back(n);
    }
    int64_t begin, end;
    if (at.size() != 2 || !natural(at[(size_t)0], &begin) || !natural(at[1], &end) || end < begin)
        DIE("%s: tensor %s has bad data_offsets", name, k);
    if ((uint64_t)end > data_size)
        DIE("%s: truncated: tensor %s ends at byte %lld of %llu", name, k, (long long)end,
            (unsigned long long)data_size);
    if ((uint64_t)(end - begin) != bytes)
        DIE("%s: tensor %s has %lld bytes, its shape needs %llu", name, k, (long long)(end - begin),
            (unsigned long long)bytes);
    t.data = data + begin;
    t.bytes = bytes;
    return t;
}

// Adds the tensors of a safetensors file to `out` and its __metadata__ to `metadata`. Accepts what the reference
// implementation accepts: a header of at most 100 MB that is a UTF-8 JSON object; for every tensor begin <= end and
// end - begin = its shape times the size of its type; together the tensors cover the data without hole or overlap.
inline void read_safetensors(const MappedFile& map, Tensors& out, Metadata& metadata) {
    const char* name = map.path.c_str();
    uint64_t length = 0;
    if (map.size < 8) DIE("%s: %zu bytes are too few for a safetensors file", name, map.size);
    memcpy(&length, map.data, 8);
    if (length > 100'000'000)
        DIE("%s: not a safetensors file: its header would be %llu bytes", name, (unsigned long long)length);
    if (length > map.size - 8)
        DIE("%s: truncated: the header is %llu bytes, the file %zu", name, (unsigned long long)length, map.size);
    const std::string_view header((const char*)map.data + 8, length);
    const uint8_t* data = map.data + 8 + length;
    const uint64_t data_size = map.size - 8 - length;
    if (header.empty() || header[0] != '{') DIE("%s: not a safetensors file: its header is no JSON object", name);
    sj::Doc doc;
    const std::string fault = sj::parse(doc, header);
    if (!fault.empty()) DIE("%s: header: %s", name, fault.c_str());

    struct Span { uint64_t begin, end; std::string name; };
    std::vector<Span> spans;
    std::set<std::string> seen;
    for (auto [key, v] : doc.root().members()) {
        if (!seen.insert(key).second) DIE("%s: header names %s twice", name, key.c_str());
        if (key == "__metadata__") {
            if (!v.is(sj::Object)) DIE("%s: __metadata__ is not an object", name);
            for (auto [mk, mv] : v.members()) {
                if (!mv.is(sj::String)) DIE("%s: __metadata__: %s is not a string", name, mk.c_str());
                metadata[mk] = mv.str();
            }
            continue;
        }
        const Tensor t = read_tensor_entry(map.path, key, v, data, data_size);
        spans.push_back({(uint64_t)(t.data - data), (uint64_t)(t.data - data) + t.bytes, key});
        auto [where, fresh] = out.emplace(key, t);
        if (!fresh) DIE("%s: tensor %s is also in %s", name, key.c_str(), where->second.file.c_str());
    }
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    uint64_t expected = 0;
    for (const Span& s : spans) {
        if (s.begin != expected)
            DIE("%s: %s before tensor %s", name, s.begin < expected ? "overlap" : "hole", s.name.c_str());
        expected = s.end;
    }
    if (expected != data_size)
        DIE("%s: the tensors end at byte %llu, the data at %llu", name, (unsigned long long)expected,
            (unsigned long long)data_size);
}

// ---- Write

// A tensor to be written; `write` writes its bytes, whenever they are due.
struct OutTensor {
    std::string name;
    const char* dtype; // as safetensors writes it
    Shape shape;
    std::function<void(OutputFile&)> write;
    size_t bytes() const { return dtype_named(dtype)->size * count_of(shape); }
};

// The tensors, in this order. Returns the bytes of the file.
inline size_t write_safetensors(const std::string& path, const Metadata& metadata,
                                const std::vector<OutTensor>& tensors) {
    sj::Writer w;
    w.object().key("__metadata__").object();
    for (auto& [key, value] : metadata) w.field(key, value);
    w.end();
    size_t at = 0;
    for (const OutTensor& t : tensors) {
        w.key(t.name).object().field("dtype", t.dtype).key("shape").array();
        for (int64_t d : t.shape) w.value(d);
        w.end().key("data_offsets").array().value(at).value(at + t.bytes()).end().end();
        at += t.bytes();
    }
    std::string header = w.end().text;
    header.append((64 - (8 + header.size()) % 64) % 64, ' '); // the data begin at a multiple of 64
    OutputFile out(path);
    const uint64_t length = header.size();
    out.write(&length, 8);
    out.write(header);
    for (const OutTensor& t : tensors) t.write(out);
    out.commit();
    return 8 + header.size() + at;
}

// =============================================================================================== 3 The model's tensors
// The one table of their names, shapes and places. What reads, writes, draws, trains or uploads all weights goes by it.

// The first seven are the modules: the products that can have an adapter. (Their numbers name the dropout masks: see
// Adapter.)
enum TensorKind {
    Q_PROJ, K_PROJ, V_PROJ, O_PROJ, GATE_PROJ, UP_PROJ, DOWN_PROJ,
    INPUT_NORM, Q_NORM, K_NORM, POST_NORM, EMBED, FINAL_NORM, HEAD
};
constexpr int MODULES = DOWN_PROJ + 1;
constexpr const char* TENSOR_NAMES[] = { // by TensorKind
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm",
    "model.embed_tokens", "model.norm", "lm_head"};

struct ModelTensor {
    TensorKind kind;
    int layer;         // -1: of the model as a whole
    int rows, columns; // a matrix (rows, columns); columns = 0: a vector of `rows` numbers

    std::string name() const { // Hugging Face's
        if (layer < 0) return format("%s.weight", TENSOR_NAMES[kind]);
        return format("model.layers.%d.%s.weight", layer, TENSOR_NAMES[kind]);
    }
    Shape shape() const { return columns ? Shape{rows, columns} : Shape{rows}; }
    size_t size() const { return (size_t)rows * (columns ? columns : 1); } // in numbers
};

// All tensors of a model, in the order of the layers' work, which is the order of our files. Blocks of one Linear are
// neighbours.
inline std::vector<ModelTensor> model_tensors(const Config& c) {
    std::vector<ModelTensor> all = {{EMBED, -1, c.V, c.C}};
    for (int l = 0; l < c.L; l++) {
        const ModelTensor layer[] = {
            {INPUT_NORM, l, c.C, 0},
            {Q_PROJ, l, c.H * c.D, c.C},
            {K_PROJ, l, c.K * c.D, c.C},
            {V_PROJ, l, c.K * c.D, c.C},
            {Q_NORM, l, c.D, 0},
            {K_NORM, l, c.D, 0},
            {O_PROJ, l, c.C, c.H * c.D},
            {POST_NORM, l, c.C, 0},
            {GATE_PROJ, l, c.F, c.C},
            {UP_PROJ, l, c.F, c.C},
            {DOWN_PROJ, l, c.C, c.F},
        };
        all.insert(all.end(), std::begin(layer), std::end(layer));
    }
    all.push_back({FINAL_NORM, -1, c.C, 0});
    if (!c.tied) all.push_back({HEAD, -1, c.V, c.C});
    return all;
}
// How many numbers a model has.
inline size_t parameters(const Config& c) {
    size_t n = 0;
    for (const ModelTensor& t : model_tensors(c)) n += t.size();
    return n;
}

// Where a tensor is in Weights: a block of rows of a Linear, or a vector.
template <class T> struct TensorPlace {
    Linear<T>* linear; // null: a vector
    int block;
    const T** vector;
    const T*& numbers() const { return linear ? linear->w[block] : *vector; } // (not those of an INT8 matrix)
};
template <class T> TensorPlace<T> place_of(Layer<T>& in, TensorKind kind) {
    switch (kind) {
        case Q_PROJ: return {&in.qkv, 0, nullptr};
        case K_PROJ: return {&in.qkv, 1, nullptr};
        case V_PROJ: return {&in.qkv, 2, nullptr};
        case O_PROJ: return {&in.o, 0, nullptr};
        case GATE_PROJ: return {&in.gate_up, 0, nullptr};
        case UP_PROJ: return {&in.gate_up, 1, nullptr};
        case DOWN_PROJ: return {&in.down, 0, nullptr};
        case INPUT_NORM: return {nullptr, 0, &in.norm1};
        case Q_NORM: return {nullptr, 0, &in.q_norm};
        case K_NORM: return {nullptr, 0, &in.k_norm};
        default: return {nullptr, 0, &in.norm2}; // POST_NORM
    }
}
template <class T> TensorPlace<T> place_of(Weights<T>& w, TensorKind kind, int layer) {
    if (kind == EMBED) return {&w.embed, 0, nullptr};
    if (kind == HEAD) return {&w.head, 0, nullptr};
    if (kind == FINAL_NORM) return {nullptr, 0, &w.norm};
    return place_of(w.layers[layer], kind);
}
template <class T> TensorPlace<T> place_of(Weights<T>& w, const ModelTensor& t) { return place_of(w, t.kind, t.layer); }

// ============================================================================================== 4 Config and ModelFile

// The end tokens, eos_token_id: those of generation_config, else those of config.
inline std::vector<int> parse_end_tokens(const char* name, sj::Value config, std::string_view generation_text, int V) {
    sj::Doc generation;
    if (!generation_text.empty()) {
        const std::string fault = sj::parse(generation, generation_text);
        if (!fault.empty()) DIE("%s: generation_config: %s", name, fault.c_str());
    }
    std::vector<int> ids;
    auto add = [&](sj::Value v) {
        int64_t id = 0;
        if (!v.integer(&id) || id < 0 || id >= V)
            DIE("%s: eos_token_id holds %.60s, which is no id of the vocabulary", name, std::string(v.raw()).c_str());
        ids.push_back((int)id);
    };
    sj::Value eos = generation.root()["eos_token_id"];
    if (!eos || eos.is(sj::Null)) eos = config["eos_token_id"];
    if (eos.is(sj::Array)) for (sj::Value v : eos.items()) add(v);
    else if (eos && !eos.is(sj::Null)) add(eos);
    return ids;
}

// Reads config.json (or its text in model.bin). Every key that changes the computation is either read or must have the
// one value that this program computes; keys of training and bookkeeping are ignored.
inline Config parse_config(const std::string& file, std::string_view text, std::string_view generation_text) {
    const char* name = file.c_str();
    sj::Doc doc;
    const std::string fault = sj::parse(doc, text);
    if (!fault.empty()) DIE("%s: config: %s", name, fault.c_str());
    const sj::Value j = doc.root();
    if (!j.is(sj::Object)) DIE("%s: config is not a JSON object", name);
    if (j["model_type"].str() != "qwen3")
        DIE("%s: model_type is %.60s, only \"qwen3\" is supported", name,
            j["model_type"] ? std::string(j["model_type"].raw()).c_str() : "missing");

    // ---- What must be off, or have one value
    auto refuse = [&](const char* key, sj::Value v) {
        DIE("%s: config has %s = %.60s, which is not supported", name, key, std::string(v.raw()).c_str());
    };
    auto must_be = [&](const char* key, bool ok) { if (j[key] && !ok) refuse(key, j[key]); };
    auto off = [](sj::Value v) { return v.is(sj::Null) || v.is(sj::False); };
    for (const char* key : {"attention_bias", "mlp_bias", "use_sliding_window", "rope_scaling", "quantization_config",
                            "num_experts", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale",
                            "residual_multiplier", "embedding_multiplier", "tie_encoder_decoder", "is_encoder_decoder",
                            "use_bidirectional_attention"})
        must_be(key, off(j[key]));
    must_be("hidden_act", j["hidden_act"].str() == "silu");
    must_be("partial_rotary_factor", j["partial_rotary_factor"].number() == 1);
    must_be("use_qk_norm", j["use_qk_norm"].is(sj::True));
    must_be("layer_types", j["layer_types"].is(sj::Array) || j["layer_types"].is(sj::Null));
    for (sj::Value kind : j["layer_types"].items())
        if (kind.str() != "full_attention") refuse("layer_types", kind);

    // ---- Sizes. Within these limits all rows and columns are ints, those of three blocks together too.
    auto integer = [&](const char* key, int64_t low, int64_t high, int64_t otherwise) {
        int64_t v = otherwise;
        if (!j[key] && otherwise < 0) DIE("%s: config has no %s", name, key);
        if (j[key] && !j[key].integer(&v)) DIE("%s: config: %s is not an integer", name, key);
        if (v < low || v > high)
            DIE("%s: config: %s = %lld is outside %lld..%lld", name, key, (long long)v, (long long)low,
                (long long)high);
        return (int)v;
    };
    Config c;
    c.C = integer("hidden_size", 1, 1 << 20, -1);
    c.L = integer("num_hidden_layers", 1, 4096, -1);
    c.H = integer("num_attention_heads", 1, 4096, -1);
    c.K = integer("num_key_value_heads", 1, 4096, -1);
    c.D = integer("head_dim", 2, MAX_HEAD, 128); // 128 is Hugging Face's default for qwen3
    c.F = integer("intermediate_size", 1, 1 << 20, -1);
    c.V = integer("vocab_size", 1, 1 << 24, -1);
    c.max_positions = integer("max_position_embeddings", 1, 1 << 24, -1);
    if (c.D % 2) DIE("%s: config: head_dim = %d is odd, RoPE needs pairs", name, c.D);
    if (c.H % c.K) DIE("%s: config: %d query heads do not share %d key/value heads evenly", name, c.H, c.K);

    // ---- Numbers
    if (!j["rms_norm_eps"].is(sj::Number)) DIE("%s: config has no rms_norm_eps", name);
    c.eps = (float)j["rms_norm_eps"].number();
    if (!(c.eps > 0 && c.eps < 1)) DIE("%s: config: rms_norm_eps is not between 0 and 1", name);
    sj::Value rope = j["rope_parameters"], theta = j["rope_theta"]; // transformers 5 has the first, 4 the second
    if (rope && !rope.is(sj::Null)) {
        if (!rope.is(sj::Object)) refuse("rope_parameters", rope);
        for (auto [key, value] : rope.members()) {
            const bool plain = (key == "rope_type" && value.str() == "default") ||
                               (key == "partial_rotary_factor" && value.number() == 1);
            if (key == "rope_theta") theta = value;
            else if (!plain) refuse(("rope_parameters." + key).c_str(), value);
        }
    }
    if (!theta.is(sj::Number)) DIE("%s: config has no rope_theta", name);
    c.rope_theta = theta.number();
    if (!(c.rope_theta >= 1 && c.rope_theta < 1e12)) DIE("%s: config: rope_theta is not between 1 and 1e12", name);
    const sj::Value tied = j["tie_word_embeddings"];
    if (tied && !tied.is_bool()) refuse("tie_word_embeddings", tied);
    c.tied = tied.boolean(false);
    c.end_tokens = parse_end_tokens(name, j, generation_text, c.V);
    return c;
}

// The __metadata__ of a model.bin.
inline Metadata model_metadata(const std::string& config_text, const std::string& generation_text) {
    Metadata metadata = {{"format", "pt"}, {"config", config_text}};
    if (!generation_text.empty()) metadata["generation_config"] = generation_text;
    return metadata;
}

// The files of a model, mapped. The config is checked; tensors are found by name, and checked when they are loaded.
struct ModelFile {
    std::string path;
    std::vector<MappedFile> maps;
    Tensors tensors;
    Config config;
    std::string config_text, generation_text;   // the first without quantization_config
    std::unique_ptr<GgufVocabulary> vocabulary; // of a GGUF file
    bool logits = true; // false: only hidden states are wanted of it, and a bare model without a head will do
    bool bare = false;  // a Qwen3Model, which need not have a head

    static bool exists(const std::string& f) { return access(f.c_str(), F_OK) == 0; }
    // The path is that of a folder with a model in it.
    static bool in_folder(const std::string& p) { return exists(p + "/config.json") || exists(p + "/model.bin"); }

    // path: a model.bin, a GGUF file, a Hugging Face folder, or a folder with a model.bin (and no Hugging Face model).
    explicit ModelFile(const std::string& p) : path(p) {
        struct stat st;
        if (stat(p.c_str(), &st) != 0) DIE("%s: %s", p.c_str(), strerror(errno));
        const bool folder = S_ISDIR(st.st_mode);
        if (!folder || (!exists(p + "/config.json") && exists(p + "/model.bin"))) {
            open_one(folder ? p + "/model.bin" : p);
            return;
        }
        Metadata metadata;
        const std::string one = p + "/model.safetensors", index = one + ".index.json";
        const std::string generation = p + "/generation_config.json";
        if (exists(p + "/adapter_config.json") && !exists(p + "/config.json"))
            DIE("%s: an adapter, not a model: its base is the model, and --adapter %s adds it", p.c_str(), p.c_str());
        if (!exists(p + "/config.json")) DIE("%s: a folder without a model: it has no config.json", p.c_str());
        config_text = MappedFile(p + "/config.json").text();
        if (exists(generation)) generation_text = MappedFile(generation).text();
        const auto quantization = take_quantization(p);
        config = parse_config(p, config_text, generation_text);
        if (exists(one)) add(one, metadata);
        else if (exists(index)) add_shards(index, metadata);
        else DIE("%s: a folder without a model: it has no model.safetensors and no model.safetensors.index.json",
                 p.c_str());
        finish(quantization);
    }

    // The checkpoint's own type is what the embedding is stored in. (F16 is read as bf16.)
    bool is_int8() const { return embedding_type() == Dtype::I8; } // (with a quantization_config it is Packed)
    bool is_quantized() const {
        return std::any_of(tensors.begin(), tensors.end(), [](auto& t) { return t.second.is_quantized(); });
    }
    bool is_fp8() const { // has such matrices, that is
        return std::any_of(tensors.begin(), tensors.end(),
                           [](auto& t) { return t.second.packed && t.second.packed->method == Method::FP8; });
    }
    bool is_float32() const { return embedding_type() == Dtype::F32; }
    bool is_float16() const { return embedding_type() == Dtype::F16; }

    // How the file's own tokenizer is another than t; "": it is the same, or none is there.
    std::string difference(const Tokenizer& t) const { return vocabulary ? vocabulary->difference(t) : ""; }

    // Names this config and these weights. Of each tensor it reads only 16 samples of 256 bytes, evenly spread: that
    // takes milliseconds, and is enough, since training moves every number. Models that differ only between the samples
    // have the same hash.
    uint64_t hash() const {
        uint64_t hash = fnv1a(config_text.data(), config_text.size());
        auto add = [&](const Tensor& tensor) {
            const size_t sample = std::min(tensor.bytes, (size_t)256);
            for (size_t i = 0; i < 16; i++) hash = fnv1a(tensor.data + (tensor.bytes - sample) * i / 15, sample, hash);
        };
        for (auto& [name, tensor] : tensors) {
            hash = fnv1a(name.data(), name.size() + 1, hash);
            hash = fnv1a(&tensor.dtype, sizeof tensor.dtype, hash);
            hash = fnv1a(&tensor.bytes, sizeof tensor.bytes, hash);
            add(tensor);
            if (const Packed* p = tensor.packed.get()) {
                const uint64_t meaning[] = {(uint64_t)p->method, (uint64_t)p->bits, (uint64_t)p->zero_offset, p->group,
                                            p->group_rows};
                hash = fnv1a(meaning, sizeof meaning, hash);
                add(p->scales), add(p->zeros), add(p->order);
            }
        }
        return hash;
    }

  private:
    void open_one(const std::string& file) { // a model.bin or a GGUF file
        Metadata metadata;
        maps.emplace_back(file);
        if (maps[0].text().substr(0, 4) == "GGUF") return open_gguf();
        read_safetensors(maps[0], tensors, metadata);
        if (!metadata.count("config"))
            DIE("%s: no config in its metadata; export.py makes a model.bin from a Hugging Face folder", file.c_str());
        config_text = metadata["config"];
        generation_text = metadata["generation_config"];
        const auto quantization = take_quantization(file);
        config = parse_config(file, config_text, generation_text);
        finish(quantization);
    }
    void open_gguf() {
        const GgufFile g(maps[0]);
        int64_t rows = 0;
        bool tied = true;
        for (const GgufTensor& t : g.tensors) {
            const std::string usual = hugging_face_name(t.name);
            if (usual.empty()) g.fail(format("tensor %.100s belongs to no Qwen3 model", t.name.c_str()));
            tensors.emplace(usual, t.tensor);
            if (t.name == "token_embd.weight") rows = t.tensor.shape[0];
            tied &= t.name != "output.weight";
        }
        if (!tensors.count("model.embed_tokens.weight")) g.fail("no tensor token_embd.weight");
        config_text = gguf_config(g, rows, tied);
        vocabulary = std::make_unique<GgufVocabulary>(g);
        sj::Writer ends;
        ends.object().key("eos_token_id").array();
        for (uint64_t id : vocabulary->end_tokens(g)) ends.value(id);
        generation_text = ends.end().end().text;
        config = parse_config(g.path, config_text, generation_text);
        Tensors rest = tensors;
        for (const ModelTensor& t : model_tensors(config))
            if (const auto at = rest.find(t.name()); at != rest.end())
                need_shape(t.name(), at->second, t.shape()), rest.erase(at);
        if (!rest.empty())
            g.fail(format("tensor %s is of no layer: the model has %d", rest.begin()->first.c_str(), config.L));
    }
    // Reads quantization_config and takes it out of the config's text: what is made of the weights is not quantised.
    std::optional<QuantizationConfig> take_quantization(const std::string& file) {
        sj::Doc doc;
        if (!sj::parse(doc, config_text).empty()) return {}; // parse_config says what is wrong
        const sj::Value found = doc.root()["quantization_config"];
        if (!found || found.is(sj::Null) || found.is(sj::False)) return {};
        const QuantizationConfig q = parse_quantization(file.c_str(), found);
        sj::Writer rest;
        rest.object();
        for (auto [key, value] : doc.root().members())
            if (key != "quantization_config") rest.field(key, value);
        config_text = rest.end().text;
        return q;
    }
    void finish(const std::optional<QuantizationConfig>& quantization) {
        if (quantization) Packer{path, tensors, *quantization}.run();
        name_as_usual();
        drop_biases();
    }
    // Qwen3 has no biases. AutoGPTQ writes zeros.
    void drop_biases() {
        for (const ModelTensor& m : model_tensors(config)) {
            const std::string weight = m.name(), name = weight.substr(0, weight.size() - strlen("weight")) + "bias";
            const auto found = tensors.find(name);
            if (found == tensors.end()) continue;
            const Tensor& t = found->second;
            if (std::any_of(t.data, t.data + t.bytes, [](uint8_t b) { return b != 0; }))
                DIE("%s: tensor %s is not zero: a model with a bias is not supported", t.file.c_str(), name.c_str());
            tensors.erase(found);
        }
    }
    // A bare Qwen3Model, as Qwen3-Embedding is published, has no "model." before its tensors' names.
    void name_as_usual() {
        sj::Doc doc;
        sj::parse(doc, config_text);
        bare = doc.root()["architectures"][(size_t)0].str() == "Qwen3Model";
        if (!tensors.count("embed_tokens.weight") || tensors.count("model.embed_tokens.weight")) return;
        bare = true;
        Tensors usual;
        for (auto& [name, tensor] : tensors) usual.emplace((name == "lm_head.weight" ? "" : "model.") + name, tensor);
        tensors.swap(usual);
    }
    Dtype embedding_type() const {
        const auto t = tensors.find(ModelTensor{EMBED, -1, 0, 0}.name());
        return t == tensors.end() ? Dtype::Other : t->second.dtype;
    }
    void add(const std::string& file, Metadata& metadata) {
        maps.emplace_back(file);
        read_safetensors(maps.back(), tensors, metadata);
    }
    // model.safetensors.index.json: {"weight_map": {"TENSOR": "FILE", ..}}; the files are in the same folder.
    void add_shards(const std::string& file, Metadata& metadata) {
        const MappedFile map(file);
        sj::Doc doc;
        const std::string fault = sj::parse(doc, map.text());
        if (!fault.empty()) DIE("%s: %s", file.c_str(), fault.c_str());
        const sj::Value names = doc.root()["weight_map"];
        if (!names.is(sj::Object)) DIE("%s: no weight_map", file.c_str());
        std::set<std::string> shards;
        for (auto [tensor, v] : names.members()) {
            const std::string shard = v.str();
            if (shard.empty() || shard.find('/') != std::string::npos || shard.find('\0') != std::string::npos)
                DIE("%s: tensor %s has a bad file name", file.c_str(), tensor.c_str());
            if (shards.insert(shard).second) add(path + "/" + shard, metadata);
        }
        for (auto [tensor, v] : names.members()) {
            const auto t = tensors.find(tensor);
            if (t == tensors.end() || t->second.file != path + "/" + v.str())
                DIE("%s: tensor %s is not in %s", file.c_str(), tensor.c_str(), v.str().c_str());
        }
    }
};

// ============================================================================================================== 5 INT8
// 32 neighbours in a row of W share a scale s: W[r][i] = q[r][i] * s[r][i / 32], where q is w / s rounded to nearest
// even, -127..127. Such a product of 8 bits and a bf16's 8 bits is exact in a float: INT8 weights are weights like any
// others, of 8.5 bits each. Files hold them as NAME (I8) and NAME_scale (BF16, (rows, ceil(columns / 32))).
// The smallest s that will do is the smallest bf16 with 127 s >= max |w|. It and the next seven are tried, and the one
// with the least squared error is taken: how well the multiples of s fit the weights is chance, and the best of eight
// draws loses a fifth less (in KL) than the first.
constexpr int SCALES = 8;

// The smallest bf16 with 127 s >= largest.
inline bf16 int8_scale(float largest) {
    bf16 s = to_bf16(largest / 127);
    while (127. * to_acc(s) < largest) s.bits++;
    while (s.bits && 127. * to_acc(bf16{(uint16_t)(s.bits - 1)}) >= largest) s.bits--;
    return s;
}
// Of that and the next seven the one with the least sum of squared errors, added up in the order of w. (Of equal ones
// the first.)
inline bf16 int8_scale(const float* w, size_t n) {
    float largest = 0;
    for (size_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(w[i]));
    const bf16 first = int8_scale(largest);
    if (first.bits == 0) return first;
    typedef double Each __attribute__((vector_size(SCALES * sizeof(double))));
    Each s = {}, lost = {};
    for (int c = 0; c < SCALES; c++) s[c] = to_acc(bf16{(uint16_t)std::min(first.bits + c, 0x7f7f)});
    const Each inverse = 1. / s;
    for (size_t i = 0; i < n; i++) {
        const double x = w[i];
        const Each nearest = x * inverse + 6755399441055744. - 6755399441055744.; // adding 1.5 * 2^52 rounds
        const Each off = x - nearest * s;
        lost += off * off;
    }
    int best = 0;
    for (int c = 1; c < SCALES; c++)
        if (lost[c] < lost[best]) best = c;
    return {(uint16_t)std::min(first.bits + best, 0x7f7f)};
}

// Makes INT8 of a matrix. False if a number is not finite: q and scale are then not all set.
inline bool to_int8(int8_t* q,       // (rows, in) out
                    bf16* scale,     // (rows, ceil(in / 32)) out
                    const Tensor& t, // (rows, in)
                    size_t rows, size_t in) {
    static_assert(Tile::COLUMNS % GROUP == 0);
    const size_t groups = (in + GROUP - 1) / GROUP;
    std::atomic<bool> finite = true;
    each_tile(t, 0, rows, [&](const Tile& tile, const float* numbers) {
        for (size_t r = 0; r < tile.rows; r++)
            for (size_t k = 0; k < tile.columns; k += GROUP) {
                const float* w = numbers + r * Tile::COLUMNS + k;
                const size_t n = std::min((size_t)GROUP, tile.columns - k), first = (tile.r + r) * in + tile.k + k;
                if (!std::all_of(w, w + n, [](float x) { return std::isfinite(x); })) finite = false;
                if (!finite) return;
                const bf16 chosen = scale[(tile.r + r) * groups + (tile.k + k) / GROUP] = int8_scale(w, n);
                const double s = to_acc(chosen);
                for (size_t i = 0; i < n; i++) q[first + i] = s > 0 ? (int8_t)std::nearbyint(w[i] / s) : (int8_t)0;
            }
    });
    return finite;
}

// =========================================================================================== 6 Weights of a checkpoint

template <class T> struct WeightLoader {
    Weights<T>& w;
    const ModelFile& file;
    std::shared_ptr<Arena> last = nullptr; // of w.converted

    const Tensor& find(const std::string& name, const Shape& shape) {
        const auto found = file.tensors.find(name);
        if (found == file.tensors.end()) DIE("%s: no tensor %s", file.path.c_str(), name.c_str());
        need_shape(name, found->second, shape);
        return found->second;
    }

    // n new numbers, if there is memory for them. They are for tensor t, and live as long as the weights: one after
    // another in large pieces of memory, so that these can have huge pages.
    template <class U> U* own(size_t n, const Tensor& t, const std::string& name) {
        const size_t have = available_memory(), bytes = (n * sizeof(U) + 63) / 64 * 64, piece = 16 << 20;
        if (bytes > have)
            DIE("%s: converting tensor %s needs %zu bytes of memory and %zu are available", t.file.c_str(),
                name.c_str(), bytes, have);
        if (!last || last->size - last->used < bytes) {
            last = std::make_shared<Arena>();
            last->template take<uint8_t>(std::min(have, std::max(bytes, piece)));
            last->allocate("the model");
            w.converted.push_back(last);
        }
        return last->template take<U>(n);
    }

    // A tensor's numbers as T: where the file maps them, if they are T and aligned there.
    const T* numbers(const std::string& name, const Shape& shape) {
        const Tensor& t = find(name, shape);
        if (!t.is_float()) DIE("%s: tensor %s is not BF16, F16 or F32", t.file.c_str(), name.c_str());
        const bool same = (std::is_same_v<T, bf16> && t.dtype == Dtype::BF16) ||
                          (std::is_same_v<T, float> && t.dtype == Dtype::F32);
        return same && (uintptr_t)t.data % alignof(T) == 0 ? (const T*)t.data : converted(name, t);
    }
    const T* converted(const std::string& name, const Tensor& t) {
        T* out = own<T>(count_of(t.shape), t, name);
        if (!read_numbers(out, t) && t.is_quantized())
            DIE("%s: tensor %s has an infinity or a NaN", t.file.c_str(), name.c_str());
        return out;
    }

    // Makes the matrix (rows, in) block b of a Linear.
    void load_block(Linear<T>& linear, int b, const ModelTensor& m, bool int8, bool packed) {
        const std::string name = m.name();
        const int rows = linear.rows[b] = m.rows, in = linear.in = m.columns;
        const Tensor& t = find(name, m.shape());
        const Kept kept = packed && !int8 && t.is_quantized() ? kept_as(t) : Kept{};
        const Format before = linear.format;
        linear.w[b] = nullptr, linear.q[b] = nullptr, linear.scale[b] = nullptr, linear.zero[b] = nullptr;
        linear.group = kept.group, linear.group_rows = kept.group_rows, linear.format = kept.format;
        if (t.dtype == Dtype::I8) {
            const Tensor& s = find(name + "_scale", {rows, (in + GROUP - 1) / GROUP});
            if (s.dtype != Dtype::BF16 || (uintptr_t)s.data % 2)
                DIE("%s: tensor %s_scale is not BF16 at an even address", s.file.c_str(), name.c_str());
            linear.q[b] = (const int8_t*)t.data, linear.scale[b] = s.data, linear.format = Format::INT8;
        } else if (kept.format == Format::INT8) {
            linear.q[b] = (const int8_t*)t.data, linear.scale[b] = t.packed->scales.data;
        } else if (kept.format == Format::INT4) {
            const size_t n = (size_t)rows * linear.groups() + 8; // (a vector reads past the last row's end)
            int8_t* q = own<int8_t>(rows * linear.row_bytes(), t, name);
            uint16_t* scale = own<uint16_t>(n, t, name);
            uint8_t* zero = kept.zeros ? own<uint8_t>(n, t, name) : nullptr;
            std::fill_n(scale + n - 8, 8, 0);
            read_pairs(q, scale, zero, t, kept);
            linear.q[b] = q, linear.scale[b] = scale, linear.zero[b] = zero;
        } else if (kept.format == Format::FP8) {
            float* scale = own<float>(count_of(t.packed->scales.shape), t, name);
            if (!read_numbers(scale, t.packed->scales)) DIE("%s: %s has bad scales", t.file.c_str(), name.c_str());
            linear.q[b] = (const int8_t*)t.data, linear.scale[b] = scale;
        } else if (int8 || (packed && t.is_quantized())) {
            make_int8(linear, b, name, t);
        } else {
            linear.w[b] = numbers(name, {rows, in});
        }
        if (b && before != linear.format && !file.is_quantized())
            DIE("%s: tensor %s is INT8 and its neighbours are not, or the other way round", t.file.c_str(),
                name.c_str());
        plain = (b && plain) || linear.format == Format::PLAIN;
        mixed = b && (mixed || before != linear.format || kept.group != last_kept.group ||
                      kept.group_rows != last_kept.group_rows);
        last_kept = kept;
    }
    bool mixed = false, plain = false; // the Linear's blocks so far are not all of one format; one of them is PLAIN
    Kept last_kept = {};

  private:
    void make_int8(Linear<T>& linear, int b, const std::string& name, const Tensor& t) {
        const char* path = t.file.c_str();
        const int rows = linear.rows[b], in = linear.in;
        if (!t.is_float()) DIE("%s: tensor %s is not BF16, F16, F32 or I8", path, name.c_str());
        linear.format = Format::INT8, linear.group = GROUP, linear.group_rows = 1;
        int8_t* q = own<int8_t>((size_t)rows * in, t, name);
        bf16* scale = own<bf16>((size_t)rows * linear.groups(), t, name);
        if (!to_int8(q, scale, t, rows, in))
            DIE("%s: tensor %s has an infinity or a NaN, which INT8 cannot hold", path, name.c_str());
        linear.q[b] = q, linear.scale[b] = scale;
    }
};

// What most of its numbers are stored as.
template <class T> const char* type_name(const Weights<T>& w) {
    switch (w.layers[0].down.format) {
        case Format::INT8: return "int8";
        case Format::INT4: return "int4";
        case Format::FP8: return "fp8";
        default: return std::is_same_v<T, bf16> ? "bfloat16" : std::is_same_v<T, float> ? "float32" : "float64";
    }
}

template <class T> Weights<T>::Weights(const ModelFile& file, bool int8, bool packed) {
    WeightLoader<T> loader{*this, file};
    layers.resize(file.config.L);
    std::vector<ModelTensor> blocks; // of the Linear at work
    for (const ModelTensor& t : model_tensors(file.config)) {
        const TensorPlace<T> place = place_of(*this, t);
        if (t.kind == HEAD && !file.logits && !file.tensors.count(t.name())) continue;
        if (!place.linear) {
            *place.vector = loader.numbers(t.name(), t.shape());
            continue;
        }
        if (place.block == 0) blocks.clear();
        blocks.push_back(t);
        loader.load_block(*place.linear, place.block, t, int8, packed);
        const bool last = t.kind == V_PROJ || t.kind == UP_PROJ;
        // A product's blocks are of one format. INT8 holds all that is quantised.
        const bool some_plain = loader.plain;
        if (last && loader.mixed)
            for (size_t b = 0; b < blocks.size(); b++)
                loader.load_block(*place.linear, (int)b, blocks[b], int8 || !some_plain, packed && !some_plain);
    }
    if (file.config.tied) head = embed;
}

// ---- Huge pages. A decoding step reads every weight once, and memory gives a tenth more of it from pages of 2 MB than
// from a file's pages of 4 KB. So who decodes for long copies the files there. A copy takes about what 64 steps gain,
// and memory that the system cannot take back as it can a file's.
constexpr size_t HUGE_PAGE = 2 << 20;
constexpr size_t STEPS_TO_HUGE_PAGES = 64; // an answer that is so long pays for the copy

// The kernel has most of the mapping in huge pages: a file that was read from disk at once may be.
inline bool in_huge_pages(const MappedFile& map) {
    FILE* f = fopen("/proc/self/smaps", "r");
    char line[512];
    bool here = false;
    size_t begin, end, kilobytes, huge = 0;
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "%zx-%zx", &begin, &end) == 2)
            here = begin < (size_t)map.data + map.size && end > (size_t)map.data;
        else if (here && (sscanf(line, "FilePmdMapped: %zu", &kilobytes) == 1 ||
                          sscanf(line, "AnonHugePages: %zu", &kilobytes) == 1)) huge += kilobytes * 1024;
    }
    if (f) fclose(f);
    return huge > map.size / 2;
}

// Puts a copy of the file, in huge pages if the kernel gives them, where the file is mapped: no pointer to it changes.
// False: there is no memory for it.
inline bool copy_to_huge_pages(const MappedFile& map) {
    // The copy is as far from a multiple of 2 MB as the mapping is, so that huge pages can move there as they are.
    const size_t off = (uintptr_t)map.data % HUGE_PAGE, room = map.size + 2 * HUGE_PAGE;
    uint8_t* memory = (uint8_t*)mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    uint8_t* copy = memory + (HUGE_PAGE - (uintptr_t)memory % HUGE_PAGE) % HUGE_PAGE + off;
    madvise(memory, room, MADV_HUGEPAGE);
    #pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < map.size; i += HUGE_PAGE) memcpy(copy + i, map.data + i, std::min(HUGE_PAGE, map.size - i));
    mprotect(copy, map.size, PROT_READ);
    if (mremap(copy, map.size, map.size, MREMAP_MAYMOVE | MREMAP_FIXED, map.data) == MAP_FAILED)
        DIE("%s: moving a copy to where it is mapped: %s", map.path.c_str(), strerror(errno));
    // What is left of it, before and after. (Where the copy was, another thread may have memory by now.)
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), begin = (size_t)(copy - memory);
    const size_t end = begin + (map.size + page - 1) / page * page;
    if (begin) munmap(memory, begin);
    munmap(memory + end, room - end);
    return true;
}

// For a CPU's weights, if they are used where the files are mapped, are more than a cache holds, and half of the
// available memory takes them.
template <class T> void use_huge_pages(const ModelFile& file, const Weights<T>& w) {
    size_t all = 0;
    bool mapped = false; // or converted; norms may be so all the same
    const void* used = w.layers[0].down.w[0] ? (const void*)w.layers[0].down.w[0] : w.layers[0].down.q[0];
    for (const MappedFile& map : file.maps) all += map.size, mapped |= used >= map.data && used < map.data + map.size;
    char enabled[64] = "[never]"; // a system without such pages has no such file
    if (FILE* f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r")) {
        if (!fgets(enabled, sizeof enabled, f)) enabled[0] = 0;
        fclose(f);
    }
    if (strstr(enabled, "[never]") || !mapped || all < ((size_t)64 << 20) || all > available_memory() / 2)
        return;
    for (const MappedFile& map : file.maps)
        if (!in_huge_pages(map) && !copy_to_huge_pages(map)) return;
}

// ========================================================================================================== 7 Adapters
// LoRA in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors. An adapter is used beside the
// weights, which stay as they are: see Adapter.

constexpr int MAX_RANK = 1024;
constexpr int GPU_RANK_STEP = 8; // the GPU's kernels take multiples of 8

struct AdapterConfig {
    int rank = 0;
    double alpha = 0;
    bool rslora = false; // Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA", 2023
    bool targets[MODULES] = {};
    double scale() const { return alpha / (rslora ? std::sqrt((double)rank) : (double)rank); }
};

// A module's name as most adapters have it: q_proj.
inline std::string module_name(int m) { return strchr(TENSOR_NAMES[m], '.') + 1; }

// The module that PEFT's target_modules calls so ("q_proj", "self_attn.q_proj"); -1: none.
inline int module_of(const std::string& name) {
    for (int m = 0; m < MODULES; m++)
        if (name == TENSOR_NAMES[m] || name == module_name(m)) return m;
    return -1;
}

// Reads adapter_config.json. As with a model's config, what changes the computation is read or must be off. A key that
// is not known here may change it: it must be off too.
inline AdapterConfig parse_adapter_config(const std::string& file, std::string_view text) {
    const char* name = file.c_str();
    sj::Doc doc;
    const std::string fault = sj::parse(doc, text);
    if (!fault.empty()) DIE("%s: %s", name, fault.c_str());
    const sj::Value j = doc.root();
    if (!j.is(sj::Object)) DIE("%s: not a JSON object", name);
    if (j["peft_type"].str() != "LORA")
        DIE("%s: peft_type is %.60s, only \"LORA\" is supported", name,
            j["peft_type"] ? std::string(j["peft_type"].raw()).c_str() : "missing");
    static const std::set<std::string> read_below = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules",
                                                     "init_lora_weights"};
    static const std::set<std::string> bookkeeping = {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "task_type"};
    for (auto [key, v] : j.members()) {
        if (read_below.count(key) || bookkeeping.count(key)) continue;
        const bool empty = (v.is(sj::Object) || v.is(sj::Array)) && v.size() == 0;
        if (!(v.is(sj::Null) || v.is(sj::False) || empty || (key == "bias" && v.str() == "none")))
            DIE("%s: %s = %.60s is not supported", name, key.c_str(), std::string(v.raw()).c_str());
    }
    // PiSSA, OLoRA and their like move a part of the base model's weights into the adapter: it fits no other base.
    const sj::Value init = j["init_lora_weights"];
    if (init && !init.is_bool() && !init.is(sj::Null) && init.str() != "gaussian")
        DIE("%s: init_lora_weights = %.60s is not supported", name, std::string(init.raw()).c_str());
    AdapterConfig a;
    int64_t rank;
    if (!j["r"].integer(&rank) || rank < 1 || rank > MAX_RANK)
        DIE("%s: r is not a whole number from 1 to %d", name, MAX_RANK);
    a.rank = (int)rank;
    if (!j["lora_alpha"].is(sj::Number)) DIE("%s: no lora_alpha", name);
    a.alpha = j["lora_alpha"].number();
    if (!(std::fabs(a.alpha) < 1e6)) DIE("%s: lora_alpha is not between -1e6 and 1e6", name);
    const sj::Value rslora = j["use_rslora"], targets = j["target_modules"];
    if (rslora && !rslora.is_bool()) DIE("%s: use_rslora is not true or false", name);
    a.rslora = rslora.boolean(false);
    if (targets.str() == "all-linear") std::fill(a.targets, a.targets + MODULES, true);
    else if (!targets.is(sj::Array) || targets.size() == 0)
        DIE("%s: target_modules is neither a list of modules nor \"all-linear\"", name);
    for (sj::Value v : targets.items()) {
        const int m = module_of(v.str());
        if (m < 0)
            DIE("%s: target_modules has %.60s; q, k, v, o, gate, up and down_proj can have an adapter", name,
                std::string(v.raw()).c_str());
        a.targets[m] = true;
    }
    return a;
}

// adapter_config.json as PEFT reads it. `base` names the model, for people.
inline std::string adapter_config_json(const AdapterConfig& a, double dropout, const std::string& base) {
    sj::Writer w;
    w.object().field("base_model_name_or_path", base).field("bias", "none").field("fan_in_fan_out", false);
    w.field("inference_mode", true).field("init_lora_weights", true).field("lora_alpha", a.alpha);
    w.field("lora_dropout", dropout).field("modules_to_save", nullptr).field("peft_type", "LORA").field("r", a.rank);
    w.key("target_modules").array();
    for (int m = 0; m < MODULES; m++)
        if (a.targets[m]) w.value(module_name(m));
    w.end().field("task_type", "CAUSAL_LM").field("use_dora", false).field("use_rslora", a.rslora).end();
    return w.text + "\n";
}

// The model's matrices that the adapter is for, in the model's order.
inline std::vector<ModelTensor> targeted(const Config& c, const AdapterConfig& a) {
    std::vector<ModelTensor> all;
    for (const ModelTensor& t : model_tensors(c))
        if (t.kind < MODULES && a.targets[t.kind]) all.push_back(t);
    return all;
}
inline size_t adapter_parameters(const Config& c, const AdapterConfig& a) {
    size_t n = 0;
    for (const ModelTensor& t : targeted(c, a)) n += a.rank * ((size_t)t.rows + t.columns);
    return n;
}
// PEFT's name of a module's A (rank, in) or B (out, rank).
inline std::string adapter_tensor(int layer, int m, char matrix) {
    return format("base_model.model.model.layers.%d.%s.lora_%c.weight", layer, TENSOR_NAMES[m], matrix);
}

// A copy of a file in memory. (One that is mapped ends us, by SIGBUS, if another program cuts it short meanwhile.)
inline MappedFile copy_of_file(const std::string& path, size_t most) {
    struct Open { // closed however we leave
        int fd;
        ~Open() { if (fd >= 0) close(fd); }
    };
    const Open from{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    struct stat st;
    if (from.fd < 0 || fstat(from.fd, &st) != 0) DIE("%s: %s", path.c_str(), strerror(errno));
    if (!S_ISREG(st.st_mode)) DIE("%s: not a regular file", path.c_str());
    if ((size_t)st.st_size > std::min(most, available_memory()))
        DIE("%s: %zu bytes are too many", path.c_str(), (size_t)st.st_size);
    const Open to{memfd_create("copy", MFD_CLOEXEC)};
    std::vector<char> some(1 << 20);
    for (ssize_t n; (n = read(from.fd, some.data(), some.size())) != 0;)
        if (n < 0 || write(to.fd, some.data(), (size_t)n) != n) DIE("%s: %s", path.c_str(), strerror(errno));
    MappedFile copy(format("/proc/self/fd/%d", to.fd));
    copy.path = path;
    return copy;
}

// An adapter's files, checked against the model they are for: every tensor that must be there is, with the right shape
// and finite numbers, and no other.
struct AdapterFile {
    std::string path;
    MappedFile map;
    Tensors tensors;
    Metadata metadata;
    AdapterConfig config;

    // copied: other programs may be at work on the files.
    AdapterFile(const std::string& folder, const Config& c, bool copied = false) : path(folder) {
        const std::string text = folder + "/adapter_config.json", numbers = folder + "/adapter_model.safetensors";
        constexpr size_t TEXT = 1 << 20; // bytes of a JSON text, at most
        auto mapped = [&](const std::string& p, size_t most) { return copied ? copy_of_file(p, most) : MappedFile(p); };
        config = parse_adapter_config(text, mapped(text, TEXT).text());
        map = mapped(numbers, adapter_parameters(c, config) * sizeof(float) + 8 * TEXT);
        read_safetensors(map, tensors, metadata);
        std::set<std::string> expected;
        for (const ModelTensor& t : targeted(c, config))
            for (char matrix : {'A', 'B'}) {
                const std::string name = adapter_tensor(t.layer, t.kind, matrix);
                check(name, matrix == 'A' ? Shape{config.rank, t.columns} : Shape{t.rows, config.rank});
                expected.insert(name);
            }
        for (auto& [name, t] : tensors)
            if (!expected.count(name))
                DIE("%s: tensor %s belongs to no module that the config names", map.path.c_str(), name.c_str());
    }

  private:
    void check(const std::string& name, const Shape& shape) const {
        const char* file = map.path.c_str();
        const auto found = tensors.find(name);
        if (found == tensors.end()) DIE("%s: no tensor %s", file, name.c_str());
        const Tensor& t = found->second;
        need_shape(name, t, shape);
        if (!t.is_float()) DIE("%s: tensor %s is not BF16, F16 or F32", file, name.c_str());
        for (size_t i = 0; i < (size_t)(shape[0] * shape[1]); i++)
            if (!std::isfinite(number(t, i))) DIE("%s: tensor %s has an infinity or a NaN", file, name.c_str());
    }
};

// ---- Adapters in memory. `w` is Weights, or whatever else has `layers` as they have.

// Gives every targeted product of the model its Adapter, with no memory for A, B and h yet. Their rank is the config's,
// rounded up to a multiple of `step`; it is returned.
template <class Model> int adapt(Model& w, const AdapterConfig& config, int step = 1) {
    const int rank = (config.rank + step - 1) / step * step;
    for (int l = 0; l < (int)w.layers.size(); l++)
        for (int m = 0; m < MODULES; m++) {
            if (!config.targets[m]) continue;
            const auto place = place_of(w.layers[l], (TensorKind)m);
            auto& a = place.linear->adapter;
            a.rank = rank, a.true_rank = config.rank, a.s = (float)config.scale();
            a.block[a.modules] = place.block, a.module[a.modules++] = l * MODULES + m;
        }
    return rank;
}

// All numbers of an adapter are one array: the A of each product in the model's order, then the B of each. This is
// where a product's A and B begin there, and where its h begins among the h of one token.
struct AdapterPlace { size_t A = 0, B = 0, h = 0; };
// Calls f(linear, place) for each product that has an adapter. Returns where the last A, B and h end.
template <class Model, class F> AdapterPlace each_adapter(Model& w, F f) {
    AdapterPlace at;
    auto each_linear = [&](auto g) {
        for (auto& layer : w.layers)
            for (auto* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
                if (linear->adapter.modules) g(*linear, linear->adapter.width());
    };
    each_linear([&](auto& linear, size_t width) { at.B += width * linear.in; });
    each_linear([&](auto& linear, size_t width) {
        f(linear, at);
        at.A += width * linear.in, at.B += width * linear.out(), at.h += width;
    });
    return at;
}

// Calls f(name, rows, columns, at, stride) for each of PEFT's tensors: its row r is `columns` numbers of that array,
// from at + r * stride on. What lies between the rows is zero.
template <class Model, class F> void each_adapter_tensor(Model& w, F f) {
    each_adapter(w, [&](auto& linear, AdapterPlace at) {
        const auto& a = linear.adapter;
        const size_t rank = a.rank, kept = a.true_rank, in = linear.in, width = a.width();
        for (int j = 0; j < a.modules; j++) {
            const int layer = a.module[j] / MODULES, m = a.module[j] % MODULES, b = a.block[j];
            const size_t row = linear.first_row(b);
            f(adapter_tensor(layer, m, 'A'), kept, in, at.A + j * rank * in, in);
            f(adapter_tensor(layer, m, 'B'), (size_t)linear.rows[b], kept, at.B + row * width + j * rank, width);
        }
    });
}

// The file's numbers as that array (B without s).
template <class Model> std::vector<float> adapter_numbers(Model& w, const AdapterFile& file) {
    std::vector<float> p(each_adapter(w, [](auto&, AdapterPlace) {}).B);
    each_adapter_tensor(w, [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t stride) {
        const Tensor& t = file.tensors.at(name);
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < columns; i++) p[at + r * stride + i] = number(t, r * columns + i);
    });
    return p;
}

// An adapter in use, for batches of up to `tokens`. The weights point into it.
template <class T> struct AttachedAdapter {
    Arena arena;

    template <class Model> AttachedAdapter(Context& ctx, Model& w, const AdapterFile& file, int tokens) {
        const int rank = adapt(w, file.config, ctx.gpu ? GPU_RANK_STEP : 1);
        const std::vector<float> p = adapter_numbers(w, file);
        const size_t A = each_adapter(w, [](Linear<T>&, AdapterPlace) {}).A; // numbers of all A
        const float s = (float)file.config.scale();
        std::vector<T> stored(p.size());
        for (size_t i = 0; i < p.size(); i++) stored[i] = to_stored<T>(i < A ? p[i] : p[i] * s);
        arena.gpu = ctx.gpu != nullptr;
        T *numbers, *h; // one h for all products: without training nobody reads it again
        auto plan = [&] { numbers = arena.take<T>(p.size()), h = arena.take<T>((size_t)tokens * 3 * rank); };
        plan();
        arena.allocate("the adapter");
        plan();
        copy_in(ctx, numbers, stored.data(), stored.size());
        each_adapter(w, [&](Linear<T>& linear, AdapterPlace at) {
            Adapter<T>& a = linear.adapter;
            a.A = numbers + at.A, a.B = numbers + at.B, a.h = h;
        });
    }
};

// ==================================================================================================== 8 Models written

// What a tensor of a model is written as: what it is, or BF16 if it is quantised.
inline const char* written_type(const std::string& name, const Tensor& t) {
    if (t.is_quantized()) return "BF16";
    for (const char* type : {"BF16", "F16", "F32", "I8"})
        if (t.dtype == dtype_named(type)->dtype) return type;
    DIE("%s: tensor %s is not BF16, F16, F32 or I8", t.file.c_str(), name.c_str());
}
inline void write_tensor(OutputFile& out, const std::string& name, const Tensor& t) {
    if (!t.is_quantized()) return out.write(t.data, t.bytes);
    std::vector<bf16> numbers(count_of(t.shape));
    if (!read_numbers(numbers.data(), t))
        DIE("%s: tensor %s has an infinity or a NaN", t.file.c_str(), name.c_str());
    out.write(numbers.data(), numbers.size() * sizeof(bf16));
}

// The file's tensors; our own INT8 matrices are packed ones here, whose numbers can be read.
inline Tensors readable_tensors(const ModelFile& file) {
    Tensors all = file.tensors;
    const QuantizationConfig none = {};
    Packer{file.path, all, none}.pack_bytes();
    return all;
}

// Writes W + s B A, computed in float32 and rounded once, to the type of W (a quantised one: to bf16).
inline void write_merged_matrix(OutputFile& out, const std::string& name,
                                const Tensor& W, // (rows, in)
                                const Tensor& A, // (rank, in)
                                const Tensor& B, // (rows, rank)
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

// Writes the model as one model.bin, in the order of the layers' work; what is quantised as bf16. Returns its bytes.
inline size_t write_model(const ModelFile& file, const std::string& path) {
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
    return write_safetensors(path, model_metadata(file.config_text, file.generation_text), tensors);
}

// Writes the model with the adapter merged into it: a model.bin if the path ends in .bin, else a Hugging Face folder,
// to which the tokenizer's files for others in the base's folder are copied. Tensors without an adapter keep their
// bytes, or become bf16 if they are quantised.
inline void write_merged(const ModelFile& file, const AdapterFile& adapter, const std::string& path) {
    const Tensors from = readable_tensors(file);
    std::map<std::string, ModelTensor> modules; // by name
    for (const ModelTensor& t : targeted(file.config, adapter.config)) {
        const auto found = from.find(t.name());
        if (found == from.end()) DIE("%s: no tensor %s", file.path.c_str(), t.name().c_str());
        need_shape(t.name(), found->second, t.shape());
        modules.emplace(t.name(), t);
    }
    std::vector<OutTensor> tensors;
    for (auto& entry : from) {
        const std::string& name = entry.first;
        const Tensor& W = entry.second;
        const char* dtype = written_type(name, W);
        const auto at = modules.find(name);
        if (at == modules.end()) {
            tensors.push_back({name, dtype, W.shape, [&](OutputFile& out) { write_tensor(out, name, W); }});
            continue;
        }
        const Tensor& A = adapter.tensors.at(adapter_tensor(at->second.layer, at->second.kind, 'A'));
        const Tensor& B = adapter.tensors.at(adapter_tensor(at->second.layer, at->second.kind, 'B'));
        tensors.push_back({name, dtype, W.shape, [&, s = (float)adapter.config.scale()](OutputFile& out) {
            write_merged_matrix(out, name, W, A, B, s);
        }});
    }
    if (path.size() > 4 && path.compare(path.size() - 4, 4, ".bin") == 0) {
        write_safetensors(path, model_metadata(file.config_text, file.generation_text), tensors);
        return;
    }
    make_folder(path);
    write_text(path + "/config.json", file.config_text);
    if (!file.generation_text.empty()) write_text(path + "/generation_config.json", file.generation_text);
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt",
                             "vocab.json", "special_tokens_map.json", "added_tokens.json"})
        if (const std::string from = file.path + "/" + name; access(from.c_str(), F_OK) == 0)
            write_text(path + "/" + name, MappedFile(from).text());
    write_safetensors(path + "/model.safetensors", {{"format", "pt"}}, tensors);
}

// ================================================================================================== 9 Weights to a GPU
// What goes to the GPU: bytes of the CPU's memory, and where in the weights' arena.
struct UploadPiece { const void* from; size_t to, bytes; };

// Places a packed matrix in the arena, its blocks one after another: numbers, scales, and INT4's zero points, which all
// blocks have if one has them. FP8's blocks of rows go on from block to block only where they are whole; else each row
// gets scales of its own. With `pieces`, says what to copy and points there; `made` keeps what no file holds.
template <class T>
void place_packed(Arena& gpu, Linear<T>& W, std::vector<UploadPiece>* pieces,
                  std::vector<std::vector<uint8_t>>& made) {
    const size_t groups = (size_t)W.groups(), size = W.format == Format::FP8 ? sizeof(float) : sizeof(uint16_t);
    bool whole = true, zeros = false;
    for (int b = 0; b < 3; b++) {
        zeros |= W.zero[b] != nullptr;
        whole &= b == 2 || !W.rows[b + 1] || W.rows[b] % W.group_rows == 0;
    }
    const int group_rows = whole ? W.group_rows : 1;
    auto scale_rows = [&](int b) { return (size_t)(W.rows[b] + group_rows - 1) / group_rows; };
    int8_t* q = gpu.take<int8_t>((size_t)W.out() * W.row_bytes());
    uint8_t* scale = gpu.take<uint8_t>((scale_rows(0) + scale_rows(1) + scale_rows(2)) * groups * size);
    uint8_t* zero = zeros ? gpu.take<uint8_t>((size_t)W.out() * groups) : nullptr;
    if (!pieces) return;
    auto put = [&](const void* from, const void* to, size_t bytes) {
        pieces->push_back({from, (size_t)((const uint8_t*)to - gpu.base), bytes});
    };
    for (int b = 0; b < 3 && W.rows[b]; b++) {
        const size_t rows = (size_t)W.rows[b], row_bytes = groups * size;
        const uint8_t* scales = (const uint8_t*)W.scale[b];
        if (!whole) {
            std::vector<uint8_t>& each = made.emplace_back(rows * row_bytes);
            for (size_t r = 0; r < rows; r++)
                memcpy(&each[r * row_bytes], scales + r / (size_t)W.group_rows * row_bytes, row_bytes);
            scales = each.data();
        }
        if (zeros && !W.zero[b]) made.emplace_back(rows * groups, (uint8_t)8);
        put(W.q[b], q, rows * W.row_bytes()), put(scales, scale, scale_rows(b) * row_bytes);
        if (zeros) put(W.zero[b] ? W.zero[b] : made.back().data(), zero, rows * groups);
        W.q[b] = q, W.scale[b] = scale, W.zero[b] = zero;
        q += rows * W.row_bytes(), scale += scale_rows(b) * row_bytes, zero += zeros ? rows * groups : 0;
    }
    W.group_rows = group_rows;
}

// Room for the largest matrix of a layer as bf16; and for parts of embedding and head, which are larger (packed.h).
constexpr size_t LEAST_UNPACKED = 32 << 20; // numbers
inline size_t unpacked_numbers(const Config& c) {
    const size_t C = (size_t)c.C, head = (size_t)c.V * C, wide = (size_t)(c.H + 2 * c.K) * c.D;
    return std::max({C * wide, 2 * C * (size_t)c.F, std::min(head, std::max(LEAST_UNPACKED, (size_t)c.V * 64))});
}

#ifdef __CUDACC__
// What the kernels can compute, else one line.
inline void check_gpu(const std::string& name, const Config& c, bool logits = true) {
    const char* n = name.c_str();
    if (c.D != 64 && c.D != 128)
        DIE("%s: the GPU's kernels are for heads of 64 and 128, not %d (--device cpu)", n, c.D);
    if (c.H / c.K > 128)
        DIE("%s: %d query heads a key/value head; the GPU's kernels take 128 (--device cpu)", n, c.H / c.K);
    if (c.C % 8 || c.F % 8 || (c.V % 8 && logits))
        DIE("%s: the GPU's kernels need hidden size (%d), ffn size (%d) and vocabulary rows (%d) in multiples of 8 "
            "(--device cpu)", n, c.C, c.F, c.V);
}

// Copies all to the GPU and lets every pointer point there, the blocks of a Linear one after another. The CPU's threads
// read the mapped file into one pinned buffer while the other one is on its way: so the link sets the pace, not the
// page faults.
template <class T> void Weights<T>::upload(Context& ctx, const ModelFile& file) {
    check_gpu(file.path, file.config, file.logits);
    std::vector<UploadPiece> pieces;
    std::vector<std::vector<uint8_t>> made;
    gpu.gpu = true;
    bool packed = false; // one of them is
    for (bool planned : {false, true}) {
        T* to = nullptr;
        for (const ModelTensor& t : model_tensors(file.config)) {
            const TensorPlace<T> place = place_of(*this, t);
            if (place.linear && place.linear->format != Format::PLAIN) {
                if (place.block == 0) place_packed(gpu, *place.linear, planned ? &pieces : nullptr, made);
                packed = true;
                continue;
            }
            if (!place.numbers()) continue; // a head that the file has not got
            if (place.block == 0) to = gpu.take<T>(place.linear ? (size_t)place.linear->out() * t.columns : t.size());
            if (planned) {
                pieces.push_back({place.numbers(), (size_t)((uint8_t*)to - gpu.base), t.size() * sizeof(T)});
                place.numbers() = to;
                to += t.size();
            }
        }
        if (packed) {
            ctx.gpu->unpacked_numbers = unpacked_numbers(file.config);
            ctx.gpu->unpacked = gpu.take<bf16>(ctx.gpu->unpacked_numbers);
        }
        if (!planned) gpu.allocate("the model");
    }
    if (file.config.tied) head = embed;
    // (The blocks of a packed Linear: its weights lie together, its scales behind them.)
    std::sort(pieces.begin(), pieces.end(), [](const UploadPiece& a, const UploadPiece& b) { return a.to < b.to; });

    constexpr size_t BUFFER = 16 << 20;
    uint8_t* buffer[2];
    cudaEvent_t sent[2];
    for (int i = 0; i < 2; i++) {
        CUDA_CHECK(cudaMallocHost(&buffer[i], BUFFER));
        CUDA_CHECK(cudaEventCreateWithFlags(&sent[i], cudaEventDisableTiming));
    }
    size_t start = 0, piece = 0, done = 0; // the buffer stands for the arena from `start` on; bytes done of a piece
    for (int turn = 0; piece < pieces.size(); turn ^= 1) {
        CUDA_CHECK(cudaEventSynchronize(sent[turn]));
        start = pieces[piece].to + done;
        size_t end = start;
        while (piece < pieces.size() && pieces[piece].to + done < start + BUFFER) {
            const UploadPiece& p = pieces[piece];
            const size_t at = p.to + done - start, n = std::min(p.bytes - done, BUFFER - at), part = 1 << 19;
            #pragma omp parallel for schedule(static) if (n > part)
            for (size_t i = 0; i < (n + part - 1) / part; i++)
                memcpy(buffer[turn] + at + i * part, (const uint8_t*)p.from + done + i * part,
                       std::min(part, n - i * part));
            end = start + at + n;
            done += n;
            if (done == p.bytes) piece++, done = 0;
        }
        CUDA_CHECK(cudaMemcpyAsync(gpu.base + start, buffer[turn], end - start, cudaMemcpyHostToDevice,
                                   ctx.gpu->stream));
        CUDA_CHECK(cudaEventRecord(sent[turn], ctx.gpu->stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(ctx.gpu->stream));
    for (int i = 0; i < 2; i++) cudaFreeHost(buffer[i]), cudaEventDestroy(sent[i]);
    converted.clear();
}
#endif // __CUDACC__
