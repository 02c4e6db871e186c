// Gradients of a whole model: the random one in fixtures/tiny, all of it or an adapter, by the mean loss of the rows in
// fixtures/train/bf16.json, through train_lora's own Trainer; and how far PyTorch's in bf16 are from the truth (made by
// tests/reference/make_train_fixtures.py).
#pragma once
#include "tests/process.h"
#include "tests/trainer.h"
#include <cmath>
#include <map>
#include <string>
#include <vector>

using Tensor64 = std::map<std::string, std::vector<double>>; // by Hugging Face's and PEFT's names
inline const Json& bf16_fixture() {
    static const Json once(read_file("tests/fixtures/train/bf16.json"));
    return once;
}

inline void write_fixture_rows(const std::string& path) {
    const Json& fixture = bf16_fixture();
    DatasetWriter writer(path, 0, 0);
    for (size_t row = 0; row < fixture["ids"].size(); row++) {
        std::vector<uint32_t> words;
        for (size_t i = 0; i < fixture["ids"][row].size(); i++)
            words.push_back((uint32_t)fixture["ids"][row][i].number() | (fixture["trained"][row][i].number() ? TRAIN : 0));
        writer.add(words);
    }
    writer.commit();
}

template <class T>
Tensor64 whole_gradients(const Context& ctx, bool full, const std::string& model = "tests/fixtures/tiny/model.bin") {
    const ModelFile file(model);
    Scratch scratch;
    write_fixture_rows(scratch / "rows.bin");
    const Dataset data(scratch / "rows.bin");
    TrainOptions o;
    o.dropout = 0;
    o.packed = true; // (of a GPU; a CPU keeps what is quantised)
    o.full = full;
    o.rank_step = ctx.gpu ? GPU_RANK_STEP : 1;
    o.adapter_init = "tests/fixtures/train/adapter_bf16";
    o.lora = AdapterFile(o.adapter_init, file.config).config;
    Trainer<T> t(o, ctx, file, data, nullptr);
    t.add_gradients(t.loader.rows, data.trained());
    const auto g = t.params.host(t.params.gradient);
    Tensor64 out;
    if (full) t.params.each_tensor([&](const ModelTensor& tensor, size_t at) {
        out[tensor.name()].assign(g.begin() + at, g.begin() + at + tensor.size());
    });
    else each_adapter_tensor(t.w, [&](const std::string& name, size_t r, size_t n, size_t at, size_t apart) {
        for (size_t i = 0; i < r; i++) out[name].insert(out[name].end(), g.begin() + at + i * apart, g.begin() + at + i * apart + n);
    });
    return out;
}

// |a - b| / |truth| of every tensor, and of all together.
inline std::map<std::string, double> distances(const Tensor64& a, const Tensor64& b, const Tensor64& truth) {
    std::map<std::string, double> out;
    double all_off = 0, all_size = 0;
    for (auto& [name, t] : truth) {
        double off = 0, size = 0;
        REQUIRE(a.at(name).size() == t.size());
        for (size_t i = 0; i < t.size(); i++) off += std::pow(a.at(name)[i] - b.at(name)[i], 2), size += t[i] * t[i];
        out[name] = std::sqrt(off / size), all_off += off, all_size += size;
    }
    out["all"] = std::sqrt(all_off / all_size);
    return out;
}
inline void no_worse_than_pytorch(const std::map<std::string, double>& ours, bool full) {
    const sj::Value theirs = bf16_fixture()[full ? "full" : "lora"];
    CHECK(ours.size() == theirs.size());
    for (const auto& [name, error] : ours) {
        const double limit = theirs[name].number();
        const std::string text = format("%s: %g, PyTorch's %g", name.c_str(), error, limit);
        INFO(text);
        CHECK(error <= limit);
    }
}
