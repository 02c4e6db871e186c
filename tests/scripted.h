// A model that says given ids exactly, made by hand, without training: for tests of thoughts, stop strings and calls.
//
// The state is the last K + 1 tokens: K heads of attention each copy the token k places back (RoPE peaks at one
// distance), and each step of the script is a unit of the MLP that knows its context and names the next token.
#pragma once
#include "model/tokenizer.h"
#include "model/write.h"
#include "sj.h"
#include "tests/files.h"
#include <cmath>
#include <map>
#include <set>

struct Script {
    std::vector<int> after, says; // the prompt's last ids; the answer
};

// Writes the folder: config.json, generation_config.json, model.safetensors in F32.
inline void write_scripted(const std::string& path, const Tokenizer& t, const std::vector<Script>& scripts, int K = 5) {
    const int end = t.id("<|im_end|>"), V = t.size(), D = 256;
    std::map<std::vector<int>, int> steps; // by the tokens before, at most K + 1
    for (const Script& s : scripts) {
        std::vector<int> ids = s.after;
        ids.insert(ids.end(), s.says.begin(), s.says.end()), ids.push_back(end);
        for (size_t i = s.after.size(); i < ids.size(); i++) {
            const size_t from = i - std::min(i, (size_t)K + 1);
            const int next = steps.emplace(std::vector<int>(ids.begin() + (ptrdiff_t)from, ids.begin() + (ptrdiff_t)i), ids[i]).first->second;
            REQUIRE(next == ids[i]); // else a larger K
        }
    }
    std::map<int, int> index;
    for (auto& [context, next] : steps) {
        for (int id : context) index.emplace(id, 0);
        index.emplace(next, 0);
    }
    int N = 0;
    for (auto& [id, i] : index) i = N++;
    REQUIRE(N <= D);
    const int C = (1 + N * (K + 2) + 7) / 8 * 8, F = ((int)steps.size() + 7) / 8 * 8;
    // Channel 0 is one; then blocks of N: this token, those 1 .. K places back, the next one.
    auto at = [&](int block, int id) { return 1 + block * N + index.at(id); };
    std::map<std::string, std::pair<Shape, std::vector<float>>> all;
    auto tensor = [&](const std::string& name, int rows, int columns, float value = 0) -> std::vector<float>& {
        auto& [shape, numbers] = all[name + ".weight"];
        shape = columns ? Shape{rows, columns} : Shape{rows};
        return numbers.assign((size_t)rows * (columns ? columns : 1), value), numbers;
    };
    const std::string L = "model.layers.0.";
    auto& embed = tensor("model.embed_tokens", V, C);
    for (int v = 0; v < V; v++) embed[(size_t)v * C] = 1;
    auto& value = tensor(L + "self_attn.v_proj", D, C);
    auto& out = tensor(L + "self_attn.o_proj", C, K * D);
    const double r = std::sqrt(C / 2.), r2 = std::sqrt(C / (2. + K)), theta = 3, S = 60;
    for (auto& [id, i] : index) {
        embed[(size_t)id * C + at(0, id)] = 1;
        value[(size_t)i * C + at(0, id)] = (float)(1 / r);
        for (int h = 0; h < K; h++) out[(size_t)at(h + 1, id) * K * D + h * D + i] = 1;
    }
    auto& q = tensor(L + "self_attn.q_proj", K * D, C);
    auto& k = tensor(L + "self_attn.k_proj", D, C);
    for (int i = 0; i < D / 2; i++) {
        k[(size_t)i * C] = 1;
        for (int h = 0; h < K; h++) {
            const double phase = std::pow(theta, -2. * i / D) * (h + 1);
            q[((size_t)h * D + i) * C] = (float)std::cos(phase), q[((size_t)h * D + D / 2 + i) * C] = (float)-std::sin(phase);
        }
    }
    auto& gate = tensor(L + "mlp.gate_proj", F, C);
    auto& up = tensor(L + "mlp.up_proj", F, C);
    auto& down = tensor(L + "mlp.down_proj", C, F);
    auto& head = tensor("lm_head", V, C);
    size_t unit = 0;
    for (auto& [context, next] : steps) {
        for (size_t back = 0; back < context.size(); back++)
            gate[unit * C + at((int)back, context[context.size() - 1 - back])] += (float)(S / r2);
        gate[unit * C] = (float)(-S * ((double)context.size() - .5) / r2), up[unit * C] = (float)(1 / r2);
        down[(size_t)at(K + 1, next) * F + unit++] = (float)(2 / S);
        head[(size_t)next * C + at(K + 1, next)] = 2;
    }
    for (const char* norm : {"model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"}) tensor(norm, C, 0, 1);
    for (const char* norm : {"self_attn.q_norm", "self_attn.k_norm"}) tensor(L + norm, D, 0, 20);
    fs::create_directories(path);
    std::vector<OutTensor> tensors;
    for (auto& [name, t] : all)
        tensors.push_back({name, "F32", t.first, [&n = t.second](OutputFile& o) { o.write(n.data(), n.size() * sizeof(float)); }});
    write_safetensors(path + "/model.safetensors", {{"format", "pt"}}, tensors);
    write_file(path + "/config.json", format(R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": %d, "num_hidden_layers": 1,
        "num_attention_heads": %d, "num_key_value_heads": 1, "head_dim": %d, "intermediate_size": %d, "vocab_size": %d, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "rope_theta": %g, "tie_word_embeddings": false, "hidden_act": "silu", "torch_dtype": "float32"})", C, K, D, F, V, theta));
    write_file(path + "/generation_config.json", format(R"({"eos_token_id": [%d]})", end));
}
