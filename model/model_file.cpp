#include "model/model_file.h"
#include "base/text.h"
#include "model/utf8.h"

// The end tokens, eos_token_id: those of generation_config, else those of config.
static std::vector<int> parse_end_tokens(const char* name, sj::Value config, std::string_view generation_text, int V) {
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

Config parse_config(const std::string& file, std::string_view text, std::string_view generation_text) {
    const char* name = file.c_str();
    sj::Doc doc;
    const std::string fault = sj::parse(doc, text);
    if (!fault.empty()) DIE("%s: config: %s", name, fault.c_str());
    const sj::Value j = doc.root();
    if (!j.is(sj::Object)) DIE("%s: config is not a JSON object", name);
    const bool mixture = j["model_type"].str() == "qwen3_moe";
    if (j["model_type"].str() != "qwen3" && !mixture)
        DIE("%s: model_type is %.60s, only \"qwen3\" and \"qwen3_moe\" are supported", name,
            j["model_type"] ? std::string(j["model_type"].raw()).c_str() : "missing");

    // ---- Keys that must be off, or have one value
    auto refuse = [&](const char* key, sj::Value v) {
        DIE("%s: config has %s = %.60s, which is not supported", name, key, std::string(v.raw()).c_str());
    };
    auto must_be = [&](const char* key, bool ok) { if (j[key] && !ok) refuse(key, j[key]); };
    auto off = [](sj::Value v) { return v.is(sj::Null) || v.is(sj::False); };
    for (const char* key : {"attention_bias", "mlp_bias", "use_sliding_window", "quantization_config",
                            "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "residual_multiplier",
                            "embedding_multiplier", "tie_encoder_decoder", "is_encoder_decoder",
                            "use_bidirectional_attention", "shared_expert_intermediate_size", "n_shared_experts"})
        must_be(key, off(j[key]));
    if (!mixture)
        for (const char* key : {"num_experts", "num_local_experts"}) must_be(key, off(j[key]));
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
    c.D = integer("head_dim", 2, MAX_HEAD, mixture ? c.C / c.H : 128); // Hugging Face's defaults
    c.F = integer("intermediate_size", 1, 1 << 20, -1);
    c.V = integer("vocab_size", 1, 1 << 24, -1);
    c.max_positions = integer("max_position_embeddings", 1, 1 << 24, -1);
    if (c.D % 2) DIE("%s: config: head_dim = %d is odd, RoPE needs pairs", name, c.D);
    if (c.H % c.K) DIE("%s: config: %d query heads do not share %d key/value heads evenly", name, c.H, c.K);

    // ---- Numbers
    if (!j["rms_norm_eps"].is(sj::Number)) DIE("%s: config has no rms_norm_eps", name);
    c.eps = (float)j["rms_norm_eps"].number();
    if (!(c.eps > 0 && c.eps < 1)) DIE("%s: config: rms_norm_eps is not between 0 and 1", name);
    c.rope_scaling = parse_rope(file, j, c.D, c.max_positions, c.rope_theta);
    c.max_positions = c.rope_scaling.reach(c.max_positions);
    const sj::Value tied = j["tie_word_embeddings"];
    if (tied && !tied.is_bool()) refuse("tie_word_embeddings", tied);
    c.tied = tied.boolean(false);
    c.end_tokens = parse_end_tokens(name, j, generation_text, c.V);
    if (!mixture) return c;

    // ---- Experts
    // transformers 5 writes num_local_experts.
    const char* count = j["num_local_experts"] && !j["num_experts"] ? "num_local_experts" : "num_experts";
    c.E = integer(count, 1, 4096, -1);
    if (j["num_local_experts"] && integer("num_local_experts", 1, 4096, -1) != c.E)
        DIE("%s: config: num_experts and num_local_experts differ", name);
    c.k = integer("num_experts_per_tok", 1, 4096, -1);
    c.M = integer("moe_intermediate_size", 1, 1 << 20, -1);
    c.sparse_step = integer("decoder_sparse_step", 1, 1 << 20, 1);
    if (c.k > c.E) DIE("%s: config: num_experts_per_tok = %d, and there are %d experts", name, c.k, c.E);
    if (c.k > MOST_CHOSEN) DIE("%s: config: num_experts_per_tok = %d is more than %d", name, c.k, MOST_CHOSEN);
    if ((int64_t)c.E * c.L > MOST_EXPERTS || (int64_t)c.k * c.M > 1 << 24)
        DIE("%s: config: %d layers of %d experts, %d of %d a token, are too many", name, c.L, c.E, c.k, c.M);
    const sj::Value normed = j["norm_topk_prob"], dense = j["mlp_only_layers"];
    if (normed && !normed.is_bool()) refuse("norm_topk_prob", normed);
    c.normed_shares = normed.boolean(false);
    const sj::Value scores = j["output_router_logits"], coefficient = j["router_aux_loss_coef"];
    if (scores && !scores.is_bool() && !scores.is(sj::Null)) refuse("output_router_logits", scores);
    if (coefficient && !(coefficient.number() >= 0 && coefficient.number() < 1e6))
        refuse("router_aux_loss_coef", coefficient);
    if (scores.boolean(false)) c.balance = (float)(coefficient ? coefficient.number() : 0.001); // transformers' default
    if (dense && !dense.is(sj::Array) && !dense.is(sj::Null)) refuse("mlp_only_layers", dense);
    for (sj::Value v : dense.items()) {
        int64_t l = 0;
        if (!v.integer(&l) || l < 0 || l >= c.L) refuse("mlp_only_layers", dense);
        c.dense_layers.push_back((int)l);
    }
    return c;
}

Metadata model_metadata(const std::string& config_text, const std::string& generation_text,
                        const std::string& chat_template) {
    Metadata metadata = {{"format", "pt"}, {"config", config_text}};
    if (!generation_text.empty()) metadata["generation_config"] = generation_text;
    if (!chat_template.empty()) metadata["chat_template"] = chat_template;
    return metadata;
}

void check_starters(const std::string& where, const Starters& starters) {
    constexpr size_t MOST = 8, LONGEST = 300; // bytes: a page and a terminal show all of them
    if (starters.size() > MOST) DIE("%s: more than %zu questions", where.c_str(), MOST);
    for (auto& s : starters)
        if (std::string good; s.empty() || s.size() > LONGEST || (utf8_repair(good, s, true), good != s))
            DIE("%s: a question is not 1 to %zu bytes of UTF-8", where.c_str(), LONGEST);
}

Starters read_starters(const std::string& file, const Metadata& metadata) {
    const auto at = metadata.find("starters");
    if (at == metadata.end()) return {};
    sj::Doc doc;
    Starters starters;
    bool good = sj::parse(doc, at->second).empty() && doc.root().is(sj::Array);
    for (sj::Value one : doc.root().items()) good &= one.is(sj::String), starters.push_back(one.str());
    if (!good) DIE("%s: starters in its metadata is not a JSON list of texts", file.c_str());
    check_starters(file + ": starters in its metadata", starters);
    return starters;
}

void add_starters(Metadata& metadata, const Starters& starters) {
    if (starters.empty()) return;
    sj::Writer w;
    w.array();
    for (auto& s : starters) w.value(s);
    metadata["starters"] = w.end().text;
}

Metadata ModelFile::metadata(const std::string& with_config) const {
    Metadata all = model_metadata(with_config, generation_text, chat_template);
    add_starters(all, starters);
    return all;
}

ModelFile::ModelFile(const std::string& p) : path(p) {
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
        DIE("%s: an adapter, not a model (train_lora MODEL --adapter-init %s --merge PATH makes one)", p.c_str(),
            p.c_str());
    if (!exists(p + "/config.json")) DIE("%s: a folder without a model: it has no config.json", p.c_str());
    config_text = MappedFile(p + "/config.json").text();
    if (exists(generation)) generation_text = MappedFile(generation).text();
    read_chat_template();
    const auto quantization = take_quantization(p);
    config = parse_config(p, config_text, generation_text);
    if (exists(one)) add(one, metadata);
    else if (exists(index)) add_shards(index, metadata);
    else DIE("%s: a folder without a model: it has no model.safetensors and no model.safetensors.index.json",
             p.c_str());
    starters = read_starters(p, metadata);
    finish(quantization);
}

void ModelFile::scale_rope(const std::string& type, double factor, int original) {
    const bool scaled = config.rope_scaling.type != RopeScaling::NONE;
    if (!original) original = scaled ? config.rope_scaling.original : config.max_positions;
    if (!original) DIE("%s: its config does not name the positions of training: --yarn-orig-ctx N", path.c_str());
    sj::Doc doc;
    sj::parse(doc, config_text);
    sj::Writer w;
    w.object();
    for (auto [key, value] : doc.root().members())
        if (key.compare(0, 5, "rope_") && key != "max_position_embeddings" && key != "original_max_position_embeddings")
            w.field(key, value);
    w.field("max_position_embeddings", RopeScaling{RopeScaling::LINEAR, factor, original}.reach(1));
    w.field("rope_theta", config.rope_theta).key("rope_scaling").object();
    w.field("rope_type", type).field("factor", factor);
    if (type == "yarn") w.field("original_max_position_embeddings", original);
    config_text = w.end().end().text;
    config = parse_config(path, config_text, generation_text);
}

void ModelFile::read_chat_template() {
    const std::string alone = path + "/chat_template.jinja", among = path + "/tokenizer_config.json";
    if (exists(alone)) chat_template = MappedFile(alone).text();
    if (!chat_template.empty() || !exists(among)) return;
    const MappedFile map(among);
    sj::Doc doc;
    const std::string fault = sj::parse(doc, map.text());
    if (!fault.empty()) DIE("%s: %s", among.c_str(), fault.c_str());
    const sj::Value found = doc.root()["chat_template"];
    if (found.is(sj::String)) chat_template = found.str();
    for (sj::Value one : found.items())
        if (one["name"].str() == "default") chat_template = one["template"].str();
}

bool ModelFile::is_fp8() const { // has such matrices, that is
    return std::any_of(tensors.begin(), tensors.end(),
                       [](auto& t) { return t.second.packed && t.second.packed->method == Method::FP8; });
}

uint64_t ModelFile::hash() const {
    uint64_t hash = fnv1a(config_text.data(), config_text.size());
    const size_t samples = config.E ? 2 : 16; // of thousands of experts' tensors fewer
    auto add = [&](const Tensor& tensor) {
        const size_t sample = std::min(tensor.bytes, (size_t)256), step = samples - 1;
        for (size_t i = 0; i < samples; i++)
            hash = fnv1a(tensor.data + (tensor.bytes - sample) * i / step, sample, hash);
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

void ModelFile::open_one(const std::string& file) { // a model.bin or a GGUF file
    Metadata metadata;
    maps.emplace_back(file);
    if (maps[0].text().substr(0, 4) == "GGUF") return open_gguf();
    read_safetensors(maps[0], tensors, metadata);
    if (!metadata.count("config"))
        DIE("%s: no config in its metadata; export.py makes a model.bin from a Hugging Face folder", file.c_str());
    config_text = metadata["config"];
    generation_text = metadata["generation_config"], chat_template = metadata["chat_template"];
    starters = read_starters(file, metadata);
    const auto quantization = take_quantization(file);
    config = parse_config(file, config_text, generation_text);
    finish(quantization);
}

void ModelFile::open_gguf() {
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
    chat_template = vocabulary->chat_template;
    sj::Writer ends;
    ends.object().key("eos_token_id").array();
    for (uint64_t id : vocabulary->end_tokens(g)) ends.value(id);
    generation_text = ends.end().end().text;
    config = parse_config(g.path, config_text, generation_text);
    cut_experts();
    Tensors rest = tensors;
    for (const ModelTensor& t : model_tensors(config))
        if (const auto at = rest.find(t.name()); at != rest.end())
            need_shape(t.name(), at->second, t.shape()), rest.erase(at);
    if (!rest.empty())
        g.fail(format("tensor %s is of no layer: the model has %d", rest.begin()->first.c_str(), config.L));
}

std::optional<QuantizationConfig> ModelFile::take_quantization(const std::string& file) {
    sj::Doc doc;
    if (!sj::parse(doc, config_text).empty()) return {}; // parse_config reports the fault
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

void ModelFile::finish(const std::optional<QuantizationConfig>& quantization) {
    if (quantization) Packer{path, tensors, *quantization}.run();
    name_as_usual();
    cut_experts();
    drop_biases();
    check_superfluous();
}

// Whether two matrices are the same, by 256 of their numbers: training moves every one.
static bool same_numbers(const Tensor& a, const Tensor& b) {
    constexpr size_t SAMPLES = 256;
    const size_t n = count_of(a.shape);
    if (a.shape != b.shape || a.dtype != b.dtype || !(a.is_float() || a.dtype == Dtype::I8)) return false;
    for (size_t i = 0; i < SAMPLES && n; i++) {
        const size_t at = (size_t)((unsigned __int128)(n - 1) * i / (SAMPLES - 1)), width = a.bytes / n;
        if (a.is_quantized() ? number(a, at) != number(b, at) : memcmp(a.data + at * width, b.data + at * width, width))
            return false;
    }
    return true;
}

void ModelFile::check_superfluous() const {
    std::set<std::string> needed;
    for (const ModelTensor& t : model_tensors(config)) needed.insert(t.name());
    const std::string head = "lm_head.weight", embedding = "model.embed_tokens.weight";
    for (auto& [name, t] : tensors) {
        if (needed.count(name) || !(ends_in(name, ".weight") || ends_in(name, ".bias"))) continue;
        const char* file = t.file.c_str();
        if (name != head) DIE("%s: tensor %.200s is none of the model that the config describes", file, name.c_str());
        const auto other = tensors.find(embedding);
        if (other != tensors.end() && !same_numbers(t, other->second))
            DIE("%s: tie_word_embeddings is true, but %s is not %s", file, head.c_str(), embedding.c_str());
    }
}

void ModelFile::drop_biases() {
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

void ModelFile::name_as_usual() {
    sj::Doc doc;
    sj::parse(doc, config_text);
    const std::string architecture = doc.root()["architectures"][(size_t)0].str();
    bare = architecture == "Qwen3Model" || architecture == "Qwen3MoeModel";
    if (!tensors.count("embed_tokens.weight") || tensors.count("model.embed_tokens.weight")) return;
    bare = true;
    Tensors usual;
    for (auto& [name, tensor] : tensors) usual.emplace((name == "lm_head.weight" ? "" : "model.") + name, tensor);
    tensors.swap(usual);
}

void ModelFile::cut_experts() {
    const int64_t E = config.E, C = config.C, M = config.M;
    const struct { const char* name; std::vector<TensorKind> kinds; Shape shape; } stacks[] = {
        {"gate_up_proj", {GATE_PROJ, UP_PROJ}, {E, 2 * M, C}}, {"gate_proj", {GATE_PROJ}, {E, M, C}},
        {"up_proj", {UP_PROJ}, {E, M, C}}, {"down_proj", {DOWN_PROJ}, {E, C, M}}};
    for (int l = 0; l < config.L; l++)
        for (auto& stack : stacks) {
            const auto found = tensors.find(format("model.layers.%d.mlp.experts.%s", l, stack.name));
            if (!config.sparse(l) || found == tensors.end()) continue;
            const Tensor all = found->second;
            need_shape(found->first, all, stack.shape);
            tensors.erase(found);
            const int parts = (int)stack.kinds.size();
            Tensor one = all;
            one.shape = {stack.shape[1] / parts, stack.shape[2]}, one.bytes = all.bytes / (size_t)(E * parts);
            for (int i = 0; i < E * parts; i++, one.data += one.bytes) {
                const std::string name = ModelTensor{stack.kinds[i % parts], l, 0, 0, i / parts}.name();
                if (!tensors.emplace(name, one).second)
                    DIE("%s: tensor %s is there twice, alone and with the other experts'", all.file.c_str(),
                        name.c_str());
            }
        }
}

Dtype ModelFile::embedding_type() const {
    const auto t = tensors.find(ModelTensor{EMBED, -1, 0, 0}.name());
    return t == tensors.end() ? Dtype::Other : t->second.dtype;
}

void ModelFile::add(const std::string& file, Metadata& metadata) {
    maps.emplace_back(file);
    read_safetensors(maps.back(), tensors, metadata);
}

void ModelFile::add_shards(const std::string& file, Metadata& metadata) {
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
