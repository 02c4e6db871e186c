#include "model/tensors.h"

std::string ModelTensor::name() const { // Hugging Face's
    if (layer < 0) return format("%s.weight", TENSOR_NAMES[kind]);
    if (expert >= 0) // mlp.gate_proj of each
        return format("model.layers.%d.mlp.experts.%d.%s.weight", layer, expert, strchr(TENSOR_NAMES[kind], '.') + 1);
    return format("model.layers.%d.%s.weight", layer, TENSOR_NAMES[kind]);
}

std::vector<ModelTensor> model_tensors(const Config& c) {
    std::vector<ModelTensor> all = {{EMBED, -1, c.V, c.C}};
    for (int l = 0; l < c.L; l++) {
        const ModelTensor layer[] = {
            {INPUT_NORM, l, c.C, 0},
            {Q_PROJ, l, c.H * c.D, c.C},
            {K_PROJ, l, c.K * c.D, c.C},
            {V_PROJ, l, c.K * c.D, c.C},
            {Q_NORM, l, c.D, 0},
            {K_NORM, l, c.D, 0},
            {O_PROJ, l, c.C, c.H * c.D},
            {POST_NORM, l, c.C, 0},
        };
        all.insert(all.end(), std::begin(layer), std::end(layer));
        auto add_mlp = [&](int F, int expert) {
            all.insert(all.end(), {{GATE_PROJ, l, F, c.C, expert}, {UP_PROJ, l, F, c.C, expert},
                                   {DOWN_PROJ, l, c.C, F, expert}});
        };
        if (!c.sparse(l)) add_mlp(c.F, -1);
        else all.push_back({ROUTER, l, c.E, c.C});
        for (int e = 0; c.sparse(l) && e < c.E; e++) add_mlp(c.M, e);
    }
    all.push_back({FINAL_NORM, -1, c.C, 0});
    if (!c.tied) all.push_back({HEAD, -1, c.V, c.C});
    return all;
}

size_t parameters(const Config& c) {
    size_t n = 0;
    for (const ModelTensor& t : model_tensors(c)) n += t.size();
    return n;
}
