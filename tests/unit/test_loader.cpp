// The model loader, the table of tensors and the writer. Each case takes a small valid model, breaks one rule, and wants
// one line that names the file and the fault; further down is what must load, and the numbers it must give.
#include "model/adapters.h"
#include "model/model_file.h"
#include "model/session.h"
#include "model/weights.h"
#include "model/write.h"
#include "sj.h"
#include "tests/common.h"
#include "tests/files.h"
#include "tests/process.h"
#include <array>
#include <csignal>
#include <sys/stat.h>

using namespace std::literals; // "..."s

#ifdef _OPENMP // thousands of tiny models: waking threads would be most of the work
static const bool one_thread = (omp_set_num_threads(1), true);
#endif

// ----------------------------------------------------------------------------------------- a small model

// `text` with its one `from` replaced.
static std::string edited(std::string text, const std::string& from, const std::string& to) {
    INFO(from);
    size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    REQUIRE(text.find(from, at + 1) == std::string::npos);
    return text.replace(at, from.size(), to);
}

struct Entry {
    std::string name, dtype;
    std::vector<int64_t> shape;
    std::string bytes;
};

// The bytes of a safetensors file, in parts that a test can bend.
struct Builder {
    std::vector<Entry> entries;
    std::map<std::string, std::string> metadata;

    std::string header() const {
        std::string h = "{";
        if (!metadata.empty()) {
            h += "\"__metadata__\":{";
            for (auto& [key, value] : metadata) {
                if (h.back() != '{') h += ",";
                sj::quote(h, key), h += ":", sj::quote(h, value);
            }
            h += "}";
        }
        size_t at = 0;
        for (auto& e : entries) {
            if (h.size() > 1) h += ",";
            std::string dims;
            for (int64_t n : e.shape) dims += format(dims.empty() ? "%lld" : ",%lld", (long long)n);
            h += format(R"("%s":{"dtype":"%s","shape":[%s],"data_offsets":[%zu,%zu]})", e.name.c_str(),
                        e.dtype.c_str(), dims.c_str(), at, at + e.bytes.size());
            at += e.bytes.size();
        }
        return h + "}";
    }
    std::string data() const {
        std::string d;
        for (auto& e : entries) d += e.bytes;
        return d;
    }
    static std::string file(const std::string& header, const std::string& data) {
        uint64_t length = header.size();
        return std::string((const char*)&length, 8) + header + data;
    }
    std::string file() const { return file(header(), data()); }
    Entry& entry(const std::string& name) {
        for (auto& e : entries)
            if (e.name == name) return e;
        throw std::out_of_range(name);
    }
};

static const std::string CONFIG = R"({"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 2,
"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 10, "vocab_size": 13,
"max_position_embeddings": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "tie_word_embeddings": false,
"hidden_act": "silu", "eos_token_id": 3})";

// CONFIG with more members. Of two equal keys the last counts.
static std::string config_with(const std::string& members) {
    return CONFIG.substr(0, CONFIG.size() - 1) + ", " + members + "}";
}
// CONFIG without a key that is not its last.
static std::string config_without(const std::string& key) {
    size_t begin = CONFIG.find("\"" + key + "\""), end = CONFIG.find('"', CONFIG.find(',', begin));
    REQUIRE(begin != std::string::npos);
    return CONFIG.substr(0, begin) + CONFIG.substr(end);
}

// A model of CONFIG's shape with random bf16 weights; model.norm.weight comes first, at bytes 0 to 16.
static Builder small_model(const std::string& config = CONFIG) {
    const int C = 8, HD = 24, KD = 12, D = 6, F = 10, V = 13;
    Builder b;
    b.metadata["config"] = config;
    Random random{7};
    auto add = [&](const std::string& name, std::vector<int64_t> shape) {
        size_t n = 1;
        for (int64_t d : shape) n *= (size_t)d;
        std::vector<bf16> w = random.fill<bf16>(n, 0.5, shape.size() == 1 ? 1 : 0);
        b.entries.push_back({name, "BF16", shape, std::string((const char*)w.data(), 2 * n)});
    };
    add("model.norm.weight", {C});
    for (int l = 0; l < 2; l++) {
        std::string layer = format("model.layers.%d.", l);
        add(layer + "input_layernorm.weight", {C});
        add(layer + "self_attn.q_proj.weight", {HD, C});
        add(layer + "self_attn.k_proj.weight", {KD, C});
        add(layer + "self_attn.v_proj.weight", {KD, C});
        add(layer + "self_attn.q_norm.weight", {D});
        add(layer + "self_attn.k_norm.weight", {D});
        add(layer + "self_attn.o_proj.weight", {C, HD});
        add(layer + "post_attention_layernorm.weight", {C});
        add(layer + "mlp.gate_proj.weight", {F, C});
        add(layer + "mlp.up_proj.weight", {F, C});
        add(layer + "mlp.down_proj.weight", {C, F});
    }
    add("model.embed_tokens.weight", {V, C});
    add("lm_head.weight", {V, C});
    return b;
}

// "" if the model at `path` loads, else its Error's message. Anything else that is thrown fails the test.
static std::string fault(const std::string& path) {
    try {
        ModelFile file(path);
        if (file.is_float32()) Weights<float> weights(file);
        else Weights<bf16> weights(file);
        return "";
    } catch (const Error& e) {
        return e.what();
    }
}

// The message begins with the file's name and speaks of `word`.
static void check_refused(const std::string& path, const std::string& word) {
    std::string message = fault(path);
    INFO("wanted: " << word << "; got: " << message);
    CHECK(message.compare(0, path.size(), path) == 0);
    CHECK(message.find(word, path.size()) != std::string::npos);
}
static void check_bytes_refused(const std::string& bytes, const std::string& word) {
    check_refused(MemoryFile(bytes).path, word);
}
static void check_config_refused(const std::string& config, const std::string& word) {
    INFO(config);
    check_bytes_refused(small_model(config).file(), word);
}

// The logits of four tokens by the model at `path`.
template <class T> std::vector<acc<T>> logits(const std::string& path) {
    ModelFile file(path);
    Weights<T> weights(file);
    Session<T> session(file.config, weights, 8);
    std::vector<acc<T>> all;
    auto keep = [&](const acc<T>* row) { all.insert(all.end(), row, row + file.config.V); };
    session.feed({1, 12, 0, 5}, nullptr, keep);
    return all;
}
template <class T> std::vector<acc<T>> logits_of(const std::string& bytes) {
    return logits<T>(MemoryFile(bytes).path);
}
template <class T> std::vector<acc<T>> logits(const Builder& b) { return logits_of<T>(b.file()); }

// ----------------------------------------------------------------------------------------- refusals

TEST_CASE("the model that the other cases break is valid") {
    const MemoryFile memory(small_model().file());
    CHECK(fault(memory.path) == "");
    ModelFile file(memory.path);
    const Config& c = file.config;
    const std::vector<int> sizes = {c.C, c.L, c.H, c.K, c.D, c.F, c.V, c.max_positions};
    CHECK(sizes == std::vector<int>{8, 2, 4, 2, 6, 10, 13, 64});
    CHECK(c.eps == 1e-6f);
    CHECK(c.rope_theta == 10000);
    CHECK(!c.tied);
    CHECK(c.end_tokens == std::vector<int>{3});
    CHECK(!file.is_float32());
    std::vector<float> l = logits<bf16>(memory.path);
    CHECK(l.size() == 4 * 13);
    CHECK(std::all_of(l.begin(), l.end(), [](float x) { return std::isfinite(x) && x != 0; }));
}

TEST_CASE("the first eight bytes: the length of the header") {
    const Builder b = small_model();
    const std::string bytes = b.file();
    auto with_length = [&](uint64_t n) { return std::string((const char*)&n, 8) + bytes.substr(8); };
    check_bytes_refused("", "empty");
    check_bytes_refused("qwen3", "too few");
    check_bytes_refused(with_length(0), "header");
    check_bytes_refused(with_length(1), "header");
    check_bytes_refused(with_length(100'000'001), "header would be 100000001 bytes");
    check_bytes_refused(with_length(UINT64_MAX), "header would be 18446744073709551615 bytes");
    check_bytes_refused(with_length(INT64_MAX), "header would be");
    check_bytes_refused(with_length(bytes.size() - 7), "truncated: the header");
    check_bytes_refused(with_length(b.header().size() - 1), "header: line 1");
    check_bytes_refused(with_length(b.header().size() + 1), "header: line 1");
    check_bytes_refused(std::string(64, '\0'), "header");
    check_bytes_refused("GGUF" + std::string(64, '\0') + "llama", "GGUF of version 0");
    check_bytes_refused("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "header would be");
}

TEST_CASE("the header: one tensor's entry") {
    const Builder b = small_model();
    const std::string norm = R"("model.norm.weight":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]})",
                      lacks = "model.norm.weight lacks dtype, shape or data_offsets";
    const struct { std::string from, to, word; } cases[] = {
        {R"({"dtype":"BF16","shape":[8],"data_offsets":[0,16]})", "[]", lacks},
        {R"({"dtype":"BF16","shape":[8],"data_offsets":[0,16]})", "null", lacks},
        {R"("dtype":"BF16",)", "", lacks},
        {R"("shape":[8],)", "", lacks},
        {R"(,"data_offsets":[0,16])", "", lacks},
        {"\"BF16\"", "16", lacks},
        {"BF16", "BF17", "unknown dtype BF17"},
        {"BF16", "bf16", "unknown dtype bf16"},
        {"BF16", "", "unknown dtype"},
        {"BF16", "F32", "16 bytes, its shape needs 32"},
        {"[8]", "8", lacks},
        {"[8]", "[-8]", "bad shape"},
        {"[8]", "[-1,-8]", "bad shape"},
        {"[8]", "[8.0]", "bad shape"},
        {"[8]", "[7.5]", "bad shape"},
        {"[8]", "[8e0]", "bad shape"},
        {"[8]", "[\"8\"]", "bad shape"},
        {"[8]", "[[8]]", "bad shape"},
        {"[8]", "[null]", "bad shape"},
        {"[8]", "[18446744073709551624]", "bad shape"}, // 2^64 + 8
        {"[8]", "[9223372036854775807]", "16 bytes, its shape needs 18446744073709551614"},
        {"[8]", "[4294967296,4294967296,8]", "overflows"},
        {"[8]", "[8,8589934592,1073741824]", "overflows"}, // 2^67 bytes
        {"[8]", "[]", "16 bytes, its shape needs 2"},
        {"[8]", "[0]", "16 bytes, its shape needs 0"},
        {"[8]", "[9]", "16 bytes, its shape needs 18"},
        {"[8]", "[8,1,2]", "16 bytes, its shape needs 32"},
        {"[0,16]", "16", lacks},
        {"[0,16]", "[]", "bad data_offsets"},
        {"[0,16]", "[0]", "bad data_offsets"},
        {"[0,16]", "[0,16,16]", "bad data_offsets"},
        {"[0,16]", "[0,16.0]", "bad data_offsets"},
        {"[0,16]", "[\"0\",16]", "bad data_offsets"},
        {"[0,16]", "[-16,0]", "bad data_offsets"},
        {R"([8],"data_offsets":[0,16])", R"([0],"data_offsets":[-0,0])", "bad data_offsets"},
        {R"([8],"data_offsets":[0,16])", R"([0],"data_offsets":[0,-0])", "bad data_offsets"},
        {"[0,16]", "[16,0]", "bad data_offsets"},
        {"[0,16]", "[0,18446744073709551632]", "bad data_offsets"},
        {"[0,16]", "[0,999999]", "truncated: tensor model.norm.weight ends at byte 999999"},
        {"[0,16]", "[9223372036854775791,9223372036854775807]", "truncated: tensor model.norm.weight"},
        {R"([8],"data_offsets":[0,16])", R"([7],"data_offsets":[0,14])", "hole before tensor model.layers.0"},
        {R"([8],"data_offsets":[0,16])", R"([7],"data_offsets":[2,16])", "hole before tensor model.norm"},
        {R"([8],"data_offsets":[0,16])", R"([9],"data_offsets":[0,18])", "overlap before tensor"},
    };
    for (auto& c : cases) {
        INFO(c.to);
        const std::string header = edited(b.header(), norm, edited(norm, c.from, c.to));
        check_bytes_refused(Builder::file(header, b.data()), c.word);
    }
}

TEST_CASE("the header as a whole") {
    const Builder b = small_model();
    const std::string header = b.header(), data = b.data(),
                      entry = R"({"dtype":"BF16","shape":[8],"data_offsets":[0,16]})";
    // Put behind the opening brace of a valid header.
    const struct { std::string front, word; } cases[] = {
        {"\"\xff\":1,", "UTF-8"},
        {"\"\xc0\x80\":1,", "UTF-8"},
        {"\"\xed\xa0\x80\":1,", "UTF-8"},
        {"x:1,", "header: line 1, byte 1"},
        {",", "header: line 1, byte 1"},
        {"\"x\":" + std::string(300, '[') + ",", "deeper"},
        {R"("model.norm.weight":)" + entry + ",", "model.norm.weight twice"},
        {R"("model.\u006eorm.weight":)" + entry + ",", "model.norm.weight twice"},
        {R"("__metadata__":{},)", "__metadata__ twice"},
        {R"("again":)" + entry + ",", "overlap before tensor"},
        {R"("nothing":{"dtype":"U8","shape":[0],"data_offsets":[5,5]},)", "overlap before tensor"},
    };
    for (auto& c : cases) {
        INFO(c.front);
        check_bytes_refused(Builder::file("{" + c.front + header.substr(1), data), c.word);
    }
    // The reference implementation, too, wants '{' as the first byte.
    for (const char* other : {"[]", "\"{}\"", "1", "null", "", " {}", "\xef\xbb\xbf{}"})
        check_bytes_refused(Builder::file(other, data), "no JSON object");
    for (const char* value : {"1", "null", "{}", "[\"x\"]"}) {
        std::string changed = edited(header, "{\"config\":", "{\"n\":"s + value + ",\"config\":");
        check_bytes_refused(Builder::file(changed, data), "__metadata__: n is not a string");
    }
    const std::string list = edited(header, "{\"config\"", "[],\"m\":{\"config\"");
    check_bytes_refused(Builder::file(list, data), "__metadata__ is not an object");
    check_bytes_refused(Builder::file(edited(header, "{\"config\"", "{\"confi\""), data), "no config");
    check_bytes_refused(Builder::file(header + "x", data), "after the end");
    check_bytes_refused(Builder::file(header + std::string(3, '\0'), data), "after the end");
    check_bytes_refused(Builder::file("{}", ""), "no config");
    check_bytes_refused(Builder::file("{}", data), "the tensors end at byte 0");
    check_bytes_refused(b.file() + "x", "the tensors end at byte");
}

TEST_CASE("a file that ends too early, at every byte of the header and every seventh of the data") {
    const Builder b = small_model();
    const size_t header = b.header().size();
    MemoryFile memory(b.file());
    auto wanted = [&](const std::string& word) {
        std::string message = fault(memory.path);
        return message.find(memory.path) == 0 && message.find(word) != std::string::npos;
    };
    for (size_t n = b.file().size() - 1; n > 8 + header; n -= std::min<size_t>(7, n - 8 - header)) {
        memory.truncate(n);
        if (!wanted("truncated: tensor")) FAIL("cut to " << n << " bytes: " << fault(memory.path));
    }
    for (uint64_t n = header - 1; n > 0; n--) {
        memory.truncate(8 + n);
        uint64_t length = header;
        memory.write(0, {(const char*)&length, 8});
        if (!wanted("truncated: the header")) FAIL("cut to " << 8 + n << " bytes: " << fault(memory.path));
        memory.write(0, {(const char*)&n, 8}); // a length that agrees: now the JSON is cut
        if (!wanted("header: line 1, byte")) FAIL("a header of " << n << " bytes: " << fault(memory.path));
    }
    for (size_t n = 8; n-- > 0;) {
        memory.truncate(n);
        if (!wanted(n ? "too few" : "empty")) FAIL("cut to " << n << " bytes: " << fault(memory.path));
    }
}

TEST_CASE("config: every fault is named") {
    const auto yarn = [](const std::string& more) {
        return R"("rope_scaling": {"type": "yarn", "factor": 4)" + (more.empty() ? "" : ", " + more) + "}";
    };
    const struct { std::string members, word; } cases[] = {
        {R"("model_type": "llama")", "model_type is \"llama\""},
        {R"("model_type": "qwen2_moe")", "model_type is \"qwen2_moe\""},
        {R"("model_type": "qwen3_moe")", "config has no num_experts"},
        {R"("model_type": 3)", "model_type is 3"},
        {R"("tie_word_embeddings": "no")", "tie_word_embeddings = \"no\""},
        {R"("tie_word_embeddings": 1)", "tie_word_embeddings = 1"},
        {R"("rope_theta": 0)", "rope_theta is not between"},
        {R"("rope_theta": -10000)", "rope_theta is not between"},
        {R"("rope_theta": 1e300)", "rope_theta is not between"},
        {R"("rope_theta": 1e999)", "rope_theta is not between"},
        {R"("rope_theta": "10000")", "no rope_theta"},
        {R"("rms_norm_eps": 0)", "rms_norm_eps is not between"},
        {R"("rms_norm_eps": -1e-6)", "rms_norm_eps is not between"},
        {R"("rms_norm_eps": 1)", "rms_norm_eps is not between"},
        {R"("rms_norm_eps": 1e-60)", "rms_norm_eps is not between"}, // 0 as a float
        {R"("rms_norm_eps": "1e-6")", "no rms_norm_eps"},
        {R"("num_attention_heads": 3)", "3 query heads do not share 2"},
        {R"("num_key_value_heads": 8)", "4 query heads do not share 8"},
        {R"("head_dim": 5)", "head_dim = 5 is odd"},
        {R"("eos_token_id": 13)", "eos_token_id holds 13"},
        {R"("eos_token_id": -1)", "eos_token_id holds -1"},
        {R"("eos_token_id": [3, 13])", "eos_token_id holds 13"},
        {R"("eos_token_id": [3, "4"])", "eos_token_id holds \"4\""},
        {R"("eos_token_id": 3.0)", "eos_token_id holds 3.0"},
        {R"("eos_token_id": 4294967299)", "eos_token_id holds 4294967299"}, // 3 in 32 bits
        {R"("eos_token_id": true)", "eos_token_id holds true"},
        // A key that would change the computation is refused by its name, with its value.
        {R"("hidden_act": "gelu")", "hidden_act = \"gelu\""},
        {R"("hidden_act": null)", "hidden_act = null"},
        {R"("attention_bias": true)", "attention_bias = true"},
        {R"("attention_bias": "false")", "attention_bias = \"false\""},
        {R"("attention_bias": 1)", "attention_bias = 1"},
        {R"("mlp_bias": true)", "mlp_bias = true"},
        {R"("use_sliding_window": true)", "use_sliding_window = true"},
        {R"("layer_types": ["full_attention", "sliding_attention"])", "layer_types = \"sliding_attention\""},
        {R"("layer_types": "sliding_attention")", "layer_types = \"sliding_attention\""},
        {R"("rope_scaling": {"rope_type": "dynamic", "factor": 4.0})", R"(rope_scaling.rope_type = "dynamic", which is not supported)"},
        {R"("rope_scaling": {"type": "longrope"})", R"(rope_scaling.type = "longrope", which is not supported)"},
        {R"("rope_scaling": {"rope_type": 3})", "rope_scaling.rope_type = 3"},
        {R"("rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4.0})", R"(rope_scaling.type = "linear", which is not its rope_type)"},
        {R"("rope_scaling": 4)", "rope_scaling = 4"},
        {R"("rope_scaling": true)", "rope_scaling = true"},
        {R"("rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {})", "both rope_scaling and rope_parameters"},
        {R"("rope_scaling": {"factor": 2})", "rope_scaling.factor = 2, which is not supported"},
        {R"("rope_scaling": {"type": "yarn"})", "config has no rope_scaling.factor"},
        {R"("rope_scaling": {"type": "yarn", "factor": null})", "config has no rope_scaling.factor"},
        {R"("rope_scaling": {"type": "yarn", "factor": 0})", "rope_scaling.factor = 0, which is not a number from 1 to 1024"},
        {R"("rope_scaling": {"type": "yarn", "factor": "4"})", "rope_scaling.factor = \"4\""},
        {R"("rope_scaling": {"type": "yarn", "factor": 1e999})", "rope_scaling.factor = 1e999"},
        {R"("rope_scaling": {"type": "yarn", "factor": NaN})", "config: line"},
        {R"("rope_scaling": {"type": "linear", "factor": 2, "truncate": true})", "rope_scaling.truncate = true, which is not supported"},
        {yarn(R"("original_max_position_embeddings": 0)"), "original_max_position_embeddings is not an integer from 1"},
        {yarn(R"("original_max_position_embeddings": 64.0)"), "original_max_position_embeddings is not an integer from 1"},
        {yarn(R"("original_max_position_embeddings": 1)") + R"(, "head_dim": 64)", "no plane of RoPE turns in 1 positions"},
        {yarn("") + R"(, "original_max_position_embeddings": -1)", "original_max_position_embeddings is not an integer from 1"},
        {yarn(R"("beta_fast": 1)"), "rope_scaling.beta_fast is not above beta_slow"},
        {yarn(R"("beta_fast": 4, "beta_slow": 8)"), "rope_scaling.beta_fast is not above beta_slow"},
        {yarn(R"("beta_slow": 0)"), "rope_scaling.beta_slow = 0"},
        {yarn(R"("attention_factor": 0)"), "rope_scaling.attention_factor = 0"},
        {yarn(R"("truncate": 1)"), "rope_scaling.truncate = 1"},
        {yarn(R"("mscale": "1")"), "rope_scaling.mscale = \"1\""},
        {yarn(R"("mrope_section": [1])"), "rope_scaling.mrope_section = [1], which is not supported"},
        {R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4})", "high_freq_factor = 4, which is not above"},
        {R"("rope_parameters": 10000)", "rope_parameters = 10000"},
        {R"("rope_parameters": {"rope_type": "yarn"})", "config has no rope_parameters.factor"},
        {R"("rope_parameters": {"factor": 4.0})", "rope_parameters.factor = 4.0"},
        {R"("rope_parameters": {"partial_rotary_factor": 0.5})", "partial_rotary_factor = 0.5"},
        {R"("partial_rotary_factor": 0.5)", "partial_rotary_factor = 0.5"},
        {R"("quantization_config": {"quant_method": "exl2"})", "quant_method = \"exl2\"; fp8, awq and gptq are read"},
        {R"("num_experts": 128)", "num_experts = 128"},
        {R"("use_qk_norm": false)", "use_qk_norm = false"},
        {R"("attn_logit_softcapping": 50.0)", "attn_logit_softcapping = 50.0"},
        {R"("final_logit_softcapping": 30.0)", "final_logit_softcapping = 30.0"},
        {R"("logit_scale": 0.5)", "logit_scale = 0.5"},
        {R"("residual_multiplier": 0.22)", "residual_multiplier = 0.22"},
        {R"("embedding_multiplier": 12)", "embedding_multiplier = 12"},
        {R"("is_encoder_decoder": true)", "is_encoder_decoder = true"},
        {R"("tie_encoder_decoder": true)", "tie_encoder_decoder = true"},
        {R"("use_bidirectional_attention": true)", "use_bidirectional_attention = true"},
        {",", "config: line 4"},
    };
    for (auto& c : cases) check_config_refused(config_with(c.members), c.word);
    for (const char* whole : {"[]", "\"qwen3\"", "7"}) check_config_refused(whole, "not a JSON object");
    for (const char* whole : {"", "{", "model_type: qwen3"}) check_config_refused(whole, "config: line 1");
    check_config_refused("{}", "model_type is missing");
    const std::string no_theta = config_without("rope_theta");
    check_config_refused(config_without("rms_norm_eps"), "no rms_norm_eps");
    check_config_refused(no_theta, "no rope_theta");
    const std::string style = R"(, "rope_parameters": {"rope_type": "default"}})";
    check_config_refused(edited(no_theta, "}", style), "no rope_theta");
}

TEST_CASE("config: integers") {
    const struct { std::string key, outside[3]; } integers[] = { // and what is too small and too large for it
        {"hidden_size", {"0", "-8", "1048577"}},         {"num_hidden_layers", {"0", "-2", "4097"}},
        {"num_attention_heads", {"0", "-4", "4097"}},    {"num_key_value_heads", {"0", "-2", "4097"}},
        {"intermediate_size", {"0", "-10", "1048577"}},  {"vocab_size", {"0", "-13", "16777217"}},
        {"max_position_embeddings", {"0", "-64", "16777217"}}, {"head_dim", {"0", "-6", "514"}}};
    for (auto& k : integers) {
        auto with = [&](const std::string& value) { return config_with("\"" + k.key + "\": " + value); };
        if (k.key != "head_dim") check_config_refused(config_without(k.key), "config has no " + k.key);
        for (auto& value : k.outside)
            check_config_refused(with(value), k.key + " = " + value + " is outside");
        check_config_refused(with("4294967300"), k.key + " = 4294967300 is outside"); // 4 in 32 bits
        for (const char* value : {"2.5", "2.0", "2e0", "\"2\"", "[2]", "true", "99999999999999999999"})
            check_config_refused(with(value), k.key + " is not an integer");
    }
}

TEST_CASE("generation_config") {
    auto ends = [](const std::string& config, const char* generation) {
        Builder b = small_model(config);
        b.metadata["generation_config"] = generation;
        return ModelFile(MemoryFile(b.file()).path).config.end_tokens;
    };
    const std::string without = config_with("\"eos_token_id\": null");
    CHECK(ends(CONFIG, "{\"eos_token_id\": [5, 0]}") == std::vector<int>{5, 0}); // it has the last word
    CHECK(ends(CONFIG, "{\"eos_token_id\": 12}") == std::vector<int>{12});
    CHECK(ends(CONFIG, "{\"eos_token_id\": null}") == std::vector<int>{3});
    CHECK(ends(CONFIG, "{\"top_k\": 20}") == std::vector<int>{3});
    CHECK(ends(without, "{}") == std::vector<int>{});
    CHECK(ends(without, "{\"eos_token_id\": 1}") == std::vector<int>{1});

    const struct { const char *generation, *word; } cases[] = {
        {"{", "generation_config: line 1"},
        {"{}x", "generation_config: line 1"},
        {"{\"eos_token_id\": 13}", "eos_token_id holds 13"},
        {"{\"eos_token_id\": [0, [1]]}", "eos_token_id holds [1]"},
        {"{\"eos_token_id\": \"<|im_end|>\"}", "eos_token_id holds"}};
    for (auto& c : cases) {
        Builder b = small_model();
        b.metadata["generation_config"] = c.generation;
        check_bytes_refused(b.file(), c.word);
    }
}

TEST_CASE("every tensor must be there, in its shape, in a type that can be read") {
    const Builder b = small_model();
    for (size_t i = 0; i < b.entries.size(); i++) {
        Builder without = b, turned = b, typed = b;
        const std::string& name = b.entries[i].name;
        without.entries.erase(without.entries.begin() + (ptrdiff_t)i);
        check_bytes_refused(without.file(), "no tensor " + name);

        std::vector<int64_t>& shape = turned.entries[i].shape; // as many numbers in another shape
        if (shape.size() == 2) std::swap(shape[0], shape[1]);
        else shape.push_back(1);
        const std::string is = format(" is (%d,%d), the config needs (", (int)shape[0], (int)shape[1]);
        check_bytes_refused(turned.file(), "tensor " + name + is);

        typed.entries[i].dtype = "I16";
        check_bytes_refused(typed.file(), "tensor " + name + " is not BF16, F16 or F32");
    }
    check_config_refused(config_with("\"vocab_size\": 14"), "(13,8), the config needs (14,8)");
    check_config_refused(config_with("\"num_hidden_layers\": 3"), "no tensor model.layers.2.input");
    check_config_refused(config_without("head_dim"), "the config needs (512,8)"); // 128 where it is not given
}

TEST_CASE("weights that the config has no place for are refused by name") {
    check_config_refused(config_with("\"num_hidden_layers\": 1"), "tensor model.layers.1.");
    for (const char* name : {"model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.self_attn.sinks.weight",
                             "score.weight", "score.bias", "model.embed_positions.weight", "v_head.summary.weight", "mtp.fc.weight"}) {
        Builder b = small_model();
        b.entries.push_back({name, "BF16", {2}, "1234"});
        check_bytes_refused(b.file(), "tensor "s + name + " is none of the model that the config describes");
    }
    for (const char* name : {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_scale", "steps"}) { // no weights
        Builder b = small_model();
        b.entries.push_back({name, "BF16", {2}, "1234"});
        CHECK(same_bits(logits<bf16>(b), logits<bf16>(small_model())));
    }
}

// ----------------------------------------------------------------------------------------- folders

// A Hugging Face folder: the config, and the small model's tensors dealt out to `shards` files with an index.
struct Folder {
    Scratch s;
    std::string index;
    explicit Folder(int shards) {
        Builder whole = small_model();
        whole.metadata.clear();
        write_file(s / "config.json", CONFIG);
        if (!shards) {
            write_file(s / "model.safetensors", whole.file());
            return;
        }
        index = "{\"metadata\": {}, \"weight_map\": {";
        for (int i = 0; i < shards; i++) {
            Builder part;
            for (size_t k = (size_t)i; k < whole.entries.size(); k += (size_t)shards) {
                part.entries.push_back(whole.entries[k]);
                if (index.back() != '{') index += ", ";
                index += format("\"%s\": \"%d.safetensors\"", whole.entries[k].name.c_str(), i);
            }
            write_file(s / format("%d.safetensors", i), part.file());
        }
        write_file(s / "model.safetensors.index.json", index += "}}");
    }
    std::string path() const { return s.path.string(); }
};

TEST_CASE("a folder gives the numbers of the one file") {
    const std::vector<float> expected = logits<bf16>(small_model());
    CHECK(same_bits(logits<bf16>(Folder(0).path()), expected));
    CHECK(same_bits(logits<bf16>(Folder(1).path()), expected));
    CHECK(same_bits(logits<bf16>(Folder(5).path()), expected));
    Folder slash(5);
    CHECK(same_bits(logits<bf16>(slash.path() + "/"), expected));
}

TEST_CASE("folders that hold no model") {
    {
        Scratch s;
        check_refused(s.path.string(), "a folder without a model: it has no config.json");
        check_refused(s / "missing", "No such file");
        write_file(s / "file", "x");
        check_refused(s / "file/model.bin", "Not a directory");
        write_file(s / "config.json", CONFIG);
        check_refused(s.path.string(), "a folder without a model: it has no model.safetensors");
        fs::create_directory(s / "model.safetensors");
        check_refused(s.path.string(), "/model.safetensors: not a regular file");
        fs::remove(s / "config.json");
        fs::create_directory(s / "config.json");
        check_refused(s.path.string(), "/config.json: not a regular file");
        REQUIRE(mkfifo((s / "fifo").c_str(), 0600) == 0);
        check_refused(s / "fifo", "not a regular file"); // and does not wait for a writer
    }
    const struct { const char *file, *bytes, *word; } cases[] = {
        {"config.json", "", "config.json: the file is empty"},
        {"config.json", "{", "config: line 1"},
        {"generation_config.json", "{", "generation_config: line 1"},
        {"generation_config.json", "", "generation_config.json: the file is empty"},
        {"model.safetensors", "", "model.safetensors: the file is empty"},
        {"model.safetensors", "\x02\0\0\0\0\0\0\0[]", "model.safetensors: "}};
    for (auto& c : cases) {
        INFO(c.word);
        Folder folder(0);
        write_file(folder.s / c.file, c.bytes);
        check_refused(folder.path(), c.word);
    }
}

TEST_CASE("an index and its shards") {
    const std::string norm = "\"model.norm.weight\": ", name = norm + "\"0.safetensors\"",
                      bad = "index.json: tensor model.norm.weight has a bad file name";
    // In a valid index of three shards, `from` is replaced by `to`.
    const struct { std::string from, to, word; } cases[] = {
        {"{\"metadata\"", "[\"metadata\"", "index.json: line 1"},
        {"weight_map", "weightmap", "index.json: no weight_map"},
        {name, norm + "\"../0.safetensors\"", bad},
        {name, norm + "\"/etc/passwd\"", bad},
        {name, norm + "\"0.safetensors\\u0000x\"", bad},
        {name, norm + "\"\"", bad},
        {name, norm + "0", bad},
        {name, norm + "\"..\"", "/..: not a regular file"},
        {name, norm + "\"7.safetensors\"", "7.safetensors: No such file"},
        {name, norm + "\"1.safetensors\"", "index.json: tensor model.norm.weight is not in 1.safetensors"},
        {name, name + ", \"x\": \"0.safetensors\"", "index.json: tensor x is not in 0.safetensors"},
    };
    for (auto& c : cases) {
        INFO(c.to);
        Folder folder(3);
        write_file(folder.s / "model.safetensors.index.json", edited(folder.index, c.from, c.to));
        check_refused(folder.path(), c.word);
    }
    Folder lost(3), twice(3), cut(3);
    fs::remove(lost.s / "1.safetensors");
    check_refused(lost.path(), "1.safetensors: No such file");
    Builder both;
    both.entries = {small_model().entry("model.norm.weight")};
    write_file(twice.s / "more.safetensors", both.file());
    write_file(twice.s / "model.safetensors.index.json",
               edited(twice.index, name, "\"x\": \"more.safetensors\", " + name));
    check_refused(twice.path(), "tensor model.norm.weight is also in " + twice.s / "more.safetensors");
    fs::resize_file(cut.s / "2.safetensors", fs::file_size(cut.s / "2.safetensors") - 1);
    check_refused(cut.path(), "2.safetensors: truncated");
}

// ----------------------------------------------------------------------------------------- what must load

TEST_CASE("harmless variety loads and changes no number") {
    const std::vector<float> expected = logits<bf16>(small_model());
    const std::pair<const char*, std::string> configs[] = {
        {"rope_parameters", edited(config_without("rope_theta"), "}",
                                   R"(, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}})")},
        {"rope_theta is an integer", config_with(R"("rope_theta": 10000)")},
        {"the newer theta wins", config_with(R"("rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e4})")},
        {"rope_parameters null", config_with(R"("rope_parameters": null)")},
        {"features that are off", config_with(R"("attention_bias": false, "rope_scaling": null,
            "sliding_window": 4, "use_sliding_window": false, "max_window_layers": 28)")},
        {"layer_types", config_with(R"("layer_types": ["full_attention", "full_attention"])")},
        {"unknown bookkeeping", config_with(R"("transformers_version": "4.51.0", "use_cache": true)")},
        {"the last of two equal keys, as in Python", edited(CONFIG, "{", R"({"hidden_size": 9, )")},
        {"no tie_word_embeddings", config_without("tie_word_embeddings")},
        {"no hidden_act", config_without("hidden_act")},
        {"no end token", config_with(R"("eos_token_id": null)")},
    };
    for (auto& c : configs) {
        INFO(c.first);
        CHECK(same_bits(logits<bf16>(small_model(c.second)), expected));
    }
    CHECK(!same_bits(logits<bf16>(small_model(config_with("\"rope_theta\": 100"))), expected)); // it can fail
    const auto scaled = [](const std::string& where, const std::string& more) {
        return logits<bf16>(small_model(config_with(where + R"(": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4)" + more)));
    };
    const std::vector<float> yarn = scaled("\"rope_scaling", "}");
    CHECK(!same_bits(yarn, expected));
    CHECK(same_bits(scaled("\"rope_parameters", "}"), yarn));
    CHECK(same_bits(scaled("\"rope_scaling", R"(, "type": "yarn", "original_max_position_embeddings": 64, "beta_fast": null, "mscale": 2})"), yarn));
    CHECK(same_bits(scaled("\"rope_scaling", R"(}, "original_max_position_embeddings": 64)"), yarn));
    CHECK(!same_bits(logits<bf16>(small_model(config_with("\"rms_norm_eps\": 0.1"))), expected));

    const Builder b = small_model();
    const std::string header = b.header();
    CHECK(same_bits(logits_of<bf16>(Builder::file(header + "  \n ", b.data())), expected));
    const std::string unused = format(R"({"none":{"dtype":"F64","shape":[3,0],"data_offsets":[16,16]},)"
                                      R"("steps":{"dtype":"I64","shape":[],"data_offsets":[%zu,%zu]},)",
                                      b.data().size(), b.data().size() + 8);
    const std::string more = Builder::file(unused + header.substr(1), b.data() + "12345678");
    CHECK(same_bits(logits_of<bf16>(more), expected));
    Builder reversed = b; // the order of the tensors means nothing
    std::reverse(reversed.entries.begin(), reversed.entries.end());
    CHECK(same_bits(logits<bf16>(reversed), expected));
}

TEST_CASE("tensors at odd addresses give the same numbers") {
    Builder b = small_model(), wide = b;
    for (Entry& e : wide.entries) { // the same numbers as float32
        std::string bytes;
        for (size_t i = 0; i < e.bytes.size(); i += 2) bytes += std::string(2, '\0') + e.bytes.substr(i, 2);
        e.dtype = "F32", e.bytes = bytes;
    }
    const std::vector<float> narrow_expected = logits<bf16>(b), wide_expected = logits<float>(wide);
    int odd = 0;
    for (size_t pad = 0; pad < 8; pad++) {
        std::string header = b.header() + std::string(pad, ' ');
        odd += (8 + header.size()) % 2;
        CHECK(same_bits(logits_of<bf16>(Builder::file(header, b.data())), narrow_expected));
        header = wide.header() + std::string(pad, ' ');
        CHECK(same_bits(logits_of<float>(Builder::file(header, wide.data())), wide_expected));
    }
    CHECK(odd == 4);
}

TEST_CASE("a tied head is the embedding; a stored lm_head must be the same") {
    const std::string tied = config_with("\"tie_word_embeddings\": true");
    Builder with = small_model(tied), without = with, untied = small_model();
    without.entries.pop_back();
    REQUIRE(with.entries.back().name == "lm_head.weight");
    const std::vector<float> expected = logits<bf16>(without);
    const std::string embedding = with.entry("model.embed_tokens.weight").bytes;
    check_bytes_refused(with.file(), "tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight");
    with.entry("lm_head.weight").bytes = embedding;
    CHECK(same_bits(logits<bf16>(with), expected));
    with.entry("lm_head.weight").bytes[5] ^= 1;
    check_bytes_refused(with.file(), "tie_word_embeddings is true, but lm_head.weight is not");
    with.entry("lm_head.weight").bytes = embedding, with.entry("lm_head.weight").shape = {8, 13};
    check_bytes_refused(with.file(), "tie_word_embeddings is true, but lm_head.weight is not");
    CHECK(!same_bits(logits<bf16>(untied), expected));
    untied.entry("lm_head.weight").bytes = untied.entry("model.embed_tokens.weight").bytes;
    CHECK(same_bits(logits<bf16>(untied), expected));
}

// The value of a half, by its definition.
static double half_value(int h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double magnitude = exponent == 0    ? std::ldexp(fraction, -24)
                       : exponent < 31  ? std::ldexp(1024 + fraction, exponent - 25)
                       : fraction == 0  ? INFINITY
                                        : NAN;
    return h & 0x8000 ? -magnitude : magnitude;
}

// Is y the bfloat16 nearest to x, of two equally near ones the even one?
static bool is_nearest(double x, bf16 y) {
    if (std::isnan(x)) return std::isnan(to_acc(y));
    const int bits = y.bits & 0x7fff;
    if (std::signbit(x) != (y.bits >> 15 == 1) || bits > 0x7f80) return false;
    auto magnitude = [](int i) { // of the i-th; "infinity" lies where the next would be
        return i < 0 ? -1. : i >= 0x7f80 ? 0x1p128 : (double)to_acc(bf16{(uint16_t)i});
    };
    const double m = std::min(std::fabs(x), 0x1p128);
    const double down = (magnitude(bits - 1) + magnitude(bits)) / 2; // halfway points are exact in double
    const double up = bits == 0x7f80 ? INFINITY : (magnitude(bits) + magnitude(bits + 1)) / 2;
    return bits % 2 ? m > down && m < up : m >= down && m <= up;
}

TEST_CASE("conversions: all halves, all bfloat16s and a million floats, exactly") {
    // A model whose embedding has 65,536 numbers: every 16-bit pattern once.
    const std::string changes = R"("hidden_size": 4, "vocab_size": 16384, "tie_word_embeddings": true)";
    Builder b = small_model(config_with(changes));
    b.entries.pop_back();
    for (Entry& e : b.entries) // half as many channels
        for (int64_t& n : e.shape)
            if (n == 8) n = 4, e.bytes.resize(e.bytes.size() / 2);
    Entry& embed = b.entry("model.embed_tokens.weight");
    embed.shape = {16384, 4};
    std::vector<uint16_t> patterns(65536);
    for (int i = 0; i < 65536; i++) patterns[i] = (uint16_t)i;
    embed.bytes.assign((const char*)patterns.data(), 131072);
    auto load = [&](const char* dtype) { // a map outlives the descriptor
        embed.dtype = dtype;
        return ModelFile(MemoryFile(b.file()).path);
    };
    int wrong_half = 0, wrong_half_bf16 = 0, wrong_bf16 = 0, wrong_float = 0, wrong_float_bf16 = 0;
    {
        ModelFile file = load("F16");
        CHECK(!file.is_float32());
        Weights<float> wide(file);
        Weights<bf16> narrow(file);
        for (int i = 0; i < 65536; i++) {
            double x = half_value(i);
            float y = wide.embed.w[0][i];
            wrong_half += std::isnan(x) ? !std::isnan(y) : y != x || std::signbit(y) != std::signbit(x);
            wrong_half_bf16 += !is_nearest(x, narrow.embed.w[0][i]);
        }
    }
    {
        ModelFile file = load("BF16");
        Weights<float> wide(file);
        Weights<bf16> narrow(file);
        for (uint32_t i = 0; i < 65536; i++) {
            uint32_t bits;
            memcpy(&bits, &wide.embed.w[0][i], 4);
            bool nan = (i & 0x7fff) > 0x7f80; // one at an odd address may become a quiet one
            wrong_bf16 += nan ? !std::isnan(wide.embed.w[0][i]) || !std::isnan(to_acc(narrow.embed.w[0][i]))
                              : bits != i << 16 || narrow.embed.w[0][i].bits != i;
        }
    }
    CHECK(wrong_half == 0);
    CHECK(wrong_half_bf16 == 0);
    CHECK(wrong_bf16 == 0);
    Random random{3};
    for (int round = 0; round < 16; round++) { // every bfloat16 with 16 tails: ties, their neighbours, others
        static const uint32_t tails[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
        std::vector<uint32_t> floats(65536);
        for (uint32_t i = 0; i < 65536; i++)
            floats[i] = i << 16 | (round < 6 ? tails[round] : (uint32_t)random.below(65536));
        embed.bytes.assign((const char*)floats.data(), 262144);
        ModelFile file = load("F32");
        CHECK(file.is_float32());
        Weights<float> wide(file);
        Weights<bf16> narrow(file);
        wrong_float += memcmp(wide.embed.w[0], floats.data(), 262144) != 0;
        for (int i = 0; i < 65536; i++) wrong_float_bf16 += !is_nearest(wide.embed.w[0][i], narrow.embed.w[0][i]);
    }
    CHECK(wrong_float == 0);
    CHECK(wrong_float_bf16 == 0);
}

TEST_CASE("a checkpoint of mixed types computes what one of a single type does") {
    Builder b = small_model(), mixed = b;
    // The numbers are bf16 with magnitudes that F16 and F32 also hold, so that nothing is lost.
    for (size_t i = 0; i < mixed.entries.size(); i++) {
        Entry& e = mixed.entries[i];
        if (i % 3 == 0 || e.name == "model.embed_tokens.weight") continue;
        std::string bytes;
        for (size_t k = 0; k < e.bytes.size(); k += 2) {
            bf16 x;
            memcpy(&x, &e.bytes[k], 2);
            float f = to_acc(x);
            if (i % 3 == 1) { bytes.append((const char*)&f, 4); continue; }
            x = to_bf16(f = std::fabs(f) < 0x1p-14f ? 0 : f); // F16 has fewer exponents
            memcpy(&b.entries[i].bytes[k], &x, 2);
            uint32_t u;
            memcpy(&u, &f, 4);
            uint16_t h = (uint16_t)((u >> 16 & 0x8000) | ((u >> 23 & 255) - 112) << 10 | (u >> 13 & 1023));
            if (f == 0) h = 0;
            REQUIRE(half_value(h) == f);
            bytes.append((const char*)&h, 2);
        }
        e.dtype = i % 3 == 1 ? "F32" : "F16", e.bytes = bytes;
    }
    CHECK(same_bits(logits<bf16>(mixed), logits<bf16>(b)));
    CHECK(same_bits(logits<float>(mixed), logits<float>(b)));
}

// ----------------------------------------------------------------------------------------- the table, and the writer

TEST_CASE("the table lists exactly the tensors of each fixture, with their shapes") {
    for (const char* path : {"tied_bf16", "tied_f16", "tied_f32", "untied_bf16", "untied_f32_sharded", "tiny/model.bin",
                             "train/tied", "train/untied"}) {
        INFO(std::string(path));
        const ModelFile file("tests/fixtures/"s + path);
        std::map<std::string, Shape> listed, held;
        size_t numbers = 0;
        for (const ModelTensor& t : model_tensors(file.config)) {
            CHECK(listed.emplace(t.name(), t.shape()).second);
            numbers += t.size();
        }
        for (auto& [name, t] : file.tensors) held[name] = t.shape;
        CHECK(listed == held);
        CHECK(numbers == parameters(file.config));
    }
}

TEST_CASE("the table's order and places: files of our own are in its order, blocks of a Linear are neighbours") {
    const MemoryFile memory(small_model().file());
    const ModelFile file(memory.path);
    Weights<bf16> w(file);
    std::vector<std::string> names;
    std::set<const bf16*> seen;
    TensorPlace<bf16> before = {nullptr, 0, nullptr};
    for (const ModelTensor& t : model_tensors(file.config)) {
        names.push_back(t.name());
        const TensorPlace<bf16> place = place_of(w, t);
        REQUIRE((place.linear == nullptr) != (place.vector == nullptr));
        CHECK((place.linear != nullptr) == (t.columns > 0));
        CHECK((const uint8_t*)place.numbers() == file.tensors.at(t.name()).data); // (all are bf16, at even addresses)
        CHECK(seen.insert(place.numbers()).second);
        if (place.linear) CHECK(place.linear->rows[place.block] == t.rows);
        if (place.linear) CHECK(place.linear->in == t.columns);
        if (place.block) CHECK(place.linear == before.linear);
        if (place.block) CHECK(place.block == before.block + 1);
        before = place;
    }
    REQUIRE(names.size() == 1 + 2 * 11 + 2);
    CHECK(names[0] == "model.embed_tokens.weight");
    CHECK(names[1] == "model.layers.0.input_layernorm.weight");
    CHECK(names[2] == "model.layers.0.self_attn.q_proj.weight");
    CHECK(names[22] == "model.layers.1.mlp.down_proj.weight");
    CHECK(names[23] == "model.norm.weight");
    CHECK(names[24] == "lm_head.weight");
    for (int m = 0; m < MODULES; m++) { // as PEFT and --targets name them
        CHECK(module_of(TENSOR_NAMES[m]) == m);
        CHECK(module_of(module_name(m)) == m);
    }
    CHECK(module_of("embed_tokens") == -1);
    CHECK(module_of("self_attn") == -1);
    CHECK(module_of("") == -1);
}

TEST_CASE("what write_safetensors writes, read_safetensors reads: names, types, shapes, bytes, metadata; aligned") {
    Scratch s;
    const Metadata metadata = {{"format", "pt"}, {"a \"quoted\" key\n", "\xe4\xb8\xad\xe6\x96\x87 \\ \x01"}, {"none", ""}};
    Random random{11};
    std::map<std::string, std::string> want;
    std::vector<OutTensor> tensors;
    auto add = [&](const std::string& name, const char* dtype, const Shape& shape) {
        OutTensor t = {name, dtype, shape, nullptr};
        std::string bytes(t.bytes(), '\0');
        for (char& b : bytes) b = (char)random.below(256);
        want[name] = bytes;
        t.write = [bytes](OutputFile& out) { out.write(bytes); };
        tensors.push_back(t);
    };
    add("z", "BF16", {3, 5});
    add("a \"b\"\t", "F32", {7});
    add("scalar", "F16", {});
    add("nothing", "F32", {4, 0, 2});
    add("m", "I8", {1, 2, 3});
    const size_t size = write_safetensors(s / "f", metadata, tensors);
    CHECK(size == read_file(s / "f").size());
    const MappedFile map(s / "f");
    Tensors got;
    Metadata read;
    read_safetensors(map, got, read);
    CHECK(read == metadata);
    REQUIRE(got.size() == tensors.size());
    const uint8_t* next = map.data;
    for (size_t i = 0; i < tensors.size(); i++) {
        const Tensor& t = got.at(tensors[i].name);
        CHECK(t.dtype == dtype_named(tensors[i].dtype)->dtype);
        CHECK(t.shape == tensors[i].shape);
        CHECK(std::string((const char*)t.data, t.bytes) == want[tensors[i].name]);
        if (i == 0) CHECK((t.data - map.data) % 64 == 0);
        if (i > 0) CHECK(t.data == next); // in the order given, one after another
        next = t.data + t.bytes;
    }
    CHECK(next == map.data + map.size);

    // No tensors at all; and a writer that fails leaves neither the file nor a part of it, and the old one as it was.
    write_safetensors(s / "empty", {}, {});
    Tensors none;
    read_safetensors(MappedFile(s / "empty"), none, read);
    CHECK(none.empty());
    tensors[2].write = [](OutputFile& out) { DIE("%s: a fault", out.path.c_str()); };
    const std::string old = read_file(s / "f");
    CHECK_THROWS_AS(write_safetensors(s / "f", metadata, tensors), Error);
    CHECK_THROWS_AS(write_safetensors(s / "g", metadata, tensors), Error);
    CHECK(read_file(s / "f") == old);
    CHECK(s.count() == 2);
}

TEST_CASE("a copy in huge pages takes the mapping's place: the same bytes, whatever becomes of the file") {
    Scratch s;
    Random random{33};
    for (size_t size : {(size_t)1, (size_t)4096, ((size_t)5 << 20) + 123}) {
        std::string bytes(size, '\0');
        for (char& b : bytes) b = (char)random.below(256);
        write_file(s / "f", bytes);
        const MappedFile map(s / "f");
        const uint8_t* at = map.data;
        REQUIRE(copy_to_huge_pages(map));
        FILE* f = fopen((s / "f").c_str(), "r+b"); // in place: a mapping of the file would show it
        REQUIRE(f);
        fputs("other", f);
        REQUIRE(fclose(f) == 0);
        CHECK(map.data == at);
        CHECK(map.text() == bytes);
    }
}

// How a program ends that maps the file and then reads a page of it that another one has cut off.
static Result after_truncation(const std::string& path, bool moved, off_t left) {
    return Process::of([&] {
        return run_program("test", [](int moved, char** words) {
            MappedFile file(words[0]), other;
            if (moved & 1) other = std::move(file), file = MappedFile("tests/fixtures/tiny/tokenizer.bin");
            if (truncate(words[0], moved >> 1) != 0) return 2;
            const MappedFile& map = moved & 1 ? other : file;
            volatile uint8_t last = map.data[map.size - 1];
            return (int)(last & 1) * 0;
        }, (int)left << 1 | moved, (char**)std::array<const char*, 2>{path.c_str(), nullptr}.data());
    });
}

TEST_CASE("a mapped file that becomes shorter ends the program with a line that names it") {
    const Scratch s;
    for (const bool moved : {false, true})
        for (const off_t left : {0, 4096, 3 * 4096 - 1, 3 * 4096}) {
            write_file(s / "a\nfile", std::string(4 * 4096, 'x'));
            const Result r = after_truncation(s / "a\nfile", moved, left);
            CHECK(r.status == 1);
            CHECK(r.err == "test: " + s / "a file" + ": became shorter while it was in use\n");
        }
    const Result other = Process::of([] { return run_program("test", [](int, char**) { return raise(SIGBUS); }, 0, nullptr); });
    CHECK(other.status == 1000 + SIGBUS); // no file
    CHECK(other.err == "");
    { // forgotten when it is unmapped
        std::vector<std::unique_ptr<MappedFile>> many;
        for (int i = 0; i < 1100; i++) many.push_back(std::make_unique<MappedFile>("tests/fixtures/tiny/tokenizer.bin"));
    }
    write_file(s / "one", std::string(4 * 4096, 'x'));
    CHECK(after_truncation(s / "one", false, 0).status == 1);
}

TEST_CASE("a model.bin written from a folder, tensor by tensor, is the same model") {
    for (const char* folder : {"tied_f16", "untied_f32_sharded"}) {
        INFO(std::string(folder));
        Scratch s;
        const ModelFile file("tests/fixtures/"s + folder);
        std::vector<OutTensor> tensors;
        for (const ModelTensor& t : model_tensors(file.config)) {
            const Tensor& from = file.tensors.at(t.name());
            const char* dtype = from.dtype == Dtype::F16 ? "F16" : "F32";
            tensors.push_back({t.name(), dtype, t.shape(), [&from](OutputFile& out) { out.write(from.data, from.bytes); }});
        }
        write_safetensors(s / "m.bin", model_metadata(file.config_text, file.generation_text), tensors);
        const ModelFile written(s / "m.bin");
        CHECK(written.hash() == file.hash());
        CHECK(written.config_text == file.config_text);
        CHECK(written.generation_text == file.generation_text);
        CHECK(written.config.end_tokens == file.config.end_tokens);
        CHECK(same_bits(logits<bf16>(s / "m.bin"), logits<bf16>(file.path)));
    }
}
