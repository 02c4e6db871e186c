// Adapters of random numbers for the random model in fixtures/tiny.
#pragma once
#include "base/file.h"
#include "model/adapters.h"
#include "model/write.h"
#include "tests/engine.h"
#include "tests/files.h"
#include <cmath>
#include <string>
#include <vector>

struct Kind {
    int rank;
    double alpha;
    std::vector<std::string> modules;
    bool rslora;
};
static const Kind KINDS[] = {
    {1, 3, {"q_proj", "up_proj"}, false},
    {4, 8, {"q_proj", "v_proj", "o_proj", "down_proj"}, true},
    {19, 19, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, false}};

// Writes an adapter of random numbers.
static void make_adapter(const std::string& folder, const Kind& kind, uint64_t seed, const Config& c = tiny().file.config) {
    AdapterConfig a;
    a.rank = kind.rank, a.alpha = kind.alpha, a.rslora = kind.rslora;
    for (auto& name : kind.modules) a.targets[module_of(name)] = true;
    Random random{seed};
    std::vector<OutTensor> all;
    for (const ModelTensor& t : targeted(c, a))
        for (char matrix : {'A', 'B'}) {
            const Shape shape = matrix == 'A' ? Shape{a.rank, t.columns} : Shape{t.rows, a.rank};
            const double size = matrix == 'A' ? 2 / std::sqrt(t.columns) : 0.2;
            std::vector<float> numbers((size_t)(shape[0] * shape[1]));
            for (float& x : numbers) x = (float)((random.uniform() * 2 - 1) * size);
            all.push_back({adapter_tensor(t.layer, t.kind, matrix), "F32", shape,
                           [numbers](OutputFile& out) { out.write(numbers.data(), numbers.size() * sizeof(float)); }});
        }
    make_folder(folder);
    write_text(folder + "/adapter_config.json", adapter_config_json(a, 0, "tiny"));
    write_safetensors(folder + "/adapter_model.safetensors", {}, all);
}
