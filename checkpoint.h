// checkpoint.h: a model's files: safetensors, Hugging Face folders, PEFT adapters. Included by qwen3.cu.

inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff, u;
    if (exponent == 31) u = sign | 0x7f800000 | fraction << 13;
    else if (exponent) u = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        float f = std::ldexp((float)fraction, -24); // subnormal or zero: fraction * 2^-24, exact
        memcpy(&u, &f, 4);
        u |= sign;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// model.bin is a safetensors file (8 bytes: length of the header; the header, JSON; the tensors' bytes) with
// Hugging Face's tensor names and two texts in __metadata__: config and generation_config. A Hugging Face
// folder is taken as it is: config.json, generation_config.json, model.safetensors or an index and shards.


// Reads config.json (or its text in model.bin). Every key that changes the computation is either read or must
// have the one value that this program computes; keys of training and bookkeeping are ignored.
inline Config parse_config(const std::string& file, std::string_view text, std::string_view generation_text) {
    const char* name = file.c_str();
    sj::Doc doc;
    std::string fault = sj::parse(doc, text);
    if (!fault.empty()) DIE("%s: config: %s", name, fault.c_str());
    sj::Value j = doc.root();
    if (!j.is(sj::Object)) DIE("%s: config is not a JSON object", name);

    if (j["model_type"].str() != "qwen3")
        DIE("%s: model_type is %.60s, only \"qwen3\" is supported", name, j["model_type"] ? std::string(j["model_type"].raw()).c_str() : "missing");

    auto refuse = [&](const char* key, sj::Value v) {
        DIE("%s: config has %s = %.60s, which is not supported", name, key, std::string(v.raw()).c_str());
    };
    auto must_be = [&](const char* key, bool ok) { if (j[key] && !ok) refuse(key, j[key]); };
    auto off = [](sj::Value v) { return v.is(sj::Null) || v.is(sj::False); };
    for (const char* key : {"attention_bias", "mlp_bias", "use_sliding_window", "rope_scaling", "quantization_config", "num_experts",
                            "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "residual_multiplier",
                            "embedding_multiplier", "tie_encoder_decoder", "is_encoder_decoder", "use_bidirectional_attention"})
        must_be(key, off(j[key]));
    must_be("hidden_act", j["hidden_act"].str() == "silu");
    must_be("partial_rotary_factor", j["partial_rotary_factor"].number() == 1);
    must_be("use_qk_norm", j["use_qk_norm"].is(sj::True));
    must_be("layer_types", j["layer_types"].is(sj::Array) || j["layer_types"].is(sj::Null));
    for (sj::Value kind : j["layer_types"].items())
        if (kind.str() != "full_attention") refuse("layer_types", kind);

    auto integer = [&](const char* key, int64_t low, int64_t high, int64_t otherwise) {
        int64_t v = otherwise;
        if (!j[key] && otherwise < 0) DIE("%s: config has no %s", name, key);
        if (j[key] && !j[key].integer(&v)) DIE("%s: config: %s is not an integer", name, key);
        if (v < low || v > high) DIE("%s: config: %s = %lld is outside %lld..%lld", name, key, (long long)v, (long long)low, (long long)high);
        return (int)v;
    };
    Config c;
    c.C = integer("hidden_size", 1, 1 << 20, -1);
    c.L = integer("num_hidden_layers", 1, 4096, -1);
    c.H = integer("num_attention_heads", 1, 4096, -1);
    c.K = integer("num_key_value_heads", 1, 4096, -1);
    c.D = integer("head_dim", 2, 512, 128); // 128 is Hugging Face's default for qwen3
    c.F = integer("intermediate_size", 1, 1 << 20, -1);
    c.V = integer("vocab_size", 1, 1 << 24, -1);
    c.max_positions = integer("max_position_embeddings", 1, 1 << 24, -1);
    if (c.D % 2) DIE("%s: config: head_dim = %d is odd, RoPE needs pairs", name, c.D);
    if (c.H % c.K) DIE("%s: config: %d query heads do not share %d key/value heads evenly", name, c.H, c.K);

    if (!j["rms_norm_eps"].is(sj::Number)) DIE("%s: config has no rms_norm_eps", name);
    c.eps = (float)j["rms_norm_eps"].number();
    if (!(c.eps > 0 && c.eps < 1)) DIE("%s: config: rms_norm_eps is not between 0 and 1", name);
    sj::Value rope = j["rope_parameters"], theta = j["rope_theta"]; // transformers 5 has the first, 4 the second
    if (rope && !rope.is(sj::Null)) {
        if (!rope.is(sj::Object)) refuse("rope_parameters", rope);
        for (auto [key, value] : rope.members()) {
            if (key == "rope_theta") theta = value;
            else if (!(key == "rope_type" && value.str() == "default") && !(key == "partial_rotary_factor" && value.number() == 1))
                refuse(("rope_parameters." + key).c_str(), value);
        }
    }
    if (!theta.is(sj::Number)) DIE("%s: config has no rope_theta", name);
    c.rope_theta = theta.number();
    if (!(c.rope_theta >= 1 && c.rope_theta < 1e12)) DIE("%s: config: rope_theta is not between 1 and 1e12", name);
    sj::Value tied = j["tie_word_embeddings"];
    if (tied && !tied.is_bool()) refuse("tie_word_embeddings", tied);
    c.tied = tied.boolean(false);

    sj::Doc generation;
    if (!generation_text.empty()) {
        fault = sj::parse(generation, generation_text);
        if (!fault.empty()) DIE("%s: generation_config: %s", name, fault.c_str());
    }
    sj::Value g = generation.root(), eos = g["eos_token_id"];
    if (!eos || eos.is(sj::Null)) eos = j["eos_token_id"];
    auto end = [&](sj::Value v) {
        int64_t id;
        if (!v.integer(&id) || id < 0 || id >= c.V) DIE("%s: eos_token_id holds %.60s, which is no id of the vocabulary", name, std::string(v.raw()).c_str());
        c.end_tokens.push_back((int)id);
    };
    if (eos.is(sj::Array)) for (sj::Value v : eos.items()) end(v);
    else if (eos && !eos.is(sj::Null)) end(eos);
    return c;
}

enum class Dtype { BF16, F16, F32, I8, Other };

struct Tensor {
    std::string file;          // where it is, for messages
    Dtype dtype = Dtype::Other;
    std::vector<int64_t> shape;
    const uint8_t* data = nullptr;
    size_t bytes = 0;
};
using Tensors = std::map<std::string, Tensor>;

// Number i of a BF16, F16 or F32 tensor.
inline float number(const Tensor& t, size_t i) {
    float f;
    uint16_t h;
    if (t.dtype == Dtype::F32) return memcpy(&f, t.data + 4 * i, 4), f;
    memcpy(&h, t.data + 2 * i, 2);
    return t.dtype == Dtype::F16 ? half_to_float(h) : to_acc(bf16{h});
}

// Bytes of one number of a safetensors dtype, 0 if it has no such name.
inline size_t dtype_size(const std::string& name, Dtype* dtype) {
    static const struct { const char* name; size_t size; Dtype dtype; } table[] = {
        {"BF16", 2, Dtype::BF16}, {"F16", 2, Dtype::F16}, {"F32", 4, Dtype::F32},
        {"F64", 8, Dtype::Other}, {"I64", 8, Dtype::Other}, {"U64", 8, Dtype::Other}, {"I32", 4, Dtype::Other},
        {"U32", 4, Dtype::Other}, {"I16", 2, Dtype::Other}, {"U16", 2, Dtype::Other}, {"I8", 1, Dtype::I8},
        {"U8", 1, Dtype::Other}, {"BOOL", 1, Dtype::Other}, {"F8_E4M3", 1, Dtype::Other}, {"F8_E5M2", 1, Dtype::Other}};
    for (auto& row : table)
        if (name == row.name) { *dtype = row.dtype; return row.size; }
    return 0;
}

// Adds the tensors of one safetensors file to `out` and its __metadata__ to `metadata`. Accepts what the
// reference implementation accepts: a header of at most 100 MB that is a UTF-8 JSON object; for every tensor
// begin <= end and end - begin = shape x dtype; together the tensors cover the data exactly, without a hole
// or an overlap.
inline void read_safetensors(const MappedFile& map, Tensors& out, std::map<std::string, std::string>& metadata) {
    const char* name = map.path.c_str();
    uint64_t length = 0;
    if (map.size < 8) DIE("%s: %zu bytes are too few for a safetensors file", name, map.size);
    memcpy(&length, map.data, 8);
    if (length > 100'000'000) DIE("%s: not a safetensors file: its header would be %llu bytes", name, (unsigned long long)length);
    if (length > map.size - 8) DIE("%s: truncated: the header is %llu bytes, the file %zu", name, (unsigned long long)length, map.size);
    std::string_view header((const char*)map.data + 8, length);
    const uint8_t* data = map.data + 8 + length;
    const uint64_t data_size = map.size - 8 - length;
    if (header.empty() || header[0] != '{') DIE("%s: not a safetensors file: its header is no JSON object", name);
    sj::Doc doc;
    std::string fault = sj::parse(doc, header);
    if (!fault.empty()) DIE("%s: header: %s", name, fault.c_str());

    struct Span { uint64_t begin, end; std::string name; };
    std::vector<Span> spans;
    std::set<std::string> seen;
    for (auto [key, v] : doc.root().members()) {
        const char* k = key.c_str();
        if (!seen.insert(key).second) DIE("%s: header names %s twice", name, k);
        if (key == "__metadata__") {
            if (!v.is(sj::Object)) DIE("%s: __metadata__ is not an object", name);
            for (auto [mk, mv] : v.members()) {
                if (!mv.is(sj::String)) DIE("%s: __metadata__: %s is not a string", name, mk.c_str());
                metadata[mk] = mv.str();
            }
            continue;
        }
        Tensor t;
        t.file = map.path;
        size_t size = dtype_size(v["dtype"].str(), &t.dtype);
        if (!v.is(sj::Object) || !v["dtype"].is(sj::String) || !v["shape"].is(sj::Array) || !v["data_offsets"].is(sj::Array))
            DIE("%s: tensor %s lacks dtype, shape or data_offsets", name, k);
        if (!size) DIE("%s: tensor %s has the unknown dtype %.40s", name, k, v["dtype"].str().c_str());
        uint64_t bytes = size;
        for (sj::Value d : v["shape"].items()) {
            int64_t n;
            if (!d.integer(&n) || d.raw()[0] == '-') DIE("%s: tensor %s has a bad shape", name, k); // -0 is refused too
            if (__builtin_mul_overflow(bytes, (uint64_t)n, &bytes)) DIE("%s: the shape of tensor %s overflows 64 bits", name, k);
            t.shape.push_back(n);
        }
        int64_t begin, end;
        sj::Value at = v["data_offsets"];
        if (at.size() != 2 || !at[(size_t)0].integer(&begin) || !at[1].integer(&end) || begin < 0 || end < begin || at[(size_t)0].raw()[0] == '-')
            DIE("%s: tensor %s has bad data_offsets", name, k);
        if ((uint64_t)end > data_size) DIE("%s: truncated: tensor %s ends at byte %lld of %llu", name, k, (long long)end, (unsigned long long)data_size);
        if ((uint64_t)(end - begin) != bytes)
            DIE("%s: tensor %s has %lld bytes, its shape needs %llu", name, k, (long long)(end - begin), (unsigned long long)bytes);
        t.data = data + begin;
        t.bytes = bytes;
        spans.push_back({(uint64_t)begin, (uint64_t)end, key});
        auto [where, fresh] = out.emplace(key, t);
        if (!fresh) DIE("%s: tensor %s is also in %s", name, k, where->second.file.c_str());
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    uint64_t expected = 0;
    for (const Span& s : spans) {
        if (s.begin != expected) DIE("%s: %s before tensor %s", name, s.begin < expected ? "overlap" : "hole", s.name.c_str());
        expected = s.end;
    }
    if (expected != data_size) DIE("%s: the tensors end at byte %llu, the data at %llu", name, (unsigned long long)expected, (unsigned long long)data_size);
}

inline void need_shape(const std::string& name, const Tensor& t, const std::vector<int64_t>& shape) {
    auto text = [](const std::vector<int64_t>& dims) {
        std::string s;
        for (int64_t d : dims) s += format("%s%lld", s.empty() ? "" : ",", (long long)d);
        return s;
    };
    if (t.shape != shape)
        DIE("%s: tensor %s is (%s), the config needs (%s)", t.file.c_str(), name.c_str(), text(t.shape).c_str(), text(shape).c_str());
}

// The files of a model, mapped and checked; tensors are found by name and not yet looked at.
struct ModelFile {
    std::string path;
    std::vector<MappedFile> maps;
    Tensors tensors;
    Config config;
    std::string config_text, generation_text;

    // path: a model.bin or a Hugging Face folder.
    explicit ModelFile(const std::string& p) : path(p) {
        struct stat st;
        if (stat(p.c_str(), &st) != 0) DIE("%s: %s", p.c_str(), strerror(errno));
        std::map<std::string, std::string> metadata;
        if (!S_ISDIR(st.st_mode)) {
            add(p, metadata);
            if (!metadata.count("config")) DIE("%s: no config in its metadata; export.py makes a model.bin from a Hugging Face folder", p.c_str());
            config_text = metadata["config"];
            generation_text = metadata["generation_config"];
            config = parse_config(p, config_text, generation_text);
            return;
        }
        auto exists = [](const std::string& f) { return access(f.c_str(), F_OK) == 0; };
        if (!exists(p + "/config.json")) DIE("%s: a folder without a model: it has no config.json", p.c_str());
        config_text = MappedFile(p + "/config.json").text();
        if (exists(p + "/generation_config.json")) generation_text = MappedFile(p + "/generation_config.json").text();
        config = parse_config(p, config_text, generation_text);
        if (exists(p + "/model.safetensors")) add(p + "/model.safetensors", metadata);
        else if (exists(p + "/model.safetensors.index.json")) add_shards(p + "/model.safetensors.index.json", metadata);
        else DIE("%s: a folder without a model: it has no model.safetensors and no model.safetensors.index.json", p.c_str());
    }

    bool is_int8() const {
        auto t = tensors.find("model.embed_tokens.weight");
        return t != tensors.end() && t->second.dtype == Dtype::I8;
    }

    // The checkpoint's own type: what the embedding is stored in. F16 is read as bf16.
    bool is_float32() const {
        auto t = tensors.find("model.embed_tokens.weight");
        return t != tensors.end() && t->second.dtype == Dtype::F32;
    }

    // A name for config and weights. Of these the hash takes 16 stretches of 256 bytes a tensor, evenly spread (all of a
    // norm), in milliseconds; training moves every number. Models that differ in a few numbers between the stretches
    // would be taken for the same.
    uint64_t hash() const {
        uint64_t hash = fnv1a(config_text.data(), config_text.size());
        for (auto& [name, tensor] : tensors) {
            hash = fnv1a(name.data(), name.size() + 1, hash);
            hash = fnv1a(&tensor.dtype, sizeof tensor.dtype, hash);
            hash = fnv1a(&tensor.bytes, sizeof tensor.bytes, hash);
            const size_t stretch = std::min(tensor.bytes, (size_t)256);
            for (size_t i = 0; i < 16; i++)
                hash = fnv1a(tensor.data + (tensor.bytes - stretch) * i / 15, stretch, hash);
        }
        return hash;
    }

  private:
    void add(const std::string& file, std::map<std::string, std::string>& metadata) {
        maps.emplace_back(file);
        read_safetensors(maps.back(), tensors, metadata);
    }
    void add_shards(const std::string& file, std::map<std::string, std::string>& metadata) {
        MappedFile map(file);
        sj::Doc doc;
        std::string fault = sj::parse(doc, map.text());
        if (!fault.empty()) DIE("%s: %s", file.c_str(), fault.c_str());
        sj::Value names = doc.root()["weight_map"];
        if (!names.is(sj::Object)) DIE("%s: no weight_map", file.c_str());
        std::set<std::string> shards;
        for (auto [tensor, v] : names.members()) {
            std::string shard = v.str();
            if (shard.empty() || shard.find('/') != std::string::npos || shard.find('\0') != std::string::npos)
                DIE("%s: tensor %s has a bad file name", file.c_str(), tensor.c_str());
            if (shards.insert(shard).second) add(path + "/" + shard, metadata);
        }
        for (auto [tensor, v] : names.members()) {
            auto t = tensors.find(tensor);
            if (t == tensors.end() || t->second.file != path + "/" + v.str())
                DIE("%s: tensor %s is not in %s", file.c_str(), tensor.c_str(), v.str().c_str());
        }
    }
};

// INT8 weights: 32 neighbours in a row of W share a scale s, W[r][i] = q[r][i] * s[r][i / 32], q in -127..127, which is
// w / s rounded to nearest even. An 8-bit integer times the 8 bits of a bf16 is exact in a float, so that INT8 weights
// are nothing but other weights, cheaper to read: 8.5 bits each. Files hold them as NAME (I8) and NAME_scale (BF16,
// (rows, ceil(in / 32))).
// The scale is the smallest bf16 with 127 s >= max |w|, or one of the next seven: where the weights fall between the
// multiples of s is chance, and the best of eight draws loses a fifth less (in KL) than the first.
constexpr int SCALES = 8;

// The smallest bf16 with 127 s >= largest.
inline bf16 int8_scale(float largest) {
    bf16 s = to_bf16(largest / 127);
    while (127. * to_acc(s) < largest) s.bits++;
    while (s.bits && 127. * to_acc(bf16{(uint16_t)(s.bits - 1)}) >= largest) s.bits--;
    return s;
}
// Of it and the next seven the one that leaves the least squares, summed in the order of w (of equals the first).
inline bf16 int8_scale(const float* w, size_t n) {
    float largest = 0;
    for (size_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(w[i]));
    const bf16 first = int8_scale(largest);
    if (first.bits == 0) return first;
    typedef double Each __attribute__((vector_size(SCALES * sizeof(double))));
    Each s, lost = {};
    for (int c = 0; c < SCALES; c++) s[c] = to_acc(bf16{(uint16_t)std::min(first.bits + c, 0x7f7f)});
    const Each inverse = 1. / s;
    for (size_t i = 0; i < n; i++) {
        const double x = w[i];
        const Each off = x - (x * inverse + 6755399441055744. - 6755399441055744.) * s; // 1.5 * 2^52: rounds to an integer
        lost += off * off;
    }
    int best = 0;
    for (int c = 1; c < SCALES; c++)
        if (lost[c] < lost[best]) best = c;
    return {(uint16_t)std::min(first.bits + best, 0x7f7f)};
}

// ---- Weights of a checkpoint
template <class T> struct WeightLoader {
    Weights<T>& w;
    const ModelFile& file;

    const Tensor& find(const std::string& name, const std::vector<int64_t>& shape) {
        auto found = file.tensors.find(name);
        if (found == file.tensors.end()) DIE("%s: no tensor %s", file.path.c_str(), name.c_str());
        const Tensor& t = found->second;
        need_shape(name, t, shape);
        return t;
    }

    // New numbers, if there is memory for them.
    template <class U> U* own(size_t n, const Tensor& t, const std::string& name) {
        const size_t have = available_memory();
        if (n * sizeof(U) > have)
            DIE("%s: converting tensor %s needs %zu bytes of memory and %zu are available", t.file.c_str(), name.c_str(), n * sizeof(U), have);
        w.converted.emplace_back(new U[n], std::default_delete<U[]>());
        return (U*)w.converted.back().get();
    }

    const T* tensor(const std::string& name, const std::vector<int64_t>& shape) {
        const Tensor& t = find(name, shape);
        if (t.dtype == Dtype::Other || t.dtype == Dtype::I8) DIE("%s: tensor %s is not BF16, F16 or F32", t.file.c_str(), name.c_str());
        const bool same = (std::is_same_v<T, bf16> && t.dtype == Dtype::BF16) || (std::is_same_v<T, float> && t.dtype == Dtype::F32);
        if (same && (uintptr_t)t.data % alignof(T) == 0) return (const T*)t.data;
        const size_t n = t.bytes / (t.dtype == Dtype::F32 ? 4 : 2);
        T* out = own<T>(n, t, name);
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < n; i++) {
            const float f = number(t, i);
            if constexpr (std::is_same_v<T, bf16>) out[i] = to_bf16(f);
            else out[i] = f;
        }
        return out;
    }

    // Makes the matrix `name` the next block of rows of y.
    void add_rows(const std::string& name, int rows, int in, bool int8, Linear<T>& y) {
        int b = 0;
        while (y.rows[b]) b++;
        y.rows[b] = rows, y.in = in;
        const Tensor& t = find(name, {rows, in});
        const size_t groups = y.groups();
        if (t.dtype == Dtype::I8) {
            const Tensor& s = find(name + "_scale", {rows, (int64_t)groups});
            if (s.dtype != Dtype::BF16 || (uintptr_t)s.data % 2) DIE("%s: tensor %s_scale is not BF16 at an even address", s.file.c_str(), name.c_str());
            y.q[b] = (const int8_t*)t.data, y.scale[b] = (const bf16*)s.data;
        } else if (int8) {
            if (t.dtype == Dtype::Other) DIE("%s: tensor %s is not BF16, F16, F32 or I8", t.file.c_str(), name.c_str());
            int8_t* q = own<int8_t>((size_t)rows * in, t, name);
            bf16* scale = own<bf16>(rows * groups, t, name);
            bool finite = true;
            #pragma omp parallel for schedule(static) reduction(&& : finite)
            for (size_t g = 0; g < rows * groups; g++) {
                const size_t first = g / groups * in + g % groups * GROUP, n = std::min((size_t)GROUP, (size_t)in - g % groups * GROUP);
                float w[GROUP];
                for (size_t i = 0; i < n; i++) {
                    w[i] = number(t, first + i);
                    finite = finite && std::isfinite(w[i]);
                }
                if (!finite) continue;
                scale[g] = int8_scale(w, n);
                const double s = to_acc(scale[g]);
                for (size_t i = 0; i < n; i++) q[first + i] = s > 0 ? (int8_t)std::nearbyint(w[i] / s) : (int8_t)0;
            }
            if (!finite) DIE("%s: tensor %s has an infinity or a NaN, which INT8 cannot hold", t.file.c_str(), name.c_str());
            y.q[b] = q, y.scale[b] = scale;
        } else {
            y.w[b] = tensor(name, {rows, in});
        }
        if (b && !y.q[b] != !y.q[0]) DIE("%s: tensor %s is INT8 and its neighbours are not, or the other way round", t.file.c_str(), name.c_str());
    }
};

template <class T> Weights<T>::Weights(const ModelFile& file, bool int8) {
    WeightLoader<T> from{*this, file};
    const Config& c = file.config;
    auto matrix = [&](const std::string& name, int rows, int in, Linear<T>& y) { from.add_rows(name, rows, in, int8, y); };
    matrix("model.embed_tokens.weight", c.V, c.C, embed);
    for (int l = 0; l < c.L; l++) {
        auto name = [&](const char* part) { return format("model.layers.%d.%s.weight", l, part); };
        Layer<T> y;
        y.norm1 = from.tensor(name("input_layernorm"), {c.C});
        matrix(name("self_attn.q_proj"), c.H * c.D, c.C, y.qkv);
        matrix(name("self_attn.k_proj"), c.K * c.D, c.C, y.qkv);
        matrix(name("self_attn.v_proj"), c.K * c.D, c.C, y.qkv);
        y.q_norm = from.tensor(name("self_attn.q_norm"), {c.D});
        y.k_norm = from.tensor(name("self_attn.k_norm"), {c.D});
        matrix(name("self_attn.o_proj"), c.C, c.H * c.D, y.o);
        y.norm2 = from.tensor(name("post_attention_layernorm"), {c.C});
        matrix(name("mlp.gate_proj"), c.F, c.C, y.gate_up);
        matrix(name("mlp.up_proj"), c.F, c.C, y.gate_up);
        matrix(name("mlp.down_proj"), c.C, c.F, y.down);
        layers.push_back(y);
    }
    norm = from.tensor("model.norm.weight", {c.C});
    if (c.tied) head = embed;
    else matrix("lm_head.weight", c.V, c.C, head);
}

// ================================================================================================ 4 Adapters
// LoRA in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors. An adapter is used beside the
// weights, unmerged: see Adapter, and linear_cpu.

// The products that can have one, by the number that names their dropout mask within a layer.
constexpr int MODULES = 7;
constexpr const char* MODULE_NAMES[MODULES] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"};
constexpr int MAX_RANK = 1024, GPU_RANK_STEP = 8; // the GPU's kernels take multiples of 8

struct AdapterConfig {
    int rank = 0;
    double alpha = 0;
    bool rslora = false; // Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA", 2023
    bool targets[MODULES] = {};
    double scale() const { return alpha / (rslora ? std::sqrt((double)rank) : (double)rank); }
};

// The module of that name, as PEFT's target_modules says it ("q_proj", "self_attn.q_proj"); -1 if it is none.
inline int module_of(const std::string& name) {
    for (int m = 0; m < MODULES; m++) {
        const std::string full = MODULE_NAMES[m];
        if (name == full || name == full.substr(full.find('.') + 1)) return m;
    }
    return -1;
}

// Reads adapter_config.json. As with a model's config: what changes the computation is read or must be off, and what is
// not known here and not off is refused too, since it may.
inline AdapterConfig parse_adapter_config(const std::string& file, std::string_view text) {
    const char* name = file.c_str();
    sj::Doc doc;
    const std::string fault = sj::parse(doc, text);
    if (!fault.empty()) DIE("%s: %s", name, fault.c_str());
    const sj::Value j = doc.root();
    if (!j.is(sj::Object)) DIE("%s: not a JSON object", name);
    if (j["peft_type"].str() != "LORA") DIE("%s: peft_type is %.60s, only \"LORA\" is supported", name, j["peft_type"] ? std::string(j["peft_type"].raw()).c_str() : "missing");
    static const std::set<std::string> read_below = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "init_lora_weights"};
    static const std::set<std::string> bookkeeping = {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core",
                                                      "peft_version", "qalora_group_size", "revision", "task_type"};
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
    if (!j["r"].integer(&rank) || rank < 1 || rank > MAX_RANK) DIE("%s: r is not a whole number from 1 to %d", name, MAX_RANK);
    a.rank = (int)rank;
    if (!j["lora_alpha"].is(sj::Number)) DIE("%s: no lora_alpha", name);
    a.alpha = j["lora_alpha"].number();
    if (!(std::fabs(a.alpha) < 1e6)) DIE("%s: lora_alpha is not between -1e6 and 1e6", name);
    const sj::Value rslora = j["use_rslora"], targets = j["target_modules"];
    if (rslora && !rslora.is_bool()) DIE("%s: use_rslora is not true or false", name);
    a.rslora = rslora.boolean(false);
    if (targets.str() == "all-linear") std::fill(a.targets, a.targets + MODULES, true);
    else if (!targets.is(sj::Array) || targets.size() == 0) DIE("%s: target_modules is neither a list of modules nor \"all-linear\"", name);
    for (sj::Value v : targets.items()) {
        const int m = module_of(v.str());
        if (m < 0) DIE("%s: target_modules has %.60s; q, k, v, o, gate, up and down_proj can have an adapter", name, std::string(v.raw()).c_str());
        a.targets[m] = true;
    }
    return a;
}

// (out, in) of a module.
inline std::pair<int, int> module_shape(const Config& c, int m) {
    const int rows[MODULES] = {c.H * c.D, c.K * c.D, c.K * c.D, c.C, c.F, c.F, c.C};
    return {rows[m], m == 3 ? c.H * c.D : m == 6 ? c.F : c.C};
}
inline size_t adapter_parameters(const Config& c, const AdapterConfig& a) {
    size_t n = 0;
    for (int m = 0; m < MODULES; m++)
        if (a.targets[m]) n += (size_t)c.L * a.rank * ((size_t)module_shape(c, m).first + module_shape(c, m).second);
    return n;
}
inline std::string adapter_tensor(int layer, int m, char matrix) {
    return format("base_model.model.model.layers.%d.%s.lora_%c.weight", layer, MODULE_NAMES[m], matrix);
}

// An adapter's files, mapped and checked against the model they are for: every tensor that must be there is, with the
// right shape and finite numbers, and no other.
struct AdapterFile {
    std::string path;
    MappedFile map;
    Tensors tensors;
    std::map<std::string, std::string> metadata;
    AdapterConfig config;

    AdapterFile(const std::string& folder, const Config& c) : path(folder) {
        const std::string text = folder + "/adapter_config.json";
        config = parse_adapter_config(text, MappedFile(text).text());
        map = MappedFile(folder + "/adapter_model.safetensors");
        read_safetensors(map, tensors, metadata);
        size_t expected = 0;
        for (int l = 0; l < c.L; l++)
            for (int m = 0; m < MODULES; m++) {
                if (!config.targets[m]) continue;
                const auto [out, in] = module_shape(c, m);
                check(adapter_tensor(l, m, 'A'), {config.rank, in});
                check(adapter_tensor(l, m, 'B'), {out, config.rank});
                expected += 2;
            }
        if (tensors.size() == expected) return;
        for (auto& [name, t] : tensors)
            if (!checked.count(name)) DIE("%s: tensor %s belongs to no module that the config names", map.path.c_str(), name.c_str());
    }

  private:
    std::set<std::string> checked;
    void check(const std::string& name, const std::vector<int64_t>& shape) {
        const auto found = tensors.find(name);
        if (found == tensors.end()) DIE("%s: no tensor %s", map.path.c_str(), name.c_str());
        const Tensor& t = found->second;
        need_shape(name, t, shape);
        if (t.dtype == Dtype::Other || t.dtype == Dtype::I8) DIE("%s: tensor %s is not BF16, F16 or F32", map.path.c_str(), name.c_str());
        for (size_t i = 0; i < (size_t)(shape[0] * shape[1]); i++)
            if (!std::isfinite(number(t, i))) DIE("%s: tensor %s has an infinity or a NaN", map.path.c_str(), name.c_str());
        checked.insert(name);
    }
};

// Gives every targeted product of the model its Adapter, without memory so far, of a rank rounded up to a multiple of
// `step`. Returns that rank.
template <class T> int adapt(Weights<T>& w, const AdapterConfig& config, int step = 1) {
    const int rank = (config.rank + step - 1) / step * step;
    for (size_t l = 0; l < w.layers.size(); l++) {
        Layer<T>& y = w.layers[l];
        Linear<T>* const linears[] = {&y.qkv, &y.qkv, &y.qkv, &y.o, &y.gate_up, &y.gate_up, &y.down};
        constexpr int blocks[MODULES] = {0, 1, 2, 0, 0, 1, 0};
        for (int m = 0; m < MODULES; m++) {
            if (!config.targets[m]) continue;
            Adapter<T>& a = linears[m]->adapter;
            a.rank = rank, a.true_rank = config.rank, a.s = (float)config.scale();
            a.block[a.modules] = blocks[m], a.module[a.modules++] = (int)l * MODULES + m;
        }
    }
    return rank;
}

// Where a product's A and B begin in an array that holds all of an adapter's numbers, every A before every B; and its h
// among the numbers of one token.
struct AdapterPlace { size_t A = 0, B = 0, h = 0; };
// Calls f(linear, place) for each; returns where A, B and h end.
template <class T, class F> AdapterPlace each_adapter(Weights<T>& w, F f) {
    AdapterPlace at;
    for (Layer<T>& y : w.layers)
        for (Linear<T>* W : {&y.qkv, &y.o, &y.gate_up, &y.down}) at.B += (size_t)W->adapter.modules * W->adapter.rank * W->in;
    for (Layer<T>& y : w.layers)
        for (Linear<T>* W : {&y.qkv, &y.o, &y.gate_up, &y.down}) {
            const size_t width = (size_t)W->adapter.modules * W->adapter.rank;
            if (width) f(*W, at);
            at.A += width * W->in, at.B += width * W->out(), at.h += width;
        }
    return at;
}

// Calls f(name, rows, columns, at, apart) for each of PEFT's tensors: (rows, columns) numbers that begin at `at` of such an
// array, rows `apart`. What lies between them is zero.
template <class T, class F> void each_adapter_tensor(Weights<T>& w, F f) {
    each_adapter(w, [&](Linear<T>& W, AdapterPlace at) {
        const Adapter<T>& a = W.adapter;
        const size_t rank = a.rank, kept = a.true_rank, width = a.modules * rank;
        for (int j = 0; j < a.modules; j++) {
            const size_t first = std::accumulate(W.rows, W.rows + a.block[j], (size_t)0);
            f(adapter_tensor(a.module[j] / MODULES, a.module[j] % MODULES, 'A'), kept, (size_t)W.in, at.A + j * rank * W.in, (size_t)W.in);
            f(adapter_tensor(a.module[j] / MODULES, a.module[j] % MODULES, 'B'), (size_t)W.rows[a.block[j]], kept, at.B + first * width + j * rank, width);
        }
    });
}

// The file's numbers as such an array.
template <class T> std::vector<float> adapter_numbers(Weights<T>& w, const AdapterFile& file) {
    std::vector<float> p(each_adapter(w, [](Linear<T>&, AdapterPlace) {}).B);
    each_adapter_tensor(w, [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t apart) {
        const Tensor& t = file.tensors.at(name);
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < columns; i++) p[at + r * apart + i] = number(t, r * columns + i);
    });
    return p;
}

// An adapter in use, for batches of up to `tokens`. The weights point into it.
template <class T> struct AttachedAdapter {
    Arena arena;

    AttachedAdapter(Context& ctx, Weights<T>& w, const AdapterFile& file, int tokens) {
        const int rank = adapt(w, file.config, ctx.gpu ? GPU_RANK_STEP : 1);
        std::vector<float> p = adapter_numbers(w, file);
        const size_t A = each_adapter(w, [](Linear<T>&, AdapterPlace) {}).A;
        std::vector<T> stored(p.size());
        for (size_t i = 0; i < p.size(); i++) stored[i] = to_stored<T>(i < A ? p[i] : p[i] * (float)file.config.scale());
        arena.gpu = ctx.gpu != nullptr;
        T *numbers, *h; // one h for all: nobody reads it again
        auto plan = [&] { numbers = arena.take<T>(p.size()), h = arena.take<T>((size_t)tokens * 3 * rank); };
        plan();
        arena.allocate("the adapter");
        plan();
        copy_in(ctx, numbers, stored.data(), stored.size());
        each_adapter(w, [&](Linear<T>& W, AdapterPlace at) { W.adapter.A = numbers + at.A, W.adapter.B = numbers + at.B, W.adapter.h = h; });
    }
};
