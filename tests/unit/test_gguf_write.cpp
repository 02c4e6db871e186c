// GGUF written (gguf_write.h): numbers, config, tokenizer and template as our own reader gets them back; what is rounded is
// said. (tests/reference/check_gguf.py has the gguf package and llama.cpp read such files.)
#include "base/file.h"
#include "model/chat_template.h"
#include "model/gguf_write.h"
#include "model/write.h"
#include "tests/files.h"
#include "tests/process.h"

static const std::string TINY = "tests/fixtures/tiny/model.bin", VOCABULARY = "tests/fixtures/tiny/tokenizer.bin", QUANTIZED = "tests/fixtures/quantized/";

static Result run_qwen3(const Strings& arguments) {
    const char* path = getenv("QWEN3");
    return Process(path ? path : "./qwen3", arguments + Strings{"-j", "1"}).wait();
}
static Result must(Strings arguments) {
    for (const char* writes : {"--convert", "--quantize", "--convert-adapter"})
        if (std::count(arguments.begin(), arguments.end(), writes)) arguments.push_back("--overwrite");
    const Result r = run_qwen3(arguments);
    INFO(r.err);
    REQUIRE(r.status == 0);
    return r;
}

// The written file, opened anew.
struct Written {
    Scratch folder;
    GgufWritten made;
    std::unique_ptr<ModelFile> file;
    explicit Written(const ModelFile& from) {
        made = write_gguf(from, Tokenizer(VOCABULARY, from.config.V), folder / "m.gguf");
        file = std::make_unique<ModelFile>(folder / "m.gguf");
    }
    const Tensor& at(const std::string& name) const { return file->tensors.at(name); }
    std::string notes() const {
        std::string all;
        for (auto& note : made.notes) all += note + "\n";
        return all;
    }
};
// How many numbers of the matrix differ; where both are bf16: after rounding to it.
static size_t different(const Tensor& a, const Tensor& b, bool rounded = false) {
    REQUIRE(a.shape == b.shape);
    size_t off = 0;
    for (size_t i = 0; i < count_of(a.shape); i++) {
        const float x = number(a, i), y = number(b, i);
        off += rounded ? to_bf16(x).bits != to_bf16(y).bits : x != y;
    }
    return off;
}

TEST_CASE("GGUF out: F32, F16 and BF16 keep their bytes, norms become F32, the config is the same") {
    for (const std::string folder : {"tied_f32", "untied_f32_sharded", "tied_bf16", "untied_bf16", "tied_f16"}) {
        INFO(folder);
        const ModelFile from("tests/fixtures/" + folder);
        const Written to(from);
        CHECK(to.notes() == "");
        CHECK(to.made.bytes == fs::file_size(to.folder / "m.gguf"));
        size_t tensors = 0;
        for (const ModelTensor& m : model_tensors(from.config)) {
            const Tensor &a = from.tensors.at(m.name()), &b = to.at(m.name());
            CHECK(b.dtype == (m.columns ? a.dtype : Dtype::F32));
            CHECK(different(a, b) == 0);
            CHECK(b.bytes == (m.columns ? a.bytes : 4 * m.size()));
            tensors++;
        }
        CHECK(tensors == to.file->tensors.size());
        const Config &c = from.config, &d = to.file->config;
        CHECK((c.C == d.C && c.L == d.L && c.H == d.H && c.K == d.K && c.D == d.D && c.F == d.F && c.V == d.V && c.max_positions == d.max_positions));
        CHECK((c.eps == d.eps && c.rope_theta == d.rope_theta && c.tied == d.tied));
        for (int id : c.end_tokens) CHECK(std::count(d.end_tokens.begin(), d.end_tokens.end(), id) == 1);
    }
}

TEST_CASE("GGUF out: scaled RoPE is the same in the file, or refused where GGUF has no key for it") {
    const std::string folder = "tests/fixtures/untied_f32_sharded";
    const auto with = [&](const std::string& scaling) {
        ModelFile file(folder);
        const size_t begin = file.config_text.find("\"rope_parameters\""), end = file.config_text.find('}', begin);
        file.config_text.replace(begin, end + 1 - begin, "\"rope_theta\": 1e4, \"rope_scaling\": " + scaling);
        file.config = parse_config(folder, file.config_text, file.generation_text);
        return file;
    };
    const std::string yarn = R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768)";
    for (const std::string& scaling : {yarn + "}", yarn + R"(, "beta_fast": 16, "beta_slow": 0.5})",
                                       std::string(R"({"type": "yarn", "factor": 2.5})"), std::string(R"({"type": "linear", "factor": 3})")}) {
        INFO(scaling);
        const ModelFile from = with(scaling);
        const Written to(from);
        const RopeScaling &a = from.config.rope_scaling, &b = to.file->config.rope_scaling;
        CHECK(a.type != RopeScaling::NONE);
        CHECK((a.type == b.type && a.factor == b.factor && a.original == b.original && a.attention == b.attention));
        CHECK((a.fast == b.fast && a.slow == b.slow && a.truncate == b.truncate));
        CHECK(from.config.max_positions == to.file->config.max_positions);
    }
    const auto refused = [&](const std::string& scaling, const std::string& word) {
        std::string fault;
        try {
            Written{with(scaling)};
        } catch (const Error& e) {
            fault = e.what();
        }
        INFO(fault);
        CHECK(fault.find(word) != std::string::npos);
    };
    refused(yarn + R"(, "truncate": false})", "cannot hold truncate = false");
    refused(yarn + R"(, "attention_factor": 1.5})", "cannot hold this attention_factor");
    refused(R"({"type": "linear", "factor": 3.1})", "3.1000000000000001 is no float");
    refused(R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4})", "cannot hold llama3's");
}

TEST_CASE("GGUF out: an embedding model is one in the file, too") {
    const Written to(ModelFile("tests/fixtures/embed"));
    const GgufFile g(to.file->maps[0]);
    CHECK(g.integer("qwen3.pooling_type") == 3);
    CHECK(to.file->config_text.find("Qwen3Model") != std::string::npos);
    CHECK(!GgufFile(Written(ModelFile(TINY)).file->maps[0])["qwen3.pooling_type"]);
}

TEST_CASE("GGUF out: INT8 as Q8_0, INT4 as Q4_1 or Q4_0, the numbers of the model; losses are counted") {
    const Scratch s;
    const std::string small = s / "small.bin", patched = s / "patched.bin";
    // Writes `small` with other bytes in the tensors whose names end so.
    const auto patch = [&](const std::string& end, const std::string& bytes) {
        std::string all = read_file(small);
        const MappedFile map(small);
        Tensors tensors;
        Metadata metadata;
        read_safetensors(map, tensors, metadata);
        int found = 0;
        for (auto& [name, t] : tensors)
            if (name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0) {
                found++;
                for (size_t i = 0; i < t.bytes; i++) all[(size_t)(t.data - map.data) + i] = bytes[i % bytes.size()];
            }
        CHECK(found > 0);
        write_file(patched, all);
    };
    const std::string q = "model.layers.0.self_attn.q_proj.weight", embedding = "model.embed_tokens.weight";
    {
        must({TINY, "--quantize", "int8", small});
        const ModelFile from(small);
        const Tensors numbers = readable_tensors(from);
        const Written to(from);
        CHECK(to.notes() == "");
        for (const std::string& name : {q, embedding}) {
            CHECK(to.at(name).dtype == Dtype::Q8_0);
            CHECK(different(numbers.at(name), to.at(name)) == 0);
        }
        // A scale of 1e-7 is no half; the nearest is twice 2^-24, 1.19e-7.
        patch("embed_tokens.weight_scale", "\xd6\x33");
        const ModelFile fine(patched);
        const Written off(fine);
        const size_t scales = count_of(off.at(embedding).shape) / 32;
        CHECK(off.notes().find(format("%zu of ", scales)) == 0);
        CHECK(off.notes().find("scales of INT8 are not halves: rounded, by 20% at most\n") != std::string::npos);
        CHECK(different(readable_tensors(fine).at(q), off.at(q)) == 0);
        patch("embed_tokens.weight_scale", "\xc3\x47"); // 99,840
        const ModelFile coarse(patched);
        CHECK_THROWS_WITH_AS(Written{coarse}, doctest::Contains("is too large for F16"), Error);
    }
    must({TINY, "--quantize", "int4", small, "--group", "32"});
    for (const bool centred : {false, true}) {
        if (centred) patch(".qzeros", "\x88");
        const ModelFile from(centred ? patched : small);
        const Written to(from);
        const Tensor &a = from.tensors.at(q), &b = to.at(q);
        CHECK(b.dtype == (centred ? Dtype::Q4_0 : Dtype::Q4_1));
        CHECK(to.at(embedding).dtype == Dtype::Q8_0);
        if (centred) {
            CHECK(to.notes() == "");
            CHECK(different(a, b) == 0);
            continue;
        }
        CHECK(to.notes().find("offsets of Q4_1 are not halves: rounded, by 0.00") != std::string::npos);
        const Packed& p = *a.packed;
        double worst = 0; // in steps
        for (size_t i = 0; i < count_of(a.shape); i++)
            worst = std::max(worst, std::fabs((number(b, i) - (double)number(a, i)) / plain_number(p.scales, i % p.in / 32 * p.rows + i / p.in)));
        CHECK(worst > 0);
        CHECK(worst < 15. / 2048); // half a unit in the last place of an offset of 15 steps
    }
    ModelFile awq(QUANTIZED + "awq"); // groups of 64: two blocks each
    awq.config.end_tokens = {1};
    const Written to(awq);
    for (auto& [name, t] : awq.tensors)
        if (t.packed) {
            CHECK(to.at(name).dtype == Dtype::Q4_1);
            double worst = 0;
            for (size_t i = 0; i < count_of(t.shape); i++)
                worst = std::max(worst, std::fabs((number(to.at(name), i) - (double)number(t, i)) / plain_number(t.packed->scales, i % t.packed->in / 64 * t.packed->rows + i / t.packed->in)));
            CHECK(worst < 15. / 2048);
        }
}

TEST_CASE("GGUF out: what GGUF has no type for becomes BF16, and that is said; GGUF's own blocks keep their bytes") {
    for (const std::string folder : {"fp8", "gptq4", "gptq8"}) { // (gptq4 has its columns in another order)
        INFO(folder);
        ModelFile from(QUANTIZED + folder);
        from.config.end_tokens = {1}; // (the vocabulary here has none of the tokenizer's)
        const Written to(from);
        size_t packed = 0;
        for (auto& [name, t] : from.tensors)
            if (t.packed) {
                CHECK(to.at(name).dtype == Dtype::BF16);
                CHECK(different(t, to.at(name), true) == 0);
                packed++;
            }
        CHECK(packed > 0);
        CHECK(to.notes() == format("%zu quantised matrices are BF16: GGUF has no type for their numbers\n", packed));
    }
    std::set<Dtype> seen;
    ModelFile from(QUANTIZED + "mixed/model.gguf");
    from.config.end_tokens = {1};
    const Written to(from);
    CHECK(to.notes() == "");
    for (auto& [name, t] : from.tensors) {
        if (t.shape.size() < 2) continue;
        const Tensor& same = to.at(name);
        CHECK(same.dtype == t.dtype);
        REQUIRE(same.bytes == t.bytes);
        CHECK(!memcmp(same.data, t.data, t.bytes));
        seen.insert(t.dtype);
    }
    CHECK(seen.size() > 5);
}

TEST_CASE("GGUF out: the experts of a layer are one tensor of one type; what qwen3moe cannot be is refused") {
    ModelFile from("tests/fixtures/moe/odd_f32");
    from.config.end_tokens = {1};
    const Written to(from);
    CHECK(to.notes() == "");
    CHECK(to.made.types == "27 x F32");
    for (auto& [name, t] : from.tensors) CHECK(different(t, to.at(name)) == 0);
    const Config &c = from.config, &d = to.file->config;
    CHECK((d.E == 7 && d.k == 3 && d.M == 24 && d.normed_shares && d.F == c.F && d.max_positions == c.max_positions));
    const Scratch s;
    write_file(s / "c.json", R"({"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": true, "vocab_size": 1024,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"})");
    must({"--synthesize", s / "c.json", s / "m.bin"});
    const std::string expert = "model.layers.0.mlp.experts.1.gate_proj.weight", router = "model.layers.0.mlp.gate.weight";
    for (const std::string how : {"int8", "int4"}) {
        INFO(how);
        must(Strings{s / "m.bin", "--quantize", how, s / "q.bin"} + (how == "int4" ? Strings{"--group", "32"} : Strings{}));
        if (how == "int4") { // an expert's zero points are all 8, those of the others not
            std::string all = read_file(s / "q.bin");
            const MappedFile map(s / "q.bin");
            Tensors tensors;
            Metadata metadata;
            read_safetensors(map, tensors, metadata);
            const Tensor& zeros = tensors.at("model.layers.0.mlp.experts.1.gate_proj.qzeros");
            memset(&all[(size_t)(zeros.data - map.data)], 0x88, zeros.bytes);
            write_file(s / "q.bin", all);
        }
        ModelFile small(s / "q.bin");
        small.config.end_tokens = {1};
        const Written made(small);
        const Tensors numbers = readable_tensors(small);
        CHECK(made.at(expert).dtype == (how == "int8" ? Dtype::Q8_0 : Dtype::Q4_1));
        CHECK(different(numbers.at(expert), made.at(expert)) == 0); // (eight steps are a half)
        CHECK(made.at(router).dtype == Dtype::F32);
        CHECK(different(numbers.at(router), made.at(router)) == 0);
        CHECK(made.file->tensors.size() == 11 + 3 * 3);
    }
    for (auto [folder, word] : {std::pair("top1_f32", "norm_topk_prob is false"), {"dense_between_f32", "layer 1 has no experts"}})
        CHECK_THROWS_WITH_AS(Written{ModelFile(std::string("tests/fixtures/moe/") + folder)}, doctest::Contains(word), Error);
    must({s / "m.bin", "--convert", s / "m.gguf", "-z", VOCABULARY});
    const Strings ask = {"-z", VOCABULARY, "--ids", "5 6 7", "--logits-hash"};
    CHECK(must(Strings{s / "m.gguf"} + ask).out == must(Strings{s / "m.bin"} + ask).out);
}

TEST_CASE("GGUF out: the tokenizer is the same, the template is the model's or Qwen3's") {
    const Scratch s;
    must({TINY, "--convert", s / "tiny.gguf", "-z", VOCABULARY});
    const ModelFile file(s / "tiny.gguf");
    CHECK(file.difference(Tokenizer(VOCABULARY)) == "");
    CHECK(file.difference(Tokenizer("tests/fixtures/odd/tokenizer.bin")) != "");
    CHECK(file.chat_template == QWEN3_JINJA);
    const ChatStyle style = ChatStyle::of(file.chat_template);
    CHECK(style.strange == "");
    CHECK(style.system == "");
    CHECK((style.thinks && style.can_be_off && !style.opens));
    // A token's kind: markup is control even where the tokenizer calls it no special one.
    const GgufFile g(file.maps[0]);
    const Tokenizer t(VOCABULARY);
    const GgufVocabulary v(g);
    REQUIRE(v.types.count == (uint64_t)file.config.V);
    const auto kind = [&](int id) { return load_as<int32_t>(v.types.data + 4 * (size_t)id); };
    CHECK(kind(0) == 1);
    CHECK(kind(t.id("<|im_end|>")) == 3);
    CHECK(kind(t.id("<|fim_prefix|>")) == 3);
    CHECK(kind(t.id("<think>")) == 4);
    CHECK(kind(file.config.V - 1) == 5);
    CHECK(g.integer("tokenizer.ggml.eos_token_id") == (uint64_t)ModelFile(TINY).config.end_tokens.at(0));
    CHECK(!v.adds_token);
    // The same answers; and from the file the same file, but for generation_config's sampling, which is not read.
    const Strings ask = {"-z", VOCABULARY, "--ids", "5 6 7", "--logits-hash"};
    CHECK(must(Strings{s / "tiny.gguf"} + ask).out == must(Strings{TINY} + ask).out);
    CHECK(g.real("general.sampling.temp") > 0);
    for (const char* folder : {"again", "third"}) fs::create_directory(s / folder);
    must({s / "tiny.gguf", "--convert", s / "again/tiny.gguf", "-z", VOCABULARY});
    must({s / "again/tiny.gguf", "--convert", s / "third/tiny.gguf", "-z", VOCABULARY});
    CHECK(must(Strings{s / "again/tiny.gguf"} + ask).out == must(Strings{TINY} + ask).out);
    CHECK(read_file(s / "third/tiny.gguf") == read_file(s / "again/tiny.gguf"));
    ModelFile none(TINY);
    none.config.end_tokens = {none.config.V};
    CHECK_THROWS_WITH_AS(Written{none}, doctest::Contains("it has no end token"), Error);
    // A template of the model's own.
    const std::string own = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}";
    ModelFile other(TINY);
    other.chat_template = own;
    CHECK(Written(other).file->chat_template == own);
    other.config.end_tokens = {7, 8, 9};
    CHECK_THROWS_WITH_AS(Written{other}, doctest::Contains("more end tokens than GGUF has places for"), Error);
    other.config.end_tokens = {7, 8};
    const std::vector<int> ends = Written(other).file->config.end_tokens;
    for (int id : {7, 8}) CHECK(std::count(ends.begin(), ends.end(), id) == 1);
    other.starters = {"day?"};
    CHECK(Written(other).notes() == "the questions that a chat begins with are left out\n");
}

TEST_CASE("GGUF out: an adapter has llama.cpp's names, PEFT's numbers, and an alpha that gives its scale") {
    const Scratch s;
    const ModelFile model(TINY);
    AdapterConfig c;
    c.rank = 4, c.alpha = 6;
    c.targets[Q_PROJ] = c.targets[DOWN_PROJ] = true;
    for (const bool rslora : {false, true}) {
        c.rslora = rslora;
        const std::string folder = s / (rslora ? "rs" : "plain"), path = folder + ".gguf";
        make_folder(folder);
        write_text(folder + "/adapter_config.json", adapter_config_json(c, 0, TINY));
        std::vector<OutTensor> tensors;
        float next = 0;
        for (const ModelTensor& m : targeted(model.config, c))
            for (const char matrix : {'A', 'B'})
                tensors.push_back({adapter_tensor(m.layer, m.kind, matrix), matrix == 'A' ? "F32" : "BF16",
                                   matrix == 'A' ? Shape{c.rank, m.columns} : Shape{m.rows, c.rank}, [&next, m, matrix, n = c.rank](OutputFile& out) {
                                       for (int i = 0; i < n * (matrix == 'A' ? m.columns : m.rows); i++) {
                                           const float x = (next += 0.001f);
                                           const bf16 h = to_bf16(x);
                                           matrix == 'A' ? out.write(&x, 4) : out.write(&h, 2);
                                       }
                                   }});
        write_safetensors(folder + "/adapter_model.safetensors", {}, tensors);
        const Result r = must({TINY, "--adapter", folder, "--convert-adapter", path});
        CHECK(r.out == "");
        const MappedFile map(path);
        const GgufFile g(map);
        CHECK(g["general.architecture"].string() == "qwen3");
        CHECK(g["general.type"].string() == "adapter");
        CHECK(g["adapter.type"].string() == "lora");
        CHECK(g.real("adapter.lora.alpha") / 4 == doctest::Approx(rslora ? 3 : 1.5)); // llama.cpp's scale
        const AdapterFile from(folder, model.config);
        REQUIRE(g.tensors.size() == tensors.size());
        for (const GgufTensor& t : g.tensors) {
            INFO(t.name);
            const size_t end = t.name.rfind(".lora_");
            REQUIRE(end != std::string::npos);
            std::string name = hugging_face_name(t.name.substr(0, end));
            name = "base_model.model." + name.substr(0, name.rfind(".weight")) + (t.name.back() == 'a' ? ".lora_A" : ".lora_B") + ".weight";
            const Tensor& want = from.tensors.at(name);
            CHECK(t.tensor.shape == want.shape);
            CHECK(t.tensor.dtype == want.dtype);
            REQUIRE(t.tensor.bytes == want.bytes);
            CHECK(!memcmp(t.tensor.data, want.data, want.bytes));
        }
        // An adapter's folder names its base itself.
        must({folder, "--convert-adapter", s / "again.gguf"});
        CHECK(fs::file_size(s / "again.gguf") == fs::file_size(path));
    }
    const std::string folder = s / "plain";
    check_refusal(run_qwen3({TINY, "--convert-adapter", s / "x.gguf"}), "qwen3", "--adapter DIR names the adapter");
    check_refusal(run_qwen3({TINY, "--adapter", folder, "--convert-adapter", s / "x.bin"}), "qwen3", "a path that ends in .gguf");
    check_refusal(run_qwen3({TINY, "--adapter", folder, "--convert-adapter", s / "x.gguf", "-i", "day"}), "qwen3", "goes with a model and --adapter alone");
    check_refusal(run_qwen3({TINY, "--adapter", folder, "--convert", s / "x.gguf"}), "qwen3", "goes with a model alone");
    check_refusal(run_qwen3({TINY, "--convert", s / "x.gguf", "-z", "tokenizer.bin"}), "qwen3", "not its tokenizer");
    check_refusal(run_qwen3({s / "plain.gguf", "--convert", s / "x.bin"}), "qwen3", "belongs to no Qwen3 model");
    CHECK(!fs::exists(s / "x.gguf"));
}
