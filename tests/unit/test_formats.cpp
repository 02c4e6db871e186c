// Quantised models as others publish them (quantized.h, gguf.h): every matrix bit by bit what the packages that define the
// format make of it, logits those of transformers on these matrices; and files that lie, each refused by one line that
// names the file and the fault.
#include "base/file.h"
#include "model/adapters.h"
#include "model/model_file.h"
#include "model/quantized.h"
#include "model/session.h"
#include "model/weights.h"
#include "model/write.h"
#include "search/embed.h"
#include "tests/files.h"
#include "tests/golden.h"
#include "tests/packed.h"
#include "tests/process.h"

using namespace std::literals; // "..."s

static const std::string FIXTURES = "tests/fixtures/quantized/", SMALL_VOCABULARY = "tests/fixtures/tiny/tokenizer.bin";
static const struct { const char *folder, *model; } MODELS[] = {
    {"fp8", ""}, {"awq", ""}, {"gptq4", ""}, {"gptq8", ""}, {"mixed", "/model.gguf"}, {"chat", "/model.gguf"}};

static const char* program(const char* variable) {
    const char* path = getenv(variable);
    REQUIRE_MESSAGE(path, variable << " is not set: make test sets it");
    return path;
}
static std::string hex(uint64_t hash) { return format("%016llx", (unsigned long long)hash); }
template <class T> std::vector<T> numbers_of(const Tensor& t) {
    std::vector<T> all((size_t)t.shape[0] * (size_t)t.shape[1]);
    CHECK(read_numbers(all.data(), t));
    return all;
}

// ----------------------------------------------------------------------------------------- the numbers

TEST_CASE("formats: every matrix is what the package that packed it makes of it, bit by bit") {
    std::set<Dtype> seen;
    for (auto& m : MODELS) {
        const ModelFile file(FIXTURES + m.folder + m.model);
        const Json golden(read_file(FIXTURES + m.folder + "/golden.json"));
        int matrices = 0;
        for (const sj::Member& entry : golden["matrices"].members()) {
            const std::string& name = entry.key;
            const sj::Value hashes = entry.value;
            INFO(std::string(m.folder) << " " << name);
            const Tensor& t = file.tensors.at(name);
            seen.insert(t.dtype);
            const std::vector<float> wide = numbers_of<float>(t);
            const std::vector<bf16> narrow = numbers_of<bf16>(t);
            CHECK(hex(fnv1a(wide.data(), wide.size() * 4)) == hashes[(size_t)0].str());
            CHECK(hex(fnv1a(narrow.data(), narrow.size() * 2)) == hashes[1].str());
            size_t off = 0; // the definition, number by number, is what whole tiles hold
            for (size_t i = 0; i < wide.size(); i++) {
                const float x = number(t, i);
                off += memcmp(&x, &wide[i], 4) != 0;
            }
            CHECK(off == 0);
            if (const sj::Value half = golden["halves"][name]) { // as the package computes: in float16
                std::vector<uint16_t> rounded;
                for (float x : wide) rounded.push_back(float_to_half(x));
                CHECK(hex(fnv1a(rounded.data(), rounded.size() * 2)) == half.str());
            }
            matrices++;
        }
        CHECK(matrices >= 7);
    }
    for (Dtype d : {Dtype::Packed, Dtype::Q4_0, Dtype::Q4_1, Dtype::Q5_0, Dtype::Q5_1, Dtype::Q8_0, Dtype::Q4_K,
                    Dtype::Q5_K, Dtype::Q6_K, Dtype::F16, Dtype::BF16, Dtype::F32})
        CHECK(seen.count(d) == 1);
}

template <class T> static std::vector<float> all_logits(const Golden& g) {
    const Weights<T> weights(g.file);
    std::vector<float> out;
    for (auto& prompt : g.prompts) {
        Session<T> session(g.file.config, weights, 64);
        session.feed(prompt, nullptr, [&](const float* row) { out.insert(out.end(), row, row + g.file.config.V); });
    }
    return out;
}

TEST_CASE("formats: logits are transformers' on the same matrices") {
    for (auto& m : MODELS) {
        INFO(std::string(m.folder));
        const Golden g("quantized/"s + m.folder, m.model);
        const std::vector<float> wide = all_logits<float>(g);
        REQUIRE(wide.size() == g.logits.size());
        double worst = 0;
        for (size_t i = 0; i < wide.size(); i++) {
            const double off = std::fabs((double)wide[i] - g.logits[i]);
            worst = off <= worst ? worst : off; // a NaN becomes the worst
        }
        INFO("largest difference " << worst);
        CHECK(worst <= 2e-4);
        CHECK(!g.file.is_float32()); // computed in bf16 unless asked
        on_every_instruction_set([&] {
            const double kl = mean_kl(g.logits, all_logits<bf16>(g), g.file.config.V);
            INFO("mean KL in bf16 " << kl << ", transformers " << g.bf16_kl);
            CHECK(kl <= g.bf16_kl);
            CHECK(kl > 0);
        });
    }
}

TEST_CASE("FP8 e4m3: every value, against arithmetic on its fields") {
    for (int u = 0; u < 256; u++) {
        const int e = u >> 3 & 15, f = u & 7;
        const double size = e ? std::ldexp(8 + f, e - 10) : std::ldexp(f, -9), want = u & 128 ? -size : size;
        const float got = e4m3_to_float((uint8_t)u);
        INFO(u);
        if ((u & 127) == 127) CHECK(std::isnan(got));
        else CHECK((got == want && std::signbit(got) == (u >= 128)));
    }
}

TEST_CASE("INT8 at load is made of the dequantised numbers") {
    for (auto& m : MODELS) {
        const ModelFile file(FIXTURES + m.folder + m.model);
        const Weights<float> plain(file), small(file, Format::INT8);
        const Linear<float>&W = plain.layers[0].down, &Q = small.layers[0].down;
        REQUIRE(Q.q[0]);
        for (int r = 0; r < W.out(); r++)
            for (int k = 0; k < W.in; k++) REQUIRE(std::fabs(Q.at(r, k) - W.at(r, k)) <= 0.51 * to_acc(((const bf16*)Q.scale[0])[(size_t)r * Q.groups() + k / GROUP]));
    }
}

// ----------------------------------------------------------------------------------------- folders

// A fixture's folder in parts that a test can bend.
struct Part { std::string dtype; Shape shape; std::string bytes; };
struct Parts {
    std::string config, generation;
    std::map<std::string, Part> tensors;

    explicit Parts(const std::string& folder) {
        config = read_file(FIXTURES + folder + "/config.json");
        generation = read_file(FIXTURES + folder + "/generation_config.json");
        const MappedFile map(FIXTURES + folder + "/model.safetensors");
        Tensors all;
        Metadata metadata;
        read_safetensors(map, all, metadata);
        for (auto& [name, t] : all)
            for (const char* dtype : {"BF16", "F16", "F32", "F8_E4M3", "I32"})
                if (t.dtype == dtype_named(dtype)->dtype)
                    tensors[name] = {dtype, t.shape, std::string((const char*)t.data, t.bytes)};
        REQUIRE(tensors.size() == all.size());
    }
    Part& operator[](const std::string& end) { // of the first layer's q_proj
        return tensors.at("model.layers.0.self_attn.q_proj." + end);
    }
    void drop(const std::string& end) { REQUIRE(tensors.erase("model.layers.0.self_attn.q_proj." + end)); }
    // Replaces the value of a key of quantization_config.
    void set(const std::string& key, const std::string& value) {
        const size_t at = config.find("\"" + key + "\": ", config.find("quantization_config"));
        REQUIRE(at != std::string::npos);
        const size_t begin = at + key.size() + 4;
        size_t end = config.find('\n', begin);
        if (config[begin] == '[' || config[begin] == '{') end = config.find(config[begin] == '[' ? ']' : '}', begin) + 1;
        else if (config[end - 1] == ',') end--;
        config.replace(begin, end - begin, value);
    }
    void add(const std::string& member) { // to quantization_config
        const size_t at = config.find('{', config.find("quantization_config"));
        config.insert(at + 1, member + ", ");
    }
    void write(const std::string& folder) const {
        fs::create_directories(folder);
        write_file(folder + "/config.json", config);
        write_file(folder + "/generation_config.json", generation);
        sj::Writer w;
        w.object();
        size_t at = 0;
        std::string data;
        for (auto& [name, t] : tensors) {
            w.key(name).object().field("dtype", t.dtype).key("shape").array();
            for (int64_t d : t.shape) w.value(d);
            w.end().key("data_offsets").array().value(at).value(at + t.bytes.size()).end().end();
            at += t.bytes.size(), data += t.bytes;
        }
        const std::string header = w.end().text;
        const uint64_t length = header.size();
        write_file(folder + "/model.safetensors", std::string((const char*)&length, 8) + header + data);
    }
};

// "" if the model loads, else its Error's message.
static std::string fault(const std::string& path) {
    try {
        const ModelFile file(path);
        const Weights<bf16> weights(file);
        return "";
    } catch (const Error& e) {
        return e.what();
    }
}
static void check_refused(const std::string& path, const std::string& word) {
    const std::string message = fault(path);
    INFO("wanted: " << word << "; got: " << message);
    CHECK(message.compare(0, path.size(), path) == 0);
    CHECK(message.find(word, path.size()) != std::string::npos);
    CHECK(message.find('\n') == std::string::npos);
}
template <class F> static void check_parts_refused(const std::string& folder, const std::string& word, F bend) {
    const Scratch s;
    Parts p(folder);
    bend(p);
    p.write(s / folder);
    check_refused(s / folder, word);
}
static void check_loads_as(const Parts& p, const std::string& fixture) { // with the same numbers
    const Scratch s;
    p.write(s / "m");
    const ModelFile a(s / "m"), b(FIXTURES + fixture);
    for (auto& [name, t] : b.tensors)
        if (t.shape.size() == 2) CHECK(same_bits(numbers_of<float>(a.tensors.at(name)), numbers_of<float>(t)));
}

TEST_CASE("folders: what they may leave out or say otherwise") {
    SUBCASE("bent by nothing") { check_loads_as(Parts("fp8"), "fp8"); }
    SUBCASE("GPTQ without g_idx, where columns are in order") {
        Parts p("gptq8");
        for (auto it = p.tensors.begin(); it != p.tensors.end();)
            it = it->first.find("g_idx") == std::string::npos ? std::next(it) : p.tensors.erase(it);
        check_loads_as(p, "gptq8");
    }
    SUBCASE("GPTQ's second format has zero points as they are") {
        Parts p("gptq4");
        for (auto& [name, t] : p.tensors)
            if (name.find("qzeros") != std::string::npos)
                for (char& c : t.bytes) c = (char)(c + 0x11); // no nibble is 15
        p.set("checkpoint_format", "\"gptq_v2\"");
        check_loads_as(p, "gptq4");
    }
    SUBCASE("the format's two names") {
        Parts p("gptq4");
        for (auto& [name, t] : p.tensors)
            if (name.find("qzeros") != std::string::npos)
                for (char& c : t.bytes) c = (char)(c + 0x11);
        p.add("\"format\": \"gptq_v2\"");
        p.set("checkpoint_format", "null");
        check_loads_as(p, "gptq4");
    }
    SUBCASE("what GPTQModel, AutoGPTQ, optimum, AutoAWQ and transformers write besides") {
        Parts gptq("gptq4"), awq("awq"), fp8("fp8");
        gptq.add(R"("method": "gptq", "format": "gptq", "rotation": null, "activation": null, "adapter": {}, "meta": {"mse": 0.0,
            "quantizer": ["gptqmodel:7.7.0"], "act_group_aware": false}, "model_name_or_path": "a/b", "is_marlin_format": false,
            "model_file_base_name": "model", "tokenizer": "a/b", "dataset": "c4", "batch_size": 1, "use_exllama": true,
            "exllama_config": {"version": 1}, "backend": "auto", "module_name_preceding_first_block": ["model.embed_tokens"],
            "cache_block_outputs": true, "act_group_aware": false, "use_cuda_fp16": false, "model_seqlen": 2048)");
        check_loads_as(gptq, "gptq4");
        awq.add(R"("method": "awq", "format": "gemm", "checkpoint_format": "gemm", "desc_act": false, "lm_head": false, "sym": false,
            "pack_dtype": "int32", "backend": "autoawq", "do_fuse": false, "fuse_max_seq_len": null, "exllama_config": null)");
        check_loads_as(awq, "awq");
        const char* autoround = R"("autoround_version": "0.4.7", "data_type": "int", "iters": 200, "nsamples": 128, "seqlen": 2048, "lr": 0.005,
            "minmax_lr": 0.005, "low_gpu_mem_usage": true, "provider": "auto-round", "enable_quanted_input": true, "amp": true, "super_bits": null,
            "gradient_accumulate_steps": 1, "scale_dtype": "torch.float16", "supported_types": ["Linear"], "act_bits": 16,
            "to_quant_block_names": "model.layers", "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}})";
        for (const char* folder : {"gptq4", "awq"}) {
            Parts p(folder);
            p.add(autoround);
            check_loads_as(p, folder);
            p.set("quant_method", "\"auto-round\"");
            p.add(folder == "awq"s ? R"("packing_format": "auto_round:auto_awq")" : R"("packing_format": "auto_round:auto_gptq")");
            check_loads_as(p, folder);
        }
        fp8.add(R"("scale_fmt": "float", "dequantize": false, "expert_dtype": "fp8", "modules_to_convert": null, "kernel": "")");
        check_loads_as(fp8, "fp8");
    }
    SUBCASE("a bias of zeros, as AutoGPTQ writes it") {
        Parts p("gptq4");
        p.tensors["model.layers.0.self_attn.q_proj.bias"] = {"F16", {64}, std::string(128, '\0')};
        check_loads_as(p, "gptq4");
    }
    SUBCASE("AWQ's version in capitals; no activation scheme") {
        Parts p("awq"), q("fp8");
        p.set("version", "\"GEMM\"");
        check_loads_as(p, "awq");
        q.set("activation_scheme", "null");
        check_loads_as(q, "fp8");
    }
    SUBCASE("scales in another type") {
        Parts p("awq");
        for (auto& [name, t] : p.tensors)
            if (name.find("scales") != std::string::npos) {
                std::string wide;
                for (size_t i = 0; i < t.bytes.size(); i += 2) {
                    const float f = half_to_float(load_as<uint16_t>(&t.bytes[i]));
                    wide.append((const char*)&f, 4);
                }
                t.dtype = "F32", t.bytes = wide;
            }
        check_loads_as(p, "awq");
    }
}

TEST_CASE("folders: a quantization_config that is not read is refused by name") {
    const struct { const char *folder, *key, *value, *word; } cases[] = {
        {"fp8", "quant_method", "\"compressed-tensors\"", "quant_method = \"compressed-tensors\"; fp8, awq and gptq are read"},
        {"fp8", "quant_method", "\"bitsandbytes\"", "quant_method = \"bitsandbytes\""},
        {"fp8", "quant_method", "null", "quant_method = null"},
        {"fp8", "fmt", "\"e5m2\"", "fmt = \"e5m2\""},
        {"fp8", "activation_scheme", "\"static\"", "activation_scheme = \"static\""},
        {"fp8", "weight_block_size", "null", "weight_block_size = null"},
        {"fp8", "weight_block_size", "[128]", "weight_block_size = [128]"},
        {"fp8", "weight_block_size", "[0, 128]", "weight_block_size is not a whole number from 1"},
        {"fp8", "weight_block_size", "[128, -1]", "weight_block_size is not a whole number from 1"},
        {"fp8", "weight_block_size", "[128, 1e2]", "weight_block_size is not a whole number from 1"},
        {"awq", "version", "\"gemv\"", "version = \"gemv\""},
        {"awq", "bits", "8", "bits = 8"},
        {"awq", "bits", "\"4\"", "bits is not a whole number"},
        {"awq", "zero_point", "false", "zero_point = false"},
        {"awq", "group_size", "0", "group_size = 0"},
        {"awq", "group_size", "-2", "group_size is not a whole number from -1"},
        {"awq", "group_size", "4294967296", "group_size is not a whole number from -1"},
        {"awq", "group_size", "128", "qzeros is (2,16), its matrix needs (1,16)"},
        {"awq", "group_size", "48", "is not in words of 8 numbers and groups of 48"},
        {"gptq4", "bits", "3", "bits = 3"},
        {"gptq4", "bits", "8", "qzeros"},
        {"gptq4", "group_size", "64", "qzeros is (3,8), its matrix needs (2,8)"},
        {"gptq4", "checkpoint_format", "\"marlin\"", "checkpoint_format = \"marlin\""},
        {"gptq4", "dynamic", "{\"-:lm_head\": {}}", "dynamic = {"},
        {"gptq4", "pack_dtype", "\"int16\"", "pack_dtype = \"int16\""},
    };
    for (auto& c : cases) {
        INFO(std::string(c.folder) << " " << std::string(c.key) << " " << std::string(c.value));
        check_parts_refused(c.folder, c.word, [&](Parts& p) { p.set(c.key, c.value); });
    }
    check_parts_refused("gptq4", "is_marlin_format = true", [](Parts& p) { p.add("\"is_marlin_format\": true"); });
    const struct { const char *folder, *member, *word; } more[] = {
        {"gptq4", R"("rotation": "hadamard")", "quantization_config has rotation = \"hadamard\", which is not supported"},
        {"gptq8", R"("rotation": "random")", "rotation = \"random\""},
        {"awq", R"("rotation": "hadamard")", "rotation = \"hadamard\""},
        {"gptq4", R"("activation": {"mode": "w4afp8"})", "activation = {"},
        {"gptq4", R"("adapter": {"name": "lora"})", "adapter = {"},
        {"gptq4", R"("method": "qqq")", "method = \"qqq\""},
        {"gptq4", R"("format": "gptq_v2")", "quantization_config: format and checkpoint_format differ"},
        {"gptq4", R"("format": "marlin")", "format = \"marlin\""},
        {"gptq4", R"("a key of tomorrow": 0)", "a key of tomorrow = 0"},
        {"gptq4", R"("data_type": "mx_fp")", "data_type = \"mx_fp\""},
        {"awq", R"("data_type": "nv_fp")", "data_type = \"nv_fp\""},
        {"gptq4", R"("act_bits": 8)", "act_bits = 8"},
        {"gptq4", R"("extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}})", "extra_config = {"},
        {"gptq4", R"("super_bits": 6)", "super_bits = 6"},
        {"awq", R"("format": "gemv_fast")", "format = \"gemv_fast\""},
        {"awq", R"("backend": "llm-awq")", "backend = \"llm-awq\""},
        {"awq", R"("desc_act": true)", "desc_act = true"},
        {"fp8", R"("scale_fmt": "ue8m0")", "scale_fmt = \"ue8m0\""},
        {"fp8", R"("rotation": "hadamard")", "rotation = \"hadamard\""},
    };
    const std::pair<const char*, const char*> packings[] = {{"", "quant_method = \"auto-round\"; fp8,"},
                                                            {R"("packing_format": "auto_round")", "packing_format = \"auto_round\""},
                                                            {R"("packing_format": "auto_round:auto_awq")", "desc_act = true"}};
    for (auto [member, word] : packings)
        check_parts_refused("gptq4", word, [member = member](Parts& p) {
            p.set("quant_method", "\"auto-round\"");
            if (*member) p.add(member);
        });
    for (auto& c : more) check_parts_refused(c.folder, c.word, [&](Parts& p) { p.add(c.member); });
    check_parts_refused("gptq4", "no tensor model.layers.0.self_attn.q_proj.g_idx", [](Parts& p) { p.drop("g_idx"); }); // desc_act
    check_parts_refused("fp8", "quantization_config is not a JSON object", [](Parts& p) {
        const size_t at = p.config.find("\"quantization_config\": {");
        p.config = p.config.substr(0, at) + "\"quantization_config\": 7}";
    });
}

TEST_CASE("folders: parts that are missing, of another shape or type, or beyond their range") {
    const std::string q = "model.layers.0.self_attn.q_proj.";
    auto refused = [](const char* folder, const std::string& word, auto bend) { check_parts_refused(folder, word, bend); };
    auto poke = [](std::string& bytes, size_t at, auto value) { memcpy(&bytes[at], &value, sizeof value); };

    refused("fp8", "no tensor " + q + "weight_scale_inv", [](Parts& p) { p.drop("weight_scale_inv"); });
    refused("fp8", q + "weight_scale_inv is (2,1), its matrix needs (1,2)", [](Parts& p) { p["weight_scale_inv"].shape = {2, 1}; });
    refused("fp8", q + "weight_scale_inv is not BF16, F16 or F32", [&](Parts& p) {
        p["weight_scale_inv"] = {"I32", {1, 1}, std::string(4, '\0')};
    });
    refused("fp8", q + "weight_scale_inv has an infinity or a NaN", [&](Parts& p) { poke(p["weight_scale_inv"].bytes, 2, (uint16_t)0x7fc0); });
    refused("fp8", q + "weight has an infinity or a NaN", [&](Parts& p) { p["weight"].bytes[77] = (char)0xff; });
    refused("fp8", q + "weight has an infinity or a NaN", [&](Parts& p) { // finite scales, and a product that is not
        p["weight_scale_inv"].dtype = "F32", p["weight_scale_inv"].bytes = std::string("\xff\xff\x7f\x7f\xff\xff\x7f\x7f", 8);
    });
    refused("fp8", q + "weight is (144,64), the config needs (64,144)", [](Parts& p) {
        p["weight"].shape = {144, 64}, p["weight_scale_inv"].shape = {2, 1};
    });
    refused("fp8", q + "weight is no matrix", [](Parts& p) { p["weight"].shape = {64 * 144}; });

    refused("awq", "no tensor " + q + "qzeros", [](Parts& p) { p.drop("qzeros"); });
    refused("awq", "no tensor " + q + "scales", [](Parts& p) { p.drop("scales"); });
    refused("awq", "no tensor " + q + "weight", [](Parts& p) { p.drop("qweight"); });
    refused("awq", q + "qweight is no matrix of I32", [](Parts& p) { p["qweight"].dtype = "F32"; });
    refused("awq", q + "qzeros is not I32", [](Parts& p) { p["qzeros"].dtype = "F32"; });
    refused("awq", q + "scales is (128,2), its matrix needs (2,128)", [](Parts& p) { p["scales"].shape = {128, 2}; });
    refused("awq", q + "scales has an infinity or a NaN", [&](Parts& p) { poke(p["scales"].bytes, 10, (uint16_t)0x7c00); });
    refused("awq", q + "weight is (64,256), the config needs (128,128)", [](Parts& p) {
        p["qweight"].shape = {256, 8}, p["qzeros"].shape = {4, 8}, p["scales"].shape = {4, 64};
    });
    refused("awq", q + "weight is there packed and not packed", [&](Parts& p) {
        p.tensors[q + "weight"] = {"F16", {128, 128}, std::string(2 * 128 * 128, '\0')};
    });

    refused("gptq4", q + "qzeros has a zero point of 16, beyond 4 bits", [](Parts& p) { p["qzeros"].bytes[3] = (char)0xf2; });
    refused("gptq4", q + "qzeros has a zero point of 16, beyond 4 bits", [](Parts& p) { p["qzeros"].bytes[3] = 0x2f; });
    refused("gptq8", q + "qzeros has a zero point of 256, beyond 8 bits", [](Parts& p) { p["qzeros"].bytes[3] = (char)0xff; });
    refused("gptq4", q + "g_idx has a group beyond the 2 there are", [&](Parts& p) { poke(p["g_idx"].bytes, 8, 2); });
    refused("gptq4", q + "g_idx has a group beyond the 2 there are", [&](Parts& p) { poke(p["g_idx"].bytes, 8, -1); });
    refused("gptq4", q + "g_idx is (63), its matrix needs (64)", [&](Parts& p) { p["g_idx"] = {"I32", {63}, std::string(252, '\0')}; });
    refused("gptq4", q + "bias is not zero", [&](Parts& p) {
        p.tensors[q + "bias"] = {"F16", {64}, std::string(127, '\0') + "\x3c"};
    });
    for (const char* bias : {"self_attn.q_proj.bias", "input_layernorm.bias"}) { // of what is not packed, too
        const std::string name = "model.layers.0."s + bias;
        refused("fp8", name + " is not zero", [&](Parts& p) { p.tensors[name] = {"BF16", {1}, "\1\1"}; });
        const Scratch s;
        Parts plain("../tied_bf16");
        plain.tensors[name] = {"BF16", {1}, "\1\1"s};
        plain.write(s / "m");
        check_refused(s / "m", name + " is not zero");
        plain.tensors[name].bytes = "\0\0"s;
        plain.write(s / "m");
        CHECK(fault(s / "m") == "");
    }
    // Shapes of no bytes whose products overflow.
    refused("gptq4", q, [&](Parts& p) { p["qweight"] = {"I32", {1ll << 62, 0}, ""}; });
    refused("awq", q, [&](Parts& p) { p["qweight"] = {"I32", {0, 1ll << 61}, ""}; });
    refused("fp8", q, [&](Parts& p) { p["weight"] = {"F8_E4M3", {0, INT64_MAX}, ""}; });
}

// ----------------------------------------------------------------------------------------- GGUF files

// A GGUF file in parts that a test can bend.
struct Gguf {
    struct Entry { std::string name; std::vector<uint64_t> dims; uint32_t type; std::string bytes; uint64_t offset; };
    std::vector<std::pair<std::string, std::string>> pairs; // key, type and value
    std::vector<Entry> tensors;
    uint64_t n_tensors = 0, n_pairs = 0; // what the file says: these more than there are
    uint32_t version = 3;

    template <class T> static std::string raw(T x) { return std::string((const char*)&x, sizeof x); }
    static std::string text(const std::string& s) { return raw<uint64_t>(s.size()) + s; }
    void set(const std::string& key, const std::string& value) { // "" takes it out
        for (auto it = pairs.begin(); it != pairs.end(); it++)
            if (it->first == key) {
                if (value.empty()) pairs.erase(it);
                else it->second = value;
                return;
            }
        pairs.push_back({key, value});
    }
    void set(const std::string& key, uint32_t x) { set(key, raw(GgufValue::U32) + raw(x)); }
    void set(const std::string& key, float x) { set(key, raw(GgufValue::F32) + raw(x)); }
    void set_text(const std::string& key, const std::string& s) { set(key, raw(GgufValue::STRING) + text(s)); }
    void set_texts(const std::string& key, const Strings& all) {
        std::string v = raw(GgufValue::ARRAY) + raw(GgufValue::STRING) + raw<uint64_t>(all.size());
        for (auto& s : all) v += text(s);
        set(key, v);
    }
    Entry& entry(const std::string& name) {
        for (Entry& e : tensors)
            if (e.name == name) return e;
        throw std::out_of_range(name);
    }
    void add(const std::string& name, std::vector<uint64_t> dims, uint32_t type, const std::string& bytes) {
        uint64_t at = 0;
        if (!tensors.empty()) at = (tensors.back().offset + tensors.back().bytes.size() + 31) / 32 * 32;
        tensors.push_back({name, dims, type, bytes, at});
    }
    std::string header() const {
        std::string h = "GGUF" + raw(version) + raw<uint64_t>(tensors.size() + n_tensors) + raw<uint64_t>(pairs.size() + n_pairs);
        for (auto& [key, value] : pairs) h += text(key) + value;
        for (const Entry& e : tensors) {
            h += text(e.name) + raw((uint32_t)e.dims.size());
            for (uint64_t d : e.dims) h += raw(d);
            h += raw(e.type) + raw(e.offset);
        }
        return h;
    }
    std::string file() const {
        std::string f = header();
        f.resize((f.size() + 31) / 32 * 32);
        for (const Entry& e : tensors) {
            std::string data = e.bytes;
            data.resize((data.size() + 31) / 32 * 32);
            f += data;
        }
        return f;
    }
};

static Gguf small_gguf() { // of Q8_0 with F32 norms: C 32, one head of 32, F 64, V 40
    Gguf g;
    g.set_text("general.architecture", "qwen3");
    const std::pair<const char*, uint32_t> sizes[] = {
        {"block_count", 1}, {"context_length", 64}, {"embedding_length", 32}, {"feed_forward_length", 64},
        {"attention.head_count", 1}, {"attention.head_count_kv", 1}, {"attention.key_length", 32}, {"attention.value_length", 32}};
    for (auto& [key, n] : sizes) g.set("qwen3."s + key, n);
    g.set("qwen3.rope.freq_base", 1e6f), g.set("qwen3.attention.layer_norm_rms_epsilon", 1e-6f);
    Random random{5};
    auto matrix = [&](const std::string& name, uint64_t rows, uint64_t in) {
        std::string bytes;
        for (uint64_t b = 0; b < rows * in / 32; b++) {
            bytes += Gguf::raw(float_to_half(0.002f));
            for (int i = 0; i < 32; i++) bytes += (char)random.below(256);
        }
        g.add(name, {in, rows}, 8, bytes);
    };
    auto norm = [&](const std::string& name, uint64_t n) {
        std::string bytes;
        for (uint64_t i = 0; i < n; i++) bytes += Gguf::raw(1 + 0.1f * (float)random.uniform());
        g.add(name, {n}, 0, bytes);
    };
    matrix("token_embd.weight", 40, 32), norm("output_norm.weight", 32);
    for (const char* name : {"attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"}) norm("blk.0."s + name + ".weight", 32);
    for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output"}) matrix("blk.0."s + name + ".weight", 32, 32);
    matrix("blk.0.ffn_gate.weight", 64, 32), matrix("blk.0.ffn_up.weight", 64, 32), matrix("blk.0.ffn_down.weight", 32, 64);
    return g;
}
template <class F> static void check_gguf_refused(const std::string& word, F bend) {
    Gguf g = small_gguf();
    bend(g);
    check_refused(MemoryFile(g.file()).path, word);
}

TEST_CASE("GGUF: the config is the metadata's") {
    Gguf g = small_gguf();
    const MemoryFile memory(g.file());
    CHECK(fault(memory.path) == "");
    const ModelFile file(memory.path);
    const Config& c = file.config;
    CHECK(std::vector<int>{c.C, c.L, c.H, c.K, c.D, c.F, c.V, c.max_positions} == std::vector<int>{32, 1, 1, 1, 32, 64, 40, 64});
    CHECK((c.eps == 1e-6f && c.rope_theta == 1e6 && c.tied && c.end_tokens.empty()));
    g.set_texts("tokenizer.ggml.tokens", {"a", "<|im_end|>", "b", "<|endoftext|>"});
    g.set("tokenizer.ggml.eos_token_id", 3u);
    g.add("output.weight", {32, 40}, 8, g.entry("token_embd.weight").bytes);
    const MemoryFile more(g.file());
    const ModelFile other(more.path);
    CHECK(other.config.end_tokens == std::vector<int>{3, 1});
    CHECK(!other.config.tied);
    CHECK(other.hash() != file.hash());
    g.set("qwen3.attention.key_length", ""), g.set("qwen3.attention.value_length", ""); // then C / H
    g.set("qwen3.attention.head_count_kv", Gguf::raw(GgufValue::I64) + Gguf::raw<int64_t>(1));
    g.version = 2;
    CHECK(fault(MemoryFile(g.file()).path) == "");
    const auto scaling = [&g] { const MemoryFile f(g.file()); return ModelFile(f.path).config.rope_scaling; };
    g.set("qwen3.rope.scaling.original_context_length", 64u), g.set("qwen3.rope.scaling.factor", 2.f);
    CHECK((scaling().type == RopeScaling::LINEAR && scaling().factor == 2)); // a factor alone is linear
    g.set_text("qwen3.rope.scaling.type", "yarn"), g.set("qwen3.rope.scaling.yarn_beta_fast", 20.f);
    CHECK((scaling().type == RopeScaling::YARN && scaling().original == 64 && scaling().fast == 20 && scaling().slow == 1));
    g.set_text("qwen3.rope.scaling.type", "none");
    CHECK(scaling().type == RopeScaling::NONE);
}

TEST_CASE("GGUF: one whose pooling is the last token makes vectors, as Qwen3-Embedding does") {
    const std::pair<uint32_t, bool> kinds[] = {{0, false}, {3, true}};
    for (auto [pooling, embeds] : kinds) {
        Gguf g = small_gguf();
        g.set("qwen3.pooling_type", pooling);
        const MemoryFile memory(g.file());
        const ModelFile file(memory.path);
        CHECK(says_it_embeds(file) == embeds);
        CHECK(file.config_text.find(embeds ? "[\"Qwen3Model\"]" : "[\"Qwen3ForCausalLM\"]") != std::string::npos);
    }
    for (uint32_t pooling : {1u, 2u, 4u, UINT32_MAX})
        check_gguf_refused(format("qwen3.pooling_type is %u, only", pooling), [&](Gguf& g) { g.set("qwen3.pooling_type", pooling); });
    check_gguf_refused("qwen3.pooling_type is not a whole number", [](Gguf& g) { g.set_text("qwen3.pooling_type", "last"); });
}

TEST_CASE("GGUF: what would be another model is refused by name") {
    auto meta = [](const char* word, const char* key, const std::string& value) {
        check_gguf_refused(word, [&](Gguf& g) { g.set(key, value); });
    };
    auto text = [](const std::string& s) { return Gguf::raw(GgufValue::STRING) + Gguf::text(s); };
    auto u32 = [](uint32_t n) { return Gguf::raw(GgufValue::U32) + Gguf::raw(n); };
    meta("architecture \"llama\", only \"qwen3\"", "general.architecture", text("llama"));
    meta("architecture \"qwen2moe\", only \"qwen3\"", "general.architecture", text("qwen2moe"));
    meta("architecture \"\", only \"qwen3\"", "general.architecture", "");
    meta("one of 3 parts of a model", "split.count", Gguf::raw(GgufValue::U16) + Gguf::raw<uint16_t>(3));
    meta("general.quantization_version is 1, only 2", "general.quantization_version", u32(1));
    meta("metadata has qwen3.expert_count", "qwen3.expert_count", u32(8));
    meta("qwen3.rope.scaling.type is longrope", "qwen3.rope.scaling.type", text("longrope"));
    meta("metadata has no qwen3.rope.scaling.factor", "qwen3.rope.scaling.type", text("yarn"));
    meta("qwen3.rope.scaling.factor is not a float", "qwen3.rope.scaling.factor", u32(4));
    meta("rope_scaling.factor = 0.0, which is not a number from 1", "qwen3.rope.scaling.factor", Gguf::raw(GgufValue::F32) + Gguf::raw(0.f));
    meta("rope.scaling.factor is an infinity or a NaN", "qwen3.rope.scaling.factor", Gguf::raw(GgufValue::F32) + Gguf::raw(NAN));
    meta("metadata has qwen3.rope.scaling.attn_factor", "qwen3.rope.scaling.attn_factor", Gguf::raw(GgufValue::F32) + Gguf::raw(1.f));
    meta("qwen3.attention.value_length is not", "qwen3.attention.value_length", u32(16));
    meta("qwen3.rope.dimension_count is not", "qwen3.rope.dimension_count", u32(16));
    meta("metadata has no qwen3.block_count", "qwen3.block_count", "");
    meta("qwen3.block_count is not a whole number", "qwen3.block_count", text("1"));
    meta("qwen3.block_count is not a whole number", "qwen3.block_count", Gguf::raw(GgufValue::I32) + Gguf::raw(-1));
    meta("num_hidden_layers = 5000 is outside", "qwen3.block_count", u32(5000));
    meta("q_proj.weight is (32,32), the config needs (64,32)", "qwen3.attention.head_count", u32(2));
    meta("metadata has no qwen3.attention.layer_norm_rms_epsilon", "qwen3.attention.layer_norm_rms_epsilon", "");
    meta("qwen3.rope.freq_base is not a float", "qwen3.rope.freq_base", u32(10000));
    for (const char* key : {"qwen3.rope.freq_base", "qwen3.attention.layer_norm_rms_epsilon"}) {
        meta((key + " is an infinity or a NaN"s).c_str(), key, Gguf::raw(GgufValue::F32) + Gguf::raw(NAN));
        meta((key + " is an infinity or a NaN"s).c_str(), key, Gguf::raw(GgufValue::F64) + Gguf::raw<double>(INFINITY));
    }
    meta("eos_token_id holds 40", "tokenizer.ggml.eos_token_id", u32(40));
    check_gguf_refused("tensor blk.0.attn_q.bias belongs to no", [](Gguf& g) { g.add("blk.0.attn_q.bias", {32}, 0, std::string(128, 0)); });
    check_gguf_refused("tensor rope_freqs.weight belongs to no", [](Gguf& g) { g.add("rope_freqs.weight", {16}, 0, std::string(64, 0)); });
    for (const char* name : {"blk.00.attn_q.weight", "blk.-1.attn_q.weight", "blk.0.attn_q", "blk.0..weight", "blk.", "blk.0.weight",
                             "blk.0.attn_q.weight.weight", "blk. 0.attn_q.weight", ""})
        check_gguf_refused(" belongs to no", [&](Gguf& g) { g.entry("blk.0.attn_q.weight").name = name; });
    check_gguf_refused("no tensor model.layers.0.mlp.down_proj.weight", [](Gguf& g) { g.tensors.pop_back(); });
    check_gguf_refused("no tensor token_embd.weight", [](Gguf& g) { g.entry("token_embd.weight").name = "blk.1.attn_q.weight"; });
    check_gguf_refused("tensor model.layers.1.self_attn.q_proj.weight is of no layer: the model has 1",
                       [](Gguf& g) { g.add("blk.1.attn_q.weight", {32, 32}, 8, g.entry("blk.0.attn_q.weight").bytes); });
    check_gguf_refused("type Q2_K, which is not supported", [](Gguf& g) { g.entry("blk.0.attn_q.weight").type = 10; });
    check_gguf_refused("the unknown type 5", [](Gguf& g) { g.entry("blk.0.attn_q.weight").type = 5; });
    check_gguf_refused("the unknown type 4294967295", [](Gguf& g) { g.entry("blk.0.attn_q.weight").type = UINT32_MAX; });
    check_gguf_refused("rows of 32 numbers, Q6_K has blocks of 256", [](Gguf& g) { g.entry("blk.0.attn_q.weight").type = 14; });
    for (uint16_t scale : {0x7c00, 0xfc00, 0x7e00}) // a block's
        check_gguf_refused("self_attn.q_proj.weight has an infinity or a NaN",
                           [&](Gguf& g) { g.entry("blk.0.attn_q.weight").bytes.replace(34 * 7, 2, Gguf::raw(scale)); });
}

TEST_CASE("GGUF: a header that lies") {
    check_gguf_refused("GGUF of version 1; 2 and 3 are read", [](Gguf& g) { g.version = 1; });
    check_gguf_refused("GGUF of version 50331648", [](Gguf& g) { g.version = 3 << 24; }); // big-endian
    for (uint64_t more : {(uint64_t)1, (uint64_t)1 << 40, UINT64_MAX - 100}) {
        check_gguf_refused("", [&](Gguf& g) { g.n_tensors = more; });
        check_gguf_refused("", [&](Gguf& g) { g.n_pairs = more; });
    }
    check_gguf_refused("names qwen3.block_count twice", [](Gguf& g) { g.pairs.push_back({"qwen3.block_count", g.pairs[1].second}); });
    check_gguf_refused("has the unknown type 13", [](Gguf& g) { g.set("x", Gguf::raw(13)); });
    check_gguf_refused("is an array of the type 9", [](Gguf& g) { g.set("x", Gguf::raw(9) + Gguf::raw(9) + Gguf::raw<uint64_t>(0)); });
    check_gguf_refused("is an array of the type 99", [](Gguf& g) { g.set("x", Gguf::raw(9) + Gguf::raw(99) + Gguf::raw<uint64_t>(0)); });
    check_gguf_refused("x overflows 64 bits", [](Gguf& g) { g.set("x", Gguf::raw(9) + Gguf::raw(10) + Gguf::raw<uint64_t>(1ull << 61)); });
    for (uint64_t n : {(uint64_t)1 << 20, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 8}) { // lengths past the end of the file
        check_gguf_refused("past the end of the file", [&](Gguf& g) { g.set("x", Gguf::raw(8) + Gguf::raw(n)); });
        check_gguf_refused("past the end of the file", [&](Gguf& g) { g.set("x", Gguf::raw(9) + Gguf::raw(0) + Gguf::raw(n)); });
        check_gguf_refused("past the end of the file", [&](Gguf& g) { g.set("x", Gguf::raw(9) + Gguf::raw(8) + Gguf::raw(n)); });
    }
    const uint32_t alignments[] = {0, 3, 48, 1u << 21, UINT32_MAX};
    for (uint32_t a : alignments) check_gguf_refused("not a power of two", [&](Gguf& g) { g.set("general.alignment", a); });
    check_gguf_refused("general.alignment is not a whole number", [](Gguf& g) { g.set_text("general.alignment", "32"); });
    check_gguf_refused("begins at byte 1376, no multiple of the alignment", [](Gguf& g) { g.set("general.alignment", 64u); });
    check_gguf_refused("is not in the file", [](Gguf& g) { g.set("general.alignment", 1u << 20); });

    auto q = [](Gguf& g) -> Gguf::Entry& { return g.entry("blk.0.attn_q.weight"); };
    check_gguf_refused("is there twice", [&](Gguf& g) { q(g).name = "blk.0.attn_k.weight"; });
    check_gguf_refused("has 0 dimensions", [&](Gguf& g) { q(g).dims = {}; });
    check_gguf_refused("has 5 dimensions", [&](Gguf& g) { q(g).dims = {32, 32, 1, 1, 1}; });
    check_gguf_refused("has a bad shape", [&](Gguf& g) { q(g).dims = {32, 0}; });
    check_gguf_refused("has a bad shape", [&](Gguf& g) { q(g).dims = {1ull << 32, 1ull << 32}; });
    check_gguf_refused("has a bad shape", [&](Gguf& g) { q(g).dims = {32, UINT64_MAX}; });
    check_gguf_refused("q_proj.weight is (64,32), the config needs (32,32)", [&](Gguf& g) {
        q(g).dims = {32, 64}, q(g).bytes += q(g).bytes;
        uint64_t at = 0;
        for (auto& e : g.tensors) e.offset = at, at += (e.bytes.size() + 31) / 32 * 32;
    });
    check_gguf_refused("rows of 33 numbers", [&](Gguf& g) { q(g).dims = {33, 32}; });
    check_gguf_refused("is (1,32), the config needs (32)", [&](Gguf& g) { g.entry("blk.0.attn_norm.weight").dims = {32, 1}; });
    check_gguf_refused("has 3 dimensions, blocks of Q8_0 are in matrices only", [&](Gguf& g) { q(g).dims = {32, 32, 1}; });
    check_gguf_refused("tensor blk.1.ffn_up.weight has 3 dimensions", [&](Gguf& g) {
        g.add("blk.1.ffn_up.weight", {32, 64, 8}, 8, std::string(34 * 64 * 8, '\0'));
    });
    check_gguf_refused("tensor blk.0.attn_norm.weight has 1 dimensions", [&](Gguf& g) {
        Gguf::Entry& norm = g.entry("blk.0.attn_norm.weight");
        norm.type = 8, norm.bytes = std::string(34, '\0');
    });
    check_gguf_refused("no multiple of the alignment", [&](Gguf& g) { q(g).offset += 2; });
    for (uint64_t far : {(uint64_t)1 << 20, (uint64_t)1 << 63, UINT64_MAX - 31})
        check_gguf_refused("is not in the file", [&](Gguf& g) { q(g).offset = far; });
    check_gguf_refused("overlaps", [&](Gguf& g) { q(g).offset -= 32; });
    check_gguf_refused("overlaps", [&](Gguf& g) { q(g).offset = 0; });

    const std::string whole = small_gguf().file();
    for (size_t n = 4; n < whole.size(); n += n < 1200 ? 1 : 997) { // (a file of fewer bytes is no GGUF)
        const MemoryFile cut(whole.substr(0, n));
        const std::string message = fault(cut.path);
        CHECK(message.compare(0, cut.path.size(), cut.path) == 0);
    }
}

// ----------------------------------------------------------------------------------------- tokenizers

TEST_CASE("GGUF: its tokenizer must be the one that is used") {
    const Tokenizer t(SMALL_VOCABULARY);
    const ModelFile file(FIXTURES + "chat/model.gguf");
    CHECK(file.difference(t) == "");
    CHECK(file.config.end_tokens.size() == 2);
    CHECK(file.config.end_tokens[0] == t.id("<|im_end|>"));
    CHECK(std::count(file.config.end_tokens.begin(), file.config.end_tokens.end(), t.id("<|endoftext|>")) == 1);
    CHECK(ModelFile(FIXTURES + "fp8").difference(t) == ""); // says nothing of one

    const GgufFile g(file.maps[0]);
    auto texts = [&](const char* key) {
        Strings all;
        g[key].each_string([&](uint64_t, std::string_view s) { all.push_back(std::string(s)); });
        return all;
    };
    const Strings tokens = texts("tokenizer.ggml.tokens"), merges = texts("tokenizer.ggml.merges");
    auto compared = [&](const Tokenizer& with, auto bend) {
        Gguf other = small_gguf();
        other.set_text("tokenizer.ggml.model", "gpt2"), other.set_text("tokenizer.ggml.pre", "qwen2");
        other.set_texts("tokenizer.ggml.tokens", tokens), other.set_texts("tokenizer.ggml.merges", merges);
        const GgufValue& types = g["tokenizer.ggml.token_type"];
        other.set("tokenizer.ggml.token_type", Gguf::raw(GgufValue::ARRAY) + Gguf::raw(types.item) + Gguf::raw(types.count) +
                                                   std::string((const char*)types.data, types.count * 4));
        bend(other);
        const MemoryFile memory(other.file());
        const MappedFile map(memory.path);
        return GgufVocabulary(GgufFile(map)).difference(with);
    };
    auto difference = [&](auto bend) { return compared(t, bend); };
    auto with = [&](const char* key, Strings all, size_t i, const char* text) {
        all[i] = text;
        return difference([&](Gguf& o) { o.set_texts(key, all); });
    };
    CHECK(difference([](Gguf&) {}) == "");
    CHECK(difference([](Gguf& o) { o.set("tokenizer.ggml.token_type", ""); }) == "");
    CHECK(with("tokenizer.ggml.tokens", tokens, 300, "zz") == "its token 300 is \"zz\"");
    CHECK(with("tokenizer.ggml.tokens", tokens, 300, "\xff") == "its token 300 is \"\xff\"");
    CHECK(with("tokenizer.ggml.tokens", tokens, 300, "\xe4\xb8\xad") == "its token 300 is \"\xe4\xb8\xad\""); // no byte's character
    CHECK(with("tokenizer.ggml.tokens", tokens, (size_t)t.size(), "[PAD]") == "");
    CHECK(with("tokenizer.ggml.merges", merges, 9, "a b") == "its merge 9 is \"a b\"");
    CHECK(with("tokenizer.ggml.merges", merges, 9, "ab") == "its merge 9 is \"ab\"");
    const Strings some(merges.begin(), merges.end() - 1), few(tokens.begin(), tokens.begin() + 999);
    CHECK(difference([&](Gguf& o) { o.set_texts("tokenizer.ggml.merges", some); }).find("merges, not") != std::string::npos);
    CHECK(difference([&](Gguf& o) { o.set_texts("tokenizer.ggml.tokens", few), o.set("tokenizer.ggml.token_type", ""); }) ==
          format("it has 999 tokens, not %d", t.size()));
    Strings more = tokens;
    more.back() = "one of its own";
    CHECK(difference([&](Gguf& o) { o.set_texts("tokenizer.ggml.tokens", more), o.set("tokenizer.ggml.token_type", ""); }) ==
          format("its token %zu is \"one of its own\"", tokens.size() - 1));
    auto first = [](const Strings& all, size_t n) { return Strings(all.begin(), all.begin() + (ptrdiff_t)n); };
    auto shorter = [&](Gguf& o) { // Qwen3-Embedding-8B has 151,665 tokens, none from <tool_response> on, and as many rows
        o.set_texts("tokenizer.ggml.tokens", first(tokens, 996)), o.set("tokenizer.ggml.token_type", "");
    };
    CHECK(difference(shorter) == format("it has 996 tokens, not %d", t.size()));
    CHECK(compared(Tokenizer(SMALL_VOCABULARY, 996), shorter) == "");
    CHECK(difference([](Gguf& o) { o.set_text("tokenizer.ggml.pre", "llama-bpe"); }) == "it is of the kind gpt2, llama-bpe");
    CHECK(difference([](Gguf& o) { o.set_text("tokenizer.ggml.model", "llama"); }) == "it is of the kind llama, qwen2");
    CHECK(difference([](Gguf& o) { o.set("tokenizer.ggml.add_bos_token", Gguf::raw(GgufValue::BOOL) + "\1"); }) == "it puts a token before every text");
    CHECK(difference([](Gguf& o) { o.set("tokenizer.ggml.add_bos_token", Gguf::raw(GgufValue::BOOL) + "\0"s); }) == "");
    CHECK(difference([](Gguf& o) { o.set_text("tokenizer.chat_template", "[INST]"); }).find("chat template is not Qwen3's") != std::string::npos);
    check_gguf_refused("token_type has another length", [&](Gguf& o) {
        o.set_texts("tokenizer.ggml.tokens", tokens);
        o.set("tokenizer.ggml.token_type", Gguf::raw(GgufValue::ARRAY) + Gguf::raw(GgufValue::I32) + Gguf::raw<uint64_t>(0));
    });
    check_gguf_refused("tokenizer.ggml.tokens is not an array", [&](Gguf& o) { o.set_text("tokenizer.ggml.tokens", "a"); });
}

// ----------------------------------------------------------------------------------------- written

TEST_CASE("a quantised tensor of any number of dimensions is written as all its numbers") {
    const Scratch s;
    std::string blocks;
    for (int b = 0; b < 8; b++) blocks += Gguf::raw(float_to_half(0.5f)) + std::string(32, (char)b);
    for (const Shape& shape : {Shape{8 * 32}, Shape{8, 32}, Shape{1, 2, 4, 32}}) {
        Tensor t;
        t.dtype = Dtype::Q8_0, t.shape = shape, t.data = (const uint8_t*)blocks.data(), t.bytes = blocks.size();
        OutputFile out(s / "t");
        write_tensor(out, "t", t);
        out.commit();
        const std::string written = read_file(s / "t");
        REQUIRE(written.size() == 2 * 8 * 32);
        for (int i = 0; i < 8 * 32; i++) CHECK(to_acc(load_as<bf16>(&written[2 * (size_t)i])) == 0.5f * (float)(i / 32));
    }
}

TEST_CASE("a bare model without a head becomes a model.bin, and that another one") {
    const std::string embed = "tests/fixtures/embed/";
    auto with = [](std::string text, const std::string& from, const std::string& to) {
        REQUIRE(text.find(from) != text.npos);
        return text.replace(text.find(from), from.size(), to);
    };
    const std::string untied = with(read_file(embed + "config.json"), "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    for (bool causal : {true, false}) { // what Qwen3-Embedding-8B says it is, and what others do
        const Scratch s;
        fs::create_directories(s / "m");
        fs::copy_file(embed + "model.safetensors", s / "m/model.safetensors");
        write_file(s / "m/config.json", causal ? untied : with(untied, "Qwen3ForCausalLM", "Qwen3Model"));
        write_model(ModelFile(s / "m"), s / "m.bin");
        ModelFile bare(s / "m"), one(s / "m.bin");
        bare.logits = one.logits = false;
        const Weights<float> a(bare), b(one);
        const size_t n = (size_t)bare.config.V * (size_t)bare.config.C;
        CHECK(std::equal(a.embed.w[0], a.embed.w[0] + n, b.embed.w[0]));
        if (!causal) CHECK(write_model(one, s / "again.bin") == fs::file_size(s / "m.bin"));
    }
    // A model that is to say something needs its head.
    const Scratch s;
    Parts p("../untied_bf16");
    REQUIRE(p.tensors.erase("lm_head.weight"));
    p.write(s / "m");
    CHECK_THROWS_WITH_AS(write_model(ModelFile(s / "m"), s / "m.bin"), (s / "m" + ": no tensor lm_head.weight").c_str(), Error);
}

// ----------------------------------------------------------------------------------------- programs

TEST_CASE("programs: a GGUF file answers, becomes a model.bin, and refuses another tokenizer") {
    const Scratch s;
    const std::string chat = FIXTURES + "chat/model.gguf", bin = s / "m.bin";
    auto run = [&](const Strings& arguments) { return Process(program("QWEN3"), arguments).wait(); };
    auto answer = [&](const std::string& model) {
        const Result r = run({model, "-z", SMALL_VOCABULARY, "-i", "day", "-n", "12", "-s", "1", "-j", "1", "--dtype", "bf16"});
        INFO(r.err);
        CHECK(r.status == 0);
        CHECK(r.out.size() > 12);
        return r.out;
    };
    const std::string text = answer(chat);
    CHECK(run({chat, "--convert", bin}).status == 0);
    CHECK(answer(bin) == text);
    CHECK(run({bin, "--convert", s / "again.bin"}).status == 0);
    CHECK(read_file(s / "again.bin") == read_file(bin));
    for (auto& m : MODELS) { // the same logits from what it was converted to
        const std::string model = FIXTURES + m.folder + m.model, out = s / m.folder + ".bin"s;
        CHECK(run({model, "--convert", out}).status == 0);
        auto hash = [&](const std::string& of, const Strings& more) {
            const Result r = run(Strings{of, "-d", "cpu", "--ids", "1 2 3", "--logits-hash"} + more);
            CHECK(r.status == 0);
            return r.out;
        };
        const std::string wide = hash(model, {"--dtype", "bf16"}), packed = hash(model, {});
        CHECK(wide == hash(out, {}));
        // Products that take bf16 round its own format to the same bf16. GPTQ's become INT8 here: other numbers.
        CHECK((packed == wide) == (rounds_packed<bf16>() && m.folder[0] != 'g'));
    }
    check_refusal(run({chat, "-z", "tokenizer.bin", "-i", "day"}), "qwen3", "its tokenizer is not tokenizer.bin: it has 1040 tokens");
    check_refusal(run({bin, "--convert", bin}), "qwen3", "is the model itself");
    for (const Strings& more : {Strings{"-i", "day"}, Strings{"--dtype", "int8"}, Strings{"--adapter", "tests/fixtures/train/adapter"}})
        check_refusal(run({bin, "--convert", s / "x.bin", more[0], more[1]}), "qwen3", "goes with a model alone");
    check_refusal(run({FIXTURES + "chat/golden.json", "--convert", s / "x.bin"}), "qwen3", "not a safetensors file");
    CHECK(!fs::exists(s / "x.bin"));
}

TEST_CASE("programs: LoRA on a quantised model, merged into bf16") {
    const Scratch s;
    const std::string chat = FIXTURES + "chat/model.gguf", data = s / "d.bin", rows = s / "rows.jsonl";
    write_file(rows, R"({"instruction": "day", "output": "night"})" "\n" R"({"instruction": "night", "output": "day"})" "\n");
    auto run = [&](const char* which, const Strings& arguments) {
        const Result r = Process(program(which), arguments).wait();
        INFO(r.err);
        CHECK(r.status == 0);
        return r.err;
    };
    run("DATAGEN", {"pack", rows, data, "-z", SMALL_VOCABULARY});
    run("TRAIN_LORA", {chat, data, "-z", SMALL_VOCABULARY, "--rank", "2", "--steps", "2", "-o", s / "run", "--merge", s / "merged.bin", "-j", "1"});
    const ModelFile base(chat), merged(s / "merged.bin");
    CHECK(merged.config_text == base.config_text);
    CHECK(merged.tensors.at("model.layers.0.self_attn.q_proj.weight").dtype == Dtype::BF16);
    CHECK(fault(s / "merged.bin") == "");
    // A merged folder of packed matrices says nothing of packing any more.
    AdapterConfig a;
    a.rank = 1, a.alpha = 1, a.targets[Q_PROJ] = true;
    const ModelFile awq(FIXTURES + "awq");
    fs::create_directories(s / "adapter");
    write_file(s / "adapter/adapter_config.json", adapter_config_json(a, 0, "awq"));
    std::vector<OutTensor> tensors;
    for (const ModelTensor& t : targeted(awq.config, a))
        for (char matrix : {'A', 'B'}) {
            const Shape shape = matrix == 'A' ? Shape{1, t.columns} : Shape{t.rows, 1};
            tensors.push_back({adapter_tensor(t.layer, t.kind, matrix), "F32", shape, [n = shape[0] * shape[1]](OutputFile& out) {
                out.write(std::string((size_t)n * 4, '\0'));
            }});
        }
    write_safetensors(s / "adapter/adapter_model.safetensors", {}, tensors);
    write_merged(awq, AdapterFile(s / "adapter", awq.config), s / "folder"); // zeros: nothing but the format changes
    const ModelFile folder(s / "folder");
    CHECK(folder.config_text.find("quantization_config") == std::string::npos);
    for (const ModelTensor& t : model_tensors(awq.config)) {
        if (!t.columns) continue;
        INFO(t.name());
        CHECK(same_bits(numbers_of<bf16>(folder.tensors.at(t.name())), numbers_of<bf16>(awq.tensors.at(t.name()))));
    }
}

TEST_CASE("a model's hash depends on the scales, zero points, order of columns and format too") {
    auto hash = [](auto bend) {
        const Scratch s;
        Parts p("gptq4");
        bend(p);
        p.write(s / "m");
        return ModelFile(s / "m").hash();
    };
    const uint64_t same = hash([](Parts&) {});
    CHECK(same == hash([](Parts&) {}));
    for (const char* part : {"qweight", "scales", "qzeros", "g_idx"})
        CHECK(same != hash([&](Parts& p) { p[part].bytes[0] ^= 1; }));
    CHECK(same != hash([](Parts& p) { p.set("checkpoint_format", "\"gptq_v2\""); }));
}
