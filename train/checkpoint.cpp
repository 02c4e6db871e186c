// train/checkpoint.cpp: the trained adapter or model, and the state that a run resumes from.
#include "base/options.h"
#include "model/adapters.h"
#include "model/instances.h"
#include "model/write.h"
#include "train/trainer.h"
#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

// ---- Results

// With --full, for qwen3: an F16 model stays F16, unless a number became too large for it; else T is stored.
template <class T>
void Trainer<T>::write_model(const std::string& folder, const Metadata& metadata, const std::vector<A>& numbers) {
    constexpr const char* TYPE = std::is_same_v<T, bf16> ? "BF16" : "F32";
    bool half = file.is_float16();
    if (half && std::any_of(numbers.begin(), numbers.end(), [](A x) { return std::fabs(x) >= 65520; })) {
        ranks.tell("%s/model.bin: a number is too large for F16: stored as %s\n", folder.c_str(), TYPE);
        half = false;
    }
    std::vector<OutTensor> tensors;
    params.each_tensor([&](const ModelTensor& t, size_t at) {
        auto write = [&numbers, half, at, n = t.size()](OutputFile& out) {
            auto rounded = [&](auto number, auto round) {
                std::vector<decltype(number)> all(n);
                for (size_t i = 0; i < n; i++) all[i] = round(numbers[at + i]);
                out.write(all.data(), n * sizeof number);
            };
            if (half) rounded(uint16_t{}, [](A x) { return float_to_half((float)x); });
            else rounded(T{}, [](A x) { return to_stored<T>(x); });
        };
        tensors.push_back({t.name(), half ? "F16" : TYPE, t.shape(), write});
    });
    write_safetensors(folder + "/model.bin", metadata, tensors);
}

template <class T> void Trainer<T>::write_result(const std::string& folder, size_t leaked) {
    const std::vector<A> numbers = params.host(params.p);
    if (ranks.rank > 0) return;
    const auto lock = ranks.writing();
    make_folder(folder);
    Metadata metadata = {{"format", "pt"}};
    if (o.full) metadata = file.metadata(file.config_text);
    add_starters(metadata, o.starters);
    if (leaked) metadata["leak"] = counted(leaked, "row") + " of the evaluation file trained on";
    std::vector<OutTensor> tensors;
    if (o.full) return write_model(folder, metadata, numbers);
    each_adapter_tensor(w, [&](const std::string& name, size_t rows, size_t columns, size_t at, size_t stride) {
        auto write = [&numbers, rows, columns, at, stride](OutputFile& out) {
            for (size_t r = 0; r < rows; r++) out.write(&numbers[at + r * stride], columns * sizeof(A));
        };
        Shape shape = {(int64_t)rows, (int64_t)columns};
        if (ends_in(name, "_vector")) shape = {(int64_t)columns};
        tensors.push_back({name, "F32", shape, write});
    });
    params.each_saved([&](const ModelTensor& t, size_t at) {
        tensors.push_back({saved_name(t), "F32", t.shape(), [&numbers, at, n = t.size()](OutputFile& out) {
            out.write(&numbers[at], n * sizeof(A));
        }});
    });
    if (o.scores())
        tensors.push_back({SCORE_TENSOR, "F32", {1, c.C}, [&](OutputFile& out) {
            out.write(&numbers[params.score], (size_t)c.C * sizeof(A));
        }});
    write_text(folder + "/adapter_config.json", adapter_config_json(o.lora, o.dropout, o.model, o.scores()));
    write_safetensors(folder + "/adapter_model.safetensors", metadata, tensors);
}

// ---- The state

std::string describe_run(const TrainOptions& o, const ModelFile& file, const Dataset& data, int64_t steps,
                         const char* type) {
    auto hex = [](uint64_t hash) { return format("%016llx", (unsigned long long)hash); };
    sj::Writer w;
    w.object().field("model", hex(file.hash())).field("dataset", hex(fnv1a(data.file.data, data.file.size)));
    w.field("dtype", type).field("full", o.full).field("rank", o.lora.rank).field("alpha", o.lora.alpha);
    w.field("rslora", o.lora.rslora);
    if (o.lora.dora && !o.full) w.field("dora", true);
    w.key("targets").array();
    for (bool target : o.lora.targets) w.value(target);
    w.end().field("dropout", (double)o.dropout).field("lr", o.lr).field("weight-decay", o.weight_decay);
    w.field("warmup", o.warmup).field("clip", o.clip).field("schedule", o.schedule).field("steps", steps);
    w.field("batch", o.batch).field("accum", o.accum).field("max-len", o.max_len).field("seed", o.seed);
    w.field("shuffle", o.shuffle);
    if (o.lora.saves() && !o.full)
        w.field("modules-to-save", format("%d %d", o.lora.embed, o.lora.head));
    if (o.moments != "32") w.field("moments", o.moments);
    if (o.loraplus != 1) w.field("loraplus-ratio", o.loraplus);
    if (o.neftune > 0) w.field("neftune-alpha", o.neftune);
    if (o.ranks->size > 1) w.field("ranks", o.ranks->size);
    if (o.preference) {
        const std::string name = o.preference->name;
        const std::string reference = o.adapter_init.empty() ? "" : o.adapter_init + "/adapter_model.safetensors";
        w.field(name, true).field("beta", o.pref.beta);
        if (name == "dpo") w.field("label-smoothing", o.pref.smoothing);
        if (name == "simpo") w.field("gamma", o.pref.gamma);
        if (name == "kto") w.field("desirable", o.pref.desirable).field("undesirable", o.pref.undesirable);
        w.field("reference", reference.empty() ? "" : hex(fnv1a(MappedFile(reference).text())));
    }
    if (!o.teacher.empty()) w.field("teacher", hex(ModelFile(o.teacher).hash()));
    if (!o.teacher.empty() || data.taught()) {
        w.field("distil-beta", (double)o.distil.beta);
        w.field("distil-temp", (double)o.distil.temperature).field("distil-weight", (double)o.distil.weight);
        w.field("on-policy", o.distil.on_policy);
    }
    if (o.distil.on_policy > 0)
        w.field("max-tokens", o.rl.max_tokens).field("temp", o.rl.temperature).field("top-p", o.rl.top_p);
    if (o.grpo) {
        const GrpoOptions& rl = o.rl;
        w.field("grpo", true).key("reward").array();
        for (auto& name : rl.rewards) {
            const Reward reward = make_reward(name, rl.timeout);
            const std::string numbers = reward.name + "/adapter_model.safetensors"; // of a reward model
            w.value(reward.of ? name : name + " " + hex(fnv1a(MappedFile(numbers).text())));
        }
        w.end().field("group", rl.group).field("max-tokens", rl.max_tokens).field("temp", rl.temperature);
        w.field("top-p", rl.top_p).field("iterations", rl.iterations).field("loss-type", rl.loss);
        w.field("scale-rewards", rl.scale).field("epsilon", rl.epsilon).field("epsilon-high", rl.epsilon_high);
        w.field("kl-beta", rl.kl_beta).field("mask-truncated", rl.mask_truncated);
    }
    w.end();
    return w.text;
}

template <class T> void Trainer<T>::write_state(const std::string& path, double best, double elapsed) {
    Metadata metadata = {
        {"format", "pt"}, {"run", run}, {"step", format("%lld", (long long)step)}, {"best", sj::repr(best)},
        {"elapsed", sj::repr(elapsed)}};
    if (step % o.rl.iterations) metadata["answers"] = groups.json(); // that the next step uses again
    const Moments8& eight = params.moments;
    const std::pair<const char*, uint8_t*> codes[] = {{"m", eight.m}, {"root", eight.root}};
    const std::pair<const char*, float*> scales[] = {{"scale_m", eight.scale_m}, {"scale_root", eight.scale_root}};
    const bool in_8_bits = o.moments == "8";
    if (ranks.rank > 0) { // in the order below
        params.host(params.p);
        for (auto [name, from] : codes) if (in_8_bits) params.host(from);
        for (auto [name, from] : scales) if (in_8_bits) params.host(from, MOMENT_BLOCK);
        for (const A* part : {params.m, params.v}) if (!in_8_bits) params.host(part);
        return;
    }
    const auto lock = ranks.writing();
    std::vector<OutTensor> tensors;
    const int64_t all = (int64_t)params.count, blocks = (all + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
    auto add = [&](const char* name, const char* type, int64_t n, auto from, size_t each) {
        tensors.push_back({name, type, {n}, [this, from, each](OutputFile& out) {
            const auto numbers = params.host(from, each);
            out.write(numbers.data(), numbers.size() * sizeof numbers[0]);
        }});
    };
    std::vector<std::pair<const char*, A*>> parts = {{"p", params.p}};
    if (!in_8_bits) parts.insert(parts.end(), {{"m", params.m}, {"v", params.v}});
    for (auto [name, from] : parts)
        tensors.push_back({name, "F32", {(int64_t)params.trained()}, [this, from = from](OutputFile& out) {
            const std::vector<A> numbers = params.host(from);
            params.each_range([&](size_t first, size_t n) { out.write(&numbers[first], n * sizeof(A)); });
        }});
    for (auto [name, from] : codes) if (in_8_bits) add(name, "I8", all, from, 1);
    for (auto [name, from] : scales) if (in_8_bits) add(name, "F32", blocks, from, MOMENT_BLOCK);
    write_safetensors(path, metadata, tensors);
}

// Whether a state belongs to this run, possibly on another number of ranks. Then another --batch or --accum may keep
// the size of a step; if not, the run continues with the same share of its steps done.
template <class T>
typename Trainer<T>::Begun Trainer<T>::check_state(const char* name, const Metadata& metadata) const {
    sj::Doc theirs, ours;
    const auto was_run = metadata.find("run");
    if (was_run == metadata.end() || !sj::parse(theirs, was_run->second).empty())
        DIE("%s: not a state of train_lora", name);
    sj::parse(ours, run);
    const sj::Value on = theirs.root()["ranks"], of = theirs.root()["steps"];
    const Begun begun = {on ? (int)on.number() : 1, (int64_t)of.number()};
    const std::set<std::string> free = {"ranks", "batch", "accum", "steps"};
    auto said = [](sj::Value v) { return v ? sj::dump(v) : "unset"; };
    for (const sj::Doc* one : {&ours, &theirs}) // (either may have options that the other leaves unset)
        for (auto [key, value] : one->root().members()) {
            if (begun.ranks != ranks.size && free.count(std::string(key))) continue;
            if (const std::string was = said(theirs.root()[key]), is = said(ours.root()[key]); was != is)
                DIE("%s: begun with %s %s, not %s: --resume needs the same options", name, key.c_str(),
                    was.c_str(), is.c_str());
        }
    return begun;
}

template <class T> void Trainer<T>::read_state(const std::string& path, double& best, double& elapsed) {
    const MappedFile map(path);
    const char* name = path.c_str();
    Tensors tensors;
    Metadata metadata;
    read_safetensors(map, tensors, metadata);
    const Begun begun = check_state(name, metadata);
    step = parse_integer(name, metadata["step"].c_str(), 0, begun.steps);
    if (begun.ranks != ranks.size) {
        step = std::llround((double)step * (double)steps / (double)std::max<int64_t>(begun.steps, 1));
        ranks.tell("%s: begun on %s, goes on with %d from the same weights at step %lld of %lld, not to the bit\n",
                   name, counted((size_t)begun.ranks, "rank").c_str(), ranks.size, (long long)step,
                   (long long)steps);
    }
    ranks.must_agree(format("step of %s\t%lld\n", name, (long long)step));
    if (o.preference && o.preference->has_reference) make_reference(); // of the first parameters
    best = metadata["best"] == "Infinity" ? INFINITY : parse_number(name, metadata["best"].c_str(), -1e30, 1e30);
    elapsed = parse_number(name, metadata["elapsed"].c_str(), 0, 1e12);
    if (step % o.rl.iterations)
        groups = Groups(name, metadata["answers"], (size_t)o.rl.group, (uint32_t)c.V);
    std::vector<A> numbers(params.count);
    std::vector<std::pair<const char*, A*>> parts = {{"p", params.p}};
    if (o.moments != "8") parts.insert(parts.end(), {{"m", params.m}, {"v", params.v}});
    else {
        const Moments8& to = params.moments;
        auto read = [&](const char* key, Dtype type, auto* array, size_t each) {
            const auto t = tensors.find(key);
            const size_t n = (params.count + each - 1) / each;
            if (t == tensors.end() || t->second.dtype != type || t->second.shape != Shape{(int64_t)n})
                DIE("%s: no tensor %s of %zu numbers", name, key, n);
            const auto* from = (decltype(array))t->second.data;
            params.keep(array, std::vector<std::decay_t<decltype(*array)>>(from, from + n), each);
        };
        read("m", Dtype::I8, to.m, 1), read("root", Dtype::I8, to.root, 1);
        read("scale_m", Dtype::F32, to.scale_m, MOMENT_BLOCK);
        read("scale_root", Dtype::F32, to.scale_root, MOMENT_BLOCK);
    }
    for (auto [key, to] : parts) {
        const auto t = tensors.find(key);
        const Shape shape = {(int64_t)params.trained()};
        if (t == tensors.end() || t->second.dtype != Dtype::F32 || t->second.shape != shape)
            DIE("%s: no tensor %s of %zu numbers", name, key, params.trained());
        const uint8_t* from = t->second.data;
        params.each_range([&](size_t first, size_t n) {
            memcpy(&numbers[first], from, n * sizeof(A));
            from += n * sizeof(A);
        });
        params.keep(to, numbers);
        if (to == params.p) params.give_copies(params.stored, numbers);
    }
    params.find_norms();
}

#define INSTANTIATE(T) \
    template void Trainer<T>::write_result(const std::string&, size_t); \
    template void Trainer<T>::write_state(const std::string&, double, double); \
    template void Trainer<T>::read_state(const std::string&, double&, double&);
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE
