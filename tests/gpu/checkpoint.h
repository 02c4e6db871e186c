// A random checkpoint of a shape that the one kernel of step.h takes (heads of 128), on the CPU and on the GPU. For
// suites that have a Random.
#pragma once
#include <filesystem>

namespace {
struct RandomCheckpoint { // of a shape, on both sides
    std::string path = (std::filesystem::temp_directory_path() / ("step" + std::to_string(getpid()))).string();
    std::unique_ptr<ModelFile> file;
    std::unique_ptr<Weights<bf16>> weights;
    RandomCheckpoint(Context& gpu, int C, int F, int H, int K, int V, int L, bool tied) {
        const std::string config = format(
            R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "eos_token_id": 0, )"
            R"("head_dim": 128, "hidden_act": "silu", "hidden_size": %d, "intermediate_size": %d, )"
            R"("max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": %d, )"
            R"("num_hidden_layers": %d, "num_key_value_heads": %d, "rms_norm_eps": 1e-06, )"
            R"("rope_theta": 1000000, "tie_word_embeddings": %s, "torch_dtype": "bfloat16", )"
            R"("vocab_size": %d})",
            C, F, H, L, K, tied ? "true" : "false", V);
        Random random{3};
        std::vector<OutTensor> tensors;
        for (const ModelTensor& t : model_tensors(parse_config("a test", config, "")))
            tensors.push_back({t.name(), "BF16", t.shape(), [&random, t](OutputFile& out) {
                const double scale = t.columns ? 0.035 : 0.3, mean = t.columns ? 0 : 1; // of a matrix, of a norm
                std::vector<bf16> x(t.size());
                for (bf16& v : x) v = to_stored<bf16>((float)(mean + scale * (2 * random.uniform() - 1)));
                out.write(x.data(), x.size() * sizeof(bf16));
            }});
        write_safetensors(path + ".bin", model_metadata(config, ""), tensors);
        file = std::make_unique<ModelFile>(path + ".bin");
        weights = std::make_unique<Weights<bf16>>(*file);
        weights->upload(gpu, *file);
    }
    ~RandomCheckpoint() {
        file.reset();
        std::filesystem::remove(path + ".bin");
    }
};
} // namespace
