#include "model/gguf.h"

size_t GgufValue::size_of(uint32_t type) { // of a number; 0: not one
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < NONE ? sizes[type] : 0;
}

bool GgufValue::integer(uint64_t* n) const { // one that is not negative
    int64_t s;
    switch (type) {
        case U8: return *n = load_as<uint8_t>(data), true;
        case U16: return *n = load_as<uint16_t>(data), true;
        case U32: return *n = load_as<uint32_t>(data), true;
        case U64: return *n = load_as<uint64_t>(data), true;
        case I8: s = load_as<int8_t>(data); break;
        case I16: s = load_as<int16_t>(data); break;
        case I32: s = load_as<int32_t>(data); break;
        case I64: s = load_as<int64_t>(data); break;
        default: return false;
    }
    return *n = (uint64_t)s, s >= 0;
}

bool GgufValue::real(double* x) const {
    if (type == F32) return *x = load_as<float>(data), true;
    return type == F64 ? *x = load_as<double>(data), true : false;
}

std::string_view GgufValue::string_at(const uint8_t*& p) { // and moves past it
    const uint64_t n = load_as<uint64_t>(p);
    p += 8 + n;
    return {(const char*)p - n, n};
}

std::string_view GgufValue::string() const {
    const uint8_t* p = data;
    return type == STRING ? string_at(p) : std::string_view();
}

const GgufType* gguf_type(uint32_t type) {
    static const GgufType table[] = {
        {"F32", Dtype::F32, 1, 4}, {"F16", Dtype::F16, 1, 2}, {"Q4_0", Dtype::Q4_0, 32, 18},
        {"Q4_1", Dtype::Q4_1, 32, 20}, {}, {}, {"Q5_0", Dtype::Q5_0, 32, 22}, {"Q5_1", Dtype::Q5_1, 32, 24},
        {"Q8_0", Dtype::Q8_0, 32, 34}, {"Q8_1"}, {"Q2_K"}, {"Q3_K"}, {"Q4_K", Dtype::Q4_K, 256, 144},
        {"Q5_K", Dtype::Q5_K, 256, 176}, {"Q6_K", Dtype::Q6_K, 256, 210}, {"Q8_K"}, {"IQ2_XXS"}, {"IQ2_XS"},
        {"IQ3_XXS"}, {"IQ1_S"}, {"IQ4_NL"}, {"IQ3_S"}, {"IQ2_S"}, {"IQ4_XS"}, {"I8"}, {"I16"}, {"I32"}, {"I64"},
        {"F64"}, {"IQ1_M"}, {"BF16", Dtype::BF16, 1, 2}, {}, {}, {}, {"TQ1_0"}, {"TQ2_0"}, {}, {}, {},
        {"MXFP4"}, {"NVFP4"}};
    return type < std::size(table) && table[type].name ? &table[type] : nullptr;
}

uint32_t gguf_number(Dtype dtype) {
    for (uint32_t type = 0;; type++)
        if (const GgufType* t = gguf_type(type); t && t->count && t->dtype == dtype) return type;
}

GgufFile::GgufFile(const MappedFile& map) : path(map.path), at(map.data), end(map.data + map.size) {
    if (left() < 4 || memcmp(at, "GGUF", 4)) fail("not a GGUF file");
    at += 4;
    const uint32_t version = take<uint32_t>();
    if (version != 2 && version != 3) fail(format("GGUF of version %u; 2 and 3 are read", version));
    const uint64_t n_tensors = take<uint64_t>(), n_values = take<uint64_t>();
    for (uint64_t i = 0; i < n_values; i++) {
        const std::string key = string();
        if (!values.emplace(key, value(key)).second) fail(format("metadata names %.100s twice", key.c_str()));
    }
    for (uint64_t i = 0; i < n_tensors; i++) read_entry();
    place(map.data);
}

const GgufValue& GgufFile::operator[](const std::string& key) const {
    static const GgufValue none;
    const auto found = values.find(key);
    return found == values.end() ? none : found->second;
}

uint64_t GgufFile::integer(const std::string& key) const {
    uint64_t n;
    if (!(*this)[key]) fail("metadata has no " + key);
    if (!(*this)[key].integer(&n)) fail("metadata: " + key + " is not a whole number, or negative");
    return n;
}

double GgufFile::real(const std::string& key) const {
    double x;
    if (!(*this)[key]) fail("metadata has no " + key);
    if (!(*this)[key].real(&x)) fail("metadata: " + key + " is not a float");
    if (!std::isfinite(x)) fail("metadata: " + key + " is an infinity or a NaN");
    return x;
}

const uint8_t* GgufFile::skip(uint64_t bytes) {
    if (bytes > left()) fail("truncated: its header goes on past the end of the file");
    return at += bytes, at - bytes;
}

GgufValue GgufFile::value(const std::string& key) {
    GgufValue v;
    uint32_t type = take<uint32_t>();
    if (type >= GgufValue::NONE) fail(format("metadata: %.100s has the unknown type %u", key.c_str(), type));
    v.type = (GgufValue::Type)type, v.count = 1;
    if (v.type == GgufValue::ARRAY) {
        type = take<uint32_t>(), v.count = take<uint64_t>();
        if (type >= GgufValue::NONE || type == GgufValue::ARRAY)
            fail(format("metadata: %.100s is an array of the type %u", key.c_str(), type));
        v.item = (GgufValue::Type)type;
    }
    v.data = at;
    if (type == GgufValue::STRING) {
        for (uint64_t i = 0; i < v.count; i++) skip(take<uint64_t>());
        return v;
    }
    uint64_t bytes;
    if (__builtin_mul_overflow(v.count, (uint64_t)GgufValue::size_of(type), &bytes))
        fail(format("metadata: %.100s overflows 64 bits", key.c_str()));
    skip(bytes);
    return v;
}

void GgufFile::read_entry() {
    GgufTensor t;
    t.name = string();
    t.tensor.file = path;
    const std::string who = format("tensor %.100s", t.name.c_str());
    const uint32_t dimensions = take<uint32_t>();
    if (dimensions < 1 || dimensions > 4) fail(who + format(" has %u dimensions", dimensions));
    uint64_t count = 1;
    for (uint32_t d = 0; d < dimensions; d++) {
        const uint64_t n = take<uint64_t>();
        if (n < 1 || n > INT64_MAX || __builtin_mul_overflow(count, n, &count) || count > INT64_MAX / 4)
            fail(who + " has a bad shape, or one that overflows 64 bits");
        t.tensor.shape.insert(t.tensor.shape.begin(), (int64_t)n);
    }
    const uint32_t number = take<uint32_t>();
    const GgufType* type = gguf_type(number);
    if (!type) fail(who + format(" has the unknown type %u", number));
    if (!type->count)
        fail(who + format(" is of type %s, which is not supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, "
                          "Q4_K, Q5_K and Q6_K are read", type->name));
    const bool stack = dimensions == 3 && t.name.find("_exps.") != t.name.npos; // the matrices of all experts
    if (type->count > 1 && dimensions != 2 && !stack)
        fail(who + format(" has %u dimensions, blocks of %s are in matrices only", dimensions, type->name));
    if ((uint64_t)t.tensor.shape.back() % type->count)
        fail(who + format(" has rows of %lld numbers, %s has blocks of %zu", (long long)t.tensor.shape.back(),
                          type->name, type->count));
    t.tensor.dtype = type->dtype, t.tensor.bytes = count / type->count * type->bytes;
    offsets.push_back(take<uint64_t>());
    tensors.push_back(std::move(t));
}

void GgufFile::place(const uint8_t* begin) {
    uint64_t alignment = 32;
    if ((*this)["general.alignment"]) alignment = integer("general.alignment");
    if (alignment < 1 || alignment > 1 << 20 || (alignment & (alignment - 1)))
        fail(format("general.alignment is %llu, not a power of two up to 2^20", (unsigned long long)alignment));
    const size_t header = (size_t)(at - begin);
    skip(std::min((uint64_t)left(), (alignment - header % alignment) % alignment));
    struct Span { uint64_t begin, end; const std::string* name; };
    std::vector<Span> spans;
    std::set<std::string> seen;
    for (size_t i = 0; i < tensors.size(); i++) {
        GgufTensor& t = tensors[i];
        const std::string who = format("tensor %.100s", t.name.c_str());
        if (!seen.insert(t.name).second) fail(who + " is there twice");
        if (offsets[i] % alignment)
            fail(who + format(" begins at byte %llu, no multiple of the alignment",
                              (unsigned long long)offsets[i]));
        if (offsets[i] > left() || t.tensor.bytes > left() - offsets[i])
            fail(who + format(" is not in the file: %zu bytes from byte %llu of %zu", t.tensor.bytes,
                              (unsigned long long)offsets[i], left()));
        t.tensor.data = at + offsets[i];
        spans.push_back({offsets[i], offsets[i] + t.tensor.bytes, &t.name});
    }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < spans.size(); i++)
        if (spans[i].begin < spans[i - 1].end)
            fail(format("tensor %.100s overlaps %.100s", spans[i].name->c_str(), spans[i - 1].name->c_str()));
}

// "qwen3." or "qwen3moe.", before the architecture's keys.
static std::string gguf_prefix(const GgufFile& g) { return std::string(g["general.architecture"].string()) + "."; }

// A factor without a type is linear, as in llama.cpp.
static void add_rope_scaling(sj::Writer& w, const GgufFile& g) {
    const std::string prefix = gguf_prefix(g) + "rope.scaling.";
    const GgufValue& named = g[prefix + "type"];
    const std::string type(named ? named.string() : g[prefix + "factor"] ? "linear" : "none");
    if (type == "none") return;
    if (type != "linear" && type != "yarn")
        g.fail(format("%stype is %.60s, which is not supported", prefix.c_str(), type.c_str()));
    w.key("rope_scaling").object().field("rope_type", type).field("factor", g.real(prefix + "factor"));
    if (type == "yarn") {
        if (const std::string key = prefix + "original_context_length"; g[key])
            w.field("original_max_position_embeddings", g.integer(key));
        for (const char* beta : {"beta_fast", "beta_slow"})
            if (const std::string key = prefix + "yarn_" + beta; g[key]) w.field(beta, g.real(key));
    }
    w.end();
}

std::string gguf_config(const GgufFile& g, int64_t vocabulary, bool tied) {
    const std::string architecture(g["general.architecture"].string());
    const bool mixture = architecture == "qwen3moe";
    if (architecture != "qwen3" && !mixture)
        g.fail(format("a GGUF file of architecture \"%.60s\", only \"qwen3\" and \"qwen3moe\" are supported",
                      architecture.c_str()));
    if (g["split.count"] && g.integer("split.count") > 1)
        g.fail(format("one of %llu parts of a model; llama-gguf-split --merge makes one file of them",
                      (unsigned long long)g.integer("split.count")));
    if (g["general.quantization_version"] && g.integer("general.quantization_version") != 2)
        g.fail(format("general.quantization_version is %llu, only 2 is supported",
                      (unsigned long long)g.integer("general.quantization_version")));
    static const std::set<std::string> of_experts = {"expert_count", "expert_used_count", "expert_feed_forward_length",
                                                     "expert_weights_norm"};
    static const std::set<std::string> known = {
        "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
        "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "vocab_size", "pooling_type"};
    const std::string prefix = gguf_prefix(g);
    for (auto& [key, v] : g.values)
        if (const std::string rest = key.substr(std::min(key.size(), prefix.size()));
            key.compare(0, prefix.size(), prefix) == 0 && !known.count(rest) && !(mixture && of_experts.count(rest)))
            g.fail(format("metadata has %.100s, which is not supported", key.c_str()));
    auto integer = [&](const char* key) { return g.integer(prefix + key); };
    constexpr uint64_t NONE = 0, LAST = 3; // which of a text's vectors are its embedding
    const uint64_t pooling = g[prefix + "pooling_type"] ? integer("pooling_type") : NONE;
    if (pooling != NONE && pooling != LAST)
        g.fail(format("%spooling_type is %llu, only 0 (none) and 3 (last) are supported", prefix.c_str(),
                      (unsigned long long)pooling));
    const uint64_t C = integer("embedding_length"), H = integer("attention.head_count");
    const uint64_t D = g[prefix + "attention.key_length"] ? integer("attention.key_length") : H ? C / H : 0;
    for (const char* key : {"attention.value_length", "rope.dimension_count"})
        if (g[prefix + key] && integer(key) != D)
            g.fail(format("%s%s is not attention.key_length, which is not supported", prefix.c_str(), key));
    sj::Writer w;
    w.object().key("architectures").array();
    w.value(format("Qwen3%s%s", mixture ? "Moe" : "", pooling == LAST ? "Model" : "ForCausalLM")).end();
    w.field("model_type", mixture ? "qwen3_moe" : "qwen3");
    w.field("hidden_act", "silu").field("attention_bias", false).field("use_sliding_window", false);
    w.field("hidden_size", C).field("num_hidden_layers", integer("block_count")).field("num_attention_heads", H);
    w.field("num_key_value_heads", g[prefix + "attention.head_count_kv"] ? integer("attention.head_count_kv") : H);
    w.field("head_dim", D).field("intermediate_size", integer("feed_forward_length")).field("vocab_size", vocabulary);
    if (mixture) { // llama.cpp divides the shares by their sum unless the file says otherwise
        const GgufValue& normed = g[prefix + "expert_weights_norm"];
        if (normed && normed.type != GgufValue::BOOL) g.fail("metadata: " + prefix + "expert_weights_norm is no bool");
        w.field("num_experts", integer("expert_count")).field("num_experts_per_tok", integer("expert_used_count"));
        w.field("moe_intermediate_size", integer("expert_feed_forward_length"));
        w.field("norm_topk_prob", !normed || *normed.data != 0);
    }
    w.field("max_position_embeddings", integer("context_length"));
    w.field("rms_norm_eps", g.real(prefix + "attention.layer_norm_rms_epsilon"));
    w.field("rope_theta", g[prefix + "rope.freq_base"] ? g.real(prefix + "rope.freq_base") : 10000.);
    add_rope_scaling(w, g);
    w.field("tie_word_embeddings", tied).field("torch_dtype", "bfloat16").end();
    return w.text;
}

static const char* const GGUF_NAMES[] = { // by TensorKind
    "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "attn_q_norm",
    "attn_k_norm", "ffn_norm", "ffn_gate_inp", "token_embd", "output_norm", "output"};

std::string gguf_name(const ModelTensor& t) {
    const std::string block = t.layer < 0 ? "" : format("blk.%d.", t.layer);
    return block + GGUF_NAMES[t.kind] + (t.expert < 0 ? ".weight" : "_exps.weight"); // (all experts' in one)
}

std::string hugging_face_name(const std::string& name) {
    int layer = -1;
    if (sscanf(name.c_str(), "blk.%5d.", &layer) == 1 && layer < 0) return "";
    for (TensorKind kind : {GATE_PROJ, UP_PROJ, DOWN_PROJ})
        if (layer >= 0 && name == gguf_name({kind, layer, 0, 0, 0}))
            return format("model.layers.%d.mlp.experts.%s", layer, strchr(TENSOR_NAMES[kind], '.') + 1);
    for (int kind = 0; kind < (int)std::size(GGUF_NAMES); kind++)
        if (const ModelTensor t = {(TensorKind)kind, kind < EMBED ? layer : -1, 0, 0};
            (kind >= EMBED || layer >= 0) && gguf_name(t) == name)
            return t.name();
    return "";
}

GgufVocabulary::GgufVocabulary(const GgufFile& g) : file(g.path) {
    auto array = [&](const char* key, std::initializer_list<GgufValue::Type> items) {
        const GgufValue& v = g[std::string("tokenizer.ggml.") + key];
        if (v && (v.type != GgufValue::ARRAY || std::find(items.begin(), items.end(), v.item) == items.end()))
            g.fail(format("metadata: tokenizer.ggml.%s is not an array of that kind", key));
        return v;
    };
    tokens = array("tokens", {GgufValue::STRING}), merges = array("merges", {GgufValue::STRING});
    types = array("token_type", {GgufValue::I32, GgufValue::U32});
    if (tokens && types && types.count != tokens.count)
        g.fail("metadata: tokenizer.ggml.token_type has another length");
    model = g["tokenizer.ggml.model"].string(), split = g["tokenizer.ggml.pre"].string();
    chat_template = g["tokenizer.chat_template"].string();
    const GgufValue& bos = g["tokenizer.ggml.add_bos_token"];
    adds_token = bos.type == GgufValue::BOOL && *bos.data;
}

std::vector<uint64_t> GgufVocabulary::end_tokens(const GgufFile& g) const {
    std::vector<uint64_t> ids;
    auto add = [&](uint64_t id) { if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id); };
    for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"})
        if (g[key]) add(g.integer(key));
    if (tokens)
        tokens.each_string([&](uint64_t i, std::string_view s) {
            if (s == "<|im_end|>" || s == "<|endoftext|>") add(i);
        });
    return ids;
}

// The character of each byte.
static const std::vector<uint32_t>& characters() {
    static const std::vector<uint32_t> table = [] {
        std::vector<uint32_t> character(256);
        uint32_t next = 0x100;
        for (uint32_t b = 0; b < 256; b++) {
            const bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
            character[b] = itself ? b : next++;
        }
        return character;
    }();
    return table;
}

std::string characters_of(std::string_view bytes) {
    std::string out;
    for (const char byte : bytes) utf8_append(out, characters()[(uint8_t)byte]);
    return out;
}

bool bytes_of(std::string_view text, std::string& out) {
    static const std::vector<int> table = [] { // of character - 0
        std::vector<int> byte(0x100 + 68, -1);
        for (int b = 0; b < 256; b++) byte[characters()[(size_t)b]] = b;
        return byte;
    }();
    out.clear();
    for (size_t i = 0; i < text.size();) {
        const int n = utf8_length(text.data() + i, text.size() - i);
        if (n <= 0) return false;
        const char* p = text.data() + i;
        const uint32_t c = utf8_read(p);
        if (c >= table.size() || table[c] < 0) return false;
        out += (char)table[c];
        i += (size_t)n;
    }
    return true;
}

std::string GgufVocabulary::difference(const Tokenizer& t) const {
    enum { NORMAL = 1, UNUSED = 5 }; // types of tokens; others are added tokens, which are written as they are
    if (!tokens) return "";
    if (model != "gpt2" || (!split.empty() && split != "qwen2"))
        return format("it is of the kind %.40s, %.40s", model.c_str(), split.c_str());
    if (adds_token) return "it puts a token before every text";
    if (!chat_template.empty() && chat_template.find("<|im_start|>") == std::string::npos)
        return "its chat template is not Qwen3's: it has no <|im_start|>";
    if (tokens.count < (uint64_t)t.size())
        return format("it has %llu tokens, not %d", (unsigned long long)tokens.count, t.size());
    std::string fault, bytes;
    tokens.each_string([&](uint64_t i, std::string_view text) {
        if (!fault.empty()) return;
        const int type = types ? load_as<int32_t>(types.data + 4 * i) : NORMAL;
        const bool padding = i >= (uint64_t)t.size();
        const std::string_view ours = t.bytes((int)i);
        const bool same = padding ? type == UNUSED || text.substr(0, 4) == "[PAD"
                          : type == NORMAL ? bytes_of(text, bytes) && bytes == ours : text == ours;
        if (!same) fault = format("its token %llu is \"%.60s\"", (unsigned long long)i, std::string(text).c_str());
    });
    if (!fault.empty()) return fault;
    if (merges.count != t.merges())
        return format("it has %llu merges, not %zu", (unsigned long long)merges.count, t.merges());
    std::string right;
    merges.each_string([&](uint64_t i, std::string_view text) {
        const size_t space = text.find(' ');
        const auto [a, b] = t.merged((size_t)i);
        if (!fault.empty() || (space != std::string_view::npos && bytes_of(text.substr(0, space), bytes) &&
                               bytes_of(text.substr(space + 1), right) && bytes == t.bytes(a) && right == t.bytes(b)))
            return;
        fault = format("its merge %llu is \"%.60s\"", (unsigned long long)i, std::string(text).c_str());
    });
    return fault;
}
