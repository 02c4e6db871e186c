// Fuzzes the readers of quantised models. A first byte of 'G' begins a GGUF file. Any other first byte chooses the tensors of
// a model.bin, and the rest is its quantization_config. The model is opened, compared with a tokenizer and, if it loads, run
// for three tokens and written. An Error is a fine answer; a crash, a leak or a read outside the file is not.
// Seeds: tests/fixtures/fuzz/gguf/, by tests/fuzz/make_gguf_seeds.py.
#include "model/write.h"
#include "tests/fuzz/model.h"

// A model.bin of one layer: the metadata's config is what is fuzzed, its tensors are packed words and scales.
static std::string packed_model(const std::string& quantization, uint8_t shapes) {
    const std::string config = R"({"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 32, "vocab_size": 8, "max_position_embeddings": 8,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": true, "quantization_config": )" + quantization + "}";
    sj::Writer w;
    w.object().key("__metadata__").object().field("config", config).end();
    size_t at = 0;
    auto add = [&](const std::string& name, const char* dtype, Shape shape) {
        const size_t n = dtype_named(dtype)->size * count_of(shape);
        w.key(name).object().field("dtype", dtype).key("shape").array();
        for (int64_t d : shape) w.value(d);
        w.end().key("data_offsets").array().value(at).value(at + n).end().end();
        at += n;
    };
    Config c = {};
    c.C = c.D = c.F = 32, c.L = c.H = c.K = 1, c.V = 8, c.tied = true;
    const int64_t groups = 1 + (shapes >> 2 & 1);
    for (const ModelTensor& t : model_tensors(c)) {
        const std::string base = t.name().substr(0, t.name().size() - 6);
        if (t.kind >= MODULES) add(t.name(), "F16", t.shape());
        else if (shapes % 4 == 0) add(base + "weight", "F8_E4M3", {32, 32}), add(base + "weight_scale_inv", "F16", {groups, 1});
        else {
            const int64_t words = shapes % 4 == 3 ? 8 : 4; // 8 bits or 4
            if (shapes % 4 == 1) add(base + "qweight", "I32", {32, words});
            else add(base + "qweight", "I32", {words, 32}), add(base + "g_idx", "I32", {32});
            add(base + "qzeros", "I32", {groups, words}), add(base + "scales", "F16", {groups, 32});
        }
    }
    const std::string header = w.end().text;
    const uint64_t length = header.size();
    return std::string((const char*)&length, 8) + header + std::string(at, (char)(shapes >> 4));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Tokenizer tokenizer("tests/fixtures/tiny/tokenizer.bin");
    if (size == 0) return 0;
    std::string model;
    if (data[0] != 'G') {
        model = packed_model(std::string((const char*)data + 1, size - 1), data[0]);
        data = (const uint8_t*)model.data(), size = model.size();
    }
    const std::string& path = path_of(data, size);
    try {
        const ModelFile file(path);
        file.difference(tokenizer);
        file.hash();
        use<bf16>(file);
        use<bf16>(file, true);
        write_model(file, "/dev/null");
    } catch (const Error& e) {
        if (std::string_view(e.what()).substr(0, path.size()) != path) abort(); // each names the file
    }
    return 0;
}
