// cli/make.cpp: writes model files: random ones of a real shape, and conversions.
#include "cli/make.h"
#include "base/file.h"
#include "base/options.h"
#include "base/progress.h"
#include "base/text.h"
#include "model/gguf_write.h"
#include "model/model_file.h"
#include "model/write.h"
#include "qwen3.cu"
#include "sj.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace cli {

static std::string of_experts(int E, int k, int M) { // members of config.json
    return format(R"("decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": %d, )"
                  R"("norm_topk_prob": true, "num_experts": %d, "num_experts_per_tok": %d, )", M, E, k);
}

// config.json and generation_config.json of a shape: one of Qwen's, or a file, which has no second one.
static std::pair<std::string, std::string> texts_of(const std::string& shape) {
    // https://huggingface.co/Qwen: hidden, layers, query heads, key/value heads, ffn, tied; experts, of a token, ffn of
    // one. (The last is ours: a thirtieth of 30B-A3B.)
    static const struct { const char* name; int C, L, H, K, F; bool tied; int E, k, M; } sizes[] = {
        {"0.6B", 1024, 28, 16, 8, 3072, true, 0, 0, 0},   {"1.7B", 2048, 28, 16, 8, 6144, true, 0, 0, 0},
        {"4B", 2560, 36, 32, 8, 9728, true, 0, 0, 0},     {"8B", 4096, 36, 32, 8, 12288, false, 0, 0, 0},
        {"14B", 5120, 40, 40, 8, 17408, false, 0, 0, 0},  {"32B", 5120, 64, 64, 8, 25600, false, 0, 0, 0},
        {"30B-A3B", 2048, 48, 32, 4, 6144, false, 128, 8, 768}, {"1B-A0.3B", 1024, 12, 16, 4, 3072, true, 64, 4, 384}};
    std::string config_text, generation_text =
        R"({"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643], )"
        R"("temperature": 0.6, "top_k": 20, "top_p": 0.95})";
    for (auto& s : sizes)
        if (shape == s.name)
            config_text = format(R"({"architectures": ["Qwen3%sForCausalLM"], "attention_bias": false, )"
                                 R"("bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, )"
                                 R"("hidden_act": "silu", "hidden_size": %d, "intermediate_size": %d, )"
                                 R"("max_position_embeddings": 40960, "model_type": "%s", %s)"
                                 R"("num_attention_heads": %d, "num_hidden_layers": %d, "num_key_value_heads": %d, )"
                                 R"("rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": %s, )"
                                 R"("torch_dtype": "bfloat16", "vocab_size": 151936})",
                                 s.E ? "Moe" : "", s.C, s.F, s.E ? "qwen3_moe" : "qwen3",
                                 s.E ? of_experts(s.E, s.k, s.M).c_str() : "", s.H, s.L, s.K,
                                 s.tied ? "true" : "false");
    if (!config_text.empty()) return {config_text, generation_text};
    if (shape.size() < 6 || shape.compare(shape.size() - 5, 5, ".json") != 0)
        DIE("--synthesize %s: 0.6B, 1.7B, 4B, 8B, 14B, 32B, 30B-A3B, 1B-A0.3B or a config.json", shape.c_str());
    return {std::string(MappedFile(shape).text()), ""};
}

void synthesize(const std::string& shape, const std::string& path, uint64_t seed, bool overwrite) {
    must_be_new("--synthesize", path, overwrite);
    const auto texts = texts_of(shape);
    const std::string &config_text = texts.first, &generation_text = texts.second;
    const Config c = parse_config(shape, config_text, generation_text);
    sj::Doc doc;
    sj::parse(doc, config_text);
    const bool wide = doc.root()["dtype"].str(doc.root()["torch_dtype"].str()) == "float32";

    // A draw is the sum of four 16-bit uniforms, which is close to normal and the same on every machine.
    const size_t BLOCK = 1 << 20, width = wide ? 4 : 2;
    std::vector<uint8_t> bytes(BLOCK * width);
    const size_t all = parameters(c) * width;
    size_t written = 0;
    auto progress = std::make_unique<Progress>();
    uint64_t counter = 0;
    auto draw = [&](OutputFile& out, size_t n, float mean, float deviation) {
        for (size_t first = 0; first < n; first += BLOCK) {
            const size_t count = std::min(BLOCK, n - first);
            #pragma omp parallel for schedule(static)
            for (size_t i = 0; i < (count + 1) / 2; i++) { // one Philox call, two draws
                Philox r = philox(seed, counter + i, STREAM_SYNTHESIZE);
                for (size_t k = 0; k < 2 && 2 * i + k < count; k++) {
                    uint32_t a = r.v[2 * k], b = r.v[2 * k + 1];
                    float sum = (float)((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16)); // mean 131070
                    float normal = (sum - 131070.f) * (1.f / 37837.2f);                       // 65536 * sqrt(4 / 12)
                    float x = mean + deviation * normal;
                    bf16 h = to_bf16(x);
                    if (wide) memcpy(&bytes[(2 * i + k) * 4], &x, 4);
                    else memcpy(&bytes[(2 * i + k) * 2], &h, 2);
                }
            }
            counter += (count + 1) / 2;
            out.write(bytes.data(), count * width);
            written += count * width;
            progress->show(written, all, [&](double) {
                return format("%s: %.0f of %.0f MB", path.c_str(), (double)written / 1e6, (double)all / 1e6);
            });
            if (interrupted) DIE("interrupted");
        }
    };
    std::vector<OutTensor> tensors;
    for (const ModelTensor& t : model_tensors(c))
        tensors.push_back({t.name(), wide ? "F32" : "BF16", t.shape(), [&draw, t](OutputFile& out) {
            draw(out, t.size(), t.columns ? 0.f : 1.f, t.columns ? 0.02f : 0.1f);
        }});
    const size_t size = write_safetensors(path, model_metadata(config_text, generation_text), tensors);
    progress.reset(); // its line ends
    fprintf(stderr, "%s: %.1f M parameters, %.0f MB, seed %llu\n", path.c_str(), (double)parameters(c) / 1e6,
            (double)size / 1e6, (unsigned long long)seed);
}

// The end of the line about a file, and its losses.
static void report(const std::string& path, const GgufWritten& written) {
    fprintf(stderr, written.types.empty() ? "\n" : "; %s\n", written.types.c_str());
    for (auto& note : written.notes) fprintf(stderr, "%s: %s\n", path.c_str(), note.c_str());
}

void convert(const Options& o, bool asks_more) {
    if (asks_more || !o.adapter.empty() || !o.dtype.empty())
        DIE("--convert goes with a model alone: no question, --dtype or --adapter (train_lora --merge merges)");
    const ModelFile file = open_model(o);
    for (const MappedFile& map : file.maps)
        if (same_file(map.path, o.convert)) DIE("--convert %s: is the model itself", o.convert.c_str());
    must_be_new("--convert", o.convert, o.overwrite);
    GgufWritten written;
    if (ends_in(o.convert, ".gguf")) written = write_gguf(file, tokenizer_of(tokenizer_path(o), file), o.convert);
    else written.bytes = write_model(file, o.convert);
    fprintf(stderr, "%s: %.1f M parameters, %.0f MB", o.convert.c_str(), (double)parameters(file.config) / 1e6,
            (double)written.bytes / 1e6);
    report(o.convert, written);
}

void convert_adapter(const Options& o, bool asks_more) {
    if (asks_more || !o.dtype.empty() || !o.convert.empty())
        DIE("--convert-adapter goes with a model and --adapter alone: no question, --convert or --dtype");
    if (o.adapter.empty()) DIE("--convert-adapter: --adapter DIR names the adapter");
    if (!ends_in(o.convert_adapter, ".gguf"))
        DIE("--convert-adapter %s: expected a path that ends in .gguf", o.convert_adapter.c_str());
    const ModelFile file(o.model);
    const AdapterFile adapter(o.adapter, file.config);
    must_be_new("--convert-adapter", o.convert_adapter, o.overwrite);
    const GgufWritten written = write_gguf_adapter(adapter, file.config, o.convert_adapter);
    fprintf(stderr, "%s: %.2f M parameters, %.1f MB", o.convert_adapter.c_str(),
            (double)adapter_parameters(file.config, adapter.config) / 1e6, (double)written.bytes / 1e6);
    report(o.convert_adapter, written);
}

} // namespace cli
